use std::net::IpAddr;

use fairlead_topology::{External, Planner};
use ipnet::IpNet;
use proptest::prelude::*;

use super::*;
use crate::plan::desired::tests::{host, inputs, key, member};
use crate::plan::desired::{Desired, Held, OwnAddresses};

/// Change of a mesh of which this is node 1.
#[derive(Debug, Clone)]
enum Step {
    /// A node gets a block, in which nodes may be reached.
    Block(u32, u8),
    /// It has this keepalive, and asks for ports to be tried or not.
    Configure(u32, Option<u16>, Option<bool>),
    /// It becomes a Peer behind another node, or a node again.
    Externalize(u32, bool),
    /// This node's own keepalive.
    Keepalive(Option<u16>),
    /// It has another key, maybe that of another node.
    Key(u32, u32),
    /// It comes, or leaves.
    Member(u32, bool),
    /// It is reached at another address, too.
    Roam(u32, u8),
    /// It sees another node there.
    See(u32, u32, u8),
    /// Services have their addresses there, or nowhere.
    Services(Option<u8>),
}

fn any_step() -> impl Strategy<Value = Step> {
    let node = || 1u32..9;
    prop_oneof![
        (node(), any::<u8>()).prop_map(|(node, block)| Step::Block(node, block % 4)),
        (node(), prop::option::of(0u16..90), any::<Option<bool>>())
            .prop_map(|(node, keepalive, birthday)| Step::Configure(node, keepalive, birthday)),
        (2u32..9, any::<bool>()).prop_map(|(node, is)| Step::Externalize(node, is)),
        prop::option::of(0u16..90).prop_map(Step::Keepalive),
        (node(), 1u32..12).prop_map(|(node, key)| Step::Key(node, key)),
        (2u32..9, any::<bool>()).prop_map(|(node, is)| Step::Member(node, is)),
        (node(), any::<u8>()).prop_map(|(node, at)| Step::Roam(node, at % 64)),
        (node(), node(), any::<u8>()).prop_map(|(node, other, at)| Step::See(node, other, at % 64)),
        prop::option::of(0u8..4).prop_map(Step::Services),
    ]
}

fn at(number: u8) -> SocketAddr {
    (IpAddr::from([203, 0, 113, number]), 51820).into()
}

fn net(number: u8) -> IpNet {
    IpNet::new(IpAddr::from([203, 0, 113, number * 16]), 28).unwrap()
}

fn change(inputs: &mut Inputs, number: u32, change: impl FnOnce(&mut Member)) {
    let name = member(number).name;
    if let Some(member) = inputs.members.iter_mut().find(|member| member.name == name) {
        change(Arc::make_mut(member));
    }
}

fn take(inputs: &mut Inputs, step: Step) {
    match step {
        Step::Block(node, block) => change(inputs, node, |member| member.blocks = vec![net(block)]),
        Step::Configure(node, keepalive, birthday) => change(inputs, node, |member| {
            member.keepalive.interval = keepalive;
            member.endpoints.birthday_attack = birthday;
        }),
        Step::Externalize(node, is_external) => change(inputs, node, |it| {
            it.external =
                is_external.then(|| External { entry_nodes: vec![member(3).name], ..External::default() });
        }),
        Step::Keepalive(seconds) => inputs.own.keepalive = seconds,
        Step::Key(node, number) => change(inputs, node, |member| member.public_key = Some(key(number))),
        Step::Member(number, is_there) => {
            inputs.members.retain(|known| known.name != member(number).name);
            inputs.members.extend(is_there.then(|| Arc::new(member(number))));
            inputs.members.sort();
        }
        Step::Roam(node, number) => change(inputs, node, |member| member.endpoints.host.push(at(number))),
        Step::See(node, other, number) => change(inputs, node, |observer| {
            observer.endpoints.sightings.insert(member(other).name, (key(other), at(number)));
        }),
        Step::Services(range) => inputs.services = range.map(net).into_iter().collect(),
    }
}

proptest! {
    #[test]
    fn after_any_changes_what_is_desired_is_the_same_as_decided_anew(
        steps in prop::collection::vec(prop::collection::vec(any_step(), 1..3), 1..12),
    ) {
        let mut planner = Planner::default();
        let mut inputs = inputs((1..9).map(member));
        let (host, own) = (host(), OwnAddresses::default());
        let mut before = Desired::new(&inputs, &host, Held::default(), &own);
        for together in steps {
            let known = inputs.clone();
            together.into_iter().for_each(|step| take(&mut inputs, step));
            let known = Some((&known, &before));
            let desired = Desired::following(known, &mut planner, &inputs, &host, Held::default(), &own);
            prop_assert_eq!(&desired, &Desired::new(&inputs, &host, Held::default(), &own));
            before = desired;
        }
    }
}

#[test]
fn a_change_of_one_node_decides_its_peer_alone_anew() {
    let (mut planner, host, own) = (Planner::default(), host(), OwnAddresses::default());
    let mut inputs = inputs((1..9).map(member));
    let mut desired = |before: Option<(&Inputs, &Desired)>, inputs: &Inputs| {
        Desired::following(before, &mut planner, inputs, &host, Held::default(), &own)
    };
    let before = desired(None, &inputs);
    let known = inputs.clone();
    take(&mut inputs, Step::Roam(5, 9));
    let after = desired(Some((&known, &before)), &inputs);
    let others: Vec<&PublicKey> = after
        .peers
        .iter()
        .filter(|(key, peer)| !Arc::ptr_eq(peer, &before.peers[*key]))
        .map(|(key, _)| key)
        .collect();
    assert_eq!(others, [&key(5)]);
    // A block around an address at which another node is reached, too.
    let known = inputs.clone();
    take(&mut inputs, Step::Block(7, 0));
    let later = desired(Some((&known, &after)), &inputs);
    let others: Vec<&PublicKey> = later
        .peers
        .iter()
        .filter(|(key, peer)| !Arc::ptr_eq(peer, &after.peers[*key]))
        .map(|(key, _)| key)
        .collect();
    assert_eq!(others, [&key(5), &key(7)]);
    assert!(later.peers[&key(5)].paths.candidates.iter().all(|it| it.address != at(9)));
}
