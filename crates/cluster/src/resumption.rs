//! Watches that are resumed after etcd was restored from a backup.
//!
//! A watch is resumed from the last resource version it has seen. For one that is too old the API server answers 410 and the
//! watcher lists again (Kubernetes API concepts, "Efficient detection of changes"). For one of a future that was undone it
//! does not: the watch shows nothing until the resource version has caught up, which can take days, and the cache keeps
//! objects that do not exist any more. A layer of the client therefore reads the current resource version before it resumes
//! a watch that was interrupted, and gives the answer 410 itself.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::BoxError;
use axum::http::{Method, Request, Response, Uri, header};
use kube::Client;
use kube::api::ListMeta;
use kube::client::Body;
use serde::Deserialize;
use tokio::time::timeout;
use tower::Service;

/// How long the API server may take to say the current resource version.
const TIMEOUT: Duration = Duration::from_secs(5);
/// A watch that is resumed so long after its time-out was alive until then. Shorter than what kube grants a silent connection.
const MARGIN: Duration = Duration::from_secs(3);
/// Lists without the objects' content.
const METADATA: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";

/// A client like `client`, whose watches list again after etcd was restored from a backup.
pub fn checking_client(client: Client) -> Client {
    let namespace = client.default_namespace().to_owned();
    Client::new(Checking { client, begun: Arc::default() }, namespace)
}

/// A request that resumes a watch.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Resumption {
    /// What is watched: the request without its resource version.
    watch: String,
    path: String,
    version: u64,
    /// When the API server ends the watch.
    timeout: Duration,
}

impl Resumption {
    /// `None` for all other requests. Pure.
    fn of(method: &Method, uri: &Uri) -> Option<Self> {
        let parameters = || uri.query().unwrap_or_default().split('&');
        let value =
            |name: &str| parameters().find_map(|parameter| parameter.strip_prefix(name)?.strip_prefix('='));
        if method != Method::GET
            || value("watch") != Some("true")
            || value("sendInitialEvents") == Some("true")
        {
            return None;
        }
        let version = value("resourceVersion")?.parse().ok().filter(|version| *version > 0)?;
        let others: Vec<&str> =
            parameters().filter(|parameter| !parameter.starts_with("resourceVersion=")).collect();
        let path = uri.path().to_owned();
        let watch = format!("{path}?{}", others.join("&"));
        let timeout =
            Duration::from_secs(value("timeoutSeconds").and_then(|text| text.parse().ok()).unwrap_or(0));
        Some(Self { watch, path, version, timeout })
    }

    /// Whether a watch that began `elapsed` ago did not simply reach its end. Pure.
    fn is_interrupted(&self, elapsed: Duration) -> bool {
        elapsed < self.timeout || elapsed > self.timeout.saturating_add(MARGIN)
    }
}

struct Checking {
    client: Client,
    /// When each watch was begun or resumed.
    begun: Arc<Mutex<HashMap<String, Instant>>>,
}

impl Checking {
    /// Takes note of the begin of a watch, and says whether it was interrupted. One that begins was just listed.
    fn is_interrupted(&self, resumption: &Resumption) -> bool {
        let now = Instant::now();
        let mut begun = self.begun.lock().unwrap_or_else(PoisonError::into_inner);
        let elapsed = begun.insert(resumption.watch.clone(), now).map(|begun| now.duration_since(begun));
        // Those of single objects do not come back.
        begun.retain(|_, begun| now.duration_since(*begun) < Duration::from_secs(600));
        elapsed.is_some_and(|elapsed| resumption.is_interrupted(elapsed))
    }
}

impl Service<Request<Body>> for Checking {
    type Response = Response<Body>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        // `Client::send` waits for it.
        let _ = context;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let client = self.client.clone();
        let resumption = Resumption::of(request.method(), request.uri());
        let resumption = resumption.filter(|resumption| self.is_interrupted(resumption));
        Box::pin(async move {
            if let Some(resumption) = resumption {
                let current = timeout(TIMEOUT, current_version(&client, &resumption.path));
                let current =
                    current.await.map_err(|_| "the API server does not say its resource version")??;
                if current.is_some_and(|current| current < resumption.version) {
                    tracing::warn!(
                        watch = resumption.path,
                        seen = resumption.version,
                        current,
                        "the API server has gone back in time: etcd was restored from a backup; listing again"
                    );
                    return Ok(Response::new(Body::from(EXPIRED.to_vec())));
                }
            }
            Ok(client.send(request).await?)
        })
    }
}

/// What ends a watch and makes the watcher list again; in the answer's status code it would not.
const EXPIRED: &[u8] = b"{\"type\":\"ERROR\",\"object\":{\"kind\":\"Status\",\"apiVersion\":\"v1\",\"status\":\"Failure\",\
\"message\":\"the resource version is newer than etcd, which was restored from a backup\",\"reason\":\"Expired\",\"code\":410}}\n";

#[derive(Deserialize)]
struct List {
    metadata: ListMeta,
}

/// The resource version of what is at `path`, as recent as etcd; `None` if this may not be known.
///
/// # Errors
/// There is no answer, or the API server fails.
async fn current_version(client: &Client, path: &str) -> Result<Option<u64>, BoxError> {
    let request = Request::get(format!("{path}?limit=1")).header(header::ACCEPT, METADATA);
    match client.request::<List>(request.body(Vec::new())?).await {
        Ok(list) => Ok(list.metadata.resource_version.and_then(|version| version.parse().ok())),
        // The watch itself may be allowed.
        Err(kube::Error::Api(status)) if status.code < 500 && status.code != 429 => Ok(None),
        Err(error) => Err(error.into()),
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::atomic::{AtomicU64, Ordering};

    use futures::{StreamExt, stream};
    use k8s_openapi::api::core::v1::Namespace;
    use kube::runtime::WatchStreamExt;
    use kube::runtime::watcher::{self, Event, watcher};
    use kube::{Api, ResourceExt};
    use proptest::prelude::*;
    use serde_json::json;
    use tower::service_fn;

    use super::*;

    fn of(uri: &str) -> Option<Resumption> {
        Resumption::of(&Method::GET, &uri.parse().unwrap())
    }

    #[test]
    fn only_watches_that_go_on_from_a_version_are_resumed() {
        let watch =
            "/api/v1/pods?&watch=true&timeoutSeconds=50&fieldSelector=spec.nodeName%3Da&resourceVersion=7";
        let expected = Resumption {
            watch: "/api/v1/pods?&watch=true&timeoutSeconds=50&fieldSelector=spec.nodeName%3Da".to_owned(),
            path: "/api/v1/pods".to_owned(),
            version: 7,
            timeout: Duration::from_secs(50),
        };
        assert_eq!(of(watch), Some(expected));
        for other in [
            "/api/v1/pods?limit=1&resourceVersion=7",
            "/api/v1/pods?watch=true&resourceVersion=0",
            "/api/v1/pods?watch=true&resourceVersion=opaque",
            "/api/v1/pods?watch=true&sendInitialEvents=true&resourceVersion=7",
            "/api/v1/pods",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
        assert_eq!(Resumption::of(&Method::DELETE, &watch.parse().unwrap()), None);
    }

    #[test]
    fn a_watch_that_reached_its_end_was_not_interrupted() {
        let resumption = of("/api/v1/pods?watch=true&timeoutSeconds=50&resourceVersion=7").unwrap();
        let cases = [(0, true), (49, true), (50, false), (52, false), (56, true), (3600, true)];
        for (seconds, interrupted) in cases {
            assert_eq!(resumption.is_interrupted(Duration::from_secs(seconds)), interrupted, "{seconds}");
        }
    }

    /// The API server of one Namespace, whose watches all break at once, but those from the future: they show nothing.
    fn server(version: Arc<AtomicU64>) -> Client {
        let answer = move |request: Request<Body>| {
            let version = version.load(Ordering::SeqCst);
            let name = format!("of-{version}");
            let namespace = json!({ "metadata": { "name": name, "resourceVersion": version.to_string() } });
            let list =
                json!({ "metadata": { "resourceVersion": version.to_string() }, "items": [namespace] });
            let body = match Resumption::of(request.method(), request.uri()) {
                None => axum::body::Body::from(list.to_string()),
                Some(watch) if watch.version > version => {
                    axum::body::Body::from_stream(stream::pending::<Result<Vec<u8>, BoxError>>())
                }
                Some(_) => axum::body::Body::from_stream(stream::iter([Err::<Vec<u8>, _>("reset")])),
            };
            std::future::ready(Ok::<_, BoxError>(Response::new(body)))
        };
        Client::new(service_fn(answer), "default")
    }

    #[tokio::test]
    async fn a_watch_from_a_future_that_was_undone_lists_again() {
        let version = Arc::new(AtomicU64::new(90));
        let client = checking_client(server(Arc::clone(&version)));
        let events = watcher(Api::<Namespace>::all(client), watcher::Config::default().timeout(60));
        let mut events = pin!(events.default_backoff());
        let mut listed_until_broken = async || {
            let mut listed = Vec::new();
            loop {
                match events.next().await.unwrap() {
                    Ok(Event::InitApply(namespace)) => listed.push(namespace.name_any()),
                    Err(watcher::Error::WatchFailed(_)) => return listed,
                    _ => {}
                }
            }
        };
        assert_eq!(listed_until_broken().await, ["of-90"]);
        assert!(listed_until_broken().await.is_empty(), "it goes on");
        version.store(40, Ordering::SeqCst);
        let again = timeout(Duration::from_secs(20), listed_until_broken()).await;
        assert_eq!(again.unwrap(), ["of-40"]);
    }

    proptest! {
        #[test]
        fn no_query_panics(query in "[a-zA-Z0-9=&%]{0,60}") {
            if let Ok(uri) = format!("/api/v1/pods?watch=true&{query}").parse() {
                Resumption::of(&Method::GET, &uri);
            }
        }
    }
}
