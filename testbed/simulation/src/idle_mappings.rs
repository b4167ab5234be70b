//! Idle sessions behind NATs whose mappings last shorter or longer than the time between two keepalives, without a relay.

use super::*;

const SHORT: Option<Duration> = Some(Duration::from_secs(10));
/// Time at which both nodes know, or have asked often enough.
const LEARNT: Duration = Duration::from_secs(900);

/// Two nodes that were active and are idle now, `phase` between their keepalives.
fn idle_pair(nats: [Nat; 2], lifetimes: [u64; 2], phase: u64, preserves_ports: bool) -> World {
    let routers = nats.iter().zip(lifetimes).zip([1, 2]).map(|((nat, seconds), site)| {
        let mut router = router(*nat, site);
        router.lifetime = Some(Duration::from_secs(seconds));
        router.preserves_ports = preserves_ports;
        router
    });
    let mut world = World::new(["192.168.1.2", "192.168.2.2"], routers.collect());
    world.nodes[1].keepalive_phase = Duration::from_secs(phase);
    world.run(5 * SECOND);
    world.sends_data = false;
    world
}

fn intervals(world: &World) -> [Option<Duration>; 2] {
    world.nodes.each_ref().map(|node| node.keepalives.last().and_then(|(_, interval)| *interval))
}

impl World {
    /// After a pause, sends one message from each node, at different times.
    fn send_one_each(&mut self, pause: Duration) {
        for node in 0..2 {
            self.run(pause);
            let World { now, network, nodes, .. } = self;
            nodes[node].send_data(*now, network);
            self.run(SECOND);
        }
    }

    fn lost_of_all(&self) -> usize {
        let [one, other] = &self.nodes;
        let lost = |from: &Node, to: &Node| (1..=from.sent).filter(|it| !to.arrived.contains_key(it)).count();
        lost(one, other) + lost(other, one)
    }
}

#[test]
fn where_mappings_expire_between_keepalives_they_come_more_often_and_an_idle_pair_loses_nothing() {
    for lifetime in [12, 15, 18, 20] {
        for phase in [0, 3, 8, 12, 17, 22] {
            let nats = [Nat::PortRestricted, Nat::PortRestricted];
            let mut world = idle_pair(nats, [lifetime; 2], phase, true);
            world.run(LEARNT);
            assert_eq!(intervals(&world), [SHORT; 2], "{lifetime} s, {phase} s apart");
            let before = world.lost_of_all();
            for pause in [7, 13, 24, 31, 70] {
                world.send_one_each(pause * SECOND);
            }
            assert_eq!(world.lost_of_all(), before, "{lifetime} s, {phase} s apart");
        }
    }
}

/// The test fails at the other node, which then asks this one.
#[test]
fn one_nat_that_forgets_soon_is_enough_whatever_the_other_one_is() {
    // Where the next mapping has another port, only these two let it in.
    let kinds = [(Nat::FullCone, false), (Nat::AddressRestricted, false), (Nat::PortRestricted, true)];
    for (other, preserves_ports) in kinds {
        let mut world = idle_pair([Nat::PortRestricted, other], [15, 300], 9, preserves_ports);
        world.run(LEARNT);
        assert_eq!(intervals(&world), [SHORT; 2], "{other:?}");
        let before = world.lost_of_all();
        world.send_one_each(24 * SECOND);
        world.send_one_each(33 * SECOND);
        assert_eq!(world.lost_of_all(), before, "{other:?}");
    }
}

#[test]
fn where_mappings_outlive_keepalives_nothing_changes_and_the_tests_end() {
    for lifetime in [30, 60, 120] {
        for phase in [0, 8, 17] {
            let mut world = idle_pair([Nat::PortRestricted; 2], [lifetime; 2], phase, true);
            world.network.loss = 20;
            world.run(LEARNT);
            assert!(world.nodes.iter().all(|node| node.keepalives.is_empty()), "{lifetime} s");
            assert!(world.longest_silence(600 * SECOND) >= 100 * SECOND, "{lifetime} s, {phase} s apart");
            world.network.loss = 0;
            let before = world.lost_of_all();
            world.send_one_each(70 * SECOND);
            assert_eq!(world.lost_of_all(), before, "{lifetime} s");
        }
    }
}

#[test]
fn another_network_of_a_node_ends_what_was_learnt_of_the_last_one() {
    let mut world = idle_pair([Nat::PortRestricted; 2], [15; 2], 8, true);
    world.run(LEARNT);
    assert_eq!(intervals(&world), [SHORT; 2]);
    for router in &mut world.network.routers {
        router.lifetime = Some(Duration::from_secs(120));
    }
    let now = world.now;
    world.nodes.iter_mut().for_each(|node| node.agent.network_changed(now));
    world.run(LEARNT);
    assert_eq!(intervals(&world), [None; 2]);
}

/// With a relay packets go there half a second after the first one that is not answered.
#[test]
fn with_a_relay_an_idle_pair_is_not_tested() {
    let mut world = World::without_peers(
        ["192.168.1.2", "192.168.2.2"],
        vec![router(Nat::PortRestricted, 1), router(Nat::PortRestricted, 2)],
    );
    world.start_relay(false);
    world.exchange_with_relay();
    world.network.routers.iter_mut().for_each(|router| router.lifetime = Some(15 * SECOND));
    world.run(5 * SECOND);
    world.sends_data = false;
    world.run(LEARNT);
    assert!(world.nodes.iter().all(|node| node.keepalives.is_empty()));
}
