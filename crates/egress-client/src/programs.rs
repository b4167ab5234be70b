//! Tunnel programs that are loaded before a pod needs them: the kernel's verifier takes tens of milliseconds for each pod, which an ADD
//! would have to wait for.
//!
//! A few are kept ready while pods of this node may need them, and each that is taken is replaced later, one after the other. An ADD
//! never waits for that: where none is ready, it loads programs itself, as many ADDs at once as there are.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fairlead_fou::Programs;
use tokio::sync::watch;
use tokio::time::sleep;

use super::Shared;

/// How many are kept once a pod of this node has used an Egress: pods start several at once.
const FOR_CLIENTS: usize = 4;
/// How many are kept where there is only an Egress that the next pod may use.
const FOR_THE_FIRST: usize = 2;
/// Rest before each load, so that loading takes no more than about half of one processor from ADDs.
const PAUSE: Duration = Duration::from_millis(50);
/// Rest after the kernel has refused.
const RETRY: Duration = Duration::from_secs(300);

/// How many are to be kept ready.
fn wanted(was_used: bool, is_any_egress: bool) -> usize {
    match (was_used, is_any_egress) {
        (true, _) => FOR_CLIENTS,
        (false, true) => FOR_THE_FIRST,
        (false, false) => 0,
    }
}

/// What pods have asked for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Usage {
    /// A pod has used an Egress.
    was_used: bool,
    /// How many programs were taken, with those that were not ready.
    taken: u64,
}

/// Programs that are ready, at most [`FOR_CLIENTS`].
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

    /// How many are ready.
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

/// Keeps as many ready as are wanted, until the program ends.
pub(crate) async fn run(shared: Arc<Shared>) -> Infallible {
    let inputs = &shared.deps.inputs;
    let (mut of_inputs, mut usage) = (inputs.subscribe(), shared.programs.usage.subscribe());
    loop {
        let was_used = usage.borrow_and_update().was_used;
        if shared.programs.lacks(wanted(was_used, inputs.has_egresses())) {
            sleep(PAUSE).await;
            if let Err(error) = load(&shared).await {
                tracing::warn!(
                    error,
                    "cannot load tunnel programs ahead; pods that need them try it themselves"
                );
                sleep(RETRY).await;
            }
            continue;
        }
        tokio::select! {
            _ = usage.changed() => {}
            () = of_inputs.changed() => sleep(PAUSE).await,
        }
    }
}

/// Loads one more.
async fn load(shared: &Shared) -> Result<(), String> {
    let loaded = tokio::task::spawn_blocking(Programs::load).await.map_err(|error| error.to_string())?;
    shared.programs.ready().push_back(loaded.map_err(|error| error.to_string())?);
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_kept_where_no_pod_can_need_it() {
        assert_eq!(wanted(false, false), 0);
        assert_eq!(wanted(false, true), FOR_THE_FIRST);
        assert_eq!([wanted(true, true), wanted(true, false)], [FOR_CLIENTS; 2]);
    }
}
