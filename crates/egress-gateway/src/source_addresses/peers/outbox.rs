//! Queue of the messages to one member.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fairlead_wire::egress_peers::{Heartbeat, ToMember, to_member::Kind};
use tokio::sync::Notify;

use super::frames;

/// Messages about flows that may wait: 1.6 MiB at most. One more is not taken, and the member gets a full copy later.
const FLOW_MESSAGES: usize = 64;

/// One heartbeat at most, and messages about flows in their order. Heartbeats overtake.
#[derive(Debug, Default)]
pub(super) struct Outbox {
    waiting: Mutex<Waiting>,
    wake: Notify,
}

#[derive(Debug, Default)]
struct Waiting {
    /// The number of the connection that is open.
    connection: Option<u64>,
    heartbeat: Option<Heartbeat>,
    flows: VecDeque<(Instant, Arc<[u8]>)>,
}

impl Outbox {
    /// Replaces the heartbeat that waits; `false` if there is no connection.
    pub(super) fn heartbeat(&self, heartbeat: Heartbeat) -> bool {
        let mut waiting = self.locked();
        let is_connected = waiting.connection.is_some();
        if is_connected {
            waiting.heartbeat = Some(heartbeat);
            self.wake.notify_one();
        }
        is_connected
    }

    /// Appends a message about flows for this connection; `false` if it was not taken.
    pub(super) fn flows(&self, connection: u64, frame: Arc<[u8]>) -> bool {
        let mut waiting = self.locked();
        let is_taken = waiting.connection == Some(connection) && waiting.flows.len() < FLOW_MESSAGES;
        if is_taken {
            waiting.flows.push_back((Instant::now(), frame));
            self.wake.notify_one();
        }
        is_taken
    }

    /// Number of messages about flows that the queue still takes, and the age of the first that waits.
    pub(super) fn room(&self) -> (usize, Duration) {
        let waiting = self.locked();
        let age = waiting.flows.front().map(|(since, _)| since.elapsed()).unwrap_or_default();
        (FLOW_MESSAGES.saturating_sub(waiting.flows.len()), age)
    }

    /// A connection is open, or none any more. What waits is dropped.
    pub(super) fn open(&self, connection: Option<u64>) {
        *self.locked() = Waiting { connection, ..Waiting::default() };
    }

    /// The next frame to send.
    pub(super) async fn next(&self) -> Arc<[u8]> {
        loop {
            if let Some(frame) = self.locked().take() {
                return frame;
            }
            self.wake.notified().await;
        }
    }

    fn locked(&self) -> MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn take(&mut self) -> Option<Arc<[u8]>> {
        let heartbeat = self.heartbeat.take();
        let heartbeat =
            heartbeat.map(|heartbeat| frames::encode(&ToMember { kind: Some(Kind::Heartbeat(heartbeat)) }));
        heartbeat.or_else(|| self.flows.pop_front().map(|(_, frame)| frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn heartbeats_overtake_flows_and_replace_each_other() {
        let outbox = Outbox::default();
        let heartbeat = |sequence| Heartbeat { sequence, ..Heartbeat::default() };
        assert!(!outbox.heartbeat(heartbeat(1)), "there is no connection");
        outbox.open(Some(7));
        assert!(outbox.flows(7, Arc::from([1u8])) && !outbox.flows(6, Arc::from([2u8])));
        assert!(outbox.heartbeat(heartbeat(2)) && outbox.heartbeat(heartbeat(3)));
        let first = ToMember { kind: Some(Kind::Heartbeat(heartbeat(3))) };
        assert_eq!(outbox.next().await, frames::encode(&first));
        assert_eq!(*outbox.next().await, [1]);
        let taken = (0..100).filter(|_| outbox.flows(7, Arc::from([1u8]))).count();
        assert_eq!((taken, outbox.room().0), (FLOW_MESSAGES, 0));
        outbox.open(None);
        assert_eq!(outbox.room(), (FLOW_MESSAGES, Duration::ZERO));
    }
}
