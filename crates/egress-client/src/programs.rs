//! Tunnel programs that are loaded before a pod needs them: the kernel's verifier takes tens of milliseconds for each pod, which an ADD
//! would have to wait for.
//!
//! A few are kept ready while pods of this node may need them, and each that is taken is replaced later, one after the other. An ADD
//! never waits for that: where none is ready, it loads programs itself, as many ADDs at once as there are.

pub(crate) mod loading;

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use fairlead_fou::Programs;
use tokio::sync::watch;

/// Demand of pods for programs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Usage {
    /// Whether a pod has used an Egress.
    was_used: bool,
    /// Number of programs that were taken, with those that were not ready.
    taken: u64,
}

/// Programs that are ready, at most [`loading::FOR_CLIENTS`].
#[derive(Debug, Default)]
pub(crate) struct ProgramStock {
    ready: Mutex<VecDeque<Programs>>,
    usage: watch::Sender<Usage>,
}

impl ProgramStock {
    /// Takes programs that are ready, or loads some. Blocks on the kernel in the latter case.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(crate) fn take(&self) -> fairlead_fou::Result<Programs> {
        let ready = self.ready().pop_front();
        self.usage.send_modify(|usage| usage.taken = usage.taken.wrapping_add(1));
        ready.map_or_else(Programs::load, Ok)
    }

    /// A pod of this node uses an Egress: others may follow.
    pub(crate) fn used(&self) {
        self.usage.send_if_modified(|usage| !std::mem::replace(&mut usage.was_used, true));
    }

    /// Number of programs that are ready.
    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.ready().len()
    }

    /// Frees what is ready beyond this number, and says whether there are fewer.
    fn lacks(&self, wanted: usize) -> bool {
        let mut ready = self.ready();
        ready.truncate(wanted);
        ready.len() < wanted
    }

    fn ready(&self) -> MutexGuard<'_, VecDeque<Programs>> {
        self.ready.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
