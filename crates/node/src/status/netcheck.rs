//! Facts about the networks that this node is in. Pure.

use std::net::SocketAddr;

use fairlead_mesh::apply::report::{PeerReport, Report};
use fairlead_mesh::tell::publish::{backend_name, nat_name};
use fairlead_path::{NatType, Seen, State, StunAnswer, classify};
use fairlead_wire::node::{AddressFamily, NetcheckResponse, StunMapping};

use super::{describe_port_mappings, describe_relay};

/// Whether datagrams come through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Udp {
    /// STUN servers were asked, and nothing answers.
    Blocked,
    /// Nothing was asked, and no peer answers.
    Unknown,
    /// A STUN server or a peer answers.
    Works,
}

/// Facts that the node program knows.
pub(super) fn netcheck(node: &str, report: &Report) -> NetcheckResponse {
    let families = [true, false].map(|is_ipv4| (family(report, is_ipv4), udp(report, is_ipv4)));
    let udp = |wanted| families.iter().any(|(_, udp)| *udp == wanted);
    let overall = if udp(Udp::Works) {
        Udp::Works
    } else if udp(Udp::Blocked) {
        Udp::Blocked
    } else {
        Udp::Unknown
    };
    NetcheckResponse {
        node: node.to_owned(),
        wireguard: backend_name(report.device.backend).to_owned(),
        listen_port: u32::from(report.device.port),
        nat_type: nat_name(report.translation.nat).to_owned(),
        udp: overall.name().to_owned(),
        has_path_socket: report.translation.stun.is_some(),
        families: families.into_iter().map(|(family, _)| family).collect(),
        port_mappings: describe_port_mappings(report),
        relays: report.relay.as_ref().map(describe_relay).into_iter().collect(),
        uplink_mtu: report.device.uplink_mtu,
        mtu: report.device.mtu,
        nat64_prefixes: report.translation.nat64.iter().map(ToString::to_string).collect(),
    }
}

fn family(report: &Report, is_ipv4: bool) -> AddressFamily {
    let of_family = |address: &&SocketAddr| address.is_ipv4() == is_ipv4;
    let host: Vec<SocketAddr> = report.endpoints.host.iter().filter(of_family).copied().collect();
    let seen: Vec<Seen> = stun(report, is_ipv4)
        .filter_map(|(server, answer)| match answer {
            StunAnswer::Mapped(address) if address.is_ipv4() == is_ipv4 => {
                Some(Seen { observer: server.ip(), address })
            }
            _ => None,
        })
        .collect();
    let by_peers = report.endpoints.observed.iter().chain(&report.endpoints.peer_reflexive).filter(of_family);
    let mut by_peers: Vec<String> =
        by_peers.filter(|address| !host.contains(address)).map(ToString::to_string).collect();
    by_peers.sort_unstable();
    by_peers.dedup();
    // What the NAT lets in was tested with a relay, and says something of a NAT with one mapping only.
    let nat = match classify(&host, &seen) {
        NatType::Cone if is_ipv4 && report.translation.nat == NatType::PortRestrictedCone => {
            report.translation.nat
        }
        nat => nat,
    };
    AddressFamily {
        name: if is_ipv4 { "IPv4" } else { "IPv6" }.to_owned(),
        nat_type: nat_name(nat).to_owned(),
        udp: udp(report, is_ipv4).name().to_owned(),
        addresses: host.iter().map(ToString::to_string).collect(),
        mappings: stun(report, is_ipv4).map(|(server, answer)| mapping(server, answer)).collect(),
        seen_by_peers: by_peers,
    }
}

fn stun(report: &Report, is_ipv4: bool) -> impl Iterator<Item = (SocketAddr, StunAnswer)> {
    let all = report.translation.stun.iter().flatten().map(|(server, answer)| (*server, *answer));
    all.filter(move |(server, _)| server.is_ipv4() == is_ipv4)
}

fn udp(report: &Report, is_ipv4: bool) -> Udp {
    let mut asked = stun(report, is_ipv4).map(|(_, answer)| answer).peekable();
    let was_asked = asked.peek().is_some();
    let is_direct = |peer: &PeerReport| {
        let endpoint = peer.device.as_ref().and_then(|device| device.config.endpoint);
        let is_of_family = endpoint.is_some_and(|endpoint| endpoint.is_ipv4() == is_ipv4);
        peer.path.state == State::Up && !peer.is_relayed() && is_of_family
    };
    if asked.any(|answer| answer != StunAnswer::Missing) || report.peers.iter().any(is_direct) {
        Udp::Works
    } else if was_asked && report.endpoints.host.iter().any(|address| address.is_ipv4() == is_ipv4) {
        Udp::Blocked
    } else {
        Udp::Unknown
    }
}

fn mapping(server: SocketAddr, answer: StunAnswer) -> StunMapping {
    let (mapped, error) = match answer {
        StunAnswer::Invalid(address) => {
            (String::new(), format!("says {address}, where no packet comes from"))
        }
        StunAnswer::Mapped(address) => (address.to_string(), String::new()),
        StunAnswer::Missing => (String::new(), "no answer".to_owned()),
        StunAnswer::Refused(code) => (String::new(), format!("refuses with {code}")),
    };
    StunMapping { server: server.to_string(), mapped, error }
}

impl Udp {
    fn name(self) -> &'static str {
        match self {
            Self::Blocked => "blocked",
            Self::Unknown => "",
            Self::Works => "works",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{peer, report};
    use super::*;

    fn address(text: &str) -> SocketAddr {
        text.parse().unwrap()
    }

    fn with(stun: &[(&str, StunAnswer)], mut report: Report) -> Report {
        let stun = stun.iter().map(|(server, answer)| (address(server), *answer)).collect();
        report.translation.stun = Some(stun);
        report
    }

    fn udp_of(report: &Report) -> (String, Vec<String>) {
        let answer = netcheck("home-1", report);
        (answer.udp, answer.families.into_iter().map(|family| family.udp).collect())
    }

    #[test]
    fn udp_is_blocked_where_nothing_answers_and_unknown_where_nothing_was_asked() {
        let (missing, mapped) = (StunAnswer::Missing, StunAnswer::Mapped(address("203.0.113.7:40000")));
        let lonely = || report(NatType::Unknown, Vec::new());
        let words = |words: [&str; 3]| (words[0].to_owned(), vec![words[1].to_owned(), words[2].to_owned()]);
        let of = |stun: &[(&str, StunAnswer)]| udp_of(&with(stun, lonely()));
        assert_eq!(udp_of(&lonely()), words(["", "", ""]));
        assert_eq!(of(&[("192.0.2.1:3478", missing)]), words(["blocked", "blocked", ""]));
        assert_eq!(
            of(&[("192.0.2.1:3478", missing), ("192.0.2.2:3478", mapped)]),
            words(["works", "works", ""])
        );
        // This host has no IPv6, so that an answer over it cannot be expected.
        assert_eq!(of(&[("[2001:db8::1]:3478", missing)]), words(["", "", ""]));
        let reached = with(&[("192.0.2.1:3478", missing)], report(NatType::Open, vec![peer(), peer()]));
        assert_eq!(udp_of(&reached), words(["works", "works", ""]));
    }

    #[test]
    fn each_server_says_what_it_sees_and_two_that_differ_make_the_nat_symmetric() {
        let mapped = |port: u16| StunAnswer::Mapped(SocketAddr::from(([203, 0, 113, 7], port)));
        let servers = [("192.0.2.1:3478", mapped(40000)), ("192.0.2.2:3478", mapped(40001))];
        let answer = netcheck("home-1", &with(&servers, report(NatType::Symmetric, Vec::new())));
        let ipv4 = &answer.families[0];
        assert_eq!((ipv4.name.as_str(), ipv4.nat_type.as_str()), ("IPv4", "symmetric"));
        assert_eq!(ipv4.mappings[0].mapped, "203.0.113.7:40000");
        assert_eq!(ipv4.addresses, ["192.168.1.10:51820"]);
        assert_eq!(ipv4.seen_by_peers, ["203.0.113.9:4000"]);
        assert!(answer.families[1].addresses.is_empty() && answer.families[1].nat_type.is_empty());
        let same = [("192.0.2.1:3478", mapped(40000)), ("192.0.2.2:3478", mapped(40000))];
        let answer = netcheck("home-1", &with(&same, report(NatType::Cone, Vec::new())));
        assert_eq!(answer.families[0].nat_type, "cone");
    }
}
