//! Arguments of the commands that query a node program or the API server.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use fairlead_api::names::NODE_SOCKET;

use super::value_parsers::duration;
use crate::api::ApiArguments;
use crate::output::Output;

/// Shortest time between the rounds of `fairlead ping`.
const MIN_PING_INTERVAL: Duration = Duration::from_millis(200);

/// Arguments of `fairlead status`.
#[derive(Debug, Default, Args)]
pub struct StatusArguments {
    /// Show this peer alone, with the last changes of its path: its name, its public key, or an address behind it
    #[arg(value_name = "PEER", conflicts_with_all = ["cluster", "node", "kubeconfig", "context"])]
    pub(crate) peer: Option<String>,
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Output,
    /// Query the node program at this UNIX socket
    #[arg(long, value_name = "PATH", conflicts_with_all = ["cluster", "node", "kubeconfig", "context"])]
    pub(crate) socket: Option<PathBuf>,
    /// Query the API server about all nodes and pools
    #[arg(long, conflicts_with = "node")]
    pub(crate) cluster: bool,
    /// Query the API server about this node
    #[arg(long, value_name = "NAME")]
    pub(crate) node: Option<String>,
    #[command(flatten)]
    pub(crate) api: ApiArguments,
    /// Print the status again every 2 seconds until interrupted
    #[arg(short, long)]
    pub(crate) watch: bool,
}

/// A configuration file of WireGuard, or data for scripts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
pub(crate) enum ConfigurationFormat {
    Json,
    #[default]
    Wireguard,
    Yaml,
}

/// Arguments of `fairlead graph`.
#[derive(Debug, Args)]
pub struct GraphArguments {
    /// Output format
    #[arg(short, long, value_enum, default_value = "dot")]
    pub(crate) output: GraphOutput,
    #[command(flatten)]
    pub(crate) api: ApiArguments,
}

/// The language of Graphviz, or data for scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum GraphOutput {
    Dot,
    Json,
}

/// Arguments of `fairlead netcheck`.
#[derive(Debug, Args)]
pub struct NetcheckArguments {
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Output,
    /// Query the node program at this UNIX socket
    #[arg(long, value_name = "PATH", default_value = NODE_SOCKET)]
    pub(crate) socket: PathBuf,
}

/// Arguments of `fairlead ping`.
#[derive(Debug, Args)]
pub struct PingArguments {
    /// The peer: its name, its public key, or an address behind it
    #[arg(value_name = "PEER")]
    pub(crate) peer: String,
    /// Number of requests to each candidate
    #[arg(short, long, value_name = "COUNT", default_value = "3", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) count: u32,
    /// Time between rounds, at least 200ms
    #[arg(short, long, value_name = "DURATION", default_value = "1s", value_parser = ping_interval)]
    pub(crate) interval: Duration,
    /// Timeout of each answer, at most 5s
    #[arg(short, long, value_name = "DURATION", default_value = "1s", value_parser = duration)]
    pub(crate) timeout: Duration,
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Output,
    /// Query the node program at this UNIX socket
    #[arg(long, value_name = "PATH", default_value = NODE_SOCKET)]
    pub(crate) socket: PathBuf,
}

/// Subcommands of `fairlead key`.
#[derive(Debug, Subcommand)]
pub enum KeyCommand {
    /// Announce another key to all nodes, and use it once they had time to prepare it
    #[command(
        after_help = "Run it on the node: kubectl -n kube-system exec POD -- fairlead key rotate. The node makes the next key, publishes it as \
        spec.nextPublicKey of its WireKubePeer, and uses it about 10 s later, without a gap in its tunnels. That goes on over restarts of the node \
        program; `fairlead status` shows both keys and what it waits for. Peers outside of the cluster have the public key in their \
        configuration: where there are some, --force is needed, and they need another configuration then.\n\nExit codes: 0 begun, or done \
        with --wait, 1 failed, 2 invalid arguments."
    )]
    Rotate(KeyRotateArguments),
}

/// Arguments of `fairlead key rotate`.
#[derive(Debug, Args)]
pub struct KeyRotateArguments {
    /// Also where Peers outside of the cluster lose their tunnel with this node until they have another configuration
    #[arg(long)]
    pub(crate) force: bool,
    /// Return when the next key is in use, at most after this time
    #[arg(long, value_name = "DURATION", value_parser = duration)]
    pub(crate) wait: Option<Duration>,
    /// Query the node program at this UNIX socket
    #[arg(long, value_name = "PATH", default_value = NODE_SOCKET)]
    pub(crate) socket: PathBuf,
}

/// Each round is a burst of probes, which all peers share the limits of.
fn ping_interval(text: &str) -> Result<Duration, String> {
    let interval = duration(text)?;
    if interval < MIN_PING_INTERVAL {
        return Err(format!("at least {}ms", MIN_PING_INTERVAL.as_millis()));
    }
    Ok(interval)
}

/// Subcommands of `fairlead ipam`.
#[derive(Debug, Subcommand)]
pub enum IpamCommand {
    /// Find inconsistencies between allocations, kernel, blocks and pods
    #[command(
        after_help = "Exit codes: 0 consistent, 1 query failed, 2 invalid arguments, 3 inconsistencies found, or some \
        data could not be compared."
    )]
    Check(IpamCheck),
    /// Release the addresses of a deleted pod
    #[command(
        after_help = "Exit codes: 0 released, 1 refused (the pod is running, or has no allocation) or query failed, \
        2 invalid arguments."
    )]
    Release(IpamRelease),
    /// Show blocks, and every allocated address with its pod, interface and pool
    #[command(after_help = "Exit codes: 0 success, 1 query failed, 2 invalid arguments.")]
    Show(IpamShow),
}

/// Arguments of `fairlead ipam check`.
#[derive(Debug, Args)]
pub struct IpamCheck {
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Output,
    /// Query the node program at this UNIX socket
    #[arg(long, value_name = "PATH", default_value = NODE_SOCKET, conflicts_with = "cluster")]
    pub(crate) socket: PathBuf,
    /// Compare the pods, blocks, pools and Nodes of the whole cluster instead, as read from the API server
    #[arg(long)]
    pub(crate) cluster: bool,
    #[command(flatten)]
    pub(crate) api: ApiArguments,
}

/// Arguments of `fairlead ipam release`.
#[derive(Debug, Args)]
pub struct IpamRelease {
    /// Address, or container ID, or at least the first 8 characters of one
    #[arg(value_name = "ADDRESS|CONTAINER")]
    pub(crate) subject: String,
    /// Release even if the pod seems to be running: it loses its network
    #[arg(long)]
    pub(crate) force: bool,
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Output,
    /// Query the node program at this UNIX socket
    #[arg(long, value_name = "PATH", default_value = NODE_SOCKET)]
    pub(crate) socket: PathBuf,
}

/// Arguments of `fairlead ipam show`.
#[derive(Debug, Args)]
pub struct IpamShow {
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Output,
    /// Query the node program at this UNIX socket
    #[arg(long, value_name = "PATH", default_value = NODE_SOCKET)]
    pub(crate) socket: PathBuf,
}

/// Subcommands of `fairlead connectivity`.
#[derive(Debug, Subcommand)]
pub enum ConnectivityCommand {
    /// Start pods on several nodes, connect them to each other, to nodes and to Services, and remove them again
    #[command(
        after_help = "Exit codes: 0 every connection succeeded, 1 the test could not run, 2 invalid arguments, 3 a \
        connection failed or a test pod did not start."
    )]
    Test(ConnectivityTest),
    /// Connect to targets and write the results; runs in test pods
    #[command(hide = true)]
    Probe(ProbeArguments),
    /// Answer connections; runs in test pods
    #[command(hide = true)]
    Serve(ServeArguments),
}

/// Arguments of `fairlead connectivity test`.
#[derive(Debug, Args)]
pub struct ConnectivityTest {
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Output,
    #[command(flatten)]
    pub(crate) api: ApiArguments,
    /// Image of the test pods, which must contain this program [default: that of the DaemonSet kube-system/coild]
    #[arg(long, value_name = "IMAGE")]
    pub(crate) image: Option<String>,
    /// Nodes to test, separated by commas [default: the first 4 that are Ready]
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    pub(crate) nodes: Vec<String>,
    /// Connect to this address outside of the cluster, too; may be repeated
    #[arg(long, value_name = "HOST:PORT")]
    pub(crate) external: Vec<String>,
    /// Timeout for test pods to start, and again for them to finish
    #[arg(long, value_name = "DURATION", default_value = "2m", value_parser = duration)]
    pub(crate) timeout: Duration,
    /// Keep the namespace and its pods for inspection
    #[arg(long)]
    pub(crate) keep: bool,
}

/// Arguments of `fairlead connectivity probe`.
#[derive(Debug, Args)]
pub struct ProbeArguments {
    /// Connect to this HOST:PORT, and read the text after a `=` from it
    #[arg(value_name = "HOST:PORT[=NAME]", required = true)]
    pub(crate) targets: Vec<String>,
    /// Write the results to this file
    #[arg(long, value_name = "PATH", default_value = "/dev/termination-log")]
    pub(crate) results: PathBuf,
}

/// Arguments of `fairlead connectivity serve`.
#[derive(Debug, Args)]
pub struct ServeArguments {
    /// TCP port
    #[arg(long)]
    pub(crate) port: u16,
    /// Text to send first
    #[arg(long)]
    pub(crate) name: String,
}
