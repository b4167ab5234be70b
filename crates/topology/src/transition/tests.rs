use ipnet::IpNet;
use proptest::prelude::*;

use super::*;
use crate::member::External;
use crate::site::{Down, InternalAddress, OwnAddress, Site};

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn block(number: u8) -> IpNet {
    net(&format!("10.64.{number}.0/24"))
}

/// A node whose key and block follow from its number. One without a location has no internal address.
fn node(number: u8, at: Option<u8>) -> Member {
    let internal = at.map(|at| InternalAddress { address: [192, 168, at, number].into(), length: None });
    let location = format!("l{}", at.unwrap_or_default());
    Member {
        public_key: Some(PublicKey([number; 32])),
        blocks: vec![block(number)],
        site: Some(Site { location, internal: internal.into_iter().collect(), ..Site::default() }),
        ..Member::named(format!("n{number:02}"))
    }
}

/// Plans of the node while the granularity changes: the one in use, and the one of both granularities.
fn plans(members: &[Member], own: &Member, uses_gateways: bool, down: Down) -> [Plan; 2] {
    let internal = own.site.iter().flat_map(|site| &site.internal);
    let addresses =
        internal.map(|it| OwnAddress { link: 7, prefix: IpNet::new(it.address, 24).unwrap() }).collect();
    let location = Granularity::Location { addresses, down };
    let (granularity, other) =
        if uses_gateways { (location, Granularity::Full) } else { (Granularity::Full, location) };
    let policy = Policy { granularity, ..Policy::new(&own.name) };
    let used = plan(members, &policy);
    let united = united(members, &policy, other, &used).unwrap();
    [used, united.plan]
}

fn number(peer: &PeerPlan) -> u8 {
    peer.members[0][1..].parse().unwrap()
}

fn accepts(plan: &Plan, from: u8, source: IpNet) -> bool {
    let Some(peer) = plan.peers.get(&PublicKey([from; 32])) else { return false };
    peer.allowed_ips.iter().chain(&peer.accepted_ips).any(|prefix| prefix.contains(&source))
}

#[test]
fn a_node_behind_gateways_prepares_tunnels_to_all_without_using_them() {
    let members: Vec<Member> = (1..=9).map(|it| node(it, Some((it - 1) / 3))).collect();
    let [used, both] = plans(&members, &members[2], true, Down::new());
    assert_eq!((used.peers.len(), both.peers.len()), (2, 8));
    let added = added(&used, &both);
    assert_eq!(added.iter().map(|key| key.0[0]).collect::<Vec<u8>>(), [4, 5, 6, 7, 8, 9]);
    for key in &added {
        let peer = &both.peers[key];
        assert!(peer.allowed_ips.is_empty() && peer.accepted_ips.contains(&block(key.0[0])));
    }
    for (key, peer) in &used.peers {
        assert_eq!(both.peers[key].allowed_ips, peer.allowed_ips, "what is sent stays");
    }
    let rest = |plan: &Plan| Plan { peers: BTreeMap::new(), ..plan.clone() };
    assert_eq!(rest(&used), rest(&both));
}

#[test]
fn a_change_without_gateways_needs_nothing_and_peers_of_kilo_are_left_alone() {
    let external = External::default();
    let laptop = Member {
        public_key: Some(PublicKey([9; 32])),
        claims: vec![net("10.9.0.9/32")],
        external: Some(external),
        ..Member::named("laptop")
    };
    let members = [node(1, Some(0)), node(2, Some(0)), node(3, Some(1)), laptop];
    let full = Policy::new("n01");
    let used = plan(&members, &full);
    assert_eq!(united(&members, &full, Granularity::Cross(Vec::new()), &used), None);
    let [used, both] = plans(&members, &members[0], false, Down::new());
    let laptop = PublicKey([9; 32]);
    assert_eq!(both.peers.get(&laptop), used.peers.get(&laptop));
    assert!(used.peers.contains_key(&laptop));
}

proptest! {
    /// Some nodes have changed over and others have not, and each has its own opinion of which gateways are down.
    #[test]
    fn whoever_changed_over_packets_arrive_and_each_step_is_accepted(
        places in proptest::collection::vec(proptest::option::weighted(0.9, 0_u8..3), 2..12),
        uses_gateways in proptest::collection::vec(any::<bool>(), 12),
        down in proptest::collection::vec(proptest::collection::btree_set(1_u8..12, 0..4), 12),
    ) {
        let members: Vec<Member> = (1..).zip(&places).map(|(number, at)| node(number, *at)).collect();
        let of = |at: usize| {
            let down = down[at].iter().map(|it| format!("n{it:02}")).collect();
            let [_, both] = plans(&members, &members[at], uses_gateways[at], down);
            both
        };
        let plans: Vec<Plan> = (0..members.len()).map(of).collect();
        let plan_of = |number: u8| &plans[usize::from(number) - 1];
        let numbers = || 1..=u8::try_from(members.len()).unwrap();
        for (from, to) in numbers().flat_map(|from| numbers().map(move |to| (from, to))) {
            let (mut at, mut steps) = (from, 0);
            while at != to {
                let sends = |peer: &&Arc<PeerPlan>| peer.allowed_ips.contains(&block(to));
                let peer = plan_of(at).peers.values().find(sends);
                prop_assert!(peer.is_some(), "n{at} drops what is for n{to}");
                let next = number(peer.unwrap());
                prop_assert!(accepts(plan_of(next), at, block(from)), "n{next} drops n{from} from n{at}");
                (at, steps) = (next, steps + 1);
                prop_assert!(steps <= 3, "a loop from n{from} to n{to}");
            }
        }
    }
}
