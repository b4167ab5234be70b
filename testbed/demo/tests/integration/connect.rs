//! `fairlead connect` on a laptop behind a NAT, with the rights of `deploy/examples/connect.yaml`.

use std::fs;
use std::net::IpAddr;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use crate::outage::{TIMEOUT, pod, took};
use anyhow::{Context as _, Result, ensure};
use fairlead_demo::node::executable;
use fairlead_demo::{World, probe, topology};
use ipnet::Ipv4Net;
use nix::sys::signal::Signal;
use testbed_lab::{Host, Nat, NatSite, Process, Progress, SiteOptions, eventually};

/// Rights that users apply.
const RIGHTS: &str = include_str!("../../../../deploy/examples/connect.yaml");
/// Binding of the second role of [`RIGHTS`], for one machine.
const NARROW: &str = r#"
apiVersion: v1
kind: ServiceAccount
metadata: {name: laptop, namespace: kube-system}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: laptop}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: fairlead-connect-laptop}
subjects: [{kind: ServiceAccount, name: laptop, namespace: kube-system}]
"#;
/// Object that the policy of [`RIGHTS`] refuses.
const FORBIDDEN: &str = "
apiVersion: kilo.squat.ai/v1alpha1
kind: Peer
metadata: {name: laptop, labels: {app.kubernetes.io/managed-by: fairlead-connect}}
spec: {allowedIPs: [10.9.0.1/32], publicKey: xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=}
";
/// Two nodes with public addresses, and one behind a NAT.
const NODES: [&str; 3] = ["cloud-1", "cloud-2", "home-1"];
/// The first address that is chosen.
const INNER: &str = "10.10.10.1";

struct Laptop {
    host: Host,
    directory: PathBuf,
    starts: u32,
    _site: NatSite,
}

impl Laptop {
    fn new(world: &World) -> Result<Self> {
        let lan: Ipv4Net = "192.168.7.0/24".parse()?;
        let site = world.lab().site("cafe", SiteOptions::new(Nat::PortRestricted, lan))?;
        let directory = world.directory().join("laptop");
        fs::create_dir(&directory)?;
        Ok(Self { host: site.host("laptop")?, directory, starts: 0, _site: site })
    }

    /// With the kubeconfig of a ServiceAccount.
    fn connect(&mut self, world: &World, account: &str, more: &[&str]) -> Result<Process> {
        let kubeconfig = self.directory.join(account);
        let token = world.plane.token(account, "kube-system", None)?;
        world.plane.kubeconfig_for_token(&token, &kubeconfig, None)?;
        let mut command = self.host.command(executable("fairlead")?)?;
        command.args(["connect", "laptop", "--state-dir"]).arg(self.directory.join("state"));
        command.arg("--kubeconfig").arg(kubeconfig).args(more);
        self.starts += 1;
        self.host.spawn(&mut command, self.directory.join(format!("connect-{}.log", self.starts)))
    }

    /// Links and routes of the connection.
    fn left(&self) -> Result<String> {
        self.host.shell(
            "ip -o link show dev fairlead0 2>/dev/null || true; ip route show proto 32; ip -6 route show proto 32",
        )
    }

    fn ping(&self, to: IpAddr) -> Result<()> {
        self.host.shell(&format!("ping -n -c 1 -W 1 {to}")).map(drop)
    }

    /// Both ways, with pods in both sites.
    fn reaches_pods(&self, world: &World, nodes: &[&str], inner: &str) -> Result<()> {
        for name in nodes {
            let pod = pod(world, name);
            self.ping(pod.addresses[0]).with_context(|| format!("to the pod on {name}"))?;
            probe::ping(pod, inner.parse()?).with_context(|| format!("from the pod on {name}"))?;
        }
        Ok(())
    }
}

fn peers(world: &World, path: &str) -> Result<String> {
    let path = format!("jsonpath={{.items[*].{path}}}");
    Ok(world.plane.kubectl(&["get", "peers.kilo.squat.ai", "-o", &path])?.trim().to_owned())
}

fn world() -> World {
    let mut plan = topology::three_sites();
    plan.sites.truncate(2);
    plan.sites[1].nodes.truncate(1);
    let mut world = World::start(&plan, &Progress::default()).unwrap();
    world.apply_mesh_and_pool().unwrap();
    world.start_pods().unwrap();
    world.plane.apply(RIGHTS).unwrap();
    world.plane.apply(NARROW).unwrap();
    let (pairs, _) = probe::all_pairs(&world.pods, Instant::now() + TIMEOUT, |_, _| String::new()).unwrap();
    assert!(pairs.iter().all(|pair| pair.tcp && pair.icmp), "{pairs:?}");
    world
}

#[test]
fn a_laptop_connects_is_followed_to_another_entry_node_and_leaves_nothing() {
    let mut world = world();
    let mut laptop = Laptop::new(&world).unwrap();
    refuses_a_device_of_others(&world, &mut laptop);
    has_no_other_addresses_than_the_policy_says(&world, &mut laptop);

    let from = Instant::now();
    let mut first = laptop.connect(&world, "fairlead-connect", &[]).unwrap();
    eventually(TIMEOUT, || laptop.reaches_pods(&world, &NODES, INNER)).unwrap();
    took("connected to pods in two sites", from, TIMEOUT);
    let uid = peers(&world, "metadata.uid").unwrap();
    println!("{}", laptop.left().unwrap());

    first.signal(Signal::SIGKILL).unwrap();
    first.wait(TIMEOUT).unwrap();
    assert!(laptop.left().unwrap().contains("fairlead0"), "an embedded device stays");
    // As other programs do.
    laptop.host.shell("ip addr flush dev fairlead0; ip route flush dev fairlead0").unwrap();
    let mut second = laptop.connect(&world, "fairlead-connect", &[]).unwrap();
    eventually(TIMEOUT, || laptop.reaches_pods(&world, &NODES, INNER)).unwrap();
    assert_eq!(peers(&world, "metadata.uid").unwrap(), uid, "the Peer of the process that was killed");

    let from = Instant::now();
    world.node("cloud-1").unwrap().kill().unwrap();
    let far = pod(&world, "home-1").addresses[0];
    laptop.host.shell(&format!("ping -n -i 0.2 -w 60 -c 1 {far}")).unwrap();
    took("the entry node is killed: the first answer through the other one", from, TIMEOUT);
    eventually(TIMEOUT, || laptop.reaches_pods(&world, &NODES[1..], INNER)).unwrap();
    second.wait_for_output(r#""entry_node":"cloud-2""#, TIMEOUT).unwrap();

    second.signal(Signal::SIGINT).unwrap();
    assert!(second.wait(TIMEOUT).unwrap().success(), "{}", second.output().unwrap());
    assert_eq!(
        (peers(&world, "metadata.name").unwrap(), laptop.left().unwrap()),
        (String::new(), String::new())
    );

    keeps_its_peer_with_the_rights_of_one_machine(&world, &mut laptop);
}

fn refuses_a_device_of_others(world: &World, laptop: &mut Laptop) {
    laptop.host.shell("ip tuntap add dev fairlead0 mode tun").unwrap();
    let mut refused = laptop.connect(world, "fairlead-connect", &[]).unwrap();
    assert_eq!(refused.wait(TIMEOUT).unwrap().code(), Some(1));
    let output = refused.output().unwrap();
    assert!(output.contains("fairlead0 exists and is not ours"), "{output}");
    assert_eq!(peers(world, "metadata.name").unwrap(), "");
    assert!(laptop.left().unwrap().contains("fairlead0"));
    laptop.host.shell("ip link delete fairlead0").unwrap();
}

/// The API server enforces a policy a moment after it is there.
fn policy_is_enforced(world: &World, laptop: &Laptop) -> Result<()> {
    let manifest = laptop.directory.join("forbidden.yaml");
    fs::write(&manifest, FORBIDDEN)?;
    let account = "--as=system:serviceaccount:kube-system:fairlead-connect";
    let created = ["create", "--dry-run=server", account, "-f", manifest.to_str().context("no UTF-8")?];
    let error = world.plane.kubectl(&created).err().context("a Peer with another address is accepted")?;
    ensure!(format!("{error:#}").contains("single addresses of 10.10.10.0/24"), "{error:#}");
    Ok(())
}

fn has_no_other_addresses_than_the_policy_says(world: &World, laptop: &mut Laptop) {
    eventually(TIMEOUT, || policy_is_enforced(world, laptop)).unwrap();
    let mut refused = laptop.connect(world, "fairlead-connect", &["-a", "10.9.0.1"]).unwrap();
    assert_eq!(refused.wait(TIMEOUT).unwrap().code(), Some(1));
    let output = refused.output().unwrap();
    assert!(output.contains("single addresses of 10.10.10.0/24"), "{output}");
    assert_eq!(
        (peers(world, "metadata.name").unwrap(), laptop.left().unwrap()),
        (String::new(), String::new())
    );
}

fn keeps_its_peer_with_the_rights_of_one_machine(world: &World, laptop: &mut Laptop) {
    let mut refused = laptop.connect(world, "laptop", &["--entry-node", "cloud-2"]).unwrap();
    assert_eq!(refused.wait(TIMEOUT).unwrap().code(), Some(1));
    assert!(refused.output().unwrap().contains("you may not list Peers"), "{}", refused.output().unwrap());

    let arguments = ["--entry-node", "cloud-2", "--allowed-ip", "10.10.10.9", "--keep"];
    let mut kept = laptop.connect(world, "laptop", &arguments).unwrap();
    eventually(TIMEOUT, || laptop.reaches_pods(world, &["home-1"], "10.10.10.9")).unwrap();
    kept.signal(Signal::SIGTERM).unwrap();
    assert!(kept.wait(TIMEOUT).unwrap().success(), "{}", kept.output().unwrap());
    assert_eq!(laptop.left().unwrap(), "");
    assert_eq!(peers(world, "spec.allowedIPs[0]").unwrap(), "10.10.10.9/32");

    let mut again = laptop.connect(world, "laptop", &["--keep"]).unwrap();
    eventually(TIMEOUT, || laptop.reaches_pods(world, &["home-1"], "10.10.10.9")).unwrap();
    world.plane.kubectl(&["delete", "peer.kilo.squat.ai", "laptop"]).unwrap();
    assert_eq!(again.wait(TIMEOUT).unwrap().code(), Some(1), "its Peer was deleted");
    let ended = || {
        ensure!(laptop.left()?.is_empty(), "the device is there");
        ensure!(peers(world, "metadata.name")?.is_empty(), "it was made again");
        Ok(())
    };
    eventually(Duration::from_secs(5), ended).unwrap();
}
