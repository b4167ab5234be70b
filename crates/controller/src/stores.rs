//! The watch caches by which addresses are granted and released.

use fairlead_api::resources::{AddressBlock, AddressPool, BlockRequest};
use k8s_openapi::api::core::v1::Node;
use kube::api::PartialObjectMeta;
use kube::runtime::reflector::Store;
use kube::runtime::reflector::store::WriterDropped;

/// Objects as last seen.
#[derive(Debug, Clone)]
pub(crate) struct Stores {
    pub(crate) blocks: Store<AddressBlock>,
    pub(crate) nodes: Store<PartialObjectMeta<Node>>,
    pub(crate) pools: Store<AddressPool>,
    pub(crate) requests: Store<BlockRequest>,
}

impl Stores {
    /// Runs `work` after the first list of each kind: deciding from half a list could grant an address twice.
    pub(crate) async fn then(self, work: impl Future<Output = ()>) -> Result<(), WriterDropped> {
        self.blocks.wait_until_ready().await?;
        self.nodes.wait_until_ready().await?;
        self.pools.wait_until_ready().await?;
        self.requests.wait_until_ready().await?;
        work.await;
        Ok(())
    }
}
