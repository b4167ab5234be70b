//! What the tasks of the program share.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicI64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fairlead_dataplane::egress_gateway::Sources;
use fairlead_wire::egress::{self as wire, State};
use ipnet::IpNet;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::facts;
use crate::holds::{self, Condition, SlotAddresses};
use crate::plane::Desired;
use crate::registry::{Reason, Refusal, Registry, StreamId};
use crate::sync::Addresses;
use fairlead_egress::options::Options;

/// Longest text of a kernel's refusal that is sent.
const MAX_MESSAGE: usize = 500;

/// What the data path has.
#[derive(Debug, Clone, Default)]
pub(crate) struct InPlace {
    /// The version of the registry that is in place; `None` before the first time.
    pub(crate) version: Option<u64>,
    /// What clients send to the outside is dropped there ([`Sources::standby`]).
    pub(crate) standby: bool,
    /// Clients whose tunnel the kernel refuses.
    pub(crate) refused: Arc<BTreeMap<IpAddr, String>>,
}

/// A source address that this gateway holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeldAddress {
    pub(crate) address: IpAddr,
    pub(crate) term: u64,
    /// Until when, unless that is said again.
    pub(crate) until: Instant,
    /// It was handed over a moment ago, and clients are not to come for it yet.
    pub(crate) settling: bool,
}

impl HeldAddress {
    /// As node programs are told now; `None` if it is over.
    pub(crate) fn to_wire(self, now: Instant) -> Option<wire::Hold> {
        let address = wire::octets(self.address);
        let left = self.until.checked_duration_since(now)?.as_millis();
        let valid_milliseconds = u32::try_from(left).unwrap_or(u32::MAX);
        let Self { term, settling, .. } = self;
        (left > 0).then_some(wire::Hold { address, term, valid_milliseconds, settling })
    }
}

/// Source addresses of the Egress. Connections that are translated to one that the gateway does not hold are copies of another's.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Floating {
    pub(crate) held: BTreeSet<IpAddr>,
    pub(crate) not_held: BTreeSet<IpAddr>,
}

/// The registry, and who is told what.
pub(crate) struct Shared {
    registry: Mutex<Registry>,
    destinations: watch::Sender<Arc<BTreeMap<IpNet, bool>>>,
    options: watch::Sender<Arc<Options>>,
    /// Source addresses, as far as the data path needs to know.
    sources: watch::Sender<Option<Sources>>,
    /// Those that the gateway holds.
    held: watch::Sender<Arc<Vec<HeldAddress>>>,
    /// The version of the registry.
    version: watch::Sender<u64>,
    in_place: watch::Sender<InPlace>,
    condition: Mutex<Condition>,
    /// What the condition says.
    state: watch::Sender<State>,
    /// `None` without source addresses.
    slots: watch::Sender<SlotAddresses>,
    streams: Mutex<BTreeMap<String, (StreamId, CancellationToken)>>,
    /// Seconds by which the clock here differs from the API server's, as the last token has shown that shows it; 0 for none.
    clock_error: AtomicI64,
}

impl Shared {
    pub(crate) fn new(registry: Registry) -> Self {
        Self {
            version: watch::Sender::new(registry.version()),
            registry: Mutex::new(registry),
            destinations: watch::Sender::default(),
            options: watch::Sender::default(),
            sources: watch::Sender::default(),
            held: watch::Sender::default(),
            in_place: watch::Sender::default(),
            condition: Mutex::default(),
            state: watch::Sender::new(State::Ready),
            slots: watch::Sender::default(),
            streams: Mutex::default(),
            clock_error: AtomicI64::new(0),
        }
    }

    /// Works on the registry, and wakes the tasks that follow its changes.
    pub(crate) fn registry<T>(&self, work: impl FnOnce(&mut Registry) -> T) -> T {
        let mut registry = self.locked();
        let result = work(&mut registry);
        let version = registry.version();
        drop(registry);
        self.version.send_if_modified(|known| {
            let is_new = *known < version;
            *known = version.max(*known);
            is_new
        });
        result
    }

    /// Reads the registry; wakes no task.
    pub(crate) fn read<T>(&self, work: impl FnOnce(&Registry) -> T) -> T {
        work(&self.locked())
    }

    fn locked(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn version(&self) -> watch::Receiver<u64> {
        self.version.subscribe()
    }

    pub(crate) fn set_destinations(&self, destinations: BTreeMap<IpNet, bool>) {
        self.destinations.send_if_modified(|known| {
            let is_new = **known != destinations;
            if is_new {
                *known = Arc::new(destinations);
            }
            is_new
        });
    }

    pub(crate) fn destinations(&self) -> watch::Receiver<Arc<BTreeMap<IpNet, bool>>> {
        self.destinations.subscribe()
    }

    pub(crate) fn set_options(&self, options: Options) {
        self.options.send_if_modified(|known| {
            let is_new = **known != options;
            if is_new {
                *known = Arc::new(options);
            }
            is_new
        });
    }

    pub(crate) fn set_sources(&self, sources: Option<Sources>) {
        self.sources.send_if_modified(|known| {
            let is_new = *known != sources;
            *known = sources;
            is_new
        });
    }

    pub(crate) fn options(&self) -> watch::Receiver<Arc<Options>> {
        self.options.subscribe()
    }

    pub(crate) fn sources(&self) -> watch::Receiver<Option<Sources>> {
        self.sources.subscribe()
    }

    /// Every call is sent to node programs, also one that says the same, unless it is again that nothing is held.
    pub(crate) fn set_held(&self, held: Vec<HeldAddress>) {
        self.held.send_if_modified(|known| {
            let is_new = !(known.is_empty() && held.is_empty());
            *known = Arc::new(held);
            is_new
        });
    }

    pub(crate) fn held(&self) -> watch::Receiver<Arc<Vec<HeldAddress>>> {
        self.held.subscribe()
    }

    /// Which source addresses the gateway holds and which it does not, as was said last.
    pub(crate) fn floating(&self) -> Floating {
        let (sources, held) = (self.sources.borrow(), self.held.borrow());
        let Some(Sources { floating, translate, .. }) = &*sources else { return Floating::default() };
        // What is translated to is held; a program that has just begun says that before the rest.
        let is_held = |address: &IpAddr| {
            held.iter().any(|it| it.address == *address) || translate.values().any(|it| it == address)
        };
        let (held, not_held) = floating.iter().copied().partition(is_held);
        Floating { held, not_held }
    }

    /// What the data path should be, and the version of the registry that says so.
    pub(crate) fn desired(&self) -> (u64, Desired) {
        let destinations = BTreeMap::clone(&self.destinations.borrow());
        let max_connections = self.options.borrow().max_connections;
        let sources = self.sources.borrow().clone();
        let registry = self.locked();
        let clients = registry.addresses();
        (registry.version(), Desired { clients, destinations, max_connections, sources })
    }

    pub(crate) fn set_in_place(&self, in_place: InPlace) {
        self.in_place.send_replace(in_place);
    }

    pub(crate) fn in_place(&self) -> watch::Receiver<InPlace> {
        self.in_place.subscribe()
    }

    /// The gateway ends when its flows have.
    pub(crate) fn drain(&self) {
        self.change(|condition| condition.draining = true);
    }

    /// It has source addresses, and holds none of them or is not ready for clients yet.
    pub(crate) fn set_standby(&self, standby: bool) {
        self.change(|condition| condition.standby = standby);
    }

    /// Whether what the Egress has probed answers.
    pub(crate) fn set_healthy(&self, is_healthy: bool) {
        self.change(|condition| condition.unhealthy = !is_healthy);
    }

    /// By how many seconds the clock here is ahead of the API server's (positive) or behind it; `None` if no token has shown that.
    pub(crate) fn clock_error(&self) -> Option<i64> {
        Some(self.clock_error.load(Ordering::Relaxed)).filter(|seconds| *seconds != 0)
    }

    /// What the last token has shown; one that shows nothing leaves it as it is.
    pub(crate) fn set_clock_error(&self, error: Option<i64>) {
        let Some(seconds) = error else { return };
        let before = self.clock_error.swap(seconds, Ordering::Relaxed);
        if seconds != 0 && before == 0 {
            tracing::warn!(
                reason = "ClockWrong",
                seconds,
                "this node's clock differs from the API server's: by it, a token that the API server accepts is not valid; set the time \
                 of the node"
            );
        }
    }

    fn change(&self, change: impl FnOnce(&mut Condition)) {
        let mut condition = self.condition.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut condition);
        let wanted = holds::state(*condition);
        self.state.send_if_modified(|state| std::mem::replace(state, wanted) != wanted);
    }

    /// What keeps it from getting new connections.
    pub(crate) fn condition(&self) -> Condition {
        *self.condition.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The Egress has no source addresses any more.
    pub(crate) fn clear_sources(&self) {
        self.set_held(Vec::new());
        self.set_sources(None);
        self.set_standby(false);
    }

    /// The addresses of slots, as the status of the Egress says.
    pub(crate) fn set_slots(&self, slots: Option<Vec<Vec<IpAddr>>>) {
        self.slots.send_if_modified(|known| {
            let is_new = known.as_deref() != slots.as_ref();
            if is_new {
                *known = slots.map(Arc::new);
            }
            is_new
        });
    }

    pub(crate) fn slots(&self) -> watch::Receiver<SlotAddresses> {
        self.slots.subscribe()
    }

    pub(crate) fn state(&self) -> watch::Receiver<State> {
        self.state.subscribe()
    }

    /// Begins a stream; the token is cancelled when a newer one of the same Node replaces it.
    pub(crate) fn begin(&self, node: &str) -> (StreamId, CancellationToken) {
        let replaced = CancellationToken::new();
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        let stream = self.registry(|registry| registry.begin(node));
        if let Some((_, earlier)) = streams.insert(node.to_owned(), (stream, replaced.clone())) {
            earlier.cancel();
        }
        (stream, replaced)
    }

    /// Ends a stream.
    pub(crate) fn end(&self, node: &str, stream: StreamId) {
        let mut streams = self.streams.lock().unwrap_or_else(PoisonError::into_inner);
        if streams.get(node).is_some_and(|(current, _)| *current == stream) {
            streams.remove(node);
        }
        self.registry(|registry| registry.end(node, stream));
    }

    /// How many streams are open.
    pub(crate) fn streams(&self) -> usize {
        self.streams.lock().unwrap_or_else(PoisonError::into_inner).len()
    }

    /// All that is refused of a Node, also by the kernel, by UID.
    pub(crate) fn refusals(&self, node: &str) -> BTreeMap<String, Refusal> {
        let refused = Arc::clone(&self.in_place.borrow().refused);
        let registry = self.locked();
        let mut all: BTreeMap<String, Refusal> =
            registry.refusals(node).map(|refusal| (refusal.uid.clone(), refusal.clone())).collect();
        for (address, reason) in refused.iter() {
            if let Some(owner) = registry.owners().get(address).filter(|owner| owner.node == node) {
                let message: String = reason.chars().take(MAX_MESSAGE).collect();
                let refusal = Refusal::new(&owner.client.uid, Reason::LinkRefused, message);
                all.insert(owner.client.uid.clone(), refusal);
            }
        }
        all
    }
}

impl Addresses for Shared {
    fn is_client(&self, address: IpAddr) -> bool {
        self.locked().may_be_client(address)
    }

    fn is_destination(&self, address: IpAddr) -> bool {
        facts::may_send_to(&self.destinations.borrow(), address)
    }
}
