//! The built-in router: plain routes in the main table to the blocks of nodes on the same network.
//!
//! An alternative to the mesh, for nodes that share a layer-2 network: packets are neither encrypted nor wrapped. Where a
//! mesh is on as well, its packets are marked before they are routed, so the mesh wins. Routes stay when the program ends.

pub mod metrics;

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fairlead_api::names::{ROUTE_PROTOCOL_ROUTER, WIREGUARD_INTERFACE};
use fairlead_api::resources::{AddressBlock, WireKubeMesh};
use fairlead_dataplane::routes::{self, Refused};
use fairlead_dataplane::uplink::{HostNetwork, Ignored};
use fairlead_netlink::route::{Route, TABLE_MAIN};
use fairlead_topology::{
    BlockRoute, Member, MemberRecord, OwnAddress, Plan, Policy, Problem, Source, merge, plan,
};
use k8s_openapi::api::core::v1::{Node, NodeStatus};
use kube::ResourceExt;
use kube::api::ObjectMeta;
use tokio::time::timeout;

use self::metrics::RouterMetrics;
use crate::mesh::node_addresses;
use crate::mesh::view::blocks_by_node;
use fairlead_cluster::caches::Cache;

/// How often the kernel is looked at when the cluster does not change: links come and go, and take routes with them.
const SWEEP: Duration = Duration::from_secs(10);
/// Least pause between two steps, so that a storm of changes costs one step, not thousands.
const LEAST_PAUSE: Duration = Duration::from_millis(50);

/// What the rest of the program may know of the router.
#[derive(Debug, Default)]
pub struct Shared(Mutex<Report>);

/// The router as of its last step.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Report {
    /// Routes the kernel has, ours or equal ones of another program.
    pub routes: Vec<BlockRoute>,
    /// Blocks without a route, one sentence each.
    pub problems: Vec<String>,
}

impl Shared {
    /// The latest report.
    pub fn report(&self) -> Report {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, report: Report) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = report;
    }
}

/// What the router works with.
pub struct Context {
    /// This node's name.
    pub node: String,
    /// All nodes, [`trimmed`].
    pub nodes: Arc<Cache<Node>>,
    /// All blocks.
    pub blocks: Arc<Cache<AddressBlock>>,
    /// The mesh resources: their devices are no networks of this node.
    pub meshes: Arc<Cache<WireKubeMesh>>,
    /// Where reports go.
    pub shared: Arc<Shared>,
    /// Counters.
    pub metrics: RouterMetrics,
}

/// Leaves of a Node only its name and addresses: a node program must stay small in a large cluster.
pub fn trimmed(node: &mut Node) {
    let addresses = node.status.take().and_then(|status| status.addresses);
    *node = Node {
        metadata: ObjectMeta { name: node.metadata.name.take(), ..ObjectMeta::default() },
        spec: None,
        status: Some(NodeStatus { addresses, ..NodeStatus::default() }),
    };
}

/// Keeps the routes for ever.
pub async fn run(context: Context) {
    let (mut nodes, mut blocks) = (context.nodes.subscribe(), context.blocks.subscribe());
    let mut meshes = context.meshes.subscribe();
    let mut done: Option<(Inputs, Instant)> = None;
    loop {
        if let Some(inputs) = context.inputs() {
            // Kubelets write to their Nodes all the time; only addresses matter here.
            let current = done.as_ref().is_some_and(|(last, at)| *last == inputs && at.elapsed() < SWEEP);
            if !current {
                context.step(inputs.clone()).await;
                done = Some((inputs, Instant::now()));
            }
        }
        tokio::time::sleep(LEAST_PAUSE).await;
        let changed = async {
            tokio::select! {
                _ = nodes.changed() => {}
                _ = blocks.changed() => {}
                _ = meshes.changed() => {}
            }
        };
        let _ = timeout(SWEEP, changed).await;
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Inputs {
    node: String,
    members: Vec<Member>,
    mesh_devices: Vec<String>,
    mesh: bool,
}

impl Context {
    /// `None` until the API server has said everything: routes of before the start must not vanish for lack of an answer.
    fn inputs(&self) -> Option<Inputs> {
        if !(self.nodes.is_ready() && self.blocks.is_ready() && self.meshes.is_ready()) {
            return None;
        }
        let mut records: Vec<MemberRecord> = Vec::new();
        for node in self.nodes.store.state() {
            let mut record = MemberRecord::of_node(Source::Kubernetes, node.name_any());
            record.member.addresses = Some(node_addresses(&node, &["InternalIP"]));
            records.push(record);
        }
        for (node, blocks) in blocks_by_node(&self.blocks.store.state()) {
            let mut record = MemberRecord::of_node(Source::Kubernetes, node);
            record.member.blocks = blocks;
            records.push(record);
        }
        let meshes = self.meshes.store.state();
        let mut mesh_devices: Vec<String> =
            meshes.iter().map(|mesh| mesh.spec.interface_name.clone()).collect();
        mesh_devices.push(WIREGUARD_INTERFACE.to_owned());
        let members = merge(records);
        Some(Inputs { node: self.node.clone(), members, mesh_devices, mesh: !meshes.is_empty() })
    }

    async fn step(&self, inputs: Inputs) {
        let outcome = tokio::task::spawn_blocking(move || bring(&inputs)).await;
        let outcome = outcome.unwrap_or_else(|error| Err(format!("the router stopped half-way: {error}")));
        let report = outcome.unwrap_or_else(|error| {
            let problems = vec![format!("cannot bring the router's routes up to date: {error}")];
            Report { problems, ..self.shared.report() }
        });
        self.metrics.synced(&self.node, report.routes.len());
        let before = self.shared.report();
        if before.problems != report.problems {
            tracing::warn!(problems = ?report.problems, "the router has other problems than before");
        }
        if before.routes != report.routes {
            tracing::info!(routes = report.routes.len(), "the router's routes changed");
        }
        self.shared.set(report);
    }
}

/// One step on a thread that may block.
fn bring(inputs: &Inputs) -> Result<Report, String> {
    let network = HostNetwork::read().map_err(|error| error.to_string())?;
    let ignored = Ignored { links: inputs.mesh_devices.clone(), ..Ignored::default() };
    let own: Vec<OwnAddress> =
        network.own_addresses(&ignored).map(|it| OwnAddress { link: it.link, prefix: it.prefix }).collect();
    let routing = plan(&inputs.members, &Policy { routes_on: Some(own), ..Policy::new(&inputs.node) });
    let desired: Vec<Route> = routing.routes.iter().map(kernel_route).collect();
    let (_, refused) = routes::sync_router(&desired).map_err(|error| error.to_string())?;
    Ok(report(routing, &refused, inputs.mesh))
}

fn kernel_route(route: &BlockRoute) -> Route {
    Route::via(TABLE_MAIN, ROUTE_PROTOCOL_ROUTER, route.destination, route.gateway, route.link)
}

/// What the user is to know. Nodes elsewhere are no problem where a mesh reaches them. Pure.
fn report(mut routing: Plan, refused: &[Refused], mesh: bool) -> Report {
    let elsewhere =
        |it: &Problem| matches!(it, Problem::NodeNotConnected { .. } | Problem::NodeWithoutAddress { .. });
    routing.problems.retain(|problem| problem.is_about_routes() && !(mesh && elsewhere(problem)));
    let mut problems: Vec<String> = routing.problems.iter().map(ToString::to_string).collect();
    problems.extend(refused.iter().map(|it| format!("no {}: {}", it.route, it.reason)));
    routing.routes.retain(|route| !refused.iter().any(|it| it.route.destination == route.destination));
    Report { routes: routing.routes, problems }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(destination: &str) -> BlockRoute {
        BlockRoute {
            destination: destination.parse().unwrap(),
            node: "b".to_owned(),
            gateway: "192.0.2.2".parse().unwrap(),
            link: 2,
        }
    }

    #[test]
    fn a_refused_route_is_a_problem_and_the_others_stay() {
        let routes = vec![route("10.0.0.0/27"), route("10.0.0.32/27")];
        let refused =
            [Refused { route: kernel_route(&routes[0]), reason: "network is unreachable".to_owned() }];
        let found = report(Plan { routes, ..Plan::default() }, &refused, false);
        assert_eq!(found.routes, [route("10.0.0.32/27")]);
        assert!(found.problems[0].contains("10.0.0.0/27") && found.problems[0].contains("unreachable"));
    }

    #[test]
    fn nodes_elsewhere_are_a_problem_only_without_a_mesh() {
        let elsewhere =
            Problem::NodeNotConnected { node: "b".to_owned(), address: "203.0.113.1".parse().unwrap() };
        let routing = Plan { problems: vec![elsewhere], ..Plan::default() };
        assert_eq!(report(routing.clone(), &[], true).problems.len(), 0);
        assert_eq!(report(routing, &[], false).problems.len(), 1);
    }

    #[test]
    fn of_a_node_only_name_and_addresses_are_kept() {
        let mut node: Node = serde_json::from_value(serde_json::json!({
            "metadata": { "name": "b", "annotations": { "a": "b" }, "labels": { "c": "d" } },
            "spec": { "podCIDR": "10.0.0.0/24" },
            "status": { "addresses": [{ "type": "InternalIP", "address": "192.0.2.2" }], "images": [{ "sizeBytes": 1 }] },
        }))
        .unwrap();
        trimmed(&mut node);
        assert_eq!(node_addresses(&node, &["InternalIP"]).len(), 1);
        let expected = serde_json::json!({
            "apiVersion": "v1", "kind": "Node",
            "metadata": { "name": "b" },
            "status": { "addresses": [{ "type": "InternalIP", "address": "192.0.2.2" }] },
        });
        assert_eq!(serde_json::to_value(&node).unwrap(), expected);
    }
}
