use std::net::SocketAddr;

use prost::bytes::Bytes;

use super::Kept;
use crate::discovery::server::{
    Affiliate as Stored, AffiliateDeleteRequest, AffiliateUpdateRequest, Duration, HelloRequest,
    HelloResponse, ListRequest, ListResponse, RedirectMessage, WatchRequest, WatchResponse,
};
use crate::discovery::{Affiliate, ClusterSecret, KubeSpan};

#[test]
fn messages_of_discovery_services_are_as_they_were() {
    let mut kept = Kept::of("discovery.txt");
    let cluster_id = "cluster".to_owned();
    let hello = HelloRequest { cluster_id: cluster_id.clone(), client_version: "0.1.0".to_owned() };
    kept.has("HelloRequest", hello);
    let redirect = Some(RedirectMessage { endpoint: "other.example:443".to_owned() });
    let client_ip = Bytes::from_static(&[192, 0, 2, 1]);
    kept.has("HelloResponse", HelloResponse { redirect, client_ip, tells_expiry: false });
    kept.has(
        "AffiliateUpdateRequest",
        AffiliateUpdateRequest {
            cluster_id: cluster_id.clone(),
            affiliate_id: "n1".to_owned(),
            affiliate_data: Some(Bytes::from_static(b"data")),
            affiliate_endpoints: vec![Bytes::from_static(&[1; 16]), Bytes::from_static(&[2; 32])],
            ttl: Some(Duration { seconds: 1800, nanos: 500 }),
        },
    );
    let affiliate_id = "n1".to_owned();
    let delete = AffiliateDeleteRequest { cluster_id: cluster_id.clone(), affiliate_id };
    kept.has("AffiliateDeleteRequest", delete);
    kept.has("ListRequest", ListRequest { cluster_id: cluster_id.clone() });
    kept.has("WatchRequest", WatchRequest { cluster_id });
    let affiliates = vec![Stored {
        id: "n1".to_owned(),
        data: Bytes::from_static(b"data"),
        endpoints: vec![Bytes::from_static(&[1; 16])],
    }];
    kept.has("ListResponse", ListResponse { affiliates: affiliates.clone() });
    let watch = WatchResponse { affiliates, deleted: true, snapshot_continues: true, expired: true };
    kept.has("WatchResponse", watch);
}

#[test]
fn what_nodes_encrypt_for_each_other_is_as_it_was() {
    let mut kept = Kept::of("affiliate.txt");
    let affiliate = Affiliate {
        node_id: "n1-id".to_owned(),
        addresses: vec!["10.0.0.1".parse().unwrap(), "2001:db8::1".parse().unwrap()],
        hostname: "host".to_owned(),
        nodename: "n1".to_owned(),
        machine_type: "controlplane".to_owned(),
        operating_system: "Debian 12".to_owned(),
        kubespan: Some(KubeSpan {
            public_key: "AQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQEBAQE=".to_owned(),
            address: "fd00::2".parse().ok(),
            additional_addresses: vec!["10.244.1.0/24".parse().unwrap(), "fd00:244:1::/64".parse().unwrap()],
            exclude_advertised_addresses: vec!["192.168.0.0/16".parse().unwrap()],
            without_preshared_key: true,
            next_public_key: "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=".to_owned(),
        }),
        api_server_port: Some(6443),
    };
    let secret = ClusterSecret::new([9; 32]);
    for (name, affiliate) in [("full", affiliate), ("minimal", Affiliate::default())] {
        let plain = kept.same(name, affiliate.encode());
        assert_eq!(Affiliate::parse(&plain), Ok((affiliate, Vec::new())));
        let sealed = secret.seal_data([7; 12], &plain).unwrap();
        let sealed = kept.same(&format!("{name} sealed"), sealed);
        assert_eq!(secret.open_data(&sealed), Ok(plain));
    }
    for endpoint in ["198.51.100.1:51820", "[2001:db8::1]:9"] {
        let parsed: SocketAddr = endpoint.parse().unwrap();
        let sealed = kept.same(endpoint, secret.seal_endpoint(parsed));
        assert_eq!(secret.open_endpoint(&sealed), Ok(parsed));
    }
}
