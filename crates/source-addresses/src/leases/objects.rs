//! The Leases of an Egress with source addresses, and the right of its gateways to them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fairlead_api::names::{EGRESS_PROGRAM, LABEL_APP_INSTANCE};
use fairlead_api::resources::Egress;
use fairlead_egress::objects::{common_labels, owner_reference, pod_labels};
use k8s_openapi::api::coordination::v1::Lease;
use k8s_openapi::api::rbac::v1::{PolicyRule, Role, RoleBinding, RoleRef, Subject};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use serde_json::{Value, json};

use crate::hold;

/// Annotation of a slot's Lease: its addresses, separated by commas. The controller writes it once.
pub const ANNOTATION_ADDRESSES: &str = "egress.coil.cybozu.com/source-addresses";
/// Annotation of a slot's Lease that was released: the pod that is to take it.
pub const ANNOTATION_SUCCESSOR: &str = "egress.coil.cybozu.com/successor";
/// Prefix of the annotations of gateways in the Lease of members; the name of the pod follows.
pub const ANNOTATION_MEMBER_PREFIX: &str = "gateway.egress.coil.cybozu.com/";
/// Role and RoleBinding in each namespace with such an Egress.
pub const ROLE: &str = "coil-egress-source-addresses";
const SOURCE: &str = "-source-";
/// Field of the annotation of a gateway by which the controller asks it to leave.
const LEAVE: &str = "leave";

/// Name of the Lease with the gateways of an Egress.
pub fn members_lease(egress: &str) -> String {
    format!("{egress}-gateways")
}

/// Name of the Lease of a slot.
pub fn source_lease(egress: &str, slot: u32) -> String {
    format!("{egress}{SOURCE}{slot}")
}

/// The slot of which a Lease has this name.
pub fn slot_of(egress: &str, lease: &str) -> Option<u32> {
    let slot = lease.strip_prefix(egress)?.strip_prefix(SOURCE)?.parse().ok()?;
    // One slot has one name: "007" is another's Lease.
    (source_lease(egress, slot) == lease).then_some(slot)
}

/// A slot's Lease, as it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SlotLease {
    /// Addresses of the slot.
    pub addresses: Vec<IpAddr>,
    /// Holder, term and successor, with the version of the Lease.
    pub lease: hold::Lease,
}

/// Reads a slot's Lease; `None` if it is being deleted, or its version is no number.
pub fn slot_lease(lease: &Lease) -> Option<SlotLease> {
    if lease.metadata.deletion_timestamp.is_some() {
        return None;
    }
    let version = lease.metadata.resource_version.as_deref()?.parse().ok()?;
    let spec = lease.spec.clone().unwrap_or_default();
    let annotations = lease.metadata.annotations.as_ref();
    let successor = annotations.and_then(|all| all.get(ANNOTATION_SUCCESSOR)).cloned();
    Some(SlotLease {
        addresses: addresses_of(lease),
        lease: hold::Lease {
            version,
            holder: spec.holder_identity.filter(|holder| !holder.is_empty()),
            term: spec.lease_transitions.and_then(|term| u64::try_from(term).ok()).unwrap_or(0),
            successor: successor.filter(|successor| !successor.is_empty()),
        },
    })
}

/// The addresses that a Lease is for; none for a Lease of something else.
pub fn addresses_of(lease: &Lease) -> Vec<IpAddr> {
    let text = lease.metadata.annotations.as_ref().and_then(|all| all.get(ANNOTATION_ADDRESSES));
    text.map(|text| text.split(',').filter_map(|it| it.parse().ok()).collect()).unwrap_or_default()
}

/// A write of a slot's Lease as a merge patch, which fails unless the Lease has the base version; `None` if the term is beyond what a Lease
/// can say.
pub fn lease_patch(write: &hold::Write, now: MicroTime) -> Option<Value> {
    let term = i32::try_from(write.term).ok()?;
    Some(json!({
        "metadata": {
            "resourceVersion": write.base.to_string(),
            "annotations": { ANNOTATION_SUCCESSOR: write.successor },
        },
        "spec": { "holderIdentity": write.holder, "leaseTransitions": term, "renewTime": now },
    }))
}

/// The Leases that an Egress with these slots should have: that of its gateways, and one for each slot with an address.
pub fn leases(egress: &Egress, slots: &[Vec<IpAddr>]) -> BTreeMap<String, Lease> {
    let name = egress.metadata.name.clone().unwrap_or_default();
    let lease = |lease: String, addresses: Option<String>| {
        let annotations = addresses.map(|it| BTreeMap::from([(ANNOTATION_ADDRESSES.to_owned(), it)]));
        let metadata = ObjectMeta {
            name: Some(lease.clone()),
            namespace: egress.metadata.namespace.clone(),
            labels: Some(pod_labels(&name)),
            annotations,
            owner_references: Some(vec![owner_reference(egress)]),
            ..ObjectMeta::default()
        };
        (lease, Lease { metadata, ..Lease::default() })
    };
    let numbered = (0u32..).zip(slots).filter(|(_, addresses)| !addresses.is_empty());
    let sources = numbered.map(|(number, addresses)| {
        let texts: Vec<String> = addresses.iter().map(ToString::to_string).collect();
        lease(source_lease(&name, number), Some(texts.join(",")))
    });
    std::iter::once(lease(members_lease(&name), None)).chain(sources).collect()
}

/// Whether a Lease has the labels of one of this Egress.
pub fn is_ours(egress: &str, lease: &Lease) -> bool {
    let labels = lease.metadata.labels.as_ref();
    let is_instance = labels.and_then(|labels| labels.get(LABEL_APP_INSTANCE)).is_some_and(|it| it == egress);
    let name = lease.metadata.name.as_deref().unwrap_or_default();
    is_instance && (name == members_lease(egress) || slot_of(egress, name).is_some())
}

/// The annotation of a member with (or without) the request to leave; `None` if it says so already, or is of no gateway.
pub fn asking_to_leave(value: &str, leave: bool) -> Option<String> {
    let mut entry: serde_json::Map<String, Value> = serde_json::from_str(value).ok()?;
    let is_asked = entry.get(LEAVE).and_then(Value::as_bool).unwrap_or_default();
    if leave {
        entry.insert(LEAVE.to_owned(), true.into());
    } else {
        entry.remove(LEAVE);
    }
    (is_asked != leave).then(|| Value::from(entry).to_string())
}

/// The pods whose annotation in the Lease of members is of none of these pods (names with UIDs).
pub fn gone_members(lease: &Lease, pods: &BTreeSet<(String, String)>) -> Vec<(String, String)> {
    let annotations = lease.metadata.annotations.iter().flatten();
    let members = annotations.filter_map(|(key, value)| {
        let pod = key.strip_prefix(ANNOTATION_MEMBER_PREFIX)?;
        let entry: Value = serde_json::from_str(value).unwrap_or_default();
        let uid = entry.get("uid").and_then(Value::as_str).unwrap_or_default();
        Some((pod.to_owned(), uid.to_owned()))
    });
    members.filter(|member| !pods.contains(member)).collect()
}

/// Rights of the gateways of a namespace to the Leases with these names, and to no others.
pub fn role(namespace: &str, leases: &BTreeSet<String>) -> Role {
    let rule = PolicyRule {
        api_groups: Some(vec!["coordination.k8s.io".to_owned()]),
        resources: Some(vec!["leases".to_owned()]),
        resource_names: Some(leases.iter().cloned().collect()),
        verbs: ["get", "list", "watch", "patch"].map(str::to_owned).to_vec(),
        ..PolicyRule::default()
    };
    // A rule without names would be for all.
    let rules = if leases.is_empty() { Vec::new() } else { vec![rule] };
    Role { metadata: metadata(namespace), rules: Some(rules) }
}

/// The binding of [`role`] to the ServiceAccount of gateways.
pub fn role_binding(namespace: &str) -> RoleBinding {
    let subject = Subject {
        kind: "ServiceAccount".to_owned(),
        name: EGRESS_PROGRAM.to_owned(),
        namespace: Some(namespace.to_owned()),
        ..Subject::default()
    };
    let role_ref = RoleRef {
        api_group: "rbac.authorization.k8s.io".to_owned(),
        kind: "Role".to_owned(),
        name: ROLE.to_owned(),
    };
    RoleBinding { metadata: metadata(namespace), role_ref, subjects: Some(vec![subject]) }
}

fn metadata(namespace: &str) -> ObjectMeta {
    ObjectMeta {
        name: Some(ROLE.to_owned()),
        namespace: Some(namespace.to_owned()),
        labels: Some(common_labels()),
        ..ObjectMeta::default()
    }
}
