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
