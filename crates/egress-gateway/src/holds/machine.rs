//! The state machine, shared by the task and the connections of other gateways, which bring heartbeats.

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
    state: Mutex<State>,
}

struct State {
    hold: Hold,
    /// Who holds each slot, as its Lease says.
    holders: std::collections::BTreeMap<u32, Option<String>>,
}

impl Machine {
    /// The machine of the gateway in this pod.
    pub(crate) fn new(pod: &str) -> Self {
        let state = State { hold: Hold::new(pod), holders: std::collections::BTreeMap::new() };
        Self { start: Instant::now(), state: Mutex::new(state) }
    }

    /// Works on it, at the present time of its clock.
    pub(crate) fn with<T>(&self, work: impl FnOnce(&mut Hold, Duration) -> T) -> T {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        // Read under the lock: time never goes back for the machine.
        let now = self.start.elapsed();
        work(&mut state.hold, now)
    }

    /// A slot's Lease was read.
    pub(crate) fn lease(&self, slot: u32, lease: Option<hold::Lease>) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let now = self.start.elapsed();
        state.holders.insert(slot, lease.as_ref().and_then(|lease| lease.holder.clone()));
        state.hold.lease(slot, lease, now);
    }

    /// These writes were not tried.
    pub(crate) fn refuse(&self, writes: &[Write]) {
        self.with(|hold, now| writes.iter().for_each(|write| hold.written(write, Outcome::Refused, now)));
    }

    /// The greatest known term of a slot, and who holds it.
    pub(crate) fn slot(&self, slot: u32) -> (u64, Option<String>) {
        let state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        (state.hold.term(slot).unwrap_or(0), state.holders.get(&slot).cloned().flatten())
    }
}

impl peers::Hold for Machine {
    fn heartbeat(&self, from: &str, heartbeat: wire::Heartbeat) -> wire::Answer {
        let claims = heartbeat.claims.iter().take(MOST);
        let claims = claims.map(|claim| hold::Claim { slot: claim.slot, term: claim.term });
        let heartbeat = hold::Heartbeat {
            sequence: heartbeat.sequence,
            claims: claims.collect(),
            ready: heartbeat.ready,
            held: heartbeat.held,
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
            ready: answer.ready,
            held: answer.held,
            slots: answer.slots.iter().map(report).collect(),
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
            ready: answer.ready,
            held: answer.held,
            slots: answer.slots.iter().take(MOST).map(report).collect(),
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
        ready: heartbeat.ready,
        held: heartbeat.held,
    }
}
