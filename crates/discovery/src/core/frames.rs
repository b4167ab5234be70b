//! Messages as watches get them, encoded once for all watches that are told the same.

use std::collections::BTreeMap;

use fairlead_wire::discovery::server::WatchResponse;
use prost::Message as _;
use prost::bytes::{BufMut as _, Bytes, BytesMut};

/// Messages of a cluster that are kept: the first messages of a watch of 10,000 affiliates are about 110.
const KEPT: usize = 128;
/// The prefix of a message of gRPC: no compression, and the length (gRPC over HTTP2, "Length-Prefixed-Message").
const PREFIX: usize = 5;

/// A message to watches.
#[derive(Debug, Clone)]
pub(super) struct Frame {
    /// Encoded message, with its length prefix.
    pub(super) bytes: Bytes,
    /// The number of the last change that it tells.
    pub(super) until: u64,
    /// Whether there was nothing more to tell when it was made.
    pub(super) is_complete: bool,
    /// The last change of the cluster when it was made.
    pub(super) last: u64,
}

/// Key of a message: the last change that its watch knows, and whether the watch is still told what there was when it began.
pub(super) type Known = (u64, bool);

/// The messages of a cluster.
#[derive(Debug, Default)]
pub(super) struct Frames {
    kept: BTreeMap<Known, Frame>,
    /// Whether one was used since the last [`Frames::age`].
    is_used: bool,
}

impl Frames {
    /// The message for watches that know this, if nothing that it tells has changed. `last` is the cluster's last change.
    pub(super) fn get(&mut self, known: Known, last: u64) -> Option<Frame> {
        let frame = self.kept.get(&known).filter(|frame| frame.is_current(last))?.clone();
        self.is_used = true;
        Some(frame)
    }

    pub(super) fn keep(&mut self, known: Known, frame: Frame) {
        if self.kept.len() >= KEPT {
            let last = frame.last;
            self.kept.retain(|_, frame| frame.is_current(last));
        }
        if self.kept.len() >= KEPT {
            self.kept.clear();
        }
        self.is_used = true;
        self.kept.insert(known, frame);
    }

    /// A change is not the last one of its affiliate any more: messages that tell it are outdated.
    pub(super) fn forget(&mut self, change: u64) {
        self.kept.retain(|(known, _), frame| change <= *known || frame.until < change);
    }

    /// Forgets the messages if no watch has used one since the last call.
    pub(super) fn age(&mut self) {
        if !std::mem::take(&mut self.is_used) {
            self.kept = BTreeMap::new();
        }
    }
}

impl Frame {
    /// A message that was all there was to tell would lack what has changed since.
    fn is_current(&self, last: u64) -> bool {
        !self.is_complete || self.last == last
    }
}

/// A message with its prefix. It is far below 4 GiB.
pub(super) fn encode(message: &WatchResponse) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(length.saturating_add(PREFIX));
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    // The buffer grows: it cannot be too small.
    let _ = message.encode(&mut bytes);
    bytes.freeze()
}

/// The message after its prefix; empty if it is none.
pub(super) fn decode(bytes: &Bytes) -> WatchResponse {
    let message = bytes.slice(PREFIX.min(bytes.len())..);
    WatchResponse::decode(message).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(until: u64, is_complete: bool, last: u64) -> Frame {
        Frame { bytes: Bytes::from_static(b"x"), until, is_complete, last }
    }

    #[test]
    fn a_message_is_read_again() {
        let message = WatchResponse { deleted: true, expired: true, ..Default::default() };
        let bytes = encode(&message);
        assert_eq!(bytes[..5], [0, 0, 0, 0, u8::try_from(bytes.len() - 5).unwrap()]);
        assert_eq!(decode(&bytes), message);
        assert_eq!(decode(&Bytes::new()), WatchResponse::default());
    }

    #[test]
    fn messages_are_kept_until_what_they_tell_changes() {
        let mut frames = Frames::default();
        frames.keep((0, true), frame(10, false, 20));
        frames.keep((10, true), frame(20, true, 20));
        assert!(frames.get((0, true), 21).is_some(), "it tells nothing of the change");
        assert!(frames.get((10, true), 20).is_some());
        assert!(frames.get((10, true), 21).is_none(), "it would lack the change");
        assert!(frames.get((10, false), 20).is_none());
        frames.forget(11);
        assert!(frames.get((0, true), 21).is_some() && frames.get((10, true), 20).is_none());
        frames.forget(10);
        assert!(frames.get((0, true), 21).is_none());
    }

    #[test]
    fn few_messages_are_kept_and_for_a_short_time() {
        let mut frames = Frames::default();
        for known in 0..1_000 {
            frames.keep((known, false), frame(known + 1, false, 2_000));
            assert!(frames.kept.len() <= KEPT);
        }
        frames.age();
        assert!(!frames.kept.is_empty());
        frames.age();
        assert!(frames.kept.is_empty());
    }
}
