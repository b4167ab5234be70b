//! Everything a WireGuard device decides, without I/O: bytes and clock readings in, bytes out.

use std::collections::HashMap;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_api::wireguard::{DeviceChange, PeerConfig, PeerState, PrivateKey, PublicKey};
use gotatun::noise::handshake::parse_handshake_anon;
use gotatun::noise::index_table::IndexTable;
use gotatun::noise::rate_limiter::RateLimiter;
use gotatun::noise::{Tunn, TunnResult};
use gotatun::packet::{Packet, WgKind};
use gotatun::x25519;

use crate::Error;
use crate::allowed::AllowedIps;
use crate::handover::Acquaintance;
use crate::inner;
use crate::peer::{Now, Peer, protocol_key};
use crate::udp::Path;

/// How often the timers of all peers are looked at.
const TICK: Duration = Duration::from_millis(250);
/// Handshake messages of one address per second before it has to prove itself with a cookie.
const HANDSHAKES_PER_ADDRESS: u64 = 100;
/// Handshake messages of all addresses per second before everybody has to.
const HANDSHAKES_IN_ALL: u32 = 1_000;

/// Something to be done with bytes.
pub(crate) enum Output {
    /// Send to the network.
    Datagram(Datagram),
    /// Write to the TUN.
    Inner(Packet),
}

/// A datagram on its way out.
pub(crate) struct Datagram {
    /// Whom it is accounted to; nobody for cookies.
    pub(crate) peer: Option<PublicKey>,
    pub(crate) path: Path,
    pub(crate) bytes: Packet,
}

/// Our keys and what protects them from floods.
struct Identity {
    configured: PrivateKey,
    private: x25519::StaticSecret,
    public: x25519::PublicKey,
    gate: Gate,
}

impl Identity {
    fn new(key: &PrivateKey, now: Now) -> Self {
        let private = x25519::StaticSecret::from(key.0);
        let public = x25519::PublicKey::from(&private);
        Self { configured: key.clone(), private, public, gate: Gate::new(&public, now.instant) }
    }
}

/// Checks message formats and MACs; under load asks for cookies (WireGuard paper 5.3).
struct Gate {
    usual: Arc<RateLimiter>,
    /// Takes nobody without a cookie: for floods from many (or forged) addresses.
    strict: RateLimiter,
    second: Instant,
    handshakes: u32,
}

impl Gate {
    fn new(public: &x25519::PublicKey, now: Instant) -> Self {
        Self {
            usual: Arc::new(RateLimiter::new(public, HANDSHAKES_PER_ADDRESS)),
            strict: RateLimiter::new(public, 0),
            second: now,
            handshakes: 0,
        }
    }

    fn admit(&mut self, from: SocketAddr, datagram: &[u8]) -> Result<WgKind, TunnResult> {
        // Types 1 and 2 cost a Diffie-Hellman computation.
        if matches!(datagram.first(), Some(1 | 2)) {
            self.handshakes = self.handshakes.saturating_add(1);
        }
        let limiter = if self.handshakes > HANDSHAKES_IN_ALL { &self.strict } else { &*self.usual };
        limiter.verify_packet(from, Packet::copy_from(datagram))
    }

    fn tick(&mut self, now: Instant) {
        self.usual.try_reset_count();
        self.strict.try_reset_count();
        if now.saturating_duration_since(self.second) >= Duration::from_secs(1) {
            self.second = now;
            self.handshakes = 0;
        }
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
    /// Where a predecessor has peers that are not configured here yet.
    inherited: HashMap<PublicKey, Path>,
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
            inherited: HashMap::new(),
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

    /// Peers with a session, for a successor.
    pub(crate) fn acquaintances(&self) -> Vec<Acquaintance> {
        let live = self.peers.iter().filter(|(_, peer)| peer.is_live());
        live.filter_map(|(key, peer)| Some(Acquaintance { key: *key, path: peer.path()? })).collect()
    }

    /// Remembers where a predecessor has its peers. When they are configured here, that is where they are, whatever
    /// endpoint is configured first.
    pub(crate) fn inherit(&mut self, acquaintances: &[Acquaintance]) {
        self.inherited = acquaintances.iter().map(|peer| (peer.key, peer.path)).collect();
    }

    /// Whether there is a session with this peer, or none is wanted.
    pub(crate) fn is_settled(&self, key: &PublicKey) -> bool {
        self.peers.get(key).is_none_or(|peer| peer.is_live())
    }

    /// Whether a datagram is for a session, or a handshake, that was not begun here.
    pub(crate) fn is_of_another(&self, datagram: &[u8]) -> bool {
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
                    let gate = Arc::clone(&identity.gate.usual);
                    tunnel.set_static_private(identity.private.clone(), identity.public, gate);
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
                // Persistent keepalives are the peer's own work: the library stops them when a handshake fails.
                None,
                self.indexes.clone(),
                Arc::clone(&identity.gate.usual),
            );
            self.peers.insert(*key, Box::new(Peer::new(tunnel, config.preshared_key)));
        }
        self.allowed.replace(*key, &config.allowed_ips);
        let inherited = self.inherited.remove(key);
        self.with_peer(*key, out, |peer, messages| match inherited {
            Some(path) => {
                peer.configure(&PeerConfig { endpoint: None, ..config.clone() }, now, messages);
                peer.meet(path, now, messages);
            }
            None => peer.configure(config, now, messages),
        });
    }

    /// Takes a packet from the TUN. Without an owner of its destination it is dropped.
    pub(crate) fn outgoing(&mut self, packet: &[u8], now: Now, out: &mut Vec<Output>) {
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

    /// Takes a datagram from the network: any bytes from anybody.
    pub(crate) fn incoming(&mut self, datagram: &[u8], path: Path, now: Now, out: &mut Vec<Output>) {
        let Some(identity) = &mut self.identity else { return };
        let message = match identity.gate.admit(path.remote, datagram) {
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
            tracing::trace!(source = %header.source, %sender, "not an allowed address of its sender");
            return;
        }
        packet.truncate(header.length);
        out.push(Output::Inner(packet));
    }

    /// Does what is due, and says when to come again.
    pub(crate) fn tick(&mut self, now: Now, out: &mut Vec<Output>) -> Instant {
        if let Some(identity) = &mut self.identity {
            identity.gate.tick(now.instant);
        }
        let (indexes, peers) = (&self.indexes, &self.peers);
        self.by_index.retain(|index, key| indexes.in_use(*index) && peers.contains_key(key));

        let mut next = now.instant.checked_add(TICK).unwrap_or(now.instant);
        let keys: Vec<PublicKey> = self.peers.keys().copied().collect();
        for key in keys {
            let wish = self.with_peer(key, out, |peer, messages| peer.tick(now, messages));
            next = wish.flatten().map_or(next, |wish| next.min(wish));
        }
        next
    }

    /// What became of a datagram: the path it was to take, the one it took.
    pub(crate) fn sent(&mut self, datagram: &Datagram, used: &Path, failure: Option<&io::Error>) {
        if let Some(peer) = datagram.peer.as_ref().and_then(|key| self.peers.get_mut(key)) {
            peer.sent(&datagram.path, used, datagram.bytes.len(), failure);
        }
    }

    /// Lets a peer act, then addresses the messages it wants sent.
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
