//! The watch caches by which addresses are granted and released.

use std::sync::{Arc, Mutex};

use fairlead_api::resources::{AddressBlock, AddressPool, BlockRequest};
use k8s_openapi::api::core::v1::Node;
use kube::runtime::reflector::Store;
use tokio::sync::watch;
use tokio::sync::watch::error::RecvError;

use crate::known_blocks::KnownBlocks;

/// Objects as last seen.
#[derive(Debug, Clone)]
pub(crate) struct Stores {
    pub(crate) blocks: Store<AddressBlock>,
    /// Nodes, reduced to identity, pod capacity, addresses and location.
    pub(crate) nodes: Store<Node>,
    pub(crate) pools: Store<AddressPool>,
    pub(crate) requests: Store<BlockRequest>,
    /// The blocks, as decisions about requests take them.
    pub(crate) known: Arc<Mutex<KnownBlocks>>,
    /// Generations of the four kinds, above zero after the first list. [`Store::wait_until_ready`] wakes only one of several
    /// tasks that wait.
    pub(crate) generations: [watch::Receiver<u64>; 4],
}

impl Stores {
    /// Runs `work` after the first list of each kind: deciding from half a list could grant an address twice.
    pub(crate) async fn then(self, work: impl Future<Output = ()>) -> Result<(), RecvError> {
        for mut generation in self.generations {
            generation.wait_for(|generation| *generation > 0).await?;
        }
        work.await;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use kube::runtime::reflector::store;

    use super::*;

    #[tokio::test]
    async fn all_that_wait_for_the_first_lists_start_together() {
        let (generations, receivers): (Vec<_>, Vec<_>) = (0..4).map(|_| watch::channel(0)).unzip();
        let stores = Stores {
            blocks: store().0,
            nodes: store().0,
            pools: store().0,
            requests: store().0,
            known: Arc::default(),
            generations: receivers.try_into().unwrap(),
        };
        let started = Arc::new(AtomicUsize::new(0));
        let start = |stores: Stores| {
            let started = Arc::clone(&started);
            tokio::spawn(stores.then(async move {
                started.fetch_add(1, Ordering::Relaxed);
            }))
        };
        let tasks = [start(stores.clone()), start(stores.clone()), start(stores)];
        for generation in &generations {
            tokio::task::yield_now().await;
            assert_eq!(started.load(Ordering::Relaxed), 0, "a list is missing");
            generation.send_replace(1);
        }
        for task in tasks {
            task.await.unwrap().unwrap();
        }
        assert_eq!(started.load(Ordering::Relaxed), 3);
    }
}
