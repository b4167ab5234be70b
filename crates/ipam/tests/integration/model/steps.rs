//! Steps that can happen to the cluster, and their frequency.

use proptest::prelude::*;

use crate::model::api::Wire;
use crate::model::{CONTAINERS, NODES, POOLS};

#[derive(Debug, Clone)]
pub(crate) enum Step {
    Add {
        node: usize,
        container: usize,
        pool: usize,
    },
    Answer {
        pick: usize,
        wire: Wire,
    },
    Crash {
        node: usize,
    },
    Del {
        node: usize,
        container: usize,
    },
    /// A user deletes a block.
    DeleteBlock {
        pick: usize,
    },
    /// A user disables a pool, or enables it.
    Disable {
        pool: usize,
        disabled: bool,
    },
    Failover,
    FindLeaks {
        node: usize,
    },
    /// Progress in quiet times: one node's ADDs and requests go on, the controller answers.
    Flow {
        node: usize,
        wire: Wire,
    },
    Gc {
        node: usize,
        valid: u16,
    },
    HandMade {
        node: usize,
        index: u32,
    },
    LosesPod {
        node: usize,
        container: usize,
    },
    NodeLeaves {
        node: usize,
    },
    Outage {
        begins: bool,
    },
    PowerCut {
        node: usize,
    },
    Release {
        node: usize,
        wire: Wire,
        refused: bool,
    },
    Request {
        node: usize,
        pick: usize,
        wire: Wire,
    },
    /// A user reserves a block, or frees it.
    Reserve {
        pick: usize,
        reserved: bool,
    },
    /// The program starts while the API server is away, and a pod gets a new sandbox.
    RestartsAlone {
        node: usize,
        container: usize,
        pool: usize,
    },
    Start {
        node: usize,
    },
    StrayArrives {
        pick: usize,
    },
    SyncBlocks {
        node: usize,
        wire: Wire,
    },
    SyncController,
    SyncNode {
        node: usize,
    },
    TakeUp {
        pick: usize,
    },
    Terminate {
        pool: usize,
    },
    /// Minutes pass in which a node may find blocks empty.
    Tidy {
        node: usize,
        wire: Wire,
    },
    Time {
        seconds: u64,
    },
    Work {
        node: usize,
        pick: usize,
        wire: Wire,
        made: bool,
    },
}

fn wire() -> impl Strategy<Value = Wire> {
    prop_oneof![8 => Just(Wire::Works), 1 => Just(Wire::LosesAnswer), 1 => Just(Wire::LosesCall)]
}

pub(crate) fn step() -> impl Strategy<Value = Step> {
    let (node, pick, container) = (0..NODES, 0..8usize, 0..CONTAINERS);
    let node = || node.clone();
    let pick = || pick.clone();
    let container = || container.clone();
    let often = prop_oneof![
        12 => (node(), container(), 0..POOLS.len())
            .prop_map(|(node, container, pool)| Step::Add { node, container, pool }),
        20 => (node(), pick(), wire(), prop::bool::weighted(0.9))
            .prop_map(|(node, pick, wire, made)| Step::Work { node, pick, wire, made }),
        10 => (node(), container()).prop_map(|(node, container)| Step::Del { node, container }),
        20 => (node(), wire()).prop_map(|(node, wire)| Step::Flow { node, wire }),
        6 => (node(), wire()).prop_map(|(node, wire)| Step::Tidy { node, wire }),
        12 => (node(), pick(), wire()).prop_map(|(node, pick, wire)| Step::Request { node, pick, wire }),
        8 => pick().prop_map(|pick| Step::TakeUp { pick }),
        10 => (pick(), wire()).prop_map(|(pick, wire)| Step::Answer { pick, wire }),
        6 => Just(Step::SyncController),
        6 => node().prop_map(|node| Step::SyncNode { node }),
        10 => (node(), wire()).prop_map(|(node, wire)| Step::SyncBlocks { node, wire }),
        8 => (node(), wire(), prop::bool::weighted(0.1))
            .prop_map(|(node, wire, refused)| Step::Release { node, wire, refused }),
        6 => prop_oneof![Just(1u64), Just(31), Just(61), Just(301)].prop_map(|seconds| Step::Time { seconds }),
    ];
    let seldom = prop_oneof![
        3 => node().prop_map(|node| Step::FindLeaks { node }),
        3 => (node(), container()).prop_map(|(node, container)| Step::LosesPod { node, container }),
        2 => (node(), any::<u16>()).prop_map(|(node, valid)| Step::Gc { node, valid }),
        3 => node().prop_map(|node| Step::Crash { node }),
        8 => node().prop_map(|node| Step::Start { node }),
        3 => (node(), container(), 0..POOLS.len())
            .prop_map(|(node, container, pool)| Step::RestartsAlone { node, container, pool }),
        1 => node().prop_map(|node| Step::PowerCut { node }),
        1 => node().prop_map(|node| Step::NodeLeaves { node }),
        2 => Just(Step::Failover),
        2 => prop::bool::weighted(0.4).prop_map(|begins| Step::Outage { begins }),
        4 => pick().prop_map(|pick| Step::StrayArrives { pick }),
        1 => (node(), 0..4u32).prop_map(|(node, index)| Step::HandMade { node, index }),
        1 => pick().prop_map(|pick| Step::DeleteBlock { pick }),
        1 => (0..POOLS.len(), any::<bool>()).prop_map(|(pool, disabled)| Step::Disable { pool, disabled }),
        1 => (pick(), any::<bool>()).prop_map(|(pick, reserved)| Step::Reserve { pick, reserved }),
        1 => (0..POOLS.len()).prop_map(|pool| Step::Terminate { pool }),
    ];
    prop_oneof![6 => often, 1 => seldom]
}
