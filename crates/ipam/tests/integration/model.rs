//! A cluster in memory, driven at random: nodes, a controller that fails over, an API server that fails in every way a
//! network can make it fail. After each step no two pods have one address and no pod has an address that is not its
//! node's. When the failures end, every ADD ends, none is refused a block that can be granted, and nothing has leaked.
//!
//! The nodes run `fairlead_ipam::state::NodeState`, as the node program does; the model only makes the calls that it asks
//! for, and wakes what it wakes. The seed is printed; `FAIRLEAD_MODEL_SEED` repeats it, and a failure shrinks to few steps.

mod api;
mod controller;
mod node;
mod steps;

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use proptest::prelude::*;
use proptest::test_runner::{Config, RngAlgorithm, TestCaseError, TestRng, TestRunner};

use api::{Api, Wire};
use controller::Controller;
use fairlead_ipam::{Grant, Request, grant};
use node::{Mistake, Node, key};
use steps::{Step, step};

/// Random runs, and the most steps of one.
const RUNS: u32 = 400;
const STEPS: usize = 250;
const NODES: usize = 3;
const CONTAINERS: usize = 10;
/// Prefixes of a subnet: IPv4, IPv6.
type Subnet = (Option<&'static str>, Option<&'static str>);

const POOLS: [&str; 4] = ["dual", "single", "narrow", "missing"];

type Checked = Result<(), TestCaseError>;

/// One container lives on one node.
fn on(node: usize, container: usize) -> usize {
    node * 100 + container
}

struct Cluster {
    api: Api,
    leader: Option<Controller>,
    nodes: Vec<Node>,
    now: Instant,
}

impl Cluster {
    fn new() -> Self {
        let mut api = Api::default();
        add_pools(&mut api);
        let leader = Some(Controller::elected(&api));
        let mut nodes: Vec<Node> = ["n0", "n1", "n2"].map(Node::new).into();
        nodes.iter_mut().for_each(Node::start);
        Self { api, leader, nodes, now: Instant::now() }
    }

    fn take(&mut self, step: &Step) {
        let (api, now) = (&mut self.api, self.now);
        match step.clone() {
            Step::Add { node, container, pool } => {
                self.nodes[node].add(now, key(on(node, container)), POOLS[pool]);
            }
            Step::Answer { pick, wire } => {
                if let Some(leader) = &mut self.leader {
                    leader.advance(api, now, pick, wire);
                }
            }
            Step::Crash { node } => self.nodes[node].crash(api),
            Step::Del { node, container } => self.nodes[node].del(&key(on(node, container))),
            Step::DeleteBlock { pick } => self.change_block(pick, |block| block.deleting = true),
            Step::Disable { pool, disabled } => {
                if let Some(state) = api.objects.pools.get_mut(POOLS[pool]) {
                    state.disabled = disabled;
                }
            }
            Step::Failover => self.failover(),
            Step::FindLeaks { node } => self.nodes[node].find_leaks(now),
            Step::Flow { node, wire } => self.flow(node, wire),
            Step::Gc { node, valid } => {
                self.nodes[node]
                    .gc(|it| (0..CONTAINERS).any(|n| *it == key(on(node, n)) && valid & (1 << n) != 0));
            }
            Step::HandMade { node, index } => self.make_by_hand(node, index),
            Step::LosesPod { node, container } => {
                self.nodes[node].kernel.remove(&key(on(node, container)));
            }
            Step::NodeLeaves { node } => self.leaves(node),
            Step::Outage { begins } => api.down = begins,
            Step::PowerCut { node } => self.power_cut(node),
            Step::Release { node, wire, refused } => self.nodes[node].release(api, wire, refused),
            Step::Request { node, pick, wire } => self.nodes[node].request(api, now, pick, wire),
            Step::Reserve { pick, reserved } => self.change_block(pick, |block| block.reserved = reserved),
            Step::RestartsAlone { node, container, pool } => self.restarts_alone(node, container, pool),
            Step::Start { node } => self.nodes[node].start(),
            Step::StrayArrives { pick } => {
                if !api.stray.is_empty() {
                    let call = api.stray.swap_remove(pick % api.stray.len());
                    let _ = api.objects.apply(&call);
                }
            }
            Step::SyncBlocks { node, wire } => self.nodes[node].sync_blocks(api, now, wire),
            Step::SyncController => {
                if let (Some(leader), false) = (&mut self.leader, api.down) {
                    leader.sync(api);
                }
            }
            Step::SyncNode { node } => self.nodes[node].sync(api),
            Step::TakeUp { pick } => {
                if let Some(leader) = &mut self.leader {
                    leader.take_up(now, pick);
                }
            }
            Step::Terminate { pool } => self.terminate(pool),
            Step::Tidy { node, wire } => self.tidy(node, wire),
            Step::Time { seconds } => {
                self.now += Duration::from_secs(seconds);
                self.nodes.iter_mut().for_each(|node| node.time_passes(api, self.now));
            }
            Step::Work { node, pick, wire, made } => self.nodes[node].work(api, now, pick, wire, made),
        }
    }

    fn flow(&mut self, node: usize, wire: Wire) {
        self.take(&Step::SyncNode { node });
        (0..CONTAINERS).for_each(|pick| self.take(&Step::Work { node, pick, wire, made: true }));
        for pick in 0..8 {
            self.take(&Step::Request { node, pick, wire });
            self.take(&Step::SyncController);
            self.take(&Step::TakeUp { pick });
            self.take(&Step::Answer { pick, wire });
        }
        (0..CONTAINERS).for_each(|pick| self.take(&Step::Work { node, pick, wire, made: true }));
    }

    fn tidy(&mut self, node: usize, wire: Wire) {
        self.take(&Step::SyncBlocks { node, wire: Wire::Works });
        self.take(&Step::Time { seconds: 301 });
        self.take(&Step::SyncBlocks { node, wire: Wire::Works });
        for wire in [Wire::Works, Wire::Works, Wire::Works, wire, wire] {
            self.take(&Step::Release { node, wire, refused: false });
        }
        for pool in 0..POOLS.len() {
            self.take(&Step::Add { node, container: pool, pool });
            (0..4).for_each(|pick| self.take(&Step::Work { node, pick, wire, made: true }));
        }
    }

    /// The program starts while the API server is away, and the sandbox of a pod is made anew.
    fn restarts_alone(&mut self, node: usize, container: usize, pool: usize) {
        let was_down = self.api.down;
        self.take(&Step::Outage { begins: true });
        self.take(&Step::Crash { node });
        self.take(&Step::Start { node });
        self.take(&Step::Del { node, container });
        self.take(&Step::Add { node, container, pool });
        (0..4).for_each(|pick| self.take(&Step::Work { node, pick, wire: Wire::Works, made: true }));
        self.take(&Step::Outage { begins: was_down });
    }

    fn failover(&mut self) {
        if let Some(leader) = self.leader.take() {
            leader.dies(&mut self.api);
        }
        if !self.api.down {
            self.leader = Some(Controller::elected(&self.api));
        }
    }

    fn power_cut(&mut self, node: usize) {
        self.nodes[node].crash(&mut self.api);
        self.nodes[node].reboot();
    }

    /// The machine is gone for good and its Node deleted; the controller frees its blocks. It may be installed anew.
    fn leaves(&mut self, node: usize) {
        if self.api.down || self.leader.is_none() {
            return;
        }
        self.power_cut(node);
        let name = &self.nodes[node].name;
        self.api.objects.blocks.retain(|_, block| block.node != *name);
        self.api.objects.requests.retain(|_, request| request.node != *name);
    }

    /// A user creates an AddressBlock with kubectl, with the number the controller would grant next or another.
    fn make_by_hand(&mut self, node: usize, index: u32) {
        let pool = self.api.objects.pools.get("dual").and_then(|state| state.parsed.as_ref().ok());
        let Some((name, nets)) = pool.and_then(|pool| Some((pool.block_name(index), pool.block(index)?)))
        else {
            return;
        };
        let block = api::Block::new("dual", &self.nodes[node].name, index, nets, None);
        let _ = self.api.objects.apply(&api::Write::CreateBlock { name, block });
    }

    /// A user changes a block with kubectl.
    fn change_block(&mut self, pick: usize, change: impl FnOnce(&mut api::Block)) {
        let objects = &mut self.api.objects;
        let (version, blocks) = (objects.next_version(), objects.blocks.len().max(1));
        if let Some(block) = objects.blocks.values_mut().nth(pick % blocks) {
            change(block);
            block.version = version;
        }
    }

    /// A pool begins to go, or is made again when its last block has gone.
    fn terminate(&mut self, pool: usize) {
        let objects = &mut self.api.objects;
        let allocated = objects.blocks.values().any(|block| block.pool == POOLS[pool]);
        if let Some(state) = objects.pools.get_mut(POOLS[pool]) {
            if !state.terminating {
                state.terminating = true;
            } else if !allocated {
                add_pools(&mut self.api);
            }
        }
    }

    /// No address twice, every pod's address in a block of its node, and CHECK of every pod succeeds.
    fn check(&self) -> Checked {
        for node in &self.nodes {
            if let Some(key) = node.fails_check() {
                return Err(TestCaseError::fail(format!("CHECK of {key:?} on {} would fail", node.name)));
            }
        }
        let mut seen: BTreeMap<IpAddr, String> = BTreeMap::new();
        for node in &self.nodes {
            for (key, link) in &node.kernel {
                for address in link.addresses() {
                    let here = format!("{} of {}", key.container_id, node.name);
                    let mine = self.api.objects.blocks.values().any(|block| {
                        block.node == node.name && block.nets.iter().any(|net| net.contains(&address))
                    });
                    prop_assert!(mine, "{address} of {here} is in no block of that node");
                    if let Some(other) = seen.insert(address, here.clone()) {
                        return Err(TestCaseError::fail(format!("{address} has {other} and {here}")));
                    }
                }
            }
        }
        Ok(())
    }

    /// The failures end: everything works and goes on until nothing moves any more.
    fn recover(&mut self) -> Checked {
        self.take(&Step::Outage { begins: false });
        while !self.api.stray.is_empty() {
            self.take(&Step::StrayArrives { pick: 0 });
            self.check()?;
        }
        self.failover();
        for round in 0..60 {
            for node in 0..NODES {
                self.take(&Step::Start { node });
                self.round(node)?;
                // What was lost before the recovery has to time out first.
                if round > 2 {
                    self.no_add_waits(node)?;
                }
                if round == 10 {
                    self.add_to_each_pool(node)?;
                }
            }
            self.take(&Step::Time { seconds: 29 });
            self.check()?;
        }
        self.nothing_leaked()
    }

    fn round(&mut self, node: usize) -> Checked {
        let wire = Wire::Works;
        for _ in 0..16 {
            if self.nodes[node].is_idle() && self.leader.as_ref().is_some_and(Controller::is_idle) {
                break;
            }
            for pick in 0..CONTAINERS {
                self.take(&Step::Work { node, pick, wire, made: true });
            }
            for pick in 0..POOLS.len() {
                self.take(&Step::Request { node, pick, wire });
            }
            self.take(&Step::SyncController);
            for pick in 0..4 {
                self.take(&Step::TakeUp { pick });
                self.take(&Step::Answer { pick, wire });
                self.take(&Step::Answer { pick, wire });
            }
        }
        self.take(&Step::SyncController);
        (0..4).for_each(|pick| self.take(&Step::TakeUp { pick }));
        (0..8).for_each(|pick| self.take(&Step::Answer { pick, wire }));
        self.take(&Step::SyncNode { node });
        self.take(&Step::FindLeaks { node });
        for _ in 0..3 {
            self.take(&Step::SyncBlocks { node, wire });
            for _ in 0..10 {
                self.take(&Step::Release { node, wire, refused: false });
            }
            self.take(&Step::SyncNode { node });
        }
        self.take(&Step::SyncBlocks { node, wire });
        self.check()
    }

    fn no_add_waits(&self, node: usize) -> Checked {
        let node = &self.nodes[node];
        prop_assert!(node.has_no_adds(), "an ADD on {} waits forever: {:?}", node.name, node.program);
        Ok(())
    }

    /// An ADD succeeds, or fails for a reason that holds.
    fn add_to_each_pool(&mut self, node: usize) -> Checked {
        for (pool, name) in POOLS.iter().enumerate() {
            let added = key(on(node, CONTAINERS + pool));
            self.nodes[node].add(self.now, added.clone(), name);
            self.round(node)?;
            self.no_add_waits(node)?;
            if !self.nodes[node].kernel.contains_key(&added) {
                let objects = &self.api.objects;
                let request = Request { uid: "", pool: name, node: "", pod_capacity: None, claim: None };
                let possible = grant(&request, &objects.pools, &objects.existing());
                let why = self.nodes[node].program.as_ref().and_then(|program| program.failures.get(&added));
                prop_assert!(
                    matches!(possible, Grant::Refused(_)),
                    "{why:?} on {}, and {possible:?} could be had",
                    self.nodes[node].name
                );
                prop_assert!(why.is_some(), "an ADD ended without a reason");
            }
            self.nodes[node].del(&added);
        }
        Ok(())
    }

    fn nothing_leaked(&self) -> Checked {
        for node in &self.nodes {
            prop_assert!(node.is_idle(), "{} still works: {:?}", node.name, node.program);
            let Some(program) = &node.program else { continue };
            let allocated: Vec<_> = program.state.table().allocated().map(|(key, _)| key).collect();
            prop_assert_eq!(allocated, node.kernel.keys().collect::<Vec<_>>(), "addresses without pods");
            let known: Vec<&str> = program.state.table().blocks().map(|block| block.name()).collect();
            let own = self.api.objects.blocks.iter().filter(|(_, block)| block.node == node.name);
            let own: Vec<&str> = own.map(|(name, _)| name.as_str()).collect();
            prop_assert_eq!(known, own, "blocks of {}", &node.name);
            prop_assert_eq!(program.state.table().releasable_blocks(), [""; 0], "blocks that no pod needs");
            prop_assert_eq!(program.state.without_block().count(), 0);
        }
        prop_assert!(self.leader.as_ref().is_some_and(Controller::is_idle));
        let pending =
            self.api.objects.requests.values().filter(|request| request.outcome == api::Outcome::Pending);
        prop_assert_eq!(pending.count(), 0, "requests without an answer");
        Ok(())
    }
}

/// Both families in blocks of four; single addresses; too few blocks for all. The fourth, `missing`, is never made.
fn add_pools(api: &mut Api) {
    let pools: [(&str, i64, &[Subnet]); 3] = [
        (
            "dual",
            2,
            &[(Some("10.0.0.0/28"), Some("fd00::/124")), (Some("10.0.9.0/29"), Some("fd00:9::/125"))],
        ),
        ("single", 0, &[(Some("192.0.2.0/29"), None)]),
        ("narrow", 1, &[(None, Some("2001:db8::/126"))]),
    ];
    for (name, bits, subnets) in pools {
        if api.objects.pools.get(name).is_none_or(|state| state.terminating) {
            let allocated = api.objects.blocks.values().any(|block| block.pool == name);
            if !allocated {
                api.objects.add_pool(name, bits, subnets);
            }
        }
    }
}

fn run(steps: &[Step], mistake: Option<Mistake>) -> Checked {
    let mut cluster = Cluster::new();
    cluster.nodes.iter_mut().for_each(|node| node.mistake = mistake);
    for step in steps {
        cluster.take(step);
        cluster.check()?;
    }
    cluster.recover()
}

fn seed() -> u64 {
    let given = std::env::var("FAIRLEAD_MODEL_SEED").ok().and_then(|text| text.parse().ok());
    given.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(0, |now| now.as_nanos() as u64)
    })
}

fn runs(seed: u64, mistake: Option<Mistake>, max_shrink_iters: u32) -> Result<(), String> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let config = Config { cases: RUNS, failure_persistence: None, max_shrink_iters, ..Config::default() };
    let mut runner = TestRunner::new_with_rng(config, TestRng::from_seed(RngAlgorithm::ChaCha, &bytes));
    let steps = prop::collection::vec(step(), 1..STEPS);
    runner.run(&steps, |steps| run(&steps, mistake)).map_err(|error| error.to_string())
}

#[test]
fn no_failure_allocates_an_address_twice_or_loses_one_or_makes_an_add_wait_forever() {
    let seed = seed();
    println!("FAIRLEAD_MODEL_SEED={seed}");
    if let Err(error) = runs(seed, None, 20_000) {
        panic!("FAIRLEAD_MODEL_SEED={seed}: {error}");
    }
}

/// The model sees what it is for: nodes that use a block again when the answer to its deletion was lost.
#[test]
fn a_node_that_takes_a_lost_answer_for_a_refusal_is_found_out() {
    let found = runs(1, Some(Mistake::ReopensWithoutAnswer), 0).expect_err("400 runs find it");
    assert!(found.contains("is in no block of that node"), "{found}");
}

/// And nodes that take a file for a proof when they start without the API server: it may be older than the release of a block.
#[test]
fn a_node_that_uses_a_recorded_block_that_its_kernel_does_not_show_is_found_out() {
    let found = runs(1, Some(Mistake::TrustsTheFile), 0).expect_err("400 runs find it");
    assert!(found.contains("is in no block of that node") || found.contains(" has "), "{found}");
}

/// And nodes on which pods are not woken when their block has come.
#[test]
fn a_node_that_wakes_no_waiting_pod_is_found_out() {
    let found = runs(1, Some(Mistake::WakesNoWaiter), 0).expect_err("400 runs find it");
    assert!(found.contains("waits forever"), "{found}");
}
