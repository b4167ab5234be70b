//! The kernel as the mesh uses it: one trait, so that tests can put another in its place.

use std::net::IpAddr;

use fairlead_dataplane::encapsulation::{self, Encapsulation, Tunnels};
use fairlead_dataplane::forwarding::ForwardingProblem;
use fairlead_dataplane::mesh::{self, Applier, Foreign, Guarded, MeshState};
use fairlead_dataplane::nft_table::Applied;
use fairlead_dataplane::uplink::{self, HostNetwork, SysctlError};
use fairlead_dataplane::wireguard::{self, Settings, WireGuardDevice};
use fairlead_netlink::Result;

/// Reads and changes the network of this host. All calls block.
pub trait Kernel: Send + 'static {
    /// Makes packets to the other nodes enter the mesh; sends nothing when everything is in place.
    ///
    /// # Errors
    /// See [`Applier::apply`].
    fn apply(&mut self, state: &MeshState) -> Result<Applied>;

    /// Problems with forwarded packets that firewalls of this host drop, as of the last [`Self::apply`].
    fn forwarding_problems(&self) -> Vec<ForwardingProblem>;

    /// Packets for the mesh that were about to leave outside of it, and were dropped, as of the last [`Self::apply`].
    fn guarded(&self) -> Guarded;

    /// Rules of other programs that work against the mesh, as of the last [`Self::apply`].
    fn foreign(&self) -> Vec<Foreign>;

    /// Description of an object of another program that has the same numbers; `None` if they are free or ours. `interface` is the name of
    /// our device.
    ///
    /// # Errors
    /// See [`mesh::numbers::taken`].
    fn numbers_taken(&mut self, interface: &str) -> Result<Option<String>>;

    /// Name of the device that packets were led into last, also by an earlier program.
    ///
    /// # Errors
    /// See [`mesh::device`].
    fn device(&mut self) -> Result<Option<String>>;

    /// Removes that device.
    ///
    /// # Errors
    /// See [`mesh::remove_device`].
    fn remove_device(&mut self) -> Result<()>;

    /// Takes away what [`Self::apply`] and [`Self::encapsulate`] made, the device included.
    ///
    /// # Errors
    /// See [`mesh::remove`].
    fn remove(&mut self) -> Result<()>;

    /// Makes the IP tunnels inside of the location what they should be; sends nothing when everything is in place.
    ///
    /// # Errors
    /// See [`encapsulation::Applier::apply`].
    fn encapsulate(&mut self, wanted: &Encapsulation) -> Result<Tunnels>;

    /// The ends of tunnels in use, also by an earlier program.
    ///
    /// # Errors
    /// See [`encapsulation::remotes_in_use`].
    fn tunnel_remotes(&mut self) -> Result<Vec<IpAddr>>;

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

    /// Whether an embedded device could be made beside the one that is there.
    ///
    /// # Errors
    /// See [`wireguard::check_embedded`].
    fn check_embedded(&self) -> std::result::Result<(), wireguard::Error>;
}

/// The kernel this program runs on.
pub struct HostKernel {
    mesh: Applier,
    encapsulation: encapsulation::Applier,
}

impl HostKernel {
    /// The kernel of a node that has routes to its pods in this table.
    pub fn new(table_pods: u32) -> Self {
        Self { mesh: Applier::beside_pods(table_pods), encapsulation: encapsulation::Applier::default() }
    }
}

impl Kernel for HostKernel {
    fn apply(&mut self, state: &MeshState) -> Result<Applied> {
        self.mesh.apply(state)
    }

    fn forwarding_problems(&self) -> Vec<ForwardingProblem> {
        self.mesh.forwarding().problems.clone()
    }

    fn guarded(&self) -> Guarded {
        self.mesh.guarded().clone()
    }

    fn foreign(&self) -> Vec<Foreign> {
        self.mesh.foreign()
    }

    fn numbers_taken(&mut self, interface: &str) -> Result<Option<String>> {
        mesh::numbers::taken(interface)
    }

    fn device(&mut self) -> Result<Option<String>> {
        mesh::device()
    }

    fn remove_device(&mut self) -> Result<()> {
        mesh::remove_device()
    }

    fn remove(&mut self) -> Result<()> {
        mesh::remove()?;
        self.encapsulate(&Encapsulation::default()).map(drop)
    }

    fn encapsulate(&mut self, wanted: &Encapsulation) -> Result<Tunnels> {
        self.encapsulation.apply(wanted)
    }

    fn tunnel_remotes(&mut self) -> Result<Vec<IpAddr>> {
        encapsulation::remotes_in_use()
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

    fn check_embedded(&self) -> std::result::Result<(), wireguard::Error> {
        wireguard::check_embedded()
    }
}
