//! The WireGuard peers of one member, computed from objects of the cluster as every node computes them: what `fairlead showconf` prints.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::Duration;

use fairlead_address::{Endpoint, PrefixSet};
use fairlead_api::resources::{AddressBlock, WireKubeMesh, WireKubePeer};
use fairlead_keys::{PresharedKey, PublicKey};
use fairlead_topology::{Member, MemberRecord, PeerPlan, Policy, Source, merge, plan};
use ipnet::IpNet;
use kube::api::DynamicObject;

use super::cached_peer::CachedPeer;
use super::external_peers::CachedExternalPeer;
use super::grants;
use crate::cached_block::CachedBlock;

/// Objects of the cluster.
#[derive(Debug, Clone, Default)]
pub struct Objects {
    /// Nodes, each as the WireKubePeer of its name.
    pub peers: Vec<WireKubePeer>,
    /// Blocks of the nodes.
    pub blocks: Vec<AddressBlock>,
    /// Peers of Kilo.
    pub external: Vec<DynamicObject>,
    /// The mesh; `None` where there is none.
    pub mesh: Option<WireKubeMesh>,
}

impl Objects {
    /// Policy by which `own` sees the members. What is wrong with the mesh itself is for the nodes to report.
    fn policy(&self, own: &str) -> Policy {
        let grants = self.mesh.as_ref().map(|mesh| grants::parse(mesh, &mut Vec::new()));
        let includes_pod_networks = self.mesh.as_ref().is_some_and(WireKubeMesh::includes_pod_networks);
        Policy { grants: grants.unwrap_or_default(), includes_pod_networks, ..Policy::new(own) }
    }
}

/// Member whose peers are wanted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject<'a> {
    /// Node of this name, whose peers are other nodes and Peers.
    Node(&'a str),
    /// Peer of this name, whose peers are nodes.
    Peer(&'a str),
}

/// WireGuard peers that the subject configures.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Configuration {
    /// Peers of the subject, sorted by name.
    pub peers: Vec<ConfiguredPeer>,
    /// Parts of the subject that are left out, and why, one sentence each.
    pub problems: Vec<String>,
}

/// One peer.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ConfiguredPeer {
    /// Name of the node or Peer.
    pub name: String,
    /// WireGuard public key of the peer.
    pub public_key: PublicKey,
    /// Extra symmetric key of the two.
    pub preshared_key: Option<PresharedKey>,
    /// Prefixes that it may send from and is sent for.
    pub allowed_ips: Vec<IpNet>,
    /// Endpoint at which it listens; `None` if it has to initiate.
    pub endpoint: Option<String>,
    /// Seconds between keepalives; zero sends none.
    pub persistent_keepalive: u16,
}

impl Configuration {
    /// Takes the addresses that the tunnels go to out of what the tunnels carry: to a system that routes all allowed IPs into the tunnel,
    /// as `wg-quick` does, the packets of WireGuard itself would not leave.
    #[must_use]
    pub fn without_endpoints(mut self, endpoints: impl IntoIterator<Item = IpAddr>) -> Self {
        let endpoints: Vec<IpNet> = endpoints.into_iter().map(IpNet::from).collect();
        let endpoints: PrefixSet = endpoints.iter().collect();
        for peer in &mut self.peers {
            peer.allowed_ips = cut(&peer.allowed_ips, &endpoints);
        }
        self
    }
}

/// The fewest prefixes that cover those without the holes.
fn cut(prefixes: &[IpNet], holes: &PrefixSet) -> Vec<IpNet> {
    prefixes.iter().collect::<PrefixSet>().subtract(holes).prefixes().collect()
}

/// The one peer of a Peer that reaches the whole cluster through the entry node `entry`; `None` if there is no such Peer. `more` is what it
/// sends there beside the addresses of nodes and pods: pools, Services.
pub fn through_entry(objects: &Objects, peer: &str, entry: &str, more: &[IpNet]) -> Option<Configuration> {
    let external: Vec<CachedExternalPeer> = objects.external.iter().map(CachedExternalPeer::new).collect();
    let subject = external.iter().find(|external| external.name() == peer)?;
    let (own_member, unread) = subject.resolved(None);
    let mut problems: Vec<String> = unread.iter().map(ToString::to_string).collect();
    let members = members(objects.peers.clone(), objects.blocks.clone(), &external);
    let own = Member::of_peer(peer).name;
    let Some((subject, key)) = own_member.as_ref().and_then(|member| Some((member, member.public_key?)))
    else {
        return Some(Configuration { peers: Vec::new(), problems });
    };
    // As the entry node sees it while the Peer is there.
    let at_entry = plan(&members, &Policy { entry_terms: [(key, u64::MAX)].into(), ..objects.policy(entry) });
    let about_own = at_entry.problems.iter().filter(|problem| problem.nodes().contains(&own.as_str()));
    problems.extend(about_own.map(ToString::to_string));
    let node = members.iter().find(|member| member.name == entry && member.external.is_none());
    let Some((node, public_key)) = node.and_then(|node| Some((node, node.public_key?))) else {
        problems.push(format!("node '{entry}' has no WireKubePeer with a public key: is the name right?"));
        return Some(Configuration { peers: Vec::new(), problems });
    };
    let Some(planned) = at_entry.peers.get(&key).filter(|planned| planned.members.contains(&own)) else {
        return Some(Configuration { peers: Vec::new(), problems });
    };
    let all: Vec<IpNet> =
        prefixes_of_nodes(&members, &objects.policy("")).chain(more.iter().copied()).collect();
    let endpoint = node.endpoints.manual.clone().or(node.endpoints.preferred.map(Endpoint::Address));
    let configured = ConfiguredPeer {
        name: entry.to_owned(),
        public_key,
        preshared_key: subject.external.as_ref().and_then(|external| external.preshared_key),
        allowed_ips: cut(&all, &planned.allowed_ips.iter().collect()),
        endpoint: endpoint.map(|endpoint| endpoint.to_string()),
        persistent_keepalive: subject.keepalive.interval.unwrap_or_default(),
    };
    if configured.endpoint.is_none() {
        problems.push(format!("node '{entry}' publishes no endpoint: the Peer has to be reached from there"));
    }
    Some(Configuration { peers: vec![configured], problems })
}

/// Prefixes of all nodes, without those of Peers.
fn prefixes_of_nodes(members: &[Member], policy: &Policy) -> impl Iterator<Item = IpNet> + use<> {
    plan(&of_nodes(members), policy).peers.into_values().flat_map(|peer| peer.allowed_ips.clone())
}

fn of_nodes(members: &[Member]) -> Vec<Member> {
    members.iter().filter(|member| member.external.is_none()).cloned().collect()
}

/// Peer that others configure for the subject itself; `None` if there is no such object, or it has no key. A node has its own prefixes, or,
/// where it stands for the whole cluster, those of all nodes and `more`.
pub fn as_peer(
    objects: Objects,
    subject: Subject<'_>,
    is_whole: bool,
    more: &[IpNet],
) -> Option<ConfiguredPeer> {
    let external: Vec<CachedExternalPeer> = objects.external.iter().map(CachedExternalPeer::new).collect();
    let policy = objects.policy("");
    let members = members(objects.peers, objects.blocks, &external);
    let name = match subject {
        Subject::Node(name) => Member::named(name).name,
        Subject::Peer(name) => Member::of_peer(name).name,
    };
    let member = members.iter().find(|member| member.name == name)?;
    let public_key = member.public_key?;
    let own: Vec<IpNet> = match subject {
        Subject::Node(_) if is_whole => {
            prefixes_of_nodes(&members, &policy).chain(more.iter().copied()).collect()
        }
        Subject::Node(_) => {
            let planned = plan(&of_nodes(&members), &policy).peers.remove(&public_key);
            planned.iter().flat_map(|planned| &planned.allowed_ips).chain(more).copied().collect()
        }
        Subject::Peer(_) => member.claims.iter().chain(more).copied().collect(),
    };
    let preferred = member.endpoints.preferred.map(Endpoint::Address);
    Some(ConfiguredPeer {
        name: member.peer_name().unwrap_or(&member.name).to_owned(),
        public_key,
        preshared_key: member.external.as_ref().and_then(|external| external.preshared_key),
        allowed_ips: cut(&own, &PrefixSet::default()),
        endpoint: member.endpoints.manual.clone().or(preferred).map(|endpoint| endpoint.to_string()),
        persistent_keepalive: member.external.as_ref().and(member.keepalive.interval).unwrap_or_default(),
    })
}

/// The names of the entry nodes of a Peer; empty if it has a tunnel with every node, or cannot be read.
pub fn entry_nodes(peer: &DynamicObject) -> Vec<String> {
    let peer = CachedExternalPeer::new(peer);
    let external = peer.described().and_then(|member| member.external.as_ref());
    external.map(|external| external.entry_nodes.clone()).unwrap_or_default()
}

/// The peers of `subject`; `None` if there is no such object. A Peer with entry nodes has none here: see [`through_entry`].
pub fn configuration(objects: Objects, subject: Subject<'_>) -> Option<Configuration> {
    let external: Vec<CachedExternalPeer> = objects.external.iter().map(CachedExternalPeer::new).collect();
    let exists = match subject {
        Subject::Node(name) => objects.peers.iter().any(|peer| peer.metadata.name.as_deref() == Some(name)),
        Subject::Peer(name) => external.iter().any(|peer| peer.name() == name),
    };
    if !exists {
        return None;
    }
    let unread = external.iter().filter(|peer| subject == Subject::Peer(peer.name()));
    let mut problems: Vec<String> =
        unread.flat_map(|peer| peer.resolved(None).1).map(|problem| problem.to_string()).collect();
    let own = match subject {
        Subject::Node(name) => Member::named(name).name,
        Subject::Peer(name) => Member::of_peer(name).name,
    };
    // A Peer is planned as its nodes see it: what others own goes before its claims.
    let policy = objects.policy(if matches!(subject, Subject::Node(_)) { &own } else { "" });
    let members = members(objects.peers, objects.blocks, &external);
    let plan = plan(&members, &policy);
    let about_own = plan.problems.iter().filter(|problem| problem.nodes().contains(&own.as_str()));
    problems.extend(about_own.map(ToString::to_string));
    let by_name: BTreeMap<&str, &Member> =
        members.iter().map(|member| (member.name.as_str(), member)).collect();
    let subject = by_name.get(own.as_str()).copied();
    // One whose key is another's gets no tunnel.
    let is_left_out = subject.is_none_or(|subject| {
        subject.external.is_some() && !plan.peers.values().any(|peer| peer.members.contains(&own))
    });
    let planned = plan.peers.iter().filter(|_| !is_left_out);
    let peers = planned.filter_map(|(key, planned)| peer(*key, planned, subject?, &by_name));
    let mut peers: Vec<ConfiguredPeer> = peers.collect();
    peers.sort_by(|a, b| a.name.cmp(&b.name));
    Some(Configuration { peers, problems })
}

fn members(
    peers: Vec<WireKubePeer>,
    blocks: Vec<AddressBlock>,
    external: &[CachedExternalPeer],
) -> Vec<Member> {
    let peers = peers.into_iter().map(|peer| CachedPeer::new(peer, "").member().clone());
    let blocks = blocks.into_iter().map(|block| {
        let block = CachedBlock::new(block, "");
        let existing = block.existing();
        Member { blocks: existing.nets.iter().collect(), ..Member::named(&existing.node) }
    });
    let blocks = blocks.filter(|member| !member.name.is_empty());
    let external = external.iter().filter_map(|peer| peer.resolved(None).0);
    let record = |member| MemberRecord { age: Duration::ZERO, source: Source::Kubernetes, member };
    merge(peers.chain(blocks).chain(external).map(record).collect())
}

fn peer(
    public_key: PublicKey,
    planned: &PeerPlan,
    subject: &Member,
    by_name: &BTreeMap<&str, &Member>,
) -> Option<ConfiguredPeer> {
    let member = planned.members.iter().find_map(|name| by_name.get(name.as_str()).copied())?;
    // Peers have tunnels with nodes only.
    if member.name == subject.name || (member.external.is_some() && subject.external.is_some()) {
        return None;
    }
    let endpoints = &member.endpoints;
    let preferred = endpoints.preferred.map(Endpoint::Address);
    // A Peer's settings count for its tunnels, on both sides.
    let settings = if subject.external.is_some() { subject } else { member };
    Some(ConfiguredPeer {
        name: member.peer_name().unwrap_or(&member.name).to_owned(),
        public_key,
        preshared_key: settings.external.as_ref().and_then(|external| external.preshared_key),
        allowed_ips: planned.allowed_ips.clone(),
        endpoint: endpoints.manual.clone().or(preferred).map(|endpoint| endpoint.to_string()),
        persistent_keepalive: settings.keepalive.interval.unwrap_or(planned.keepalive),
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn key(byte: u8) -> String {
        PublicKey([byte; 32]).to_string()
    }

    fn node(name: &str, number: u8) -> WireKubePeer {
        serde_json::from_value(json!({
            "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer",
            "metadata": { "name": name, "uid": name, "creationTimestamp": "1970-01-01T00:00:01Z" },
            "spec": {
                "publicKey": key(number), "allowedIPs": [format!("192.0.2.{number}/32")],
                "endpoint": format!("203.0.113.{number}:51820"),
            },
            "status": {
                "endpointDiscoveryMethod": "stun", "natType": "cone",
                "node": { "internalIPs": [format!("192.0.2.{number}")] },
            },
        }))
        .unwrap()
    }

    fn block(node: &str, ipv4: &str) -> AddressBlock {
        serde_json::from_value(json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "AddressBlock", "index": 0, "ipv4": ipv4,
            "metadata": { "name": format!("b-{node}"), "labels": { "coil.cybozu.com/node": node, "coil.cybozu.com/pool": "default" } },
        }))
        .unwrap()
    }

    fn external(name: &str, number: u8, allowed_ips: &[&str]) -> DynamicObject {
        serde_json::from_value(json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer",
            "metadata": { "name": name, "uid": name, "creationTimestamp": "1970-01-01T00:00:02Z" },
            "spec": {
                "publicKey": key(number), "presharedKey": key(77), "allowedIPs": allowed_ips, "persistentKeepalive": 10,
            },
        }))
        .unwrap()
    }

    fn objects() -> Objects {
        Objects {
            peers: vec![node("a", 1), node("b", 2)],
            blocks: vec![block("a", "10.64.0.0/27"), block("b", "10.64.0.32/27")],
            external: vec![
                external("laptop", 3, &["10.9.0.1/32", "10.64.0.32/27"]),
                external("phone", 4, &["10.9.0.2/32"]),
                external("copy", 1, &["10.9.0.3/32"]),
            ],
            mesh: None,
        }
    }

    fn names(configuration: &Configuration) -> Vec<&str> {
        configuration.peers.iter().map(|peer| peer.name.as_str()).collect()
    }

    #[test]
    fn a_peer_has_all_nodes_with_its_own_settings() {
        let laptop = configuration(objects(), Subject::Peer("laptop")).unwrap();
        assert_eq!(names(&laptop), ["a", "b"]);
        let b = &laptop.peers[1];
        assert_eq!(b.allowed_ips, ["10.64.0.32/27", "192.0.2.2/32"].map(|text| text.parse().unwrap()));
        assert_eq!(b.endpoint.as_deref(), Some("203.0.113.2:51820"));
        assert_eq!((b.preshared_key, b.persistent_keepalive), (Some(PresharedKey([77; 32])), 10));
        let [problem] = &laptop.problems[..] else { panic!("{:?}", laptop.problems) };
        assert!(problem.contains("10.64.0.32/27"), "{problem}");
    }

    #[test]
    fn a_default_route_is_printed_where_the_mesh_grants_it() {
        let elsewhere: IpAddr = "198.51.100.7".parse().unwrap();
        let exit = |mesh| {
            let external = vec![external("exit", 5, &["0.0.0.0/0"])];
            let found = configuration(Objects { external, mesh, ..objects() }, Subject::Node("a")).unwrap();
            let exit = found.peers.into_iter().find(|peer| peer.name == "exit");
            exit.is_some_and(|peer| peer.allowed_ips.iter().any(|prefix| prefix.contains(&elsewhere)))
        };
        let grants = json!({ "grants": [{ "peer": "exit", "cidrs": ["0.0.0.0/0"] }] });
        let mesh = WireKubeMesh::new("default", serde_json::from_value(grants).unwrap());
        assert!(!exit(None));
        assert!(exit(Some(mesh)));
    }

    #[test]
    fn a_node_has_the_other_nodes_and_the_peers() {
        let a = configuration(objects(), Subject::Node("a")).unwrap();
        assert_eq!(names(&a), ["b", "laptop", "phone"]);
        let laptop = &a.peers[1];
        assert_eq!(laptop.allowed_ips, ["10.9.0.1/32".parse().unwrap()]);
        assert_eq!((laptop.preshared_key, &laptop.endpoint), (Some(PresharedKey([77; 32])), &None));
        assert_eq!((a.peers[0].preshared_key, a.peers[0].persistent_keepalive), (None, 25));
    }

    fn through(entry: &str) -> Configuration {
        let mut objects = objects();
        objects.external[0].data["spec"]["entryNodes"] = json!(["b", "a"]);
        let more = ["10.64.0.0/16", "10.96.0.0/12"].map(|text| text.parse().unwrap());
        through_entry(&objects, "laptop", entry, &more).unwrap()
    }

    #[test]
    fn through_an_entry_node_a_peer_reaches_all_others() {
        for (entry, endpoint) in [("a", "203.0.113.1:51820"), ("b", "203.0.113.2:51820")] {
            let found = through(entry);
            assert_eq!(names(&found), [entry]);
            let peer = &found.peers[0];
            let expected = ["10.64.0.0/16", "10.96.0.0/12", "192.0.2.1/32", "192.0.2.2/32"];
            assert_eq!(peer.allowed_ips, expected.map(|text| text.parse().unwrap()));
            assert_eq!((peer.endpoint.as_deref(), peer.persistent_keepalive), (Some(endpoint), 10));
            assert_eq!(found.problems.len(), 1, "a block of its claims is left out: {:?}", found.problems);
        }
        assert!(through("c").problems.iter().any(|problem| problem.contains("'c'")));
        assert_eq!(through_entry(&objects(), "nobody", "a", &[]), None);
        assert!(through_entry(&objects(), "copy", "a", &[]).unwrap().peers.is_empty());
    }

    #[test]
    fn tunnels_do_not_carry_the_addresses_they_go_to() {
        let found =
            through("a").without_endpoints(["192.0.2.1".parse().unwrap(), "10.96.0.1".parse().unwrap()]);
        let allowed_ips = &found.peers[0].allowed_ips;
        let covers = |text: &str| {
            let address: IpAddr = text.parse().unwrap();
            allowed_ips.iter().any(|prefix| prefix.contains(&address))
        };
        assert!(!covers("192.0.2.1") && !covers("10.96.0.1"));
        assert!(covers("192.0.2.2") && covers("10.96.0.10") && covers("10.64.9.9"));
    }

    #[test]
    fn a_node_stands_for_itself_or_for_its_cluster_in_another_one() {
        let services = ["10.96.0.0/12".parse().unwrap()];
        let of = |subject, is_whole| {
            let peer = as_peer(objects(), subject, is_whole, &services).unwrap();
            let allowed_ips: Vec<String> = peer.allowed_ips.iter().map(ToString::to_string).collect();
            (allowed_ips.join(" "), peer.endpoint, peer.preshared_key.is_some())
        };
        let (alone, endpoint, has_preshared_key) = of(Subject::Node("a"), false);
        assert_eq!(alone, "10.64.0.0/27 10.96.0.0/12 192.0.2.1/32");
        assert_eq!((endpoint.as_deref(), has_preshared_key), (Some("203.0.113.1:51820"), false));
        let (whole, ..) = of(Subject::Node("a"), true);
        assert_eq!(whole, "10.64.0.0/26 10.96.0.0/12 192.0.2.1/32 192.0.2.2/32");
        assert!(of(Subject::Peer("phone"), false).2);
        assert_eq!(as_peer(objects(), Subject::Node("nobody"), false, &[]), None);
    }

    #[test]
    fn what_does_not_exist_is_none_and_what_is_left_out_has_a_reason() {
        for absent in [Subject::Node("laptop"), Subject::Peer("a"), Subject::Node("")] {
            assert_eq!(configuration(objects(), absent), None);
        }
        let copy = configuration(objects(), Subject::Peer("copy")).unwrap();
        assert_eq!(names(&copy), [""; 0]);
        assert!(copy.problems[0].contains("its public key is that of node a"), "{:?}", copy.problems);
    }
}
