//! Failures of CNI operations: a reason for programs, a message and a hint for people.

use std::fmt;

use fairlead_dataplane::pods;
use fairlead_egress::problem::{EgressProblem, EgressReason};
use fairlead_ipam::RefusalReason;
use fairlead_ipam::state::AllocationError;
use fairlead_wire::cni::{CniError, ErrorCode, status_with_error};
use tonic::{Code, Status};

/// One CamelCase word per cause, the same in CNI errors, Events, logs and metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// The API server refuses or does not answer.
    ApiServerUnavailable,
    /// CHECK found differences.
    AttachmentChanged,
    /// The kernel refused, or could not be read.
    DataPlaneFailed,
    /// A bug: an operation did not finish.
    Internal,
    /// The pod does not get the egress gateways that it asks for.
    Egress(EgressReason),
    /// No address, for a reason that is not the pool's.
    FailedAllocation,
    /// The pool has only IPv6, which the kernel does not have.
    Ipv6Disabled,
    /// The container has an interface of that name already.
    InterfaceExists,
    /// A `CNI_` variable is missing or invalid.
    InvalidEnvironment,
    /// The network configuration or its `prevResult` cannot be decoded.
    InvalidNetworkConfig,
    /// Another plugin should have run before, or should not have.
    InvalidPluginOrder,
    /// The kernel does not lead packets into the mesh yet.
    MeshStarting,
    /// No pool has a free block.
    NoAddressBlock,
    /// There is no AddressPool.
    NoAddressPool,
    /// No address is allocated to the container's interface.
    NotAttached,
    /// The pool allocates no address.
    Pool(RefusalReason),
    /// The files beside the socket cannot be read or written.
    RecordsUnusable,
    /// The pod's namespace does not exist.
    UnknownNamespace,
    /// The container's network namespace cannot be entered.
    UnusableNetns,
}

impl Reason {
    /// The word.
    pub fn as_str(self) -> &'static str {
        self.entry().0
    }

    fn entry(self) -> (&'static str, ErrorCode) {
        match self {
            Self::ApiServerUnavailable => ("ApiServerUnavailable", ErrorCode::TryAgainLater),
            Self::AttachmentChanged => ("AttachmentChanged", ErrorCode::AttachmentChanged),
            Self::DataPlaneFailed => ("DataPlaneFailed", ErrorCode::IoFailure),
            Self::Egress(reason) if reason.is_temporary() => (reason.as_str(), ErrorCode::TryAgainLater),
            Self::Egress(reason) => (reason.as_str(), ErrorCode::InvalidNetworkConfig),
            Self::FailedAllocation => ("FailedAllocation", ErrorCode::TryAgainLater),
            Self::Ipv6Disabled => ("Ipv6Disabled", ErrorCode::InvalidNetworkConfig),
            Self::Internal => ("Internal", ErrorCode::Internal),
            Self::InterfaceExists => ("InterfaceExists", ErrorCode::InvalidEnvironmentVariables),
            Self::InvalidEnvironment => ("InvalidEnvironment", ErrorCode::InvalidEnvironmentVariables),
            Self::InvalidNetworkConfig => ("InvalidNetworkConfig", ErrorCode::DecodingFailure),
            Self::InvalidPluginOrder => ("InvalidPluginOrder", ErrorCode::InvalidNetworkConfig),
            Self::MeshStarting => ("MeshStarting", ErrorCode::TryAgainLater),
            Self::NoAddressBlock => ("NoAddressBlock", ErrorCode::PluginNotAvailable),
            Self::NoAddressPool => ("NoAddressPool", ErrorCode::PluginNotAvailable),
            Self::NotAttached => ("NotAttached", ErrorCode::UnknownContainer),
            Self::Pool(reason) => (reason.as_str(), ErrorCode::TryAgainLater),
            Self::RecordsUnusable => ("RecordsUnusable", ErrorCode::IoFailure),
            Self::UnknownNamespace => ("UnknownNamespace", ErrorCode::UnknownContainer),
            Self::UnusableNetns => ("UnusableNetns", ErrorCode::UnknownContainer),
        }
    }
}

impl fmt::Display for Reason {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.as_str())
    }
}

/// A failed CNI operation.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{message}")]
pub struct Failure {
    /// Reason of the failure, for programs.
    pub reason: Reason,
    /// The code of the CNI specification, usually the reason's.
    pub code: ErrorCode,
    /// Operation that failed, and its object.
    pub message: String,
    /// Advice for the operator, or the cause; may be empty.
    pub details: String,
}

impl Failure {
    /// A failure for this reason with its usual code; `message` says what failed, on what.
    pub fn new(reason: Reason, message: impl Into<String>) -> Self {
        Self { reason, code: reason.entry().1, message: message.into(), details: String::new() }
    }

    pub(super) fn code(self, code: ErrorCode) -> Self {
        Self { code, ..self }
    }

    /// The failure with what to do about it, or its cause.
    #[must_use]
    pub fn details(self, details: impl fmt::Display) -> Self {
        Self { details: details.to_string(), ..self }
    }
}

impl From<AllocationError> for Failure {
    fn from(error: AllocationError) -> Self {
        let reason = error.reason().map_or(Reason::FailedAllocation, Reason::Pool);
        let code =
            if error.is_temporary() { ErrorCode::TryAgainLater } else { ErrorCode::InvalidNetworkConfig };
        Self::new(reason, error.to_string()).code(code)
    }
}

impl From<pods::Error> for Failure {
    fn from(error: pods::Error) -> Self {
        let failure = |reason| Self::new(reason, error.to_string());
        match error {
            pods::Error::Netns { .. } => failure(Reason::UnusableNetns),
            pods::Error::Invalid { .. } => failure(Reason::InvalidEnvironment),
            // What cannot be made is the interface that CNI_IFNAME asks for (CNI specification, "Parameters").
            pods::Error::InterfaceExists { .. } => failure(Reason::InterfaceExists).details(
                "CNI_IFNAME must name an interface that does not exist yet: put Fairlead before the plugin that \
                 made it, or start `fairlead node` with --enable-ipam=false",
            ),
            _ => failure(Reason::DataPlaneFailed),
        }
    }
}

impl From<EgressProblem> for Failure {
    fn from(problem: EgressProblem) -> Self {
        Self::new(Reason::Egress(problem.reason), problem.message).details(
            "without its gateways the pod would be seen with another source address, so it does not start",
        )
    }
}

impl From<Failure> for Status {
    fn from(Failure { reason, code, message, details }: Failure) -> Self {
        let grpc = match code {
            ErrorCode::LimitedConnectivity | ErrorCode::PluginNotAvailable | ErrorCode::TryAgainLater => {
                Code::Unavailable
            }
            ErrorCode::InvalidEnvironmentVariables
            | ErrorCode::InvalidNetworkConfig
            | ErrorCode::UnsupportedField => Code::InvalidArgument,
            ErrorCode::AttachmentChanged => Code::FailedPrecondition,
            ErrorCode::UnknownContainer => Code::NotFound,
            _ => Code::Internal,
        };
        let details = if details.is_empty() { reason.to_string() } else { format!("{reason}: {details}") };
        status_with_error(grpc, CniError { code: code.into(), msg: message, details })
    }
}

/// The result of work that blocks on the kernel or on the file system. `what` names it if it panics.
///
/// # Errors
/// It panicked.
pub async fn blocking<T: Send + 'static>(
    what: &str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Failure> {
    let unfinished = |error| Failure::new(Reason::Internal, format!("{what} did not finish")).details(error);
    tokio::task::spawn_blocking(work).await.map_err(unfinished)
}

#[cfg(test)]
mod tests {
    use fairlead_wire::cni::error_of;

    use super::*;

    #[test]
    fn the_reason_is_in_the_error_beside_the_hint() {
        let failure = Failure::new(Reason::NotAttached, "no address");
        let status = Status::from(failure.clone());
        assert_eq!((status.code(), status.message()), (Code::NotFound, "no address"));
        assert_eq!(error_of(&status).unwrap().details, "NotAttached");
        let error = error_of(&Status::from(failure.details("recreate the sandbox"))).unwrap();
        assert_eq!((error.code, error.details.as_str()), (3, "NotAttached: recreate the sandbox"));
    }

    #[tokio::test]
    async fn a_panic_becomes_an_internal_error() {
        let failure = blocking("the removal", || panic!("bug")).await.map(|()| "done").unwrap_err();
        assert_eq!((failure.reason, failure.code), (Reason::Internal, ErrorCode::Internal));
        assert_eq!(failure.message, "the removal did not finish");
    }
}
