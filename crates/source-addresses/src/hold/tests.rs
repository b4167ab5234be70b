mod faults;
mod simulation;

use std::time::Duration;

use proptest::prelude::*;

use self::faults::{Fault, Settings};
use self::simulation::Simulation;
use super::*;

/// Gateways and slots of the simulations.
const GATEWAYS: usize = 3;

fn faults() -> impl Strategy<Value = Vec<(u64, Fault)>> {
    let node = 0..GATEWAYS;
    // The last one is the API server.
    let end = 0..=GATEWAYS;
    let fault = prop_oneof![
        3 => node.clone().prop_map(Fault::Crash),
        3 => node.clone().prop_map(Fault::Start),
        2 => (end.clone(), end.clone()).prop_map(|(a, b)| Fault::Cut(a, b)),
        2 => (end.clone(), end.clone()).prop_map(|(a, b)| Fault::OneWay(a, b)),
        3 => (end.clone(), end).prop_map(|(a, b)| Fault::Join(a, b)),
        2 => (0..=GATEWAYS).prop_map(Fault::Isolate),
        2 => Just(Fault::Heal),
        2 => (node.clone(), 100u64..4000).prop_map(|(node, time)| Fault::Stall(node, time)),
        1 => (0u32..60).prop_map(Fault::Loss),
        1 => (1u64..1800).prop_map(Fault::Slow),
        1 => (node.clone(), any::<bool>()).prop_map(|(node, healthy)| Fault::Healthy(node, healthy)),
        1 => node.prop_map(Fault::Drain),
    ];
    proptest::collection::vec((0u64..3000, fault), 1..14)
}

fn settings() -> impl Strategy<Value = Settings> {
    (any::<u64>(), 1u32..=3, proptest::collection::vec(-20i64..=20, GATEWAYS))
        .prop_map(|(seed, slots, drift)| Settings { seed, slots, drift })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    #[test]
    fn a_slot_never_has_two_holders_and_has_one_after_healing(settings in settings(), faults in faults()) {
        let mut simulation = Simulation::new(&settings);
        simulation.run(8000)?;
        for (pause, fault) in faults {
            simulation.fault(fault);
            simulation.run(pause)?;
        }
        simulation.heal_all();
        simulation.run(7000)?;
        simulation.is_held()?;
        simulation.run(3000)?;
        simulation.is_held()?;
        // Slots may be handed over, to share them.
        prop_assert!(simulation.longest_gap_since(2900) < 300, "unheld after healing: {simulation:?}");
    }

    #[test]
    fn after_one_failure_a_slot_is_held_within_three_seconds(
        settings in settings(), node in 0..GATEWAYS, kind in 0..7, other in 0..GATEWAYS,
    ) {
        let mut simulation = Simulation::new(&settings);
        // Then the slots are shared.
        simulation.run(40_000)?;
        simulation.is_held()?;
        let fault = match kind {
            0 => Fault::Crash(node),
            1 => Fault::Isolate(node),
            2 => Fault::Cut(node, GATEWAYS),
            3 => Fault::Cut(node, other),
            4 => Fault::Stall(node, 6000),
            5 => Fault::Healthy(node, false),
            _ => Fault::Isolate(GATEWAYS),
        };
        simulation.fault(fault);
        simulation.run(10_000)?;
        simulation.is_held()?;
        let gap = simulation.longest_gap_since(10_000);
        let most = match kind {
            0 | 1 | 4 => 3000,
            // Handed over (5), or nothing happens.
            _ => 20,
        };
        prop_assert!(gap < most, "unheld for {gap} ms after {kind}: {simulation:?}");
    }
}

#[test]
fn a_restart_keeps_the_hold_and_a_drain_hands_it_over() {
    let settings = Settings { seed: 7, slots: 2, drift: vec![0; GATEWAYS] };
    let mut simulation = Simulation::new(&settings);
    simulation.run(40_000).unwrap();
    let holder = simulation.holder(0).unwrap();
    let term = simulation.term(0);
    simulation.fault(Fault::Crash(holder));
    simulation.run(800).unwrap();
    simulation.fault(Fault::Start(holder));
    simulation.run(5000).unwrap();
    assert_eq!((simulation.holder(0), simulation.term(0)), (Some(holder), term));
    assert!(simulation.longest_gap_since(5800) < 20, "{simulation:?}");
    (0..GATEWAYS).for_each(|gateway| drop(simulation.causes(gateway)));
    simulation.fault(Fault::Drain(holder));
    simulation.run(2000).unwrap();
    let next = simulation.holder(0).unwrap();
    assert_ne!(next, holder);
    assert_eq!(simulation.causes(next), [Cause::Handover]);
    assert!(simulation.longest_gap_since(2000) < 20, "{simulation:?}");
    simulation.fault(Fault::Crash(next));
    simulation.run(5000).unwrap();
    let last = simulation.holder(0).unwrap();
    assert_eq!(simulation.causes(last).last(), Some(&Cause::Failure));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn without_the_api_server_a_slot_stays_held_also_where_its_holder_is_to_hand_it_over(
        settings in settings(), drains in any::<bool>(),
    ) {
        let mut simulation = Simulation::new(&settings);
        simulation.run(40_000)?;
        simulation.is_held()?;
        let holder = simulation.holder(0).unwrap_or(0);
        simulation.fault(Fault::Isolate(GATEWAYS));
        simulation.run(500)?;
        simulation.fault(if drains { Fault::Drain(holder) } else { Fault::Healthy(holder, false) });
        simulation.run(10_000)?;
        prop_assert_eq!(simulation.holder(0), Some(holder));
        prop_assert!(simulation.longest_gap_since(10_000) < 20, "{simulation:?}");
        simulation.fault(Fault::Heal);
        simulation.run(3000)?;
        prop_assert_ne!(simulation.holder(0), Some(holder));
        simulation.is_held()?;
        prop_assert!(simulation.longest_gap_since(3000) < 20, "{simulation:?}");
    }
}

/// Three slots, which the only gateway that runs holds.
fn of_one_gateway() -> Simulation {
    let mut simulation = Simulation::new(&Settings { seed: 3, slots: 3, drift: vec![0; GATEWAYS] });
    simulation.fault(Fault::Crash(1));
    simulation.fault(Fault::Crash(2));
    simulation.run(20_000).unwrap();
    assert!((0..3).all(|slot| simulation.holder(slot) == Some(0)), "{simulation:?}");
    simulation
}

#[test]
fn without_the_api_server_slots_are_not_shared() {
    let mut simulation = of_one_gateway();
    simulation.fault(Fault::Start(1));
    simulation.fault(Fault::Start(2));
    simulation.run(5000).unwrap();
    simulation.fault(Fault::Isolate(GATEWAYS));
    simulation.run(20_000).unwrap();
    assert!((0..3).all(|slot| simulation.holder(slot) == Some(0)), "{simulation:?}");
    assert!(simulation.longest_gap_since(20_000) < 20, "{simulation:?}");
    simulation.fault(Fault::Heal);
    simulation.run(20_000).unwrap();
    let holders: BTreeSet<_> = (0..3).map(|slot| simulation.holder(slot)).collect();
    assert_eq!(holders.len(), 3, "{simulation:?}");
}

#[test]
fn each_slot_is_handed_over_to_a_gateway_that_has_its_connections() {
    let mut simulation = of_one_gateway();
    for (gateway, copies) in [(1, vec![0]), (2, vec![1])] {
        simulation.fault(Fault::Copies(gateway, copies));
        simulation.fault(Fault::Start(gateway));
    }
    simulation.run(2000).unwrap();
    simulation.fault(Fault::Drain(0));
    simulation.run(3000).unwrap();
    let holders: Vec<_> = (0..3).map(|slot| simulation.holder(slot)).collect();
    assert_eq!(holders, [Some(1), Some(2), Some(0)], "{simulation:?}");
    simulation.fault(Fault::Copies(2, vec![1, 2]));
    simulation.run(3000).unwrap();
    assert_eq!(simulation.holder(2), Some(2), "{simulation:?}");
    assert!(simulation.longest_gap_since(6000) < 300, "{simulation:?}");
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, ..ProptestConfig::default() })]

    #[test]
    fn where_no_gateway_is_healthy_slots_are_held_all_the_same(
        settings in settings(), drains in any::<bool>(), healthy in 0..GATEWAYS,
    ) {
        let mut simulation = Simulation::new(&settings);
        for number in 0..GATEWAYS {
            simulation.fault(Fault::Healthy(number, false));
        }
        simulation.run(12_000)?;
        simulation.is_held()?;
        let holder = simulation.holder(0).unwrap_or(0);
        simulation.fault(if drains { Fault::Drain(holder) } else { Fault::Crash(holder) });
        simulation.run(8000)?;
        simulation.is_held()?;
        prop_assert_ne!(simulation.holder(0), Some(holder));
        prop_assert!(simulation.longest_gap_since(8000) < if drains { 300 } else { 3000 }, "{simulation:?}");
        let healthy = if healthy == holder { (holder + 1) % GATEWAYS } else { healthy };
        simulation.fault(Fault::Healthy(healthy, true));
        simulation.run(4000)?;
        for slot in 0..settings.slots {
            prop_assert_eq!(simulation.holder(slot), Some(healthy), "{:?}", simulation);
        }
        prop_assert!(simulation.longest_gap_since(4000) < 300, "{simulation:?}");
    }

    #[test]
    fn after_a_restoration_of_etcd_slots_are_held_as_before(
        settings in settings(), node in 0..GATEWAYS, away in 0u64..9000,
    ) {
        let mut simulation = Simulation::new(&settings);
        simulation.run(40_000)?;
        simulation.fault(Fault::Save);
        simulation.fault(Fault::Crash(node));
        simulation.run(5000)?;
        simulation.fault(Fault::Start(node));
        simulation.run(30_000)?;
        simulation.is_held()?;
        simulation.fault(Fault::Isolate(GATEWAYS));
        simulation.run(away)?;
        simulation.fault(Fault::Restore);
        simulation.fault(Fault::Heal);
        simulation.run(8000)?;
        simulation.is_held()?;
        prop_assert!(simulation.longest_gap_since(8000) < 3000, "{simulation:?}");
        let holder = simulation.holder(0).unwrap_or(0);
        simulation.fault(Fault::Crash(holder));
        simulation.run(8000)?;
        simulation.is_held()?;
        prop_assert!(simulation.longest_gap_since(8000) < 3000, "{simulation:?}");
    }
}

#[test]
fn nothing_is_written_while_all_gateways_are_there_and_slots_are_shared() {
    let settings = Settings { seed: 1, slots: 3, drift: vec![0; GATEWAYS] };
    let mut simulation = Simulation::new(&settings);
    simulation.run(60_000).unwrap();
    let holders: BTreeSet<_> = (0..3).map(|slot| simulation.holder(slot)).collect();
    assert_eq!(holders.len(), 3, "{simulation:?}");
    let before = simulation.writes();
    simulation.run(20_000).unwrap();
    assert_eq!(simulation.writes(), before);
}

#[test]
fn without_the_lease_nothing_is_promised_or_held() {
    let mut hold = Hold::new("a");
    hold.set_slots(1);
    let heartbeat =
        Heartbeat { sequence: 1, claims: vec![Claim { slot: 0, term: 4 }], ..Heartbeat::default() };
    assert!(!hold.heartbeat("b", &heartbeat, Duration::ZERO).slots[&0].promised);
    assert_eq!(hold.tick(Duration::from_secs(9)), Actions::default());
    let lease = Lease { version: 1, holder: Some("b".to_owned()), term: 4, successor: None };
    assert!(!hold.lease(0, Some(lease.clone()), Duration::ZERO));
    assert!(hold.heartbeat("b", &heartbeat, Duration::ZERO).slots[&0].promised);
    // What was released, or is another's, is not promised.
    hold.lease(0, Some(Lease { version: 2, holder: None, ..lease }), Duration::ZERO);
    assert!(!hold.heartbeat("b", &heartbeat, Duration::ZERO).slots[&0].promised);
}

fn lease(version: u64, holder: Option<&str>, term: u64) -> Option<Lease> {
    Some(Lease { version, holder: holder.map(str::to_owned), term, successor: None })
}

/// Gateway `a` among `b` and `c`, of one slot with this Lease.
fn gateway(seen: Option<Lease>) -> Hold {
    let mut hold = Hold::new("a");
    hold.set_slots(1);
    hold.set_healthy(true);
    hold.members(&["a", "b", "c"].map(str::to_owned).into(), Duration::ZERO);
    hold.lease(0, seen, Duration::ZERO);
    hold
}

fn promises(hold: &mut Hold, to: &str, term: u64, now: Duration) -> bool {
    let claims = vec![Claim { slot: 0, term }];
    hold.heartbeat(to, &Heartbeat { sequence: 1, claims, ..Heartbeat::default() }, now).slots[&0].promised
}

const LIES: [u64; 4] = [4, i32::MAX as u64, i32::MAX as u64 + 1, u64::MAX];

#[test]
fn what_members_say_of_terms_takes_no_slot_from_its_holder() {
    for lie in LIES {
        let mut hold = gateway(lease(1, Some("a"), 3));
        let at = Duration::from_millis;
        let write = hold.tick(at(0)).writes.remove(0);
        assert_eq!((write.kind, write.term), (WriteKind::Renew, 3));
        hold.written(&write, Outcome::Done(2), at(10));
        assert!(!promises(&mut hold, "b", lie, at(20)));
        let sequence = hold.tick(at(300)).heartbeat.unwrap().sequence;
        let report = Report { term: lie, promised: true, blocked: Some(PROMISE) };
        let answer = Answer { sequence, slots: [(0, report)].into(), ..Answer::default() };
        hold.answer("b", &answer, at(310));
        assert_eq!(hold.held(at(320)).get(&0).map(|held| held.term), Some(3), "{lie}");
        // Nothing was promised, so it writes the Lease, with its own term.
        let write = hold.tick(at(800)).writes.remove(0);
        assert_eq!((write.kind, write.term), (WriteKind::Renew, 3));
        hold.written(&write, Outcome::Done(3), at(810));
        assert!(hold.held(at(2000)).contains_key(&0));
    }
}

#[test]
fn a_lie_about_a_term_is_forgotten_with_the_next_write_of_the_lease() {
    for lie in LIES {
        let mut hold = gateway(lease(1, Some("b"), 3));
        let at = Duration::from_millis;
        assert!(promises(&mut hold, "b", 3, at(0)));
        let is_possible = lie <= MAX_TERM;
        assert_eq!(promises(&mut hold, "c", lie, at(10)), is_possible);
        assert_eq!(promises(&mut hold, "b", 3, at(20)), !is_possible);
        hold.lease(0, lease(2, Some("b"), 3), at(3000));
        assert!(promises(&mut hold, "b", 3, at(3010)), "{lie}");
        hold.lease(0, lease(3, None, 3), at(3020));
        assert!(hold.tick(at(3500)).writes.is_empty(), "others may come first");
        let write = hold.tick(at(4500)).writes.remove(0);
        assert_eq!((write.kind, write.term), (WriteKind::Take, 4));
    }
}

#[test]
fn the_greatest_term_of_a_lease_does_not_end_its_use() {
    let at = Duration::from_secs;
    let mut hold = gateway(lease(1, Some("b"), MAX_TERM));
    hold.tick(at(5));
    let write = hold.tick(at(6)).writes.remove(0);
    assert_eq!((write.kind, write.term), (WriteKind::Take, MAX_TERM));
    hold.written(&write, Outcome::Done(2), at(6));
    assert!(hold.held(at(7)).contains_key(&0));
    assert!(!promises(&mut hold, "b", MAX_TERM, at(9)), "it is not the holder any more");
}

#[test]
fn a_renewal_says_the_term_of_the_claim_whatever_the_lease_says() {
    let at = Duration::from_millis;
    let mut hold = gateway(lease(1, Some("a"), 7));
    let write = hold.tick(at(0)).writes.remove(0);
    hold.written(&write, Outcome::Done(2), at(10));
    hold.lease(0, lease(3, Some("a"), 1), at(100));
    let write = hold.tick(at(800)).writes.remove(0);
    assert_eq!((write.kind, write.term), (WriteKind::Renew, 7));
    hold.written(&write, Outcome::Done(4), at(810));
    assert_eq!((hold.held(at(820))[&0].term, hold.slot(0)), (7, (7, Some("a".to_owned()))));
}

#[test]
fn an_older_lease_counts_where_a_consistent_read_shows_it() {
    let at = Duration::from_millis;
    let mut hold = gateway(lease(9, Some("b"), 7));
    hold.lease(0, lease(20, Some("c"), 8), at(100));
    let old = lease(9, Some("b"), 7);
    assert!(hold.lease(0, old.clone(), at(200)), "the caller is to read it");
    hold.read(0, old.clone(), at(90), at(210));
    assert_eq!(hold.slot(0), (8, Some("c".to_owned())), "the read began before the newer one was seen");
    hold.read(0, old.clone(), at(200), at(220));
    assert_eq!(hold.slot(0), (7, Some("b".to_owned())));
    assert!(!hold.lease(0, old, at(230)), "it is known now");
}

#[test]
fn the_outcome_of_a_write_counts_only_for_what_it_was_made_of() {
    let at = Duration::from_secs;
    let mut hold = gateway(lease(1, None, 0));
    hold.tick(at(1));
    let write = hold.tick(at(2)).writes.remove(0);
    assert_eq!(write.kind, WriteKind::Take);
    // The slot gets other addresses, with another Lease.
    hold.lease(0, None, at(2));
    hold.lease(0, lease(5, None, 0), at(2));
    hold.written(&write, Outcome::Done(9), at(2));
    assert!(hold.held(at(2)).is_empty());
    hold.tick(at(3));
    assert_eq!(hold.tick(at(4)).writes[0].base, 5);
}
