//! Traffic and connections of each client, for metrics and for `/clients`. Pure.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fairlead_fou::ClientTraffic;
use serde::Serialize;

use crate::registry::Registry;

/// Clients that metrics show: each is a few series. `/clients` has all.
pub(crate) const MAX_IN_METRICS: usize = 256;

/// A client.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct ClientUse {
    /// Namespace and name of the pod; empty for one of an earlier process that no node program has registered yet.
    pub(crate) namespace: String,
    pub(crate) name: String,
    /// Node of the pod; empty as above.
    pub(crate) node: String,
    pub(crate) addresses: Vec<IpAddr>,
    /// Packets that it has sent since it is a client of this process, and their bytes.
    pub(crate) sent_packets: u64,
    pub(crate) sent_bytes: u64,
    pub(crate) received_packets: u64,
    pub(crate) received_bytes: u64,
    /// Connections that the client has open; `None` where they are not counted, since there are very many.
    pub(crate) connections: Option<u64>,
}

/// Clients, as metrics and `/clients` show them: read again only when something of them has changed.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Registered {
    pub(crate) uses: Vec<ClientUse>,
    /// Clients of each Node.
    pub(crate) nodes: BTreeMap<String, u64>,
    /// Addresses of clients of an earlier process that no node program has registered yet.
    pub(crate) adopted: u64,
}

impl Registered {
    /// As [`uses`].
    pub(crate) fn of(
        registry: &Registry,
        traffic: &BTreeMap<IpAddr, ClientTraffic>,
        connections: Option<&BTreeMap<IpAddr, usize>>,
    ) -> Self {
        let mut pods = BTreeMap::<&str, BTreeSet<&str>>::new();
        for owner in registry.owners().values() {
            pods.entry(&owner.node).or_default().insert(&owner.client.uid);
        }
        Self {
            uses: uses(registry, traffic, connections),
            nodes: pods.into_iter().map(|(node, pods)| (node.to_owned(), pods.len() as u64)).collect(),
            adopted: registry.adopted().len() as u64,
        }
    }
}

/// Load of the gateway, as `/load` shows it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Load {
    /// Tracked connections, of clients or not, without copies of other gateways' connections; `None` before they have been counted.
    pub(crate) connections: Option<u64>,
    /// Client pods.
    pub(crate) clients: u64,
    /// The gateway takes no new flows and ends when those that it has have ended.
    pub(crate) draining: bool,
    /// The targets that the Egress has probed do not answer.
    pub(crate) unhealthy: bool,
    /// Least number of seconds by which the clock here is ahead of the API server's (positive) or behind it; `None` if that has not been seen.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) clock_error_seconds: Option<i64>,
}

/// All clients by namespace and name. `traffic` and `connections` are by address.
pub(crate) fn uses(
    registry: &Registry,
    traffic: &BTreeMap<IpAddr, ClientTraffic>,
    connections: Option<&BTreeMap<IpAddr, usize>>,
) -> Vec<ClientUse> {
    let mut by_uid: BTreeMap<(&str, &str, String), (&str, Vec<IpAddr>)> = BTreeMap::new();
    for (address, owner) in registry.owners() {
        let client = &owner.client;
        let key = (client.namespace.as_str(), client.name.as_str(), client.uid.clone());
        by_uid.entry(key).or_insert_with(|| (&owner.node, Vec::new())).1.push(*address);
    }
    for address in registry.adopted() {
        by_uid.insert(("", "", address.to_string()), ("", vec![*address]));
    }
    let of = |((namespace, name, _), (node, addresses)): ((&str, &str, String), (&str, Vec<IpAddr>))| {
        let of_address = |address: &IpAddr| traffic.get(address).copied().unwrap_or_default();
        let sum = addresses.iter().map(of_address).fold(ClientTraffic::default(), ClientTraffic::and);
        let open = |address: &IpAddr| {
            connections.map(|found| found.get(address).copied().unwrap_or_default() as u64)
        };
        ClientUse {
            namespace: namespace.to_owned(),
            name: name.to_owned(),
            node: node.to_owned(),
            sent_packets: sum.sent_packets,
            sent_bytes: sum.sent_bytes,
            received_packets: sum.received_packets,
            received_bytes: sum.received_bytes,
            connections: addresses.iter().map(open).sum(),
            addresses,
        }
    };
    by_uid.into_iter().map(of).collect()
}

/// Clients that metrics show: if there are too many, the ones with the most bytes.
pub(crate) fn in_metrics(uses: &[ClientUse]) -> Vec<&ClientUse> {
    let mut shown: Vec<&ClientUse> = uses.iter().filter(|client| !client.name.is_empty()).collect();
    if shown.len() > MAX_IN_METRICS {
        let bytes = |client: &ClientUse| client.sent_bytes.saturating_add(client.received_bytes);
        shown.sort_by_key(|client| std::cmp::Reverse(bytes(client)));
        shown.truncate(MAX_IN_METRICS);
    }
    shown
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use super::*;
    use crate::facts::Facts;
    use crate::registry::{Client, Update};

    fn registry(pods: u8) -> Registry {
        let mut registry = Registry::new(Vec::new(), [IpAddr::from([10, 0, 1, 1])]);
        let mut facts = Facts::default();
        facts.nodes.insert("n1".to_owned());
        facts.pod_cidrs.add("n1", "10.0.0.0/24".parse().unwrap());
        facts.pod_cidrs.add("n1", "fd00::/64".parse().unwrap());
        registry.set_facts(facts);
        let stream = registry.begin("n1");
        let client = |number: u8| Client {
            uid: format!("u{number}"),
            namespace: "shop".to_owned(),
            name: format!("p{number}"),
            addresses: [IpAddr::from([10, 0, 0, number]), format!("fd00::{number}").parse().unwrap()]
                .into_iter()
                .collect(),
        };
        registry.check("n1", stream, 1).unwrap();
        registry.update("n1", stream, Update::All((1..=pods).map(client).collect())).unwrap();
        registry
    }

    #[test]
    fn both_families_of_a_pod_are_one_client() {
        let number =
            |bytes| ClientTraffic { sent_bytes: bytes, received_bytes: 1, ..ClientTraffic::default() };
        let traffic = [("10.0.0.1", number(5)), ("fd00::1", number(7)), ("10.0.0.9", number(9))];
        let traffic = traffic.map(|(address, traffic)| (address.parse().unwrap(), traffic)).into();
        let connections =
            [("10.0.0.1", 2), ("fd00::1", 3)].map(|(it, count)| (it.parse().unwrap(), count)).into();
        let uses = super::uses(&registry(2), &traffic, Some(&connections));
        let seen: Vec<_> = uses
            .iter()
            .map(|it| (it.name.as_str(), it.sent_bytes, it.received_bytes, it.connections))
            .collect();
        // The first is the one that is adopted.
        assert_eq!(seen, [("", 0, 0, Some(0)), ("p1", 12, 2, Some(5)), ("p2", 0, 0, Some(0))]);
        assert_eq!(uses[1].addresses.len(), 2);
        assert_eq!(super::uses(&registry(1), &traffic, None)[1].connections, None);
        assert_eq!(in_metrics(&uses).len(), 2);
        let Registered { nodes, adopted, .. } = Registered::of(&registry(2), &traffic, None);
        assert_eq!((nodes, adopted), ([("n1".to_owned(), 2)].into(), 1));
    }

    #[test]
    fn metrics_show_those_with_the_most_bytes() {
        let client = |number: usize| ClientUse {
            namespace: "n".to_owned(),
            name: number.to_string(),
            node: String::new(),
            addresses: vec![Ipv4Addr::LOCALHOST.into()],
            sent_packets: 0,
            sent_bytes: number as u64,
            received_packets: 0,
            received_bytes: 0,
            connections: None,
        };
        let all: Vec<ClientUse> = (0..1000).map(client).collect();
        let shown = in_metrics(&all);
        assert_eq!(shown.len(), MAX_IN_METRICS);
        assert!(shown.iter().all(|client| client.sent_bytes >= (1000 - MAX_IN_METRICS) as u64));
    }
}
