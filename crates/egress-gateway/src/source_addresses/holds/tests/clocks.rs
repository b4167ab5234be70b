//! Gateways whose wall clocks are wrong. They write their time into Leases, where no gateway judges by it, and their certificates count
//! whatever the time is.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use fairlead_source_addresses::hold::{Hold, Outcome, Write};
use fairlead_source_addresses::leases::{ANNOTATION_ADDRESSES, lease_patch, slot_lease};
use fairlead_transport::AnyCertificate;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::MicroTime;
use k8s_openapi::jiff::Timestamp;
use proptest::array::{uniform2, uniform3};
use proptest::prelude::*;
use rustls::client::danger::ServerCertVerifier as _;
use rustls::pki_types::{ServerName, UnixTime};
use rustls::server::danger::ClientCertVerifier as _;
use serde_json::{Value, json};

use crate::certificate::OwnCertificate;
use crate::source_addresses::holds::TICK;

const GATEWAYS: usize = 3;
/// The right time when the test begins, in seconds since the epoch.
const BEGIN: i64 = 1_767_225_600;
const HOUR: i64 = 3600;
/// Ticks until a slot has a holder, while the holder is away, and until the end.
const SETTLED: usize = 200;
const AWAY: usize = 100;
const END: usize = 500;
/// Ticks in three seconds.
const MOST_UNHELD: usize = 60;

/// Gateways, and an API server with the Lease of one slot. What is sent arrives at once.
struct World {
    /// Time of the monotonic clocks.
    now: Duration,
    /// By how many seconds each wall clock is wrong.
    errors: [i64; GATEWAYS],
    /// Errors of the times that were written, in seconds.
    written: BTreeSet<i64>,
    version: u64,
    lease: Value,
    gateways: [Option<Hold>; GATEWAYS],
    /// Until when each kernel uses the addresses.
    kernels: [Duration; GATEWAYS],
}

fn name(number: usize) -> String {
    format!("g{number}")
}

/// A JSON merge patch (RFC 7396).
fn merge(target: &mut Value, patch: &Value) {
    let Some(fields) = patch.as_object() else {
        *target = patch.clone();
        return;
    };
    if !target.is_object() {
        *target = json!({});
    }
    for (key, value) in fields {
        if value.is_null() {
            target.as_object_mut().unwrap().remove(key);
        } else {
            merge(&mut target[key.as_str()], value);
        }
    }
}

impl World {
    fn new(errors: [i64; GATEWAYS]) -> Self {
        let annotations = json!({ ANNOTATION_ADDRESSES: "192.0.2.1" });
        let metadata = json!({ "name": "nat-source-0", "resourceVersion": "1", "annotations": annotations });
        let mut world = Self {
            now: Duration::from_secs(1000),
            errors,
            written: BTreeSet::new(),
            version: 1,
            lease: json!({ "metadata": metadata }),
            gateways: [const { None }; GATEWAYS],
            kernels: [Duration::ZERO; GATEWAYS],
        };
        (0..GATEWAYS).for_each(|number| world.start(number));
        world
    }

    fn start(&mut self, number: usize) {
        let mut hold = Hold::new(&name(number));
        hold.set_slots(1);
        hold.set_healthy(true);
        hold.members(&(0..GATEWAYS).map(name).collect(), self.now);
        self.gateways[number] = Some(hold);
        self.show(number);
    }

    /// The watch of a gateway shows the Lease.
    fn show(&mut self, number: usize) {
        let lease = slot_lease(&serde_json::from_value(self.lease.clone()).unwrap()).unwrap().lease;
        if let Some(hold) = &mut self.gateways[number] {
            hold.lease(0, Some(lease), self.now);
        }
    }

    fn write(&mut self, number: usize, write: &Write) -> Outcome {
        let right = BEGIN + i64::try_from(self.now.as_secs()).unwrap();
        let wall = Timestamp::from_second(right + self.errors[number]).unwrap();
        let patch = lease_patch(write, MicroTime(wall)).unwrap();
        if patch["metadata"]["resourceVersion"] != self.lease["metadata"]["resourceVersion"] {
            return Outcome::Refused;
        }
        merge(&mut self.lease, &patch);
        self.version += 1;
        self.lease["metadata"]["resourceVersion"] = json!(self.version.to_string());
        let said: Timestamp = self.lease["spec"]["renewTime"].as_str().unwrap().parse().unwrap();
        self.written.insert(said.as_second() - right);
        Outcome::Done(self.version)
    }

    fn turn(&mut self, number: usize) {
        let now = self.now;
        let Some(hold) = &mut self.gateways[number] else { return };
        let actions = hold.tick(now);
        let held = hold.held(now).get(&0).map(|held| held.until);
        // Else an earlier process may have left something.
        if held.is_some() || !hold.undecided().contains(&0) {
            self.kernels[number] = held.unwrap_or_default();
        }
        if let Some(heartbeat) = actions.heartbeat {
            for other in (0..GATEWAYS).filter(|other| *other != number) {
                let Some(member) = &mut self.gateways[other] else { continue };
                let answer = member.heartbeat(&name(number), &heartbeat, now);
                if let Some(hold) = &mut self.gateways[number] {
                    hold.answer(&name(other), &answer, now);
                }
            }
        }
        for write in actions.writes {
            let outcome = self.write(number, &write);
            if let Some(hold) = &mut self.gateways[number] {
                hold.written(&write, outcome, now);
            }
            (0..GATEWAYS).for_each(|other| self.show(other));
        }
    }

    /// Gateways that use the addresses after the next tick.
    fn tick(&mut self) -> Vec<usize> {
        self.now += TICK;
        (0..GATEWAYS).for_each(|number| self.turn(number));
        (0..GATEWAYS).filter(|number| self.kernels[*number] > self.now).collect()
    }
}

/// Gateways that use the addresses after each tick, and the errors of the times in the Lease. The holder crashes and starts again
/// later, and meanwhile the errors become the others.
fn run([before, after]: [[i64; GATEWAYS]; 2], crash: usize) -> (Vec<Vec<usize>>, BTreeSet<i64>) {
    let mut world = World::new(before);
    let mut users: Vec<Vec<usize>> = Vec::new();
    let mut crashed = None;
    for tick in 0..END {
        if tick == crash {
            crashed = users.last().and_then(|users| users.first().copied());
            world.gateways[crashed.unwrap()] = None;
        }
        if tick == crash + AWAY / 2 {
            world.errors = after;
        }
        if tick == crash + AWAY {
            world.start(crashed.unwrap());
        }
        users.push(world.tick());
    }
    (users, world.written)
}

fn errors() -> impl Strategy<Value = [i64; GATEWAYS]> {
    uniform3(prop_oneof![Just(HOUR), Just(-HOUR), -24 * HOUR..=24 * HOUR])
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn wrong_clocks_change_nothing_of_who_holds_a_slot(
        errors in uniform2(errors()), crash in SETTLED..SETTLED + 50,
    ) {
        let (users, written) = run(errors, crash);
        let (right, zero) = run([[0; GATEWAYS]; 2], crash);
        prop_assert_eq!(&users, &right);
        prop_assert_eq!(zero, BTreeSet::from([0]));
        prop_assert!(!written.is_empty() && written.iter().all(|it| errors.as_flattened().contains(it)));
        prop_assert!(users.iter().all(|users| users.len() <= 1), "two at once: {users:?}");
        let unheld = users[SETTLED - 1..].iter().filter(|users| users.is_empty()).count();
        prop_assert!(unheld < MOST_UNHELD, "{unheld} ticks without a holder");
        prop_assert_eq!(users.last().map(Vec::len), Some(1));
        prop_assert_ne!(users.last(), users.get(crash - 1));
    }
}

#[test]
fn certificates_count_whatever_the_time_is() {
    let own = OwnCertificate::generate().unwrap();
    let any = AnyCertificate(Arc::new(rustls::crypto::aws_lc_rs::default_provider()));
    let name = ServerName::try_from("192.0.2.1").unwrap();
    let now = u64::try_from(BEGIN).unwrap();
    for seconds in [0, now - 3600, now, now + 3600, 2 * now] {
        let time = UnixTime::since_unix_epoch(Duration::from_secs(seconds));
        any.verify_server_cert(&own.certificate, &[], &name, &[], time).unwrap();
        any.verify_client_cert(&own.certificate, &[], time).unwrap();
    }
}
