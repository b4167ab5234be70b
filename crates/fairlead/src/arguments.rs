//! The command line. Names, defaults and environment variables of the programs follow Coil's, so that its manifests
//! work with another image alone.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use fairlead_api::names::NODE_SOCKET;
use fairlead_node::WireGuardChoice;

use crate::coil_compat::{IgnoredArguments, RoutingArguments};
use crate::install::{InstallArguments, UninstallArguments};

/// A Kubernetes network across clouds, homes and data centres.
#[derive(Debug, Parser)]
#[command(name = "fairlead", version, propagate_version = true)]
pub(crate) struct Arguments {
    /// Minimum log level
    #[arg(long, global = true, value_enum, default_value = "info", env = "FAIRLEAD_LOG_LEVEL")]
    pub(crate) log_level: LogLevel,
    /// Log format
    #[arg(long, global = true, value_enum, default_value = "json", env = "FAIRLEAD_LOG_FORMAT")]
    pub(crate) log_format: LogFormat,
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
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum LogFormat {
    Json,
    Text,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the node program: CNI server, IPAM, mesh
    Node(Box<NodeArguments>),
    /// Run the controller: address pools and blocks (replicas elect a leader)
    Controller(ControllerArguments),
    /// Install the CNI plugin and its network configuration on this node
    Install(InstallArguments),
    /// Inspect the address allocation of this node, find inconsistencies, release leaked addresses
    Ipam {
        #[command(subcommand)]
        command: IpamCommand,
    },
    /// Show nodes, peers and their problems
    #[command(
        after_help = "Exit codes: 0 no problem, 1 query failed, 2 invalid arguments, 3 a peer is down or a problem is reported."
    )]
    Status(StatusArguments),
    /// Remove the CNI plugin and its network configuration from this node
    Uninstall(UninstallArguments),
    /// Print a completion script for a shell
    Completion {
        /// Shell to generate the script for
        #[arg(value_enum)]
        shell: Shell,
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
    /// Serve Prometheus metrics on this address
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:9384", value_parser = listen_address)]
    pub(crate) metrics_addr: SocketAddr,
    /// Serve /healthz and /readyz on this address
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:9385", value_parser = listen_address)]
    pub(crate) health_addr: SocketAddr,
    /// Allocate pod addresses and create pod interfaces; if false, another CNI plugin must precede this one
    #[arg(long, value_name = "BOOL", default_value = "true",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) enable_ipam: bool,
    /// Serve egress gateways (not implemented yet)
    #[arg(long, value_name = "BOOL", default_value = "true",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) enable_egress: bool,
    /// Release an address block after it has been empty for this long, such as 5m or 1h30m
    #[arg(long, default_value = "5m", value_name = "DURATION", value_parser = duration)]
    pub(crate) addressblock_gc_interval: Duration,
    /// WireGuard implementation
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) wireguard: WireGuard,
    #[command(flatten)]
    pub(crate) numbers: RoutingArguments,
    /// Name pod interfaces as Calico's Felix expects them (FELIX_INTERFACEPREFIX=veth)
    #[arg(long, value_name = "BOOL", default_value = "false",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) compat_calico: bool,
    #[command(flatten)]
    pub(crate) ignored: IgnoredArguments,
    /// Install unencrypted routes to the pods of nodes on the same layer-2 network, instead of a mesh
    #[arg(long, env = "FAIRLEAD_ROUTER", value_name = "BOOL", default_value = "false",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) router: bool,
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
    /// The kernel's; without it, fail
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
    /// Serve Prometheus metrics on this address
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:9386", value_parser = listen_address)]
    pub(crate) metrics_addr: SocketAddr,
    /// Serve /healthz and /readyz on this address
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:9387", value_parser = listen_address)]
    pub(crate) health_addr: SocketAddr,
    /// Interval for releasing the blocks of deleted Nodes, in addition to every change of a Node
    #[arg(long, default_value = "5m", value_name = "DURATION", value_parser = duration)]
    pub(crate) gc_interval: Duration,
    /// Serve the admission webhook on this address
    #[arg(long, value_name = "ADDRESS:PORT", default_value = "[::]:9443", value_parser = listen_address)]
    pub(crate) webhook_addr: SocketAddr,
    /// Directory of the webhook's tls.crt and tls.key, if something else issues them
    #[arg(long, value_name = "DIRECTORY", default_value = "/certs")]
    pub(crate) cert_dir: PathBuf,
    /// Issue and rotate the webhook's certificates [default: true unless the directory has a certificate]
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) enable_cert_rotation: Option<bool>,
    /// Validity of issued certificates, such as 90d; each is replaced after two thirds of it
    #[arg(long, value_name = "DURATION", default_value = "365d", value_parser = duration)]
    pub(crate) cert_lifetime: Duration,
    /// Pause between the steps of a rotation, in which every API server and replica observes the previous step
    #[arg(long, value_name = "DURATION", default_value = "1h", value_parser = duration)]
    pub(crate) cert_settle: Duration,
    /// Accepted for Coil's manifests, without effect: new certificates are served without a restart
    #[arg(long, hide_short_help = true, value_name = "BOOL", default_value = "false",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) enable_restart_on_cert_refresh: bool,
}

#[derive(Debug, Args)]
pub(crate) struct StatusArguments {
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Output,
    /// Query the node program at this UNIX socket
    #[arg(long, value_name = "PATH", default_value = NODE_SOCKET, conflicts_with = "cluster")]
    pub(crate) socket: PathBuf,
    /// Query the API server about all nodes instead
    #[arg(long)]
    pub(crate) cluster: bool,
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
    pub(crate) output: IpamOutput,
    /// Query the node program at this UNIX socket
    #[arg(long, value_name = "PATH", default_value = NODE_SOCKET, conflicts_with = "cluster")]
    pub(crate) socket: PathBuf,
    /// Compare the pods, blocks, pools and Nodes of the whole cluster instead, as read from the API server
    #[arg(long)]
    pub(crate) cluster: bool,
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
    pub(crate) output: IpamOutput,
    /// Query the node program at this UNIX socket
    #[arg(long, value_name = "PATH", default_value = NODE_SOCKET)]
    pub(crate) socket: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct IpamShow {
    /// Output format
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: IpamOutput,
    /// Query the node program at this UNIX socket
    #[arg(long, value_name = "PATH", default_value = NODE_SOCKET)]
    pub(crate) socket: PathBuf,
}

/// A table, a table with more columns, or JSON for scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum IpamOutput {
    Table,
    Wide,
    Json,
}

/// A table, or JSON for scripts.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    Table,
    Json,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_definition_passes_the_checks_of_clap() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn addresses_without_a_host_listen_on_all() {
        assert_eq!(listen_address(":9384").unwrap().to_string(), "[::]:9384");
        assert_eq!(listen_address("127.0.0.1:1").unwrap().to_string(), "127.0.0.1:1");
        assert!(listen_address("9384").is_err());
    }

    #[test]
    fn boolean_flags_take_an_optional_value() {
        let parse = |more: &[&str]| {
            let required = ["fairlead", "node", "--node-name", "a"];
            let Command::Node(node) = Arguments::parse_from(required.iter().chain(more)).command else {
                panic!("unexpected command")
            };
            (node.router, node.clear_routes_on_shutdown)
        };
        assert_eq!(parse(&[]), (false, false));
        assert_eq!(parse(&["--router", "--clear-routes-on-shutdown=true"]), (true, true));
        assert_eq!(parse(&["--router=false", "--clear-routes-on-shutdown"]), (false, true));
    }

    #[test]
    fn durations_are_parsed_as_go_parses_them() {
        for (text, milliseconds) in
            [("300ms", 300), ("45s", 45_000), ("1h30m", 5_400_000), ("1.5s", 1_500), ("90d", 7_776_000_000)]
        {
            assert_eq!(duration(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
        for invalid in ["", "5", "m", "0s", "-5m", "5m3", "1w", "5 m", "1e400h", "..s"] {
            assert!(duration(invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn webhook_flags_of_coil_are_accepted() {
        let parse = |more: &[&str]| {
            let Command::Controller(controller) =
                Arguments::parse_from(["fairlead", "controller"].iter().chain(more)).command
            else {
                panic!("unexpected command")
            };
            (controller.webhook_addr.port(), controller.cert_dir, controller.enable_cert_rotation)
        };
        assert_eq!(parse(&[]), (9443, "/certs".into(), None));
        let all = [
            "--webhook-addr=:1",
            "--cert-dir=/c",
            "--enable-cert-rotation=false",
            "--enable-restart-on-cert-refresh=true",
        ];
        assert_eq!(parse(&all), (1, "/c".into(), Some(false)));
        assert_eq!(parse(&["--enable-cert-rotation", "--enable-restart-on-cert-refresh"]).2, Some(true));
    }

    #[test]
    fn completion_scripts_contain_the_subcommands() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "fairlead", &mut script);
            let script = String::from_utf8(script).unwrap();
            assert!(script.contains("controller") && script.contains("release"));
        }
    }
}
