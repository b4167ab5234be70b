//! Addresses of this node: the [`allocator`](Ipam), and the tasks around it.
//!
//! [`requests`] makes BlockRequests, and [`blocks`] keeps and releases blocks. [`own_blocks`] follows the watch of blocks.
//! [`positions`] keeps where the search for free addresses goes on, [`block_record`] which blocks a program that starts alone may use;
//! [`leaks`] frees addresses of pods that are gone.

use std::path::PathBuf;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fairlead_api::resources::AddressPool;
use fairlead_cluster::caches::Cache;
use fairlead_cluster::subsystem::Supervisor;
pub use fairlead_ipam::state::{AllocationError, Attachment};
use k8s_openapi::api::core::v1::Node;
use kube::Client;
use kube::runtime::reflector::Store;
use tokio::sync::watch;

mod allocator;
mod block_record;
mod blocks;
mod leaks;
pub mod metrics;
pub mod own_blocks;
mod positions;
pub mod requests;

pub use self::allocator::Ipam;
use self::metrics::IpamMetrics;
use self::own_blocks::OwnBlocks;
use crate::container_locks::ContainerLocks;

/// Dependencies of the tasks of this module.
pub struct Deps {
    /// Client of the API server.
    pub client: Client,
    /// This node's Node object, once the watch has shown it.
    pub nodes: Store<Node>,
    /// This node's blocks.
    pub blocks: OwnBlocks,
    /// Sees every interruption of the watch of blocks.
    pub interruptions: watch::Receiver<u64>,
    /// All pools.
    pub pools: Arc<Cache<AddressPool>>,
    /// The locks of the CNI operations.
    pub locks: Arc<ContainerLocks>,
    /// Counters.
    pub metrics: IpamMetrics,
    /// Time that a block must have been empty before it is released.
    pub block_grace: Duration,
    /// File that keeps where the search for free addresses goes on.
    pub positions: PathBuf,
    /// File that keeps this node's blocks.
    pub block_record: PathBuf,
}

/// Starts the tasks that request, keep and release blocks and free leaked addresses.
pub fn start(ipam: &Arc<Ipam>, deps: Deps, supervisor: &mut Supervisor) {
    let subsystem = supervisor.subsystem("ipam");
    let Deps {
        client,
        nodes,
        blocks,
        interruptions,
        pools,
        locks,
        metrics,
        block_grace,
        positions,
        block_record,
    } = deps;
    let requests = requests::Requests {
        client: client.clone(),
        ipam: Arc::clone(ipam),
        nodes,
        blocks: blocks.clone(),
        refused: Mutex::default(),
    };
    subsystem.spawn("requests", requests::run(requests));
    let keeper = blocks::Keeper {
        client,
        ipam: Arc::clone(ipam),
        metrics: metrics.clone(),
        record: block_record::BlockRecord::new(block_record),
        set_routes: blocks::Routes::set,
    };
    subsystem.spawn("blocks", keeper.run(blocks, interruptions, pools.subscribe(), block_grace));
    subsystem.spawn("positions", positions::run(Arc::clone(ipam), positions));
    subsystem.spawn("leaks", leaks::run(Arc::clone(ipam), locks, metrics));
}

#[cfg(test)]
pub(crate) mod tests;
