//! Requests to the API server, counted by verb, resource and answer in a layer of the client.

use std::pin::Pin;
use std::task::{Context, Poll};

use axum::http::{Method, Request, Response, Uri};
use kube::client::{Body, ClientBuilder};
use kube::{Client, Config};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use tower::Service;
use tower::layer::layer_fn;

use crate::metrics::declare;

/// Code of a request without an answer, as client-go has it.
const NO_ANSWER: &str = "<error>";

/// One kind of request, in the words of Kubernetes' audit log.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kind {
    /// Plural name of the resource with its subresource, as `pods` or `nodes/status`; `-` for anything else, such as
    /// the server's version.
    pub resource: String,
    /// get, list, watch, create, update, patch, delete, deletecollection.
    pub verb: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Answered {
    resource: String,
    verb: &'static str,
    code: String,
}

/// Counts requests to the API server.
#[derive(Debug, Clone, Default)]
pub struct RequestMetrics {
    requests: Family<Answered, Counter>,
}

impl RequestMetrics {
    /// Declares them in `registry`.
    pub fn register(registry: &mut Registry) -> Self {
        let help =
            "Requests to the API server, by verb, resource and status code; <error> if there was no answer";
        Self { requests: declare(registry, "api_requests", help) }
    }

    /// Counts one request by the status code of its answer.
    pub fn count(&self, kind: Kind, code: Option<u16>) {
        let Kind { resource, verb } = kind;
        let code = code.map_or_else(|| NO_ANSWER.to_owned(), |code| code.to_string());
        self.requests.get_or_create(&Answered { resource, verb, code }).inc();
    }
}

/// A client that counts each request when it is answered.
///
/// # Errors
/// The configuration is invalid, as with [`Client::try_from`].
pub fn counting_client(config: Config, metrics: RequestMetrics) -> kube::Result<Client> {
    let layer = layer_fn(move |inner| Counting { inner, metrics: metrics.clone() });
    Ok(ClientBuilder::try_from(config)?.with_layer(&layer).build())
}

struct Counting<S> {
    inner: S,
    metrics: RequestMetrics,
}

impl<S, B> Service<Request<Body>> for Counting<S>
where
    S: Service<Request<Body>, Response = Response<B>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<S::Response, S::Error>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(context)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let kind = kind(request.method(), request.uri());
        let metrics = self.metrics.clone();
        let answer = self.inner.call(request);
        Box::pin(async move {
            let answer = answer.await;
            metrics.count(kind, answer.as_ref().ok().map(|answer| answer.status().as_u16()));
            answer
        })
    }
}

/// Kind of a request: its verb and resource (Kubernetes API concepts, "Resource URIs"). Pure.
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
    use tower::service_fn;

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

    #[tokio::test]
    async fn requests_are_counted_by_the_code_of_their_answer() {
        let metrics = RequestMetrics::default();
        let inner = service_fn(|request: Request<Body>| async move {
            match request.uri().path() {
                "/api/v1/nodes/away" => Err("connection refused"),
                "/api/v1/nodes/none" => Ok(Response::builder().status(404).body(()).unwrap()),
                _ => Ok(Response::new(())),
            }
        });
        let mut counting = Counting { inner, metrics: metrics.clone() };
        for name in ["one", "none", "away"] {
            let request = Request::get(format!("/api/v1/nodes/{name}")).body(Body::empty()).unwrap();
            let _ = counting.call(request).await;
        }
        for code in ["200", "404", NO_ANSWER] {
            let labels = Answered { resource: "nodes".to_owned(), verb: "get", code: code.to_owned() };
            assert_eq!(metrics.requests.get(&labels).map(|count| count.get()), Some(1), "{code}");
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
