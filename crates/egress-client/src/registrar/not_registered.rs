//! Reasons why a client is registered at no gateway.

use fairlead_api::names::EGRESS_REGISTRATION_PORT;
use fairlead_egress::endpoints::NO_GATEWAY;

use super::refusal::Refusal;

/// Reason why a client is registered at no gateway.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum NotRegistered {
    /// The program may not read EndpointSlices, or has not yet.
    #[error(
        "the EndpointSlices of the Egress are not known: the API server does not answer, or deploy/rbac/node.yaml is not applied"
    )]
    EndpointSlicesUnknown,
    /// No gateway is ready.
    #[error("{NO_GATEWAY}")]
    NoGateway,
    /// There are some, but none answers.
    #[error(
        "no gateway of the Egress answers: {0}; nodes must reach TCP port {EGRESS_REGISTRATION_PORT} of gateway pods"
    )]
    NoGatewayAnswers(String),
    /// Gateways have confirmed it, and none of them forwards.
    #[error("no gateway of the Egress holds one of its source addresses: see status.sourceAddresses")]
    NoSourceAddressHeld,
    /// The pod was never added as a client, or was removed meanwhile.
    #[error("the pod is no client of the Egress any more")]
    NotAClient,
    /// All gateways that are ready refuse it.
    #[error("the gateways refuse the pod: {}: {}", .0.reason, .0.message)]
    Refused(Refusal),
    /// There is no token to register with.
    #[error("the API server gives no token to register with: {0}")]
    TokenUnavailable(String),
}

impl NotRegistered {
    /// One CamelCase word; of a refusal, the gateway's.
    pub(crate) fn reason(&self) -> &str {
        match self {
            Self::EndpointSlicesUnknown => "EndpointSlicesUnknown",
            Self::NoGateway => "NoGateway",
            Self::NoGatewayAnswers(_) => "NoGatewayAnswers",
            Self::NoSourceAddressHeld => "NoSourceAddressHeld",
            Self::NotAClient => "NotAClient",
            Self::Refused(refusal) => &refusal.reason,
            Self::TokenUnavailable(_) => "TokenUnavailable",
        }
    }
}
