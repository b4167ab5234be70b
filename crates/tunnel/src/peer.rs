//! One peer: its sessions, its path, and its timers.
//!
//! Handshakes, replay protection and the timers of WireGuard paper section 6 are `gotatun`'s [`Tunn`]. This module
//! adds what the device has to do: roaming, packets that wait for a session, persistent keepalives that never stop, and
//! quick repetitions of a handshake after a new endpoint.
//!
//! A peer that does not answer and that no packet waits for rests: no timer of the protocol runs, and a peer that has never
//! answered has no [`Tunn`], which takes 10 KiB. It is asked again ever more rarely ([`Pace`]).

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use fairlead_api::wireguard::{PeerConfig, PeerState, PublicKey};
use gotatun::noise::{Tunn, TunnResult};
use gotatun::packet::{Packet, WgKind};

use crate::roaming::Roaming;
use crate::udp::Path;

mod protocol;
mod schedule;

pub(crate) use protocol::Protocol;
pub(crate) use schedule::{Pace, TICK};

/// Packets kept per peer while there is no session; the oldest make room.
const MAX_STAGED: usize = 32;
/// How a handshake towards a new endpoint is repeated, counted from the first message. Two peers behind NATs open the
/// way for each other: the first message is dropped, so both repeat theirs before `REKEY_TIMEOUT` (5 s).
///
/// The protocol library remembers two initiations, and a peer answers only the first of several that arrive in one
/// bunch (they wait together for address resolution, or a slow link). So only two different messages are sent, each
/// twice: the answer to either is accepted. A copy that arrives after its original is a replay to the
/// peer and harmless.
const REPEATS: [Repeat; 4] = [
    Repeat { after: Duration::ZERO, message: Message::Fresh },
    Repeat { after: Duration::from_millis(300), message: Message::Copy },
    Repeat { after: Duration::from_secs(1), message: Message::Fresh },
    Repeat { after: Duration::from_secs(2), message: Message::Copy },
];
/// How long an answered handshake may take to be confirmed before we start one of our own.
const CONFIRMATION_TIMEOUT: Duration = Duration::from_secs(1);

/// How long the last session of an identity that was replaced still takes what the peer sends, which follows after a moment.
const PREVIOUS_IDENTITY: Duration = Duration::from_secs(15);

/// One reading of both clocks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Now {
    pub(crate) instant: Instant,
    pub(crate) wall: SystemTime,
}

impl Now {
    pub(crate) fn read() -> Self {
        Self { instant: Instant::now(), wall: SystemTime::now() }
    }
}

#[derive(Clone, Copy)]
struct Repeat {
    after: Duration,
    message: Message,
}

#[derive(Clone, Copy)]
enum Message {
    /// The last initiation once more.
    Copy,
    /// A new one.
    Fresh,
}

/// Repetitions still to come of a handshake towards a new endpoint.
struct Repeats {
    started: Instant,
    left: &'static [Repeat],
    /// The last initiation, unless something was learned since that has to go into the next.
    last: Option<Vec<u8>>,
}

/// The session with the identity that was replaced: the kernel's WireGuard takes what arrives for it, too.
struct Previous {
    tunnel: Box<Tunn>,
    /// Our index of it.
    index: u32,
    until: Instant,
}

/// A peer of the device.
pub(crate) struct Peer {
    /// When its timers run next, as the engine has it in its queue.
    pub(crate) due: Option<Instant>,
    key: PublicKey,
    protocol: Arc<Protocol>,
    /// `None` while there is neither a session nor a handshake nor anything to remember.
    tunnel: Option<Box<Tunn>>,
    previous: Option<Previous>,
    /// The library's timers do not run.
    resting: bool,
    /// An authenticated message has come since the identity was set: its time stamp must be remembered against replays
    /// (WireGuard paper 5.1).
    was_heard: bool,
    /// When the library's timers last ran.
    ticked: Option<Instant>,
    /// When a handshake was last started, or a message last ended the rest.
    attempted: Option<Instant>,
    /// Handshakes in a row that were started only for a keepalive and not answered.
    unanswered: u32,
    /// When an inner packet last went either way.
    last_data: Option<Instant>,
    /// When the first inner packet was sent since anything came from the peer, or since [`Self::take_unanswered`] said so.
    waiting_since: Option<Instant>,
    path: Option<Path>,
    /// Where the initiation came from whose answer is about to be sent: the answer goes back the same way, also where the session
    /// does not move to it.
    answer_path: Option<Path>,
    roaming: Roaming,
    preshared_key: Option<[u8; 32]>,
    persistent_keepalive: Option<u16>,
    /// The peer has used a session with us (key confirmation, WireGuard paper 5.4.6). Until then the session in `tunnel`
    /// may stem from a replayed initiation or a lost response, and must not take packets.
    confirmed: bool,
    /// Our index of the session of our last response, which the peer has not used yet, and when we sent it.
    unconfirmed: Option<(u32, Instant)>,
    /// Our index of the session of the newest data message, and its counter.
    newest: Option<(u32, u64)>,
    staged: VecDeque<Packet>,
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
    pub(crate) fn new(key: PublicKey, protocol: Arc<Protocol>) -> Self {
        Self {
            due: None,
            key,
            protocol,
            tunnel: None,
            previous: None,
            resting: true,
            was_heard: false,
            ticked: None,
            attempted: None,
            unanswered: 0,
            last_data: None,
            waiting_since: None,
            path: None,
            answer_path: None,
            roaming: Roaming::default(),
            preshared_key: None,
            persistent_keepalive: None,
            confirmed: false,
            unconfirmed: None,
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

    /// Where a message that was just emitted goes.
    pub(crate) fn path_of(&mut self, message: &WgKind) -> Option<Path> {
        let answer = matches!(message, WgKind::HandshakeResp(_)).then(|| self.answer_path.take());
        answer.flatten().or(self.path)
    }

    /// Why the last datagram could not be sent, if so.
    pub(crate) fn send_error(&self) -> Option<&str> {
        self.send_error.as_deref()
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
    pub(crate) fn configure(
        &mut self,
        config: &PeerConfig,
        delay: Duration,
        now: Now,
        out: &mut Vec<WgKind>,
    ) {
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
            if self.is_live() {
                self.roaming.configured(path.remote, self.is_first(), now.instant);
            }
            self.waiting_since = None;
            self.send_error = None;
            self.use_new_endpoint(delay, now, out);
        }
    }

    /// The device has a new identity: nothing more is sent in sessions of the old one. A peer that is not to be called is not.
    pub(crate) fn rekey(
        &mut self,
        protocol: Arc<Protocol>,
        delay: Duration,
        now: Now,
        out: &mut Vec<WgKind>,
    ) {
        let was_live = self.is_live();
        self.protocol = protocol;
        self.was_heard = false;
        let until = now.instant.checked_add(PREVIOUS_IDENTITY).unwrap_or(now.instant);
        let last = self.newest.take().filter(|_| was_live);
        self.previous =
            last.and_then(|(index, _)| Some(Previous { tunnel: self.tunnel.take()?, index, until }));
        self.rest();
        if self.path.is_some() && (was_live || self.keepalive_interval().is_some()) {
            self.use_new_endpoint(delay, now, out);
        }
    }

    /// Starts with a handshake on the path that the old process of a hand-over used.
    pub(crate) fn start_at(&mut self, path: Path, now: Now, out: &mut Vec<WgKind>) {
        self.path = Some(path);
        self.use_new_endpoint(Duration::ZERO, now, out);
    }

    fn use_new_endpoint(&mut self, delay: Duration, now: Now, out: &mut Vec<WgKind>) {
        if self.is_live() {
            self.keep_alive(now, out);
        } else {
            self.unanswered = 0;
            let started = now.instant.checked_add(delay).unwrap_or(now.instant);
            self.repeats = Some(Repeats { started, left: &REPEATS, last: None });
            // The first keepalive is no other handshake.
            self.attempted = Some(started);
            self.repeat(now, out);
        }
    }

    /// Sends an inner packet (already padded), or keeps it until there is a session.
    pub(crate) fn send(&mut self, packet: Packet, now: Now, out: &mut Vec<WgKind>) {
        if self.path.is_none() {
            return;
        }
        self.last_data = Some(now.instant);
        self.unanswered = 0;
        self.waiting_since.get_or_insert(now.instant);
        self.catch_up(now, out);
        if let Err(packet) = self.encapsulate(packet, now, out) {
            self.stage(packet);
            let awaits_confirmation = self
                .unconfirmed
                .is_some_and(|(_, at)| now.instant.saturating_duration_since(at) < CONFIRMATION_TIMEOUT);
            if !awaits_confirmation {
                self.initiate(false, now, out);
            }
        }
    }

    /// Takes a message for this peer; returns the inner packet (empty for a keepalive) of a data message.
    /// Only an authenticated message moves the endpoint, as [`Roaming`] decides.
    pub(crate) fn receive(
        &mut self,
        message: WgKind,
        path: Path,
        length: usize,
        now: Now,
        out: &mut Vec<WgKind>,
    ) -> Option<Packet> {
        let order = match &message {
            WgKind::Data(data) => Some((data.header.receiver_idx.get(), data.header.counter.get())),
            WgKind::HandshakeInit(_) | WgKind::HandshakeResp(_) | WgKind::CookieReply(_) => None,
        };
        if let Some(index) = order.map(|(index, _)| index)
            && self.previous.as_ref().is_some_and(|previous| previous.index == index)
        {
            return self.receive_with_previous(message, path, length, now);
        }
        // Without any state, only an initiation has a meaning.
        if self.tunnel.is_none() && !matches!(message, WgKind::HandshakeInit(_)) {
            return None;
        }
        self.catch_up(now, out);
        match self.tunnel(now).handle_incoming_packet(message) {
            TunnResult::WriteToNetwork(reply) => {
                self.record_received(path, false, length, now);
                self.reply(reply, path, now, out);
                None
            }
            TunnResult::WriteToTunnel(packet) => {
                let is_late = self.is_overtaken(order);
                self.record_received(path, is_late, length, now);
                let session = order.map(|(session, _)| session);
                let confirms = self.unconfirmed.is_some_and(|(index, _)| Some(index) == session);
                if confirms {
                    self.unconfirmed = None;
                }
                if confirms || !self.confirmed {
                    self.established(now, out);
                }
                if !packet.is_empty() {
                    self.last_data = Some(now.instant);
                }
                Some(packet)
            }
            TunnResult::Done => {
                // A cookie: only a new initiation carries it.
                if let Some(repeats) = &mut self.repeats {
                    repeats.last = None;
                }
                None
            }
            TunnResult::Err(error) => {
                tracing::trace!(?error, remote = %path.remote, "message dropped");
                None
            }
        }
    }

    fn receive_with_previous(
        &mut self,
        message: WgKind,
        path: Path,
        length: usize,
        now: Now,
    ) -> Option<Packet> {
        self.previous.take_if(|previous| previous.until <= now.instant);
        let TunnResult::WriteToTunnel(packet) =
            self.previous.as_mut()?.tunnel.handle_incoming_packet(message)
        else {
            return None;
        };
        // Only time stamps of handshakes with the identity of now have to be remembered.
        let was_heard = self.was_heard;
        self.record_received(path, false, length, now);
        self.was_heard = was_heard;
        self.last_data = Some(now.instant);
        Some(packet)
    }

    /// Whether a data message was sent before one that has arrived: by a way that the peer has left since. The highest counter of a
    /// session decides, as in QUIC (RFC 9000, 9.3).
    fn is_overtaken(&mut self, order: Option<(u32, u64)>) -> bool {
        let (Some((session, counter)), newest) = (order, self.newest) else { return false };
        let is_overtaken = newest.is_some_and(|(of, newest)| of == session && counter < newest);
        if !is_overtaken {
            self.newest = order;
        }
        is_overtaken
    }

    fn record_received(&mut self, path: Path, is_overtaken: bool, length: usize, now: Now) {
        let present = self.path.map(|present| present.remote);
        let counts = !is_overtaken || present == Some(path.remote);
        // Without a session there are no packets under way that could make both peers swap their paths.
        if counts && (!self.is_live() || self.roaming.moves(present, path.remote, now.instant)) {
            self.path = Some(path);
        }
        self.was_heard = true;
        self.waiting_since = None;
        self.unanswered = 0;
        self.rx_bytes = self.rx_bytes.saturating_add(u64::try_from(length).unwrap_or(u64::MAX));
    }

    fn reply(&mut self, reply: WgKind, from: Path, now: Now, out: &mut Vec<WgKind>) {
        let response = match &reply {
            WgKind::HandshakeResp(response) => Some((response.sender_idx.get(), now.instant)),
            WgKind::HandshakeInit(_) | WgKind::CookieReply(_) | WgKind::Data(_) => None,
        };
        self.last_sent = Some(now.instant);
        out.push(reply);
        match response {
            Some(_) => {
                self.unconfirmed = response;
                self.answer_path = Some(from);
            }
            // The keepalive that answers a response: the handshake we initiated is complete.
            None => self.established(now, out),
        }
    }

    fn established(&mut self, now: Now, out: &mut Vec<WgKind>) {
        if !self.is_live() && self.is_first() {
            self.roaming.hold(now.instant);
        }
        self.confirmed = true;
        self.last_handshake = Some(now.wall);
        self.repeats = None;
        for packet in mem::take(&mut self.staged) {
            if let Err(packet) = self.encapsulate(packet, now, out) {
                self.stage(packet);
            }
        }
    }

    /// Whether this node has the lower key.
    fn is_first(&self) -> bool {
        self.protocol.public.as_bytes() < &self.key.0
    }

    fn repeat(&mut self, now: Now, out: &mut Vec<WgKind>) {
        if self.next_repeat().is_none_or(|due| due > now.instant) {
            return;
        }
        match self.take_copy() {
            Some(copy) => self.emit(copy, now, out),
            None => self.initiate(true, now, out),
        }
    }

    /// Consumes the next repetition; returns the message if it is a copy.
    fn take_copy(&mut self) -> Option<WgKind> {
        let repeats = self.repeats.as_mut()?;
        let (repeat, left) = repeats.left.split_first()?;
        repeats.left = left;
        match repeat.message {
            Message::Copy => Packet::copy_from(repeats.last.as_ref()?.as_slice()).try_into_wg().ok(),
            Message::Fresh => None,
        }
    }

    fn next_repeat(&self) -> Option<Instant> {
        let repeats = self.repeats.as_ref()?;
        let due = repeats.started.checked_add(repeats.left.first()?.after)?;
        let confirmation = self.unconfirmed.and_then(|(_, at)| at.checked_add(CONFIRMATION_TIMEOUT));
        Some(confirmation.map_or(due, |until| due.max(until)))
    }

    /// The result of a send: counts the bytes, or keeps the error. `used` lacks the local address of `asked` when the
    /// kernel refused it: the address has been removed.
    pub(crate) fn sent(&mut self, asked: &Path, used: &Path, length: usize, failure: Option<&io::Error>) {
        if let Some(error) = failure {
            self.send_error = Some(format!("sending {length} bytes to {}: {error}", asked.remote));
            return;
        }
        self.send_error = None;
        self.tx_bytes = self.tx_bytes.saturating_add(u64::try_from(length).unwrap_or(u64::MAX));
        if used.local != asked.local
            && let Some(path) = self.path.as_mut().filter(|path| path.local == asked.local)
        {
            path.local = None;
        }
    }

    /// Whether there is a session that the peer has used.
    pub(crate) fn is_live(&self) -> bool {
        self.confirmed && self.has_session()
    }

    fn has_session(&self) -> bool {
        self.tunnel.as_ref().is_some_and(|tunnel| tunnel.time_since_last_handshake().is_some())
    }

    fn keep_alive(&mut self, now: Now, out: &mut Vec<WgKind>) {
        // The next one is an interval away, even if this one fails.
        self.last_sent = Some(now.instant);
        if self.encapsulate(Packet::default(), now, out).is_err() {
            self.unanswered = self.unanswered.saturating_add(1);
            self.initiate(false, now, out);
        }
    }

    fn encapsulate(&mut self, packet: Packet, now: Now, out: &mut Vec<WgKind>) -> Result<(), Packet> {
        let Some(tunnel) = self.tunnel.as_mut().filter(|_| self.confirmed) else { return Err(packet) };
        let message = tunnel.encapsulate_with_session(packet)?;
        self.emit(message.into(), now, out);
        Ok(())
    }

    fn initiate(&mut self, again: bool, now: Now, out: &mut Vec<WgKind>) {
        if self.path.is_none() {
            return;
        }
        let Some(message) = self.tunnel(now).format_handshake_initiation(again) else { return };
        self.attempted = Some(now.instant);
        let bytes = message.into_bytes();
        if let Some(repeats) = &mut self.repeats {
            repeats.last = Some(bytes.to_vec());
        }
        // It was parsed from these bytes.
        if let Ok(message) = bytes.try_into_wg() {
            self.emit(message, now, out);
        }
    }

    fn emit(&mut self, message: WgKind, now: Now, out: &mut Vec<WgKind>) {
        self.last_sent = Some(now.instant);
        out.push(message);
    }

    fn stage(&mut self, packet: Packet) {
        if self.staged.len() >= MAX_STAGED {
            self.staged.pop_front();
        }
        self.staged.push_back(packet);
    }
}
