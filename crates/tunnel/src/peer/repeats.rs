//! Repetitions of a handshake towards a new endpoint.

use std::time::{Duration, Instant};

use fairlead_wireguard::Initiation;

/// Counted from the first message. Two peers behind NATs open the way for each other: the first message is dropped, so both repeat
/// theirs before `REKEY_TIMEOUT` (5 s).
///
/// [`fairlead_wireguard::Tunnel`] remembers two initiations, and a peer answers only the first of several that arrive in one bunch
/// (they wait together for address resolution, or a slow link). So only two different messages are sent, each twice: the answer to
/// either is accepted. A copy that arrives after its original is a replay to the peer and harmless.
const REPEATS: [(Duration, Message); 4] = [
    (Duration::ZERO, Message::Fresh),
    (Duration::from_millis(300), Message::Copy),
    (Duration::from_secs(1), Message::Fresh),
    (Duration::from_secs(2), Message::Copy),
];

#[derive(Clone, Copy, PartialEq, Eq)]
enum Message {
    /// The last initiation once more.
    Copy,
    /// A new one.
    Fresh,
}

/// Repetitions still to come.
pub(super) struct Repeats {
    started: Instant,
    left: &'static [(Duration, Message)],
    /// The last initiation, unless something was learned since that has to go into the next.
    last: Option<Box<Initiation>>,
}

impl Repeats {
    pub(super) fn new(started: Instant) -> Self {
        Self { started, left: &REPEATS, last: None }
    }

    /// Time at which the next one is due.
    pub(super) fn due(&self) -> Option<Instant> {
        self.started.checked_add(self.left.first()?.0)
    }

    /// Consumes the next one: the message if it is a copy, `None` if a new one is to be sent.
    pub(super) fn take_copy(&mut self) -> Option<Initiation> {
        let ((_, message), left) = self.left.split_first()?;
        self.left = left;
        self.last.as_deref().filter(|_| *message == Message::Copy).copied()
    }

    /// An initiation was sent.
    pub(super) fn sent(&mut self, initiation: &Initiation) {
        self.last = Some(Box::new(*initiation));
    }

    /// A cookie has come, which only a new initiation carries.
    pub(super) fn forget_last(&mut self) {
        self.last = None;
    }
}
