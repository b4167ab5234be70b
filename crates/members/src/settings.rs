//! The mesh as its resource describes it.

mod discovery;
mod filters;
mod relay;
mod topology;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fairlead_address::{Endpoint, EndpointFilters};
use fairlead_api::names::STUN_PORT;
use fairlead_api::resources::{
    BirthdayAttack, DeletedPeer, Encapsulation, Granularity, LocalSubnetPolicy, RevokedPeer, Toggle,
    Topology, WireKubeMesh,
};
use fairlead_cluster::caches::Cache;
use fairlead_path::BirthdayPolicy;
use fairlead_relay::client;
use fairlead_topology::Source;
use ipnet::{IpNet, Ipv4Net};

pub use self::discovery::{ConfiguredDiscovery, DiscoverySettings};
use crate::departures::{Deletion, Revoked};
use crate::{SourceProblem, grants};

/// The WireGuard device of each node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceSettings {
    /// Name of the interface.
    pub interface: String,
    /// UDP port of every node that has no other.
    pub port: u16,
    /// Largest MTU, in bytes.
    pub mtu: u32,
}

/// Destinations in and outside of the mesh.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct RoutingSettings {
    /// Destinations that never enter the mesh.
    pub excluded: Vec<IpNet>,
    /// Whether what is in a network of this host is reached there, and not through the mesh.
    pub bypass_local_subnets: bool,
    /// Whether packets to nodes whose tunnels are down leave without a tunnel.
    pub bypasses_down_peers: bool,
    /// Whether nodes are reached at their own addresses through the mesh, as KubeSpan does; WireKube's
    /// `autoAllowedIPs.includeNodeInternalIP` says no when it is there and false.
    pub claim_node_addresses: bool,
    /// Whether the networks of pods that Nodes have (`spec.podCIDRs`) are in the mesh.
    pub includes_pod_networks: bool,
    /// Prefixes that administrators let members have, by the member's name.
    pub grants: BTreeMap<String, Vec<IpNet>>,
}

/// Ways through NATs.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TraversalSettings {
    /// STUN servers, in the order of the resource.
    pub stun_servers: Vec<Endpoint>,
    /// Whether gateways are asked to lead the port to this node.
    pub port_mapping: bool,
    /// Pairs of nodes that try many ports of a symmetric NAT.
    pub birthday: BirthdayPolicy,
}

/// Locations of nodes, and what goes between nodes of one.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LocationSettings {
    /// Granularity in use: between which nodes packets go without a tunnel.
    pub granularity: Granularity,
    /// Message of the controller about the granularity of `topology`, if that is not in use yet.
    pub waits: Option<String>,
    /// Encapsulation: which of these packets take IP tunnels.
    pub encapsulation: Encapsulation,
    /// Settings of `spec.topology`, which also say where nodes are.
    pub topology: Topology,
}

/// A WireKubeMesh with defaults filled in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MeshSettings {
    /// The device.
    pub device: DeviceSettings,
    /// Destinations.
    pub routing: RoutingSettings,
    /// Filters of the endpoints that are published, and of those that are tried.
    pub filters: EndpointFilters,
    /// Whether nodes publish the endpoints at which they see others.
    pub harvests_endpoints: bool,
    /// Ways through NATs.
    pub traversal: TraversalSettings,
    /// The relay, unless there is none or it is not to be used.
    pub relay: Option<RelaySettings>,
    /// Addresses and port at which the pods of the managed relay listen.
    pub relay_pods: Vec<SocketAddr>,
    /// The discovery services, if there are any.
    pub discovery: Option<DiscoverySettings>,
    /// Members that administrators revoked.
    pub revoked: Revoked,
    /// Deletions that the controller has seen.
    pub deleted: Vec<Deletion>,
    /// Locations.
    pub locations: LocationSettings,
    /// Network from which nodes have IPv4 addresses on the mesh.
    pub mesh_ipv4: Option<Ipv4Net>,
}

/// The relay of the mesh.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelaySettings {
    /// The relay.
    pub server: RelayServer,
    /// Whether everything is relayed.
    pub is_only: bool,
    /// Longest wait for a direct handshake.
    pub handshake_timeout: Duration,
    /// Longest time between attempts to find a direct path.
    pub direct_retry: Duration,
}

/// A relay, and what this node needs to connect to it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelayServer {
    /// Endpoint of the relay, with its transport.
    pub endpoint: client::Endpoint,
    /// PEM certificates of the authorities that certify it; those of this host when `None`.
    pub ca_bundle: Option<Vec<u8>>,
    /// The name in its certificate, if it is not the host of `endpoint`.
    pub server_name: Option<String>,
    /// Namespace and name of the Secret with the token.
    pub secret: Option<(String, String)>,
}

/// The WireKubeMesh that nodes follow.
pub fn selected(meshes: &Cache<WireKubeMesh>) -> Option<Arc<WireKubeMesh>> {
    WireKubeMesh::selected(&meshes.store.state()).cloned()
}

impl MeshSettings {
    /// Reads the mesh resource; what does not parse is left out and added to `problems`.
    pub fn parse(mesh: &WireKubeMesh, problems: &mut Vec<SourceProblem>) -> Self {
        let spec = &mesh.spec;
        // Problems are in the order of these.
        let excluded = excluded(mesh, problems);
        let stun_servers = stun_servers(mesh, problems);
        let topology = topology::parse(mesh, problems);
        let filters = filters::parse(mesh, problems);
        let routing = routing(mesh, excluded, problems);
        let traversal = spec.nat_traversal.as_ref();
        Self {
            device: DeviceSettings {
                interface: spec.interface_name.clone(),
                port: spec.listen_port,
                mtu: u32::from(spec.mtu),
            },
            routing,
            harvests_endpoints: spec.harvest_extra_endpoints,
            filters,
            traversal: TraversalSettings {
                stun_servers,
                port_mapping: traversal.is_none_or(|traversal| traversal.port_mapping == Toggle::Enabled),
                birthday: match traversal.and_then(|traversal| traversal.birthday_attack) {
                    Some(BirthdayAttack::Disabled) => BirthdayPolicy::Disabled,
                    Some(BirthdayAttack::Enabled) => BirthdayPolicy::Symmetric,
                    None => BirthdayPolicy::PortRestricted,
                },
            },
            relay: relay::parse(mesh, problems),
            relay_pods: relay::pods(mesh),
            discovery: discovery::parse(mesh, problems),
            revoked: revoked(mesh, problems),
            deleted: deleted(mesh),
            locations: LocationSettings {
                granularity: mesh.granularity(),
                waits: topology::waits(mesh),
                encapsulation: topology.encapsulation,
                topology,
            },
            // The API server has checked it.
            mesh_ipv4: spec.mesh_cidr.as_ref().and_then(|text| text.parse().ok()),
        }
    }
}

fn routing(mesh: &WireKubeMesh, excluded: Vec<IpNet>, problems: &mut Vec<SourceProblem>) -> RoutingSettings {
    let spec = &mesh.spec;
    let auto = spec.auto_allowed_ips.as_ref();
    let local = spec.routing.as_ref().and_then(|routing| routing.local_subnet_policy);
    RoutingSettings {
        excluded,
        bypass_local_subnets: local == Some(LocalSubnetPolicy::Bypass),
        bypasses_down_peers: spec.routing.as_ref().is_some_and(|routing| routing.allow_down_peer_bypass),
        claim_node_addresses: auto.is_none_or(|auto| auto.include_node_internal_ip.unwrap_or(false)),
        includes_pod_networks: mesh.includes_pod_networks(),
        grants: grants::parse(mesh, problems),
    }
}

fn excluded(mesh: &WireKubeMesh, problems: &mut Vec<SourceProblem>) -> Vec<IpNet> {
    let entries = mesh.spec.routing.iter().flat_map(|routing| &routing.exclude_cidrs);
    let mut excluded = Vec::new();
    for entry in entries {
        match entry.parse() {
            Ok(prefix) => excluded.push(prefix),
            Err(_) => problems.push(SourceProblem::InvalidExcludedCidr {
                mesh: mesh.metadata.name.clone().unwrap_or_default(),
                entry: entry.clone(),
            }),
        }
    }
    excluded
}

fn stun_servers(mesh: &WireKubeMesh, problems: &mut Vec<SourceProblem>) -> Vec<Endpoint> {
    let mut servers = Vec::new();
    for entry in &mesh.spec.stun_servers {
        match stun_server(entry) {
            Some(server) => servers.push(server),
            None => problems.push(SourceProblem::InvalidStunServer {
                mesh: mesh.metadata.name.clone().unwrap_or_default(),
                entry: entry.clone(),
            }),
        }
    }
    servers
}

/// Only the controller writes them.
fn deleted(mesh: &WireKubeMesh) -> Vec<Deletion> {
    let deletion = |peer: &DeletedPeer| {
        Some(Deletion {
            source: Source::Kubernetes,
            name: peer.name.clone(),
            public_key: peer.public_key.parse().ok()?,
            next_key: peer.next_public_key.as_ref().and_then(|key| key.parse().ok()),
        })
    };
    mesh.status.iter().flat_map(|status| &status.deleted_peers).filter_map(deletion).collect()
}

fn revoked(mesh: &WireKubeMesh, problems: &mut Vec<SourceProblem>) -> Revoked {
    let mut revoked = Revoked::default();
    for RevokedPeer { name, public_key } in &mesh.spec.revoked_peers {
        revoked.names.extend(name.clone());
        match public_key.as_ref().map(|key| key.parse()) {
            Some(Ok(key)) => drop(revoked.keys.insert(key)),
            Some(Err(_)) => problems.push(SourceProblem::InvalidRevokedKey {
                mesh: mesh.metadata.name.clone().unwrap_or_default(),
                value: public_key.clone().unwrap_or_default(),
            }),
            None => {}
        }
    }
    revoked
}

fn base64_bytes(text: &str) -> Result<Vec<u8>, String> {
    STANDARD.decode(text).map_err(|error| format!("is not base64: {error}"))
}

/// A STUN server as users write it: a `stun:` URI (RFC 7064) or host:port; the port may be left out.
fn stun_server(entry: &str) -> Option<Endpoint> {
    let entry = entry.strip_prefix("stun:").unwrap_or(entry);
    entry.parse().or_else(|_| format!("{entry}:{STUN_PORT}").parse()).ok()
}

#[cfg(test)]
mod tests {
    use fairlead_api::names::RELAY_SERVER_NAME;
    use serde_json::{Value, json};

    use super::*;

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
        let servers: Vec<String> = settings.traversal.stun_servers.iter().map(ToString::to_string).collect();
        let expected =
            ["a.example.com:19302", "b.example.com:3478", "[2001:db8::1]:3478", "[2001:db8::2]:3478"];
        assert_eq!(servers, expected);
        let entry = "http://x".to_owned();
        assert_eq!(problems, [SourceProblem::InvalidStunServer { mesh: "default".to_owned(), entry }]);
    }

    /// `spec.relay` with this external relay.
    fn relay(external: Value, others: Value) -> Value {
        let mut relay = json!({ "provider": "external", "external": external });
        relay.as_object_mut().unwrap().extend(others.as_object().unwrap().clone());
        relay
    }

    fn parsed(relay: &Value) -> (Option<RelaySettings>, Vec<SourceProblem>) {
        let spec = serde_json::from_value(json!({ "relay": relay })).unwrap();
        let mut problems = Vec::new();
        (MeshSettings::parse(&WireKubeMesh::new("default", spec), &mut problems).relay, problems)
    }

    #[test]
    fn a_relay_is_read_as_users_write_it() {
        for (external, endpoint) in [
            (json!({ "endpoint": "relay.example:3478" }), "tcp://relay.example:3478"),
            (json!({ "endpoint": "relay.example", "transport": "wss" }), "wss://relay.example:443"),
            (json!({ "endpoint": "wss://relay.example/", "transport": "wss" }), "wss://relay.example:443"),
            (json!({ "endpoint": "ws://[2001:db8::1]:80" }), "ws://[2001:db8::1]:80"),
        ] {
            let (settings, problems) = parsed(&relay(external, json!({ "mode": "always" })));
            let settings = settings.unwrap();
            assert_eq!((settings.server.endpoint.to_string().as_str(), problems), (endpoint, vec![]));
            assert!(settings.is_only);
        }
        let settings = parsed(&relay(
            json!({ "endpoint": "a:1", "authSecretRef": { "name": "token" } }),
            json!({ "handshakeTimeoutSeconds": 7, "directRetryIntervalSeconds": 60 }),
        ));
        let settings = settings.0.unwrap();
        assert_eq!(settings.server.secret, Some(("kube-system".to_owned(), "token".to_owned())));
        assert_eq!((settings.handshake_timeout.as_secs(), settings.direct_retry.as_secs()), (7, 60));
    }

    #[test]
    fn a_relay_that_cannot_be_used_is_named_and_none_is_used() {
        for (external, field, words) in [
            (json!({ "endpoint": "relay.example" }), "spec.relay.external.endpoint", "tcp://relay.example"),
            (
                json!({ "endpoint": "ws://a:1", "transport": "wss" }),
                "spec.relay.external.endpoint",
                "contradicts",
            ),
            (json!({ "endpoint": "a:1", "caBundle": "?" }), "spec.relay.external.caBundle", "base64"),
            (
                json!({ "endpoint": "a:1", "caBundle": "bm9uZQ==" }),
                "spec.relay.external.caBundle",
                "no certificate",
            ),
        ] {
            let (settings, problems) = parsed(&relay(external, json!({})));
            let [SourceProblem::InvalidRelay { field: found, error, .. }] = &problems[..] else {
                panic!("{problems:?}")
            };
            assert_eq!((settings, *found), (None, field));
            assert!(error.contains(words), "{error}");
        }
        let never = parsed(&relay(json!({ "endpoint": "a:1" }), json!({ "mode": "never" })));
        assert_eq!(never, (None, vec![]));
    }

    fn managed(transport: &str, status: &Value) -> (MeshSettings, Vec<SourceProblem>) {
        let relay = json!({ "provider": "managed", "managed": { "transport": transport } });
        let mesh = json!({
            "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubeMesh", "metadata": { "name": "default" },
            "spec": { "relay": relay }, "status": status,
        });
        let mut problems = Vec::new();
        (MeshSettings::parse(&serde_json::from_value(mesh).unwrap(), &mut problems), problems)
    }

    #[test]
    fn a_managed_relay_is_used_where_the_status_says_it_is() {
        let made = rcgen::generate_simple_self_signed([RELAY_SERVER_NAME.to_owned()]).unwrap();
        let bundle = STANDARD.encode(made.cert.pem());
        let status = json!({
            "relayEndpoint": "[2001:db8::1]:30478", "relayCABundle": bundle,
            "relayPodIPs": ["10.64.0.9", "fd02::9", "rubbish"],
        });
        let (settings, problems) = managed("wss", &status);
        let relay = settings.relay.unwrap().server;
        assert_eq!((relay.endpoint.to_string().as_str(), problems), ("wss://[2001:db8::1]:30478", vec![]));
        assert_eq!((relay.server_name.as_deref(), relay.secret), (Some(RELAY_SERVER_NAME), None));
        assert_eq!(relay.ca_bundle, Some(made.cert.pem().into_bytes()));
        let pods: Vec<String> = settings.relay_pods.iter().map(ToString::to_string).collect();
        assert_eq!(pods, ["10.64.0.9:3478", "[fd02::9]:3478"]);
        for missing in ["relayEndpoint", "relayCABundle"] {
            let mut status = status.clone();
            status.as_object_mut().unwrap().remove(missing);
            let (settings, problems) = managed("tcp", &status);
            assert_eq!((settings.relay, problems), (None, vec![]), "it is not there yet");
        }
        assert_eq!(managed("ws", &status).0.relay, None, "the relay speaks TLS");
    }

    #[test]
    fn a_status_that_cannot_be_used_is_named() {
        for (endpoint, bundle, field) in
            [("nowhere", "bm9uZQ==", "status.relayEndpoint"), ("a:1", "?", "status.relayCABundle")]
        {
            let status = json!({ "relayEndpoint": endpoint, "relayCABundle": bundle });
            let (settings, problems) = managed("tcp", &status);
            let [SourceProblem::InvalidRelay { field: found, .. }] = &problems[..] else {
                panic!("{problems:?}")
            };
            assert_eq!((settings.relay, *found), (None, field));
        }
    }
}
