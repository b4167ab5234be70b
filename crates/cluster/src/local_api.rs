//! Local API server, where there is no other: a client whose requests this process answers itself. So a node without
//! Kubernetes runs the same program as the nodes of a cluster, on other objects.
//!
//! Objects only come from [`LocalObjects`]; what is written is taken and forgotten.

use std::collections::hash_map::DefaultHasher;
use std::convert::Infallible;
use std::hash::{Hash as _, Hasher as _};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::{Method, Request, StatusCode, Uri, header};
use axum::response::{IntoResponse as _, Response};
use futures::stream;
use kube::Client;
use serde_json::{Value, json};
use tokio::time::sleep;

/// Interval at which a watch compares the objects.
const INTERVAL: Duration = Duration::from_secs(2);
/// Longest object that is taken.
const MAX_LENGTH: usize = 4 << 20;

/// The objects.
pub trait LocalObjects: Send + Sync + 'static {
    /// All objects of a resource as they are now, by the path of the list, such as `/api/v1/nodes`.
    fn list(&self, path: &str) -> Vec<Value>;
    /// The object at this path, if it is in no list.
    fn get(&self, path: &str) -> Option<Value>;
}

/// A client that reads these objects. Its watches show changes within seconds.
pub fn client(objects: impl LocalObjects) -> Client {
    let objects: Arc<dyn LocalObjects> = Arc::new(objects);
    let router = Router::new().fallback(move |request: Request<Body>| {
        let objects = Arc::clone(&objects);
        async move { answer(&objects, request).await }
    });
    Client::new(router, "default")
}

async fn answer(objects: &Arc<dyn LocalObjects>, request: Request<Body>) -> Response {
    let (head, body) = request.into_parts();
    if head.method != Method::GET {
        return match axum::body::to_bytes(body, MAX_LENGTH).await {
            Ok(object) => ([(header::CONTENT_TYPE, "application/json")], object).into_response(),
            Err(_) => StatusCode::PAYLOAD_TOO_LARGE.into_response(),
        };
    }
    let path = head.uri.path();
    if is_watch(&head.uri) {
        return watch(Arc::clone(objects), path.to_owned(), version_asked_for(&head.uri));
    }
    if let Some(object) = objects.get(path) {
        return json_response(StatusCode::OK, &object);
    }
    let (list, name) = path.rsplit_once('/').unwrap_or_default();
    if let Some(object) = objects.list(list).into_iter().find(|object| is_named(object, name)) {
        return json_response(StatusCode::OK, &object);
    }
    // The last part of a list's path is a plural, which no object here has for a name.
    let items = objects.list(path);
    if items.is_empty() && is_object(path) {
        let status = json!({
            "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "code": 404,
            "reason": "NotFound", "message": format!("this node runs without Kubernetes and has no {path}"),
        });
        return json_response(StatusCode::NOT_FOUND, &status);
    }
    let version = version(&items);
    let items: Vec<Value> = items.into_iter().map(|item| versioned(item, &version)).collect();
    let list = json!({ "kind": "List", "apiVersion": "v1", "metadata": { "resourceVersion": version }, "items": items });
    json_response(StatusCode::OK, &list)
}

fn is_named(object: &Value, name: &str) -> bool {
    object.pointer("/metadata/name").and_then(Value::as_str) == Some(name)
}

/// Whether a path names one object: `/api/VERSION` has a resource behind it, `/apis/GROUP/VERSION` too, either also in a namespace.
fn is_object(path: &str) -> bool {
    let mut parts = path.split('/').skip(1);
    let after_version = if parts.next() == Some("api") { 1 } else { 2 };
    let rest: Vec<&str> = parts.skip(after_version).collect();
    match rest.as_slice() {
        ["namespaces", _, rest @ ..] if !rest.is_empty() => rest.len() > 1,
        rest => rest.len() > 1,
    }
}

fn is_watch(uri: &Uri) -> bool {
    parameter(uri, "watch").is_some_and(|value| value == "true" || value == "1")
}

fn version_asked_for(uri: &Uri) -> String {
    parameter(uri, "resourceVersion").unwrap_or_default().to_owned()
}

fn parameter<'a>(uri: &'a Uri, name: &str) -> Option<&'a str> {
    let mut parameters = uri.query().unwrap_or_default().split('&');
    parameters.find_map(|parameter| parameter.strip_prefix(name)?.strip_prefix('='))
}

/// Another content has another version.
fn version(items: &[Value]) -> String {
    let mut hasher = DefaultHasher::new();
    items.iter().for_each(|item| item.to_string().hash(&mut hasher));
    hasher.finish().max(1).to_string()
}

fn versioned(mut object: Value, version: &str) -> Value {
    if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
        metadata.insert("resourceVersion".to_owned(), version.into());
    }
    object
}

/// Never ends. Objects change and are never deleted.
fn watch(objects: Arc<dyn LocalObjects>, path: String, version: String) -> Response {
    let events = stream::unfold((version, false), move |(known, waits)| {
        let objects = Arc::clone(&objects);
        let path = path.clone();
        async move {
            if waits {
                sleep(INTERVAL).await;
            }
            loop {
                let items = objects.list(&path);
                let current = self::version(&items);
                if current != known {
                    let events = items.into_iter().map(|item| {
                        let event = json!({ "type": "MODIFIED", "object": versioned(item, &current) });
                        format!("{event}\n")
                    });
                    let events = Bytes::from(events.collect::<String>());
                    return Some((Ok::<_, Infallible>(events), (current, true)));
                }
                sleep(INTERVAL).await;
            }
        }
    });
    ([(header::CONTENT_TYPE, "application/json")], Body::from_stream(events)).into_response()
}

fn json_response(status: StatusCode, object: &Value) -> Response {
    (status, [(header::CONTENT_TYPE, "application/json")], object.to_string()).into_response()
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use futures::StreamExt as _;
    use k8s_openapi::api::core::v1::{Node, Pod, Secret};
    use kube::Api;
    use kube::api::{ListParams, PostParams};
    use kube::runtime::watcher::{self, Event, watcher};

    use super::*;

    #[derive(Clone)]
    struct One(Arc<Mutex<&'static str>>);

    impl LocalObjects for One {
        fn list(&self, path: &str) -> Vec<Value> {
            let label = *self.0.lock().unwrap();
            let node = json!({ "metadata": { "name": "n1", "labels": { "is": label } } });
            if path == "/api/v1/nodes" { vec![node] } else { Vec::new() }
        }

        fn get(&self, path: &str) -> Option<Value> {
            let secret = json!({ "metadata": { "name": "s" }, "data": { "a": "Yg==" } });
            (path == "/api/v1/namespaces/ns/secrets/s").then_some(secret)
        }
    }

    #[tokio::test]
    async fn objects_are_listed_and_read_and_all_others_are_missing() {
        let client = client(One(Arc::new(Mutex::new("first"))));
        let nodes = Api::<Node>::all(client.clone());
        assert_eq!(nodes.list(&ListParams::default()).await.unwrap().items.len(), 1);
        assert!(nodes.get("n1").await.is_ok() && nodes.get_opt("n2").await.unwrap().is_none());
        let secrets = Api::<Secret>::namespaced(client.clone(), "ns");
        assert_eq!(secrets.get("s").await.unwrap().data.unwrap()["a"].0, b"b");
        let refused = secrets.get("other").await.unwrap_err().to_string();
        assert!(refused.contains("without Kubernetes"), "{refused}");
        let pods = Api::<Pod>::namespaced(client, "ns");
        assert_eq!(pods.list(&ListParams::default()).await.unwrap().items.len(), 0);
        assert!(pods.create(&PostParams::default(), &Pod::default()).await.is_ok(), "taken and forgotten");
    }

    #[tokio::test]
    async fn a_watch_shows_what_changes() {
        let one = One(Arc::new(Mutex::new("first")));
        let events = watcher(Api::<Node>::all(client(one.clone())), watcher::Config::default());
        let mut events = std::pin::pin!(events);
        loop {
            match events.next().await.unwrap().unwrap() {
                Event::InitDone => *one.0.lock().unwrap() = "second",
                Event::Apply(node) => break assert_eq!(node.metadata.labels.unwrap()["is"], "second"),
                _ => {}
            }
        }
    }
}
