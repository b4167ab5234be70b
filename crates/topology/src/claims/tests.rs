use std::collections::BTreeMap;
use std::net::IpAddr;

use fairlead_keys::PublicKey;

use super::*;
use crate::member::{ByDiscovery, MemberAddresses, Since};
use crate::plan::{Plan, plan};
use crate::policy::{Reserved, SourceNodes};

fn net(text: &str) -> IpNet {
    text.parse().unwrap()
}

/// A node that joined in the order of the numbers, whose Node object has these addresses.
fn node(name: &str, number: u8, claims: &[&str], addresses: Option<&[&str]>) -> Member {
    let address = |text: &&str| text.parse::<IpAddr>().unwrap();
    Member {
        public_key: Some(PublicKey([number; 32])),
        since: Some(Since { created: number.into(), uid: name.to_owned() }),
        claims: claims.iter().copied().map(net).collect(),
        addresses: MemberAddresses {
            node: addresses.map(|addresses| addresses.iter().map(address).collect()),
            ..MemberAddresses::default()
        },
        ..Member::named(name)
    }
}

fn own() -> Member {
    node("a", 1, &["192.0.2.1/32"], Some(&["192.0.2.1"]))
}

fn granting(name: &str, prefix: &str) -> Policy {
    Policy { grants: BTreeMap::from([(name.to_owned(), vec![net(prefix)])]), ..Policy::new("a") }
}

fn allowed(plan: &Plan, number: u8) -> Vec<String> {
    plan.peers[&PublicKey([number; 32])].allowed_ips.iter().map(ToString::to_string).collect()
}

fn reasons(plan: &Plan) -> Vec<&'static str> {
    plan.problems.iter().map(Problem::reason).collect()
}

/// A stolen token announces the address of a server elsewhere.
#[test]
fn an_address_that_the_node_does_not_have_is_no_part_of_the_mesh() {
    let thief = node("thief", 2, &["192.0.2.2/32", "203.0.113.80/32"], Some(&["192.0.2.2"]));
    let members = [own(), thief];
    let planned = plan(&members, &Policy::new("a"));
    assert_eq!(allowed(&planned, 2), ["192.0.2.2/32"]);
    assert_eq!(planned.targets_ipv4, ["192.0.2.2/32".parse().unwrap()], "the server is reached as before");
    assert_eq!(
        planned.problems[0].to_string(),
        "node thief announces 203.0.113.80/32, which is left out of the mesh: its Node has no such InternalIP, or none that the \
         controller believes (condition InternalIPsBelieved of the WireKubeMesh); if that is meant, grant it to thief in spec.grants of the \
         WireKubeMesh"
    );
    let planned = plan(&members, &granting("thief", "203.0.113.0/24"));
    assert_eq!((allowed(&planned, 2).len(), planned.problems.len()), (2, 0));
}

/// A stranger with the secret of discovery services says that the router, or the cluster's DNS, is its own.
#[test]
fn a_member_that_only_discovery_knows_takes_no_address_that_others_need() {
    let claims = ["192.0.2.2/32", "192.168.1.1/32", "10.96.0.10/32", "203.0.113.1/32"];
    let told = Member {
        discovery: ByDiscovery { is_only_source: true, needs_preshared_key: false },
        ..node("told", 2, &claims, None)
    };
    let policy = Policy {
        reserved: Reserved {
            hosts: vec![net("192.168.1.1/32"), net("203.0.113.1/32")],
            services: vec![net("10.96.0.0/16")],
            ..Reserved::default()
        },
        ..granting("told", "192.168.1.1/32")
    };
    let planned = plan(&[own(), told], &policy);
    assert_eq!(allowed(&planned, 2), ["192.0.2.2/32"]);
    assert_eq!(planned.targets_ipv4, ["192.0.2.2/32".parse().unwrap()]);
    assert_eq!(reasons(&planned), ["ClaimRefused"; 3]);
    assert_eq!(
        planned.problems[0].to_string(),
        "node told says that 10.96.0.10/32 is its own, which is left out of the mesh: these addresses belong to Services"
    );
}

/// A node's token can announce any single address, and its kubelet say that the Node has it.
#[test]
fn an_address_on_the_mesh_is_that_of_the_node_which_the_controller_gave_it() {
    let address = "fd7f:175a:b97c:5602::3";
    let thief = node("thief", 2, &["fd7f:175a:b97c:5602::3/128"], Some(&[address]));
    let victim = Member {
        addresses: MemberAddresses { mesh: vec![address.parse().unwrap()], ..MemberAddresses::default() },
        ..node("victim", 3, &[], None)
    };
    let members = [own(), thief, victim.clone()];
    let planned = plan(&members, &Policy::new("a"));
    assert_eq!((allowed(&planned, 2).len(), allowed(&planned, 3)), (0, vec![format!("{address}/128")]));
    assert_eq!(planned.targets_ipv6, [format!("{address}/128").parse().unwrap()]);
    // Of what only discovery services know nothing is believed that another member has.
    let told = Member {
        discovery: ByDiscovery { is_only_source: true, needs_preshared_key: false },
        public_key: Some(PublicKey([4; 32])),
        ..victim.clone()
    };
    let told = Member { name: "discovery/x".to_owned(), ..told };
    let planned = plan(&[own(), victim, told], &Policy::new("a"));
    assert_eq!((allowed(&planned, 3).len(), allowed(&planned, 4).len()), (1, 0));
}

#[test]
fn the_node_that_has_the_address_gets_it_whoever_announced_it_first() {
    let thief = node("thief", 2, &["192.0.2.3/32"], None);
    let members = [own(), thief, node("victim", 3, &["192.0.2.3/32"], Some(&["192.0.2.3"]))];
    let held = BTreeMap::from([(PublicKey([2; 32]), [net("192.0.2.3/32")].into())]);
    let plan = plan(&members, &Policy { held, ..Policy::new("a") });
    assert_eq!((allowed(&plan, 2), allowed(&plan, 3)), (vec![], vec!["192.0.2.3/32".to_owned()]));
    assert_eq!(reasons(&plan), ["ClaimedTwice"]);
}

#[test]
fn of_two_nodes_with_one_address_the_older_has_it_unless_it_is_granted() {
    let of_two = |number, name| node(name, number, &["192.168.1.10/32"], Some(&["192.168.1.10"]));
    let members = [own(), of_two(2, "office"), of_two(3, "home")];
    let planned = plan(&members, &Policy::new("a"));
    assert_eq!((allowed(&planned, 2).len(), allowed(&planned, 3).len()), (1, 0));
    let planned = plan(&members, &granting("home", "192.168.1.10/32"));
    assert_eq!((allowed(&planned, 2).len(), allowed(&planned, 3).len()), (0, 1));
    // The controller copies the address of the first alone.
    let members = [own(), of_two(2, "office"), node("home", 3, &["192.168.1.10/32"], Some(&[]))];
    let planned = plan(&members, &Policy::new("a"));
    assert_eq!((allowed(&planned, 2).len(), allowed(&planned, 3).len()), (1, 0));
    let Problem::ClaimedTwice { nodes, owner, .. } = &planned.problems[0] else {
        panic!("{:?}", planned.problems)
    };
    assert_eq!((nodes.as_slice(), owner.as_str()), (&["home".to_owned(), "office".to_owned()][..], "office"));
    // A block goes before that, too.
    let block = Member { blocks: vec![net("192.168.1.0/24")], ..node("block", 4, &[], None) };
    let planned = plan(&[members.to_vec(), vec![block]].concat(), &granting("home", "192.168.1.10/32"));
    assert_eq!((allowed(&planned, 3).len(), allowed(&planned, 4).len()), (0, 1));
}

#[test]
fn this_node_keeps_its_address_whatever_is_granted() {
    let members = [own(), node("b", 2, &["192.0.2.1/32"], None)];
    let plan = plan(&members, &granting("b", "0.0.0.0/0"));
    assert_eq!((allowed(&plan, 2), plan.targets_ipv4), (vec![], vec![]));
}

#[test]
fn a_default_route_needs_a_grant_and_takes_no_address_of_a_node() {
    let exit = |claims: &[&str]| Member {
        external: Some(crate::member::External::default()),
        ..node("peer/exit", 3, claims, None)
    };
    let b = Member { blocks: vec![net("10.64.0.0/27")], ..node("b", 2, &["192.0.2.2/32"], None) };
    let members = [own(), b, exit(&["0.0.0.0/0"])];
    let planned = plan(&members, &Policy::new("a"));
    assert_eq!((allowed(&planned, 3), reasons(&planned)), (vec![], vec!["PeerPrefixRefused"]));
    let reserved = Reserved { hosts: vec![net("203.0.113.1/32")], ..Reserved::default() };
    let planned = plan(&members, &Policy { reserved, ..granting("peer/exit", "0.0.0.0/0") });
    assert_eq!(allowed(&planned, 2), ["10.64.0.0/27", "192.0.2.2/32"]);
    assert_eq!(planned.problems, []);
    let covers = |address: &str| {
        let address: IpAddr = address.parse().unwrap();
        allowed(&planned, 3).iter().any(|prefix| net(prefix).contains(&address))
    };
    assert!(covers("8.8.8.8") && covers("192.168.0.1") && !covers("203.0.113.1") && !covers("127.0.0.1"));
    let node = node("n", 3, &["128.0.0.0/2"], None);
    let planned = plan(&[own(), node.clone()], &Policy::new("a"));
    assert_eq!((allowed(&planned, 3), reasons(&planned)), (vec![], vec!["ClaimTooWide"]));
    assert_eq!(
        allowed(&plan(&[own(), node], &granting("n", "128.0.0.0/1")), 3),
        [
            "128.0.0.0/3",
            "160.0.0.0/5",
            "168.0.0.0/8",
            "169.0.0.0/9",
            "169.128.0.0/10",
            "169.192.0.0/11",
            "169.224.0.0/12",
            "169.240.0.0/13",
            "169.248.0.0/14",
            "169.252.0.0/15",
            "169.255.0.0/16",
            "170.0.0.0/7",
            "172.0.0.0/6",
            "176.0.0.0/4"
        ]
    );
}

#[test]
fn a_granted_range_goes_before_other_ranges_and_after_addresses() {
    let older = node("older", 2, &["10.9.0.0/16"], None);
    let granted = node("granted", 3, &["10.9.0.0/16"], None);
    let inside = node("inside", 4, &["10.9.0.7/32"], Some(&["10.9.0.7"]));
    let plan = plan(&[own(), older, granted, inside], &granting("granted", "10.9.0.0/16"));
    assert_eq!((allowed(&plan, 2), allowed(&plan, 3)), (vec![], vec!["10.9.0.0/16".to_owned()]));
    assert_eq!(allowed(&plan, 4), ["10.9.0.7/32"]);
}

/// As Talos decides: the smaller identifier wins, and the other one keeps the rest.
#[test]
fn of_discovered_members_the_smaller_identifier_wins() {
    let discovered = |name: &str, number, id: &str, claims: &[&str]| Member {
        since: Some(Since { created: i64::MAX, uid: id.to_owned() }),
        discovery: ByDiscovery { is_only_source: true, needs_preshared_key: false },
        ..node(name, number, claims, None)
    };
    let members = [
        own(),
        discovered("x", 2, "B", &["10.244.2.0/23", "192.168.3.4/32"]),
        discovered("y", 3, "A", &["10.244.3.0/24", "192.168.3.4/32", "0.0.0.0/0"]),
    ];
    let plan = plan(&members, &granting("y", "0.0.0.0/0"));
    assert_eq!(
        allowed(&plan, 3),
        ["10.244.3.0/24", "192.168.3.4/32"],
        "nothing is granted to a name that anyone can take"
    );
    // The longer prefix is the other member's.
    assert_eq!(allowed(&plan, 2), ["10.244.2.0/23"]);
    assert_eq!(reasons(&plan), ["ClaimedTwice", "ClaimTooWide"]);
}

const SOURCE: &str = "198.51.100.40/32";

/// Node "b" and "c" have gateways of the Egress of [`SOURCE`]; the controller names this one as the holder.
fn with_source(holder: Option<&str>) -> Policy {
    let gateways = ["b", "c"].map(str::to_owned).into();
    let nodes = SourceNodes { holder: holder.map(str::to_owned), gateways };
    Policy { sources: BTreeMap::from([(net(SOURCE).addr(), nodes)]), ..Policy::new("a") }
}

/// Numbers of the members whose peers are sent for the address.
fn has_source(members: &[Member], policy: &Policy) -> Vec<u8> {
    let planned = plan(members, policy);
    assert!(planned.nodes.is_disjoint(&[net(SOURCE).addr()].into()), "it is no node's own");
    let has = |number: &u8| {
        let peer = planned.peers.get(&PublicKey([*number; 32]));
        peer.is_some_and(|peer| peer.allowed_ips.contains(&net(SOURCE)))
    };
    (2..=4).filter(has).collect()
}

fn claimants(names: &[&str]) -> Vec<Member> {
    let others = [("b", 2, "192.0.2.2"), ("c", 3, "192.0.2.3"), ("thief", 4, "192.0.2.4")];
    let member = |(name, number, address): (&str, u8, &str)| {
        let own = format!("{address}/32");
        let claims: &[&str] = if names.contains(&name) { &[&own, SOURCE] } else { &[&own] };
        node(name, number, claims, Some(&[address]))
    };
    [own()].into_iter().chain(others.map(member)).collect()
}

#[test]
fn a_source_address_goes_from_holder_to_holder_without_a_moment_in_which_both_are_refused() {
    let steps: [(&[&str], Option<&str>, &[u8]); 7] = [
        (&["b"], None, &[2]),
        (&["b"], Some("b"), &[2]),
        // The next one has claimed it, and is not named yet; or is named, and has not claimed it yet.
        (&["b", "c"], Some("b"), &[2]),
        (&["b"], Some("c"), &[2]),
        // The one before has lost its power, so what it claimed stays.
        (&["b", "c"], Some("c"), &[3]),
        (&["c"], Some("c"), &[3]),
        (&["c"], None, &[3]),
    ];
    for (claiming, holder, expected) in steps {
        let members = claimants(claiming);
        assert_eq!(has_source(&members, &with_source(holder)), expected, "{claiming:?} {holder:?}");
        assert!(plan(&members, &with_source(holder)).problems.is_empty(), "two may claim it for a moment");
    }
}

#[test]
fn a_stolen_token_takes_no_source_address_from_its_holder() {
    for holder in [Some("b"), None] {
        let members = claimants(&["b", "thief"]);
        assert_eq!(has_source(&members, &with_source(holder)), [2]);
        assert_eq!(reasons(&plan(&members, &with_source(holder))), ["ClaimNotOfNode"]);
        assert!(has_source(&claimants(&["thief"]), &with_source(holder)).is_empty(), "not even a free one");
    }
    // Nor does the token of a node that has another gateway of the Egress.
    let mut members = claimants(&["b", "c"]);
    members.iter_mut().filter(|member| member.name == "c").for_each(|it| it.since = own().since);
    assert_eq!(has_source(&members, &with_source(Some("b"))), [2]);
}

/// A node whose Node the controller has not copied yet.
fn unconfirmed(name: &str, number: u8, claims: &[&str]) -> Member {
    let member = node(name, number, claims, None);
    Member { addresses: MemberAddresses { is_unconfirmed: true, ..member.addresses }, ..member }
}

/// A stolen token publishes a new WireKubePeer, or takes part where no controller runs.
#[test]
fn an_announced_address_counts_once_the_controller_or_a_grant_names_its_holder() {
    let claims = ["192.0.2.2/32", "203.0.113.80/32"];
    let members = [own(), unconfirmed("new", 2, &claims)];
    let planned = plan(&members, &Policy::new("a"));
    assert_eq!((allowed(&planned, 2), planned.targets_ipv4.len()), (vec![], 0), "all is reached as before");
    assert_eq!(reasons(&planned), ["ClaimNotYetConfirmed"; 2]);
    assert_eq!(
        planned.problems[0].to_string(),
        "node new announces 192.0.2.2/32, which is left out of the mesh until the controller has copied the InternalIPs of its Node \
         to status.node of its WireKubePeer; if this lasts, see that fairlead-controller runs and that the Node exists, or grant it \
         to new in spec.grants of the WireKubeMesh"
    );
    let blocks = Member { blocks: vec![net("10.64.0.0/27")], ..unconfirmed("new", 2, &claims) };
    assert_eq!(allowed(&plan(&[own(), blocks], &Policy::new("a")), 2), ["10.64.0.0/27"], "pods are reached");
    assert_eq!(allowed(&plan(&members, &granting("new", "192.0.2.2/32")), 2), ["192.0.2.2/32"]);
    let confirmed = [own(), node("new", 2, &claims, Some(&["192.0.2.2"]))];
    let planned = plan(&confirmed, &Policy::new("a"));
    assert_eq!(
        (allowed(&planned, 2), reasons(&planned)),
        (vec!["192.0.2.2/32".to_owned()], vec!["ClaimNotOfNode"])
    );
    let of_file = [own(), node("file", 2, &claims, None)];
    assert_eq!(allowed(&plan(&of_file, &Policy::new("a")), 2).len(), 2, "an administrator's file says so");
}

/// The program is upgraded where no controller has ever copied anything.
#[test]
fn an_address_that_the_device_has_stays_with_its_key_until_the_controller_says_more() {
    let held = BTreeMap::from([(PublicKey([2; 32]), [net("192.0.2.2/32")].into())]);
    let policy = Policy { held, ..Policy::new("a") };
    let before = unconfirmed("before", 2, &["192.0.2.2/32", "192.0.2.9/32"]);
    let planned = plan(&[own(), before.clone()], &policy);
    assert_eq!(
        (allowed(&planned, 2), reasons(&planned)),
        (vec!["192.0.2.2/32".to_owned()], vec!["ClaimNotYetConfirmed"])
    );
    let confirmed = node("other", 3, &["192.0.2.2/32"], Some(&["192.0.2.2"]));
    let planned = plan(&[own(), before.clone(), confirmed], &policy);
    assert_eq!((allowed(&planned, 2).len(), allowed(&planned, 3).len()), (0, 1));
    let needed = [net("192.0.2.2/32")].to_vec();
    for reserved in [
        Reserved { hosts: needed.clone(), ..Reserved::default() },
        Reserved { name_servers: needed.clone(), ..Reserved::default() },
        Reserved { services: needed.clone(), ..Reserved::default() },
    ] {
        let policy = Policy { reserved, ..policy.clone() };
        assert_eq!(allowed(&plan(&[own(), before.clone()], &policy), 2).len(), 0, "{:?}", policy.reserved);
    }
}

/// Each of three control-plane nodes has an API server, and so an address of "the API server".
#[test]
fn control_plane_nodes_keep_their_addresses_and_no_other_node_takes_them() {
    let address = |number: u8| format!("192.0.2.{number}");
    let control_plane = |number: u8| {
        let address = address(number);
        node(&format!("cp-{number}"), number, &[&format!("{address}/32")], Some(&[&address]))
    };
    let servers = [1, 2, 3].map(address);
    let claims = servers.each_ref().map(|address| format!("{address}/32"));
    let claims: Vec<&str> = claims.iter().map(String::as_str).chain(["192.0.2.9/32"]).collect();
    let reserved = Reserved {
        hosts: servers.iter().map(|address| net(&format!("{address}/32"))).collect(),
        services: vec![net("10.96.0.0/16")],
        name_servers: vec![net("192.0.2.53/32")],
    };
    let policy = |own: &str| Policy { reserved: reserved.clone(), ..Policy::new(own) };
    let thieves = [
        unconfirmed("thief", 9, &claims),
        node("thief", 9, &claims, Some(&["192.0.2.9"])),
        Member { since: Some(Since { created: 0, uid: String::new() }), ..unconfirmed("thief", 9, &claims) },
    ];
    for thief in thieves {
        let members = [control_plane(1), control_plane(2), control_plane(3), thief];
        for own in [1u8, 2, 3] {
            let planned = plan(&members, &policy(&format!("cp-{own}")));
            for other in [1u8, 2, 3].into_iter().filter(|other| *other != own) {
                assert_eq!(allowed(&planned, other), [format!("192.0.2.{other}/32")], "seen from cp-{own}");
            }
            assert!(allowed(&planned, 9).iter().all(|prefix| prefix == "192.0.2.9/32"));
        }
    }
    // No Node is a Service, whatever its kubelet says, unless an administrator wants it.
    let kubelet = node("kubelet", 9, &["10.96.0.10/32"], Some(&["10.96.0.10"]));
    let planned = plan(&[control_plane(1), kubelet.clone()], &policy("cp-1"));
    assert_eq!((allowed(&planned, 9).len(), reasons(&planned)), (0, vec!["ClaimRefused"]));
    let granted = Policy { grants: granting("kubelet", "10.96.0.10/32").grants, ..policy("cp-1") };
    assert_eq!(allowed(&plan(&[control_plane(1), kubelet], &granted), 9), ["10.96.0.10/32"]);
}
