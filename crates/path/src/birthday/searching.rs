//! Behind the port-restricted NAT: requests to random ports of the peer's NAT, from the WireGuard port.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fairlead_wire::probe::TransactionId;
use rand::RngExt;
use rand::rngs::StdRng;

use super::{
    ANSWER_TIMEOUT, BirthdayOutcome, CONFIRMATIONS, MAX_AT_ONCE, MAX_ATTEMPT, MAX_SILENCE, PACE, at, paced,
};

/// Requests of one attempt to ports that have not answered.
pub(super) const MAX_REQUESTS: u32 = 2048;
/// NATs give out no lower ports (RFC 6056, section 3.2).
const FIRST_PORT: u16 = 1024;
/// How long after the last request the first answer is waited for.
const LAST_ANSWER: Duration = Duration::from_millis(1500);
/// How often the port that has answered is asked again while it does not, and for how long.
const RETRY: Duration = Duration::from_millis(300);
const MAX_TRIAL: Duration = Duration::from_secs(2);

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
    /// The ports to try, each once, the next one last.
    ports: Vec<u16>,
    ip: IpAddr,
    sent: u32,
    /// When requests were last sent.
    ran: Duration,
    pending: BTreeMap<TransactionId, (SocketAddr, Duration)>,
    /// When the peer last said that it takes part.
    heard: Duration,
    trial: Option<Trial>,
}

impl Searching {
    pub(super) fn new(now: Duration, ip: IpAddr, random: &mut StdRng) -> Self {
        let mut ports: Vec<u16> = (FIRST_PORT..=u16::MAX).collect();
        let tried = usize::try_from(MAX_REQUESTS).unwrap_or(usize::MAX).min(ports.len());
        // The first steps of a shuffle (Fisher and Yates).
        for position in 0..tried {
            let other = random.random_range(position..ports.len());
            ports.swap(position, other);
        }
        ports.truncate(tried);
        Self { since: now, ports, ip, sent: 0, ran: now, pending: BTreeMap::new(), heard: now, trial: None }
    }

    /// The peer takes part.
    pub(super) fn hear(&mut self, now: Duration) {
        self.heard = now;
    }

    /// The requests to send now.
    pub(super) fn due(&mut self, now: Duration, random: &mut StdRng) -> Vec<(SocketAddr, TransactionId)> {
        self.ran = now;
        self.trial.take_if(|trial| now.saturating_sub(trial.began) >= MAX_TRIAL);
        let due: Vec<SocketAddr> = if let Some(trial) = &mut self.trial {
            if trial.next > now {
                return Vec::new();
            }
            trial.next = now.saturating_add(RETRY);
            vec![trial.address]
        } else if now.saturating_sub(self.heard) <= MAX_SILENCE {
            let sent = usize::try_from(self.sent).unwrap_or(usize::MAX);
            let due = paced(now.saturating_sub(self.since)).saturating_sub(sent).min(MAX_AT_ONCE);
            let ports = self.ports.split_off(self.ports.len().saturating_sub(due));
            self.sent = self.sent.saturating_add(u32::try_from(ports.len()).unwrap_or(u32::MAX));
            ports.into_iter().map(|port| at(self.ip, port)).collect()
        } else {
            Vec::new()
        };
        let with_transaction = |to: SocketAddr| {
            let transaction = TransactionId(random.random());
            self.pending.insert(transaction, (to, now));
            (to, transaction)
        };
        due.into_iter().map(with_transaction).collect()
    }

    /// When something is due next.
    pub(super) fn next(&self) -> Duration {
        if let Some(trial) = &self.trial {
            return trial.next;
        }
        let elapsed =
            Duration::from_millis(u64::from(self.sent).saturating_mul(1000) / u64::from(super::RATE));
        let sent = self.since.saturating_add(elapsed);
        if self.ports.is_empty() {
            sent.saturating_add(LAST_ANSWER)
        } else {
            sent.max(self.ran.saturating_add(PACE))
        }
    }

    /// What the end of the attempt is, if it has come.
    pub(super) fn end(&self, now: Duration) -> Option<BirthdayOutcome> {
        if self.trial.is_some() {
            return None;
        }
        let has_ended = self.ports.is_empty() && now >= self.next();
        if has_ended || now.saturating_sub(self.since) >= MAX_ATTEMPT {
            return Some(BirthdayOutcome::NoPortFound);
        }
        let is_silent = !self.ports.is_empty() && now.saturating_sub(self.heard) > MAX_SILENCE;
        is_silent.then_some(BirthdayOutcome::PeerSilent)
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
}
