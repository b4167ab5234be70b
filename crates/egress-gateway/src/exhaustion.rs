//! Whether new connections fail because ports or the table of connections are used up. Pure.

use std::time::{Duration, Instant};

use fairlead_netlink::conntrack::Statistics;

/// Least time between two log lines about a resource that stays used up.
const PAUSE: Duration = Duration::from_secs(60);

/// Resource of connection tracking that is used up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Exhausted {
    /// The table of connections is full.
    ConnectionTableFull,
    /// No port is left for connections to a destination.
    PortsExhausted,
}

impl Exhausted {
    /// Reason for logs, and advice for the operator.
    pub(crate) fn reason_and_advice(self) -> (&'static str, &'static str) {
        match self {
            Self::ConnectionTableFull => (
                "ConnectionTableFull",
                "raise net.netfilter.nf_conntrack_max of the node, or limit clients with spec.maxConnectionsPerClient",
            ),
            Self::PortsExhausted => (
                "PortsExhausted",
                "all ports towards a destination are in use: add gateways or source addresses, or limit clients with spec.maxConnectionsPerClient",
            ),
        }
    }
}

/// Statistics that were read last, and the failures that are not logged yet.
#[derive(Debug, Default)]
pub(crate) struct Exhaustion {
    last: Option<Statistics>,
    /// Packets that failed since the last time that was said, and when that was.
    failed: u64,
    said: Option<Instant>,
}

impl Exhaustion {
    /// Takes what was read, and returns what is used up and how many packets have failed for that, when it is time to say it.
    pub(crate) fn observe(
        &mut self,
        now: Instant,
        read: Statistics,
        connections: Option<(u64, u64)>,
    ) -> Option<(Exhausted, u64)> {
        let last = self.last.replace(read)?;
        let grown = |of: fn(&Statistics) -> u64| of(&read).saturating_sub(of(&last));
        // A packet whose connection could not be inserted may be counted as dropped as well.
        let failed = grown(|it| it.insert_failed).max(grown(|it| it.drop));
        self.failed = self.failed.saturating_add(failed);
        let is_quiet = self.said.is_some_and(|said| now.saturating_duration_since(said) < PAUSE);
        if failed == 0 || is_quiet {
            return None;
        }
        self.said = Some(now);
        // Nearly: connections end all the time.
        let is_full = grown(|it| it.early_drop) > 0
            || connections.is_some_and(|(count, limit)| count >= limit.saturating_sub(limit / 20));
        let exhausted = if is_full { Exhausted::ConnectionTableFull } else { Exhausted::PortsExhausted };
        Some((exhausted, std::mem::take(&mut self.failed)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(insert_failed: u64, drop: u64) -> Statistics {
        Statistics { insert_failed, drop, early_drop: 0 }
    }

    #[test]
    fn what_grows_is_said_once_a_minute() {
        let (mut it, start) = (Exhaustion::default(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(it.observe(at(0), read(9, 9), None), None, "from before");
        assert_eq!(it.observe(at(3), read(9, 9), None), None);
        assert_eq!(it.observe(at(6), read(11, 10), None), Some((Exhausted::PortsExhausted, 2)));
        assert_eq!(it.observe(at(9), read(14, 13), None), None);
        assert_eq!(it.observe(at(66), read(14, 13), None), None, "it has ended");
        assert_eq!(it.observe(at(69), read(15, 13), None), Some((Exhausted::PortsExhausted, 4)));
        assert_eq!(it.observe(at(200), read(0, 0), None), None, "they began anew");
    }

    #[test]
    fn a_full_table_is_told_from_exhausted_ports() {
        let (mut it, now) = (Exhaustion::default(), Instant::now());
        it.observe(now, read(0, 0), None);
        assert_eq!(it.observe(now, read(0, 1), Some((99, 100))), Some((Exhausted::ConnectionTableFull, 1)));
        let (reason, advice) = Exhausted::ConnectionTableFull.reason_and_advice();
        assert!(reason == "ConnectionTableFull" && advice.contains("nf_conntrack_max"));
    }
}
