//! The prefixes of a NAT64 that are used, of those that the resolver says.

use std::net::IpAddr;

use fairlead_address::PrefixSet;
use fairlead_path::Nat64;
use ipnet::{IpNet, Ipv4Net};

use crate::model::inputs::Inputs;
use crate::model::nat64::Nat64Answer;
use crate::model::problem::MeshProblem;

/// Most prefixes that are used.
const MAX_PREFIXES: usize = 4;

/// NAT64 by which this node reaches IPv4 endpoints, and problems for answers of the resolver that are not used: prefixes in which pods,
/// Services, nodes or this host have addresses.
pub(super) fn usable(inputs: &Inputs, own: &[IpAddr], ipv4_routes: &[Ipv4Net]) -> (Nat64, Vec<MeshProblem>) {
    let Nat64Answer { prefixes, refused } = &inputs.network.nat64;
    let ipv4_routes = ipv4_routes.to_vec();
    if prefixes.is_empty() && refused.is_empty() {
        return (Nat64 { prefixes: Vec::new(), ipv4_routes }, Vec::new());
    }
    let mesh: PrefixSet = inputs
        .members
        .iter()
        .flat_map(|member| member.blocks.iter().chain(&member.claims).chain(&member.pod_networks))
        .chain(&inputs.services)
        .collect();
    let own: PrefixSet = own.iter().copied().map(IpNet::from).collect();
    let mut problems: Vec<MeshProblem> = refused
        .iter()
        .map(|(address, reason)| MeshProblem::Nat64Refused {
            answer: address.to_string(),
            reason: reason.to_string(),
        })
        .collect();
    let mut used = Vec::new();
    for prefix in prefixes {
        let network = IpNet::V6(prefix.network());
        let reason = if mesh.overlapping(network).is_some() {
            "pods, Services or nodes of the mesh have addresses in it"
        } else if own.overlapping(network).is_some() {
            "this node has an address in it"
        } else if used.len() >= MAX_PREFIXES {
            "there are too many"
        } else {
            used.push(*prefix);
            continue;
        };
        problems.push(MeshProblem::Nat64Refused { answer: prefix.to_string(), reason: reason.to_owned() });
    }
    (Nat64 { prefixes: used, ipv4_routes }, problems)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::desired::tests::{inputs, member};

    fn read(addresses: &[&str]) -> Nat64Answer {
        Nat64Answer::read(addresses.iter().map(|text| text.parse().unwrap()))
    }

    #[test]
    fn a_prefix_of_pods_or_nodes_and_what_is_none_is_named_and_not_used() {
        let mut owner = member(2);
        owner.blocks = vec!["2001:db8:a::/64".parse().unwrap()];
        owner.claims.push("2001:db8:b::7/128".parse().unwrap());
        let used = |answer: &[&str]| {
            let mut inputs = inputs([member(1), owner.clone()]);
            inputs.network.nat64 = read(answer);
            let (nat64, problems) = usable(&inputs, &["2001:db8:c::1".parse().unwrap()], &[]);
            let prefixes: Vec<String> = nat64.prefixes.iter().map(ToString::to_string).collect();
            (prefixes, problems.iter().map(ToString::to_string).collect::<Vec<_>>())
        };
        let cases = [
            ("2001:db8:a::192.0.0.170", "pods, Services or nodes of the mesh have addresses in it"),
            ("2001:db8:c000:aa::", "pods, Services or nodes of the mesh have addresses in it"),
            ("2001:db8:c::192.0.0.170", "this node has an address in it"),
            ("::1", "it contains no IPv4 address of ipv4only.arpa"),
        ];
        for (answer, reason) in cases {
            let (prefixes, problems) = used(&[answer, "64:ff9b::192.0.0.170"]);
            assert_eq!((prefixes, problems.len()), (vec!["64:ff9b::/96".to_owned()], 1), "{answer}");
            assert!(problems[0].contains(reason), "{problems:?}");
        }
        let many: Vec<String> = (0..9).map(|site| format!("2001:db8:64:{site}::192.0.0.170")).collect();
        let (prefixes, problems) = used(&many.iter().map(String::as_str).collect::<Vec<_>>());
        assert_eq!((prefixes.len(), problems.len()), (MAX_PREFIXES, 9 - MAX_PREFIXES));
    }
}
