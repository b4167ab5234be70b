//! Two agents and a relay between them: what each tells the other of itself.

use fairlead_address::{AddressFilter, EndpointFilters, Nat64, Nat64Prefix, PrefixSet};
use fairlead_keys::PrivateKey;
use fairlead_wire::probe::{self, CandidateKind, Epoch, Message, ProbeKeys, TransactionId};
use x25519_dalek::StaticSecret;

use super::*;
use crate::OwnView;

/// The relay's port for the other one, on both nodes.
const RELAY: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::new(127, 64, 0, 1)), 20_000);

fn identity(private: u8) -> Identity {
    let public = x25519_dalek::PublicKey::from(&StaticSecret::from([private; 32]));
    let public_key = PublicKey(public.to_bytes());
    Identity { private_key: PrivateKey([private; 32]), public_key, epoch: [private; 16] }
}

fn endpoint(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

/// Node 1 or 2, with the other one as its peer, of which only the relay is known.
fn node(number: u8) -> PathAgent {
    let mut agent = agent();
    agent.enable_probes(identity(number));
    let relay = RelayPath {
        endpoint: RELAY,
        is_only: false,
        handshake_timeout: 30 * SECOND,
        direct_retry: 120 * SECOND,
    };
    let paths = PeerPaths { relay: Some(relay), ..PeerPaths::default() };
    agent.upsert_peer(SECOND, identity(3 - number).public_key, paths);
    agent
}

/// Passes what they send over the relay; the rest is lost.
fn exchange(now: Duration, nodes: &mut [PathAgent; 2]) -> Vec<SocketAddr> {
    let mut lost = Vec::new();
    nodes.iter_mut().for_each(|node| node.handle_timeout(now));
    for _ in 0..4 {
        for from in [0, 1] {
            while let Some(transmit) = nodes[from].poll_transmit() {
                if transmit.remote == RELAY {
                    nodes[1 - from].handle_datagram(now, None, RELAY, &transmit.payload);
                } else {
                    lost.push(transmit.remote);
                }
            }
            nodes[1 - from].handle_timeout(now);
        }
    }
    lost
}

fn known(node: &PathAgent, now: Duration, of: u8) -> Vec<String> {
    let candidates = node.candidates(now, &identity(of).public_key);
    candidates.iter().map(|status| status.candidate.to_string()).collect()
}

fn side(host: &[&str], mapped: &[&str]) -> OwnSide {
    let endpoints = |texts: &[&str]| texts.iter().map(|text| endpoint(text)).collect::<Vec<_>>();
    OwnSide { host: endpoints(host), mapped: endpoints(mapped), ..OwnSide::default() }
}

#[test]
fn nodes_tell_each_other_over_the_relay_where_they_are_and_again_when_that_changes() {
    let mut nodes = [node(1), node(2)];
    nodes[0].set_own_side(SECOND, side(&["10.0.0.1:51820"], &[]));
    nodes[1].set_own_side(SECOND, side(&["10.9.0.2:51820"], &["203.0.113.2:4000"]));
    let asked = exchange(SECOND, &mut nodes);
    let relay = format!("{RELAY} (relay over TCP)");
    let expected = ["203.0.113.2:4000 (observed)", "10.9.0.2:51820 (host)", &relay];
    assert_eq!(BTreeSet::from_iter(known(&nodes[0], SECOND, 2)), expected.map(str::to_owned).into());
    assert!(asked.contains(&endpoint("203.0.113.2:4000")) && asked.contains(&endpoint("10.0.0.1:51820")));
    // A new mapping is told at once, though no round is due.
    let later = SECOND + Duration::from_millis(300);
    nodes[1].set_own_side(later, side(&["10.9.0.2:51820"], &["203.0.113.2:5000"]));
    assert!(exchange(later, &mut nodes).contains(&endpoint("203.0.113.2:5000")));
    let expected = ["203.0.113.2:5000 (observed)", "10.9.0.2:51820 (host)", &relay];
    assert_eq!(BTreeSet::from_iter(known(&nodes[0], later, 2)), expected.map(str::to_owned).into());
}

#[test]
fn own_candidates_that_change_all_the_time_are_told_four_times_a_second() {
    let mut nodes = [node(1), node(2)];
    exchange(SECOND, &mut nodes);
    let before = nodes[0].probe_counts().requests_sent;
    for step in 0..1000_u16 {
        let now = 2 * SECOND + Duration::from_millis(step.into());
        nodes[0].set_own_side(now, side(&[&format!("10.0.0.1:{}", 1000 + step)], &[]));
        exchange(now, &mut nodes);
    }
    // Requests over the relay; one of each round is answered at once.
    let sent = nodes[0].probe_counts().requests_sent - before;
    assert!(sent <= 60, "{sent} requests");
}

/// In a cluster with these addresses of pods and Services.
fn pods_and_services() -> OwnSide {
    let prefixes: [ipnet::IpNet; 3] =
        ["10.64.0.0/16", "10.96.0.0/12", "fd96::/112"].map(|it| it.parse().unwrap());
    OwnSide { cluster_addresses: PrefixSet::from_iter(&prefixes), ..OwnSide::default() }
}

/// The guards are those for published candidates.
#[test]
fn a_peer_cannot_name_addresses_that_no_node_has() {
    let mut nodes = [node(1), node(2)];
    let own = OwnView { addresses: vec!["198.51.100.7".parse().unwrap()], ..OwnView::default() };
    let own = OwnView { nat64: Nat64 { prefixes: vec![Nat64Prefix::WELL_KNOWN], ..Nat64::default() }, ..own };
    nodes[0].set_own_side(SECOND, OwnSide { view: own, ..pods_and_services() });
    let hostile = ["127.0.0.1:53", "169.254.169.254:80", "224.0.0.1:1", "0.0.0.0:1", "198.51.100.7:22"];
    let inside = ["10.64.3.4:80", "203.0.113.1:0", "10.96.0.1:443", "[fd96::a]:53", "[64:ff9b::a60:1]:443"];
    nodes[1].set_own_side(SECOND, side(&hostile, &inside));
    assert_eq!(exchange(SECOND, &mut nodes), []);
    assert_eq!(known(&nodes[0], SECOND, 2), [format!("{RELAY} (relay over TCP)")]);
}

/// A request of node 2 to node 1 that names one address.
fn request(epoch: u8, counter: u64, address: &str) -> Vec<u8> {
    let [own, peer] = [identity(2), identity(1)];
    let keys = ProbeKeys::derive(&own.private_key.0, &peer.public_key.0, None).unwrap();
    let message = Message::Request {
        transaction: TransactionId([counter as u8; 12]),
        starts_round: false,
        wants_handshake: false,
        is_birthday: false,
        wants_keepalives: false,
        ports: None,
        candidates: vec![probe::Candidate { kind: CandidateKind::Host, address: endpoint(address) }],
    };
    keys.seal(Epoch([epoch; 16]), counter, &message, 0)
}

#[test]
fn recordings_late_requests_and_those_past_the_relay_name_nothing() {
    let mut nodes = [node(1), node(2)];
    exchange(SECOND, &mut nodes);
    let now = 2 * SECOND;
    let mut known_after = |from: SocketAddr, datagram: &[u8]| {
        nodes[0].handle_datagram(now, None, from, datagram);
        let mut known = known(&nodes[0], now, 2);
        known.retain(|candidate| candidate.contains("203.0.113."));
        known
    };
    assert_eq!(known_after(RELAY, &request(2, 1000, "203.0.113.1:1")), ["203.0.113.1:1 (host)"]);
    // Overtaken on the way, a recording of an earlier run, and one that did not come over the relay.
    assert_eq!(known_after(RELAY, &request(2, 999, "203.0.113.2:1")), ["203.0.113.1:1 (host)"]);
    assert_eq!(known_after(RELAY, &request(7, 1, "203.0.113.3:1")), ["203.0.113.1:1 (host)"]);
    let elsewhere = known_after(endpoint("203.0.113.99:1"), &request(2, 1001, "203.0.113.4:1"));
    assert_eq!(elsewhere, ["203.0.113.1:1 (host)", "203.0.113.99:1 (roamed)"]);
}

#[test]
fn pods_and_services_are_no_candidates_wherever_they_come_from() {
    let mut nodes = [node(1), node(2)];
    nodes[0].set_own_side(SECOND, pods_and_services());
    exchange(SECOND, &mut nodes);
    let now = 2 * SECOND;
    for (counter, from) in [(1000, "10.96.0.10:53"), (1001, "10.64.3.4:1"), (1002, "[64:ff9b::a60:1]:443")] {
        nodes[0].handle_datagram(now, None, endpoint(from), &request(2, counter, "203.0.113.1:1"));
    }
    let answers: Vec<Transmit> = std::iter::from_fn(|| nodes[0].poll_transmit()).collect();
    assert_eq!(answers, [], "they would go through a tunnel");
    assert_eq!(known(&nodes[0], now, 2), [format!("{RELAY} (relay over TCP)")]);
    // Nor are they this node's own, whatever gateways say.
    nodes[0].set_own_side(now, OwnSide { mapped: vec![endpoint("10.96.0.1:443")], ..pods_and_services() });
    exchange(now, &mut nodes);
    assert_eq!(known(&nodes[1], now, 1), [format!("{RELAY} (relay over TCP)")]);
}

#[test]
fn filtered_endpoints_are_neither_told_nor_tried_and_the_relay_stays() {
    let filter = || AddressFilter::new(["0.0.0.0/0", "!10.0.0.0/8"].map(|entry| entry.parse().unwrap()));
    let relay = format!("{RELAY} (relay over TCP)");
    let (all, other) = (["10.0.0.2:51820", "198.51.100.2:51820"], "198.51.100.2:51820 (host)");
    for (teller, filters) in [
        (1, EndpointFilters { published: filter(), ..EndpointFilters::default() }),
        (0, EndpointFilters { tried: filter(), ..EndpointFilters::default() }),
    ] {
        let mut nodes = [node(1), node(2)];
        let mut sides = [side(&[], &[]), side(&all, &[])];
        sides[teller].filters = filters;
        let [first, second] = sides;
        nodes[0].set_own_side(SECOND, first);
        nodes[1].set_own_side(SECOND, second);
        exchange(SECOND, &mut nodes);
        let known = BTreeSet::from_iter(known(&nodes[0], SECOND, 2));
        assert_eq!(known, [other.to_owned(), relay.clone()].into());
    }
    // What an administrator names is told all the same.
    let mut nodes = [node(1), node(2)];
    let filters = EndpointFilters { published: filter(), ..EndpointFilters::default() };
    let extra = vec![endpoint("10.0.0.3:7")];
    nodes[1].set_own_side(SECOND, OwnSide { filters, extra, ..side(&all[..1], &[]) });
    exchange(SECOND, &mut nodes);
    let expected = ["10.0.0.3:7 (observed)".to_owned(), relay.clone()];
    assert_eq!(BTreeSet::from_iter(known(&nodes[0], SECOND, 2)), expected.into());
    // Packets that come from there are answered; the node does not begin to use the endpoint.
    let mut nodes = [node(1), node(2)];
    let filters = EndpointFilters { tried: filter(), ..EndpointFilters::default() };
    nodes[0].set_own_side(SECOND, OwnSide { filters, ..OwnSide::default() });
    exchange(SECOND, &mut nodes);
    let now = 2 * SECOND;
    nodes[0].handle_datagram(now, None, endpoint("10.0.0.9:1"), &request(2, 1000, "203.0.113.1:1"));
    assert_eq!(known(&nodes[0], now, 2), [relay]);
}
