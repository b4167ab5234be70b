//! `fairlead cleanup`: removes Fairlead from a node.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use fairlead_api::names::{NODE_SOCKET, WIREGUARD_INTERFACE};
use fairlead_cli::install::{self, Paths};
use fairlead_cli::query::current_thread;
use fairlead_node::Cleanup;

use crate::coil_compat::RoutingArguments;

/// Arguments of `fairlead cleanup`.
#[derive(Debug, Args)]
pub(crate) struct CleanupArguments {
    #[command(flatten)]
    paths: Paths,
    /// Socket of the node program
    #[arg(long, value_name = "PATH", default_value = NODE_SOCKET)]
    socket: PathBuf,
    /// Directory of this node's WireGuard private key
    #[arg(long, value_name = "DIRECTORY", default_value = "/var/lib/fairlead", env = "FAIRLEAD_STATE_DIR")]
    state_dir: PathBuf,
    /// Name of a mesh device; may be repeated
    #[arg(long, value_name = "NAME", default_value = WIREGUARD_INTERFACE)]
    mesh_device: Vec<String>,
    #[command(flatten)]
    numbers: RoutingArguments,
}

/// Removes first the files: without them the container runtime starts no more pods.
pub(crate) fn run(arguments: &CleanupArguments) -> anyhow::Result<ExitCode> {
    install::remove_files(&arguments.paths)?;
    let CleanupArguments { socket, state_dir, mesh_device, numbers, .. } = arguments;
    let cleanup = Cleanup {
        socket: socket.clone(),
        state_dir: state_dir.clone(),
        numbers: numbers.checked(true)?,
        mesh_devices: mesh_device.clone(),
    };
    current_thread(cleanup.run())?;
    tracing::info!("nothing of Fairlead is left on this node");
    Ok(ExitCode::SUCCESS)
}
