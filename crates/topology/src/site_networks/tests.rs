use fairlead_keys::PublicKey;

use crate::member::{Member, MemberAddresses};
use crate::plan::{Plan, plan};
use crate::policy::{Policy, Reserved};
use crate::problem::{Problem, Refusal};
use crate::site::{Granularity, InternalAddress, OwnAddress, Site};

use super::*;

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

/// A node at `192.168.LOCATION.NUMBER`, with hosts beside it.
fn node(number: u8, location: u8, networks: &[&str]) -> Member {
    let address = net(&format!("192.168.{location}.{number}/32")).addr();
    let networks = networks.iter().map(|text| net(text)).collect();
    let internal = vec![InternalAddress { address, length: None }];
    Member {
        public_key: Some(PublicKey([number; 32])),
        claims: vec![IpNet::from(address)],
        addresses: MemberAddresses::of_node(vec![address]),
        blocks: vec![net(&format!("10.64.{number}.0/24"))],
        site: Some(Site { location: format!("l{location}"), internal, networks, ..Site::default() }),
        ..Member::named(format!("n{number}"))
    }
}

/// Three nodes of a location, the third with hosts beside it, and three elsewhere.
fn members(networks: &[&str]) -> Vec<Member> {
    let beside = |number| if number == 3 { networks } else { &[] };
    (1..=6).map(|number| node(number, (number - 1) / 3, beside(number))).collect()
}

fn at_gateways(own: u8) -> Policy {
    let prefix = net(&format!("192.168.{}.{own}/24", (own - 1) / 3));
    let addresses = vec![OwnAddress { link: 7, prefix }];
    Policy {
        granularity: Granularity::Location { addresses, down: BTreeSet::new() },
        ..Policy::new(format!("n{own}"))
    }
}

/// The node that gets what is for a prefix.
fn next(plan: &Plan, prefix: &str) -> Option<String> {
    let has = plan.peers.values().find(|peer| peer.allowed_ips.contains(&net(prefix)));
    has.map(|peer| peer.members[0].clone())
}

fn targets(plan: &Plan) -> PrefixSet {
    let ipv4 = plan.targets_ipv4.iter().copied().map(IpNet::from);
    ipv4.chain(plan.targets_ipv6.iter().copied().map(IpNet::from)).collect()
}

#[test]
fn hosts_beside_a_node_are_reached_through_it() {
    let members = members(&["10.9.0.0/16", "fd09::/64"]);
    for own in [1, 2, 4, 5, 6] {
        let planned = plan(&members, &Policy::new(format!("n{own}")));
        for prefix in ["10.9.0.0/16", "fd09::/64"] {
            assert_eq!(next(&planned, prefix).as_deref(), Some("n3"), "{own}");
            assert!(targets(&planned).contains(net(prefix).addr()), "{own}");
        }
        assert_eq!((planned.masqueraded, planned.problems), (vec![], vec![]), "{own}");
    }
    let own = plan(&members, &Policy::new("n3"));
    assert_eq!(own.masqueraded, [net("10.9.0.0/16"), net("fd09::/64")]);
    assert!(!targets(&own).contains(net("10.9.0.0/16").addr()));
}

#[test]
fn from_another_location_the_way_leads_through_gateways_which_masquerade_too() {
    let members = members(&["10.9.0.0/16"]);
    for (own, through) in [(6, "n4"), (4, "n1"), (1, "n3")] {
        assert_eq!(next(&plan(&members, &at_gateways(own)), "10.9.0.0/16").as_deref(), Some(through));
    }
    for (own, masquerades) in [(1, true), (2, true), (3, true), (4, false), (6, false)] {
        assert_eq!(!plan(&members, &at_gateways(own)).masqueraded.is_empty(), masquerades, "{own}");
    }
}

#[test]
fn a_node_reaches_the_networks_it_is_connected_to_by_itself() {
    let members = members(&["10.0.0.0/8"]);
    let connected = vec![net("10.7.0.0/16"), net("192.168.1.0/24")];
    let planned = plan(&members, &Policy { connected, ..Policy::new("n4") });
    let targets = targets(&planned);
    assert!(targets.contains(net("10.8.0.1/32").addr()) && !targets.contains(net("10.7.0.1/32").addr()));
    assert!(targets.contains(net("192.168.1.5/32").addr()), "nodes are reached as before");
}

#[test]
fn pods_nodes_and_services_keep_their_addresses() {
    let members = members(&["10.0.0.0/8", "192.168.1.5/32", "10.96.0.0/16"]);
    let reserved = Reserved { services: vec![net("10.96.0.0/12")], ..Reserved::default() };
    let planned = plan(&members, &Policy { reserved, ..Policy::new("n1") });
    assert_eq!(next(&planned, "10.64.5.0/24").as_deref(), Some("n5"));
    assert_eq!(next(&planned, "192.168.1.5/32").as_deref(), Some("n5"));
    assert!(!targets(&planned).contains(net("10.96.0.1/32").addr()));
    assert!(targets(&planned).contains(net("10.9.0.1/32").addr()));
    let refused = Problem::SitePrefixRefused {
        node: "n3".to_owned(),
        prefix: net("10.96.0.0/16"),
        why: Refusal::Service,
    };
    assert!(planned.problems.contains(&refused), "{:?}", planned.problems);
    assert!(refused.to_string().contains("kilo.squat.ai/allowed-location-ips"), "{refused}");
}

#[test]
fn what_members_have_within_a_prefix_is_not_taken_for_hosts_beside_the_node() {
    let members = members(&["10.0.0.0/8", "192.168.0.0/16"]);
    let masqueraded: PrefixSet = plan(&members, &Policy::new("n3")).masqueraded.iter().collect();
    for host in ["10.9.0.1", "10.64.7.1", "192.168.1.7"] {
        assert!(masqueraded.contains(host.parse().unwrap()), "{host}");
    }
    // A pod of another node, pods of this one, a node elsewhere.
    for member in ["10.64.5.9", "10.64.3.9", "192.168.1.5"] {
        assert!(!masqueraded.contains(member.parse().unwrap()), "{member}");
    }
}

#[test]
fn everything_takes_a_grant_and_members_without_a_node_lead_to_nothing() {
    let everything = members(&["0.0.0.0/0"]);
    let without = plan(&everything, &Policy::new("n1"));
    assert_eq!(without.problems[0].reason(), "LocationPrefixRefused");
    assert!(!targets(&without).contains(net("203.0.113.1/32").addr()));
    let grants = [("n3".to_owned(), vec![net("0.0.0.0/0")])].into();
    let granted = plan(&everything, &Policy { grants, ..Policy::new("n1") });
    assert!(targets(&granted).contains(net("203.0.113.1/32").addr()));
    assert_eq!(granted.problems, []);

    let mut discovered = members(&["10.9.0.0/16"]);
    discovered[2].discovery.is_only_source = true;
    assert_eq!(next(&plan(&discovered, &Policy::new("n1")), "10.9.0.0/16"), None);
}

#[test]
fn of_two_nodes_that_name_a_prefix_one_leads_there_and_a_problem_says_which() {
    let mut members = members(&["10.9.0.0/16"]);
    members[1] = node(2, 0, &["10.9.0.0/16"]);
    let planned = plan(&members, &Policy::new("n6"));
    assert_eq!(next(&planned, "10.9.0.0/16").as_deref(), Some("n2"));
    let reasons: Vec<&str> = planned.problems.iter().map(Problem::reason).collect();
    assert_eq!(reasons, ["ClaimedTwice"]);
    assert_eq!(plan(&members, &Policy::new("n3")).masqueraded, [net("10.9.0.0/16")]);
}
