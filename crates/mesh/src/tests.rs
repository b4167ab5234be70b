//! A kernel and a WireGuard device in memory, which record all calls. Everything else of the mesh is real.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use fairlead_address::IpFamily;
use fairlead_dataplane::encapsulation::{Encapsulation, Tunnels};
use fairlead_dataplane::forwarding::ForwardingProblem;
use fairlead_dataplane::mesh::{Foreign, Guarded, MeshState};
use fairlead_dataplane::nft_table::Applied;
use fairlead_dataplane::uplink::{HostNetwork, SysctlError};
use fairlead_dataplane::wireguard::{
    self, Backend, PathDatagram, PathSocket, PathSocketStats, PendingHandover, Preference, Settings,
    WireGuardDevice,
};
use fairlead_keys::{DeviceChange, DeviceState, PeerState, PrivateKey, PublicKey};
use fairlead_netlink::{Error, Result};
use fairlead_path::Identity;
use ipnet::IpNet;

use super::apply::kernel::Kernel;
use super::apply::paths::PathDriver;
use super::apply::relay::RelayView;
use super::plan::desired::tests::key;
use super::tell::metrics::time_to_direct;

/// State and record of a [`FakeKernel`].
#[derive(Default)]
pub(crate) struct Record {
    /// Names of devices that were opened.
    pub(crate) opened: Vec<String>,
    /// Changes of the device, one entry per batch.
    pub(crate) changes: Vec<DeviceChange>,
    /// Whether packets were led anywhere at the time of each change.
    pub(crate) led: Vec<bool>,
    /// States of nftables, rules and routes that differed from the one before.
    pub(crate) applied: Vec<MeshState>,
    /// Number of times these were compared.
    pub(crate) mesh_reads: usize,
    /// Links, addresses and routes of the host.
    pub(crate) network: HostNetwork,
    /// Number of dumps of links, addresses and routes.
    pub(crate) networks_read: usize,
    /// Number of reads of the device.
    pub(crate) states_read: usize,
    /// Names of devices that were deleted.
    pub(crate) deleted: Vec<String>,
    /// Number of times everything was removed.
    pub(crate) removals: usize,
    /// Name of the device; `None` when there is none.
    pub(crate) device: Option<String>,
    pub(crate) refuse_apply: bool,
    pub(crate) refuse_change: bool,
    pub(crate) numbers_taken: Option<String>,
    pub(crate) refuse_open: bool,
    /// A device that is opened is a new one.
    pub(crate) opens_anew: bool,
    /// UDP ports that other programs have.
    pub(crate) ports_taken: Vec<u16>,
    /// The device; `None` when there is none.
    pub(crate) state: Option<DeviceState>,
    /// nftables, rules and routes as they are.
    pub(crate) mesh: Option<MeshState>,
    /// Prefixes that peers may send from besides their allowed addresses.
    pub(crate) accepted: BTreeMap<PublicKey, Vec<IpNet>>,
    /// Prefixes that each peer could send from, after each step.
    pub(crate) senders: Vec<BTreeMap<PublicKey, BTreeSet<IpNet>>>,
    /// The IP tunnels that are wanted, and all that were after another.
    pub(crate) encapsulation: Encapsulation,
    pub(crate) encapsulations: Vec<Encapsulation>,
    /// Reason why there can be no tunnels.
    pub(crate) without_tunnels: Option<String>,
    /// The ends of tunnels that an earlier program used.
    pub(crate) tunnel_remotes: Vec<IpAddr>,
    /// Path socket of a device that is opened; `None` where it has none.
    pub(crate) path_socket: Option<FakePathSocket>,
    /// Problems of firewalls that drop forwarded packets.
    pub(crate) forwarding_problems: Vec<ForwardingProblem>,
    /// Packets that were dropped because they were about to leave outside of the mesh.
    pub(crate) guarded: Guarded,
    /// Rules of other programs that work against the mesh.
    pub(crate) foreign: Vec<Foreign>,
    /// Devices that are made are the kernel's unless the embedded one is asked for.
    pub(crate) has_wireguard: bool,
    /// The implementation of the device that is there.
    pub(crate) backend: Option<Backend>,
    /// The embedded WireGuard cannot be started.
    pub(crate) refuse_embedded: bool,
    /// Number of checks whether it can be started.
    pub(crate) checks: usize,
    /// Reason why this host sends nothing to any peer.
    pub(crate) send_error: Option<String>,
    /// Number of times that was asked.
    pub(crate) send_errors_read: usize,
}

/// Index of the links of tunnels.
pub(crate) const TUNNEL: u32 = 99;

pub(crate) type Shared = Arc<Mutex<Record>>;

impl Record {
    /// Begins to count anew; the kernel stays as it is.
    pub(crate) fn forget(&mut self) {
        let (state, mesh, device) = (self.state.take(), self.mesh.take(), self.device.take());
        let path_socket = self.path_socket.take();
        let encapsulation = std::mem::take(&mut self.encapsulation);
        let (network, has_wireguard) = (std::mem::take(&mut self.network), self.has_wireguard);
        let ports_taken = std::mem::take(&mut self.ports_taken);
        *self = Self {
            state,
            mesh,
            device,
            path_socket,
            encapsulation,
            network,
            has_wireguard,
            backend: self.backend,
            ports_taken,
            ..Self::default()
        };
    }

    /// As `ip link delete` does.
    pub(crate) fn remove_device(&mut self) {
        (self.state, self.backend) = (None, None);
    }

    fn note_senders(&mut self) {
        let mut senders: BTreeMap<PublicKey, BTreeSet<IpNet>> = BTreeMap::new();
        let allowed = self.state.iter().flat_map(|state| &state.peers);
        let allowed = allowed.map(|(key, peer)| (key, &peer.config.allowed_ips));
        for (key, prefixes) in allowed.chain(&self.accepted) {
            senders.entry(*key).or_default().extend(prefixes);
        }
        self.senders.push(senders);
    }

    fn delete_device(&mut self) {
        self.deleted.extend(self.device.take());
        self.remove_device();
    }
}

/// A datagram and its destination.
type Sent = (SocketAddr, Vec<u8>);

/// The paths of a node with the private key of these tests.
pub(crate) fn paths() -> PathDriver {
    let identity = Identity { private_key: PrivateKey([8; 32]), public_key: key(1), epoch: [1; 16] };
    PathDriver::new(identity, 7, RelayView::new(None).0, time_to_direct(), Instant::now())
}

/// Queues instead of a port. Its descriptor is never readable.
#[derive(Clone)]
pub(crate) struct FakePathSocket {
    pub(crate) sent: Arc<Mutex<Vec<Sent>>>,
    pub(crate) received: Arc<Mutex<VecDeque<PathDatagram>>>,
    descriptor: Arc<UnixStream>,
}

impl Default for FakePathSocket {
    fn default() -> Self {
        let (descriptor, _) = UnixStream::pair().unwrap();
        Self { sent: Arc::default(), received: Arc::default(), descriptor: Arc::new(descriptor) }
    }
}

impl AsFd for FakePathSocket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor.as_fd()
    }
}

impl PathSocket for FakePathSocket {
    fn send(&self, _: Option<IpAddr>, remote: SocketAddr, payload: &[u8]) -> std::io::Result<()> {
        self.sent.lock().unwrap().push((remote, payload.to_vec()));
        Ok(())
    }

    fn try_receive(&self) -> Option<PathDatagram> {
        self.received.lock().unwrap().pop_front()
    }

    fn stats(&self) -> PathSocketStats {
        PathSocketStats::default()
    }
}

pub(crate) struct FakeKernel(pub(crate) Shared);

fn refused() -> Error {
    Error::Invalid { what: "change a fake kernel".to_owned(), reason: "the test says so".to_owned() }
}

impl Kernel for FakeKernel {
    fn apply(&mut self, state: &MeshState) -> Result<Applied> {
        let mut record = self.0.lock().unwrap();
        record.mesh_reads += 1;
        if record.refuse_apply {
            return Err(refused());
        }
        if record.mesh.as_ref() == Some(state) {
            return Ok(Applied::Unchanged);
        }
        record.mesh = Some(state.clone());
        record.applied.push(state.clone());
        Ok(Applied::Rebuilt)
    }

    fn forwarding_problems(&self) -> Vec<ForwardingProblem> {
        self.0.lock().unwrap().forwarding_problems.clone()
    }

    fn guarded(&self) -> Guarded {
        self.0.lock().unwrap().guarded.clone()
    }

    fn foreign(&self) -> Vec<Foreign> {
        self.0.lock().unwrap().foreign.clone()
    }

    fn numbers_taken(&mut self, _: &str) -> Result<Option<String>> {
        Ok(self.0.lock().unwrap().numbers_taken.clone())
    }

    fn device(&mut self) -> Result<Option<String>> {
        Ok(self.0.lock().unwrap().device.clone())
    }

    fn remove_device(&mut self) -> Result<()> {
        self.0.lock().unwrap().delete_device();
        Ok(())
    }

    fn remove(&mut self) -> Result<()> {
        let mut record = self.0.lock().unwrap();
        if record.refuse_apply {
            return Err(refused());
        }
        record.delete_device();
        record.mesh = None;
        record.encapsulation = Encapsulation::default();
        record.removals += 1;
        Ok(())
    }

    fn encapsulate(&mut self, wanted: &Encapsulation) -> Result<Tunnels> {
        let mut record = self.0.lock().unwrap();
        if record.encapsulation != *wanted {
            record.encapsulations.push(wanted.clone());
            record.encapsulation = wanted.clone();
        }
        let missing = record.without_tunnels.clone();
        let tunnel = |local: &IpAddr| (IpFamily::of(*local), missing.clone().map_or(Ok(TUNNEL), Err));
        Ok(wanted.local.iter().map(tunnel).collect())
    }

    fn tunnel_remotes(&mut self) -> Result<Vec<IpAddr>> {
        Ok(self.0.lock().unwrap().tunnel_remotes.clone())
    }

    fn loosen_reverse_path_filter(&mut self, _: &str) -> std::result::Result<(), SysctlError> {
        Ok(())
    }

    fn network(&mut self) -> Result<HostNetwork> {
        let mut record = self.0.lock().unwrap();
        record.networks_read += 1;
        Ok(record.network.clone())
    }

    fn open(
        &mut self,
        settings: &Settings,
    ) -> std::result::Result<Box<dyn WireGuardDevice>, wireguard::Error> {
        let mut record = self.0.lock().unwrap();
        if record.refuse_open {
            return Err(refused().into());
        }
        let made = if record.has_wireguard && settings.preference != Preference::Embedded {
            Backend::Kernel
        } else {
            Backend::Embedded
        };
        let backend = record.backend.unwrap_or(made);
        record.backend = Some(backend);
        record.opened.push(settings.interface.clone());
        record.device = Some(settings.interface.clone());
        if record.opens_anew {
            record.state = None;
        }
        record.state.get_or_insert_with(|| DeviceState {
            private_key: None,
            listen_port: 0,
            fwmark: 0,
            peers: Default::default(),
        });
        let interface = settings.interface.clone();
        Ok(Box::new(FakeDevice { interface, backend, record: Arc::clone(&self.0) }))
    }

    fn check_embedded(&self) -> std::result::Result<(), wireguard::Error> {
        let mut record = self.0.lock().unwrap();
        record.checks += 1;
        if record.refuse_embedded { Err(refused().into()) } else { Ok(()) }
    }
}

struct FakeDevice {
    interface: String,
    backend: Backend,
    record: Shared,
}

impl FakeDevice {
    fn vanished(&self) -> wireguard::Error {
        wireguard::Error::Vanished(self.interface.clone())
    }
}

impl WireGuardDevice for FakeDevice {
    fn backend(&self) -> Backend {
        self.backend
    }

    fn interface(&self) -> &str {
        &self.interface
    }

    fn state(&self) -> std::result::Result<DeviceState, wireguard::Error> {
        let mut record = self.record.lock().unwrap();
        record.states_read += 1;
        record.state.clone().ok_or_else(|| self.vanished())
    }

    fn change(&self, change: &DeviceChange) -> std::result::Result<(), wireguard::Error> {
        let mut record = self.record.lock().unwrap();
        let is_taken = change.listen_port.is_some_and(|port| record.ports_taken.contains(&port));
        if is_taken || record.refuse_change {
            return Err(refused().into());
        }
        let is_led = record.mesh.is_some();
        record.led.push(is_led);
        let Some(state) = &mut record.state else { return Err(self.vanished()) };
        state.private_key = change.private_key.clone().or(state.private_key.take());
        state.listen_port = change.listen_port.unwrap_or(state.listen_port);
        state.fwmark = change.fwmark.unwrap_or(state.fwmark);
        change.remove_peers.iter().for_each(|key| drop(state.peers.remove(key)));
        for (key, config) in &change.set_peers {
            let peer = PeerState { config: config.clone(), ..PeerState::default() };
            state.peers.insert(*key, peer);
        }
        record.changes.push(change.clone());
        record.note_senders();
        Ok(())
    }

    fn accept(
        &self,
        prefixes: &BTreeMap<PublicKey, Vec<IpNet>>,
    ) -> std::result::Result<(), wireguard::Error> {
        let mut record = self.record.lock().unwrap();
        record.accepted.clone_from(prefixes);
        record.note_senders();
        Ok(())
    }

    fn send_error(&self, _: &PublicKey) -> Option<String> {
        let mut record = self.record.lock().unwrap();
        record.send_errors_read += 1;
        record.send_error.clone()
    }

    fn open_path_socket(&self) -> std::io::Result<Option<Box<dyn PathSocket>>> {
        let socket = self.record.lock().unwrap().path_socket.clone();
        Ok(socket.map(|socket| Box::new(socket) as Box<dyn PathSocket>))
    }

    fn hand_over(
        self: Box<Self>,
        _: PathBuf,
    ) -> std::result::Result<Option<PendingHandover>, wireguard::Error> {
        Ok(None)
    }

    fn delete(self: Box<Self>) -> std::result::Result<(), wireguard::Error> {
        self.record.lock().unwrap().delete_device();
        Ok(())
    }
}
