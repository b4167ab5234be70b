//! Findings about Egresses that are collected at intervals, besides what their objects say.

use std::collections::BTreeMap;
use std::sync::Arc;

use fairlead_api::resources::Egress;
use futures::{StreamExt as _, stream};
use kube::ResourceExt as _;
use tokio::sync::watch;

/// Egresses that are looked at at the same time: one with silent gateways does not hold up the others.
const EGRESSES: usize = 4;

/// Cause why a gateway is not available, or another problem of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cause {
    /// One CamelCase word.
    pub(super) reason: &'static str,
    /// A sentence, with the pod.
    pub(super) message: String,
}

/// Causes by the UIDs of Egresses.
pub(super) type Causes = Arc<BTreeMap<String, Cause>>;

/// Publishes what a task finds, and says when that changes.
pub(super) struct Findings {
    found: watch::Sender<Causes>,
    changed: watch::Sender<u64>,
}

impl Findings {
    /// Without any so far; with the receivers of what is found and of its changes.
    pub(super) fn new() -> (Self, (watch::Receiver<Causes>, watch::Receiver<u64>)) {
        let (found, causes) = watch::channel(Causes::default());
        // Nothing waits for the first look.
        let (changed, signal) = watch::channel(1);
        (Self { found, changed }, (causes, signal))
    }

    /// Looks at these Egresses. One that cannot be looked at is as it was: it has not been mended for that.
    pub(super) async fn renew<F, E>(
        &self,
        egresses: impl Iterator<Item = Arc<Egress>>,
        look: impl Fn(Arc<Egress>) -> F,
    ) where
        F: Future<Output = Result<Option<Cause>, E>>,
    {
        let before = Arc::clone(&self.found.borrow());
        let looks = egresses.filter_map(|egress| {
            let uid = egress.uid()?;
            let found = look(egress);
            let before = before.get(&uid).cloned();
            Some(async move { Some((uid, found.await.unwrap_or(before)?)) })
        });
        let causes: BTreeMap<String, Cause> =
            stream::iter(looks).buffer_unordered(EGRESSES).filter_map(std::future::ready).collect().await;
        if **self.found.borrow() != causes {
            self.found.send_replace(Arc::new(causes));
            self.changed.send_modify(|generation| *generation = generation.wrapping_add(1));
        }
    }
}
