//! Addresses of this node, shared by the verbs that run side by side: the pure [`NodeIpam`] behind a short lock, and
//! waiting for a block without holding it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fairlead_api::resources::{AddressBlock, AddressPool};
use fairlead_dataplane::numbers::Numbers;
use fairlead_dataplane::pods::PodOnNode;
use fairlead_ipam::check::Owner;
use fairlead_ipam::leaks::Suspects;
use fairlead_ipam::{
    Allocation, Answer, AssumedBlocks, Block, BlockUsage, Held, Key, NodeIpam, RefusalReason,
};
use fairlead_wire::cni::ErrorCode;
use fairlead_wire::node::Block as WireBlock;
use ipnet::IpNet;
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Api, ResourceExt};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

mod waiting;

use self::waiting::Waiting;
use crate::requests::{self, Requester};

/// How long the API server may take to say whether a pool exists.
const POOL_WAIT: Duration = Duration::from_secs(5);

/// Why a pod got no address.
#[derive(Debug, thiserror::Error)]
pub enum Failure {
    /// No such pool.
    #[error(
        "pool {pool} does not exist: create an AddressPool of that name, or change the annotation \
         coil.cybozu.com/pool of the pod's namespace"
    )]
    UnknownPool {
        /// Its name.
        pool: String,
    },
    /// The pool is on its way out.
    #[error("pool {pool} is being deleted: it gives no addresses to new pods")]
    Terminating {
        /// Its name.
        pool: String,
    },
    /// An administrator stopped the pool.
    #[error(
        "pool {pool} is disabled and gives no addresses to new pods: set spec.disabled of the AddressPool to false, \
         or change the annotation coil.cybozu.com/pool of the pod's namespace"
    )]
    Disabled {
        /// Its name.
        pool: String,
    },
    /// The controller said no.
    #[error("no address block: {message}")]
    Refused {
        /// Its reason; `None` where the API server or another controller refused.
        reason: Option<RefusalReason>,
        /// Its words.
        message: String,
    },
    /// Nobody answered in time.
    #[error(
        "no address block of pool {pool} within the time a pod may wait: is `fairlead controller` running, and is the API server reachable?"
    )]
    TimedOut {
        /// Its name.
        pool: String,
    },
}

impl Failure {
    /// The CNI error code: whether trying again may help without anybody doing anything.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::UnknownPool { .. } | Self::Terminating { .. } | Self::Disabled { .. } => {
                ErrorCode::InvalidNetworkConfig
            }
            Self::Refused { .. } | Self::TimedOut { .. } => ErrorCode::TryAgainLater,
        }
    }

    /// The reason of the Event on the pod.
    pub fn event_reason(&self) -> &'static str {
        match self {
            Self::UnknownPool { .. } => RefusalReason::UnknownPool.as_str(),
            Self::Terminating { .. } => RefusalReason::PoolTerminating.as_str(),
            Self::Disabled { .. } => RefusalReason::PoolDisabled.as_str(),
            Self::Refused { reason, .. } => reason.map_or("FailedAllocation", RefusalReason::as_str),
            Self::TimedOut { .. } => "FailedAllocation",
        }
    }
}

/// What one interface of one container has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attached {
    /// Whose it is.
    pub key: Key,
    /// Its addresses.
    pub held: Held,
    /// The block of this node that has them.
    pub block: Option<String>,
    /// The pod, if it was attached since the start of this program.
    pub owner: Option<Owner>,
}

/// The address book of this node.
pub struct Ipam {
    node: String,
    /// Of the routes of pods and blocks in the kernel.
    numbers: Numbers,
    book: Mutex<NodeIpam>,
    /// Locked before the book, never after it.
    assumed: Mutex<AssumedBlocks>,
    /// For people; nothing is decided by it. Only of keys that hold an address.
    owners: Mutex<BTreeMap<Key, Owner>>,
    changed: watch::Sender<u64>,
    /// Pods that wait for a block, by pool.
    waiting: Mutex<BTreeMap<String, usize>>,
    /// A block of a withdrawn pool has become empty.
    drained: Notify,
    /// Whether the API server has said which blocks this node has.
    blocks_known: AtomicBool,
    pools: Store<AddressPool>,
    api: Api<AddressPool>,
}

impl Ipam {
    /// An empty book of this node.
    pub fn new(node: &str, numbers: Numbers, pools: Store<AddressPool>, api: Api<AddressPool>) -> Self {
        Self {
            node: node.to_owned(),
            numbers,
            book: Mutex::new(NodeIpam::default()),
            assumed: Mutex::default(),
            owners: Mutex::default(),
            changed: watch::Sender::new(0),
            waiting: Mutex::default(),
            drained: Notify::new(),
            blocks_known: AtomicBool::new(false),
            pools,
            api,
        }
    }

    /// This node's name.
    pub fn node(&self) -> &str {
        &self.node
    }

    /// Numbers of the tables that routes of pods and blocks are in.
    pub fn numbers(&self) -> Numbers {
        self.numbers
    }

    fn book(&self) -> MutexGuard<'_, NodeIpam> {
        self.book.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters the pods the kernel already has; called once, before the first verb.
    pub fn adopt(&self, pods: Vec<PodOnNode>) {
        let mut book = self.book();
        for pod in pods {
            let key = Key { container_id: pod.container_id, ifname: pod.ifname };
            if let Err(error) = book.adopt(key, &pod.pool, pod.ipv4, pod.ipv6) {
                tracing::warn!(%error, link = pod.host_name, "a pod of before the start is not in order");
            }
        }
    }

    /// Brings the book to the blocks that the watch shows. Blocks granted since stay; see [`Self::unseen`].
    pub fn sync_blocks(&self, blocks: &[Arc<AddressBlock>]) {
        let mut assumed = self.assumed();
        let id = |block: &Arc<AddressBlock>| (block.name_any(), block.uid().unwrap_or_default());
        let ids: Vec<(String, String)> = blocks.iter().map(id).collect();
        assumed.observe(ids.iter().map(|(name, uid)| (name.as_str(), uid.as_str())));
        let own = blocks.iter().filter_map(|block| self.own_block(block));
        let own: Vec<Block> = own.filter(|block| assumed.get(block.name()).is_none()).collect();
        let mut book = self.book();
        let gone: Vec<String> = book
            .blocks()
            .map(|block| block.name().to_owned())
            .filter(|name| assumed.get(name).is_none() && !own.iter().any(|block| block.name() == name))
            .collect();
        for name in gone {
            book.remove_block(&name);
        }
        for block in own {
            book.upsert_block(block);
        }
        drop((book, assumed));
        self.blocks_known.store(true, Ordering::Release);
        self.changed.send_modify(|generation| *generation += 1);
    }

    /// Withdraws pools that are disabled or being deleted, and takes back into use those that no longer are.
    pub fn sync_pools(&self) {
        let names: BTreeSet<String> = self.book().blocks().map(|block| block.pool().to_owned()).collect();
        for pool in names {
            self.sync_pool(&pool);
        }
    }

    fn sync_pool(&self, pool: &str) {
        let withdrawn =
            self.pools.get(&ObjectRef::new(pool)).is_some_and(|object| withdrawal(&object).is_some());
        self.book().set_withdrawn(pool, withdrawn);
    }

    /// Whether an empty block is to be given back without waiting for a pod that may need it.
    pub fn drains(&self, block: &str) -> bool {
        let book = self.book();
        book.blocks().any(|known| known.name() == block && book.is_withdrawn(known.pool()))
    }

    /// Resolves when a block of a withdrawn pool has become empty.
    pub async fn drained(&self) {
        self.drained.notified().await;
    }

    /// Takes one granted block into use at once.
    pub fn add_block(&self, block: &AddressBlock) {
        if let Some(own) = self.own_block(block) {
            let mut assumed = self.assumed();
            assumed.assume(std::time::Instant::now(), own.name(), Some(own.uid().to_owned()), ());
            self.book().upsert_block(own);
            drop(assumed);
            self.changed.send_modify(|generation| *generation += 1);
        }
    }

    /// Name and UID of the blocks in use that the watch has not shown yet. They may be gone without it having shown
    /// them: only the API server can say.
    pub fn unseen(&self) -> Vec<(String, String)> {
        let assumed = self.assumed();
        assumed.iter().map(|(name, block)| (name.to_owned(), block.uid.clone().unwrap_or_default())).collect()
    }

    fn assumed(&self) -> MutexGuard<'_, AssumedBlocks> {
        self.assumed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn own_block(&self, block: &AddressBlock) -> Option<Block> {
        if block.node() != Some(&self.node) {
            return None;
        }
        let own = Block::try_from(block);
        own.inspect_err(|error| tracing::error!(block = block.name_any(), %error, "unusable AddressBlock"))
            .ok()
    }

    /// An address for `key`, waiting until `deadline` for a block where none has room. The same key gets the same
    /// address again. One pool's wait is nobody else's.
    ///
    /// # Errors
    /// The pool gives none; see [`Failure`].
    pub async fn allocate(
        &self,
        requester: &Requester,
        pool: &str,
        key: &Key,
        deadline: Instant,
    ) -> Result<Allocation, Failure> {
        let (mut blocks, mut answers) = (self.changed.subscribe(), requester.answers());
        self.sync_pool(pool);
        let mut waiting = None;
        loop {
            match self.book().allocate(pool, key) {
                Answer::Allocated(allocation) => break Ok(allocation),
                Answer::NeedBlock => {}
            }
            let size = self.check_pool(pool).await?;
            if let Some(refusal) = requester.refusal(pool, std::time::Instant::now()) {
                let requests::Refusal { reason, message } = refusal;
                return Err(Failure::Refused { reason, message });
            }
            waiting.get_or_insert_with(|| Waiting::enter(&self.waiting, pool));
            requester.want(pool, size);
            let woken = async {
                tokio::select! {
                    _ = blocks.changed() => {}
                    _ = answers.changed() => {}
                }
            };
            if tokio::time::timeout_at(deadline, woken).await.is_err() {
                return Err(Failure::TimedOut { pool: pool.to_owned() });
            }
        }
        .inspect(|_| {
            // Ahead of need, so that no pod waits for a block.
            if self.book().wants_block(pool) {
                requester.want(pool, usize::MAX);
            }
        })
    }

    /// Pods that wait for a block beyond those for which there is room by now; one at least while a block is wanted ahead
    /// of need.
    pub fn missing(&self, pool: &str) -> usize {
        let waiting = waiting::pods(&self.waiting, pool);
        let book = self.book();
        let room = usize::try_from(book.free(pool)).unwrap_or(usize::MAX);
        waiting.saturating_sub(room).max(book.wants_block(pool).into())
    }

    /// The number of addresses in a block of a pool that may give some.
    ///
    /// A pool that the cache does not have may just have been made: the API server has the last word. While that one
    /// is away, nobody can say, and the pod waits.
    async fn check_pool(&self, pool: &str) -> Result<usize, Failure> {
        let object = match self.pools.get(&ObjectRef::new(pool)) {
            Some(object) => object,
            None => match tokio::time::timeout(POOL_WAIT, self.api.get_opt(pool)).await {
                Ok(Ok(None)) => return Err(Failure::UnknownPool { pool: pool.to_owned() }),
                Ok(Ok(Some(object))) => Arc::new(object),
                Ok(Err(_)) | Err(_) => return Ok(usize::MAX),
            },
        };
        match withdrawal(&object) {
            Some(failure) => Err(failure),
            None => Ok(1_usize.checked_shl(object.spec.block_size_bits.into()).unwrap_or(usize::MAX)),
        }
    }

    /// What `key` holds.
    pub fn held(&self, key: &Key) -> Option<Held> {
        self.book().get(key).cloned()
    }

    /// Frees what `key` holds; nothing when it holds nothing.
    pub fn release(&self, key: &Key) {
        let mut book = self.book();
        let released = book.release(key);
        if released.is_some_and(|released| released.now_empty && book.is_withdrawn(&released.held.pool)) {
            self.drained.notify_one();
        }
        drop(book);
        self.owners().remove(key);
        self.changed.send_modify(|generation| *generation += 1);
    }

    fn owners(&self) -> MutexGuard<'_, BTreeMap<Key, Owner>> {
        self.owners.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Remembers which pod an attachment was made for.
    pub fn remember_owner(&self, key: &Key, owner: Owner) {
        self.owners().insert(key.clone(), owner);
    }

    /// All that is held, by key.
    pub fn attachments(&self) -> Vec<Attached> {
        let owners = self.owners().clone();
        let book = self.book();
        let nets: Vec<(String, IpNet)> = book
            .blocks()
            .flat_map(|block| {
                block.nets().nets().map(|net| (block.name().to_owned(), net)).collect::<Vec<_>>()
            })
            .collect();
        let attached = |(key, held): (&Key, &Held)| {
            let ip = held.ipv4.map(IpAddr::from).or(held.ipv6.map(IpAddr::from));
            let block = nets.iter().find(|(_, net)| ip.is_some_and(|ip| net.contains(&ip)));
            Attached {
                key: key.clone(),
                held: held.clone(),
                block: block.map(|(name, _)| name.clone()),
                owner: owners.get(key).cloned(),
            }
        };
        book.held().map(attached).collect()
    }

    /// Every block with its use, for people.
    pub fn describe_blocks(&self) -> Vec<WireBlock> {
        let book = self.book();
        let blocks: BTreeMap<&str, &Block> = book.blocks().map(|block| (block.name(), block)).collect();
        let describe = |usage: BlockUsage| {
            let block = blocks.get(usage.block.as_str());
            let nets = block.map(|block| block.nets()).unwrap_or_default();
            let state = match block {
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
                state: state.to_owned(),
            }
        };
        book.usage().into_iter().map(describe).collect()
    }

    /// Looks for addresses whose pod has no link any more; see [`Suspects::look`].
    pub fn leaked(&self, suspects: &mut Suspects, grace: Duration, linked: &BTreeSet<Key>) -> Vec<Key> {
        suspects.look(std::time::Instant::now(), grace, self.book().held().map(|(key, _)| key), linked)
    }

    /// Use of every block.
    pub fn usage(&self) -> Vec<BlockUsage> {
        self.book().usage()
    }

    /// All prefixes of this node's blocks.
    pub fn prefixes(&self) -> Vec<IpNet> {
        self.book().blocks().flat_map(|block| block.nets().nets().collect::<Vec<_>>()).collect()
    }

    /// Empty blocks that may be given back.
    pub fn releasable(&self) -> Vec<String> {
        self.book().releasable_blocks()
    }

    /// Forgets a block that is gone.
    pub fn forget(&self, block: &str) {
        let mut assumed = self.assumed();
        assumed.forget(block);
        self.book().remove_block(block);
    }

    /// Takes an empty block out of use, so that it can be given back; false when a pod was quicker.
    pub fn close(&self, block: &str) -> bool {
        self.book().close_block(block)
    }

    /// Takes a block that was certainly not deleted into use again.
    pub fn reopen(&self, block: &str) {
        self.book().reopen_block(block);
        self.changed.send_modify(|generation| *generation += 1);
    }

    /// Pods whose addresses are in no block of this node, one sentence each. None while the API server has not said
    /// which blocks there are: a pod must not be deleted because of an outage.
    pub fn problems(&self) -> Vec<String> {
        if !self.blocks_known.load(Ordering::Acquire) {
            return Vec::new();
        }
        let book = self.book();
        let sentence = |(key, held): (&Key, &Held)| {
            let addresses: Vec<String> = held
                .ipv4
                .map(|ip| ip.to_string())
                .into_iter()
                .chain(held.ipv6.map(|ip| ip.to_string()))
                .collect();
            format!(
                "container {} has {} which is in no AddressBlock of this node: another node may be given it; delete the pod",
                key.container_id,
                addresses.join(" and ")
            )
        };
        book.homeless().map(sentence).collect()
    }
}

/// Why a pool gives nothing to new pods, whatever blocks there are.
fn withdrawal(pool: &AddressPool) -> Option<Failure> {
    let name = pool.name_any();
    match (pool.metadata.deletion_timestamp.is_some(), pool.spec.disabled) {
        (true, _) => Some(Failure::Terminating { pool: name }),
        (false, true) => Some(Failure::Disabled { pool: name }),
        (false, false) => None,
    }
}

#[cfg(test)]
pub(crate) mod tests;
