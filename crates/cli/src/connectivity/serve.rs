//! Runs in a target pod: sends its name and a payload over every connection.

use std::convert::Infallible;
use std::net::{Ipv6Addr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::arguments::queries::ServeArguments;

/// Bytes that a target sends after its name: enough for full-size packets, which a wrong MTU on the way would stop.
pub(super) const PAYLOAD: usize = 64 * 1024;
/// Connections at the same time; others wait in the listener's queue.
const MAX_CONNECTIONS: usize = 64;
/// Longest one connection may take.
const TIMEOUT: Duration = Duration::from_secs(10);

/// Serves until the pod is ended.
///
/// # Errors
/// The port cannot be used.
pub(super) async fn run(arguments: &ServeArguments) -> anyhow::Result<ExitCode> {
    let address = SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), arguments.port);
    let listener = fairlead_transport::listen(address)
        .with_context(|| format!("cannot listen on port {}", arguments.port))?;
    match accept_all(&listener, &arguments.name).await {}
}

pub(super) async fn accept_all(listener: &TcpListener, name: &str) -> Infallible {
    let serve = |stream, _| {
        let answered = timeout(TIMEOUT, answer(stream, name.to_owned()));
        Some(async move { drop(answered.await) })
    };
    fairlead_transport::accept_all(listener, &mut JoinSet::new(), || MAX_CONNECTIONS, serve).await
}

async fn answer(mut stream: TcpStream, name: String) -> std::io::Result<()> {
    stream.write_all(format!("{name}\n").as_bytes()).await?;
    stream.write_all(&vec![b'.'; PAYLOAD]).await?;
    stream.shutdown().await
}
