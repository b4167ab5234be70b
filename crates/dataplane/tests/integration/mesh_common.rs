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
    }
}
