//! Everything a WireGuard device decides, without I/O: bytes and clock readings in, bytes out.

use std::collections::HashMap;
use std::io;
use std::time::{Duration, Instant};

use fairlead_api::wireguard::{DeviceChange, PeerConfig, PeerState, PrivateKey, PublicKey};
use gotatun::noise::handshake::parse_handshake_anon;
use gotatun::noise::index_table::IndexTable;
use gotatun::noise::{Tunn, TunnResult};
use gotatun::packet::{Packet, WgKind};
use gotatun::x25519;

use crate::Error;
use crate::allowed::AllowedIps;
use crate::handover::PeerSnapshot;
use crate::inner;
use crate::peer::{Now, Peer, protocol_key};
use crate::udp::Path;

mod limiter;

use limiter::HandshakeLimiter;

/// How often the timers of all peers run, and how many peers add as much again, up to a second: WireGuard's timers are of seconds.
const TICK: Duration = Duration::from_millis(250);
const PEERS_PER_TICK: usize = 500;
const MAX_TICKS: u32 = 4;

/// Bytes for the packet loop to send or write.
pub(crate) enum Output {
    /// Send to the network.
    Datagram(Datagram),
    /// Write to the TUN.
    Inner(Packet),
}

/// A datagram to be sent.
pub(crate) struct Datagram {
    /// The peer whose counters include it; `None` for cookies.
    pub(crate) peer: Option<PublicKey>,
    pub(crate) path: Path,
    pub(crate) bytes: Packet,
}

/// Our keys and the limiter of handshakes with them.
struct Identity {
    configured: PrivateKey,
    private: x25519::StaticSecret,
    public: x25519::PublicKey,
    limiter: HandshakeLimiter,
}

impl Identity {
    fn new(key: &PrivateKey, now: Now) -> Self {
        let private = x25519::StaticSecret::from(key.0);
        let public = x25519::PublicKey::from(&private);
        let limiter = HandshakeLimiter::new(&public, now.instant);
        Self { configured: key.clone(), private, public, limiter }
    }
}

/// A device without its sockets.
pub(crate) struct Engine {
    mtu: u16,
    identity: Option<Identity>,
    /// Boxed: a peer has room for eight sessions, about 10 KiB, and half of a hash map is empty.
    peers: HashMap<PublicKey, Box<Peer>>,
    allowed: AllowedIps,
    indexes: IndexTable,
    /// Which peer a session index that we gave out belongs to.
    by_index: HashMap<u32, PublicKey>,
    /// Paths of the old process to peers that are not configured here yet.
    snapshots: HashMap<PublicKey, Path>,
    messages: Vec<WgKind>,
}

impl Engine {
    pub(crate) fn new(mtu: u16) -> Self {
        Self {
            mtu,
            identity: None,
            peers: HashMap::new(),
            allowed: AllowedIps::default(),
            indexes: IndexTable::from_os_rng(),
            by_index: HashMap::new(),
            snapshots: HashMap::new(),
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
            self.peers.remove(key);
            self.allowed.replace(*key, &[]);
        }
        if let Some(key) = change.private_key.as_ref().filter(|key| Some(*key) != self.private_key()) {
            self.set_identity(key, now, out);
        }
        for (key, config) in &change.set_peers {
            self.set_peer(key, config, now, out);
        }
    }

    fn set_identity(&mut self, key: &PrivateKey, now: Now, out: &mut Vec<Output>) {
        let identity = Identity::new(key, now);
        let keys: Vec<PublicKey> = self.peers.keys().copied().collect();
        for key in keys {
            self.with_peer(key, out, |peer, messages| {
                let renew = |tunnel: &mut Tunn| {
                    let limiter = identity.limiter.per_address();
                    tunnel.set_static_private(identity.private.clone(), identity.public, limiter);
                };
                peer.rekey(renew, now, messages);
            });
        }
        self.identity = Some(identity);
    }

    fn set_peer(&mut self, key: &PublicKey, config: &PeerConfig, now: Now, out: &mut Vec<Output>) {
        if !self.peers.contains_key(key) {
            let Some(identity) = &self.identity else { return };
            let tunnel = Tunn::new(
                identity.private.clone(),
                protocol_key(key),
                config.preshared_key,
                // `Peer` sends persistent keepalives: the library stops them when a handshake fails.
                None,
                self.indexes.clone(),
                identity.limiter.per_address(),
            );
            self.peers.insert(*key, Box::new(Peer::new(tunnel, config.preshared_key)));
        }
        self.allowed.replace(*key, &config.allowed_ips);
        let snapshot = self.snapshots.remove(key);
        self.with_peer(*key, out, |peer, messages| match snapshot {
            Some(path) => {
                peer.configure(&PeerConfig { endpoint: None, ..config.clone() }, now, messages);
                peer.start_at(path, now, messages);
            }
            None => peer.configure(config, now, messages),
        });
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
        self.with_peer(owner, out, |peer, messages| peer.send(packet, now, messages));
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
        let packet = self.with_peer(sender, out, |peer, messages| {
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
                let half = parse_handshake_anon(&identity.private, &identity.public, initiation).ok()?;
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
        if self.allowed.owner(header.source) != Some(&sender) {
            tracing::trace!(source = %header.source, %sender, "the source is no allowed address of its sender");
            return;
        }
        packet.truncate(header.length);
        out.push(Output::Inner(packet));
    }

    /// Runs the timers that are due, and returns when to call again.
    pub(crate) fn tick(&mut self, now: Now, out: &mut Vec<Output>) -> Instant {
        if let Some(identity) = &mut self.identity {
            identity.limiter.tick(now.instant);
        }
        let (indexes, peers) = (&self.indexes, &self.peers);
        self.by_index.retain(|index, key| indexes.in_use(*index) && peers.contains_key(key));

        let ticks = u32::try_from(self.peers.len() / PEERS_PER_TICK).unwrap_or(MAX_TICKS).clamp(1, MAX_TICKS);
        let mut next = now.instant.checked_add(TICK.saturating_mul(ticks)).unwrap_or(now.instant);
        let keys: Vec<PublicKey> = self.peers.keys().copied().collect();
        for key in keys {
            let due = self.with_peer(key, out, |peer, messages| peer.tick(now, messages));
            next = due.flatten().map_or(next, |due| next.min(due));
        }
        next
    }

    /// The result of sending a datagram; `used` is the path it took.
    pub(crate) fn sent(&mut self, datagram: &Datagram, used: &Path, failure: Option<&io::Error>) {
        if let Some(peer) = datagram.peer.as_ref().and_then(|key| self.peers.get_mut(key)) {
            peer.sent(&datagram.path, used, datagram.bytes.len(), failure);
        }
    }

    /// Calls `act` with a peer, then addresses the messages it emitted.
    fn with_peer<T>(
        &mut self,
        key: PublicKey,
        out: &mut Vec<Output>,
        act: impl FnOnce(&mut Peer, &mut Vec<WgKind>) -> T,
    ) -> Option<T> {
        let peer = self.peers.get_mut(&key)?;
        let result = act(peer, &mut self.messages);
        let path = peer.path();
        for message in self.messages.drain(..) {
            match &message {
                WgKind::HandshakeInit(initiation) => self.by_index.insert(initiation.sender_idx.get(), key),
                WgKind::HandshakeResp(response) => self.by_index.insert(response.sender_idx.get(), key),
                WgKind::CookieReply(_) | WgKind::Data(_) => None,
            };
            if let Some(path) = path {
                out.push(Output::Datagram(Datagram { peer: Some(key), path, bytes: message.into() }));
            }
        }
        Some(result)
    }
}

#[cfg(test)]
mod tests;
