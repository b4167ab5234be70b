//! Data of `fairlead ipam check`, which the node program and the command line share.

use fairlead_cluster::pods::SlimPod;
use fairlead_ipam::check::{Finding, KnownPod};
use fairlead_wire::node::Finding as WireFinding;

/// Pod as the checks know it.
pub fn known_pod(pod: &SlimPod) -> KnownPod {
    KnownPod {
        namespace: pod.namespace().to_owned(),
        name: pod.name().to_owned(),
        uids: pod.uids(),
        node: pod.node().unwrap_or_default().to_owned(),
        addresses: pod.addresses(),
        has_network: !pod.uses_host_network() && !pod.has_ended(),
    }
}

/// Finding as it travels between the node program and the command line.
pub fn to_wire(finding: Finding) -> WireFinding {
    WireFinding {
        severity: finding.severity.as_str().to_owned(),
        reason: finding.reason.to_owned(),
        subject: finding.subject,
        what: finding.what,
        why: finding.why,
        advice: finding.advice,
    }
}
