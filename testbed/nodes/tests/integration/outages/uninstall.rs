//! Fairlead is removed from a cluster with running pods, and installed again.

use anyhow::ensure;
use testbed_lab::eventually;
use testbed_nodes::Cluster;
use testbed_nodes::install::Mode;

use crate::bed::{Room, TIMEOUT, addresses_agree, all_different, fairlead, overlap_is_refused, pool, server};
use crate::outages::BED;

/// Everything that a node program leaves in the kernel, by the commands that show it.
const TRACES: [(&str, &str); 8] = [
    ("ip -o link", "wire_kube"),
    ("ip -o -d link", "COIL:"),
    ("ip rule; ip -6 rule", "lookup 116"),
    ("ip rule; ip -6 rule", "fwmark 0x40/0x60"),
    ("ip route show table all; ip -6 route show table all", "proto 30"),
    ("nft list tables", "talos_kubespan"),
    ("nft list tables", "fairlead"),
    ("ip -o link", "veth"),
];
/// The same in the node's files.
const FILES: &str = "ls -A /run/coild.sock /run/coild.sock.d /opt/cni/bin/coil /etc/cni/net.d/10-coil.conflist /var/lib/fairlead";
const KINDS: &str = "crd,clusterrole,clusterrolebinding,role,rolebinding,serviceaccount,validatingadmissionpolicy,\
    validatingwebhookconfiguration,mutatingwebhookconfiguration,daemonset,deployment,service,secret,configmap,pdb";

fn nothing_is_left(cluster: &Cluster) {
    for node in cluster.nodes() {
        for (command, trace) in TRACES {
            let shown = node.host().shell(command).unwrap();
            assert!(!shown.contains(trace), "{command} on {} shows {trace}:\n{shown}", node.name());
        }
        let files = node.exec(&["sh", "-c", &format!("{FILES} 2>/dev/null; true")]).unwrap();
        assert_eq!(files.trim(), "/var/lib/fairlead:", "on {}", node.name());
    }
    let objects = cluster.kubectl(&["get", KINDS, "-A", "-o", "name"]).unwrap();
    let ours = ["coil", "wirekube", "kilo", "fairlead"];
    let left: Vec<&str> =
        objects.lines().filter(|name| ours.iter().any(|word| name.contains(word))).collect();
    assert!(left.is_empty(), "{left:?}");
}

fn restart(cluster: &Cluster, namespace: &str, deployment: &str) {
    cluster.kubectl(&["-n", namespace, "rollout", "restart", deployment]).unwrap();
    let timeout = format!("--timeout={}s", TIMEOUT.as_secs());
    cluster.kubectl(&["-n", namespace, "rollout", "status", deployment, &timeout]).unwrap();
}

/// Waits less than the default of five minutes for each step.
fn uninstall(cluster: &Cluster, more: &[&str]) -> (Option<i32>, String) {
    let words = [&["uninstall", "--yes", "--timeout", "30s"], more].concat();
    let (code, _, stderr) = fairlead(cluster, &words).unwrap();
    (code, stderr)
}

/// The node comes back after Fairlead is gone, and is cleaned up as docs/uninstall.md says.
#[test]
#[ignore = "four minutes, for changes of the uninstallation: cargo xtask test soak"]
fn a_node_that_is_off_is_named_and_can_be_left_out() {
    let mut cluster = BED.alone();
    {
        let room = Room::new(&cluster, "uninstall-off");
        room.run("deployment/web", &server("web", 3));
        room.keep();
    }
    cluster.node_mut("cloud-2").unwrap().power_cut().unwrap();
    let (code, said) = uninstall(&cluster, &[]);
    assert_eq!(code, Some(1), "{said}");
    assert!(said.contains("on node cloud-2") && said.contains("--skip-unreachable-nodes"), "{said}");
    assert!(!said.contains("on node cloud-1") && !said.contains("on node home-1"), "{said}");
    let (code, said) = uninstall(&cluster, &["--skip-unreachable-nodes"]);
    assert_eq!(code, Some(0), "{said}");
    assert!(said.contains("run `fairlead cleanup` on these nodes") && said.contains("cloud-2"), "{said}");

    cluster.node_mut("cloud-2").unwrap().power_on().unwrap();
    let program = testbed_lab::executable("fairlead").unwrap();
    let program = program.to_string_lossy();
    let cleanup = [&program, "cleanup", "--conf-dir", "/etc/cni/net.d", "--bin-dir", "/opt/cni/bin"];
    // Its kubelet still has to end the node program.
    eventually(TIMEOUT, || cluster.node("cloud-2")?.exec(&cleanup)).unwrap();
    let gone = || {
        let pods = cluster.kubectl(&[
            "-n",
            "kube-system",
            "get",
            "pods",
            "-l",
            "app.kubernetes.io/name=coil",
            "-o",
            "name",
        ])?;
        ensure!(pods.is_empty(), "{pods}");
        Ok(())
    };
    eventually(TIMEOUT, gone).unwrap();
    nothing_is_left(&cluster);

    cluster.install_fairlead(Mode::Mesh).unwrap();
    restart(&cluster, "kube-system", "deployment/coredns");
    restart(&cluster, "uninstall-off", "deployment/web");
    all_different(&Room::again(&cluster, "uninstall-off").pods("web").unwrap());
    addresses_agree(&cluster);
}

/// The controller is where the API server cannot reach it before there is a mesh.
#[test]
fn fairlead_is_uninstalled_and_installed_again_with_its_controller_behind_nat() {
    let cluster = BED.alone();
    let room = Room::new(&cluster, "uninstall");
    room.run("deployment/web", &server("web", 3));
    cluster.uninstall_fairlead().unwrap();
    nothing_is_left(&cluster);
    // Once more is no error.
    cluster.uninstall_fairlead().unwrap();

    cluster.install_fairlead_with_controller_on(Mode::Mesh, "home-1").unwrap();
    overlap_is_refused(&cluster, &pool("thief", "10.64.8.0/24", 2));
    restart(&cluster, "kube-system", "deployment/coredns");
    restart(&cluster, "uninstall", "deployment/web");
    let pods = room.pods("web").unwrap();
    all_different(&pods);
    for from in &pods {
        for to in &pods {
            let ask = format!("curl -sS -m 5 -o /dev/null http://{}:8080/", to.addresses[0]);
            eventually(TIMEOUT, || room.shell(&from.name, &ask)).unwrap();
        }
    }
    cluster.install_fairlead(Mode::Mesh).unwrap();
    let unpinned = || {
        let replicas = "jsonpath={.status.readyReplicas}";
        let ready = cluster.kubectl(&[
            "-n",
            "kube-system",
            "get",
            "deployment",
            "coil-ipam-controller",
            "-o",
            replicas,
        ])?;
        ensure!(ready == "2", "{ready} controllers are ready");
        Ok(())
    };
    eventually(TIMEOUT, unpinned).unwrap();
    addresses_agree(&cluster);
}
