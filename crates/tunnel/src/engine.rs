//! Everything a WireGuard device decides, without I/O: bytes and clock readings in, bytes out.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_keys::{DeviceChange, PeerConfig, PeerState, PrivateKey, PublicKey};
use fairlead_wireguard::{HandshakeLimiter, Identity, Now, Random, Verdict, read_initiation};
use fairlead_wireguard::{Kind, kind_of, receiver_index};
use ipnet::IpNet;

use crate::Error;
use crate::allowed::{AcceptedIps, AllowedIps};
use crate::handover::PeerSnapshot;
use crate::inner;
use crate::offload::Split;
use crate::outbox::{Batch, Outbox};
use crate::peer::{Context, Indexes, Pace, Peer};
use crate::received::{Message, SessionKey};
use crate::udp::{Path, Received};

mod both_ways;

pub(crate) use both_ways::{BothWays, Copies};

/// Peers that do not answer are asked so often that together they cost this much time for each: 25 handshakes a second, whatever
/// their number.
const PAUSE_PER_PEER: Duration = Duration::from_millis(40);
/// Peers of one change that are asked at once, and how the others follow: thousands at once would take the memory of thousands of
/// handshakes.
const AT_ONCE: usize = 128;
const START_INTERVAL: Duration = Duration::from_millis(5);

/// Our keys and the limiter of handshakes with them.
struct Keys {
    configured: PrivateKey,
    identity: Arc<Identity>,
    limiter: HandshakeLimiter,
}

impl Keys {
    fn new(configured: &PrivateKey, now: Now) -> Self {
        let identity = Arc::new(Identity::new(configured));
        let limiter = HandshakeLimiter::new(&identity.public(), now.instant);
        Self { configured: configured.clone(), identity, limiter }
    }
}

/// A device without its sockets.
pub(crate) struct Engine {
    mtu: u16,
    keys: Option<Keys>,
    /// Time at which the device did something first.
    started: Option<Now>,
    random: Box<dyn Random + Send>,
    /// Boxed: half of a hash map is empty.
    peers: HashMap<PublicKey, Box<Peer>>,
    /// Times at which the timers of peers are due; the others have none.
    timers: BTreeSet<(Instant, PublicKey)>,
    allowed: AllowedIps,
    accepted: AcceptedIps,
    indexes: Indexes,
    /// Paths of the old process to peers that are not configured here yet.
    snapshots: HashMap<PublicKey, Path>,
    /// Peers that have not answered packets lately; [`Self::take_unanswered`] empties it.
    unanswered: Vec<PublicKey>,
    both_ways: BothWays,
}

impl Engine {
    pub(crate) fn new(mtu: u16, random: Box<dyn Random + Send>) -> Self {
        Self {
            mtu,
            keys: None,
            started: None,
            random,
            peers: HashMap::new(),
            timers: BTreeSet::new(),
            allowed: AllowedIps::default(),
            accepted: AcceptedIps::default(),
            indexes: Indexes::default(),
            snapshots: HashMap::new(),
            unanswered: Vec::new(),
            both_ways: BothWays::new(),
        }
    }

    /// Our private key, if one is set.
    pub(crate) fn private_key(&self) -> Option<&PrivateKey> {
        self.keys.as_ref().map(|keys| &keys.configured)
    }

    /// All peers with their allowed addresses.
    pub(crate) fn peers(&self) -> impl Iterator<Item = (PublicKey, PeerState)> {
        self.peers.iter().map(|(key, peer)| {
            let mut state = peer.state();
            state.config.allowed_ips = self.allowed.of(key);
            (*key, state)
        })
    }

    /// Reason why the last datagram to a peer could not be sent; `None` if it could.
    pub(crate) fn send_error(&self, key: &PublicKey) -> Option<&str> {
        self.peers.get(key)?.send_error()
    }

    /// The peers with a session, for the process that takes over.
    pub(crate) fn peer_snapshots(&self, now: Instant) -> Vec<PeerSnapshot> {
        let live = self.peers.iter().filter(|(_, peer)| peer.is_live(now));
        live.filter_map(|(key, peer)| Some(PeerSnapshot { key: *key, path: peer.path()? })).collect()
    }

    /// Sets the paths of the old process. A peer that is configured here starts with that path, whatever endpoint is
    /// configured first.
    pub(crate) fn set_peer_snapshots(&mut self, snapshots: &[PeerSnapshot]) {
        self.snapshots = snapshots.iter().map(|peer| (peer.key, peer.path)).collect();
    }

    /// Whether the peer is configured and has no session yet.
    pub(crate) fn awaits_session(&self, key: &PublicKey, now: Instant) -> bool {
        self.peers.get(key).is_some_and(|peer| !peer.is_live(now))
    }

    /// Whether a datagram belongs to a session, or a handshake, of the other process of a hand-over.
    pub(crate) fn belongs_to_other_process(&self, datagram: &[u8]) -> bool {
        receiver_index(datagram).is_some_and(|index| self.indexes.owner(index).is_none())
    }

    /// Whether `change` can be applied; nothing is applied in part.
    pub(crate) fn check(&self, change: &DeviceChange) -> Result<(), Error> {
        let Some(key) = change.private_key.as_ref().or(self.private_key()) else {
            return if change.set_peers.is_empty() { Ok(()) } else { Err(Error::NoPrivateKey) };
        };
        let own = key.public_key();
        let stays = self.peers.contains_key(&own) && !change.remove_peers.contains(&own);
        if stays || change.set_peers.contains_key(&own) {
            return Err(Error::OwnKey(own));
        }
        Ok(())
    }

    /// Applies a checked change.
    pub(crate) fn apply(&mut self, change: &DeviceChange, now: Now, out: &mut Outbox) {
        for key in &change.remove_peers {
            if let Some(due) = self.peers.remove(key).and_then(|peer| peer.due) {
                self.timers.remove(&(due, *key));
            }
            self.indexes.sweep_soon();
            self.allowed.replace(*key, &[]);
        }
        if let Some(key) = change.private_key.as_ref().filter(|key| Some(*key) != self.private_key()) {
            self.set_keys(key, now, out);
        }
        for (position, (key, config)) in change.set_peers.iter().enumerate() {
            self.set_peer(key, config, start_delay(position), now, out);
        }
        for key in &change.handshakes {
            self.with_peer(*key, now, out, |peer, context| peer.start_handshake(context));
        }
    }

    fn set_keys(&mut self, key: &PrivateKey, now: Now, out: &mut Outbox) {
        let new = Keys::new(key, now);
        let peers: Vec<PublicKey> = self.peers.keys().copied().collect();
        for (position, key) in peers.into_iter().enumerate() {
            self.with_peer(key, now, out, |peer, context| {
                peer.rekey(Arc::clone(&new.identity), start_delay(position), context);
            });
        }
        self.keys = Some(new);
    }

    fn set_peer(
        &mut self,
        key: &PublicKey,
        config: &PeerConfig,
        delay: Duration,
        now: Now,
        out: &mut Outbox,
    ) {
        let Some(Keys { identity, .. }) = &self.keys else { return };
        self.peers.entry(*key).or_insert_with(|| Box::new(Peer::new(*key, Arc::clone(identity))));
        self.allowed.replace(*key, &config.allowed_ips);
        let snapshot = self.snapshots.remove(key);
        self.with_peer(*key, now, out, |peer, context| match snapshot {
            Some(path) => {
                peer.configure(&PeerConfig { endpoint: None, ..config.clone() }, delay, context);
                peer.start_at(path, context);
            }
            None => peer.configure(config, delay, context),
        });
    }

    /// Replaces what peers may send from besides what they are sent for.
    pub(crate) fn accept(&mut self, prefixes: &BTreeMap<PublicKey, Vec<IpNet>>) {
        self.accepted = AcceptedIps::new(prefixes);
    }

    /// Takes what one read of the TUN gave: packets of one flow. Without an owner of their destination they are dropped.
    pub(crate) fn send_packets(&mut self, packets: Split<'_>, now: Now, out: &mut Outbox) {
        let Some(header) = inner::parse(packets.packet()) else { return };
        let Some(owner) = self.allowed.owner(header.destination).copied() else {
            tracing::trace!(destination = %header.destination, "no peer has this address");
            return;
        };
        self.with_peer(owner, now, out, |peer, context| peer.send(packets, context));
    }

    /// Takes what was received: any bytes from any sender. It is decrypted in place; where the inner packets are, if their sender may
    /// use their source addresses, is appended to `packets`.
    pub(crate) fn receive(
        &mut self,
        received: &mut Received<'_>,
        now: Now,
        out: &mut Outbox,
        packets: &mut Vec<Range<usize>>,
    ) {
        let mut start = 0;
        while let Some(rest) = received.bytes.get(start..).filter(|rest| !rest.is_empty()) {
            let run = data_run(rest, received.length);
            let taken = if run > 0 { run } else { rest.len().min(received.length.max(1)) };
            let end = start.saturating_add(taken);
            if run > 0 {
                if let Some(session) = self.session(rest, now.instant) {
                    let mut messages = Vec::new();
                    session.decrypt(received.bytes, start..end, received.length, &mut messages);
                    self.receive_decrypted(session.peer, (received, &messages), now, out, packets);
                }
            } else if let Some(message) = rest.get(..taken) {
                self.receive_message(message, received.path, now, out);
            }
            start = end;
        }
    }

    /// The session of everything that was received, if it is data messages of one session that may still be used.
    pub(crate) fn session_of_all(&self, received: &Received<'_>, now: Instant) -> Option<SessionKey> {
        let run = data_run(received.bytes, received.length);
        if run == received.bytes.len() { self.session(received.bytes, now) } else { None }
    }

    /// Whether a message of a handshake, or of a session, is in what was received: it may not overtake what came before it. Other
    /// datagrams may.
    pub(crate) fn has_place_in_order(&self, received: &Received<'_>) -> bool {
        received.bytes.chunks(received.length.max(1)).any(|datagram| {
            let is_ours =
                || receiver_index(datagram).is_some_and(|index| self.indexes.owner(index).is_some());
            kind_of(datagram) == Some(Kind::Initiation) || is_ours()
        })
    }

    /// The session of the first of these data messages.
    fn session(&self, messages: &[u8], now: Instant) -> Option<SessionKey> {
        let index = receiver_index(messages)?;
        let peer = self.indexes.owner(index)?;
        Some(SessionKey { peer, key: self.peers.get(&peer)?.receive_key(index, now)? })
    }

    /// Takes the messages of one session that were decrypted. Where the inner packets are, if their sender may use their source
    /// addresses, is appended to `packets`.
    pub(crate) fn receive_decrypted(
        &mut self,
        peer: PublicKey,
        (received, messages): (&mut Received<'_>, &[Message]),
        now: Now,
        out: &mut Outbox,
        packets: &mut Vec<Range<usize>>,
    ) {
        let path = received.path;
        let first = packets.len();
        self.with_peer(peer, now, out, |peer, context| {
            for Message { range, decrypted } in messages {
                let start = range.start;
                let inner = decrypted.inner();
                if peer.receive_data(decrypted, range.len(), path, context) && !inner.is_empty() {
                    packets.push(inner.start.saturating_add(start)..inner.end.saturating_add(start));
                }
            }
        });
        self.keep_permitted(peer, received, packets, first);
    }

    /// Filters the packets from `first` on: keeps those whose sources are allowed addresses of their sender, without the padding behind
    /// them, and with the congestion that the datagrams met.
    fn keep_permitted(
        &self,
        sender: PublicKey,
        received: &mut Received<'_>,
        packets: &mut Vec<Range<usize>>,
        first: usize,
    ) {
        let mut last = None;
        let mut kept = first;
        for position in first..packets.len() {
            let Some(range) = packets.get(position).cloned() else { break };
            let Some(packet) = received.bytes.get_mut(range.clone()) else { continue };
            let Some(header) = inner::parse(packet) else { continue };
            if last != Some(header.source) && !self.may_send(sender, header.source) {
                tracing::trace!(source = %header.source, %sender, "the source is no allowed address of its sender");
                continue;
            }
            last = Some(header.source);
            if !received.ecn.apply_to(packet) {
                tracing::trace!(%sender, "a packet that is not ECN-capable met congestion");
                continue;
            }
            if let Some(slot) = packets.get_mut(kept) {
                *slot = range.start..range.start.saturating_add(header.length).min(range.end);
                kept = kept.saturating_add(1);
            }
        }
        packets.truncate(kept);
    }

    fn may_send(&self, sender: PublicKey, source: IpAddr) -> bool {
        self.allowed.owner(source) == Some(&sender) || self.accepted.contains(&sender, source)
    }

    /// Takes a message of a handshake, or junk.
    fn receive_message(&mut self, message: &[u8], path: Path, now: Now, out: &mut Outbox) {
        let Some(keys) = &mut self.keys else { return };
        let kind = kind_of(message);
        if matches!(kind, Some(Kind::Initiation | Kind::Response)) {
            match keys.limiter.check(path.remote, message, now.instant, &mut *self.random) {
                Verdict::Accept => {}
                Verdict::Refuse => return,
                Verdict::Cookie(cookie) => return out.push_message(None, &path, &cookie),
            }
        }
        let owner = receiver_index(message).and_then(|index| self.indexes.owner(index));
        match (kind, owner) {
            (Some(Kind::Initiation), _) => {
                let Ok(initiation) = read_initiation(&keys.identity, message) else { return };
                self.with_peer(initiation.peer, now, out, |peer, context| {
                    peer.receive_initiation(initiation, (path, message.len()), context);
                });
            }
            (Some(Kind::Response), Some(owner)) => {
                self.with_peer(owner, now, out, |peer, context| {
                    peer.receive_response(message, path, context);
                });
            }
            (Some(Kind::CookieReply), Some(owner)) => {
                self.with_peer(owner, now, out, |peer, context| peer.receive_cookie(message, context));
            }
            (Some(Kind::Response | Kind::CookieReply), None) | (Some(Kind::Data) | None, _) => {}
        }
    }

    /// Time at which to call [`Self::tick`]; `None` if only a message or a change brings work.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(due, _)| *due)
    }

    /// Runs the timers that are due, and no others.
    pub(crate) fn tick(&mut self, now: Now, out: &mut Outbox) {
        let peers = &self.peers;
        self.indexes.sweep(|index, key| peers.get(key).is_some_and(|peer| peer.uses(index)));
        let pace = self.pace();
        let mut due = Vec::new();
        while self.timers.first().is_some_and(|(at, _)| *at <= now.instant) {
            due.extend(self.timers.pop_first().map(|(_, key)| key));
        }
        for key in due {
            let is_unanswered = self.with_peer(key, now, out, |peer, context| {
                peer.due = None;
                peer.tick(&pace, context);
                peer.take_unanswered(now.instant)
            });
            if is_unanswered == Some(true) {
                self.unanswered.push(key);
            }
        }
    }

    /// The peers that were sent packets and have answered none for [`MISSED_AFTER`](crate::peer::MISSED_AFTER), once each.
    pub(crate) fn take_unanswered(&mut self) -> Vec<PublicKey> {
        std::mem::take(&mut self.unanswered)
    }

    /// Replaces the peers whose packets go another way as well.
    pub(crate) fn set_both_ways(&mut self, also: &BTreeMap<PublicKey, SocketAddr>) {
        self.both_ways.set(also);
    }

    /// Takes the counters of packets that went both ways since the last call.
    pub(crate) fn take_copies(&mut self) -> Copies {
        self.both_ways.take_copies()
    }

    fn pace(&self) -> Pace {
        let peers = u32::try_from(self.peers.len()).unwrap_or(u32::MAX);
        Pace { max_pause: PAUSE_PER_PEER.saturating_mul(peers) }
    }

    /// The result of sending datagrams; `used` is the path they took.
    pub(crate) fn sent(&mut self, batch: &Batch, used: &Path, failure: Option<&io::Error>) {
        if let Some(peer) = batch.to.peer.as_ref().and_then(|key| self.peers.get_mut(key)) {
            peer.sent(&batch.to.path, used, batch.bytes().len(), failure);
        }
    }

    /// Calls `act` with a peer, then sets its timer.
    fn with_peer<T>(
        &mut self,
        key: PublicKey,
        now: Now,
        out: &mut Outbox,
        act: impl FnOnce(&mut Peer, &mut Context<'_>) -> T,
    ) -> Option<T> {
        let pace = self.pace();
        let started = *self.started.get_or_insert(now);
        let running = now.instant.saturating_duration_since(started.instant);
        let peer = self.peers.get_mut(&key)?;
        let mut context = Context {
            now,
            steady_wall: started.wall.checked_add(running).unwrap_or(now.wall),
            random: &mut *self.random,
            indexes: &mut self.indexes,
            both_ways: &mut self.both_ways,
            out,
            mtu: self.mtu,
        };
        // What is overdue comes first: it must not end what begins now.
        peer.run_protocol_timers(&mut context);
        let result = act(peer, &mut context);
        // A new session may be due after what was sent or received.
        peer.run_protocol_timers(&mut context);
        if let Some(next) = peer.poll_timeout(now.instant, &pace)
            && peer.due.is_none_or(|due| next < due)
        {
            if let Some(due) = peer.due.replace(next) {
                self.timers.remove(&(due, key));
            }
            self.timers.insert((next, key));
        }
        Some(result)
    }
}

/// The length of the data messages at the beginning that belong to one session.
fn data_run(datagrams: &[u8], length: usize) -> usize {
    let mut index = None;
    let same = datagrams.chunks(length.max(1)).take_while(|datagram| {
        let own = receiver_index(datagram);
        kind_of(datagram) == Some(Kind::Data) && *index.get_or_insert(own) == own
    });
    same.map(<[u8]>::len).sum()
}

/// Delay of the first handshake with a peer that has `position` others before it.
fn start_delay(position: usize) -> Duration {
    let before = u32::try_from(position.saturating_sub(AT_ONCE)).unwrap_or(u32::MAX);
    START_INTERVAL.saturating_mul(before)
}

#[cfg(test)]
mod tests;
