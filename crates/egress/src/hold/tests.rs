mod simulation;

use std::time::Duration;

use proptest::prelude::*;

use self::simulation::{Fault, Settings, Simulation};
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
        1 => (node.clone(), any::<bool>()).prop_map(|(node, ready)| Fault::Ready(node, ready)),
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
            5 => Fault::Ready(node, false),
            _ => Fault::Isolate(GATEWAYS),
        };
        simulation.fault(fault);
        simulation.run(10_000)?;
        simulation.is_held()?;
        let gap = simulation.longest_gap_since(10_000);
        let most = match kind {
            0 | 1 | 4 => 3000,
            // Handed over.
            5 => 300,
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
    simulation.fault(Fault::Drain(holder));
    simulation.run(2000).unwrap();
    assert_ne!(simulation.holder(0), Some(holder));
    assert!(simulation.longest_gap_since(2000) < 300);
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
        simulation.fault(if drains { Fault::Drain(holder) } else { Fault::Ready(holder, false) });
        simulation.run(10_000)?;
        prop_assert_eq!(simulation.holder(0), Some(holder));
        prop_assert!(simulation.longest_gap_since(10_000) < 20, "{simulation:?}");
        simulation.fault(Fault::Heal);
        simulation.run(3000)?;
        prop_assert_ne!(simulation.holder(0), Some(holder));
        simulation.is_held()?;
        prop_assert!(simulation.longest_gap_since(3000) < 300, "{simulation:?}");
    }
}

#[test]
fn without_the_api_server_slots_are_not_shared() {
    let mut simulation = Simulation::new(&Settings { seed: 3, slots: 3, drift: vec![0; GATEWAYS] });
    simulation.fault(Fault::Crash(1));
    simulation.fault(Fault::Crash(2));
    simulation.run(20_000).unwrap();
    assert!((0..3).all(|slot| simulation.holder(slot) == Some(0)), "{simulation:?}");
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
    hold.lease(0, Some(lease.clone()), Duration::ZERO);
    assert!(hold.heartbeat("b", &heartbeat, Duration::ZERO).slots[&0].promised);
    // What was released, or is another's, is not promised.
    hold.lease(0, Some(Lease { version: 2, holder: None, ..lease }), Duration::ZERO);
    assert!(!hold.heartbeat("b", &heartbeat, Duration::ZERO).slots[&0].promised);
}
