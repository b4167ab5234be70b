use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn key(number: u8) -> PublicKey {
    PublicKey([number; 32])
}

fn candidate(number: u8, source: Source) -> Candidate {
    Candidate { address: SocketAddr::from(([203, 0, 113, number], 51820)), source }
}

/// One peer, and a clock.
struct Bed {
    history: PathHistory,
    began: Instant,
    seconds: u32,
}

impl Bed {
    fn new() -> Self {
        let (mut history, began) = (PathHistory::default(), Instant::now());
        history.set_peers(began, &[(key(1), ())].into());
        Self { history, began, seconds: 0 }
    }

    fn times(&mut self) -> (SystemTime, Instant) {
        self.seconds += 1;
        (SystemTime::UNIX_EPOCH + self.seconds * SECOND, self.began + self.seconds * SECOND)
    }

    fn set(&mut self, to: Candidate, reason: EndpointReason) -> Option<Duration> {
        let times = self.times();
        self.history.endpoint_set(&key(1), times, to, reason)
    }

    fn observe_nothing(&mut self) {
        let times = self.times();
        let observed = Observed { endpoint: None, is_up: false };
        assert_eq!(self.history.observed(&key(1), times, observed, |_| Source::Roamed), None);
    }

    fn observe(&mut self, at: Candidate, is_up: bool) -> Option<Duration> {
        let times = self.times();
        let observed = Observed { endpoint: Some(at.address), is_up };
        self.history.observed(&key(1), times, observed, |_| at.source)
    }

    /// Last number of the addresses from and to, and the reason.
    fn changes(&self) -> Vec<(Option<u8>, u8, &'static str)> {
        let number = |candidate: Candidate| match candidate.address {
            SocketAddr::V4(address) => address.ip().octets()[3],
            SocketAddr::V6(_) => 0,
        };
        let changes = self.history.of(&key(1));
        changes.iter().map(|it| (it.from.map(number), number(it.to), it.reason.name())).collect()
    }
}

#[test]
fn each_change_says_from_where_to_where_and_why() {
    let mut bed = Bed::new();
    let (relay, direct) = (candidate(1, Source::Relay), candidate(2, Source::Observed));
    bed.set(relay, EndpointReason::ProbeAnswered);
    bed.observe(relay, true);
    bed.set(direct, EndpointReason::BetterPath);
    bed.observe(relay, true);
    bed.observe(direct, true);
    bed.observe(candidate(3, Source::Roamed), true);
    bed.observe(candidate(3, Source::Roamed), true);
    let expected = [(None, 1, "ProbeAnswered"), (Some(1), 2, "BetterPath"), (Some(2), 3, "Roamed")];
    assert_eq!(bed.changes(), expected, "what was just set is no roaming");
    assert_eq!(bed.history.of(&key(1))[1].at, SystemTime::UNIX_EPOCH + 3 * SECOND);
}

/// Seen in the demo: the device is read between two endpoints that are set.
#[test]
fn an_endpoint_that_the_device_does_not_have_yet_is_no_roaming() {
    let mut bed = Bed::new();
    let (relay, direct) = (candidate(1, Source::Relay), candidate(2, Source::Observed));
    bed.observe_nothing();
    bed.set(relay, EndpointReason::NextCandidate);
    bed.set(direct, EndpointReason::NewCandidate);
    assert_eq!(bed.observe(relay, true), None, "nor is the relay a direct path");
    bed.set(relay, EndpointReason::ProbeAnswered);
    bed.observe(direct, false);
    bed.observe(relay, true);
    let expected = [(None, 1, "NextCandidate"), (Some(1), 2, "NewCandidate"), (Some(2), 1, "ProbeAnswered")];
    assert_eq!(bed.changes(), expected);
    bed.observe(direct, true);
    assert_eq!(bed.changes().last(), Some(&(Some(1), 2, "Roamed")));
}

#[test]
fn the_last_sixteen_are_kept_and_the_oldest_still_knows_where_from() {
    let mut bed = Bed::new();
    for number in 0..20 {
        bed.set(candidate(number, Source::Host), EndpointReason::PathFailed);
    }
    let changes = bed.changes();
    assert_eq!((changes.len(), changes[0]), (MAX_CHANGES, (Some(3), 4, "PathFailed")));
    assert_eq!(changes[15], (Some(18), 19, "PathFailed"));
}

#[test]
fn attempts_at_a_peer_that_stays_away_displace_nothing() {
    let mut bed = Bed::new();
    bed.set(candidate(1, Source::Host), EndpointReason::ProbeAnswered);
    for number in 0..100 {
        bed.set(candidate(number, Source::Host), EndpointReason::NextCandidate);
    }
    assert_eq!(bed.changes(), [(None, 1, "ProbeAnswered"), (Some(1), 99, "NextCandidate")]);
    assert_eq!(bed.history.of(&key(1))[1].attempts, 100);
}

#[test]
fn a_peer_that_is_gone_is_forgotten() {
    let mut bed = Bed::new();
    bed.set(candidate(1, Source::Host), EndpointReason::LastGood);
    bed.history.set_peers(bed.began, &[(key(2), ())].into());
    assert_eq!(bed.changes(), []);
    assert_eq!(bed.set(candidate(2, Source::Host), EndpointReason::LastGood), None);
    assert_eq!(bed.changes(), []);
}

#[test]
fn the_first_direct_path_is_timed_once() {
    let mut bed = Bed::new();
    assert_eq!(bed.set(candidate(1, Source::Host), EndpointReason::NextCandidate), None, "an attempt");
    assert_eq!(bed.set(candidate(2, Source::Relay), EndpointReason::ProbeAnswered), None);
    assert_eq!(bed.observe(candidate(2, Source::Relay), true), None);
    assert_eq!(bed.set(candidate(3, Source::Observed), EndpointReason::BetterPath), Some(4 * SECOND));
    assert_eq!(bed.observe(candidate(3, Source::Observed), true), None);
    assert_eq!(bed.set(candidate(4, Source::Host), EndpointReason::BetterPath), None);

    // The other node decides, and this one follows its packets.
    let mut follows = Bed::new();
    follows.observe_nothing();
    assert_eq!(follows.observe(candidate(1, Source::Observed), true), Some(2 * SECOND));
}

#[test]
fn a_session_that_was_there_before_the_program_is_not_timed() {
    let mut bed = Bed::new();
    assert_eq!(bed.observe(candidate(1, Source::Observed), true), None);
    assert_eq!(bed.observe(candidate(2, Source::Observed), true), None);
    assert_eq!(bed.set(candidate(3, Source::Host), EndpointReason::BetterPath), None);
}
