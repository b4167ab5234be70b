use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

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

/// A peer, a clock, and a device that does what it is told.
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

    fn with(config: Config, worked: Option<Worked>, items: &[(&str, Source)]) -> Self {
        let mut rotation = Rotation::new(config, worked);
        rotation.set_candidates(Duration::ZERO, list(items));
        Self { rotation, now: Duration::from_secs(1000), device: Observation::default(), handshake: None }
    }

    fn look(&mut self) -> Option<String> {
        let handshake_age = self.handshake.map(|at| self.now.saturating_sub(at));
        self.rotation.observe(self.now, Observation { handshake_age, ..self.device });
        let set = self.rotation.poll(self.now);
        self.device.endpoint = set.or(self.device.endpoint);
        set.map(|address| address.to_string())
    }

    /// Once a second; what was set, with the second it was set in.
    fn run(&mut self, seconds: u64) -> Vec<(u64, String)> {
        let start = self.now;
        (0..seconds)
            .filter_map(|second| {
                self.now = start + Duration::from_secs(second + 1);
                self.look().map(|set| (second + 1, set))
            })
            .collect()
    }

    /// A handshake completes now, with a packet.
    fn shake(&mut self) {
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
    assert_eq!(bench.look().as_deref(), Some(A));
    assert_eq!((bench.state(), bench.status().reason), (State::Connecting, format!("trying {A} (host)")));
    bench.shake();
    assert_eq!(bench.run(3), []);
    let status = bench.status();
    assert_eq!((status.state, status.endpoint, status.source), (State::Up, Some(end(A)), Some(Source::Host)));
    assert_eq!(status.reason, format!("handshake 3 s ago over {A} (host)"));
    assert_eq!(bench.rotation.worked().map(|worked| worked.address), Some(end(A)));
}

#[test]
fn all_candidates_are_tried_in_turn_then_slowly_for_ever() {
    let mut bench = Bench::new(&[(A, Source::Host), (B, Source::Observed), (C, Source::Host)]);
    let set = bench.run(40);
    let order: Vec<&str> = set.iter().map(|(_, address)| address.as_str()).collect();
    assert_eq!(order, [A, B, C, A, B, C, A]);
    assert_eq!(set.iter().map(|(at, _)| *at).collect::<Vec<_>>(), [1, 7, 13, 19, 25, 31, 37]);
    let status = bench.status();
    assert_eq!(status.state, State::Down);
    assert_eq!(status.reason, format!("tried 3 endpoints, no handshake yet; trying {A} (host)"));
    let slow = bench.run(600);
    assert!((600 / 24 - 1..=600 / 15).contains(&slow.len()), "{}", slow.len());
}

#[test]
fn nothing_is_said_before_the_device_was_read() {
    let mut bench = Bench::new(&[(A, Source::Host)]);
    assert_eq!(bench.rotation.poll(bench.now), None);
    assert_eq!(bench.rotation.next_wakeup(bench.now), None);
    assert_eq!(bench.status().reason, "the WireGuard device has not been read yet");
}

#[test]
fn without_candidates_it_waits_and_says_so() {
    let mut bench = Bench::new(&[]);
    assert_eq!(bench.run(100), []);
    assert_eq!(bench.rotation.next_wakeup(bench.now), None);
    assert_eq!(bench.state(), State::Down);
    assert_eq!(
        bench.status().reason,
        "no candidate endpoint known: the node has published none and no peer has seen it"
    );
    bench.rotation.set_candidates(bench.now, list(&[(A, Source::Observed)]));
    assert_eq!(bench.rotation.next_wakeup(bench.now), Some(bench.now));
    assert_eq!(bench.look().as_deref(), Some(A));
    assert_eq!(bench.state(), State::Connecting);
    bench.rotation.set_candidates(bench.now, vec![]);
    bench.run(10);
    assert_eq!(bench.state(), State::Down);
    assert!(bench.status().reason.ends_with("no peer has seen it"), "{}", bench.status().reason);
}

#[test]
fn a_peer_that_comes_to_us_is_not_disturbed() {
    for items in [&[][..], &[(A, Source::Host), (B, Source::Host)][..]] {
        let mut bench = Bench::new(items);
        bench.device.endpoint = Some(end(C));
        bench.shake();
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
fn an_endpoint_that_roams_in_while_we_try_gets_its_window_without_being_set() {
    let mut bench = Bench::new(&[(A, Source::Host), (B, Source::Host)]);
    assert_eq!(bench.look().as_deref(), Some(A));
    bench.run(4);
    // The peer's first handshake message arrives: the device turns to where it came from.
    bench.device.endpoint = Some(end(C));
    bench.device.rx_bytes += 148;
    assert_eq!(bench.run(5), []);
    assert_eq!(bench.status().reason, format!("tried 1 endpoint, no handshake yet; trying {C} (roamed)"));
    bench.shake();
    assert_eq!(bench.run(30), []);
    assert_eq!(bench.state(), State::Up);
}

#[test]
fn a_peer_that_is_heard_but_never_answers_does_not_stop_the_rotation() {
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
fn a_live_session_that_roams_is_kept_and_remembered() {
    let mut bench = Bench::new(&[(A, Source::Host)]);
    bench.look();
    bench.shake();
    bench.run(5);
    bench.device.endpoint = Some(end(C));
    bench.device.rx_bytes += 100;
    assert_eq!(bench.run(20), []);
    bench.rotation.set_candidates(bench.now, list(&[(B, Source::Manual), (A, Source::Host)]));
    assert_eq!(bench.run(20), []);
    assert_eq!(bench.status().source, Some(Source::Roamed));
    // Lost: what worked last comes first, in the fast rounds only, because nobody names it.
    let set = bench.run(120);
    let order: Vec<&str> = set.iter().map(|(_, address)| address.as_str()).collect();
    assert_eq!(order[..7], [C, B, A, C, B, A, B]);
    assert!(!order[7..].contains(&C));
}

#[test]
fn keepalives_hold_a_session_up_and_wakeups_are_rare() {
    let mut bench = Bench::new(&[(A, Source::Host)]);
    bench.look();
    for round in 0..40 {
        if round % 4 == 0 {
            bench.shake();
        }
        bench.device.rx_bytes += 32;
        assert!(bench.run(25).is_empty());
        assert_eq!(bench.state(), State::Up);
        let wakeup = bench.rotation.next_wakeup(bench.now).unwrap();
        assert!(wakeup > bench.now + Duration::from_secs(30), "{wakeup:?}");
    }
}

#[test]
fn waking_only_when_asked_to_misses_nothing() {
    let mut bench = Bench::new(&[(A, Source::Host), (B, Source::Host)]);
    bench.look();
    bench.shake();
    bench.look();
    let mut set = Vec::new();
    for _ in 0..5 {
        bench.now = bench.rotation.next_wakeup(bench.now).unwrap();
        set.extend(bench.look());
    }
    assert_eq!(set, [A, B, A, B, A]);
}

#[test]
fn a_restarted_program_takes_over_a_live_session_and_remembers() {
    let mut bench = Bench::new(&[(A, Source::Host), (B, Source::Host)]);
    bench.device =
        Observation { endpoint: Some(end(B)), handshake_age: None, rx_bytes: 5_000_000, tx_bytes: 0 };
    bench.handshake = Some(bench.now - Duration::from_secs(100));
    assert_eq!(bench.run(30), []);
    assert_eq!(bench.state(), State::Up);
    // And with the session gone, the seed says where to begin.
    let worked = list(&[(B, Source::Host)]).pop();
    let mut cold = Bench::with(Config::default(), worked, &[(A, Source::Host), (B, Source::Host)]);
    assert_eq!(cold.look().as_deref(), Some(B));
    let mut alone = Bench::with(Config::default(), worked, &[]);
    assert_eq!(alone.look().as_deref(), Some(B));
}

#[test]
fn a_device_made_anew_is_no_news_from_the_peer() {
    let mut bench = Bench::new(&[(A, Source::Host)]);
    bench.look();
    bench.shake();
    bench.run(3);
    bench.device = Observation { rx_bytes: 0, ..bench.device };
    bench.handshake = None;
    assert_eq!(bench.run(1), [(1, A.to_owned())]);
    assert_eq!(bench.status().reason, format!("its session is gone; trying {A} (host)"));
}

#[test]
fn a_better_new_candidate_is_tried_at_once_and_a_worse_one_waits() {
    let mut bench = Bench::new(&[(B, Source::Host)]);
    bench.look();
    bench
        .rotation
        .set_candidates(bench.now, list(&[(A, Source::Observed), (B, Source::Host), (C, Source::Host)]));
    assert_eq!(bench.rotation.next_wakeup(bench.now), Some(bench.now));
    assert_eq!(bench.look().as_deref(), Some(A));
    assert_eq!(bench.run(7), [(6, C.to_owned())]);
    // The same list again is no news.
    bench
        .rotation
        .set_candidates(bench.now, list(&[(A, Source::Observed), (B, Source::Host), (C, Source::Host)]));
    assert_eq!(bench.look(), None);
}

#[test]
fn a_known_candidate_that_rises_above_the_current_one_is_tried_at_once() {
    let mut bench = Bench::new(&[(A, Source::Host), (B, Source::Observed)]);
    bench.look();
    // We have learnt how we look from outside: the private address is somebody else's.
    bench.rotation.set_candidates(bench.now, list(&[(B, Source::Observed), (A, Source::Host)]));
    assert_eq!(bench.look().as_deref(), Some(B));
}

#[test]
fn what_worked_is_not_overtaken_by_what_stood_above_it_all_along() {
    let worked = list(&[(B, Source::Observed)]).pop();
    let items = [(A, Source::Host), (B, Source::Observed)];
    let mut bench = Bench::with(Config::default(), worked, &items);
    assert_eq!(bench.look().as_deref(), Some(B));
    bench.rotation.set_candidates(bench.now, list(&items));
    assert_eq!(bench.look(), None);
}

#[test]
fn when_all_others_failed_any_new_candidate_is_tried_at_once() {
    let mut bench = Bench::new(&[(A, Source::Host)]);
    bench.run(30);
    bench.rotation.set_candidates(bench.now, list(&[(A, Source::Host), (B, Source::Observed)]));
    assert_eq!(bench.look().as_deref(), Some(B));
}

#[test]
fn a_peer_that_restarts_on_another_port_is_found_again() {
    let mut bench = Bench::new(&[("198.51.100.1:40000", Source::Observed)]);
    bench.look();
    bench.shake();
    bench.run(50);
    bench.rotation.set_candidates(bench.now, list(&[("198.51.100.1:40999", Source::Observed)]));
    let set = bench.run(20);
    let order: Vec<&str> = set.iter().map(|(_, address)| address.as_str()).collect();
    assert_eq!(order, ["198.51.100.1:40000", "198.51.100.1:40999"]);
}

#[test]
fn a_flapping_peer_starts_fast_each_time() {
    let mut bench = Bench::new(&[(A, Source::Host), (B, Source::Host)]);
    bench.look();
    for _ in 0..5 {
        bench.shake();
        assert_eq!(bench.run(60), []);
        assert_eq!(bench.state(), State::Up);
        let set = bench.run(12);
        assert_eq!(set[0].1, A, "what worked comes first");
        assert_eq!(set[1].1, B);
        assert_eq!(bench.state(), State::Connecting);
        bench.device.endpoint = Some(end(A));
    }
}

/// Two peers behind port-restricted NATs: a packet arrives only where one was sent in the last 30 s.
#[test]
fn two_peers_behind_nat_meet_in_the_middle() {
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
                let set = peers[side].look();
                if set.is_some() || second % 5 == 0 {
                    let Some(target) = peers[side].device.endpoint else { continue };
                    opened[side].insert(target, second);
                    let open = opened[other].get(&public[side]).is_some_and(|at| second - at <= 30);
                    if target == public[other] && open {
                        peers[0].device.endpoint = Some(public[1]);
                        peers[1].device.endpoint = Some(public[0]);
                        peers[0].shake();
                        peers[1].shake();
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
    fn whatever_happens_it_sets_only_what_it_was_given_and_leaves_live_sessions_alone(
        steps in prop::collection::vec(step(), 1..80),
        seed in any::<u64>(),
    ) {
        let mut rotation = Rotation::new(Config { seed, ..Config::default() }, None);
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
            let worked = rotation.worked();
            if let Some(set) = rotation.poll(now) {
                prop_assert!(!was_up);
                prop_assert!(current.iter().chain(&worked).any(|candidate| candidate.address == set));
                prop_assert_eq!(rotation.status(now).endpoint, Some(set));
                device = Some(set);
            }
            prop_assert_eq!(rotation.poll(now), None, "asking twice");
            let status = rotation.status(now);
            prop_assert_eq!(status.state == State::Up, was_up);
            prop_assert!(!status.reason.is_empty());
            prop_assert!(rotation.next_wakeup(now).is_none_or(|at| at > now));
        }
    }

    #[test]
    fn while_down_every_candidate_is_tried_within_bounded_time(
        steps in prop::collection::vec(step(), 0..40),
        numbers in prop::collection::btree_set(0u8..16, 1..=16),
        seed in any::<u64>(),
    ) {
        let mut rotation = Rotation::new(Config { seed, ..Config::default() }, None);
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
        // Two rounds at the slowest pace, with one window for what worked and one for what roams in.
        let windows = u32::try_from(numbers.len()).unwrap() * 2 + 3;
        let end = now + Duration::from_secs(23) * windows;
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
