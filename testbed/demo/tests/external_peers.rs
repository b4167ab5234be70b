//! A laptop outside of the cluster, behind a NAT, that is a Peer of Kilo: wireguard-go, an independent WireGuard, with the configuration
//! that `fairlead showconf` prints.

#![cfg(test)]

mod outage;

use std::fs::{self, File};
use std::net::{IpAddr, Ipv4Addr};
use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use fairlead_demo::node::executable;
use fairlead_demo::{World, probe, topology};
use ipnet::Ipv4Net;
use nix::fcntl::{Flock, FlockArg};
use outage::{TIMEOUT, loses_nothing, node, pod, udp};
use serde_json::{Value, json};
use testbed_lab::{Host, Nat, NatSite, Process, Progress, SiteOptions, eventually};

const MODULE: &str = "golang.zx2c4.com/wireguard";
/// The version that the tests of `crates/tunnel` use.
const VERSION: &str = "v0.0.0-20260522210424-ecfc5a8d5446";
const INTERFACE: &str = "wg0";
/// The laptop inside of the mesh.
const INNER: Ipv4Addr = Ipv4Addr::new(10, 9, 0, 1);
/// Nodes whose pods the laptop reaches.
const NODES: [&str; 2] = ["rack-1", "rack-2"];

/// The program, built once per machine into the user's cache.
fn wireguard_go() -> Result<PathBuf> {
    let cache = match std::env::var_os("XDG_CACHE_HOME") {
        Some(cache) => PathBuf::from(cache),
        None => {
            PathBuf::from(std::env::var_os("HOME").context("HOME says where the cache is")?).join(".cache")
        }
    };
    let directory = cache.join("fairlead").join(format!("wireguard-go-{VERSION}"));
    fs::create_dir_all(&directory)?;
    let lock = File::create(directory.join("lock"))?;
    let _lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, errno)| errno)?;
    let program = directory.join("wireguard");
    if !program.exists() {
        let mut go = Command::new("go");
        let built = go.args(["install", &format!("{MODULE}@{VERSION}")]).env("GOBIN", &directory).output()?;
        ensure!(built.status.success(), "building wireguard-go: {}", String::from_utf8_lossy(&built.stderr));
    }
    Ok(program)
}

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

    fn ping(&self, to: IpAddr) -> Result<()> {
        self.host.shell(&format!("ping -n -c 1 -W 1 {to}")).map(drop)
    }
}

fn showconf(world: &World, arguments: &[&str]) -> Result<String> {
    let mut command = world.plane_host().command(executable("fairlead")?)?;
    command.arg("showconf").args(arguments).arg("--kubeconfig").arg(world.plane.kubeconfig());
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

/// What a node says of its peers outside of the cluster.
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
