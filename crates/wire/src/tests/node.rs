use super::Kept;
use crate::node::{
    AddressFamily, Block, BlockRoute, DiscoveryService, ExternalPeer, Finding, HeldAddresses,
    IpamCheckResponse, IpamReleaseRequest, IpamReleaseResponse, IpamShowResponse, MemberSource,
    NetcheckResponse, PathChange, Peer, PingRequest, PingResponse, PingedCandidate, PortMapping, Relay,
    RotateKeyRequest, RotateKeyResponse, Router, SourceAddress, StatusRequest, StatusResponse, StunMapping,
};

const KEY: &str = "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=";
const NEXT_KEY: &str = "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=";

fn texts<const N: usize>(texts: [&str; N]) -> Vec<String> {
    texts.map(str::to_owned).into()
}

fn peer() -> Peer {
    Peer {
        name: "n2".to_owned(),
        public_key: KEY.to_owned(),
        state: "up".to_owned(),
        endpoint: "198.51.100.2:51820".to_owned(),
        endpoint_source: "observed".to_owned(),
        handshake_age_seconds: Some(12.5),
        rx_bytes: 1 << 40,
        tx_bytes: 77,
        prefixes: texts(["10.244.2.0/24", "fd00:244:2::/64", "192.0.2.0/28"]),
        reason: "no handshake".to_owned(),
        round_trip_seconds: Some(0.025),
        relay_reason: "both symmetric NAT".to_owned(),
        path_changes: vec![PathChange {
            at_seconds: 1_700_000_000.25,
            from: "192.0.2.1:7".to_owned(),
            from_source: "host".to_owned(),
            to: "tcp://relay:443".to_owned(),
            to_source: "relay".to_owned(),
            reason: "PathFailed".to_owned(),
            attempts: 3,
        }],
        plain_prefixes: texts(["10.244.2.0/24"]),
        encapsulated_prefixes: texts(["192.0.2.0/28"]),
        sources: vec![
            MemberSource { source: "Kubernetes".to_owned(), age_seconds: Some(0.0) },
            MemberSource { source: "static file".to_owned(), age_seconds: None },
        ],
    }
}

fn relay() -> Relay {
    Relay {
        endpoint: "wss://relay.example:443".to_owned(),
        connected: true,
        error: "draining".to_owned(),
        round_trip_seconds: Some(0.5),
        rx_bytes: 1,
        tx_bytes: 2,
    }
}

fn port_mapping() -> PortMapping {
    PortMapping {
        gateway: "192.168.0.1".to_owned(),
        protocol: "PCP".to_owned(),
        external: "198.51.100.1:51820".to_owned(),
        error: "refused".to_owned(),
        lifetime_seconds: Some(7200),
    }
}

fn block() -> Block {
    Block {
        name: "default-1".to_owned(),
        pool: "default".to_owned(),
        ipv4: "10.244.1.0/27".to_owned(),
        ipv6: "fd00:244:1::/123".to_owned(),
        used: 3,
        capacity: 32,
        state: "open".to_owned(),
    }
}

fn status() -> StatusResponse {
    StatusResponse {
        node: "n1".to_owned(),
        version: "0.1.0".to_owned(),
        wireguard: "embedded".to_owned(),
        interface: "wg0".to_owned(),
        public_key: KEY.to_owned(),
        listen_port: 51820,
        mtu: 1420,
        nat_type: "cone".to_owned(),
        peers: vec![peer(), Peer::default()],
        problems: texts(["the API server does not answer"]),
        blocks: vec![block()],
        prefixes: texts(["10.244.1.0/24"]),
        netlink_changes: 9,
        router: Some(Router {
            routes: vec![BlockRoute {
                destination: "10.244.2.0/27".to_owned(),
                node: "n2".to_owned(),
                gateway: "192.0.2.2".to_owned(),
            }],
        }),
        relay: Some(relay()),
        port_mappings: vec![port_mapping()],
        nat64_prefixes: texts(["64:ff9b::/96"]),
        port_access: "nftables".to_owned(),
        external_peers: vec![ExternalPeer {
            name: "laptop".to_owned(),
            public_key: NEXT_KEY.to_owned(),
            connected: true,
            endpoint: "203.0.113.9:5".to_owned(),
            handshake_age_seconds: Some(1.0),
            rx_bytes: 5,
            tx_bytes: 6,
            prefixes: texts(["10.9.0.2/32"]),
            standby: true,
        }],
        discovery_services: vec![DiscoveryService {
            server: "https://discovery.example".to_owned(),
            connected: true,
            published: true,
            members: 4,
            error: "slow".to_owned(),
        }],
        next_public_key: NEXT_KEY.to_owned(),
        wireguard_reason: "no kernel module".to_owned(),
        discovery_affiliate_id: "n1-id".to_owned(),
        source_addresses: vec![SourceAddress {
            address: "192.0.2.40".to_owned(),
            egress: "shop/nat".to_owned(),
            gateway: "nat-0".to_owned(),
            term: 12,
            links: texts(["eth0"]),
        }],
        // Not known to that commit.
        released_blocks: Vec::new(),
    }
}

#[test]
fn the_status_of_a_node_is_as_it_was() {
    let mut kept = Kept::of("status.txt");
    kept.has("StatusRequest", StatusRequest { peer: "n2".to_owned() });
    kept.has("StatusResponse", status());
    kept.has("StatusResponse minimal", StatusResponse { node: "n1".to_owned(), ..StatusResponse::default() });
    kept.has(
        "NetcheckResponse",
        NetcheckResponse {
            node: "n1".to_owned(),
            wireguard: "kernel".to_owned(),
            listen_port: 51820,
            nat_type: "symmetric".to_owned(),
            udp: "works".to_owned(),
            has_path_socket: true,
            families: vec![AddressFamily {
                name: "IPv4".to_owned(),
                nat_type: "open".to_owned(),
                udp: "blocked".to_owned(),
                addresses: texts(["192.0.2.1:51820"]),
                mappings: vec![StunMapping {
                    server: "stun.example:3478".to_owned(),
                    mapped: "198.51.100.1:9".to_owned(),
                    error: "timeout".to_owned(),
                }],
                seen_by_peers: texts(["198.51.100.1:10"]),
            }],
            port_mappings: vec![port_mapping()],
            relays: vec![relay()],
            uplink_mtu: 1500,
            mtu: 1420,
            nat64_prefixes: texts(["64:ff9b::/96"]),
        },
    );
}

#[test]
fn the_other_requests_to_a_node_are_as_they_were() {
    let mut kept = Kept::of("node.txt");
    kept.has("PingRequest", PingRequest { peer: "n2".to_owned(), timeout_milliseconds: 1500 });
    let candidate = PingedCandidate {
        address: "192.0.2.2:51820".to_owned(),
        kind: "srflx".to_owned(),
        in_use: true,
        round_trip_seconds: Some(0.001),
        held_back: true,
        loses_long_packets: true,
    };
    kept.has("PingResponse", PingResponse { peer: "n2".to_owned(), candidates: vec![candidate] });
    kept.has("RotateKeyRequest", RotateKeyRequest { force: true });
    kept.has(
        "RotateKeyResponse",
        RotateKeyResponse {
            node: "n1".to_owned(),
            public_key: KEY.to_owned(),
            next_public_key: NEXT_KEY.to_owned(),
            external_peers: texts(["laptop"]),
        },
    );
    let held = HeldAddresses {
        container_id: "c0ffee".to_owned(),
        ifname: "eth0".to_owned(),
        pool: "default".to_owned(),
        block: "default-1".to_owned(),
        ipv4: "10.244.1.7".to_owned(),
        ipv6: "fd00:244::7".to_owned(),
        pod_namespace: "shop".to_owned(),
        pod_name: "web-0".to_owned(),
        pod_uid: "uid-1".to_owned(),
        link: "veth1".to_owned(),
        network: "k8s-pod-network".to_owned(),
        attached_unix_seconds: Some(1_700_000_000),
    };
    let node = "n1".to_owned();
    kept.has(
        "IpamShowResponse",
        IpamShowResponse { node: node.clone(), blocks: vec![block()], attachments: vec![held.clone()] },
    );
    let finding = Finding {
        severity: "error".to_owned(),
        reason: "LostLink".to_owned(),
        subject: "10.244.1.7".to_owned(),
        what: "what".to_owned(),
        why: "why".to_owned(),
        advice: "advice".to_owned(),
    };
    kept.has(
        "IpamCheckResponse",
        IpamCheckResponse { node, findings: vec![finding], unknown: texts(["no pods"]) },
    );
    kept.has("IpamReleaseRequest", IpamReleaseRequest { subject: "10.244.1.7".to_owned(), force: true });
    kept.has("IpamReleaseResponse", IpamReleaseResponse { released: vec![held] });
}
