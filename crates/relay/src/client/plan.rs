//! Plan of the links of a client and of its attempts to connect, without I/O, a clock or randomness: one link is active, and
//! where the relay has other replicas, a second one at another of them stands by.

use std::time::{Duration, Instant};

use fairlead_limits::{Backoff, part};

/// Stand-by links are made within this time after they can be, so that clients do not all come at once.
const SPREAD: Duration = Duration::from_secs(5);
/// The longest pause between attempts at a stand-by link: a load balancer may lead to the same replica again and again.
const LONGEST_STANDBY: Duration = Duration::from_secs(300);

/// Role of a connection among the links.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Role {
    Active,
    Standby,
}

/// Reason why a link has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum End {
    /// The link broke, or the relay said nothing more.
    Lost,
    /// The relay ended it with an error.
    Refused,
}

/// Effect on the other links of one that has ended or is about to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Change {
    /// There is no active link any more.
    Down,
    /// Nothing.
    None,
    /// This link, which stood by, is the active one.
    Promoted(u64),
}

/// The links of a client. Numbers of links grow.
#[derive(Debug)]
pub(super) struct Plan {
    active: Option<Link>,
    standby: Option<Link>,
    backoff: Backoff,
    standby_backoff: Backoff,
    /// The next attempts.
    active_at: Option<Instant>,
    standby_at: Option<Instant>,
}

#[derive(Debug, Clone, Copy)]
struct Link {
    number: u64,
    replica: [u8; 16],
    since: Instant,
    /// Other replicas that accept stand-by links, as the relay says over this one.
    others: u8,
    is_draining: bool,
}

impl Plan {
    /// Without links; connects at once.
    pub(super) fn new(now: Instant) -> Self {
        Self {
            active: None,
            standby: None,
            backoff: Backoff::default(),
            standby_backoff: Backoff::up_to(LONGEST_STANDBY),
            active_at: Some(now),
            standby_at: None,
        }
    }

    /// The next attempt, if there is to be one.
    pub(super) fn due(&self) -> Option<(Instant, Role)> {
        let active = self.active_at.map(|at| (at, Role::Active));
        active.or_else(|| self.standby_at.map(|at| (at, Role::Standby)))
    }

    /// The active link.
    pub(super) fn active(&self) -> Option<u64> {
        self.active.map(|link| link.number)
    }

    /// The link that stands by.
    pub(super) fn standby(&self) -> Option<u64> {
        self.standby.map(|link| link.number)
    }

    /// The replica at which no stand-by link is of use.
    pub(super) fn active_replica(&self) -> Option<[u8; 16]> {
        self.active.map(|link| link.replica)
    }

    /// An attempt has succeeded. Returns the link that this one replaces.
    pub(super) fn connected(
        &mut self,
        now: Instant,
        role: Role,
        number: u64,
        replica: [u8; 16],
    ) -> Option<u64> {
        let link = Link { number, replica, since: now, others: 0, is_draining: false };
        let replaced = match role {
            Role::Active => {
                // Whether there are other replicas, the relay says over the new link.
                self.active_at = None;
                self.standby_at = None;
                self.active.replace(link)
            }
            Role::Standby => {
                self.standby_at = None;
                self.standby_backoff.reset();
                self.standby.replace(link)
            }
        };
        replaced.map(|link| link.number)
    }

    /// An attempt has failed, or led to the replica of the active link.
    pub(super) fn failed(&mut self, now: Instant, role: Role, random: u32) {
        match role {
            Role::Active => self.active_at = now.checked_add(self.backoff.next(random)),
            Role::Standby => self.standby_at = now.checked_add(self.standby_backoff.next(random)),
        }
    }

    /// A link has ended.
    pub(super) fn ended(&mut self, now: Instant, number: u64, end: End, random: u32) -> Change {
        if self.standby.take_if(|link| link.number == number).is_some() {
            let has_others = self.active.is_some_and(|link| link.others > 0);
            let soon = now.checked_add(part(SPREAD, random)).filter(|_| has_others);
            self.standby_at = self.standby_at.or(soon);
            return Change::None;
        }
        let Some(link) = self.active.take_if(|link| link.number == number) else { return Change::None };
        if let Some(number) = self.promote(now, part(SPREAD, random)) {
            return Change::Promoted(number);
        }
        let lasted = now.saturating_duration_since(link.since);
        let pause = match end {
            End::Lost => self.backoff.lost(lasted, random),
            End::Refused => self.backoff.refused(lasted, random),
        };
        self.active_at = self.active_at.or(now.checked_add(pause));
        self.standby_at = None;
        Change::Down
    }

    /// The relay is about to end a link, and asks to connect again after this time.
    pub(super) fn draining(&mut self, now: Instant, number: u64, after: Duration) -> Change {
        if let Some(standby) = self.standby.as_mut().filter(|link| link.number == number) {
            standby.is_draining = true;
            self.standby_at = now.checked_add(after);
        } else if let Some(active) = self.active.as_mut().filter(|link| link.number == number) {
            active.is_draining = true;
            if self.standby.is_some_and(|link| !link.is_draining)
                && let Some(number) = self.promote(now, after)
            {
                return Change::Promoted(number);
            }
            self.active_at = now.checked_add(self.backoff.asked(after));
        }
        Change::None
    }

    /// The link that stands by becomes active; another one is made after `pause`.
    fn promote(&mut self, now: Instant, pause: Duration) -> Option<u64> {
        let link = self.standby.take()?;
        self.active = Some(link);
        self.active_at = None;
        self.standby_at = now.checked_add(pause).filter(|_| link.others > 0);
        if link.is_draining {
            self.active_at = Some(now);
        }
        Some(link.number)
    }

    /// The relay says over a link how many other replicas it has.
    pub(super) fn replicas(&mut self, now: Instant, number: u64, others: u8, random: u32) {
        let links = [&mut self.active, &mut self.standby];
        if let Some(link) = links.into_iter().flatten().find(|link| link.number == number) {
            link.others = others;
        }
        if self.active() == Some(number) && self.standby.is_none() {
            self.standby_backoff.reset();
            let soon = now.checked_add(part(SPREAD, random));
            self.standby_at = soon.filter(|_| others > 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);
    const HALF: u32 = u32::MAX / 2;

    fn replica(number: u8) -> [u8; 16] {
        [number; 16]
    }

    /// Two links, at the replicas 1 and 2, and the moment at which the second was made.
    fn two_links() -> (Plan, Instant) {
        let start = Instant::now();
        let mut plan = Plan::new(start);
        assert_eq!(plan.due(), Some((start, Role::Active)));
        assert_eq!(plan.connected(start, Role::Active, 1, replica(1)), None);
        assert_eq!(plan.due(), None, "a relay without replicas has one link of a client");
        plan.replicas(start, 1, 2, u32::MAX);
        let at = start + SPREAD;
        assert_eq!((plan.due(), plan.active_replica()), (Some((at, Role::Standby)), Some(replica(1))));
        assert_eq!(plan.connected(at, Role::Standby, 2, replica(2)), None);
        plan.replicas(at, 2, 2, 0);
        assert_eq!(plan.due(), None);
        (plan, at)
    }

    #[test]
    fn a_standby_link_takes_over_at_once_and_another_one_is_made() {
        let (mut plan, at) = two_links();
        assert_eq!(plan.ended(at, 1, End::Lost, 0), Change::Promoted(2));
        assert_eq!((plan.active(), plan.standby()), (Some(2), None));
        assert_eq!(plan.due(), Some((at, Role::Standby)));
        plan.connected(at, Role::Standby, 3, replica(3));
        assert_eq!(plan.ended(at, 3, End::Lost, 0), Change::None);
        assert_eq!(plan.due(), Some((at, Role::Standby)));
        assert_eq!(plan.ended(at, 2, End::Lost, 0), Change::Down);
        assert!(matches!(plan.due(), Some((_, Role::Active))), "the active link comes first");
    }

    #[test]
    fn a_replica_that_drains_is_left_at_once_where_there_is_another_link() {
        let (mut plan, at) = two_links();
        assert_eq!(plan.draining(at, 1, 3 * SECOND), Change::Promoted(2));
        assert_eq!(plan.due(), Some((at + 3 * SECOND, Role::Standby)));
        // The older link ends later: nothing depends on it.
        assert_eq!(plan.ended(at + SECOND, 1, End::Lost, 0), Change::None);
        assert_eq!(plan.due(), Some((at + 3 * SECOND, Role::Standby)));
        // Without another link, the new one replaces it while it still works.
        assert_eq!(plan.draining(at, 2, SECOND), Change::None);
        assert_eq!(plan.due(), Some((at + SECOND, Role::Active)));
        assert_eq!(plan.connected(at + SECOND, Role::Active, 3, replica(3)), Some(2));
    }

    #[test]
    fn a_standby_link_that_drains_is_replaced_and_used_if_it_must() {
        let (mut plan, at) = two_links();
        assert_eq!(plan.draining(at, 2, SECOND), Change::None);
        assert_eq!(plan.due(), Some((at + SECOND, Role::Standby)));
        assert_eq!(plan.connected(at, Role::Standby, 3, replica(3)), Some(2));
        assert_eq!(plan.draining(at, 3, SECOND), Change::None);
        assert_eq!(plan.ended(at, 1, End::Lost, 0), Change::Promoted(3));
        assert_eq!(plan.due(), Some((at, Role::Active)), "it ends, too");
    }

    #[test]
    fn attempts_that_lead_to_the_same_replica_become_rare_until_there_are_others() {
        let (mut plan, mut now) = two_links();
        plan.ended(now, 2, End::Lost, HALF);
        let mut attempts = 0;
        let end = now + 3600 * SECOND;
        while now < end {
            now = plan.due().unwrap().0;
            plan.failed(now, Role::Standby, HALF);
            attempts += 1;
        }
        assert!((15..30).contains(&attempts), "{attempts} in an hour");
        plan.replicas(now, 1, 3, 0);
        assert_eq!(plan.due(), Some((now, Role::Standby)));
        plan.replicas(now, 1, 0, 0);
        assert_eq!(plan.due(), None, "the relay has no other replica");
    }

    #[test]
    fn a_lost_link_is_replaced_at_once_and_a_refused_one_after_a_pause() {
        let start = Instant::now();
        let mut plan = Plan::new(start);
        plan.connected(start, Role::Active, 1, replica(1));
        let later = start + 20 * SECOND;
        assert_eq!(plan.ended(later, 1, End::Lost, 0), Change::Down);
        assert_eq!(plan.due(), Some((later, Role::Active)));
        plan.failed(later, Role::Active, 0);
        assert_eq!(plan.due(), Some((later + SECOND / 2, Role::Active)));
        plan.connected(later, Role::Active, 2, replica(1));
        assert_eq!(plan.ended(later + 20 * SECOND, 2, End::Refused, 0), Change::Down);
        assert_eq!(plan.due(), Some((later + 21 * SECOND, Role::Active)));
    }
}
