//! Traffic between running pods while something happens.

use std::time::{Duration, Instant};

use anyhow::Context;
use testbed_lab::traffic::{Figures, Flow};
use testbed_lab::{ForeignNetwork, eventually};
use testbed_nodes::Cluster;

use super::{Pod, Room, TIMEOUT, server};

/// Time until messages of now are old enough to be counted.
const SETTLE: Duration = Duration::from_millis(1100);

/// The network namespace of a running pod.
pub(crate) fn network(cluster: &Cluster, pod: &Pod) -> ForeignNetwork {
    cluster.node(&pod.node).unwrap().pod_network(pod.addresses[0]).unwrap()
}

/// Flows of numbered messages (20 a second each) between two pods: UDP both ways, in every family, and one TCP
/// connection.
pub(crate) struct Traffic {
    pub(crate) between: String,
    flows: Vec<Flow>,
}

impl Traffic {
    pub(crate) fn between(cluster: &Cluster, one: &Pod, other: &Pod) -> Self {
        let (here, there) = (network(cluster, one), network(cluster, other));
        let mut flows: Vec<Flow> =
            other.addresses.iter().map(|address| Flow::udp(&here, &there, *address).unwrap()).collect();
        flows.extend(one.addresses.iter().map(|address| Flow::udp(&there, &here, *address).unwrap()));
        // After an outage of the API server, nodes learn of new blocks with the next attempt of a watch.
        let tcp = eventually(TIMEOUT, || Flow::tcp(&here, &there, other.addresses[0]));
        flows.push(tcp.with_context(|| explain(cluster, [one, other])).unwrap());
        Self { between: format!("{} - {}", one.node, other.node), flows }
    }

    /// Waits until all flow.
    pub(crate) fn flows(&self) {
        let now = Instant::now();
        let deadline = now + TIMEOUT;
        while !self.flows.iter().all(|flow| flow.flows_since(now)) {
            assert!(Instant::now() < deadline, "{} does not flow", self.between);
            for flow in &self.flows {
                assert!(flow.ended().is_none(), "{} ended: {:?}", flow.name(), flow.ended());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    /// Waits until all flow again, and says how many messages sent since `mark` were lost.
    pub(crate) fn lost_since(&self, mark: Instant) -> usize {
        self.flows();
        std::thread::sleep(SETTLE);
        let figures: Vec<Figures> = self.flows.iter().map(|flow| flow.figures_since(mark)).collect();
        let lost = figures.iter().map(|figures| figures.lost).sum();
        let sent: usize = figures.iter().map(|figures| figures.sent).sum();
        assert!(figures.iter().all(|figures| figures.sent > 0), "{}: nothing was sent", self.between);
        let gap = |of: &[Figures]| of.iter().map(|figures| figures.longest_gap).max().unwrap_or_default();
        let pause = figures.iter().map(|figures| figures.longest_pause).max().unwrap_or_default();
        let (tcp, udp) = figures.split_last().unwrap();
        println!(
            "{}: {lost} of {sent} messages lost; longest gap UDP {:.2?}, TCP {:.2?}; longest time without sending {pause:.2?}",
            self.between,
            gap(udp),
            tcp.longest_gap
        );
        lost
    }

    /// Nothing was lost since `mark`, and everything flows.
    pub(crate) fn lost_nothing(&self, mark: Instant) {
        assert_eq!(self.lost_since(mark), 0, "{}", self.between);
    }
}

/// Report of the nodes of two pods about the way between them.
fn explain(cluster: &Cluster, pods: [&Pod; 2]) -> String {
    let [one, other] = pods;
    let of = |here: &Pod, there: &Pod| {
        let run = |words: &[&str]| {
            let output = cluster.node(&here.node).and_then(|node| node.exec(words));
            format!(
                "{}: {}\n{}",
                here.node,
                words.join(" "),
                output.unwrap_or_else(|error| format!("{error:#}\n"))
            )
        };
        let selector = format!("spec.nodeName={}", here.node);
        let program = cluster.kubectl(&[
            "-n",
            "kube-system",
            "get",
            "pods",
            "-l",
            "app.kubernetes.io/component=coild",
            "--field-selector",
            &selector,
            "-o",
            "jsonpath={.items[0].metadata.name}",
        ]);
        let status = program.and_then(|program| {
            let words = ["-n", "kube-system", "exec", &program, "-c", "coild", "--", "fairlead", "status"];
            cluster.kubectl(&[&words[..], &[there.node.as_str()]].concat())
        });
        let status = status.unwrap_or_else(|error| format!("{error:#}\n"));
        run(&["ip", "route", "get", &there.addresses[0].to_string()]) + &status
    };
    of(one, other) + &of(other, one)
}

/// Two running pods on each node, with traffic between neighbours on one node and between the nodes.
pub(crate) struct Running {
    pub(crate) pods: Vec<Pod>,
    /// Between two pods of one node, for each node.
    pub(crate) local: Vec<Traffic>,
    /// Between the nodes, each pair.
    pub(crate) across: Vec<Traffic>,
}

impl Running {
    pub(crate) fn start(room: &Room<'_>) -> Self {
        let nodes: Vec<&str> = room.cluster.nodes().iter().map(|node| node.name()).collect();
        let pods = room.run("deployment/web", &server("web", 2 * nodes.len()));
        let on = |node: &str| pods.iter().filter(|pod| pod.node == node).collect::<Vec<_>>();
        let local =
            nodes.iter().map(|node| Traffic::between(room.cluster, on(node)[0], on(node)[1])).collect();
        let pairs = nodes.iter().enumerate().flat_map(|(index, one)| {
            nodes[index + 1..].iter().map(|other| (*one, *other)).collect::<Vec<_>>()
        });
        let across =
            pairs.map(|(one, other)| Traffic::between(room.cluster, on(one)[0], on(other)[1])).collect();
        let running = Self { pods, local, across };
        running.all().for_each(|traffic| traffic.flows());
        running
    }

    pub(crate) fn all(&self) -> impl Iterator<Item = &Traffic> {
        self.local.iter().chain(&self.across)
    }

    /// The same pods run with the same addresses, and no container was started again.
    pub(crate) fn untouched(&self, room: &Room<'_>) {
        let now = room.pods("web").unwrap();
        assert_eq!(now, self.pods);
    }

    /// A pod can start on each node.
    pub(crate) fn more_start(&self, room: &Room<'_>) {
        room.kubectl(&format!("scale deployment web --replicas={}", self.pods.len() * 3 / 2)).unwrap();
        room.rolled_out("deployment/web");
        super::all_different(&room.pods("web").unwrap());
    }
}
