//! Attempts between two symmetric NATs.

use std::time::Duration;

use fairlead_path::{BirthdayOutcome, BirthdayPolicy};

use super::birthday::{behind, is_direct, outcomes};
use super::router::Nat;
use super::{SECOND, World};

const ENABLED: [BirthdayPolicy; 2] = [BirthdayPolicy::Symmetric; 2];
/// Most probes that a node sends besides the attempt, in a minute.
const OTHER_PROBES: u64 = 300;

/// Runs until both nodes use a direct path, or the attempt has failed. Returns how long the attempt took. Other hosts
/// behind each NAT take so many ports in a second meanwhile.
fn attempt(world: &mut World, others: u32) -> Option<Duration> {
    let (end, mut began, mut steps) = (world.now + 30 * SECOND, None, 0);
    while world.now < end {
        world.run(Duration::from_millis(10));
        let (one, other) = (world.nodes[0].key, world.nodes[1].key);
        let is_running =
            world.nodes[0].birthday_runs(world.now, other) || world.nodes[1].birthday_runs(world.now, one);
        if is_running {
            began = began.or(Some(world.now));
            steps += 1;
            let ports = u16::try_from(steps * others / 100 - (steps - 1) * others / 100).unwrap();
            world.network.routers.iter_mut().for_each(|router| router.take_ports(ports));
        }
        if let Some(began) = began.filter(|_| is_direct(world)) {
            return Some(world.now - began);
        }
        if [0, 1].into_iter().all(|node| outcomes(world, node, BirthdayOutcome::NoPortFound) > 0) {
            return None;
        }
    }
    None
}

fn sent(world: &World) -> u64 {
    world.nodes.iter().map(|node| node.probes).max().unwrap()
}

#[test]
fn two_nats_that_count_up_get_a_direct_path_without_losing_a_packet() {
    let mut world = behind([Nat::Symmetric; 2], ENABLED, 1);
    let took = attempt(&mut world, 0).expect("still relayed");
    assert!(took <= 2 * SECOND, "{took:?}");
    let at_once = sent(&world);
    assert!(at_once <= OTHER_PROBES, "{at_once}");
    world.run(60 * SECOND);
    assert!(is_direct(&world));
    assert_eq!(world.lost(), 0);
    for node in [0, 1] {
        assert_eq!(outcomes(&world, node, BirthdayOutcome::Found), 1);
        assert_eq!((world.nodes[node].sockets.len(), world.nodes[node].kept.len()), (0, 0));
    }
}

/// `FAIRLEAD_SIMULATION_SEEDS` runs more of them.
#[test]
fn two_nats_that_count_up_are_opened_over_lossy_networks_and_with_other_hosts_behind_them() {
    let seeds = std::env::var("FAIRLEAD_SIMULATION_SEEDS").map_or(20, |seeds| seeds.parse().unwrap());
    let mut times = Vec::new();
    for seed in 0..seeds {
        let mut world = behind([Nat::Symmetric; 2], ENABLED, seed);
        world.network.delays.1 = Duration::from_millis(2 + seed * 37 % 150);
        world.network.loss = u32::try_from(seed * 13 % 50).unwrap();
        let others = [0, 5, 20, 100][usize::try_from(seed % 4).unwrap()];
        let took = attempt(&mut world, others);
        times.push(took.unwrap_or_else(|| panic!("seed {seed}: still relayed")));
        world.run(20 * SECOND);
        // A lossy path is left now and then, for a moment.
        let is_direct_again = || {
            world.run(SECOND);
            is_direct(&world)
        };
        assert!(std::iter::repeat_with(is_direct_again).take(10).any(|is_direct| is_direct), "seed {seed}");
    }
    times.sort();
    println!("time to direct: median {:?}, longest {:?}", times[times.len() / 2], times[times.len() - 1]);
}

/// One of them in 32 attempts, and in 1,000, finds a port: what is asserted is what they cost. `FAIRLEAD_SIMULATION_SEEDS` runs more.
#[test]
fn nats_with_random_ports_are_tried_once_in_six_hours_and_keep_the_relay() {
    let seeds = std::env::var("FAIRLEAD_SIMULATION_SEEDS").map_or(2, |seeds| seeds.parse().unwrap());
    for nats in [[Nat::Symmetric, Nat::SymmetricRandom], [Nat::SymmetricRandom; 2]] {
        let mut found = 0;
        for seed in 0..seeds {
            let mut world = behind(nats, ENABLED, seed);
            let took = attempt(&mut world, 0);
            found += u64::from(took.is_some());
            assert!(sent(&world) <= 2048 + OTHER_PROBES, "{}", sent(&world));
            if seed < 2 && took.is_none() {
                world.run(60 * SECOND);
                assert!(sent(&world) <= 2048 + 2 * OTHER_PROBES, "{}", sent(&world));
                assert_eq!((is_direct(&world), world.lost()), (false, 0));
                let status = world.nodes[0].agent.birthday_status(world.now, &world.nodes[1].key).unwrap();
                assert_eq!((status.last, status.attempts), (BirthdayOutcome::NoPortFound, 1));
                assert!(status.next.is_some_and(|next| next > 5 * 3600 * SECOND + 3500 * SECOND));
            }
        }
        println!("{nats:?}: {found} of {seeds} attempts found a port");
    }
}

#[test]
fn two_symmetric_nats_are_left_alone_unless_both_nodes_are_told() {
    for policies in
        [[BirthdayPolicy::PortRestricted; 2], [BirthdayPolicy::Symmetric, BirthdayPolicy::PortRestricted]]
    {
        let mut world = behind([Nat::Symmetric; 2], policies, 1);
        world.run(60 * SECOND);
        assert!(!is_direct(&world) && world.first_arrival(SECOND).is_some());
        assert!(sent(&world) <= OTHER_PROBES + 50, "{}", sent(&world));
        assert_eq!(outcomes(&world, 0, BirthdayOutcome::Found), 0);
    }
}

#[test]
fn a_path_that_is_lost_is_found_again() {
    let mut world = behind([Nat::Symmetric; 2], ENABLED, 3);
    attempt(&mut world, 0).expect("still relayed");
    world.run(10 * SECOND);
    world.network.routers[0].rebind();
    world.run(60 * SECOND);
    assert!(is_direct(&world));
}
