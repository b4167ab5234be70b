//! Choice of the write of a slot's Lease that is due, and of the time at which this gateway may take the slot.

use std::time::Duration;

use super::{Cause, Hold, JOIN, Lease, Member, PROMISE, SILENCE, Write, WriteKind, is_heard};

/// Time for which others leave a released slot to the gateway that was named.
const SUCCESSION: Duration = Duration::from_millis(700);
/// A gateway takes a slot later for each one that it holds, by its place among the names of those that hold as many, and if it has no copy of
/// the slot's connections; up to a limit.
const DELAY_HELD: Duration = Duration::from_millis(150);
const DELAY_PLACE: Duration = Duration::from_millis(50);
const DELAY_NO_COPY: Duration = Duration::from_millis(200);
const DELAY_LIMIT: Duration = Duration::from_millis(400);

impl Hold {
    /// The write of a slot's Lease that is due.
    pub(super) fn write(&mut self, number: u32, now: Duration) -> Option<Write> {
        let (delay, may_take) = (self.delay(number, now), self.may_take(number, now));
        let own = self.own.clone();
        let slot = self.slots.get_mut(&number)?;
        if slot.in_flight.is_some() {
            return None;
        }
        if slot.is_given_up() {
            return slot.release(number, now);
        }
        let is_due = slot.is_write_due(now);
        let lease = slot.lease.clone()?;
        if slot.claim().is_some() {
            let oldest = slot.oldest(&self.members, now);
            let is_silent = oldest.is_none_or(|at| now >= at.saturating_add(SILENCE));
            let renews = (is_silent || slot.is_to_go) && is_due;
            return if renews { slot.begin(WriteKind::Renew, number, Some(own), None, now) } else { None };
        }
        if lease.holder.as_ref() == Some(&own) {
            // This gateway has it from before its program started, or by a write without an answer. It may have made a promise since.
            if !is_due || slot.promised(now).is_some() {
                return None;
            }
            return match self.draining {
                true => slot.begin(WriteKind::Release, number, None, None, now),
                false => slot.begin(WriteKind::Renew, number, Some(own), None, now),
            };
        }
        if may_take {
            return self.take(number, &lease, delay, now);
        }
        slot.able_since = None;
        // Whether an earlier attempt succeeds must be known before this gateway can promise anything.
        let voids = slot.open_take && is_due;
        if voids { slot.begin(WriteKind::Void, number, lease.holder, lease.successor, now) } else { None }
    }

    /// The write that takes a slot which this gateway may take, once those have had time that come first.
    fn take(&mut self, number: u32, lease: &Lease, delay: Duration, now: Duration) -> Option<Write> {
        let slot = self.slots.get_mut(&number)?;
        let is_successor = lease.successor.as_ref() == Some(&self.own);
        let able_since = *slot.able_since.get_or_insert(now);
        let delay = if is_successor { Duration::ZERO } else { delay };
        let is_time = now >= able_since.saturating_add(delay) && (slot.is_write_due(now) || is_successor);
        if !is_time {
            return None;
        }
        let holder = lease.holder.as_ref().map(|holder| self.members.get(holder));
        slot.takes_by = match holder {
            // One that is heard has most likely given it up, and its Lease does not say so yet.
            Some(holder) if !holder.is_some_and(|holder| is_heard(holder, now)) => Cause::Failure,
            None if !is_successor => Cause::Free,
            _ => Cause::Handover,
        };
        slot.begin(WriteKind::Take, number, Some(self.own.clone()), None, now)
    }

    /// Whether nothing but the order among gateways keeps this one from taking a slot.
    fn may_take(&self, number: u32, now: Duration) -> bool {
        let Some(slot) = self.slots.get(&number) else { return false };
        let (Some(lease), Some(joined)) = (&slot.lease, self.joined) else { return false };
        if !self.is_able() || (self.healthy == Some(false) && self.hears_healthy(now)) {
            return false;
        }
        let released = lease.holder.is_none();
        // Its holder had this term, so all of before are void.
        let is_void = |term: u64| released && term <= lease.term;
        if slot.promised(now).is_some_and(|term| !is_void(term)) {
            return false;
        }
        let blocks = |member: &Member| {
            let block = member.blocks.get(&number).filter(|block| block.until > now && !is_void(block.term));
            is_heard(member, now) && block.is_some()
        };
        if self.members.values().any(blocks) {
            return false;
        }
        let since = |time: Duration| now.saturating_sub(time);
        if !released {
            return since(slot.seen_at) >= PROMISE && since(joined) >= JOIN;
        }
        match &lease.successor {
            Some(successor) if *successor != self.own => {
                let answers = self.members.get(successor).is_some_and(|member| is_heard(member, now));
                !answers || since(slot.seen_at) >= SUCCESSION
            }
            _ => true,
        }
    }

    /// Whether another gateway answers that is ready and healthy.
    fn hears_healthy(&self, now: Duration) -> bool {
        let is_healthy = |member: &Member| member.ready_since.is_some() && member.is_healthy;
        self.members.values().any(|member| is_heard(member, now) && is_healthy(member))
    }

    /// Time for which others have the precedence for a slot.
    fn delay(&self, number: u32, now: Duration) -> Duration {
        let own = self.count(now);
        let before = |(name, member): &(&String, &Member)| {
            is_heard(member, now)
                && member.ready_since.is_some()
                && member.held == own
                && name.as_str() < self.own.as_str()
        };
        let place = u32::try_from(self.members.iter().filter(before).count()).unwrap_or(u32::MAX);
        let order = DELAY_HELD.saturating_mul(own).saturating_add(DELAY_PLACE.saturating_mul(place));
        let copy = if self.copies.contains(&number) { Duration::ZERO } else { DELAY_NO_COPY };
        order.min(DELAY_LIMIT).saturating_add(copy)
    }
}
