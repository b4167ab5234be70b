//! The registration of this node's clients at one gateway: what to send and when, and what answers mean. Without I/O, without a clock and
//! without randomness of its own.
//!
//! Nothing is queued: when the gateway has answered the last message, the clients are compared with what it was told, and the
//! difference is the next message. What was confirmed stays so when the stream ends, since the gateway keeps it.

mod stream;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use fairlead_address::DualStackAddrs;
use fairlead_egress::registration::PublicKeyHash;
use fairlead_limits::{doubled, part};
use fairlead_source_addresses::announcements::holds::{self, Hold};
use fairlead_wire::egress::{RegisterRequest, RegisterResponse, State};

use self::stream::{Next, Stream};
use super::client::Client;
use super::refusal::Refusal;

/// Pauses between attempts, doubled from the first to the last; each is between a half and the whole of it.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LAST_PAUSE: Duration = Duration::from_secs(10);
/// A stream that lasted this long was good: the next pause is the first.
const GOOD: Duration = Duration::from_secs(10);
/// Longest pause for a gateway on this node that may hold source addresses: when its program starts again, they are announced as long as it
/// has said before.
const LAST_PAUSE_OF_HOLDER: Duration = Duration::from_millis(200);

/// The clients of an Egress by the UIDs of their pods.
pub(super) type Clients = BTreeMap<String, Client>;

/// A token for one gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Token {
    pub(super) text: String,
    /// The key of the gateway that it is for.
    pub(super) key: PublicKeyHash,
    /// Time at which another one is needed, well before this one expires.
    pub(super) renew_at: Instant,
}

/// Next step of the owner of the connection.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Step {
    /// Close the connection, and call [`Session::closed`].
    Close(Ended),
    /// Connect and request a token; then call [`Session::opened`] or [`Session::closed`].
    Connect,
    /// Request another token while the stream lasts; then call [`Session::renewed`].
    RenewToken,
    /// Send this message.
    Send(RegisterRequest),
    /// Wait until this time, if there is one, or until something changes.
    Wait(Option<Instant>),
}

/// Reason why there is no stream.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(super) enum Ended {
    #[error("it ended the registration")]
    ByGateway,
    #[error("it does not answer")]
    NoAnswer,
    #[error("this node has no clients for it any more")]
    NoClients,
    #[error("it violates the protocol: {0}")]
    Protocol(String),
    /// TCP: nothing listens.
    #[error("it refuses connections to TCP port {0}")]
    Refused(u16),
    #[error("it does not accept this node: {0}")]
    Rejected(String),
    #[error("it answers {0}")]
    Status(String),
    #[error("no token for it: {0}")]
    Token(String),
    #[error("{0}")]
    Unreachable(String),
}

/// Changes by an answer of the gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Heard {
    /// Whether [`Session::confirmed`], [`Session::refusal`] or [`Session::state`] return something else.
    pub(super) changed: bool,
    /// Clients that were confirmed, and refused.
    pub(super) confirmed: u64,
    pub(super) refused: u64,
    /// Whether [`Session::holds`] returns something else, if only in its times.
    pub(super) held: bool,
}

#[derive(Debug)]
enum Phase {
    Idle { not_before: Option<Instant> },
    Connecting,
    Open(Box<Stream>),
}

/// A client that the gateway refused, and when it is asked again.
#[derive(Debug, Clone)]
struct Refused {
    refusal: Refusal,
    addresses: DualStackAddrs,
    attempts: u32,
    retry_at: Instant,
}

/// See the module.
#[derive(Debug)]
pub(super) struct Session {
    phase: Phase,
    failures: u32,
    confirmed: BTreeMap<String, DualStackAddrs>,
    refused: BTreeMap<String, Refused>,
    state: State,
    /// Holds that the gateway said last, also those that have ended since.
    holds: BTreeMap<IpAddr, Hold>,
    token: Option<Token>,
    /// It may have more clients than was confirmed: a stream ended in which it was told of some, or an earlier program told it.
    may_have_clients: bool,
    has_registered: bool,
    refuses_connections: bool,
    failure: Option<Ended>,
}

impl Default for Session {
    fn default() -> Self {
        Self {
            phase: Phase::Idle { not_before: None },
            failures: 0,
            confirmed: BTreeMap::new(),
            refused: BTreeMap::new(),
            state: State::Unspecified,
            holds: BTreeMap::new(),
            token: None,
            may_have_clients: false,
            has_registered: false,
            refuses_connections: false,
            failure: None,
        }
    }
}

impl Session {
    /// Whether the gateway has these addresses of the client in its data path.
    pub(super) fn confirmed(&self, client: &Client) -> bool {
        self.confirmed.get(&client.uid) == Some(&client.addresses)
    }

    /// Refusal of the client with its current addresses, if there is one.
    pub(super) fn refusal(&self, client: &Client) -> Option<&Refusal> {
        let refused = self.refused.get(&client.uid)?;
        (refused.addresses == client.addresses).then_some(&refused.refusal)
    }

    /// State that the gateway last said of itself.
    pub(super) fn state(&self) -> State {
        self.state
    }

    /// The source addresses that it said last it holds, some of which it may hold no more: see [`Hold::until`].
    pub(super) fn holds(&self) -> &BTreeMap<IpAddr, Hold> {
        &self.holds
    }

    /// Whether it has ever answered: it is not one of Coil's.
    pub(super) fn has_registered(&self) -> bool {
        self.has_registered
    }

    /// Whether it has refused connections while it was ready, and has never answered.
    pub(super) fn does_not_register(&self) -> bool {
        self.refuses_connections && !self.has_registered
    }

    /// Whether the gateway has answered since the stream began.
    pub(super) fn is_synced(&self) -> bool {
        matches!(&self.phase, Phase::Open(stream) if stream.is_synced())
    }

    /// Reason why there is no stream; `None` while there is one, or none was tried.
    pub(super) fn failure(&self) -> Option<&Ended> {
        self.failure.as_ref()
    }

    /// Whether there is no connection, and none is being made.
    pub(super) fn is_idle(&self) -> bool {
        matches!(self.phase, Phase::Idle { .. })
    }

    /// Whether the gateway has, or may have, clients of this node.
    pub(super) fn has_clients(&self) -> bool {
        self.may_have_clients
            || !self.confirmed.is_empty()
            || matches!(&self.phase, Phase::Open(stream) if stream.has_sent_clients())
    }

    /// The gateway may have clients of an earlier program.
    pub(super) fn expect_clients(&mut self) {
        self.may_have_clients = true;
    }

    /// The gateway became ready: what failed before says nothing.
    pub(super) fn retry_now(&mut self) {
        self.failures = 0;
        if let Phase::Idle { not_before } = &mut self.phase {
            *not_before = None;
        }
    }

    /// Next step. `may_connect`: the gateway is ready or serving. `may_hold`: it is on this node and may hold source addresses, so
    /// it is connected in any case.
    pub(super) fn poll(
        &mut self,
        clients: &Clients,
        may_connect: bool,
        may_hold: bool,
        now: Instant,
    ) -> Step {
        match &mut self.phase {
            Phase::Connecting => Step::Wait(None),
            Phase::Open(stream) => stream.poll(clients, &self.refused, may_hold, now),
            Phase::Idle { .. }
                if !may_hold
                    && (!may_connect
                        || (clients.is_empty() && self.confirmed.is_empty() && !self.may_have_clients)) =>
            {
                Step::Wait(None)
            }
            Phase::Idle { not_before: Some(at) } if *at > now => Step::Wait(Some(*at)),
            Phase::Idle { .. } => {
                self.phase = Phase::Connecting;
                Step::Connect
            }
        }
    }

    /// A token for this key that need not be renewed yet.
    pub(super) fn token(&self, key: &PublicKeyHash, now: Instant) -> Option<Token> {
        self.token.clone().filter(|token| token.key == *key && token.renew_at > now)
    }

    /// There is a connection, and this is its token.
    pub(super) fn opened(&mut self, token: Token, now: Instant) {
        self.token = Some(token.clone());
        self.phase = Phase::Open(Box::new(Stream::new(token, now)));
    }

    /// There is another token, or none: then it is requested again later.
    pub(super) fn renewed(&mut self, token: Option<Token>, now: Instant, random: u32) {
        let Phase::Open(stream) = &mut self.phase else { return };
        match token {
            Some(token) => {
                self.token = Some(token.clone());
                stream.renew(token);
            }
            None => stream.renew_later(now, random),
        }
    }

    /// The connection ended, or there is none. `is_ready` is whether the gateway is, as EndpointSlices show; `may_hold` is as for
    /// [`Self::poll`].
    pub(super) fn closed(&mut self, ended: Ended, is_ready: bool, may_hold: bool, now: Instant, random: u32) {
        let mut lasted = Duration::ZERO;
        if let Phase::Open(stream) = &self.phase {
            lasted = stream.lasted(now);
            self.may_have_clients |= stream.has_sent_clients();
        }
        if lasted >= GOOD || ended == Ended::NoClients {
            self.failures = 0;
        }
        self.refuses_connections |= is_ready && matches!(ended, Ended::Refused(_));
        if matches!(ended, Ended::Rejected(_)) {
            // It may have been the token.
            self.token = None;
        }
        let pause = pause(&mut self.failures, random);
        let pause = if may_hold { pause.min(LAST_PAUSE_OF_HOLDER) } else { pause };
        self.phase = Phase::Idle { not_before: now.checked_add(pause) };
        self.failure = (ended != Ended::NoClients).then_some(ended);
    }

    /// Takes an answer of the gateway.
    ///
    /// # Errors
    /// It is none that a gateway may send; the connection is to be closed.
    pub(super) fn received(
        &mut self,
        clients: &Clients,
        response: RegisterResponse,
        now: Instant,
        random: u32,
    ) -> Result<Heard, Ended> {
        let Phase::Open(stream) = &mut self.phase else { return Ok(Heard::default()) };
        let mut heard = Heard::default();
        let state = response.state();
        let acknowledged = stream.acknowledge(response.revision)?;
        let says_holds = state == State::Standby || !response.held.is_empty();
        let holds = holds::read(&response.held, now).map_err(Ended::Protocol)?;
        for refusal in response.refused {
            // Of others than those that were sent the gateway has nothing to say.
            let Some(addresses) = stream.refuse(&refusal.uid) else { continue };
            let attempts = self.refused.get(&refusal.uid).map_or(0, |refused| refused.attempts);
            let uid = refusal.uid;
            let refusal = Refusal::new(&refusal.reason, &refusal.message);
            heard.changed |= self.confirmed.remove(&uid).is_some()
                || self.refused.get(&uid).is_none_or(|it| it.refusal != refusal || it.addresses != addresses);
            heard.refused = heard.refused.saturating_add(1);
            let mut attempts = attempts;
            let retry_at = now.checked_add(pause(&mut attempts, random)).unwrap_or(now);
            self.refused.insert(uid, Refused { refusal, addresses, attempts, retry_at });
        }
        if state != State::Unspecified {
            heard.changed |= self.state != state;
            self.state = state;
        }
        // Nothing said of holds leaves them as they are: each ends by its own time.
        if says_holds {
            heard.changed |= !holds.keys().eq(self.holds.keys())
                || !holds
                    .values()
                    .map(|it| (it.term, it.settling))
                    .eq(self.holds.values().map(|it| (it.term, it.settling)));
            heard.held |= holds != self.holds;
            self.holds = holds;
        }
        if let Some(message) = acknowledged {
            self.has_registered = true;
            self.refuses_connections = false;
            self.confirm(message, &mut heard);
        }
        self.refused.retain(|uid, _| clients.contains_key(uid));
        Ok(heard)
    }

    /// The gateway has done what a message said.
    fn confirm(&mut self, message: Next, heard: &mut Heard) {
        let Phase::Open(stream) = &self.phase else { return };
        if matches!(message, Next::Hello) {
            return;
        }
        heard.changed |= self.failure.take().is_some();
        self.may_have_clients = false;
        let before = std::mem::take(&mut self.confirmed);
        self.confirmed = stream.in_force().map(|(uid, addresses)| (uid.clone(), addresses)).collect();
        for uid in self.confirmed.keys() {
            self.refused.remove(uid);
        }
        let new =
            self.confirmed.iter().filter(|(uid, addresses)| before.get(*uid) != Some(addresses)).count();
        heard.confirmed = u64::try_from(new).unwrap_or(u64::MAX);
        heard.changed |= self.confirmed != before;
    }
}

/// The next pause; `failures` counts up.
fn pause(failures: &mut u32, random: u32) -> Duration {
    let half = doubled(FIRST_PAUSE, *failures, LAST_PAUSE) / 2;
    *failures = failures.saturating_add(1);
    half.saturating_add(part(half, random))
}

#[cfg(test)]
mod tests;
