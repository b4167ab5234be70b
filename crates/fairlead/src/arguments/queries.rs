//! Arguments of the commands that query a node program or the API server.

use std::net::IpAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use fairlead_api::names::{NODE_SOCKET, is_dns_label, is_object_name};

use super::value_parsers::{at, duration};
use crate::api::ApiArguments;
use crate::output::Output;

/// Shortest time between the rounds of `fairlead ping`.
const MIN_PING_INTERVAL: Duration = Duration::from_millis(200);

#[derive(Debug, Default, Args)]
pub(crate) struct StatusArguments {
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

#[derive(Debug, Args)]
pub(crate) struct GraphArguments {
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

#[derive(Debug, Args)]
pub(crate) struct NetcheckArguments {
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Output,
    /// Query the node program at this UNIX socket
    #[arg(long, value_name = "PATH", default_value = NODE_SOCKET)]
    pub(crate) socket: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct PingArguments {
    /// The peer: its name, its public key, or an address behind it
    #[arg(value_name = "PEER")]
    pub(crate) peer: String,
    /// How often each candidate is asked
    #[arg(short, long, value_name = "COUNT", default_value = "3", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) count: u32,
    /// Time between rounds, at least 200ms
    #[arg(short, long, value_name = "DURATION", default_value = "1s", value_parser = ping_interval)]
    pub(crate) interval: Duration,
    /// How long answers are waited for, at most 5s
    #[arg(short, long, value_name = "DURATION", default_value = "1s", value_parser = duration)]
    pub(crate) timeout: Duration,
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Output,
    /// Query the node program at this UNIX socket
    #[arg(long, value_name = "PATH", default_value = NODE_SOCKET)]
    pub(crate) socket: PathBuf,
}

/// What is done with the key of this node.
#[derive(Debug, Subcommand)]
pub(crate) enum KeyCommand {
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

#[derive(Debug, Args)]
pub(crate) struct KeyRotateArguments {
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

#[derive(Debug, Subcommand)]
pub(crate) enum EgressCommand {
    /// Say which way packets of a pod to an address take: by eth0, to the gateways of an Egress, or nowhere
    #[command(
        after_help = "It follows the rules and routes that the node program sets in the pod, as it plans them from the objects that the API \
        server has: the pod's annotations, Egresses, Services, EndpointSlices, AddressPools, ServiceCIDRs, Nodes. What may not be read is \
        named. It does not ask the node: whether gateways have registered the pod is told by its Events, which are shown.\n\n\
        Exit codes: 0 there is a way, 1 packets are refused, the way is not known, or the query failed, 2 invalid arguments."
    )]
    Explain(EgressExplain),
    /// Show Egresses; with a name its gateways and client pods, and what is wrong with them
    #[command(
        after_help = "CLIENTS are the pods whose annotation egress.coil.cybozu.com/NAMESPACE names the Egress. What may not be read is \
        named, and shown as a question mark.\n\nExit codes: 0 no problem, 1 query failed, 2 invalid arguments, 3 an Egress is not ready or, \
        with a name, a client pod has a problem."
    )]
    Status(EgressStatusArguments),
    /// Say which pod used an address and port outside: all gateways are asked which connections had it as their source
    #[command(
        after_help = "Gateways remember the last 65,536 connections as long as their program runs; with spec.logConnections they also write them to \
        their logs. Asking one takes the right to `get` pods/proxy, and to list pods. A gateway that cannot be asked is named.\n\n\
        Exit codes: 0 found, 1 query failed, 2 invalid arguments, 3 no gateway that could be asked knows such a connection."
    )]
    Who(EgressWho),
}

#[derive(Debug, Args)]
pub(crate) struct EgressWho {
    /// The source address that was seen outside
    #[arg(value_name = "ADDRESS")]
    pub(crate) address: IpAddr,
    /// The source port that was seen outside; for ICMP, the identifier of echo requests
    #[arg(value_name = "PORT")]
    pub(crate) port: u16,
    /// When it was seen, as in 2026-01-31T12:00:00Z; without it, all connections that are known are shown
    #[arg(long, value_name = "TIME", value_parser = at)]
    pub(crate) at: Option<jiff::Timestamp>,
    /// Ask the gateways of this Egress alone
    #[arg(long, value_name = "NAMESPACE/NAME", value_parser = qualified)]
    pub(crate) egress: Option<Qualified>,
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Output,
    #[command(flatten)]
    pub(crate) api: ApiArguments,
}

#[derive(Debug, Args)]
pub(crate) struct EgressExplain {
    /// The pod
    #[arg(value_name = "NAMESPACE/POD", value_parser = qualified)]
    pub(crate) pod: Qualified,
    /// The address that it sends to
    #[arg(value_name = "DESTINATION")]
    pub(crate) destination: IpAddr,
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Output,
    #[command(flatten)]
    pub(crate) api: ApiArguments,
}

#[derive(Debug, Args)]
pub(crate) struct EgressStatusArguments {
    /// Show this Egress alone, with its gateways and client pods
    #[arg(value_name = "NAMESPACE/NAME", value_parser = qualified)]
    pub(crate) egress: Option<Qualified>,
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Output,
    #[command(flatten)]
    pub(crate) api: ApiArguments,
}

/// An object of a namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Qualified {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

fn qualified(text: &str) -> Result<Qualified, String> {
    match text.split_once('/') {
        Some((namespace, name)) if is_dns_label(namespace) && is_object_name(name) => {
            Ok(Qualified { namespace: namespace.to_owned(), name: name.to_owned() })
        }
        _ => Err("must be NAMESPACE/NAME".to_owned()),
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum IpamCommand {
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

#[derive(Debug, Args)]
pub(crate) struct IpamCheck {
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

#[derive(Debug, Args)]
pub(crate) struct IpamRelease {
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

#[derive(Debug, Args)]
pub(crate) struct IpamShow {
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Output,
    /// Query the node program at this UNIX socket
    #[arg(long, value_name = "PATH", default_value = NODE_SOCKET)]
    pub(crate) socket: PathBuf,
}

#[derive(Debug, Subcommand)]
pub(crate) enum ConnectivityCommand {
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

#[derive(Debug, Args)]
pub(crate) struct ConnectivityTest {
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

#[derive(Debug, Args)]
pub(crate) struct ProbeArguments {
    /// What to connect to: HOST:PORT, and after a `=` what must be read from it
    #[arg(value_name = "HOST:PORT[=NAME]", required = true)]
    pub(crate) targets: Vec<String>,
    /// Write the results to this file
    #[arg(long, value_name = "PATH", default_value = "/dev/termination-log")]
    pub(crate) results: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct ServeArguments {
    /// TCP port
    #[arg(long)]
    pub(crate) port: u16,
    /// What to send first
    #[arg(long)]
    pub(crate) name: String,
}
