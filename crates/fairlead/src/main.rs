//! The `fairlead` executable: the programs of a cluster and the command line of its operators.
//!
//! It is thin: arguments become the settings of `fairlead-node` or `fairlead-controller`; `install` puts the CNI plugin in
//! place; `status` and `ipam` ask a node's socket or the API server. Data goes to stdout, logs and errors to stderr. Exit
//! codes: 0 done, 1 failed, 2 wrong arguments, 3 `status` or `ipam check` found something that is not as it should be.

mod arguments;
mod called_as;
mod install;
mod ipam;
mod logging;
mod netconf;
mod of_coil;
mod output;
mod programs;
mod status;

use std::process::ExitCode;

use clap::Parser;

use crate::arguments::{Arguments, Command};

/// As clap ends with it.
const WRONG_ARGUMENTS: u8 = 2;

fn main() -> ExitCode {
    let arguments = match called_as::translate(std::env::args_os()) {
        Ok(arguments) => Arguments::parse_from(arguments),
        Err(message) => {
            logging::complain(&message);
            return ExitCode::from(WRONG_ARGUMENTS);
        }
    };
    logging::start(arguments.log_level, arguments.log_format);
    // One provider for every TLS connection of the process; a second installation is harmless.
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let outcome = match arguments.command {
        Command::Node(node) => programs::node(*node),
        Command::Controller(controller) => programs::controller(controller),
        Command::Install(places) => install::install(&places),
        Command::Ipam { command } => ipam::run(&command),
        Command::Status(query) => status::run(&query),
        Command::Uninstall(places) => install::uninstall(&places),
        Command::Completion { shell } => {
            arguments::completion(shell);
            Ok(ExitCode::SUCCESS)
        }
    };
    outcome.unwrap_or_else(|error| {
        logging::complain(&format!("{error:#}"));
        ExitCode::FAILURE
    })
}
