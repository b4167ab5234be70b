use std::net::IpAddr;

use fairlead_keys::PublicKey;
use ipnet::IpNet;
use proptest::prelude::*;

use super::*;
use crate::plan::{Plan, plan};
use crate::policy::Policy;
use crate::site::{Down, Granularity};

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

fn internal(text: &str) -> InternalAddress {
    match text.split_once('/') {
        None => InternalAddress { address: text.parse().unwrap(), length: None },
        Some((address, length)) => {
            InternalAddress { address: address.parse().unwrap(), length: Some(length.parse().unwrap()) }
        }
    }
}

/// A member whose key, block and address follow from its number.
fn member(number: u8, location: &str, addresses: &[&str]) -> Member {
    let internal: Vec<_> = addresses.iter().map(|text| internal(text)).collect();
    Member {
        public_key: Some(PublicKey([number; 32])),
        claims: internal.iter().map(|it| IpNet::from(it.address)).collect(),
        blocks: vec![net(&format!("10.64.{number}.0/24")), net(&format!("fd64:0:0:{number:x}::/64"))],
        site: Some(Site { location: location.to_owned(), internal, ..Site::default() }),
        ..Member::named(format!("n{number}"))
    }
}

fn cross(own: u8, addresses: &[(u32, &str)]) -> Policy {
    let addresses = addresses.iter().map(|(link, prefix)| OwnAddress { link: *link, prefix: net(prefix) });
    let granularity = Granularity::Cross(addresses.collect());
    Policy { granularity, ..Policy::new(format!("n{own}")) }
}

fn routes(plan: &Plan) -> Vec<String> {
    let text = |it: &BlockRoute| format!("{} via {} on {}", it.destination, it.gateway, it.link);
    plan.routes.iter().map(text).collect()
}

#[test]
fn a_neighbour_in_the_location_is_reached_without_its_tunnel_which_stays() {
    let members = [
        member(1, "lab", &["192.168.1.1", "fd01::1"]),
        member(2, "lab", &["192.168.1.2", "fd01::2"]),
        member(3, "lab", &["192.168.2.3"]),
        member(4, "cloud", &["192.168.1.4"]),
        member(5, "lab", &[]),
        Member { site: None, ..member(6, "", &["192.168.1.6"]) },
    ];
    let full = plan(&members, &Policy::new("n1"));
    assert_eq!(full.routes, []);
    let plan = plan(&members, &cross(1, &[(7, "192.168.1.1/24"), (8, "fd01::1/64")]));
    let expected = [
        "10.64.2.0/24 via 192.168.1.2 on 7",
        "192.168.1.2/32 via 192.168.1.2 on 7",
        "fd01::2/128 via fd01::2 on 8",
        "fd64:0:0:2::/64 via fd01::2 on 8",
    ];
    assert_eq!(routes(&plan), expected);
    assert_eq!(
        (plan.peers, plan.targets_ipv4),
        (full.peers, full.targets_ipv4),
        "the tunnels are those of full"
    );
}

#[test]
fn the_length_that_an_administrator_gives_is_that_of_the_subnet() {
    let near = |own: &str, other: &str| {
        let members = [member(1, "lab", &[own]), member(2, "lab", &[other])];
        !plan(&members, &cross(1, &[(7, "192.168.1.1/24")])).routes.is_empty()
    };
    assert!(near("192.168.1.1", "192.168.1.2"));
    assert!(!near("192.168.1.1/32", "192.168.1.2"));
    assert!(!near("192.168.1.1", "192.168.1.2/32"));
    assert!(near("192.168.1.1/16", "192.168.2.2"));
    assert!(!near("192.168.1.1", "192.168.2.2"));
    assert!(!near("203.0.113.1/24", "203.0.113.2"), "this host does not have the address");
}

#[test]
fn an_address_that_two_members_name_leads_to_neither() {
    let members = [
        member(1, "lab", &["192.168.1.1"]),
        member(2, "lab", &["192.168.1.2"]),
        member(3, "lab", &["192.168.1.2"]),
        member(4, "lab", &["192.168.1.1"]),
    ];
    let plan = plan(&members, &cross(1, &[(7, "192.168.1.1/24")]));
    assert_eq!(routes(&plan), Vec::<String>::new());
    let shared = |address: &str, nodes: [&str; 2]| Problem::InternalAddressShared {
        address: address.parse::<IpAddr>().unwrap(),
        nodes: nodes.map(str::to_owned).into(),
    };
    for problem in [shared("192.168.1.1", ["n1", "n4"]), shared("192.168.1.2", ["n2", "n3"])] {
        assert!(plan.problems.contains(&problem), "{:?}", plan.problems);
    }
}

fn tunnels(plan: &Plan) -> Vec<String> {
    plan.tunnels
        .routes
        .iter()
        .map(|it| format!("{} to {} at {}", it.destination, it.node, it.remote))
        .collect()
}

fn encapsulated(own: u8, addresses: &[(u32, &str)], encapsulation: Encapsulation) -> Policy {
    Policy { encapsulation, ..cross(own, addresses) }
}

#[test]
fn a_neighbour_on_another_subnet_is_reached_through_an_ip_tunnel() {
    let members = [
        member(1, "lab", &["192.168.1.1", "fd01::1"]),
        member(2, "lab", &["192.168.1.2"]),
        member(3, "lab", &["192.168.2.3", "fd02::3"]),
        member(4, "cloud", &["192.168.1.4"]),
        member(5, "lab", &[]),
    ];
    let own = [(7, "192.168.1.1/24"), (8, "fd01::1/64")];
    let near = ["10.64.2.0/24 via 192.168.1.2 on 7", "192.168.1.2/32 via 192.168.1.2 on 7"];
    let far = ["10.64.3.0/24 to n3 at 192.168.2.3", "fd64:0:0:3::/64 to n3 at fd02::3"];
    let by_subnet = plan(&members, &encapsulated(1, &own, Encapsulation::CrossSubnet));
    assert_eq!(
        (routes(&by_subnet), tunnels(&by_subnet)),
        (near.map(str::to_owned).to_vec(), far.map(str::to_owned).to_vec())
    );
    let addresses = |texts: &[&str]| texts.iter().map(|it| it.parse().unwrap()).collect::<BTreeSet<IpAddr>>();
    let planned = &by_subnet.tunnels;
    assert_eq!(
        planned.local.iter().copied().collect::<BTreeSet<_>>(),
        addresses(&["192.168.1.1", "fd01::1"])
    );
    assert_eq!(
        planned.senders,
        addresses(&["192.168.1.2", "192.168.2.3", "fd02::3"]),
        "those of the location"
    );

    let always = plan(&members, &encapsulated(1, &own, Encapsulation::Always));
    assert_eq!(always.routes, [], "the network need not deliver packets with addresses of pods");
    let mut all = tunnels(&always);
    all.retain(|it| it.contains("n2"));
    assert_eq!(all, ["10.64.2.0/24 to n2 at 192.168.1.2"], "the peer has the address of the tunnel's end");

    let never = plan(&members, &cross(1, &own));
    assert_eq!((routes(&never), never.tunnels), (near.map(str::to_owned).to_vec(), Tunnels::default()));
    let full = Policy { encapsulation: Encapsulation::Always, ..Policy::new("n1") };
    assert_eq!(plan(&members, &full).tunnels, Tunnels::default());
}

#[test]
fn what_is_behind_a_gateway_on_another_subnet_takes_the_tunnel_to_it() {
    let leader = |site: Option<Site>| site.map(|site| Site { is_leader: true, ..site });
    let gateway = member(2, "lab", &["192.168.2.2"]);
    let members = [
        member(1, "lab", &["192.168.1.1"]),
        Member { site: leader(gateway.site.clone()), ..gateway },
        member(3, "lab", &["192.168.1.3"]),
        member(4, "cloud", &["172.16.0.4"]),
    ];
    let addresses = vec![OwnAddress { link: 7, prefix: net("192.168.1.3/24") }];
    let granularity = Granularity::Location { addresses, down: Down::default() };
    let policy = Policy { granularity, encapsulation: Encapsulation::CrossSubnet, ..Policy::new("n3") };
    let planned = plan(&members, &policy);
    assert!(
        tunnels(&planned).contains(&"10.64.4.0/24 to n2 at 192.168.2.2".to_owned()),
        "{:?}",
        tunnels(&planned)
    );
}

#[test]
fn an_address_that_two_members_name_is_the_end_of_no_tunnel() {
    let members = [
        member(1, "lab", &["192.168.1.1"]),
        member(2, "lab", &["192.168.2.2", "192.168.3.2"]),
        member(3, "lab", &["192.168.2.2"]),
    ];
    let plan = plan(&members, &encapsulated(1, &[(7, "192.168.1.1/24")], Encapsulation::Always));
    assert_eq!(tunnels(&plan), Vec::<String>::new());
    let address = "192.168.2.2".parse().unwrap();
    let shared = Problem::InternalAddressShared { address, nodes: ["n2", "n3"].map(str::to_owned).into() };
    assert!(plan.problems.contains(&shared), "{:?}", plan.problems);
}

prop_compose! {
    fn any_member(number: u8)(
        location in 0u8..3,
        hosts in prop::collection::vec((0u8..2, 1u8..6, prop::option::of(20u8..=32)), 0..3),
        has_site: bool,
    ) -> Member {
        let hosts: Vec<String> = hosts.into_iter().map(|(net, host, length)| {
            let length = length.map(|length| format!("/{length}")).unwrap_or_default();
            format!("192.168.{net}.{host}{length}")
        }).collect();
        let hosts: Vec<&str> = hosts.iter().map(String::as_str).collect();
        let member = member(number, &format!("l{location}"), &hosts);
        Member { site: member.site.filter(|_| has_site), ..member }
    }
}

fn any_members() -> impl Strategy<Value = Vec<Member>> {
    (any_member(1), any_member(2), any_member(3), any_member(4), any_member(5))
        .prop_map(|(a, b, c, d, e)| vec![a, b, c, d, e])
}

fn own_addresses(member: &Member) -> Vec<(u32, String)> {
    let internal = member.site.iter().flat_map(|site| &site.internal);
    internal.map(|it| (7, format!("{}/24", it.address))).collect()
}

fn plan_of(members: &[Member], own: u8) -> Plan {
    let addresses = own_addresses(&members[usize::from(own) - 1]);
    let addresses: Vec<_> = addresses.iter().map(|(link, prefix)| (*link, prefix.as_str())).collect();
    plan(members, &cross(own, &addresses))
}

proptest! {
    /// Packets that a node sends without the tunnel go to the very member that would get them through the tunnel, in the same location,
    /// and that member takes them from both. So packets arrive, and none goes around, whatever each node knows.
    #[test]
    fn a_plain_route_leads_where_the_tunnel_would(members in any_members(), own in 1u8..=5) {
        let found = plan_of(&members, own);
        let full = plan(&members, &Policy::new(format!("n{own}")));
        prop_assert_eq!(&found.peers, &full.peers);
        let own_site = members[usize::from(own) - 1].site.clone();
        for route in &found.routes {
            let to = members.iter().find(|member| member.name == route.node).unwrap();
            let peer = &full.peers[&to.public_key.unwrap()];
            prop_assert!(peer.allowed_ips.contains(&route.destination));
            let site = to.site.as_ref().unwrap();
            prop_assert_eq!(&site.location, &own_site.as_ref().unwrap().location);
            prop_assert!(site.internal.iter().any(|it| it.address == route.gateway));
            let holders = members.iter().filter(|member| {
                member.site.as_ref().is_some_and(|it| {
                    it.location == site.location && it.internal.iter().any(|it| it.address == route.gateway)
                })
            });
            prop_assert_eq!(holders.count(), 1, "{} is the address of one", route.gateway);
        }
    }

    /// Packets that a node puts into a tunnel go to the member that the peer would bring them to, at the address where that member takes
    /// its end to be and lets this node in; and the peer is there for them all the same, so that a tunnel that fails is no black hole.
    #[test]
    fn a_tunnel_leads_where_the_peer_would(members in any_members(), own in 1u8..=5, always: bool) {
        let encapsulation = if always { Encapsulation::Always } else { Encapsulation::CrossSubnet };
        let planned = |own: u8| {
            let addresses = own_addresses(&members[usize::from(own) - 1]);
            let addresses: Vec<_> = addresses.iter().map(|(link, prefix)| (*link, prefix.as_str())).collect();
            plan(&members, &encapsulated(own, &addresses, encapsulation))
        };
        let (found, full) = (planned(own), plan(&members, &Policy::new(format!("n{own}"))));
        prop_assert_eq!(&found.peers, &full.peers);
        for route in &found.tunnels.routes {
            let to = members.iter().find(|member| member.name == route.node).unwrap();
            prop_assert!(full.peers[&to.public_key.unwrap()].allowed_ips.contains(&route.destination));
            prop_assert!(!found.routes.iter().any(|it| it.destination == route.destination), "one way");
            prop_assert_eq!(route.remote.is_ipv4(), route.destination.addr().is_ipv4());
            prop_assert_ne!(IpNet::from(route.remote), route.destination, "the outer packet is not put in again");
            let other = planned(route.node[1..].parse().unwrap());
            prop_assert!(other.tunnels.local.contains(&route.remote));
            prop_assert!(found.tunnels.local.iter().any(|local| other.tunnels.senders.contains(local)));
        }
    }

    #[test]
    fn the_order_of_members_does_not_matter(members in any_members().prop_shuffle(), own in 1u8..=5) {
        let mut sorted = members.clone();
        sorted.sort();
        let addresses = own_addresses(&sorted[usize::from(own) - 1]);
        let addresses: Vec<_> = addresses.iter().map(|(link, prefix)| (*link, prefix.as_str())).collect();
        let policy = encapsulated(own, &addresses, Encapsulation::CrossSubnet);
        prop_assert_eq!(plan(&members, &policy), plan(&sorted, &policy));
    }

    #[test]
    fn a_member_that_moves_changes_only_the_routes_to_it(members in any_members(), own in 1u8..=5, moved in 1u8..=5) {
        prop_assume!(own != moved);
        let before = plan_of(&members, own);
        let mut after = members.clone();
        after[usize::from(moved) - 1].site = Some(Site { location: "elsewhere".to_owned(), ..Site::default() });
        let after = plan_of(&after, own);
        let name = format!("n{moved}");
        let addresses: Vec<IpAddr> =
            members[usize::from(moved) - 1].site.iter().flat_map(|it| &it.internal).map(|it| it.address).collect();
        for route in after.routes.iter().filter(|route| !before.routes.contains(route)) {
            // It no longer names an address that another has too.
            prop_assert!(addresses.contains(&route.gateway), "{route:?}");
        }
        prop_assert!(before.routes.iter().all(|it| it.node == name || after.routes.contains(it)
            || after.routes.iter().any(|other| other.destination == it.destination && addresses.contains(&other.gateway))));
    }
}
