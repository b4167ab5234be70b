//! Arguments of `fairlead node`.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use fairlead_api::names::NODE_SOCKET;
use fairlead_cli::arguments::value_parsers::{duration, listen_address};
use fairlead_node::WireGuardChoice;

use super::standalone::StandaloneArguments;
use crate::coil_compat::{IgnoredEgressArguments, IgnoredLoggingArguments, RoutingArguments};

#[derive(Debug, Args)]
pub(crate) struct NodeArguments {
    /// Name of this node's Node object
    #[arg(long, value_name = "NAME", env = "COIL_NODE_NAME")]
    pub(crate) node_name: String,
    /// Listen on this UNIX socket for the CNI plugin and the command line
    #[arg(long, value_name = "PATH", default_value = NODE_SOCKET)]
    pub(crate) socket: PathBuf,
    /// Directory of this node's WireGuard private key
    #[arg(long, value_name = "DIRECTORY", default_value = "/var/lib/fairlead", env = "FAIRLEAD_STATE_DIR")]
    pub(crate) state_dir: PathBuf,
    /// Serve Prometheus metrics on this address; port 0 serves none
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:9384", value_parser = listen_address)]
    pub(crate) metrics_addr: SocketAddr,
    /// Serve metrics with TLS, and only for tokens that the API server allows to `get` /metrics
    #[arg(long, env = "FAIRLEAD_METRICS_SECURE", value_name = "BOOL", default_value = "false",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) metrics_secure: bool,
    /// Serve /healthz and /readyz on this address
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:9385", value_parser = listen_address)]
    pub(crate) health_addr: SocketAddr,
    /// Allocate pod addresses and create pod interfaces; if false, another CNI plugin does: alone, or with this one chained after it
    #[arg(long, value_name = "BOOL", default_value = "true",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) enable_ipam: bool,
    /// Set up egress gateways for pods; if false, pods that ask for them do not start. This and IPAM cannot both be off
    #[arg(long, value_name = "BOOL", default_value = "true",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) enable_egress: bool,
    /// Connections that others open to pods are answered without egress gateways, unless an Egress says spec.originatingOnly
    #[arg(long, value_name = "BOOL", default_value = "false",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) enable_originating_only: bool,
    /// Release an address block after it has been empty for this long, such as 1m or 1h30m
    #[arg(long, default_value = "1m", value_name = "DURATION", value_parser = duration)]
    pub(crate) addressblock_gc_interval: Duration,
    /// WireGuard implementation
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) wireguard: WireGuard,
    /// Members of the mesh that neither the API server nor a discovery service has to tell of (YAML or JSON), read again when it changes
    #[arg(long, value_name = "FILE", env = "FAIRLEAD_PEERS")]
    pub(crate) peers: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) standalone: StandaloneArguments,
    #[command(flatten)]
    pub(crate) numbers: RoutingArguments,
    /// Name pod interfaces as Calico's Felix expects them (FELIX_INTERFACEPREFIX=veth)
    #[arg(long, value_name = "BOOL", default_value = "false",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) compat_calico: bool,
    #[command(flatten)]
    pub(crate) egress: IgnoredEgressArguments,
    #[command(flatten)]
    pub(crate) logging: IgnoredLoggingArguments,
    /// Install unencrypted routes to the pods of nodes on the same layer-2 network, instead of a mesh
    #[arg(long, env = "FAIRLEAD_ROUTER", value_name = "BOOL", default_value = "false",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) router: bool,
    /// Export metrics of each peer of the mesh (at most 100, those without a working tunnel first), or only their number
    #[arg(long, env = "FAIRLEAD_METRICS_PER_PEER", value_name = "BOOL", default_value = "true",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) metrics_per_peer: bool,
    /// On shutdown, clear the export table if the Node object has been deleted
    #[arg(long, env = "FAIRLEAD_CLEAR_ROUTES_ON_SHUTDOWN", value_name = "BOOL", default_value = "false",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) clear_routes_on_shutdown: bool,
}

impl NodeArguments {
    /// Names of the flags that were given and have no effect.
    pub(crate) fn without_effect(&self) -> Vec<&'static str> {
        let mut flags = self.logging.given();
        flags.extend(self.egress.given());
        flags
    }
}

/// WireGuard implementation.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum WireGuard {
    /// The kernel's if it has WireGuard, else the embedded one
    Auto,
    /// The kernel's; fail if it has none
    Kernel,
    /// The userspace implementation inside this program
    Embedded,
}

impl From<WireGuard> for WireGuardChoice {
    fn from(choice: WireGuard) -> Self {
        match choice {
            WireGuard::Auto => Self::Auto,
            WireGuard::Kernel => Self::Kernel,
            WireGuard::Embedded => Self::Embedded,
        }
    }
}
