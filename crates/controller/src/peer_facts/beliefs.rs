//! InternalIPs that are believed: from the objects to [`Holders::judge`], and the refusals to a condition of the mesh and to Events.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use fairlead_api::conditions::{Finding, condition};
use fairlead_api::resources::{WireKubeMesh, WireKubePeer};
use fairlead_cluster::events::{EventPublisher, PendingEvent, node_reference, truncate_note};
use fairlead_cluster::writes::apply_status;
use ipnet::IpNet;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{Api, Client, ResourceExt};
use serde_json::json;

use super::internal_ips::{Claimant, Holders, Judged, Refusal};

/// Field manager of the condition.
const MANAGER: &str = "fairlead-controller-internal-ips";
/// The condition that says whether the InternalIPs of all Nodes are believed.
const CONDITION: &str = "InternalIPsBelieved";
/// Most refusals that the condition names.
const MAX_NAMED: usize = 4;

/// Holders of addresses, and what was told of refusals.
pub(super) struct Beliefs {
    client: Client,
    events: EventPublisher,
    holders: Holders,
    told: BTreeSet<Refusal>,
}

impl Beliefs {
    pub(super) fn new(client: Client, events: EventPublisher) -> Self {
        Self { client, events, holders: Holders::default(), told: BTreeSet::new() }
    }

    /// Judges the InternalIPs of all Nodes, by name.
    pub(super) fn judge(
        &mut self,
        mesh: Option<&Arc<WireKubeMesh>>,
        peers: &[Arc<WireKubePeer>],
        nodes: &[Arc<Node>],
    ) -> BTreeMap<String, Judged> {
        let grants = grants(mesh.map(|mesh| &**mesh));
        let by_name: BTreeMap<String, &WireKubePeer> =
            peers.iter().map(|peer| (peer.name_any(), &**peer)).collect();
        let claimants: Vec<Claimant> =
            nodes.iter().map(|node| claimant(node, by_name.get(&node.name_any()).copied())).collect();
        self.holders.judge(&claimants, |node, address| {
            grants.get(node).is_some_and(|granted| granted.iter().any(|prefix| prefix.contains(address)))
        })
    }

    /// Tells of refusals: of each an Event of its Node, once, and all in a condition of the mesh.
    pub(super) async fn publish(
        &mut self,
        mesh: Option<&Arc<WireKubeMesh>>,
        judged: &BTreeMap<String, Judged>,
    ) {
        let excluded = excluded(mesh.map(|mesh| &**mesh));
        let refusals: BTreeSet<Refusal> =
            judged.iter().flat_map(|(node, judged)| judged.refusals(node, &excluded)).collect();
        for Refusal { node, text } in refusals.difference(&self.told) {
            tracing::warn!(node, "{text}");
            self.events.warn(PendingEvent {
                regarding: node_reference(node),
                reason: "InternalIPRefused",
                action: "CopyAddresses",
                note: truncate_note(text.clone()),
            });
        }
        self.told = refusals;
        let Some(mesh) = mesh else { return };
        let present = mesh.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
        let condition = finding(&self.told, present, Timestamp::now());
        let is_known = present.iter().any(|it| it.type_ == CONDITION);
        if present.contains(&condition) || (self.told.is_empty() && !is_known) {
            return;
        }
        let name = mesh.name_any();
        let patch = json!({
            "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubeMesh", "metadata": { "name": name },
            "status": { "conditions": [condition] },
        });
        let api = Api::<WireKubeMesh>::all(self.client.clone());
        if let Err(error) = apply_status(&api, &name, MANAGER, &patch).await {
            tracing::warn!(mesh = name, %error, "cannot write the status; retrying");
        }
    }
}

/// Prefixes that administrators let nodes have.
fn grants(mesh: Option<&WireKubeMesh>) -> BTreeMap<&str, Vec<IpNet>> {
    let mut grants: BTreeMap<&str, Vec<IpNet>> = BTreeMap::new();
    for grant in mesh.iter().flat_map(|mesh| &mesh.spec.grants) {
        if let Some(node) = &grant.node {
            grants
                .entry(node)
                .or_default()
                .extend(grant.cidrs.iter().filter_map(|entry| entry.parse::<IpNet>().ok()));
        }
    }
    grants
}

/// Prefixes that are never sent into the mesh.
fn excluded(mesh: Option<&WireKubeMesh>) -> Vec<IpNet> {
    let routing = mesh.and_then(|mesh| mesh.spec.routing.as_ref());
    let entries = routing.iter().flat_map(|routing| &routing.exclude_cidrs);
    entries.filter_map(|entry| entry.parse().ok()).collect()
}

/// Addresses of type InternalIP of a Node. What does not parse is left out.
pub(super) fn internal_ips(node: &Node) -> BTreeSet<IpAddr> {
    let addresses = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let internal = addresses.filter(|address| address.type_ == "InternalIP");
    internal.filter_map(|address| address.address.parse().ok()).collect()
}

/// Claimant that a Node is. The copy in a peer counts if the peer is of this Node, and not of an earlier one of its name.
fn claimant(node: &Node, peer: Option<&WireKubePeer>) -> Claimant {
    let uid = node.uid().unwrap_or_default();
    let is_of = |peer: &&WireKubePeer| {
        let owners = peer.metadata.owner_references.iter().flatten();
        owners.filter(|owner| owner.kind == "Node").all(|owner| owner.uid == uid)
    };
    let copied = peer.filter(is_of).and_then(|peer| peer.status.as_ref()?.node.as_ref());
    let parsed = |texts: &[String]| -> BTreeSet<IpAddr> {
        texts.iter().filter_map(|text| text.parse().ok()).collect()
    };
    let metadata = peer.map_or(&node.metadata, |peer| &peer.metadata);
    let created = metadata.creation_timestamp.as_ref().map(|time| time.0.as_second());
    let since = (peer.is_none(), created.unwrap_or(i64::MAX), metadata.uid.clone().unwrap_or_default());
    Claimant {
        name: node.name_any(),
        uid,
        since,
        addresses: internal_ips(node),
        copied: copied.map(|facts| parsed(&facts.internal_ips)).unwrap_or_default(),
        first: copied.map(|facts| parsed(&facts.first_internal_ips)).unwrap_or_default(),
    }
}

fn finding(refusals: &BTreeSet<Refusal>, present: &[Condition], now: Timestamp) -> Condition {
    let holds = refusals.is_empty();
    let mut texts: Vec<&str> = refusals.iter().take(MAX_NAMED).map(|it| it.text.as_str()).collect();
    let more = format!("and {} more", refusals.len().saturating_sub(MAX_NAMED));
    if refusals.len() > MAX_NAMED {
        texts.push(&more);
    }
    let (reason, message) = match holds {
        true => ("Believed", "the InternalIPs of all Nodes are believed".to_owned()),
        false => ("InternalIPRefused", texts.join("; ")),
    };
    condition(present, Finding { type_: CONDITION, holds, reason, message }, None, Time(now))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(uid: &str) -> Node {
        serde_json::from_value(json!({
            "metadata": { "name": "n1", "uid": uid, "creationTimestamp": "2026-01-01T00:00:00Z" },
            "status": { "addresses": [
                { "type": "InternalIP", "address": "192.0.2.7" }, { "type": "ExternalIP", "address": "203.0.113.1" },
                { "type": "InternalIP", "address": "nonsense" },
            ] },
        }))
        .unwrap()
    }

    #[test]
    fn of_a_peer_of_an_earlier_node_of_the_name_nothing_counts() {
        let peer: WireKubePeer = serde_json::from_value(json!({
            "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer",
            "metadata": { "name": "n1", "ownerReferences": [{ "apiVersion": "v1", "kind": "Node", "name": "n1", "uid": "new" }] },
            "spec": {}, "status": { "node": { "internalIPs": ["192.0.2.7"], "firstInternalIPs": ["192.0.2.6"] } },
        }))
        .unwrap();
        let of = |uid: &str| claimant(&node(uid), Some(&peer));
        assert_eq!((of("new").copied.len(), of("new").first.len(), of("new").addresses.len()), (1, 1, 1));
        assert_eq!((of("old").copied.len(), of("old").first.len(), of("old").addresses.len()), (0, 0, 1));
    }

    #[test]
    fn the_condition_names_the_first_refusals_and_counts_the_rest() {
        let refusal = |number: usize| Refusal { node: "n".to_owned(), text: format!("refusal {number}") };
        let found = finding(&(0..6).map(refusal).collect(), &[], Timestamp::UNIX_EPOCH);
        assert_eq!((found.status.as_str(), found.reason.as_str()), ("False", "InternalIPRefused"));
        assert_eq!(found.message, "refusal 0; refusal 1; refusal 2; refusal 3; and 2 more");
        assert_eq!(finding(&BTreeSet::new(), &[], Timestamp::UNIX_EPOCH).status, "True");
    }
}
