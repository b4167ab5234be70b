//! Sources that peers accept, for packets that have another one when they enter the mesh.
//!
//! The kernel chooses the source of a connection that this host opens by the routes of the table `main`, before the packet is marked: an address of the
//! link with the default route, which need not be the one that the Node object names, or a virtual address on `lo`. The source that masquerading
//! takes (kube-proxy's, for a NodePort) is that of any link, since the mesh device may have none, and a route's preferred source counts for
//! neither. Peers accept none of these. So this chain, before those of other programs, translates to an address that they accept:
//!
//! ```text
//! oifname "wire_kube" meta mark & 0x00004000 == 0x00004000 snat ip to A fully-random
//! oifname "wire_kube" fib saddr type local ip saddr != @fairlead_own_ipv4 snat ip to A fully-random
//! oifname "wire_kube" iifgroup 116 accept
//! oifname "wire_kube" ip saddr != @fairlead_own_ipv4 ip saddr != @kubespan_targets_ipv4 snat ip to A fully-random
//! ```
//!
//! and the same for IPv6. The first is for what kube-proxy is about to masquerade. Packets of pods of this node and of others that it forwards
//! for other members (as a gateway, as an entry node) keep their sources. Those of its pods are told by their links, too: a pod that starts may send before
//! the node program has heard of its block. The hook sees the first packet of a connection only.

use std::collections::BTreeSet;
use std::net::IpAddr;

use fairlead_address::{IpFamily, octets};
use fairlead_api::names;
use fairlead_netlink::nftables::{AddressEnd, Chain, Comparison, Expression, Hook, Meta, Rule};
use ipnet::IpNet;

use super::state::{MeshState, OwnSource};

/// Before the chain that masquerades for hosts beside this node (99), and those of other programs at `srcnat` (100).
const PRIORITY: i32 = 98;

/// Addresses of this node of which one is to be the source.
#[derive(Debug, Clone, Copy, Default)]
pub struct Candidates<'a> {
    /// Addresses that its Node object has and that no other member claims.
    pub of_node: &'a [IpAddr],
    /// Addresses on the mesh, which no other member has.
    pub on_mesh: &'a [IpAddr],
    /// All that it says are its own.
    pub claims: &'a [IpAddr],
    /// Addresses that links of this host have.
    pub on_host: &'a [IpAddr],
}

/// The address of each family by which this node is known to peers: one that the Node object has if a link of this host has it too, else one
/// on the mesh, else any of this host that peers accept.
pub fn choose(candidates: Candidates<'_>) -> Vec<OwnSource> {
    let Candidates { of_node, on_mesh, claims, on_host } = candidates;
    let claimed = || claims.iter().filter(|claim| of_node.contains(claim));
    let is_held = |claim: &&IpAddr| on_host.contains(claim);
    // Not the source addresses of egress gateways that the node announces: links of pods have these.
    let others = claims.iter().filter(is_held);
    let ordered: Vec<IpAddr> =
        claimed().filter(is_held).chain(on_mesh).chain(claimed()).chain(others).copied().collect();
    let of_family = |family| ordered.iter().copied().find(|address| IpFamily::of(*address) == family);
    let chosen = IpFamily::BOTH.into_iter().filter_map(of_family);
    chosen.map(|address| OwnSource { address, is_on_host: on_host.contains(&address) }).collect()
}

/// Families of which this host has addresses and of which none is among those that were chosen, although there are targets: peers drop what
/// the host sends to these.
pub fn missing<'a>(
    chosen: &[OwnSource],
    on_host: &[IpAddr],
    targets: impl Iterator<Item = &'a IpNet>,
) -> impl Iterator<Item = IpFamily> {
    let chosen: Vec<IpFamily> = chosen.iter().map(|source| IpFamily::of(source.address)).collect();
    let on_host: Vec<IpFamily> = on_host.iter().map(|address| IpFamily::of(*address)).collect();
    let targets: BTreeSet<IpFamily> = targets.map(|target| IpFamily::of(target.addr())).collect();
    targets.into_iter().filter(move |family| on_host.contains(family) && !chosen.contains(family))
}

/// The chain; `None` where no address is known that peers accept.
pub(super) fn chain(state: &MeshState) -> Option<Chain> {
    if state.bypass.own.is_empty() {
        return None;
    }
    let rules: Vec<Rule> =
        state.sources.iter().flat_map(|source| rules(&state.interface, source.address)).collect();
    (!rules.is_empty()).then_some(Chain { hook: Hook::NatPostrouting, priority: PRIORITY, rules })
}

fn rules(interface: &str, source: IpAddr) -> [Rule; 4] {
    let family = IpFamily::of(source);
    let (own, targets) = match family {
        IpFamily::V4 => (names::NFT_SET_OWN_IPV4, names::NFT_SET_IPV4),
        IpFamily::V6 => (names::NFT_SET_OWN_IPV6, names::NFT_SET_IPV6),
    };
    let bit = names::MARK_KUBE_PROXY_MASQUERADE;
    let masqueraded = Expression::mark_is(bit, bit);
    let absent = |set: &str| {
        [Expression::load_address(family, AddressEnd::Source), Expression::LookupAbsent(set.to_owned())]
    };
    let of_host = Expression::source_is_local().into_iter().chain(absent(own)).collect();
    let of_pod = vec![
        Expression::LoadMeta(Meta::InputInterfaceGroup),
        Expression::Compare(Comparison::Equal, names::LINK_GROUP_PODS.to_ne_bytes().to_vec()),
    ];
    let foreign = absent(own).into_iter().chain(absent(targets)).collect();
    let translate = [Expression::LoadConstant(octets(source)), Expression::SourceNat(family)];
    let keep = [Expression::Accept];
    let rules: [(Vec<Expression>, &[Expression]); 4] =
        [(masqueraded, &translate), (of_host, &translate), (of_pod, &keep), (foreign, &translate)];
    rules.map(|(which, effect)| {
        let mut expressions = vec![
            Expression::LoadMeta(Meta::OutputInterface),
            Expression::is_interface(interface),
            Expression::LoadMeta(Meta::NetworkProtocol),
            Expression::is_protocol(family),
        ];
        expressions.extend(which);
        expressions.extend(effect.iter().cloned());
        Rule(expressions)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn addresses(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn source(text: &str, is_on_host: bool) -> OwnSource {
        OwnSource { address: text.parse().unwrap(), is_on_host }
    }

    #[test]
    fn the_address_of_the_node_comes_before_others_that_peers_accept() {
        let of_node = addresses(&["192.0.2.9", "192.0.2.1", "2001:db8::1"]);
        let on_mesh = addresses(&["100.100.0.1", "fd00::1"]);
        let claims = addresses(&["198.51.100.7", "192.0.2.9", "192.0.2.1", "2001:db8::1"]);
        let on_host = addresses(&["203.0.113.1", "198.51.100.7", "192.0.2.1"]);
        let all = Candidates { of_node: &of_node, on_mesh: &on_mesh, claims: &claims, on_host: &on_host };
        // Each with whether a link of this host has it.
        let cases: [(Candidates<'_>, &[(&str, bool)]); 5] = [
            (all, &[("192.0.2.1", true), ("fd00::1", false)]),
            (
                Candidates { on_host: &[], on_mesh: &[], ..all },
                &[("192.0.2.9", false), ("2001:db8::1", false)],
            ),
            // Another member claims the address of the Node, too.
            (Candidates { of_node: &[], ..all }, &[("100.100.0.1", false), ("fd00::1", false)]),
            // The mesh leaves out addresses of Nodes.
            (Candidates { claims: &claims[..1], on_mesh: &[], ..all }, &[("198.51.100.7", true)]),
            (Candidates { claims: &claims[..1], on_mesh: &[], on_host: &[], ..all }, &[]),
        ];
        for (candidates, expected) in cases {
            let of = |(text, is_on_host): &(&str, bool)| source(text, *is_on_host);
            assert_eq!(choose(candidates), expected.iter().map(of).collect::<Vec<_>>(), "{candidates:?}");
        }
    }

    #[test]
    fn a_family_of_which_the_host_has_addresses_and_peers_accept_none_is_named() {
        let targets: Vec<IpNet> = ["10.1.0.0/16", "fd00:1::/64"].map(|it| it.parse().unwrap()).to_vec();
        let found = |chosen: &[&str], on_host: &[&str], targets: &[IpNet]| -> Vec<IpFamily> {
            let chosen: Vec<OwnSource> = chosen.iter().map(|text| source(text, true)).collect();
            missing(&chosen, &addresses(on_host), targets.iter()).collect()
        };
        let both = ["192.0.2.1", "2001:db8::1"];
        assert_eq!(found(&both, &both, &targets), []);
        assert_eq!(found(&["2001:db8::1"], &both, &targets), [IpFamily::V4]);
        assert_eq!(found(&["2001:db8::1"], &["2001:db8::1"], &targets), [], "a host without IPv4");
        assert_eq!(found(&[], &both, &targets[1..]), [IpFamily::V6]);
    }
}
