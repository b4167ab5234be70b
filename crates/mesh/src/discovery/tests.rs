mod staging;

use fairlead_keys::{PeerState, PrivateKey, PublicKey};
use fairlead_path::NatType;

use super::*;
use crate::publish::tests::{mesh, report};

#[test]
fn a_node_publishes_what_others_need_to_reach_it() {
    let mut report = report(NatType::Cone, Vec::new());
    report.own.claims = vec!["192.168.1.10".parse().unwrap()];
    report.own.prefixes = vec!["192.168.1.10/32".parse().unwrap(), "10.64.0.0/27".parse().unwrap()];
    report.own.mesh_addresses =
        ["fd7f:175a:b97c:5602::1", "100.64.0.1"].map(|it| it.parse().unwrap()).to_vec();
    report.configured.manual = Some("198.51.100.1:7".parse().unwrap());
    report.endpoints.host = (0..100).map(|port| ([192, 168, 1, 10], 1000 + port).into()).collect();
    let keys = Keys::new(PrivateKey([1; 32]));
    let local = local("n1", &keys, &report);
    let Affiliate { addresses, nodename, kubespan, .. } = local.affiliate;
    let kubespan = kubespan.unwrap();
    assert_eq!((addresses.len(), nodename.as_str()), (2, "n1"), "its own and the IPv4 address on the mesh");
    assert_eq!(kubespan.address, report.own.mesh_addresses.first().copied());
    assert_eq!(kubespan.additional_addresses, ["10.64.0.0/27".parse().unwrap()]);
    assert!(kubespan.without_preshared_key);
    assert_eq!((local.endpoints.len(), local.port), (1 + MAX_HOST + 1, Some(51820)));
    assert_eq!(local.endpoints[0], "198.51.100.1:7".parse().unwrap());
    assert_eq!(local.endpoints.last(), Some(&"203.0.113.9:4000".parse().unwrap()));
}

#[test]
fn a_peer_is_alive_while_its_tunnel_works_or_its_handshake_is_young() {
    let now = SystemTime::now();
    let key = PublicKey([1; 32]);
    assert_eq!(mesh(1, &[]).session(&key, now), Session::Alive, "up, whatever the clock says");
    assert_eq!(mesh(1, &[]).session(&PublicKey([2; 32]), now), Session::Never);
    let with_handshake = |ago: u64| {
        let mut report = mesh(1, &[0]);
        let last_handshake = Some(now - Duration::from_secs(ago));
        let device = report.peers[0].device.take().map(Arc::unwrap_or_clone).unwrap();
        report.peers[0].device = Some(Arc::new(PeerState { last_handshake, ..device }));
        report.session(&key, now)
    };
    assert_eq!((with_handshake(179), with_handshake(180)), (Session::Alive, Session::Ended));
}
