//! Cleaning up when a program ends: nothing is cleared, unless its Node was deleted and `--clear-routes-on-shutdown` is set.

use std::time::Duration;

use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_dataplane::{routes, source_addresses};
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};
use tokio::time::timeout;

/// Longest that the request and the clearing may take: less than the grace kubelet gives a pod.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The API server's answer to a GET of the Node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Exists,
    Missing,
    /// A token that is bound to a Node dies with it (401).
    Unauthorized,
    Unknown,
}

/// Whether the Node was certainly deleted. `watched`: whether the watch cache had the object at last; `None` if the watch
/// never had an answer. Pure.
fn is_deleted(answer: Answer, watched: Option<bool>) -> bool {
    match answer {
        Answer::Missing => true,
        // An expired token gets the same answer; only the watch can tell the two apart.
        Answer::Unauthorized => watched == Some(false),
        Answer::Exists | Answer::Unknown => false,
    }
}

/// Empties the export table if the Node object was deleted, so that routing daemons stop advertising what other nodes may now
/// have. Everything else, and everything in all other cases, stays.
pub(crate) async fn clear_if_deleted(
    client: &Client,
    node: &str,
    numbers: RoutingIds,
    watched: Option<bool>,
) {
    let work = async {
        if !is_deleted(get(client, node).await, watched) {
            tracing::info!(node, "the Node still exists; the export table stays");
            return;
        }
        let clear = move || {
            let sources = source_addresses::remove_all(numbers);
            routes::sync_export(numbers, &[]).and_then(|difference| sources.map(|()| difference))
        };
        match tokio::task::spawn_blocking(clear).await {
            Ok(Ok(_)) => tracing::info!(node, "the Node was deleted; emptied the export table"),
            Ok(Err(error)) => tracing::warn!(%error, "cannot empty the export table"),
            Err(error) => tracing::warn!(%error, "emptying the export table stopped before it finished"),
        }
    };
    if timeout(TIMEOUT, work).await.is_err() {
        tracing::warn!(
            "the export table stays: the API server did not answer within {} s whether the Node still exists",
            TIMEOUT.as_secs()
        );
    }
}

async fn get(client: &Client, node: &str) -> Answer {
    match Api::<Node>::all(client.clone()).get_metadata_opt(node).await {
        Ok(Some(_)) => Answer::Exists,
        Ok(None) => Answer::Missing,
        Err(kube::Error::Api(status)) if status.code == 401 => Answer::Unauthorized,
        Err(error) => {
            tracing::warn!(%error, "cannot get the Node");
            Answer::Unknown
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_node_that_was_certainly_deleted_is_cleared() {
        let cases = [
            (Answer::Missing, None, true),
            (Answer::Missing, Some(true), true),
            (Answer::Unauthorized, Some(false), true),
            (Answer::Unauthorized, Some(true), false),
            (Answer::Unauthorized, None, false),
            (Answer::Unknown, Some(false), false),
            (Answer::Exists, Some(false), false),
        ];
        for (answer, watched, deleted) in cases {
            assert_eq!(is_deleted(answer, watched), deleted, "{answer:?} {watched:?}");
        }
    }
}
