//! The command line. Names, defaults and environment variables of the programs follow Coil's, so that the arguments in its
//! manifests keep working.

pub(crate) mod connect;
pub(crate) mod controller;
pub(crate) mod discovery;
pub(crate) mod egress;
pub(crate) mod node;
pub(crate) mod relay;
pub(crate) mod standalone;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use anyhow::Context as _;
use clap::{CommandFactory, Parser, Subcommand};
use clap_complete::Shell;
use fairlead_cli::arguments::egress::EgressCommand;
use fairlead_cli::arguments::peer::PeerCommand;
use fairlead_cli::arguments::peers::ShowconfCommand;
use fairlead_cli::arguments::queries::{
    ConnectivityCommand, GraphArguments, IpamCommand, KeyCommand, NetcheckArguments, PingArguments,
    StatusArguments,
};
use fairlead_cli::arguments::uninstall::UninstallArguments;
use fairlead_cli::install::InstallArguments;

use self::connect::ConnectArguments;
use self::controller::ControllerArguments;
use self::discovery::DiscoveryArguments;
use self::egress::{EgressControllerArguments, EgressGatewayArguments};
use self::node::NodeArguments;
use self::relay::RelayArguments;
use crate::cleanup::CleanupArguments;
use crate::logging::{LogFormat, LogLevel};

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
