//! The agent against servers that are these tests: responses are written by hand, after RFC 8489.

use std::net::IpAddr;

use proptest::prelude::*;

use super::*;
use crate::{Config, Event, PathAgent};

const SECOND: Duration = Duration::from_secs(1);
const COOKIE: u32 = 0x2112_a442;

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn servers() -> [SocketAddr; 2] {
    [address("203.0.113.1:3478"), address("203.0.113.2:3478")]
}

/// A success response to `request` that says `mapped` (IPv4).
fn response(request: &Transmit, mapped: &str) -> Vec<u8> {
    let mapped = address(mapped);
    let IpAddr::V4(ip) = mapped.ip() else { panic!("{mapped}") };
    let port = mapped.port() ^ u16::try_from(COOKIE >> 16).unwrap();
    let attribute = [&[0, 0x20, 0, 8, 0, 1][..], &port.to_be_bytes(), &(ip.to_bits() ^ COOKIE).to_be_bytes()];
    [&[1, 1, 0, 12][..], &request.payload[4..20], &attribute.concat()].concat()
}

struct Bed {
    agent: PathAgent,
    now: Duration,
}

impl Bed {
    fn new(servers: &[SocketAddr]) -> Self {
        let mut agent = PathAgent::new(Config::default(), 7);
        agent.set_stun_servers(SECOND, servers);
        Self { agent, now: SECOND }
    }

    fn requests(&mut self) -> Vec<Transmit> {
        self.agent.handle_timeout(self.now);
        std::iter::from_fn(|| self.agent.poll_transmit()).collect()
    }

    /// Goes on to the next timer and returns what is sent.
    fn next(&mut self) -> Vec<Transmit> {
        let at = self.agent.poll_timeout().unwrap();
        assert!(at >= self.now, "timers do not go back");
        self.now = at;
        self.requests()
    }

    fn answer(&mut self, from: SocketAddr, request: &Transmit, mapped: &str) {
        self.agent.handle_datagram(self.now, None, from, &response(request, mapped));
    }

    fn has_news(&mut self) -> bool {
        std::iter::from_fn(|| self.agent.poll_event()).any(|event| event == Event::StunAnswersChanged)
    }

    fn mapped(&self) -> Vec<Option<SocketAddr>> {
        let mapped = |answer: StunAnswer| match answer {
            StunAnswer::Mapped(address) => Some(address),
            _ => None,
        };
        self.agent.stun_answers().into_values().map(mapped).collect()
    }

    /// Runs timers, answering every request of these servers, until `end`; returns when requests were sent.
    fn run(&mut self, end: Duration, answering: &[SocketAddr], mapped: &str) -> Vec<Duration> {
        let mut sent = Vec::new();
        while self.agent.poll_timeout().unwrap() < end {
            let requests = self.next();
            if !requests.is_empty() {
                sent.push(self.now);
            }
            for request in requests.iter().filter(|request| answering.contains(&request.remote)) {
                self.answer(request.remote, request, mapped);
            }
        }
        sent
    }
}

#[test]
fn all_servers_are_asked_at_once_and_their_answers_reported_once() {
    let mut bed = Bed::new(&servers());
    let requests = bed.next();
    assert_eq!((bed.now, requests.len()), (SECOND, 2));
    assert_ne!(requests[0].payload[8..], requests[1].payload[8..], "each has a transaction of its own");
    for request in &requests {
        bed.answer(request.remote, request, "198.51.100.7:1234");
    }
    assert!(bed.has_news());
    assert_eq!(bed.mapped(), [Some(address("198.51.100.7:1234")); 2]);
    let sent = bed.run(120 * SECOND, &servers(), "198.51.100.7:1234");
    assert!(!bed.has_news(), "the same answers are no news");
    assert!((4..=6).contains(&sent.len()), "about every 23 s: {sent:?}");
    bed.run(150 * SECOND, &servers(), "198.51.100.7:4321");
    assert!(bed.has_news());
    assert_eq!(bed.mapped(), [Some(address("198.51.100.7:4321")); 2]);
}

#[test]
fn a_request_is_repeated_and_a_silent_server_is_named_within_three_seconds() {
    let mut bed = Bed::new(&servers());
    let first = bed.next();
    bed.answer(servers()[0], &first[0], "198.51.100.7:1234");
    let second = bed.next();
    assert_eq!((bed.now, second.as_slice()), (SECOND + ATTEMPTS[1], &first[1..]), "the same transaction");
    assert_eq!(bed.next().len(), 1);
    assert!(bed.next().is_empty());
    assert_eq!(bed.now, SECOND + ROUND);
    let answers: Vec<StunAnswer> = bed.agent.stun_answers().into_values().collect();
    assert_eq!(answers, [StunAnswer::Mapped(address("198.51.100.7:1234")), StunAnswer::Missing]);
}

#[test]
fn answers_from_elsewhere_late_repeated_or_of_other_transactions_do_not_count() {
    let mut bed = Bed::new(&servers());
    let requests = bed.next();
    bed.answer(address("203.0.113.9:3478"), &requests[0], "192.0.2.66:1");
    bed.answer(servers()[0], &requests[1], "192.0.2.66:1");
    bed.answer(address("203.0.113.1:3479"), &requests[0], "192.0.2.66:1");
    assert!(!bed.has_news());
    assert_eq!(bed.agent.unknown_datagrams(), 3);
    bed.answer(servers()[0], &requests[0], "198.51.100.7:1234");
    bed.answer(servers()[0], &requests[0], "192.0.2.66:1");
    while bed.now < SECOND + ROUND {
        bed.next();
    }
    bed.answer(servers()[1], &requests[1], "192.0.2.66:1");
    assert_eq!(bed.mapped(), [Some(address("198.51.100.7:1234")), None]);
}

#[test]
fn lies_that_no_packet_can_come_from_are_named_and_refusals_too() {
    let mut bed = Bed::new(&servers());
    let requests = bed.next();
    bed.answer(servers()[0], &requests[0], "127.0.0.1:1234");
    let refusal = [&[1, 0x11, 0, 8][..], &requests[1].payload[4..20], &[0, 9, 0, 4, 0, 0, 5, 0]].concat();
    bed.agent.handle_datagram(bed.now, None, servers()[1], &refusal);
    let answers: Vec<StunAnswer> = bed.agent.stun_answers().into_values().collect();
    assert_eq!(
        answers,
        [StunAnswer::Invalid(address("127.0.0.1:1234")), StunAnswer::Refused(ErrorCode(500))]
    );
}

#[test]
fn a_server_that_fails_keeps_its_mapping_for_some_rounds_but_not_over_a_change_of_the_network() {
    let mut bed = Bed::new(&servers());
    bed.run(30 * SECOND, &servers(), "198.51.100.7:1234");
    bed.run(60 * SECOND, &servers()[..1], "198.51.100.7:1234");
    assert_eq!(bed.mapped(), [Some(address("198.51.100.7:1234")); 2]);
    bed.agent.network_changed(bed.now);
    let end = bed.now + 4 * SECOND;
    bed.run(end, &servers()[..1], "198.51.100.8:1234");
    assert_eq!(bed.mapped(), [Some(address("198.51.100.8:1234")), None]);
    assert!(bed.has_news());

    let mut bed = Bed::new(&servers());
    bed.run(30 * SECOND, &servers(), "198.51.100.7:1234");
    bed.run(120 * SECOND, &servers()[..1], "198.51.100.7:1234");
    assert_eq!(bed.mapped(), [Some(address("198.51.100.7:1234")), None]);
}

#[test]
fn servers_that_do_not_answer_are_asked_ever_more_rarely_until_the_network_changes() {
    let mut bed = Bed::new(&servers());
    let sent = bed.run(3600 * SECOND, &[], "");
    let rounds = sent.len() / ATTEMPTS.len();
    assert!((10..=16).contains(&rounds), "{rounds}");
    bed.agent.network_changed(bed.now);
    assert_eq!(bed.agent.poll_timeout(), Some(bed.now));
}

#[test]
fn servers_may_be_replaced_and_removed() {
    let mut bed = Bed::new(&servers());
    bed.run(10 * SECOND, &servers(), "198.51.100.7:1234");
    assert!(bed.has_news());
    let now = bed.now;
    bed.agent.set_stun_servers(now, &servers());
    assert!(!bed.has_news());
    bed.agent.set_stun_servers(now, &servers()[..1]);
    assert!(bed.has_news());
    bed.agent.set_stun_servers(now, &[]);
    assert_eq!((bed.agent.poll_timeout(), bed.mapped().len()), (None, 0));
    let many: Vec<SocketAddr> = (1..=20).map(|port| SocketAddr::from(([203, 0, 113, 1], port))).collect();
    bed.agent.set_stun_servers(now, &many);
    bed.now = bed.agent.poll_timeout().unwrap();
    assert_eq!(bed.requests().len(), MAX_SERVERS);
}

proptest! {
    /// Whatever happens to the network: at most one round a second and so many packets to each server.
    #[test]
    fn requests_are_bounded(changes in proptest::collection::vec(0_u64..200, 0..200)) {
        let mut bed = Bed::new(&servers());
        let mut sent = 0;
        let start = bed.now;
        for pause in changes {
            let until = bed.now + Duration::from_millis(pause);
            sent += bed.run(until, &[], "").len();
            bed.now = until;
            bed.agent.network_changed(until);
        }
        let seconds = usize::try_from((bed.now - start).as_secs()).unwrap();
        prop_assert!(sent <= (seconds + 1) * 2, "{sent} in {seconds} s");
    }
}
