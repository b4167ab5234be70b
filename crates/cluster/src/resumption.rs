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

/// Time-out of a request for the current resource version.
const TIMEOUT: Duration = Duration::from_secs(5);
/// A watch that is resumed so long after its time-out was alive until then. Shorter than what kube grants a silent connection.
const MARGIN: Duration = Duration::from_secs(3);
/// A watch that is resumed so long after it ended was not watched meanwhile. Longer than the watcher's first backoff (kube,
/// `DefaultBackoff`: 0.8 s and as much again by chance), shorter than a restoration takes.
const PAUSE: Duration = Duration::from_secs(2);
/// Period for which the beginning of a watch is remembered that is not resumed.
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
    /// The watched list: the request without its resource version.
    watch: String,
    path: String,
    version: u64,
    /// Time after which the API server ends the watch.
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

    /// Interruption of a watch, from its beginnings. Pure.
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

/// End of a watch.
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
    /// Time at which its connection broke, or the API server ended it.
    ended: Option<Instant>,
}

struct Checking {
    client: Client,
    watches: Arc<Mutex<Watches>>,
}

/// State of each watch.
#[derive(Default)]
struct Watches {
    begun: HashMap<String, Begun>,
    /// Times at which those that did not begin since were told to list again because the API server had been away.
    listed: HashMap<String, Instant>,
}

impl Watches {
    /// Interruption of the watch since it began.
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

/// Outcome of an attempt.
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

/// Message that ends a watch and makes the watcher list again; as status code of the answer it would not.
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
mod tests;
