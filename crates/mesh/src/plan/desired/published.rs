//! Endpoints of peers that this node publishes.

use std::net::SocketAddr;

use fairlead_address::AddressFilter;

use super::peer::DesiredPeer;
use crate::model::inputs::Inputs;

/// Choice of the endpoints of peers that this node publishes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Harvest {
    is_on: bool,
    /// Filter of the mesh, for peers whose Nodes have none of their own.
    filter: AddressFilter,
}

impl Harvest {
    pub(super) fn new(inputs: &Inputs) -> Self {
        Self { is_on: inputs.settings.harvests_endpoints, filter: inputs.settings.filters.published.clone() }
    }

    /// Whether this node is to publish that it sees a peer at an endpoint: others learn something from it, and the peer's Node or the mesh
    /// lets nodes publish it.
    pub(super) fn publishes(&self, peer: &DesiredPeer, endpoint: SocketAddr) -> bool {
        let filter = peer.published.as_ref().unwrap_or(&self.filter);
        self.is_on && filter.allows(endpoint.ip()) && peer.is_news(endpoint)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::net::IpAddr;

    use super::*;
    use crate::plan::desired::tests::{host, inputs, key, member};
    use crate::plan::desired::{Desired, Held, Host, OwnAddresses};

    fn filter(entries: &[&str]) -> AddressFilter {
        AddressFilter::new(entries.iter().map(|entry| entry.parse().unwrap()))
    }

    fn endpoint(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    /// A peer that publishes these and is seen at one more.
    fn peer_at(hosts: &[&str], manual: &str) -> [fairlead_topology::Member; 3] {
        let mut peer = member(2);
        peer.endpoints.host = hosts.iter().map(|text| endpoint(text)).collect();
        peer.endpoints.manual = manual.parse().ok();
        let mut observer = member(3);
        observer.endpoints.sightings = [(peer.name.clone(), (key(2), endpoint("10.3.9.9:4000")))].into();
        [member(1), peer, observer]
    }

    #[test]
    fn only_endpoints_that_the_filter_adds_are_published_in_its_order() {
        let mut inputs = inputs([member(1)]);
        inputs.own.addresses = vec!["10.3.0.1".parse().unwrap()];
        inputs.network.public_ipv4 = "198.51.100.1".parse().ok();
        let addresses: Vec<IpAddr> =
            ["10.3.0.1", "10.4.0.1", "203.0.113.1"].map(|it| it.parse().unwrap()).into();
        let host = Host { addresses, ..host() };
        let peers: BTreeSet<SocketAddr> = [endpoint("10.3.0.7:1"), endpoint("203.0.113.7:1")].into();
        let by_peers = OwnAddresses { peers, ..OwnAddresses::default() };
        let all = Desired::new(&inputs, &host, Held::default(), &by_peers);
        assert_eq!((all.endpoints.host.len(), all.endpoints.peer_reflexive.len()), (3, 2));
        inputs.settings.filters.published = filter(&["203.0.113.0/24", "10.0.0.0/8", "!10.3.0.0/16"]);
        let desired = Desired::new(&inputs, &host, Held::default(), &by_peers);
        assert_eq!(desired.endpoints.host, [endpoint("203.0.113.1:51820"), endpoint("10.4.0.1:51820")]);
        assert_eq!(desired.endpoints.peer_reflexive, [endpoint("203.0.113.7:1")]);
        assert_eq!((&*desired.endpoints.mapped, desired.endpoints.public_ipv4), (&[][..], None));
        // Where this host is, and what is in front of it, does not change.
        assert_eq!((&desired.own_side.view, desired.nat), (&all.own_side.view, all.nat));
        assert_eq!(desired.own_side.host, all.own_side.host);
    }

    #[test]
    fn nodes_do_not_publish_for_a_peer_what_the_filter_takes_away() {
        let mut inputs = inputs(peer_at(&["10.4.0.2:51820"], ""));
        let publishes = |inputs: &_| {
            let desired = Desired::new(inputs, &host(), Held::default(), &OwnAddresses::default());
            let peer = &desired.peers[&key(2)];
            ["10.3.0.2:4000", "203.0.113.2:4000"].map(|it| desired.publishes(peer, endpoint(it)))
        };
        assert_eq!(publishes(&inputs), [true, true]);
        inputs.settings.filters.published = filter(&["0.0.0.0/0", "!10.3.0.0/16"]);
        assert_eq!(publishes(&inputs), [false, true]);
    }

    #[test]
    fn nodes_publish_nothing_of_where_they_see_others_unless_the_mesh_harvests() {
        let mut inputs = inputs(peer_at(&["10.4.0.2:51820"], ""));
        for harvests in [true, false] {
            inputs.settings.harvests_endpoints = harvests;
            let desired = Desired::new(&inputs, &host(), Held::default(), &OwnAddresses::default());
            assert_eq!(desired.publishes(&desired.peers[&key(2)], endpoint("203.0.113.2:4000")), harvests);
        }
    }

    #[test]
    fn only_endpoints_of_peers_that_their_filter_adds_are_tried() {
        let mut inputs = inputs(peer_at(&["10.3.0.2:51820", "10.4.0.2:51820"], "10.3.0.3:7"));
        let tried = |inputs: &_| {
            let desired = Desired::new(inputs, &host(), Held::default(), &OwnAddresses::default());
            let candidates = desired.peers[&key(2)].paths.candidates.iter();
            candidates.map(|candidate| candidate.address).collect::<BTreeSet<_>>()
        };
        let all = ["10.3.0.2:51820", "10.4.0.2:51820", "10.3.0.3:7", "10.3.9.9:4000"];
        assert_eq!(tried(&inputs), all.map(endpoint).into());
        inputs.settings.filters.published = filter(&["192.0.2.1"]);
        assert_eq!(tried(&inputs), all.map(endpoint).into(), "what others publish is theirs");
        inputs.settings.filters.tried = filter(&["0.0.0.0/0", "!10.3.0.0/16"]);
        assert_eq!(tried(&inputs), [endpoint("10.4.0.2:51820")].into());
    }

    #[test]
    fn a_filter_of_a_node_counts_for_that_node_and_that_of_the_mesh_for_the_others() {
        let publishes = |inputs: &Inputs| {
            let desired = Desired::new(inputs, &host(), Held::default(), &OwnAddresses::default());
            let peer = &desired.peers[&key(2)];
            ["10.3.0.9:1", "203.0.113.9:1"].map(|it| desired.publishes(peer, endpoint(it)))
        };
        let of = |own: Option<&[&str]>, mesh: &[&str]| {
            let mut peer = member(2);
            peer.endpoints.filter = own.map(filter);
            let mut inputs = inputs([member(1), peer]);
            inputs.settings.filters.published = filter(mesh);
            // What this node says of itself says nothing of others.
            inputs.own.filters.published = Some(filter(&["192.0.2.1"]));
            publishes(&inputs)
        };
        assert_eq!(of(None, &[]), [true, true]);
        assert_eq!(of(None, &["10.0.0.0/8"]), [true, false]);
        assert_eq!(of(Some(&["203.0.113.0/24"]), &["10.0.0.0/8"]), [false, true]);
        assert_eq!(of(Some(&[]), &["10.0.0.0/8"]), [true, true]);
    }

    #[test]
    fn a_node_s_own_filters_replace_those_of_the_mesh() {
        let mut inputs = inputs(peer_at(&["10.3.0.2:51820", "10.4.0.2:51820"], ""));
        let both: Vec<IpAddr> = ["10.3.0.1", "10.4.0.1"].map(|it| it.parse().unwrap()).into();
        let desired = |inputs: &Inputs| {
            let host = Host { addresses: both.clone(), ..host() };
            let desired = Desired::new(inputs, &host, Held::default(), &OwnAddresses::default());
            let candidates = desired.peers[&key(2)].paths.candidates.iter();
            let tried = candidates.map(|candidate| candidate.address).collect::<Vec<_>>();
            (desired.endpoints.host.len(), tried)
        };
        inputs.own.addresses.clear();
        inputs.settings.filters.published = filter(&["0.0.0.0/0", "!10.3.0.0/16"]);
        inputs.settings.filters.tried = filter(&["10.3.0.0/16"]);
        let (published, tried) = desired(&inputs);
        assert!(published == 1 && tried.iter().all(|it| *it != endpoint("10.4.0.2:51820")), "{tried:?}");
        inputs.own.filters.published = Some(filter(&[]));
        inputs.own.filters.tried = Some(filter(&["10.4.0.0/16"]));
        assert_eq!(desired(&inputs), (2, vec![endpoint("10.4.0.2:51820")]));
    }
}
