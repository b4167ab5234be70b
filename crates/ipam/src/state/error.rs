//! Reasons why a pod gets no address.

use super::RequestFailure;
use crate::refusal::RefusalReason;

/// Reason why a pod gets no address.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum AllocationError {
    /// `spec.disabled` of the pool is true.
    #[error(
        "pool {pool} is disabled and allocates no addresses to new pods: set spec.disabled of the AddressPool to false, \
         or change the annotation coil.cybozu.com/pool of the pod's namespace"
    )]
    Disabled {
        /// Name of the pool.
        pool: String,
    },
    /// The request for a block failed.
    #[error("no address block: {}", .0.message)]
    NoBlock(RequestFailure),
    /// The pool is being deleted.
    #[error("pool {pool} is being deleted: it allocates no addresses to new pods")]
    Terminating {
        /// Name of the pool.
        pool: String,
    },
    /// No block came in time.
    #[error(
        "no address block of pool {pool} within the time a pod may wait: is `fairlead controller` running, and is the API server reachable?"
    )]
    TimedOut {
        /// Name of the pool.
        pool: String,
    },
    /// There is no such pool.
    #[error(
        "pool {pool} does not exist: create an AddressPool of that name, or change the annotation \
         coil.cybozu.com/pool of the pod's namespace"
    )]
    UnknownPool {
        /// Name of the pool.
        pool: String,
    },
}

impl AllocationError {
    /// The reason in one word; `None` when only the message tells.
    pub fn reason(&self) -> Option<RefusalReason> {
        match self {
            Self::Disabled { .. } => Some(RefusalReason::PoolDisabled),
            Self::NoBlock(failure) => failure.reason,
            Self::Terminating { .. } => Some(RefusalReason::PoolTerminating),
            Self::TimedOut { .. } => None,
            Self::UnknownPool { .. } => Some(RefusalReason::UnknownPool),
        }
    }

    /// Whether another attempt can succeed although no user changes anything.
    pub fn is_temporary(&self) -> bool {
        matches!(self, Self::NoBlock(_) | Self::TimedOut { .. })
    }
}
