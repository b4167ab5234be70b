//! Packets and handshake messages to a peer.

use std::mem;
use std::sync::Arc;

use fairlead_wireguard::{DATA_HEADER_LENGTH, Now, TAG_LENGTH};

use super::{Context, MAX_STAGED, Peer};
use crate::ecn::Ecn;
use crate::inner;
use crate::offload::Split;
use crate::outbox::Destination;

impl Peer {
    /// Sends the packets that one read of the TUN gave, or keeps them until there is a session.
    pub(crate) fn send(&mut self, mut packets: Split<'_>, context: &mut Context<'_>) {
        if !self.may_ask() {
            return;
        }
        let now = context.now.instant;
        self.handshakes.unanswered = 0;
        self.traffic.wait(now);
        let ecn = Ecn::of_packet(packets.packet());
        let count = packets.segments();
        let max_length = packets.max_length();
        let mut append = |bytes: &mut Vec<u8>| {
            packets.append_next(bytes);
        };
        if self.enqueue((count, max_length), ecn, context, &mut append) {
            return;
        }
        loop {
            let mut packet = Vec::new();
            if !packets.append_next(&mut packet) {
                break;
            }
            self.stage(packet);
        }
        if !self.handshakes.await_confirmation(now) {
            self.initiate(false, context);
        }
    }

    /// Makes data messages of `count` packets of at most `max_length` bytes each, all with one ECN field: `append` appends the next one
    /// to what is there. They get their counters here, and are encrypted when they leave. Returns false, and asks for no packet, if
    /// there is no session.
    pub(super) fn enqueue(
        &mut self,
        (count, max_length): (usize, usize),
        ecn: Ecn,
        context: &mut Context<'_>,
        mut append: impl FnMut(&mut Vec<u8>),
    ) -> bool {
        let Context { now, both_ways, out, mtu, .. } = context;
        let Some((path, tunnel)) = self.endpoint.path.zip(self.sessions.tunnel.as_mut()) else {
            return false;
        };
        let Some(mut sealer) = tunnel.sealer(now.instant) else { return false };
        let key = Arc::clone(sealer.key());
        let overhead = DATA_HEADER_LENGTH.saturating_add(TAG_LENGTH);
        let max_length = inner::padded_length(max_length, *mtu).saturating_add(overhead);
        for _ in 0..count {
            if !out.has_room(max_length) {
                break;
            }
            self.traffic.last_sent = Some(now.instant);
            let also = both_ways.second_path(&self.key, &path, max_length, now.instant);
            let to = Destination { peer: Some(self.key), path, also, ecn };
            out.append(&to, max_length, Some(&key), |bytes| {
                let start = bytes.len();
                bytes.extend_from_slice(&[0; DATA_HEADER_LENGTH]);
                let packet = bytes.len();
                append(bytes);
                let padded = inner::padded_length(bytes.len().saturating_sub(packet), *mtu);
                bytes.resize(packet.saturating_add(padded).saturating_add(TAG_LENGTH), 0);
                let message = bytes.get_mut(start..).unwrap_or_default();
                if sealer.assign_counter(message).is_err() {
                    bytes.truncate(start);
                }
            });
        }
        true
    }

    /// Sends an empty packet; returns false if there is no session.
    pub(super) fn send_empty(&mut self, context: &mut Context<'_>) -> bool {
        self.enqueue((1, 0), Ecn::NOT_CAPABLE, context, |_| {})
    }

    /// Sends the packets that waited for a session, or an empty one if none did: the peer uses the session from its first packet on
    /// (key confirmation, WireGuard paper 5.4.6).
    pub(super) fn send_staged(&mut self, context: &mut Context<'_>) {
        if self.staged.is_empty() {
            self.send_empty(context);
        }
        for packet in mem::take(&mut self.staged) {
            let append = |bytes: &mut Vec<u8>| bytes.extend_from_slice(&packet);
            if !self.enqueue((1, packet.len()), Ecn::of_packet(&packet), context, append) {
                self.stage(packet);
            }
        }
    }

    /// A keepalive that the user asked for, or that shows a peer our new endpoint. Without a session, a handshake.
    pub(super) fn keep_alive(&mut self, context: &mut Context<'_>) {
        // The next one is an interval away, even if this one fails.
        self.traffic.last_sent = Some(context.now.instant);
        if !self.send_empty(context) {
            self.handshakes.unanswered = self.handshakes.unanswered.saturating_add(1);
            self.initiate(false, context);
        }
    }

    /// Whether a handshake with it can be begun.
    pub(super) fn may_ask(&self) -> bool {
        self.endpoint.path.is_some() && !self.handshakes.has_unusable_key
    }

    /// Sends an initiation, unless one of the last seconds is unanswered and `again` is false.
    pub(super) fn initiate(&mut self, again: bool, context: &mut Context<'_>) {
        if !self.may_ask() {
            return;
        }
        let index = context.indexes.free(context.random);
        let now = Now { wall: context.steady_wall, ..context.now };
        let tunnel = self.tunnel();
        let Some(message) = tunnel.initiate(again, index, now, context.random) else {
            self.handshakes.has_unusable_key = !tunnel.is_handshaking();
            return;
        };
        context.indexes.insert(index, self.key);
        self.handshakes.sent(&message, context.now.instant);
        self.emit(&message, context);
    }

    /// Sends a message of a handshake where packets go now.
    pub(super) fn emit(&mut self, message: &[u8], context: &mut Context<'_>) {
        self.traffic.last_sent = Some(context.now.instant);
        if let Some(path) = &self.endpoint.path {
            context.out.push_message(Some(self.key), path, message);
        }
    }

    fn stage(&mut self, packet: Vec<u8>) {
        if self.staged.len() >= MAX_STAGED {
            self.staged.pop_front();
        }
        self.staged.push_back(packet);
    }
}
