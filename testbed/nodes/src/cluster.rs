//! A cluster: the lab's networks, a control plane, and the nodes.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use tempfile::TempDir;
use testbed_kube::ControlPlane;
use testbed_lab::{Host, Ipv6, Lab, NatSite, Progress, SiteOptions, eventually};

use crate::control_plane::{self, PROXY_TOKEN, token};
use crate::files;
use crate::janitor::Janitor;
use crate::node::{Membership, Node};
use crate::topology::{Families, Network, Placement, Site, Topology};

/// Longest time until nodes are Ready on a busy machine.
const READY: Duration = Duration::from_secs(180);
/// Directory of the reference plugins in Debian.
const STOCK_PLUGINS: &str = "/usr/lib/cni";
/// Sysctls that a node behind a router needs (the prerequisites of Kubernetes' container runtimes).
const SYSCTLS: &[(&str, &str)] = &[("net/ipv4/ip_forward", "1"), ("net/ipv6/conf/all/forwarding", "1")];

/// A running cluster. Dropping it ends and removes everything, also after a panic; so does the end of its process,
/// even by SIGKILL.
pub struct Cluster {
    // In the order in which they go: nodes before their API server, programs before their namespaces and files.
    nodes: Vec<Node>,
    plane: ControlPlane,
    plane_host: Host,
    sites: Vec<NatSite>,
    lab: Lab,
    _janitor: Janitor,
    directory: TempDir,
    topology: Topology,
    progress: Progress,
}

impl Cluster {
    /// Starts everything and imports `images` into every node. Nodes are registered when it returns; they are Ready when
    /// there is a network for pods, see [`Cluster::wait_ready`].
    ///
    /// # Errors
    /// A part did not become ready; the message names it and shows the end of its log.
    pub fn start(topology: Topology, images: &[PathBuf], progress: Progress) -> Result<Self> {
        let directory = tempfile::Builder::new().prefix("fairlead-nodes-").tempdir()?;
        let name = directory.path().file_name().unwrap_or_default().to_string_lossy().into_owned();
        let janitor = Janitor::new(&name, directory.path())?;
        let lab = Lab::new()?;
        let (mut sites, mut hosts) = (Vec::new(), Vec::new());
        for plan in &topology.sites {
            let site = lab.site(plan.name, site_options(plan, topology.families))?;
            for number in 1..=plan.nodes {
                hosts.push(site.host(&format!("{}-{number}", plan.name))?);
            }
            sites.push(site);
        }
        let names: Vec<&str> = hosts.iter().map(|host| host.name()).collect();
        progress.step(&format!("networks: nodes {}", names.join(", ")));
        let plane_host = hosts.first().context("a cluster needs a node")?.clone();
        let plane = control_plane::prepare(&topology, &sites, &hosts, directory.path())?;
        let nodes = hosts
            .into_iter()
            .map(|host| make_node(host, &topology, &plane, &name, directory.path()))
            .collect::<Result<Vec<Node>>>()?;
        let mut cluster =
            Self { nodes, plane, plane_host, sites, lab, _janitor: janitor, directory, topology, progress };
        cluster.boot(images)?;
        if cluster.topology.network == Network::Stock {
            cluster.install_stock_network()?;
        }
        Ok(cluster)
    }

    fn boot(&mut self, images: &[PathBuf]) -> Result<()> {
        std::thread::scope(|scope| {
            let booting: Vec<_> = self
                .nodes
                .iter_mut()
                .map(|node| {
                    scope.spawn(move || {
                        node.power_on_held()?;
                        images.iter().try_for_each(|image| node.import_image(image))
                    })
                })
                .collect();
            booting
                .into_iter()
                .try_for_each(|node| node.join().unwrap_or_else(|_| Err(anyhow::anyhow!("panicked"))))
        })?;
        self.progress.step(&format!("containerd runs on every node and has {} images", images.len()));
        eventually(READY, || self.plane.kubectl(&["get", "--raw", "/readyz"]))
            .with_context(|| self.control_plane_logs())?;
        self.progress.step(&format!("API server ready at {}", self.plane.server_url()));
        self.plane.apply(RIGHTS)?;
        self.nodes.iter().try_for_each(Node::start_kubelet)?;
        for node in &self.nodes {
            eventually(READY, || self.plane.kubectl(&["get", "node", node.name()]))
                .with_context(|| tail(&node.log("kubelet")))?;
        }
        if self.placement() == Placement::EveryNode {
            // As kubeadm does. There is no taint: pods run everywhere.
            self.plane.kubectl(&["label", "node", "--all", "node-role.kubernetes.io/control-plane="])?;
        }
        self.progress.step("kubelet has registered every node");
        Ok(())
    }

    /// Waits until every Node is Ready.
    ///
    /// # Errors
    /// One is not; the message shows its conditions and the end of its kubelet's log.
    pub fn wait_ready(&self) -> Result<()> {
        let timeout = format!("--timeout={}s", READY.as_secs());
        let waited = self.plane.kubectl(&["wait", "--for=condition=Ready", "node", "--all", &timeout]);
        waited.with_context(|| {
            let logs: Vec<String> = self.nodes.iter().map(|node| tail(&node.log("kubelet"))).collect();
            format!("nodes are not Ready\n{}", logs.join("\n"))
        })?;
        self.progress.step("every node is Ready");
        Ok(())
    }

    /// All nodes; the first has the control plane, if not all have it.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// The node of that name.
    ///
    /// # Errors
    /// There is none.
    pub fn node(&self, name: &str) -> Result<&Node> {
        self.nodes.iter().find(|node| node.name() == name).with_context(|| format!("no node {name}"))
    }

    /// The node of that name, to switch it off and on.
    ///
    /// # Errors
    /// There is none.
    pub fn node_mut(&mut self, name: &str) -> Result<&mut Node> {
        self.nodes.iter_mut().find(|node| node.name() == name).with_context(|| format!("no node {name}"))
    }

    /// Address families of nodes and pods.
    pub fn families(&self) -> Families {
        self.topology.families
    }

    /// Nodes that run the control plane.
    pub fn placement(&self) -> Placement {
        self.topology.control_plane
    }

    /// The networks' routers, in the order of the topology.
    pub fn sites(&self) -> &[NatSite] {
        &self.sites
    }

    /// The API server, with controllers and scheduler.
    pub fn plane(&self) -> &ControlPlane {
        &self.plane
    }

    /// The first node's machine, which has the control plane or a part of it.
    pub fn plane_host(&self) -> &Host {
        &self.plane_host
    }

    /// The lab, for tests that add to it.
    pub fn lab(&self) -> &Lab {
        &self.lab
    }

    /// Runs kubectl as administrator on the first node; returns its standard output.
    ///
    /// # Errors
    /// kubectl failed; its words are in the message.
    pub fn kubectl<A: AsRef<OsStr>>(&self, arguments: &[A]) -> Result<String> {
        self.plane.kubectl(arguments)
    }

    /// Creates or updates the objects in a YAML text.
    ///
    /// # Errors
    /// The API server refuses.
    pub fn apply(&self, yaml: &str) -> Result<String> {
        self.plane.apply(yaml)
    }

    /// Makes an image known to every node.
    ///
    /// # Errors
    /// A node is off or its containerd refuses.
    pub fn import_image(&self, archive: &Path) -> Result<()> {
        std::thread::scope(|scope| {
            let importing: Vec<_> =
                self.nodes.iter().map(|node| scope.spawn(|| node.import_image(archive))).collect();
            importing
                .into_iter()
                .try_for_each(|node| node.join().unwrap_or_else(|_| Err(anyhow::anyhow!("panicked"))))
        })
    }

    /// Directory of the cluster, with one for each node, where its logs are.
    pub fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// Progress lines on standard error.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// The ends of the logs of what nodes run of the control plane, for errors.
    pub(crate) fn control_plane_logs(&self) -> String {
        let logs = |node: &Node| ["etcd", "kube-apiserver"].map(|program| node.log(program));
        let logs = self.nodes.iter().flat_map(logs).filter(|log| log.exists());
        logs.map(|log| tail(&log) + "\n").collect()
    }

    /// Ranges of pods by the number of the node, and plain routes between the nodes of one network.
    fn install_stock_network(&self) -> Result<()> {
        for (index, node) in self.nodes.iter().enumerate() {
            let ranges = stock_ranges(index, self.topology.families);
            let network = files::stock_network(&ranges).to_string();
            node.configure_network("10-stock.conflist", &network)?;
            for other in self.nodes.iter().filter(|other| other.name() != node.name()) {
                for (range, gateway) in ranges.iter().zip(node.addresses()) {
                    other.host().shell(&format!("ip route replace {range} via {gateway}"))?;
                }
            }
        }
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        // All at once: each takes a second.
        std::thread::scope(|scope| {
            for node in &mut self.nodes {
                scope.spawn(move || node.switch_off());
            }
        });
    }
}

/// Rights that kubeadm would have granted kube-proxy.
const RIGHTS: &str = "\
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: testbed-node-proxier}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: system:node-proxier}
subjects: [{kind: User, name: system:kube-proxy, apiGroup: rbac.authorization.k8s.io}]
";

fn stock_ranges(index: usize, families: Families) -> Vec<String> {
    let number = index.saturating_add(1);
    let ipv4 = format!("10.244.{number}.0/24");
    match families {
        Families::Dual => vec![ipv4, format!("fd00:10:244:{number}::/64")],
        Families::Ipv4 => vec![ipv4],
    }
}

fn site_options(site: &Site, families: Families) -> SiteOptions {
    let ipv6 = match families {
        Families::Dual => site.ipv6,
        Families::Ipv4 => Ipv6::Off,
    };
    SiteOptions { ipv6, ..SiteOptions::new(site.nat, site.lan) }
}

fn make_node(
    host: Host,
    topology: &Topology,
    plane: &ControlPlane,
    cluster: &str,
    directory: &Path,
) -> Result<Node> {
    let own = directory.join(host.name());
    fs::create_dir(&own).with_context(|| format!("cannot create {}", own.display()))?;
    let (kubelet_kubeconfig, proxy_kubeconfig) =
        (own.join("kubelet.kubeconfig"), own.join("proxy.kubeconfig"));
    let server = control_plane::own_server(topology, &host);
    plane.kubeconfig_for_token(&token(host.name()), &kubelet_kubeconfig, server.as_deref())?;
    plane.kubeconfig_for_token(PROXY_TOKEN, &proxy_kubeconfig, server.as_deref())?;
    let pods = match topology.network {
        Network::Installed { pods } => pods,
        Network::Stock if topology.families == Families::Dual => "10.244.0.0/16,fd00:10:244::/48",
        Network::Stock => "10.244.0.0/16",
    };
    host.set_sysctls(SYSCTLS)?;
    let membership = Membership {
        cluster,
        directory,
        kubebed: &testbed_kube::binary()?,
        authority: &plane.directory().join("ca.crt"),
        kubelet_kubeconfig: &kubelet_kubeconfig,
        proxy_kubeconfig: &proxy_kubeconfig,
        pods,
        addresses: topology.families.addresses(&host),
        control_plane: control_plane::programs(plane, host.name(), &own),
    };
    let node = Node::new(host, membership)?;
    copy_plugins(&node.directory().join("cni-bin"))?;
    Ok(node)
}

/// Nodes of real clusters have the reference plugins; chains with portmap need them.
fn copy_plugins(target: &Path) -> Result<()> {
    let entries = fs::read_dir(STOCK_PLUGINS)
        .with_context(|| format!("cannot read {STOCK_PLUGINS}: install containernetworking-plugins"))?;
    let mut copied = 0;
    for entry in entries {
        let path = entry?.path();
        if let Some(name) = path.file_name().filter(|_| path.is_file()) {
            fs::copy(&path, target.join(name)).with_context(|| format!("cannot copy {}", path.display()))?;
            copied += 1;
        }
    }
    ensure!(copied > 0, "{STOCK_PLUGINS} is empty: install containernetworking-plugins");
    Ok(())
}

/// The last lines of a log, for errors.
pub(crate) fn tail(path: &Path) -> String {
    const LINES: usize = 15;
    let text = fs::read(path).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    let end = lines.get(lines.len().saturating_sub(LINES)..).unwrap_or_default();
    format!("--- end of {}:\n{}", path.display(), end.join("\n"))
}
