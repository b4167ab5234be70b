//! Connections of clients and of other replicas: options of their sockets, and the end of their tasks.

use std::io;

use socket2::SockRef;
use tokio::net::TcpStream;
use tokio::task::JoinError;

use crate::{NOT_SENT, USER_TIMEOUT};

pub(super) fn configure(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    let socket = SockRef::from(stream);
    socket.set_tcp_notsent_lowat(NOT_SENT)?;
    socket.set_tcp_user_timeout(Some(USER_TIMEOUT))
}

/// A panic ends only its connection.
pub(super) fn report(ended: Result<(), JoinError>) {
    if let Err(error) = ended {
        tracing::error!(%error, "a connection's task failed");
    }
}
