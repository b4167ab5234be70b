use fairlead_egress::hold::{Lease, WriteKind};
use fairlead_wire::egress_peers::{Claim, Heartbeat};

use super::*;
use crate::peers::Hold as _;

fn slots() -> Vec<Vec<IpAddr>> {
    let slot = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
    vec![slot(&["192.0.2.1"]), slot(&["192.0.2.2", "2001:db8::2"])]
}

#[test]
fn new_connections_get_the_first_address_of_their_family_that_is_held() {
    let slots = slots();
    let all = slots.iter().flatten().copied().collect();
    let both = sources(&slots, &all);
    assert_eq!((both.translate[&IpFamily::V4], both.translate[&IpFamily::V6]), (slots[0][0], slots[1][1]));
    let second = sources(&slots, &slots[1].iter().copied().collect());
    assert_eq!((second.translate[&IpFamily::V4], second.standby), (slots[1][0], false));
    let none = sources(&slots, &BTreeSet::new());
    assert_eq!((none.translate.len(), none.standby, none.floating.len()), (0, true, 3));
}

#[test]
fn a_gateway_that_holds_nothing_says_so_before_all_else() {
    let of = |standby, draining, unhealthy| state(Condition { standby, draining, unhealthy });
    assert_eq!(of(true, true, true), State::Standby);
    assert_eq!(of(false, true, true), State::Draining);
    assert_eq!((of(false, false, true), of(false, false, false)), (State::Unhealthy, State::Ready));
}

#[test]
fn a_heartbeat_from_the_wire_is_answered_with_a_promise_and_its_time() {
    let machine = Machine::new("a");
    machine.with(|hold, now| {
        hold.set_slots(1);
        hold.members(&["a", "b"].map(str::to_owned).into(), now);
    });
    machine.lease(0, Some(Lease { version: 1, holder: Some("b".to_owned()), term: 3, successor: None }));
    let claims = vec![Claim { slot: 0, term: 3 }];
    let answer = machine.heartbeat("b", Heartbeat { sequence: 9, claims, ready: true, held: 1 });
    assert_eq!((answer.sequence, answer.slots.len()), (9, 1));
    assert!(answer.slots[0].promised && answer.slots[0].blocked_milliseconds == Some(2000), "{answer:?}");
    assert_eq!(machine.slot(0), (3, Some("b".to_owned())));
}

#[test]
fn what_was_not_tried_may_be_tried_again() {
    let machine = Machine::new("a");
    machine.with(|hold, now| {
        hold.set_slots(1);
        hold.set_ready(true);
        hold.set_complete(true);
        hold.members(&["a".to_owned()].into(), now);
    });
    machine.lease(0, Some(Lease { version: 1, ..Lease::default() }));
    let writes = machine.with(|hold, now| hold.tick(now).writes);
    assert_eq!(writes[0].kind, WriteKind::Take);
    assert!(machine.with(|hold, now| hold.tick(now).writes).is_empty());
    machine.refuse(&writes);
    let again = machine.with(|hold, now| hold.tick(now.saturating_add(Duration::from_secs(1))).writes);
    assert_eq!(again.len(), 1);
}
