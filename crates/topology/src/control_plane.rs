//! Control-plane nodes, which need each other before there is a tunnel between them.

use std::borrow::Borrow;
use std::collections::BTreeSet;
use std::net::IpAddr;

use fairlead_keys::PublicKey;

use crate::member::Member;

/// Addresses of the other control-plane nodes by which these are reached in the mesh, each with the key of its node; none if the node `own` is not a
/// control-plane node itself. `nodes` are [`crate::Plan::nodes`]. What only discovery services say is not believed.
pub fn control_plane<M: Borrow<Member>>(
    members: &[M],
    own: &str,
    nodes: &BTreeSet<IpAddr>,
) -> Vec<(IpAddr, PublicKey)> {
    let members = members.iter().map(|member| -> &Member { member.borrow() });
    let is_one = |member: &&Member| member.addresses.is_control_plane && !member.discovery.is_only_source;
    let (of_own, others): (Vec<&Member>, Vec<&Member>) =
        members.filter(is_one).partition(|member| member.name == own);
    if of_own.is_empty() {
        return Vec::new();
    }
    let addresses = |member: &&Member| {
        let of_node = member.addresses.node.clone().unwrap_or_default();
        let key = member.public_key;
        let reached = of_node.into_iter().filter(|address| nodes.contains(address));
        reached.filter_map(move |address| Some((address, key?))).collect::<Vec<_>>()
    };
    let mut found: Vec<(IpAddr, PublicKey)> = others.iter().flat_map(addresses).collect();
    found.sort_unstable();
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::member::{ByDiscovery, MemberAddresses};

    fn address(number: u8) -> IpAddr {
        [192, 0, 2, number].into()
    }

    fn node(number: u8, is_control_plane: bool) -> Member {
        Member {
            public_key: Some(PublicKey([number; 32])),
            addresses: MemberAddresses {
                is_control_plane,
                ..MemberAddresses::of_node(vec![address(number), address(100 + number)])
            },
            ..Member::named(format!("n{number}"))
        }
    }

    #[test]
    fn control_plane_nodes_know_each_other_by_addresses_in_the_mesh_and_other_nodes_know_none() {
        let told = Member {
            discovery: ByDiscovery { is_only_source: true, needs_preshared_key: false },
            ..node(5, true)
        };
        let keyless = Member { public_key: None, ..node(6, true) };
        let members = [node(1, true), node(2, true), node(3, false), node(4, true), told, keyless];
        let nodes: BTreeSet<IpAddr> = (1..=6).map(address).collect();
        let of = |own: &str| -> Vec<IpAddr> {
            control_plane(&members, own, &nodes).into_iter().map(|(address, _)| address).collect()
        };
        assert_eq!(of("n1"), [address(2), address(4)]);
        assert_eq!(of("n2"), [address(1), address(4)]);
        assert_eq!(of("n3"), [] as [IpAddr; 0]);
        assert_eq!(control_plane(&members, "n1", &nodes)[0].1, PublicKey([2; 32]));
        assert_eq!(control_plane(&members, "n1", &BTreeSet::new()), []);
    }
}
