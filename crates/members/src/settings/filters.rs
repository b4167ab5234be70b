//! Filters of the endpoints that nodes publish and try.

use fairlead_address::{AddressFilter, EndpointFilters};
use fairlead_api::resources::WireKubeMesh;
use kube::ResourceExt;

use crate::SourceProblem;

/// The filters of the mesh. What is no entry is left out and added to `problems`.
pub(super) fn parse(mesh: &WireKubeMesh, problems: &mut Vec<SourceProblem>) -> EndpointFilters {
    let mut filter = |field, entries: &[String]| {
        let mut read = |entry: &String| {
            let problem = || SourceProblem::InvalidEndpointFilter {
                mesh: mesh.name_any(),
                field,
                entry: entry.clone(),
            };
            entry.parse().map_err(|_| problems.push(problem())).ok()
        };
        AddressFilter::new(entries.iter().filter_map(&mut read).collect::<Vec<_>>())
    };
    EndpointFilters {
        published: filter("endpointFilters", &mesh.spec.endpoint_filters),
        tried: filter("peerEndpointFilters", &mesh.spec.peer_endpoint_filters),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_malformed_entry_of_a_filter_is_named_and_the_others_count() {
        let spec = json!({ "endpointFilters": ["10.0.0.0/8", "nonsense", "!10.3.0.0/16"], "peerEndpointFilters": ["!"] });
        let mesh = WireKubeMesh::new("default", serde_json::from_value(spec).unwrap());
        let mut problems = Vec::new();
        let filters = parse(&mesh, &mut problems);
        let allowed =
            ["10.4.0.1", "10.3.0.1", "192.0.2.1"].map(|it| filters.published.allows(it.parse().unwrap()));
        assert_eq!(allowed, [true, false, false]);
        assert_eq!(filters.tried, AddressFilter::default());
        let messages: Vec<String> = problems.iter().map(ToString::to_string).collect();
        assert_eq!(messages.len(), 2);
        assert!(messages[0].contains("endpointFilters entry \"nonsense\""), "{messages:?}");
        assert!(messages[1].contains("peerEndpointFilters entry \"!\""), "{messages:?}");
    }
}
