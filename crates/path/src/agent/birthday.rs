//! Birthday attempts on their way between their machine, the probers of the peers, and the shell.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use fairlead_address::canonical;
use fairlead_keys::PublicKey;
use fairlead_wire::probe::{Message, PortSequence, TransactionId, is_probe};
use fairlead_wire::stun::binding_request;

use super::{Event, PathAgent, SocketChange};
use crate::birthday::{Action, BirthdayOutcome, BirthdayStatus};
use crate::datagram::{Arrival, Transmit};

impl PathAgent {
    /// Ports that the NAT in front of this node gave to new mappings, in that order, as the first birthday attempt with the peer of another
    /// symmetric NAT has measured them in this network; empty without one.
    pub fn measured_ports(&self) -> &[u16] {
        self.birthdays.measured()
    }

    /// The device can open sockets beside its port ([`SocketChange::Open`]): without this, no attempt is made behind a symmetric
    /// NAT.
    pub fn enable_sockets(&mut self) {
        self.birthdays.enable_sockets();
    }

    /// An earlier program keeps sockets for these endpoints. Each stays kept for the peer whose endpoint it is; what no peer uses for
    /// two minutes is left.
    pub fn adopt_sockets(&mut self, now: Duration, remotes: &[SocketAddr]) {
        self.birthdays.adopt(now, remotes);
    }

    /// The sockets of [`SocketChange::Open`] could not be opened.
    pub fn sockets_refused(&mut self, now: Duration) {
        self.birthdays.sockets_refused(now);
        self.run_birthday_actions(now);
    }

    /// Takes a datagram that came in by a socket of the birthday attempt and is no WireGuard message.
    pub fn handle_socket_datagram(&mut self, now: Duration, socket: u16, remote: SocketAddr, bytes: &[u8]) {
        if is_probe(bytes) {
            let arrival = Arrival { local: None, socket: Some(socket) };
            self.handle_probe(now, arrival, canonical(remote), bytes);
        } else if self.birthdays.handle_stun(now, socket, remote, bytes) {
            self.run_birthday_actions(now);
        } else {
            self.unknown_datagrams = self.unknown_datagrams.saturating_add(1);
        }
    }

    /// Status of the birthday attempts with a peer; `None` if there was none.
    pub fn birthday_status(&self, now: Duration, key: &PublicKey) -> Option<BirthdayStatus> {
        self.birthdays.status(now, key)
    }

    /// Number of birthday attempts by outcome.
    pub fn birthday_outcomes(&self) -> &BTreeMap<BirthdayOutcome, u64> {
        self.birthdays.outcomes()
    }

    pub(super) fn run_birthdays(&mut self, now: Duration) {
        if self.birthdays.poll_timeout().is_some_and(|at| at <= now) {
            self.birthdays.handle_timeout(now);
            self.run_birthday_actions(now);
            self.start_birthday(now);
        }
    }

    /// Begins an attempt, if a peer needs one and none runs.
    fn start_birthday(&mut self, now: Duration) {
        for key in self.birthdays.startable(now) {
            let Some(peer) = self.peers.get(&key) else { continue };
            let wants = peer.prober.wants_birthday(now);
            if let Some(target) = peer.prober.birthday_target().filter(|_| wants)
                && self.birthdays.start(now, key, target)
            {
                self.run_birthday_actions(now);
                return;
            }
        }
    }

    /// The paths of a peer may have changed: a socket may be of no more use, or an attempt of some.
    pub(super) fn review_birthday(&mut self, now: Duration, key: &PublicKey) {
        let Some(peer) = self.peers.get(key) else { return };
        if let Some(remote) = self.birthdays.kept(key) {
            let is_in_use = peer.prober.is_in_use(remote);
            let has_failed = peer.prober.has_failed(remote, now);
            self.birthdays.review(now, key, is_in_use, has_failed);
            self.run_birthday_actions(now);
        } else if peer.prober.wants_birthday(now) {
            self.start_birthday(now);
        }
    }

    pub(super) fn run_birthday_actions(&mut self, now: Duration) {
        while let Some(action) = self.birthdays.poll_action() {
            match action {
                Action::Ask { peer, transaction, ports } => self.ask_for_birthday(&peer, transaction, ports),
                Action::Close => self.events.push_back(Event::Sockets(SocketChange::Close)),
                Action::Found { peer: key, address } => {
                    if let Some(peer) = self.peers.get_mut(&key) {
                        peer.prober.add_found(now, address);
                        self.wakeups.follow_prober(&key, peer);
                    }
                }
                Action::Keep { peer, remote, socket } => {
                    self.events.push_back(Event::Sockets(SocketChange::Keep { peer, remote, socket }));
                }
                Action::Leave { remote } => {
                    self.events.push_back(Event::Sockets(SocketChange::Leave { remote }));
                }
                Action::Measure { server: remote, socket, transaction } => {
                    let socket = Some(socket);
                    let payload = binding_request(transaction).to_vec();
                    self.transmits.push_back(Transmit { local: None, socket, remote, payload });
                }
                Action::Open(count) => self.events.push_back(Event::Sockets(SocketChange::Open { count })),
                Action::Request { peer, to: remote, socket, transaction } => {
                    let request = request(transaction, false, None);
                    let probing = self.probing.as_mut();
                    if let Some(payload) = probing.and_then(|probing| probing.search(now, &peer, &request)) {
                        self.transmits.push_back(Transmit { local: None, socket, remote, payload });
                    }
                }
            }
        }
    }

    fn ask_for_birthday(&mut self, key: &PublicKey, transaction: TransactionId, ports: Option<PortSequence>) {
        let relay = self.peers.get(key).and_then(|peer| peer.prober.relay_address());
        let (Some(remote), Some(probing)) = (relay, &mut self.probing) else { return };
        if let Some(payload) = probing.check(key, &request(transaction, true, ports), 0) {
            self.transmits.push_back(Transmit { local: None, socket: None, remote, payload });
        }
    }
}

fn request(transaction: TransactionId, is_birthday: bool, ports: Option<PortSequence>) -> Message {
    Message::Request {
        transaction,
        starts_round: false,
        wants_handshake: false,
        is_birthday,
        wants_keepalives: false,
        ports,
        candidates: Vec::new(),
    }
}
