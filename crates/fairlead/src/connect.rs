//! `fairlead connect`: this machine, which is not of the cluster, is in its network as a Peer while the program runs.
//!
//! The configuration is that of `fairlead peer show`, made again when something changes in the cluster. Each second the program looks at the
//! device: an entry node that answers nothing is left for the next one. What other programs change of the device, its addresses and its
//! routes is mended. Nothing is left at the end; what an ended process has left is taken over by the next one.

mod caches;
mod entries;
mod host;
mod key;
mod own_peer;
mod routes;
mod session;

use std::os::linux::net::SocketAddrExt as _;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::pin::pin;
use std::process::ExitCode;

use anyhow::{Context as _, bail};

use self::session::Session;
use crate::arguments::connect::{ConnectArguments, peer_name};
use crate::programs;

/// Runs until a signal.
pub(crate) fn run(arguments: ConnectArguments) -> anyhow::Result<ExitCode> {
    programs::run(async {
        let mut stop = pin!(programs::stop("disconnecting")?);
        let name = name(&arguments)?;
        let _lock = lock(&arguments.interface)?;
        let opened = tokio::select! {
            biased;
            () = &mut stop => return Ok(()),
            opened = Session::open(arguments, name) => opened,
        };
        let mut session = opened?;
        let joined_and_followed = async {
            session.join().await?;
            session.follow().await
        };
        let outcome = tokio::select! {
            biased;
            () = &mut stop => Ok(()),
            outcome = joined_and_followed => outcome,
        };
        outcome.and(session.close().await)
    })
}

fn name(arguments: &ConnectArguments) -> anyhow::Result<String> {
    if let Some(name) = &arguments.name {
        return Ok(name.clone());
    }
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").context("cannot read the host name")?;
    let name = peer_name(&host.trim().to_ascii_lowercase());
    name.map_err(anyhow::Error::msg).context("the host name is no name of a Peer: give one")
}

/// Keeps other processes of this network namespace from the device.
fn lock(interface: &str) -> anyhow::Result<UnixListener> {
    let address = SocketAddr::from_abstract_name(format!("fairlead-connect/{interface}"))?;
    match UnixListener::bind_addr(&address) {
        Err(error) if error.kind() == std::io::ErrorKind::AddrInUse => {
            bail!("another `fairlead connect` uses device {interface}: choose another one with --interface")
        }
        bound => bound.context("cannot lock the device"),
    }
}
