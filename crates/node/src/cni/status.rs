//! STATUS: could an ADD succeed now?
//!
//! Runtimes report what this says as the readiness of the node, so it says no only when no pod at all could start. A
//! mesh that does not work is named only then (code 51): pods still start and reach each other on this node.

use std::collections::BTreeMap;
use std::time::Duration;

use fairlead_ipam::{BlockUsage, ExistingBlock, Grant, PoolState, Request, grant};
use fairlead_wire::cni::ErrorCode;
use kube::ResourceExt;
use tokio::time::timeout;
use tonic::Status;

use super::Service;
use super::args::refuse;

/// How long the API server may take to show that it is there.
const ANSWER: Duration = Duration::from_secs(2);

impl Service {
    /// Whether ADD could succeed now. Asks the API server only if no block of this node has room.
    pub(super) async fn readiness(&self) -> Result<(), Status> {
        // What another plugin gives, that one has to judge.
        if !self.gives_addresses || has_room(&self.ipam.usage()) {
            return Ok(());
        }
        let Err(reason) = self.could_get_a_block().await else { return Ok(()) };
        let msg = format!("no pod can start on this node: no address block has room, and {reason}");
        match (self.mesh_problem)() {
            Some(problem) => {
                let msg = format!("{msg}; running pods may not reach other nodes: {problem}");
                Err(refuse(ErrorCode::LimitedConnectivity, msg, ""))
            }
            None => Err(refuse(ErrorCode::PluginNotAvailable, msg, "")),
        }
    }

    async fn could_get_a_block(&self) -> Result<(), String> {
        if !(self.pools.is_ready() && self.blocks.is_ready()) {
            return Err("the API server has not answered since the start of this program".to_owned());
        }
        match timeout(ANSWER, self.client.apiserver_version()).await {
            Ok(Ok(_)) => {}
            Ok(Err(error)) => return Err(format!("the API server cannot be asked for one: {error}")),
            Err(_) => return Err("the API server does not answer".to_owned()),
        }
        let pools =
            self.pools.store.state().iter().map(|pool| (pool.name_any(), pool.as_ref().into())).collect();
        let blocks: Vec<ExistingBlock> =
            self.blocks.store.state().iter().map(|block| block.as_ref().into()).collect();
        some_pool_gives(&pools, &blocks)
    }
}

fn has_room(usage: &[BlockUsage]) -> bool {
    usage.iter().any(|block| block.open && block.used < block.capacity)
}

/// Whether the controller would grant a block of any pool; it decides with the same function.
fn some_pool_gives(pools: &BTreeMap<String, PoolState>, blocks: &[ExistingBlock]) -> Result<(), String> {
    let mut refusals = Vec::new();
    for pool in pools.keys() {
        match grant(&Request { uid: "", pool, node: "" }, pools, blocks) {
            Grant::Refused(refusal) => refusals.push(refusal.to_string()),
            Grant::Existing { .. } | Grant::New { .. } => return Ok(()),
        }
    }
    match refusals.is_empty() {
        true => Err("there is no AddressPool: create one (deploy/examples/pool.yaml)".to_owned()),
        false => Err(refusals.join("; ")),
    }
}

#[cfg(test)]
mod tests {
    use fairlead_ipam::{BlockNets, Pool};

    use super::*;

    fn pool(name: &str, subnet: &str, bits: i64, terminating: bool) -> (String, PoolState) {
        let parsed = Pool::parse(name, bits, [(Some(subnet), None)]);
        (name.to_owned(), PoolState { parsed, terminating, disabled: false, created: 0 })
    }

    fn block(name: &str, pool: &str, net: &str) -> ExistingBlock {
        let nets = BlockNets { ipv4: Some(net.parse().unwrap()), ipv6: None };
        ExistingBlock {
            name: name.into(),
            pool: pool.into(),
            index: 0,
            nets,
            request: None,
            terminating: false,
        }
    }

    #[test]
    fn a_block_with_room_is_enough() {
        let usage = |used, open| BlockUsage { block: "b".into(), pool: "p".into(), used, capacity: 2, open };
        assert!(has_room(&[usage(2, true), usage(1, true)]));
        assert!(!has_room(&[usage(2, true), usage(0, false)]));
        assert!(!has_room(&[]));
    }

    #[test]
    fn without_pools_none_gives() {
        assert!(some_pool_gives(&BTreeMap::new(), &[]).unwrap_err().contains("no AddressPool"));
    }

    #[test]
    fn one_pool_that_gives_is_enough() {
        let dry = pool("dry", "10.0.0.0/32", 0, false);
        let going = pool("going", "10.1.0.0/24", 5, true);
        let good = pool("good", "10.2.0.0/24", 5, false);
        let taken = [block("dry-0", "dry", "10.0.0.0/32")];
        assert_eq!(some_pool_gives(&[dry.clone(), going.clone(), good].into(), &taken), Ok(()));
        let reasons = some_pool_gives(&[dry, going].into(), &taken).unwrap_err();
        assert!(
            reasons.contains("dry does not have free blocks") && reasons.contains("going is being deleted"),
            "{reasons}"
        );
    }
}
