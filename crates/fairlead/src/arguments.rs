//! The command line. Names, defaults and environment variables of the programs follow Coil's, so that manifests need
//! only another image.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use fairlead_api::names::NODE_SOCKET;
use fairlead_node::WireGuardChoice;

use crate::install::{InstallArguments, UninstallArguments};
use crate::of_coil::{KernelNumbers, OfCoil};

/// A Kubernetes network across clouds, homes and data centres.
#[derive(Debug, Parser)]
#[command(name = "fairlead", version, propagate_version = true)]
pub(crate) struct Arguments {
    /// What is worth a line in the log
    #[arg(long, global = true, value_enum, default_value = "info", env = "FAIRLEAD_LOG_LEVEL")]
    pub(crate) log_level: LogLevel,
    /// How log lines look
    #[arg(long, global = true, value_enum, default_value = "json", env = "FAIRLEAD_LOG_FORMAT")]
    pub(crate) log_format: LogFormat,
    #[command(subcommand)]
    pub(crate) command: Command,
}

/// Least important lines that are logged.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum LogLevel {
    Error,
    Warn,
    Info,
    Debug,
    Trace,
}

/// Log lines for programs or for people.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum LogFormat {
    Json,
    Text,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Run the per-node program: CNI server, addresses, mesh
    Node(Box<NodeArguments>),
    /// Run the controller: pools and blocks (several copies elect one)
    Controller(ControllerArguments),
    /// Put the CNI plugin and its network configuration in place on this node
    Install(InstallArguments),
    /// Explain every address of this node, find disagreements, free what leaked
    Ipam {
        #[command(subcommand)]
        command: IpamCommand,
    },
    /// Show nodes, peers and what is wrong with them
    Status(StatusArguments),
    /// Remove the CNI plugin and its network configuration from this node
    Uninstall(UninstallArguments),
    /// Print a completion script for a shell
    Completion {
        /// The shell
        #[arg(value_enum)]
        shell: Shell,
    },
}

#[derive(Debug, Args)]
pub(crate) struct NodeArguments {
    /// Name of this node's Node object
    #[arg(long, env = "COIL_NODE_NAME")]
    pub(crate) node_name: String,
    /// Socket for the CNI plugin and `fairlead status`
    #[arg(long, default_value = NODE_SOCKET)]
    pub(crate) socket: PathBuf,
    /// Directory that keeps this node's WireGuard key
    #[arg(long, default_value = "/var/lib/fairlead", env = "FAIRLEAD_STATE_DIR")]
    pub(crate) state_dir: PathBuf,
    /// Address for Prometheus metrics
    #[arg(long, default_value = "[::]:9384", value_parser = listen_address)]
    pub(crate) metrics_addr: SocketAddr,
    /// Address for /healthz and /readyz
    #[arg(long, default_value = "[::]:9385", value_parser = listen_address)]
    pub(crate) health_addr: SocketAddr,
    /// Give addresses to pods and make their interfaces; without, another plugin must come before this one
    #[arg(long, value_name = "BOOL", default_value = "true",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) enable_ipam: bool,
    /// Serve egress gateways. Nothing acts on it yet
    #[arg(long, value_name = "BOOL", default_value = "true",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) enable_egress: bool,
    /// How long a block must have been empty before it is given back, as 5m or 1h30m
    #[arg(long, default_value = "5m", value_name = "DURATION", value_parser = duration)]
    pub(crate) addressblock_gc_interval: Duration,
    /// Which WireGuard to use
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) wireguard: WireGuard,
    #[command(flatten)]
    pub(crate) numbers: KernelNumbers,
    /// Name the links of pods as Calico's policy program expects (FELIX_INTERFACEPREFIX=veth)
    #[arg(long, value_name = "BOOL", default_value = "false",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) compat_calico: bool,
    #[command(flatten)]
    pub(crate) of_coil: OfCoil,
    /// Keep plain routes to the pods of nodes on the same layer-2 network, without encryption, in place of a mesh
    #[arg(long, env = "FAIRLEAD_ROUTER", value_name = "BOOL", default_value = "false",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) router: bool,
    /// At the end, empty the export table if the Node object is gone
    #[arg(long, env = "FAIRLEAD_CLEAR_ROUTES_ON_SHUTDOWN", value_name = "BOOL", default_value = "false",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) clear_routes_on_shutdown: bool,
}

/// Which WireGuard implementation to use.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum WireGuard {
    /// The kernel's if it has one, else the embedded one
    Auto,
    /// The kernel's, or fail
    Kernel,
    /// The one inside this program
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
    /// Name of this copy in the election
    #[arg(long, env = "HOSTNAME", default_value = "fairlead-controller")]
    pub(crate) identity: String,
    /// Address for Prometheus metrics
    #[arg(long, default_value = "[::]:9386", value_parser = listen_address)]
    pub(crate) metrics_addr: SocketAddr,
    /// Address for /healthz and /readyz
    #[arg(long, default_value = "[::]:9387", value_parser = listen_address)]
    pub(crate) health_addr: SocketAddr,
    /// How often blocks are compared with Nodes besides at every change of a Node
    #[arg(long, default_value = "5m", value_name = "DURATION", value_parser = duration)]
    pub(crate) gc_interval: Duration,
    /// Address for the admission webhook
    #[arg(long, default_value = "[::]:9443", value_parser = listen_address)]
    pub(crate) webhook_addr: SocketAddr,
    /// Directory with tls.crt and tls.key of the webhook, if they are made by somebody else
    #[arg(long, default_value = "/certs")]
    pub(crate) cert_dir: PathBuf,
    /// Make and rotate the webhook's certificates; the default is to do so unless the directory has one
    #[arg(long, value_name = "BOOL", num_args = 0..=1, require_equals = true, default_missing_value = "true")]
    pub(crate) enable_cert_rotation: Option<bool>,
    /// How long certificates that are made here are valid, such as 90d; the next is made after two thirds
    #[arg(long, default_value = "365d", value_parser = duration)]
    pub(crate) cert_lifetime: Duration,
    /// Pause between the steps of a rotation, for every API server and every copy to see the last one
    #[arg(long, default_value = "1h", value_parser = duration)]
    pub(crate) cert_settle: Duration,
    /// Has no effect, because new certificates are used without a restart; for manifests of Coil
    #[arg(long, hide_short_help = true, value_name = "BOOL", default_value = "false",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) enable_restart_on_cert_refresh: bool,
}

#[derive(Debug, Args)]
pub(crate) struct StatusArguments {
    /// How to print it
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: Output,
    /// Ask the node program behind this socket
    #[arg(long, default_value = NODE_SOCKET, conflicts_with = "cluster")]
    pub(crate) socket: PathBuf,
    /// Ask the API server instead, for all nodes
    #[arg(long)]
    pub(crate) cluster: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum IpamCommand {
    /// Find out where kernel, blocks and pods disagree
    #[command(
        after_help = "Exit codes: 0 everything agrees, 1 could not ask, 2 wrong arguments, 3 something disagrees \
        or could not be compared."
    )]
    Check(IpamCheck),
    /// Free the addresses of a pod that is gone
    #[command(
        after_help = "Exit codes: 0 freed, 1 refused (the pod is alive, or nothing is reserved for it) or could \
        not ask, 2 wrong arguments."
    )]
    Release(IpamRelease),
    /// Show blocks, and every address with its pod, link and pool
    #[command(after_help = "Exit codes: 0 shown, 1 could not ask, 2 wrong arguments.")]
    Show(IpamShow),
}

#[derive(Debug, Args)]
pub(crate) struct IpamCheck {
    /// How to print it
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: IpamOutput,
    /// Ask the node program behind this socket
    #[arg(long, default_value = NODE_SOCKET, conflicts_with = "cluster")]
    pub(crate) socket: PathBuf,
    /// Compare pods, blocks, pools and Nodes of the whole cluster instead, as the API server has them
    #[arg(long)]
    pub(crate) cluster: bool,
}

#[derive(Debug, Args)]
pub(crate) struct IpamRelease {
    /// An address, or a container ID or the first 8 or more characters of it
    pub(crate) subject: String,
    /// Also if the pod seems to be alive: it loses its network
    #[arg(long)]
    pub(crate) force: bool,
    /// How to print it
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: IpamOutput,
    /// Ask the node program behind this socket
    #[arg(long, default_value = NODE_SOCKET)]
    pub(crate) socket: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct IpamShow {
    /// How to print it
    #[arg(short, long, value_enum, default_value = "table")]
    pub(crate) output: IpamOutput,
    /// Ask the node program behind this socket
    #[arg(long, default_value = NODE_SOCKET)]
    pub(crate) socket: PathBuf,
}

/// For people, for people with wide screens, or for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum IpamOutput {
    Table,
    Wide,
    Json,
}

/// For people or for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Output {
    Table,
    Json,
}

/// `:9384` means every address, as in Coil's manifests.
fn listen_address(text: &str) -> Result<SocketAddr, String> {
    let full = if text.starts_with(':') { format!("[::]{text}") } else { text.to_owned() };
    full.parse().map_err(|_| format!("{text:?} is not ADDRESS:PORT or :PORT"))
}

/// Durations as Go writes them: numbers with units, as `1h30m` or `1.5s` (Go,
/// `time.ParseDuration`), and days besides.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is no duration: write it as 300ms, 45s, 5m, 1h30m or 90d");
    let mut seconds = 0.0_f64;
    let mut rest = text;
    while !rest.is_empty() {
        let end = rest.find(|c: char| !c.is_ascii_digit() && c != '.').ok_or_else(wrong)?;
        let (number, behind) = rest.split_at_checked(end).ok_or_else(wrong)?;
        let units = [
            ("ns", 1e-9),
            ("us", 1e-6),
            ("ms", 1e-3),
            ("s", 1.0),
            ("m", 60.0),
            ("h", 3600.0),
            ("d", 86_400.0),
        ];
        let unit = units.into_iter().find_map(|(name, size)| Some((behind.strip_prefix(name)?, size)));
        let (behind, size) = unit.ok_or_else(wrong)?;
        seconds += number.parse::<f64>().map_err(|_| wrong())? * size;
        rest = behind;
    }
    match Duration::try_from_secs_f64(seconds) {
        Ok(duration) if !duration.is_zero() => Ok(duration),
        _ => Err(wrong()),
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
    fn the_definition_is_sound() {
        Arguments::command().debug_assert();
    }

    #[test]
    fn coils_short_addresses_are_accepted() {
        assert_eq!(listen_address(":9384").unwrap().to_string(), "[::]:9384");
        assert_eq!(listen_address("127.0.0.1:1").unwrap().to_string(), "127.0.0.1:1");
        assert!(listen_address("9384").is_err());
    }

    #[test]
    fn switches_are_written_as_in_coils_manifests() {
        let parse = |more: &[&str]| {
            let usual = ["fairlead", "node", "--node-name", "a"];
            let Command::Node(node) = Arguments::parse_from(usual.iter().chain(more)).command else {
                panic!("another command")
            };
            (node.router, node.clear_routes_on_shutdown)
        };
        assert_eq!(parse(&[]), (false, false));
        assert_eq!(parse(&["--router", "--clear-routes-on-shutdown=true"]), (true, true));
        assert_eq!(parse(&["--router=false", "--clear-routes-on-shutdown"]), (false, true));
    }

    #[test]
    fn durations_are_read_as_go_reads_them() {
        for (text, milliseconds) in
            [("300ms", 300), ("45s", 45_000), ("1h30m", 5_400_000), ("1.5s", 1_500), ("90d", 7_776_000_000)]
        {
            assert_eq!(duration(text), Ok(Duration::from_millis(milliseconds)), "{text}");
        }
        for wrong in ["", "5", "m", "0s", "-5m", "5m3", "1w", "5 m", "1e400h", "..s"] {
            assert!(duration(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn coils_arguments_of_the_webhook_are_accepted() {
        let parse = |more: &[&str]| {
            let Command::Controller(controller) =
                Arguments::parse_from(["fairlead", "controller"].iter().chain(more)).command
            else {
                panic!("another command")
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
    fn every_shell_gets_a_completion() {
        for shell in [Shell::Bash, Shell::Zsh, Shell::Fish] {
            let mut script = Vec::new();
            clap_complete::generate(shell, &mut Arguments::command(), "fairlead", &mut script);
            let script = String::from_utf8(script).unwrap();
            assert!(script.contains("controller") && script.contains("release"));
        }
    }
}
