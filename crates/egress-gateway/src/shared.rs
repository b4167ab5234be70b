//! What the tasks of the program share.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fairlead_wire::egress::State;
use ipnet::IpNet;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::facts;
use crate::plane::Desired;
use crate::registry::{Reason, Refusal, Registry, StreamId};
use fairlead_egress::options::Options;
use crate::sync::Addresses;

/// Longest text of a kernel's refusal that is sent.
const MAX_MESSAGE: usize = 500;

/// What the data path has.
#[derive(Debug, Clone, Default)]
pub(crate) struct InPlace {
    /// The version of the registry that is in place; `None` before the first time.
    pub(crate) version: Option<u64>,
    /// Clients whose tunnel the kernel refuses.
    pub(crate) refused: Arc<BTreeMap<IpAddr, String>>,
}

/// What holds of this gateway, of which node programs are told one thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Conditions {
    is_draining: bool,
    is_unhealthy: bool,
}

impl Conditions {
    /// One that drains takes no new flows whatever other gateways do, so this comes first.
    fn state(self) -> State {
        match self {
            Self { is_draining: true, .. } => State::Draining,
            Self { is_unhealthy: true, .. } => State::Unhealthy,
            _ => State::Ready,
        }
    }
}

/// The registry, and who is told what.
pub(crate) struct Shared {
    registry: Mutex<Registry>,
    destinations: watch::Sender<Arc<BTreeMap<IpNet, bool>>>,
    options: watch::Sender<Arc<Options>>,
    /// The version of the registry.
    version: watch::Sender<u64>,
    in_place: watch::Sender<InPlace>,
    conditions: Mutex<Conditions>,
    /// What the conditions say.
    state: watch::Sender<State>,
    streams: Mutex<BTreeMap<String, (StreamId, CancellationToken)>>,
}

impl Shared {
    pub(crate) fn new(registry: Registry) -> Self {
        Self {
            version: watch::Sender::new(registry.version()),
            registry: Mutex::new(registry),
            destinations: watch::Sender::default(),
            options: watch::Sender::default(),
            in_place: watch::Sender::default(),
            conditions: Mutex::default(),
            state: watch::Sender::new(State::Ready),
            streams: Mutex::default(),
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

    pub(crate) fn options(&self) -> watch::Receiver<Arc<Options>> {
        self.options.subscribe()
    }

    /// What the data path should be, and the version of the registry that says so.
    pub(crate) fn desired(&self) -> (u64, Desired) {
        let destinations = BTreeMap::clone(&self.destinations.borrow());
        let max_connections = self.options.borrow().max_connections;
        let registry = self.locked();
        (registry.version(), Desired { clients: registry.addresses(), destinations, max_connections })
    }

    pub(crate) fn set_in_place(&self, in_place: InPlace) {
        self.in_place.send_replace(in_place);
    }

    pub(crate) fn in_place(&self) -> watch::Receiver<InPlace> {
        self.in_place.subscribe()
    }

    /// The gateway ends when its flows have.
    pub(crate) fn set_draining(&self) {
        self.change(|conditions| conditions.is_draining = true);
    }

    /// Whether what the Egress has probed answers.
    pub(crate) fn set_healthy(&self, is_healthy: bool) {
        self.change(|conditions| conditions.is_unhealthy = !is_healthy);
    }

    fn change(&self, change: impl FnOnce(&mut Conditions)) {
        let mut conditions = self.conditions.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut conditions);
        let state = conditions.state();
        self.state.send_if_modified(|known| std::mem::replace(known, state) != state);
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
