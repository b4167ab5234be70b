//! Answers of STUN servers, also through a NAT64.

use fairlead_path::BirthdaySide;

use super::*;

fn answers(answers: [StunAnswer; 2]) -> OwnAddresses {
    let servers = ["198.51.100.1:3478", "198.51.100.2:3478"].map(|server| server.parse().unwrap());
    by_stun(Some(servers.into_iter().zip(answers).collect()))
}

fn by_stun(stun: StunAnswers) -> OwnAddresses {
    OwnAddresses { stun, ..OwnAddresses::default() }
}

fn mapped(address: &str) -> StunAnswer {
    StunAnswer::Mapped(address.parse().unwrap())
}

#[test]
fn stun_servers_show_the_nat_and_where_this_node_is_reached() {
    let desired = |stun| Desired::new(&inputs([member(1), member(2)]), &host(), Held::default(), &stun);
    let cone = desired(answers([mapped("203.0.113.1:4000"); 2]));
    assert_eq!(
        (cone.nat, cone.endpoints.reflexive),
        (NatType::Cone, vec!["203.0.113.1:4000".parse().unwrap()])
    );
    let symmetric = desired(answers([mapped("203.0.113.1:4000"), mapped("203.0.113.1:4001")]));
    assert_eq!((symmetric.nat, symmetric.endpoints.reflexive.len()), (NatType::Symmetric, 2));
    let open = desired(answers([mapped("10.0.0.1:51820"); 2]));
    assert_eq!((open.nat, open.endpoints.reflexive), (NatType::Open, Vec::new()));
    let one = desired(answers([mapped("203.0.113.1:4000"), StunAnswer::Missing]));
    assert_eq!((one.nat, one.endpoints.reflexive.len(), one.problems), (NatType::Unknown, 1, Vec::new()));
}

#[test]
fn a_translation_between_families_says_nothing_of_the_nat_of_either() {
    let server = "[2001:db8::5]:3478".parse().unwrap();
    let stun = by_stun(Some([(server, mapped("203.0.113.1:4000"))].into()));
    let desired = Desired::new(&inputs([member(1)]), &host(), Held::default(), &stun);
    assert_eq!((desired.nat, desired.endpoints.reflexive.len()), (NatType::Unknown, 1));
}

#[test]
fn stun_servers_that_are_of_no_use_are_named() {
    let mut inputs = inputs([member(1)]);
    let reasons = |stun: &OwnAddresses| {
        let desired = Desired::new(&inputs, &host(), Held::default(), stun);
        desired.problems.iter().map(MeshProblem::reason).collect::<Vec<_>>()
    };
    let lie = StunAnswer::Invalid("127.0.0.1:1".parse().unwrap());
    assert_eq!(reasons(&answers([lie, mapped("203.0.113.1:4000")])), ["STUNServerUnusable"]);
    assert_eq!(reasons(&answers([StunAnswer::Missing; 2])), ["NoSTUNAnswer"]);
    assert_eq!(reasons(&OwnAddresses::default()), [""; 0]);
    inputs.settings.traversal.stun_servers = vec!["198.51.100.1:3478".parse().unwrap()];
    let desired = Desired::new(&inputs, &host(), Held::default(), &OwnAddresses::default());
    assert_eq!(desired.problems, [MeshProblem::StunUnavailable]);
}

#[test]
fn a_peer_is_tried_where_stun_servers_see_it() {
    let mut peer = member(2);
    peer.endpoints.reflexive = vec!["203.0.113.1:4000".parse().unwrap()];
    let desired =
        Desired::new(&inputs([member(1), peer]), &host(), Held::default(), &OwnAddresses::default());
    let candidates = &desired.peers[&key(2)].paths.candidates;
    assert!(candidates.iter().any(|candidate| candidate.address == "203.0.113.1:4000".parse().unwrap()));
}

#[test]
fn a_mapped_port_is_a_candidate_and_says_nothing_of_the_nat() {
    let mapped: SocketAddr = "198.51.100.1:4000".parse().unwrap();
    let seen = |number: u32, at: SocketAddr| {
        let mut observer = member(number);
        observer.endpoints.sightings.insert("node-0001".to_owned(), (key(1), at));
        observer
    };
    let members = || [member(1), seen(2, mapped), seen(3, "198.51.100.1:51820".parse().unwrap())];
    let granted = |external: &str| {
        let (protocol, lifetime) =
            (fairlead_port_mapping::Protocol::Pcp, std::time::Duration::from_secs(7200));
        let granted =
            fairlead_port_mapping::Mapping { protocol, external: external.parse().unwrap(), lifetime };
        PortMappings([("10.0.0.254".parse().unwrap(), Ok(granted))].into())
    };
    let plan = |external: &str| {
        let mut inputs = inputs(members());
        inputs.network.port_mappings = granted(external);
        Desired::new(&inputs, &host(), Held::default(), &OwnAddresses::default())
    };
    let with = plan("198.51.100.1:4000");
    assert_eq!((with.endpoints.mapped, with.nat == NatType::Symmetric), (vec![mapped], false));
    assert_eq!(plan("192.0.2.1:4000").nat, NatType::Symmetric, "two ports seen are two mappings");
    assert!(
        plan("10.0.0.1:51820").endpoints.mapped.is_empty(),
        "an address of this host is not published twice"
    );
}

#[test]
fn the_public_address_of_an_instance_is_a_candidate_with_the_port_of_wireguard() {
    let mut inputs = inputs([member(1)]);
    inputs.network.public_ipv4 = Some([198, 51, 100, 1].into());
    let desired = Desired::new(&inputs, &host(), Held::default(), &OwnAddresses::default());
    assert_eq!(desired.endpoints.mapped, ["198.51.100.1:51820".parse().unwrap()]);
}

#[test]
fn where_peers_see_this_node_is_published_once_and_never_an_address_of_a_pod() {
    let mut mapping = mapped("203.0.113.1:4000");
    let peers: BTreeSet<SocketAddr> =
        ["203.0.113.1:4000", "203.0.113.2:4000", "10.0.0.1:51820", "10.64.2.9:51820"]
            .map(|address| address.parse().unwrap())
            .into();
    let block = Member { blocks: vec!["10.64.2.0/24".parse().unwrap()], ..member(2) };
    let inputs = inputs([member(1), block]);
    let seen = |stun: StunAnswer| {
        let own = OwnAddresses { peers: peers.clone(), ..answers([stun; 2]) };
        Desired::new(&inputs, &host(), Held::default(), &own).endpoints.peer_reflexive
    };
    let expected = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<_>>();
    assert_eq!(seen(mapping), expected(&["203.0.113.2:4000"]));
    mapping = StunAnswer::Missing;
    assert_eq!(seen(mapping), expected(&["203.0.113.1:4000", "203.0.113.2:4000"]));
}

/// A host in a network without IPv4 whose NAT64 has this prefix.
fn behind_nat64(inputs: &mut Inputs, answer: &str) -> Host {
    inputs.network.nat64.prefixes.insert(Nat64Prefix::of_answer(answer.parse().unwrap()).unwrap());
    let own: IpAddr = "2001:db8:1::5".parse().unwrap();
    inputs.own.addresses = vec![own];
    Host { addresses: vec![own], ipv4_routes: Vec::new(), ..host() }
}

#[test]
fn without_ipv4_peers_and_stun_servers_are_reached_through_the_nat64_but_no_pods() {
    let mut peer = member(2);
    peer.endpoints.host = ["203.0.113.2:51820", "10.64.2.9:51820"].map(|text| text.parse().unwrap()).to_vec();
    let mut inputs =
        inputs([member(1), peer, Member { blocks: vec!["10.64.2.0/24".parse().unwrap()], ..member(3) }]);
    let host = behind_nat64(&mut inputs, "2001:db8:64::192.0.0.170");
    inputs.settings.traversal.stun_servers =
        ["198.51.100.1:3478", "[2001:db8:64::c633:6401]:3478"].map(|server| server.parse().unwrap()).to_vec();
    let desired = Desired::new(&inputs, &host, Held::default(), &OwnAddresses::default());
    let candidates: Vec<String> =
        desired.peers[&key(2)].paths.candidates.iter().map(ToString::to_string).collect();
    assert_eq!(candidates, ["[2001:db8:64::cb00:7102]:51820 (nat64)"]);
    assert_eq!(stun_servers(&inputs, &host), ["[2001:db8:64::c633:6401]:3478".parse().unwrap()]);
    let routed = Host { ipv4_routes: vec![Ipv4Net::default()], ..host };
    assert_eq!(stun_servers(&inputs, &routed), inputs.stun_servers(), "with a route they are asked there");
}

#[test]
fn servers_that_are_asked_through_the_nat64_show_what_it_does() {
    let mut inputs = inputs([member(1)]);
    let host = behind_nat64(&mut inputs, "2001:db8:64::192.0.0.170");
    let nat = |second: &str| {
        let servers = ["[2001:db8:64::c633:6401]:3478", "[2001:db8:64::c633:6402]:3478"];
        let answers = [mapped("203.0.113.1:4000"), mapped(second)];
        let stun = servers.into_iter().map(|server| server.parse().unwrap()).zip(answers).collect();
        Desired::new(&inputs, &host, Held::default(), &by_stun(Some(stun))).nat
    };
    assert_eq!([nat("203.0.113.1:4000"), nat("203.0.113.1:4001")], [NatType::Cone, NatType::Symmetric]);
}

#[test]
fn annotations_of_the_two_nodes_come_before_the_birthday_policy_of_the_mesh() {
    let symmetric = answers([mapped("203.0.113.1:4000"), mapped("203.0.113.1:4001")]);
    let side = |policy, own, theirs| {
        let with = |number, birthday_attack| {
            let mut member = member(number);
            member.endpoints.birthday_attack = birthday_attack;
            member.endpoints.is_nat_symmetric = true;
            member
        };
        let mut inputs = inputs([with(1, own), with(2, theirs)]);
        inputs.settings.traversal.birthday = policy;
        Desired::new(&inputs, &host(), Held::default(), &symmetric).peers[&key(2)].paths.birthday
    };
    let (yes, no) = (Some(true), Some(false));
    let both = Some(BirthdaySide::BothSymmetric);
    for (policy, of_mesh) in [(BirthdayPolicy::Disabled, None), (BirthdayPolicy::Symmetric, both)] {
        assert_eq!(side(policy, None, None), of_mesh, "{policy:?}");
        assert_eq!([side(policy, yes, None), side(policy, None, yes), side(policy, yes, yes)], [both; 3]);
        assert_eq!([side(policy, no, None), side(policy, None, no)], [None; 2], "{policy:?}");
        assert_eq!([side(policy, no, yes), side(policy, yes, no)], [None; 2], "{policy:?}");
    }
}
