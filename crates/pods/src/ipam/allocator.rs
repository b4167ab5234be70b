//! Allocator of this node: one pure [`NodeState`] behind one lock.
//!
//! Every method locks the state, lets it decide, and applies the [`Effects`] after it has released the lock: it wakes pods
//! that wait and notifies the task that makes BlockRequests ([`super::requests`]) or the one that keeps and releases blocks
//! ([`super::blocks`]).

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fairlead_api::names::is_object_name;
use fairlead_api::resources::{AddressBlock, AddressPool};
use fairlead_dataplane::pods::PodOnNode;
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_ipam::check::Owner;
use fairlead_ipam::state::{
    AllocationError, Attachment, Attempt, BlockDemand, Effects, NodeState, PoolInfo, RequestFailure,
    ShownBlock,
};
use fairlead_ipam::{Allocated, Allocation, Block, BlockUsage, Key, Unclear};
use fairlead_wire::node::Block as WireBlock;
use ipnet::IpNet;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, ResourceExt};
use tokio::sync::Notify;
use tokio::time::{timeout, timeout_at};

/// Time the API server may take to say whether a pool exists.
const POOL_TIMEOUT: Duration = Duration::from_secs(5);

/// The addresses of this node.
pub struct Ipam {
    pub(super) node: String,
    /// Numbers of the routes of pods and blocks in the kernel.
    numbers: RoutingIds,
    state: Mutex<NodeState<Arc<Notify>>>,
    /// There may be a BlockRequest to make.
    pub(super) request: Notify,
    /// A granted block is assumed.
    pub(super) assumed: Notify,
    /// A block of a cordoned pool has become empty.
    pub(super) release: Notify,
    /// The search for free addresses has gone on.
    pub(super) positions: Notify,
    /// This node's blocks are others than before.
    pub(super) blocks_changed: Notify,
    pub(super) pools: Store<AddressPool>,
    api: Api<AddressPool>,
}

impl Ipam {
    /// The empty state of this node.
    pub fn new(node: &str, numbers: RoutingIds, pools: Store<AddressPool>, api: Api<AddressPool>) -> Self {
        Self {
            node: node.to_owned(),
            numbers,
            state: Mutex::default(),
            request: Notify::new(),
            assumed: Notify::new(),
            release: Notify::new(),
            positions: Notify::new(),
            blocks_changed: Notify::new(),
            pools,
            api,
        }
    }

    /// This node's name.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Numbers of the tables that routes of pods and blocks are in.
    pub fn numbers(&self) -> RoutingIds {
        self.numbers
    }

    pub(super) fn lock(&self) -> MutexGuard<'_, NodeState<Arc<Notify>>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn update<T>(&self, decide: impl FnOnce(&mut NodeState<Arc<Notify>>) -> T) -> T {
        let mut state = self.lock();
        let value = decide(&mut state);
        let Effects { wake, request, release, positions } = state.take_effects();
        drop(state);
        wake.iter().for_each(|waiter| waiter.notify_one());
        if request {
            self.request.notify_one();
        }
        if release {
            self.release.notify_one();
        }
        if positions {
            self.positions.notify_one();
        }
        value
    }

    /// Allocates no IPv6 address where a pool has IPv4, too: the kernel has no IPv6.
    pub fn allocate_ipv4_only(&self) {
        self.update(NodeState::allocate_ipv4_only);
    }

    /// Records the pods that the kernel has already; called once, before the first CNI operation.
    pub fn adopt(&self, pods: Vec<PodOnNode>) {
        self.update(|state| {
            for pod in pods {
                let key = Key { container_id: pod.container_id, ifname: pod.ifname };
                if let Err(error) = state.adopt(key, &pod.pool, pod.addresses.ipv4, pod.addresses.ipv6) {
                    tracing::warn!(%error, link = pod.host_name, "cannot adopt the addresses of a running pod");
                }
            }
        });
    }

    /// Gives no address to another pod that this running one may have.
    pub fn hold_back(&self, pod: &PodOnNode, why: String) {
        let key = Key { container_id: pod.container_id.clone(), ifname: pod.ifname.clone() };
        self.update(|state| state.hold_back(key, Unclear { pool: pod.pool.clone(), why }));
    }

    /// Updates the blocks to those of this node that the watch shows. Assumed blocks stay.
    pub(super) fn sync_blocks(&self, blocks: &[Arc<AddressBlock>]) {
        let shown = blocks.iter().map(|block| ShownBlock {
            name: block.metadata.name.as_deref().unwrap_or_default(),
            uid: block.metadata.uid.as_deref().unwrap_or_default(),
            own: self.own_block(block),
        });
        let shown = shown.collect();
        self.update(|state| state.sync_blocks(shown));
    }

    /// Cordons pools that are disabled or being deleted, and uncordons the others.
    pub(super) fn sync_pools(&self) {
        self.update(|state| {
            state.sync_pools(|pool| self.cached_pool(pool).is_some_and(PoolInfo::is_cordoned));
        });
    }

    pub(super) fn end_request(&self, demand: &BlockDemand, outcome: Result<Option<Block>, RequestFailure>) {
        let assumed = matches!(outcome, Ok(Some(_)));
        self.update(|state| state.end_request(Instant::now(), demand, outcome));
        if assumed {
            self.assumed.notify_one();
        }
    }

    pub(super) fn own_block(&self, block: &AddressBlock) -> Option<Block> {
        if block.node() != Some(&self.node) {
            return None;
        }
        let own = Block::try_from(block);
        own.inspect_err(|error| tracing::error!(block = block.name_any(), %error, "unusable AddressBlock"))
            .ok()
    }

    /// An address for `key`, after waiting until `deadline` for a block if no block has a free one. The same key gets the
    /// same address again. The caller holds the container's lock.
    ///
    /// # Errors
    /// See [`AllocationError`].
    pub async fn allocate(
        &self,
        pool: &str,
        key: &Key,
        deadline: tokio::time::Instant,
    ) -> Result<Allocation, AllocationError> {
        let wait = Wait { ipam: self, key, waker: Arc::new(Notify::new()) };
        let mut pool_info = self.cached_pool(pool);
        loop {
            let now = Instant::now();
            match self.update(|state| state.allocate(now, pool, key, pool_info, &wait.waker)) {
                Attempt::Allocated(allocation) => return Ok(allocation),
                Attempt::Failed(error) => return Err(error),
                Attempt::ReadPool => pool_info = Some(self.read_pool(pool).await),
                Attempt::Wait => {
                    if timeout_at(deadline, wait.waker.notified()).await.is_err() {
                        return Err(AllocationError::TimedOut { pool: pool.to_owned() });
                    }
                    pool_info = self.cached_pool(pool);
                }
            }
        }
    }

    fn cached_pool(&self, pool: &str) -> Option<PoolInfo> {
        self.pools.get(&ObjectRef::new(pool)).map(|pool| pool_info(&pool))
    }

    /// A pool that the cache does not have may just have been made.
    async fn read_pool(&self, pool: &str) -> PoolInfo {
        // It comes from an annotation, and would get into a URL.
        if !is_object_name(pool) {
            return PoolInfo::Missing;
        }
        match timeout(POOL_TIMEOUT, self.api.get_opt(pool)).await {
            Ok(Ok(Some(pool))) => pool_info(&pool),
            Ok(Ok(None)) => PoolInfo::Missing,
            Ok(Err(_)) | Err(_) => PoolInfo::Unavailable,
        }
    }

    /// Addresses that `key` has.
    pub fn allocated(&self, key: &Key) -> Option<Allocated> {
        self.lock().table().get(key).cloned()
    }

    /// Frees what `key` has, if anything.
    pub fn release(&self, key: &Key) {
        self.update(|state| state.release(key));
    }

    /// Remembers which pod an attachment was made for.
    pub fn set_owner(&self, key: &Key, owner: Owner) {
        self.update(|state| state.set_owner(key, owner));
    }

    /// All attachments, by key.
    pub fn attachments(&self) -> Vec<Attachment> {
        self.lock().attachments()
    }

    /// Whether any attachment is there, also one whose addresses are not known.
    pub fn has_attachments(&self) -> bool {
        let state = self.lock();
        let table = state.table();
        table.allocated().next().is_some() || table.unclear().next().is_some()
    }

    /// Every block with its use, for `fairlead status`.
    pub fn describe_blocks(&self) -> Vec<WireBlock> {
        let state = self.lock();
        let describe = |usage: BlockUsage| {
            let block = state.table().block(&usage.block);
            let nets = block.map(Block::nets).unwrap_or_default();
            let condition = match block {
                Some(block) if block.is_reserved() => "reserved",
                Some(block) if block.is_deleting() => "deleting",
                _ if usage.open => "open",
                _ => "closed",
            };
            WireBlock {
                ipv4: nets.ipv4.map(|net| net.to_string()).unwrap_or_default(),
                ipv6: nets.ipv6.map(|net| net.to_string()).unwrap_or_default(),
                name: usage.block,
                pool: usage.pool,
                used: usage.used.into(),
                capacity: usage.capacity.into(),
                state: condition.to_owned(),
            }
        };
        state.table().usage().into_iter().map(describe).collect()
    }

    /// Use of every block.
    pub fn usage(&self) -> Vec<BlockUsage> {
        self.lock().table().usage()
    }

    /// All prefixes of this node's blocks, without those that are being released.
    pub(super) fn prefixes(&self) -> Vec<IpNet> {
        let state = self.lock();
        state.table().kept_blocks().flat_map(|block| block.nets().iter().collect::<Vec<_>>()).collect()
    }

    /// Prefixes of this node's blocks whose addresses only pods of this node have: those of reserved blocks may be in use otherwise. A block
    /// that is being released is among them until it is gone. `None` before the blocks are known.
    pub(crate) fn pod_prefixes(&self) -> Option<Vec<IpNet>> {
        let state = self.lock();
        let blocks = state.table().blocks().filter(|block| !block.is_reserved());
        let prefixes = blocks.flat_map(|block| block.nets().iter().collect::<Vec<_>>());
        state.are_blocks_known().then(|| prefixes.collect())
    }

    /// Resolves when this node's blocks have changed since it resolved last.
    pub(crate) async fn blocks_changed(&self) {
        self.blocks_changed.notified().await;
    }

    /// Keys whose addresses have leaked; see [`fairlead_ipam::leaks`].
    pub(super) fn leaked(&self, grace: Duration, linked: &BTreeSet<Key>) -> Vec<Key> {
        self.update(|state| state.leaked(Instant::now(), grace, linked))
    }

    /// Attachments whose addresses are in no block of this node or not known, one sentence each.
    pub fn problems(&self) -> Vec<String> {
        let sentence = |(key, allocated): (&Key, &Allocated)| {
            let addresses: Vec<String> = allocated.addresses().map(|address| address.to_string()).collect();
            format!(
                "container {} has {} which is in no AddressBlock of this node: another node may be given it; delete the pod",
                key.container_id,
                addresses.join(" and ")
            )
        };
        let unclear = |(key, unclear): (&Key, &Unclear)| {
            format!(
                "the addresses of container {} of pool {} are not known ({}): blocks of before give none to other pods; \
                 delete the pod",
                key.container_id, unclear.pool, unclear.why
            )
        };
        let state = self.lock();
        state.without_block().map(sentence).chain(state.table().unclear().map(unclear)).collect()
    }
}

/// One waiting ADD; ends the wait when it is dropped.
struct Wait<'a> {
    ipam: &'a Ipam,
    key: &'a Key,
    waker: Arc<Notify>,
}

impl Drop for Wait<'_> {
    fn drop(&mut self) {
        self.ipam.update(|state| state.stop_waiting(self.key));
    }
}

fn pool_info(pool: &AddressPool) -> PoolInfo {
    match (pool.metadata.deletion_timestamp.is_some(), pool.spec.disabled) {
        (true, _) => PoolInfo::Deleting,
        (false, true) => PoolInfo::Disabled,
        (false, false) => PoolInfo::Usable {
            block_size: 1_usize.checked_shl(pool.spec.block_size_bits.into()).unwrap_or(usize::MAX),
        },
    }
}
