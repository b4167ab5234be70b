//! `fairlead connectivity test`: pods on several nodes connect to each other, to nodes and to Services.
//!
//! [`test`] runs on the operator's machine: it makes a namespace, in it a target pod on each node, then on each node a probe
//! pod that connects to what [`plan`] lists, and removes the namespace. Pods report over the API server, in the termination
//! message of their container, so that a node whose kubelet cannot be reached is tested, too. [`probe`] and [`serve`] run in
//! the pods, from the same image as the node program.

mod manifests;
mod plan;
mod probe;
mod report;
mod serve;
mod test;

use std::process::ExitCode;

use crate::arguments::queries::ConnectivityCommand;
use crate::query::current_thread;

/// Runs a subcommand. The exit code says whether a connection failed.
///
/// # Errors
/// The test cannot be run: its pods cannot be made, or do not finish in time.
pub fn run(command: &ConnectivityCommand) -> anyhow::Result<ExitCode> {
    match command {
        ConnectivityCommand::Probe(probe) => current_thread(probe::run(probe)),
        ConnectivityCommand::Serve(serve) => current_thread(serve::run(serve)),
        ConnectivityCommand::Test(test) => current_thread(test::run(test)),
    }
}
