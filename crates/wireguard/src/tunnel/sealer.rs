//! Sending in the current session.

use std::sync::Arc;
use std::time::Instant;

use crate::error::Error;
use crate::keys::SendKey;
use crate::message::{DATA_HEADER_LENGTH, TAG_LENGTH};
use crate::session::Session;
use crate::timers::{REKEY_AFTER_MESSAGES, REKEY_AFTER_TIME, Timers};

/// Sends packets in a peer's current session; see [`Tunnel::sealer`](super::Tunnel::sealer). Time stands still in it: it is made
/// for the packets that are at hand.
#[derive(Debug)]
pub struct Sealer<'a> {
    key: &'a Arc<SendKey>,
    timers: &'a mut Timers,
    now: Instant,
    /// The session is so old that this node, its initiator, has to begin a new one when it sends.
    is_old: bool,
}

impl<'a> Sealer<'a> {
    #[inline]
    pub(super) fn new(
        key: &'a Arc<SendKey>,
        session: &Session,
        timers: &'a mut Timers,
        now: Instant,
    ) -> Self {
        let is_old = session.is_initiator && session.is_older(REKEY_AFTER_TIME, now);
        Self { key, timers, now, is_old }
    }

    /// Gives the next counter to `datagram`, which is to be sent: 16 bytes for the header, the inner packet, which is padded already
    /// (none for a keepalive), and 16 bytes for the tag. [`SendKey::encrypt`] of [`Self::key`] then makes a data message of it.
    ///
    /// # Errors
    /// [`Error::CounterExhausted`], after which a new session is needed, and [`Error::Malformed`] if `datagram` has no room for
    /// header and tag.
    #[inline]
    pub fn assign_counter(&mut self, datagram: &mut [u8]) -> Result<(), Error> {
        let counter = self.key.assign_counter(datagram)?;
        self.timers.message_sent(datagram.len() > DATA_HEADER_LENGTH + TAG_LENGTH, self.now);
        if self.is_old || counter >= REKEY_AFTER_MESSAGES {
            self.timers.want_handshake(self.now);
        }
        Ok(())
    }

    /// The key of the session, for any thread.
    pub fn key(&self) -> &Arc<SendKey> {
        self.key
    }
}
