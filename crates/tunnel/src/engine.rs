//! Everything a WireGuard device decides, without I/O: bytes and clock readings in, bytes out.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_api::wireguard::{DeviceChange, PeerConfig, PeerState, PrivateKey, PublicKey};
use gotatun::noise::TunnResult;
use gotatun::noise::handshake::parse_handshake_anon;
use gotatun::noise::index_table::IndexTable;
use gotatun::packet::{Packet, WgKind};
use gotatun::x25519;
use ipnet::IpNet;

use crate::Error;
use crate::allowed::{AcceptedIps, AllowedIps};
use crate::handover::PeerSnapshot;
use crate::inner;
use crate::peer::{Now, Pace, Peer, Protocol, TICK};
use crate::udp::Path;

mod both_ways;
mod limiter;

use both_ways::BothWays;
pub(crate) use both_ways::Copies;
use limiter::HandshakeLimiter;

/// How many peers lengthen the tick of those in use by [`TICK`], up to a second.
const PEERS_PER_TICK: usize = 500;
const MAX_TICKS: u32 = 4;
const MIN_INDEXES: usize = 64;
/// Peers that do not answer are asked so often that together they cost this much time for each: 25 handshakes a second, whatever
/// their number.
const PAUSE_PER_PEER: Duration = Duration::from_millis(40);
/// Peers of one change that are asked at once, and how the others follow: thousands at once would take the memory of thousands of
/// handshakes.
const AT_ONCE: usize = 128;
const START_INTERVAL: Duration = Duration::from_millis(5);

/// Bytes for the packet loop to send or write.
pub(crate) enum Output {
    /// Send to the network.
    Datagram(Datagram),
    /// Write to the TUN.
    Inner(Packet),
}

/// A datagram to be sent.
pub(crate) struct Datagram {
    /// The peer whose counters include it; `None` for cookies and copies.
    pub(crate) peer: Option<PublicKey>,
    pub(crate) path: Path,
    pub(crate) bytes: Packet,
}

/// Our keys and the limiter of handshakes with them.
struct Identity {
    configured: PrivateKey,
    protocol: Arc<Protocol>,
    limiter: HandshakeLimiter,
}

impl Identity {
    fn new(key: &PrivateKey, indexes: IndexTable, now: Now) -> Self {
        let private = x25519::StaticSecret::from(key.0);
        let public = x25519::PublicKey::from(&private);
        let limiter = HandshakeLimiter::new(&public, now.instant);
        let protocol = Arc::new(Protocol { private, public, indexes, limiter: limiter.per_address() });
        Self { configured: key.clone(), protocol, limiter }
    }
}

/// A device without its sockets.
pub(crate) struct Engine {
    mtu: u16,
    identity: Option<Identity>,
    /// Boxed: half of a hash map is empty.
    peers: HashMap<PublicKey, Box<Peer>>,
    /// When the timers of peers are due; the others have none.
    timers: BTreeSet<(Instant, PublicKey)>,
    allowed: AllowedIps,
    accepted: AcceptedIps,
    indexes: IndexTable,
    /// Which peer a session index that we gave out belongs to.
    by_index: HashMap<u32, PublicKey>,
    /// How many of them there may be before those that are not in use any more are removed.
    max_indexes: usize,
    /// Paths of the old process to peers that are not configured here yet.
    snapshots: HashMap<PublicKey, Path>,
    /// Peers that have not answered packets lately; [`Self::take_unanswered`] empties it.
    unanswered: Vec<PublicKey>,
    both_ways: BothWays,
    messages: Vec<WgKind>,
}

impl Engine {
    pub(crate) fn new(mtu: u16) -> Self {
        Self {
            mtu,
            identity: None,
            peers: HashMap::new(),
            timers: BTreeSet::new(),
            allowed: AllowedIps::default(),
            accepted: AcceptedIps::default(),
            indexes: IndexTable::from_os_rng(),
            by_index: HashMap::new(),
            max_indexes: 0,
            snapshots: HashMap::new(),
            unanswered: Vec::new(),
            both_ways: BothWays::new(),
            messages: Vec::new(),
        }
    }

    /// Our private key, if one is set.
    pub(crate) fn private_key(&self) -> Option<&PrivateKey> {
        self.identity.as_ref().map(|identity| &identity.configured)
    }

    /// All peers with their allowed addresses.
    pub(crate) fn peers(&self) -> impl Iterator<Item = (PublicKey, PeerState)> {
        self.peers.iter().map(|(key, peer)| {
            let mut state = peer.state();
            state.config.allowed_ips = self.allowed.of(key);
            (*key, state)
        })
    }

    /// Why the last datagram to a peer could not be sent, if so.
    pub(crate) fn send_error(&self, key: &PublicKey) -> Option<&str> {
        self.peers.get(key)?.send_error()
    }

    /// The peers with a session, for the process that takes over.
    pub(crate) fn peer_snapshots(&self) -> Vec<PeerSnapshot> {
        let live = self.peers.iter().filter(|(_, peer)| peer.is_live());
        live.filter_map(|(key, peer)| Some(PeerSnapshot { key: *key, path: peer.path()? })).collect()
    }

    /// Sets the paths of the old process. A peer that is configured here starts with that path, whatever endpoint is
    /// configured first.
    pub(crate) fn set_peer_snapshots(&mut self, snapshots: &[PeerSnapshot]) {
        self.snapshots = snapshots.iter().map(|peer| (peer.key, peer.path)).collect();
    }

    /// Whether the peer is configured and has no session yet.
    pub(crate) fn awaits_session(&self, key: &PublicKey) -> bool {
        self.peers.get(key).is_some_and(|peer| !peer.is_live())
    }

    /// Whether a datagram belongs to a session, or a handshake, of the other process of a hand-over.
    pub(crate) fn belongs_to_other_process(&self, datagram: &[u8]) -> bool {
        // The receiver's index, by type of message (WireGuard paper 5.4.2 to 5.4.7).
        let index = match datagram.first() {
            Some(2) => datagram.get(8..12),
            Some(3 | 4) => datagram.get(4..8),
            _ => None,
        };
        let index = index.and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes);
        index.is_some_and(|index| !self.by_index.contains_key(&index))
    }

    /// Whether `change` can be applied; nothing is applied in part.
    pub(crate) fn check(&self, change: &DeviceChange) -> Result<(), Error> {
        let Some(key) = change.private_key.as_ref().or(self.private_key()) else {
            return if change.set_peers.is_empty() { Ok(()) } else { Err(Error::NoPrivateKey) };
        };
        let own = PublicKey(*x25519::PublicKey::from(&x25519::StaticSecret::from(key.0)).as_bytes());
        let stays = self.peers.contains_key(&own) && !change.remove_peers.contains(&own);
        if stays || change.set_peers.contains_key(&own) {
            return Err(Error::OwnKey(own));
        }
        Ok(())
    }

    /// Applies a checked change.
    pub(crate) fn apply(&mut self, change: &DeviceChange, now: Now, out: &mut Vec<Output>) {
        for key in &change.remove_peers {
            if let Some(due) = self.peers.remove(key).and_then(|peer| peer.due) {
                self.timers.remove(&(due, *key));
            }
            self.max_indexes = 0;
            self.allowed.replace(*key, &[]);
        }
        if let Some(key) = change.private_key.as_ref().filter(|key| Some(*key) != self.private_key()) {
            self.set_identity(key, now, out);
        }
        for (position, (key, config)) in change.set_peers.iter().enumerate() {
            self.set_peer(key, config, start_delay(position), now, out);
        }
        for key in &change.handshakes {
            self.with_peer(*key, now, out, |peer, messages| peer.start_handshake(now, messages));
        }
    }

    fn set_identity(&mut self, key: &PrivateKey, now: Now, out: &mut Vec<Output>) {
        let identity = Identity::new(key, self.indexes.clone(), now);
        let keys: Vec<PublicKey> = self.peers.keys().copied().collect();
        for (position, key) in keys.into_iter().enumerate() {
            self.with_peer(key, now, out, |peer, messages| {
                peer.rekey(Arc::clone(&identity.protocol), start_delay(position), now, messages);
            });
        }
        self.identity = Some(identity);
    }

    fn set_peer(
        &mut self,
        key: &PublicKey,
        config: &PeerConfig,
        delay: Duration,
        now: Now,
        out: &mut Vec<Output>,
    ) {
        let Some(identity) = &self.identity else { return };
        let protocol = &identity.protocol;
        self.peers.entry(*key).or_insert_with(|| Box::new(Peer::new(*key, Arc::clone(protocol))));
        self.allowed.replace(*key, &config.allowed_ips);
        let snapshot = self.snapshots.remove(key);
        self.with_peer(*key, now, out, |peer, messages| match snapshot {
            Some(path) => {
                peer.configure(&PeerConfig { endpoint: None, ..config.clone() }, delay, now, messages);
                peer.start_at(path, now, messages);
            }
            None => peer.configure(config, delay, now, messages),
        });
    }

    /// Replaces what peers may send from besides what they are sent for.
    pub(crate) fn accept(&mut self, prefixes: &BTreeMap<PublicKey, Vec<IpNet>>) {
        self.accepted = AcceptedIps::new(prefixes);
    }

    /// Takes a packet from the TUN. Without an owner of its destination it is dropped.
    pub(crate) fn send_packet(&mut self, packet: &[u8], now: Now, out: &mut Vec<Output>) {
        let Some(header) = inner::parse(packet) else { return };
        let Some(owner) = self.allowed.owner(header.destination).copied() else {
            tracing::trace!(destination = %header.destination, "no peer has this address");
            return;
        };
        let padded = inner::padded_length(packet.len(), self.mtu);
        let mut packet = Packet::copy_from(packet);
        packet.buf_mut().resize(padded, 0);
        self.with_peer(owner, now, out, |peer, messages| peer.send(packet, now, messages));
    }

    /// Takes a datagram from the network: any bytes from any sender.
    pub(crate) fn receive_datagram(&mut self, datagram: &[u8], path: Path, now: Now, out: &mut Vec<Output>) {
        let Some(identity) = &mut self.identity else { return };
        let message = match identity.limiter.verify(path.remote, datagram) {
            Ok(message) => message,
            Err(TunnResult::WriteToNetwork(cookie)) => {
                out.push(Output::Datagram(Datagram { peer: None, path, bytes: cookie.into() }));
                return;
            }
            Err(_) => return,
        };
        let Some(sender) = self.sender(&message) else { return };
        let packet = self.with_peer(sender, now, out, |peer, messages| {
            peer.receive(message, path, datagram.len(), now, messages)
        });
        if let Some(packet) = packet.flatten() {
            self.deliver(sender, packet, out);
        }
    }

    fn sender(&self, message: &WgKind) -> Option<PublicKey> {
        let index = match message {
            WgKind::HandshakeInit(initiation) => {
                let identity = self.identity.as_ref()?;
                let Protocol { private, public, .. } = &*identity.protocol;
                let half = parse_handshake_anon(private, public, initiation).ok()?;
                return Some(PublicKey(half.peer_static_public));
            }
            WgKind::HandshakeResp(response) => response.receiver_idx.get(),
            WgKind::CookieReply(cookie) => cookie.receiver_idx.get(),
            WgKind::Data(data) => data.header.receiver_idx.get(),
        };
        self.by_index.get(&index).copied()
    }

    /// Hands a decrypted packet to the TUN if its sender may use its source address.
    fn deliver(&self, sender: PublicKey, mut packet: Packet, out: &mut Vec<Output>) {
        if packet.is_empty() {
            return;
        }
        let Some(header) = inner::parse(&packet) else { return };
        let is_owner = self.allowed.owner(header.source) == Some(&sender);
        if !(is_owner || self.accepted.contains(&sender, header.source)) {
            tracing::trace!(source = %header.source, %sender, "the source is no allowed address of its sender");
            return;
        }
        packet.truncate(header.length);
        out.push(Output::Inner(packet));
    }

    /// When to call [`Self::tick`]; `None` if only a message or a change brings work.
    pub(crate) fn poll_timeout(&self) -> Option<Instant> {
        self.timers.first().map(|(due, _)| *due)
    }

    /// Runs the timers that are due, and no others.
    pub(crate) fn tick(&mut self, now: Now, out: &mut Vec<Output>) {
        if let Some(identity) = &mut self.identity {
            identity.limiter.tick(now.instant);
        }
        if self.by_index.len() >= self.max_indexes {
            let (indexes, peers) = (&self.indexes, &self.peers);
            self.by_index.retain(|index, key| indexes.in_use(*index) && peers.contains_key(key));
            // So that the cost for each index is constant.
            self.max_indexes = self.by_index.len().saturating_mul(2).max(MIN_INDEXES);
        }
        let pace = self.pace();
        let mut due = Vec::new();
        while self.timers.first().is_some_and(|(at, _)| *at <= now.instant) {
            due.extend(self.timers.pop_first().map(|(_, key)| key));
        }
        for key in due {
            let is_unanswered = self.with_peer(key, now, out, |peer, messages| {
                peer.due = None;
                peer.tick(now, &pace, messages);
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

    /// What went both ways since the last call.
    pub(crate) fn take_copies(&mut self) -> Copies {
        self.both_ways.take_copies()
    }

    fn pace(&self) -> Pace {
        let ticks = u32::try_from(self.peers.len() / PEERS_PER_TICK).unwrap_or(MAX_TICKS).clamp(1, MAX_TICKS);
        let peers = u32::try_from(self.peers.len()).unwrap_or(u32::MAX);
        Pace { tick: TICK.saturating_mul(ticks), max_pause: PAUSE_PER_PEER.saturating_mul(peers) }
    }

    /// The result of sending a datagram; `used` is the path it took.
    pub(crate) fn sent(&mut self, datagram: &Datagram, used: &Path, failure: Option<&io::Error>) {
        if let Some(peer) = datagram.peer.as_ref().and_then(|key| self.peers.get_mut(key)) {
            peer.sent(&datagram.path, used, datagram.bytes.len(), failure);
        }
    }

    /// Calls `act` with a peer, sets its timer, and addresses the messages it emitted.
    fn with_peer<T>(
        &mut self,
        key: PublicKey,
        now: Now,
        out: &mut Vec<Output>,
        act: impl FnOnce(&mut Peer, &mut Vec<WgKind>) -> T,
    ) -> Option<T> {
        let pace = self.pace();
        let peer = self.peers.get_mut(&key)?;
        let result = act(peer, &mut self.messages);
        // Nothing is due sooner than the next tick, unless the peer has just been configured.
        let is_soon = |due| due <= now.instant + pace.tick;
        if peer.due.is_none_or(|due| !is_soon(due))
            && let Some(next) = peer.poll_timeout(now.instant, &pace)
            && peer.due.is_none_or(|due| next < due)
        {
            if let Some(due) = peer.due.replace(next) {
                self.timers.remove(&(due, key));
            }
            self.timers.insert((next, key));
        }
        for message in self.messages.drain(..) {
            match &message {
                WgKind::HandshakeInit(initiation) => self.by_index.insert(initiation.sender_idx.get(), key),
                WgKind::HandshakeResp(response) => self.by_index.insert(response.sender_idx.get(), key),
                WgKind::CookieReply(_) | WgKind::Data(_) => None,
            };
            if let Some(path) = peer.path_of(&message) {
                let is_data = matches!(message, WgKind::Data(_));
                let bytes = message.into();
                let copy = is_data.then(|| self.both_ways.copy(&key, &path, &bytes, now.instant)).flatten();
                out.push(Output::Datagram(Datagram { peer: Some(key), path, bytes }));
                out.extend(copy.map(Output::Datagram));
            }
        }
        Some(result)
    }
}

/// How long the first handshake with a new peer waits for those before it.
fn start_delay(position: usize) -> Duration {
    let before = u32::try_from(position.saturating_sub(AT_ONCE)).unwrap_or(u32::MAX);
    START_INTERVAL.saturating_mul(before)
}

#[cfg(test)]
mod tests;
