//! Queues of frames for one client. Every queue is bounded; datagrams are bounded by time too, because a late one is worth less than
//! the one behind it (head drop). Where datagrams wait all the time, CoDel drops some before that, so that the flows inside slow
//! down.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

use fairlead_wire::relay::Frame;

use super::codel::Codel;
use super::counters::{Counters, DropReason};

/// Frames other than datagrams that wait. Beyond that the newest is dropped: a client that reads none of its answers.
const MAX_CONTROL: usize = 32;

/// Bounds of the queues of one client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct QueueLimits {
    /// Longest wait of a datagram.
    pub time: Duration,
    /// Bytes of datagrams that wait, unless it is only one.
    pub bytes: usize,
    /// Bytes of probes that wait, unless it is only one.
    pub probe_bytes: usize,
}

/// Class of a datagram, which decides on its queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Class {
    Datagram,
    Probe,
}

#[derive(Debug, Default)]
pub(crate) struct Outbox {
    control: VecDeque<Vec<u8>>,
    datagrams: Queue,
    probes: Queue,
    codel: Codel,
}

#[derive(Debug, Default)]
struct Queue {
    bytes: usize,
    /// Encoded frames and when they came.
    frames: VecDeque<(Instant, Box<[u8]>)>,
}

impl Outbox {
    /// Queues a frame that carries no datagram. Whether there was room.
    pub(crate) fn push_control(&mut self, frame: &Frame<'_>) -> bool {
        let mut bytes = Vec::new();
        let room = self.control.len() < MAX_CONTROL && frame.encode(&mut bytes).is_ok();
        if room {
            self.control.push_back(bytes);
        }
        room
    }

    /// Queues a datagram, and drops those for which there is no room or time left.
    pub(crate) fn push(
        &mut self,
        now: Instant,
        class: Class,
        frame: Box<[u8]>,
        limits: &QueueLimits,
        counters: &mut Counters,
    ) {
        let (queue, limit) = match class {
            Class::Datagram => (&mut self.datagrams, limits.bytes),
            Class::Probe => (&mut self.probes, limits.probe_bytes),
        };
        queue.drop_late(now, limits.time, counters);
        queue.bytes = queue.bytes.saturating_add(frame.len());
        queue.frames.push_back((now, frame));
        // The newest always finds room.
        while queue.bytes > limit && queue.frames.len() > 1 && queue.pop().is_some() {
            counters.count_drop(DropReason::QueueFull);
        }
    }

    /// Appends frames to `out` until it has `budget` bytes: first control frames, then probes, then the rest.
    pub(crate) fn pop_into(
        &mut self,
        now: Instant,
        limits: &QueueLimits,
        budget: usize,
        out: &mut Vec<u8>,
        counters: &mut Counters,
    ) {
        while let Some(frame) = self.control.pop_front() {
            out.extend_from_slice(&frame);
        }
        for (queue, mut codel) in [(&mut self.probes, None), (&mut self.datagrams, Some(&mut self.codel))] {
            queue.drop_late(now, limits.time, counters);
            while out.len() < budget {
                let Some((at, frame)) = queue.pop() else { break };
                let waited = now.saturating_duration_since(at);
                if codel.as_mut().is_some_and(|codel| codel.drops(now, waited, queue.bytes)) {
                    counters.count_drop(DropReason::QueueTime);
                    continue;
                }
                out.extend_from_slice(&frame);
            }
            queue.release();
        }
    }

    /// Drops all datagrams of a link that is closing.
    pub(crate) fn clear(&mut self) {
        self.datagrams = Queue::default();
        self.probes = Queue::default();
    }

    pub(super) fn is_empty(&self) -> bool {
        self.control.is_empty() && self.datagrams.frames.is_empty() && self.probes.frames.is_empty()
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        let control: usize = self.control.iter().map(Vec::len).sum();
        control + self.datagrams.bytes + self.probes.bytes
    }
}

impl Queue {
    fn pop(&mut self) -> Option<(Instant, Box<[u8]>)> {
        let (at, frame) = self.frames.pop_front()?;
        self.bytes = self.bytes.saturating_sub(frame.len());
        Some((at, frame))
    }

    fn drop_late(&mut self, now: Instant, limit: Duration, counters: &mut Counters) {
        let is_late = |(at, _): &(Instant, _)| now.saturating_duration_since(*at) > limit;
        while self.frames.front().is_some_and(is_late) && self.pop().is_some() {
            counters.count_drop(DropReason::QueueTime);
        }
    }

    /// Gives memory back after a burst.
    fn release(&mut self) {
        if self.frames.is_empty() && self.frames.capacity() > MAX_CONTROL {
            self.frames = VecDeque::new();
        }
    }
}
