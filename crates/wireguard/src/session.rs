//! One session: the keys that a handshake has given, and what has been received with them (`struct noise_keypair` of the kernel's
//! `noise.h`).

use std::fmt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_limits::ReplayWindow;
use zeroize::Zeroizing;

use crate::error::Error;
use crate::handshake::SessionKeys;
use crate::keys::{Decrypted, REJECT_AFTER_MESSAGES, ReceiveKey, SendKey};

/// Age at which a session can be used no more (`REJECT_AFTER_TIME`, WireGuard paper 6.1).
pub(crate) const REJECT_AFTER_TIME: Duration = Duration::from_secs(180);
/// Words of the replay window (WireGuard paper 5.4.6): 8,192 bits, the kernel's `COUNTER_BITS_TOTAL` in `messages.h`.
const WINDOW_WORDS: usize = 128;
/// Words of the window of a session that is only used by messages still under way when the next one began: 2,048 bits.
const RETIRED_WINDOW_WORDS: usize = 32;

/// Keys from one handshake. Its memory is kept small, because a node has two sessions with every peer.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) local_index: u32,
    /// Whether this node has sent the initiation.
    pub(crate) is_initiator: bool,
    created: Instant,
    sending: Sending,
    receive: Arc<ReceiveKey>,
    window: ReplayWindow,
}

/// The cipher takes 600 bytes, so there is one only while it may be used.
enum Sending {
    Key(Arc<SendKey>),
    /// A newer session has taken over.
    Over,
    /// The peer has not used the session yet (WireGuard paper 5.4.6). Until then, it may stem from an initiation that was replayed.
    Unconfirmed {
        key: Zeroizing<[u8; 32]>,
        remote_index: u32,
    },
}

impl fmt::Debug for Sending {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Key(key) => key.fmt(f),
            Self::Over => f.write_str("Over"),
            Self::Unconfirmed { .. } => f.write_str("Unconfirmed"),
        }
    }
}

impl Session {
    /// A session of the keys, which its initiator may use at once, and the responder after [`Self::confirm`].
    pub(crate) fn new(keys: &SessionKeys, now: Instant) -> Box<Self> {
        let sending = if keys.is_initiator {
            Sending::Key(Arc::new(SendKey::new(&keys.send, keys.remote_index)))
        } else {
            Sending::Unconfirmed { key: Zeroizing::new(keys.send), remote_index: keys.remote_index }
        };
        Box::new(Self {
            local_index: keys.local_index,
            is_initiator: keys.is_initiator,
            created: now,
            sending,
            receive: Arc::new(ReceiveKey::new(&keys.receive, keys.local_index)),
            window: ReplayWindow::new(WINDOW_WORDS, REJECT_AFTER_MESSAGES),
        })
    }

    /// The peer has used the session: now this node may.
    pub(crate) fn confirm(&mut self) {
        if let Sending::Unconfirmed { key, remote_index } = &self.sending {
            self.sending = Sending::Key(Arc::new(SendKey::new(key, *remote_index)));
        }
    }

    /// Retires the session when a newer one takes over: only messages under way are still received in it.
    pub(crate) fn retired(mut self: Box<Self>) -> Box<Self> {
        self.sending = Sending::Over;
        self.window.reduce(RETIRED_WINDOW_WORDS);
        self
    }

    /// Whether [`Self::retired`] was called: this node never sends in it again.
    pub(crate) fn is_retired(&self) -> bool {
        matches!(self.sending, Sending::Over)
    }

    /// Whether a message of the peer has arrived in it.
    pub(crate) fn is_used(&self) -> bool {
        !self.window.is_empty()
    }

    /// Whether the response that made it was sent, or received, before `instant`.
    #[inline]
    pub(crate) fn is_from_before(&self, instant: Instant) -> bool {
        self.created < instant
    }

    /// Whether this session is older than the other one.
    #[inline]
    pub(crate) fn precedes(&self, other: &Self) -> bool {
        self.is_from_before(other.created)
    }

    /// The key to send with, if that is still allowed.
    #[inline]
    pub(crate) fn send_key(&self, now: Instant) -> Option<&Arc<SendKey>> {
        match &self.sending {
            Sending::Key(key) if !key.is_exhausted() && !self.is_older(REJECT_AFTER_TIME, now) => Some(key),
            Sending::Key(_) | Sending::Over | Sending::Unconfirmed { .. } => None,
        }
    }

    /// Whether so much time has passed since the handshake, as the kernel's `wg_birthdate_has_expired` has it.
    #[inline]
    pub(crate) fn is_older(&self, age: Duration, now: Instant) -> bool {
        now.saturating_duration_since(self.created) >= age
    }

    /// The key that decrypts what is received in it, if that is still allowed.
    ///
    /// # Errors
    /// [`Error::Expired`]
    #[inline]
    pub(crate) fn receive_key(&self, now: Instant) -> Result<&Arc<ReceiveKey>, Error> {
        if self.is_older(REJECT_AFTER_TIME, now) { Err(Error::Expired) } else { Ok(&self.receive) }
    }

    /// Records a message that was decrypted: a forged counter must not move the window.
    ///
    /// # Errors
    /// [`Error::Expired`] and [`Error::Replayed`]
    #[inline]
    pub(crate) fn record(&mut self, decrypted: &Decrypted, now: Instant) -> Result<(), Error> {
        self.receive_key(now)?;
        if self.window.check_and_record(decrypted.counter) { Ok(()) } else { Err(Error::Replayed) }
    }
}
