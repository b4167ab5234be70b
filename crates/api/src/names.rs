//! Names and numbers by which users, kernels and other programs know Fairlead, each with its source.

/// API group of pools, blocks and egresses (Coil v2).
pub const COIL_GROUP: &str = "coil.cybozu.com";
/// API group of mesh and peers (WireKube).
pub const WIREKUBE_GROUP: &str = "wirekube.io";
/// API group of external peers (Kilo).
pub const KILO_GROUP: &str = "kilo.squat.ai";

/// Finalizer on AddressPools and AddressBlocks (Coil v2).
pub const COIL_FINALIZER: &str = "coil.cybozu.com";
/// Namespace annotation that names the pool of its pods (Coil v2).
pub const ANNOTATION_POOL: &str = "coil.cybozu.com/pool";
/// Pool of namespaces without the annotation (Coil v2).
pub const DEFAULT_POOL: &str = "default";
/// Label on an AddressBlock: the pool it is from (Coil v2).
pub const LABEL_POOL: &str = "coil.cybozu.com/pool";
/// Label on an AddressBlock: the node that owns it (Coil v2).
pub const LABEL_NODE: &str = "coil.cybozu.com/node";
/// Label on an AddressBlock: UID of the BlockRequest it answers (Coil v2).
pub const LABEL_REQUEST: &str = "coil.cybozu.com/request";
/// Label on an AddressBlock whose addresses must never be allocated to pods (Coil v2).
pub const LABEL_RESERVED: &str = "coil.cybozu.com/reserved";
/// Prefix of pod annotations that choose egress gateways, followed by their namespace (Coil v2).
pub const ANNOTATION_EGRESS_PREFIX: &str = "egress.coil.cybozu.com/";

/// Node annotation: endpoint to publish instead of a discovered one (WireKube).
pub const ANNOTATION_ENDPOINT: &str = "wirekube.io/endpoint";
/// Node annotation: which of its endpoints are published, instead of `spec.endpointFilters` of the mesh (own).
pub const ANNOTATION_ENDPOINT_FILTERS: &str = "wirekube.io/endpoint-filters";
/// Node annotation: which endpoints of others it tries, instead of `spec.peerEndpointFilters` of the mesh (own).
pub const ANNOTATION_PEER_ENDPOINT_FILTERS: &str = "wirekube.io/peer-endpoint-filters";
/// Node annotation: what of its own it does not have in the mesh (KubeSpan).
pub const ANNOTATION_KUBESPAN_EXCLUDED: &str = "networking.talos.dev/kubespan-exclude-advertised-networks";
/// Node annotation: internal address to publish (WireKube).
pub const ANNOTATION_INTERNAL_IP: &str = "wirekube.io/internal-ip";
/// WireKubePeer annotation: per-peer override of the birthday method (WireKube).
pub const ANNOTATION_BIRTHDAY: &str = "wirekube.io/birthday-attack";
/// Label on a WireKubePeer: the node it belongs to (WireKube).
pub const LABEL_WIREKUBE_NODE: &str = "wirekube.io/node";

/// Node annotation: endpoint to use for this node (Kilo).
pub const ANNOTATION_KILO_FORCE_ENDPOINT: &str = "kilo.squat.ai/force-endpoint";
/// Node annotation: internal address to use (Kilo).
pub const ANNOTATION_KILO_FORCE_INTERNAL_IP: &str = "kilo.squat.ai/force-internal-ip";
/// Node annotation: preferred leader of its location (Kilo).
pub const ANNOTATION_KILO_LEADER: &str = "kilo.squat.ai/leader";
/// Node annotation: its location (Kilo).
pub const ANNOTATION_KILO_LOCATION: &str = "kilo.squat.ai/location";
/// Node label: the region it is in, its location unless [`ANNOTATION_KILO_LOCATION`] names another (Kubernetes; Kilo's default).
pub const LABEL_REGION: &str = "topology.kubernetes.io/region";
/// Node label: the zone it is in (Kubernetes).
pub const LABEL_ZONE: &str = "topology.kubernetes.io/zone";
/// Prefix of labels of Nodes that kubelets may not set (Kubernetes, admission plugin NodeRestriction).
pub const RESTRICTED_LABEL_PREFIX: &str = "node-restriction.kubernetes.io/";
/// Node annotation: keepalive in seconds towards all peers (Kilo).
pub const ANNOTATION_KILO_KEEPALIVE: &str = "kilo.squat.ai/persistent-keepalive";
/// Node annotation: further prefixes reachable at its location (Kilo).
pub const ANNOTATION_KILO_ALLOWED_LOCATION_IPS: &str = "kilo.squat.ai/allowed-location-ips";

/// Routing table with one route per local pod (Coil v2).
pub const TABLE_PODS: u32 = 116;
/// Routing table of narrow egress destinations in client pods (Coil v2).
pub const TABLE_EGRESS_NARROW: u32 = 117;
/// Routing table of wide egress destinations in client pods (Coil v2).
pub const TABLE_EGRESS_WIDE: u32 = 118;
/// Routing table with one route per local block, for routing daemons (Coil v2).
pub const TABLE_EXPORT: u32 = 119;
/// Routing table with the default routes into the mesh (KubeSpan).
pub const TABLE_MESH: u32 = 180;
/// Priority of the rule that looks up [`TABLE_PODS`] (Coil v2).
pub const RULE_PRIORITY_PODS: u32 = 2000;
/// Priority of the rule that looks up [`TABLE_MESH`] (KubeSpan).
pub const RULE_PRIORITY_MESH: u32 = 32500;
/// Priority of the rule that looks up [`TABLE_MESH`] for packets without a mark that nothing else routes: after the kernel's rules
/// for the tables `main` and `default` (own).
pub const RULE_PRIORITY_MESH_LAST: u32 = 32800;
/// Routing table with what enters the mesh, apart from the other nodes' own addresses: for packets without a mark (own).
pub const TABLE_MESH_GUARD: u32 = 181;
/// The same for the other nodes' own addresses and packets that this host sends (own).
pub const TABLE_MESH_GUARD_NODES_HOST: u32 = 182;
/// The same for packets that it forwards (own).
pub const TABLE_MESH_GUARD_NODES: u32 = 183;
/// The three tables above.
pub const TABLES_MESH_GUARD: [u32; 3] =
    [TABLE_MESH_GUARD, TABLE_MESH_GUARD_NODES_HOST, TABLE_MESH_GUARD_NODES];
/// Priority of the mesh's rule that looks up [`TABLE_PODS`]: to the rules after it pods of this node are elsewhere (own).
pub const RULE_PRIORITY_MESH_PODS: u32 = 100;
/// Priority of the first rules of the mesh, before those of other programs: marked packets look up [`TABLE_MESH`], and what goes past
/// the mesh passes over the next ones. It is greater than that of Cilium's rule for local addresses, 100, and all of these are at most that
/// of NetBird's first one, 105 (own).
pub const RULE_PRIORITY_MESH_FIRST: u32 = 101;
/// Priority of the rule that looks up [`TABLE_MESH_GUARD`] (own).
pub const RULE_PRIORITY_MESH_GUARD: u32 = 102;
/// Priority of the rules by which answers of the API server and of relays to other nodes pass over the next ones (own).
pub const RULE_PRIORITY_MESH_ANSWERS: u32 = 103;
/// Priority of the rules that look up [`TABLE_MESH_GUARD_NODES_HOST`] and [`TABLE_MESH_GUARD_NODES`] (own).
pub const RULE_PRIORITY_MESH_NODES: u32 = 104;
/// Priority of the rule at which packets go on that pass over some of the rules above (own).
pub const RULE_PRIORITY_MESH_PAST: u32 = 105;
/// Priorities of all these rules.
pub const RULE_PRIORITIES_MESH_GUARD: std::ops::RangeInclusive<u32> =
    RULE_PRIORITY_MESH_PODS..=RULE_PRIORITY_MESH_PAST;
/// Route protocol of everything above (Coil v2).
pub const ROUTE_PROTOCOL: u8 = 30;
/// Route protocol of the built-in router (Coil v2, coil-router).
pub const ROUTE_PROTOCOL_ROUTER: u8 = 31;
/// UDP port of Foo-over-UDP (Coil v2).
pub const FOU_PORT: u16 = 5555;
/// Priority of the rule in client pods that keeps link-local destinations in the table `main` (Coil v2).
pub const RULE_PRIORITY_EGRESS_LINK_LOCAL: u32 = 1800;
/// Priority of the rule in client pods that looks up [`TABLE_EGRESS_NARROW`] (Coil v2).
pub const RULE_PRIORITY_EGRESS_NARROW: u32 = 1900;
/// Priority of the first of the rules in client pods that keep private networks in the table `main` (Coil v2).
pub const RULE_PRIORITY_EGRESS_PRIVATE: u32 = 2000;
/// Priorities of the rules in client pods that keep other ranges of the cluster in the table `main` (own).
pub const RULE_PRIORITIES_EGRESS_IN_CLUSTER: std::ops::RangeInclusive<u32> = 2003..=2099;
/// Priority of the rule in gateway pods that looks up [`TABLE_EGRESS_WIDE`], their routes to clients, for packets from the uplink
/// (Coil v2).
pub const RULE_PRIORITY_EGRESS_GATEWAY: u32 = 2000;
/// Priority of the rule in gateway pods that does so for ICMP packets of the gateway itself (own).
pub const RULE_PRIORITY_EGRESS_GATEWAY_ICMP: u32 = 2001;
/// Priority of the rule in client pods that looks up [`TABLE_EGRESS_WIDE`] (Coil v2).
pub const RULE_PRIORITY_EGRESS_WIDE: u32 = 2100;
/// Priority of the rule in client pods for replies to connections that others opened by `eth0` (Coil v2).
pub const RULE_PRIORITY_EGRESS_REPLIES: u32 = 1000;
/// Number of the routing table that this rule looks up, less the index of `eth0` (Coil v2).
pub const TABLE_EGRESS_REPLIES_BASE: u32 = 1000;
/// Priority of the rules in pods that lead what comes from the address of a further interface to the table of that interface: before
/// those of egress, whose gateways do not know this address (own).
pub const RULE_PRIORITY_ADDITIONAL_INTERFACE: u32 = 990;
/// Number of the routing table that such a rule looks up, less the index of the interface (own).
pub const TABLE_ADDITIONAL_INTERFACE_BASE: u32 = 3000;
/// Prefix of the names of FoU links over IPv4, followed by the peer's address as eight hexadecimal digits (Coil v2).
pub const LINK_PREFIX_FOU_IPV4: &str = "fou4_";
/// Prefix of the names of FoU links over IPv6, followed by the first four bytes of the SHA-1 of the peer's address (Coil v2).
pub const LINK_PREFIX_FOU_IPV6: &str = "fou6_";
/// Time to live, or hop limit, of the outer packets of FoU links (Coil v2).
pub const FOU_TTL: u8 = 225;

/// Bits of the packet mark that the mesh uses; all others belong to other software (KubeSpan).
pub const MARK_MASK: u32 = 0x60;
/// Mark of packets that WireGuard sends (KubeSpan).
pub const MARK_FROM_WIREGUARD: u32 = 0x20;
/// Mark of packets that are to enter WireGuard (KubeSpan).
pub const MARK_TO_WIREGUARD: u32 = 0x40;
/// Mark of packets of this host that go past the mesh although their destination is in it, and look for a route again (own).
pub const MARK_PAST_MESH: u32 = 0x60;
/// Bit of the mark of forwarded packets that firewalls of other programs are to accept: those of pods, and those between members
/// of the mesh. Only where such a firewall drops the others (own).
pub const MARK_FORWARD: u32 = 0x10;
/// nftables table of the mesh, family `inet` (KubeSpan).
pub const NFT_TABLE: &str = "talos_kubespan";
/// Chain in the prerouting hook, type filter (KubeSpan).
pub const NFT_CHAIN_PREROUTING: &str = "kubespan_prerouting";
/// Chain in the output hook, type route (KubeSpan).
pub const NFT_CHAIN_OUTGOING: &str = "kubespan_outgoing";
/// Set of IPv4 prefixes reached through the mesh (KubeSpan).
pub const NFT_SET_IPV4: &str = "kubespan_targets_ipv4";
/// Set of IPv6 prefixes reached through the mesh (KubeSpan).
pub const NFT_SET_IPV6: &str = "kubespan_targets_ipv6";
/// Set of the other nodes' own IPv4 addresses, which an API server on this node answers without the mesh (own).
pub const NFT_SET_NODES_IPV4: &str = "fairlead_nodes_ipv4";
/// The same for IPv6 (own).
pub const NFT_SET_NODES_IPV6: &str = "fairlead_nodes_ipv6";
/// Set of IPv4 prefixes of hosts beside this node, into which it masquerades (own).
pub const NFT_SET_SITE_IPV4: &str = "fairlead_site_ipv4";
/// The same for IPv6 (own).
pub const NFT_SET_SITE_IPV6: &str = "fairlead_site_ipv6";
/// Chain that masquerades what comes from the mesh to these hosts (own).
pub const NFT_CHAIN_SITE: &str = "fairlead_site";
/// Set of the IPv4 prefixes from which other nodes accept packets of this node (own).
pub const NFT_SET_OWN_IPV4: &str = "fairlead_own_ipv4";
/// The same for IPv6 (own).
pub const NFT_SET_OWN_IPV6: &str = "fairlead_own_ipv6";

/// Set of the IPv4 addresses of the other control-plane nodes, on a control-plane node (own).
pub const NFT_SET_CONTROL_PLANE_IPV4: &str = "fairlead_control_plane_ipv4";
/// The same for IPv6 (own).
pub const NFT_SET_CONTROL_PLANE_IPV6: &str = "fairlead_control_plane_ipv6";
/// Set of those among them whose tunnel is not up (own).
pub const NFT_SET_CONTROL_PLANE_DOWN_IPV4: &str = "fairlead_control_plane_down_ipv4";
/// The same for IPv6 (own).
pub const NFT_SET_CONTROL_PLANE_DOWN_IPV6: &str = "fairlead_control_plane_down_ipv6";
/// TCP ports by which control-plane nodes need each other before there is a mesh, and whose protocols encrypt themselves: etcd's clients and its
/// members, API server, kubelet (Kubernetes, "Ports and Protocols").
pub const CONTROL_PLANE_PORTS: [u16; 4] = [2379, 2380, 6443, 10250];
/// Label of Nodes that are control-plane nodes (Kubernetes). Kubelets cannot set it (admission plugin NodeRestriction).
pub const LABEL_CONTROL_PLANE: &str = "node-role.kubernetes.io/control-plane";
/// Chain that marks packets of other nodes which come past the mesh (own).
pub const NFT_CHAIN_ARRIVING: &str = "fairlead_arriving";
/// Chain that gives packets into the mesh an address of this node which other nodes accept (own).
pub const NFT_CHAIN_SOURCES: &str = "fairlead_sources";
/// Bit of the mark of packets that kube-proxy is to masquerade (its `masqueradeBit`, 14 unless configured).
pub const MARK_KUBE_PROXY_MASQUERADE: u32 = 0x4000;

/// nftables table that drops packets of pods with another's source address, family `inet` (own).
pub const NFT_TABLE_SOURCE_CHECK: &str = "fairlead_source_check";
/// nftables table that masquerades packets of pods that leave the cluster, family `inet` (own).
pub const NFT_TABLE_MASQUERADE: &str = "fairlead_masquerade";
/// nftables table that marks forwarded packets of pods with [`MARK_FORWARD`], family `inet` (own).
pub const NFT_TABLE_FORWARD: &str = "fairlead_forward";
/// Chain in the forward hook of the mesh's table, which marks what passes between members (own).
pub const NFT_CHAIN_FORWARD: &str = "fairlead_forward";
/// nftables table of an egress gateway, family `inet` (own).
pub const NFT_TABLE_EGRESS: &str = "fairlead_egress";
/// nftables table that marks replies in a client pod of an Egress with `spec.originatingOnly`, family `inet` (own).
pub const NFT_TABLE_EGRESS_CLIENT: &str = "fairlead_egress_client";
/// nftables table that joins the path socket to the port of the kernel's WireGuard, family `inet` (own).
pub const NFT_TABLE_PATH_SOCKET: &str = "fairlead_path_socket";

/// nftables table that drops and counts what is for the mesh and leaves outside of it, family `inet` (own).
pub const NFT_TABLE_GUARD: &str = "fairlead_guard";
/// nftables table that says who may send packets to the tunnels of the location, family `inet` (own).
pub const NFT_TABLE_ENCAPSULATION: &str = "fairlead_encapsulation";
/// Name of the tunnel of IPv4 in IPv4 to nodes of the location (own).
pub const LINK_IPIP: &str = "fairlead_ipip";
/// Name of the tunnel of IPv6 in IPv6 to nodes of the location (own).
pub const LINK_IP6TNL: &str = "fairlead_ip6tnl";
/// Bytes that a tunnel adds: the outer header, of IPv4 (RFC 791) and of IPv6 (RFC 8200).
pub const IPIP_OVERHEAD: u32 = 20;
/// The same in IPv6.
pub const IP6TNL_OVERHEAD: u32 = 40;

/// WireGuard's UDP port (KubeSpan, WireKube, Kilo).
pub const WIREGUARD_PORT: u16 = 51820;
/// UDP port of a STUN server that is named without one (RFC 8489, section 18.5).
pub const STUN_PORT: u16 = 3478;
/// Name of the WireGuard device unless the mesh names another (WireKube).
pub const WIREGUARD_INTERFACE: &str = "wire_kube";
/// Name of KubeSpan's WireGuard device (KubeSpan).
pub const KUBESPAN_INTERFACE: &str = "kubespan";
/// Device MTU on a 1500-byte uplink (KubeSpan, WireKube).
pub const MESH_MTU: u32 = 1420;
/// Bytes WireGuard adds over IPv6: 40 IP + 8 UDP + 32 WireGuard; over IPv4 it is 20 less.
pub const WIREGUARD_OVERHEAD_IPV6: u32 = 80;
/// Minimum MTU of an IPv6 link (RFC 8200, section 5).
pub const IPV6_MIN_MTU: u32 = 1280;

/// Name of the WireGuard device of `fairlead connect` unless the user names another (own).
pub const CONNECT_INTERFACE: &str = "fairlead0";
/// Prefix of the alias of that device, followed by the name of its Peer (own).
pub const LINK_ALIAS_CONNECT: &str = "FAIRLEAD-CONNECT:";
/// Protocol of the routes onto that device, which are in the table `main` (own).
pub const ROUTE_PROTOCOL_CONNECT: u8 = 32;
/// Label: the program that writes the object (Kubernetes, "Recommended Labels").
pub const LABEL_MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// Value of [`LABEL_MANAGED_BY`] on Peers that `fairlead connect` has made, and deletes (own).
pub const MANAGED_BY_CONNECT: &str = "fairlead-connect";

/// Socket on which the node program serves the CNI plugin and the CLI (Coil v2).
pub const NODE_SOCKET: &str = "/run/coild.sock";
/// Prefix of the alias of a pod's host link: `COIL:<pool>:<container ID>:<interface>` (Coil v2).
pub const LINK_ALIAS_PREFIX: &str = "COIL:";
/// Group of the pods' links on the host, by which nftables matches them (own).
pub const LINK_GROUP_PODS: u32 = 116;
/// IPv4 gateway of pods, on the host's end of every pod link (Coil v2 design, "Intra-node routing").
pub const POD_GATEWAY_IPV4: std::net::Ipv4Addr = std::net::Ipv4Addr::new(169, 254, 1, 1);
/// IPv6 gateway of pods, on the host's end of every pod link.
pub const POD_GATEWAY_IPV6: std::net::Ipv6Addr = std::net::Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1);

/// The node program: its DaemonSet, its container and `argv[0]` (Coil v2).
pub const NODE_PROGRAM: &str = "coild";
/// Programs that enforce NetworkPolicies, by the names of their DaemonSets or labels: Calico (also with Flannel as Canal), Cilium, kube-router,
/// kube-network-policies of SIG Network, Antrea, Weave Net, OVN-Kubernetes, Kube-OVN, Azure's, AWS's agent and kindnet.
pub const NETWORK_POLICY_ENFORCERS: [&str; 13] = [
    "antrea",
    "antrea-agent",
    "aws-node",
    "azure-npm",
    "calico-node",
    "canal",
    "cilium",
    "kindnet",
    "kube-network-policies",
    "kube-ovn-cni",
    "kube-router",
    "ovnkube-node",
    "weave-net",
];
/// The controller: its Deployment and `argv[0]` (Coil v2).
pub const CONTROLLER_PROGRAM: &str = "coil-ipam-controller";
/// The init container that prepares a node, and its `argv[0]` (Coil v2).
pub const INSTALLER_PROGRAM: &str = "coil-installer";
/// The controller of egress gateways: its Deployment and `argv[0]` (Coil v2).
pub const EGRESS_CONTROLLER_PROGRAM: &str = "coil-egress-controller";
/// The gateway program: its ServiceAccount, ClusterRole, ClusterRoleBinding and `argv[0]` (Coil v2).
pub const EGRESS_PROGRAM: &str = "coil-egress";
/// The container of the gateway in a gateway pod, and the component of all objects of an Egress (Coil v2).
pub const EGRESS_COMPONENT: &str = "egress";
/// Coil's built-in router, which is part of the node program (Coil v2).
pub const ROUTER_PROGRAM: &str = "coil-router";
/// Lease the IPAM controller is elected by (Coil v2).
pub const LEASE_IPAM: &str = "coil-ipam-leader";
/// Lease the controller of egress gateways is elected by (Coil v2).
pub const LEASE_EGRESS: &str = "coil-egress-leader";
/// Label: the name of the application (Kubernetes, "Recommended Labels").
pub const LABEL_APP_NAME: &str = "app.kubernetes.io/name";
/// Label: which instance of the application; of gateways, the name of their Egress (Kubernetes; Coil v2).
pub const LABEL_APP_INSTANCE: &str = "app.kubernetes.io/instance";
/// Label: the part of the application (Kubernetes).
pub const LABEL_APP_COMPONENT: &str = "app.kubernetes.io/component";
/// Value of [`LABEL_APP_NAME`] (Coil v2).
pub const APP_NAME: &str = "coil";
/// Port of the metrics of a gateway pod (Coil v2).
pub const EGRESS_METRICS_PORT: u16 = 8080;
/// Port of the health probes of a gateway pod (Coil v2).
pub const EGRESS_HEALTH_PORT: u16 = 8081;
/// TCP port at which node programs register clients at a gateway pod (own).
pub const EGRESS_REGISTRATION_PORT: u16 = 5556;
/// TCP port at which the gateways of an Egress talk to each other.
pub const EGRESS_PEER_PORT: u16 = 5557;
/// Annotation of Namespaces: Egresses of other namespaces whose selectors may select pods of this one, `NAMESPACE/NAME` or `NAMESPACE/*`,
/// separated by commas.
pub const ANNOTATION_EGRESS_ALLOW_SELECTORS: &str = "egress.coil.cybozu.com/allow-selectors-of";
/// Namespace of Fairlead's own objects (Coil v2).
pub const SYSTEM_NAMESPACE: &str = "kube-system";
/// Secret with the preshared keys of Peers that name one in `spec.presharedKeyRef`, in [`SYSTEM_NAMESPACE`]. Nodes may read it.
pub const PEER_PRESHARED_KEYS_SECRET: &str = "fairlead-peer-preshared-keys";
/// Secret with the identifier and the secret of the cluster for discovery services, in [`SYSTEM_NAMESPACE`].
pub const DISCOVERY_SECRET: &str = "fairlead-discovery";
/// Key of [`DISCOVERY_SECRET`] for the identifier, named as in Talos's configuration, in lower camel case.
pub const DISCOVERY_CLUSTER_ID: &str = "clusterID";
/// Key of [`DISCOVERY_SECRET`] for the secret of the cluster; see [`DISCOVERY_CLUSTER_ID`].
pub const DISCOVERY_CLUSTER_SECRET: &str = "clusterSecret";
/// Namespace of the managed relay (own): what the controller writes there cannot use ServiceAccounts and Secrets of others.
pub const RELAY_NAMESPACE: &str = "fairlead-relay";
/// The managed relay: its Deployment, Service and ServiceAccount (own).
pub const RELAY_PROGRAM: &str = "fairlead-relay";
/// Secret with the authority that certifies the managed relay (own).
pub const RELAY_CA_SECRET: &str = "fairlead-relay-ca";
/// Secret with the certificate of the managed relay (own).
pub const RELAY_TLS_SECRET: &str = "fairlead-relay-tls";
/// The name in the certificate of the managed relay, wherever it is: the DNS name of its Service (own).
pub const RELAY_SERVER_NAME: &str = "fairlead-relay.fairlead-relay.svc";
/// TCP port of the managed relay's pods (WireKube).
pub const RELAY_PORT: u16 = 3478;
/// Headless Service with the addresses of all replicas of the managed relay (own).
pub const RELAY_REPLICAS_SERVICE: &str = "fairlead-relay-replicas";
/// TCP port at which replicas of a relay serve each other (own).
pub const RELAY_REPLICA_PORT: u16 = 3480;
/// Pods of the managed relay, at most: each is connected to all others (own).
pub const MAX_RELAY_REPLICAS: u32 = 5;

/// Whether a text can be the name of a Node or a pool: a DNS subdomain (RFC 1123). Only such texts may get into a URL.
pub fn is_object_name(text: &str) -> bool {
    text.len() <= 253 && text.split('.').all(is_dns_word)
}

/// Whether a text can be the name of a namespace: a DNS label (RFC 1123).
pub fn is_dns_label(text: &str) -> bool {
    text.len() <= 63 && is_dns_word(text)
}

/// Whether a text can be the name of a Service: a DNS label that begins with a letter (RFC 1035).
pub fn is_service_name(text: &str) -> bool {
    is_dns_label(text) && text.starts_with(|first: char| first.is_ascii_lowercase())
}

/// A part of a DNS name, of any length.
fn is_dns_word(text: &str) -> bool {
    let inner = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || *byte == b'-';
    let bytes = text.as_bytes();
    bytes.iter().all(inner)
        && bytes.first().is_some_and(|byte| *byte != b'-')
        && bytes.last().is_some_and(|byte| *byte != b'-')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_dns_names_are_names_of_objects() {
        for name in ["default", "a", "0", "node-1.example.com", "a--b"] {
            assert!(is_object_name(name), "{name}");
        }
        for text in [
            "",
            "default?",
            "default/status",
            "../nodes",
            "a b",
            "A",
            "-a",
            "a-",
            "a..b",
            ".a",
            "a%2f",
            "ä",
            "a_b",
        ] {
            assert!(!is_object_name(text), "{text}");
        }
        assert!(!is_object_name(&"a".repeat(254)));
    }

    #[test]
    fn labels_are_short_and_services_begin_with_a_letter() {
        assert!(is_dns_label(&"a".repeat(63)) && !is_dns_label(&"a".repeat(64)));
        assert!(is_dns_label("0a") && !is_dns_label("a.b") && !is_dns_label("") && !is_dns_label("-a"));
        assert!(is_service_name("a0") && !is_service_name("0a") && !is_service_name(""));
    }
}
