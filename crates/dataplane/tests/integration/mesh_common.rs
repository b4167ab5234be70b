//! Shared parts of the tests of the mesh.

use fairlead_dataplane::mesh::{Applier, Bypass, MeshState};
use fairlead_dataplane::nft_table::Applied;
use ipnet::IpNet;
pub(crate) use testbed_netns::{Namespace, in_namespace, sh as run};

/// Applies a state without memory of earlier ones, as a node program that was just started.
pub(crate) fn apply(state: &MeshState) -> fairlead_netlink::Result<Applied> {
    Applier::default().apply(state)
}

/// That many prefixes of each family, none next to another.
pub(crate) fn targets(count: u32) -> (Vec<IpNet>, Vec<IpNet>) {
    let v4 = (0..count)
        .map(|n| IpNet::new(std::net::Ipv4Addr::from_bits(0x0a00_0000 + n * 512).into(), 24).unwrap());
    let v6 = (0..count).map(|n| {
        let bits = (0xfd00_u128 << 112) + (u128::from(n) << 65);
        IpNet::new(std::net::Ipv6Addr::from_bits(bits).into(), 64).unwrap()
    });
    (v4.collect(), v6.collect())
}

/// A mesh with these targets, and nothing else.
pub(crate) fn mesh(mtu: u32, v4: &[&str], v6: &[&str]) -> MeshState {
    let nets = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect::<Vec<IpNet>>();
    MeshState {
        interface: "mesh0".into(),
        mtu,
        addresses: Vec::new(),
        targets_v4: nets(v4),
        targets_v6: nets(v6),
        bypass: Bypass::default(),
        plain: Vec::new(),
        narrow: Vec::new(),
        masqueraded: Vec::new(),
        without_default: Vec::new(),
        listen_port: 51820,
        sources: Vec::new(),
        uplinks: Vec::new(),
    }
}

/// Joins a node with others, each by a link of this name in the networks 100.N.0.0/24 and fdN::/64: the node is 1 there, and the default route of the
/// other, which is 2.
pub(crate) fn join(node: &Namespace, others: [(&str, &Namespace, u8); 3]) {
    for (link, other, number) in others {
        node.veth(link, other, "eth0");
        node.sh(&format!(
            "ip addr add 100.{number}.0.1/24 dev {link}; ip addr add fd{number}::1/64 dev {link} nodad"
        ));
        other.sh(&format!(
            "ip addr add 100.{number}.0.2/24 dev eth0; ip addr add fd{number}::2/64 dev eth0 nodad; \
             ip route add default via 100.{number}.0.1; ip route add default via fd{number}::1"
        ));
    }
}
