//! Initiations without answer.

use std::time::Instant;

use crate::handshake::Initiator;

/// The last two handshakes that this node has begun, the newest first.
///
/// Two, because an initiation is also repeated before the time for its answer is over, and the answer to either is good.
#[derive(Debug, Default)]
pub(super) struct Pending([Option<Box<Handshake>>; 2]);

#[derive(Debug)]
struct Handshake {
    initiator: Initiator,
    sent: Instant,
}

impl Pending {
    /// Adds a handshake that begins now; forgets the last but one.
    pub(super) fn push(&mut self, initiator: Initiator, sent: Instant) {
        let [newest, older] = &mut self.0;
        *older = newest.replace(Box::new(Handshake { initiator, sent }));
    }

    /// Time at which the last one was sent.
    pub(super) fn last_sent(&self) -> Option<Instant> {
        self.iter().next().map(|handshake| handshake.sent)
    }

    /// The one with this index, and when its initiation was sent.
    pub(super) fn get(&self, index: u32) -> Option<(&Initiator, Instant)> {
        let handshake = self.iter().find(|handshake| handshake.initiator.index() == index)?;
        Some((&handshake.initiator, handshake.sent))
    }

    /// Forgets the one with this index, which was answered, and older ones. To a newer one there may be another answer: the peer
    /// that has sent it has no keys of the older one any more.
    pub(super) fn remove_through(&mut self, index: u32) {
        let [newest, older] = &mut self.0;
        *older = None;
        newest.take_if(|handshake| handshake.initiator.index() == index);
    }

    /// Forgets all.
    pub(super) fn clear(&mut self) {
        self.0 = Default::default();
    }

    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        let [newest, _] = &self.0;
        newest.is_none()
    }

    pub(super) fn indexes(&self) -> impl Iterator<Item = u32> {
        self.iter().map(|handshake| handshake.initiator.index())
    }

    fn iter(&self) -> impl Iterator<Item = &Handshake> {
        self.0.iter().flatten().map(Box::as_ref)
    }
}
