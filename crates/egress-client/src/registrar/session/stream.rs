//! One stream of messages to a gateway.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fairlead_address::DualStackAddrs;
use fairlead_limits::part;
use fairlead_wire::egress::register_request::Kind;
use fairlead_wire::egress::{self as wire, RegisterRequest};

use super::{Clients, Ended, Refused, Step, Token};
use crate::registrar::Client;

/// Longest time in which a gateway answers a message.
const ANSWER: Duration = Duration::from_secs(5);
/// Time for which a stream is kept without clients: pods come and go.
const LINGER: Duration = Duration::from_secs(30);
/// Most clients in one change; the rest follows in the next.
const MAX_CHANGE: usize = 512;
/// Pause after a token could not be renewed, between a half and the whole of it.
const RENEW_AGAIN: Duration = Duration::from_secs(20);

/// The kinds of messages, in the order of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    Hello,
    All,
    Change,
}

/// A message that the gateway has not answered.
#[derive(Debug)]
struct Outstanding {
    message: Next,
    deadline: Instant,
}

#[derive(Debug)]
pub(super) struct Stream {
    since: Instant,
    /// Revision of the last message that was sent; 0 before the first.
    revision: u64,
    outstanding: Option<Outstanding>,
    next: Next,
    /// Token to be sent in a Hello.
    token: Option<String>,
    /// Time at which another token is needed; `None` while one is being requested.
    renew_at: Option<Instant>,
    /// Addresses that the gateway was told, by the client's UID; `None` where it refused them.
    sent: BTreeMap<String, Option<DualStackAddrs>>,
    idle_since: Option<Instant>,
}

impl Stream {
    pub(super) fn new(token: Token, now: Instant) -> Self {
        Self {
            since: now,
            revision: 0,
            outstanding: None,
            next: Next::Hello,
            token: Some(token.text),
            renew_at: Some(token.renew_at),
            sent: BTreeMap::new(),
            idle_since: None,
        }
    }

    pub(super) fn lasted(&self, now: Instant) -> Duration {
        if self.is_synced() { now.saturating_duration_since(self.since) } else { Duration::ZERO }
    }

    /// Whether the gateway has answered all clients.
    pub(super) fn is_synced(&self) -> bool {
        self.next == Next::Change && !matches!(&self.outstanding, Some(it) if it.message == Next::All)
    }

    pub(super) fn has_sent_clients(&self) -> bool {
        !self.sent.is_empty()
    }

    /// Clients that the gateway was told of and has not refused, with their addresses.
    pub(super) fn in_force(&self) -> impl Iterator<Item = (&String, DualStackAddrs)> {
        self.sent.iter().filter_map(|(uid, addresses)| Some((uid, (*addresses)?)))
    }

    pub(super) fn renew(&mut self, token: Token) {
        self.token = Some(token.text);
        self.renew_at = Some(token.renew_at);
    }

    pub(super) fn renew_later(&mut self, now: Instant, random: u32) {
        let pause = (RENEW_AGAIN / 2).saturating_add(part(RENEW_AGAIN / 2, random));
        self.renew_at = now.checked_add(pause);
    }

    pub(super) fn poll(
        &mut self,
        clients: &Clients,
        refused: &BTreeMap<String, Refused>,
        may_hold: bool,
        now: Instant,
    ) -> Step {
        if let Some(outstanding) = &self.outstanding {
            let is_late = outstanding.deadline <= now;
            return if is_late {
                Step::Close(Ended::NoAnswer)
            } else {
                Step::Wait(Some(outstanding.deadline))
            };
        }
        if let Some(token) = self.token.take() {
            return self.send(Next::Hello, Kind::Hello(wire::Hello { token }), now);
        }
        if self.next == Next::All {
            self.sent = clients.values().map(|client| (client.uid.clone(), Some(client.addresses))).collect();
            let clients = clients.values().map(message).collect();
            return self.send(Next::All, Kind::All(wire::Clients { clients }), now);
        }
        if let Some(change) = self.difference(clients, refused, now) {
            return self.send(Next::Change, Kind::Change(change), now);
        }
        if self.renew_at.is_some_and(|at| at <= now) {
            self.renew_at = None;
            return Step::RenewToken;
        }
        self.wait(clients, refused, may_hold, now)
    }

    fn wait(
        &mut self,
        clients: &Clients,
        refused: &BTreeMap<String, Refused>,
        may_hold: bool,
        now: Instant,
    ) -> Step {
        let is_idle = clients.is_empty() && !may_hold;
        self.idle_since = is_idle.then(|| self.idle_since.unwrap_or(now));
        let end = self.idle_since.and_then(|since| since.checked_add(LINGER));
        if end.is_some_and(|end| end <= now) {
            return Step::Close(Ended::NoClients);
        }
        let retries = refused.iter().filter(|(uid, _)| clients.contains_key(*uid)).map(|(_, it)| it.retry_at);
        // One that is due although there is no difference has been confirmed meanwhile.
        let retries = retries.filter(|at| *at > now);
        Step::Wait(retries.chain(self.renew_at).chain(end).min())
    }

    /// Change that the gateway has to be told, at most [`MAX_CHANGE`] clients each way; `None` if nothing differs.
    fn difference(
        &mut self,
        clients: &Clients,
        refused: &BTreeMap<String, Refused>,
        now: Instant,
    ) -> Option<wire::Change> {
        let waits = |client: &Client| {
            let refused = refused.get(&client.uid);
            refused.is_some_and(|it| it.addresses == client.addresses && it.retry_at > now)
        };
        let differs =
            |client: &&Client| self.sent.get(&client.uid) != Some(&Some(client.addresses)) && !waits(client);
        let set: Vec<&Client> = clients.values().filter(differs).take(MAX_CHANGE).collect();
        let removed = self.sent.keys().filter(|uid| !clients.contains_key(*uid)).take(MAX_CHANGE);
        let removed: Vec<String> = removed.cloned().collect();
        if set.is_empty() && removed.is_empty() {
            return None;
        }
        for client in &set {
            self.sent.insert(client.uid.clone(), Some(client.addresses));
        }
        for uid in &removed {
            self.sent.remove(uid);
        }
        Some(wire::Change { set: set.into_iter().map(message).collect(), removed })
    }

    fn send(&mut self, message: Next, kind: Kind, now: Instant) -> Step {
        self.revision = self.revision.saturating_add(1);
        let deadline = now.checked_add(ANSWER).unwrap_or(now);
        self.outstanding = Some(Outstanding { message, deadline });
        Step::Send(RegisterRequest { revision: self.revision, kind: Some(kind) })
    }

    /// Returns the message that is answered by this revision, if any is.
    pub(super) fn acknowledge(&mut self, revision: u64) -> Result<Option<Next>, Ended> {
        if revision > self.revision {
            let what = format!("it answers message {revision}, and {} were sent", self.revision);
            return Err(Ended::Protocol(what));
        }
        if revision < self.revision {
            return Ok(None);
        }
        let Some(Outstanding { message, .. }) = self.outstanding.take() else { return Ok(None) };
        self.next = match (self.next, message) {
            (Next::Hello, Next::Hello) => Next::All,
            (_, Next::All) => Next::Change,
            (next, _) => next,
        };
        Ok(Some(message))
    }

    /// The gateway refuses a client; returns the addresses of it that the gateway was told.
    pub(super) fn refuse(&mut self, uid: &str) -> Option<DualStackAddrs> {
        self.sent.get_mut(uid)?.take()
    }
}

fn message(client: &Client) -> wire::Client {
    wire::Client {
        uid: client.uid.clone(),
        namespace: client.namespace.clone(),
        name: client.name.clone(),
        addresses: client.addresses.iter().map(wire::octets).collect(),
    }
}
