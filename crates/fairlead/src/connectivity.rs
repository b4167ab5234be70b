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

use crate::arguments::ConnectivityCommand;
use crate::status::current_thread;

/// TCP port of target pods.
const PORT: u16 = 8080;
/// What a target sends after its name: enough for full-size packets, which a wrong MTU on the way would stop.
const PAYLOAD: usize = 64 * 1024;

/// Runs a subcommand. The exit code says whether a connection failed.
pub(crate) fn run(command: &ConnectivityCommand) -> anyhow::Result<ExitCode> {
    match command {
        ConnectivityCommand::Probe(probe) => current_thread(probe::run(probe)),
        ConnectivityCommand::Serve(serve) => current_thread(serve::run(serve)),
        ConnectivityCommand::Test(test) => current_thread(test::run(test)),
    }
}
