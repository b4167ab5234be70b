//! The elected controller: `fairlead_ipam::grant` with caches that lag and calls that fail, in the order in which
//! `crates/controller/src/grants.rs` makes them.

use std::time::{Duration, Instant};

use fairlead_ipam::{AssumedBlocks, ExistingBlock, Grant, Request as Wanted, grant};

use crate::model::api::{Api, Block, Failed, Objects, Outcome, Request, Wire, Write};

/// Time for which a block just made counts although the watch has not shown it.
const ASSUMED_FOR: Duration = Duration::from_secs(60);

/// One answer that is being given.
#[derive(Debug, Clone)]
pub(crate) struct Task {
    request: String,
    wanted: Request,
    call: Write,
}

#[derive(Debug)]
pub(crate) struct Controller {
    cache: Objects,
    assumed: AssumedBlocks<ExistingBlock>,
    tasks: Vec<Task>,
}

impl Controller {
    /// A replica that was just elected: it lists everything before it decides anything.
    pub(crate) fn elected(api: &Api) -> Self {
        Self { cache: api.objects.clone(), assumed: AssumedBlocks::default(), tasks: Vec::new() }
    }

    /// The watches deliver.
    pub(crate) fn sync(&mut self, api: &Api) {
        self.cache = api.objects.clone();
    }

    /// Takes up a request that is not being answered yet.
    pub(crate) fn take_up(&mut self, now: Instant, pick: usize) {
        let free = |request: &&(&String, &Request)| {
            request.1.outcome == Outcome::Pending
                && !self.tasks.iter().any(|task| task.wanted.uid == request.1.uid)
        };
        let requests: Vec<_> = self.cache.requests.iter().collect();
        let pending: Vec<_> = requests.iter().filter(free).collect();
        if pending.is_empty() {
            return;
        }
        let (name, request) = *pending[pick % pending.len()];
        let (name, request) = (name.clone(), request.clone());
        let call = self.decide(now, &name, &request);
        self.tasks.push(Task { request: name, wanted: request, call });
    }

    fn decide(&mut self, now: Instant, name: &str, request: &Request) -> Write {
        let shown = self.cache.blocks.iter().map(|(name, block)| (name.as_str(), block.uid.as_str()));
        self.assumed.observe(shown);
        self.assumed.expire(now, ASSUMED_FOR);
        let mut blocks = self.cache.existing();
        self.assumed.iter().for_each(|(_, assumed)| blocks.insert(assumed.block.clone()));
        let wanted = Wanted {
            uid: &request.uid,
            pool: &request.pool,
            node: &request.node,
            pod_capacity: None,
            claim: None,
        };
        let answer =
            |outcome| Write::AnswerRequest { name: name.to_owned(), uid: request.uid.clone(), outcome };
        match grant(&wanted, &self.cache.pools, &blocks) {
            Grant::Existing { name } => answer(Outcome::Granted(name)),
            Grant::Refused(refusal) => answer(Outcome::Refused(refusal.reason().as_condition())),
            Grant::New { index, name, nets } => {
                let (pool, request_uid) = (request.pool.clone(), Some(request.uid.clone()));
                let existing = ExistingBlock {
                    name: name.clone(),
                    pool: pool.clone(),
                    node: request.node.clone(),
                    index,
                    nets,
                    request: request_uid.clone(),
                    terminating: false,
                };
                self.assumed.assume(now, &name, None, existing);
                let block = Block::new(&pool, &request.node, index, nets, request_uid);
                Write::CreateBlock { name, block }
            }
        }
    }

    /// Makes the next call of one answer.
    pub(crate) fn advance(&mut self, api: &mut Api, now: Instant, pick: usize, wire: Wire) {
        if self.tasks.is_empty() {
            return;
        }
        let mut task = self.tasks.remove(pick % self.tasks.len());
        let done = api.call(&task.call, wire);
        let Write::CreateBlock { name, .. } = &task.call else { return };
        match done {
            Ok(_) => {
                task.call = Write::AnswerRequest {
                    name: task.request.clone(),
                    uid: task.wanted.uid.clone(),
                    outcome: Outcome::Granted(name.clone()),
                };
            }
            Err(Failed::Conflict) => {
                if let Some(assumed) = self.assumed.get_mut(name) {
                    assumed.block.request = None;
                }
                task.call = self.decide(now, &task.request.clone(), &task.wanted.clone());
            }
            Err(_) => {
                self.assumed.forget(name);
                return;
            }
        }
        self.tasks.push(task);
    }

    /// It dies or loses the lease; what it has sent may still arrive.
    pub(crate) fn dies(self, api: &mut Api) {
        api.stray.extend(self.tasks.into_iter().map(|task| task.call));
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.tasks.is_empty()
    }
}
