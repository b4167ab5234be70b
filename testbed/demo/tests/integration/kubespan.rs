//! Addresses of nodes on the mesh, and a node that behaves as one of Talos: the published discovery client and wireguard-go, with the
//! preshared key and the address that KubeSpan derives. There is no Talos here; everything else is real.

use std::fs::{self, File};
use std::io::Write as _;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Instant;

use crate::outage;
use crate::outage::{TIMEOUT, node, pod};
use crate::wireguard_go::{INTERFACE, wireguard_go};
use anyhow::{Context as _, Result, ensure};
use fairlead_demo::{World, probe, servers, topology};
use serde_json::{Value, json};
use testbed_lab::discovery::Discovery;
use testbed_lab::{Host, Process, Progress, eventually};

/// The cluster of Talos's own test vector, and the subnet that it has there.
const CLUSTER: &str = "8XuV9TZHW08DOk3bVxQjH9ih_TBKjnh-j44tsCLSBzo=";
const SUBNET: &str = "fd7f:175a:b97c:5602:";
/// 32 bytes of 2.
const SECRET: &str = "AgICAgICAgICAgICAgICAgICAgICAgICAgICAgICAgI=";
const SECRET_HEX: &str = "0202020202020202020202020202020202020202020202020202020202020202";
const MESH_CIDR: &str = "100.100.0.0/24";
const NODES: [&str; 2] = ["cloud-1", "office-1"];
/// Address that KubeSpan derives of the hardware address 2e:1a:b6:53:81:69 in this cluster.
const TALOS: &str = "fd7f:175a:b97c:5602:2c1a:b6ff:fe53:8169";
const TALOS_ID: &str = "talosNode";

#[test]
fn nodes_have_addresses_on_the_mesh_and_a_node_of_kubespan_joins_it() {
    let mut world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    let host = world.lab().public_site("internet").host("discovery").unwrap();
    let server =
        Discovery::start(host.clone(), world.directory().join("discovery"), &format!("{CLUSTER} *")).unwrap();
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret",
        "metadata": { "name": "fairlead-discovery", "namespace": "kube-system" },
        "stringData": { "clusterID": CLUSTER, "clusterSecret": SECRET },
    });
    world.plane.apply(&secret.to_string()).unwrap();
    servers::apply_mesh(&world, &json!({ "discovery": server.spec(), "meshCIDR": MESH_CIDR })).unwrap();
    world.apply_pool().unwrap();
    world.start_pods().unwrap();
    for name in NODES {
        // Packets to pods and nodes leave all the same.
        assert_eq!(node(&world, name).host.shell("ip -6 route show default").unwrap(), "", "{name}");
    }
    eventually(TIMEOUT, || all_reach_each_other(&world)).unwrap();
    println!("every node and pod reaches every node at its addresses on the mesh");
    a_host_without_a_default_route_is_led_to_members_only(&world);
    a_node_that_comes_back_has_its_address(&world);
    let talos = Talos::start(&world, host.address()).unwrap();
    eventually(TIMEOUT, || talos.is_connected(&world)).unwrap();
    println!("the node of KubeSpan and nodes and pods reach each other");
    let is_up = || {
        let peer = outage::peer(node(&world, "cloud-1"), "talos-1").context("no such peer")?;
        ensure!(peer["state"] == "up", "{peer}");
        Ok(())
    };
    eventually(TIMEOUT, is_up).unwrap();
}

/// Addresses of a node in the mesh as the kernel has them: IPv6, IPv4.
fn mesh_addresses(world: &World, name: &str) -> Result<(Ipv6Addr, Ipv4Addr)> {
    let shown = node(world, name).host.shell("ip -j addr show dev wire_kube")?;
    let shown: Value = serde_json::from_str(&shown)?;
    let listed = shown[0]["addr_info"].as_array().context("no addresses")?;
    let of = |family: &str, length: u64| {
        let mut global = listed.iter().filter(|it| it["scope"] == "global" && it["family"] == family);
        let found = global.find(|it| it["prefixlen"] == length);
        found.and_then(|it| it["local"].as_str()).with_context(|| format!("{name} has no {family}: {shown}"))
    };
    let (ipv6, ipv4) = (of("inet6", 64)?, of("inet", 24)?);
    ensure!(ipv6.starts_with(SUBNET), "{name}: {ipv6}");
    Ok((ipv6.parse()?, ipv4.parse()?))
}

fn all_reach_each_other(world: &World) -> Result<()> {
    for to in NODES {
        let (ipv6, ipv4) = mesh_addresses(world, to)?;
        let derived = node(world, to)
            .host
            .shell("dev=$(ip -j route show default | jq -r '.[0].dev'); cat /sys/class/net/$dev/address")?;
        let bytes: Vec<&str> = derived.trim().split(':').collect();
        let end = u16::from_str_radix(&bytes.get(4..6).context("no MAC")?.concat(), 16)?;
        ensure!(ipv6.segments()[7] == end, "{to}: {ipv6} is not of {derived}");
        for address in [IpAddr::from(ipv6), ipv4.into()] {
            for from in NODES {
                node(world, from).host.shell(&format!("ping -n -c 1 -W 1 {address}"))?;
                probe::ping(pod(world, from), address)?;
            }
        }
    }
    Ok(())
}

/// Another program takes the rule away, and a default route comes and goes.
fn a_host_without_a_default_route_is_led_to_members_only(world: &World) {
    let host = &node(world, "cloud-1").host;
    let pod = pod(world, "office-1").addresses[1];
    let way =
        |to: &str, mark: u32| host.shell(&format!("ip -6 route get {to} mark {mark} 2>&1 || true")).unwrap();
    let is_led = || {
        let way = way(&pod.to_string(), 0);
        ensure!(way.contains("dev wire_kube table 181"), "{way}");
        let rule = host.shell("ip -6 rule show pref 32800")?;
        ensure!(rule.contains("lookup 180"), "{rule}");
        let routes = host.shell("ip -6 route show table 180")?;
        ensure!(routes.lines().count() > 2, "{routes}");
        Ok(())
    };
    eventually(TIMEOUT, is_led).unwrap();
    for (to, mark) in [("2001:db8::1", 0), ("fd00::1", 0), (pod.to_string().as_str(), 0x20)] {
        let way = way(to, mark);
        assert!(way.contains("Network is unreachable"), "{to} with mark {mark:#x}: {way}");
    }
    let from = Instant::now();
    host.shell("ip -6 rule del pref 32800; ip -6 route flush table 180").unwrap();
    eventually(TIMEOUT, is_led).unwrap();
    println!("the rule and the routes are back after {:.1?}", from.elapsed());
    let from = Instant::now();
    host.shell("ip -6 route add default dev eth0").unwrap();
    let has_defaults_only = || {
        let routes = host.shell("ip -6 route show table 180")?;
        ensure!(routes.lines().count() == 2, "{routes}");
        Ok(())
    };
    eventually(TIMEOUT, has_defaults_only).unwrap();
    println!("a default route came: routes to members were gone after {:.1?}", from.elapsed());
    let from = Instant::now();
    host.shell("ip -6 route del default").unwrap();
    eventually(TIMEOUT, is_led).unwrap();
    println!("it went: they were back after {:.1?}", from.elapsed());
}

fn a_node_that_comes_back_has_its_address(world: &World) {
    let before = mesh_addresses(world, "office-1").unwrap();
    let old = world.published("office-1").unwrap();
    world.plane.kubectl(&["delete", "wkpeer", "office-1"]).unwrap();
    let is_back = || {
        let mut peer = world.published("office-1")?;
        ensure!(peer["metadata"]["uid"] != old["metadata"]["uid"], "not made again");
        let given: Vec<IpAddr> = serde_json::from_value(peer["status"]["node"]["meshIPs"].take())?;
        ensure!(given == [IpAddr::from(before.0), before.1.into()], "{given:?}, not {before:?}");
        let kept = world.mesh()?["status"]["keptMeshIPs"].to_string();
        ensure!(!kept.contains("office-1"), "still kept: {kept}");
        all_reach_each_other(world)
    };
    eventually(TIMEOUT, is_back).unwrap();
}

/// A machine with a public address that does what Talos does.
struct Talos {
    host: Host,
    found: PathBuf,
    _device: Process,
    judge: Child,
}

impl Drop for Talos {
    fn drop(&mut self) {
        let _ = self.judge.kill().and_then(|()| self.judge.wait());
    }
}

impl Talos {
    fn start(world: &World, server: Ipv4Addr) -> Result<Self> {
        let host = world.lab().public_site("internet").host("talos")?;
        let mut command = host.command(wireguard_go()?)?;
        command.args(["-f", INTERFACE]);
        let device = host.spawn(&mut command, world.directory().join("talos.log"))?;
        eventually(TIMEOUT, || host.shell(&format!("wg show {INTERFACE}")))?;
        let key = host.shell("wg genkey")?;
        let script = format!(
            "umask 077; echo '{}' > /run/wireguard/key; echo '{SECRET}' > /run/wireguard/psk\n\
             wg set {INTERFACE} private-key /run/wireguard/key listen-port 51820\n\
             ip addr add {TALOS}/64 dev {INTERFACE} nodad; ip link set {INTERFACE} mtu 1420 up\n\
             wg show {INTERFACE} public-key",
            key.trim()
        );
        let public_key = host.shell(&script)?.trim().to_owned();
        let found = world.directory().join("talos.found");
        let mut judge = host.command(testbed_discovery::program()?)?;
        judge.args([&format!("{server}:3000"), CLUSTER, SECRET_HEX, TALOS_ID, "30m"]);
        judge.arg(world.directory().join("discovery/tls.crt"));
        let log = File::create(world.directory().join("talos.judge"))?;
        let mut judge = judge.stdin(Stdio::piped()).stdout(File::create(&found)?).stderr(log).spawn()?;
        let member = json!({
            "node_id": TALOS_ID, "hostname": "talos-1", "nodename": "talos-1",
            "addresses": [host.address(), TALOS], "public_key": public_key, "address": TALOS,
            "routed": [], "excluded": [], "endpoints": [format!("{}:51820", host.address())],
        });
        let input = judge.stdin.as_mut().context("no input")?;
        writeln!(input, "{member}")?;
        Ok(Self { host, found, _device: device, judge })
    }

    /// Configures what it finds, as Talos would, and pings.
    fn is_connected(&self, world: &World) -> Result<()> {
        let text = fs::read_to_string(&self.found)?;
        let last = text.lines().rev().find(|line| line.ends_with('}')).context("nothing found")?;
        let found: Value = serde_json::from_str(last)?;
        let members = found["members"].as_array().context("no members")?;
        ensure!(members.len() == NODES.len(), "{found}");
        for member in members {
            self.configure(member)?;
        }
        for name in NODES {
            let (ipv6, ipv4) = mesh_addresses(world, name)?;
            let pod = pod(world, name);
            for to in [IpAddr::from(ipv6), ipv4.into()].into_iter().chain(pod.addresses.iter().copied()) {
                self.host
                    .shell(&format!("ping -n -c 1 -W 1 {to}"))
                    .with_context(|| format!("{name}: {found}"))?;
            }
            node(world, name).host.shell(&format!("ping -n -c 1 -W 1 {TALOS}"))?;
            probe::ping(pod, TALOS.parse()?)?;
        }
        Ok(())
    }

    fn configure(&self, member: &Value) -> Result<()> {
        let texts = |field: &str| -> Vec<String> {
            let list = member[field].as_array().into_iter().flatten();
            list.filter_map(Value::as_str).map(ToOwned::to_owned).collect()
        };
        let word = |field: &str| member[field].as_str().unwrap_or_default().to_owned();
        let address = word("address");
        ensure!(address.starts_with(SUBNET), "no address on the mesh: {member}");
        let own = texts("addresses")
            .into_iter()
            .filter(|it| it.starts_with("100.100."))
            .map(|it| format!("{it}/32"));
        let routed: Vec<String> = own.chain(texts("routed")).collect();
        let allowed = routed.iter().cloned().chain([format!("{address}/128")]).collect::<Vec<_>>().join(",");
        // Those behind NATs call.
        let endpoint = texts("endpoints").into_iter().find(|it| it.starts_with("198.51.100."));
        let endpoint = endpoint.map(|it| format!("endpoint {it}")).unwrap_or_default();
        let routes: String =
            routed.iter().map(|to| format!("ip route replace {to} dev {INTERFACE}\n")).collect();
        let key = word("public_key");
        let script = format!(
            "wg set {INTERFACE} peer {key} preshared-key /run/wireguard/psk persistent-keepalive 25 {endpoint} \
             allowed-ips {allowed}\n{routes}"
        );
        self.host.shell(&script).map(drop)
    }
}
