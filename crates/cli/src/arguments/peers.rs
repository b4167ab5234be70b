//! Arguments of `fairlead peer` and `fairlead showconf`.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use fairlead_keys::PublicKey;
use ipnet::IpNet;

use super::queries::ConfigurationFormat;
use crate::api::ApiArguments;
use crate::output::Output;

/// Arguments of `fairlead peer add`.
#[derive(Debug, Args)]
pub struct PeerAdd {
    /// Name of the Peer
    pub(crate) name: String,
    /// Address of the machine inside of the mesh; may be repeated [default: the first free one of 10.10.10.0/24]
    #[arg(long = "address", value_name = "ADDRESS[/LENGTH]", value_parser = prefix)]
    pub(crate) addresses: Vec<IpNet>,
    /// Network behind the machine that pods and nodes are to reach; may be repeated
    #[arg(long = "network", value_name = "CIDR")]
    pub(crate) networks: Vec<IpNet>,
    /// Node that has a tunnel with the machine and forwards for all others; may be repeated [default: every node has one]
    #[arg(long = "entry-node", value_name = "NODE")]
    pub(crate) entry_nodes: Vec<String>,
    /// Endpoint at which the machine listens, if nodes are to begin [default: the machine begins]
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) endpoint: Option<String>,
    /// Seconds between keepalives; 0 sends none
    #[arg(long, value_name = "SECONDS", default_value = "25")]
    pub(crate) keepalive: u16,
    /// Make no preshared key
    #[arg(long)]
    pub(crate) no_preshared_key: bool,
    /// Put the preshared key into Secret kube-system/fairlead-peer-preshared-keys, not into the Peer
    #[arg(long, conflicts_with = "no_preshared_key")]
    pub(crate) preshared_key_secret: bool,
    /// Use the key pair of the machine, of which this is the public key
    #[arg(long, value_name = "KEY", conflicts_with = "private_key_file")]
    pub(crate) public_key: Option<PublicKey>,
    #[command(flatten)]
    pub(crate) machine: MachineArguments,
}

/// Arguments of `fairlead peer show`.
#[derive(Debug, Args)]
pub struct PeerShow {
    /// Name of the Peer
    pub(crate) name: String,
    /// Entry node of the Peer to go through [default: its first one]
    #[arg(long, value_name = "NODE")]
    pub(crate) through: Option<String>,
    #[command(flatten)]
    pub(crate) machine: MachineArguments,
}

/// Settings of the printed configuration for the machine of a Peer.
#[derive(Debug, Default, Args)]
pub(crate) struct MachineArguments {
    /// File with the private key, as `wg genkey` prints it
    #[arg(long, value_name = "PATH")]
    pub(crate) private_key_file: Option<PathBuf>,
    /// Send packets to this prefix into the tunnel, too; may be repeated
    #[arg(long = "allowed-ips", value_name = "CIDR", value_delimiter = ',')]
    pub(crate) allowed_ips: Vec<IpNet>,
    /// Do not resolve names with the DNS of the cluster
    #[arg(long)]
    pub(crate) no_dns: bool,
    /// Domain of the names of Services
    #[arg(long, value_name = "DOMAIN", default_value = "cluster.local")]
    pub(crate) cluster_domain: String,
    /// Print a QR code for the WireGuard application of a phone
    #[arg(long, conflicts_with = "output")]
    pub(crate) qr: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value = "wireguard")]
    pub(crate) output: ConfigurationFormat,
    #[command(flatten)]
    pub(crate) api: ApiArguments,
}

/// Arguments of `fairlead peer list`.
#[derive(Debug, Args)]
pub struct PeerList {
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Output,
    #[command(flatten)]
    pub(crate) api: ApiArguments,
}

/// Arguments of `fairlead peer remove`.
#[derive(Debug, Args)]
pub struct PeerRemove {
    /// Name of the Peer
    pub(crate) name: String,
    #[command(flatten)]
    pub(crate) api: ApiArguments,
}

/// Subcommands of `fairlead showconf`.
#[derive(Debug, Subcommand)]
pub enum ShowconfCommand {
    /// Print the peers that a node configures: the other nodes and all Peers
    Node(ShowconfArguments),
    /// Print the peers that a Peer configures: all nodes, or its first entry node
    Peer(ShowconfArguments),
}

/// Arguments of `fairlead showconf`.
#[derive(Debug, Args)]
pub struct ShowconfArguments {
    /// Name of the object
    pub(crate) name: String,
    /// Print it as a peer that others configure instead: with -o yaml a Peer for another cluster
    #[arg(long)]
    pub(crate) as_peer: bool,
    /// With --as-peer, of a node: with the prefixes of the whole cluster, which is reached through the node
    #[arg(long, requires = "as_peer")]
    pub(crate) whole_cluster: bool,
    /// Add this prefix to the allowed IPs; may be repeated
    #[arg(long = "allowed-ips", value_name = "CIDR", value_delimiter = ',')]
    pub(crate) allowed_ips: Vec<IpNet>,
    /// Output format
    #[arg(short, long, value_enum, default_value = "wireguard")]
    pub(crate) output: ConfigurationFormat,
    #[command(flatten)]
    pub(crate) api: ApiArguments,
}

/// Parses a prefix; an address is one of its own.
///
/// # Errors
/// The text is neither.
pub fn prefix(text: &str) -> Result<IpNet, String> {
    let address = || text.parse().map(|address: std::net::IpAddr| IpNet::from(address));
    text.parse().or_else(|_| address()).map_err(|_| format!("'{text}' is neither an address nor a prefix"))
}
