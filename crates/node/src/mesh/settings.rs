//! The mesh as its resource describes it.

use fairlead_api::resources::WireKubeMesh;
use ipnet::IpNet;

use crate::members::SourceProblem;

/// A WireKubeMesh with defaults filled in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeshSettings {
    /// Name of the WireGuard device.
    pub interface: String,
    /// UDP port of every node that names no other.
    pub port: u16,
    /// Largest device MTU, in bytes.
    pub mtu: u32,
    /// Destinations that never enter the mesh.
    pub excluded: Vec<IpNet>,
    /// Whether nodes are reached at their own addresses through the mesh, as KubeSpan does; WireKube's
    /// `autoAllowedIPs.includeNodeInternalIP` says no when it is there and false.
    pub claim_node_addresses: bool,
}

impl MeshSettings {
    /// Reads the mesh resource; what does not parse is left out and added to `problems`.
    pub fn parse(mesh: &WireKubeMesh, problems: &mut Vec<SourceProblem>) -> Self {
        let spec = &mesh.spec;
        let mut excluded = Vec::new();
        for entry in spec.routing.iter().flat_map(|routing| &routing.exclude_cidrs) {
            match entry.parse() {
                Ok(prefix) => excluded.push(prefix),
                Err(_) => problems.push(SourceProblem::InvalidExcludedCidr {
                    mesh: mesh.metadata.name.clone().unwrap_or_default(),
                    entry: entry.clone(),
                }),
            }
        }
        let auto = spec.auto_allowed_ips.as_ref();
        Self {
            excluded,
            interface: spec.interface_name.clone(),
            port: spec.listen_port,
            mtu: u32::from(spec.mtu),
            claim_node_addresses: auto.is_none_or(|auto| auto.include_node_internal_ip),
        }
    }
}
