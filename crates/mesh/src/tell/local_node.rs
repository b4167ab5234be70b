//! This node, as the discovery services of the mesh are told of it.

use std::net::IpAddr;
use std::sync::Arc;

use fairlead_discovery::client::Local;
use fairlead_keys::PublicKey;
use fairlead_members::departures::Session;
use fairlead_members::discovery_client::LocalNode;
use fairlead_members::provenance::DiscoveryStatus;
use fairlead_wire::discovery::{Affiliate, KubeSpan};
use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use ipnet::IpNet;
use tokio::sync::watch;

use super::reports::{Publication, Reports};
use crate::apply::report::Report;
use crate::gather::keys::Keys;

/// Most endpoints of this node at its own addresses: there is room for others, too.
const MAX_HOST: usize = 32;

/// This node by its keys and its reports.
pub(crate) struct ReportedNode {
    pub(crate) name: String,
    pub(crate) keys: watch::Receiver<Keys>,
    pub(crate) reports: Arc<Reports>,
}

impl LocalNode for ReportedNode {
    fn publication(&self) -> Option<Local> {
        let is_member = matches!(*self.reports.subscribe().borrow(), Publication::Member(_));
        let report = self.reports.snapshot().report.filter(|_| is_member)?;
        Some(local(&self.name, &self.keys.borrow(), &report))
    }

    fn changes(&self) -> BoxStream<'static, ()> {
        let seen = (self.reports.subscribe(), self.keys.clone());
        let next = |(mut reports, mut keys): (watch::Receiver<Publication>, watch::Receiver<Keys>)| async move {
            tokio::select! {
                _ = reports.changed() => {}
                Ok(()) = keys.changed() => {}
            }
            Some(((), (reports, keys)))
        };
        stream::unfold(seen, next).boxed()
    }

    fn session(&self, key: &PublicKey) -> Session {
        self.reports.session(key)
    }

    fn observe(&self, status: &DiscoveryStatus) {
        self.reports.discovery(status);
    }
}

fn local(node: &str, keys: &Keys, report: &Report) -> Local {
    let is_claim = |prefix: &&IpNet| report.own.claims.iter().any(|claim| IpNet::from(*claim) == **prefix);
    let kubespan = KubeSpan {
        public_key: keys.public_key.to_string(),
        next_public_key: keys.next_public_key().map(|key| key.to_string()).unwrap_or_default(),
        additional_addresses: report
            .own
            .prefixes
            .iter()
            .filter(|prefix| !is_claim(prefix))
            .copied()
            .collect(),
        address: report.own.mesh_addresses.iter().copied().find(IpAddr::is_ipv6),
        without_preshared_key: true,
        ..KubeSpan::default()
    };
    let mesh_ipv4 = report.own.mesh_addresses.iter().copied().filter(IpAddr::is_ipv4);
    let affiliate = Affiliate {
        addresses: report.own.claims.iter().copied().chain(mesh_ipv4).collect(),
        hostname: node.to_owned(),
        nodename: node.to_owned(),
        kubespan: Some(kubespan),
        ..Affiliate::default()
    };
    let manual = report.configured.manual.as_ref().and_then(|endpoint| endpoint.address());
    let host = report.endpoints.host.iter().take(MAX_HOST);
    let seen = report
        .endpoints
        .mapped
        .iter()
        .chain(&report.endpoints.reflexive)
        .chain(&report.endpoints.observed)
        .chain(&report.endpoints.peer_reflexive);
    let endpoints = manual.iter().chain(host).chain(seen).copied().collect();
    let filter = report.configured.published.clone();
    Local {
        affiliate,
        endpoints,
        extra_endpoints: report.configured.extra_endpoints.clone(),
        port: Some(report.device.port),
        filter,
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, SystemTime};

    use fairlead_keys::{PeerState, PrivateKey};
    use fairlead_path::NatType;

    use super::*;
    use crate::tell::publish::tests::{mesh, report};

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
        assert_eq!(
            (addresses.len(), nodename.as_str()),
            (2, "n1"),
            "its own and the IPv4 address on the mesh"
        );
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
}
