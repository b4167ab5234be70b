//! The WireGuard device of the mesh, which is opened when it is needed.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use fairlead_api::wireguard::PublicKey;
use fairlead_dataplane::wireguard::{
    self, PathSocketFailure, PathSocketHealth, PendingHandover, PortAccess, Preference, WireGuardDevice,
};
use ipnet::IpNet;

use crate::mesh::kernel::Kernel;
use crate::mesh::path_port::{AttachedSocket, PathPort};
use crate::mesh::problem::MeshProblem;

/// The place of the WireGuard device.
pub struct DeviceSlot {
    preference: Preference,
    /// Where devices inside processes are handed from one program to the next.
    handover: PathBuf,
    pub(super) device: Option<OpenDevice>,
}

/// The device, and the MTU it was opened with.
pub(super) struct OpenDevice {
    /// Past WireGuard on its port. Before the device, because it keeps the port open.
    path_socket: Option<AttachedSocket>,
    pub(super) device: Box<dyn WireGuardDevice>,
    pub(super) mtu: u32,
    /// The path socket works in an address family.
    can_probe: bool,
    /// How the path socket shares the port, once that is known.
    pub(super) port_access: Option<PortAccess>,
    /// Why it does not.
    pub(super) problems: Vec<MeshProblem>,
    /// What peers may send from besides what they are sent for.
    accepted: BTreeMap<PublicKey, Vec<IpNet>>,
}

impl DeviceSlot {
    /// Without a device. `handover` is where a device of another process may be waiting, and where this one will.
    pub fn new(preference: Preference, handover: PathBuf) -> Self {
        Self { preference, handover, device: None }
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

    /// Lets peers send from these prefixes too.
    pub(super) fn accept(
        &mut self,
        prefixes: &BTreeMap<PublicKey, Vec<IpNet>>,
    ) -> Result<(), wireguard::Error> {
        let Some(open) = self.device.as_mut().filter(|open| open.accepted != *prefixes) else {
            return Ok(());
        };
        open.device.accept(prefixes)?;
        open.accepted.clone_from(prefixes);
        Ok(())
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
        let open = match self.device.take().filter(|open| open.mtu == mtu) {
            Some(open) => open,
            None => {
                let (preference, handover_socket) = (self.preference, Some(self.handover.clone()));
                let interface = interface.to_owned();
                let settings = wireguard::Settings { interface, mtu, preference, handover_socket };
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
                let can_probe = path_socket.is_some();
                let path_socket = path_socket.map(|socket| port.attach(socket));
                let (port_access, accepted) = (None, BTreeMap::new());
                OpenDevice { path_socket, device, mtu, can_probe, port_access, problems, accepted }
            }
        };
        Ok(&*self.device.insert(open).device)
    }
}
