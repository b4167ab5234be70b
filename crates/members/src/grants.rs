//! Prefixes that `spec.grants` of the mesh lets members have. Pure.

use std::collections::BTreeMap;

use fairlead_api::resources::WireKubeMesh;
use fairlead_topology::Member;
use ipnet::IpNet;

use super::problem::SourceProblem;

/// The grants by the name of the member that each is for. What is no prefix is left out and named.
pub fn parse(mesh: &WireKubeMesh, problems: &mut Vec<SourceProblem>) -> BTreeMap<String, Vec<IpNet>> {
    let mut grants: BTreeMap<String, Vec<IpNet>> = BTreeMap::new();
    for grant in &mesh.spec.grants {
        let member = match (&grant.node, &grant.peer) {
            (Some(node), None) => Member::named(node).name,
            (None, Some(peer)) => Member::of_peer(peer).name,
            // The API server refuses it.
            _ => continue,
        };
        for entry in &grant.cidrs {
            match entry.parse::<IpNet>() {
                Ok(prefix) => grants.entry(member.clone()).or_default().push(prefix.trunc()),
                Err(_) => problems.push(SourceProblem::InvalidGrant {
                    mesh: mesh.metadata.name.clone().unwrap_or_default(),
                    entry: entry.clone(),
                }),
            }
        }
    }
    grants
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn grants_are_read_by_member_and_what_is_no_prefix_is_named() {
        let grants = json!([
            { "node": "n1", "cidrs": ["192.0.2.7/24", "nonsense"] },
            { "node": "n1", "cidrs": ["::/0"] },
            { "peer": "exit", "cidrs": ["0.0.0.0/0"] },
        ]);
        let spec = serde_json::from_value(json!({ "grants": grants })).unwrap();
        let mut problems = Vec::new();
        let grants = parse(&WireKubeMesh::new("default", spec), &mut problems);
        let read: Vec<(&str, Vec<String>)> = grants
            .iter()
            .map(|(member, prefixes)| (member.as_str(), prefixes.iter().map(ToString::to_string).collect()))
            .collect();
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect::<Vec<_>>();
        assert_eq!(read, [("n1", texts(&["192.0.2.0/24", "::/0"])), ("peer/exit", texts(&["0.0.0.0/0"]))]);
        let entry = "nonsense".to_owned();
        assert_eq!(problems, [SourceProblem::InvalidGrant { mesh: "default".to_owned(), entry }]);
    }
}
