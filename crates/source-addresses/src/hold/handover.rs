//! Choice of the slots that a gateway hands over, and of the gateways that get them.

use std::time::Duration;

use super::slot::Slot;
use super::{Hold, Member, is_heard};

/// Time for which a gateway must have been ready before another one hands a slot over to it, to share the slots.
const SETTLED: Duration = Duration::from_secs(10);

impl Hold {
    /// Hands slots over that another gateway should have.
    pub(super) fn hand_over(&mut self, now: Duration) {
        self.slots.values_mut().for_each(|slot| slot.is_to_go = false);
        if self.draining || self.healthy == Some(false) {
            self.hand_all_over(now);
        } else {
            self.share(now);
        }
    }

    /// To healthy gateways. One that is to end takes others, too, rather than let connections end.
    fn hand_all_over(&mut self, now: Duration) {
        let mut able = self.able(Duration::ZERO, now);
        able.retain(|(_, member)| member.is_healthy || self.draining);
        // What was given up to them and they have not taken yet counts as theirs.
        for successor in self.slots.values().filter_map(Slot::successor) {
            let of_it = able.iter_mut().filter(|(name, _)| name == successor);
            of_it.for_each(|(_, member)| member.held = member.held.saturating_add(1));
        }
        for (number, slot) in self.slots.iter_mut().filter(|(_, slot)| slot.claim().is_some()) {
            let with_copy = able.iter_mut().filter(|(_, member)| member.copies.contains(number));
            let first = with_copy.min_by_key(|(_, member)| (!member.is_healthy, member.held));
            if let Some((name, member)) = first {
                member.held = member.held.saturating_add(1);
                slot.hand_over(name, &self.members, now);
            }
        }
    }

    /// One of several slots to a gateway that holds none. One at a time: what that one holds then is known with its next heartbeat.
    fn share(&mut self, now: Duration) {
        if self.count(now) < 2 || self.slots.values().any(Slot::is_given_up) {
            return;
        }
        let mut idle = self.able(SETTLED, now);
        idle.retain(|(_, member)| member.is_healthy && member.held == 0);
        let is_settled = |slot: &Slot| {
            slot.claim().is_some() && slot.taken.is_none_or(|at| now >= at.saturating_add(SETTLED))
        };
        let settled = self.slots.iter_mut().rev().filter(|(_, slot)| is_settled(slot));
        for (number, slot) in settled {
            if let Some((name, _)) = idle.iter().find(|(_, member)| member.copies.contains(number)) {
                return slot.hand_over(name, &self.members, now);
            }
        }
    }

    /// Members that answer and have been able to take slots for this long, by their names.
    fn able(&self, settled: Duration, now: Duration) -> Vec<(String, Member)> {
        let is_settled = |member: &Member| {
            let since = member.ready_since.filter(|_| is_heard(member, now));
            since.is_some_and(|since| now >= since.saturating_add(settled))
        };
        let able = self.members.iter().filter(|(_, member)| is_settled(member));
        able.map(|(name, member)| (name.clone(), member.clone())).collect()
    }
}
