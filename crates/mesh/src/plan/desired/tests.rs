use std::net::IpAddr;

use fairlead_address::{Endpoint, EndpointFilters, Nat64Prefix};
use fairlead_api::resources::{Encapsulation, Granularity, Topology};
use fairlead_keys::{PresharedKey, PrivateKey};
use fairlead_members::departures::{Departures, Revoked};
use fairlead_members::discovery_client::Shared;
use fairlead_members::settings::{
    DeviceSettings, LocationSettings, MeshSettings, RoutingSettings, TraversalSettings,
};
use fairlead_netlink::route::{Link, LinkLayer};
use fairlead_path::{BirthdayPolicy, StunAnswer};
use fairlead_port_mapping::task::PortMappings;
use fairlead_topology::{
    ByDiscovery, Endpoints, InternalAddress, Keepalive, Member, MemberAddresses, MemberRecord, OwnAddress,
    Site, Source, merge,
};
use ipnet::Ipv4Net;

use super::*;
use crate::model::inputs::{NetworkFacts, OwnKeys, OwnNode};

mod pods;
mod stun;

/// The key of a node in tests.
pub(crate) fn key(number: u32) -> PublicKey {
    let mut bytes = [1; 32];
    bytes[..4].copy_from_slice(&number.to_be_bytes());
    PublicKey(bytes)
}

/// A member with one address, 10.0.x.y, where it can be reached.
pub(crate) fn member(number: u32) -> Member {
    let address = IpAddr::from([10, 0, (number / 256) as u8, (number % 256) as u8]);
    let endpoints = Endpoints { host: vec![SocketAddr::new(address, 51820)], ..Endpoints::default() };
    Member {
        public_key: Some(key(number)),
        claims: vec![address.into()],
        endpoints,
        ..Member::named(format!("node-{number:04}"))
    }
}

/// Inputs of node 1 in a cluster of these members.
pub(crate) fn inputs(members: impl IntoIterator<Item = Member>) -> Inputs {
    let record = |member| MemberRecord { member, ..MemberRecord::of_node(Source::Kubernetes, "") };
    let own: IpAddr = [10, 0, 0, 1].into();
    Inputs {
        node: "node-0001".to_owned(),
        keys: OwnKeys { private: PrivateKey([8; 32]), public: key(1), previous: None },
        own: OwnNode { addresses: vec![own], claims: vec![own], ..OwnNode::default() },
        network: NetworkFacts::default(),
        settings: MeshSettings {
            device: DeviceSettings { interface: "wire_kube".to_owned(), port: 51820, mtu: 1420 },
            routing: RoutingSettings { claim_node_addresses: true, ..RoutingSettings::default() },
            filters: EndpointFilters::default(),
            harvests_endpoints: true,
            traversal: TraversalSettings { port_mapping: true, ..TraversalSettings::default() },
            relay: None,
            relay_pods: Vec::new(),
            discovery: None,
            revoked: Revoked::default(),
            deleted: Vec::new(),
            locations: LocationSettings {
                waits: None,
                granularity: Granularity::Full,
                encapsulation: Encapsulation::Never,
                topology: Topology::default(),
            },
            mesh_ipv4: None,
        },
        members: merge(members.into_iter().map(record).collect()).into_iter().map(Arc::new).collect(),
        api_server: vec!["192.0.2.100:6443".parse().unwrap()],
        resolved: BTreeMap::new(),
        sources: Arc::default(),
        services: Vec::new(),
        departures: Departures::default(),
        problems: Vec::new(),
        saved_at: None,
        cluster: None,
    }
}

/// An Ethernet link that is up.
pub(crate) fn link(index: u32, name: &str) -> Link {
    Link {
        index,
        name: name.to_owned(),
        mtu: 1500,
        up: true,
        carrier: true,
        operational: true,
        layer: LinkLayer::Ethernet,
        ..Link::default()
    }
}

pub(crate) fn host() -> Host {
    Host {
        port: 51820,
        uplink_mtu: 1500,
        addresses: vec![[10, 0, 0, 1].into()],
        networks: Vec::new(),
        ipv4_routes: vec![Ipv4Net::default()],
        without_default: Vec::new(),
        gateways: BTreeSet::new(),
        name_servers: BTreeSet::new(),
        own: vec![OwnAddress { link: 7, prefix: "10.0.0.1/24".parse().unwrap() }],
        links: [(7, "eth0".to_owned())].into(),
    }
}

#[test]
fn what_a_peer_did_not_publish_and_its_public_addresses_are_news() {
    let mut peer = member(2);
    peer.endpoints.manual = "203.0.113.1:7".parse().ok();
    peer.endpoints.host =
        ["192.168.1.10:51820", "198.51.100.1:51820"].map(|text| text.parse().unwrap()).to_vec();
    let desired =
        Desired::new(&inputs([member(1), peer]), &host(), Held::default(), &OwnAddresses::default());
    let cases = [
        ("203.0.113.9:4000", true),
        ("198.51.100.1:51820", true),
        ("192.168.1.10:51820", false),
        ("203.0.113.1:7", false),
    ];
    for (endpoint, news) in cases {
        assert_eq!(desired.peers[&key(2)].is_news(endpoint.parse().unwrap()), news, "{endpoint}");
    }
}

#[test]
fn a_sighting_counts_only_for_the_present_key_of_the_peer() {
    let observer = |number, seen: PublicKey| {
        let mut observer = member(number);
        let endpoint = "203.0.113.1:9".parse().unwrap();
        observer.endpoints.sightings = [("node-0001".to_owned(), (seen, endpoint))].into();
        observer
    };
    let members = [observer(2, key(1)), observer(3, key(9)), observer(1, key(1))];
    let shared: Vec<Arc<Member>> = members.iter().cloned().map(Arc::new).collect();
    let sightings = Sightings::new(&shared);
    assert_eq!(sightings.of("node-0001", &key(1)).count(), 1);
    assert_eq!(sightings.endpoints("node-0001", &key(9)), ["203.0.113.1:9".parse().unwrap()]);
    assert_eq!(
        Desired::new(&inputs(members), &host(), Held::default(), &OwnAddresses::default()).endpoints.observed,
        ["203.0.113.1:9".parse().unwrap()]
    );
}

#[test]
fn a_thousand_peers_lose_one_and_only_it_changes() {
    let before =
        Desired::new(&inputs((0..1000).map(member)), &host(), Held::default(), &OwnAddresses::default());
    let after =
        Desired::new(&inputs((0..999).map(member)), &host(), Held::default(), &OwnAddresses::default());
    let gone: Vec<_> =
        before.peers.iter().filter(|(key, peer)| after.peers.get(*key) != Some(*peer)).collect();
    assert_eq!(gone.len(), 1);
    assert_eq!(after.peers.len(), 998);
}

#[test]
fn a_host_name_is_tried_once_it_is_resolved() {
    let mut peer = member(2);
    peer.endpoints.manual = "node.example:7".parse().ok();
    let mut inputs = inputs([member(1), peer]);
    assert_eq!(
        Desired::new(&inputs, &host(), Held::default(), &OwnAddresses::default()).peers[&key(2)]
            .paths
            .candidates
            .len(),
        1
    );
    let resolved: SocketAddr = "203.0.113.7:7".parse().unwrap();
    inputs.resolved.insert("node.example:7".parse().unwrap(), vec![resolved]);
    assert_eq!(
        Desired::new(&inputs, &host(), Held::default(), &OwnAddresses::default()).peers[&key(2)]
            .paths
            .candidates[0]
            .address,
        resolved
    );
}

#[test]
fn only_endpoints_of_the_api_server_and_addresses_of_nodes_go_past_the_mesh() {
    let pods: IpNet = "10.64.0.0/24".parse().unwrap();
    let owner = Member { blocks: vec![pods], ..member(2) };
    let mut thief = member(3);
    thief.claims.push("10.64.0.7/32".parse().unwrap());
    let mut inputs = inputs([member(1), owner, thief]);
    let in_a_pod = "10.64.0.9:6443".parse().unwrap();
    inputs.api_server.push(in_a_pod);
    let relay: SocketAddr = "10.64.0.10:3478".parse().unwrap();
    inputs.settings.relay_pods = vec![relay, "192.0.2.7:3478".parse().unwrap()];
    let bypass = Desired::new(&inputs, &host(), Held::default(), &OwnAddresses::default())
        .mesh_state("wire_kube", &BTreeSet::new(), Vec::new(), |_| None)
        .bypass;
    assert_eq!(bypass.servers, ["192.0.2.100:6443".parse().unwrap()]);
    assert_eq!(bypass.relays, [relay], "only a pod is a pod of the relay");
    assert_eq!(bypass.nodes, [IpAddr::from([10, 0, 0, 2]), IpAddr::from([10, 0, 0, 3])]);
}

#[test]
fn endpoints_of_a_copied_key_displace_none_of_its_owner() {
    let mut thief = Member { public_key: Some(key(2)), ..member(3) };
    thief.endpoints.host = (0..30).map(|host| SocketAddr::from(([203, 0, 113, host], 1))).collect();
    for older in [2, 3] {
        let since = |number: u32| {
            let created = if number == older { 1 } else { 2 };
            Some(fairlead_topology::Since { created, uid: String::new() })
        };
        let victim = Member { since: since(2), ..member(2) };
        let thief = Member { since: since(3), ..thief.clone() };
        let desired = Desired::new(
            &inputs([member(1), victim, thief]),
            &host(),
            Held::default(),
            &OwnAddresses::default(),
        );
        let candidates = &desired.peers[&key(2)].paths.candidates;
        let place = candidates.iter().position(|it| it.address == "10.0.0.2:51820".parse().unwrap());
        assert!(place.is_some_and(|place| place < 2), "{candidates:?}");
    }
}

#[test]
fn how_long_a_peer_may_be_silent_follows_from_both_keepalives() {
    let silence_of = |always_sends: bool, own: Option<u16>, theirs: u16| {
        let peer = Member { keepalive: Keepalive { interval: Some(theirs), always_sends }, ..member(2) };
        let mut inputs = inputs([member(1), peer]);
        inputs.own.keepalive = own;
        Desired::new(&inputs, &host(), Held::default(), &OwnAddresses::default()).peers[&key(2)]
            .paths
            .silence
            .map(|limit| limit.as_secs())
    };
    let silence = |own, theirs| silence_of(true, own, theirs);
    assert_eq!([silence(None, 25), silence(Some(7), 25), silence(None, 7)], [Some(60); 3]);
    assert_eq!([silence(None, 120), silence(Some(120), 25)], [Some(250); 2]);
    assert_eq!([silence(None, 0), silence(Some(0), 25)], [None; 2]);
    // The kernel's WireGuard sends none while it receives ours.
    let silence = |own, theirs| silence_of(false, own, theirs);
    assert_eq!([silence(None, 25), silence(None, 120), silence(None, 0)], [Some(200), Some(250), None]);
}

#[test]
fn the_keepalive_of_this_node_s_annotation_is_that_of_all_its_peers() {
    let keepalives = |keepalive| {
        let members = [(2, Some(25)), (3, Some(0)), (4, None)];
        let members = members.map(|(n, theirs)| Member { keepalive: Keepalive::every(theirs), ..member(n) });
        let mut inputs = inputs([member(1)].into_iter().chain(members));
        inputs.own.keepalive = keepalive;
        let desired = Desired::new(&inputs, &host(), Held::default(), &OwnAddresses::default());
        [2, 3, 4].map(|n| desired.peers[&key(n)].config.persistent_keepalive)
    };
    assert_eq!(keepalives(Some(7)), [Some(7); 3]);
    assert_eq!(keepalives(Some(0)), [None; 3]);
    assert_eq!(keepalives(None), [Some(25), None, Some(25)]);
}

#[test]
fn a_node_without_a_key_is_no_peer_and_its_address_no_bypass() {
    let keyless = Member { public_key: None, ..member(2) };
    let desired =
        Desired::new(&inputs([member(1), keyless]), &host(), Held::default(), &OwnAddresses::default());
    assert!(desired.peers.is_empty());
    assert_eq!(
        desired.mesh_state("wire_kube", &BTreeSet::new(), Vec::new(), |_| None).bypass.nodes,
        Vec::<IpAddr>::new()
    );
}

/// Addresses of every source, also as a NAT64 translates them.
#[test]
fn addresses_of_services_are_no_endpoints_of_peers_and_of_this_node() {
    let endpoint = |text: &str| -> SocketAddr { text.parse().unwrap() };
    let inside = ["10.96.0.1:443", "[fd96::1]:51820", "[64:ff9b::a60:1]:51820"].map(endpoint);
    let mut peer = member(2);
    peer.endpoints.manual = Some(Endpoint::Address(inside[0]));
    peer.endpoints.preferred = Some(inside[0]);
    peer.endpoints.host.extend(inside);
    peer.endpoints.reflexive = inside.to_vec();
    let mut observer = member(3);
    observer.endpoints.sightings =
        [("node-0001".to_owned(), (key(1), inside[0])), ("node-0002".to_owned(), (key(2), inside[1]))].into();
    let services: Vec<IpNet> = ["10.96.0.0/12", "fd96::/112"].map(|it| it.parse().unwrap()).to_vec();
    let mut inputs = Inputs { services, ..inputs([member(1), peer, observer]) };
    inputs.own.addresses = vec![[10, 0, 0, 1].into(), inside[0].ip()];
    inputs.network.public_ipv4 = Some([10, 96, 0, 1].into());
    let server = endpoint("192.0.2.1:3478");
    let own = OwnAddresses {
        stun: Some([(server, StunAnswer::Mapped(inside[0]))].into()),
        peers: inside[..2].iter().copied().collect(),
        ..OwnAddresses::default()
    };
    // kube-proxy gives addresses of Services to a link of the host (IPVS).
    let host = Host { addresses: vec![[10, 0, 0, 1].into(), inside[1].ip()], ..host() };
    let desired = Desired::new(&inputs, &host, Held::default(), &own);
    let candidates = &desired.peers[&key(2)].paths.candidates;
    assert_eq!(candidates.iter().map(|it| it.address).collect::<Vec<_>>(), [endpoint("10.0.0.2:51820")]);
    assert_eq!(desired.endpoints.host, [endpoint("10.0.0.1:51820")]);
    assert!(desired.endpoints.observed.is_empty() && desired.endpoints.reflexive.is_empty(), "{desired:?}");
    assert!(
        desired.endpoints.mapped.is_empty() && desired.endpoints.peer_reflexive.is_empty(),
        "{desired:?}"
    );
    let side = &desired.own_side;
    assert_eq!(side.host, [endpoint("10.0.0.1:51820")]);
    assert!(inside[..2].iter().all(|it| side.cluster_addresses.contains(it.ip())));
    let problems: Vec<String> = desired.problems.iter().map(ToString::to_string).collect();
    let named =
        "WireKubePeer node-0002: spec.endpoint \"10.96.0.1:443\" is in a ServiceCIDR: an address of Services";
    assert!(problems.iter().any(|problem| problem.starts_with(named)), "{problems:?}");
}

#[test]
fn what_discovery_services_say_displaces_no_candidate() {
    let mut plain = member(2);
    plain.endpoints.reflexive = vec!["203.0.113.2:1".parse().unwrap()];
    let candidates = |member: Member| {
        let inputs = inputs([member]);
        let desired = Desired::new(&inputs, &host(), Held::default(), &OwnAddresses::default());
        let peer = desired.peers.values().next().unwrap().paths.candidates.clone();
        peer.into_iter().map(|candidate| candidate.address).collect::<Vec<_>>()
    };
    let known = candidates(plain.clone());
    assert_eq!(known.len(), 2);
    let mut lied = plain;
    lied.endpoints.discovered = (1..=64).map(|port| ([203, 0, 113, 9], port).into()).collect();
    lied.endpoints.discovered.push(known[0]);
    let with_lies = candidates(lied);
    assert_eq!((&with_lies[..2], with_lies.len()), (known.as_slice(), 2 + peers::MAX_DISCOVERED));
}

#[test]
fn what_is_in_a_network_of_this_host_stays_out_of_the_mesh_where_the_mesh_wants_that() {
    let mut inputs = inputs([member(1), member(2), member(300)]);
    let host = Host { networks: vec!["10.0.0.0/24".parse().unwrap()], ..host() };
    let mut targets = |bypass| {
        inputs.settings.routing.bypass_local_subnets = bypass;
        let desired = Desired::new(&inputs, &host, Held::default(), &OwnAddresses::default());
        desired.traffic.targets_v4.iter().map(ToString::to_string).collect::<Vec<_>>()
    };
    assert_eq!(targets(false), ["10.0.0.2/32", "10.0.1.44/32"]);
    assert_eq!(targets(true), ["10.0.1.44/32"]);
}

#[test]
fn neighbours_in_the_location_are_reached_without_the_tunnel_where_the_mesh_asks_for_it() {
    let located = |member: Member, address: &str| {
        let internal = vec![InternalAddress { address: address.parse().unwrap(), length: None }];
        Member { site: Some(Site { location: "lab".to_owned(), internal, ..Site::default() }), ..member }
    };
    let block: IpNet = "10.64.2.0/24".parse().unwrap();
    let neighbour = Member { blocks: vec![block], ..located(member(2), "10.0.0.2") };
    let mut inputs = inputs([located(member(1), "10.0.0.1"), neighbour]);
    let plain = |inputs: &Inputs| {
        let desired = Desired::new(inputs, &host(), Held::default(), &OwnAddresses::default());
        (
            desired.mesh_state("wg", &BTreeSet::new(), Vec::new(), |_| None).plain,
            desired.traffic.plain_links().to_vec(),
            desired.peers.len(),
        )
    };
    assert_eq!(plain(&inputs), (Vec::new(), Vec::new(), 1));
    inputs.settings.locations.granularity = Granularity::Cross;
    let (routes, links, peers) = plain(&inputs);
    let route = PlainRoute { destination: block, gateway: [10, 0, 0, 2].into(), link: 7, is_tunnel: false };
    assert!(routes.contains(&route), "{routes:?}");
    assert_eq!((links, peers), (vec!["eth0".to_owned()], 1), "the tunnel stays");
}

#[test]
fn addresses_on_the_mesh_are_on_the_device_and_no_endpoint_is_in_them() {
    let addresses: Vec<IpAddr> =
        ["fd7f:175a:b97c:5602::1", "100.64.0.1"].map(|text| text.parse().unwrap()).into();
    let mut peer = Member {
        addresses: MemberAddresses {
            mesh: vec!["fd7f:175a:b97c:5602::2".parse().unwrap()],
            ..Default::default()
        },
        ..member(2)
    };
    peer.endpoints.reflexive = vec!["[fd7f:175a:b97c:5602::2]:51820".parse().unwrap()];
    let mut inputs = inputs([
        Member { addresses: MemberAddresses { mesh: addresses, ..Default::default() }, ..member(1) },
        peer,
    ]);
    inputs.settings.mesh_ipv4 = "100.64.0.0/16".parse().ok();
    let desired = Desired::new(&inputs, &host(), Held::default(), &OwnAddresses::default());
    let on_device: Vec<String> = desired
        .mesh_state("wire_kube", &BTreeSet::new(), Vec::new(), |_| None)
        .addresses
        .iter()
        .map(ToString::to_string)
        .collect();
    assert_eq!(on_device, ["fd7f:175a:b97c:5602::1/64", "100.64.0.1/16"]);
    let peer = &desired.peers[&key(2)];
    assert!(peer.config.allowed_ips.contains(&"fd7f:175a:b97c:5602::2/128".parse().unwrap()));
    assert_eq!(peer.paths.candidates.len(), 1, "not through the tunnel itself");
    // Peers accept packets from these, and from no other address of this host.
    let own = desired.mesh_state("wire_kube", &BTreeSet::new(), Vec::new(), |_| None).bypass.own;
    let expected = ["fd7f:175a:b97c:5602::1/128", "100.64.0.1/32"].map(|text| text.parse().unwrap());
    assert!(expected.iter().all(|address| own.contains(address)), "{own:?}");
    assert!(own.iter().all(|prefix| prefix.prefix_len() > 16), "not the subnets: {own:?}");
    inputs.settings.mesh_ipv4 = None;
    assert_eq!(inputs.mesh_addresses().len(), 1);
}

#[test]
fn a_node_of_kubespan_has_the_secret_as_preshared_key_and_no_relay() {
    let talos =
        Member { discovery: ByDiscovery { is_only_source: true, needs_preshared_key: true }, ..member(2) };
    let mut inputs = inputs([member(1), member(3)]);
    inputs.members.insert(1, Arc::new(talos));
    let planned =
        |inputs: &Inputs| Desired::new(inputs, &host(), Held::default(), &OwnAddresses::default()).peers;
    assert!(!planned(&inputs).contains_key(&key(2)), "a device that has the key keeps its session");
    let (cluster_id, secret) = ("c".to_owned(), [9; 32]);
    let current = fairlead_members::saved::discovery::Credentials { cluster_id, secret };
    inputs.cluster = Some(Shared { current, previous: None });
    let peers = planned(&inputs);
    assert_eq!(
        (peers[&key(2)].config.preshared_key, peers[&key(2)].uses_relay),
        (Some(PresharedKey([9; 32])), false)
    );
    assert_eq!((peers[&key(3)].config.preshared_key, peers[&key(3)].uses_relay), (None, true));

    // While the secret changes, it is that under which services tell of the node.
    let mut changing = |changed: BTreeSet<String>| {
        inputs.cluster.as_mut().unwrap().previous = Some(([8; 32], changed));
        planned(&inputs)[&key(2)].config.preshared_key
    };
    assert_eq!(changing(BTreeSet::new()), Some(PresharedKey([8; 32])));
    assert_eq!(changing(BTreeSet::from([member(2).name])), Some(PresharedKey([9; 32])));
}
