//! The built-in router: plain routes in the main table to the blocks of nodes on the same network.
//!
//! An alternative to the mesh, for nodes that share a layer-2 network: packets are neither encrypted nor wrapped. Where a
//! mesh is on as well, its packets are marked before they are routed, so the mesh wins. Routes stay when the program ends.
//!
//! Data goes one way: Nodes and AddressBlocks by way of [`fairlead_members`] to [`fairlead_topology::plan`], whose routes
//! `dataplane::routes::sync_router` brings to the kernel.

pub mod metrics;

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fairlead_api::names::{ROUTE_PROTOCOL_ROUTER, WIREGUARD_INTERFACE};
use fairlead_api::resources::WireKubeMesh;
use fairlead_cluster::caches::{self, Cache};
use fairlead_cluster::subsystem::Supervisor;
use fairlead_dataplane::kernel_watch::KernelChanges;
use fairlead_dataplane::routes::{self, Refused};
use fairlead_dataplane::uplink::{HostNetwork, Ignored};
use fairlead_members::cached_block::CachedBlock;
use fairlead_members::kubernetes::Kubernetes;
use fairlead_members::{self as members, MemberSource, nodes};
use fairlead_netlink::route::{Change, Route, TABLE_MAIN};
use fairlead_topology::{BlockRoute, Member, OwnAddress, Plan, Policy, Problem, SourceNodes, plan};
use ipnet::IpNet;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{sleep, timeout};

use self::metrics::RouterMetrics;

/// Interval at which the kernel is compared without a change: links come and go, and take routes with them.
const SWEEP_INTERVAL: Duration = Duration::from_secs(10);
/// Least pause between two steps, so that a storm of changes costs one step, not thousands.
const MIN_PAUSE: Duration = Duration::from_millis(50);

/// Dependencies of the built-in router.
pub struct RoutesDeps {
    /// Client of the API server.
    pub client: Client,
    /// This node's name.
    pub node: String,
    /// All blocks.
    pub blocks: Arc<Cache<CachedBlock>>,
    /// The mesh resources: their devices are no networks of this node.
    pub meshes: Arc<Cache<WireKubeMesh>>,
    /// Nodes by the source addresses of egress gateways that they have; `None` until the API server has said it.
    pub source_nodes: watch::Receiver<Option<Arc<BTreeMap<IpAddr, SourceNodes>>>>,
    /// Changes of the kernel that [`concerns`] lets through.
    pub kernel: KernelChanges,
    /// Counters.
    pub metrics: RouterMetrics,
}

/// Whether a change of the kernel may be that another program has taken routes away, as systemd-networkd does when it is restarted.
pub fn concerns(change: &Change) -> bool {
    let is_own = |route: &Route| route.protocol == ROUTE_PROTOCOL_ROUTER;
    matches!(change, Change::Missed) || matches!(change, Change::Route { route, gone: true } if is_own(route))
}

/// Keeps the routes, with a watch of all Nodes that nothing else needs.
pub fn start(deps: RoutesDeps, supervisor: &mut Supervisor) -> RoutesHandle {
    let subsystem = supervisor.subsystem("router");
    let nodes = watcher(Api::all(deps.client), caches::config()).modify(nodes::trim);
    let nodes = Arc::new(caches::start(subsystem, "Nodes", nodes));
    let handle = RoutesHandle::default();
    let router = Router {
        node: deps.node,
        sources: vec![Box::new(Kubernetes::of_routes(nodes, deps.blocks))],
        meshes_changed: deps.meshes.subscribe(),
        meshes: deps.meshes,
        source_nodes: deps.source_nodes,
        kernel: deps.kernel,
        reports: handle.clone(),
        metrics: deps.metrics,
    };
    subsystem.spawn("routes", router.run());
    handle
}

/// State of the routes for other subsystems.
#[derive(Clone, Default)]
pub struct RoutesHandle(Arc<Mutex<Report>>);

impl RoutesHandle {
    /// The latest report.
    pub fn report(&self) -> Report {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    fn set(&self, report: Report) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = report;
    }
}

/// The routes as of the last step.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Report {
    /// Routes the kernel has, ours or equal ones of another program.
    pub routes: Vec<BlockRoute>,
    /// Blocks without a route.
    pub problems: Vec<RouteProblem>,
}

/// Reason why a route is missing. `Display` is a sentence for status.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RouteProblem {
    /// Left out by the plan.
    Plan(Problem),
    /// The kernel refuses this route, or another program's is in its place.
    Refused {
        /// The route.
        route: Box<Route>,
        /// Answer of the kernel.
        error: String,
    },
    /// The routes could not be read or compared.
    SyncFailed(String),
}

impl RouteProblem {
    /// One word for conditions, Events and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Plan(problem) => problem.reason(),
            Self::Refused { .. } => "RouteRefused",
            Self::SyncFailed(_) => "SyncFailed",
        }
    }
}

impl fmt::Display for RouteProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Plan(problem) => problem.fmt(f),
            Self::Refused { route, error } => write!(f, "no {route}: {error}"),
            Self::SyncFailed(error) => write!(f, "cannot reconcile the router's routes: {error}"),
        }
    }
}

struct Router {
    node: String,
    sources: Vec<Box<dyn MemberSource>>,
    meshes_changed: watch::Receiver<u64>,
    meshes: Arc<Cache<WireKubeMesh>>,
    source_nodes: watch::Receiver<Option<Arc<BTreeMap<IpAddr, SourceNodes>>>>,
    kernel: KernelChanges,
    reports: RoutesHandle,
    metrics: RouterMetrics,
}

/// Inputs of the routes, but for the kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Inputs {
    node: String,
    members: Vec<Member>,
    mesh_devices: Vec<String>,
    mesh: bool,
}

impl Router {
    async fn run(mut self) -> Infallible {
        let mut done: Option<(Inputs, Instant)> = None;
        let mut are_routes_gone = false;
        loop {
            if let Some(inputs) = self.inputs() {
                // Kubelets write to their Nodes all the time; only addresses matter here.
                let current =
                    done.as_ref().is_some_and(|(last, at)| *last == inputs && at.elapsed() < SWEEP_INTERVAL);
                if !current || are_routes_gone {
                    self.step(inputs.clone()).await;
                    done = Some((inputs, Instant::now()));
                }
            }
            sleep(MIN_PAUSE).await;
            let changed = async {
                tokio::select! {
                    () = self.kernel.changed() => true,
                    () = members::changed(&mut self.sources) => false,
                    _ = self.meshes_changed.changed() => false,
                    Ok(()) = self.source_nodes.changed() => false,
                }
            };
            are_routes_gone = timeout(SWEEP_INTERVAL, changed).await.unwrap_or_default();
        }
    }

    /// `None` until every watch has shown its first list: routes of before the start must not vanish for lack of an answer.
    fn inputs(&mut self) -> Option<Inputs> {
        if !self.meshes.has_answer() {
            return None;
        }
        let sources = self.source_nodes.borrow_and_update().clone()?;
        let mut members = members::merged(&mut self.sources, &mut Vec::new())?;
        add_sources(&mut members, &sources);
        let meshes = self.meshes.store.state();
        let mut mesh_devices: Vec<String> =
            meshes.iter().map(|mesh| mesh.spec.interface_name.clone()).collect();
        mesh_devices.push(WIREGUARD_INTERFACE.to_owned());
        Some(Inputs { node: self.node.clone(), members, mesh_devices, mesh: !meshes.is_empty() })
    }

    async fn step(&self, inputs: Inputs) {
        let outcome = tokio::task::spawn_blocking(move || sync(&inputs)).await;
        let outcome = outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic.into_panic()));
        let before = self.reports.report();
        let report = outcome.unwrap_or_else(|error| {
            let problems = vec![RouteProblem::SyncFailed(error.to_string())];
            Report { problems, ..before.clone() }
        });
        self.metrics.synced(&self.node, report.routes.len());
        if before.problems != report.problems {
            tracing::warn!(problems = ?report.problems, "the router has other problems than before");
        }
        if before.routes != report.routes {
            tracing::info!(routes = report.routes.len(), "the router's routes changed");
        }
        self.reports.set(report);
    }
}

/// One step on a thread that may block.
fn sync(inputs: &Inputs) -> fairlead_netlink::Result<Report> {
    let network = HostNetwork::read()?;
    let ignored = Ignored { links: inputs.mesh_devices.clone(), ..Ignored::default() };
    let own = network.own_addresses(&ignored).map(|it| OwnAddress { link: it.link, prefix: it.prefix });
    let policy = Policy { routes_on: Some(own.collect()), ..Policy::new(&inputs.node) };
    let plan = plan(&inputs.members, &policy);
    let desired: Vec<Route> = plan.routes.iter().map(kernel_route).collect();
    let (_, refused) = routes::sync_router(&desired)?;
    Ok(report(plan, refused, inputs.mesh))
}

/// Source addresses of egress gateways are prefixes of the node that the controller names, as its blocks are. Pure.
fn add_sources(members: &mut [Member], sources: &BTreeMap<IpAddr, SourceNodes>) {
    for (address, nodes) in sources {
        let holder = members.iter_mut().find(|member| nodes.holder.as_ref() == Some(&member.name));
        if let Some(holder) = holder {
            holder.blocks.push(IpNet::from(*address));
        }
    }
}

fn kernel_route(route: &BlockRoute) -> Route {
    Route::via(TABLE_MAIN, ROUTE_PROTOCOL_ROUTER, route.destination, route.gateway, route.link)
}

/// The report for users. Nodes elsewhere are no problem where a mesh reaches them. Pure.
fn report(plan: Plan, refused: Vec<Refused>, mesh: bool) -> Report {
    let elsewhere =
        |it: &Problem| matches!(it, Problem::NodeNotConnected { .. } | Problem::NodeWithoutAddress { .. });
    let missing = plan
        .problems
        .into_iter()
        .filter(|problem| problem.is_about_routes() && !(mesh && elsewhere(problem)));
    let mut problems: Vec<RouteProblem> = missing.map(RouteProblem::Plan).collect();
    let mut routes = plan.routes;
    routes.retain(|route| !refused.iter().any(|it| it.route.destination == route.destination));
    problems.extend(
        refused.into_iter().map(|it| RouteProblem::Refused { route: Box::new(it.route), error: it.reason }),
    );
    Report { routes, problems }
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
            vec![Refused { route: kernel_route(&routes[0]), reason: "network is unreachable".to_owned() }];
        let found = report(Plan { routes, ..Plan::default() }, refused, false);
        assert_eq!(found.routes, [route("10.0.0.32/27")]);
        let text = found.problems[0].to_string();
        assert!(text.contains("10.0.0.0/27") && text.contains("unreachable"), "{text}");
        assert_eq!(found.problems[0].reason(), "RouteRefused");
    }

    #[test]
    fn only_routes_that_were_taken_away_wake_the_router() {
        let own = kernel_route(&route("10.0.0.0/27"));
        let others = Route { protocol: 4, ..own.clone() };
        let change = |route: &Route, gone| Change::Route { route: route.clone(), gone };
        assert!(concerns(&change(&own, true)) && concerns(&Change::Missed));
        assert!(!concerns(&change(&own, false)) && !concerns(&change(&others, true)));
    }

    #[test]
    fn a_source_address_is_a_prefix_of_the_node_whose_gateway_is_named() {
        let mut members = ["a", "b"].map(Member::named).to_vec();
        let address = |last| IpAddr::from([192, 0, 2, last]);
        let nodes = |holder: Option<&str>| SourceNodes {
            holder: holder.map(str::to_owned),
            gateways: ["a", "b"].map(str::to_owned).into(),
        };
        let sources =
            [(address(40), nodes(Some("b"))), (address(41), nodes(None)), (address(42), nodes(Some("gone")))];
        add_sources(&mut members, &sources.into());
        assert_eq!(
            (members[0].blocks.len(), &members[1].blocks[..]),
            (0, &["192.0.2.40/32".parse().unwrap()][..])
        );
    }

    #[test]
    fn nodes_elsewhere_are_a_problem_only_without_a_mesh() {
        let elsewhere =
            Problem::NodeNotConnected { node: "b".to_owned(), address: "203.0.113.1".parse().unwrap() };
        let plan = Plan { problems: vec![elsewhere], ..Plan::default() };
        assert_eq!(report(plan.clone(), Vec::new(), true).problems.len(), 0);
        assert_eq!(report(plan, Vec::new(), false).problems.len(), 1);
    }
}
