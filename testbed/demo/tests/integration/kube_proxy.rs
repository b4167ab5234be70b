//! The mesh beside kube-proxy, in the modes iptables and nftables: connections to Services are translated on the node, and take the tunnel.

use std::net::IpAddr;
use std::process::Command;

use anyhow::ensure;
use fairlead_demo::judge::counters;
use fairlead_demo::{World, probe, topology};
use serde_json::{Value, json};
use testbed_lab::{Process, eventually};

use crate::outage::{TIMEOUT, mesh_of, node, pod};

/// Node with kube-proxy, node with the pod that serves, and node that asks the first one at a node port.
const NODES: [&str; 3] = ["rack-1", "rack-2", "rack-3"];
const NODE_PORT: u16 = 30_007;
/// Packets to pods that arrive at a node outside of WireGuard.
const JUDGE: &str = "nft 'table netdev judge; delete table netdev judge; table netdev judge { chain in { \
    type filter hook ingress device eth0 priority 0; \
    ip daddr 10.64.0.0/16 counter; ip6 daddr fd02:fa1e::/112 counter; }; }'";

#[test]
fn services_of_kube_proxy_lead_into_the_mesh_in_both_modes() {
    let world = mesh_of(&topology::one_network(&[]));
    let _servers = probe::Servers::start(&world.pods).unwrap();
    let service = service(&world);
    for mode in ["iptables", "nftables"] {
        node(&world, NODES[1]).host.shell(JUDGE).unwrap();
        let proxy = start(&world, mode);
        is_reached(&world, service, mode);
        proxy.stop(TIMEOUT).unwrap();
        let proxy = start(&world, mode);
        is_reached(&world, service, &format!("{mode}, restarted"));
        let listed = node(&world, NODES[1]).host.shell("nft -j list table netdev judge").unwrap();
        assert_eq!(counters(&listed).unwrap(), [0, 0], "{mode}: {listed}");
        proxy.stop(TIMEOUT).unwrap();
        kube_proxy(&world, mode, &["--cleanup"]).wait(TIMEOUT).unwrap();
    }
    the_judge_sees_what_is_in_clear_text(&world);
}

/// A Service with a node port, the only endpoint of which is the pod of the second node; its address.
fn service(world: &World) -> IpAddr {
    let name = json!({ "name": "echo", "namespace": "default" });
    let ports = json!([{ "port": probe::PORT, "nodePort": NODE_PORT, "protocol": "TCP" }]);
    let service = json!({
        "apiVersion": "v1", "kind": "Service", "metadata": name,
        "spec": { "type": "NodePort", "ports": ports },
    });
    let address = pod(world, NODES[1]).addresses.iter().find(|it| it.is_ipv4()).unwrap();
    let slice = json!({
        "apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
        "metadata": { "name": "echo", "namespace": "default", "labels": { "kubernetes.io/service-name": "echo" } },
        "endpoints": [{ "addresses": [address], "conditions": { "ready": true } }],
        "ports": [{ "port": probe::PORT, "protocol": "TCP", "name": "" }],
    });
    let both = json!({ "apiVersion": "v1", "kind": "List", "items": [service, slice] });
    world.plane.apply(&both.to_string()).unwrap();
    let shown = world.plane.kubectl(&["get", "service", "echo", "-o", "jsonpath={.spec.clusterIP}"]).unwrap();
    shown.trim().parse().unwrap()
}

fn start(world: &World, mode: &str) -> Process {
    kube_proxy(world, mode, &[])
}

fn kube_proxy(world: &World, mode: &str, arguments: &[&str]) -> Process {
    let configuration = configuration(world, mode);
    let path = world.directory().join("kube-proxy.json");
    std::fs::write(&path, configuration.to_string()).unwrap();
    let mut command = Command::new(testbed_kube::binary().unwrap());
    command.arg("kube-proxy").arg(format!("--config={}", path.display())).args(arguments);
    node(world, NODES[0]).host.spawn(&mut command, world.directory().join("kube-proxy.log")).unwrap()
}

/// Limits of connection tracking belong to the whole machine and stay as they are.
fn configuration(world: &World, mode: &str) -> Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": { "kubeconfig": world.plane.kubeconfig() },
        "clusterCIDR": "10.64.0.0/16",
        "conntrack": { "maxPerCore": 0, "min": 0, "tcpCloseWaitTimeout": "0s", "tcpEstablishedTimeout": "0s" },
        "hostnameOverride": NODES[0],
        "mode": mode,
    })
}

/// From a pod and the host of the node, and from another host at the node port.
fn is_reached(world: &World, service: IpAddr, what: &str) {
    let first = node(world, NODES[0]).addresses()[0];
    let reached = || {
        probe::tcp(pod(world, NODES[0]), service, 32)?;
        let connects = |name: &str, to: IpAddr, port: u16| {
            let asked = node(world, name).host.shell(&format!("echo x | nc -N -w 2 {to} {port}"))?;
            ensure!(asked == "x\n", "{name} hears from {to}: {asked:?}");
            Ok(())
        };
        connects(NODES[0], service, probe::PORT)?;
        connects(NODES[2], first, NODE_PORT)
    };
    eventually(TIMEOUT, reached).unwrap_or_else(|error| {
        let log = std::fs::read_to_string(world.directory().join("kube-proxy.log")).unwrap_or_default();
        panic!("{what}: {error:#}\n{log}")
    });
}

/// A packet with the mark of the node program's sockets goes past the mesh, by a route that leads there.
fn the_judge_sees_what_is_in_clear_text(world: &World) {
    let to = pod(world, NODES[1]).addresses.iter().find(|it| it.is_ipv4()).unwrap();
    let second = node(world, NODES[1]);
    let by = second.addresses()[0];
    let script = format!("ip route add {to} via {by} dev eth0; ping -m 32 -c 1 -W 1 {to} || true");
    node(world, NODES[0]).host.shell(&script).unwrap();
    let listed = second.host.shell("nft -j list table netdev judge").unwrap();
    assert_eq!(counters(&listed).unwrap(), [1, 0], "{listed}");
}
