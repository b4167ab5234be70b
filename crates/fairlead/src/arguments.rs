//! The command line. Names, defaults and environment variables of the programs follow Coil's, so that manifests need
//! only another image.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, CommandFactory, Parser, Subcommand, ValueEnum};
use clap_complete::Shell;
use fairlead_api::names::NODE_SOCKET;
use fairlead_node::WireGuardChoice;

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
    Node(NodeArguments),
    /// Run the controller: pools and blocks (several copies elect one)
    Controller(ControllerArguments),
    /// Show nodes, peers and what is wrong with them
    Status(StatusArguments),
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
    /// Which WireGuard to use
    #[arg(long, value_enum, default_value = "auto")]
    pub(crate) wireguard: WireGuard,
    /// Keep plain routes to the pods of nodes on the same layer-2 network, without encryption, in place of a mesh
    #[arg(long, env = "FAIRLEAD_ROUTER", value_name = "BOOL", default_value = "false",
        num_args = 0..=1, require_equals = true, default_missing_value = "true", action = clap::ArgAction::Set)]
    pub(crate) router: bool,
    /// At the end, empty table 119 if the Node object is gone
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

/// A whole number with its unit: `90d`, `1h`, `30m` or `20s`.
fn duration(text: &str) -> Result<Duration, String> {
    let wrong = || format!("{text:?} is not a number with s, m, h or d behind it, such as 90d");
    let unit = text.chars().next_back().ok_or_else(wrong)?;
    let seconds: u64 = match unit {
        's' => 1,
        'm' => 60,
        'h' => 3600,
        'd' => 86_400,
        _ => return Err(wrong()),
    };
    let count: u32 = text.strip_suffix(unit).and_then(|count| count.parse().ok()).ok_or_else(wrong)?;
    Ok(Duration::from_secs(seconds.saturating_mul(count.into())))
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
    fn durations_have_units() {
        assert_eq!(duration("90d"), Ok(Duration::from_secs(90 * 86_400)));
        assert_eq!(duration("20s"), Ok(Duration::from_secs(20)));
        for wrong in ["", "s", "20", "-1h", "1.5h", "1w", "99999999999d", "1ä"] {
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
            assert!(String::from_utf8(script).unwrap().contains("controller"));
        }
    }
}
