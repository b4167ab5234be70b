//! Problems of the egress of pods, for the status.

use std::sync::{Arc, Mutex, PoisonError};

/// Problems of the egress of pods, as of the last comparison.
#[derive(Clone, Default)]
pub struct EgressProblems(Arc<Mutex<Vec<String>>>);

impl EgressProblems {
    /// One sentence each.
    pub fn get(&self) -> Vec<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn set(&self, problems: Vec<String>) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if *known != problems {
            if !problems.is_empty() {
                tracing::warn!(?problems, "pods of this node do not have the egress that they ask for");
            }
            *known = problems;
        }
    }
}
