use std::net::IpAddr;

use fairlead_api::wireguard::PublicKey;
use ipnet::IpNet;
use proptest::prelude::*;

use super::*;
use crate::plan::{Plan, Policy, plan};

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
    /// What a node sends without the tunnel goes to the very member that would get it through the tunnel, in the same location, and
    /// that member takes it from both. So packets arrive, and none goes around, whatever each node knows.
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

    #[test]
    fn the_order_of_members_does_not_matter(members in any_members().prop_shuffle(), own in 1u8..=5) {
        let mut sorted = members.clone();
        sorted.sort();
        let addresses = own_addresses(&sorted[usize::from(own) - 1]);
        let addresses: Vec<_> = addresses.iter().map(|(link, prefix)| (*link, prefix.as_str())).collect();
        let policy = cross(own, &addresses);
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
