//! Watches that are resumed after etcd was restored from a backup.
//!
//! A watch is resumed from the last resource version it has seen. For one that is too old the API server answers 410 and the
//! watcher lists again (Kubernetes API concepts, "Efficient detection of changes"). For one of a future that was undone it
//! does not: the watch shows nothing until the resource version has caught up, which can take days, and the cache keeps
//! objects that do not exist any more. A layer of the client therefore decides how a watch that was interrupted goes on:
//!
//! * If an attempt to resume it failed, its connection was silent until it timed out, or the watcher waited before it tried (its
//!   backoff grows with each failure of the last two minutes), the API server was away, perhaps long enough for a restoration,
//!   and other clients may have written since: the resource version shows nothing. The layer gives the answer 410 itself. An API
//!   server that was restarted gives it as well, because its watch cache begins anew.
//! * If the first attempt succeeds at once, as with several API servers of which one was stopped, the layer reads the current
//!   resource version and gives the answer 410 only if it has gone back.

use std::collections::HashMap;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use axum::BoxError;
use axum::http::{Method, Request, Response, Uri, header};
use hyper::body::{Bytes, Frame, SizeHint};
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
/// A watch that is resumed so long after it ended was not watched meanwhile. Longer than the watcher's first backoff (kube,
/// `DefaultBackoff`: 0.8 s and as much again by chance), shorter than a restoration takes.
const PAUSE: Duration = Duration::from_secs(2);
/// How long the beginning of a watch is remembered that is not resumed.
const KEPT: Duration = Duration::from_secs(600);
/// After a list for which the API server had been away, the same watch is not listed again for that reason for so long.
const LIST_PAUSE: Duration = Duration::from_secs(30);
/// Lists without the objects' content.
const METADATA: &str = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1";

/// A client like `client`, whose watches list again after etcd was restored from a backup.
pub fn checking_client(client: Client) -> Client {
    let namespace = client.default_namespace().to_owned();
    Client::new(Checking { client, watches: Arc::default() }, namespace)
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

    /// What happened to the watch. Pure.
    ///
    /// `before` is its last beginning, `None` if it was just listed.
    fn interruption(&self, before: Option<Begun>, now: Instant) -> Interruption {
        let Some(before) = before else { return Interruption::None };
        let elapsed = now.duration_since(before.at);
        let paused = before.ended.is_some_and(|ended| now.duration_since(ended) > PAUSE);
        if before.failed || paused || elapsed > self.timeout.saturating_add(MARGIN) {
            Interruption::Away
        } else if elapsed < self.timeout {
            Interruption::Brief
        } else {
            Interruption::None
        }
    }
}

/// How a watch ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Interruption {
    /// The API server did not answer, perhaps for long.
    Away,
    /// The connection broke, and the API server can be asked again at once.
    Brief,
    /// The watch reached its end, or it begins.
    None,
}

/// The last beginning of a watch.
#[derive(Debug, Clone, Copy)]
struct Begun {
    at: Instant,
    /// The attempt brought no watch.
    failed: bool,
    /// When its connection broke, or the API server ended it.
    ended: Option<Instant>,
}

struct Checking {
    client: Client,
    watches: Arc<Mutex<Watches>>,
}

/// What is known of each watch.
#[derive(Default)]
struct Watches {
    begun: HashMap<String, Begun>,
    /// When those that did not begin since were told to list again because the API server had been away.
    listed: HashMap<String, Instant>,
}

impl Watches {
    /// What happened to the watch since it began.
    fn interruption(&mut self, resumption: &Resumption, now: Instant) -> Interruption {
        // Those of single objects do not come back.
        self.begun.retain(|_, begun| now.duration_since(begun.at) < KEPT);
        self.listed.retain(|_, at| now.duration_since(*at) < LIST_PAUSE);
        match resumption.interruption(self.begun.get(&resumption.watch).copied(), now) {
            // A watch that cannot begin after a list would be listed again and again.
            Interruption::Away if self.listed.contains_key(&resumption.watch) => Interruption::Brief,
            interruption => interruption,
        }
    }

    /// Takes note of an attempt to begin or resume a watch.
    fn note(&mut self, watch: String, outcome: Outcome, now: Instant) {
        match outcome {
            Outcome::Begun => {
                self.listed.remove(&watch);
                self.begun.insert(watch, Begun { at: now, failed: false, ended: None })
            }
            Outcome::Failed => self.begun.insert(watch, Begun { at: now, failed: true, ended: None }),
            Outcome::ListAgain => {
                self.listed.insert(watch.clone(), now);
                self.begun.remove(&watch)
            }
            // The API server was not away, or it is known already.
            Outcome::Refused => None,
        };
    }
}

/// The answer to a request. What a watch shows ends with its connection: that is noted, since the watcher may wait before it asks
/// again.
struct Answer {
    body: Body,
    /// `None` if it is no watch, or it has ended.
    watch: Option<(String, Arc<Mutex<Watches>>)>,
}

impl hyper::body::Body for Answer {
    type Data = Bytes;
    type Error = kube::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, kube::Error>>> {
        let frame = Pin::new(&mut self.body).poll_frame(context);
        if matches!(frame, Poll::Ready(None | Some(Err(_))))
            && let Some((watch, watches)) = self.watch.take()
            && let Some(begun) = lock(&watches).begun.get_mut(&watch)
        {
            begun.ended = Some(Instant::now());
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// What came of an attempt.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Begun,
    /// There is no answer, or the API server fails.
    Failed,
    ListAgain,
    /// The API server answers, and does not show the objects now: it has too much to do (429), or RBAC does not allow it (403).
    Refused,
}

impl Outcome {
    fn of(answer: &Result<Option<Response<Body>>, BoxError>) -> Self {
        match answer {
            Ok(None) => Self::ListAgain,
            Ok(Some(response)) if response.status().is_success() => Self::Begun,
            Ok(Some(response)) if response.status().is_client_error() => Self::Refused,
            Err(error) if is_refusal(error) => Self::Refused,
            Ok(Some(_)) | Err(_) => Self::Failed,
        }
    }
}

fn is_refusal(error: &BoxError) -> bool {
    matches!(error.downcast_ref(), Some(kube::Error::Api(status)) if (400..500).contains(&status.code))
}

impl Service<Request<Body>> for Checking {
    type Response = Response<Answer>;
    type Error = BoxError;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Answer>, BoxError>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        // `Client::send` waits for it.
        let _ = context;
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let client = self.client.clone();
        let Some(resumption) = Resumption::of(request.method(), request.uri()) else {
            let answer =
                async move { Ok(client.send(request).await?.map(|body| Answer { body, watch: None })) };
            return Box::pin(answer);
        };
        let watches = Arc::clone(&self.watches);
        let interruption = lock(&watches).interruption(&resumption, Instant::now());
        Box::pin(async move {
            let answer = resume(&client, &resumption, interruption, request).await;
            lock(&watches).note(resumption.watch.clone(), Outcome::of(&answer), Instant::now());
            let answer = answer?.unwrap_or_else(|| Response::new(Body::from(EXPIRED.to_vec())));
            Ok(answer.map(|body| Answer { body, watch: Some((resumption.watch, watches)) }))
        })
    }
}

fn lock(watches: &Mutex<Watches>) -> MutexGuard<'_, Watches> {
    watches.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The API server's answer; `None` if the watch has to be listed again.
async fn resume(
    client: &Client,
    resumption: &Resumption,
    interruption: Interruption,
    request: Request<Body>,
) -> Result<Option<Response<Body>>, BoxError> {
    if interruption == Interruption::Away {
        return Ok(None);
    }
    if interruption == Interruption::Brief {
        let current = timeout(TIMEOUT, current_version(client, &resumption.path));
        let current = current.await.map_err(|_| "the API server does not say its resource version")??;
        if current.is_some_and(|current| current < resumption.version) {
            tracing::warn!(
                watch = resumption.path,
                seen = resumption.version,
                current,
                "the API server has gone back in time: etcd was restored from a backup; listing again"
            );
            return Ok(None);
        }
    }
    Ok(Some(client.send(request).await?))
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
    use std::sync::atomic::Ordering::SeqCst;
    use std::sync::atomic::{AtomicBool, AtomicU16, AtomicU64};

    use futures::{Stream, StreamExt, stream};
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
    fn only_an_api_server_that_was_away_makes_a_watch_list_again_unseen() {
        use Interruption::{Away, Brief, None};
        let resumption = of("/api/v1/pods?watch=true&timeoutSeconds=50&resourceVersion=7").unwrap();
        let at = Instant::now();
        let cases = [
            (0, false, Option::None, Brief),
            (49, false, Some(48), Brief),
            (50, false, Some(50), None),
            (52, false, Some(50), None),
            (53, false, Some(50), Away),
            (49, false, Some(46), Away),
            (56, false, Option::None, Away),
            (3600, false, Option::None, Away),
            (0, true, Option::None, Away),
            (51, true, Option::None, Away),
        ];
        for (seconds, failed, ended, expected) in cases {
            let after = |seconds| at + Duration::from_secs(seconds);
            let begun = Begun { at, failed, ended: ended.map(after) };
            assert_eq!(resumption.interruption(Some(begun), after(seconds)), expected, "{seconds} {begun:?}");
        }
        assert_eq!(resumption.interruption(Option::None, at), None);
    }

    /// An API server.
    #[derive(Default)]
    struct Server {
        /// The highest resource version.
        version: AtomicU64,
        /// Changes when etcd is restored from a backup.
        history: AtomicU64,
        is_away: AtomicBool,
        /// It answers watches with this status.
        refusal: AtomicU16,
        /// Lists of all objects.
        lists: AtomicU64,
        /// Requests that resumed or began a watch and were served.
        watches: AtomicU64,
    }

    impl Server {
        fn at_90() -> Arc<Self> {
            Arc::new(Self { version: AtomicU64::new(90), ..Self::default() })
        }

        fn list(&self) -> serde_json::Value {
            let (version, history) = (self.version.load(SeqCst).to_string(), self.history.load(SeqCst));
            let name = format!("of-{history}");
            let namespace = json!({ "metadata": { "name": name, "resourceVersion": version } });
            json!({ "metadata": { "resourceVersion": version }, "items": [namespace] })
        }

        /// Watches all break at once, but those from the future: they show nothing.
        fn answer(&self, request: &Request<Body>) -> Result<Response<axum::body::Body>, BoxError> {
            if self.is_away.load(SeqCst) {
                return Err("refused".into());
            }
            let watch = Resumption::of(request.method(), request.uri());
            if watch.is_some() {
                self.watches.fetch_add(1, SeqCst);
            } else if request.uri().query() != Some("limit=1") {
                self.lists.fetch_add(1, SeqCst);
            }
            let refusal = self.refusal.load(SeqCst);
            if watch.is_some() && refusal != 0 {
                let status = json!({ "kind": "Status", "status": "Failure", "code": refusal, "reason": "" });
                return Ok(Response::builder().status(refusal).body(status.to_string().into())?);
            }
            let body = match watch {
                None => axum::body::Body::from(self.list().to_string()),
                Some(watch) if watch.version > self.version.load(SeqCst) => {
                    axum::body::Body::from_stream(stream::pending::<Result<Vec<u8>, BoxError>>())
                }
                Some(_) => axum::body::Body::from_stream(stream::iter([Err::<Vec<u8>, _>("reset")])),
            };
            Ok(Response::new(body))
        }
    }

    fn events_of(server: &Arc<Server>) -> impl Stream<Item = watcher::Result<Event<Namespace>>> + use<> {
        let server = Arc::clone(server);
        let answer = move |request: Request<Body>| std::future::ready(server.answer(&request));
        let client = checking_client(Client::new(service_fn(answer), "default"));
        watcher(Api::<Namespace>::all(client), watcher::Config::default().timeout(60))
    }

    /// The names of what is listed until a watch has begun and broken.
    async fn listed_until_broken(
        events: &mut (impl Stream<Item = watcher::Result<Event<Namespace>>> + Unpin),
    ) -> Vec<String> {
        let mut listed = Vec::new();
        let broken = async {
            loop {
                match events.next().await.unwrap() {
                    Ok(Event::InitApply(namespace)) => listed.push(namespace.name_any()),
                    Err(watcher::Error::WatchFailed(_)) => return,
                    _ => {}
                }
            }
        };
        timeout(Duration::from_secs(40), broken).await.unwrap();
        listed
    }

    #[tokio::test]
    async fn a_watch_from_a_future_that_was_undone_lists_again() {
        let server = Server::at_90();
        let mut events = pin!(events_of(&server).default_backoff());
        assert_eq!(listed_until_broken(&mut events).await, ["of-0"]);
        assert!(listed_until_broken(&mut events).await.is_empty(), "it goes on");
        server.history.store(1, SeqCst);
        server.version.store(40, SeqCst);
        assert_eq!(listed_until_broken(&mut events).await, ["of-1"]);
    }

    /// Other clients have written so much since that no resource version shows the restoration.
    #[tokio::test]
    async fn a_watch_lists_again_after_the_api_server_was_away() {
        let server = Server::at_90();
        let mut events = pin!(events_of(&server).default_backoff());
        assert_eq!(listed_until_broken(&mut events).await, ["of-0"]);
        server.is_away.store(true, SeqCst);
        let watches = server.watches.load(SeqCst);
        assert!(events.next().await.unwrap().is_err(), "it is away");
        server.history.store(1, SeqCst);
        server.version.store(95, SeqCst);
        server.is_away.store(false, SeqCst);
        assert_eq!(listed_until_broken(&mut events).await, ["of-1"]);
        assert_eq!(server.watches.load(SeqCst), watches + 1, "the watch was not resumed");
        assert!(listed_until_broken(&mut events).await.is_empty(), "it is listed once");
    }

    /// The watcher waits for long, because the API server failed shortly before: its first attempt to resume the watch succeeds.
    #[tokio::test]
    async fn a_watch_that_was_not_resumed_at_once_lists_again() {
        let server = Server::at_90();
        let mut events = pin!(events_of(&server));
        assert_eq!(listed_until_broken(&mut events).await, ["of-0"]);
        assert!(listed_until_broken(&mut events).await.is_empty(), "it goes on");
        tokio::time::sleep(PAUSE + Duration::from_millis(50)).await;
        server.history.store(1, SeqCst);
        server.version.store(95, SeqCst);
        assert_eq!(listed_until_broken(&mut events).await, ["of-1"]);
    }

    /// Listing again would make it worse: it has too much to do.
    #[tokio::test]
    async fn an_api_server_that_refuses_watches_is_asked_for_few_lists() {
        for (status, expected) in [(403, 1), (429, 1), (503, 2)] {
            let server = Server::at_90();
            server.refusal.store(status, SeqCst);
            let mut events = pin!(events_of(&server));
            for _ in 0..20 {
                events.next().await.unwrap().ok();
            }
            assert!(server.watches.load(SeqCst) > 5, "{status}");
            assert_eq!(server.lists.load(SeqCst), expected, "{status}");
        }
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
