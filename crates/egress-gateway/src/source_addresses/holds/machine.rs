//! The state machine, shared by the task and the connections of other gateways, which bring heartbeats.

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use fairlead_source_addresses::hold::{self, Hold, Outcome, Write};
use fairlead_wire::egress_peers as wire;

use crate::source_addresses::peers;

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

    /// The machine of a gateway that knows its members and the Leases of all slots, and has sent a heartbeat.
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

    /// The instant at which the clock of the machine shows `time`; `None` beyond what an `Instant` can be.
    pub(crate) fn instant(&self, time: Duration) -> Option<Instant> {
        self.start.checked_add(time)
    }

    /// These writes were not tried.
    pub(crate) fn refuse(&self, writes: &[Write]) {
        self.with(|hold, now| writes.iter().for_each(|write| hold.written(write, Outcome::Refused, now)));
    }
}

impl peers::Hold for Machine {
    fn heartbeat(&self, from: &str, heartbeat: wire::Heartbeat) -> wire::Answer {
        let heartbeat = heartbeat.into();
        self.with(|hold, now| hold.heartbeat(from, &heartbeat, now)).into()
    }

    fn answer(&self, from: &str, answer: wire::Answer) {
        let answer = answer.into();
        self.with(|hold, now| hold.answer(from, &answer, now));
    }
}
