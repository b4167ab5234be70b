//! A node: its kernel, and the node program around `NodeIpam`, in the order in which `crates/node` does things.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use fairlead_ipam::demand::{Demand, blocks_wanted};
use fairlead_ipam::leaks::Suspects;
use fairlead_ipam::{Allocation, Answer, Block as Own, Key, NodeIpam};

use crate::api::{Api, Block, Failed, Outcome, Wire, Write};

const ANSWER: Duration = Duration::from_secs(30);
const EMPTY_FOR: Duration = Duration::from_secs(300);
const LEAKED_FOR: Duration = Duration::from_secs(60);
/// Addresses in a block, as nodes count when pods wait: few, so that they ask for many blocks at once.
const LEAST_BLOCK: usize = 1;

/// A pod's link with its alias, and its routes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Link {
    pub(crate) pool: String,
    pub(crate) ipv4: Option<Ipv4Addr>,
    pub(crate) ipv6: Option<Ipv6Addr>,
}

impl Link {
    pub(crate) fn addresses(&self) -> impl Iterator<Item = IpAddr> + use<> {
        self.ipv4.map(IpAddr::V4).into_iter().chain(self.ipv6.map(IpAddr::V6))
    }
}

#[derive(Debug, Clone)]
enum Add {
    Waits { pool: String },
    HasAddress(Allocation),
}

/// A BlockRequest under way.
#[derive(Debug, Clone)]
struct Asking {
    since: Instant,
    next: Ask,
}

#[derive(Debug, Clone)]
enum Ask {
    Look,
    Send(Write),
    Await,
    Read(String),
}

/// A block being given back.
#[derive(Debug, Clone)]
struct Giving {
    name: String,
    call: Write,
}

/// The node program while it runs.
#[derive(Debug)]
pub(crate) struct Program {
    pub(crate) book: NodeIpam,
    cache: Option<BTreeMap<String, Block>>,
    adds: BTreeMap<Key, Add>,
    /// By pool and number.
    asking: BTreeMap<(String, usize), Asking>,
    demand: Demand,
    giving: Option<Giving>,
    empty_since: BTreeMap<String, Instant>,
    suspects: Suspects,
}

#[derive(Debug)]
pub(crate) struct Node {
    pub(crate) name: String,
    pub(crate) kernel: BTreeMap<Key, Link>,
    pub(crate) program: Option<Program>,
    /// A mistake that the model must find: a block whose deletion got no answer is used again.
    pub(crate) careless: bool,
}

pub(crate) fn key(container: usize) -> Key {
    Key { container_id: format!("c{container}"), ifname: "eth0".to_owned() }
}

impl Node {
    pub(crate) fn new(name: &str) -> Self {
        Self { name: name.to_owned(), kernel: BTreeMap::new(), program: None, careless: false }
    }

    /// The program starts: its state is what the kernel shows.
    pub(crate) fn start(&mut self) {
        if self.program.is_some() {
            return;
        }
        let mut book = NodeIpam::new();
        for (key, link) in &self.kernel {
            book.adopt(key.clone(), &link.pool, link.ipv4, link.ipv6)
                .expect("the kernel's pods are in order");
        }
        self.program = Some(Program {
            book,
            cache: None,
            adds: BTreeMap::new(),
            asking: BTreeMap::new(),
            demand: Demand::default(),
            giving: None,
            empty_since: BTreeMap::new(),
            suspects: Suspects::default(),
        });
    }

    /// The program dies; the kernel stays, and what was sent may still arrive.
    pub(crate) fn crash(&mut self, api: &mut Api) {
        let Some(program) = self.program.take() else { return };
        api.stray.extend(program.giving.map(|giving| giving.call));
        for asking in program.asking.into_values() {
            if let Ask::Send(call) = asking.next {
                api.stray.push(call);
            }
        }
    }

    /// The watch delivers this node's blocks.
    pub(crate) fn sync(&mut self, api: &Api) {
        let Some(program) = &mut self.program else { return };
        let Ok(objects) = api.read(Wire::Works) else { return };
        let own = objects.blocks.iter().filter(|(_, block)| block.node == self.name);
        program.cache = Some(own.map(|(name, block)| (name.clone(), block.clone())).collect());
    }

    pub(crate) fn add(&mut self, key: Key, pool: &str) {
        let Some(program) = &mut self.program else { return };
        program.adds.entry(key).or_insert_with(|| Add::Waits { pool: pool.to_owned() });
    }

    /// DEL and each victim of GC: never beside an ADD of the same container.
    pub(crate) fn del(&mut self, key: &Key) {
        let Some(program) = &mut self.program else { return };
        if !program.adds.contains_key(key) {
            self.kernel.remove(key);
            program.book.release(key);
        }
    }

    pub(crate) fn gc(&mut self, valid: impl Fn(&Key) -> bool) {
        let Some(program) = &self.program else { return };
        let victims: Vec<Key> =
            program.book.held().map(|(key, _)| key.clone()).filter(|key| !valid(key)).collect();
        victims.iter().for_each(|key| self.del(key));
    }

    /// A pod of which CHECK would say that it does not hold the addresses that its link has. Pods that are being
    /// added wait for their turn.
    pub(crate) fn fails_check(&self) -> Option<&Key> {
        let program = self.program.as_ref()?;
        let holds = |key: &Key, link: &Link| {
            let held = program.book.get(key);
            held.is_some_and(|it| it.pool == link.pool && it.ipv4 == link.ipv4 && it.ipv6 == link.ipv6)
        };
        let settled = self.kernel.iter().filter(|(key, _)| !program.adds.contains_key(*key));
        settled.filter(|(key, link)| !holds(key, link)).map(|(key, _)| key).next()
    }

    /// One step of one ADD. `made` says whether the kernel makes the link.
    pub(crate) fn work(&mut self, now: Instant, pick: usize, made: bool) {
        let Some(program) = &mut self.program else { return };
        let Some(key) = program.adds.keys().nth(pick % program.adds.len().max(1)).cloned() else { return };
        match program.adds.remove(&key) {
            Some(Add::Waits { pool }) => match program.book.allocate(&pool, &key) {
                Answer::NeedBlock => {
                    program.adds.insert(key, Add::Waits { pool: pool.clone() });
                    let waits = |add: &&Add| matches!(add, Add::Waits { pool: its } if *its == pool);
                    let waiting = program.adds.values().filter(waits).count();
                    program.ask(now, &pool, blocks_wanted(waiting, LEAST_BLOCK));
                }
                Answer::Allocated(allocation) => {
                    if program.book.wants_block(&pool) {
                        program.ask(now, &pool, 1);
                    }
                    program.adds.insert(key, Add::HasAddress(allocation));
                }
            },
            Some(Add::HasAddress(allocation)) => {
                // A stale link of the same container goes first, whatever comes of the new one.
                self.kernel.remove(&key);
                if made {
                    let Allocation { pool, ipv4, ipv6, .. } = allocation;
                    self.kernel.insert(key, Link { pool, ipv4, ipv6 });
                } else if allocation.fresh {
                    program.book.release(&key);
                }
            }
            None => {}
        }
    }

    /// The runtime's patience with an ADD that waits for a block ends.
    pub(crate) fn give_up(&mut self, pick: usize) {
        let Some(program) = &mut self.program else { return };
        let waiting = |(key, add): (&Key, &Add)| matches!(add, Add::Waits { .. }).then(|| key.clone());
        let waiting: Vec<Key> = program.adds.iter().filter_map(waiting).collect();
        if !waiting.is_empty() {
            program.adds.remove(&waiting[pick % waiting.len()]);
        }
    }

    /// One step of one BlockRequest.
    pub(crate) fn ask(&mut self, api: &mut Api, pick: usize, wire: Wire) {
        let Some(program) = &mut self.program else { return };
        let Some(at) = program.asking.keys().nth(pick % program.asking.len().max(1)).cloned() else {
            return;
        };
        let Some(mut asking) = program.asking.remove(&at) else { return };
        let (pool, number) = &at;
        let name = format!("req{number}-{pool}-{}", self.name);
        let create = Write::CreateRequest { name: name.clone(), pool: pool.clone(), node: self.name.clone() };
        let next = match &asking.next {
            Ask::Look => api.read(wire).map(|objects| match objects.requests.get(&name) {
                None => Some(Ask::Send(create)),
                Some(present) if present.outcome == Outcome::Pending => Some(Ask::Await),
                Some(present) => {
                    Some(Ask::Send(Write::DeleteRequest { name: name.clone(), uid: present.uid.clone() }))
                }
            }),
            Ask::Send(call) => api.call(call, wire).map(|()| match call {
                Write::DeleteRequest { .. } => Some(Ask::Send(create)),
                _ => Some(Ask::Await),
            }),
            Ask::Await => api.read(wire).map(|objects| {
                match objects.requests.get(&name).map(|request| request.outcome.clone()) {
                    Some(Outcome::Granted(block)) => Some(Ask::Read(block)),
                    Some(Outcome::Pending) => Some(Ask::Await),
                    Some(Outcome::Refused) | None => None,
                }
            }),
            Ask::Read(block) => api.read(wire).map(|objects| {
                if let Some(granted) = objects.blocks.get(block).filter(|block| block.node == self.name) {
                    program.book.upsert_block(own(block, granted));
                }
                None
            }),
        };
        if let Ok(Some(next)) = next {
            asking.next = next;
            program.asking.insert(at, asking);
        } else {
            program.demand.end(pool, *number);
        }
    }

    /// What the block task does at each turn: the book follows the watch, and one empty block begins to be given back.
    pub(crate) fn tend(&mut self, api: &Api, now: Instant, wire: Wire) {
        let Some(program) = &mut self.program else { return };
        let Some(cache) = &program.cache else { return };
        if program.giving.is_some() {
            return;
        }
        let known: Vec<String> = program.book.blocks().map(|block| block.name().to_owned()).collect();
        for name in known.iter().filter(|name| !cache.contains_key(*name)) {
            program.book.remove_block(name);
        }
        for (name, block) in cache {
            program.book.upsert_block(own(name, block));
        }
        let releasable = program.book.releasable_blocks();
        program.empty_since.retain(|name, _| releasable.contains(name));
        for name in releasable {
            let since = *program.empty_since.entry(name.clone()).or_insert(now);
            if now.saturating_duration_since(since) < EMPTY_FOR {
                continue;
            }
            // Asked before it is closed: while the server is away, pods go on getting addresses from it.
            let Ok(objects) = api.read(wire) else { continue };
            let present = objects.blocks.get(&name).filter(|block| block.node == self.name).cloned();
            if !program.book.close_block(&name) {
                continue;
            }
            if let Some(Block { uid, version, .. }) = present {
                let call = Write::DeleteBlock { name: name.clone(), uid, version };
                program.giving = Some(Giving { name, call });
                return;
            }
        }
    }

    /// The next call for the block that is being given back. `refused` is a server that says no and means it.
    pub(crate) fn give(&mut self, api: &mut Api, wire: Wire, refused: bool) {
        let Some(program) = &mut self.program else { return };
        let Some(Giving { name, call }) = program.giving.take() else { return };
        let Write::DeleteBlock { uid, .. } = &call else {
            // Whatever came of the finalizer: the block stays closed, and the next turn looks at it again.
            if api.call(&call, wire).is_err() && self.careless {
                program.book.reopen_block(&name);
            }
            return;
        };
        if refused {
            program.book.reopen_block(&name);
            return;
        }
        match api.call(&call, wire) {
            Ok(()) => {
                let call = Write::DropFinalizer { name: name.clone(), uid: uid.clone() };
                program.giving = Some(Giving { name, call });
            }
            Err(Failed::NoAnswer) if self.careless => program.book.reopen_block(&name),
            Err(Failed::Conflict | Failed::NoAnswer | Failed::NotFound) => {}
        }
    }

    /// The look for leaked addresses.
    pub(crate) fn look(&mut self, now: Instant) {
        let Some(program) = &mut self.program else { return };
        let linked: BTreeSet<Key> = self.kernel.keys().cloned().collect();
        let held = program.book.held().map(|(key, _)| key);
        for key in program.suspects.look(now, LEAKED_FOR, held, &linked) {
            // The turn of the container is held: no ADD of it runs.
            if !program.adds.contains_key(&key) && !self.kernel.contains_key(&key) {
                program.book.release(&key);
            }
        }
    }

    /// Requests that were not answered in time are dropped; what was sent may still arrive.
    pub(crate) fn time_passes(&mut self, api: &mut Api, now: Instant) {
        let Some(program) = &mut self.program else { return };
        let late = |asking: &Asking| now.saturating_duration_since(asking.since) >= ANSWER;
        for asking in program.asking.values().filter(|asking| late(asking)) {
            if let Ask::Send(call) = &asking.next {
                api.stray.push(call.clone());
            }
        }
        let Program { asking, demand, .. } = program;
        asking.retain(|(pool, number), asking| {
            if late(asking) {
                demand.end(pool, *number);
            }
            !late(asking)
        });
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.program.as_ref().is_some_and(|program| {
            program.adds.is_empty() && program.asking.is_empty() && program.giving.is_none()
        })
    }
}

impl Program {
    fn ask(&mut self, now: Instant, pool: &str, blocks: usize) {
        while let Some(number) = self.demand.begin(pool, blocks) {
            self.asking.insert((pool.to_owned(), number), Asking { since: now, next: Ask::Look });
        }
    }
}

fn own(name: &str, block: &Block) -> Own {
    Own::new(name, &block.pool, block.nets, false, block.deleting).expect("granted").with_uid(&block.uid)
}
