//! The node that chooses: requests to ports of the peer's NAT, from the WireGuard port. The first one that answers is tried out.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fairlead_wire::probe::TransactionId;
use rand::RngExt;
use rand::rngs::StdRng;

use super::BirthdayOutcome;
use super::limits::{ANSWER_TIMEOUT, CONFIRMATIONS, LAST_ANSWER, MAX_ATTEMPT, MAX_SILENCE};
use super::ports::Volley;

/// Time between requests to a port that has answered, until it answers often enough, and the longest time for them.
const RETRY: Duration = Duration::from_millis(300);
const MAX_TRIAL: Duration = Duration::from_secs(2);
/// Most endpoints that are asked because the peer has reached this node from there.
const MAX_ASKED_BACK: usize = 64;

/// A port that has answered.
#[derive(Debug)]
struct Trial {
    address: SocketAddr,
    began: Duration,
    answers: u8,
    next: Duration,
}

/// The search of an attempt.
#[derive(Debug)]
pub(super) struct Searching {
    since: Duration,
    volley: Volley,
    pending: BTreeMap<TransactionId, (SocketAddr, Duration)>,
    asked_back: BTreeSet<SocketAddr>,
    /// Time at which the peer last said that it takes part.
    heard: Duration,
    trial: Option<Trial>,
}

impl Searching {
    pub(super) fn new(now: Duration, ip: IpAddr, ports: Vec<u16>) -> Self {
        Self {
            since: now,
            volley: Volley::new(now, ip, ports),
            pending: BTreeMap::new(),
            asked_back: BTreeSet::new(),
            heard: now,
            trial: None,
        }
    }

    /// The peer takes part.
    pub(super) fn hear(&mut self, now: Duration) {
        self.heard = now;
    }

    /// The requests to send now.
    pub(super) fn due(&mut self, now: Duration, random: &mut StdRng) -> Vec<(SocketAddr, TransactionId)> {
        self.trial.take_if(|trial| now.saturating_sub(trial.began) >= MAX_TRIAL);
        let due: Vec<SocketAddr> = if let Some(trial) = &mut self.trial {
            self.volley.pause(now);
            if trial.next > now {
                return Vec::new();
            }
            trial.next = now.saturating_add(RETRY);
            vec![trial.address]
        } else if now.saturating_sub(self.heard) <= MAX_SILENCE {
            self.volley.due(now)
        } else {
            self.volley.pause(now);
            Vec::new()
        };
        due.into_iter().map(|to| (to, self.request(now, to, random))).collect()
    }

    /// Time at which something is due next.
    pub(super) fn next(&self) -> Duration {
        if let Some(trial) = &self.trial {
            return trial.next;
        }
        let next = self.volley.next();
        if self.volley.is_over() { next.saturating_add(LAST_ANSWER) } else { next }
    }

    /// Outcome of the attempt; `None` while it goes on.
    pub(super) fn end(&self, now: Duration) -> Option<BirthdayOutcome> {
        if self.trial.is_some() {
            return None;
        }
        let has_ended = self.volley.is_over() && now >= self.next();
        if has_ended || now.saturating_sub(self.since) >= MAX_ATTEMPT {
            return Some(BirthdayOutcome::NoPortFound);
        }
        let is_silent = !self.volley.is_over() && now.saturating_sub(self.heard) > MAX_SILENCE;
        is_silent.then_some(BirthdayOutcome::PeerSilent)
    }

    /// The peer has reached the WireGuard port by a mapping of this node's own symmetric NAT: that endpoint is asked, once, since
    /// the request that made the mapping came too early for the peer's NAT.
    pub(super) fn handle_request(
        &mut self,
        now: Duration,
        from: SocketAddr,
        random: &mut StdRng,
    ) -> Option<TransactionId> {
        let may_ask = self.trial.is_none() && self.asked_back.len() < MAX_ASKED_BACK;
        (may_ask && self.asked_back.insert(from)).then(|| self.request(now, from, random))
    }

    /// Whether the port is to be used; `None` if no request was answered. The first port that answers is the only one asked again.
    pub(super) fn handle_answer(
        &mut self,
        now: Duration,
        from: SocketAddr,
        transaction: TransactionId,
    ) -> Option<bool> {
        let (to, sent) = self.pending.remove(&transaction)?;
        if to != from || now.saturating_sub(sent) > ANSWER_TIMEOUT {
            return None;
        }
        let trial = self.trial.get_or_insert(Trial { address: from, began: now, answers: 0, next: now });
        if trial.address != from {
            return Some(false);
        }
        trial.answers = trial.answers.saturating_add(1);
        trial.next = now;
        Some(trial.answers >= CONFIRMATIONS)
    }

    fn request(&mut self, now: Duration, to: SocketAddr, random: &mut StdRng) -> TransactionId {
        let transaction = TransactionId(random.random());
        self.pending.insert(transaction, (to, now));
        transaction
    }
}
