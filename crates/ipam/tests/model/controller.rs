//! The elected controller: `fairlead_ipam::grant` with caches that lag and calls that fail, in the order in which
//! `crates/controller/src/grants.rs` makes them.

use std::collections::BTreeMap;

use fairlead_ipam::{ExistingBlock, Grant, Request as Wanted, grant};

use crate::api::{Api, Block, Failed, Objects, Outcome, Request, Wire, Write};

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
    fresh: BTreeMap<String, ExistingBlock>,
    tasks: Vec<Task>,
}

impl Controller {
    /// A copy that was just elected: it lists everything before it decides anything.
    pub(crate) fn elected(api: &Api) -> Self {
        Self { cache: api.objects.clone(), fresh: BTreeMap::new(), tasks: Vec::new() }
    }

    /// The watches deliver.
    pub(crate) fn sync(&mut self, api: &Api) {
        self.cache = api.objects.clone();
        self.fresh.retain(|name, _| !self.cache.blocks.contains_key(name));
    }

    /// Takes up a request that nobody works on.
    pub(crate) fn take_up(&mut self, pick: usize) {
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
        let call = self.decide(&name, &request);
        self.tasks.push(Task { request: name, wanted: request, call });
    }

    fn decide(&mut self, name: &str, request: &Request) -> Write {
        let mut blocks = self.cache.existing();
        blocks.extend(self.fresh.values().cloned());
        let wanted = Wanted { uid: &request.uid, pool: &request.pool, node: &request.node };
        let answer =
            |outcome| Write::AnswerRequest { name: name.to_owned(), uid: request.uid.clone(), outcome };
        match grant(&wanted, &self.cache.pools, &blocks) {
            Grant::Existing { name } => answer(Outcome::Granted(name)),
            Grant::Refused(_) => answer(Outcome::Refused),
            Grant::New { index, name, nets } => {
                let block = Block {
                    uid: String::new(),
                    pool: request.pool.clone(),
                    node: request.node.clone(),
                    index,
                    nets,
                    request: Some(request.uid.clone()),
                    deleting: false,
                    version: 0,
                };
                let existing = ExistingBlock {
                    name: name.clone(),
                    pool: request.pool.clone(),
                    index,
                    nets,
                    request: Some(request.uid.clone()),
                    terminating: false,
                };
                self.fresh.insert(name.clone(), existing);
                Write::CreateBlock { name, block }
            }
        }
    }

    /// Makes the next call of one answer.
    pub(crate) fn advance(&mut self, api: &mut Api, pick: usize, wire: Wire) {
        if self.tasks.is_empty() {
            return;
        }
        let mut task = self.tasks.remove(pick % self.tasks.len());
        let done = api.call(&task.call, wire);
        let Write::CreateBlock { name, .. } = &task.call else { return };
        match done {
            Ok(()) => {
                task.call = Write::AnswerRequest {
                    name: task.request.clone(),
                    uid: task.wanted.uid.clone(),
                    outcome: Outcome::Granted(name.clone()),
                };
            }
            Err(Failed::Conflict) => {
                if let Some(block) = self.fresh.get_mut(name) {
                    block.request = None;
                }
                task.call = self.decide(&task.request.clone(), &task.wanted.clone());
            }
            Err(_) => {
                self.fresh.remove(name);
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
