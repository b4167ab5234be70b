//! Random changes, after each of which the plan is that of all members.

use std::collections::BTreeMap;
use std::net::IpAddr;

use proptest::prelude::*;

use super::*;
use crate::member::{ByDiscovery, External, Keepalive, MemberAddresses, Since};
use crate::policy::Reserved;
use crate::site::{Encapsulation, InternalAddress, OwnAddress, Site};

const OWN: &str = "n0";

fn net(text: &str) -> IpNet {
    text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
}

fn key(number: u8) -> PublicKey {
    PublicKey([number; 32])
}

/// Few addresses, so that some collide.
fn any_net() -> impl Strategy<Value = IpNet> {
    prop_oneof![
        8 => (0u8..4, 0u8..16, 26u8..=32).prop_map(|(a, b, length)| net(&format!("10.0.{a}.{b}/{length}"))),
        2 => (0u16..16, 124u8..=128).prop_map(|(a, length)| net(&format!("fd00::{a:x}/{length}"))),
        1 => (0u8..=32).prop_map(|length| net(&format!("10.0.1.1/{length}"))),
    ]
}

fn any_address() -> impl Strategy<Value = IpAddr> {
    (0u8..4, 0u8..16).prop_map(|(a, b)| IpAddr::from([10, 0, a, b]))
}

prop_compose! {
    fn any_site()(
        location in 0u8..3,
        internal in prop::collection::vec(((0u8..24).prop_map(|it| IpAddr::from([192, 168, 0, it])), prop::option::of(26u8..=30)), 0..3),
        is_leader: bool,
        is_public: bool,
        networks in prop::collection::vec(any_net(), 0..2),
    ) -> Site {
        let internal = internal.into_iter().map(|(address, length)| InternalAddress { address, length });
        Site { location: format!("l{location}"), internal: internal.collect(), is_leader, is_public, networks }
    }
}

fn any_external() -> impl Strategy<Value = External> {
    let entry_nodes = prop::collection::vec((0u8..12).prop_map(|number| format!("n{number}")), 0..3);
    entry_nodes.prop_map(|entry_nodes| External { entry_nodes, ..External::default() })
}

prop_compose! {
    fn any_member()(
        number in 0u8..12,
        keys in (prop::option::weighted(0.9, 0u8..16), prop::option::weighted(0.1, 0u8..20)),
        prefixes in (
            prop::collection::vec(any_net(), 0..3),
            prop::collection::vec(any_net(), 0..2),
            prop::collection::vec(any_net(), 0..2),
            prop::collection::vec(any_address(), 0..2),
        ),
        addresses in prop::option::weighted(0.3, prop::collection::vec(any_address(), 0..2)),
        persistent_keepalive in prop::option::weighted(0.2, 0u16..3),
        site in prop::option::weighted(0.8, any_site()),
        created in prop::option::of(0i64..4),
        is_discovered in prop::bool::weighted(0.1),
        external in prop::option::weighted(0.15, any_external()),
        term in prop::option::weighted(0.3, (0u8..12, 0u8..16, 1u64..4)),
    ) -> Member {
        let (claims, blocks, pod_networks, mesh_addresses) = prefixes;
        let external = external.filter(|_| number != 0);
        let terms = term.map(|(peer, with, term)| (format!("n{peer}"), (key(with), term)));
        let name = match external {
            Some(_) => Member::of_peer(&format!("n{number}")).name,
            None => format!("n{number}"),
        };
        Member {
            public_key: keys.0.map(key),
            next_key: keys.1.map(key),
            claims, blocks, pod_networks, site,
            addresses: MemberAddresses {
                mesh: mesh_addresses,
                is_unconfirmed: addresses.is_none(),
                node: addresses,
                is_control_plane: number % 3 == 0,
            },
            keepalive: Keepalive::every(persistent_keepalive),
            since: created.map(|created| Since { created, uid: String::new() }),
            discovery: ByDiscovery { is_only_source: is_discovered && number != 0, needs_preshared_key: false },
            external,
            entry_terms: terms.into_iter().collect(),
            ..Member::named(name)
        }
    }
}

fn any_granularity() -> impl Strategy<Value = Granularity> {
    let on_host = |link, text: &str| OwnAddress { link, prefix: net(text) };
    let addresses = vec![on_host(2, "192.168.0.1/27"), on_host(3, "192.168.0.2/28")];
    let location = |addresses: Vec<OwnAddress>, down: Option<u8>| {
        let down = down.map(|number| format!("n{number}")).into_iter().collect();
        Granularity::Location { addresses, down }
    };
    prop_oneof![
        Just(Granularity::Full),
        Just(Granularity::Cross(addresses.clone())),
        prop::option::of(0u8..12).prop_map(move |down| location(addresses.clone(), down)),
    ]
}

prop_compose! {
    fn any_policy()(
        granularity in any_granularity(),
        encapsulation in prop::sample::select(vec![
            Encapsulation::Always, Encapsulation::CrossSubnet, Encapsulation::Never,
        ]),
        includes_pod_networks: bool,
        excluded in prop::collection::vec(any_net(), 0..2),
        guarded in prop::collection::vec(any_net(), 0..2),
        connected in prop::collection::vec(any_net(), 0..2),
        grants in prop::collection::vec((0u8..12, any_net()), 0..3),
        completed in prop::collection::vec(0u8..20, 0..2),
    ) -> Policy {
        let mut by_name: BTreeMap<String, Vec<IpNet>> = BTreeMap::new();
        for (number, prefix) in grants {
            by_name.entry(format!("n{number}")).or_default().push(prefix.trunc());
        }
        let completed = completed.into_iter().map(key).collect();
        Policy {
            granularity, encapsulation, includes_pod_networks, excluded, guarded, connected, completed,
            grants: by_name, reserved: Reserved { hosts: vec![net("10.0.3.9/32")], services: vec![net("10.0.3.0/29")], ..Reserved::default() },
            ..Policy::new(OWN)
        }
    }
}

/// Change of the mesh.
#[derive(Debug, Clone)]
enum Step {
    /// These prefixes are guarded now.
    Guard(Vec<IpNet>),
    /// The device has this at a key.
    Hold(u8, Vec<IpNet>),
    Policy(Box<Policy>),
    Put(Box<Member>),
    Remove(u8),
    /// A member has another endpoint.
    Roam(u8),
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        3 => prop::collection::vec(any_net(), 0..3).prop_map(Step::Guard),
        2 => (0u8..20, prop::collection::vec(any_net(), 0..3)).prop_map(|(key, held)| Step::Hold(key, held)),
        1 => any_policy().prop_map(|policy| Step::Policy(Box::new(policy))),
        12 => any_member().prop_map(|member| Step::Put(Box::new(member))),
        3 => (0u8..12).prop_map(Step::Remove),
        2 => (0u8..12).prop_map(Step::Roam),
    ]
}

/// The mesh of a test.
struct Mesh {
    members: BTreeMap<String, Arc<Member>>,
    policy: Policy,
    planner: Planner,
}

impl Mesh {
    fn new(members: Vec<Member>, policy: Policy) -> Self {
        let members = members.into_iter().map(|member| (member.name.clone(), Arc::new(member))).collect();
        Self { members, policy, planner: Planner::default() }
    }

    fn put(&mut self, member: Member) {
        self.members.insert(member.name.clone(), Arc::new(member));
    }

    fn take(&mut self, step: Step) {
        match step {
            Step::Guard(guarded) => self.policy.guarded = guarded,
            Step::Hold(number, held) => {
                self.policy.held.insert(key(number), held.iter().map(IpNet::trunc).collect());
            }
            Step::Policy(policy) => self.policy = Policy { held: self.policy.held.clone(), ..*policy },
            Step::Put(member) => self.put(*member),
            Step::Remove(number) => {
                self.members.remove(&format!("n{number}"));
                self.members.remove(&Member::of_peer(&format!("n{number}")).name);
            }
            Step::Roam(number) => {
                if let Some(member) = self.members.get_mut(&format!("n{number}")) {
                    Arc::make_mut(member).endpoints.host.push(([192, 0, 2, number], 1).into());
                }
            }
        }
    }

    /// The plan, which is that of all members planned together.
    fn plan(&mut self) -> Plan {
        let members: Vec<Arc<Member>> = self.members.values().cloned().collect();
        let planned = self.planner.plan(&members, self.policy.clone()).clone();
        assert_eq!(planned, plan(&members, &self.policy));
        planned
    }
}

/// `n0` to `n999`, each with prefixes of its own.
fn large() -> Mesh {
    Mesh::new((0..1000).map(plain).collect(), Policy::new(OWN))
}

fn plain(number: u16) -> Member {
    let [high, low] = number.to_be_bytes();
    let mut public_key = [1; 32];
    public_key[..2].copy_from_slice(&[high, low]);
    Member {
        public_key: Some(PublicKey(public_key)),
        claims: vec![net(&format!("172.16.{high}.{low}/32"))],
        blocks: vec![net(&format!("10.{high}.{low}.0/27"))],
        ..Member::named(format!("n{number}"))
    }
}

#[test]
fn a_change_of_a_member_plans_its_group_alone_and_keeps_the_peers_of_others() {
    let mut mesh = large();
    let before = mesh.plan();
    let mut moved = plain(7);
    moved.claims.push(net("172.17.0.7/32"));
    mesh.put(moved);
    let after = mesh.plan();
    let is_same =
        |(key, peer): (&PublicKey, &Arc<crate::peer::PeerPlan>)| Arc::ptr_eq(peer, &after.peers[key]);
    assert_eq!(before.peers.iter().filter(|peer| !is_same(*peer)).count(), 1);
    mesh.members.remove("n8");
    mesh.put(Member { name: "n8b".to_owned(), ..plain(2000) });
    assert_eq!(mesh.plan().peers.len(), 999);
    mesh.take(Step::Roam(9));
    mesh.plan();
    assert_eq!(mesh.planner.full_plans(), 1);
}

#[test]
fn blocks_that_are_released_and_taken_again_plan_no_others() {
    let mut mesh = large();
    mesh.plan();
    let (block, other) = (plain(7).blocks[0], net("10.200.0.0/27"));
    mesh.put(Member { blocks: Vec::new(), ..plain(7) });
    for guarded in [vec![block, other], vec![block]] {
        let is_guarded = guarded.contains(&other);
        mesh.take(Step::Guard(guarded));
        let targets: PrefixSet = mesh.plan().targets_ipv4.into_iter().map(IpNet::from).collect();
        assert!(targets.contains(block.addr()));
        assert_eq!(targets.contains(other.addr()), is_guarded);
    }
    let blocks = [plain(8).blocks, vec![block]].concat();
    mesh.put(Member { blocks, ..plain(8) });
    mesh.take(Step::Guard(Vec::new()));
    mesh.plan();
    assert_eq!(mesh.planner.full_plans(), 1);
}

#[test]
fn a_range_that_concerns_all_members_has_all_planned_together() {
    let mut mesh = large();
    mesh.plan();
    let mut thief = plain(9);
    thief.claims.push(net("10.0.0.0/8"));
    mesh.put(thief);
    mesh.plan();
    assert_eq!(mesh.planner.full_plans(), 2);
    // One that is refused concerns no other member.
    let mut thief = plain(9);
    thief.claims.push(net("0.0.0.0/0"));
    mesh.put(thief);
    mesh.plan();
    let full_plans = mesh.planner.full_plans();
    mesh.put(plain(10));
    mesh.put(plain(9));
    mesh.plan();
    assert_eq!(mesh.planner.full_plans(), full_plans);
}

#[test]
fn members_in_another_order_are_all_planned() {
    let members: Vec<Arc<Member>> = [plain(2), plain(0), plain(1)].map(Arc::new).to_vec();
    let mut planner = Planner::default();
    for _ in 0..2 {
        assert_eq!(planner.plan(&members, Policy::new(OWN)), &plan(&members, &Policy::new(OWN)));
    }
    assert_eq!(planner.full_plans(), 2);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, ..ProptestConfig::default() })]

    #[test]
    fn after_any_changes_the_plan_is_that_of_all_members(
        members in prop::collection::vec(any_member(), 0..12),
        policy in any_policy(),
        steps in prop::collection::vec(prop::collection::vec(any_step(), 1..3), 1..16),
    ) {
        let mut mesh = Mesh::new(members, policy);
        mesh.plan();
        for together in steps {
            together.into_iter().for_each(|step| mesh.take(step));
            mesh.plan();
        }
    }
}
