//! The API server as the programs see it: objects with versions, calls that get lost on the way there or back.

use std::collections::BTreeMap;

use fairlead_ipam::{BlockIndex, DualStackNets, ExistingBlock, Pool, PoolState};

/// An AddressBlock with Coil's finalizer.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Block {
    pub(crate) uid: String,
    pub(crate) pool: String,
    pub(crate) node: String,
    pub(crate) index: u32,
    pub(crate) nets: DualStackNets,
    pub(crate) request: Option<String>,
    pub(crate) reserved: bool,
    pub(crate) deleting: bool,
    pub(crate) version: u64,
}

impl Block {
    pub(crate) fn new(
        pool: &str,
        node: &str,
        index: u32,
        nets: DualStackNets,
        request: Option<String>,
    ) -> Self {
        let (uid, pool, node) = (String::new(), pool.to_owned(), node.to_owned());
        Self { uid, pool, node, index, nets, request, reserved: false, deleting: false, version: 0 }
    }
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Outcome {
    Pending,
    Granted(String),
    /// With the reason of the condition.
    Refused(&'static str),
}

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Request {
    pub(crate) uid: String,
    pub(crate) pool: String,
    pub(crate) node: String,
    pub(crate) outcome: Outcome,
}

#[derive(Debug, Clone, Default)]
pub(crate) struct Objects {
    pub(crate) pools: BTreeMap<String, PoolState>,
    pub(crate) blocks: BTreeMap<String, Block>,
    pub(crate) requests: BTreeMap<String, Request>,
    next: u64,
}

/// Fate of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wire {
    /// It is executed and the answer arrives.
    Works,
    /// It is executed and the answer is lost.
    LosesAnswer,
    /// It never arrives.
    LosesCall,
}

/// Cause of a failed call, as the caller sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Failed {
    Conflict,
    NotFound,
    /// It may have been executed or not.
    NoAnswer,
}

/// Something that changes objects.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Write {
    CreateBlock { name: String, block: Block },
    DeleteBlock { name: String, uid: String, version: u64 },
    DropFinalizer { name: String, uid: String },
    CreateRequest { pool: String, node: String },
    DeleteRequest { name: String },
    AnswerRequest { name: String, uid: String, outcome: Outcome },
}

impl Objects {
    pub(crate) fn next_version(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Executes a write; gives the name of a created request.
    pub(crate) fn apply(&mut self, write: &Write) -> Result<String, Failed> {
        let version = self.next_version();
        match write {
            Write::CreateBlock { name, block } => {
                if self.blocks.contains_key(name) {
                    return Err(Failed::Conflict);
                }
                let block = Block { uid: format!("block-{version}"), version, ..block.clone() };
                self.blocks.insert(name.clone(), block);
            }
            Write::DeleteBlock { name, uid, version: seen } => {
                let block = self.blocks.get_mut(name).ok_or(Failed::NotFound)?;
                if block.uid != *uid || block.version != *seen {
                    return Err(Failed::Conflict);
                }
                (block.deleting, block.version) = (true, version);
            }
            Write::DropFinalizer { name, uid } => {
                let block = self.blocks.get(name).ok_or(Failed::NotFound)?;
                if block.uid != *uid || !block.deleting {
                    return Err(Failed::Conflict);
                }
                self.blocks.remove(name);
            }
            Write::CreateRequest { pool, node } => {
                let name = format!("req-{pool}-{node}-{version}");
                let (uid, outcome) = (format!("request-{version}"), Outcome::Pending);
                let request = Request { uid, pool: pool.clone(), node: node.clone(), outcome };
                self.requests.insert(name.clone(), request);
                return Ok(name);
            }
            Write::DeleteRequest { name } => {
                self.requests.remove(name).ok_or(Failed::NotFound)?;
            }
            Write::AnswerRequest { name, uid, outcome } => {
                let request = self.requests.get_mut(name).ok_or(Failed::NotFound)?;
                if request.uid != *uid {
                    return Err(Failed::Conflict);
                }
                request.outcome = outcome.clone();
            }
        }
        Ok(String::new())
    }

    /// All blocks as the controller's decision takes them.
    pub(crate) fn existing(&self) -> BlockIndex {
        self.blocks
            .iter()
            .map(|(name, block)| ExistingBlock {
                name: name.clone(),
                pool: block.pool.clone(),
                node: block.node.clone(),
                index: block.index,
                nets: block.nets,
                request: block.request.clone(),
                terminating: block.deleting,
            })
            .collect()
    }

    pub(crate) fn add_pool(&mut self, name: &str, bits: i64, subnets: &[(Option<&str>, Option<&str>)]) {
        let parsed = Pool::parse(name, bits, subnets.iter().copied());
        self.pools
            .insert(name.to_owned(), PoolState { parsed, terminating: false, disabled: false, created: 0 });
    }
}

/// The server and the network before it.
#[derive(Debug, Default)]
pub(crate) struct Api {
    pub(crate) objects: Objects,
    pub(crate) down: bool,
    /// Calls of programs that died since; each may still be executed, once.
    pub(crate) stray: Vec<Write>,
}

impl Api {
    pub(crate) fn call(&mut self, write: &Write, wire: Wire) -> Result<String, Failed> {
        if self.down || wire == Wire::LosesCall {
            return Err(Failed::NoAnswer);
        }
        let done = self.objects.apply(write);
        if wire == Wire::LosesAnswer { Err(Failed::NoAnswer) } else { done }
    }

    pub(crate) fn read(&self, wire: Wire) -> Result<&Objects, Failed> {
        if self.down || wire != Wire::Works { Err(Failed::NoAnswer) } else { Ok(&self.objects) }
    }
}
