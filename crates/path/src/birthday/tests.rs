use std::collections::BTreeSet;

use super::limits::{CONFIRMATIONS, PACE};
use super::*;
use crate::nat::NatType;

const MILLISECOND: Duration = Duration::from_millis(1);
const SECOND: Duration = Duration::from_secs(1);
const PEER: PublicKey = PublicKey([1; 32]);
const OTHER: PublicKey = PublicKey([2; 32]);

fn target() -> SocketAddr {
    "203.0.113.1:40000".parse().unwrap()
}

fn birthdays(side: BirthdaySide) -> Birthdays {
    with_lead(side, true)
}

fn with_lead(side: BirthdaySide, leads: bool) -> Birthdays {
    let mut birthdays = Birthdays::new(7);
    birthdays.enable_sockets();
    birthdays.set_side(PEER, Some(side), leads);
    birthdays.set_side(OTHER, Some(side), leads);
    birthdays
}

/// Runs its timers; the peer says that it takes part as long as `is_taking_part`. Returns what was sent, with the time.
fn run(
    birthdays: &mut Birthdays,
    from: Duration,
    time: Duration,
    is_taking_part: bool,
) -> Vec<(Duration, SocketAddr, Option<u16>)> {
    let mut sent = Vec::new();
    let mut now = from;
    while now < from + time {
        if is_taking_part && now.as_millis().is_multiple_of(500) {
            birthdays.handle_ask(now, PEER, Some(target()), None);
        }
        if birthdays.poll_timeout().is_some_and(|at| at <= now) {
            birthdays.handle_timeout(now);
        }
        while let Some(action) = birthdays.poll_action() {
            if let Action::Request { to, socket, .. } = action {
                sent.push((now, to, socket));
            }
        }
        now += MILLISECOND;
    }
    sent
}

/// The most that was sent within a second.
fn most_per_second(sent: &[(Duration, SocketAddr, Option<u16>)]) -> usize {
    let within = |(at, ..): &(Duration, SocketAddr, Option<u16>)| {
        sent.iter().filter(|(other, ..)| *other >= *at && *other < *at + SECOND).count()
    };
    sent.iter().map(within).max().unwrap_or_default()
}

#[test]
fn a_symmetric_and_a_port_restricted_nat_make_attempts_and_others_only_where_enabled() {
    use NatType::{Cone, Open, PortRestrictedCone, Symmetric, Unknown};
    let all = [Cone, Open, PortRestrictedCone, Symmetric, Unknown];
    for (own, peer) in all.into_iter().flat_map(|own| all.map(|peer| (own, peer))) {
        let expected = match (own, peer) {
            (PortRestrictedCone, Symmetric) => Some(BirthdaySide::PortRestricted),
            (Symmetric, PortRestrictedCone) => Some(BirthdaySide::Symmetric),
            _ => None,
        };
        assert_eq!(birthday_side(BirthdayPolicy::PortRestricted, own, peer), expected, "{own:?} {peer:?}");
        assert_eq!(birthday_side(BirthdayPolicy::Disabled, own, peer), None);
        let both = (own == Symmetric && peer == Symmetric).then_some(BirthdaySide::BothSymmetric);
        assert_eq!(birthday_side(BirthdayPolicy::Symmetric, own, peer), expected.or(both));
    }
}

#[test]
fn each_port_is_tried_once_at_no_more_than_the_rate_and_only_at_the_address_of_the_peer() {
    let mut birthdays = birthdays(BirthdaySide::PortRestricted);
    let sent = run(&mut birthdays, SECOND, 10 * SECOND, true);
    let ports: BTreeSet<u16> = sent.iter().map(|(_, to, _)| to.port()).collect();
    assert_eq!((sent.len(), ports.len()), (2048, 2048));
    assert!(sent.iter().all(|(_, to, socket)| to.ip() == target().ip() && socket.is_none()));
    assert!(ports.first().is_some_and(|port| *port >= 1024));
    let most = most_per_second(&sent);
    assert!((400..=470).contains(&most), "{most}");
    assert_eq!(birthdays.outcomes().get(&BirthdayOutcome::NoPortFound), Some(&1));
}

#[test]
fn nothing_more_is_sent_when_the_peer_stops_to_say_that_it_takes_part() {
    let mut birthdays = birthdays(BirthdaySide::PortRestricted);
    birthdays.handle_ask(SECOND, PEER, Some(target()), None);
    let sent = run(&mut birthdays, SECOND, 10 * SECOND, false);
    assert!((500..=750).contains(&sent.len()), "{}", sent.len());
    assert_eq!(birthdays.outcomes().get(&BirthdayOutcome::PeerSilent), Some(&1));
}

#[test]
fn the_sockets_send_once_each_and_only_after_the_peer_has_agreed() {
    let mut birthdays = birthdays(BirthdaySide::Symmetric);
    assert!(birthdays.start(SECOND, PEER, target()));
    assert!(!birthdays.start(SECOND, OTHER, target()), "one at a time");
    assert_eq!(run(&mut birthdays, SECOND, SECOND, false), []);
    birthdays.handle_ask(2 * SECOND, OTHER, Some(target()), None);
    assert_eq!(run(&mut birthdays, 2 * SECOND, 100 * MILLISECOND, false), []);
    birthdays.handle_ask(2100 * MILLISECOND, PEER, None, None);
    assert_eq!(birthdays.poll_action(), Some(Action::Open(SOCKETS)));
    let sent = run(&mut birthdays, 2100 * MILLISECOND, 10 * SECOND, false);
    let sockets: BTreeSet<u16> = sent.iter().filter_map(|(.., socket)| *socket).collect();
    assert_eq!((sent.len(), sockets.len()), (256, 256));
    assert!(sent.iter().all(|(_, to, _)| *to == target()));
    assert_eq!(birthdays.outcomes().get(&BirthdayOutcome::NoPortFound), Some(&1));
}

#[test]
fn a_peer_that_knows_no_attempts_is_asked_ever_more_rarely() {
    let mut birthdays = birthdays(BirthdaySide::Symmetric);
    let mut attempts = Vec::new();
    for second in 1..3600 {
        let now = SECOND * second;
        if birthdays.startable(now).contains(&PEER) && birthdays.start(now, PEER, target()) {
            attempts.push(now);
        }
        assert_eq!(run(&mut birthdays, now, SECOND, false), []);
    }
    assert!((8..=20).contains(&attempts.len()), "{attempts:?}");
    birthdays.network_changed();
    assert!(birthdays.startable(SECOND * 3600).contains(&PEER));
}

#[test]
fn attempts_that_find_no_port_come_ever_more_rarely_and_within_a_budget() {
    let mut birthdays = birthdays(BirthdaySide::PortRestricted);
    let sent = run(&mut birthdays, SECOND, 1000 * SECOND, true);
    assert!(sent.len() <= 7 * 2048, "{}", sent.len());
    for attempt in 0..20 {
        // As if the network changed all the time.
        birthdays.network_changed();
        run(&mut birthdays, SECOND * (2000 + attempt * 10), 10 * SECOND, true);
    }
    let spent = birthdays.outcomes().get(&BirthdayOutcome::NoPortFound).copied().unwrap_or_default();
    assert!(spent <= 6 + 10, "{spent}");
}

/// Answers requests from one port until it is used.
fn answer(birthdays: &mut Birthdays, from: Duration) {
    for round in 1..=u32::from(CONFIRMATIONS) {
        let now = from + PACE * round;
        birthdays.handle_timeout(now);
        let requested = std::iter::from_fn(|| birthdays.poll_action()).filter_map(|action| match action {
            Action::Request { to, transaction, .. } => Some((to, transaction)),
            _ => None,
        });
        let (to, transaction) = requested.last().unwrap();
        assert!(birthdays.handle_answer(now, &PEER, to, None, transaction));
    }
}

#[test]
fn an_attempt_costs_the_budget_what_it_has_sent() {
    let mut birthdays = birthdays(BirthdaySide::PortRestricted);
    for attempt in 0..20 {
        birthdays.network_changed();
        let now = SECOND * (10 + attempt * 10);
        birthdays.handle_ask(now, PEER, Some(target()), None);
        let sent = run(&mut birthdays, now, SECOND / 2, false);
        assert!((150..=250).contains(&sent.len()), "{attempt}: {}", sent.len());
        answer(&mut birthdays, now + SECOND / 2);
        assert_eq!(birthdays.outcomes().get(&BirthdayOutcome::Found), Some(&u64::from(attempt + 1)));
    }
}

#[test]
fn a_socket_is_closed_when_its_path_fails_or_is_not_used() {
    for has_failed in [true, false] {
        let mut birthdays = birthdays(BirthdaySide::Symmetric);
        birthdays.kept.insert(PEER, Kept { remote: target(), unused_since: None });
        birthdays.review(SECOND, &PEER, true, false);
        birthdays.review(100 * SECOND, &PEER, true, false);
        birthdays.review(101 * SECOND, &PEER, false, false);
        birthdays.review(160 * SECOND, &PEER, false, false);
        assert_eq!((birthdays.poll_action(), birthdays.kept(&PEER)), (None, Some(target())));
        birthdays.review(161 * SECOND, &PEER, has_failed, has_failed);
        assert_eq!(birthdays.poll_action(), Some(Action::Leave { remote: target() }));
        assert_eq!(birthdays.kept(&PEER), None);
    }
}

/// Between two symmetric NATs, with what the STUN server says of each socket. Returns the ports that were tried.
fn tried_of_both(leads: bool, own: impl Fn(u16) -> u16, their: Option<PortSequence>) -> Vec<u16> {
    let server: SocketAddr = "198.51.100.1:3478".parse().unwrap();
    let mut birthdays = with_lead(BirthdaySide::BothSymmetric, leads);
    birthdays.set_stun_server(Some(server));
    assert!(birthdays.start(SECOND, PEER, target()));
    assert_eq!(birthdays.poll_action(), Some(Action::Open(8)));
    birthdays.handle_timeout(SECOND);
    assert_eq!(birthdays.poll_action(), None, "the sockets are opened first");
    birthdays.handle_timeout(SECOND + PACE);
    let requests: Vec<Action> = std::iter::from_fn(|| birthdays.poll_action()).collect();
    assert_eq!(requests.len(), 8);
    for request in requests {
        let Action::Measure { socket, transaction, .. } = request else { panic!("{request:?}") };
        let seen = SocketAddr::from(([203, 0, 113, 9], own(socket)));
        let answer = stun::server::success(transaction, seen);
        assert!(!birthdays.handle_stun(SECOND + PACE, socket, "192.0.2.66:3478".parse().unwrap(), &answer));
        assert!(birthdays.handle_stun(SECOND + PACE, socket, server, &answer));
        assert!(!birthdays.handle_stun(SECOND + PACE, socket, server, &answer), "once");
    }
    assert_eq!(birthdays.poll_action(), Some(Action::Close));
    birthdays.handle_timeout(SECOND + PACE);
    let told = birthdays.poll_action();
    assert!(matches!(told, Some(Action::Ask { peer: PEER, .. })), "{told:?}");
    assert_eq!(run(&mut birthdays, SECOND + PACE, SECOND, false), [], "before the peer has agreed");
    birthdays.handle_ask(2 * SECOND, PEER, Some(target()), their);
    let sent = run(&mut birthdays, 2 * SECOND, 10 * SECOND, true);
    assert!(most_per_second(&sent) <= 470);
    assert!(sent.iter().all(|(_, to, socket)| to.ip() == target().ip() && socket.is_none()));
    assert_eq!(birthdays.outcomes().get(&BirthdayOutcome::NoPortFound), Some(&1));
    assert_eq!(birthdays.startable(SECOND * 6 * 3600), [OTHER]);
    sent.iter().map(|(_, to, _)| to.port()).collect()
}

#[test]
fn between_two_symmetric_nats_predicted_ports_are_tried_first_and_random_ones_where_there_is_no_sequence() {
    let in_sequence = |socket: u16| 30_000 + 2 * socket;
    let their = Some(PortSequence { next: 40_000, step: 1 });
    let following = tried_of_both(false, in_sequence, their);
    assert_eq!((following.len(), &following[..3]), (2048, &[40_000, 40_001, 40_002][..]));
    let leading = tried_of_both(true, in_sequence, their);
    assert_eq!(
        (&leading[..3], &leading[14..17]),
        (&[39_996, 39_998, 40_000][..], &[40_024, 40_011, 40_013][..])
    );
    let random = [1_234, 50_022, 8_361, 33_190, 61_001, 15_222, 40_000, 9_999];
    let at_random = tried_of_both(true, |socket| random[usize::from(socket)], their);
    assert_eq!(
        at_random[..3],
        [40_000, 40_001, 40_002],
        "the own NAT's sequence is not needed for the peer's"
    );
    for tried in [leading, tried_of_both(false, in_sequence, None)] {
        let ports: BTreeSet<u16> = tried.iter().copied().collect();
        assert!(tried.len() > 2000 && ports.len() == tried.len(), "each port once");
    }
}

#[test]
fn the_node_that_is_asked_measures_first_and_only_every_six_hours() {
    let mut birthdays = birthdays(BirthdaySide::BothSymmetric);
    birthdays.handle_ask(SECOND, PEER, Some(target()), None);
    assert_eq!(birthdays.poll_action(), Some(Action::Open(8)));
    // Without a STUN server there is nothing to wait for.
    let sent = run(&mut birthdays, SECOND, 10 * SECOND, true);
    assert_eq!(sent.len(), 2048);
    birthdays.network_changed();
    for (second, is_accepted) in [(3600, false), (6 * 3600 - 60, false), (6 * 3600 + 11, true)] {
        birthdays.handle_ask(SECOND * second, PEER, Some(target()), None);
        assert_eq!(birthdays.poll_action().is_some(), is_accepted, "{second}");
    }
}

#[test]
fn the_socket_of_an_earlier_program_is_kept_for_the_peer_that_uses_it_and_else_left() {
    let mut birthdays = birthdays(BirthdaySide::Symmetric);
    let unused: SocketAddr = "203.0.113.2:7".parse().unwrap();
    birthdays.adopt(SECOND, &[target(), unused]);
    birthdays.claim(&PEER, "203.0.113.3:7".parse().unwrap());
    assert_eq!(birthdays.kept(&PEER), None);
    birthdays.claim(&PEER, target());
    assert_eq!(birthdays.kept(&PEER), Some(target()));
    assert_eq!(birthdays.reason(&PEER, target()), Some(EndpointReason::BirthdayAttack));
    assert_eq!(birthdays.startable(SECOND), [OTHER], "it has a path");
    // The socket is opened again, with what is known already.
    birthdays.adopt(100 * SECOND, &[target(), unused]);
    assert_eq!(birthdays.poll_timeout(), Some(121 * SECOND));
    birthdays.handle_timeout(120 * SECOND);
    assert_eq!(birthdays.poll_action(), None);
    birthdays.handle_timeout(121 * SECOND);
    assert_eq!(birthdays.poll_action(), Some(Action::Leave { remote: unused }));
    assert_eq!((birthdays.poll_action(), birthdays.poll_timeout()), (None, None));
    birthdays.review(122 * SECOND, &PEER, false, true);
    assert_eq!(birthdays.poll_action(), Some(Action::Leave { remote: target() }));
}
