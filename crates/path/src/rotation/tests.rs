use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

mod relay_attempt;
mod silence;

fn end(text: &str) -> SocketAddr {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

const A: &str = "192.0.2.1:51820";
const B: &str = "192.0.2.2:51820";
const C: &str = "192.0.2.3:51820";

fn list(items: &[(&str, Source)]) -> Vec<Candidate> {
    items.iter().map(|(address, source)| Candidate { address: end(address), source: *source }).collect()
}

/// A rotation with a clock and a device that uses the endpoint it is told.
struct Bench {
    rotation: Rotation,
    now: Duration,
    device: Observation,
    handshake: Option<Duration>,
}

impl Bench {
    fn new(items: &[(&str, Source)]) -> Self {
        Self::with(Config::default(), None, items)
    }

    fn with(config: Config, last_good: Option<Candidate>, items: &[(&str, Source)]) -> Self {
        let mut rotation = Rotation { last_good, ..Rotation::new(config) };
        rotation.set_silence(Some(Duration::from_secs(60)));
        rotation.set_candidates(Duration::ZERO, list(items));
        Self { rotation, now: Duration::from_secs(1000), device: Observation::default(), handshake: None }
    }

    fn poll(&mut self) -> Option<String> {
        let handshake_age = self.handshake.map(|at| self.now.saturating_sub(at));
        self.rotation.observe(self.now, Observation { handshake_age, ..self.device });
        let set = self.rotation.poll(self.now);
        self.device.endpoint = set.or(self.device.endpoint);
        set.map(|address| address.to_string())
    }

    /// Polls once a second; returns each endpoint set, with its second.
    fn run(&mut self, seconds: u64) -> Vec<(u64, String)> {
        let start = self.now;
        (0..seconds)
            .filter_map(|second| {
                self.now = start + Duration::from_secs(second + 1);
                self.poll().map(|set| (second + 1, set))
            })
            .collect()
    }

    /// A handshake completes now, with a packet.
    fn complete_handshake(&mut self) {
        self.handshake = Some(self.now);
        self.device.rx_bytes += 92;
    }

    fn status(&self) -> Status {
        self.rotation.status(self.now)
    }

    fn state(&self) -> State {
        self.status().state
    }
}

#[test]
fn a_public_peer_is_up_after_the_first_attempt() {
    let mut bench = Bench::new(&[(A, Source::Host), (B, Source::Observed)]);
    assert_eq!(bench.poll().as_deref(), Some(A));
    assert_eq!((bench.state(), bench.status().message), (State::Connecting, format!("trying {A} (host)")));
    bench.complete_handshake();
    assert_eq!(bench.run(3), []);
    let status = bench.status();
    assert_eq!((status.state, status.endpoint, status.source), (State::Up, Some(end(A)), Some(Source::Host)));
    assert_eq!(status.message, format!("handshake 3 s ago over {A} (host)"));
    assert_eq!(bench.rotation.last_good.map(|last| last.address), Some(end(A)));
}

#[test]
fn all_candidates_are_tried_in_order_then_slowly_forever() {
    let mut bench = Bench::new(&[(A, Source::Host), (B, Source::Observed), (C, Source::Host)]);
    let set = bench.run(40);
    let order: Vec<&str> = set.iter().map(|(_, address)| address.as_str()).collect();
    assert_eq!(order, [A, B, C, A, B, C, A]);
    assert_eq!(set.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [1, 7, 13, 19, 25, 31, 37]);
    let status = bench.status();
    assert_eq!(status.state, State::Down);
    assert_eq!(status.message, format!("tried 3 endpoints, no handshake yet; trying {A} (host)"));
    let slow = bench.run(600);
    assert!((600 / 48 - 1..=600 / 15).contains(&slow.len()), "{}", slow.len());
    bench.run(3600);
    let slower = bench.run(3600).len();
    assert!(
        (3600 / 91 - 1..=3600 / 60).contains(&slower),
        "a peer that stays away is tried less often: {slower}"
    );
}

#[test]
fn nothing_is_decided_before_the_first_observation() {
    let mut bench = Bench::new(&[(A, Source::Host)]);
    assert_eq!(bench.rotation.poll(bench.now), None);
    assert_eq!(bench.rotation.next_wakeup(bench.now), None);
    assert_eq!(bench.status().message, "the WireGuard device has not been read yet");
}

#[test]
fn without_candidates_the_peer_is_down_until_one_appears() {
    let mut bench = Bench::new(&[]);
    assert_eq!(bench.run(100), []);
    assert_eq!(bench.rotation.next_wakeup(bench.now), None);
    assert_eq!(bench.state(), State::Down);
    assert_eq!(
        bench.status().message,
        "no candidate endpoint known: the node has published none and no peer has seen it"
    );
    bench.rotation.set_candidates(bench.now, list(&[(A, Source::Observed)]));
    assert_eq!(bench.rotation.next_wakeup(bench.now), Some(bench.now));
    assert_eq!(bench.poll().as_deref(), Some(A));
    assert_eq!(bench.state(), State::Connecting);
    bench.rotation.set_candidates(bench.now, vec![]);
    bench.run(10);
    assert_eq!(bench.state(), State::Down);
    assert!(bench.status().message.ends_with("no peer has seen it"), "{}", bench.status().message);
}

#[test]
fn a_session_that_the_peer_initiated_keeps_its_endpoint() {
    for items in [&[][..], &[(A, Source::Host), (B, Source::Host)][..]] {
        let mut bench = Bench::new(items);
        bench.device.endpoint = Some(end(C));
        bench.complete_handshake();
        bench.now += Duration::from_secs(50);
        assert_eq!(bench.run(60), []);
        let status = bench.status();
        assert_eq!(
            (status.state, status.endpoint, status.source),
            (State::Up, Some(end(C)), Some(Source::Roamed))
        );
    }
}

#[test]
fn a_roamed_endpoint_gets_an_attempt_without_being_set() {
    let mut bench = Bench::new(&[(A, Source::Host), (B, Source::Host)]);
    assert_eq!(bench.poll().as_deref(), Some(A));
    bench.run(4);
    // The peer's first handshake message arrives: the device turns to where it came from.
    bench.device.endpoint = Some(end(C));
    bench.device.rx_bytes += 148;
    assert_eq!(bench.run(5), []);
    assert_eq!(bench.status().message, format!("tried 1 endpoint, no handshake yet; trying {C} (roamed)"));
    bench.complete_handshake();
    assert_eq!(bench.run(30), []);
    assert_eq!(bench.state(), State::Up);
}

#[test]
fn a_peer_that_sends_but_never_answers_does_not_stop_the_rotation() {
    let mut bench = Bench::new(&[(A, Source::Host), (B, Source::Host)]);
    let mut set = Vec::new();
    for _ in 0..6 {
        set.extend(bench.run(5).into_iter().map(|(_, address)| address));
        bench.device.endpoint = Some(end(C));
        bench.device.rx_bytes += 148;
    }
    assert!(set.contains(&A.to_owned()) && set.contains(&B.to_owned()), "{set:?}");
}

#[test]
fn a_live_session_that_roams_keeps_its_endpoint_as_last_good() {
    let mut bench = Bench::new(&[(A, Source::Host)]);
    bench.poll();
    bench.complete_handshake();
    bench.run(5);
    bench.device.endpoint = Some(end(C));
    bench.device.rx_bytes += 100;
    assert_eq!(bench.run(20), []);
    bench.rotation.set_candidates(bench.now, list(&[(B, Source::Manual), (A, Source::Host)]));
    assert_eq!(bench.run(20), []);
    assert_eq!(bench.status().source, Some(Source::Roamed));
    // Lost: the last good endpoint comes first, in the fast rounds only, because it is no candidate.
    let set = bench.run(120);
    let order: Vec<&str> = set.iter().map(|(_, address)| address.as_str()).collect();
    assert_eq!(order[..7], [C, B, A, C, B, A, B]);
    assert!(!order[7..].contains(&C));
}

#[test]
fn keepalives_hold_a_session_up_and_wakeups_are_rare() {
    let mut bench = Bench::new(&[(A, Source::Host)]);
    bench.poll();
    for round in 0..40 {
        if round % 4 == 0 {
            bench.complete_handshake();
        }
        bench.device.rx_bytes += 32;
        assert!(bench.run(25).is_empty());
        assert_eq!(bench.state(), State::Up);
        let wakeup = bench.rotation.next_wakeup(bench.now).unwrap();
        assert!(wakeup > bench.now + Duration::from_secs(30), "{wakeup:?}");
    }
}

#[test]
fn polling_only_at_the_wakeups_misses_nothing() {
    let mut bench = Bench::new(&[(A, Source::Host), (B, Source::Host)]);
    bench.poll();
    bench.complete_handshake();
    bench.poll();
    let mut set = Vec::new();
    for _ in 0..5 {
        bench.now = bench.rotation.next_wakeup(bench.now).unwrap();
        set.extend(bench.poll());
    }
    assert_eq!(set, [A, B, A, B, A]);
}

#[test]
fn a_restarted_program_keeps_a_live_session() {
    let mut bench = Bench::new(&[(A, Source::Host), (B, Source::Host)]);
    bench.device =
        Observation { endpoint: Some(end(B)), handshake_age: None, rx_bytes: 5_000_000, tx_bytes: 0 };
    bench.handshake = Some(bench.now - Duration::from_secs(100));
    assert_eq!(bench.run(30), []);
    assert_eq!(bench.state(), State::Up);
    // Without a session the rotation starts with the last good endpoint.
    let last_good = list(&[(B, Source::Host)]).pop();
    let mut cold = Bench::with(Config::default(), last_good, &[(A, Source::Host), (B, Source::Host)]);
    assert_eq!(cold.poll().as_deref(), Some(B));
    let mut alone = Bench::with(Config::default(), last_good, &[]);
    assert_eq!(alone.poll().as_deref(), Some(B));
}

#[test]
fn a_recreated_device_counts_as_no_packet() {
    let mut bench = Bench::new(&[(A, Source::Host)]);
    bench.poll();
    bench.complete_handshake();
    bench.run(3);
    bench.device = Observation { rx_bytes: 0, ..bench.device };
    bench.handshake = None;
    assert_eq!(bench.run(1), [(1, A.to_owned())]);
    assert_eq!(bench.status().message, format!("the device lost its session; trying {A} (host)"));
}

#[test]
fn a_better_new_candidate_is_tried_at_once_and_a_worse_one_waits() {
    let mut bench = Bench::new(&[(B, Source::Host)]);
    bench.poll();
    bench
        .rotation
        .set_candidates(bench.now, list(&[(A, Source::Observed), (B, Source::Host), (C, Source::Host)]));
    assert_eq!(bench.rotation.next_wakeup(bench.now), Some(bench.now));
    assert_eq!(bench.poll().as_deref(), Some(A));
    assert_eq!(bench.run(7), [(6, C.to_owned())]);
    // The same list again changes nothing.
    bench
        .rotation
        .set_candidates(bench.now, list(&[(A, Source::Observed), (B, Source::Host), (C, Source::Host)]));
    assert_eq!(bench.poll(), None);
}

#[test]
fn a_known_candidate_that_rises_above_the_current_one_is_tried_at_once() {
    let mut bench = Bench::new(&[(A, Source::Host), (B, Source::Observed)]);
    bench.poll();
    // The node's public address became known: the private address belongs to another site.
    bench.rotation.set_candidates(bench.now, list(&[(B, Source::Observed), (A, Source::Host)]));
    assert_eq!(bench.poll().as_deref(), Some(B));
}

#[test]
fn last_good_is_not_overtaken_by_candidates_that_ranked_above_it_before() {
    let last_good = list(&[(B, Source::Observed)]).pop();
    let items = [(A, Source::Host), (B, Source::Observed)];
    let mut bench = Bench::with(Config::default(), last_good, &items);
    assert_eq!(bench.poll().as_deref(), Some(B));
    bench.rotation.set_candidates(bench.now, list(&items));
    assert_eq!(bench.poll(), None);
}

#[test]
fn when_all_others_failed_any_new_candidate_is_tried_at_once() {
    let mut bench = Bench::new(&[(A, Source::Host)]);
    bench.run(30);
    bench.rotation.set_candidates(bench.now, list(&[(A, Source::Host), (B, Source::Observed)]));
    assert_eq!(bench.poll().as_deref(), Some(B));
}

#[test]
fn a_peer_that_restarts_on_another_port_is_found_again() {
    let mut bench = Bench::new(&[("198.51.100.1:40000", Source::Observed)]);
    bench.poll();
    bench.complete_handshake();
    bench.run(50);
    bench.rotation.set_candidates(bench.now, list(&[("198.51.100.1:40999", Source::Observed)]));
    let set = bench.run(20);
    let order: Vec<&str> = set.iter().map(|(_, address)| address.as_str()).collect();
    assert_eq!(order, ["198.51.100.1:40000", "198.51.100.1:40999"]);
}

#[test]
fn a_flapping_peer_starts_fast_each_time() {
    let mut bench = Bench::new(&[(A, Source::Host), (B, Source::Host)]);
    bench.poll();
    for _ in 0..5 {
        bench.complete_handshake();
        assert_eq!(bench.run(60), []);
        assert_eq!(bench.state(), State::Up);
        let set = bench.run(12);
        assert_eq!(set[0].1, A, "the last good endpoint comes first");
        assert_eq!(set[1].1, B);
        assert_eq!(bench.state(), State::Connecting);
        bench.device.endpoint = Some(end(A));
    }
}

/// Two peers behind port-restricted NATs: a packet arrives only where one was sent in the last 30 s.
#[test]
fn two_peers_behind_nat_try_each_other_at_the_same_time() {
    let (seen_a, seen_b) = ("198.51.100.1:40000", "198.51.100.2:41000");
    for delay in 0..40 {
        let config = |seed| Config { seed, ..Config::default() };
        let junk = [("10.0.0.7:51820", Source::Host), ("10.0.0.8:51820", Source::Host), (A, Source::Host)];
        let mut of_a = vec![(seen_b, Source::Observed)];
        let mut of_b = vec![(seen_a, Source::Observed)];
        of_a.extend(junk);
        of_b.splice(0..0, junk);
        let mut peers = [Bench::with(config(1), None, &of_a), Bench::with(config(2), None, &of_b)];
        let public = [end(seen_a), end(seen_b)];
        let mut opened: [BTreeMap<SocketAddr, u64>; 2] = Default::default();
        let mut met = None;
        for second in 0..600u64 {
            for side in [0, 1] {
                if side == 1 && second < delay {
                    continue;
                }
                let other = 1 - side;
                peers[side].now = Duration::from_secs(1000 + second);
                let set = peers[side].poll();
                if set.is_some() || second % 5 == 0 {
                    let Some(target) = peers[side].device.endpoint else { continue };
                    opened[side].insert(target, second);
                    let open = opened[other].get(&public[side]).is_some_and(|at| second - at <= 30);
                    if target == public[other] && open {
                        peers[0].device.endpoint = Some(public[1]);
                        peers[1].device.endpoint = Some(public[0]);
                        peers[0].complete_handshake();
                        peers[1].complete_handshake();
                        met = met.or(Some(second));
                    }
                }
            }
            if met.is_some_and(|at| second > at + 1) {
                break;
            }
        }
        assert!(met.is_some_and(|at| at <= delay + 60), "started {delay} s apart, met at {met:?}");
        assert!(peers.iter().all(|peer| peer.state() == State::Up));
    }
}

#[derive(Debug, Clone)]
enum Step {
    Wait(u16),
    Candidates(Vec<u8>),
    Observe { endpoint: Option<u8>, age: Option<u16>, rx: u64 },
}

fn address(number: u8) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, number], 51820))
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        any::<u16>().prop_map(Step::Wait),
        prop::collection::vec(0u8..8, 0..6).prop_map(Step::Candidates),
        (prop::option::of(0u8..10), prop::option::of(0u16..400), 0u64..1000)
            .prop_map(|(endpoint, age, rx)| Step::Observe { endpoint, age, rx }),
    ]
}

fn candidates(numbers: &[u8]) -> Vec<Candidate> {
    numbers.iter().map(|n| Candidate { address: address(*n), source: Source::Host }).collect()
}

proptest! {
    #[test]
    fn any_sequence_sets_only_given_candidates_and_leaves_live_sessions_alone(
        steps in prop::collection::vec(step(), 1..80),
        seed in any::<u64>(),
    ) {
        let mut rotation = Rotation::new(Config { seed, ..Config::default() });
        rotation.set_silence(Some(Duration::from_secs(60)));
        let (mut now, mut current, mut device) = (Duration::from_secs(1), vec![], None);
        for step in steps {
            match step {
                Step::Wait(millis) => now += Duration::from_millis(millis.into()),
                Step::Candidates(numbers) => {
                    current = candidates(&numbers);
                    rotation.set_candidates(now, current.clone());
                }
                Step::Observe { endpoint, age, rx } => {
                    device = endpoint.map(address).or(device);
                    let handshake_age = age.map(|age| Duration::from_secs(age.into()));
                    rotation.observe(now, Observation { endpoint: device, handshake_age, rx_bytes: rx, tx_bytes: 0 });
                }
            }
            let was_up = rotation.status(now).state == State::Up;
            let last_good = rotation.last_good;
            if let Some(set) = rotation.poll(now) {
                prop_assert!(!was_up);
                prop_assert!(current.iter().chain(&last_good).any(|candidate| candidate.address == set));
                prop_assert_eq!(rotation.status(now).endpoint, Some(set));
                device = Some(set);
            }
            prop_assert_eq!(rotation.poll(now), None, "asking twice");
            let status = rotation.status(now);
            prop_assert_eq!(status.state == State::Up, was_up);
            prop_assert!(!status.message.is_empty());
            prop_assert!(rotation.next_wakeup(now).is_none_or(|at| at > now));
        }
    }

    #[test]
    fn while_down_every_candidate_is_tried_within_bounded_time(
        steps in prop::collection::vec(step(), 0..40),
        numbers in prop::collection::btree_set(0u8..16, 1..=16),
        seed in any::<u64>(),
    ) {
        let mut rotation = Rotation::new(Config { seed, ..Config::default() });
        rotation.set_silence(Some(Duration::from_secs(60)));
        let mut now = Duration::from_secs(1);
        for step in steps {
            match step {
                Step::Wait(millis) => now += Duration::from_millis(millis.into()),
                Step::Candidates(numbers) => rotation.set_candidates(now, candidates(&numbers)),
                Step::Observe { endpoint, age, rx } => {
                    let handshake_age = age.map(|age| Duration::from_secs(age.into()));
                    rotation.observe(now, Observation { endpoint: endpoint.map(address), handshake_age, rx_bytes: rx, tx_bytes: 0 });
                }
            }
            rotation.poll(now);
        }
        let numbers: Vec<u8> = numbers.into_iter().collect();
        rotation.set_candidates(now, candidates(&numbers));
        // Two rounds at the slowest pace, with one attempt for the last good endpoint and one for a roamed one.
        let windows = u32::try_from(numbers.len()).unwrap() * 2 + 3;
        let end = now + Duration::from_secs(90) * windows;
        let (mut tried, mut device) = (BTreeSet::new(), None);
        while now < end {
            rotation.observe(now, Observation { endpoint: device, handshake_age: None, rx_bytes: 0, tx_bytes: 0 });
            if let Some(set) = rotation.poll(now) {
                tried.insert(set);
                device = Some(set);
            }
            now = rotation.next_wakeup(now).unwrap();
        }
        for number in numbers {
            prop_assert!(tried.contains(&address(number)), "{} of {:?}", number, tried);
        }
    }
}
