//! Connections between control-plane nodes whose tunnel is not up. A control-plane node that boots has no tunnel before its node program runs, which
//! the kubelet starts once an API server answers, which waits for etcd: so etcd's members, API servers and kubelets reach each other without one. Only
//! TCP ports whose protocols encrypt themselves, only of the hosts, and only while there is no tunnel:
//!
//! ```text
//! tcp dport P ip daddr @fairlead_control_plane_down_ipv4 meta mark set meta mark | 0x60 accept
//! tcp sport P ct mark & 0x00000060 == 0x00000020 ip daddr @fairlead_control_plane_ipv4 meta mark set meta mark | 0x60 accept
//! ```
//!
//! in the outgoing chain, for each port, and the same for IPv6. An answer goes the way that the request came: this node notices later than the other one
//! that the tunnel between them is gone, or that it is there and the other one accepts this node's addresses from it. So a bit in the mark of the
//! connection says whether its last request came past the tunnel. The kernel's direction of a connection does not count: of one that is older than the
//! first rule, the packet that it sees first is the original, and that may be an answer. In the prerouting chain:
//!
//! ```text
//! iifname "wire_kube" tcp dport P ct mark & 0x00000060 == 0x00000020 ct mark set ct mark & 0xffffff9f
//! iifname != "wire_kube" tcp dport P ip saddr @fairlead_control_plane_ipv4 ct mark set ct mark & 0xffffffbf | 0x00000020
//! ```

use fairlead_address::{IntervalSet, IpFamily};
use fairlead_api::names;
use fairlead_netlink::nftables::{AddressEnd, Comparison, Expression, Meta, Rule};
use ipnet::IpNet;

use super::state::ControlPlane;
use super::table::{TCP_DESTINATION_PORT, TCP_SOURCE_PORT, is_tcp_port};

/// Names of the sets of a family, of all and of those whose tunnel is not up.
const fn names_of(family: IpFamily) -> (&'static str, &'static str) {
    match family {
        IpFamily::V4 => (names::NFT_SET_CONTROL_PLANE_IPV4, names::NFT_SET_CONTROL_PLANE_DOWN_IPV4),
        IpFamily::V6 => (names::NFT_SET_CONTROL_PLANE_IPV6, names::NFT_SET_CONTROL_PLANE_DOWN_IPV6),
    }
}

pub(super) fn sets(control_plane: &ControlPlane) -> impl Iterator<Item = (String, IntervalSet)> {
    control_plane.families().flat_map(|family| {
        let (all, down) = names_of(family);
        [(all, &control_plane.nodes), (down, &control_plane.down)].map(|(name, addresses)| {
            let prefixes: Vec<IpNet> = addresses.iter().copied().map(IpNet::from).collect();
            (name.to_owned(), IntervalSet::from_prefixes(family, &prefixes))
        })
    })
}

/// Rules of the prerouting chain, which note by which way a request came.
pub(super) fn incoming(control_plane: &ControlPlane, interface: &str) -> Vec<Rule> {
    let ports = move || control_plane.ports.iter().filter(move |_| !control_plane.nodes.is_empty());
    let by_tunnel = ports().map(|port| {
        let mut expressions =
            vec![Expression::LoadMeta(Meta::InputInterface), Expression::is_interface(interface)];
        expressions.extend(is_tcp_port(TCP_DESTINATION_PORT, *port));
        expressions.extend(came_past_tunnel());
        expressions.extend([
            Expression::LoadConnectionMark,
            Expression::replace_bits(!names::MARK_MASK, 0),
            Expression::StoreConnectionMark,
        ]);
        Rule(expressions)
    });
    let past_tunnel = control_plane.families().flat_map(|family| {
        ports().map(move |port| {
            let mut expressions =
                vec![Expression::LoadMeta(Meta::InputInterface), Expression::is_other_interface(interface)];
            expressions.extend(is_tcp_port(TCP_DESTINATION_PORT, *port));
            expressions.extend(Expression::address_in(family, AddressEnd::Source, names_of(family).0));
            expressions.extend([
                Expression::LoadConnectionMark,
                Expression::replace_bits(!names::MARK_TO_WIREGUARD, names::MARK_FROM_WIREGUARD),
                Expression::StoreConnectionMark,
            ]);
            Rule(expressions)
        })
    });
    by_tunnel.chain(past_tunnel).collect()
}

/// Rules of the outgoing chain, which lead this host's packets past the mesh. `mark` is what they do before they accept a packet.
pub(super) fn outgoing(control_plane: &ControlPlane, mark: &[Expression]) -> Vec<Rule> {
    let of_family = |family| {
        let (all, down) = names_of(family);
        control_plane.ports.iter().flat_map(move |port| {
            let mut request = is_tcp_port(TCP_DESTINATION_PORT, *port).to_vec();
            request.extend(Expression::address_in(family, AddressEnd::Destination, down));
            let mut answer = is_tcp_port(TCP_SOURCE_PORT, *port).to_vec();
            answer.extend(came_past_tunnel());
            answer.extend(Expression::address_in(family, AddressEnd::Destination, all));
            [request, answer].map(|mut expressions| {
                expressions.extend_from_slice(mark);
                expressions.push(Expression::Accept);
                Rule(expressions)
            })
        })
    };
    control_plane.families().flat_map(of_family).collect()
}

/// `ct mark & 0x60 == 0x20`
fn came_past_tunnel() -> [Expression; 3] {
    [
        Expression::LoadConnectionMark,
        Expression::replace_bits(names::MARK_MASK, 0),
        Expression::Compare(Comparison::Equal, names::MARK_FROM_WIREGUARD.to_ne_bytes().to_vec()),
    ]
}
