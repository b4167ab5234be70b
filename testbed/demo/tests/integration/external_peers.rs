//! A laptop outside of the cluster, behind a NAT, that is a Peer of Kilo: wireguard-go, an independent WireGuard, with the configuration
//! that `fairlead showconf` or `fairlead peer` prints.

use std::fs;
use std::net::{IpAddr, Ipv4Addr};
use std::os::unix::fs::PermissionsExt as _;
use std::time::{Duration, Instant};

use crate::outage;
use crate::outage::{TIMEOUT, loses_nothing, node, pod, steady, udp};
use crate::wireguard_go::{INTERFACE, wireguard_go};
use anyhow::{Context, Result, bail, ensure};
use fairlead_demo::node::executable;
use fairlead_demo::{World, probe, topology};
use ipnet::Ipv4Net;
use serde_json::{Value, json};
use testbed_lab::{Host, Nat, NatSite, Process, Progress, SiteOptions, eventually};

/// The laptop inside of the mesh.
const INNER: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
/// Nodes whose pods the laptop reaches.
const NODES: [&str; 2] = ["rack-1", "rack-2"];

/// A machine with wireguard-go.
struct Laptop {
    host: Host,
    private_key: String,
    public_key: String,
    preshared_key: String,
    _device: Process,
    _site: NatSite,
}

impl Laptop {
    /// On another network than the nodes.
    fn new(world: &World) -> Result<Self> {
        let lan = Ipv4Net::new(Ipv4Addr::new(192, 168, 7, 0), 24)?;
        let site = world.lab().site("cafe", SiteOptions::new(Nat::PortRestricted, lan))?;
        let host = site.host("laptop")?;
        let mut command = host.command(wireguard_go()?)?;
        command.args(["-f", INTERFACE]);
        let device = host.spawn(&mut command, world.directory().join("laptop.log"))?;
        let shell = |script: &str| Ok::<_, anyhow::Error>(host.shell(script)?.trim().to_owned());
        let private_key = shell("wg genkey")?;
        let public_key = shell(&format!("echo '{private_key}' | wg pubkey"))?;
        let preshared_key = shell("wg genpsk")?;
        eventually(TIMEOUT, || shell(&format!("wg show {INTERFACE}")))?;
        Ok(Self { host, private_key, public_key, preshared_key, _device: device, _site: site })
    }

    fn peer(&self, allowed_ips: &[String]) -> String {
        let spec = json!({
            "publicKey": self.public_key, "presharedKey": self.preshared_key, "allowedIPs": allowed_ips,
            "persistentKeepalive": 2,
        });
        json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": { "name": "laptop" }, "spec": spec,
        })
        .to_string()
    }

    /// Does what a user does with the output of `fairlead showconf`.
    fn configure(&self, peers: &str, destinations: &[IpAddr]) -> Result<()> {
        let routes: String =
            destinations.iter().map(|to| format!("ip route add {to} dev {INTERFACE}\n")).collect();
        let script = format!(
            "umask 077; cat > /run/wireguard/configuration <<END\n[Interface]\nPrivateKey = {}\n\n{peers}END\n\
             wg setconf {INTERFACE} /run/wireguard/configuration\nip addr add {INNER}/32 dev {INTERFACE}\n\
             ip link set {INTERFACE} mtu 1380 up\n{routes}",
            self.private_key
        );
        self.host.shell(&script).map(drop)
    }

    /// Does what `wg-quick` does with a whole configuration.
    fn bring_up(&self, world: &World, configuration: &str) -> Result<()> {
        let file = world.directory().join("laptop.conf");
        fs::write(&file, configuration)?;
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600))?;
        let prefixes = configuration.lines().filter_map(|line| line.strip_prefix("AllowedIPs = "));
        let prefixes = prefixes.flat_map(|list| list.split(", ")).filter(|prefix| !prefix.contains(':'));
        // Nodes of another cluster mark packets of WireGuard itself instead, so their Peer has the address of the endpoint, too.
        let endpoint = configuration.lines().find_map(|line| line.strip_prefix("Endpoint = "));
        let endpoint =
            endpoint.and_then(|it| it.rsplit_once(':')).map(|(address, _)| format!("{address}/32"));
        let prefixes = prefixes.filter(|prefix| endpoint.as_deref() != Some(*prefix));
        let routes: String =
            prefixes.map(|prefix| format!("ip route add {prefix} dev {INTERFACE}\n")).collect();
        // The endpoint of one configuration may be an allowed IP of the one before.
        let script = format!(
            "set -e; ip route flush dev {INTERFACE}; wg-quick strip {0} > {0}.stripped; wg setconf {INTERFACE} {0}.stripped\n\
             ip addr replace {INNER}/32 dev {INTERFACE}\nip link set {INTERFACE} mtu 1380 up\n{routes}",
            file.display()
        );
        self.host.shell(&script).map(drop)
    }

    fn ping(&self, to: IpAddr) -> Result<()> {
        self.host.shell(&format!("ping -n -c 1 -W 1 {to}")).map(drop)
    }
}

fn showconf(world: &World, arguments: &[&str]) -> Result<String> {
    fairlead(world, &[&["showconf"], arguments].concat())
}

fn fairlead(world: &World, arguments: &[&str]) -> Result<String> {
    let mut command = world.plane_host().command(executable("fairlead")?)?;
    command.args(arguments).arg("--kubeconfig").arg(world.plane.kubeconfig());
    let output = command.output()?;
    let said = String::from_utf8_lossy(&output.stderr);
    ensure!(output.status.success(), "{arguments:?}: {said}");
    Ok(String::from_utf8(output.stdout)?)
}

/// Both ways, with the pods of both nodes.
fn reach_each_other(world: &World, laptop: &Laptop) -> Result<()> {
    for name in NODES {
        let pod = pod(world, name);
        laptop.ping(pod.addresses[0])?;
        probe::ping(pod, INNER.into())?;
    }
    Ok(())
}

/// Peers outside of the cluster, in the status of a node.
fn external(world: &World, name: &str) -> Result<Value> {
    Ok(node(world, name).status()?["externalPeers"].clone())
}

fn is_configured_without_what_belongs_to_others(world: &World) -> Result<()> {
    for name in ["rack-1", "rack-2", "rack-3"] {
        let status = node(world, name).status()?;
        let peers = &status["externalPeers"];
        ensure!(peers[0]["prefixes"] == json!([format!("{INNER}/32")]), "{name}: {peers}");
        let problems = status["problems"].to_string();
        let refused = pod(world, "rack-2").addresses[0];
        for words in [format!("Peer laptop claims {refused}/32"), "Peer laptop claims 0.0.0.0/0".to_owned()] {
            ensure!(problems.contains(&words), "{name}: {words} is missing in {problems}");
        }
    }
    Ok(())
}

#[test]
fn a_laptop_outside_of_the_cluster_reaches_pods_on_all_nodes() {
    let mut world = World::start(&topology::one_network(&[]), &Progress::default()).unwrap();
    world.apply_mesh_and_pool().unwrap();
    world.start_pods().unwrap();
    let (pairs, _) = probe::all_pairs(&world.pods, Instant::now() + TIMEOUT, |_, _| String::new()).unwrap();
    assert!(pairs.iter().all(|pair| pair.tcp && pair.icmp), "{pairs:?}");
    let flows = [udp(&world, "rack-1", "rack-2")];

    let laptop = Laptop::new(&world).unwrap();
    steady(&flows);
    let mark = Instant::now();
    let theirs = format!("{}/32", pod(&world, "rack-2").addresses[0]);
    let allowed_ips = [format!("{INNER}/32"), theirs, "0.0.0.0/0".to_owned()];
    world.plane.apply(&laptop.peer(&allowed_ips)).unwrap();
    eventually(TIMEOUT, || is_configured_without_what_belongs_to_others(&world)).unwrap();
    println!("all nodes have the Peer after {:.1?}", mark.elapsed());

    let configuration = showconf(&world, &["peer", "laptop"]).unwrap();
    println!("{}", configuration.replace(&laptop.preshared_key, "(hidden)"));
    let data: Value =
        serde_json::from_str(&showconf(&world, &["peer", "laptop", "-o", "json"]).unwrap()).unwrap();
    assert_eq!(data["peers"].as_array().map(Vec::len), Some(3), "{data}");
    assert_eq!(data["peers"][0]["persistentKeepalive"], 2);
    assert!(showconf(&world, &["node", "rack-1"]).unwrap().contains(&laptop.public_key));
    showconf(&world, &["peer", "unknown"]).unwrap_err();
    let destinations = NODES.map(|name| pod(&world, name).addresses[0]);
    let from = Instant::now();
    laptop.configure(&configuration, &destinations).unwrap();
    eventually(TIMEOUT, || reach_each_other(&world, &laptop)).unwrap();
    println!("pods of two nodes and the laptop reach each other after {:.1?}", from.elapsed());
    // Messages of the last second do not count.
    std::thread::sleep(Duration::from_secs(3));
    loses_nothing("a Peer claims the address of a pod", &flows, mark);
    println!("{}", external(&world, "rack-1").unwrap());

    let from = Instant::now();
    laptop.host.router().unwrap().change_address().unwrap();
    eventually(TIMEOUT, || reach_each_other(&world, &laptop)).unwrap();
    println!("its NAT has another address: back after {:.1?}", from.elapsed());

    let from = Instant::now();
    world.plane.kubectl(&["delete", "peer", "laptop"]).unwrap();
    let is_cut = || {
        for name in NODES {
            ensure!(external(&world, name)? == json!([]), "{name} has it still");
            if laptop.ping(pod(&world, name).addresses[0]).is_ok() {
                bail!("the pod on {name} still answers");
            }
        }
        Ok(())
    };
    eventually(TIMEOUT, is_cut).unwrap();
    println!("the Peer is deleted: cut after {:.1?}, of which two seconds are lost pings", from.elapsed());

    world.plane.apply(&laptop.peer(&allowed_ips)).unwrap();
    eventually(TIMEOUT, || reach_each_other(&world, &laptop)).unwrap();
    is_kept_while_the_api_server_is_away(&mut world, &laptop);
}

#[test]
fn a_preshared_key_in_the_secret_counts_and_without_it_the_peer_has_no_tunnel() {
    let mut world = World::start(&topology::one_network(&[]), &Progress::default()).unwrap();
    world.apply_mesh_and_pool().unwrap();
    world.start_pods().unwrap();
    let laptop = Laptop::new(&world).unwrap();
    let key_file = world.directory().join("laptop.key");
    fs::write(&key_file, &laptop.private_key).unwrap();
    let (file, address) = (key_file.display().to_string(), format!("{INNER}"));
    let add =
        ["peer", "add", "laptop", "--preshared-key-secret", "--entry-node", "rack-1", "--address", &address];
    let configuration = fairlead(&world, &[&add[..], &["--private-key-file", &file]].concat()).unwrap();
    let peer = world.plane.kubectl(&["get", "peer", "laptop", "-o", "json"]).unwrap();
    let peer: Value = serde_json::from_str(&peer).unwrap();
    assert_eq!(peer["spec"]["presharedKeyRef"], json!({ "key": "laptop" }));
    assert!(peer["spec"].get("presharedKey").is_none() && configuration.contains("PresharedKey = "));
    let shown = fairlead(&world, &["peer", "show", "laptop", "--private-key-file", &file]).unwrap();
    assert_eq!(shown, configuration, "the same from the Secret");
    laptop.bring_up(&world, &configuration).unwrap();
    eventually(TIMEOUT, || reach_each_other(&world, &laptop)).unwrap();

    let change = |data: Value| {
        let patch = data.to_string();
        let name = "fairlead-peer-preshared-keys";
        let words = ["-n", "kube-system", "patch", "secret", name, "--type=merge", "-p", &patch];
        world.plane.kubectl(&words).unwrap();
    };
    let is_cut = |words: &str| {
        ensure!(external(&world, "rack-1")? == json!([]), "rack-1 has it still");
        let problems = node(&world, "rack-1").status()?["problems"].to_string();
        ensure!(problems.contains(words), "{problems}");
        ensure!(laptop.ping(pod(&world, "rack-1").addresses[0]).is_err(), "the pod still answers");
        Ok(())
    };
    change(json!({ "data": { "laptop": null } }));
    eventually(TIMEOUT, || is_cut("has no key 'laptop'")).unwrap();
    change(json!({ "stringData": { "laptop": "nonsense" } }));
    eventually(TIMEOUT, || is_cut("is no WireGuard key")).unwrap();
    // Another key: the machine has to have the same.
    change(json!({ "stringData": { "laptop": laptop.preshared_key } }));
    let is_there = || {
        ensure!(external(&world, "rack-1")? != json!([]), "rack-1 has it not yet");
        Ok(())
    };
    eventually(TIMEOUT, is_there).unwrap();
    assert!(reach_each_other(&world, &laptop).is_err(), "with the old key");
    let shown = fairlead(&world, &["peer", "show", "laptop", "--private-key-file", &file]).unwrap();
    assert!(shown.contains(&laptop.preshared_key));
    laptop.bring_up(&world, &shown).unwrap();
    eventually(TIMEOUT, || reach_each_other(&world, &laptop)).unwrap();

    fairlead(&world, &["peer", "remove", "laptop"]).unwrap();
    let secret = ["-n", "kube-system", "get", "secret", "fairlead-peer-preshared-keys", "-o", "json"];
    let secret: Value = serde_json::from_str(&world.plane.kubectl(&secret).unwrap()).unwrap();
    assert!(secret["data"].get("laptop").is_none(), "its key goes with it");
}

/// A node program starts again, which ends its embedded WireGuard, and nothing but its file knows the Peer.
fn is_kept_while_the_api_server_is_away(world: &mut World, laptop: &Laptop) {
    let saved = world.directory().join("rack-1/state/mesh.json");
    let is_saved = || {
        let text = fs::read_to_string(&saved)?;
        ensure!(text.contains("peer/laptop"), "not saved");
        Ok(())
    };
    eventually(TIMEOUT, is_saved).unwrap();
    world.plane.stop_apiserver().unwrap();
    let from = Instant::now();
    let first = world.node("rack-1").unwrap();
    first.kill().unwrap();
    first.start().unwrap();
    first.wait_ready(TIMEOUT).unwrap();
    eventually(TIMEOUT, || reach_each_other(world, laptop)).unwrap();
    println!("a node starts while the API server is away: back after {:.1?}", from.elapsed());
}

/// Nodes with public addresses, through which the laptop enters.
const ENTRIES: [&str; 2] = ["cloud-1", "cloud-2"];
/// The third node of its location, of which two are gateways.
const BEHIND_GATEWAYS: &str = "home-3";

/// Pods of all nodes and the laptop, both ways, the address of a node behind a NAT, and a Service.
fn reaches_all_through_one(world: &World, laptop: &Laptop, service: IpAddr) -> Result<()> {
    for pod in &world.pods {
        laptop.ping(pod.addresses[0]).with_context(|| format!("to the pod on {}", pod.node))?;
        probe::ping(pod, INNER.into()).with_context(|| format!("from the pod on {}", pod.node))?;
    }
    laptop.ping([192, 168, 1, 11].into()).context("to a node")?;
    laptop.ping(service).context("to a Service")
}

/// Stands in for kube-proxy, which is not here: makes a Service on the nodes where the laptop may enter.
fn stand_in_for_kube_proxy(world: &World) -> Result<IpAddr> {
    let ranges =
        world.plane.kubectl(&["get", "servicecidr", "kubernetes", "-o", "jsonpath={.spec.cidrs[0]}"])?;
    let range: Ipv4Net = ranges.trim().parse()?;
    let service = range.hosts().nth(76).context("a short range")?;
    let behind = pod(world, "home-2").addresses[0];
    for name in ENTRIES {
        node(world, name).host.shell(&format!(
            "nft add table ip stand_in\nnft 'add chain ip stand_in pre {{ type nat hook prerouting priority -100; }}'\n\
             nft add rule ip stand_in pre ip daddr {service} dnat to {behind}"
        ))?;
    }
    Ok(service.into())
}

#[test]
fn a_laptop_reaches_everything_through_one_entry_node_and_is_followed_to_another() {
    let mut topology = topology::three_sites();
    topology.sites[1].nodes.push(Ipv4Addr::new(192, 168, 1, 13));
    let world = outage::mesh_of(&topology);
    let laptop = Laptop::new(&world).unwrap();
    let service = stand_in_for_kube_proxy(&world).unwrap();
    let inner = INNER.to_string();
    let add = |entry: &str| {
        let arguments =
            ["peer", "add", "laptop", "--address", &inner, "--entry-node", "cloud-1", "--entry-node", entry];
        fairlead(&world, &arguments)
    };
    let unknown = add("cloud-9").unwrap_err().to_string();
    assert!(unknown.contains("cloud-9"), "{unknown}");
    let configuration = add("cloud-2").unwrap();
    let key = configuration.lines().find_map(|line| line.strip_prefix("PrivateKey = ")).unwrap();
    let key_file = world.directory().join("laptop.key");
    fs::write(&key_file, key).unwrap();
    assert!(!world.plane.kubectl(&["get", "peers", "-o", "yaml"]).unwrap().contains(key));
    println!("{}", configuration.replace(key, "(hidden)"));

    let from = Instant::now();
    laptop.bring_up(&world, &configuration).unwrap();
    eventually(TIMEOUT, || reaches_all_through_one(&world, &laptop, service)).unwrap();
    println!("all pods, a node and a Service through {}: after {:.1?}", ENTRIES[0], from.elapsed());
    assert_eq!(external(&world, "home-1").unwrap(), json!([]), "only entry nodes have a tunnel");
    assert_eq!(external(&world, "cloud-2").unwrap()[0]["standby"], true);

    stands_for_a_node_of_another_cluster(&world, &laptop, service, &configuration);
    let key_file = key_file.display().to_string();
    is_followed_from_one_to_the_other(&world, &laptop, service, &key_file);
    let terms = ["get", "wirekubepeers", "-o", "jsonpath={.items[*].status.entryTerms.laptop.term}"];
    assert_eq!(world.plane.kubectl(&terms).unwrap().trim(), "2 1", "one write for each change");

    locations_have_gateways(&world);
    eventually(TIMEOUT, || reaches_all_through_one(&world, &laptop, service)).unwrap();
    println!("with gateways: reached all");
    is_followed_from_one_to_the_other(&world, &laptop, service, &key_file);
    what_is_beside_nodes_and_their_pods_of_other_plugins_is_printed(&world);
}

/// The configuration of another machine has what a node leads to: of a location without a tunnel to the entry node, too.
fn what_is_beside_nodes_and_their_pods_of_other_plugins_is_printed(world: &World) {
    let (beside, pods) = ("10.88.0.0/24", ["10.244.7.0/24", "fd00:244:0:7::/64"]);
    let annotation = format!("kilo.squat.ai/allowed-location-ips={beside}");
    world.plane.kubectl(&["annotate", "node", BEHIND_GATEWAYS, &annotation]).unwrap();
    let merge = |object: &[&str], patch: Value| {
        let patch = patch.to_string();
        world.plane.kubectl(&[&["patch"], object, &["--type=merge", "-p", &patch]].concat()).unwrap();
    };
    merge(&["node", BEHIND_GATEWAYS], json!({ "spec": { "podCIDR": pods[0], "podCIDRs": pods } }));
    let add = |name: &str, address: &str| {
        fairlead(world, &["peer", "add", name, "--address", address, "--entry-node", "cloud-1"]).unwrap()
    };
    let is_copied = || {
        let peer = world.published(BEHIND_GATEWAYS)?.to_string();
        let is_there = [beside, pods[0], pods[1]].iter().all(|prefix| peer.contains(prefix));
        ensure!(is_there, "{peer}");
        Ok(())
    };
    eventually(TIMEOUT, is_copied).unwrap();
    let allowed = |configuration: &str| {
        let line = configuration.lines().find_map(|line| line.strip_prefix("AllowedIPs = ")).unwrap();
        line.split(", ").map(str::to_owned).collect::<Vec<_>>()
    };
    let without = allowed(&add("tablet", "10.9.0.2"));
    assert!(without.iter().any(|it| it == beside), "{without:?}");
    assert!(!without.iter().any(|it| pods.contains(&it.as_str())), "not advertised: {without:?}");
    let advertise = json!({ "includeNodeInternalIP": true, "includePodCIDRs": true });
    merge(&["wkmesh", "default"], json!({ "spec": { "autoAllowedIPs": advertise } }));
    let with = allowed(&add("phone", "10.9.0.3"));
    println!("beside a node and advertised: {with:?}");
    assert!([beside, pods[0], pods[1]].iter().all(|it| with.iter().any(|have| have == it)), "{with:?}");
}

/// The machine has what a node of another cluster gets, where the Peer is applied that `--as-peer` prints.
fn stands_for_a_node_of_another_cluster(
    world: &World,
    laptop: &Laptop,
    service: IpAddr,
    configuration: &str,
) {
    let entry = ["node", ENTRIES[0], "--as-peer", "--whole-cluster"];
    let peer = showconf(world, &entry).unwrap();
    // Both sides have to have the preshared key, or none.
    let line = |name: &str| configuration.lines().find(|line| line.starts_with(name)).unwrap();
    let peer = format!("{}\n", peer.trim_end()) + line("PresharedKey = ");
    let whole = format!("[Interface]\n{}\n\n{peer}\n", line("PrivateKey = "));
    laptop.bring_up(world, &whole).unwrap();
    eventually(TIMEOUT, || reaches_all_through_one(world, laptop, service)).unwrap();
    let manifest = showconf(world, &[&entry[..], &["-o", "json"]].concat()).unwrap();
    let manifest: Value = serde_json::from_str(&manifest).unwrap();
    // A section is for systems that lead all of it into the tunnel: it leaves out where the tunnel itself goes.
    let endpoint = format!("{}/32", node(world, ENTRIES[0]).host.address());
    let prefixes = manifest["spec"]["allowedIPs"].as_array().unwrap().iter().map(|it| it.as_str().unwrap());
    let section = peer.lines().find_map(|line| line.strip_prefix("AllowedIPs = ")).unwrap();
    let has = |prefixes: Vec<&str>| prefixes.contains(&endpoint.as_str());
    assert!(has(prefixes.collect()) && !has(section.split(", ").collect()), "{manifest}\n{peer}");
    // The API server of another cluster takes it, under a name that is free here.
    let mut manifest = manifest;
    manifest["metadata"]["name"] = json!("another-cluster");
    manifest["spec"]["publicKey"] = json!(laptop.host.shell("wg genkey | wg pubkey").unwrap().trim());
    world.plane.apply(&manifest.to_string()).unwrap();
    world.plane.kubectl(&["delete", "peer", "another-cluster"]).unwrap();
}

/// The machine takes another entry node, and then the first again.
fn is_followed_from_one_to_the_other(world: &World, laptop: &Laptop, service: IpAddr, key_file: &str) {
    for entry in ["cloud-2", "cloud-1"] {
        let show = ["peer", "show", "laptop", "--through", entry, "--private-key-file", key_file];
        let other = fairlead(world, &show).unwrap();
        let far = pod(world, BEHIND_GATEWAYS).addresses[0];
        laptop.bring_up(world, &other).unwrap();
        let from = Instant::now();
        // It ends with the first answer.
        laptop.host.shell(&format!("ping -n -i 0.2 -w 60 -c 1 {far}")).unwrap();
        let took = from.elapsed();
        println!("through {entry}: the first answer after {took:.1?}");
        // Three seconds are the goal; a busy machine gets some more.
        assert!(took < Duration::from_secs(30), "{took:?}");
        eventually(TIMEOUT, || reaches_all_through_one(world, laptop, service)).unwrap();
    }
}

/// Only gateways have tunnels between locations from now on, and one node is none.
fn locations_have_gateways(world: &World) {
    for node in &world.nodes {
        let annotation = format!("kilo.squat.ai/location={}", node.site);
        world.plane.kubectl(&["annotate", "node", &node.name, &annotation]).unwrap();
    }
    let patch = r#"{"spec": {"topology": {"granularity": "location"}}}"#;
    world.plane.kubectl(&["patch", "wkmesh", "default", "--type=merge", "-p", patch]).unwrap();
    let is_behind = || {
        let status = node(world, BEHIND_GATEWAYS).status()?;
        let peers = status["peers"].as_array().map_or(0, Vec::len);
        ensure!(peers == 2, "{BEHIND_GATEWAYS} has {peers} peers, not the two of its location");
        Ok(())
    };
    eventually(TIMEOUT, is_behind).unwrap();
}
