//! Two peers, a clock that only tests move, and randomness that is the same at every run.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use fairlead_keys::{PrivateKey, PublicKey};
use fairlead_wireguard::{
    Due, Error, Identity, Kind, Now, Random, ReceivedInitiation, Response, Tunnel, kind_of, read_initiation,
    receiver_index,
};

pub(crate) const SECOND: Duration = Duration::from_secs(1);
pub(crate) const MILLISECOND: Duration = Duration::from_millis(1);

/// SplitMix64.
pub(crate) struct Seeded(pub(crate) u64);

impl Random for Seeded {
    fn fill(&mut self, bytes: &mut [u8]) {
        for byte in bytes {
            self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
            let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            *byte = ((mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 56) as u8;
        }
    }
}

/// One of the two peers.
pub(crate) struct Side {
    pub(crate) identity: Arc<Identity>,
    pub(crate) tunnel: Tunnel,
    pub(crate) random: Seeded,
    pub(crate) last_index: u32,
}

impl Side {
    pub(crate) fn new(private: u8, peer: &Identity, preshared_key: Option<[u8; 32]>) -> Self {
        let identity = Arc::new(identity(private));
        let tunnel = Tunnel::new(Arc::clone(&identity), peer.public(), preshared_key);
        Self { identity, tunnel, random: Seeded(private.into()), last_index: u32::from(private) << 24 }
    }

    pub(crate) fn index(&mut self) -> u32 {
        self.last_index += 1;
        self.last_index
    }

    pub(crate) fn initiate(&mut self, again: bool, now: Now) -> Option<Vec<u8>> {
        let index = self.index();
        self.tunnel.initiate(again, index, now, &mut self.random).map(Vec::from)
    }

    pub(crate) fn read(&self, initiation: &[u8]) -> ReceivedInitiation {
        read_initiation(&self.identity, initiation).unwrap()
    }

    pub(crate) fn respond(&mut self, initiation: &[u8], now: Now) -> Result<Response, Error> {
        let (received, index) = (self.read(initiation), self.index());
        self.tunnel.respond(received, index, now, &mut self.random)
    }

    /// The data message with this packet; none without a session.
    pub(crate) fn seal(&mut self, packet: &[u8], now: Now) -> Option<Vec<u8>> {
        let mut datagram = [&[0; 16], packet, &[0; 16]].concat();
        let mut sealer = self.tunnel.sealer(now.instant)?;
        sealer.assign_counter(&mut datagram).unwrap();
        sealer.key().encrypt(&mut datagram).unwrap();
        Some(datagram)
    }

    /// The packet of a data message, which the test keeps.
    pub(crate) fn open(&mut self, datagram: &[u8], now: Now) -> Result<(Vec<u8>, Opened), Error> {
        let mut datagram = datagram.to_vec();
        let index = receiver_index(&datagram).ok_or(Error::Malformed)?;
        let decrypted = self.tunnel.receive_key(index, now.instant)?.decrypt(&mut datagram)?;
        let is_first = self.tunnel.receive(&decrypted, now)?;
        let (index, counter, inner) = (decrypted.index(), decrypted.counter(), decrypted.inner());
        Ok((datagram[inner.clone()].to_vec(), Opened { index, counter, inner, is_first }))
    }

    pub(crate) fn due(&mut self, now: Now) -> Vec<Due> {
        let mut all = Vec::new();
        while let Some(due) = self.tunnel.take_due(now.instant, &mut self.random) {
            all.push(due);
            assert!(all.len() < 10, "take_due does not end: {all:?}");
        }
        if let Some(next) = self.tunnel.poll_timeout() {
            assert!(next > now.instant, "poll_timeout has not passed");
        }
        all
    }

    /// Moves the clock to the next timer, and says what is due, and how much time has passed since `start`.
    pub(crate) fn wait(&mut self, clock: &mut Clock) -> (Duration, Vec<Due>) {
        let next = self.tunnel.poll_timeout().expect("there is a timer");
        clock.elapsed = clock.elapsed.max(next - clock.start.instant);
        (clock.elapsed, self.due(clock.now()))
    }

    /// Takes any message.
    pub(crate) fn receive(&mut self, message: &[u8], now: Now) -> Result<Received, Error> {
        let (mut answer, mut packet) = (None, None);
        match kind_of(message).ok_or(Error::Malformed)? {
            Kind::Initiation => {
                let received = read_initiation(&self.identity, message)?;
                let index = self.index();
                let response = self.tunnel.respond(received, index, now, &mut self.random)?;
                answer = Some(response.to_vec());
            }
            Kind::Response => self.tunnel.finish(message, now)?,
            Kind::CookieReply => self.tunnel.receive_cookie(message, now.instant)?,
            Kind::Data => packet = Some(self.open(message, now)?.0),
        }
        Ok(Received { answer, packet })
    }
}

/// Data message that was decrypted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Opened {
    pub(crate) index: u32,
    pub(crate) counter: u64,
    /// Range of the packet in the datagram.
    pub(crate) inner: Range<usize>,
    /// It has confirmed the session.
    pub(crate) is_first: bool,
}

/// Result of a message that was received.
pub(crate) struct Received {
    pub(crate) answer: Option<Vec<u8>>,
    pub(crate) packet: Option<Vec<u8>>,
}

pub(crate) struct Clock {
    pub(crate) start: Now,
    pub(crate) elapsed: Duration,
}

impl Clock {
    pub(crate) fn now(&self) -> Now {
        Now { instant: self.start.instant + self.elapsed, wall: self.start.wall + self.elapsed }
    }

    pub(crate) fn advance(&mut self, duration: Duration) -> Now {
        self.elapsed += duration;
        self.now()
    }

    /// Moves the clock to this time after its start.
    pub(crate) fn set(&mut self, elapsed: Duration) -> Now {
        assert!(elapsed >= self.elapsed);
        self.elapsed = elapsed;
        self.now()
    }
}

pub(crate) fn identity(private: u8) -> Identity {
    Identity::new(&PrivateKey([private; 32]))
}

pub(crate) fn clock() -> Clock {
    let wall = SystemTime::UNIX_EPOCH + Duration::from_secs(1_700_000_000);
    Clock { start: Now { instant: Instant::now(), wall }, elapsed: Duration::ZERO }
}

/// Two peers that know each other.
pub(crate) fn strangers() -> (Side, Side, Clock) {
    (Side::new(1, &identity(2), None), Side::new(2, &identity(1), None), clock())
}

/// A whole handshake: the initiator may send now, the responder after a message of it.
pub(crate) fn shake(initiator: &mut Side, responder: &mut Side, now: Now) {
    let initiation = initiator.initiate(true, now).unwrap();
    let response = responder.respond(&initiation, now).unwrap();
    initiator.tunnel.finish(&response, now).unwrap();
}

/// Sends a packet; it must arrive.
pub(crate) fn send(from: &mut Side, to: &mut Side, packet: &[u8], now: Now) -> Opened {
    let datagram = from.seal(packet, now).expect("there is a session");
    let (received, opened) = to.open(&datagram, now).unwrap();
    assert_eq!(received, packet);
    opened
}

/// Two peers with a session at the start of the clock, in which a keepalive of the initiator, the first, has arrived.
pub(crate) fn established() -> (Side, Side, Clock) {
    let (mut a, mut b, clock) = strangers();
    shake(&mut a, &mut b, clock.now());
    assert!(send(&mut a, &mut b, b"", clock.now()).is_first);
    (a, b, clock)
}

pub(crate) fn public(side: &Side) -> PublicKey {
    side.identity.public()
}
