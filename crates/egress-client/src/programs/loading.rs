//! Loading of programs ahead of the pods that need them.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use fairlead_fou::Programs;
use tokio::time::sleep;

use crate::pod_egress::PodEgress;

/// Number of programs that are kept ready once a pod of this node has used an Egress: pods start several at once.
const FOR_CLIENTS: usize = 4;
/// Number of programs that are kept ready where there is only an Egress that the next pod may use.
const FOR_THE_FIRST: usize = 2;
/// Rest before each load, so that loading takes no more than about half of one processor from ADDs.
const PAUSE: Duration = Duration::from_millis(50);
/// Rest after the kernel has refused.
const RETRY: Duration = Duration::from_secs(300);

/// Number of programs that are to be kept ready.
fn wanted(was_used: bool, is_any_egress: bool) -> usize {
    match (was_used, is_any_egress) {
        (true, _) => FOR_CLIENTS,
        (false, true) => FOR_THE_FIRST,
        (false, false) => 0,
    }
}

/// Keeps as many ready as are wanted, until the program ends.
pub(crate) async fn run(shared: Arc<PodEgress>) -> Infallible {
    let inputs = &shared.deps.inputs;
    let mut of_inputs = inputs.subscribe();
    let mut usage = shared.programs.usage.subscribe();
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

/// Loads one more program.
async fn load(shared: &PodEgress) -> Result<(), String> {
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
