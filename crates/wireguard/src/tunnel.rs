//! State of the protocol for one peer.

use std::fmt;
use std::sync::Arc;
use std::time::{Instant, SystemTime};

use fairlead_keys::PublicKey;
use zeroize::Zeroizing;

use crate::error::Error;
use crate::handshake::Tai64n;
use crate::identity::Identity;
use crate::keys::{Decrypted, ReceiveKey};
use crate::mac::MacSender;
use crate::now::Now;
use crate::random::Random;
use crate::session::{REJECT_AFTER_TIME, Session};
use crate::timers::{Due, REKEY_ON_RECEIVE, REKEY_TIMEOUT, Timers};
use pending::Pending;

mod handshakes;
mod pending;
mod sealer;
#[cfg(test)]
mod tests;

pub use sealer::Sealer;

/// The sessions and handshakes with one peer, and its timers (WireGuard paper 5 and 6).
///
/// It makes and takes messages; sending them, finding the peer of a message and keeping packets while there is no session are the
/// caller's. Whatever was called, [`Self::take_due`] may have something new, and [`Self::poll_timeout`] may have changed.
///
/// With two sessions, it takes less than 4 KiB with its heap, and less than 3 KiB where there is little traffic. While handshakes
/// of both peers cross, there is a third session, until the peer uses one of the new ones.
pub struct Tunnel {
    identity: Arc<Identity>,
    peer: PublicKey,
    preshared_key: Option<Zeroizing<[u8; 32]>>,
    macs: MacSender,
    timers: Timers,
    /// The session that this node sends in.
    current: Option<Box<Session>>,
    /// Previous session, for messages that are still under way. It is retired, unless the peer may still come to use it.
    previous: Option<Box<Session>>,
    /// The session of the last response that this node has sent, until the peer uses it. It is retired if this node will not send
    /// in it even then.
    next: Option<Box<Session>>,
    /// Initiations without answer.
    pending: Pending,
    /// The greatest time stamp in an initiation of the peer (WireGuard paper 5.1).
    greatest_timestamp: Option<Tai64n>,
    /// Time at which its last initiation was taken.
    initiation_taken: Option<Instant>,
    last_handshake: Option<SystemTime>,
}

impl Tunnel {
    /// A peer that nothing has been sent to and nothing come from.
    pub fn new(identity: Arc<Identity>, peer: PublicKey, preshared_key: Option<[u8; 32]>) -> Self {
        Self {
            identity,
            macs: MacSender::new(&peer),
            peer,
            preshared_key: preshared_key.map(Zeroizing::new),
            timers: Timers::default(),
            current: None,
            previous: None,
            next: None,
            pending: Pending::default(),
            greatest_timestamp: None,
            initiation_taken: None,
            last_handshake: None,
        }
    }

    /// The key that handshakes mix in from now on, also those that have begun. Sessions stay.
    pub fn set_preshared_key(&mut self, key: Option<[u8; 32]>) {
        self.preshared_key = key.map(Zeroizing::new);
    }

    /// The session to send in, for a number of packets at `now`. None while there is no session that may still send: packets have
    /// to wait for one, and [`Self::initiate`] is to be called.
    #[inline]
    pub fn sealer(&mut self, now: Instant) -> Option<Sealer<'_>> {
        let session = self.current.as_deref()?;
        Some(Sealer::new(session.send_key(now)?, session, &mut self.timers, now))
    }

    /// The key that decrypts data messages with this index of ours. [`Self::receive`] is to take what was decrypted.
    ///
    /// # Errors
    /// [`Error::UnknownIndex`] and [`Error::Expired`]
    #[inline]
    pub fn receive_key(&self, index: u32, now: Instant) -> Result<&Arc<ReceiveKey>, Error> {
        let mut sessions = [&self.current, &self.previous, &self.next].into_iter().flatten();
        let session = sessions.find(|session| session.local_index == index).ok_or(Error::UnknownIndex)?;
        session.receive_key(now)
    }

    /// Takes a data message that was decrypted. What it contains came from the peer, and comes here only once. Returns whether it
    /// confirms the session of the last response: from now on this node sends in it, and packets that wait can go.
    ///
    /// # Errors
    /// [`Error::UnknownIndex`], [`Error::Expired`] and [`Error::Replayed`]: it must be dropped. The state has not changed then.
    #[inline]
    pub fn receive(&mut self, decrypted: &Decrypted, now: Now) -> Result<bool, Error> {
        let index = decrypted.index;
        let session = [&mut self.current, &mut self.previous, &mut self.next]
            .into_iter()
            .filter_map(Option::as_mut)
            .find(|session| session.local_index == index)
            .ok_or(Error::UnknownIndex)?;
        session.record(decrypted, now.instant)?;
        let is_current = self.current.as_ref().is_some_and(|current| current.local_index == index);
        let is_first = !is_current && self.used_other(index, now);
        self.received(index, decrypted.inner.len(), now.instant);
        Ok(is_first)
    }

    /// The peer has used a session that is not the current one. Whether that has confirmed the one of the last response.
    #[cold]
    fn used_other(&mut self, index: u32, now: Now) -> bool {
        if let Some(next) = self.next.take_if(|next| next.local_index == index) {
            if next.is_retired() {
                self.previous = Some(next);
                return false;
            }
            self.confirm(next, now);
            return true;
        }
        let is_wanted = |session: &mut Box<Session>| session.local_index == index && !session.is_retired();
        if let Some(session) = self.previous.take_if(is_wanted) {
            // The peer has changed to this node's session after this node had changed to the peer's.
            self.previous = self.current.replace(session).map(Session::retired);
        }
        false
    }

    /// The peer has used the session of the last response (`wg_noise_received_with_keypair` of the kernel's `noise.c`).
    fn confirm(&mut self, mut session: Box<Session>, now: Now) {
        session.confirm();
        // With a newer one that the peer has not used, the handshakes have crossed: it may be about to.
        let may_come = |last: &Session| session.precedes(last) && !last.is_used();
        let last = self.current.take().map(|last| if may_come(&last) { last } else { last.retired() });
        self.previous = last;
        self.current = Some(session);
        self.timers.handshake_completed();
        self.pending.clear();
        self.last_handshake = Some(now.wall);
    }

    #[inline]
    fn received(&mut self, index: u32, length: usize, now: Instant) {
        self.timers.message_received(length > 0, now);
        let Some(session) = &self.current else { return };
        let is_current = session.local_index == index;
        // The peer would use a session that it has begun later than this one; what it sends does not take so long.
        let is_stale = |next: &mut Box<Session>| next.precedes(session) || next.is_older(REKEY_TIMEOUT, now);
        if is_current && self.next.is_some() {
            self.next.take_if(is_stale);
        }
        if is_current && !self.pending.is_empty() && !self.timers.is_attempting() {
            // The peer uses the session. An answer to a later initiation than the one that led to it is no longer needed.
            self.pending.clear();
        }
        if session.is_initiator && session.is_older(REKEY_ON_RECEIVE, now) && session.send_key(now).is_some()
        {
            self.timers.want_last_minute_handshake(now);
        }
    }

    /// Whether there is a session that may still send.
    pub fn is_established(&self, now: Instant) -> bool {
        self.current.as_ref().is_some_and(|session| session.send_key(now).is_some())
    }

    /// Whether a response was sent that the peer may still confirm by using its session.
    pub fn awaits_confirmation(&self, now: Instant) -> bool {
        self.next
            .as_ref()
            .is_some_and(|session| !session.is_retired() && !session.is_older(REJECT_AFTER_TIME, now))
    }

    /// Time at which the last handshake was completed: the peer has answered, or confirmed a session by using it.
    pub fn last_handshake(&self) -> Option<SystemTime> {
        self.last_handshake
    }

    /// Takes the next action that is due at `now`; to be called until there is none.
    pub fn take_due(&mut self, now: Instant, random: &mut dyn Random) -> Option<Due> {
        let due = self.timers.take_due(self.is_established(now), now, random)?;
        if due == Due::Expired {
            self.erase_sessions();
            if !self.timers.is_attempting() {
                self.pending.clear();
            }
        }
        Some(due)
    }

    /// Whether this node has begun a handshake that was neither answered nor given up.
    pub fn is_handshaking(&self) -> bool {
        self.timers.is_attempting()
    }

    /// Time at which [`Self::take_due`] has an action. None: never, unless something is called before.
    pub fn poll_timeout(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// This node's indexes of all sessions and handshakes: messages with these belong to this peer.
    pub fn indexes(&self) -> impl Iterator<Item = u32> {
        let sessions = [&self.current, &self.previous, &self.next].into_iter().flatten();
        sessions.map(|session| session.local_index).chain(self.pending.indexes())
    }

    /// Erases all keys, handshakes and timers. The greatest time stamp stays, as protection against replayed initiations (WireGuard
    /// paper 5.1), and so does a cookie.
    pub fn forget_sessions(&mut self) {
        self.erase_sessions();
        self.pending.clear();
        self.timers = Timers::default();
    }

    /// Whether a new one would do as well: there is no session, no handshake, no time stamp and no cookie to remember.
    pub fn is_empty(&self) -> bool {
        self.indexes().next().is_none() && self.greatest_timestamp.is_none() && !self.macs.has_cookie()
    }

    fn erase_sessions(&mut self) {
        self.current = None;
        self.previous = None;
        self.next = None;
    }
}

impl fmt::Debug for Tunnel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tunnel")
            .field("peer", &self.peer)
            .field("current", &self.current)
            .field("previous", &self.previous)
            .field("next", &self.next)
            .field("pending", &self.pending)
            .field("timers", &self.timers)
            .finish_non_exhaustive()
    }
}
