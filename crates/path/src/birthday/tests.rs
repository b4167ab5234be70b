use std::collections::BTreeSet;

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
    let mut birthdays = Birthdays::new(7);
    birthdays.enable_sockets();
    birthdays.set_side(PEER, Some(side));
    birthdays.set_side(OTHER, Some(side));
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
            birthdays.handle_ask(now, PEER, Some(target()));
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
fn a_symmetric_and_a_port_restricted_nat_make_attempts_and_no_others() {
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
    birthdays.handle_ask(SECOND, PEER, Some(target()));
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
    birthdays.handle_ask(2 * SECOND, OTHER, Some(target()));
    assert_eq!(run(&mut birthdays, 2 * SECOND, 100 * MILLISECOND, false), []);
    birthdays.handle_ask(2100 * MILLISECOND, PEER, None);
    assert_eq!(birthdays.poll_action(), Some(Action::Open));
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
