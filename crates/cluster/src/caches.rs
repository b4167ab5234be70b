//! Watch caches: the objects of one kind as last seen, kept current, with a signal at every change.
//!
//! An unreachable API server stops nothing: the last known state remains in use and the watch is retried with exponential
//! backoff.

use std::fmt::Debug;
use std::hash::Hash;
use std::pin::pin;

use futures::{Stream, StreamExt};
use kube::runtime::WatchStreamExt;
use kube::runtime::reflector::{self, Lookup, Store};
use kube::runtime::watcher::{self, Event};
use tokio::sync::watch;
use tokio::task::JoinSet;

use crate::subsystem::Subsystem;

/// Seconds after which the server ends a watch and it is begun anew. A connection that is dead without a reset (a NAT
/// binding that expired, a router that was replaced) is detected within this time.
pub const WATCH_SECONDS: u32 = 60;

/// Objects of one kind as last seen.
pub struct Cache<K: Lookup + Clone + 'static>
where
    K::DynamicType: Hash + Eq + Clone + Debug + Default,
{
    /// The objects.
    pub store: Store<K>,
    generation: watch::Receiver<u64>,
}

impl<K: Lookup + Clone + 'static> Cache<K>
where
    K::DynamicType: Hash + Eq + Clone + Debug + Default,
{
    /// A receiver that sees every change from now on.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.generation.clone()
    }

    /// Whether the first list has arrived.
    pub fn is_ready(&self) -> bool {
        *self.generation.borrow() > 0
    }
}

/// Keeps a cache current on a task of `tasks`. `what` names the objects in logs.
pub fn spawn<K>(
    tasks: &mut JoinSet<()>,
    what: &'static str,
    events: impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static,
) -> Cache<K>
where
    K: Lookup + Clone + Debug + Send + Sync + 'static,
    K::DynamicType: Hash + Eq + Clone + Debug + Default + Send + Sync,
{
    let (cache, update) = cache(what, events);
    tasks.spawn(update);
    cache
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
    let (cache, update) = cache(what, events);
    subsystem.spawn(what, update);
    cache
}

fn cache<K>(
    what: &'static str,
    events: impl Stream<Item = watcher::Result<Event<K>>> + Send + 'static,
) -> (Cache<K>, impl Future<Output = ()> + Send + 'static)
where
    K: Lookup + Clone + Debug + Send + Sync + 'static,
    K::DynamicType: Hash + Eq + Clone + Debug + Default + Send + Sync,
{
    let (store, mut writer) = reflector::store();
    let (changed, generation) = watch::channel(0);
    let update = async move {
        let mut events = pin!(events.default_backoff());
        let mut interrupted = false;
        while let Some(event) = events.next().await {
            match event {
                Ok(event) => {
                    writer.apply_watcher_event(&event);
                    if std::mem::take(&mut interrupted) {
                        tracing::info!(what, "watching again");
                    }
                    if !matches!(event, Event::Init | Event::InitApply(_)) {
                        changed.send_modify(|generation| *generation += 1);
                    }
                }
                Err(error) if interrupted => tracing::debug!(what, %error, "still cannot watch"),
                Err(error) => {
                    interrupted = true;
                    tracing::warn!(what, %error, "cannot watch; the last known state remains in use");
                }
            }
        }
    };
    (Cache { store, generation }, update)
}

/// The watch parameters every cache uses.
pub fn config() -> watcher::Config {
    watcher::Config::default().timeout(WATCH_SECONDS)
}
