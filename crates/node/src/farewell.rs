//! What an ending program clears: nothing, unless its node is gone for good and somebody asked for it.

use std::time::Duration;

use fairlead_dataplane::routes;
use fairlead_dataplane::routing_ids::RoutingIds;
use k8s_openapi::api::core::v1::Node;
use kube::{Api, Client};
use tokio::time::timeout;

/// How long asking and clearing may take: less than the grace kubelet gives a pod.
const BUDGET: Duration = Duration::from_secs(10);

/// What the API server says when it is asked for the Node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Answer {
    Exists,
    Missing,
    /// A token that is bound to a Node dies with it (401).
    Unauthorized,
    Unknown,
}

/// Whether the Node is gone for sure. `watched`: whether the last watch of it ended with the object there, if it ever
/// had an answer. Pure.
fn is_gone(answer: Answer, watched: Option<bool>) -> bool {
    match answer {
        Answer::Missing => true,
        // The same answer comes for a token that ran out; only the watch can tell the two apart.
        Answer::Unauthorized => watched == Some(false),
        Answer::Exists | Answer::Unknown => false,
    }
}

/// Empties the export table if the Node object is gone, so that routing daemons stop advertising what other nodes may now have.
/// Everything else, and everything in all other cases, stays.
pub(crate) async fn clear_if_gone(client: &Client, node: &str, numbers: RoutingIds, watched: Option<bool>) {
    let work = async {
        if !is_gone(ask(client, node).await, watched) {
            tracing::info!(node, "the Node still exists; the export table stays");
            return;
        }
        match tokio::task::spawn_blocking(move || routes::sync_export(numbers, &[])).await {
            Ok(Ok(_)) => tracing::info!(node, "the Node is gone; emptied the export table"),
            Ok(Err(error)) => tracing::warn!(%error, "cannot empty the export table"),
            Err(error) => tracing::warn!(%error, "emptying the export table stopped half-way"),
        }
    };
    if timeout(BUDGET, work).await.is_err() {
        tracing::warn!(
            "the export table stays: the API server did not say in {} s whether the Node is gone",
            BUDGET.as_secs()
        );
    }
}

async fn ask(client: &Client, node: &str) -> Answer {
    match Api::<Node>::all(client.clone()).get_metadata_opt(node).await {
        Ok(Some(_)) => Answer::Exists,
        Ok(None) => Answer::Missing,
        Err(kube::Error::Api(status)) if status.code == 401 => Answer::Unauthorized,
        Err(error) => {
            tracing::warn!(%error, "cannot ask whether the Node still exists");
            Answer::Unknown
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_node_that_is_gone_for_sure_is_cleared_after() {
        let cases = [
            (Answer::Missing, None, true),
            (Answer::Missing, Some(true), true),
            (Answer::Unauthorized, Some(false), true),
            (Answer::Unauthorized, Some(true), false),
            (Answer::Unauthorized, None, false),
            (Answer::Unknown, Some(false), false),
            (Answer::Exists, Some(false), false),
        ];
        for (answer, watched, gone) in cases {
            assert_eq!(is_gone(answer, watched), gone, "{answer:?} {watched:?}");
        }
    }
}
