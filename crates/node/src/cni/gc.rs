//! Freeing what no runtime uses any more: GC, and DELs that plugins left while this program was away.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use fairlead_dataplane::pods;
use fairlead_ipam::Key;
use fairlead_wire::cni::ErrorCode;
use fairlead_wire::network::{Attachment, GcRequest, GcResponse};
use tonic::Status;

use super::Service;
use super::args::refuse;
use super::records::Records;

/// How often unfinished DELs are looked for: a plugin may have written one down just before this program served.
const SWEEP: Duration = Duration::from_secs(5);

/// Finishes the DELs that were left while no node program ran. For the start, before pods are adopted and verbs served.
pub fn finish_pending(records: &Records) {
    let pending = records.pending().unwrap_or_else(|error| {
        tracing::warn!(%error, "cannot read the DELs that were left for this program");
        Vec::new()
    });
    for key in pending {
        let done = pods::remove(&key.container_id, &key.ifname).map_err(|error| error.to_string());
        let done = done.and_then(|existed| {
            let forgotten = records.forget(&key).and_then(|()| records.forget_pending(&key));
            forgotten.map(|()| existed).map_err(|error| error.to_string())
        });
        match done {
            Ok(existed) => {
                tracing::info!(container = key.container_id, existed, "finished a DEL of before the start")
            }
            Err(error) => {
                tracing::warn!(container = key.container_id, error, "cannot finish a DEL; will try again")
            }
        }
    }
}

/// Finishes DELs that are left later, for ever.
pub async fn run(service: Arc<Service>) {
    loop {
        tokio::time::sleep(SWEEP).await;
        for key in service.records.pending().unwrap_or_default() {
            let _guard = service.locks.lock(&key.container_id).await;
            // An ADD or a DEL that had its turn in between may have settled it.
            if !service.records.is_pending(&key) {
                continue;
            }
            match service.detach(&key).await {
                Ok(existed) => {
                    tracing::info!(container = key.container_id, existed, "finished a DEL that was left")
                }
                Err(error) => {
                    tracing::warn!(
                        container = key.container_id,
                        error = error.message(),
                        "cannot finish a DEL"
                    )
                }
            }
        }
    }
}

impl Service {
    /// Frees every attachment of the network that is not valid. One that an ADD or DEL works on at this moment is left
    /// alone: the runtime's list may be older than that. Goes on after errors.
    pub(super) async fn collect(&self, request: GcRequest) -> Result<GcResponse, Status> {
        let _only = self.collecting.lock().await;
        let present = self.records.of(&request.network).map_err(|error| {
            let msg = format!("cannot read the attachments of network {}", request.network);
            refuse(ErrorCode::IoFailure, msg, error.to_string())
        })?;
        let free = |key: Key| async move {
            let Some(_guard) = self.locks.try_lock(&key.container_id) else {
                tracing::info!(container = key.container_id, "GC leaves a busy attachment alone");
                return (key, Ok(false));
            };
            let outcome = self.detach(&key).await.map(|_| true);
            (key, outcome)
        };
        Ok(free_all(superfluous(present, &request.valid), free).await)
    }
}

/// Goes on after each error: one attachment that cannot be freed keeps no other. `free` says whether it did.
async fn free_all<F>(keys: Vec<Key>, free: impl Fn(Key) -> F) -> GcResponse
where
    F: Future<Output = (Key, Result<bool, Status>)>,
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
            Err(error) => {
                answer.failures.push(format!("container {}: {}", key.container_id, error.message()))
            }
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
    async fn an_attachment_that_cannot_be_freed_keeps_no_other() {
        let key = |id: &str| Key { container_id: id.to_owned(), ifname: "eth0".to_owned() };
        let keys = ["a", "stuck", "busy", "b"].map(key).to_vec();
        let free = |key: Key| async move {
            let outcome = match key.container_id.as_str() {
                "stuck" => Err(refuse(ErrorCode::IoFailure, "the kernel says no", "")),
                id => Ok(id != "busy"),
            };
            (key, outcome)
        };
        let done = free_all(keys, free).await;
        let freed: Vec<&str> = done.freed.iter().map(|one| one.container_id.as_str()).collect();
        assert_eq!(freed, ["a", "b"]);
        assert_eq!(done.failures, ["container stuck: the kernel says no"]);
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
