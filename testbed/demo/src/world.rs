//! Everything together, started as a user would start it.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use nix::sys::signal::Signal;
use serde_json::Value;
use tempfile::TempDir;
use testbed_kube::{ControlPlane, Options};
pub use testbed_lab::eventually;
use testbed_lab::{Host, HostOptions, Lab, NatSite, Process, Progress, SiteOptions};

use crate::cni::{self, Pod};
use crate::node::{self, Node, executable};
use crate::objects::{self, EVENTS, MESHES, NAMESPACE, NODES, PEERS, POOLS};
use crate::topology::{SitePlan, Topology};

/// Longest time until programs are up on a busy machine.
const START: Duration = Duration::from_secs(60);
/// ServiceAccounts of `deploy/rbac`.
const NODE_ACCOUNT: &str = "fairlead-node";
const CONTROLLER_ACCOUNT: &str = "fairlead-controller";

/// A cluster across networks. Dropping it ends and removes everything.
pub struct World {
    /// The nodes, in the order of the topology.
    pub nodes: Vec<Node>,
    /// The pods, one to a node until a test makes more.
    pub pods: Vec<Pod>,
    /// The routers, by site.
    pub sites: Vec<NatSite>,
    /// The API server.
    pub plane: ControlPlane,
    controller: Option<Process>,
    plane_host: Host,
    directory: TempDir,
    // Last, so that the programs end before their namespaces.
    lab: Lab,
}

impl World {
    /// Starts lab, API server, controller and node programs. Mesh and pool are not there yet.
    ///
    /// # Errors
    /// A part did not become ready; the message names it and shows its log.
    pub fn start(topology: &Topology, progress: &Progress) -> anyhow::Result<Self> {
        let lab = Lab::new()?;
        let directory = tempfile::Builder::new().prefix("fairlead-").tempdir()?;
        let mut sites = Vec::new();
        let mut nodes = Vec::new();
        let mut carriers = BTreeMap::new();
        for plan in &topology.sites {
            let mut options = options(plan);
            if let Some(name) = plan.carrier {
                let carrier = match carriers.entry(name) {
                    Entry::Occupied(known) => known.into_mut(),
                    Entry::Vacant(new) => new.insert(lab.carrier(name)?),
                };
                options.behind = Some(carrier.clone());
            }
            let site = lab.site(plan.name, options)?;
            nodes.extend(hosts(&site, plan, topology.node_arguments, directory.path())?);
            sites.push(site);
        }
        progress.step(&format!("lab: {} ({})", topology.name, topology.about));
        let cloud = sites.first().context("a topology needs a site")?;
        let plane_host = cloud.host("api")?;
        let plane = control_plane(&plane_host)?;
        progress.step(&format!("Kubernetes API server with deploy/ ready at {}", plane.server_url()));
        let mut world =
            Self { nodes, pods: Vec::new(), sites, plane, controller: None, plane_host, directory, lab };
        world.register()?;
        progress.step("made Nodes and tokens of their programs");
        world.start_controller()?;
        world.nodes.iter_mut().try_for_each(Node::start)?;
        world.nodes.iter_mut().try_for_each(|node| node.wait_ready(START))?;
        progress.step(&format!("fairlead controller and {} node programs run", world.nodes.len()));
        Ok(world)
    }

    /// The lab, for tests that add to it.
    pub fn lab(&self) -> &Lab {
        &self.lab
    }

    /// The machine of the API server and the controller.
    pub fn plane_host(&self) -> &Host {
        &self.plane_host
    }

    /// Directory of sockets, keys and logs.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// The node of that name.
    ///
    /// # Errors
    /// There is none.
    pub fn node(&mut self, name: &str) -> anyhow::Result<&mut Node> {
        self.nodes.iter_mut().find(|node| node.name == name).with_context(|| format!("no node {name}"))
    }

    /// Applies the mesh and the pool of `deploy/examples`.
    ///
    /// # Errors
    /// The API server refuses.
    pub fn apply_mesh_and_pool(&self) -> anyhow::Result<()> {
        self.plane.apply_at(&format!("{MESHES}/default"), objects::MESH)?;
        self.apply_pool()
    }

    /// Applies the pool alone, for clusters without a mesh.
    ///
    /// # Errors
    /// The API server refuses.
    pub fn apply_pool(&self) -> anyhow::Result<()> {
        self.plane.apply_at(&format!("{POOLS}/default"), objects::POOL).map(drop)
    }

    /// WireKubePeer that a node publishes of itself.
    ///
    /// # Errors
    /// There is none, or the API server does not answer.
    pub fn published(&self, node: &str) -> anyhow::Result<Value> {
        self.plane.get(&format!("{PEERS}/{node}"))
    }

    /// The mesh, with its status.
    ///
    /// # Errors
    /// There is none, or the API server does not answer.
    pub fn mesh(&self) -> anyhow::Result<Value> {
        self.plane.get(&format!("{MESHES}/default"))
    }

    /// Events of all namespaces that a field selector selects, such as `regarding.name=NODE,reason=REASON`; an empty one selects all.
    ///
    /// # Errors
    /// The API server does not answer, or does not know a field.
    pub fn events(&self, selector: &str) -> anyhow::Result<Vec<Value>> {
        let list = self.plane.get(&format!("{EVENTS}?fieldSelector={selector}"))?;
        Ok(list.get("items").and_then(Value::as_array).context("no Events")?.clone())
    }

    /// Notes of those Events, one on a line.
    ///
    /// # Errors
    /// As for [`Self::events`].
    pub fn notes(&self, selector: &str) -> anyhow::Result<String> {
        let events = self.events(selector)?;
        let notes: Vec<&str> = events.iter().filter_map(|event| event.get("note")?.as_str()).collect();
        Ok(notes.join("\n"))
    }

    /// Makes one pod on every node, concurrently, through the CNI plugin.
    ///
    /// # Errors
    /// A pod did not start, in the plugin's words.
    pub fn start_pods(&mut self) -> anyhow::Result<()> {
        let names: Vec<(String, String)> =
            self.nodes.iter().map(|node| (format!("pod-{}", node.name), node.name.clone())).collect();
        names.iter().try_for_each(|(pod, node)| self.make_pod(pod, node).map(drop))?;
        let started: Vec<anyhow::Result<Pod>> = std::thread::scope(|scope| {
            let (lab, nodes) = (&self.lab, &self.nodes);
            let running: Vec<_> = nodes
                .iter()
                .zip(&names)
                .map(|(node, (pod, _))| scope.spawn(|| start_pod(lab, node, pod)))
                .collect();
            running
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|_| Err(anyhow::anyhow!("panicked"))))
                .collect()
        });
        for pod in started {
            self.pods.push(pod?);
        }
        Ok(())
    }

    /// Makes one more pod.
    ///
    /// # Errors
    /// It did not start.
    pub fn start_pod(&mut self, name: &str, node: &str) -> anyhow::Result<&Pod> {
        self.make_pod(name, node)?;
        let at = self.nodes.iter().find(|at| at.name == node).with_context(|| format!("no node {node}"))?;
        let pod = start_pod(&self.lab, at, name)?;
        self.pods.push(pod);
        self.pods.last().context("just pushed")
    }

    /// Makes the object of a pod, as its owner and the scheduler do; nothing starts it yet.
    ///
    /// # Errors
    /// The API server refuses.
    pub fn make_pod(&self, name: &str, node: &str) -> anyhow::Result<Value> {
        self.plane.apply_at(&objects::pod_path(NAMESPACE, name), &objects::pod(name, node))
    }

    /// Starts the controller.
    ///
    /// # Errors
    /// It is not built.
    pub fn start_controller(&mut self) -> anyhow::Result<()> {
        let mut command = self.plane_host.command(executable("fairlead")?)?;
        command
            .args(["controller", "--identity", "controller-1"])
            .envs(node::ALLOCATOR)
            .env("KUBECONFIG", self.directory.path().join("controller.kubeconfig"));
        let log = self.directory.path().join("controller.log");
        self.controller = Some(self.plane_host.spawn(&mut command, log)?);
        Ok(())
    }

    /// Process ID of the controller.
    ///
    /// # Errors
    /// It does not run.
    pub fn controller_id(&self) -> anyhow::Result<u32> {
        Ok(self.controller.as_ref().context("the controller does not run")?.id())
    }

    /// Resident memory of the controller in MiB.
    ///
    /// # Errors
    /// It does not run.
    pub fn controller_resident_mib(&self) -> anyhow::Result<f64> {
        node::resident_mib(self.controller.as_ref().context("the controller does not run")?)
    }

    /// Kills the controller with SIGKILL.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill_controller(&mut self) -> anyhow::Result<()> {
        let mut controller = self.controller.take().context("the controller does not run")?;
        controller.signal(Signal::SIGKILL)?;
        controller.wait(Duration::from_secs(5)).map(drop)
    }

    /// Waits until `condition` gives a value, trying every 100 ms.
    ///
    /// # Errors
    /// The last error, when `patience` ran out.
    pub fn wait_for<T>(
        &self,
        patience: Duration,
        mut condition: impl FnMut(&Self) -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        eventually(patience, || condition(self))
    }

    /// Makes what a cluster has before Fairlead starts, and the kubeconfigs of its programs.
    fn register(&self) -> anyhow::Result<()> {
        self.plane.apply_at(&objects::namespace_path(NAMESPACE), &objects::namespace())?;
        let controller = self.plane.token(CONTROLLER_ACCOUNT, "kube-system", None)?;
        let path = self.directory.path().join("controller.kubeconfig");
        self.plane.kubeconfig_for_token(&controller, &path, None)?;
        self.nodes.iter().try_for_each(|node| self.join(node))
    }

    /// Stands in for the kubelet of a machine: makes its Node with its addresses, and the kubeconfig of its node program, with a token that is
    /// bound to it.
    ///
    /// # Errors
    /// The API server refuses.
    pub fn join(&self, node: &Node) -> anyhow::Result<()> {
        let path = format!("{NODES}/{}", node.name);
        self.plane.apply_at(&path, &objects::node(&node.name))?;
        self.plane.merge(&format!("{path}/status"), &objects::node_status(&node.addresses()))?;
        let token = self.plane.token(NODE_ACCOUNT, "kube-system", Some(&node.name))?;
        self.plane.kubeconfig_for_token(&token, &node.kubeconfig(), None)?;
        Ok(())
    }
}

fn options(plan: &SitePlan) -> SiteOptions {
    SiteOptions { ipv6: plan.ipv6, uplink_mtu: plan.uplink_mtu, ..SiteOptions::new(plan.nat, plan.lan) }
}

fn hosts(site: &NatSite, plan: &SitePlan, arguments: &[&str], directory: &Path) -> anyhow::Result<Vec<Node>> {
    let host = |(index, address): (usize, &std::net::Ipv4Addr)| {
        let name = format!("{}-{}", plan.name, index + 1);
        let host = site.host_with(&name, &HostOptions { address: Some(*address), mtu: None })?;
        let own = directory.join(&name);
        std::fs::create_dir(&own)?;
        let mut node = Node::new(&name, plan.name, host, own);
        node.arguments = arguments.iter().map(|text| (*text).to_owned()).collect();
        Ok(node)
    };
    plan.nodes.iter().enumerate().map(host).collect()
}

fn control_plane(host: &Host) -> anyhow::Result<ControlPlane> {
    let deploy = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../deploy");
    ensure!(deploy.is_dir(), "{} is missing", deploy.display());
    let inside = host.clone();
    ControlPlane::start(Options {
        installed: Some(deploy),
        launcher: Some(Box::new(move |program| {
            // A lab that has ended cannot start anything; the command then fails with that reason.
            inside.command(program).unwrap_or_else(|_| std::process::Command::new("/nonexistent"))
        })),
        addresses: vec![IpAddr::from(host.address())],
        // No controller here makes the default ServiceAccounts that this plugin would wait for.
        apiserver_args: vec!["--disable-admission-plugins=ServiceAccount".to_owned()],
        ..Options::default()
    })
}

fn start_pod(lab: &Lab, node: &Node, name: &str) -> anyhow::Result<Pod> {
    let namespace = lab.bare_namespace(name)?;
    let container = cni::container(name, &namespace);
    let addresses = node.plugin()?.add(&container)?;
    Ok(Pod {
        name: name.to_owned(),
        node: node.name.clone(),
        site: node.site.clone(),
        namespace,
        container,
        addresses,
    })
}
