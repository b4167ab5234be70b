//! The WireGuard device of the mesh, which is opened when it is needed.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_dataplane::wireguard::{
    self, Backend, PathSocketFailure, PathSocketHealth, PendingHandover, PortAccess, Preference,
    WireGuardDevice,
};
use fairlead_keys::{DeviceChange, DeviceState, PublicKey};
use ipnet::IpNet;

use crate::apply::kernel::Kernel;
use crate::apply::path_port::{AttachedSocket, PathPort};
use crate::model::problem::MeshProblem;

/// Reason why the embedded WireGuard is needed. A device that is there does not tell whether the kernel has WireGuard too.
const SEVERAL_GATEWAYS: &str =
    "tunnels with several gateways of a location need it, whether or not the kernel has WireGuard";

/// Pause between checks whether the embedded WireGuard can be started. They cost no tunnel.
const RETRY: Duration = Duration::from_secs(60);
/// Pause after the embedded WireGuard could not be started although a check had passed: such an attempt costs the tunnels.
const RETRY_WITH_LOSS: Duration = Duration::from_secs(3600);

/// The place of the WireGuard device.
pub struct DeviceSlot {
    preference: Preference,
    /// Path of the socket over which one program hands the device inside of its process to the next.
    handover: PathBuf,
    pub(super) device: Option<OpenDevice>,
    refusal: Option<Refusal>,
}

/// Last failure of the embedded WireGuard to take the place of the kernel's, and the time of the next attempt.
struct Refusal {
    reason: String,
    again: Instant,
}

/// Number of gateways of one location with which this node has tunnels, as far as it decides on the implementation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gateways {
    /// At most one gateway of each location.
    Single,
    /// Several of a location. The kernel's WireGuard takes packets of the location from one of them only.
    Several,
}

/// Whether the embedded WireGuard is to take the place of the device. There is no way back while the device exists, so changes of
/// gateways cost the tunnels once at most.
fn changes_over(preference: Preference, present: Backend, gateways: Gateways) -> bool {
    preference == Preference::Auto && present == Backend::Kernel && gateways == Gateways::Several
}

/// The device, and the MTU it was opened with.
pub(super) struct OpenDevice {
    /// Past WireGuard on its port. Before the device, because it keeps the port open.
    path_socket: Option<AttachedSocket>,
    pub(super) device: Box<dyn WireGuardDevice>,
    pub(super) mtu: u32,
    /// The path socket works in an address family.
    can_probe: bool,
    /// Way in which the path socket shares the port; `None` before it is known, and where no probes can be sent.
    pub(super) port_access: Option<PortAccess>,
    /// Reasons why probes cannot be sent, for each address family.
    pub(super) problems: Vec<MeshProblem>,
    accepted: Accepted,
}

/// Prefixes that each peer may send from, besides its allowed addresses.
type Accepted = BTreeMap<PublicKey, Vec<IpNet>>;

impl OpenDevice {
    fn accept(&mut self, prefixes: &Accepted) -> Result<(), wireguard::Error> {
        if self.accepted != *prefixes {
            self.device.accept(prefixes)?;
            self.accepted.clone_from(prefixes);
        }
        Ok(())
    }
}

/// Union of both.
fn either(one: &Accepted, other: &Accepted) -> Accepted {
    let mut prefixes: BTreeMap<PublicKey, BTreeSet<IpNet>> = BTreeMap::new();
    for (key, more) in one.iter().chain(other) {
        prefixes.entry(*key).or_default().extend(more);
    }
    prefixes.into_iter().map(|(key, prefixes)| (key, prefixes.into_iter().collect())).collect()
}

impl DeviceSlot {
    /// Creates a place without a device. `handover` is the socket at which a device of another process may be waiting, and this one will.
    pub fn new(preference: Preference, handover: PathBuf) -> Self {
        Self { preference, handover, device: None, refusal: None }
    }

    /// Gets ready to hand the device to the next program. `None` when there is nothing to hand over.
    ///
    /// # Errors
    /// The device cannot be handed over: the next program starts it anew.
    pub fn hand_over(self) -> Result<Option<PendingHandover>, wireguard::Error> {
        let Some(OpenDevice { path_socket, device, .. }) = self.device else { return Ok(None) };
        drop(path_socket);
        device.hand_over(self.handover)
    }

    /// Changes the device, and lets peers send from the prefixes of `accepted` besides those that the change gives them.
    ///
    /// A prefix that moves from one gateway to another is taken from the former, which may still send from it. So the prefixes that are
    /// accepted before and after the change are accepted during it.
    pub(super) fn change(
        &mut self,
        change: &DeviceChange,
        accepted: &Accepted,
    ) -> Result<(), wireguard::Error> {
        let Some(open) = &mut self.device else { return Ok(()) };
        if change.is_empty() {
            return open.accept(accepted);
        }
        open.accept(&either(&open.accepted, accepted))?;
        open.device.change(change)?;
        open.accept(accepted)
    }

    pub(super) fn has_path_socket(&self) -> bool {
        self.device.as_ref().is_some_and(|open| open.can_probe)
    }

    /// Mends the path socket where other programs changed what it needs.
    pub(super) fn maintain_path_socket(&mut self, port: &PathPort) {
        let Some(open) = &mut self.device else { return };
        let Some(PathSocketHealth { access, families, failures }) = port.maintain_socket() else { return };
        let problem = |PathSocketFailure { family, reason }| MeshProblem::PathProbesUnavailable {
            family: Some(family),
            reason,
        };
        let problems: Vec<MeshProblem> = failures.into_iter().map(problem).collect();
        problems.iter().filter(|problem| !open.problems.contains(problem)).for_each(|problem| {
            tracing::warn!(interface = open.device.interface(), reason = problem.reason(), "{problem}");
        });
        open.problems = problems;
        open.can_probe = !families.is_empty();
        open.port_access = Some(access).filter(|_| open.can_probe);
    }

    /// Empty without a device.
    pub(super) fn interface(&self) -> String {
        self.device.as_ref().map(|open| open.device.interface().to_owned()).unwrap_or_default()
    }

    /// After an error the device is closed: another program may have removed it, and the next call opens it again.
    pub(super) fn use_device<T>(
        &mut self,
        work: impl FnOnce(&mut Self) -> Result<T, wireguard::Error>,
    ) -> Result<T, wireguard::Error> {
        let outcome = work(self);
        if outcome.is_err() {
            self.device = None;
        }
        outcome
    }

    /// The device, opened again when it is to have another MTU.
    pub(super) fn open(
        &mut self,
        kernel: &mut impl Kernel,
        port: &Arc<PathPort>,
        interface: &str,
        mtu: u32,
    ) -> Result<&dyn WireGuardDevice, wireguard::Error> {
        let settings = self.settings(interface, mtu);
        let open = match self.device.take() {
            Some(open) if open.mtu == mtu => open,
            Some(former) => self.reopen(kernel, port, former, settings)?,
            None => self.open_anew(kernel, port, settings)?,
        };
        Ok(&*self.device.insert(open).device)
    }

    /// Lets the embedded WireGuard take the place of the kernel's where that cannot do what is asked for: with the same name, key,
    /// port, peers and endpoints, `before`. Returns its state; `None` where the device stays, also because the embedded one cannot be started.
    ///
    /// # Errors
    /// The kernel's cannot be removed, or the embedded one not be made although it seemed so. The next [`Self::open`] makes one.
    pub(super) fn change_over(
        &mut self,
        kernel: &mut impl Kernel,
        port: &Arc<PathPort>,
        gateways: Gateways,
        before: &DeviceState,
        now: Instant,
    ) -> Result<Option<DeviceState>, wireguard::Error> {
        if !self.is_due(gateways, now) {
            return Ok(None);
        }
        if let Err(error) = kernel.check_embedded() {
            tracing::error!(%error, "the embedded WireGuard cannot take the place of the kernel's, which stays");
            self.refuse(&error, now, RETRY);
            return Ok(None);
        }
        let Some(OpenDevice { path_socket, device, mtu, .. }) = self.device.take() else { return Ok(None) };
        let began = Instant::now();
        let settings = wireguard::Settings {
            preference: Preference::Embedded,
            ..self.settings(device.interface(), mtu)
        };
        let change = copy_of(before);
        drop(path_socket);
        device.delete()?;
        let opened = self.open_anew(kernel, port, settings);
        let open = opened.inspect_err(|error| self.refuse(error, now, RETRY_WITH_LOSS))?;
        open.device.change(&change)?;
        let state = open.device.state()?;
        self.refusal = None;
        tracing::info!(
            interface = open.device.interface(),
            took = ?began.elapsed(),
            "the embedded WireGuard took the place of the kernel's: this node has tunnels with several gateways of a location"
        );
        self.device = Some(open);
        Ok(Some(state))
    }

    /// The device with other settings. The embedded one begins anew: with the peers, endpoints and prefixes of the former, so that only its
    /// sessions are lost.
    fn reopen(
        &self,
        kernel: &mut impl Kernel,
        port: &Arc<PathPort>,
        former: OpenDevice,
        settings: wireguard::Settings,
    ) -> Result<OpenDevice, wireguard::Error> {
        let state = former.device.state();
        let accepted = former.accepted.clone();
        drop(former);
        let mut open = self.open_anew(kernel, port, settings)?;
        let is_new = open.device.state()?.peers.is_empty();
        if let Some(state) = state.ok().filter(|_| is_new) {
            open.accept(&accepted)?;
            open.device.change(&copy_of(&state))?;
        }
        Ok(open)
    }

    fn is_due(&self, gateways: Gateways, now: Instant) -> bool {
        let rests = self.refusal.as_ref().is_some_and(|refusal| now < refusal.again);
        let changes =
            |open: &OpenDevice| changes_over(self.preference, open.device.backend(), gateways) && !rests;
        self.device.as_ref().is_some_and(changes)
    }

    fn refuse(&mut self, error: &wireguard::Error, now: Instant, rest: Duration) {
        self.refusal = Some(Refusal { reason: error.to_string(), again: now + rest });
    }

    /// Reason why the device has to be embedded; `None` where it need not be, or an administrator chose it.
    pub(super) fn reason(&self, gateways: Gateways) -> Option<&'static str> {
        let is_embedded = self.device.as_ref()?.device.backend() == Backend::Embedded;
        let is_chosen = is_embedded && self.preference == Preference::Auto && gateways == Gateways::Several;
        is_chosen.then_some(SEVERAL_GATEWAYS)
    }

    /// Reason why the kernel's WireGuard stays although [`Gateways::Several`] need the embedded one; `None` where nothing keeps it.
    pub(super) fn refusal(&self) -> Option<&str> {
        self.refusal.as_ref().map(|refusal| refusal.reason.as_str())
    }

    fn settings(&self, interface: &str, mtu: u32) -> wireguard::Settings {
        let handover_socket = Some(self.handover.clone());
        let interface = interface.to_owned();
        wireguard::Settings { interface, mtu, preference: self.preference, handover_socket }
    }

    fn open_anew(
        &self,
        kernel: &mut impl Kernel,
        port: &Arc<PathPort>,
        settings: wireguard::Settings,
    ) -> Result<OpenDevice, wireguard::Error> {
        let device = kernel.open(&settings)?;
        // Without it the mesh works, but asks no STUN server and probes no peer.
        let (path_socket, problems) = match device.open_path_socket() {
            Ok(socket) => (socket, Vec::new()),
            Err(error) => {
                tracing::warn!(%error, "cannot open the path socket of the WireGuard device");
                let reason = error.to_string();
                (None, vec![MeshProblem::PathProbesUnavailable { family: None, reason }])
            }
        };
        Ok(OpenDevice {
            can_probe: path_socket.is_some(),
            path_socket: path_socket.map(|socket| port.attach(socket)),
            device,
            mtu: settings.mtu,
            port_access: None,
            problems,
            accepted: BTreeMap::new(),
        })
    }
}

/// Change that makes a new device the same as this one.
fn copy_of(device: &DeviceState) -> DeviceChange {
    DeviceChange {
        private_key: device.private_key.clone(),
        listen_port: Some(device.listen_port).filter(|port| *port != 0),
        fwmark: Some(device.fwmark),
        set_peers: device.peers.iter().map(|(key, peer)| (*key, peer.config.clone())).collect(),
        ..DeviceChange::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_kernel_s_with_several_gateways_is_replaced_and_only_where_the_choice_is_free() {
        use Backend::{Embedded, Kernel};
        use Gateways::{Several, Single};
        assert!(changes_over(Preference::Auto, Kernel, Several));
        for (preference, present, gateways) in [
            (Preference::Auto, Kernel, Single),
            (Preference::Auto, Embedded, Several),
            (Preference::Auto, Embedded, Single),
            (Preference::Embedded, Embedded, Several),
            (Preference::Kernel, Kernel, Several),
        ] {
            let changes = changes_over(preference, present, gateways);
            assert!(!changes, "{preference:?} {present:?} {gateways:?}");
        }
    }
}
