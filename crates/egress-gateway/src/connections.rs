//! Users of addresses and ports outside: keeps what the kernel says of connections, writes them to the log if the Egress asks for it, and
//! answers `/connections`.

mod answer;
mod copies;
mod log;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fairlead_egress::options::Options;
use fairlead_netlink::conntrack::{ConnectionEvent, ConnectionEvents, ConnectionTable, Flow};
use tokio::io::unix::AsyncFd;
use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};

use self::answer::Answer;
use self::copies::{Change, Copies};
use self::log::{Connection, Connections, MAX_KEPT, Millis, Pod};
use crate::data_path::connections;
use crate::metrics::Metrics;
use crate::registry::Registry;
use crate::registry::store::Store;
use crate::source_addresses::holds::announced::Announced;

/// Notifications that are taken at once.
const BATCH: usize = 256;
/// Interval at which all connections are listed: the kernel reports nothing of those that began before the program did.
const LIST: Duration = Duration::from_secs(60);
/// Time until the next list when notifications were lost, or the gateway has taken a source address with its connections.
const LIST_SOON: Duration = Duration::from_secs(2);

/// Connections that are known, open and ended.
#[derive(Clone)]
pub(crate) struct Known(Arc<Mutex<Connections>>);

impl Known {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(Connections::new(now()))))
    }

    fn locked(&self) -> MutexGuard<'_, Connections> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Answer of `/connections` to a query.
    ///
    /// # Errors
    /// The query is none.
    pub(crate) fn answer(&self, query: &str) -> Result<Answer, String> {
        let query = fairlead_egress::lookup::parse(query)?;
        Ok(Answer::of(&self.locked(), &query))
    }
}

/// Takes what the kernel says of connections. Never ends.
pub(crate) async fn watch(mut watch: Watch) -> anyhow::Result<()> {
    #[expect(
        deprecated,
        reason = "unsound only for types that do not own their descriptor; `register` is unsafe"
    )]
    let mut socket = AsyncFd::try_new(ConnectionEvents::open_new_destroyed()?)?;
    let mut announced = watch.announced.clone();
    let mut lists = interval(LIST);
    lists.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut events = Vec::with_capacity(BATCH);
    let mut is_soon = false;
    loop {
        tokio::select! {
            _ = lists.tick() => {
                is_soon = false;
                watch.list().await;
                continue;
            }
            Ok(()) = announced.changed() => {}
            ready = socket.readable_mut() => {
                let mut ready = ready?;
                if ready.get_inner_mut().read(BATCH, &mut events)? {
                    ready.clear_ready();
                }
            }
        }
        let is_new = watch.follow_sources();
        let is_missed = watch.take(&events);
        events.clear();
        if (is_new || is_missed) && !std::mem::replace(&mut is_soon, true) {
            lists.reset_after(LIST_SOON);
        }
    }
}

/// Task that follows connections.
pub(crate) struct Watch {
    store: Arc<Store>,
    announced: Announced,
    options: watch::Receiver<Arc<Options>>,
    known: Known,
    metrics: Metrics,
    /// Each name once, by the address.
    pods: HashMap<IpAddr, Arc<Pod>>,
    copies: Copies,
}

impl Watch {
    pub(crate) fn new(
        store: Arc<Store>,
        announced: Announced,
        options: watch::Receiver<Arc<Options>>,
        known: Known,
        metrics: Metrics,
    ) -> Self {
        Self { store, announced, options, known, metrics, pods: HashMap::new(), copies: Copies::default() }
    }

    /// Connections of addresses that the gateway no longer holds are another's. Returns whether those of an address that it holds now are
    /// not known yet.
    fn follow_sources(&mut self) -> bool {
        let Some(change) = self.copies.follow(&self.announced.floating()) else { return false };
        let mut connections = self.known.locked();
        connections.forget_all(self.copies.addresses());
        if change == Change::Taken {
            // Those of before are known to the gateway that had the address.
            connections.missed(now());
        }
        change == Change::Taken
    }

    /// Returns whether some notifications are missing.
    fn take(&mut self, events: &[ConnectionEvent]) -> bool {
        if events.is_empty() {
            return false;
        }
        let now = now();
        let Self { store, known, metrics, pods, copies, .. } = self;
        let mut is_incomplete = false;
        let mut ended = Vec::new();
        let mut connections = known.locked();
        store.read(|registry| {
            for event in events {
                match event {
                    ConnectionEvent::Missed => {
                        is_incomplete = true;
                        connections.missed(now);
                    }
                    ConnectionEvent::Destroyed(flow) if copies.has(flow) => connections.forget(flow),
                    ConnectionEvent::Destroyed(flow) => {
                        let pod = pod(registry, pods, flow.original.source).unwrap_or_default();
                        ended.extend(connections.ended(flow, pod, now));
                    }
                    ConnectionEvent::New(flow) | ConnectionEvent::Updated(flow) if copies.has(flow) => {}
                    ConnectionEvent::New(flow) | ConnectionEvent::Updated(flow) => {
                        let begin = matches!(event, ConnectionEvent::New(_)).then_some(now);
                        // The gateway's own connections are left out.
                        if let Some(pod) = pod(registry, pods, flow.original.source) {
                            connections.seen(flow, pod, begin, now);
                        }
                    }
                }
            }
        });
        metrics.connections_left_out(connections.left_out());
        drop(connections);
        self.log(&ended);
        is_incomplete
    }

    /// Lists all connections, unless they are too many.
    async fn list(&mut self) {
        self.forget_pods();
        if connections().is_none_or(|(count, _)| count > MAX_KEPT as u64) {
            return;
        }
        let listed = tokio::task::spawn_blocking(|| ConnectionTable::open()?.all()).await;
        let flows = match listed {
            Ok(Ok(flows)) => flows,
            Ok(Err(error)) => return tracing::warn!(%error, "cannot list connections; some may not be known"),
            Err(error) => std::panic::resume_unwind(error.into_panic()),
        };
        let ended = self.set_open(flows);
        self.log(&ended);
    }

    /// Forgets the names of those that are no clients any more.
    fn forget_pods(&mut self) {
        let pods = &mut self.pods;
        self.store.read(|registry| pods.retain(|address, _| registry.owners().contains_key(address)));
    }

    /// Takes all connections that the kernel has. Returns those that have ended unheard.
    fn set_open(&mut self, mut flows: Vec<Flow>) -> Vec<Connection> {
        let Self { store, announced, known, pods, copies, .. } = self;
        copies.keep(&flows, &announced.floating());
        flows.retain(|flow| !copies.has(flow));
        let mut connections = known.locked();
        store.read(|registry| connections.set_open(&flows, |address| pod(registry, pods, address), now()))
    }

    fn log(&self, ended: &[Connection]) {
        if !self.options.borrow().log_connections {
            return;
        }
        for connection in ended {
            let Connection { pod, protocol, client, destination, outside, begin, end, bytes } = connection;
            let at = |time: &Option<Millis>| time.map(answer::time).unwrap_or_default();
            tracing::info!(
                target: "connections",
                namespace = pod.namespace,
                pod = pod.name,
                protocol,
                client = %client.0,
                client_port = client.1,
                destination = %destination.0,
                destination_port = destination.1,
                source = %outside.0,
                source_port = outside.1,
                begin = at(begin),
                end = at(end),
                sent_bytes = bytes.map(|[sent, _]| sent),
                received_bytes = bytes.map(|[_, received]| received),
                "a connection has ended"
            );
        }
    }
}

/// The client with an address.
fn pod(registry: &Registry, pods: &mut HashMap<IpAddr, Arc<Pod>>, address: IpAddr) -> Option<Arc<Pod>> {
    let Some(owner) = registry.owners().get(&address) else {
        return registry.adopted().contains(&address).then(Arc::default);
    };
    let namespace = &owner.client.namespace;
    let name = &owner.client.name;
    let pod = pods.entry(address).or_default();
    if (&pod.namespace, &pod.name) != (namespace, name) {
        *pod = Arc::new(Pod { namespace: namespace.clone(), name: name.clone() });
    }
    Some(Arc::clone(pod))
}

fn now() -> Millis {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    Millis::try_from(since.as_millis()).unwrap_or(Millis::MAX)
}
