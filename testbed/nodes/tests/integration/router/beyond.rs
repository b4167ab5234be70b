//! Traffic of pods to what is no pod.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::ensure;
use testbed_lab::traffic::Flow;
use testbed_lab::{ForeignNetwork, Place, eventually};
use testbed_nodes::{Cluster, Node};

use crate::bed::outside::{addresses_of, connect, serve};
use crate::bed::{Pod, TIMEOUT, network};

/// Time until messages of now are old enough to be counted.
const SETTLE: Duration = Duration::from_millis(1100);

/// Flows of numbered messages (20 a second each) of a pod of each node, UDP and TCP in both families: to the other nodes, and to a machine
/// outside, which sees the address of the pod's node.
pub(crate) struct Beyond(Vec<Flow>);

impl Beyond {
    pub(crate) fn start(cluster: &Cluster, pods: &[Pod]) -> Self {
        let outside = cluster.lab().dual_stack_site("outside").host("outside").unwrap();
        let addresses = addresses_of(&outside);
        serve(&outside, addresses.clone()).unwrap();
        let mut flows = Vec::new();
        for node in cluster.nodes() {
            let pod = pods.iter().find(|pod| pod.node == node.name()).unwrap();
            let place = network(cluster, pod);
            for to in &addresses {
                is_translated(&place, *to, node);
            }
            flows.extend(flows_to(&place, &*outside, &addresses));
            for other in cluster.nodes().iter().filter(|other| other.name() != node.name()) {
                flows.extend(flows_to(&place, &**other.host(), other.addresses()));
            }
        }
        let beyond = Self(flows);
        beyond.flows();
        beyond
    }

    /// Waits until all flow.
    fn flows(&self) {
        let mark = Instant::now();
        let all_flow = || {
            let stopped = self.0.iter().find(|flow| !flow.flows_since(mark));
            ensure!(stopped.is_none(), "{:?} does not flow", stopped.map(|flow| (flow.name(), flow.ended())));
            Ok(())
        };
        eventually(TIMEOUT, all_flow).unwrap();
    }

    /// Not one message since `mark` was lost, and everything flows.
    pub(crate) fn lost_nothing(&self, mark: Instant) {
        self.flows();
        std::thread::sleep(SETTLE);
        let (mut sent, mut lost, mut gap) = (0, 0, Duration::ZERO);
        for flow in &self.0 {
            let figures = flow.figures_since(mark);
            assert!(figures.sent > 0, "{}: nothing was sent", flow.name());
            sent += figures.sent;
            lost += figures.lost;
            gap = gap.max(figures.longest_gap);
        }
        println!(
            "pods to nodes and the outside: {lost} of {sent} messages of {} flows lost; longest gap {gap:.2?}",
            self.0.len()
        );
        assert_eq!(lost, 0, "messages of pods to nodes and the outside");
    }
}

fn flows_to(from: &ForeignNetwork, to: &impl Place, addresses: &[IpAddr]) -> Vec<Flow> {
    let both =
        |address: &IpAddr| [Flow::udp(from, to, *address).unwrap(), Flow::tcp(from, to, *address).unwrap()];
    addresses.iter().flat_map(both).collect()
}

/// Waits until new connections of the pod have an address of its node.
fn is_translated(place: &ForeignNetwork, to: IpAddr, node: &Node) {
    let translated = || {
        let (_, seen) = connect(place, to)?;
        ensure!(node.addresses().contains(&seen), "{to} sees {seen}");
        Ok(())
    };
    eventually(TIMEOUT, translated).unwrap();
}
