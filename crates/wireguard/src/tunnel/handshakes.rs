//! The four handshake messages, from the side of either peer (WireGuard paper 5.4.2 to 5.4.7).

use std::time::{Duration, Instant};

use super::Tunnel;
use crate::error::Error;
use crate::handshake::{self, ReceivedInitiation, SessionKeys, Tai64n};
use crate::message::{self, Initiation, Response};
use crate::now::Now;
use crate::random::Random;
use crate::session::Session;
use crate::timers::REKEY_TIMEOUT;

/// Shortest time between initiations of a peer: 50 a second are taken (`INITIATIONS_PER_SECOND` of the kernel's `messages.h`).
const INITIATION_INTERVAL: Duration = Duration::from_millis(20);

impl Tunnel {
    /// A new initiation to be sent to the peer, with its MACs. `index` is what the peer will call this node by; it is new.
    ///
    /// Without `again`, a packet asks for it: the 90 s until this node gives up begin anew, and there is no message while another
    /// one, younger than `REKEY_TIMEOUT` (5 s), is not answered. With `again`, the attempt under way goes on. There is no message
    /// either if the peer's public key is of low order: such a peer cannot exist.
    pub fn initiate(
        &mut self,
        again: bool,
        index: u32,
        now: Now,
        random: &mut dyn Random,
    ) -> Option<Initiation> {
        if !again {
            self.timers.restart_attempt(now.instant);
            let is_young = |sent| now.instant.saturating_duration_since(sent) < REKEY_TIMEOUT;
            if self.timers.is_attempting() && self.pending.last_sent().is_some_and(is_young) {
                return None;
            }
        }
        let timestamp = Tai64n::from(now.wall);
        let begun = handshake::initiate(&self.identity, &self.peer, index, timestamp, random);
        let (initiator, mut message) = begun.ok()?;
        self.macs.sign(&mut message, now.instant);
        self.pending.push(initiator, now.instant);
        self.timers.initiation_sent(now.instant, random);
        Some(message)
    }

    /// Answers an initiation of this peer; the response, with its MACs, is to be sent. `index` is what the peer will call this node
    /// by; it is new. The session becomes the current one when the peer uses it (WireGuard paper 5.4.6).
    ///
    /// # Errors
    /// [`Error::OldTimestamp`] (WireGuard paper 5.1) and [`Error::TooFrequent`], neither of which changes anything;
    /// [`Error::Authentication`] if the initiation is another peer's; and those of [`ReceivedInitiation::respond`].
    pub fn respond(
        &mut self,
        received: ReceivedInitiation,
        index: u32,
        now: Now,
        random: &mut dyn Random,
    ) -> Result<Response, Error> {
        if received.peer != self.peer {
            return Err(Error::Authentication);
        }
        if self.greatest_timestamp.is_some_and(|greatest| received.timestamp <= greatest) {
            return Err(Error::OldTimestamp);
        }
        let is_near = |taken| now.instant.saturating_duration_since(taken) < INITIATION_INTERVAL;
        if self.initiation_taken.is_some_and(is_near) {
            return Err(Error::TooFrequent);
        }
        self.greatest_timestamp = Some(received.timestamp);
        self.initiation_taken = Some(now.instant);
        let (mut response, keys) = received.respond(self.preshared_key.as_deref(), index, random)?;
        self.macs.sign(&mut response, now.instant);
        self.await_confirmation(&keys, now.instant);
        self.timers.response_sent(now.instant, random);
        Ok(response)
    }

    /// Takes the response to one of the last two initiations: there is a current session. Now packets that wait can be sent. The
    /// peer sends nothing in the session before it has got something: without a packet, [`Self::take_due`] asks for a keepalive.
    ///
    /// # Errors
    /// [`Error::Malformed`], [`Error::UnknownIndex`] and those of [`Initiator::finish`](crate::Initiator::finish). The state has
    /// not changed then: the true response may still come.
    pub fn finish(&mut self, response: &[u8], now: Now) -> Result<(), Error> {
        let index = message::receiver_index(response).ok_or(Error::Malformed)?;
        let (initiator, sent) = self.pending.get(index).ok_or(Error::UnknownIndex)?;
        let keys = initiator.finish(response, self.preshared_key.as_deref())?;
        self.pending.remove_through(index);
        self.begin_session(&keys, sent, now.instant);
        self.timers.response_received(now.instant);
        self.last_handshake = Some(now.wall);
        Ok(())
    }

    /// Takes a cookie reply to the last handshake message: the next one will carry it (WireGuard paper 5.4.7). The message is not
    /// repeated at once, or load would cause more load.
    ///
    /// # Errors
    /// See [`MacSender::receive_cookie`](crate::MacSender::receive_cookie).
    pub fn receive_cookie(&mut self, reply: &[u8], now: Instant) -> Result<(), Error> {
        self.macs.receive_cookie(reply, now)
    }

    /// The initiator's half of the kernel's `add_new_keypair` (`noise.c`), for an initiation sent at `sent`.
    ///
    /// If each node has sent its initiation before it got the other's, the handshakes have crossed, and both nodes may finish both.
    /// (The kernel cannot: an initiation that it takes overwrites its own.) The session that the node with the lower key has begun is
    /// to stay. The other node sends in its own one until the peer uses the first, so nothing depends on a message that may be lost,
    /// nor on the peer having the same rule.
    fn begin_session(&mut self, keys: &SessionKeys, sent: Instant, now: Instant) {
        let stays = self.identity.public().0 < self.peer.0;
        // Otherwise the peer has answered this initiation after it had begun the session of its own one.
        let has_crossed = |next: &Session| !next.is_from_before(sent);
        self.next =
            self.next.take().map(|next| if !stays && has_crossed(&next) { next } else { next.retired() });
        let last = self.current.replace(Session::new(keys, now));
        // The peer goes on in the session that it has used, until it gets something in the new one.
        let is_needed = |last: &Session| last.is_used() || self.previous.is_none();
        let last = last.filter(|last| is_needed(last));
        self.previous = last.or(self.previous.take()).map(Session::retired);
    }

    /// The responder's half. Of the older sessions only those stay in which the peer may still be sending, or may begin to.
    fn await_confirmation(&mut self, keys: &SessionKeys, now: Instant) {
        let last = self.next.replace(Session::new(keys, now));
        if self.current.as_ref().is_none_or(|current| current.is_used()) {
            self.previous = None;
        } else if self.previous.is_none() {
            self.previous = last;
        }
    }
}
