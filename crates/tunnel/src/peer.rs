//! One peer: its path, and what the device does with its sessions.
//!
//! Handshakes, replay protection and the timers of WireGuard paper section 6 are [`Tunnel`]'s. This module adds what the device has to
//! do: roaming, packets that wait for a session, persistent keepalives that never stop, and quick repetitions of a handshake after a
//! new endpoint.
//!
//! A peer that does not answer and that no packet waits for rests: no timer of the protocol runs, and a peer that has never answered
//! has no [`Tunnel`]. It is asked again ever more rarely ([`Pace`]).

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_keys::{PeerConfig, PeerState, PresharedKey, PublicKey};
use fairlead_wireguard::{Decrypted, Identity, ReceiveKey, ReceivedInitiation, Tunnel};

use crate::udp::Path;

mod context;
mod endpoint;
mod handshakes;
mod repeats;
mod schedule;
mod send;
mod sessions;
mod traffic;

pub(crate) use context::{Context, Indexes};
use endpoint::Endpoint;
use handshakes::Handshakes;
pub(crate) use schedule::Pace;
use sessions::Sessions;
use traffic::Traffic;

/// Packets kept per peer while there is no session; the oldest make room.
const MAX_STAGED: usize = 32;

/// A peer of the device.
pub(crate) struct Peer {
    /// Time at which its timers run next, as the engine has it in its queue.
    pub(crate) due: Option<Instant>,
    key: PublicKey,
    identity: Arc<Identity>,
    preshared_key: Option<PresharedKey>,
    persistent_keepalive: Option<u16>,
    sessions: Sessions,
    handshakes: Handshakes,
    endpoint: Endpoint,
    traffic: Traffic,
    /// Packets that wait for a session.
    staged: VecDeque<Vec<u8>>,
}

impl Peer {
    /// A peer without session and path, until [`Self::configure`].
    pub(crate) fn new(key: PublicKey, identity: Arc<Identity>) -> Self {
        Self {
            due: None,
            key,
            identity,
            preshared_key: None,
            persistent_keepalive: None,
            sessions: Sessions::default(),
            handshakes: Handshakes::default(),
            endpoint: Endpoint::default(),
            traffic: Traffic::default(),
            staged: VecDeque::new(),
        }
    }

    /// Path of packets to the peer now; `None` while no endpoint is known.
    pub(crate) fn path(&self) -> Option<Path> {
        self.endpoint.path
    }

    /// Reason why the last datagram could not be sent; `None` if it could.
    pub(crate) fn send_error(&self) -> Option<&str> {
        self.endpoint.error.as_deref()
    }

    /// Whether a session or a handshake has this index of ours.
    pub(crate) fn uses(&self, index: u32) -> bool {
        self.sessions.use_index(index)
    }

    /// The state without the allowed addresses, which [`crate::allowed`] has.
    pub(crate) fn state(&self) -> PeerState {
        PeerState {
            config: PeerConfig {
                preshared_key: self.preshared_key,
                endpoint: self.endpoint.path.map(|path| path.remote),
                persistent_keepalive: self.persistent_keepalive,
                allowed_ips: Vec::new(),
            },
            last_handshake: self.handshakes.completed,
            rx_bytes: self.traffic.rx_bytes,
            tx_bytes: self.traffic.tx_bytes,
        }
    }

    /// Applies `config` without disturbing the session. A handshake that a new endpoint asks for begins after `delay`.
    pub(crate) fn configure(&mut self, config: &PeerConfig, delay: Duration, context: &mut Context<'_>) {
        if self.preshared_key != config.preshared_key {
            self.preshared_key = config.preshared_key;
            if let Some(tunnel) = &mut self.sessions.tunnel {
                tunnel.set_preshared_key(config.preshared_key.map(|key| key.0));
            }
        }
        let was_off = self.keepalive_interval().is_none();
        self.persistent_keepalive = config.persistent_keepalive;
        if was_off && self.keepalive_interval().is_some() {
            self.traffic.last_sent = None;
        }
        if let Some(path) = config.endpoint.map(Path::to)
            && self.endpoint.path.is_none_or(|present| present.remote != path.remote)
        {
            self.endpoint.configure(path);
            if self.is_live(context.now.instant) {
                let is_first = self.is_first();
                self.endpoint.roaming.configured(path.remote, is_first, context.now.instant);
            }
            self.traffic.stop_waiting();
            self.use_new_endpoint(delay, context);
        }
    }

    /// The device has a new identity: nothing more is sent in sessions of the old one. A peer that is not to be called is not.
    pub(crate) fn rekey(&mut self, identity: Arc<Identity>, delay: Duration, context: &mut Context<'_>) {
        let now = context.now.instant;
        let was_live = self.is_live(now);
        self.identity = identity;
        self.sessions.replace_identity(now);
        self.rest();
        if self.endpoint.path.is_some() && (was_live || self.keepalive_interval().is_some()) {
            self.use_new_endpoint(delay, context);
        }
    }

    /// Starts with a handshake on the path that the old process of a hand-over used.
    pub(crate) fn start_at(&mut self, path: Path, context: &mut Context<'_>) {
        self.endpoint.path = Some(path);
        self.use_new_endpoint(Duration::ZERO, context);
    }

    fn use_new_endpoint(&mut self, delay: Duration, context: &mut Context<'_>) {
        let now = context.now.instant;
        if self.is_live(now) {
            self.keep_alive(context);
        } else {
            self.handshakes.start_series(now.checked_add(delay).unwrap_or(now));
            self.repeat(context);
        }
    }

    /// Takes an initiation of this peer, and answers it the way it came.
    pub(crate) fn receive_initiation(
        &mut self,
        initiation: ReceivedInitiation,
        (path, length): (Path, usize),
        context: &mut Context<'_>,
    ) {
        let was_live = self.is_live(context.now.instant);
        let index = context.indexes.free(context.random);
        match self.tunnel().respond(initiation, index, context.now, context.random) {
            Ok(response) => {
                context.indexes.insert(index, self.key);
                self.record_received(path, false, was_live, length, context);
                self.handshakes.answered(context.now.instant);
                self.traffic.last_sent = Some(context.now.instant);
                context.out.push_message(Some(self.key), &path, &response);
            }
            Err(error) => tracing::trace!(%error, remote = %path.remote, "initiation refused"),
        }
    }

    /// Takes the answer to a handshake.
    pub(crate) fn receive_response(&mut self, response: &[u8], path: Path, context: &mut Context<'_>) {
        let was_live = self.is_live(context.now.instant);
        let Some(tunnel) = &mut self.sessions.tunnel else { return };
        match tunnel.finish(response, context.now) {
            Ok(()) => {
                self.record_received(path, false, was_live, response.len(), context);
                self.established(was_live, context);
            }
            Err(error) => tracing::trace!(%error, remote = %path.remote, "response refused"),
        }
    }

    /// Takes a cookie, which does not show where the peer is.
    pub(crate) fn receive_cookie(&mut self, reply: &[u8], context: &mut Context<'_>) {
        let Some(tunnel) = &mut self.sessions.tunnel else { return };
        match tunnel.receive_cookie(reply, context.now.instant) {
            Ok(()) => self.handshakes.receive_cookie(),
            Err(error) => tracing::trace!(%error, "cookie refused"),
        }
    }

    /// The key that decrypts data messages with this index of ours.
    pub(crate) fn receive_key(&self, index: u32, now: Instant) -> Option<Arc<ReceiveKey>> {
        self.sessions.receive_key(index, now, &self.key)
    }

    /// Takes a data message of `length` bytes that was decrypted. Returns whether it has come for the first time.
    pub(crate) fn receive_data(
        &mut self,
        decrypted: &Decrypted,
        length: usize,
        path: Path,
        context: &mut Context<'_>,
    ) -> bool {
        let was_live = self.is_live(context.now.instant);
        let Some(data) = self.sessions.receive(decrypted, path.remote, context.now) else { return false };
        self.record_received(path, data.is_overtaken, was_live, length, context);
        if data.confirms {
            self.established(was_live, context);
        }
        true
    }

    fn record_received(
        &mut self,
        path: Path,
        is_overtaken: bool,
        was_live: bool,
        length: usize,
        context: &Context<'_>,
    ) {
        self.endpoint.follow(path, is_overtaken, was_live, context.now.instant);
        self.handshakes.unanswered = 0;
        self.traffic.received(length);
    }

    /// There is a session that the peer has, too.
    fn established(&mut self, was_live: bool, context: &mut Context<'_>) {
        if !was_live && self.is_first() {
            self.endpoint.roaming.hold(context.now.instant);
        }
        self.handshakes.complete(context.now.wall);
        self.send_staged(context);
    }

    /// Whether this node has the lower key.
    fn is_first(&self) -> bool {
        self.identity.public().0 < self.key.0
    }

    /// The result of a send: counts the bytes, or keeps the error. `used` lacks the local address of `asked` when the
    /// kernel refused it: the address has been removed.
    pub(crate) fn sent(&mut self, asked: &Path, used: &Path, length: usize, failure: Option<&io::Error>) {
        if let Some(error) = failure {
            return self.endpoint.failed(&self.key, asked, length, error);
        }
        self.endpoint.sent(&self.key, asked, used);
        self.traffic.sent(length);
    }

    /// Whether there is a session that the peer has used, or answered for.
    pub(crate) fn is_live(&self, now: Instant) -> bool {
        self.sessions.are_live(now)
    }

    fn tunnel(&mut self) -> &mut Tunnel {
        let identity = &self.identity;
        let key = self.key;
        let preshared_key = self.preshared_key.map(|key| key.0);
        let new = || Box::new(Tunnel::new(Arc::clone(identity), key, preshared_key));
        self.sessions.tunnel.get_or_insert_with(new)
    }
}
