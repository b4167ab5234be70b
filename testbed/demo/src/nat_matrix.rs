//! Nodes behind every kind of NAT, and how packets between each two of them should go.
//!
//! The expected ways follow from how a NAT maps and filters (RFC 4787, sections 4.1 and 5), not from what the nodes do.

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;
use testbed_lab::{Ipv6, Nat};

use crate::topology::{SitePlan, Topology};

/// Mapping behaviour of a NAT for an internal endpoint (RFC 4787, 4.1).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mapping {
    /// Another one for each remote address and port.
    AddressAndPortDependent,
    /// One for all destinations.
    EndpointIndependent,
}

/// Filtering behaviour of a NAT: senders whose packets a mapping lets in (RFC 4787, 5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Filtering {
    /// Endpoints that were sent to.
    AddressAndPortDependent,
    /// Addresses that were sent to.
    AddressDependent,
    /// No UDP passes at all.
    Blocked,
    /// All senders.
    EndpointIndependent,
}

/// A kind of NAT that nodes are behind.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kind {
    /// Name of the kind in the grid.
    pub name: &'static str,
    nat: Nat,
    mapping: Mapping,
    filtering: Filtering,
    /// Public IPv6 beside IPv4, behind a firewall that lets in answers only.
    ipv6: bool,
}

/// Kind of path between two nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PathKind {
    /// By way of the relay; directly with a birthday attempt, which the test of the matrix does without.
    Birthday,
    /// By way of the relay; directly with addresses between home router and carrier, which the nodes do not learn yet.
    CarrierAddresses,
    /// Directly.
    Direct,
    /// By way of the relay.
    Relay,
}

/// A node of the matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Place {
    /// Name of the node.
    pub node: &'static str,
    /// Name of the site.
    pub site: &'static str,
    /// Kind of NAT or firewall between the site and the Internet.
    pub kind: Kind,
    /// The carrier that the site shares with another one.
    carrier: Option<&'static str>,
    address: Ipv4Addr,
}

impl PathKind {
    /// Whether Fairlead finds a direct path now.
    pub fn is_direct(self) -> bool {
        self == Self::Direct
    }
}

const fn kind(name: &'static str, nat: Nat, mapping: Mapping, filtering: Filtering) -> Kind {
    Kind { name, nat, mapping, filtering, ipv6: false }
}

/// The kinds of the grid, those that let in most first.
pub const KINDS: [Kind; 11] = [
    kind("open", Nat::None, Mapping::EndpointIndependent, Filtering::EndpointIndependent),
    kind("one-to-one", Nat::OneToOne, Mapping::EndpointIndependent, Filtering::EndpointIndependent),
    kind("full-cone", Nat::FullCone, Mapping::EndpointIndependent, Filtering::EndpointIndependent),
    kind("address", Nat::AddressRestricted, Mapping::EndpointIndependent, Filtering::AddressDependent),
    kind("port", Nat::PortRestricted, Mapping::EndpointIndependent, Filtering::AddressAndPortDependent),
    kind("linux", Nat::LinuxMasquerade, Mapping::EndpointIndependent, Filtering::AddressAndPortDependent),
    kind("cgnat", Nat::Cgnat, Mapping::EndpointIndependent, Filtering::AddressAndPortDependent),
    kind(
        "sequential",
        Nat::SymmetricPredictable,
        Mapping::AddressAndPortDependent,
        Filtering::AddressAndPortDependent,
    ),
    kind(
        "random",
        Nat::SymmetricRandom,
        Mapping::AddressAndPortDependent,
        Filtering::AddressAndPortDependent,
    ),
    Kind {
        ipv6: true,
        ..kind(
            "random-ipv6",
            Nat::SymmetricRandom,
            Mapping::AddressAndPortDependent,
            Filtering::AddressAndPortDependent,
        )
    },
    kind("no-udp", Nat::UdpBlocked, Mapping::EndpointIndependent, Filtering::Blocked),
];

/// A NAT whose hosts reach each other by their external addresses.
const HAIRPIN: Kind =
    kind("hairpin", Nat::Hairpin, Mapping::EndpointIndependent, Filtering::EndpointIndependent);
/// A home router behind the carrier that the site names.
const CUSTOMER: Kind =
    kind("cgnat", Nat::PortRestricted, Mapping::EndpointIndependent, Filtering::AddressAndPortDependent);

impl Kind {
    /// The `natType` that a node behind it publishes, in WireKube's words. Blocked UDP says nothing of itself.
    pub fn nat_type(&self) -> &'static str {
        match (self.nat, self.mapping, self.filtering) {
            (_, _, Filtering::Blocked) => "",
            (Nat::None, ..) => "open",
            (_, Mapping::AddressAndPortDependent, _) => "symmetric",
            (_, _, Filtering::AddressAndPortDependent) => "port-restricted-cone",
            (_, _, Filtering::AddressDependent | Filtering::EndpointIndependent) => "cone",
        }
    }

    /// Whether the first packet of a node behind `other` comes in, when both nodes send to what STUN servers see of the other
    /// one: the source of that packet is the known endpoint only if `other` has one mapping for all.
    fn lets_in(&self, other: &Self) -> bool {
        let is_known = self.mapping == Mapping::EndpointIndependent;
        is_known
            && match self.filtering {
                Filtering::AddressAndPortDependent => other.mapping == Mapping::EndpointIndependent,
                Filtering::AddressDependent | Filtering::EndpointIndependent => true,
                Filtering::Blocked => false,
            }
    }
}

/// Expected way of packets between two nodes.
pub fn way(one: &Place, other: &Place) -> PathKind {
    let (a, b) = (&one.kind, &other.kind);
    if one.site == other.site {
        return PathKind::Direct;
    }
    if [a, b].iter().any(|kind| kind.filtering == Filtering::Blocked) {
        return PathKind::Relay;
    }
    if one.carrier.is_some() && one.carrier == other.carrier {
        return PathKind::CarrierAddresses;
    }
    if (a.ipv6 && b.ipv6) || a.lets_in(b) || b.lets_in(a) {
        return PathKind::Direct;
    }
    if a.mapping == b.mapping { PathKind::Relay } else { PathKind::Birthday }
}

const fn place(node: &'static str, site: &'static str, kind: Kind, address: [u8; 4]) -> Place {
    let [a, b, c, d] = address;
    Place { node, site, kind, carrier: None, address: Ipv4Addr::new(a, b, c, d) }
}

/// The nodes: two sites of each kind, and what a NAT alone does not decide. The first site has the API server.
///
/// `linux-a` and `linux-b` have one private range, `port-a` has two nodes on one LAN, `hairpin` as well, and `cgnat-a` and
/// `cgnat-c` are customers of one carrier.
pub fn places() -> Vec<Place> {
    let [open, one_to_one, full_cone, address, port, linux, cgnat, sequential, random, ipv6, no_udp] = KINDS;
    let shared = |place: Place| Place { carrier: Some("carrier"), ..place };
    vec![
        place("open-a-1", "open-a", open, [198, 51, 100, 11]),
        place("open-b-1", "open-b", open, [192, 0, 2, 11]),
        place("one-to-one-a-1", "one-to-one-a", one_to_one, [10, 1, 1, 11]),
        place("one-to-one-b-1", "one-to-one-b", one_to_one, [10, 1, 2, 11]),
        place("full-cone-a-1", "full-cone-a", full_cone, [10, 2, 1, 11]),
        place("full-cone-b-1", "full-cone-b", full_cone, [10, 2, 2, 11]),
        place("address-a-1", "address-a", address, [10, 3, 1, 11]),
        place("address-b-1", "address-b", address, [10, 3, 2, 11]),
        place("port-a-1", "port-a", port, [10, 4, 1, 11]),
        place("port-a-2", "port-a", port, [10, 4, 1, 12]),
        place("port-b-1", "port-b", port, [10, 4, 2, 11]),
        place("linux-a-1", "linux-a", linux, [192, 168, 1, 11]),
        place("linux-b-1", "linux-b", linux, [192, 168, 1, 12]),
        shared(place("cgnat-a-1", "cgnat-a", CUSTOMER, [10, 6, 1, 11])),
        place("cgnat-b-1", "cgnat-b", cgnat, [10, 6, 2, 11]),
        shared(place("cgnat-c-1", "cgnat-c", CUSTOMER, [10, 6, 3, 11])),
        place("sequential-a-1", "sequential-a", sequential, [10, 7, 1, 11]),
        place("sequential-b-1", "sequential-b", sequential, [10, 7, 2, 11]),
        place("random-a-1", "random-a", random, [10, 8, 1, 11]),
        place("random-b-1", "random-b", random, [10, 8, 2, 11]),
        place("random-ipv6-a-1", "random-ipv6-a", ipv6, [10, 9, 1, 11]),
        place("random-ipv6-b-1", "random-ipv6-b", ipv6, [10, 9, 2, 11]),
        place("no-udp-a-1", "no-udp-a", no_udp, [10, 10, 1, 11]),
        place("no-udp-b-1", "no-udp-b", no_udp, [10, 10, 2, 11]),
        place("hairpin-1", "hairpin", HAIRPIN, [10, 11, 1, 11]),
        place("hairpin-2", "hairpin", HAIRPIN, [10, 11, 1, 12]),
    ]
}

/// The sites of these nodes.
pub fn topology(places: &[Place]) -> Topology {
    let mut sites: Vec<SitePlan> = Vec::new();
    for place in places {
        match sites.iter_mut().find(|site| site.name == place.site) {
            Some(site) => site.nodes.push(place.address),
            None => sites.push(site(place)),
        }
    }
    Topology {
        name: "nat-matrix",
        about: "two sites behind each kind of NAT with a node each",
        sites,
        node_arguments: &[],
    }
}

fn site(place: &Place) -> SitePlan {
    SitePlan {
        name: place.site,
        nat: place.kind.nat,
        lan: Ipv4Net::new_assert(place.address, 24).trunc(),
        nodes: vec![place.address],
        ipv6: if place.kind.ipv6 { Ipv6::Global } else { Ipv6::Off },
        uplink_mtu: None,
        carrier: place.carrier,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first node behind each kind.
    fn first(name: &str) -> Place {
        places().into_iter().find(|place| place.kind.name == name).unwrap()
    }

    fn between(one: &str, other: &str) -> PathKind {
        let (one, other) = (first(one), first(other));
        let elsewhere = Place { site: "elsewhere", carrier: None, ..other };
        assert_eq!(way(&one, &elsewhere), way(&elsewhere, &one));
        way(&one, &elsewhere)
    }

    #[test]
    fn what_is_expected_is_what_nat_traversal_is_known_to_reach() {
        for kind in KINDS.iter().filter(|kind| kind.name != "no-udp") {
            for reachable in ["open", "one-to-one", "full-cone", "address"] {
                assert_eq!(between(kind.name, reachable), PathKind::Direct, "{} to {reachable}", kind.name);
            }
            assert_eq!(between(kind.name, "no-udp"), PathKind::Relay);
        }
        for (one, other, expected) in [
            ("port", "linux", PathKind::Direct),
            ("cgnat", "port", PathKind::Direct),
            ("port", "random", PathKind::Birthday),
            ("cgnat", "sequential", PathKind::Birthday),
            ("random", "random", PathKind::Relay),
            ("random", "sequential", PathKind::Relay),
            ("random-ipv6", "random", PathKind::Relay),
            ("random-ipv6", "random-ipv6", PathKind::Direct),
            ("no-udp", "no-udp", PathKind::Relay),
        ] {
            assert_eq!(between(one, other), expected, "{one} to {other}");
        }
        let [one, other] = ["cgnat-a-1", "cgnat-c-1"]
            .map(|node| places().into_iter().find(|place| place.node == node).unwrap());
        assert_eq!(way(&one, &other), PathKind::CarrierAddresses);
    }

    #[test]
    fn every_kind_has_two_sites() {
        for kind in KINDS {
            let sites: std::collections::BTreeSet<&str> = places()
                .iter()
                .filter(|place| place.kind.name == kind.name)
                .map(|place| place.site)
                .collect();
            assert!(sites.len() >= 2, "{}: {sites:?}", kind.name);
        }
    }
}
