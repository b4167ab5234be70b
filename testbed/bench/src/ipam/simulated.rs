//! Nodes without a kernel: the node program's addresses and its requests, many in one process.

use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_ipam::Key;
use fairlead_pods::ipam::Ipam;
use fairlead_pods::ipam::requests::{self, Requests};
use futures::future::try_join_all;
use futures::{StreamExt, TryStreamExt, stream};
use kube::Api;
use tokio::task::JoinSet;

use super::Size;
use super::cluster::{Cluster, POOL};
use crate::report::milliseconds;

/// Nodes on which pods start at the same time.
const AT_ONCE: usize = 50;
/// Longest time for which one pod waits for its address.
const TIMEOUT: Duration = Duration::from_secs(120);

/// Outcome of one node.
pub(super) struct Done {
    /// Time since the start of the run.
    pub(super) at: Duration,
    pub(super) addresses: Vec<Ipv4Addr>,
    /// Milliseconds that each pod waited for its address.
    pub(super) waits: Vec<f64>,
    /// Requests that have brought their blocks are still to be deleted.
    _requests: JoinSet<()>,
}

/// Starts all pods of one node after the other, and those of each node at once.
pub(super) async fn run(cluster: &Cluster, size: Size, start: Instant) -> Result<Vec<Done>> {
    let nodes = cluster.names.iter().map(|name| node(cluster, name, size.pods, start));
    stream::iter(nodes).buffer_unordered(AT_ONCE).try_collect().await
}

async fn node(cluster: &Cluster, name: &str, pods: usize, start: Instant) -> Result<Done> {
    let (pools, api) = (cluster.pools.store.clone(), Api::all(cluster.client.clone()));
    let ipam = Arc::new(Ipam::new(name, RoutingIds::default(), pools, api));
    let requests = Requests {
        client: cluster.client.clone(),
        ipam: Arc::clone(&ipam),
        nodes: cluster.nodes.store.clone(),
        blocks: cluster.blocks.get(name).context("no such node")?.clone(),
        refused: std::sync::Mutex::default(),
    };
    let mut tasks = JoinSet::new();
    tasks.spawn(requests::run(requests));
    let pod = |number: usize| {
        let ipam = &ipam;
        async move {
            let key = Key { container_id: format!("{name}-{number}"), ifname: "eth0".to_owned() };
            let begin = Instant::now();
            let deadline = tokio::time::Instant::now() + TIMEOUT;
            let given = ipam.allocate(POOL, &key, deadline).await;
            let given = given.with_context(|| format!("no address for pod {number} of {name}"))?;
            let address =
                given.ipv4.with_context(|| format!("pod {number} of {name} has no IPv4 address"))?;
            anyhow::Ok((address, milliseconds(begin.elapsed())))
        }
    };
    let (addresses, waits) = try_join_all((0..pods).map(pod)).await?.into_iter().unzip();
    Ok(Done { at: start.elapsed(), addresses, waits, _requests: tasks })
}
