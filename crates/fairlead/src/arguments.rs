//! The command line. Names, defaults and environment variables of the programs follow Coil's, so that the arguments in its
//! manifests keep working.

mod connect;
mod discovery;
mod egress;
mod peer;
mod peers;
mod queries;
mod relay;
mod standalone;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use fairlead_api::names::NODE_SOCKET;
use fairlead_node::WireGuardChoice;

use crate::coil_compat::{
    IgnoredEgressArguments, IgnoredLoggingArguments, IgnoredWebhookArguments, RoutingArguments,
};
use crate::install::{CleanupArguments, InstallArguments};

pub(crate) use queries::{
    ApiArguments, ConfigurationFormat, ConnectivityCommand, ConnectivityTest, EgressCommand, EgressExplain,
    EgressStatusArguments, EgressWho, GraphArguments, GraphOutput, IpamCheck, IpamCommand, IpamRelease,
    IpamShow, KeyCommand, KeyRotateArguments, NetcheckArguments, Output, PingArguments, ProbeArguments,
    Qualified, ServeArguments, StatusArguments,
};

pub(crate) use connect::{ConnectArguments, name as peer_name};
pub(crate) use discovery::{DiscoveryArguments, DiscoveryCommand, DiscoveryIdArguments};
pub(crate) use egress::{EgressControllerArguments, EgressGatewayArguments};
pub(crate) use peer::{PeerCommand, RevokeArguments};
pub(crate) use peers::{
    MachineArguments, PeerAdd, PeerList, PeerRemove, PeerShow, ShowconfArguments, ShowconfCommand,
};
pub(crate) use relay::RelayArguments;
pub(crate) use standalone::StandaloneArguments;

/// A Kubernetes network across clouds, homes and data centres.
#[derive(Debug, Parser)]
#[command(
    name = "fairlead",
    version,
    propagate_version = true,
    after_help = "Exit codes: 0 done, 1 failed, 2 invalid arguments, 3 a problem was found (status, egress status, ipam check, \
    connectivity test)."
)]
pub(crate) struct Arguments {
    /// Minimum log level
    #[arg(long, global = true, value_enum, default_value = "info", env = "FAIRLEAD_LOG_LEVEL")]
    pub(crate) log_level: LogLevel,
    /// Log format [default: text on a terminal, else json]
    #[arg(long, global = true, value_enum, env = "FAIRLEAD_LOG_FORMAT")]
    pub(crate) log_format: Option<LogFormat>,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Minimum level of lines that are logged.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

/// JSON for log collectors, text for terminals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Json,
    Text,
}

#[derive(Debug, Args)]
pub(crate) struct UninstallArguments {
    #[command(flatten)]
    pub(crate) api: ApiArguments,
    /// Remove everything; without this flag, only report what would be removed
    #[arg(long)]
    pub(crate) yes: bool,
    /// Timeout of each step, such as the clean-up of all nodes
    #[arg(long, default_value = "5m", value_name = "DURATION", value_parser = duration)]
    pub(crate) timeout: Duration,
    /// After the timeout, continue without the nodes that were not cleaned up
    #[arg(long)]
    pub(crate) skip_unreachable_nodes: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Remove Fairlead from this node: CNI plugin and configuration, links of pods, tunnels, rules, routes, tables, the key
    Cleanup(CleanupArguments),
    /// Run the node program: CNI server, IPAM, mesh
    Node(Box<NodeArguments>),
    /// Run the controller: address pools and blocks (replicas elect a leader)
    Controller(Box<ControllerArguments>),
    /// Show egress gateways and their client pods, and which way packets of a pod take
    Egress {
        #[command(subcommand)]
        command: EgressCommand,
    },
    /// Run the controller of egress gateways (replicas elect a leader)
    #[command(hide = true)]
    EgressController(Box<EgressControllerArguments>),
    /// Run a gateway of an Egress, in a pod of its own
    #[command(hide = true)]
    EgressGateway(Box<EgressGatewayArguments>),
    /// Connect this machine, which is not of the cluster, with pods, nodes and Services through a tunnel with a node
    #[command(
        after_help = "Run it as root on a laptop or a server outside of the cluster, with a kubeconfig: the kernel's WireGuard is used, or the one \
        inside of this program. It makes a Peer, a WireGuard device, addresses and routes, follows what changes in the cluster, and uses another \
        entry node when the one in use does not answer. SIGINT and SIGTERM undo all of it; --keep leaves the Peer. The rights that it needs \
        are in deploy/examples/connect.yaml. The resolver stays as it is; `fairlead peer show NAME` prints the DNS of the cluster.\n\n\
        Routes leave out what would cut the machine off: its routers, its networks, its name servers on them, the API server, and the address \
        that the tunnel goes to.\n\nExit codes: 0 disconnected by a signal, 1 failed, 2 invalid arguments."
    )]
    Connect(Box<ConnectArguments>),
    /// Test the network between pods, nodes and Services
    Connectivity {
        #[command(subcommand)]
        command: ConnectivityCommand,
    },
    /// Print the mesh as a graph: nodes, and which of them reach each other directly or through a relay
    #[command(
        after_help = "For a picture: fairlead graph | dot -Tsvg > mesh.svg (Graphviz). Relayed paths are dashed, nodes that do not reach \
        all others red. It shows what nodes publish: in a mesh of more than 100 others only paths that are not direct.\n\nExit codes: 0 \
        done, 1 query failed, 2 invalid arguments."
    )]
    Graph(GraphArguments),
    /// Install the CNI plugin and its network configuration on this node
    Install(InstallArguments),
    /// Inspect the address allocation of this node, find inconsistencies, release leaked addresses
    Ipam {
        #[command(subcommand)]
        command: IpamCommand,
    },
    /// Replace the WireGuard key of this node
    Key {
        #[command(subcommand)]
        command: KeyCommand,
    },
    /// Show what this node's networks are like: NAT, UDP, IPv6, port mapping, relay, MTU
    #[command(
        after_help = "Run it on a node: kubectl -n kube-system exec ds/coild -- fairlead netcheck. It prints what the node program \
        knows and sends nothing itself: where STUN servers (spec.stunServers of the WireKubeMesh) and peers see the node's WireGuard \
        port, the type of its NAT from that (open, cone: one mapping for all destinations, port-restricted-cone: that only lets answers \
        in, symmetric: another mapping for each destination), what its \
        gateway grants by PCP, NAT-PMP or UPnP, and the round-trip time to the relay. UDP is said to be blocked when STUN servers were \
        asked, none answers, and no peer is reached directly.\n\nExit codes: 0 done, 1 query failed, 2 invalid arguments."
    )]
    Netcheck(NetcheckArguments),
    /// Peers outside of the cluster and their WireGuard configurations; remove nodes from the mesh for good
    Peer {
        #[command(subcommand)]
        command: PeerCommand,
    },
    /// Ask every candidate endpoint of a peer whether it answers, and how fast
    #[command(
        after_help = "Run it on a node: kubectl -n kube-system exec ds/coild -- fairlead ping PEER. The node program sends path \
        probes from its WireGuard port, within its limits on probes (20 unanswered to one address and 500 in all per second), and the \
        peer answers. A better path that is found is used from then on.\n\nKIND is host (an address of the peer itself), srflx \
        (where STUN servers or other nodes see it, or its router maps a port), prflx (where this node sees it), relay, or manual \
        (chosen by an administrator).\n\nExit codes: 0 a candidate answered, 1 none did or the query failed, 2 invalid arguments."
    )]
    Ping(PingArguments),
    /// Run a discovery server, through which nodes find each other without the Kubernetes API
    #[command(
        after_help = "It speaks the Sidero discovery protocol (Talos KubeSpan), and cannot read what nodes publish. The identifier of \
        a cluster is all that a caller needs to read, change and delete its entries."
    )]
    Discovery(Box<DiscoveryArguments>),
    /// Run a relay, which passes packets between nodes that do not reach each other
    Relay(Box<RelayArguments>),
    /// Print the WireGuard configuration of a Peer outside of the cluster, or of a node
    #[command(
        after_help = "The sections [Peer] of a configuration, as `wg setconf` reads them, with keys of Peers: reading Peers needs the \
        rights of an administrator. [Interface] with the private key is up to you: docs/peers.md.\n\nExit codes: 0 printed, \
        1 there is no such object or it is left out, 2 invalid arguments."
    )]
    Showconf {
        #[command(subcommand)]
        command: ShowconfCommand,
    },
    /// Show nodes, peers and their problems
    #[command(
        after_help = "Without --cluster, --node, --socket, --kubeconfig or --context: the node program of this machine if there \
        is one, else the cluster.\n\nExit codes: 0 no problem, 1 query failed, 2 invalid arguments, 3 a peer is down or a \
        problem is reported."
    )]
    Status(StatusArguments),
    /// Remove Fairlead from the cluster: programs, state of every node, custom resources and their objects
    #[command(
        after_help = "Pods with an address of Fairlead lose their network. Exit codes: 0 removed, 1 failed; run it again, \
        2 invalid arguments."
    )]
    Uninstall(UninstallArguments),
    /// Print a completion script for a shell
    Completion {
        /// Shell to generate the script for
        #[arg(value_enum)]
        shell: Shell,
    },
    /// Write manual pages, one for each command
    Man {
        /// Directory to write them to; it must exist
        #[arg(value_name = "DIRECTORY")]
        directory: PathBuf,
    },
}

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

#[derive(Debug, Args)]
pub(crate) struct ControllerArguments {
    /// Identity of this replica in the leader election
    #[arg(long, value_name = "NAME", env = "HOSTNAME", default_value = "fairlead-controller")]
    pub(crate) identity: String,
    /// Serve Prometheus metrics on this address; port 0 serves none
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:9386", value_parser = listen_address)]
    pub(crate) metrics_addr: SocketAddr,
    /// Serve metrics with TLS, and only for tokens that the API server allows to `get` /metrics
    #[arg(long, env = "FAIRLEAD_METRICS_SECURE", value_name = "BOOL", default_value = "false",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) metrics_secure: bool,
    /// Serve /healthz and /readyz on this address
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:9387", value_parser = listen_address)]
    pub(crate) health_addr: SocketAddr,
    /// Interval of attempts to release the blocks of deleted Nodes, in addition to every change of a Node
    #[arg(long, default_value = "5m", value_name = "DURATION", value_parser = duration)]
    pub(crate) gc_interval: Duration,
    /// Release the blocks of a Node after it has been deleted for this long and no Pod of it is left
    #[arg(long, default_value = "5m", value_name = "DURATION", value_parser = duration)]
    pub(crate) deleted_node_grace: Duration,
    #[command(flatten)]
    pub(crate) webhook: IgnoredWebhookArguments,
    #[command(flatten)]
    pub(crate) logging: IgnoredLoggingArguments,
}

impl NodeArguments {
    /// Names of the flags that were given and have no effect.
    pub(crate) fn without_effect(&self) -> Vec<&'static str> {
        let mut flags = self.logging.given();
        flags.extend(self.egress.given());
        flags
    }
}

impl ControllerArguments {
    /// Names of the flags that were given and have no effect.
    pub(crate) fn without_effect(&self) -> Vec<&'static str> {
        let mut flags = self.logging.given();
        flags.extend(self.webhook.given());
        flags
    }
}

/// `:9384` is every address, as in Coil's manifests.
fn listen_address(text: &str) -> Result<SocketAddr, String> {
    let full = if text.starts_with(':') { format!("[::]{text}") } else { text.to_owned() };
    full.parse().map_err(|_| format!("{text:?} is not ADDRESS:PORT or :PORT"))
}

/// Go durations (`time.ParseDuration`) such as `1h30m` or `1.5s`, and in addition the unit `d` for days.
fn duration(text: &str) -> Result<Duration, String> {
    let invalid = || format!("{text:?} is not a duration such as 300ms, 45s, 5m, 1h30m or 90d");
    let mut seconds = 0.0_f64;
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(invalid)?;
        let (number, tail) = rest.split_at_checked(end).ok_or_else(invalid)?;
        let units = [
            ("ns", 1e-9),
            ("us", 1e-6),
            ("ms", 1e-3),
            ("s", 1.0),
            ("m", 60.0),
            ("h", 3600.0),
            ("d", 86_400.0),
        ];
        let unit = units.into_iter().find_map(|(name, size)| Some((tail.strip_prefix(name)?, size)));
        let (tail, size) = unit.ok_or_else(invalid)?;
        seconds += number.parse::<f64>().map_err(|_| invalid())? * size;
        rest = tail;
    }
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err(invalid()),
    }
}

/// Prints a completion script to stdout.
pub(crate) fn completion(shell: Shell) {
    clap_complete::generate(shell, &mut Arguments::command(), "fairlead", &mut std::io::stdout());
}

/// Writes a manual page for each command: `fairlead.1`, `fairlead-status.1`, …
pub(crate) fn manual(directory: &Path) -> anyhow::Result<ExitCode> {
    clap_mangen::generate_to(Arguments::command(), directory)
        .with_context(|| format!("cannot write manual pages to {}", directory.display()))?;
    Ok(ExitCode::SUCCESS)
}

#[cfg(test)]
mod tests;
