use fairlead_wire::stun::server::{nonce, parse_request, stale_nonce, success};
use rand::SeedableRng;

use super::*;

const PEER: PublicKey = PublicKey([1; 32]);
const SECRET: [u8; 32] = [7; 32];

fn port() -> RelayPort {
    RelayPort { address: "203.0.113.1:20000".parse().unwrap(), token: [2; 32] }
}

/// The machine, and a relay that sees it at `source`.
struct Bed {
    bindings: Bindings,
    now: Duration,
    random: StdRng,
    source: Option<SocketAddr>,
    bound: Option<SocketAddr>,
    requests: usize,
}

impl Bed {
    fn new(source: &str) -> Self {
        let random = StdRng::seed_from_u64(1);
        let source = Some(source.parse().unwrap());
        let now = Duration::from_secs(1);
        Self { bindings: Bindings::default(), now, random, source, bound: None, requests: 0 }
    }

    /// Runs timers, needed all the time or not at all; what became of the port.
    fn run(&mut self, time: Duration, is_needed: bool) -> Vec<Outcome> {
        let end = self.now + time;
        let mut outcomes = Vec::new();
        while let Some(at) = self.bindings.poll_timeout().filter(|at| *at <= end) {
            self.now = self.now.max(at);
            if is_needed {
                self.bindings.need(self.now, PEER, false);
            }
            self.bindings.handle_timeout(self.now, &mut self.random);
            while let Some(sent) = self.bindings.poll_transmit() {
                self.requests += 1;
                assert!(self.requests < 1000, "a loop");
                self.answer(&sent);
            }
            outcomes.extend(std::iter::from_fn(|| self.bindings.poll_outcome()).map(|(_, outcome)| outcome));
        }
        self.now = end;
        outcomes
    }

    /// As the relay does.
    fn answer(&mut self, sent: &Transmit) {
        assert_eq!(sent.remote, port().address);
        let Some(source) = self.source else { return };
        let parsed = parse_request(&sent.payload).unwrap();
        assert!(parsed.is_authentic(&port().token));
        let (transaction, expected) = (parsed.request.transaction, nonce(&SECRET, source, 1));
        let answer = if self.bound == Some(source) || parsed.request.nonce == Some(expected) {
            self.bound = Some(source);
            success(transaction, source)
        } else {
            stale_nonce(transaction, &expected)
        };
        assert!(self.bindings.handle_datagram(self.now, sent.remote, &answer));
    }
}

#[test]
fn a_port_is_asked_for_bound_and_kept_while_it_is_needed() {
    let mut bed = Bed::new("198.51.100.7:40000");
    assert!(!bed.bindings.need(bed.now, PEER, false), "while UDP to the relay is not known to work");
    assert!(bed.bindings.need(bed.now, PEER, true));
    assert!(!bed.bindings.need(bed.now, PEER, true), "not again at once");
    bed.bindings.insert(bed.now, PEER, port());
    assert_eq!(bed.run(Duration::from_millis(1), true), [Outcome::Bound(port().address)]);
    assert_eq!((bed.requests, bed.bound), (2, bed.source));
    assert_eq!(bed.run(Duration::from_secs(300), true), []);
    assert!((30..=33).contains(&bed.requests), "every 10 s: {}", bed.requests);
    assert_eq!(bed.run(Duration::from_secs(300), false), [Outcome::Lost]);
    assert_eq!(bed.bindings.poll_timeout(), None, "nothing is left");
    assert!(bed.requests < 42, "{}", bed.requests);
}

#[test]
fn another_address_of_this_node_is_bound_at_once() {
    let mut bed = Bed::new("198.51.100.7:40000");
    bed.bindings.need(bed.now, PEER, true);
    bed.bindings.insert(bed.now, PEER, port());
    bed.run(Duration::from_secs(5), true);
    bed.source = Some("198.51.100.7:50000".parse().unwrap());
    bed.bindings.renew(bed.now, &PEER);
    assert_eq!(bed.run(Duration::from_millis(1), true), []);
    assert_eq!((bed.bound, bed.requests), (bed.source, 4));
    for _ in 0..100 {
        bed.bindings.renew_all(bed.now);
        bed.run(Duration::from_millis(5), true);
    }
    assert!(bed.requests <= 6, "at most once a second: {}", bed.requests);
}

#[test]
fn a_relay_that_does_not_answer_has_lost_the_port_and_is_asked_again() {
    let mut bed = Bed::new("198.51.100.7:40000");
    bed.bindings.need(bed.now, PEER, true);
    bed.bindings.insert(bed.now, PEER, port());
    bed.run(Duration::from_secs(5), true);
    bed.source = None;
    assert_eq!(bed.run(Duration::from_secs(9), true), [Outcome::Lost]);
    assert_eq!(bed.requests, 2 + ATTEMPTS.len());
    assert!(bed.bindings.need(bed.now, PEER, true));
    // The new one has another number.
    bed.source = Some("198.51.100.7:40000".parse().unwrap());
    bed.bindings.insert(bed.now, PEER, port());
    assert_eq!(bed.run(Duration::from_secs(1), true), [Outcome::Bound(port().address)]);
    let other = RelayPort { address: "203.0.113.1:20001".parse().unwrap(), ..port() };
    bed.bindings.insert(bed.now, PEER, other);
    assert_eq!(bed.bindings.poll_outcome(), Some((PEER, Outcome::Lost)));
}

#[test]
fn answers_of_others_bind_nothing() {
    let mut bed = Bed::new("198.51.100.7:40000");
    bed.bindings.need(bed.now, PEER, true);
    bed.bindings.insert(bed.now, PEER, port());
    bed.bindings.handle_timeout(bed.now, &mut bed.random);
    let sent = bed.bindings.poll_transmit().unwrap();
    let transaction = parse_request(&sent.payload).unwrap().request.transaction;
    let answer = success(transaction, port().address);
    let wrong = success(TransactionId([9; 12]), port().address);
    let stranger = "203.0.113.2:20000".parse().unwrap();
    assert!(!bed.bindings.handle_datagram(bed.now, stranger, &answer));
    assert!(!bed.bindings.handle_datagram(bed.now, port().address, &wrong));
    assert_eq!(bed.bindings.poll_outcome(), None);
    // A relay that always wants another nonce is asked no more often than one that is silent.
    bed.source = None;
    for number in 0..100_u8 {
        bed.now += Duration::from_millis(100);
        bed.bindings.handle_timeout(bed.now, &mut bed.random);
        if let Some(sent) = bed.bindings.poll_transmit() {
            bed.requests += 1;
            let transaction = parse_request(&sent.payload).unwrap().request.transaction;
            bed.bindings.handle_datagram(bed.now, sent.remote, &stale_nonce(transaction, &[number; 16]));
        }
    }
    assert!(bed.requests < ATTEMPTS.len() * 5, "{}", bed.requests);
}
