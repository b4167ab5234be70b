//! The endpoint of a peer.

use std::io;
use std::time::Instant;

use fairlead_keys::PublicKey;

use crate::roaming::Roaming;
use crate::udp::Path;

/// The way of packets to a peer, and when it changes.
#[derive(Default)]
pub(super) struct Endpoint {
    pub(super) path: Option<Path>,
    pub(super) roaming: Roaming,
    /// Reason why the last datagram could not be sent; `None` if it could.
    pub(super) error: Option<String>,
}

impl Endpoint {
    /// Uses a configured way.
    pub(super) fn configure(&mut self, path: Path) {
        *self = Self { path: Some(path), ..Self::default() };
    }

    /// Takes the way by which an authenticated message came: only such a one moves the endpoint, as [`Roaming`] decides.
    pub(super) fn follow(&mut self, path: Path, is_overtaken: bool, was_live: bool, now: Instant) {
        let present = self.path.map(|present| present.remote);
        let counts = !is_overtaken || present == Some(path.remote);
        // Without a session there are no packets under way that could make both peers swap their paths.
        if counts && (!was_live || self.roaming.moves(present, path.remote, now)) {
            self.path = Some(path);
        }
    }

    /// Takes note of a datagram that could not be sent.
    pub(super) fn failed(&mut self, peer: &PublicKey, asked: &Path, length: usize, error: &io::Error) {
        if self.error.is_none() {
            tracing::debug!(%peer, remote = %asked.remote, %error, "this host does not send to a peer");
        }
        self.error = Some(format!("sending {length} bytes to {}: {error}", asked.remote));
    }

    /// Takes note of a datagram that was sent. `used` lacks the local address of `asked` when the kernel refused it: the address
    /// has been removed.
    pub(super) fn sent(&mut self, peer: &PublicKey, asked: &Path, used: &Path) {
        if self.error.take().is_some() {
            tracing::debug!(%peer, remote = %asked.remote, "this host sends to a peer again");
        }
        if used.local != asked.local
            && let Some(path) = self.path.as_mut().filter(|path| path.local == asked.local)
        {
            path.local = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_local_address_that_was_refused_is_left_and_an_error_is_kept_until_a_send() {
        let (mut endpoint, peer) = (Endpoint::default(), PublicKey([1; 32]));
        let asked = Path { local: Some([192, 0, 2, 9].into()), ..Path::to(([192, 0, 2, 1], 7).into()) };
        endpoint.configure(asked);
        endpoint.failed(&peer, &asked, 92, &io::Error::other("no"));
        assert_eq!(endpoint.error.as_deref(), Some("sending 92 bytes to 192.0.2.1:7: no"));
        endpoint.sent(&peer, &asked, &Path { local: None, ..asked });
        assert_eq!((endpoint.error, endpoint.path.unwrap().local), (None, None));
    }
}
