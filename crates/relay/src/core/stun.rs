//! Choice of the STUN requests that a relay answers, and from which of its two ports: without I/O and without a clock.
//!
//! From the first port it answers every binding request, from the second one only to clients that it gave a key over their link.
//! So a client learns whether its NAT lets in what comes from a port that it has not sent to. No answer is longer than its
//! request, and none goes anywhere but to the request's source.

use std::hash::{BuildHasher, RandomState};
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use fairlead_limits::{Rate, TokenBucket, network};
use fairlead_wire::relay::StunServer;
use fairlead_wire::stun::server::{USER_LENGTH, parse_request, success, user_key};

/// Answers to one address, a second and at once: many nodes may be behind it.
const SOURCE_RATE: Rate = Rate::per_second(100, 400);
/// Limits that are kept. Addresses that share one are answered less.
const LIMITS: usize = 4096;

/// Reason why a request is not answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StunDrop {
    /// The datagram is no binding request.
    Malformed,
    /// The source has had as many answers as it may in this second.
    RateLimited,
    /// The answer would be longer.
    Short,
    /// The request wants an answer from the second port and does not prove that a client sent it.
    Unauthenticated,
}

impl StunDrop {
    /// All of them.
    pub const ALL: [Self; 4] = [Self::Malformed, Self::RateLimited, Self::Short, Self::Unauthenticated];

    /// The value of the label `reason`.
    pub fn label(self) -> &'static str {
        match self {
            Self::Malformed => "malformed",
            Self::RateLimited => "rate_limited",
            Self::Short => "short",
            Self::Unauthenticated => "unauthenticated",
        }
    }
}

/// An answer, for the source of the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StunAnswer {
    /// Whether it leaves from the second port.
    pub from_other_port: bool,
    /// The message.
    pub payload: Vec<u8>,
}

/// Totals since the start.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct StunCounters {
    /// Requests that were answered.
    pub answers: u64,
    drops: [u64; StunDrop::ALL.len()],
}

impl StunCounters {
    /// Requests that were not answered, by reason.
    pub fn drops(&self) -> impl Iterator<Item = (StunDrop, u64)> {
        StunDrop::ALL.into_iter().zip(self.drops)
    }
}

/// Answers STUN requests.
#[derive(Debug)]
pub struct StunResponder {
    secret: [u8; 32],
    users: u64,
    hasher: RandomState,
    limits: Vec<Option<TokenBucket>>,
    counters: StunCounters,
}

impl StunResponder {
    /// Makes a responder with a secret from which keys of users are derived.
    pub fn new(secret: [u8; 32]) -> Self {
        let counters = StunCounters::default();
        Self { secret, users: 0, hasher: RandomState::new(), limits: vec![None; LIMITS], counters }
    }

    /// Credentials for a client.
    pub fn add_user(&mut self, (port, other_port): (u16, u16), relay_ports: (u16, u16)) -> StunServer {
        self.users = self.users.wrapping_add(1);
        let user = self.users.to_be_bytes();
        StunServer { port, other_port, user, key: self.key(user), relay_ports }
    }

    fn key(&self, user: [u8; USER_LENGTH]) -> [u8; 32] {
        user_key(&self.secret, user)
    }

    /// Answers a datagram that arrived on the first port.
    ///
    /// # Errors
    /// It is to be dropped.
    pub fn handle_datagram(
        &mut self,
        now: Instant,
        source: SocketAddr,
        datagram: &[u8],
    ) -> Result<StunAnswer, StunDrop> {
        let answer = self.answer(now, source, datagram);
        match &answer {
            Ok(_) => self.counters.answers = self.counters.answers.wrapping_add(1),
            Err(reason) => {
                for (each, count) in StunDrop::ALL.iter().zip(&mut self.counters.drops) {
                    *count = count.wrapping_add(u64::from(each == reason));
                }
            }
        }
        answer
    }

    fn answer(&mut self, now: Instant, source: SocketAddr, datagram: &[u8]) -> Result<StunAnswer, StunDrop> {
        let parsed = parse_request(datagram).ok_or(StunDrop::Malformed)?;
        if !self.may_answer(now, source.ip()) {
            return Err(StunDrop::RateLimited);
        }
        let request = parsed.request;
        let is_client = || request.user.is_some_and(|user| parsed.is_authentic(&self.key(user)));
        if request.change_port && !is_client() {
            return Err(StunDrop::Unauthenticated);
        }
        let payload = success(request.transaction, source);
        if parsed.is_shorter_than(&payload) {
            return Err(StunDrop::Short);
        }
        Ok(StunAnswer { from_other_port: request.change_port, payload })
    }

    fn may_answer(&mut self, now: Instant, source: IpAddr) -> bool {
        let slot = usize::try_from(self.hasher.hash_one(network(source))).unwrap_or_default() % LIMITS;
        let Some(limit) = self.limits.get_mut(slot) else { return false };
        limit.get_or_insert_with(|| TokenBucket::full(SOURCE_RATE, now)).take(now, 1).is_ok()
    }

    /// Totals since the start.
    pub fn counters(&self) -> StunCounters {
        self.counters
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use fairlead_wire::stun::server::AuthenticatedRequest;
    use fairlead_wire::stun::{TransactionId, binding_request, parse_response};
    use proptest::prelude::*;

    use super::*;

    const TRANSACTION: TransactionId = TransactionId([3; 12]);

    fn source(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn filter_test(server: &StunServer) -> AuthenticatedRequest {
        let user = Some(server.user);
        AuthenticatedRequest { transaction: TRANSACTION, change_port: true, user, nonce: None }
    }

    #[test]
    fn every_source_learns_its_address_from_the_first_port() {
        let mut responder = StunResponder::new([1; 32]);
        for from in ["192.0.2.1:1000", "[2001:db8::1]:1000"].map(source) {
            let answer =
                responder.handle_datagram(Instant::now(), from, &binding_request(TRANSACTION)).unwrap();
            assert!(!answer.from_other_port);
            assert_eq!(parse_response(&answer.payload).unwrap().mapped, Ok(from));
        }
        assert_eq!(responder.counters().answers, 2);
    }

    #[test]
    fn only_a_client_is_answered_from_the_second_port() {
        let mut responder = StunResponder::new([1; 32]);
        let (one, two) = (responder.add_user((1, 2), (0, 0)), responder.add_user((1, 2), (0, 0)));
        assert_ne!((one.user, one.key), (two.user, two.key));
        let mut answer = |request: Vec<u8>| {
            let answer = responder.handle_datagram(Instant::now(), source("192.0.2.1:1"), &request);
            answer.map(|answer| answer.from_other_port)
        };
        assert_eq!(answer(filter_test(&one).encode(&one.key)), Ok(true));
        assert_eq!(answer(filter_test(&one).encode(&two.key)), Err(StunDrop::Unauthenticated));
        let nameless = AuthenticatedRequest { user: None, ..filter_test(&one) };
        assert_eq!(answer(nameless.encode(&one.key)), Err(StunDrop::Unauthenticated));
        let counted: Vec<u64> = responder.counters().drops().map(|(_, count)| count).collect();
        assert_eq!(counted, [0, 0, 0, 2]);
    }

    #[test]
    fn what_would_be_amplified_is_not_answered() {
        let mut responder = StunResponder::new([1; 32]);
        // RFC 8489, section 2: a request may be a header only.
        let mut short = binding_request(TRANSACTION)[..20].to_vec();
        short[3] = 0;
        let dropped = responder.handle_datagram(Instant::now(), source("192.0.2.1:1"), &short);
        assert_eq!(dropped, Err(StunDrop::Short));
    }

    #[test]
    fn a_source_is_answered_up_to_its_rate_and_others_meanwhile() {
        let mut responder = StunResponder::new([1; 32]);
        let now = Instant::now();
        let mut answered = |from: &str, now: Instant| {
            let from = source(from);
            (0..1000)
                .filter(|_| responder.handle_datagram(now, from, &binding_request(TRANSACTION)).is_ok())
                .count()
        };
        assert_eq!(answered("[2001:db8::1]:1", now), 400);
        assert_eq!(answered("[2001:db8::2]:2", now), 0, "of the same network");
        assert_eq!(answered("192.0.2.1:1", now), 400);
        assert_eq!(answered("[2001:db8::1]:1", now + Duration::from_secs(1)), 100);
    }

    proptest! {
        #[test]
        fn no_answer_is_longer_than_its_request(bytes in proptest::collection::vec(any::<u8>(), 0..120)) {
            let mut responder = StunResponder::new([1; 32]);
            let length = u16::try_from(bytes.len()).unwrap().to_be_bytes();
            let message = [&[0, 1][..], &length, &[0x21, 0x12, 0xa4, 0x42], &[3; 12], &bytes].concat();
            for datagram in [&bytes, &message] {
                if let Ok(answer) = responder.handle_datagram(Instant::now(), source("[2001:db8::1]:1"), datagram) {
                    prop_assert!(answer.payload.len() <= datagram.len() && !answer.from_other_port);
                }
            }
        }
    }
}
