//! Nodes that are reached without their tunnels because these are down, where the mesh allows that. Pure.
//!
//! Up and down are the states that `fairlead status` shows. A node that comes and goes is bypassed only after it was down for a while
//! without a break, and no more only after it was up for a while, so that packets do not change between both ways all the time.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_address::PrefixSet;
use fairlead_keys::PublicKey;
use fairlead_path::State;
use ipnet::IpNet;

use super::desired::DesiredPeer;

/// Time for which a node is down before it is bypassed.
const DOWN_FOR: Duration = Duration::from_secs(10);
/// Time for which a bypassed node is up before its tunnel is used again.
const UP_FOR: Duration = Duration::from_secs(5);
/// Time for which the tunnel to a control-plane node is up before etcd and API servers use it. That node may know this one's key before the controller
/// has confirmed this one's addresses, and accepts none of them from the tunnel until then: cut from this node's etcd, it would not hear of it.
const SETTLES_IN: Duration = Duration::from_secs(10);

/// The nodes that are bypassed, or soon will be.
#[derive(Debug, Default)]
pub struct DownPeers {
    bypassed: BTreeSet<PublicKey>,
    /// Time since which a node has been in the state that is to change whether it is bypassed.
    since: BTreeMap<PublicKey, Instant>,
    /// Addresses of control-plane nodes to which packets were led last as to those without a tunnel.
    pub control_plane: Vec<IpAddr>,
    /// Time since which the tunnels to control-plane nodes have been up.
    up_since: BTreeMap<PublicKey, Instant>,
}

impl DownPeers {
    /// The nodes that are bypassed.
    pub fn bypassed(&self) -> &BTreeSet<PublicKey> {
        &self.bypassed
    }

    /// Takes the states of all nodes. Returns whether others are bypassed than before.
    pub fn observe(&mut self, now: Instant, states: &BTreeMap<PublicKey, State>) -> bool {
        let before = self.bypassed.clone();
        self.bypassed.retain(|key| states.contains_key(key));
        self.since.retain(|key, _| states.contains_key(key));
        for (key, state) in states {
            let is_bypassed = self.bypassed.contains(key);
            let (is_contrary, least) = match (state, is_bypassed) {
                (State::Down, false) => (true, DOWN_FOR),
                (State::Up, true) => (true, UP_FOR),
                (State::Connecting | State::Down | State::Up, _) => (false, Duration::ZERO),
            };
            if !is_contrary {
                self.since.remove(key);
                continue;
            }
            let since = *self.since.entry(*key).or_insert(now);
            if now.saturating_duration_since(since) < least {
                continue;
            }
            self.since.remove(key);
            if is_bypassed {
                self.bypassed.remove(key);
            } else {
                self.bypassed.insert(*key);
            }
        }
        self.bypassed != before
    }

    /// Takes the states of the tunnels to control-plane nodes, and returns the addresses of those to which packets are led past the mesh: their tunnels
    /// are not up, or have not been for long.
    pub fn observe_control_plane(
        &mut self,
        now: Instant,
        tunnels: &[(IpAddr, PublicKey, State)],
    ) -> Vec<IpAddr> {
        let up = tunnels.iter().filter(|(_, _, state)| *state == State::Up);
        let since = |key: &PublicKey| (*key, self.up_since.get(key).copied().unwrap_or(now));
        self.up_since = up.map(|(_, key, _)| since(key)).collect();
        let is_settled = |key: &PublicKey| {
            self.up_since.get(key).is_some_and(|since| now.saturating_duration_since(*since) >= SETTLES_IN)
        };
        tunnels.iter().filter(|(_, key, _)| !is_settled(key)).map(|(address, _, _)| *address).collect()
    }

    /// No node is bypassed any more. Returns whether one was.
    pub fn clear(&mut self) -> bool {
        self.since.clear();
        !std::mem::take(&mut self.bypassed).is_empty()
    }
}

/// The addresses of the nodes that are bypassed. A packet to an address belongs to the longest prefix that has it: what other peers have inside
/// of a prefix stays with them. `others` are the prefixes of peers that are no nodes, and those that have no tunnel at all.
pub fn addresses<'a>(
    bypassed: &BTreeSet<PublicKey>,
    nodes: &BTreeMap<PublicKey, Arc<DesiredPeer>>,
    others: impl Iterator<Item = &'a IpNet>,
) -> PrefixSet {
    if bypassed.is_empty() {
        return PrefixSet::default();
    }
    let of_nodes = nodes.iter().flat_map(|(key, peer)| {
        peer.config.allowed_ips.iter().map(|prefix| (prefix.trunc(), bypassed.contains(key)))
    });
    let mut all: Vec<(IpNet, bool)> = of_nodes.chain(others.map(|prefix| (prefix.trunc(), false))).collect();
    // Where both have a prefix, it is not bypassed.
    all.sort_unstable();
    all.dedup_by_key(|(prefix, _)| *prefix);
    let prefixes = all.iter().enumerate().filter(|(_, (_, is_bypassed))| *is_bypassed);
    let left = prefixes.flat_map(|(at, (prefix, _))| {
        let inside = all.iter().skip(at.saturating_add(1)).take_while(|(other, _)| prefix.contains(other));
        let kept: PrefixSet =
            inside.filter(|(_, is_bypassed)| !is_bypassed).map(|(other, _)| other).collect();
        PrefixSet::from_iter([prefix]).subtract(&kept).prefixes()
    });
    left.collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::plan::desired::tests::{host, inputs, key, member};
    use crate::plan::desired::{Desired, Held, OwnAddresses};

    struct World {
        peers: DownPeers,
        now: Instant,
    }

    impl World {
        fn new() -> Self {
            Self { peers: DownPeers::default(), now: Instant::now() }
        }

        /// A second later, in this state.
        fn second(&mut self, state: State) -> bool {
            self.now += Duration::from_secs(1);
            self.peers.observe(self.now, &[(key(2), state)].into());
            self.peers.bypassed().contains(&key(2))
        }

        /// Number of changes in 600 seconds in which these states repeat, one each second.
        fn changes(&mut self, states: &[State]) -> usize {
            let mut is_bypassed = self.peers.bypassed().contains(&key(2));
            let mut changes = 0;
            for state in states.iter().cycle().take(600) {
                changes +=
                    usize::from(std::mem::replace(&mut is_bypassed, self.second(*state)) != is_bypassed);
            }
            changes
        }
    }

    #[test]
    fn control_plane_nodes_are_led_into_a_tunnel_that_has_been_up_for_a_while() {
        let (mut peers, start) = (DownPeers::default(), Instant::now());
        let address: IpAddr = [192, 0, 2, 2].into();
        let mut is_past = |second: u64, state| {
            let now = start + Duration::from_secs(second);
            peers.observe_control_plane(now, &[(address, key(2), state)]) == [address]
        };
        assert!(is_past(0, State::Connecting));
        assert!(is_past(1, State::Up) && is_past(10, State::Up));
        assert!(!is_past(11, State::Up));
        assert!(is_past(12, State::Down), "at once");
        assert!(is_past(13, State::Up), "its time begins anew");
        assert!(!is_past(23, State::Up));
    }

    #[test]
    fn a_node_is_bypassed_after_it_was_down_and_no_more_after_it_was_up_for_a_while() {
        let mut world = World::new();
        for (state, seconds) in [(State::Up, 100), (State::Connecting, 100), (State::Down, 10)] {
            assert!((0..seconds).all(|_| !world.second(state)), "{state:?}");
        }
        assert!(world.second(State::Down));
        assert!((0..100).all(|_| world.second(State::Down) && world.second(State::Connecting)));
        assert!((0..5).all(|_| world.second(State::Up)));
        assert!(!world.second(State::Up));
    }

    #[test]
    fn a_node_that_comes_and_goes_does_not_change_its_way_all_the_time() {
        let flapping = [State::Up, State::Connecting, State::Down, State::Down];
        assert_eq!(World::new().changes(&flapping), 0, "its tunnel is used");
        let mut down = World::new();
        assert!((0..11).any(|_| down.second(State::Down)));
        assert_eq!(down.changes(&flapping), 0, "it is bypassed");
    }

    #[test]
    fn a_node_that_leaves_is_forgotten_and_a_switch_ends_all() {
        let mut world = World::new();
        while !world.second(State::Down) {}
        assert!(world.peers.observe(world.now, &BTreeMap::new()));
        assert!(!world.second(State::Down), "it begins anew");
        while !world.second(State::Down) {}
        assert!(world.peers.clear() && !world.peers.clear());
    }

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    /// Nodes with these prefixes.
    fn nodes(prefixes: &[(u32, Vec<IpNet>)]) -> BTreeMap<PublicKey, Arc<DesiredPeer>> {
        let plain =
            Desired::new(&inputs((1..6).map(member)), &host(), Held::default(), &OwnAddresses::default());
        let with = |(number, prefixes): &(u32, Vec<IpNet>)| {
            let mut peer = (*plain.peers[&key(*number)]).clone();
            peer.config.allowed_ips.clone_from(prefixes);
            (key(*number), Arc::new(peer))
        };
        prefixes.iter().map(with).collect()
    }

    #[test]
    fn what_others_have_inside_of_a_prefix_is_not_bypassed() {
        let nodes = nodes(&[
            (2, vec![net("10.0.0.0/8"), net("10.1.2.3/32")]),
            (3, vec![net("10.1.0.0/16")]),
            (4, vec![net("192.0.2.4/32")]),
        ]);
        let laptop = [net("10.9.0.9/32")];
        let found = addresses(&[key(2)].into(), &nodes, laptop.iter());
        for (address, expected) in [
            ("10.0.0.1", true),
            ("10.1.0.1", false),
            ("10.1.2.3", true),
            ("10.9.0.9", false),
            ("192.0.2.4", false),
        ] {
            assert_eq!(found.contains(address.parse().unwrap()), expected, "{address}");
        }
        let none = addresses(&BTreeSet::new(), &nodes, laptop.iter());
        assert!(none.ipv4_prefixes().is_empty() && none.ipv6_prefixes().is_empty());
    }

    fn small_nets() -> impl Strategy<Value = Vec<IpNet>> {
        let small =
            (0u8..4, 20u8..=32).prop_map(|(last, length)| net(&format!("10.0.0.{last}/{length}")).trunc());
        prop::collection::vec(small, 0..4)
    }

    proptest! {
        /// As the longest prefix decides, read one by one.
        #[test]
        fn the_longest_prefix_decides(of in prop::collection::vec(small_nets(), 4), down in prop::collection::btree_set(2u32..6, 0..4)) {
            let mut seen = BTreeSet::new();
            let of: Vec<(u32, Vec<IpNet>)> = (2..6)
                .zip(of)
                .map(|(number, prefixes)| (number, prefixes.into_iter().filter(|it| seen.insert(*it)).collect()))
                .collect();
            let bypassed: BTreeSet<PublicKey> = down.iter().copied().map(key).collect();
            let found = addresses(&bypassed, &nodes(&of), std::iter::empty());
            for last in 0u8..8 {
                let address = [10, 0, 0, last].into();
                let all = of.iter().flat_map(|(number, prefixes)| prefixes.iter().map(move |it| (number, it)));
                let longest = all.filter(|(_, it)| it.contains(&address)).max_by_key(|(_, it)| it.prefix_len());
                let expected = longest.is_some_and(|(number, _)| down.contains(number));
                prop_assert_eq!(found.contains(address), expected, "10.0.0.{}", last);
            }
        }
    }
}
