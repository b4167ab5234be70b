//! The kernel as the mesh uses it: one trait, so that tests can put another in its place.

use fairlead_dataplane::mesh::{self, Applied, MeshState};
use fairlead_dataplane::uplink::{self, HostNetwork, SysctlError};
use fairlead_dataplane::wireguard::{self, Settings, WireGuardDevice};
use fairlead_netlink::Result;

/// Reads and changes the network of this host. All calls block.
pub trait Kernel: Send + 'static {
    /// Makes packets to the other nodes enter the mesh; sends nothing when everything is in place.
    ///
    /// # Errors
    /// See [`mesh::apply`].
    fn apply(&mut self, state: &MeshState) -> Result<Applied>;

    /// Lets answers in that came by another link than the main table would use.
    ///
    /// # Errors
    /// The switch cannot be written.
    fn loosen_reverse_path_filter(&mut self, interface: &str) -> std::result::Result<(), SysctlError>;

    /// Links, addresses and main routes.
    ///
    /// # Errors
    /// The kernel refuses.
    fn network(&mut self) -> Result<HostNetwork>;

    /// Adopts or creates the WireGuard device.
    ///
    /// # Errors
    /// See [`wireguard::open`].
    fn open(
        &mut self,
        settings: &Settings,
    ) -> std::result::Result<Box<dyn WireGuardDevice>, wireguard::Error>;
}

/// The kernel this program runs on.
pub struct HostKernel;

impl Kernel for HostKernel {
    fn apply(&mut self, state: &MeshState) -> Result<Applied> {
        mesh::apply(state)
    }

    fn loosen_reverse_path_filter(&mut self, interface: &str) -> std::result::Result<(), SysctlError> {
        uplink::loosen_reverse_path_filter(interface).map(|_changed| ())
    }

    fn network(&mut self) -> Result<HostNetwork> {
        HostNetwork::read()
    }

    fn open(
        &mut self,
        settings: &Settings,
    ) -> std::result::Result<Box<dyn WireGuardDevice>, wireguard::Error> {
        wireguard::open(settings)
    }
}
