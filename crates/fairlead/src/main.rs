//! The `fairlead` executable: the programs of a cluster and the command line of its operators.
//!
//! It is thin: arguments become the settings of `fairlead-node`, `fairlead-controller`, `fairlead-relay` or `fairlead-discovery`;
//! `install` installs the CNI plugin; `connect` joins a machine as a Peer; `status`, `ipam` and `egress` query a node's socket or the API server; `connectivity test` runs test pods. Data goes to
//! stdout, logs and errors to stderr. Exit codes: 0 done, 1 failed, 2 invalid arguments, 3 `status`, `egress status`,
//! `ipam check` or `connectivity test` found a problem.

mod arguments;
mod argv0;
mod cleanup;
mod coil_compat;
mod connect;
mod discovery;
mod endpoints;
mod logging;
mod programs;
mod relay;

use std::process::ExitCode;

use clap::Parser;
use fairlead_cli::{
    connectivity, egress, graph, install, ipam, key, netcheck, output, peer, ping, showconf, status,
    uninstall,
};

use crate::arguments::{Arguments, Command};

/// Exit code of clap, too.
const INVALID_ARGUMENTS: u8 = 2;

fn main() -> ExitCode {
    let arguments = match argv0::translate(std::env::args_os()) {
        Ok(arguments) => Arguments::parse_from(arguments),
        Err(message) => {
            output::error(&message);
            return ExitCode::from(INVALID_ARGUMENTS);
        }
    };
    logging::start(arguments.log_level, arguments.log_format);
    // One provider for every TLS connection of the process; a second installation is harmless.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let outcome = match arguments.command {
        Command::Cleanup(arguments) => cleanup::run(&arguments),
        Command::Node(node) => programs::node(*node),
        Command::Connect(connect) => connect::run(*connect),
        Command::Connectivity { command } => connectivity::run(&command),
        Command::Controller(controller) => programs::controller(*controller),
        Command::Egress { command } => egress::run(&command),
        Command::EgressController(controller) => programs::egress_controller(*controller),
        Command::EgressGateway(gateway) => programs::egress_gateway(*gateway),
        Command::Graph(query) => graph::run(&query),
        Command::Install(places) => install::install(&places),
        Command::Ipam { command } => ipam::run(&command),
        Command::Key { command } => key::run(&command),
        Command::Netcheck(query) => netcheck::run(&query),
        Command::Peer { command } => peer::run(&command),
        Command::Ping(query) => ping::run(&query),
        Command::Discovery(discovery) => programs::discovery(*discovery),
        Command::Relay(relay) => programs::relay(*relay),
        Command::Showconf { command } => showconf::run(&command),
        Command::Status(query) => status::run(&query),
        Command::Uninstall(arguments) => uninstall::run(&arguments),
        Command::Completion { shell } => {
            arguments::completion(shell);
            Ok(ExitCode::SUCCESS)
        }
        Command::Man { directory } => arguments::manual(&directory),
    };
    outcome.unwrap_or_else(|error| {
        output::error(&format!("{error:#}"));
        ExitCode::FAILURE
    })
}
