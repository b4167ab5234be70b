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
use std::time::{Duration, Instant, SystemTime};

use fairlead_keys::{PeerConfig, PeerState, PublicKey};
use fairlead_wireguard::{Decrypted, Identity, ReceiveKey, ReceivedInitiation, Tunnel};

use crate::roaming::Roaming;
use crate::udp::Path;

mod context;
mod repeats;
mod schedule;
mod send;

pub(crate) use context::{Context, Indexes};
use repeats::Repeats;
pub(crate) use schedule::Pace;

/// Packets kept per peer while there is no session; the oldest make room.
const MAX_STAGED: usize = 32;
/// How long an answered handshake may take to be confirmed before we start one of our own.
const CONFIRMATION_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the last session of an identity that was replaced still takes what the peer sends, which follows after a moment.
const PREVIOUS_IDENTITY: Duration = Duration::from_secs(15);

/// The session with the identity that was replaced: the kernel's WireGuard takes what arrives for it, too.
struct Previous {
    tunnel: Box<Tunnel>,
    /// Our index of it.
    index: u32,
    until: Instant,
}

/// A peer of the device.
pub(crate) struct Peer {
    /// When its timers run next, as the engine has it in its queue.
    pub(crate) due: Option<Instant>,
    key: PublicKey,
    identity: Arc<Identity>,
    /// `None` while there is neither a session nor a handshake nor anything to remember.
    tunnel: Option<Box<Tunnel>>,
    previous: Option<Box<Previous>>,
    /// No handshake can be begun: its key is a point of low order (RFC 7748, section 6.1), with which no secret is made.
    has_unusable_key: bool,
    /// A cookie has come, and no initiation was sent with it yet.
    has_new_cookie: bool,
    /// When a handshake was last started.
    attempted: Option<Instant>,
    /// When a handshake of the peer was last answered that it has not confirmed yet.
    answered: Option<Instant>,
    /// Handshakes in a row that were started only for a keepalive and not answered.
    unanswered: u32,
    /// When an inner packet last went either way.
    last_data: Option<Instant>,
    /// When the first inner packet was sent since anything came from the peer, or since [`Self::take_unanswered`] said so.
    waiting_since: Option<Instant>,
    path: Option<Path>,
    roaming: Roaming,
    preshared_key: Option<[u8; 32]>,
    persistent_keepalive: Option<u16>,
    /// Our index of the session of the newest data message, and its counter.
    newest: Option<(u32, u64)>,
    staged: VecDeque<Vec<u8>>,
    repeats: Option<Repeats>,
    /// When an authenticated packet was last sent; `None` asks for a keepalive now. What is received does not count, as it does
    /// in the kernel: an inbound packet need not refresh the mapping of a NAT (RFC 4787, 4.3), and of two nodes that send
    /// keepalives one would never be heard.
    last_sent: Option<Instant>,
    last_handshake: Option<SystemTime>,
    rx_bytes: u64,
    tx_bytes: u64,
    send_error: Option<String>,
}

impl Peer {
    /// A peer without session and path, until [`Self::configure`].
    pub(crate) fn new(key: PublicKey, identity: Arc<Identity>) -> Self {
        Self {
            due: None,
            key,
            identity,
            tunnel: None,
            previous: None,
            has_unusable_key: false,
            has_new_cookie: false,
            attempted: None,
            answered: None,
            unanswered: 0,
            last_data: None,
            waiting_since: None,
            path: None,
            roaming: Roaming::default(),
            preshared_key: None,
            persistent_keepalive: None,
            newest: None,
            staged: VecDeque::new(),
            repeats: None,
            last_sent: None,
            last_handshake: None,
            rx_bytes: 0,
            tx_bytes: 0,
            send_error: None,
        }
    }

    /// Where packets go now.
    pub(crate) fn path(&self) -> Option<Path> {
        self.path
    }

    /// Why the last datagram could not be sent, if so.
    pub(crate) fn send_error(&self) -> Option<&str> {
        self.send_error.as_deref()
    }

    /// Whether a session or a handshake has this index of ours.
    pub(crate) fn uses(&self, index: u32) -> bool {
        let previous = self.previous.as_deref().map(|previous| &previous.tunnel);
        self.tunnel.iter().chain(previous).any(|tunnel| tunnel.indexes().any(|used| used == index))
    }

    /// The state without the allowed addresses, which [`crate::allowed`] has.
    pub(crate) fn state(&self) -> PeerState {
        PeerState {
            config: PeerConfig {
                preshared_key: self.preshared_key,
                endpoint: self.path.map(|path| path.remote),
                persistent_keepalive: self.persistent_keepalive,
                allowed_ips: Vec::new(),
            },
            last_handshake: self.last_handshake,
            rx_bytes: self.rx_bytes,
            tx_bytes: self.tx_bytes,
        }
    }

    /// Applies `config` without disturbing the session. A handshake that a new endpoint asks for begins after `delay`.
    pub(crate) fn configure(&mut self, config: &PeerConfig, delay: Duration, context: &mut Context<'_>) {
        if self.preshared_key != config.preshared_key {
            self.preshared_key = config.preshared_key;
            if let Some(tunnel) = &mut self.tunnel {
                tunnel.set_preshared_key(config.preshared_key);
            }
        }
        let was_off = self.keepalive_interval().is_none();
        self.persistent_keepalive = config.persistent_keepalive;
        if was_off && self.keepalive_interval().is_some() {
            self.last_sent = None;
        }
        if let Some(path) = config.endpoint.map(Path::to)
            && self.path.is_none_or(|present| present.remote != path.remote)
        {
            self.path = Some(path);
            self.roaming = Roaming::default();
            if self.is_live(context.now.instant) {
                self.roaming.configured(path.remote, self.is_first(), context.now.instant);
            }
            self.waiting_since = None;
            self.send_error = None;
            self.use_new_endpoint(delay, context);
        }
    }

    /// The device has a new identity: nothing more is sent in sessions of the old one. A peer that is not to be called is not.
    pub(crate) fn rekey(&mut self, identity: Arc<Identity>, delay: Duration, context: &mut Context<'_>) {
        let now = context.now.instant;
        let was_live = self.is_live(now);
        self.identity = identity;
        let until = now.checked_add(PREVIOUS_IDENTITY).unwrap_or(now);
        let last = self.newest.take().filter(|_| was_live);
        // Time stamps of handshakes with the old identity need not be remembered.
        let tunnel = self.tunnel.take();
        self.previous =
            last.zip(tunnel).map(|((index, _), tunnel)| Box::new(Previous { tunnel, index, until }));
        self.rest();
        if self.path.is_some() && (was_live || self.keepalive_interval().is_some()) {
            self.use_new_endpoint(delay, context);
        }
    }

    /// Starts with a handshake on the path that the old process of a hand-over used.
    pub(crate) fn start_at(&mut self, path: Path, context: &mut Context<'_>) {
        self.path = Some(path);
        self.use_new_endpoint(Duration::ZERO, context);
    }

    fn use_new_endpoint(&mut self, delay: Duration, context: &mut Context<'_>) {
        let now = context.now.instant;
        if self.is_live(now) {
            self.keep_alive(context);
        } else {
            self.unanswered = 0;
            let started = now.checked_add(delay).unwrap_or(now);
            self.repeats = Some(Repeats::new(started));
            // The first keepalive is no other handshake.
            self.attempted = Some(started);
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
                self.answered = Some(context.now.instant);
                self.last_sent = Some(context.now.instant);
                context.out.push_message(Some(self.key), &path, &response);
            }
            Err(error) => tracing::trace!(%error, remote = %path.remote, "initiation refused"),
        }
    }

    /// Takes the answer to a handshake.
    pub(crate) fn receive_response(&mut self, response: &[u8], path: Path, context: &mut Context<'_>) {
        let was_live = self.is_live(context.now.instant);
        let Some(tunnel) = &mut self.tunnel else { return };
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
        let Some(tunnel) = &mut self.tunnel else { return };
        match tunnel.receive_cookie(reply, context.now.instant) {
            Ok(()) => {
                self.has_new_cookie = true;
                self.repeats.iter_mut().for_each(Repeats::forget_last);
            }
            Err(error) => tracing::trace!(%error, "cookie refused"),
        }
    }

    /// The key that decrypts data messages with this index of ours.
    pub(crate) fn receive_key(&self, index: u32, now: Instant) -> Option<Arc<ReceiveKey>> {
        let previous = self.previous.as_deref().filter(|it| it.index == index && it.until > now);
        let tunnel = previous.map(|previous| &previous.tunnel).or(self.tunnel.as_ref())?;
        let key = tunnel.receive_key(index, now);
        key.inspect_err(|error| tracing::trace!(%error, peer = %self.key, "messages dropped")).ok().cloned()
    }

    /// Takes a data message of `length` bytes that was decrypted. Returns whether it has come for the first time.
    pub(crate) fn receive_data(
        &mut self,
        decrypted: &Decrypted,
        length: usize,
        path: Path,
        context: &mut Context<'_>,
    ) -> bool {
        let (now, index) = (context.now, decrypted.index());
        let was_live = self.is_live(now.instant);
        self.previous.take_if(|previous| previous.until <= now.instant);
        let previous = self.previous.as_deref_mut().filter(|previous| index == previous.index);
        let is_previous = previous.is_some();
        let tunnel = previous.map(|previous| &mut previous.tunnel).or(self.tunnel.as_mut());
        let Some(tunnel) = tunnel else { return false };
        let is_first = match tunnel.receive(decrypted, now) {
            Ok(is_first) => is_first,
            Err(error) => {
                tracing::trace!(%error, remote = %path.remote, "message dropped");
                return false;
            }
        };
        let is_late = !is_previous && self.is_overtaken(index, decrypted.counter());
        self.record_received(path, is_late, was_live, length, context);
        if is_first && !is_previous {
            self.established(was_live, context);
        }
        if !decrypted.inner().is_empty() {
            self.last_data = Some(now.instant);
        }
        true
    }

    /// Whether a data message was sent before one that has arrived: by a way that the peer has left since. The highest counter of a
    /// session decides, as in QUIC (RFC 9000, 9.3).
    fn is_overtaken(&mut self, index: u32, counter: u64) -> bool {
        let is_overtaken = self.newest.is_some_and(|(of, newest)| of == index && counter < newest);
        if !is_overtaken {
            self.newest = Some((index, counter));
        }
        is_overtaken
    }

    /// Only an authenticated message moves the endpoint, as [`Roaming`] decides.
    fn record_received(
        &mut self,
        path: Path,
        is_overtaken: bool,
        was_live: bool,
        length: usize,
        context: &Context<'_>,
    ) {
        let present = self.path.map(|present| present.remote);
        let counts = !is_overtaken || present == Some(path.remote);
        // Without a session there are no packets under way that could make both peers swap their paths.
        if counts && (!was_live || self.roaming.moves(present, path.remote, context.now.instant)) {
            self.path = Some(path);
        }
        self.waiting_since = None;
        self.unanswered = 0;
        self.rx_bytes = self.rx_bytes.saturating_add(u64::try_from(length).unwrap_or(u64::MAX));
    }

    /// There is a session that the peer has, too.
    fn established(&mut self, was_live: bool, context: &mut Context<'_>) {
        if !was_live && self.is_first() {
            self.roaming.hold(context.now.instant);
        }
        self.answered = None;
        self.last_handshake = Some(context.now.wall);
        self.repeats = None;
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
            if self.send_error.is_none() {
                tracing::debug!(peer = %self.key, remote = %asked.remote, %error, "this host does not send to a peer");
            }
            self.send_error = Some(format!("sending {length} bytes to {}: {error}", asked.remote));
            return;
        }
        if self.send_error.take().is_some() {
            tracing::debug!(peer = %self.key, remote = %asked.remote, "this host sends to a peer again");
        }
        self.tx_bytes = self.tx_bytes.saturating_add(u64::try_from(length).unwrap_or(u64::MAX));
        if used.local != asked.local
            && let Some(path) = self.path.as_mut().filter(|path| path.local == asked.local)
        {
            path.local = None;
        }
    }

    /// Whether there is a session that the peer has used, or answered for.
    pub(crate) fn is_live(&self, now: Instant) -> bool {
        self.tunnel.as_ref().is_some_and(|tunnel| tunnel.is_established(now))
    }

    fn tunnel(&mut self) -> &mut Tunnel {
        let (identity, key, preshared_key) = (&self.identity, self.key, self.preshared_key);
        self.tunnel.get_or_insert_with(|| Box::new(Tunnel::new(Arc::clone(identity), key, preshared_key)))
    }
}
