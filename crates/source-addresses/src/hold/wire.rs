//! Messages of the protocol as gateways send them.

use std::time::Duration;

use fairlead_wire::egress_peers as wire;

use super::message::{Answer, Claim, Condition, Heartbeat, Report};

/// Slots and claims of a message that are read: an Egress has at most 32.
const MOST: usize = 64;

impl From<&Heartbeat> for wire::Heartbeat {
    fn from(heartbeat: &Heartbeat) -> Self {
        let claim = |claim: &Claim| wire::Claim { slot: claim.slot, term: claim.term };
        Self {
            sequence: heartbeat.sequence,
            claims: heartbeat.claims.iter().map(claim).collect(),
            ready: heartbeat.condition.ready,
            held: heartbeat.condition.held,
            unhealthy: !heartbeat.condition.healthy,
            copies: heartbeat.condition.copies.iter().copied().collect(),
        }
    }
}

impl From<wire::Heartbeat> for Heartbeat {
    fn from(heartbeat: wire::Heartbeat) -> Self {
        let claims = heartbeat.claims.iter().take(MOST);
        let claims = claims.map(|claim| Claim { slot: claim.slot, term: claim.term });
        Self {
            sequence: heartbeat.sequence,
            claims: claims.collect(),
            condition: condition(heartbeat.ready, heartbeat.unhealthy, heartbeat.held, heartbeat.copies),
        }
    }
}

impl From<Answer> for wire::Answer {
    fn from(answer: Answer) -> Self {
        let report = |(slot, report): (&u32, &Report)| wire::Report {
            slot: *slot,
            term: report.term,
            promised: report.promised,
            // Rounded up: what is over a moment too late does no harm.
            blocked_milliseconds: report
                .blocked
                .map(|left| u32::try_from(left.as_micros().div_ceil(1000)).unwrap_or(u32::MAX)),
        };
        Self {
            sequence: answer.sequence,
            ready: answer.condition.ready,
            held: answer.condition.held,
            slots: answer.slots.iter().map(report).collect(),
            unhealthy: !answer.condition.healthy,
            copies: answer.condition.copies.iter().copied().collect(),
        }
    }
}

impl From<wire::Answer> for Answer {
    fn from(answer: wire::Answer) -> Self {
        let report = |report: &wire::Report| {
            let blocked = report.blocked_milliseconds.map(|left| {
                // No gateway promises for longer.
                Duration::from_millis(left.into()).min(super::PROMISE)
            });
            (report.slot, Report { term: report.term, promised: report.promised, blocked })
        };
        Self {
            sequence: answer.sequence,
            slots: answer.slots.iter().take(MOST).map(report).collect(),
            condition: condition(answer.ready, answer.unhealthy, answer.held, answer.copies),
        }
    }
}

/// Condition that a gateway reports of itself.
fn condition(ready: bool, unhealthy: bool, held: u32, copies: Vec<u32>) -> Condition {
    let copies = copies.into_iter().take(MOST).collect();
    Condition { ready, healthy: !unhealthy, held, copies }
}
