//! This node's blocks: synchronised with the API server, exported to routing daemons, released when empty.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_api::names::COIL_FINALIZER;
use fairlead_api::resources::AddressBlock;
use fairlead_cluster::writes;
use fairlead_dataplane::routes;
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_ipam::Block;
use fairlead_ipam::state::{BlockDeletion, DeletionAnswer};
use fairlead_netlink as netlink;
use ipnet::IpNet;
use kube::api::{DeleteParams, Preconditions};
use kube::{Api, Client, ResourceExt};
use tokio::sync::watch;
use tokio::time::timeout;

use super::allocator::Ipam;
use super::block_record::BlockRecord;
use super::metrics::IpamMetrics;
use super::own_blocks::OwnBlocks;

/// Interval at which the table and the empty blocks are checked when nothing changes.
const SYNC_INTERVAL: Duration = Duration::from_secs(30);

/// Interval at which the API server is asked again for blocks that it may have lost.
const CONFIRM_INTERVAL: Duration = Duration::from_secs(2);

/// Longest wait for an answer of the API server.
const TIMEOUT: Duration = Duration::from_secs(5);

/// Keeps blocks, the export table and the state synchronised.
pub(super) struct Keeper {
    pub(super) client: Client,
    pub(super) ipam: Arc<Ipam>,
    pub(super) metrics: IpamMetrics,
    pub(super) record: BlockRecord,
    /// [`Routes::set`].
    pub(super) set_routes: fn(&Routes) -> netlink::Result<bool>,
}

/// The routes that tell routing daemons of blocks. Those that refuse packets to addresses of no pod are [`crate::pod_network`]'s.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Routes {
    ids: RoutingIds,
    /// Prefixes that are exported.
    exported: Vec<IpNet>,
}

impl Routes {
    /// Brings the kernel's table to these routes, and says whether it has changed.
    ///
    /// # Errors
    /// The kernel refuses a route.
    pub(super) fn set(&self) -> netlink::Result<bool> {
        Ok(!routes::sync_export(self.ids, &self.exported)?.is_empty())
    }
}

impl Keeper {
    /// Runs forever. A block is released when it has been empty for `grace`: a pod that is replaced finds it still here.
    pub(super) async fn run(
        mut self,
        mut blocks: OwnBlocks,
        mut interruptions: watch::Receiver<u64>,
        mut pools: watch::Receiver<u64>,
        grace: Duration,
    ) {
        let mut unconfirmed = Vec::new();
        let mut of_pods = None;
        loop {
            if let Some(shown) = blocks.listed() {
                self.ipam.sync_blocks(&shown);
                self.ipam.sync_pools();
                let open: Vec<Block> = self.ipam.lock().table().open_blocks().cloned().collect();
                self.record.keep(open.iter());
                // Pods use a granted block already, and what follows may wait for the API server.
                self.export().await;
                let is_gone = self.confirm_assumed().await | self.confirm(&mut unconfirmed).await;
                if is_gone {
                    self.export().await;
                }
                self.notify_of_pod_prefixes(&mut of_pods);
                for name in self.ipam.update(|state| state.due_releases(Instant::now(), grace)) {
                    self.release(&name).await;
                }
            }
            let interval = if unconfirmed.is_empty() { SYNC_INTERVAL } else { CONFIRM_INTERVAL };
            let changed = async {
                tokio::select! {
                    () = blocks.changed() => {}
                    _ = pools.changed() => {}
                    () = self.ipam.assumed.notified() => {}
                    () = self.ipam.release.notified() => {}
                    Ok(()) = interruptions.changed() => unconfirmed = self.ipam.lock().blocks(),
                }
            };
            let _ = timeout(interval.min(grace), changed).await;
        }
    }

    /// Wakes what refuses packets to addresses of no pod, if these may be others than the `known` ones: a block that is being released is exported no
    /// more, and yet refused until it is gone.
    fn notify_of_pod_prefixes(&self, known: &mut Option<Vec<IpNet>>) {
        let prefixes = self.ipam.pod_prefixes();
        if prefixes != *known {
            *known = prefixes;
            self.ipam.blocks_changed.notify_one();
        }
    }

    fn blocks(&self) -> Api<AddressBlock> {
        Api::all(self.client.clone())
    }

    /// Forgets granted blocks that were deleted before the watch showed them: it may never show them. Without an answer
    /// they stay. Whether there were any.
    async fn confirm_assumed(&self) -> bool {
        let mut is_gone = false;
        let assumed = self.ipam.lock().assumed();
        for (name, uid) in assumed {
            let Ok(Ok(present)) = timeout(TIMEOUT, self.blocks().get_opt(&name)).await else { continue };
            if present.and_then(|block| block.uid()).as_ref() != Some(&uid) {
                tracing::warn!(block = name, "a granted block was deleted at once");
                self.ipam.update(|state| state.forget_block(&name, &uid));
                is_gone = true;
            }
        }
        is_gone
    }

    /// Asks the API server for blocks that it may have lost while the watch was interrupted, and forgets those that it does
    /// not have. Those without an answer stay in the list. Whether there were any.
    async fn confirm(&self, unconfirmed: &mut Vec<(String, String)>) -> bool {
        let mut is_gone = false;
        while let Some((name, uid)) = unconfirmed.last() {
            let Ok(Ok(present)) = timeout(TIMEOUT, self.blocks().get_opt(name)).await else { break };
            if present.and_then(|block| block.uid()).as_ref() != Some(uid) {
                tracing::warn!(block = name, "the API server has lost a block");
                self.ipam.update(|state| state.lose_block(name, uid));
                is_gone = true;
            }
            unconfirmed.pop();
        }
        is_gone
    }

    async fn release(&self, name: &str) {
        match self.try_release(name).await {
            Ok(true) => {
                self.metrics.block_released(true);
                tracing::info!(block = name, "released an empty block");
            }
            Ok(false) => {}
            Err(error) => {
                self.metrics.block_released(false);
                tracing::warn!(
                    block = name,
                    error = format!("{error:#}"),
                    "cannot release an empty block; will try again"
                );
            }
        }
    }

    /// False when the block is not released now. The server is asked before the block is closed, so that an outage takes
    /// no block out of use; and what routing daemons are told of it goes before it does, because the next node may have it at once. Packets to it
    /// are refused meanwhile; [`crate::pod_network`] decides for how long after it is gone.
    async fn try_release(&self, name: &str) -> anyhow::Result<bool> {
        let present = timeout(TIMEOUT, self.blocks().get_opt(name)).await??;
        let present =
            present.filter(|block| block.node() == Some(&self.ipam.node)).map(|block| BlockDeletion {
                name: name.to_owned(),
                uid: block.uid().unwrap_or_default(),
                version: block.resource_version().unwrap_or_default(),
            });
        let Some(deletion) = self.ipam.update(|state| state.close_block(name, present)) else {
            return Ok(false);
        };
        let (answer, outcome) = match self.set_routes().await {
            Ok(()) => self.delete(&deletion).await,
            Err(error) => (DeletionAnswer::Refused, Err(error.context("cannot withdraw its routes"))),
        };
        let is_gone = self.ipam.update(|state| state.deletion_answered(&deletion, answer));
        if answer == DeletionAnswer::Refused {
            self.export().await;
        }
        outcome?;
        if is_gone {
            timeout(TIMEOUT, remove_finalizer(&self.blocks(), name, &deletion.uid)).await??;
            self.ipam.update(|state| state.forget_block(name, &deletion.uid));
            self.ipam.blocks_changed.notify_one();
        }
        Ok(is_gone)
    }

    async fn delete(&self, deletion: &BlockDeletion) -> (DeletionAnswer, anyhow::Result<()>) {
        let BlockDeletion { name, uid, version } = deletion;
        let preconditions = Preconditions { uid: Some(uid.clone()), resource_version: Some(version.clone()) };
        let parameters = DeleteParams { preconditions: Some(preconditions), ..DeleteParams::default() };
        match timeout(TIMEOUT, self.blocks().delete(name, &parameters)).await {
            Ok(sent) => (answer(sent.as_ref().err()), sent.map(drop).map_err(Into::into)),
            Err(elapsed) => (DeletionAnswer::Unknown, Err(elapsed.into())),
        }
    }

    /// Tells routing daemons of all blocks.
    async fn export(&self) {
        if let Err(error) = self.set_routes().await {
            tracing::warn!(error = format!("{error:#}"), "cannot update the export table");
        }
    }

    async fn set_routes(&self) -> anyhow::Result<()> {
        let set = self.set_routes;
        let routes = Routes { ids: self.ipam.numbers(), exported: self.ipam.prefixes() };
        if tokio::task::spawn_blocking(move || set(&routes)).await?? {
            self.ipam.blocks_changed.notify_one();
        }
        Ok(())
    }
}

/// A conflict leaves open whether the block is another one by now, and a 5xx whether the deletion was stored.
fn answer(error: Option<&kube::Error>) -> DeletionAnswer {
    match error {
        None => DeletionAnswer::Accepted,
        Some(kube::Error::Api(status)) if status.is_not_found() => DeletionAnswer::Accepted,
        Some(kube::Error::Api(status)) if matches!(status.code, 400 | 401 | 403 | 405 | 422 | 429) => {
            DeletionAnswer::Refused
        }
        Some(_) => DeletionAnswer::Unknown,
    }
}

/// After the deletion, not before: in between the block cannot be granted to another node.
async fn remove_finalizer(blocks: &Api<AddressBlock>, name: &str, uid: &str) -> Result<(), kube::Error> {
    let present = blocks.get_opt(name).await?.filter(|block| block.uid().as_deref() == Some(uid));
    let Some(block) = present else { return Ok(()) };
    match writes::remove_finalizer(blocks, &block, COIL_FINALIZER).await {
        Err(kube::Error::Api(status)) if status.is_not_found() => Ok(()),
        outcome => outcome.map(drop),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use futures::FutureExt;
    use kube::core::Status;
    use tokio::task::JoinSet;

    use prometheus_client::registry::Registry;
    use testbed_api::server::client;

    use super::*;
    use crate::ipam::tests::{assume, block, node};

    /// A server on which a block has no finalizer but ours and whose DELETE is answered with `code`.
    fn server(code: u16) -> Client {
        client(move |call| {
            let object = || serde_json::to_string(&block("a-0", "a", "10.0.0.0/30")).unwrap();
            let status = format!(r#"{{"kind":"Status","apiVersion":"v1","status":"Failure","code":{code}}}"#);
            let answer = match call.split(' ').next() {
                Some("DELETE") if code != 200 => (code, status),
                _ => (200, object()),
            };
            std::future::ready(answer).boxed()
        })
    }

    fn keeper(client: Client, ipam: &Arc<Ipam>) -> Keeper {
        let metrics = IpamMetrics::register(&mut Registry::default());
        let record = BlockRecord::new(std::env::temp_dir().join("unused"));
        Keeper { client, ipam: Arc::clone(ipam), metrics, record, set_routes: |_| Ok(true) }
    }

    #[tokio::test]
    async fn a_block_is_used_again_only_after_a_plain_refusal() {
        for (code, known, open) in
            [(200, false, false), (403, true, true), (409, true, false), (504, true, false)]
        {
            let mut tasks = JoinSet::new();
            let client = server(code);
            let ipam = node(client.clone(), &["a"], &mut tasks);
            ipam.sync_blocks(&[]);
            assume(&ipam, &block("a-0", "a", "10.0.0.0/30"));
            let outcome = keeper(client, &ipam).try_release("a-0").await;
            assert_eq!(outcome.is_ok(), code == 200, "{code}: {outcome:?}");
            let usage = ipam.usage();
            assert_eq!(!usage.is_empty(), known, "{code}");
            assert_eq!(usage.first().is_some_and(|usage| usage.open), open, "{code}");
            let refused = ipam.pod_prefixes().unwrap();
            assert_eq!(!refused.is_empty(), known, "{code}: it is this node's until it is gone");
        }
    }

    /// The next node may be granted it as soon as it is deleted. What refuses packets to it hears of that.
    #[tokio::test]
    async fn a_block_is_withdrawn_before_it_goes_and_without_that_it_stays() {
        static STEPS: Mutex<Vec<String>> = Mutex::new(Vec::new());
        for routes_go in [true, false] {
            let mut tasks = JoinSet::new();
            let client = client(|call| {
                STEPS.lock().unwrap().push(call.split(' ').next().unwrap_or_default().to_owned());
                let there = serde_json::to_string(&block("a-0", "a", "10.0.0.0/30")).unwrap();
                std::future::ready((200, there)).boxed()
            });
            let ipam = node(client.clone(), &["a"], &mut tasks);
            ipam.sync_blocks(&[]);
            assume(&ipam, &block("a-0", "a", "10.0.0.0/30"));
            assert_eq!(ipam.prefixes().len(), 1);
            let set_routes: fn(&Routes) -> netlink::Result<bool> = if routes_go {
                |routes| {
                    assert_eq!(routes.exported, []);
                    STEPS.lock().unwrap().push("withdraw".to_owned());
                    Ok(false)
                }
            } else {
                |_| {
                    let source = std::io::ErrorKind::PermissionDenied.into();
                    Err(netlink::Error::Socket { operation: "sendmsg", source })
                }
            };
            let keeper = Keeper { set_routes, ..keeper(client, &ipam) };
            assert_eq!(keeper.try_release("a-0").await.is_ok(), routes_go);
            let mut steps = std::mem::take(&mut *STEPS.lock().unwrap());
            steps.retain(|step| step != "GET" && step != "PATCH");
            let expected: &[&str] = if routes_go { &["withdraw", "DELETE"] } else { &[] };
            assert_eq!(steps, expected);
            assert_eq!(ipam.blocks_changed().now_or_never().is_some(), routes_go);
            assert_eq!(ipam.prefixes().len(), usize::from(!routes_go), "it is used again");
        }
    }

    #[tokio::test]
    async fn what_refuses_packets_is_woken_when_a_block_is_gone_that_was_exported_no_more() {
        let mut tasks = JoinSet::new();
        let client = server(504);
        let ipam = node(client.clone(), &["a"], &mut tasks);
        ipam.sync_blocks(&[]);
        assume(&ipam, &block("a-0", "a", "10.0.0.0/30"));
        let keeper = keeper(client, &ipam);
        keeper.try_release("a-0").await.unwrap_err();
        let mut known = None;
        let mut is_woken = || {
            keeper.notify_of_pod_prefixes(&mut known);
            ipam.blocks_changed().now_or_never().is_some()
        };
        assert_eq!([is_woken(), is_woken()], [true, false]);
        ipam.update(|state| state.forget_block("a-0", "a-0"));
        assert_eq!([is_woken(), is_woken()], [true, false]);
    }

    #[tokio::test]
    async fn a_granted_block_stays_while_the_watch_is_behind_and_goes_when_it_was_deleted() {
        let other = |block: &mut AddressBlock| block.metadata.uid = Some("another".to_owned());
        for (shown, present, stays) in [(false, true, true), (true, true, true), (false, false, false)] {
            let mut tasks = JoinSet::new();
            let client = client(move |_| {
                let mut there = block("a-0", "a", "10.0.0.0/30");
                if !present {
                    other(&mut there);
                }
                std::future::ready((200, serde_json::to_string(&there).unwrap())).boxed()
            });
            let ipam = node(client.clone(), &["a"], &mut tasks);
            let granted = block("a-0", "a", "10.0.0.0/30");
            assume(&ipam, &granted);
            let later = tokio::time::Instant::now() + Duration::from_secs(600);
            let key = fairlead_ipam::Key { container_id: "pod".to_owned(), ifname: "eth0".to_owned() };
            let given = ipam.allocate("a", &key, later).await.unwrap();
            // Of the same name, but an older one, as the watch still has it.
            let mut older = block("a-0", "a", "10.9.0.0/30");
            other(&mut older);
            ipam.sync_blocks(&[]);
            ipam.sync_blocks(&[Arc::new(older)]);
            assert_eq!(ipam.usage().first().map(|usage| usage.used), Some(1), "it is in use");
            assert!(
                ipam.prefixes()
                    .iter()
                    .any(|net| given.ipv4.is_some_and(|ip| net.contains(&std::net::IpAddr::from(ip))))
            );
            if shown {
                ipam.sync_blocks(&[Arc::new(granted)]);
                assert_eq!(ipam.lock().assumed(), []);
                ipam.sync_blocks(&[]);
                assert!(ipam.usage().is_empty(), "what the watch has shown goes when it no longer does");
                continue;
            }
            keeper(client, &ipam).confirm_assumed().await;
            assert_eq!(!ipam.usage().is_empty(), stays);
        }
    }

    #[test]
    fn only_a_plain_no_lets_a_block_be_used_again() {
        let answer = |code| kube::Error::Api(Box::new(Status { code, ..Status::default() }));
        for code in [400, 401, 403, 405, 422, 429] {
            assert_eq!(super::answer(Some(&answer(code))), DeletionAnswer::Refused, "{code}");
        }
        for code in [409, 500, 503, 504] {
            assert_eq!(super::answer(Some(&answer(code))), DeletionAnswer::Unknown, "{code}");
        }
        let gone = Status { code: 404, reason: "NotFound".to_owned(), ..Status::default() };
        assert_eq!(super::answer(Some(&kube::Error::Api(Box::new(gone)))), DeletionAnswer::Accepted);
        let lost = std::io::Error::from(std::io::ErrorKind::ConnectionReset);
        let lost = kube::Error::Service(Box::new(lost));
        assert_eq!(super::answer(Some(&lost)), DeletionAnswer::Unknown);
    }
}
