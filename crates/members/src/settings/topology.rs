//! Topology of the mesh: which packets take tunnels.

use fairlead_api::resources::{Encapsulation, GRANULARITY_IN_USE, Granularity, Topology, WireKubeMesh};

use crate::SourceProblem;

pub(super) fn parse(mesh: &WireKubeMesh, problems: &mut Vec<SourceProblem>) -> Topology {
    let topology = mesh.spec.topology.clone().unwrap_or_default();
    let name = || mesh.metadata.name.clone().unwrap_or_default();
    let given = [
        ("spec.topology.encapsulation", topology.encapsulation != Encapsulation::Never),
        ("spec.topology.internalCIDRs", !topology.internal_cidrs.is_empty()),
        ("spec.topology.label", topology.label.is_some()),
    ];
    if topology.granularity == Granularity::Full {
        let without_effect = given.into_iter().filter(|(_, is_given)| *is_given);
        problems.extend(
            without_effect.map(|(field, _)| SourceProblem::TopologyWithoutEffect { mesh: name(), field }),
        );
    }
    // The API server refuses both; its definition may be an older one.
    let label = topology.label.iter().filter(|label| !Topology::may_be_location(label));
    problems.extend(label.map(|label| SourceProblem::InvalidTopology {
        mesh: name(),
        field: "spec.topology.label",
        entry: label.clone(),
    }));
    let (_, unreadable) = topology.internal_prefixes().unwrap_or_default();
    problems.extend(unreadable.into_iter().map(|entry| SourceProblem::InvalidTopology {
        mesh: name(),
        field: "spec.topology.internalCIDRs",
        entry: entry.to_owned(),
    }));
    topology
}

/// Message of the controller about nodes that have not prepared for the granularity of the spec; `None` if that is in
/// use.
pub(super) fn waits(mesh: &WireKubeMesh) -> Option<String> {
    let mut conditions = mesh.status.iter().flat_map(|status| &status.conditions);
    let waits = conditions.find(|it| it.type_ == GRANULARITY_IN_USE && it.status == "False")?;
    (mesh.granularity() != mesh.wanted_granularity()).then(|| waits.message.clone())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn what_has_no_effect_in_a_mesh_without_locations_is_a_problem() {
        let reasons = |topology| {
            let spec = serde_json::from_value(json!({ "topology": topology })).unwrap();
            let mut problems = Vec::new();
            parse(&WireKubeMesh::new("default", spec), &mut problems);
            problems.iter().map(SourceProblem::reason).collect::<Vec<_>>()
        };
        assert_eq!(reasons(json!({ "encapsulation": "always" })), ["EncapsulationWithoutEffect"]);
        let cross = json!({ "granularity": "cross", "encapsulation": "crosssubnet" });
        assert_eq!(reasons(cross), Vec::<&str>::new());
        assert_eq!(reasons(json!({ "encapsulation": "never" })), Vec::<&str>::new());
        let zones = |granularity: &str, label: &str| {
            reasons(json!({ "granularity": granularity, "label": label, "internalCIDRs": ["10.0.0.0/8"] }))
        };
        assert_eq!(zones("cross", "topology.kubernetes.io/zone"), Vec::<&str>::new());
        assert_eq!(
            zones("full", "topology.kubernetes.io/zone"),
            ["LocationWithoutEffect", "LocationWithoutEffect"]
        );
        assert_eq!(zones("cross", "example.com/site"), ["InvalidTopology"]);
        assert_eq!(
            reasons(json!({ "granularity": "cross", "internalCIDRs": ["x", "10.0.0.0/8"] })),
            ["InvalidTopology"]
        );
    }
}
