//! State that all probers of a node share: its identity, the senders of probes, replays, and the limits on what is sent.
//! The rules are those of `docs/path-protocol.md`.

use std::collections::BTreeMap;
use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fairlead_keys::{PrivateKey, PublicKey};
use fairlead_limits::{Rate, ReplayWindow, TokenBucket};
use fairlead_wire::probe::{Epoch, Header, Message, ProbeKeys, SenderTag};

/// Identity with which this node sends probes.
#[derive(Clone)]
pub struct Identity {
    /// WireGuard key of this node.
    pub private_key: PrivateKey,
    /// The public half.
    pub public_key: PublicKey,
    /// Random bytes of the operating system, new at each start: used twice, they would break the encryption of probes.
    pub epoch: [u8; 16],
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Identity").field("public_key", &self.public_key).finish_non_exhaustive()
    }
}

/// Words of a replay window: it remembers the 64 counters below the greatest.
const WINDOW_WORDS: usize = 2;
/// Requests of an epoch that no answer has confirmed, per second.
const MAX_UNCONFIRMED: u32 = 4;
/// Requests of one peer that are answered, per second.
const MAX_ANSWERED: u32 = 100;
/// Requests to one address that may be unanswered, per second, over all peers: a member that publishes the address of a
/// victim must not be able to aim all nodes at it.
const MAX_UNANSWERED: u32 = 20;
/// Requests of this node per second.
const MAX_REQUESTS: u32 = 500;
/// Requests to one peer over paths that have not answered lately: at once, and then per second. A peer that publishes ever other
/// candidates must not use up what this node may send to all.
const PEER_RATE: Rate = Rate::per_second(16, 80);
const SECOND: Duration = Duration::from_secs(1);

/// Counters of dropped probes, by reason.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProbeDrops {
    /// Probes whose sender is no peer, or whose authentication failed.
    pub unauthenticated: u64,
    /// Probes of a version or kind that this node does not know.
    pub unknown: u64,
    /// Probes that had been received before.
    pub replayed: u64,
    /// Requests beyond those that are answered per second.
    pub limited: u64,
    /// Answers that this node did not wait for.
    pub unexpected: u64,
    /// Requests of this node that its limits held back.
    pub held_back: u64,
}

/// Counters of probes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ProbeCounts {
    /// Requests of this node.
    pub requests_sent: u64,
    /// Answers of this node.
    pub answers_sent: u64,
    /// Requests of peers that were not dropped.
    pub requests_received: u64,
    /// Answers that this node waited for.
    pub answers_received: u64,
    /// Probes that were dropped or held back.
    pub drops: ProbeDrops,
}

/// A limit per second.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct PerSecond {
    began: Duration,
    count: u32,
}

impl PerSecond {
    pub(crate) fn take(&mut self, now: Duration, limit: u32) -> bool {
        if now.saturating_sub(self.began) >= SECOND {
            *self = Self { began: now, count: 0 };
        }
        let is_free = self.count < limit;
        if is_free {
            self.count = self.count.saturating_add(1);
        }
        is_free
    }
}

/// Counters of an epoch that were seen.
#[derive(Debug)]
struct Window {
    epoch: Epoch,
    seen: ReplayWindow,
}

impl Window {
    fn new(epoch: Epoch, counter: u64) -> Self {
        let mut window = Self { epoch, seen: ReplayWindow::new(WINDOW_WORDS, u64::MAX) };
        window.accept(counter);
        window
    }

    fn accept(&mut self, counter: u64) -> bool {
        self.seen.check_and_record(counter)
    }
}

/// Replay windows and counters of what was received from one peer.
#[derive(Debug, Default)]
struct Received {
    confirmed: Option<Window>,
    unconfirmed: Option<Window>,
    unconfirmed_rate: PerSecond,
    answered: PerSecond,
}

#[derive(Debug, PartialEq, Eq)]
enum Refusal {
    Limited,
    Replayed,
}

impl Received {
    fn accept_request(&mut self, now: Duration, header: &Header) -> Result<(), Refusal> {
        let is_new = match (&mut self.confirmed, &mut self.unconfirmed) {
            (Some(window), _) if window.epoch == header.epoch => window.accept(header.counter),
            (_, unconfirmed) => {
                if !self.unconfirmed_rate.take(now, MAX_UNCONFIRMED) {
                    return Err(Refusal::Limited);
                }
                match unconfirmed {
                    Some(window) if window.epoch == header.epoch => window.accept(header.counter),
                    other => {
                        *other = Some(Window::new(header.epoch, header.counter));
                        true
                    }
                }
            }
        };
        if !is_new {
            return Err(Refusal::Replayed);
        }
        if self.answered.take(now, MAX_ANSWERED) { Ok(()) } else { Err(Refusal::Limited) }
    }

    /// An answer to a request of this node carried this header: no recorded datagram can.
    fn confirm(&mut self, header: &Header) {
        if self.confirmed.as_ref().is_some_and(|window| window.epoch == header.epoch) {
            return;
        }
        let known = self.unconfirmed.take().filter(|window| window.epoch == header.epoch);
        self.confirmed = Some(known.unwrap_or_else(|| Window::new(header.epoch, header.counter)));
    }
}

/// Keys of the probes of a peer, derived when first needed.
#[derive(Debug)]
enum PeerKeys {
    NotDerived,
    /// The public key of the peer gives no shared secret.
    None,
    Derived(ProbeKeys),
}

/// State of the probes that one peer sends and gets.
#[derive(Debug)]
struct Correspondent {
    tag: SenderTag,
    keys: PeerKeys,
    received: Received,
    /// Requests over paths that have not answered lately; full while `None`.
    unproven: Option<TokenBucket<Duration>>,
}

/// Encrypts and decrypts for all peers, within the limits.
#[derive(Debug)]
pub(crate) struct Probing {
    identity: Identity,
    counter: u64,
    peers: BTreeMap<PublicKey, Correspondent>,
    by_tag: BTreeMap<SenderTag, PublicKey>,
    requests: PerSecond,
    unanswered: BTreeMap<IpAddr, u32>,
    unanswered_since: Duration,
    counts: ProbeCounts,
}

impl Probing {
    pub(crate) fn new(identity: Identity) -> Self {
        Self {
            identity,
            counter: 0,
            peers: BTreeMap::new(),
            by_tag: BTreeMap::new(),
            requests: PerSecond::default(),
            unanswered: BTreeMap::new(),
            unanswered_since: Duration::ZERO,
            counts: ProbeCounts::default(),
        }
    }

    /// Takes another key. Counters go on, so that no number is used twice.
    pub(crate) fn set_identity(&mut self, identity: Identity) {
        self.identity = Identity { epoch: self.identity.epoch, ..identity };
        self.by_tag.clear();
        for (peer, known) in &mut self.peers {
            known.tag = SenderTag::new(&peer.0, &self.identity.public_key.0);
            known.keys = PeerKeys::NotDerived;
            self.by_tag.insert(known.tag, *peer);
        }
    }

    /// Whether this node decides for both which path they use.
    pub(crate) fn is_controlling(&self, peer: &PublicKey) -> bool {
        self.identity.public_key < *peer
    }

    pub(crate) fn add_peer(&mut self, peer: PublicKey) {
        let tag = SenderTag::new(&peer.0, &self.identity.public_key.0);
        self.by_tag.insert(tag, peer);
        let new = || Correspondent {
            tag,
            keys: PeerKeys::NotDerived,
            received: Received::default(),
            unproven: None,
        };
        self.peers.entry(peer).or_insert_with(new);
    }

    pub(crate) fn remove_peer(&mut self, peer: &PublicKey) {
        if let Some(known) = self.peers.remove(peer) {
            self.by_tag.remove(&known.tag);
        }
    }

    pub(crate) fn counts(&self) -> ProbeCounts {
        self.counts
    }

    /// Encrypts a request over a path that has answered lately: the peer wants it, and there are few.
    pub(crate) fn check(&mut self, peer: &PublicKey, message: &Message, length: usize) -> Option<Vec<u8>> {
        let sealed = self.seal(peer, message, length)?;
        increment(&mut self.counts.requests_sent);
        Some(sealed)
    }

    /// Encrypts a request over any other path, unless the limits hold it back.
    pub(crate) fn request(
        &mut self,
        now: Duration,
        peer: &PublicKey,
        to: SocketAddr,
        message: &Message,
        length: usize,
    ) -> Option<Vec<u8>> {
        if now.saturating_sub(self.unanswered_since) >= SECOND {
            self.unanswered.clear();
            self.unanswered_since = now;
        }
        let unanswered = self.unanswered.get(&to.ip()).copied().unwrap_or_default();
        let bucket =
            self.peers.get_mut(peer)?.unproven.get_or_insert_with(|| TokenBucket::full(PEER_RATE, now));
        // A token is gone though another limit holds the request back: that is the price of asking in vain.
        let is_held_back = bucket.take(now, 1).is_err()
            || unanswered >= MAX_UNANSWERED
            || !self.requests.take(now, MAX_REQUESTS);
        if is_held_back {
            increment(&mut self.counts.drops.held_back);
            return None;
        }
        let sealed = self.check(peer, message, length)?;
        self.unanswered.insert(to.ip(), unanswered.saturating_add(1));
        Some(sealed)
    }

    /// Encrypts a request of a birthday attempt, of which most are not answered, unless this node has sent too many. They go only
    /// where the peer is known to be, and while it says over the relay that it takes part.
    pub(crate) fn search(&mut self, now: Duration, peer: &PublicKey, message: &Message) -> Option<Vec<u8>> {
        if !self.requests.take(now, MAX_REQUESTS) {
            increment(&mut self.counts.drops.held_back);
            return None;
        }
        self.check(peer, message, 0)
    }

    /// Decrypts a probe and says who sent it. Requests that were received before, or are too many, are dropped.
    pub(crate) fn open(&mut self, now: Duration, bytes: &[u8]) -> Option<(PublicKey, Header, Message)> {
        let opened = self.authenticate(bytes);
        let (peer, header, message) = match opened {
            Ok(opened) => opened,
            Err(is_unknown) => {
                let drops = &mut self.counts.drops;
                increment(if is_unknown { &mut drops.unknown } else { &mut drops.unauthenticated });
                return None;
            }
        };
        if matches!(message, Message::Request { .. }) {
            let refusal = self.peers.get_mut(&peer)?.received.accept_request(now, &header).err();
            let counts = &mut self.counts;
            increment(match refusal {
                None => &mut counts.requests_received,
                Some(Refusal::Limited) => &mut counts.drops.limited,
                Some(Refusal::Replayed) => &mut counts.drops.replayed,
            });
            return refusal.is_none().then_some((peer, header, message));
        }
        Some((peer, header, message))
    }

    fn authenticate(&mut self, bytes: &[u8]) -> Result<(PublicKey, Header, Message), bool> {
        let header = Header::parse(bytes).map_err(|_| true)?;
        let peer = *self.by_tag.get(&header.sender).ok_or(false)?;
        let keys = self.keys(&peer).ok_or(false)?;
        let message =
            keys.open(bytes).map_err(|error| matches!(error, fairlead_wire::probe::InvalidProbe::Kind(_)))?;
        Ok((peer, header, message))
    }

    /// An answer was one that this node waited for, or not.
    pub(crate) fn conclude(
        &mut self,
        peer: &PublicKey,
        header: &Header,
        from: SocketAddr,
        is_expected: bool,
    ) {
        if !is_expected {
            increment(&mut self.counts.drops.unexpected);
            return;
        }
        increment(&mut self.counts.answers_received);
        if let Some(unanswered) = self.unanswered.get_mut(&from.ip()) {
            *unanswered = unanswered.saturating_sub(1);
        }
        if let Some(peer) = self.peers.get_mut(peer) {
            peer.received.confirm(header);
        }
    }

    /// Whether an answer to a request of this node has carried this epoch: the datagram is no recording of an earlier run.
    pub(crate) fn is_confirmed(&self, peer: &PublicKey, header: &Header) -> bool {
        let confirmed = self.peers.get(peer).and_then(|peer| peer.received.confirmed.as_ref());
        confirmed.is_some_and(|window| window.epoch == header.epoch)
    }

    /// Whether the datagram is not of another epoch than the one that an answer to a request of this node has carried, if any has.
    pub(crate) fn is_current(&self, peer: &PublicKey, header: &Header) -> bool {
        let confirmed = self.peers.get(peer).and_then(|peer| peer.received.confirmed.as_ref());
        confirmed.is_none_or(|window| window.epoch == header.epoch)
    }

    /// Encrypts a message of `length` bytes at least to a peer: an answer is as long as its request.
    pub(crate) fn seal(&mut self, peer: &PublicKey, message: &Message, length: usize) -> Option<Vec<u8>> {
        // A counter that does not grow any more must not be used again.
        let counter = self.counter.checked_add(1)?;
        let epoch = Epoch(self.identity.epoch);
        let sealed = self.keys(peer)?.seal(epoch, counter, message, length);
        self.counter = counter;
        if matches!(message, Message::Answer { .. }) {
            increment(&mut self.counts.answers_sent);
        }
        Some(sealed)
    }

    fn keys(&mut self, peer: &PublicKey) -> Option<&ProbeKeys> {
        let keys = &mut self.peers.get_mut(peer)?.keys;
        if matches!(keys, PeerKeys::NotDerived) {
            let derived = ProbeKeys::derive(&self.identity.private_key.0, &peer.0, None);
            *keys = derived.map_or(PeerKeys::None, PeerKeys::Derived);
        }
        match keys {
            PeerKeys::Derived(keys) => Some(keys),
            PeerKeys::None | PeerKeys::NotDerived => None,
        }
    }
}

fn increment(count: &mut u64) {
    *count = count.saturating_add(1);
}

#[cfg(test)]
mod tests;
