//! The files that an administrator would write: configuration of containerd, kubelet and kube-proxy. Pure.

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};
// It holds a pod's namespaces, and must be on the node: nothing is ever pulled.
use testbed_kube::images::PAUSE;

/// Address of the cluster's DNS, in the first range of Services.
pub(crate) const CLUSTER_DNS: &str = "10.96.0.10";

/// containerd 1.6 and newer.
///
/// `restrict_oom_score_adj`: a test machine's root may lack the right to make processes harder to kill than its own.
pub(crate) fn containerd() -> String {
    format!(
        r#"version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
  address = "/run/containerd/containerd.sock"
[plugins."io.containerd.grpc.v1.cri"]
  sandbox_image = "{PAUSE}"
  disable_apparmor = true
  restrict_oom_score_adj = true
  [plugins."io.containerd.grpc.v1.cri".cni]
    bin_dir = "/opt/cni/bin"
    conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.grpc.v1.cri".containerd]
    default_runtime_name = "runc"
    [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
        SystemdCgroup = false
"#
    )
}

/// kubelet, in JSON, which readers of YAML take. Disk pressure of the test machine must not evict the test's pods.
pub(crate) fn kubelet(authority: &Path, resolv_conf: &Path) -> Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": {"enabled": false},
            "webhook": {"enabled": true},
            "x509": {"clientCAFile": authority},
        },
        "authorization": {"mode": "Webhook"},
        "address": "::",
        "cgroupDriver": "cgroupfs",
        "clusterDNS": [CLUSTER_DNS],
        "clusterDomain": "cluster.local",
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "evictionHard": {"imagefs.available": "0%", "nodefs.available": "0%", "nodefs.inodesFree": "0%"},
        "failCgroupV1": false,
        "failSwapOn": false,
        "imageGCHighThresholdPercent": 100,
        "makeIPTablesUtilChains": false,
        "resolvConf": resolv_conf,
    })
}

/// kube-proxy with nftables. The limits of connection tracking belong to the whole machine and stay as they are.
pub(crate) fn kube_proxy(kubeconfig: &Path, node: &str, pods: &str) -> Value {
    json!({
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": kubeconfig},
        "clusterCIDR": pods,
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpCloseWaitTimeout": "0s", "tcpEstablishedTimeout": "0s"},
        "hostnameOverride": node,
        "mode": "nftables",
        "nftables": {"minSyncPeriod": "200ms"},
    })
}

/// `/etc/hosts` of a node.
pub(crate) fn hosts(node: &str, addresses: &[IpAddr]) -> String {
    let own = addresses.iter().map(|address| format!("{address} {node}\n"));
    std::iter::once("127.0.0.1 localhost\n::1 localhost\n".to_owned()).chain(own).collect()
}

/// Directories that a node has for itself, instead of the machine's: (name in the node's directory, path).
pub(crate) fn own_directories(node: &Path) -> Vec<(PathBuf, PathBuf)> {
    [
        ("kubelet", "/var/lib/kubelet"),
        ("containerd", "/var/lib/containerd"),
        ("fairlead", "/var/lib/fairlead"),
        ("cni-cache", "/var/lib/cni"),
        ("cni-conf", "/etc/cni/net.d"),
        ("cni-bin", "/opt/cni/bin"),
        ("pods-log", "/var/log/pods"),
        ("containers-log", "/var/log/containers"),
    ]
    .map(|(own, path)| (node.join(own), PathBuf::from(path)))
    .to_vec()
}

/// A network configuration of the reference plugins, to judge the bed itself with.
pub(crate) fn stock_network(ranges: &[String]) -> Value {
    let ranges: Vec<Value> = ranges.iter().map(|subnet| json!([{"subnet": subnet}])).collect();
    json!({
        "cniVersion": "1.0.0",
        "name": "stock",
        "plugins": [
            {
                "type": "ptp",
                "ipam": {
                    "type": "host-local",
                    "ranges": ranges,
                    "routes": [{"dst": "0.0.0.0/0"}, {"dst": "::/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": true}},
        ],
    })
}
