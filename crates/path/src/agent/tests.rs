use proptest::prelude::*;

use super::observation::{MAX_OBSERVATION_INTERVAL, OBSERVATION_GRID};
use super::*;
use crate::rotation::{EndpointReason, Reason};

mod convergence;
mod nat64;
mod own_candidates;
mod ping;
mod versions;

const SECOND: Duration = Duration::from_secs(1);

fn key(number: u16) -> PublicKey {
    let mut bytes = [0; 32];
    bytes[..2].copy_from_slice(&number.to_be_bytes());
    PublicKey(bytes)
}

fn address(number: u8) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, number], 51820))
}

fn paths(numbers: &[u8]) -> PeerPaths {
    let candidate = |number: &u8| Candidate { address: address(*number), source: Source::Host };
    PeerPaths {
        candidates: numbers.iter().map(candidate).collect(),
        silence: Some(60 * SECOND),
        ..PeerPaths::default()
    }
}

fn agent() -> PathAgent {
    PathAgent::new(Config::default(), 7)
}

fn events(agent: &mut PathAgent) -> Vec<Event> {
    std::iter::from_fn(|| agent.poll_event()).collect()
}

fn session(endpoint: SocketAddr, age: Duration) -> Observation {
    Observation { endpoint: Some(endpoint), handshake_age: Some(age), rx_bytes: 92, tx_bytes: 0 }
}

#[test]
fn a_new_peer_is_observed_at_once_and_its_best_candidate_set() {
    let mut agent = agent();
    agent.upsert_peer(SECOND, key(1), paths(&[1, 2]));
    assert_eq!(agent.poll_timeout(), Some(SECOND));
    agent.handle_timeout(SECOND);
    assert_eq!(events(&mut agent), [Event::ObservationDue { peer: key(1) }]);
    agent.observe(SECOND, &key(1), Observation::default());
    let set = Event::SetEndpoint {
        peer: key(1),
        endpoint: address(1),
        source: Source::Host,
        reason: EndpointReason::NextCandidate,
    };
    assert_eq!(events(&mut agent), [set]);
    assert_eq!(agent.status(SECOND, &key(1)).unwrap().reason, Reason::TryingCandidates);
}

#[test]
fn an_observation_is_asked_for_until_it_comes_and_once_at_a_time() {
    let mut agent = agent();
    agent.upsert_peer(SECOND, key(1), paths(&[1]));
    for _ in 0..10 {
        let at = agent.poll_timeout().unwrap();
        agent.handle_timeout(at);
        assert!(agent.poll_timeout() > Some(at));
    }
    assert_eq!(events(&mut agent), [Event::ObservationDue { peer: key(1) }], "the shell did not listen");
    agent.handle_timeout(agent.poll_timeout().unwrap());
    assert_eq!(events(&mut agent).len(), 1);
}

#[test]
fn state_changes_carry_their_reason() {
    let mut agent = agent();
    agent.upsert_peer(SECOND, key(1), paths(&[1]));
    agent.observe(SECOND, &key(1), Observation::default());
    agent.observe(2 * SECOND, &key(1), session(address(1), SECOND));
    agent.observe(63 * SECOND, &key(1), session(address(1), 62 * SECOND));
    agent.upsert_peer(63 * SECOND, key(1), paths(&[]));
    let changes: Vec<_> = events(&mut agent)
        .into_iter()
        .filter_map(|event| match event {
            Event::StateChanged { from, to, reason, .. } => Some((from, to, reason)),
            Event::HandshakeDue { .. }
            | Event::KeepaliveChanged { .. }
            | Event::ObservationDue { .. }
            | Event::RelayPortDue { .. }
            | Event::SendBothWays { .. }
            | Event::SetEndpoint { .. }
            | Event::Sockets(_)
            | Event::StunAnswersChanged
            | Event::ReflexiveAddressesChanged
            | Event::RouteMtuChanged { .. } => None,
        })
        .collect();
    let expected = [
        (State::Connecting, State::Up, Reason::SessionAlive),
        (State::Up, State::Connecting, Reason::PeerSilent),
    ];
    assert_eq!(changes, expected);
    assert_eq!(
        agent.status(63 * SECOND, &key(1)).unwrap().state,
        State::Connecting,
        "the last good endpoint"
    );

    let mut empty = self::agent();
    empty.upsert_peer(SECOND, key(1), paths(&[]));
    empty.observe(SECOND, &key(1), Observation::default());
    let down = Event::StateChanged {
        peer: key(1),
        from: State::Connecting,
        to: State::Down,
        reason: Reason::NoCandidates,
    };
    assert_eq!(events(&mut empty), [down]);
}

#[test]
fn reasons_are_one_word_and_one_sentence() {
    for reason in Reason::ALL {
        assert_eq!(format!("{reason:?}"), reason.name());
        assert!(reason.to_string().contains(' '), "{reason}");
    }
}

#[test]
fn a_new_candidate_for_a_peer_that_is_not_up_is_tried_at_once() {
    let mut agent = agent();
    agent.upsert_peer(SECOND, key(1), paths(&[2]));
    agent.observe(SECOND, &key(1), Observation::default());
    events(&mut agent);
    agent.upsert_peer(2 * SECOND, key(1), paths(&[1, 2]));
    assert_eq!(agent.poll_timeout(), Some(SECOND + MIN_OBSERVATION_INTERVAL).min(Some(2 * SECOND)));
    agent.observe(2 * SECOND, &key(1), Observation::default());
    let set = events(&mut agent);
    assert!(matches!(set[..], [Event::SetEndpoint { reason: EndpointReason::NewCandidate, .. }]), "{set:?}");
}

#[test]
fn a_removed_peer_leaves_no_timer_and_no_event() {
    let mut agent = agent();
    agent.upsert_peer(SECOND, key(1), paths(&[1]));
    agent.upsert_peer(SECOND, key(2), paths(&[1]));
    agent.handle_timeout(SECOND);
    agent.remove_peer(&key(1));
    assert_eq!(events(&mut agent), [Event::ObservationDue { peer: key(2) }]);
    agent.remove_peer(&key(2));
    assert_eq!((agent.poll_timeout(), agent.peers().count()), (None, 0));
    agent.observe(SECOND, &key(1), Observation::default());
    assert_eq!(events(&mut agent), []);
    assert_eq!(agent.status(SECOND, &key(1)), None);
}

#[test]
fn datagrams_are_counted_and_answered_by_nothing() {
    let mut agent = agent();
    agent.upsert_peer(SECOND, key(1), paths(&[1]));
    for bytes in [&b""[..], &[0; 28], b"\x00\x01\x00\x00\x21\x12\xa4\x42"] {
        agent.handle_datagram(SECOND, None, address(1), bytes);
    }
    assert_eq!((agent.unknown_datagrams(), agent.poll_transmit()), (3, None));
    assert_eq!(agent.status(SECOND, &key(1)).unwrap().state, State::Connecting);
}

#[test]
fn a_wake_runs_the_machines_that_are_due_and_no_others() {
    let mut agent = agent();
    for number in 0..1000 {
        agent.upsert_peer(Duration::ZERO, key(number), paths(&[1]));
    }
    for number in 0..1000_u16 {
        // 50 per moment of the grid, each observed at a time of its own.
        let now = SECOND + Duration::from_millis(1 + 2 * u64::from(number));
        agent.observe(now, &key(number), session(address(1), SECOND));
    }
    events(&mut agent);
    // A machine that runs is due again later.
    let due = |agent: &PathAgent| agent.peers.values().map(|peer| peer.due).collect::<Vec<_>>();
    // Until the first are due again, since the shell did not observe them.
    for moment in 1..=5 {
        let at = agent.poll_timeout().unwrap();
        assert_eq!(at, 6 * SECOND + moment * OBSERVATION_GRID);
        let before = due(&agent);
        agent.handle_timeout(at);
        assert_eq!(due(&agent).iter().zip(&before).filter(|(after, before)| after != before).count(), 50);
        assert_eq!(events(&mut agent).len(), 50);
    }
}

#[test]
fn peers_draw_different_numbers_and_the_same_seed_draws_the_same() {
    let run = |seed| {
        let mut agent = PathAgent::new(Config::default(), seed);
        for number in 0..2 {
            agent.upsert_peer(SECOND, key(number), paths(&[1, 2]));
        }
        let mut set: [Vec<Duration>; 2] = Default::default();
        while let Some(now) = agent.poll_timeout().filter(|at| *at < 600 * SECOND) {
            agent.handle_timeout(now);
            for event in events(&mut agent) {
                agent.observe(now, event.peer().unwrap(), Observation::default());
            }
            for event in events(&mut agent) {
                if matches!(event, Event::SetEndpoint { .. }) {
                    set[usize::from(event.peer().unwrap().0[1])].push(now);
                }
            }
        }
        set
    };
    let first = run(1);
    assert_eq!(first, run(1));
    assert_ne!(first, run(2));
    assert_ne!(first[0], first[1]);
}

#[derive(Debug, Clone)]
enum Step {
    Datagram(Vec<u8>),
    Observe { peer: u16, endpoint: Option<u8>, age: Option<u16>, rx: u64, tx: u64 },
    Remove(u16),
    Timeout,
    Upsert { peer: u16, candidates: Vec<u8> },
    Wait(u16),
}

fn step() -> impl Strategy<Value = Step> {
    let observe =
        (0_u16..4, prop::option::of(0_u8..6), prop::option::of(0_u16..400), 0_u64..1000, 0_u64..1000);
    prop_oneof![
        prop::collection::vec(any::<u8>(), 0..40).prop_map(Step::Datagram),
        observe.prop_map(|(peer, endpoint, age, rx, tx)| Step::Observe { peer, endpoint, age, rx, tx }),
        (0_u16..4).prop_map(Step::Remove),
        Just(Step::Timeout),
        (0_u16..4, prop::collection::vec(0_u8..6, 0..5))
            .prop_map(|(peer, candidates)| Step::Upsert { peer, candidates }),
        any::<u16>().prop_map(Step::Wait),
    ]
}

proptest! {
    #[test]
    fn any_sequence_keeps_timers_ahead_and_live_sessions_untouched(
        steps in prop::collection::vec(step(), 1..200),
        seed in any::<u64>(),
    ) {
        let mut agent = PathAgent::new(Config::default(), seed);
        let (mut now, mut received) = (SECOND, BTreeMap::new());
        for step in steps {
            let mut live = None;
            match step {
                Step::Datagram(bytes) => agent.handle_datagram(now, None, address(9), &bytes),
                Step::Observe { peer, endpoint, age, rx, tx } => {
                    let handshake_age = age.map(|seconds| Duration::from_secs(seconds.into()));
                    let endpoint = endpoint.map(address);
                    agent.observe(now, &key(peer), Observation { endpoint, handshake_age, rx_bytes: rx, tx_bytes: tx });
                    let known = agent.peers().any(|present| *present == key(peer));
                    let more = known && received.insert(peer, rx).is_some_and(|before| rx > before);
                    live = Some(key(peer)).filter(|_| more && age.is_some_and(|age| age < 195));
                }
                Step::Remove(peer) => {
                    received.remove(&peer);
                    agent.remove_peer(&key(peer));
                }
                Step::Timeout => agent.handle_timeout(now),
                Step::Upsert { peer, candidates } => agent.upsert_peer(now, key(peer), paths(&candidates)),
                Step::Wait(milliseconds) => now += Duration::from_millis(milliseconds.into()),
            }
            for event in events(&mut agent) {
                prop_assert!(agent.peers().any(|key| Some(key) == event.peer()));
                if let Event::SetEndpoint { peer, endpoint, .. } = event {
                    prop_assert_ne!(Some(peer), live);
                    prop_assert_eq!(agent.status(now, &peer).unwrap().endpoint, Some(endpoint));
                }
            }
            // Each peer has a timer, and after a wake none is left behind.
            prop_assert_eq!(agent.wakeups.observations.len(), agent.peers().count());
            let mut woken = now;
            if agent.poll_timeout().is_some_and(|at| at <= woken) {
                agent.handle_timeout(woken);
            }
            prop_assert!(agent.poll_timeout().is_none_or(|at| at > woken));
            woken = agent.poll_timeout().unwrap_or(woken);
            prop_assert!(woken <= now + MAX_OBSERVATION_INTERVAL + OBSERVATION_GRID, "observed at least this often");
        }
    }
}
