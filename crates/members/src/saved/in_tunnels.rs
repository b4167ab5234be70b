//! Prefixes of which an earlier run of this program knew that nothing may leave for them in clear text. Pure.
//!
//! After a reboot the kernel has nothing of the mesh, and an API server may take a minute for its lists, refuse them, or not know the Node yet.
//! Until there is a plan again, these prefixes are refused. They are those of pods alone: an API server may have moved to any node's address, and
//! must be reached.

use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use fairlead_address::PrefixSet;
use fairlead_topology::{Down, Member, OwnAddress, Policy, Reserved, plan};
use ipnet::IpNet;

use super::cluster::Saved;
use crate::locations;
use crate::settings::MeshSettings;

/// Addresses and networks of this host.
#[derive(Debug, Clone, Default)]
pub struct HostNetworks {
    /// Addresses, each with the link that has it.
    pub addresses: Vec<OwnAddress>,
    /// Networks that the host is connected to.
    pub connected: Vec<IpNet>,
    /// Default gateways.
    pub gateways: Vec<IpAddr>,
}

impl Saved {
    /// Prefixes of other nodes' pods, also of nodes and pods that left, to which packets of the node `own` leave by a tunnel or not at all: without what
    /// the mesh excludes, and what leaves plainly inside of a location. The fewest prefixes that cover exactly them; none where the mesh lets
    /// packets leave in clear text while a tunnel is down.
    pub fn in_tunnels(&self, own: &str, host: &HostNetworks, now: Instant) -> Vec<IpNet> {
        let settings = MeshSettings::parse(&self.facts.mesh, &mut Vec::new());
        if settings.routing.bypasses_down_peers {
            return Vec::new();
        }
        let includes_pod_networks = settings.routing.includes_pod_networks;
        let policy =
            Policy { guarded: self.guarded(includes_pod_networks, now), ..self.policy(own, host, &settings) };
        let others = self.facts.members.iter().filter(|member| member.name != own);
        let held: Vec<(&str, &IpNet)> = others
            .flat_map(|member| {
                pods(member, includes_pod_networks).map(move |prefix| (member.name.as_str(), prefix))
            })
            .collect();
        // Another member may have a block of a missing one by now, and a plain route leads to that.
        let of_others: PrefixSet = held.iter().map(|(_, prefix)| *prefix).collect();
        let left = policy.guarded.iter().collect::<PrefixSet>().subtract(&of_others);
        let left: Vec<IpNet> = left.prefixes().collect();
        let left = left.iter().map(|prefix| ("", prefix));
        plan(&self.facts.members, &policy).in_tunnels(held.into_iter().chain(left))
    }

    /// The policy of the mesh as it was saved, as far as prefixes of pods depend on it.
    fn policy(&self, own: &str, host: &HostNetworks, settings: &MeshSettings) -> Policy {
        let MeshSettings { routing, locations: of_mesh, .. } = settings;
        let local = host.connected.iter().filter(|_| routing.bypass_local_subnets);
        let servers = self.facts.api_server.iter().map(SocketAddr::ip);
        Policy {
            excluded: routing.excluded.iter().chain(local).copied().collect(),
            reserved: Reserved {
                hosts: servers.chain(host.gateways.iter().copied()).map(IpNet::from).collect(),
                services: self.facts.services.clone(),
                ..Reserved::default()
            },
            grants: routing.grants.clone(),
            granularity: locations::granularity(of_mesh.granularity, host.addresses.clone(), Down::new()),
            encapsulation: locations::encapsulation(of_mesh.encapsulation),
            includes_pod_networks: routing.includes_pod_networks,
            ..Policy::new(own)
        }
    }

    /// Prefixes of pods that no member has any more, and that are guarded as yet. Addresses of nodes that are missing are not among them.
    fn guarded(&self, includes_pod_networks: bool, now: Instant) -> Vec<IpNet> {
        let released = self.departures.released().iter().filter(|(_, until)| *until > now);
        let (_, missing) = self.departures.remembered();
        let missing = missing.values().filter(|missing| missing.is_guarded && missing.until > now);
        let of_missing = missing.flat_map(|missing| pods(&missing.member, includes_pod_networks));
        released.map(|(block, _)| block).chain(of_missing).copied().collect()
    }
}

/// Prefixes of the member's pods that the mesh carries.
fn pods(member: &Member, includes_pod_networks: bool) -> impl Iterator<Item = &IpNet> {
    member.blocks.iter().chain(member.pod_networks.iter().filter(move |_| includes_pod_networks))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;
    use std::time::Duration;

    use fairlead_api::resources::WireKubeMesh;
    use fairlead_keys::PublicKey;
    use fairlead_topology::{InternalAddress, Site};
    use serde_json::{Value, json};

    use super::*;
    use crate::departures::{Departures, Missing, ReleasedBlocks};
    use crate::saved::cluster::Facts;

    fn net(text: &str) -> IpNet {
        text.parse().unwrap()
    }

    /// A member whose key, address, blocks and network of pods follow from its number.
    fn member(number: u8) -> Member {
        let address = IpAddr::from([192, 168, 1, number]);
        let internal = vec![InternalAddress { address, length: None }];
        Member {
            public_key: Some(PublicKey([number; 32])),
            claims: vec![address.into(), net(&format!("fd01::{number}/128"))],
            blocks: vec![net(&format!("10.64.{number}.0/24")), net(&format!("fd64:0:0:{number}::/64"))],
            pod_networks: vec![net(&format!("10.244.{number}.0/24"))],
            site: Some(Site { location: "lab".to_owned(), internal, ..Site::default() }),
            ..Member::named(format!("n{number}"))
        }
    }

    /// A file of node 1 with three more, of which 4 has no key and 6 is at another place, and a Peer.
    fn saved(spec: Value) -> Saved {
        let elsewhere = Site { location: "cloud".to_owned(), ..Site::default() };
        let members = vec![
            member(1),
            member(2),
            Member { public_key: None, ..member(4) },
            Member { site: Some(elsewhere), ..member(6) },
            Member {
                claims: vec![net("10.9.0.0/24")],
                public_key: Some(PublicKey([9; 32])),
                ..Member::of_peer("home")
            },
        ];
        let facts = Facts {
            mesh: Arc::new(WireKubeMesh::new("default", serde_json::from_value(spec).unwrap())),
            node: Arc::default(),
            members,
            api_server: vec!["192.168.1.2:6443".parse().unwrap()],
            services: vec![net("10.96.0.0/12")],
            sources: Arc::default(),
            problems: Vec::new(),
        };
        Saved { facts, departures: Departures::default(), age: Duration::ZERO }
    }

    fn host() -> HostNetworks {
        HostNetworks {
            addresses: vec![OwnAddress { link: 7, prefix: net("192.168.1.1/24") }],
            connected: vec![net("192.168.1.0/24"), net("10.64.6.0/25")],
            gateways: vec!["192.168.1.254".parse().unwrap()],
        }
    }

    fn refused(saved: &Saved) -> Vec<String> {
        saved.in_tunnels("n1", &host(), Instant::now()).iter().map(ToString::to_string).collect()
    }

    const ALL: [&str; 6] = [
        "10.64.2.0/24",
        "10.64.4.0/24",
        "10.64.6.0/24",
        "fd64:0:0:2::/64",
        "fd64:0:0:4::/64",
        "fd64:0:0:6::/64",
    ];

    /// Neither addresses of nodes, one of which the API server has, nor what is behind a Peer.
    #[test]
    fn pods_of_other_nodes_are_refused_and_nothing_else() {
        assert_eq!(refused(&saved(json!({}))), ALL);
        let with_networks =
            saved(json!({ "autoAllowedIPs": { "includeNodeInternalIP": true, "includePodCIDRs": true } }));
        let networks = ["10.244.2.0/24", "10.244.4.0/24", "10.244.6.0/24"];
        let expected: Vec<&str> = ALL[..3].iter().chain(&networks).chain(&ALL[3..]).copied().collect();
        assert_eq!(refused(&with_networks), expected);
    }

    #[test]
    fn what_the_mesh_lets_past_it_is_not_refused() {
        let excluding = json!({ "routing": { "excludeCIDRs": ["10.64.2.0/23", "fd64::/16"] } });
        assert_eq!(refused(&saved(excluding)), ["10.64.4.0/24", "10.64.6.0/24"]);
        let local = json!({ "routing": { "localSubnetPolicy": "bypass" } });
        assert_eq!(refused(&saved(local))[..3], ["10.64.2.0/24", "10.64.4.0/24", "10.64.6.128/25"]);
        let down = json!({ "routing": { "allowDownPeerBypass": true } });
        assert_eq!(refused(&saved(down)), [""; 0]);
    }

    /// By IPv6 there is no plain way to the neighbour, and without a key there is none at all. What is at another place is behind a gateway, which
    /// may be the neighbour.
    #[test]
    fn neighbours_that_are_reached_without_a_tunnel_are_not_refused() {
        for granularity in ["cross", "location"] {
            let plain = saved(json!({ "topology": { "granularity": granularity } }));
            assert_eq!(refused(&plain), ALL[1..], "{granularity}");
        }
        let mut encapsulated =
            saved(json!({ "topology": { "granularity": "cross", "encapsulation": "always" } }));
        assert_eq!(refused(&encapsulated), ALL[1..]);
        encapsulated.facts.members.retain(|member| member.name != "n1");
        assert_eq!(refused(&encapsulated), ALL, "it is not known where this node is");
    }

    #[test]
    fn a_block_of_a_missing_node_that_a_neighbour_has_by_now_leaves_by_the_plain_route() {
        let now = Instant::now();
        let gone = Member { blocks: vec![net("10.64.2.0/24"), net("10.64.8.0/24")], ..member(8) };
        let missing = Missing { member: gone, until: now + Duration::from_secs(3600), is_guarded: true };
        let missing = BTreeMap::from([("n8".to_owned(), missing)]);
        let departures = Departures::restored(BTreeMap::new(), missing, ReleasedBlocks::default());
        let plain = saved(json!({ "topology": { "granularity": "cross" } }));
        let found = refused(&Saved { departures, ..plain });
        assert!(!found.contains(&"10.64.2.0/24".to_owned()), "{found:?}");
        assert!(found.contains(&"10.64.8.0/24".to_owned()), "{found:?}");
    }

    #[test]
    fn blocks_of_pods_that_left_are_refused_as_long_as_they_are_guarded() {
        let now = Instant::now();
        let soon = now + Duration::from_secs(3600);
        let missing = |number, until, is_guarded| {
            let member = member(number);
            (member.name.clone(), Missing { member, until, is_guarded })
        };
        let missing =
            BTreeMap::from([missing(8, soon, true), missing(10, soon, false), missing(12, now, true)]);
        let released = [(net("10.65.0.0/24"), soon), (net("10.66.0.0/24"), now), (net("10.64.1.0/24"), soon)];
        let departures =
            Departures::restored(BTreeMap::new(), missing, ReleasedBlocks::restored(released.into()));
        let with_departures = Saved { departures, ..saved(json!({})) };
        let found = with_departures.in_tunnels("n1", &host(), now);
        let others: Vec<String> =
            found.iter().map(ToString::to_string).filter(|it| !ALL.contains(&it.as_str())).collect();
        assert_eq!(others, ["10.64.8.0/24", "10.65.0.0/24", "fd64:0:0:8::/64"], "its own block is not");
    }
}
