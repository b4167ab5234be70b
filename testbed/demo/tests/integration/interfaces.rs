//! Further interfaces of a pod: real Multus calls the plugin once for each, and the plugins of the CNI project change them, in the
//! newest release and in Debian's.

use std::fs;
use std::io::Write as _;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use fairlead_demo::cni;
use fairlead_demo::node::{Node, executable, tail};
use fairlead_demo::{World, objects, topology};
use serde_json::{Value, json};
use testbed_kube::Published;
use testbed_lab::{Namespace, Progress};

use crate::outage::{node, used};

/// Plugins that are called after the one that makes the interface.
const NEWEST: Published = Published {
    name: "cni-meta-plugins",
    version: "v1.10.0",
    packages: &[
        "github.com/containernetworking/plugins/plugins/meta/bandwidth",
        "github.com/containernetworking/plugins/plugins/meta/sbr",
        "github.com/containernetworking/plugins/plugins/meta/tuning",
    ],
};
/// Directory of the plugins of Debian's `containernetworking-plugins`.
const DEBIANS: &str = "/usr/lib/cni";
const NODE: &str = "cloud-1";

#[test]
fn multus_gives_a_pod_a_second_interface_and_takes_it_away_again() {
    let world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    world.apply_mesh_and_pool().unwrap();
    let newest = NEWEST.programs().unwrap();
    for (name, plugins) in [("newest", newest.as_path()), ("debians", Path::new(DEBIANS))] {
        for more in [Vec::new(), vec!["tuning", "bandwidth"], vec!["sbr"], vec!["sbr", "tuning", "bandwidth"]]
        {
            let pod = format!("{name}-{}", more.join("-")).trim_end_matches('-').to_owned();
            Pod::of(&world, &pod, plugins, &more).lives();
            println!("{pod}: ok");
        }
    }
}

/// A pod with two interfaces of this node's plugin, the second in a chain with others.
struct Pod<'a> {
    node: &'a Node,
    namespace: Namespace,
    name: String,
    plugins: PathBuf,
    chain: Vec<Value>,
    directory: tempfile::TempDir,
}

impl<'a> Pod<'a> {
    fn of(world: &'a World, name: &str, plugins: &Path, more: &[&str]) -> Self {
        world.plane.apply(&objects::pod(name, NODE)).unwrap();
        let node = node(world, NODE);
        let directory = tempfile::Builder::new().prefix("fairlead-multus-").tempdir().unwrap();
        fs::create_dir_all(directory.path().join("bin")).unwrap();
        fs::create_dir_all(directory.path().join("var-lib")).unwrap();
        let plugin = executable("fairlead-cni").unwrap();
        std::os::unix::fs::symlink(plugin, directory.path().join("bin/coil")).unwrap();
        let of = |plugin: &&str| match *plugin {
            "bandwidth" => {
                json!({"type": "bandwidth", "ingressRate": 80_000_000, "ingressBurst": 80_000_000})
            }
            "tuning" => json!({"type": "tuning", "sysctl": {"net.core.somaxconn": "500"}}),
            other => json!({"type": other}),
        };
        Self {
            node,
            namespace: world.lab().bare_namespace(name).unwrap(),
            name: name.to_owned(),
            plugins: plugins.to_owned(),
            chain: more.iter().map(of).collect(),
            directory,
        }
    }

    /// A network of this node's plugin, and then others.
    fn network(&self, name: &str, more: &[Value]) -> Value {
        let mut plugins = vec![json!({"type": "coil", "socket": self.node.socket()})];
        plugins.extend_from_slice(more);
        json!({"cniVersion": "1.0.0", "name": name, "plugins": plugins})
    }

    /// Calls a plugin as a runtime does. Plugins keep files below `/var/lib`, which are not the machine's own here.
    fn call(&self, plugin: &Path, operation: &str, ifname: &str, configuration: &Value) -> Output {
        let container = cni::container(&self.name, &self.namespace);
        let private = "mount --bind \"$1\" /var/lib && shift && exec \"$@\"";
        let mut command = self.node.host.command("unshare").unwrap();
        command
            .args(["--mount", "sh", "-ec", private, "sh"])
            .args([&self.directory.path().join("var-lib"), plugin])
            .env("CNI_COMMAND", operation)
            .env("CNI_CONTAINERID", &container.id)
            .env("CNI_NETNS", &container.netns)
            .env("CNI_IFNAME", ifname)
            .env("CNI_PATH", format!("{}/bin:{}", self.directory.path().display(), self.plugins.display()))
            .env(
                "CNI_ARGS",
                format!(
                    "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={}",
                    objects::NAMESPACE,
                    self.name
                ),
            )
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        child.stdin.take().unwrap().write_all(configuration.to_string().as_bytes()).unwrap();
        child.wait_with_output().unwrap()
    }

    fn multus(&self, operation: &str, more: &Value) -> Value {
        let mut configuration = json!({
            "cniVersion": "1.0.0", "name": "multus", "type": "multus", "logLevel": "error",
            "delegates": [self.network("k8s-pod-network", &[]), self.network("second", &self.chain)],
        });
        for (key, value) in more.as_object().unwrap() {
            configuration[key] = value.clone();
        }
        let output = self.call(&testbed_kube::multus().unwrap(), operation, "eth0", &configuration);
        assert!(output.status.success(), "{operation}: {output:?}\n{}", tail(&self.node.log()));
        if output.stdout.is_empty() { Value::Null } else { serde_json::from_slice(&output.stdout).unwrap() }
    }

    fn inside(&self, line: &str) -> String {
        let mut words = line.split(' ');
        let output = self.namespace.command(words.next().unwrap()).unwrap().args(words).output().unwrap();
        assert!(output.status.success(), "{line}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn addresses(&self, ifname: &str) -> Vec<IpAddr> {
        let shown: Value =
            serde_json::from_str(&self.inside(&format!("ip -json addr show dev {ifname} scope global")))
                .unwrap();
        let all = shown[0]["addr_info"].as_array().unwrap().iter();
        all.filter_map(|info| info["local"].as_str()?.parse().ok()).collect()
    }

    /// The host drops a reply that comes from another link than the one that has the address.
    fn answers(&self, ifname: &str) {
        let addresses = self.addresses(ifname);
        assert_eq!(addresses.len(), 2, "{addresses:?}");
        for address in addresses {
            let mut command = self.node.host.command("ping").unwrap();
            let output = command.args(["-c", "1", "-W", "10", &address.to_string()]).output().unwrap();
            let routes = || self.inside("ip route show table all") + &self.inside("ip rule");
            assert!(output.status.success(), "{ifname} {address}: {output:?}\n{}", routes());
        }
    }

    fn has_one_default_route(&self) {
        for family in ["-4", "-6"] {
            let shown = self.inside(&format!("ip {family} route show default"));
            assert!(shown.contains("dev eth0") && !shown.contains("net1"), "{shown}");
        }
    }

    fn lives(&self) {
        let before = used(self.node);
        let result = self.multus("ADD", &json!({}));
        assert_eq!(result["interfaces"][0]["name"], "eth0", "{result}");
        assert_eq!(result["routes"].as_array().map(Vec::len), Some(2), "{result}");
        assert_eq!(used(self.node), before + 2);
        self.has_one_default_route();
        self.answers("eth0");
        self.answers("net1");
        self.multus("CHECK", &json!({ "prevResult": result }));
        // The second one alone goes and comes back, as for a network that is attached to a running pod.
        let plugin = self.directory.path().join("bin/coil");
        let mut second =
            json!({"cniVersion": "1.0.0", "name": "second", "type": "coil", "socket": self.node.socket()});
        for _ in 0..2 {
            let output = self.call(&plugin, "DEL", "net1", &second);
            assert!(output.status.success(), "{output:?}");
            assert_eq!(used(self.node), before + 1);
            self.answers("eth0");
            self.has_one_default_route();
        }
        let output = self.call(&plugin, "ADD", "net1", &second);
        assert!(output.status.success(), "{output:?}");
        let result: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert!(result["routes"].as_array().is_none_or(Vec::is_empty), "{result}");
        assert_eq!(result["ips"][0]["gateway"], "169.254.1.1", "{result}");
        self.answers("net1");
        second["prevResult"] = result;
        let output = self.call(&plugin, "CHECK", "net1", &second);
        assert!(output.status.success(), "{output:?}");
        self.multus("DEL", &json!({}));
        self.multus("DEL", &json!({}));
        assert_eq!(used(self.node), before);
    }
}
