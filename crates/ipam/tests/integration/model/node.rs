//! A node: its kernel, and a node program around [`NodeState`]. Everything here is I/O; the state decides.

mod boot;
mod link;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::{Duration, Instant};

use fairlead_ipam::state::{
    AllocationError, Attempt, BlockDeletion, BlockDemand, DeletionAnswer, NodeState, PoolInfo,
    RequestFailure, ShownBlock,
};
use fairlead_ipam::{Allocation, Block as Own, Key, PoolState, RefusalReason};

pub(crate) use self::link::Link;
use crate::model::api::{Api, Block, Failed, Outcome, Wire, Write};

const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
const BLOCK_WAIT: Duration = Duration::from_secs(20);
const RELEASE_GRACE: Duration = Duration::from_secs(60);
const LEAK_GRACE: Duration = Duration::from_secs(60);
/// Addresses in a block, as nodes count when pods wait: few, so that they request many blocks at once.
const BLOCK_SIZE: usize = 1;

#[derive(Debug, Clone)]
struct Add {
    pool: String,
    since: Instant,
    stage: Stage,
}

#[derive(Debug, Clone)]
enum Stage {
    HasAddress(Allocation),
    ReadsPool,
    Tries,
    /// Until the state wakes it.
    Waits,
}

/// A BlockRequest under way, and the next call of it.
#[derive(Debug, Clone)]
struct Requesting {
    demand: BlockDemand,
    since: Instant,
    call: Call,
}

#[derive(Debug, Clone)]
enum Call {
    Create,
    AwaitAnswer { name: String },
    ReadBlock { name: String, block: String, request_uid: String },
}

/// A block that is being released: the next thing to do.
#[derive(Debug, Clone)]
enum Release {
    Close(String, Option<BlockDeletion>),
    Delete(BlockDeletion),
    RemoveFinalizer(BlockDeletion),
    Forget(BlockDeletion),
}

/// The node program while it runs.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) state: NodeState<Key>,
    blocks: Option<BTreeMap<String, Block>>,
    pools: BTreeMap<String, PoolState>,
    adds: BTreeMap<Key, Add>,
    /// Cause of the failure of each container's latest ADD.
    pub(crate) failures: BTreeMap<Key, AllocationError>,
    requests: Vec<Requesting>,
    /// Whether the request task was notified.
    request: bool,
    due: VecDeque<String>,
    release: Option<Release>,
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) kernel: BTreeMap<Key, Link>,
    /// Blocks that the kernel exports, and those in the file beside the socket. Neither outlasts the boot.
    exported: BTreeSet<String>,
    recorded: Vec<Own>,
    pub(crate) program: Option<Program>,
    /// A mistake that the model must find.
    pub(crate) mistake: Option<Mistake>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Mistake {
    /// A block whose deletion got no answer is used again.
    ReopensWithoutAnswer,
    /// A program that starts believes the file, whatever the kernel exports.
    TrustsTheFile,
    /// Waiting pods are never woken.
    WakesNoWaiter,
}

pub(crate) fn key(container: usize) -> Key {
    Key { container_id: format!("c{container}"), ifname: "eth0".to_owned() }
}

impl Node {
    pub(crate) fn new(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            kernel: BTreeMap::new(),
            exported: BTreeSet::new(),
            recorded: Vec::new(),
            program: None,
            mistake: None,
        }
    }

    /// The program starts: its state is what the kernel shows.
    pub(crate) fn start(&mut self) {
        if self.program.is_some() {
            return;
        }
        let mut state = NodeState::default();
        for (key, link) in &self.kernel {
            state
                .adopt(key.clone(), &link.pool, link.ipv4, link.ipv6)
                .expect("the kernel's pods are in order");
        }
        self.restored().into_iter().for_each(|block| state.restore_block(block));
        self.program = Some(Program {
            state,
            blocks: None,
            pools: BTreeMap::new(),
            adds: BTreeMap::new(),
            failures: BTreeMap::new(),
            requests: Vec::new(),
            request: false,
            due: VecDeque::new(),
            release: None,
        });
    }

    /// The program dies; the kernel stays, and what was sent may still arrive.
    pub(crate) fn crash(&mut self, api: &mut Api) {
        let Some(program) = self.program.take() else { return };
        let release = match program.release {
            Some(Release::Delete(deletion)) => Some(delete(&deletion)),
            Some(Release::RemoveFinalizer(deletion)) => Some(remove_finalizer(&deletion)),
            _ => None,
        };
        api.stray.extend(release);
        api.stray.extend(program.requests.iter().map(|it| self.last_write(it)));
    }

    /// The watches deliver this node's blocks and all pools.
    pub(crate) fn sync(&mut self, api: &Api) {
        let Some(program) = &mut self.program else { return };
        let Ok(objects) = api.read(Wire::Works) else { return };
        let own = objects.blocks.iter().filter(|(_, block)| block.node == self.name);
        program.blocks = Some(own.map(|(name, block)| (name.clone(), block.clone())).collect());
        program.pools = objects.pools.clone();
    }

    pub(crate) fn add(&mut self, now: Instant, key: Key, pool: &str) {
        let Some(program) = &mut self.program else { return };
        let add = || Add { pool: pool.to_owned(), since: now, stage: Stage::Tries };
        program.adds.entry(key).or_insert_with(add);
    }

    /// DEL and each victim of GC: never beside an ADD of the same container.
    pub(crate) fn del(&mut self, key: &Key) {
        let Some(program) = &mut self.program else { return };
        if !program.adds.contains_key(key) {
            self.kernel.remove(key);
            program.state.release(key);
            self.apply_effects();
        }
    }

    pub(crate) fn gc(&mut self, valid: impl Fn(&Key) -> bool) {
        let Some(program) = &self.program else { return };
        let keys = program.state.table().allocated().map(|(key, _)| key.clone());
        let victims: Vec<Key> = keys.filter(|key| !valid(key)).collect();
        victims.iter().for_each(|key| self.del(key));
    }

    /// A pod of which CHECK would say that it does not have the addresses of its link. Pods that are being added wait for
    /// their lock.
    pub(crate) fn fails_check(&self) -> Option<&Key> {
        let program = self.program.as_ref()?;
        let has = |key: &Key, link: &Link| {
            let allocated = program.state.table().get(key);
            allocated.is_some_and(|it| it.pool == link.pool && it.ipv4 == link.ipv4 && it.ipv6 == link.ipv6)
        };
        let mut added = self.kernel.iter().filter(|(key, _)| !program.adds.contains_key(*key));
        added.find(|(key, link)| !has(key, link)).map(|(key, _)| key)
    }

    /// One step of one ADD. `made` says whether the kernel makes the link.
    pub(crate) fn work(&mut self, api: &Api, now: Instant, pick: usize, wire: Wire, made: bool) {
        let Some(program) = &mut self.program else { return };
        let runs = |(key, add): (&Key, &Add)| (!matches!(add.stage, Stage::Waits)).then(|| key.clone());
        let running: Vec<Key> = program.adds.iter().filter_map(runs).collect();
        let Some(key) = running.get(pick % running.len().max(1)) else { return };
        let Some(mut add) = program.adds.remove(key) else { return };
        let pool_info = match add.stage {
            Stage::HasAddress(allocation) => {
                // A stale link of the same container goes first, whatever comes of the new one.
                self.kernel.remove(key);
                if made {
                    let Allocation { pool, ipv4, ipv6, .. } = allocation;
                    self.kernel.insert(key.clone(), Link { pool, ipv4, ipv6 });
                } else if allocation.is_new {
                    program.state.release(key);
                    self.apply_effects();
                }
                return;
            }
            Stage::Tries => program.pools.get(&add.pool).map(pool_info),
            Stage::ReadsPool => Some(match api.read(wire) {
                Ok(objects) => objects.pools.get(&add.pool).map_or(PoolInfo::Missing, pool_info),
                Err(_) => PoolInfo::Unavailable,
            }),
            Stage::Waits => return,
        };
        add.stage = match program.state.allocate(now, &add.pool, key, pool_info, key) {
            Attempt::Allocated(allocation) => Stage::HasAddress(allocation),
            Attempt::Failed(error) => {
                program.failures.insert(key.clone(), error);
                return self.apply_effects();
            }
            Attempt::ReadPool => Stage::ReadsPool,
            Attempt::Wait => Stage::Waits,
        };
        program.adds.insert(key.clone(), add);
        self.apply_effects();
    }

    /// One step of one BlockRequest.
    pub(crate) fn request(&mut self, api: &mut Api, now: Instant, pick: usize, wire: Wire) {
        let Some(program) = &mut self.program else { return };
        if std::mem::take(&mut program.request) {
            while let Some(demand) = program.state.next_request() {
                program.requests.push(Requesting { demand, since: now, call: Call::Create });
            }
        }
        if program.requests.is_empty() {
            return;
        }
        let mut requesting = program.requests.remove(pick % program.requests.len());
        let ended = self.call(api, wire, &mut requesting);
        let Some(program) = &mut self.program else { return };
        match ended {
            Some(outcome) => {
                program.state.end_request(now, &requesting.demand, outcome);
                // If this call is lost, the request is deleted at the next start of the program.
                if let Call::AwaitAnswer { name } | Call::ReadBlock { name, .. } = requesting.call {
                    let _ = api.call(&Write::DeleteRequest { name }, wire);
                }
            }
            None => program.requests.push(requesting),
        }
        self.apply_effects();
    }

    /// Makes the next call of a request; `Some` is how it ended.
    fn call(
        &self,
        api: &mut Api,
        wire: Wire,
        requesting: &mut Requesting,
    ) -> Option<Result<Option<Own>, RequestFailure>> {
        match &requesting.call {
            Call::Create => match api.call(&self.create(&requesting.demand), wire) {
                Ok(name) => requesting.call = Call::AwaitAnswer { name },
                Err(_) => return Some(Err(failure("no answer"))),
            },
            Call::AwaitAnswer { name } => {
                let Ok(objects) = api.read(wire) else { return Some(Err(failure("no answer"))) };
                let Some(request) = objects.requests.get(name) else {
                    return Some(Err(failure("unanswered")));
                };
                match &request.outcome {
                    // The watch goes on.
                    Outcome::Pending => {}
                    Outcome::Granted(block) => {
                        let (name, block) = (name.clone(), block.clone());
                        requesting.call = Call::ReadBlock { name, block, request_uid: request.uid.clone() };
                    }
                    Outcome::Refused(reason) => {
                        let reason = RefusalReason::from_condition(reason);
                        return Some(Err(RequestFailure { reason, message: String::new() }));
                    }
                }
            }
            Call::ReadBlock { block, request_uid, .. } => {
                return Some(self.read_block(api, wire, block, request_uid));
            }
        }
        None
    }

    fn read_block(
        &self,
        api: &Api,
        wire: Wire,
        name: &str,
        request_uid: &str,
    ) -> Result<Option<Own>, RequestFailure> {
        let cached = self.program.as_ref().and_then(|program| program.blocks.as_ref()?.get(name));
        let block = match cached.filter(|block| block.request.as_deref() == Some(request_uid)) {
            Some(cached) => cached,
            None => {
                let objects = api.read(wire).map_err(|_| failure("no answer"))?;
                objects.blocks.get(name).ok_or_else(|| failure("no such block"))?
            }
        };
        Ok((block.node == self.name).then(|| own(name, block)))
    }

    fn create(&self, demand: &BlockDemand) -> Write {
        Write::CreateRequest { pool: demand.pool.clone(), node: self.name.clone() }
    }

    /// The write that a request may still make when its program has ended.
    fn last_write(&self, requesting: &Requesting) -> Write {
        match &requesting.call {
            Call::Create => self.create(&requesting.demand),
            Call::AwaitAnswer { name } | Call::ReadBlock { name, .. } => {
                Write::DeleteRequest { name: name.clone() }
            }
        }
    }

    /// Block task after a change: the state follows the watches, and blocks become due.
    pub(crate) fn sync_blocks(&mut self, api: &Api, now: Instant, wire: Wire) {
        let Some(program) = &mut self.program else { return };
        let Some(blocks) = program.blocks.as_ref().filter(|_| program.release.is_none()) else { return };
        let shown = blocks.iter().map(|(name, block)| ShownBlock {
            name,
            uid: &block.uid,
            own: Some(own(name, block)),
        });
        program.state.sync_blocks(shown.collect());
        for (name, uid) in program.state.assumed() {
            let Ok(objects) = api.read(wire) else { continue };
            if objects.blocks.get(&name).is_none_or(|block| block.uid != uid) {
                program.state.forget_block(&name, &uid);
            }
        }
        let pools = &program.pools;
        program.state.sync_pools(|pool| pools.get(pool).is_some_and(|pool| pool_info(pool).is_cordoned()));
        program.due = program.state.due_releases(now, RELEASE_GRACE).into();
        self.keep_blocks();
        self.apply_effects();
    }

    /// The next step of the release of a block. `refused` is a server that says no and means it.
    pub(crate) fn release(&mut self, api: &mut Api, wire: Wire, refused: bool) {
        let mistaken = self.mistake == Some(Mistake::ReopensWithoutAnswer);
        let Some(program) = &mut self.program else { return };
        program.release = match program.release.take() {
            None => program.due.pop_front().and_then(|name| {
                let objects = api.read(wire).ok()?;
                let present = objects.blocks.get(&name).filter(|block| block.node == self.name);
                let deletion = present.map(|block| BlockDeletion {
                    name: name.clone(),
                    uid: block.uid.clone(),
                    version: block.version.to_string(),
                });
                Some(Release::Close(name, deletion))
            }),
            Some(Release::Close(name, present)) => {
                let deletion = program.state.close_block(&name, present);
                // Its routes go before it does.
                self.exported.remove(&name);
                deletion.map(Release::Delete)
            }
            Some(Release::Delete(deletion)) => {
                let answer = match api.call(&delete(&deletion), if refused { Wire::LosesCall } else { wire })
                {
                    _ if refused => DeletionAnswer::Refused,
                    Ok(_) | Err(Failed::NotFound) => DeletionAnswer::Accepted,
                    Err(Failed::NoAnswer) if mistaken => DeletionAnswer::Refused,
                    Err(Failed::Conflict | Failed::NoAnswer) => DeletionAnswer::Unknown,
                };
                let accepted = program.state.deletion_answered(&deletion, answer);
                accepted.then_some(Release::RemoveFinalizer(deletion))
            }
            Some(Release::RemoveFinalizer(deletion)) => match api.call(&remove_finalizer(&deletion), wire) {
                Ok(_) | Err(Failed::Conflict | Failed::NotFound) => Some(Release::Forget(deletion)),
                Err(Failed::NoAnswer) => {
                    if mistaken {
                        program.state.deletion_answered(&deletion, DeletionAnswer::Refused);
                    }
                    None
                }
            },
            Some(Release::Forget(BlockDeletion { name, uid, .. })) => {
                program.state.forget_block(&name, &uid);
                None
            }
        };
        self.apply_effects();
    }

    /// The search for leaked addresses.
    pub(crate) fn find_leaks(&mut self, now: Instant) {
        let Some(program) = &mut self.program else { return };
        let linked: BTreeSet<Key> = self.kernel.keys().cloned().collect();
        for key in program.state.leaked(now, LEAK_GRACE, &linked) {
            // The lock of the container is held: no ADD of it runs.
            if !program.adds.contains_key(&key) && !self.kernel.contains_key(&key) {
                program.state.release(&key);
            }
        }
        self.apply_effects();
    }

    /// Requests and pods that have waited too long give up; what was sent may still arrive.
    pub(crate) fn time_passes(&mut self, api: &mut Api, now: Instant) {
        let Some(program) = &mut self.program else { return };
        let late = |since: Instant, limit| now.saturating_duration_since(since) >= limit;
        let expired = program.requests.extract_if(.., |request| late(request.since, REQUEST_TIMEOUT));
        let expired: Vec<Requesting> = expired.collect();
        for Requesting { demand, .. } in &expired {
            program.state.end_request(now, demand, Err(failure("timed out")));
        }
        for (key, _) in program
            .adds
            .extract_if(.., |_, add| matches!(add.stage, Stage::Waits) && late(add.since, BLOCK_WAIT))
        {
            program.state.stop_waiting(&key);
        }
        self.apply_effects();
        api.stray.extend(expired.iter().map(|it| self.last_write(it)));
    }

    fn apply_effects(&mut self) {
        let Some(program) = &mut self.program else { return };
        let effects = program.state.take_effects();
        program.request |= effects.request;
        for key in effects.wake {
            if self.mistake == Some(Mistake::WakesNoWaiter) {
                continue;
            }
            if let Some(add) = program.adds.get_mut(&key).filter(|add| matches!(add.stage, Stage::Waits)) {
                add.stage = Stage::Tries;
            }
        }
    }

    pub(crate) fn has_no_adds(&self) -> bool {
        self.program.as_ref().is_some_and(|program| program.adds.is_empty())
    }

    /// Whether no ADD, request or release is under way.
    pub(crate) fn is_idle(&self) -> bool {
        self.program.as_ref().is_some_and(|program| {
            program.adds.is_empty()
                && program.requests.is_empty()
                && program.release.is_none()
                && !program.request
        })
    }
}

fn failure(message: &str) -> RequestFailure {
    RequestFailure { reason: None, message: message.to_owned() }
}

fn pool_info(pool: &PoolState) -> PoolInfo {
    match (pool.terminating, pool.disabled) {
        (true, _) => PoolInfo::Deleting,
        (false, true) => PoolInfo::Disabled,
        (false, false) => PoolInfo::Usable { block_size: BLOCK_SIZE },
    }
}

fn delete(deletion: &BlockDeletion) -> Write {
    let BlockDeletion { name, uid, version } = deletion.clone();
    Write::DeleteBlock { name, uid, version: version.parse().expect("a version of the model") }
}

fn remove_finalizer(deletion: &BlockDeletion) -> Write {
    Write::DropFinalizer { name: deletion.name.clone(), uid: deletion.uid.clone() }
}

fn own(name: &str, block: &Block) -> Own {
    let own = Own::new(name, &block.pool, block.nets, block.reserved, block.deleting);
    own.expect("granted").with_uid(&block.uid)
}
