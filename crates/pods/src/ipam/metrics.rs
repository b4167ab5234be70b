//! Metrics of addresses and blocks.

use std::time::Duration;

use fairlead_cluster::metrics::{Outcome, Pool, declare, register, register_with_unit};
use fairlead_ipam::BlockUsage;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// Upper bounds of the ADD and DEL latency buckets, in seconds: from a kernel round trip to more than the longest wait for a
/// block.
pub(crate) const LATENCY_BUCKETS: [f64; 15] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0];

/// See [`Self::register`] for what each means.
#[derive(Debug, Clone)]
pub struct IpamMetrics {
    addresses_used: Family<Pool, Gauge>,
    addresses: Family<Pool, Gauge>,
    blocks: Family<Pool, Gauge>,
    block_wait: Histogram,
    blocks_released: Family<Outcome, Counter>,
    leaked_addresses: Counter,
}

impl IpamMetrics {
    /// Declares them in `all`.
    pub fn register(all: &mut Registry) -> Self {
        let ours = all.sub_registry_with_prefix("fairlead_ipam");
        let family = Family::default;
        let wait = "Time an ADD waited for its address, and so for a block if none had a free one";
        let released = "Empty AddressBlocks that were to be released, by result";
        let leaked = "Addresses that were freed because their pod was gone without a DEL";
        Self {
            addresses_used: register(
                ours,
                "addresses_used",
                "Addresses of this node's blocks that pods have",
                family(),
            ),
            addresses: register(
                ours,
                "addresses",
                "Addresses in this node's blocks; of two families, each pair counts once",
                family(),
            ),
            blocks: register(ours, "blocks", "AddressBlocks of this node", family()),
            block_wait: register_with_unit(
                ours,
                "block_wait",
                wait,
                Unit::Seconds,
                Histogram::new(LATENCY_BUCKETS),
            ),
            blocks_released: declare(ours, "blocks_released", released),
            leaked_addresses: declare(ours, "leaked_addresses_freed", leaked),
        }
    }

    /// Sets the number of blocks and of their addresses, by pool. Pools without a block on this node disappear.
    pub fn blocks(&self, usage: &[BlockUsage]) {
        for family in [&self.addresses_used, &self.addresses, &self.blocks] {
            family.clear();
        }
        for block in usage {
            let label = Pool { pool: block.pool.clone() };
            self.addresses_used.get_or_create(&label).inc_by(block.used.into());
            self.addresses.get_or_create(&label).inc_by(block.capacity.into());
            self.blocks.get_or_create(&label).inc();
        }
    }

    /// An ADD got an address, or none.
    pub fn block_wait(&self, took: Duration) {
        self.block_wait.observe(took.as_secs_f64());
    }

    /// An empty block was released, or could not be.
    pub fn block_released(&self, ok: bool) {
        self.blocks_released.get_or_create(&ok.into()).inc();
    }

    /// An address was freed whose pod was gone.
    pub fn leaked_address_freed(&self) {
        self.leaked_addresses.inc();
    }
}
