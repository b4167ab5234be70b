//! Runs in a target pod: sends its name and a payload over every connection.

use std::convert::Infallible;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context as _;
use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::arguments::queries::ServeArguments;

/// What a target sends after its name: enough for full-size packets, which a wrong MTU on the way would stop.
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
    let any = |ip: std::net::IpAddr| TcpListener::bind(SocketAddr::new(ip, arguments.port));
    // Without IPv6 in the kernel there is no `::` to listen on.
    let listener = match any(Ipv6Addr::UNSPECIFIED.into()).await {
        Ok(listener) => listener,
        Err(_) => any(Ipv4Addr::UNSPECIFIED.into())
            .await
            .with_context(|| format!("cannot listen on port {}", arguments.port))?,
    };
    match accept(listener, arguments.name.clone()).await {}
}

pub(super) async fn accept(listener: TcpListener, name: String) -> Infallible {
    let mut connections = JoinSet::new();
    loop {
        if connections.len() >= MAX_CONNECTIONS {
            connections.join_next().await;
        }
        match listener.accept().await {
            Ok((stream, _)) => drop(connections.spawn(timeout(TIMEOUT, answer(stream, name.clone())))),
            Err(error) => tracing::warn!(%error, "cannot accept a connection"),
        }
        while connections.try_join_next().is_some() {}
    }
}

async fn answer(mut stream: TcpStream, name: String) -> std::io::Result<()> {
    stream.write_all(format!("{name}\n").as_bytes()).await?;
    stream.write_all(&vec![b'.'; PAYLOAD]).await?;
    stream.shutdown().await
}
