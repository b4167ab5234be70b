//! Candidates with clocks hours apart, an API server with resource versions, answers that are lost, and crashes. One
//! monotonic time drives all of them.

use proptest::prelude::*;

use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn time(seconds: i64) -> Timestamp {
    Timestamp::from_second(1_800_000_000 + seconds).unwrap()
}

fn held_by(lease: &Lease) -> Option<&str> {
    lease.spec.as_ref().unwrap().holder_identity.as_deref()
}

/// The API server: a write is accepted only under the version that is stored.
#[derive(Default)]
struct Server(Option<Lease>, u64);

impl Server {
    fn write(&mut self, mut lease: Lease) -> Option<Lease> {
        let stored = self.0.as_ref().and_then(|stored| stored.metadata.resource_version.clone());
        if lease.metadata.resource_version != stored {
            return None;
        }
        self.1 += 1;
        lease.metadata.resource_version = Some(self.1.to_string());
        self.0 = Some(lease.clone());
        Some(lease)
    }
}

/// A candidate whose wall clock is off by so many seconds.
struct Candidate {
    elector: Elector,
    clock: i64,
    running: bool,
    /// Number of times it noticed that etcd was restored.
    restorations: usize,
}

impl Candidate {
    fn new(name: &str, clock: i64) -> Self {
        Self { elector: Elector::new(name.to_owned()), clock, running: true, restorations: 0 }
    }

    /// Reads, and writes what it claims; `lost` loses the answer to the write.
    fn attempt(&mut self, server: &mut Server, start: Instant, now: Instant, lost: bool) {
        let seconds = i64::try_from((now - start).as_secs()).unwrap();
        self.restorations += usize::from(self.elector.observe(now, server.0.clone()));
        let Some(claim) = self.elector.claim(now, time(seconds + self.clock)) else { return };
        if let Some(stored) = server.write(claim).filter(|_| !lost) {
            self.elector.accepted(now, stored);
        }
    }
}

#[test]
fn the_leader_notices_a_lease_of_a_backup_however_much_is_written_after_it() {
    let (start, mut server) = (Instant::now(), Server::default());
    let (mut leader, mut standby) = (Candidate::new("leader", 0), Candidate::new("standby", 0));
    let mut both = |server: &mut Server, second: u32| {
        leader.attempt(server, start, start + second * SECOND, false);
        standby.attempt(server, start, start + second * SECOND, false);
        (leader.restorations, standby.restorations)
    };
    assert_eq!(both(&mut server, 0), (0, 0));
    let backup = server.0.clone();
    assert_eq!(both(&mut server, 2), (0, 0));
    assert_eq!(both(&mut server, 4), (0, 0));
    server.0 = backup;
    // Other programs write, or the operator raised the version.
    server.1 += 1_000_000_000;
    assert_eq!(both(&mut server, 6), (1, 0), "the standby reads what the leader has written since");
    assert_eq!(both(&mut server, 8), (1, 0));
    server.0 = None;
    assert_eq!(both(&mut server, 10), (2, 0), "a backup from before the first election");
    assert_eq!(both(&mut server, 12), (2, 0));
}

#[test]
fn a_standby_that_takes_over_has_seen_the_lease_of_the_backup() {
    let (start, mut server) = (Instant::now(), Server::default());
    let (mut leader, mut standby) = (Candidate::new("leader", 0), Candidate::new("standby", 0));
    leader.attempt(&mut server, start, start, false);
    let backup = server.0.clone();
    leader.attempt(&mut server, start, start + 2 * SECOND, false);
    standby.attempt(&mut server, start, start + 2 * SECOND, false);
    server.0 = backup;
    for second in [30, 45] {
        standby.attempt(&mut server, start, start + second * SECOND, false);
    }
    assert_eq!(held_by(server.0.as_ref().unwrap()), Some("standby"));
    assert_eq!(standby.restorations, 1);
}

#[test]
fn a_missing_lease_is_created_with_the_fields_of_client_go() {
    let (now, elector) = (Instant::now(), Elector::new("a".to_owned()));
    let claim = elector.claim(now, time(0)).unwrap();
    let json = serde_json::to_value(&claim).unwrap();
    assert_eq!(json["metadata"]["resourceVersion"], serde_json::Value::Null);
    let expected = serde_json::json!({
        "holderIdentity": "a", "leaseDurationSeconds": 15, "leaseTransitions": 0,
        "acquireTime": "2027-01-15T08:00:00.000000Z", "renewTime": "2027-01-15T08:00:00.000000Z",
    });
    assert_eq!(json["spec"], expected);
}

#[test]
fn a_renewal_keeps_the_acquire_time_and_a_takeover_counts_as_a_transition() {
    let (start, mut server) = (Instant::now(), Server::default());
    let (mut one, mut two) = (Candidate::new("one", 0), Candidate::new("two", 0));
    one.attempt(&mut server, start, start, false);
    one.attempt(&mut server, start, start + 2 * SECOND, false);
    let spec = server.0.clone().unwrap().spec.unwrap();
    assert_eq!((spec.acquire_time, spec.renew_time), (Some(MicroTime(time(0))), Some(MicroTime(time(2)))));
    assert_eq!(spec.lease_transitions, Some(0));
    two.attempt(&mut server, start, start + 3 * SECOND, false);
    assert_eq!(two.elector.claim(start + 17 * SECOND, time(17)), None);
    two.attempt(&mut server, start, start + 18 * SECOND, false);
    let spec = server.0.unwrap().spec.unwrap();
    assert_eq!((spec.holder_identity.as_deref(), spec.lease_transitions), (Some("two"), Some(1)));
    assert_eq!(spec.acquire_time, Some(MicroTime(time(18))));
}

/// With a comparison of wall clocks the first case would block the takeover for an hour, and the second would take the
/// Lease away from a living leader.
#[test]
fn a_takeover_takes_the_same_time_whatever_the_clocks_show() {
    for clock in [3600, -3600] {
        let (start, mut server) = (Instant::now(), Server::default());
        let (mut leader, mut standby) = (Candidate::new("leader", clock), Candidate::new("standby", 0));
        for second in (0..60).step_by(2) {
            leader.attempt(&mut server, start, start + second * SECOND, false);
            standby.attempt(&mut server, start, start + second * SECOND, false);
            assert!(!standby.elector.leads(start + second * SECOND), "clock {clock}, second {second}");
        }
        // The leader renewed last in second 58, which the standby observed at once.
        let takeover = (60..120).step_by(2).find(|second| {
            standby.attempt(&mut server, start, start + *second * SECOND, false);
            standby.elector.leads(start + *second * SECOND)
        });
        assert_eq!(takeover, Some(74), "clock {clock}");
    }
}

#[test]
fn a_released_lease_is_acquired_at_once() {
    let (start, mut server) = (Instant::now(), Server::default());
    let (mut one, mut two) = (Candidate::new("one", 3600), Candidate::new("two", 0));
    assert_eq!(one.elector.release(time(0)), None);
    one.attempt(&mut server, start, start, false);
    two.attempt(&mut server, start, start, false);
    let released = one.elector.release(time(1)).unwrap();
    assert_eq!((held_by(&released), one.elector.leads(start)), (None, false));
    server.write(released).unwrap();
    two.attempt(&mut server, start, start + SECOND, false);
    assert!(two.elector.leads(start + SECOND));
}

#[test]
fn a_leader_that_cannot_renew_stops_before_another_may_start() {
    let (start, mut server) = (Instant::now(), Server::default());
    let mut leader = Candidate::new("leader", 0);
    leader.attempt(&mut server, start, start, false);
    assert_eq!(leader.elector.deadline(), Some(start + RENEW_DEADLINE));
    assert!(leader.elector.leads(start + RENEW_DEADLINE - SECOND));
    assert!(!leader.elector.leads(start + RENEW_DEADLINE));
    // Another holder is shown: it stops although its deadline has not passed.
    leader.attempt(&mut server, start, start + SECOND, false);
    let mut other = server.0.clone().unwrap();
    other.spec.as_mut().unwrap().holder_identity = Some("other".to_owned());
    leader.elector.observe(start + SECOND, Some(other));
    assert!(!leader.elector.leads(start + SECOND));
}

#[test]
fn a_change_of_metadata_alone_is_not_a_renewal() {
    let (start, mut server) = (Instant::now(), Server::default());
    let (mut one, mut two) = (Candidate::new("one", 0), Candidate::new("two", 0));
    one.attempt(&mut server, start, start, false);
    for second in 0..15 {
        let mut annotated = server.0.clone().unwrap();
        annotated.metadata.annotations = Some([("second".to_owned(), second.to_string())].into());
        server.write(annotated).unwrap();
        two.attempt(&mut server, start, start + second * SECOND, false);
        assert!(!two.elector.leads(start + second * SECOND));
    }
    two.attempt(&mut server, start, start + 15 * SECOND, false);
    assert!(two.elector.leads(start + 15 * SECOND));
}

#[derive(Debug, Clone)]
enum Step {
    /// A candidate reads and writes; the answer may be lost.
    Attempt(usize, bool),
    /// A candidate ends without releasing, or starts again with an empty memory.
    Toggle(usize),
    /// Milliseconds pass.
    Pass(u64),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..3usize, prop::bool::weighted(0.2)).prop_map(|(who, lost)| Step::Attempt(who, lost)),
        1 => (0..3usize).prop_map(Step::Toggle),
        4 => (0..5_000u64).prop_map(Step::Pass),
    ];
    prop::collection::vec(step, 0..200)
}

proptest! {
    /// There are never two leaders, whatever the clocks show and whichever answers are lost, and after at most one
    /// lease duration and two attempts of a candidate there is one.
    #[test]
    fn there_is_one_leader_at_most_and_soon_one_again(
        clocks in prop::array::uniform3(-7_200i64..7_200),
        steps in steps(),
    ) {
        let (start, mut server) = (Instant::now(), Server::default());
        let mut now = start;
        let names = ["a", "b", "c"];
        let mut candidates: Vec<Candidate> =
            names.iter().zip(clocks).map(|(name, clock)| Candidate::new(name, clock)).collect();
        for step in steps {
            match step {
                Step::Attempt(who, lost) if candidates[who].running => {
                    candidates[who].attempt(&mut server, start, now, lost);
                }
                Step::Attempt(..) => {}
                Step::Pass(milliseconds) => now += Duration::from_millis(milliseconds),
                Step::Toggle(who) => {
                    let running = !candidates[who].running;
                    candidates[who] = Candidate { running, ..Candidate::new(names[who], clocks[who]) };
                }
            }
            let leaders = candidates.iter().filter(|candidate| candidate.elector.leads(now)).count();
            prop_assert!(leaders <= 1, "{leaders} leaders");
        }
        candidates[0].running = true;
        for _ in 0..=(LEASE_DURATION.as_secs() / RETRY_PERIOD.as_secs() + 1) {
            for candidate in candidates.iter_mut().filter(|candidate| candidate.running) {
                candidate.attempt(&mut server, start, now, false);
            }
            now += RETRY_PERIOD;
        }
        prop_assert_eq!(candidates.iter().filter(|candidate| candidate.elector.leads(now)).count(), 1);
    }
}
