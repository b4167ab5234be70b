mod clocks;

use fairlead_address::IpFamily;
use fairlead_source_addresses::hold::{Lease, WriteKind};
use fairlead_wire::egress_peers::Claim;

use super::*;
use crate::source_addresses::peers::Hold as _;

fn slots() -> Vec<Vec<IpAddr>> {
    let slot = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
    vec![slot(&["192.0.2.1"]), slot(&["192.0.2.2", "2001:db8::2"])]
}

#[test]
fn new_connections_get_the_first_address_of_their_family_that_is_held() {
    let slots = slots();
    let all = slots.iter().flatten().copied().collect();
    let no = BTreeMap::new();
    let both = sources(&slots, &all, &no);
    assert_eq!((both.translate[&IpFamily::V4], both.translate[&IpFamily::V6]), (slots[0][0], slots[1][1]));
    let second = sources(&slots, &slots[1].iter().copied().collect(), &no);
    assert_eq!((second.translate[&IpFamily::V4], second.standby), (slots[1][0], false));
    let none = sources(&slots, &BTreeSet::new(), &no);
    assert_eq!((none.translate.len(), none.standby, none.floating.len()), (0, true, 3));
    let settling = sources(&slots, &all, &[(0, Instant::now())].into());
    assert_eq!(
        settling.translate[&IpFamily::V4],
        slots[1][0],
        "answers to the first one do not come here yet"
    );
}

#[test]
fn clients_come_for_a_slot_that_was_handed_over_once_its_addresses_can_be_used_here() {
    let now = Instant::now();
    let held = |slots: &[u32]| -> BTreeMap<u32, Held> {
        slots.iter().map(|slot| (*slot, Held { term: 3, until: Duration::from_secs(9) })).collect()
    };
    let deadlines = [(slots()[0][0], now)].into();
    let (new, none) = ([(0, now)].into(), BTreeMap::new());
    assert!(is_standby(&held(&[0]), &deadlines, &new));
    assert!(!is_standby(&held(&[0]), &deadlines, &none));
    assert!(!is_standby(&held(&[0, 1]), &deadlines, &new), "it had another one before");
    assert!(is_standby(&held(&[]), &BTreeMap::new(), &none), "it holds nothing");
    assert!(!is_standby(&held(&[]), &deadlines, &none), "it has what an earlier process held");
}

#[test]
fn a_heartbeat_from_the_wire_is_answered_with_a_promise_and_its_time() {
    let machine = Machine::new("a");
    machine.with(|hold, now| {
        hold.set_slots(1);
        hold.members(&["a", "b"].map(str::to_owned).into(), now);
    });
    let lease = Lease { version: 1, holder: Some("b".to_owned()), term: 3, successor: None };
    machine.with(|hold, now| hold.lease(0, Some(lease), now));
    let claims = vec![Claim { slot: 0, term: 3 }];
    let heartbeat = Heartbeat { sequence: 9, claims, ready: true, held: 1, ..Heartbeat::default() };
    let answer = machine.heartbeat("b", heartbeat);
    assert_eq!((answer.sequence, answer.slots.len()), (9, 1));
    assert!(answer.slots[0].promised && answer.slots[0].blocked_milliseconds == Some(2000), "{answer:?}");
    assert_eq!(machine.with(|hold, _| hold.slot(0)), (3, Some("b".to_owned())));
}

#[test]
fn what_was_not_tried_may_be_tried_again() {
    let machine = Machine::new("a");
    machine.with(|hold, now| {
        hold.set_slots(1);
        hold.set_healthy(true);
        hold.set_copies([0].into());
        hold.members(&["a".to_owned()].into(), now);
        hold.lease(0, Some(Lease { version: 1, ..Lease::default() }), now);
    });
    let writes = machine.with(|hold, now| hold.tick(now).writes);
    assert_eq!(writes[0].kind, WriteKind::Take);
    assert!(machine.with(|hold, now| hold.tick(now).writes).is_empty());
    machine.refuse(&writes);
    let again = machine.with(|hold, now| hold.tick(now.saturating_add(Duration::from_secs(1))).writes);
    assert_eq!(again.len(), 1);
}

#[test]
fn what_gateways_say_of_themselves_is_the_same_after_the_wire() {
    let machine = Machine::new("a");
    let condition = hold::Condition { ready: true, healthy: false, held: 2, copies: [0, 3].into() };
    let said = hold::Heartbeat { sequence: 1, claims: Vec::new(), condition };
    let heartbeat = Heartbeat::from(&said);
    assert_eq!((heartbeat.unhealthy, heartbeat.copies.clone()), (true, vec![0, 3]));
    machine.with(|hold, now| {
        hold.set_slots(1);
        hold.members(&["a", "b"].map(str::to_owned).into(), now);
        hold.set_healthy(false);
        hold.set_copies([0].into());
    });
    let answer = machine.heartbeat("b", heartbeat);
    assert_eq!((answer.ready, answer.unhealthy, answer.copies), (true, true, vec![0]));
}

#[test]
fn a_lease_for_other_addresses_is_none() {
    let lease = |addresses: &[IpAddr]| {
        Some(SlotLease { addresses: addresses.to_vec(), lease: Lease { version: 1, ..Lease::default() } })
    };
    let slots = slots();
    assert!(of_slot(&slots, 1, lease(&slots[1])).is_some());
    assert!(of_slot(&slots, 0, lease(&slots[1])).is_none() && of_slot(&slots, 9, lease(&slots[1])).is_none());
    assert!(of_slot(&[Vec::new()], 0, lease(&[])).is_none());
}
