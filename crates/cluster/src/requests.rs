//! Requests to the API server, counted by verb and resource in a layer of the client.

use axum::http::{Method, Request, Uri};
use kube::client::{Body, ClientBuilder};
use kube::{Client, Config};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use tower::util::MapRequestLayer;

use crate::metrics::register;

/// One kind of request, in the words of Kubernetes' audit log.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Kind {
    /// Plural name of the resource with its subresource, as `pods` or `nodes/status`; `-` for anything else, such as
    /// the server's version.
    pub resource: String,
    /// get, list, watch, create, update, patch, delete, deletecollection.
    pub verb: &'static str,
}

/// Counts requests to the API server.
#[derive(Debug, Clone, Default)]
pub struct RequestMetrics {
    requests: Family<Kind, Counter>,
}

impl RequestMetrics {
    /// Declares them in `registry`.
    pub fn register(registry: &mut Registry) -> Self {
        let help = "Requests sent to the API server, by verb and resource";
        Self { requests: register(registry, "api_requests", help, Family::default()) }
    }

    /// Counts one request.
    pub fn count(&self, kind: &Kind) {
        self.requests.get_or_create(kind).inc();
    }
}

/// A client that counts each request before it is sent.
///
/// # Errors
/// The configuration is invalid, as with [`Client::try_from`].
pub fn counting_client(config: Config, metrics: RequestMetrics) -> kube::Result<Client> {
    let layer = MapRequestLayer::new(move |request: Request<Body>| {
        metrics.count(&kind(request.method(), request.uri()));
        request
    });
    Ok(ClientBuilder::try_from(config)?.with_layer(&layer).build())
}

/// What a request is about (Kubernetes API concepts, "Resource URIs"). Pure.
pub fn kind(method: &Method, uri: &Uri) -> Kind {
    let segments: Vec<&str> = uri.path().split('/').filter(|segment| !segment.is_empty()).collect();
    let of_group = match segments.as_slice() {
        ["api", _, rest @ ..] | ["apis", _, _, rest @ ..] => rest,
        _ => &[],
    };
    let in_namespace = match of_group {
        // The Namespace object itself has at most a subresource behind its name.
        ["namespaces", _, rest @ ..] if !matches!(rest, [] | ["status" | "finalize"]) => rest,
        all => all,
    };
    let (resource, named) = match in_namespace {
        [] => ("-".to_owned(), true),
        [resource] => ((*resource).to_owned(), false),
        [resource, _] => ((*resource).to_owned(), true),
        [resource, _, subresource, ..] => (format!("{resource}/{subresource}"), true),
    };
    let watches =
        uri.query().into_iter().flat_map(|query| query.split('&')).any(|part| part.starts_with("watch=true"));
    let verb = match method.as_str() {
        "POST" => "create",
        "PUT" => "update",
        "PATCH" => "patch",
        "DELETE" if named => "delete",
        "DELETE" => "deletecollection",
        _ if watches => "watch",
        _ if named => "get",
        _ => "list",
    };
    Kind { verb, resource }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn requests_are_named_as_in_the_audit_log() {
        let cases = [
            ("GET", "/api/v1/pods?limit=500&fieldSelector=spec.nodeName%3Da", "list", "pods"),
            ("GET", "/api/v1/pods?&watch=true&timeoutSeconds=60", "watch", "pods"),
            ("GET", "/api/v1/namespaces/demo", "get", "namespaces"),
            ("GET", "/api/v1/namespaces", "list", "namespaces"),
            ("PUT", "/api/v1/namespaces/demo/status", "update", "namespaces/status"),
            ("GET", "/api/v1/namespaces/demo/pods/web", "get", "pods"),
            ("GET", "/api/v1/namespaces/demo/pods", "list", "pods"),
            ("PATCH", "/api/v1/nodes/a/status?", "patch", "nodes/status"),
            ("POST", "/apis/coil.cybozu.com/v2/blockrequests?", "create", "blockrequests"),
            ("DELETE", "/apis/coil.cybozu.com/v2/addressblocks/b", "delete", "addressblocks"),
            ("DELETE", "/apis/coil.cybozu.com/v2/addressblocks", "deletecollection", "addressblocks"),
            ("POST", "/apis/events.k8s.io/v1/namespaces/demo/events?", "create", "events"),
            ("GET", "/version", "get", "-"),
        ];
        for (method, uri, verb, resource) in cases {
            let found = kind(&method.parse().unwrap(), &uri.parse().unwrap());
            assert_eq!(found, Kind { verb, resource: resource.to_owned() }, "{method} {uri}");
        }
    }

    proptest! {
        #[test]
        fn no_path_panics(path in "(/[a-z0-9.]{0,8}){0,9}", query in "[a-z=&]{0,20}") {
            if let Ok(uri) = format!("{path}?{query}").parse() {
                kind(&Method::GET, &uri);
            }
        }
    }
}
