//! Limits the handshakes that cost computation (WireGuard paper 5.3; `drivers/net/wireguard/cookie.c` and `ratelimiter.c`).

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::time::{Duration, Instant};

use chacha20poly1305::aead::AeadInPlace as _;
use chacha20poly1305::{KeyInit as _, XChaCha20Poly1305};
use fairlead_keys::PublicKey;
use fairlead_limits::network;
use subtle::ConstantTimeEq as _;
use zeroize::Zeroizing;

use crate::mac::{self, COOKIE_LIFETIME, Mac};
use crate::message::{self, CookieReply, Kind, MAC_LENGTH};
use crate::random::Random;

/// Handshake messages of one address per second before it has to answer with a cookie.
const MAX_HANDSHAKES_PER_ADDRESS: u32 = 100;
/// The same for a network of IPv6 (/64), in which one host has all addresses it likes, and others may be nodes as well.
const MAX_HANDSHAKES_PER_NETWORK: u32 = 500;
/// Handshake messages of all addresses per second before every sender has to. Also the most addresses that are counted.
const MAX_HANDSHAKES: u32 = 1_000;
/// Messages with a right cookie of all addresses per second; of one address as many as without. What comes then is dropped: a host that
/// owns its address could otherwise make this one compute all the time.
const MAX_PROVEN: u32 = 3_000;

/// Decision about a handshake message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// The message may cost a Diffie-Hellman computation.
    Accept,
    /// Dropped without an answer: it is no handshake message, `mac1` is wrong, or its sender has sent too many with a cookie.
    Refuse,
    /// Dropped, and answered with this.
    Cookie(CookieReply),
}

/// Checks the MACs of handshake messages to one public key, and demands cookies under load.
///
/// Under load is who sends more than 100 messages in a second (500 of a network of IPv6), and every sender after the first 1,000 messages in a second. Only
/// messages with a right `mac1` count: a sender that does not know our public key makes no other sender wait. A sender whose
/// cookie is right owns its address, and is accepted 100 times a second, as long as there are no more than 3,000 from all of them.
pub struct HandshakeLimiter {
    mac1_key: [u8; 32],
    cookie_key: [u8; 32],
    /// Secret that cookies are made with, and the time since when; made when the first cookie is needed.
    secret: Option<(Zeroizing<[u8; 32]>, Instant)>,
    /// Time at which the present second began.
    second: Instant,
    /// Messages of this second.
    handshakes: u32,
    /// Messages of this second by address, while they are not more than [`MAX_HANDSHAKES`] in all.
    by_address: BTreeMap<IpAddr, u32>,
    /// Messages of this second with a right cookie, in all and by address.
    proven: u32,
    proven_by_address: BTreeMap<IpAddr, u32>,
}

impl HandshakeLimiter {
    /// For messages to this public key, which is ours.
    pub fn new(public: &PublicKey, now: Instant) -> Self {
        Self {
            mac1_key: mac::mac1_key(public),
            cookie_key: mac::cookie_key(public),
            secret: None,
            second: now,
            handshakes: 0,
            by_address: BTreeMap::new(),
            proven: 0,
            proven_by_address: BTreeMap::new(),
        }
    }

    /// Checks an initiation or a response that came from this address and port.
    pub fn check(
        &mut self,
        from: SocketAddr,
        message: &[u8],
        now: Instant,
        random: &mut dyn Random,
    ) -> Verdict {
        let Some(signed) = Signed::parse(message) else { return Verdict::Refuse };
        let mac1 = mac::mac(&self.mac1_key, &[signed.body]);
        if !bool::from(mac1.ct_eq(signed.mac1)) {
            return Verdict::Refuse;
        }
        if !self.is_under_load(from.ip(), now) {
            return Verdict::Accept;
        }
        let cookie = self.cookie(from, now, random);
        let mac2 = mac::mac(&cookie, &[signed.body, signed.mac1]);
        if bool::from(mac2.ct_eq(signed.mac2)) {
            return if self.admits_proven(from.ip()) { Verdict::Accept } else { Verdict::Refuse };
        }
        self.reply(&signed, cookie, random).map_or(Verdict::Refuse, Verdict::Cookie)
    }

    /// Counts a message, and says whether its sender has to prove that it owns its address.
    fn is_under_load(&mut self, from: IpAddr, now: Instant) -> bool {
        if now.saturating_duration_since(self.second) >= Duration::from_secs(1) {
            self.second = now;
            self.handshakes = 0;
            self.by_address.clear();
            self.proven = 0;
            self.proven_by_address.clear();
        }
        // What one sender sends beyond its share brings no other sender under load.
        takes(&mut self.handshakes, MAX_HANDSHAKES, &mut self.by_address, from).is_none()
    }

    /// Counts a message whose sender owns its address, and says whether it is one too many.
    fn admits_proven(&mut self, from: IpAddr) -> bool {
        takes(&mut self.proven, MAX_PROVEN, &mut self.proven_by_address, from).is_some()
    }

    /// The cookie of a sender: a MAC of its address and port with a secret that changes every 120 s (WireGuard paper 5.4.7).
    fn cookie(&mut self, from: SocketAddr, now: Instant, random: &mut dyn Random) -> Mac {
        let is_old = |(_, since): &(_, Instant)| now.saturating_duration_since(*since) >= COOKIE_LIFETIME;
        if self.secret.as_ref().is_some_and(is_old) {
            self.secret = None;
        }
        let (secret, _) = self.secret.get_or_insert_with(|| {
            let mut secret = Zeroizing::new([0; 32]);
            random.fill(&mut *secret);
            (secret, now)
        });
        let address = mapped(from.ip()).octets();
        mac::mac(&**secret, &[&address, &from.port().to_be_bytes()])
    }

    fn reply(&self, signed: &Signed<'_>, mut cookie: Mac, random: &mut dyn Random) -> Option<CookieReply> {
        let mut nonce = [0; 24];
        random.fill(&mut nonce);
        // It fails only for messages of more than 256 GiB.
        let tag = XChaCha20Poly1305::new(&self.cookie_key.into())
            .encrypt_in_place_detached(&nonce.into(), signed.mac1, &mut cookie)
            .ok()?;
        Some(message::assemble(Kind::CookieReply, &[&signed.sender.to_le_bytes(), &nonce, &cookie, &tag]))
    }
}

impl fmt::Debug for HandshakeLimiter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HandshakeLimiter").field("handshakes", &self.handshakes).finish_non_exhaustive()
    }
}

/// An initiation or a response, in its parts.
struct Signed<'a> {
    sender: u32,
    /// Bytes that `mac1` covers.
    body: &'a [u8],
    mac1: &'a Mac,
    mac2: &'a Mac,
}

impl<'a> Signed<'a> {
    fn parse(message: &'a [u8]) -> Option<Self> {
        let sender = message::sender_index(message)?;
        let (signed, mac2) = message.split_last_chunk::<MAC_LENGTH>()?;
        let (body, mac1) = signed.split_last_chunk::<MAC_LENGTH>()?;
        Some(Self { sender, body, mac1, mac2 })
    }
}

/// Counts a message of this address; `None`, and nothing is counted, if it or all of them have had their share of this second.
fn takes(all: &mut u32, most: u32, each: &mut BTreeMap<IpAddr, u32>, from: IpAddr) -> Option<()> {
    let network = network(from);
    let count = each.get(&network).copied().unwrap_or_default();
    if *all >= most || count >= max_of(from) {
        return None;
    }
    *all = all.saturating_add(1);
    each.insert(network, count.saturating_add(1));
    Some(())
}

/// Largest number of handshake messages in a second from the network of an address: of one address of IPv4, or of a /64 of IPv6.
fn max_of(from: IpAddr) -> u32 {
    match from.to_canonical() {
        IpAddr::V4(_) => MAX_HANDSHAKES_PER_ADDRESS,
        IpAddr::V6(_) => MAX_HANDSHAKES_PER_NETWORK,
    }
}

/// The same bytes for an IPv4 address whether or not it came through a socket of IPv6.
fn mapped(address: IpAddr) -> Ipv6Addr {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped(),
        IpAddr::V6(address) => address,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::mac::MacSender;
    use crate::message::{INITIATION_LENGTH, RESPONSE_LENGTH};
    use crate::random::tests::Seeded;

    const OURS: PublicKey = PublicKey([9; 32]);

    struct Test {
        limiter: HandshakeLimiter,
        random: Seeded,
        start: Instant,
    }

    impl Test {
        fn new() -> Self {
            let start = Instant::now();
            Self { limiter: HandshakeLimiter::new(&OURS, start), random: Seeded(1), start }
        }

        fn check(&mut self, from: &str, message: &[u8], milliseconds: u64) -> Verdict {
            let now = self.start + Duration::from_millis(milliseconds);
            self.limiter.check(from.parse().unwrap(), message, now, &mut self.random)
        }

        /// As many messages of different addresses as bring every sender under load.
        fn flood(&mut self, milliseconds: u64) {
            let signed = signed(&mut MacSender::new(&OURS), RESPONSE_LENGTH, self.start);
            for sender in 0..MAX_HANDSHAKES {
                let from = format!("10.1.{}.{}:7", sender / 256, sender % 256);
                assert_eq!(self.check(&from, &signed, milliseconds), Verdict::Accept);
            }
        }

        fn at(&self, milliseconds: u64) -> Instant {
            self.start + Duration::from_millis(milliseconds)
        }
    }

    /// A message of this length with the sender index 0x5a5a5a5a.
    fn signed(sender: &mut MacSender, length: usize, now: Instant) -> Vec<u8> {
        let mut message = vec![0x5a; length];
        message[..4].copy_from_slice(&[if length == INITIATION_LENGTH { 1 } else { 2 }, 0, 0, 0]);
        sender.sign(&mut message, now);
        message
    }

    fn cookie_of(verdict: Verdict) -> CookieReply {
        match verdict {
            Verdict::Cookie(reply) => reply,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_wrong_mac_or_form_is_refused_and_counts_for_nothing() {
        let mut test = Test::new();
        let mut sender = MacSender::new(&OURS);
        let message = signed(&mut sender, INITIATION_LENGTH, test.start);
        for byte in (0..INITIATION_LENGTH - 16).chain([4, 5, 6].into_iter().cycle().take(5_000)) {
            let mut forged = message.clone();
            forged[byte] ^= 0x10;
            assert_eq!(test.check("192.0.2.1:1", &forged, 0), Verdict::Refuse, "byte {byte}");
        }
        for junk in [&[][..], &[4; 200], &[3, 0, 0, 0], &message[..147]] {
            assert_eq!(test.check("192.0.2.1:1", junk, 0), Verdict::Refuse);
        }
        assert_eq!(test.check("192.0.2.1:1", &message, 0), Verdict::Accept);
        assert_eq!((test.limiter.handshakes, test.limiter.by_address.len()), (1, 1));
    }

    #[test]
    fn an_address_with_too_many_messages_needs_a_cookie_until_the_next_second() {
        let mut test = Test::new();
        let message = signed(&mut MacSender::new(&OURS), INITIATION_LENGTH, test.start);
        for port in 1..=MAX_HANDSHAKES_PER_ADDRESS {
            assert_eq!(test.check(&format!("192.0.2.1:{port}"), &message, 0), Verdict::Accept);
        }
        let reply = cookie_of(test.check("192.0.2.1:1", &message, 999));
        assert_eq!((reply.len(), &reply[..8]), (64, &[3, 0, 0, 0, 0x5a, 0x5a, 0x5a, 0x5a][..]));
        assert_eq!(test.check("192.0.2.2:1", &message, 999), Verdict::Accept);
        assert_eq!(test.check("192.0.2.1:1", &message, 1_000), Verdict::Accept);
    }

    #[test]
    fn a_sender_with_its_cookie_is_accepted_under_load() {
        for length in [INITIATION_LENGTH, RESPONSE_LENGTH] {
            let (mut test, mut sender) = (Test::new(), MacSender::new(&OURS));
            test.flood(0);
            let first = signed(&mut sender, length, test.start);
            let reply = cookie_of(test.check("192.0.2.1:7", &first, 1));
            sender.receive_cookie(&reply, test.start).unwrap();
            let second = signed(&mut sender, length, test.start);
            assert_eq!(test.check("192.0.2.1:7", &second, 2), Verdict::Accept);
            // The same socket of ours may show the address in the other family.
            assert_eq!(test.check("[::ffff:192.0.2.1]:7", &second, 2), Verdict::Accept);
            for other in ["192.0.2.1:8", "192.0.2.2:7", "[2001:db8::1]:7"] {
                cookie_of(test.check(other, &second, 2));
            }
        }
    }

    #[test]
    fn a_sender_with_its_cookie_is_not_accepted_without_end() {
        let mut test = Test::new();
        test.flood(0);
        let mut macs = MacSender::new(&OURS);
        let first = signed(&mut macs, INITIATION_LENGTH, test.start);
        let cookie = cookie_of(test.check("192.0.2.1:7", &first, 0));
        macs.receive_cookie(&cookie, test.start).unwrap();
        let message = signed(&mut macs, INITIATION_LENGTH, test.start);
        for number in 0..2 * MAX_HANDSHAKES_PER_ADDRESS {
            let expected =
                if number < MAX_HANDSHAKES_PER_ADDRESS { Verdict::Accept } else { Verdict::Refuse };
            assert_eq!(test.check("192.0.2.1:7", &message, 0), expected, "{number}");
        }
        test.flood(1_000);
        assert_eq!(test.check("192.0.2.1:7", &message, 1_000), Verdict::Accept, "in the next second");
    }

    /// It repeats one message as fast as it can.
    #[test]
    fn a_sender_with_its_cookie_takes_nothing_from_the_others() {
        let mut test = Test::new();
        let proven = |test: &mut Test, from: &str| {
            let mut macs = MacSender::new(&OURS);
            let first = signed(&mut macs, INITIATION_LENGTH, test.start);
            let cookie = cookie_of(test.check(from, &first, 0));
            macs.receive_cookie(&cookie, test.start).unwrap();
            signed(&mut macs, INITIATION_LENGTH, test.start)
        };
        test.flood(0);
        let [hostile, honest] = ["192.0.2.1:7", "192.0.2.2:7"].map(|from| (from, proven(&mut test, from)));
        let accepted =
            (0..20_000).filter(|_| test.check(hostile.0, &hostile.1, 1) == Verdict::Accept).count();
        assert_eq!(accepted, MAX_HANDSHAKES_PER_ADDRESS as usize);
        assert_eq!(test.check(honest.0, &honest.1, 2), Verdict::Accept);
        assert_eq!(test.limiter.proven_by_address.len(), 2);
    }

    #[test]
    fn a_sender_beyond_its_share_brings_no_other_under_load() {
        let mut test = Test::new();
        let message = signed(&mut MacSender::new(&OURS), INITIATION_LENGTH, test.start);
        let cookies =
            (0..20_000).filter(|_| matches!(test.check("192.0.2.1:7", &message, 0), Verdict::Cookie(_)));
        assert_eq!(cookies.count(), 20_000 - MAX_HANDSHAKES_PER_ADDRESS as usize);
        assert_eq!(test.check("192.0.2.2:7", &message, 0), Verdict::Accept);
    }

    #[test]
    fn cookies_end_with_their_secret() {
        let (mut test, mut sender) = (Test::new(), MacSender::new(&OURS));
        test.flood(0);
        let first = signed(&mut sender, INITIATION_LENGTH, test.start);
        let reply = cookie_of(test.check("192.0.2.1:7", &first, 0));
        sender.receive_cookie(&reply, test.at(0)).unwrap();
        let second = signed(&mut sender, INITIATION_LENGTH, test.at(0));
        test.flood(119_000);
        assert_eq!(test.check("192.0.2.1:7", &second, 119_999), Verdict::Accept);
        test.flood(120_000);
        let reply = cookie_of(test.check("192.0.2.1:7", &second, 120_000));
        sender.receive_cookie(&reply, test.at(120_000)).unwrap();
        let third = signed(&mut sender, INITIATION_LENGTH, test.at(120_000));
        assert_eq!(test.check("192.0.2.1:7", &third, 120_001), Verdict::Accept);
    }

    #[test]
    fn a_flood_from_many_addresses_takes_bounded_memory() {
        let mut test = Test::new();
        let message = signed(&mut MacSender::new(&OURS), INITIATION_LENGTH, test.start);
        for sender in 0..20_000_u32 {
            let from = SocketAddr::new(IpAddr::from(sender.to_be_bytes()), 7);
            let verdict = test.limiter.check(from, &message, test.start, &mut test.random);
            assert_eq!(matches!(verdict, Verdict::Cookie(_)), sender >= MAX_HANDSHAKES, "{sender}");
        }
        assert_eq!(test.limiter.by_address.len(), MAX_HANDSHAKES as usize);
        assert_eq!(test.check("192.0.2.1:7", &message, 1_000), Verdict::Accept);
        assert_eq!(test.limiter.by_address.len(), 1);
    }

    #[test]
    fn a_host_cannot_hide_among_its_addresses_of_ipv6() {
        let of = |text: &str| network(text.parse().unwrap());
        assert_eq!(of("2001:db8::1"), of("2001:db8::ffff:0:0:1"));
        assert_ne!(of("2001:db8::1"), of("2001:db8:0:1::1"));
        assert_eq!(of("::ffff:192.0.2.1"), of("192.0.2.1"));
        assert_ne!(of("192.0.2.1"), of("192.0.2.2"));
    }

    #[test]
    fn no_nonce_is_used_twice() {
        let mut test = Test::new();
        test.flood(0);
        let message = signed(&mut MacSender::new(&OURS), INITIATION_LENGTH, test.start);
        let replies = [0, 1].map(|at| cookie_of(test.check("192.0.2.1:7", &message, at)));
        assert_ne!(replies[0][8..32], replies[1][8..32]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_refused(message in prop::collection::vec(any::<u8>(), 0..160), kind in 0..5_u8) {
            let mut test = Test::new();
            for length in [message.len(), INITIATION_LENGTH, RESPONSE_LENGTH] {
                let mut message = message.clone();
                message.resize(length, 0);
                message.iter_mut().zip([kind, 0, 0, 0]).for_each(|(to, from)| *to = from);
                prop_assert_eq!(test.check("[2001:db8::1]:7", &message, 0), Verdict::Refuse);
            }
        }
    }
}
