//! Connections that have, and had, an address and port outside. Pure: time and events are arguments.

use std::collections::{BTreeSet, HashMap, HashSet, VecDeque};
use std::net::IpAddr;
use std::sync::Arc;

use fairlead_netlink::conntrack::{Flow, Ports, STATUS_SOURCE_TRANSLATED, Tuple};

/// Connections of each kind that are kept, those that are open and those that have ended; some 150 bytes each.
pub(crate) const MAX_KEPT: usize = 65_536;
/// Tolerance of times, in milliseconds: notifications take a moment, and clocks differ.
const SLACK: i64 = 2_000;

/// Milliseconds since 1970.
pub(crate) type Millis = i64;

/// Pod that has an address.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub(crate) struct Pod {
    pub(crate) namespace: String,
    pub(crate) name: String,
}

/// A connection whose source is translated.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Connection {
    /// Empty for a client of an earlier process that no node program has registered yet.
    pub(crate) pod: Arc<Pod>,
    pub(crate) protocol: u8,
    /// As the client sends it; ports are identifiers for ICMP, and 0 for protocols without any.
    pub(crate) client: (IpAddr, u16),
    pub(crate) destination: (IpAddr, u16),
    /// The source that is seen outside.
    pub(crate) outside: (IpAddr, u16),
    /// `None` if it is from before this was watched.
    pub(crate) begin: Option<Millis>,
    /// Time when the kernel forgot it, which is some time after its last packet.
    pub(crate) end: Option<Millis>,
    /// Bytes that the client sent and received, where the kernel counts them.
    pub(crate) bytes: Option<[u64; 2]>,
}

impl Connection {
    /// `None` if its source is not translated.
    fn new(flow: &Flow, pod: Arc<Pod>, begin: Option<Millis>) -> Option<Self> {
        let Flow { original, reply, status, .. } = flow;
        if status & STATUS_SOURCE_TRANSLATED == 0 && original.source == reply.destination {
            return None;
        }
        let (source_port, destination_port) = match original.ports {
            Ports::Icmp { id, .. } => (id, 0),
            Ports::None => (0, 0),
            Ports::Ports { source, destination } => (source, destination),
        };
        Some(Self {
            pod,
            protocol: original.protocol,
            client: (original.source, source_port),
            destination: (original.destination, destination_port),
            outside: (reply.destination, reply.destination_port().unwrap_or_default()),
            begin,
            end: None,
            bytes: None,
        })
    }

    fn ended(mut self, now: Millis, flow: Option<&Flow>) -> Self {
        self.end = Some(now);
        let counters = flow.and_then(|flow| flow.counters);
        self.bytes = counters.map(|counters| counters.map(|it| it.bytes)).or(self.bytes);
        self
    }

    fn was_open(&self, at: Millis) -> bool {
        self.begin.is_none_or(|begin| begin <= at.saturating_add(SLACK))
            && self.end.is_none_or(|end| at <= end.saturating_add(SLACK))
    }
}

/// See the module.
#[derive(Debug, Default)]
pub(crate) struct Connections {
    /// By the tuple of replies, which is that of one connection at a time.
    open: HashMap<Tuple, Connection>,
    /// Keys of connections in `open` that the last list did not have: that they have ended may still be heard.
    missing: HashSet<Tuple>,
    /// The last ones, in the order of their ends.
    ended: VecDeque<Connection>,
    /// Time since when all that have ended are in `ended`.
    complete_since: Option<Millis>,
    /// Connections that were not kept, since as many are open.
    left_out: u64,
    /// Whether there may be connections that are open and not in `open`.
    is_partial: bool,
}

impl Connections {
    /// Since when events are taken. [`Self::set_open`] adds connections that began before.
    pub(crate) fn new(now: Millis) -> Self {
        Self { complete_since: Some(now), is_partial: true, ..Self::default() }
    }

    /// From when on all connections are known; of those that ended before, some may be. `None` while some that are open may not be known.
    pub(crate) fn complete_since(&self) -> Option<Millis> {
        self.complete_since.filter(|_| !self.is_partial)
    }

    /// Connections that were not kept, since as many are open.
    pub(crate) fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Connections that ended until now may be missing, and until the next [`Self::set_open`] some that are open.
    pub(crate) fn missed(&mut self, now: Millis) {
        self.complete_since = self.complete_since.max(Some(now));
        self.is_partial = true;
    }

    /// A connection is there. `begin` is `None` for one that may be older.
    pub(crate) fn seen(&mut self, flow: &Flow, pod: Arc<Pod>, begin: Option<Millis>, now: Millis) {
        if self.open.contains_key(&flow.reply) && begin.is_none() {
            return;
        }
        let Some(connection) = Connection::new(flow, pod, begin) else { return };
        if self.open.len() >= MAX_KEPT && !self.open.contains_key(&flow.reply) {
            self.left_out = self.left_out.saturating_add(1);
            self.missed(now);
            return;
        }
        // One with the same tuple has ended, and that was not heard.
        if let Some(earlier) = self.open.insert(flow.reply, connection) {
            let end = begin.unwrap_or_default();
            self.keep(earlier.ended(end, None));
        }
    }

    /// A connection has ended. Returns it, if it was one with a translated source.
    pub(crate) fn ended(&mut self, flow: &Flow, pod: Arc<Pod>, now: Millis) -> Option<Connection> {
        let open = self.open.remove(&flow.reply);
        let ended = open.or_else(|| Connection::new(flow, pod, None))?.ended(now, Some(flow));
        self.keep(ended.clone());
        Some(ended)
    }

    /// A connection is no longer one of this gateway: another has it, or had it when it ended.
    pub(crate) fn forget(&mut self, flow: &Flow) {
        self.open.remove(&flow.reply);
    }

    /// The same, of all that are translated to these addresses.
    pub(crate) fn forget_all(&mut self, outside: &BTreeSet<IpAddr>) {
        self.open.retain(|_, connection| !outside.contains(&connection.outside.0));
    }

    /// All that are open; `pod` says whose an address is. Those that have been missing twice have ended unheard, and are returned.
    pub(crate) fn set_open(
        &mut self,
        flows: &[Flow],
        mut pod: impl FnMut(IpAddr) -> Option<Arc<Pod>>,
        now: Millis,
    ) -> Vec<Connection> {
        let listed: HashSet<&Tuple> = flows.iter().map(|flow| &flow.reply).collect();
        let missing = self.open.keys().filter(|tuple| !listed.contains(tuple)).copied().collect();
        let before = std::mem::replace(&mut self.missing, missing);
        let gone: Vec<Tuple> = self.missing.intersection(&before).copied().collect();
        let gone: Vec<Connection> = gone.iter().filter_map(|tuple| self.open.remove(tuple)).collect();
        let ended: Vec<Connection> = gone.into_iter().map(|connection| connection.ended(now, None)).collect();
        ended.iter().for_each(|connection| self.keep(connection.clone()));
        self.is_partial = false;
        for flow in flows {
            if let Some(pod) = pod(flow.original.source) {
                self.seen(flow, pod, None, now);
            }
        }
        ended
    }

    fn keep(&mut self, connection: Connection) {
        if self.ended.len() >= MAX_KEPT
            && let Some(lost) = self.ended.pop_front()
        {
            self.complete_since = self.complete_since.max(lost.end);
        }
        self.ended.push_back(connection);
    }

    /// Connections that have, or had, this address and port outside, at that time if one is given; the last first.
    pub(crate) fn find(&self, outside: (IpAddr, u16), at: Option<Millis>) -> Vec<&Connection> {
        let is_meant = |connection: &&Connection| {
            connection.outside == outside && at.is_none_or(|at| connection.was_open(at))
        };
        let mut found: Vec<&Connection> = self.open.values().filter(is_meant).collect();
        found.sort_by_key(|connection| std::cmp::Reverse(connection.begin));
        found.extend(self.ended.iter().rev().filter(is_meant));
        found
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::translated;
    use super::*;

    const OUTSIDE: &str = "192.0.2.1";

    fn flow(client: &str, port: u16, outside_port: u16) -> Flow {
        translated(client.parse().unwrap(), port, OUTSIDE.parse().unwrap(), outside_port)
    }

    fn pod(name: &str) -> Arc<Pod> {
        Arc::new(Pod { namespace: "n".to_owned(), name: name.to_owned() })
    }

    fn names(connections: &Connections, port: u16, at: Option<Millis>) -> Vec<String> {
        let outside = (OUTSIDE.parse().unwrap(), port);
        connections.find(outside, at).iter().map(|found| found.pod.name.clone()).collect()
    }

    #[test]
    fn one_port_has_one_client_after_the_other() {
        let mut all = Connections::new(0);
        let (first, second) = (flow("10.0.0.1", 5000, 40_000), flow("10.0.0.2", 6000, 40_000));
        all.seen(&first, pod("a"), Some(10_000), 10_000);
        assert!(all.ended(&first, pod("later"), 20_000).is_some_and(|it| it.begin == Some(10_000)));
        all.seen(&second, pod("b"), Some(40_000), 40_000);
        all.seen(&second, pod("c"), None, 41_000);
        assert_eq!(names(&all, 40_000, None), ["b", "a"]);
        assert_eq!(names(&all, 40_000, Some(15_000)), ["a"]);
        assert_eq!(names(&all, 40_000, Some(21_000)), ["a"], "times are not exact");
        assert_eq!(names(&all, 40_000, Some(30_000)), [""; 0]);
        assert_eq!(names(&all, 40_000, Some(90_000)), ["b"]);
        assert_eq!(names(&all, 40_001, None), [""; 0]);
        // The end of the second one was not heard.
        all.seen(&first, pod("d"), Some(100_000), 100_000);
        assert_eq!(names(&all, 40_000, None), ["d", "b", "a"]);
    }

    #[test]
    fn what_is_not_translated_is_no_connection() {
        let mut all = Connections::new(0);
        let mut own = flow("10.0.0.1", 1, 1);
        own.reply.destination = own.original.source;
        own.status = 0;
        all.seen(&own, pod("a"), Some(1), 1);
        assert_eq!(all.ended(&own, pod("a"), 2), None);
        assert!(all.open.is_empty() && all.ended.is_empty());
    }

    #[test]
    fn connections_that_ended_unheard_end_with_the_second_list_that_lacks_them() {
        let mut all = Connections::new(0);
        let (first, second) = (flow("10.0.0.1", 1, 1), flow("10.0.0.2", 2, 2));
        all.seen(&first, pod("a"), Some(1), 1);
        all.seen(&second, pod("b"), Some(1), 1);
        assert_eq!(all.set_open(&[], |_| None, 5), []);
        // The end of the second one was on its way.
        assert!(all.ended(&second, pod("b"), 6).is_some());
        let third = flow("10.0.0.3", 3, 3);
        let ended = all.set_open(&[third], |_| Some(pod("c")), 7);
        let ended: Vec<_> = ended.iter().map(|it| (it.pod.name.as_str(), it.end)).collect();
        assert_eq!(ended, [("a", Some(7))]);
        assert_eq!((names(&all, 2, None).len(), names(&all, 3, Some(-9_000_000))), (1, vec!["c".to_owned()]));
        all.set_open(&[third, flow("10.0.0.4", 4, 4)], |_| None, 8);
        assert_eq!(all.open.len(), 1, "one is no client's");
    }

    #[test]
    fn a_bounded_number_is_kept_and_what_is_complete_is_known() {
        let mut all = Connections::new(7);
        for number in 0..(MAX_KEPT as u32 + 10) {
            let [_, second, third, fourth] = number.to_be_bytes();
            let one = flow(&format!("10.{second}.{third}.{fourth}"), 1, 2);
            all.ended(&one, pod("a"), 100 + Millis::from(number));
            let open = Flow { reply: Tuple { source: one.original.source, ..one.reply }, ..one };
            all.seen(&open, pod("a"), Some(1), 1);
        }
        assert_eq!((all.ended.len(), all.open.len(), all.left_out()), (MAX_KEPT, MAX_KEPT, 10));
        assert_eq!(
            (all.complete_since, all.complete_since()),
            (Some(109), None),
            "some are open and not known"
        );
        all.set_open(&[], |_| None, 400);
        assert_eq!(all.complete_since(), Some(109));
        let one = flow("10.255.0.1", 1, 3);
        all.set_open(&[one], |_| Some(pod("a")), 500);
        assert_eq!((all.left_out(), all.open.len()), (10, 1), "the others have ended");
    }

    #[test]
    fn what_is_not_known_is_said() {
        let mut all = Connections::new(5);
        assert_eq!(all.complete_since(), None, "what began before is not listed yet");
        all.set_open(&[], |_| None, 6);
        assert_eq!(all.complete_since(), Some(5));
        all.missed(20);
        assert_eq!(all.complete_since(), None);
        all.set_open(&[], |_| None, 22);
        assert_eq!(all.complete_since(), Some(20), "some may have ended before");
    }
}
