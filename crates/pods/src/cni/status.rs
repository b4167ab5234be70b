//! STATUS: is the network of this node of any use?
//!
//! Runtimes report the answer as the readiness of the node, and a cluster evicts all pods of a node that is not ready for some
//! minutes. So it is an error only when no pod could start and none is attached. A full pool and an API server that is away stop
//! neither the pods that run nor the node: the condition of the pool and Events of the pods that wait say it. A broken mesh is
//! named only with an error (code 51): pods still start, and reach each other on this node.

use std::collections::BTreeMap;
use std::time::Duration;

use fairlead_ipam::{BlockIndex, BlockUsage, Grant, PoolState, Request, grant};
use fairlead_wire::cni::ErrorCode;
use kube::ResourceExt;
use tokio::time::timeout;

use super::failure::{Failure, Reason};
use super::service::Service;
use crate::ipam::Ipam;

/// Longest wait for an answer of the API server.
const API_SERVER_TIMEOUT: Duration = Duration::from_secs(2);

impl Service {
    /// Whether ADD could succeed now, or a pod is attached. Asks the API server only if there is neither room nor a pod.
    pub(super) async fn status(&self) -> Result<(), Failure> {
        // Addresses of another plugin are that plugin's to judge.
        if !self.deps.enable_ipam || is_of_use(&self.deps.ipam) {
            return Ok(());
        }
        let Err((reason, why)) = self.could_get_a_block().await else { return Ok(()) };
        let message =
            format!("no pod runs on this node, and none can start: no address block has room, and {why}");
        Err(match self.deps.mesh.problem() {
            Some(problem) => {
                let message = format!("{message}; running pods may not reach other nodes: {problem}");
                Failure::new(reason, message).code(ErrorCode::LimitedConnectivity)
            }
            None => Failure::new(reason, message).code(ErrorCode::PluginNotAvailable),
        })
    }

    async fn could_get_a_block(&self) -> Result<(), (Reason, String)> {
        let unavailable = |why: String| Err((Reason::ApiServerUnavailable, why));
        if !(self.deps.pools.has_answer() && self.deps.blocks.is_ready()) {
            return unavailable("the API server has not answered since the start of this program".to_owned());
        }
        match timeout(API_SERVER_TIMEOUT, self.deps.client.apiserver_version()).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return unavailable(format!("the API server cannot be asked for one: {error}")),
            Err(_) => return unavailable("the API server does not answer".to_owned()),
        }
        if !self.deps.pools.is_ready() {
            // The program may not read pools; the controller decides when a block is requested.
            return Ok(());
        }
        let pools = self
            .deps
            .pools
            .store
            .state()
            .iter()
            .map(|pool| (pool.name_any(), pool.as_ref().into()))
            .collect();
        let blocks = self.deps.blocks.store.state().iter().map(|block| block.existing().clone()).collect();
        any_pool_grants(&pools, &blocks)
    }
}

/// Whether a pod is attached, or the next one gets an address.
fn is_of_use(ipam: &Ipam) -> bool {
    ipam.has_attachments() || has_room(&ipam.usage())
}

fn has_room(usage: &[BlockUsage]) -> bool {
    usage.iter().any(|block| block.open && block.used < block.capacity)
}

/// Whether the controller would grant a block of any pool; it decides with the same function.
fn any_pool_grants(pools: &BTreeMap<String, PoolState>, blocks: &BlockIndex) -> Result<(), (Reason, String)> {
    let mut refusals = Vec::new();
    for pool in pools.keys() {
        let request = Request { uid: "", pool, node: "", pod_capacity: None, claim: None };
        match grant(&request, pools, blocks) {
            Grant::Refused(refusal) => refusals.push(refusal.to_string()),
            Grant::Existing { .. } | Grant::New { .. } => return Ok(()),
        }
    }
    match refusals.is_empty() {
        true => {
            let why = "there is no AddressPool: create one (deploy/examples/pool.yaml)";
            Err((Reason::NoAddressPool, why.to_owned()))
        }
        false => Err((Reason::NoAddressBlock, refusals.join("; "))),
    }
}

#[cfg(test)]
mod tests {
    use fairlead_address::DualStackAddrs;
    use fairlead_dataplane::pods::PodOnNode;
    use fairlead_ipam::{DualStackNets, ExistingBlock, Key, Pool};
    use futures::FutureExt;
    use testbed_api::server::client;
    use tokio::task::JoinSet;

    use super::*;
    use crate::ipam::tests::{assume, block as address_block, node};

    fn pool(name: &str, subnet: &str, bits: i64, terminating: bool) -> (String, PoolState) {
        let parsed = Pool::parse(name, bits, [(Some(subnet), None)]);
        (name.to_owned(), PoolState { parsed, terminating, disabled: false, created: 0 })
    }

    fn block(name: &str, pool: &str, net: &str) -> ExistingBlock {
        let nets = DualStackNets { ipv4: Some(net.parse().unwrap()), ipv6: None };
        ExistingBlock { name: name.into(), pool: pool.into(), nets, ..ExistingBlock::default() }
    }

    #[test]
    fn a_block_with_room_is_enough() {
        let usage = |used, open| BlockUsage { block: "b".into(), pool: "p".into(), used, capacity: 2, open };
        assert!(has_room(&[usage(2, true), usage(1, true)]));
        assert!(!has_room(&[usage(2, true), usage(0, false)]));
        assert!(!has_room(&[]));
    }

    /// The runtime would have the pods of this node evicted.
    #[tokio::test]
    async fn a_node_with_a_full_block_or_an_unclear_pod_is_of_use() {
        let mut tasks = JoinSet::new();
        let unavailable = client(|_| std::future::ready((503, String::new())).boxed());
        let ipam = node(unavailable, &["a"], &mut tasks);
        assert!(!is_of_use(&ipam), "neither a block nor a pod");
        assume(&ipam, &address_block("a-0", "a", "10.0.0.0/32"));
        assert!(is_of_use(&ipam));
        let key = Key { container_id: "c".into(), ifname: "eth0".into() };
        let later = tokio::time::Instant::now() + Duration::from_secs(60);
        ipam.allocate("a", &key, later).await.unwrap();
        assert!(!has_room(&ipam.usage()) && is_of_use(&ipam), "its block is full, and a pod runs");
        ipam.release(&key);
        assert!(has_room(&ipam.usage()));

        let ipam = node(client(|_| std::future::ready((503, String::new())).boxed()), &["a"], &mut tasks);
        let unclear = PodOnNode {
            pool: "a".into(),
            container_id: "c".into(),
            ifname: "eth0".into(),
            host_name: "veth1".into(),
            host_index: 7,
            addresses: DualStackAddrs::default(),
        };
        ipam.hold_back(&unclear, "its network namespace cannot be read".into());
        assert!(is_of_use(&ipam), "a pod runs whose address is not known");
    }

    #[test]
    fn without_pools_there_is_no_block() {
        let (reason, why) = any_pool_grants(&BTreeMap::new(), &BlockIndex::default()).unwrap_err();
        assert!(reason == Reason::NoAddressPool && why.contains("no AddressPool"), "{reason} {why}");
    }

    #[test]
    fn one_pool_that_grants_is_enough() {
        let dry = pool("dry", "10.0.0.0/32", 0, false);
        let going = pool("going", "10.1.0.0/24", 5, true);
        let good = pool("good", "10.2.0.0/24", 5, false);
        let taken = [block("dry-0", "dry", "10.0.0.0/32")].into_iter().collect();
        assert_eq!(any_pool_grants(&[dry.clone(), going.clone(), good].into(), &taken), Ok(()));
        let (reason, refusals) = any_pool_grants(&[dry, going].into(), &taken).unwrap_err();
        assert_eq!(reason, Reason::NoAddressBlock);
        assert!(
            refusals.contains("dry does not have free blocks") && refusals.contains("going is being deleted"),
            "{refusals}"
        );
    }
}
