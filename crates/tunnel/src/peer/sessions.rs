//! Sessions with a peer, of this node's identity and of the one that was replaced.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_keys::PublicKey;
use fairlead_wireguard::{Decrypted, Now, ReceiveKey, Tunnel};

/// Time in which the last session of a replaced identity still takes what the peer sends: the peer follows after a moment.
const PREVIOUS_IDENTITY: Duration = Duration::from_secs(15);

/// The session with the identity that was replaced: the kernel's WireGuard takes what arrives for it, too.
struct Previous {
    tunnel: Box<Tunnel>,
    /// Our index of it.
    index: u32,
    until: Instant,
}

/// A data message that came in a session for the first time.
pub(super) struct ReceivedData {
    /// Whether the packet confirms the session of the last response.
    pub(super) confirms: bool,
    /// Whether the packet was sent before one that has arrived: by a way that the peer has left since.
    pub(super) is_overtaken: bool,
}

/// Sessions of one peer, and handshakes for them.
#[derive(Default)]
pub(super) struct Sessions {
    /// `None` while there is neither a session nor a handshake nor anything to remember.
    pub(super) tunnel: Option<Box<Tunnel>>,
    previous: Option<Box<Previous>>,
    /// Our index of the session of the newest data message, and its counter.
    newest: Option<(u32, u64)>,
}

impl Sessions {
    /// Whether there is one that the peer has used, or answered for.
    pub(super) fn are_live(&self, now: Instant) -> bool {
        self.tunnel.as_ref().is_some_and(|tunnel| tunnel.is_established(now))
    }

    /// Whether there is one, also if the peer has yet to confirm it.
    pub(super) fn exist(&self, now: Instant) -> bool {
        let exists = |tunnel: &Tunnel| tunnel.is_established(now) || tunnel.awaits_confirmation(now);
        self.tunnel.as_deref().is_some_and(exists)
    }

    /// Whether a handshake of this node has had no answer yet.
    pub(super) fn are_handshaking(&self) -> bool {
        self.tunnel.as_ref().is_some_and(|tunnel| tunnel.is_handshaking())
    }

    /// Whether a session or a handshake has this index of ours.
    pub(super) fn use_index(&self, index: u32) -> bool {
        let previous = self.previous.as_deref().map(|previous| &previous.tunnel);
        self.tunnel.iter().chain(previous).any(|tunnel| tunnel.indexes().any(|used| used == index))
    }

    /// The key that decrypts data messages with this index of ours.
    pub(super) fn receive_key(&self, index: u32, now: Instant, peer: &PublicKey) -> Option<Arc<ReceiveKey>> {
        let previous = self.previous.as_deref().filter(|it| it.index == index && it.until > now);
        let tunnel = previous.map(|previous| &previous.tunnel).or(self.tunnel.as_ref())?;
        let key = tunnel.receive_key(index, now);
        key.inspect_err(|error| tracing::trace!(%error, %peer, "messages dropped")).ok().cloned()
    }

    /// Takes a data message that was decrypted; `None` if it must be dropped.
    pub(super) fn receive(
        &mut self,
        decrypted: &Decrypted,
        remote: SocketAddr,
        now: Now,
    ) -> Option<ReceivedData> {
        let index = decrypted.index();
        self.end_previous(now.instant);
        let previous = self.previous.as_deref_mut().filter(|previous| index == previous.index);
        let is_previous = previous.is_some();
        let tunnel = previous.map(|previous| &mut previous.tunnel).or(self.tunnel.as_mut())?;
        let is_first = tunnel
            .receive(decrypted, now)
            .inspect_err(|error| tracing::trace!(%error, %remote, "message dropped"))
            .ok()?;
        let is_overtaken = !is_previous && self.have_overtaken(index, decrypted.counter());
        Some(ReceivedData { confirms: is_first && !is_previous, is_overtaken })
    }

    /// Whether a newer message than this one has arrived. The highest counter of a session decides, as in QUIC (RFC 9000, 9.3).
    fn have_overtaken(&mut self, index: u32, counter: u64) -> bool {
        let is_overtaken = self.newest.is_some_and(|(of, newest)| of == index && counter < newest);
        if !is_overtaken {
            self.newest = Some((index, counter));
        }
        is_overtaken
    }

    /// The identity of this node is replaced: only the last session that works takes what the peer still sends in it.
    pub(super) fn replace_identity(&mut self, now: Instant) {
        let was_live = self.are_live(now);
        let until = now.checked_add(PREVIOUS_IDENTITY).unwrap_or(now);
        let last = self.newest.take().filter(|_| was_live);
        // Time stamps of handshakes with the old identity need not be remembered.
        let tunnel = self.tunnel.take();
        self.previous =
            last.zip(tunnel).map(|((index, _), tunnel)| Box::new(Previous { tunnel, index, until }));
    }

    /// Time at which the session of the identity that was replaced ends.
    pub(super) fn previous_until(&self) -> Option<Instant> {
        self.previous.as_ref().map(|previous| previous.until)
    }

    /// Ends the session of the identity that was replaced, if it is time.
    pub(super) fn end_previous(&mut self, now: Instant) {
        self.previous.take_if(|previous| previous.until <= now);
    }

    /// Ends handshakes and sessions; frees their state if nothing in it has to be remembered, as the time stamp of the peer's last
    /// handshake has to be.
    pub(super) fn end(&mut self) {
        if let Some(tunnel) = &mut self.tunnel {
            tunnel.forget_sessions();
        }
        self.tunnel.take_if(|tunnel| tunnel.is_empty());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_lower_counter_of_the_same_session_is_overtaken() {
        let mut sessions = Sessions::default();
        let overtaken = [(7, 5), (7, 4), (7, 6), (8, 0), (7, 5)]
            .map(|(index, counter)| sessions.have_overtaken(index, counter));
        assert_eq!(overtaken, [false, true, false, false, false]);
    }
}
