//! One slot, as one gateway knows it.

use std::collections::BTreeMap;
use std::time::Duration;

use super::confirmations::Confirmations;
use super::{
    Cause, Held, LINGER, Lease, MAX_TERM, Member, Outcome, PROMISE, Report, VALIDITY, WRITABLE, WRITE, Write,
    WriteKind,
};

/// Promise not to take the slot from the holder of this term.
#[derive(Debug, Clone)]
pub(super) struct Promise {
    pub(super) term: u64,
    pub(super) until: Duration,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Slot {
    pub(super) lease: Option<Lease>,
    /// Time at which the present version of the Lease was first seen.
    pub(super) seen_at: Duration,
    pub(super) promise: Option<Promise>,
    tenure: Tenure,
    /// Time since when this gateway has held the slot, or known that it does not.
    pub(super) taken: Option<Duration>,
    /// Time at which the last write was answered, if it succeeded.
    answered: Option<Duration>,
    /// A write that has had no outcome yet.
    pub(super) in_flight: Option<Write>,
    /// Cause by which the write that takes the slot gets it.
    pub(super) takes_by: Cause,
    /// Whether a write that takes the slot has had no answer, so that it may still succeed: until the Lease is known to have another version.
    pub(super) open_take: bool,
    /// Time at which the last write began.
    pub(super) wrote: Option<Duration>,
    /// Time since when only the order among gateways keeps this one from taking it.
    pub(super) able_since: Option<Duration>,
    /// Whether another gateway is to have it, once the API server is known to take writes.
    pub(super) is_to_go: bool,
}

/// Hold of the slot by this gateway. A slot that was handed over lingers: it may be used a little longer.
#[derive(Debug)]
enum Tenure {
    /// It holds the slot with this term, be it confirmed or not.
    Claimed { term: u64, confirmations: Confirmations },
    /// It held the slot with this term and gave it up, and the Lease does not say so yet.
    GivenUp { term: u64, successor: Option<String>, lingers: Option<Held> },
    /// It does not hold the slot.
    NotHeld { lingers: Option<Held> },
}

impl Default for Tenure {
    fn default() -> Self {
        Self::NotHeld { lingers: None }
    }
}

impl Slot {
    /// The term with which this gateway holds the slot, be it confirmed or not.
    pub(super) fn claim(&self) -> Option<u64> {
        match &self.tenure {
            Tenure::Claimed { term, .. } => Some(*term),
            Tenure::GivenUp { .. } | Tenure::NotHeld { .. } => None,
        }
    }

    fn confirmations(&mut self) -> Option<&mut Confirmations> {
        match &mut self.tenure {
            Tenure::Claimed { confirmations, .. } => Some(confirmations),
            Tenure::GivenUp { .. } | Tenure::NotHeld { .. } => None,
        }
    }

    /// Forgets members that are gone.
    pub(super) fn retain(&mut self, is_member: impl Fn(&String) -> bool) {
        if let Some(confirmations) = self.confirmations() {
            confirmations.retain(is_member);
        }
    }

    /// Whether the interval of writes is over.
    pub(super) fn is_write_due(&self, now: Duration) -> bool {
        self.wrote.is_none_or(|at| now >= at.saturating_add(WRITE))
    }

    /// Whether a Lease differs from the known one, and is not newer.
    pub(super) fn is_older(&self, lease: &Lease) -> bool {
        self.lease.as_ref().is_some_and(|known| known.version >= lease.version && known != lease)
    }

    /// A consistent read that began then has shown the Lease. If the known version was seen before and is not there any more, etcd was
    /// restored from a backup: what was read counts, and what was written since that backup never was.
    pub(super) fn read(&mut self, own: &str, lease: Option<Lease>, began: Duration, now: Duration) {
        if lease.is_none() && began < self.seen_at {
            // It was made since.
            return;
        }
        if lease.as_ref().is_some_and(|lease| self.is_older(lease)) && began >= self.seen_at {
            (self.lease, self.in_flight, self.answered) = (None, None, None);
            if let Some(confirmations) = self.confirmations() {
                confirmations.forget_writes();
            }
        }
        self.seen(own, lease, now);
    }

    /// The Lease was seen. Older versions than a known one say nothing.
    pub(super) fn seen(&mut self, own: &str, lease: Option<Lease>, now: Duration) {
        let Some(lease) = lease else {
            let taken = Some(self.taken.unwrap_or(now));
            *self = Self { promise: self.promise.take(), taken, ..Self::default() };
            return;
        };
        let known = self.lease.as_ref().map(|known| known.version);
        if known.is_some_and(|known| known >= lease.version) {
            return;
        }
        // With another version, no earlier write can succeed.
        self.open_take = false;
        self.seen_at = now;
        self.able_since = None;
        // If no Lease had the term that was promised, it counts no longer.
        self.promise = self.promise.take().filter(|promise| promise.until > now);
        if lease.holder.as_deref() != Some(own) {
            if let Tenure::GivenUp { lingers, .. } = &mut self.tenure {
                self.tenure = Tenure::NotHeld { lingers: lingers.take() };
            }
            self.lose();
        }
        if self.claim().is_some_and(|claim| claim < lease.term) {
            self.lose();
        }
        self.lease = Some(lease);
    }

    /// The greatest term that counts.
    pub(super) fn term(&self) -> u64 {
        let lease = self.lease.as_ref().map(|lease| lease.term);
        let promised = self.promise.as_ref().map(|promise| promise.term);
        lease.max(self.claim()).max(promised).unwrap_or(0)
    }

    fn lose(&mut self) {
        if self.claim().is_some() {
            self.tenure = Tenure::default();
        }
    }

    /// Whether this gateway promises not to take the slot from the holder of this term.
    pub(super) fn promise(
        &mut self,
        term: u64,
        from: &str,
        members: &BTreeMap<String, Member>,
        now: Duration,
    ) -> bool {
        let takes = self.open_take || self.in_flight.as_ref().is_some_and(|it| it.kind == WriteKind::Take);
        // Without the Lease, it does not know whether a greater term was given by itself before it started.
        let Some(lease) = self.lease.as_ref().filter(|_| !takes) else { return false };
        if term > MAX_TERM || term < self.term() || self.claim() == Some(term) {
            return false;
        }
        // While this gateway holds the slot, no other one can have taken it, whatever it says.
        if self.claim().is_some() && self.valid_until(members, now) > now {
            return false;
        }
        if lease.term == term && lease.holder.as_deref() != Some(from) {
            // Released, or another's: the claim is older than the Lease.
            return false;
        }
        // Its own is of a lesser term.
        self.lose();
        self.promise = Some(Promise { term, until: now.saturating_add(PROMISE) });
        self.able_since = None;
        true
    }

    /// The term of a promise that is running.
    pub(super) fn promised(&self, now: Duration) -> Option<u64> {
        self.promise.as_ref().filter(|promise| promise.until > now).map(|promise| promise.term)
    }

    /// Until when this gateway, or one to which it has promised so, has the slot.
    pub(super) fn blocked(&self, members: &BTreeMap<String, Member>, now: Duration) -> Option<Duration> {
        let own = self.claim().map(|_| self.valid_until(members, now));
        let promised = self.promise.as_ref().map(|promise| promise.until);
        own.max(promised).filter(|until| *until > now)
    }

    /// A member's answer to a heartbeat that was sent then.
    pub(super) fn reported(&mut self, from: &str, report: &Report, sent: Duration) {
        if let Tenure::Claimed { term, confirmations } = &mut self.tenure
            && report.promised
            && *term == report.term
        {
            confirmations.acknowledge(from, sent);
        }
    }

    /// Members that are new: their promises are missed only from now on, since they take nothing for a while.
    pub(super) fn joined(&mut self, members: &BTreeMap<String, Member>, new: &[&String], now: Duration) {
        let oldest = self.oldest(members, now);
        let (Some(oldest), Some(confirmations)) = (oldest, self.confirmations()) else { return };
        for name in new {
            confirmations.join(name, oldest);
        }
    }

    /// When the heartbeat was sent since which all members have promised; `None` if one has promised nothing, or there is no claim.
    pub(super) fn oldest(&self, members: &BTreeMap<String, Member>, now: Duration) -> Option<Duration> {
        match &self.tenure {
            Tenure::Claimed { confirmations, .. } => confirmations.oldest(members.keys(), now),
            Tenure::GivenUp { .. } | Tenure::NotHeld { .. } => None,
        }
    }

    /// Until when a claim is confirmed.
    pub(super) fn valid_until(&self, members: &BTreeMap<String, Member>, now: Duration) -> Duration {
        let confirmed = match &self.tenure {
            Tenure::Claimed { confirmations, .. } => confirmations.last(members.keys(), now),
            Tenure::GivenUp { .. } | Tenure::NotHeld { .. } => None,
        };
        confirmed.map_or(Duration::ZERO, |at| at.saturating_add(VALIDITY))
    }

    /// Until when it may be used, with its term.
    pub(super) fn held(&self, members: &BTreeMap<String, Member>, now: Duration) -> Option<Held> {
        let held = match &self.tenure {
            Tenure::Claimed { term, .. } => Some(Held { term: *term, until: self.valid_until(members, now) }),
            Tenure::GivenUp { lingers, .. } | Tenure::NotHeld { lingers } => *lingers,
        };
        held.filter(|held| held.until > now)
    }

    pub(super) fn is_given_up(&self) -> bool {
        matches!(self.tenure, Tenure::GivenUp { .. })
    }

    /// Gives the slot up to another gateway if the API server has just taken a write of its Lease, and else has that tried first: what was
    /// given up and cannot be released would be held by no gateway. It lingers, so that packets find one of both gateways at any time.
    pub(super) fn hand_over(&mut self, successor: &str, members: &BTreeMap<String, Member>, now: Duration) {
        let is_writable = self.answered.is_some_and(|at| now < at.saturating_add(WRITABLE));
        match (self.held(members, now), is_writable && self.in_flight.is_none()) {
            _ if self.claim().is_none() => {}
            (held, true) => {
                // Else the gateway before this one may linger still.
                let is_settled = self.taken.is_none_or(|at| now >= at.saturating_add(LINGER));
                let until = now.saturating_add(LINGER);
                let lingers = held.filter(|_| is_settled);
                let lingers = lingers.map(|held| Held { until: held.until.min(until), ..held });
                self.give_up(Some(successor.to_owned()), lingers);
            }
            (_, false) => self.is_to_go = true,
        }
    }

    /// To whom the slot was given up.
    pub(super) fn successor(&self) -> Option<&str> {
        match &self.tenure {
            Tenure::GivenUp { successor, .. } => successor.as_deref(),
            Tenure::Claimed { .. } | Tenure::NotHeld { .. } => None,
        }
    }

    /// Gives the slot up, which may be used as `lingers` says.
    pub(super) fn give_up(&mut self, successor: Option<String>, lingers: Option<Held>) {
        let term = self.claim().unwrap_or(0);
        self.tenure = Tenure::GivenUp { term, successor, lingers };
        // The first write does not wait for the interval of renewals.
        self.wrote = None;
    }

    /// The write that says that the slot was given up.
    pub(super) fn release(&mut self, number: u32, now: Duration) -> Option<Write> {
        let Tenure::GivenUp { successor, .. } = &self.tenure else { return None };
        let successor = successor.clone();
        if self.is_write_due(now) {
            self.begin(WriteKind::Release, number, None, successor, now)
        } else {
            None
        }
    }

    /// Begins a write.
    pub(super) fn begin(
        &mut self,
        kind: WriteKind,
        slot: u32,
        holder: Option<String>,
        successor: Option<String>,
        now: Duration,
    ) -> Option<Write> {
        let lease = self.lease.as_ref()?;
        // That of its claim may be greater than the Lease's: after a restoration of etcd, or where a user has changed that.
        let term = match (kind, &self.tenure) {
            (WriteKind::Take, _) => lease.term.saturating_add(1).min(MAX_TERM),
            (WriteKind::Renew, Tenure::Claimed { term, .. })
            | (WriteKind::Release, Tenure::GivenUp { term, .. }) => lease.term.max(*term),
            (WriteKind::Release | WriteKind::Renew | WriteKind::Void, _) => lease.term,
        };
        let write = Write { slot, kind, base: lease.version, holder, term, successor, began: now };
        self.in_flight = Some(write.clone());
        self.wrote = Some(now);
        Some(write)
    }

    /// Takes the outcome of a write. Returns the cause by which the slot was got, if it was. A write that does not belong to what is known of
    /// the slot any more says nothing: the slot has got other addresses, or etcd was restored.
    pub(super) fn written(
        &mut self,
        own: &str,
        write: &Write,
        outcome: Outcome,
        now: Duration,
    ) -> Option<Cause> {
        if self.in_flight.as_ref() != Some(write) {
            return None;
        }
        self.in_flight = None;
        self.answered = None;
        let version = match outcome {
            Outcome::Done(version) => version,
            Outcome::Refused => {
                // Either it was never tried, or the Lease has changed, which will be seen. An attempt before it may have done that.
                return None;
            }
            Outcome::Unknown => {
                let has_base = self.lease.as_ref().is_some_and(|lease| lease.version == write.base);
                self.open_take |= write.kind == WriteKind::Take && has_base;
                return None;
            }
        };
        let is_given_up = self.is_given_up();
        let Write { holder, term, successor, .. } = write.clone();
        self.seen(own, Some(Lease { version, holder, term, successor }), now);
        let is_current = self.lease.as_ref().is_some_and(|lease| lease.version == version);
        let holds = matches!(write.kind, WriteKind::Renew | WriteKind::Take) && is_current;
        self.answered = is_current.then_some(now);
        let is_superseded = self.promised(now).is_some_and(|promised| promised > term);
        if !holds || is_given_up || is_superseded {
            return None;
        }
        let mut confirmations = self.confirmations().map(std::mem::take).unwrap_or_default();
        confirmations.renew(write.began);
        let is_new = self.claim() != Some(term);
        if is_new {
            confirmations.forget_promises();
            self.taken = Some(now);
        }
        self.tenure = Tenure::Claimed { term, confirmations };
        is_new.then(|| if write.kind == WriteKind::Renew { Cause::Restart } else { self.takes_by })
    }
}
