//! Handshakes that only the peer can start. A peer refuses handshake initiations whose time stamp is older than one it has seen
//! (TAI64N, WireGuard paper 5.1), and says nothing: a node that was rebooted with its clock set back gets no session. So a
//! peer that answers requests but no handshakes is asked to start one. Its own initiation is not refused: this node has seen none of its
//! time stamps, or older ones.

use std::net::SocketAddr;
use std::time::Duration;

use super::Prober;

impl Prober {
    /// Takes what the device says of handshakes: whether it has a session, whatever has come through it, and how many bytes it
    /// has sent to the peer.
    pub(crate) fn observe_handshake(&mut self, now: Duration, has_session: bool, tx_bytes: u64) {
        let works = self.works(now);
        self.handshakes.observe(now, works, has_session, tx_bytes);
    }

    /// Takes the address for a request to start a handshake; `None` if none is due.
    pub(super) fn take_handshake_request(&mut self, now: Duration) -> Option<SocketAddr> {
        self.handshakes.take_request(now).then_some(self.paths.current).flatten()
    }

    /// The peer has asked for a handshake, in an authenticated request. Whether this node is to start one: the request `is_new`, no
    /// recording, the path in use works, and the last such handshake is long enough ago. Otherwise the peer is asked whether it
    /// is there; it asks again.
    pub(crate) fn handle_handshake_request(&mut self, now: Duration, from: SocketAddr, is_new: bool) -> bool {
        if self.handshakes.was_just_started(now) {
            return false;
        }
        if is_new && self.works(now) {
            self.handshakes.start(now);
            return true;
        }
        let Some(was_tried) = self.handshakes.try_paths(now) else { return false };
        if is_new && was_tried && self.paths.to(from).is_some_and(|path| path.is_fresh(now)) {
            // The peer has moved: the path in use was asked as well.
            self.fail_current(now);
        } else {
            self.paths.ask_once(now, [Some(from), self.paths.current]);
        }
        false
    }
}
