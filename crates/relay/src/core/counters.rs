//! Counters of a relay.

/// Reason why a datagram was not passed on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DropReason {
    /// The peer has no link.
    NotRegistered,
    /// The queue to the peer was full; the oldest datagrams in it were dropped.
    QueueFull,
    /// The datagram waited too long: the peer reads slower than others send to it.
    QueueTime,
    /// The sender exceeded its rate.
    RateLimited,
}

impl DropReason {
    /// All of them, in the order of [`Counters::drops`].
    pub const ALL: [Self; 4] = [Self::NotRegistered, Self::QueueFull, Self::QueueTime, Self::RateLimited];

    /// The value of the label `reason`.
    pub fn label(self) -> &'static str {
        match self {
            Self::NotRegistered => "not_registered",
            Self::QueueFull => "queue_full",
            Self::QueueTime => "queue_time",
            Self::RateLimited => "rate_limited",
        }
    }
}

/// Totals since the relay started.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counters {
    /// Datagrams queued for their peer.
    pub datagrams: u64,
    /// Bytes of these datagrams, without the frames around them.
    pub bytes: u64,
    /// Registrations that were accepted.
    pub registrations: u64,
    /// Registrations that replaced a link of another run of the client, or of another client.
    pub key_changes: u64,
    drops: [u64; DropReason::ALL.len()],
}

impl Counters {
    /// Datagrams that were not passed on, by reason.
    pub fn drops(&self) -> impl Iterator<Item = (DropReason, u64)> {
        DropReason::ALL.into_iter().zip(self.drops)
    }

    /// Datagrams that were not passed on for this reason.
    pub fn dropped(&self, reason: DropReason) -> u64 {
        self.drops().find(|(each, _)| *each == reason).map_or(0, |(_, count)| count)
    }

    pub(super) fn count_drop(&mut self, reason: DropReason) {
        for (each, count) in DropReason::ALL.into_iter().zip(&mut self.drops) {
            *count = count.wrapping_add(u64::from(each == reason));
        }
    }

    pub(super) fn count_datagram(&mut self, length: usize) {
        self.datagrams = self.datagrams.wrapping_add(1);
        self.bytes = self.bytes.wrapping_add(u64::try_from(length).unwrap_or(u64::MAX));
    }
}
