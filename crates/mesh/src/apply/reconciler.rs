//! Brings the kernel to the desired mesh. Runs when something changed, and now and then because others change the kernel
//! too.

mod device;
mod listen_port;
mod reports;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use fairlead_api::names::MARK_FROM_WIREGUARD;
use fairlead_api::resources::Granularity;
use fairlead_keys::{DeviceState, PeerState, PublicKey};
use fairlead_path::{NatType, State};
use fairlead_topology::{Down, Planner};
use tokio::sync::watch;

pub use self::device::{DeviceSlot, Gateways};
use self::listen_port::{ListenPort, WantedPort};
use super::encapsulation::EncapsulationWatch;
use super::gateways::{self, GatewayWatch};
use super::kernel::Kernel;
use super::path_port::PathPort;
use super::paths::{Capabilities, PathDriver, Woken};
use super::report::Report;
use crate::model::inputs::Inputs;
use crate::model::problem::MeshFailure;
use crate::plan::desired::{self, Desired, Held, Host, OwnAddresses, StunAnswers};
use crate::plan::down_peers::DownPeers;
use crate::plan::entries::Entries;
use crate::plan::external::{DesiredExternal, ExternalEndpoints};
use crate::plan::granted::GrantedAddresses;
use crate::plan::granularity::GranularityChange;
use crate::plan::key_changes::{self, KeyChanges};

/// The mesh of this node: the device, what it is to be, and the paths. Losing it (a restart) loses no traffic: the
/// device is adopted as it is.
pub struct Mesh<K> {
    kernel: K,
    device: DeviceSlot,
    listen_port: ListenPort,
    planning: Planning,
    nat: NatType,
    paths: PathDriver,
    external: ExternalEndpoints,
    entries: Entries,
    gateways: GatewayWatch,
    granted: GrantedAddresses,
    down_peers: DownPeers,
    encapsulation: EncapsulationWatch,
    keys: KeyChanges,
    granularity: GranularityChange,
    /// The paths found something from which another plan may follow.
    is_outdated: bool,
}

/// The last plan, and who follows it.
#[derive(Default)]
struct Planning {
    planner: Planner,
    last: Option<Arc<Planned>>,
    /// Number of plans so far.
    count: usize,
    /// The plan that the paths follow, by its number, and on which device.
    followed: Option<(usize, Capabilities)>,
}

/// Last desired state, with everything from which it follows.
struct Planned {
    inputs: Arc<Inputs>,
    host: Host,
    own_addresses: OwnAddresses,
    entry_terms: BTreeMap<PublicKey, u64>,
    down: Down,
    completed: BTreeSet<PublicKey>,
    other: Option<Granularity>,
    desired: Desired,
}

impl<K: Kernel> Mesh<K> {
    /// Nothing is touched before the first [`Self::reconcile`].
    pub fn new(kernel: K, device: DeviceSlot, paths: PathDriver) -> Self {
        Self {
            kernel,
            device,
            listen_port: ListenPort::default(),
            planning: Planning::default(),
            nat: NatType::Unknown,
            paths,
            external: ExternalEndpoints::default(),
            entries: Entries::default(),
            gateways: GatewayWatch::default(),
            granted: GrantedAddresses::default(),
            down_peers: DownPeers::default(),
            encapsulation: EncapsulationWatch::default(),
            keys: KeyChanges::default(),
            granularity: GranularityChange::default(),
            is_outdated: false,
        }
    }

    /// Brings the kernel to what `inputs` ask for.
    ///
    /// # Errors
    /// The kernel refuses something. What was done before stays, and the next call goes on from there.
    pub fn reconcile(&mut self, inputs: &Arc<Inputs>, now: Instant) -> Result<Report, MeshFailure> {
        self.is_outdated = false;
        if let Some(evidence) = self.kernel.numbers_taken(&inputs.settings.device.interface)? {
            return Err(MeshFailure::NumbersTaken(evidence));
        }
        let mut host = Host::new(&self.kernel.network()?, inputs);
        let inputs = &self.granted.extend(inputs, host.addresses());
        let mtu = desired::mtu(inputs, &host);
        let (before, is_listening) = match self.device_state(inputs, &mut host, mtu, now) {
            Ok(read) => read,
            Err(failure) => {
                let planned = self.plan(inputs, host, OwnAddresses::default(), &BTreeMap::new(), now);
                self.drop_packets(&planned, now);
                return Err(failure);
            }
        };
        self.device.maintain_path_socket(self.paths.port());
        // Before the device has the port, nothing can be asked: the next reconciliation follows at once.
        self.is_outdated |= !is_listening;
        let stun = self.ask_stun_servers(inputs, &host, is_listening, now);
        let own_addresses =
            OwnAddresses { stun, peers: self.paths.reflexive_addresses(), filtering: self.paths.filtering() };
        self.observe_entries(&before, now);
        self.observe_keys(&before);
        self.paths.set_identity(&inputs.keys.private, inputs.keys.public);
        let planned = self.plan(inputs, host, own_addresses, &before.peers, now);
        if before.peers.is_empty() {
            // As soon as it has some, packets come by the tunnel, also for pods that are not there.
            self.drop_packets(&planned, now);
        }
        self.configure_device(&planned, before, mtu, now)
            .inspect_err(|_| self.drop_packets(&planned, now))?;
        self.lead_packets(&planned, now)?;
        self.observe_granularity(now);
        let report = self.report(now).ok_or(MeshFailure::NoMesh)?;
        self.watch_down_peers(&report, now);
        Ok(report)
    }

    /// Leads packets into the device, which is missing or has no peers: they are dropped, and never leave in clear text. What the kernel refuses is
    /// tried again, and reported, by [`Self::lead_packets`].
    fn drop_packets(&mut self, planned: &Planned, now: Instant) {
        let Planned { inputs, host, desired, .. } = planned;
        // Packets through IP tunnels need no device.
        self.encapsulation.apply(&mut self.kernel, desired, host.uplink_mtu(), now);
        let encapsulated = self.encapsulation.routes(desired);
        let bypassed = self.down_peers.bypassed();
        let interface = &inputs.settings.device.interface;
        drop(self.kernel.apply(&desired.mesh_state(interface, bypassed, encapsulated, |_| None)));
    }

    /// Gives the device its port, its peers and their endpoints. `before` is what it has.
    fn configure_device(
        &mut self,
        planned: &Planned,
        mut before: DeviceState,
        mtu: u32,
        now: Instant,
    ) -> Result<(), MeshFailure> {
        let Planned { inputs, host, desired, .. } = planned;
        let gateways = gateways::several(desired);
        let changed_over = self.device.use_device(|slot| {
            slot.change_over(&mut self.kernel, self.paths.port(), gateways, &before, now)
        })?;
        self.is_outdated |= changed_over.is_some();
        // The new device has no sessions yet: the paths go on where the old one's led.
        let replaced = changed_over.map(|state| std::mem::replace(&mut before, state));
        let interface = &inputs.settings.device.interface;
        let has_path_socket = self.device.has_path_socket();
        let backend = self.device.use_device(|slot| {
            Ok(slot.open(&mut self.kernel, self.paths.port(), interface, mtu)?.backend())
        })?;
        self.follow_plan(planned, Capabilities { backend, has_path_socket }, mtu, now);
        self.paths.port().watch_refusals(host.port);
        let mut endpoints = self.paths.observe(replaced.as_ref().unwrap_or(&before), now);
        let relay = inputs.settings.relay.as_ref();
        endpoints.extend(self.keys.endpoints(&before, |endpoint, key| {
            self.paths.relay_transport(endpoint)?;
            Some(self.paths.relay().path(relay?, key)?.endpoint)
        }));
        let settings = (&inputs.keys.private, host.port, MARK_FROM_WIREGUARD);
        let mut change = before
            .change_of(settings, &desired.peers, |key, peer| (&peer.config, endpoints.get(key).copied()));
        self.paths.complete(&mut change, &before, &endpoints);
        self.external.complete(&mut change, &desired.external, &before, (now, SystemTime::now()));
        key_changes::complete(&mut change, &desired.prepared, &before);
        self.paths.remember(before);
        self.device.use_device(|slot| slot.change(&change, &desired.accepted))?;
        self.keys.applied();
        self.listen_port.set(Some(host.port));
        Ok(())
    }

    /// Tells the paths of a plan, or a device, that they do not follow yet.
    fn follow_plan(&mut self, planned: &Planned, capabilities: Capabilities, mtu: u32, now: Instant) {
        let follows = Some((self.planning.count, capabilities));
        if self.planning.followed == follows {
            return;
        }
        let Planned { inputs, host, desired, .. } = planned;
        let is_peer = |key: &PublicKey| desired.peers.contains_key(key) || desired.prepared.contains_key(key);
        self.paths.relay().set_users(host.port, is_peer);
        self.paths.relay().set_nat64(&desired.own_side.view.nat64);
        self.paths.set_peers(&desired.peers, capabilities, inputs.settings.relay.as_ref(), now);
        let since = self.paths.port().since(now);
        self.paths.port().with_agent(|agent| {
            agent.set_own_side(since, desired.own_side.clone());
            agent.set_mtu(mtu);
            agent.set_nat64(&desired.own_side.view.nat64.prefixes);
        });
        self.planning.followed = follows;
    }

    /// Leads packets into the device, into IP tunnels and past both.
    fn lead_packets(&mut self, planned: &Planned, now: Instant) -> Result<(), MeshFailure> {
        let Planned { inputs, host, desired, .. } = planned;
        let interface = self.device.interface();
        // Answers to what came out of the tunnel may leave by another link than the main table says.
        self.kernel.loosen_reverse_path_filter(&interface)?;
        for link in desired.traffic.plain_links() {
            self.kernel.loosen_reverse_path_filter(link)?;
        }
        self.encapsulation.apply(&mut self.kernel, desired, host.uplink_mtu(), now);
        if !inputs.settings.routing.bypasses_down_peers {
            self.down_peers.clear();
        }
        let bypassed = self.down_peers.bypassed();
        let encapsulated = self.encapsulation.routes(desired);
        let mut state =
            desired.mesh_state(&interface, bypassed, encapsulated, |key| self.paths.route_mtu(key));
        let tunnels = self.control_plane_tunnels(desired, now);
        state.bypass.control_plane.down = self.down_peers.observe_control_plane(now, &tunnels);
        self.down_peers.control_plane.clone_from(&state.bypass.control_plane.down);
        self.kernel.apply(&state)?;
        Ok(())
    }

    /// Leaves the mesh: removes the device and what leads packets into it, also what an earlier program left.
    ///
    /// # Errors
    /// The kernel refuses something. The next call goes on from there.
    pub fn disable(&mut self) -> Result<(), MeshFailure> {
        self.planning.last = None;
        self.granularity = GranularityChange::default();
        self.planning.planner = Planner::default();
        self.listen_port.set(None);
        self.down_peers.clear();
        self.encapsulation = EncapsulationWatch::default();
        self.paths.clear(Instant::now());
        if let Some(open) = self.device.device.take() {
            open.device.delete()?;
        }
        Ok(self.kernel.remove()?)
    }

    /// Opens the device, unless it is open, reads it, and gives it the port of `host`, or the host the one that it has. Says whether the
    /// device had the port before.
    fn device_state(
        &mut self,
        inputs: &Inputs,
        host: &mut Host,
        mtu: u32,
        now: Instant,
    ) -> Result<(DeviceState, bool), MeshFailure> {
        let interface = &inputs.settings.device.interface;
        self.close_other_device(interface)?;
        let port = self.paths.port();
        let mut state =
            self.device.use_device(|slot| slot.open(&mut self.kernel, port, interface, mtu)?.state())?;
        let listened_on = state.listen_port;
        let wanted = WantedPort {
            port: host.port,
            is_of_node: inputs.own.port.is_some(),
            of_mesh: inputs.settings.device.port,
        };
        if let Some(open) = &self.device.device {
            host.port = self.listen_port.bring_up(wanted, &*open.device, &mut state, now)?;
        }
        Ok((state, listened_on == host.port))
    }

    /// The port on which this node listens; `None` before it listens on one.
    pub fn listen_port(&self) -> watch::Receiver<Option<u16>> {
        self.listen_port.subscribe()
    }

    /// A device of another name than the mesh resource says is removed: two cannot have one port. Packets to other nodes are
    /// dropped until the new one is there.
    fn close_other_device(&mut self, interface: &str) -> Result<(), MeshFailure> {
        match self.device.device.take() {
            Some(open) if open.device.interface() == interface => self.device.device = Some(open),
            Some(open) => open.device.delete()?,
            None if self.kernel.device()?.is_some_and(|present| present != interface) => {
                self.kernel.remove_device()?;
            }
            None => {}
        }
        Ok(())
    }

    /// Does what the paths need done. Reads the device only if it may. Returns a report if there is anything new in it.
    ///
    /// # Errors
    /// The device cannot be read or changed.
    pub fn wake_paths(&mut self, may_observe: bool, now: Instant) -> Result<Option<Report>, MeshFailure> {
        let woken = self.device.use_device(|slot| match &slot.device {
            Some(open) => self.paths.wake(&*open.device, may_observe, now),
            None => Ok(Woken::default()),
        })?;
        self.is_outdated |= woken.own_addresses_changed || woken.route_mtu_changed || woken.keepalive_changed;
        if woken.observed {
            self.observe_granularity(now);
        }
        let report = if woken.observed { self.report(now) } else { None };
        if let Some(report) = &report {
            self.watch_down_peers(report, now);
        }
        Ok(report)
    }

    /// Takes from a report which nodes are down. [`Self::reconcile`] then bypasses others.
    fn watch_down_peers(&mut self, report: &Report, now: Instant) {
        let planned = self.planning.last.as_ref();
        let tunnels = planned.map(|planned| self.control_plane_tunnels(&planned.desired, now));
        let down = self.down_peers.observe_control_plane(now, &tunnels.unwrap_or_default());
        self.is_outdated |= down != self.down_peers.control_plane;
        if self
            .planning
            .last
            .as_ref()
            .is_some_and(|planned| planned.inputs.settings.routing.bypasses_down_peers)
        {
            let states = report.peers.iter().map(|peer| (peer.public_key, peer.path.state));
            self.is_outdated |= self.down_peers.observe(now, &states.collect());
        }
    }

    /// Whether Peers may come to this node that are at another entry node now, or nodes with keys that they announced.
    pub fn is_standby(&self) -> bool {
        let mut planned = self.planning.last.iter().map(|planned| &planned.desired);
        planned.any(|desired| {
            !desired.prepared.is_empty() || desired.external.values().any(DesiredExternal::is_standby)
        })
    }

    /// Looks whether one has come, which [`Self::reconcile`] then takes up.
    ///
    /// # Errors
    /// The device cannot be read.
    pub fn watch_entries(&mut self, now: Instant) -> Result<(), MeshFailure> {
        let state = self
            .device
            .use_device(|slot| slot.device.as_ref().map(|open| open.device.state()).transpose())?;
        if let Some(state) = state {
            self.is_outdated |= self.observe_entries(&state, now) | self.observe_keys(&state);
        }
        Ok(())
    }

    /// Whether this node reaches others through gateways or IP tunnels.
    pub fn has_gateways(&self) -> bool {
        let has_any =
            |desired: &Desired| !(desired.gateways.used.is_empty() && desired.tunnels.ends.is_empty());
        self.planning.last.as_ref().is_some_and(|planned| has_any(&planned.desired))
    }

    /// Asks whether gateways forward and nodes answer through IP tunnels. [`Self::reconcile`] then uses other ways.
    pub fn watch_gateways(&mut self, now: Instant) {
        if let Some(Planned { desired, .. }) = self.planning.last.as_deref() {
            let backend = self.device.device.as_ref().map(|open| open.device.backend());
            self.is_outdated |= self.gateways.observe(desired, &self.paths, backend, now);
            self.is_outdated |= self.encapsulation.observe(&desired.tunnels, now);
        }
    }

    fn observe_entries(&mut self, state: &DeviceState, now: Instant) -> bool {
        let Some(Planned { desired, .. }) = self.planning.last.as_deref() else { return false };
        self.entries.observe(&desired.external, state, now)
    }

    /// Looks whether the tunnels are up that the next granularity needs; what it needs is accepted already.
    fn observe_granularity(&mut self, now: Instant) {
        let Some(Planned { desired, .. }) = self.planning.last.as_deref() else { return };
        let is_up = |key| self.paths.status(key, now).is_some_and(|(status, _)| status.state == State::Up);
        let are_up = desired.added.iter().all(is_up);
        self.granularity.observe(are_up, now);
        self.is_outdated |= self.granularity.is_over(now);
    }

    fn observe_keys(&mut self, state: &DeviceState) -> bool {
        let Some(Planned { desired, .. }) = self.planning.last.as_deref() else { return false };
        self.keys.observe(desired, state)
    }

    /// Whether the paths found something that [`Self::reconcile`] has to take up.
    pub fn is_outdated(&self) -> bool {
        self.is_outdated
    }

    /// Number of plans so far.
    #[cfg(test)]
    pub(crate) fn plans(&self) -> usize {
        self.planning.count
    }

    /// The WireGuard port as the paths use it.
    pub fn path_port(&self) -> Arc<PathPort> {
        Arc::clone(self.paths.port())
    }

    /// The device, for the program that follows this one.
    pub fn into_device(self) -> DeviceSlot {
        self.device
    }

    /// Plans anew if anything changed that the plan follows from.
    fn plan(
        &mut self,
        inputs: &Arc<Inputs>,
        host: Host,
        own_addresses: OwnAddresses,
        present: &BTreeMap<PublicKey, PeerState>,
        now: Instant,
    ) -> Arc<Planned> {
        let settings = &inputs.settings;
        let other = self.granularity.follow(
            settings.locations.granularity,
            settings.locations.topology.granularity,
            now,
        );
        let is_known = |last: &Planned| {
            last.inputs == *inputs
                && (&last.host, &last.own_addresses) == (&host, &own_addresses)
                && last.entry_terms == *self.entries.terms()
                && last.down == self.gateways.down()
                && (last.other, &last.completed) == (other, self.keys.completed())
        };
        if let Some(planned) = self.planning.last.as_ref().filter(|planned| is_known(planned)) {
            return Arc::clone(planned);
        }
        self.planning.count = self.planning.count.saturating_add(1);
        self.keys.follow(self.planning.last.as_ref().map(|planned| &planned.desired), &inputs.members);
        let completed = self.keys.completed().clone();
        let entry_terms = self.entries.terms().clone();
        let prefixes = self.keys.held(present);
        let down = self.gateways.down();
        let held = Held {
            prefixes,
            entry_terms: entry_terms.clone(),
            down: down.clone(),
            completed: completed.clone(),
            other,
        };
        let before = self.planning.last.as_ref().map(|planned| (&*planned.inputs, &planned.desired));
        let planner = &mut self.planning.planner;
        let desired = Desired::following(before, planner, inputs, &host, held, &own_addresses);
        self.nat = self.nat.updated(desired.nat);
        let planned = Arc::new(Planned {
            inputs: Arc::clone(inputs),
            host,
            own_addresses,
            entry_terms,
            down,
            completed,
            other,
            desired,
        });
        self.planning.last = Some(Arc::clone(&planned));
        planned
    }

    /// Tells the paths whom to ask where this node is, and returns what is known; `None` where the port gives no access.
    fn ask_stun_servers(
        &mut self,
        inputs: &Inputs,
        host: &Host,
        is_listening: bool,
        now: Instant,
    ) -> StunAnswers {
        let has_socket = self.device.has_path_socket();
        let servers =
            if has_socket && is_listening { desired::stun_servers(inputs, host) } else { Vec::new() };
        self.paths.set_stun_servers(&servers, now);
        if self.planning.last.as_ref().is_some_and(|last| last.host != *host) {
            self.paths.network_changed(now);
        }
        has_socket.then(|| self.paths.stun_answers())
    }
}

#[cfg(test)]
mod tests;
