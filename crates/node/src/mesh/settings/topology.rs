//! Which packets take tunnels.

use fairlead_api::resources::{Encapsulation, Granularity, Topology, WireKubeMesh};

use crate::members::SourceProblem;

pub(super) fn parse(mesh: &WireKubeMesh, problems: &mut Vec<SourceProblem>) -> (Granularity, Encapsulation) {
    let Topology { granularity, encapsulation } = mesh.spec.topology.clone().unwrap_or_default();
    if granularity == Granularity::Full && encapsulation != Encapsulation::Never {
        let mesh = mesh.metadata.name.clone().unwrap_or_default();
        problems.push(SourceProblem::EncapsulationWithoutEffect { mesh });
    }
    (granularity, encapsulation)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn ip_tunnels_in_a_mesh_without_locations_are_a_problem() {
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
    }
}
