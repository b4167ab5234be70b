//! The sockets beside the WireGuard port: those of birthday attempts, and those that are kept.

use std::time::Duration;

use fairlead_dataplane::wireguard::PathSocket;
use fairlead_path::SocketChange;

use super::Shared;

impl Shared {
    /// Tells the agent of what was kept by another one.
    pub(super) fn adopt_sockets(&mut self, now: Duration) {
        let kept = self.socket.as_deref().map(PathSocket::kept_endpoints).unwrap_or_default();
        self.agent.adopt_sockets(now, &kept);
    }

    /// Opens, keeps, leaves or closes sockets of a birthday attempt.
    pub(super) fn change_sockets(&mut self, change: SocketChange) {
        let Some(socket) = &self.socket else { return };
        match change {
            SocketChange::Close => socket.close_sockets(),
            SocketChange::Keep { peer, remote, socket: number } => {
                tracing::debug!(%peer, %remote, "keeping a socket of the birthday attempt");
                if let Err(error) = socket.keep_socket(number, remote) {
                    tracing::warn!(%peer, %remote, %error, "cannot keep a socket of the birthday attempt");
                }
            }
            SocketChange::Leave { remote } => socket.leave_socket(remote),
            SocketChange::Open { count } => {
                tracing::debug!(count, "opening sockets for a birthday attempt");
                if let Err(error) = socket.open_sockets(count) {
                    tracing::warn!(%error, "cannot open the sockets of a birthday attempt");
                    self.is_sockets_refused = true;
                }
            }
        }
    }
}
