//! Removing attachments that no runtime uses any more: GC, and DELs that plugins left while this program was away.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use fairlead_dataplane::pods;
use fairlead_ipam::Key;
use fairlead_wire::network::{Attachment, GcRequest, GcResponse};

use super::failure::{Failure, Reason};
use super::records::Records;
use super::service::Service;

/// Interval at which pending DELs are looked for: a plugin may have written one just before this program served.
const SWEEP_INTERVAL: Duration = Duration::from_secs(5);

/// Finishes the DELs that are pending at the start, before pods are adopted and operations served.
pub fn finish_pending(records: &Records) {
    let pending = records.pending().unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot read the pending DELs");
        Vec::new()
    });
    for key in pending {
        let done = pods::remove(&key.container_id, &key.ifname).map_err(|error| error.to_string());
        let done = done.and_then(|_| {
            let removed = records.remove(&key).and_then(|()| records.remove_pending(&key));
            removed.map_err(|error| error.to_string())
        });
        log_pending(&key, done);
    }
}

/// Finishes DELs that become pending later.
pub(super) async fn finish_pending_later(service: Arc<Service>) -> Infallible {
    loop {
        tokio::time::sleep(SWEEP_INTERVAL).await;
        for key in service.deps.records.pending().unwrap_or_default() {
            // An ADD or a DEL in progress decides itself what becomes of it.
            let Some(_guard) = service.deps.locks.try_lock(&key.container_id) else { continue };
            if service.deps.records.is_pending(&key) {
                log_pending(&key, service.detach(&key).await);
            }
        }
    }
}

fn log_pending(key: &Key, done: Result<(), impl std::fmt::Display>) {
    let container = &key.container_id;
    match done {
        Ok(()) => tracing::info!(container, "finished a pending DEL"),
        Err(error) => tracing::warn!(container, %error, "cannot finish a pending DEL; will retry"),
    }
}

impl Service {
    /// Removes every attachment of the network that is not valid. One that an ADD or DEL works on at this moment is left
    /// alone: the runtime's list may be older than that. Continues after errors.
    pub(super) async fn gc(&self, request: GcRequest) -> Result<GcResponse, Failure> {
        let _only = self.collecting.lock().await;
        let present = self.deps.records.attachments(&request.network).map_err(|error| {
            let message = format!("cannot read the attachments of network {}", request.network);
            Failure::new(Reason::RecordsUnusable, message).details(error)
        })?;
        let free = |key: Key| async move {
            let Some(_guard) = self.deps.locks.try_lock(&key.container_id) else {
                tracing::info!(container = key.container_id, "GC leaves a busy attachment alone");
                return (key, Ok(false));
            };
            let outcome = self.detach(&key).await.map(|()| true);
            (key, outcome)
        };
        Ok(free_all(superfluous(present, &request.valid), free).await)
    }
}

/// Continues after each error: an attachment that cannot be freed delays no other. `free` returns whether it did.
async fn free_all<F>(keys: Vec<Key>, free: impl Fn(Key) -> F) -> GcResponse
where
    F: Future<Output = (Key, Result<bool, Failure>)>,
{
    let mut answer = GcResponse::default();
    for key in keys {
        let (key, outcome) = free(key).await;
        match outcome {
            Ok(true) => {
                tracing::info!(container = key.container_id, ifname = key.ifname, "GC freed an attachment");
                let Key { container_id, ifname } = key;
                answer.freed.push(Attachment { container_id, ifname });
            }
            Ok(false) => {}
            Err(error) => answer.failures.push(format!("container {}: {}", key.container_id, error)),
        }
    }
    answer
}

fn superfluous(present: Vec<Key>, valid: &[Attachment]) -> Vec<Key> {
    let valid: BTreeSet<(&str, &str)> =
        valid.iter().map(|one| (one.container_id.as_str(), one.ifname.as_str())).collect();
    present
        .into_iter()
        .filter(|key| !valid.contains(&(key.container_id.as_str(), key.ifname.as_str())))
        .collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn any_key() -> impl Strategy<Value = Key> {
        ("[a-c]", "eth[01]").prop_map(|(container_id, ifname)| Key { container_id, ifname })
    }

    #[tokio::test]
    async fn an_attachment_that_cannot_be_freed_delays_no_other() {
        let key = |id: &str| Key { container_id: id.to_owned(), ifname: "eth0".to_owned() };
        let keys = ["a", "stuck", "busy", "b"].map(key).to_vec();
        let free = |key: Key| async move {
            let outcome = match key.container_id.as_str() {
                "stuck" => Err(Failure::new(Reason::DataPlaneFailed, "the kernel refused")),
                id => Ok(id != "busy"),
            };
            (key, outcome)
        };
        let done = free_all(keys, free).await;
        let freed: Vec<&str> = done.freed.iter().map(|one| one.container_id.as_str()).collect();
        assert_eq!(freed, ["a", "b"]);
        assert_eq!(done.failures, ["container stuck: the kernel refused"]);
    }

    proptest! {
        #[test]
        fn valid_attachments_stay_and_all_others_go(
            present in prop::collection::vec(any_key(), 0..8),
            valid in prop::collection::vec(any_key(), 0..8),
        ) {
            let listed: Vec<Attachment> = valid
                .iter()
                .map(|key| Attachment { container_id: key.container_id.clone(), ifname: key.ifname.clone() })
                .collect();
            let gone = superfluous(present.clone(), &listed);
            for key in &present {
                prop_assert_eq!(gone.contains(key), !valid.contains(key));
            }
            prop_assert_eq!(superfluous(present.clone(), &[]), present);
        }
    }
}
