//! Choice of the BlockRequests that the controller answers next: fairly among nodes, each request at most once at a
//! time, and failed ones again after a pause.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use fairlead_limits::Backoff;

/// Requests that are answered at the same time.
pub const MAX_RUNNING: usize = 16;
/// Requests of one node among them: what one node asks for cannot keep the others waiting.
pub const MAX_RUNNING_OF_NODE: usize = 4;
/// Pause after the first failure of a request; it doubles with each.
pub const MIN_PAUSE: Duration = Duration::from_millis(200);
/// Longest pause.
pub const MAX_PAUSE: Duration = Duration::from_secs(60);

/// A request without an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pending<'a> {
    /// UID of the object.
    pub uid: &'a str,
    /// `spec.nodeName`.
    pub node: &'a str,
    /// Whether it claims a block that the node uses already: such requests come first.
    pub claims: bool,
}

/// Result of an attempt to answer a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Attempt {
    /// The answer is written. The watch may not show it yet.
    Answered,
    /// There is no answer.
    Failed,
}

/// The state of all requests that are being answered or have failed.
#[derive(Debug, Clone, Default)]
pub struct RequestQueue {
    /// Nodes of the requests whose attempts have not ended, by UID.
    running: BTreeMap<String, String>,
    answered: BTreeSet<String>,
    failed: BTreeMap<String, Pause>,
}

#[derive(Debug, Clone)]
struct Pause {
    until: Instant,
    backoff: Backoff,
}

impl RequestQueue {
    /// Begins attempts and returns their UIDs. `pending` are all requests without an answer that the watch shows, the oldest
    /// first. Until `hold_off`, only claims are answered.
    pub fn start(&mut self, now: Instant, hold_off: Instant, pending: &[Pending<'_>]) -> Vec<String> {
        let shown: BTreeSet<&str> = pending.iter().map(|request| request.uid).collect();
        self.answered.retain(|uid| shown.contains(uid.as_str()));
        self.failed.retain(|uid, _| shown.contains(uid.as_str()));
        let mut started = Vec::new();
        let mut of_node: BTreeMap<&str, Vec<&Pending<'_>>> = BTreeMap::new();
        for request in pending.iter().rev().filter(|request| self.is_due(now, hold_off, request)) {
            of_node.entry(request.node).or_default().push(request);
        }
        // Stable, and so still the oldest last.
        of_node.values_mut().for_each(|requests| requests.sort_by_key(|request| request.claims));
        let positions: BTreeMap<&str, usize> =
            pending.iter().enumerate().map(|(position, request)| (request.uid, position)).collect();
        while self.running.len() < MAX_RUNNING {
            let next = of_node.iter().filter_map(|(node, requests)| {
                let first = requests.last()?;
                let running = self.running_of(node);
                let position = positions.get(first.uid)?;
                (running < MAX_RUNNING_OF_NODE).then_some((!first.claims, running, *position, *node))
            });
            let Some((.., node)) = next.min() else { break };
            let Some(request) = of_node.get_mut(node).and_then(Vec::pop) else { break };
            self.running.insert(request.uid.to_owned(), node.to_owned());
            started.push(request.uid.to_owned());
        }
        started
    }

    /// UIDs of the requests that an attempt could begin for now. They wait for a slot if [`Self::start`] begins none.
    pub fn due<'a>(
        &self,
        now: Instant,
        hold_off: Instant,
        pending: &[Pending<'a>],
    ) -> impl Iterator<Item = &'a str> {
        pending.iter().filter(move |request| self.is_due(now, hold_off, request)).map(|request| request.uid)
    }

    fn is_due(&self, now: Instant, hold_off: Instant, request: &Pending<'_>) -> bool {
        let paused = self.failed.get(request.uid).is_some_and(|pause| pause.until > now);
        let held = !request.claims && now < hold_off;
        !paused && !held && !self.running.contains_key(request.uid) && !self.answered.contains(request.uid)
    }

    fn running_of(&self, node: &str) -> usize {
        self.running.values().filter(|of| *of == node).count()
    }

    /// Ends an attempt.
    pub fn end(&mut self, now: Instant, uid: &str, attempt: Attempt) {
        self.running.remove(uid);
        match attempt {
            Attempt::Answered => {
                self.failed.remove(uid);
                self.answered.insert(uid.to_owned());
            }
            Attempt::Failed => {
                let first = || Pause { until: now, backoff: Backoff::new(MIN_PAUSE, MAX_PAUSE) };
                let pause = self.failed.entry(uid.to_owned()).or_insert_with(first);
                pause.until = now.checked_add(pause.backoff.next_whole()).unwrap_or(now);
            }
        }
    }

    /// Time at which the next pause ends.
    pub fn next_due(&self, now: Instant) -> Option<Instant> {
        self.failed.values().map(|pause| pause.until).filter(|until| *until > now).min()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request<'a>(uid: &'a str, node: &'a str) -> Pending<'a> {
        Pending { uid, node, claims: false }
    }

    fn names(count: usize, prefix: &str) -> Vec<String> {
        (0..count).map(|number| format!("{prefix}{number}")).collect()
    }

    #[test]
    fn a_node_with_many_requests_leaves_room_for_the_others() {
        let (mut queue, now) = (RequestQueue::default(), Instant::now());
        let flood = names(100, "bad-");
        let mut pending: Vec<_> = flood.iter().map(|uid| request(uid, "bad")).collect();
        assert_eq!(queue.start(now, now, &pending), ["bad-0", "bad-1", "bad-2", "bad-3"]);
        pending.push(request("good", "good"));
        assert_eq!(queue.start(now, now, &pending), ["good"]);
        assert!(queue.start(now, now, &pending).is_empty(), "each is answered once at a time");
    }

    #[test]
    fn of_many_nodes_those_with_the_fewest_requests_under_way_are_next() {
        let (mut queue, now) = (RequestQueue::default(), Instant::now());
        let (uids, nodes) = (names(40, "u"), names(10, "n"));
        let pending: Vec<_> = uids.iter().enumerate().map(|(at, uid)| request(uid, &nodes[at / 4])).collect();
        let started = queue.start(now, now, &pending);
        // One of each node, then a second of the first ones.
        assert_eq!(started[..10], ["u0", "u4", "u8", "u12", "u16", "u20", "u24", "u28", "u32", "u36"]);
        assert_eq!((started.len(), started[10].as_str()), (MAX_RUNNING, "u1"));
    }

    #[test]
    fn claims_come_first_and_alone_during_the_hold_off() {
        let (mut queue, now) = (RequestQueue::default(), Instant::now());
        let hold_off = now + Duration::from_secs(5);
        let claim = Pending { claims: true, ..request("claim", "n") };
        let pending = [request("old", "n"), request("other", "m"), claim];
        assert_eq!(queue.start(now, hold_off, &pending), ["claim"]);
        assert_eq!(queue.start(hold_off, hold_off, &pending), ["other", "old"]);
    }

    #[test]
    fn a_request_that_fails_pauses_longer_each_time_and_one_that_is_answered_is_left_alone() {
        let (mut queue, mut now) = (RequestQueue::default(), Instant::now());
        let pending = [request("u", "n")];
        for length in [200, 400, 800, 1600] {
            assert_eq!(queue.start(now, now, &pending), ["u"]);
            queue.end(now, "u", Attempt::Failed);
            assert!(queue.start(now, now, &pending).is_empty());
            assert_eq!(queue.next_due(now), Some(now + Duration::from_millis(length)));
            now += Duration::from_millis(length);
        }
        assert_eq!(queue.start(now, now, &pending), ["u"]);
        queue.end(now, "u", Attempt::Answered);
        assert!(queue.start(now + MAX_PAUSE * 2, now, &pending).is_empty(), "the watch lags behind");
        assert!(queue.start(now, now, &[]).is_empty());
        assert!(queue.answered.is_empty() && queue.failed.is_empty(), "what is gone is forgotten");
    }

    proptest! {
        /// Property, however requests come, fail and end: no slot too many, none for one request twice, and a node
        /// without a request under way is served as soon as a slot is free.
        #[test]
        fn slots_are_shared(steps in prop::collection::vec((0..6u8, 0..30usize, 0..5usize), 1..200)) {
            let (uids, nodes) = (names(30, "u"), names(5, "n"));
            let (mut queue, start) = (RequestQueue::default(), Instant::now());
            let mut now = start;
            let mut pending: Vec<Pending<'_>> = Vec::new();
            let mut running: BTreeMap<String, &str> = BTreeMap::new();
            for (step, uid, node) in steps {
                match step {
                    0 | 1 if !pending.iter().any(|request| request.uid == uids[uid]) => {
                        pending.push(Pending { claims: uid % 7 == 0, ..request(&uids[uid], &nodes[node]) });
                    }
                    2 => pending.retain(|request| request.uid != uids[uid]),
                    3 | 4 => if let Some((uid, _)) = running.pop_first() {
                        queue.end(now, &uid, if step == 3 { Attempt::Failed } else { Attempt::Answered });
                    },
                    _ => now += Duration::from_millis(500),
                }
                for uid in queue.start(now, start, &pending) {
                    let of = pending.iter().find(|request| request.uid == uid).unwrap().node;
                    prop_assert!(running.insert(uid, of).is_none(), "answered twice at once");
                }
                prop_assert!(running.len() <= MAX_RUNNING);
                for node in &nodes {
                    let under_way = running.values().filter(|of| *of == node).count();
                    prop_assert!(under_way <= MAX_RUNNING_OF_NODE);
                    let waits = pending.iter().any(|request| request.node == node && queue.is_due(now, start, request));
                    prop_assert!(!waits || under_way == MAX_RUNNING_OF_NODE || running.len() == MAX_RUNNING);
                }
            }
        }
    }
}
