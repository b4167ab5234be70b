//! The mesh as its resource describes it.

use fairlead_address::Endpoint;
use fairlead_api::names::STUN_PORT;
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
    /// STUN servers, in the order of the resource.
    pub stun_servers: Vec<Endpoint>,
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
        let mut stun_servers = Vec::new();
        for entry in &spec.stun_servers {
            match stun_server(entry) {
                Some(server) => stun_servers.push(server),
                None => problems.push(SourceProblem::InvalidStunServer {
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
            stun_servers,
        }
    }
}

/// A STUN server as users write it: a `stun:` URI (RFC 7064) or host:port; the port may be left out.
fn stun_server(entry: &str) -> Option<Endpoint> {
    let entry = entry.strip_prefix("stun:").unwrap_or(entry);
    entry.parse().or_else(|_| format!("{entry}:{STUN_PORT}").parse()).ok()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fairlead_api::resources::not_implemented::WIREKUBE_MESH;
    use serde_json::json;

    use super::*;
    use crate::pod_network::desired::masquerade;
    use crate::spec_fields::assert_each_is_read_or_listed;

    #[test]
    fn stun_servers_are_read_as_users_write_them_and_others_named() {
        let entries = [
            "stun:a.example.com:19302",
            "b.example.com",
            "stun:[2001:db8::1]:3478",
            "[2001:db8::2]",
            "http://x",
        ];
        let spec = serde_json::from_value(json!({ "stunServers": entries })).unwrap();
        let mut problems = Vec::new();
        let settings = MeshSettings::parse(&WireKubeMesh::new("default", spec), &mut problems);
        let servers: Vec<String> = settings.stun_servers.iter().map(ToString::to_string).collect();
        let expected =
            ["a.example.com:19302", "b.example.com:3478", "[2001:db8::1]:3478", "[2001:db8::2]:3478"];
        assert_eq!(servers, expected);
        let entry = "http://x".to_owned();
        assert_eq!(problems, [SourceProblem::InvalidStunServer { mesh: "default".to_owned(), entry }]);
    }

    #[test]
    fn every_field_is_read_or_listed_as_not_implemented() {
        let pool = json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "AddressPool", "metadata": { "name": "default" },
            "spec": { "subnets": [{ "ipv4": "10.64.0.0/16" }] },
        });
        let pools = [Arc::new(serde_json::from_value(pool).unwrap())];
        let read = |spec| {
            let mesh = WireKubeMesh::new("default", serde_json::from_value(spec).unwrap());
            (MeshSettings::parse(&mesh, &mut Vec::new()), masquerade(&pools, Some(&mesh), Vec::new()))
        };
        let samples = [
            ("spec.listenPort", json!(51821)),
            ("spec.interfaceName", json!("wg9")),
            ("spec.mtu", json!(1400)),
            ("spec.masquerade", json!(false)),
            ("spec.nonMasqueradeCIDRs", json!(["192.0.2.0/24"])),
            ("spec.autoAllowedIPs.includeNodeInternalIP", json!(false)),
            ("spec.routing.excludeCIDRs", json!(["192.0.2.0/24"])),
            ("spec.stunServers", json!(["a.example.com:3478", "b.example.com:3478"])),
        ];
        let without_effect = json!({
            "apiServerURL": "https://192.0.2.1:6443",
            "meshCIDR": "100.64.0.0/16",
            "natTraversal": { "birthdayAttack": "enabled", "handshakeValidWindowSeconds": 60 },
            "relay": { "mode": "always", "provider": "external", "external": { "endpoint": "relay.example.com:3478" } },
            "routing": { "localSubnetPolicy": "bypass" },
        });
        assert_each_is_read_or_listed::<WireKubeMesh, _>(
            Some(&WIREKUBE_MESH),
            read,
            &samples,
            &without_effect,
        );
    }
}
