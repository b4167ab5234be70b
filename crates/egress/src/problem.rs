//! Problems that keep a pod from using the egress gateways that it asks for.

use std::fmt;

use crate::EgressName;
use crate::annotation::InvalidAnnotation;
use crate::client::{self, Problems};

/// One CamelCase word per cause, the same in CNI errors, Events, logs and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum EgressReason {
    /// An annotation names no gateways.
    AnnotationInvalid,
    /// `spec.destinations` has an entry that is no prefix.
    DestinationInvalid,
    /// The node program has `--enable-egress=false`.
    Disabled,
    /// A gateway cannot be a client.
    GatewayIsClient,
    /// A pod in its node's network has none of its own.
    HostNetwork,
    /// Packets do not fit through a tunnel.
    MtuTooSmall,
    /// No destination has an address family of the pod.
    NoDestination,
    /// The Service has no address of a family of the destinations.
    NoServiceAddress,
    /// `spec.allowedNamespaces` does not have the pod's namespace.
    NotAllowed,
    /// No gateway has taken the pod as its client.
    NotRegistered,
    /// The controller has not written `status.clusterRanges` yet.
    RangesUnknown,
    /// The two links would have one name.
    SameLink,
    /// Two Egresses have the same destination.
    SamePrefix,
    /// There is no Service yet.
    ServiceMissing,
    /// A destination contains the address of a Service.
    SwallowsTunnel,
    /// More ranges of the cluster than rules.
    TooManyRanges,
    /// There is no such Egress.
    Unknown,
}

impl EgressReason {
    /// All of them.
    pub const ALL: [Self; 17] = [
        Self::AnnotationInvalid,
        Self::DestinationInvalid,
        Self::Disabled,
        Self::GatewayIsClient,
        Self::HostNetwork,
        Self::MtuTooSmall,
        Self::NoDestination,
        Self::NoServiceAddress,
        Self::NotAllowed,
        Self::NotRegistered,
        Self::RangesUnknown,
        Self::SameLink,
        Self::SamePrefix,
        Self::ServiceMissing,
        Self::SwallowsTunnel,
        Self::TooManyRanges,
        Self::Unknown,
    ];

    /// The word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AnnotationInvalid => "EgressAnnotationInvalid",
            Self::DestinationInvalid => "EgressDestinationInvalid",
            Self::Disabled => "EgressDisabled",
            Self::GatewayIsClient => "EgressGatewayIsClient",
            Self::HostNetwork => "EgressHostNetwork",
            Self::MtuTooSmall => "EgressMtuTooSmall",
            Self::NoDestination => "EgressNoDestination",
            Self::NoServiceAddress => "EgressNoServiceAddress",
            Self::NotAllowed => "EgressNotAllowed",
            Self::NotRegistered => "EgressNotRegistered",
            Self::RangesUnknown => "EgressRangesUnknown",
            Self::SameLink => "EgressSameLink",
            Self::SamePrefix => "EgressSamePrefix",
            Self::ServiceMissing => "EgressServiceMissing",
            Self::SwallowsTunnel => "EgressSwallowsTunnel",
            Self::TooManyRanges => "EgressTooManyRanges",
            Self::Unknown => "EgressUnknown",
        }
    }

    /// Whether it may be over when the runtime tries again, without a change of the pod.
    pub fn is_temporary(self) -> bool {
        matches!(
            self,
            Self::NoServiceAddress
                | Self::NotRegistered
                | Self::RangesUnknown
                | Self::ServiceMissing
                | Self::Unknown
        )
    }
}

/// Problem with the egress of one pod.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
#[error("{message}")]
pub struct EgressProblem {
    /// Kind of the problem.
    pub reason: EgressReason,
    /// Message for the user: the error, its object, and what to do about it.
    pub message: String,
}

impl EgressProblem {
    /// A problem of this kind, in these words.
    pub fn new(reason: EgressReason, message: impl fmt::Display) -> Self {
        Self { reason, message: message.to_string() }
    }

    /// The problem of a pod that asks for an Egress that is not there.
    pub fn unknown(egress: &EgressName) -> Self {
        let message = format!("there is no Egress {egress}: create it, or correct the annotation of the pod");
        Self::new(EgressReason::Unknown, message)
    }

    /// The problem of a pod whose namespace an Egress does not allow.
    pub fn not_allowed(egress: &EgressName, namespace: &str) -> Self {
        let message =
            format!("Egress {egress} does not allow pods of namespace {namespace} (spec.allowedNamespaces)");
        Self::new(EgressReason::NotAllowed, message)
    }

    /// The problem of an Egress without a Service.
    pub fn service_missing(egress: &EgressName) -> Self {
        let message = format!(
            "Egress {egress} has no Service with an address yet: the controller of egress gateways makes it"
        );
        Self::new(EgressReason::ServiceMissing, message)
    }

    /// The problem of an Egress without ranges of the cluster.
    pub fn ranges_unknown(egress: &EgressName) -> Self {
        let message = format!(
            "Egress {egress} has no status.clusterRanges for its destinations yet: the controller of egress gateways writes the ranges of the cluster there; see \
             whether it runs, and is as new as the node program"
        );
        Self::new(EgressReason::RangesUnknown, message)
    }

    /// The problem of an Egress with a destination that is no prefix.
    pub fn invalid_destination(egress: &EgressName, error: &str) -> Self {
        Self::new(EgressReason::DestinationInvalid, format!("Egress {egress}: {error}"))
    }

    /// The problem of a gateway that asks for gateways.
    pub fn gateway(egress: &EgressName) -> Self {
        let message = format!(
            "the pod is a gateway of Egress {egress} by its labels, and a gateway cannot use egress gateways itself: \
             remove the annotation egress.coil.cybozu.com/… of its template"
        );
        Self::new(EgressReason::GatewayIsClient, message)
    }

    /// The problem of a node that has no egress.
    pub fn disabled() -> Self {
        let message = "the pod asks for egress gateways, and the node program of its node has --enable-egress=false: let the pod run on another \
                       node, or remove that flag";
        Self::new(EgressReason::Disabled, message)
    }

    /// The problem of a pod in its node's network.
    pub fn host_network() -> Self {
        let message = "the pod uses its node's network (spec.hostNetwork), so it cannot use egress gateways: its packets have \
                       the node's address";
        Self::new(EgressReason::HostNetwork, message)
    }
}

impl From<InvalidAnnotation> for EgressProblem {
    fn from(error: InvalidAnnotation) -> Self {
        Self::new(EgressReason::AnnotationInvalid, error)
    }
}

/// All of them in words, with the reason of the first.
impl From<Problems> for EgressProblem {
    fn from(problems: Problems) -> Self {
        let reason = problems.iter().next().map_or(EgressReason::NoDestination, reason_of);
        Self::new(reason, &problems)
    }
}

fn reason_of(problem: &client::Problem) -> EgressReason {
    match problem {
        client::Problem::MtuTooSmall { .. } => EgressReason::MtuTooSmall,
        client::Problem::NoDestination { .. } => EgressReason::NoDestination,
        client::Problem::NoServiceAddress { .. } => EgressReason::NoServiceAddress,
        client::Problem::SameLink { .. } => EgressReason::SameLink,
        client::Problem::SamePrefix { .. } => EgressReason::SamePrefix,
        client::Problem::SwallowsTunnel { .. } => EgressReason::SwallowsTunnel,
        client::Problem::TooManyRanges { .. } => EgressReason::TooManyRanges,
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn reasons_are_different_words() {
        let words: BTreeSet<&str> = EgressReason::ALL.into_iter().map(EgressReason::as_str).collect();
        assert_eq!(words.len(), EgressReason::ALL.len());
        assert!(
            words
                .iter()
                .all(|word| word.starts_with("Egress") && word.bytes().all(|b| b.is_ascii_alphanumeric()))
        );
    }
}
