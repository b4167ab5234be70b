//! The settings of the node program.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use fairlead_cluster::http::MetricsAddress;
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_dataplane::wireguard::Preference;
use fairlead_egress_client::EgressSwitches;

use super::standalone::Standalone;

/// Implementation of WireGuard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WireGuardChoice {
    /// The kernel's if it has one, else the embedded one; at a node with tunnels with several gateways of a location the embedded one.
    Auto,
    /// The kernel's, or none.
    Kernel,
    /// The embedded one.
    Embedded,
}

impl From<WireGuardChoice> for Preference {
    fn from(choice: WireGuardChoice) -> Self {
        match choice {
            WireGuardChoice::Auto => Self::Auto,
            WireGuardChoice::Kernel => Self::Kernel,
            WireGuardChoice::Embedded => Self::Embedded,
        }
    }
}

/// Source of the objects that the program follows.
pub enum Access {
    /// At an API server.
    Cluster(Box<kube::Config>),
    /// On its own node: there is no Kubernetes.
    Standalone(Box<Standalone>),
}

/// Settings of the node program.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Name of this node's Node object.
    pub node: String,
    /// Socket for the CNI plugin and the command line.
    pub socket: PathBuf,
    /// Directory of the key file.
    pub state_dir: PathBuf,
    /// Listening address of metrics, and who may read them.
    pub metrics: MetricsAddress,
    /// Listening address of health.
    pub health: SocketAddr,
    /// Whether to allocate addresses and create interfaces; otherwise another plugin does before this one is called.
    pub enable_ipam: bool,
    /// Features of egress gateways that pods have.
    pub egress: EgressSwitches,
    /// Time for which a block must have been empty before it is released.
    pub block_grace: Duration,
    /// Implementation of WireGuard.
    pub wireguard: WireGuardChoice,
    /// A file with members of the mesh.
    pub peers: Option<PathBuf>,
    /// Whether to keep plain routes to the blocks of nodes on the same network.
    pub router: bool,
    /// Table and protocol numbers of the routes of pods and blocks in the kernel.
    pub numbers: RoutingIds,
    /// Whether links of pods have the names that Calico's policy program expects.
    pub calico_names: bool,
    /// Whether peers of the mesh have metrics of their own.
    pub metrics_per_peer: bool,
    /// Whether to empty the export table at the end if the Node object was deleted.
    pub clear_routes_on_shutdown: bool,
}
