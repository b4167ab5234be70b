//! Watch caches: the objects of one kind as last seen, kept current, with a signal at every change.
//!
//! An unreachable API server stops nothing: the last known state remains in use and the watch is retried with exponential
//! backoff.

use std::fmt::Debug;
use std::hash::Hash;
use std::ops::RangeInclusive;
use std::pin::pin;
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt, stream};
use kube::runtime::reflector::{self, Lookup, Store};
use kube::runtime::watcher::Event;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client, Resource};
use serde::de::DeserializeOwned;
use tokio::sync::watch;

use crate::lean;
use crate::subsystem::Subsystem;

/// Seconds after which the server ends a watch and it is begun anew. A connection that is dead without a reset (a NAT
/// binding that expired, a router that was replaced) is detected within this time. Each watch has its own, so that those that
/// started together, as after a restart of the API server, do not start again together.
pub const WATCH_SECONDS: RangeInclusive<u32> = 40..=60;

/// Objects of one kind as last seen.
#[derive(Clone)]
pub struct Cache<K: Lookup + Clone + 'static>
where
    K::DynamicType: Hash + Eq + Clone + Debug + Default,
{
    /// The objects.
    pub store: Store<K>,
    generation: watch::Receiver<u64>,
    refusal: watch::Receiver<Option<Refused>>,
    interruptions: watch::Receiver<u64>,
    interrupted: watch::Receiver<Option<Instant>>,
}

/// Refusal of the API server: it answers, but shows no objects. It is asked again with exponential backoff.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// RBAC does not allow it; in the API server's words.
    #[error("{0}")]
    Forbidden(String),
    /// There is no such resource.
    #[error("the API server has no {0}: apply deploy/crds")]
    UnknownResource(&'static str),
}

impl Refusal {
    /// `None` if another attempt may succeed as things are.
    fn of(what: &'static str, error: &watcher::Error) -> Option<Self> {
        let status = match error {
            watcher::Error::InitialListFailed(kube::Error::Api(status))
            | watcher::Error::WatchStartFailed(kube::Error::Api(status))
            | watcher::Error::WatchError(status) => status,
            _ => return None,
        };
        match status.code {
            403 => Some(Self::Forbidden(status.message.clone())),
            404 => Some(Self::UnknownResource(what)),
            _ => None,
        }
    }
}

/// Refusals of one kind in a row.
#[derive(Debug)]
struct Refused {
    latest: Refusal,
    first_at: Instant,
    latest_at: Instant,
}

impl Refused {
    fn again(before: Option<&Self>, latest: Refusal, now: Instant) -> Self {
        let is_same =
            |before: &&Self| std::mem::discriminant(&before.latest) == std::mem::discriminant(&latest);
        let first_at = before.filter(is_same).map_or(now, |before| before.first_at);
        Self { latest, first_at, latest_at: now }
    }

    fn lasted(&self) -> Duration {
        self.latest_at.saturating_duration_since(self.first_at)
    }
}

impl<K: Lookup + Clone + 'static> Cache<K>
where
    K::DynamicType: Hash + Eq + Clone + Debug + Default,
{
    /// A receiver that sees every change from now on.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.generation.clone()
    }

    /// A number that grows with every change; zero before the first list.
    pub fn generation(&self) -> u64 {
        *self.generation.borrow()
    }

    /// A receiver that sees every interruption of the watch from now on. What happens to the objects during one may never
    /// be shown: etcd may be restored from a backup.
    pub fn interruptions(&self) -> watch::Receiver<u64> {
        self.interruptions.clone()
    }

    /// Since when the watch is interrupted; `None` while the objects are current.
    pub fn interrupted_at(&self) -> Option<Instant> {
        *self.interrupted.borrow()
    }

    /// Whether the first list has arrived.
    pub fn is_ready(&self) -> bool {
        self.generation() > 0
    }

    /// Refusal of the latest list or watch; `None` if there was none.
    pub fn refusal(&self) -> Option<Refusal> {
        self.refusal.borrow().as_ref().map(|refused| refused.latest.clone())
    }

    /// Time from the first to the latest refusal of the same kind in a row; zero if it was refused once or not at all. The pause before the next attempt, up
    /// to a minute, does not count: the API server may refuse nothing any more.
    pub fn refused_for(&self) -> Duration {
        self.refusal.borrow().as_ref().map(Refused::lasted).unwrap_or_default()
    }

    /// Whether the first list has arrived or was refused: waiting longer brings nothing.
    pub fn has_answer(&self) -> bool {
        self.is_ready() || self.refusal.borrow().is_some()
    }
}

/// Keeps a cache current on a task of `subsystem`. `what` names the objects in logs and the task.
pub fn start<K>(
    subsystem: &mut Subsystem,
    what: &'static str,
    events: impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static,
) -> Cache<K>
where
    K: Lookup + Clone + Debug + Send + Sync + 'static,
    K::DynamicType: Hash + Eq + Clone + Debug + Default + Send + Sync,
{
    start_noting(subsystem, what, events, |_| {})
}

/// Watches all objects of a kind that `config` selects, as [`start`] does, without the metadata that [`lean::any`] removes.
pub fn watch_all<K>(
    subsystem: &mut Subsystem,
    what: &'static str,
    client: &Client,
    config: watcher::Config,
) -> Cache<K>
where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
{
    start(subsystem, what, watcher(Api::all(client.clone()), config).modify(lean::any))
}

/// Like [`start`]; `deleted` is called with each object whose deletion the watch shows, after it has left the cache and before others
/// see the change. What is missing after an interruption of the watch was not seen to be deleted.
pub fn start_noting<K>(
    subsystem: &mut Subsystem,
    what: &'static str,
    events: impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static,
    deleted: impl FnMut(&K) + Send + 'static,
) -> Cache<K>
where
    K: Lookup + Clone + Debug + Send + Sync + 'static,
    K::DynamicType: Hash + Eq + Clone + Debug + Default + Send + Sync,
{
    let (cache, update) = cache(what, events, deleted);
    subsystem.spawn(what, update);
    cache
}

fn cache<K>(
    what: &'static str,
    events: impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static,
    mut deleted: impl FnMut(&K) + Send + 'static,
) -> (Cache<K>, impl Future<Output = ()> + Send + 'static)
where
    K: Lookup + Clone + Debug + Send + Sync + 'static,
    K::DynamicType: Hash + Eq + Clone + Debug + Default + Send + Sync,
{
    let (store, mut writer) = reflector::store();
    let (changed, generation) = watch::channel(0);
    let (refused, refusal) = watch::channel(None);
    let (interrupts, interruptions) = watch::channel(0);
    let (interruption, interrupted) = watch::channel(None::<Instant>);
    let update = async move {
        let mut events = pin!(events.default_backoff());
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => {
                    writer.apply_watcher_event(&event);
                    if let Event::Delete(object) = &event {
                        deleted(object);
                    }
                    // Each attempt to list begins with this event; it may still fail.
                    if !matches!(event, Event::Init) {
                        refused.send_if_modified(|refusal| refusal.take().is_some());
                        if interruption.send_replace(None).is_some() {
                            tracing::info!(what, "watching again");
                        }
                    }
                    if !matches!(event, Event::Init | Event::InitApply(_)) {
                        changed.send_modify(|generation| *generation += 1);
                    }
                }
                Err(error) => {
                    let again = |refusal| Refused::again(refused.borrow().as_ref(), refusal, Instant::now());
                    let refusal = Refusal::of(what, &error).map(again);
                    let is_new = refusal.is_some() && refused.borrow().is_none();
                    refused.send_replace(refusal);
                    if is_new {
                        // The generation stays, and tasks that wait for the first list hear that it was refused.
                        changed.send_modify(|_| {});
                    }
                    interrupts.send_modify(|count| *count += 1);
                    let since = *interruption.borrow();
                    interruption.send_replace(since.or_else(|| Some(Instant::now())));
                    match since.is_some() {
                        true => tracing::debug!(what, %error, "still cannot watch"),
                        false => {
                            tracing::warn!(what, %error, "cannot watch; the last known state remains in use")
                        }
                    }
                }
            }
        }
    };
    (Cache { store, generation, refusal, interruptions, interrupted }, update)
}

/// The events of a watch with what a cache keeps of each object: parsed, without what is not read.
pub fn parsed<K, T>(
    events: impl Stream<Item = watcher::Result<Event<K>>>,
    parse: impl Fn(K) -> T,
) -> impl Stream<Item = watcher::Result<Event<T>>> {
    let parsed = move |event| match event {
        Event::Apply(object) => Event::Apply(parse(object)),
        Event::Delete(object) => Event::Delete(parse(object)),
        Event::Init => Event::Init,
        Event::InitApply(object) => Event::InitApply(parse(object)),
        Event::InitDone => Event::InitDone,
    };
    events.map(move |event| event.map(&parsed))
}

/// The events of a watch in which an object is gone as soon as it is being deleted, whatever finalizers hold it. A list says so of such
/// objects after its end: an earlier list may have had them.
pub fn without_deleted<K: Resource>(
    events: impl Stream<Item = watcher::Result<Event<K>>>,
) -> impl Stream<Item = watcher::Result<Event<K>>> {
    let mut listed: Vec<K> = Vec::new();
    let is_deleted = |object: &K| object.meta().deletion_timestamp.is_some();
    events.flat_map(move |event| {
        let gone = match &event {
            Ok(Event::Init) => {
                listed.clear();
                Vec::new()
            }
            Ok(Event::InitDone) => std::mem::take(&mut listed),
            _ => Vec::new(),
        };
        let event = match event {
            Ok(Event::Apply(object)) if is_deleted(&object) => Some(Ok(Event::Delete(object))),
            Ok(Event::InitApply(object)) if is_deleted(&object) => {
                listed.push(object);
                None
            }
            event => Some(event),
        };
        stream::iter(event.into_iter().chain(gone.into_iter().map(|object| Ok(Event::Delete(object)))))
    })
}

/// The watch parameters every cache uses.
pub fn config() -> watcher::Config {
    watcher::Config::default().timeout(rand::random_range(WATCH_SECONDS))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use k8s_openapi::api::core::v1::Namespace;
    use kube::core::{ObjectMeta, Status};

    use super::*;
    use crate::subsystem::Supervisor;

    #[test]
    fn watches_do_not_all_end_at_once() {
        let ends: BTreeSet<u32> = (0..200).filter_map(|_| config().timeout).collect();
        assert!(ends.len() > 10 && ends.iter().all(|end| WATCH_SECONDS.contains(end)), "{ends:?}");
    }

    fn error(code: u16) -> watcher::Error {
        let status = Status { message: format!("code {code}"), code, ..Status::default() };
        watcher::Error::InitialListFailed(kube::Error::Api(Box::new(status)))
    }

    #[tokio::test]
    async fn a_refusal_is_an_answer_until_the_objects_are_shown() {
        let refused = stream::iter([Err(error(403))]).chain(stream::pending());
        let mut supervisor = Supervisor::default();
        let cache = start::<Namespace>(supervisor.subsystem("caches"), "Namespaces", refused);
        while !cache.has_answer() {
            tokio::task::yield_now().await;
        }
        assert_eq!(cache.refusal(), Some(Refusal::Forbidden("code 403".to_owned())));
        assert!(!cache.is_ready());

        let (cache, update) = cache_of([Err(error(403)), Ok(Event::Init), Ok(Event::InitDone)]);
        update.await;
        assert_eq!((cache.refusal(), cache.is_ready()), (None, true));
        assert_eq!(cache.refused_for(), Duration::ZERO);
        assert_eq!(cache.interrupted_at(), None);
        let (cache, update) = cache_of([Ok(Event::Init), Ok(Event::InitDone), Err(error(500))]);
        update.await;
        assert!(cache.is_ready() && cache.interrupted_at().is_some());
    }

    /// A watch is tried again after up to a minute, and the API server may have refused it only while it started.
    #[tokio::test]
    async fn what_was_refused_once_has_not_been_refused_for_long() {
        let now = Instant::now();
        let forbidden = || Refusal::Forbidden(String::new());
        let once = Refused::again(None, forbidden(), now);
        assert_eq!(once.lasted(), Duration::ZERO);
        let again = Refused::again(Some(&once), forbidden(), now + Duration::from_secs(50));
        assert_eq!(again.lasted(), Duration::from_secs(50));
        let unknown = Refusal::UnknownResource("Namespaces");
        let other = Refused::again(Some(&again), unknown, now + Duration::from_secs(60));
        assert_eq!(other.lasted(), Duration::ZERO, "what was forbidden need not be unknown");

        let twice = stream::iter([Err(error(403)), Err(error(403))]).chain(stream::pending());
        let mut supervisor = Supervisor::default();
        let cache = start::<Namespace>(supervisor.subsystem("caches"), "Namespaces", twice);
        while !cache.has_answer() {
            tokio::task::yield_now().await;
        }
        assert_eq!(cache.refused_for(), Duration::ZERO);
        while cache.refused_for().is_zero() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    #[tokio::test]
    async fn only_a_deletion_that_the_watch_shows_is_noted() {
        let named = |name: &str| {
            let metadata = ObjectMeta { name: Some(name.to_owned()), ..ObjectMeta::default() };
            Namespace { metadata, ..Namespace::default() }
        };
        let events = [
            Event::Init,
            Event::InitApply(named("a")),
            Event::InitApply(named("b")),
            Event::InitDone,
            Event::Delete(named("a")),
            Event::Init,
            Event::InitDone,
        ];
        let (noted, mut deletions) = tokio::sync::mpsc::unbounded_channel();
        let note = move |namespace: &Namespace| noted.send(namespace.metadata.name.clone()).unwrap();
        let (cache, update) = super::cache("Namespaces", stream::iter(events.map(Ok)), note);
        update.await;
        assert_eq!(deletions.recv().await, Some(Some("a".to_owned())));
        assert!(deletions.recv().await.is_none() && cache.store.state().is_empty());
    }

    /// A finalizer holds what the holder of a stolen token wants to stay.
    #[tokio::test]
    async fn an_object_that_is_being_deleted_is_gone_whatever_holds_it() {
        let named = |name: &str, is_deleted: bool| {
            let since = is_deleted.then_some("2026-01-01T00:00:00Z");
            let metadata = serde_json::json!({ "name": name, "deletionTimestamp": since });
            let metadata: ObjectMeta = serde_json::from_value(metadata).unwrap();
            Namespace { metadata, ..Namespace::default() }
        };
        let events = [
            Event::Init,
            Event::InitApply(named("a", true)),
            Event::InitApply(named("b", false)),
            Event::InitApply(named("c", false)),
            Event::InitDone,
            Event::Apply(named("b", true)),
            Event::Delete(named("b", true)),
        ];
        let (noted, mut deletions) = tokio::sync::mpsc::unbounded_channel();
        let note = move |namespace: &Namespace| noted.send(namespace.metadata.name.clone()).unwrap();
        let events = without_deleted(stream::iter(events.map(Ok)));
        let (cache, update) = super::cache("Namespaces", events, note);
        update.await;
        let left: Vec<_> = cache.store.state().iter().filter_map(|it| it.metadata.name.clone()).collect();
        assert_eq!(left, ["c"]);
        for name in ["a", "b", "b"] {
            assert_eq!(deletions.recv().await, Some(Some(name.to_owned())));
        }
        assert!(deletions.recv().await.is_none());
    }

    #[test]
    fn only_a_refusal_that_lasts_counts() {
        assert_eq!(Refusal::of("Peers", &error(503)), None);
        assert_eq!(Refusal::of("Peers", &watcher::Error::NoResourceVersion), None);
        let unknown = Refusal::of("Peers", &error(404)).unwrap();
        assert_eq!(unknown.to_string(), "the API server has no Peers: apply deploy/crds");
    }

    fn cache_of<const N: usize>(
        events: [watcher::Result<Event<Namespace>>; N],
    ) -> (Cache<Namespace>, impl Future<Output = ()>) {
        super::cache("Namespaces", stream::iter(events), |_| {})
    }
}
