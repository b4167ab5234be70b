//! The state machine, shared by the task and the connections of other gateways, which bring heartbeats.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fairlead_egress::hold::{self, Hold, Outcome, Write};
use fairlead_wire::egress_peers as wire;

use crate::peers;

/// Slots and claims of a message that are read: an Egress has at most 32.
const MOST: usize = 64;

/// See the module.
pub(crate) struct Machine {
    start: Instant,
    hold: Mutex<Hold>,
}

impl Machine {
    /// The machine of the gateway in this pod.
    pub(crate) fn new(pod: &str) -> Self {
        Self { start: Instant::now(), hold: Mutex::new(Hold::new(pod)) }
    }

    /// That of a gateway that knows its members and the Leases of all slots, and has sent a heartbeat.
    pub(crate) fn among(pod: &str, members: &BTreeSet<String>, leases: &[hold::Lease]) -> Self {
        let machine = Self::new(pod);
        machine.with(|hold, now| {
            hold.set_slots(u32::try_from(leases.len()).unwrap_or(u32::MAX));
            hold.set_healthy(true);
            hold.members(members, now);
            for (slot, lease) in (0..).zip(leases) {
                hold.lease(slot, Some(lease.clone()), now);
            }
            hold.tick(now);
        });
        machine
    }

    /// Works on it, at the present time of its clock.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut Hold, Duration) -> T) -> T {
        let mut hold = self.hold.lock().unwrap_or_else(PoisonError::into_inner);
        // Read under the lock: time never goes back for the machine.
        let now = self.start.elapsed();
        work(&mut hold, now)
    }

    /// When its clock shows this time.
    pub(crate) fn instant(&self, time: Duration) -> Option<Instant> {
        self.start.checked_add(time)
    }

    /// These writes were not tried.
    pub(crate) fn refuse(&self, writes: &[Write]) {
        self.with(|hold, now| writes.iter().for_each(|write| hold.written(write, Outcome::Refused, now)));
    }
}

/// Condition that a gateway reports of itself, from the wire.
fn condition(ready: bool, unhealthy: bool, held: u32, copies: Vec<u32>) -> hold::Condition {
    let copies = copies.into_iter().take(MOST).collect();
    hold::Condition { ready, healthy: !unhealthy, held, copies }
}

impl peers::Hold for Machine {
    fn heartbeat(&self, from: &str, heartbeat: wire::Heartbeat) -> wire::Answer {
        let claims = heartbeat.claims.iter().take(MOST);
        let claims = claims.map(|claim| hold::Claim { slot: claim.slot, term: claim.term });
        let heartbeat = hold::Heartbeat {
            sequence: heartbeat.sequence,
            claims: claims.collect(),
            condition: condition(heartbeat.ready, heartbeat.unhealthy, heartbeat.held, heartbeat.copies),
        };
        let answer = self.with(|hold, now| hold.heartbeat(from, &heartbeat, now));
        let report = |(slot, report): (&u32, &hold::Report)| wire::Report {
            slot: *slot,
            term: report.term,
            promised: report.promised,
            // Rounded up: what is over a moment too late does no harm.
            blocked_milliseconds: report
                .blocked
                .map(|left| u32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)),
        };
        wire::Answer {
            sequence: answer.sequence,
            ready: answer.condition.ready,
            held: answer.condition.held,
            slots: answer.slots.iter().map(report).collect(),
            unhealthy: !answer.condition.healthy,
            copies: answer.condition.copies.iter().copied().collect(),
        }
    }

    fn answer(&self, from: &str, answer: wire::Answer) {
        let report = |report: &wire::Report| {
            let blocked = report.blocked_milliseconds.map(|left| {
                // No gateway promises for longer.
                Duration::from_millis(left.into()).min(hold::PROMISE)
            });
            (report.slot, hold::Report { term: report.term, promised: report.promised, blocked })
        };
        let answer = hold::Answer {
            sequence: answer.sequence,
            slots: answer.slots.iter().take(MOST).map(report).collect(),
            condition: condition(answer.ready, answer.unhealthy, answer.held, answer.copies),
        };
        self.with(|hold, now| hold.answer(from, &answer, now));
    }
}

/// A heartbeat as it is sent.
pub(crate) fn to_wire(heartbeat: &hold::Heartbeat) -> wire::Heartbeat {
    let claim = |claim: &hold::Claim| wire::Claim { slot: claim.slot, term: claim.term };
    wire::Heartbeat {
        sequence: heartbeat.sequence,
        claims: heartbeat.claims.iter().map(claim).collect(),
        ready: heartbeat.condition.ready,
        held: heartbeat.condition.held,
        unhealthy: !heartbeat.condition.healthy,
        copies: heartbeat.condition.copies.iter().copied().collect(),
    }
}
