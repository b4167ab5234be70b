//! An independent judge of the CNI side: `cnitool` of the CNI project drives every operation at every version, also through
//! chains with Debian's plugins, against a real node program and a real API server.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use fairlead_demo::cni;
use fairlead_demo::node::{Node, executable, tail};
use fairlead_demo::{World, objects, topology};
use serde_json::{Value, json};
use testbed_kube::Published;
use testbed_lab::Namespace;
use testbed_lab::Progress;

use crate::outage;
use crate::outage::{TIMEOUT, node, used};

const CNITOOL: Published = Published {
    name: "cnitool",
    version: "v1.3.1",
    packages: &["github.com/containernetworking/cni/cnitool"],
};
/// Directory of the plugins of Debian's `containernetworking-plugins`.
const DEBIANS: &str = "/usr/lib/cni";
const NODE: &str = "cloud-1";

#[test]
fn cnitool_drives_every_verb_at_every_version() {
    let mut world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    let bed = Bed::new(&world);
    bed.status_without_a_pool_is_50(&world);
    world.apply_mesh_and_pool().unwrap();
    bed.eventually_ready(&world);
    for version in ["0.3.1", "0.4.0", "1.0.0", "1.1.0"] {
        bed.lives(&world, version, &[]);
    }
    for version in ["0.4.0", "1.0.0"] {
        let [tuning, bandwidth, portmap] = debians();
        bed.lives(&world, version, &[tuning.clone(), bandwidth.clone()]);
        bed.lives(&world, version, &[tuning, bandwidth, portmap]);
    }
    bed.check_names_what_is_wrong(&world);
    bed.gc_frees_what_is_not_valid(&world);
    bed.del_without_a_node_program_leaks_nothing(&mut world);
}

/// Plugins that come after ours in real lists.
fn debians() -> [Value; 3] {
    for plugin in ["portmap", "tuning", "bandwidth"] {
        let path = Path::new(DEBIANS).join(plugin);
        assert!(path.is_file(), "{} is missing: install containernetworking-plugins", path.display());
    }
    [
        json!({"type": "tuning", "mac": "02:00:00:00:be:ef", "sysctl": {"net.core.somaxconn": "500"}}),
        json!({"type": "bandwidth", "capabilities": {"bandwidth": true}}),
        json!({"type": "portmap", "capabilities": {"portMappings": true}, "snat": true}),
    ]
}

struct Bed {
    tool: PathBuf,
    directory: tempfile::TempDir,
}

/// One container as cnitool sees it: it makes the container ID from the path of the namespace.
struct Sandbox {
    name: String,
    namespace: Namespace,
}

impl Bed {
    fn new(world: &World) -> Self {
        let directory = tempfile::Builder::new().prefix("fairlead-cnitool-").tempdir().unwrap();
        for name in ["bin", "var-lib"] {
            fs::create_dir(directory.path().join(name)).unwrap();
        }
        let plugin = executable("fairlead-cni").unwrap();
        std::os::unix::fs::symlink(plugin, directory.path().join("bin/coil")).unwrap();
        let pods: Vec<String> =
            ["life", "broken", "kept", "dropped"].map(|name| objects::pod(name, NODE)).to_vec();
        world.plane.apply(&pods.join("---\n")).unwrap();
        Self { tool: CNITOOL.programs().unwrap().join("cnitool"), directory }
    }

    fn sandbox(&self, world: &World, name: &str) -> Sandbox {
        Sandbox { name: name.to_owned(), namespace: world.lab().bare_namespace(name).unwrap() }
    }

    fn tool(
        &self,
        node: &Node,
        operation: &str,
        version: &str,
        more: &[Value],
        sandbox: Option<&Sandbox>,
    ) -> Output {
        let mut plugins = vec![json!({"type": "coil", "socket": node.socket()})];
        plugins.extend_from_slice(more);
        let list = json!({"cniVersion": version, "name": "k8s-pod-network", "plugins": plugins});
        let nets = self.directory.path().join("net.d");
        fs::create_dir_all(&nets).unwrap();
        fs::write(nets.join("10-coil.conflist"), list.to_string()).unwrap();
        // cnitool keeps results below /var/lib/cni, which cannot be changed; the machine's own is not ours to write.
        let mut command = node.host.command("unshare").unwrap();
        let private = "mount --bind \"$1\" /var/lib && shift && exec \"$@\"";
        command
            .args(["--mount", "sh", "-ec", private, "sh"])
            .args([&self.directory.path().join("var-lib"), &self.tool])
            .args([operation, "k8s-pod-network"])
            .env("NETCONFPATH", nets)
            .env("CNI_PATH", format!("{}/bin:{DEBIANS}", self.directory.path().display()));
        match sandbox {
            Some(Sandbox { name, namespace }) => {
                let args =
                    format!("IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={name}", objects::NAMESPACE);
                command.arg(namespace.netns_path()).env("CNI_ARGS", args);
            }
            // cnitool requires a namespace also for operations that have none.
            None => {
                command.arg("/nonexistent");
            }
        }
        if !more.is_empty() {
            let capabilities = json!({
                "portMappings": [{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}],
                "bandwidth": {"ingressRate": 8_000_000, "ingressBurst": 8_000_000},
            });
            command.env("CAP_ARGS", capabilities.to_string());
        }
        command.output().unwrap()
    }

    fn works(
        &self,
        node: &Node,
        operation: &str,
        version: &str,
        more: &[Value],
        sandbox: Option<&Sandbox>,
    ) -> String {
        let output = self.tool(node, operation, version, more, sandbox);
        assert!(output.status.success(), "{operation} {version}: {output:?}");
        String::from_utf8(output.stdout).unwrap()
    }

    fn fails(&self, node: &Node, operation: &str, version: &str, sandbox: Option<&Sandbox>) -> String {
        let output = self.tool(node, operation, version, &[], sandbox);
        assert!(!output.status.success(), "{operation} {version} succeeded");
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout)
    }

    fn status_without_a_pool_is_50(&self, world: &World) {
        let said = self.fails(node(world, NODE), "status", "1.1.0", None);
        assert!(said.contains("there is no AddressPool"), "{said}");
    }

    fn eventually_ready(&self, world: &World) {
        let ready = |world: &World| {
            let output = self.tool(node(world, NODE), "status", "1.1.0", &[], None);
            anyhow::ensure!(output.status.success(), "{output:?}");
            Ok(())
        };
        world.wait_for(TIMEOUT, ready).unwrap();
    }

    /// ADD, CHECK, DEL and DEL again.
    fn lives(&self, world: &World, version: &str, more: &[Value]) {
        let at = node(world, NODE);
        let before = used(at);
        let sandbox = self.sandbox(world, "life");
        let result: Value =
            serde_json::from_str(&self.works(at, "add", version, more, Some(&sandbox))).unwrap();
        assert_eq!(result["cniVersion"], version);
        assert_eq!(result["interfaces"][0]["sandbox"], json!(sandbox.namespace.netns_path()), "{result}");
        assert_eq!(result["interfaces"][0]["mtu"].is_number(), version == "1.1.0", "{result}");
        assert_eq!(cni::addresses(&result).unwrap().len(), 2, "{result}");
        if !more.is_empty() {
            assert_eq!(result["interfaces"][0]["mac"], "02:00:00:00:be:ef", "tuning changed it: {result}");
        }
        expect_used(at, before + 1);
        if more.iter().any(|plugin| plugin["type"] == "portmap") {
            // Its CHECK looks for the IPv4 rules of a dual-stack pod among those of IPv6 (as of 1.1.1).
            println!("CHECK behind portmap is not asked");
        } else if version == "0.3.1" {
            let said = self.fails(at, "check", version, Some(&sandbox));
            assert!(said.contains("CHECK"), "{said}");
        } else {
            self.works(at, "check", version, more, Some(&sandbox));
        }
        self.works(at, "del", version, more, Some(&sandbox));
        self.works(at, "del", version, more, Some(&sandbox));
        expect_used(at, before);
        println!("{version} with {} more plugins: ok", more.len());
    }

    fn check_names_what_is_wrong(&self, world: &World) {
        let at = node(world, NODE);
        let sandbox = self.sandbox(world, "broken");
        self.works(at, "add", "1.1.0", &[], Some(&sandbox));
        self.works(at, "check", "1.1.0", &[], Some(&sandbox));
        let run = |line: &str| {
            let mut words = line.split(' ');
            let mut command = sandbox.namespace.command(words.next().unwrap()).unwrap();
            let output = command.args(words).output().unwrap();
            assert!(output.status.success(), "{line}: {output:?}");
        };
        run("ip -4 route del default");
        let said = self.fails(at, "check", "1.1.0", Some(&sandbox));
        assert!(said.contains("no default route"), "{said}");
        run("ip link del eth0");
        let said = self.fails(at, "check", "1.1.0", Some(&sandbox));
        assert!(said.contains("no interface eth0") && said.contains("host's end"), "{said}");
        self.works(at, "del", "1.1.0", &[], Some(&sandbox));
    }

    /// cnitool names no valid attachment, so all of the network go; the plugin itself is asked to keep one.
    fn gc_frees_what_is_not_valid(&self, world: &World) {
        let at = node(world, NODE);
        let before = used(at);
        let plugin = at.plugin().unwrap();
        let containers = ["kept", "dropped"].map(|name| outage::container(world, name, objects::NAMESPACE));
        for container in &containers {
            plugin.add(container).unwrap();
        }
        let mut conf: Value = serde_json::from_str(&plugin.configuration()).unwrap();
        conf["cniVersion"] = json!("1.1.0");
        conf["cni.dev/valid-attachments"] = json!([{"containerID": containers[0].id, "ifname": "eth0"}]);
        for network in ["another-network", "k8s-pod-network"] {
            expect_used(at, before + 2);
            conf["name"] = json!(network);
            let output = plugin.call("GC", &containers[0], &conf.to_string()).unwrap();
            assert!(output.status.success(), "{output:?}");
        }
        expect_used(at, before + 1);
        self.works(at, "gc", "1.1.0", &[], None);
        expect_used(at, before);
    }

    fn del_without_a_node_program_leaks_nothing(&self, world: &mut World) {
        let before = used(node(world, NODE));
        let (one, two) = (self.sandbox(world, "kept"), self.sandbox(world, "dropped"));
        for sandbox in [&one, &two] {
            self.works(node(world, NODE), "add", "1.1.0", &[], Some(sandbox));
        }
        expect_used(node(world, NODE), before + 2);
        world.node(NODE).unwrap().kill().unwrap();
        let at = node(world, NODE);
        // A runtime would make the Node NotReady, and the cluster evict the pods that run.
        self.works(at, "status", "1.1.0", &[], None);
        self.works(at, "del", "1.1.0", &[], Some(&one));
        drop(one);
        let started = world.node(NODE).unwrap();
        started.start().unwrap();
        started.wait_ready(TIMEOUT).unwrap();
        let at = node(world, NODE);
        // Only the other one is left.
        expect_used(at, before + 1);
        self.works(at, "check", "1.1.0", &[], Some(&two));
        self.works(at, "del", "1.1.0", &[], Some(&two));
        world
            .wait_for(Duration::from_secs(30), |world| {
                anyhow::ensure!(used(node(world, NODE)) == before, "an address is still used");
                Ok(())
            })
            .unwrap();
    }
}

fn expect_used(at: &Node, wanted: u64) {
    let now = used(at);
    assert_eq!(now, wanted, "{:#}\n{}", at.status().unwrap(), tail(&at.log()));
}
