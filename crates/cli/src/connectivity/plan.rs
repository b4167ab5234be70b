//! Plan of the connections of each probe pod. Pure.

use std::fmt;
use std::net::{IpAddr, SocketAddr};

/// TCP port of target pods.
pub(super) const PORT: u16 = 8080;

/// Name of the Service in front of the target pods.
pub(super) const SERVICE: &str = "target";
/// Port of the `kubernetes` Service.
const API_SERVER_PORT: u16 = 443;

/// Property that a connection is to show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Test {
    Dns,
    External,
    PodStart,
    PodToApiServer,
    PodToNode,
    PodToPod,
    PodToService,
}

impl fmt::Display for Test {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Dns => "name of a Service",
            Self::External => "outside of the cluster",
            Self::PodStart => "start of a pod",
            Self::PodToApiServer => "pod to API server",
            Self::PodToNode => "pod to node",
            Self::PodToPod => "pod to pod",
            Self::PodToService => "pod to Service",
        })
    }
}

/// One connection.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Target {
    pub(super) test: Test,
    /// Node or Service.
    pub(super) to: String,
    /// HOST:PORT.
    pub(super) address: String,
    /// Name that must be read; empty for any. `None` if connecting is enough.
    pub(super) name: Option<String>,
}

impl Target {
    /// As an argument of `connectivity probe`.
    pub(super) fn argument(&self) -> String {
        match &self.name {
            Some(name) => format!("{}={name}", self.address),
            None => self.address.clone(),
        }
    }
}

/// A node under test.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Node {
    pub(super) name: String,
    pub(super) addresses: Vec<IpAddr>,
    /// TCP port on which its kubelet listens.
    pub(super) kubelet_port: u16,
}

/// A target pod that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Pod {
    pub(super) name: String,
    pub(super) node: String,
    pub(super) addresses: Vec<IpAddr>,
}

/// The cluster, as far as it is tested.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Facts {
    pub(super) nodes: Vec<Node>,
    pub(super) pods: Vec<Pod>,
    /// Addresses of the Service in front of the pods.
    pub(super) service: Vec<IpAddr>,
    /// DNS name of the Service, if the cluster has DNS.
    pub(super) dns: Option<String>,
    /// Addresses of the Service `kubernetes`.
    pub(super) api_server: Vec<IpAddr>,
    /// HOST:PORT of the user.
    pub(super) external: Vec<String>,
}

/// All connections; the same from every node. Only address families that all pods have are used.
pub(super) fn targets(facts: &Facts) -> Vec<Target> {
    let has = |ipv4: bool| facts.pods.iter().all(|pod| pod.addresses.iter().any(|ip| ip.is_ipv4() == ipv4));
    let (ipv4, ipv6) = (has(true), has(false));
    let usable = |ip: &&IpAddr| if ip.is_ipv4() { ipv4 } else { ipv6 };
    let mut targets = Vec::new();
    let mut add = |test, to: &str, addresses: &[IpAddr], port, name: Option<&str>| {
        targets.extend(addresses.iter().filter(usable).map(|ip| Target {
            test,
            to: to.to_owned(),
            address: SocketAddr::new(*ip, port).to_string(),
            name: name.map(str::to_owned),
        }));
    };
    for pod in &facts.pods {
        add(Test::PodToPod, &pod.node, &pod.addresses, PORT, Some(&pod.name));
    }
    for node in &facts.nodes {
        add(Test::PodToNode, &node.name, &node.addresses, node.kubelet_port, None);
    }
    add(Test::PodToService, SERVICE, &facts.service, PORT, Some(""));
    add(Test::PodToApiServer, "kubernetes", &facts.api_server, API_SERVER_PORT, None);
    let named = |test, to: &str, address: String, name| Target { test, to: to.to_owned(), address, name };
    targets.extend(
        facts.dns.iter().map(|dns| named(Test::Dns, SERVICE, format!("{dns}:{PORT}"), Some(String::new()))),
    );
    targets.extend(facts.external.iter().map(|address| named(Test::External, "-", address.clone(), None)));
    targets
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ips(texts: &[&str]) -> Vec<IpAddr> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn facts() -> Facts {
        let pod = |name: &str, node: &str, texts: &[&str]| Pod {
            name: name.into(),
            node: node.into(),
            addresses: ips(texts),
        };
        Facts {
            nodes: vec![Node {
                name: "n1".into(),
                addresses: ips(&["192.0.2.1", "2001:db8::1"]),
                kubelet_port: 10250,
            }],
            pods: vec![
                pod("target-0", "n1", &["10.0.0.1", "fd00::1"]),
                pod("target-1", "n2", &["10.0.1.1", "fd00::2"]),
            ],
            service: ips(&["10.96.0.9"]),
            dns: Some("target.ns.svc".into()),
            api_server: ips(&["10.96.0.1"]),
            external: vec!["192.0.2.99:443".into()],
        }
    }

    #[test]
    fn every_pod_node_and_service_is_a_target_in_every_family() {
        let arguments: Vec<String> = targets(&facts()).iter().map(Target::argument).collect();
        let expected = [
            "10.0.0.1:8080=target-0",
            "[fd00::1]:8080=target-0",
            "10.0.1.1:8080=target-1",
            "[fd00::2]:8080=target-1",
            "192.0.2.1:10250",
            "[2001:db8::1]:10250",
            "10.96.0.9:8080=",
            "10.96.0.1:443",
            "target.ns.svc:8080=",
            "192.0.2.99:443",
        ];
        assert_eq!(arguments, expected);
    }

    #[test]
    fn a_family_that_pods_do_not_have_is_left_out() {
        let mut facts = facts();
        facts.pods[1].addresses.pop();
        facts.dns = None;
        assert!(targets(&facts).iter().all(|target| !target.address.contains('[')), "{:?}", targets(&facts));
    }
}
