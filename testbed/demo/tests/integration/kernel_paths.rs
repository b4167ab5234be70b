//! Paths of nodes with the kernel's WireGuard, among each other and with nodes that have the embedded one. One VM is behind a
//! symmetric NAT, and reaches by birthday attempts what is behind port-restricted NATs: the other VM, and a node with the embedded
//! WireGuard; a third node has a public address. Nothing is fake but the kubelet; the kernels with WireGuard are in VMs.
//! The second VM has a firewall that lets its probes pass by raw sockets only, for a while. `cargo xtask test demo -- --ignored
//! kernel_s_wireguard` runs it.

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fairlead_demo::vm_node::VmNode;
use fairlead_demo::{World, probe, servers, topology};
use serde_json::{Value, json};
use testbed_lab::relay::TOKEN;
use testbed_lab::{Nat, NatSite, Progress, eventually};

/// Only bounds a test that would hang; everything in the VMs is emulated and slow.
const TIMEOUT: Duration = Duration::from_secs(300);
/// Longest time until traffic is back after its path has failed: 3 times what the embedded WireGuard may take on a kernel that is not emulated.
/// Without probes, silence is noticed after 12 s.
const OTHER_PATH: Duration = Duration::from_millis(4500);
/// Output of the ping that shows how long.
const PINGS: &str = "/tmp/pings";
const RESTART_PINGS: &str = "/tmp/pings-of-restart";
/// The nodes in VMs, their NATs, and the LANs they are in.
const VMS: [(&str, Nat, &str); 2] =
    [("home", Nat::SymmetricRandom, "192.168.7.0/24"), ("farm", Nat::PortRestricted, "192.168.8.0/24")];
/// Nodes behind port-restricted NATs: where the first VM has pinned ports.
const PINNED: [&str; 2] = ["farm", "office"];
/// Knows WireGuard's port alone, and those of the node program at which WireGuard finds the relay. It is behind the rules that
/// join the path socket's port to WireGuard's: raw sockets take their place.
const FARM_FIREWALL: &str = "\
table inet late {
  chain input {
    type filter hook input priority 300;
    ip daddr 127.64.0.0/10 accept
    meta l4proto udp udp dport != 51820 drop
  }
}
";

/// Counts what a VM sends, on the switch before it: path probes from the WireGuard port, and from others.
const JUDGE: &str = "\
table bridge judge {
  counter from_wireguard { }
  counter from_elsewhere { }
  chain forward {
    type filter hook forward priority 0;
    iifname tap0 meta l4proto udp @th,64,32 0xf11ead50 udp sport 51820 counter name from_wireguard
    iifname tap0 meta l4proto udp @th,64,32 0xf11ead50 udp sport != 51820 counter name from_elsewhere
  }
}
";

#[test]
#[ignore = "two emulated machines: a minute of both cores: cargo xtask test soak"]
fn nodes_with_the_kernel_s_wireguard_find_paths_and_leave_those_that_fail() {
    let mut world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    let relay = servers::relay(&world).unwrap();
    let sites = VMS.map(|(name, nat, lan)| world.lab().nat_site(name, nat, lan.parse().unwrap()).unwrap());
    let servers = ["stun-1", "stun-2"].map(|name| servers::stun_server(&world, name).unwrap());
    let stun = servers.each_ref().map(|(host, _)| format!("stun:{}", host.address()));
    world.apply_pool().unwrap();
    servers::apply_token(&world, TOKEN).unwrap();
    world.start_pods().unwrap();
    let applied = Instant::now();
    servers::apply_mesh(&world, &json!({ "relay": relay.spec("auto"), "stunServers": stun })).unwrap();
    let mut vms = in_both(sites.each_ref(), |site: &NatSite| {
        let mut vm = VmNode::boot(&world, site, &format!("{}-vm", site.name()), "").unwrap();
        if site.name() == "farm" {
            vm.shell(&format!("nft -f - <<'END'\n{FARM_FIREWALL}END")).unwrap();
        }
        vm.start(TIMEOUT).unwrap();
        let addresses = vm.start_pod(&world, &pod(&vm)).unwrap();
        (vm, addresses[0])
    });
    println!("both VMs are nodes {:.1?} after the mesh", applied.elapsed());

    // A session that is not used looks for no better path.
    send_all_the_time(&world, &mut vms);
    let settled = || {
        all_reach_each_other(&world, &mut vms)?;
        let missing: Vec<_> = vms.iter_mut().filter_map(|(vm, _)| all_direct_by_probes(vm).err()).collect();
        ensure!(missing.is_empty(), "{missing:#?}");
        Ok(())
    };
    eventually(TIMEOUT, settled).unwrap();
    println!("all paths are direct {:.1?} after the mesh", applied.elapsed());
    for (vm, _) in &mut vms {
        for peer in peers(vm).unwrap() {
            println!(
                "{} to {}: {} {} s",
                vm.node.name, peer["name"], peer["endpoint"], peer["roundTripSeconds"]
            );
        }
    }
    let [(home, _), _] = &mut vms;
    let pins = pinned_endpoints(home).unwrap();
    assert_eq!(pins.len(), PINNED.len(), "{pins:?}");
    for ((vm, _), access) in vms.iter_mut().zip(["nftables", "raw-socket"]) {
        let status = vm.status().unwrap();
        assert_eq!(status["portAccess"], access, "{status:#}");
    }

    for (vm, _) in &vms {
        vm.node.host.shell(&format!("nft -f - <<'END'\n{JUDGE}END")).unwrap();
    }
    a_restart_keeps_the_pinned_ports(&mut vms, &pins);
    a_black_hole_is_left_for_the_relay(&world, &mut vms);
    rules_that_are_flushed_are_mended(&mut vms[0].0);
    vms.iter().for_each(|(vm, _)| judge(vm));
}

/// The endpoints to which a port is pinned, with it.
fn pinned_endpoints(vm: &mut VmNode) -> Result<Vec<String>> {
    let table = vm.shell("nft -j list map inet fairlead_path_socket pinned_ports")?;
    let table: Value = serde_json::from_str(&table)?;
    let maps = table["nftables"].as_array().context("no list")?.iter();
    let elements = maps.filter_map(|it| it["map"]["elem"].as_array()).flatten();
    Ok(elements.map(ToString::to_string).collect())
}

/// The kernel goes on without the node program, and the next one changes neither ports nor endpoints.
fn a_restart_keeps_the_pinned_ports(vms: &mut [(VmNode, IpAddr); 2], pins: &[String]) {
    let [(home, _), (_, in_farm)] = vms;
    let endpoints = |vm: &mut VmNode| -> Vec<String> {
        peers(vm).unwrap().iter().map(|peer| peer["endpoint"].to_string()).collect()
    };
    let before = endpoints(home);
    let inside = pod(home);
    home.shell(&format!(
        "ip netns exec {inside} ping -n -i 0.1 {in_farm} >{RESTART_PINGS} 2>&1 &\necho $! >{PINGS}.pid"
    ))
    .unwrap();
    home.kill().unwrap();
    let took = home.start(TIMEOUT).unwrap();
    let restarted = Instant::now();
    eventually(TIMEOUT, || all_direct_by_probes(home)).unwrap();
    println!("back {took:.1?} after the restart, probes answered {:.1?} later", restarted.elapsed());
    assert_eq!((&endpoints(home), &pinned_endpoints(home).unwrap()[..]), (&before, pins));
    home.shell(&format!("kill -INT $(cat {PINGS}.pid)\nwhile kill -0 $(cat {PINGS}.pid); do sleep 0.1; done 2>/dev/null || true")).unwrap();
    let summary = home.shell(&format!("grep transmitted {RESTART_PINGS}")).unwrap();
    println!("meanwhile: {}", summary.trim());
    let lost = summary.split(", ").find_map(|part| part.split_once("% packet loss")).unwrap().0;
    assert_eq!(lost, "0", "{summary}");
}

fn in_both<T: Send, U: Send>(each: [T; 2], work: impl Fn(T) -> U + Sync) -> [U; 2] {
    let work = &work;
    std::thread::scope(|scope| {
        let working = each.map(|it| scope.spawn(move || work(it)));
        working.map(|thread| thread.join().unwrap())
    })
}

/// Starts pings from each pod in a VM to all others, until the VM ends.
fn send_all_the_time(world: &World, vms: &mut [(VmNode, IpAddr); 2]) {
    let inside = vms.each_ref().map(|(_, address)| *address);
    for (vm, own) in vms {
        let pod = pod(vm);
        for to in world.pods.iter().map(|pod| pod.addresses[0]).chain(inside).filter(|to| to != own) {
            vm.shell(&format!("ip netns exec {pod} ping -n -i 0.2 {to} >/dev/null 2>&1 &")).unwrap();
        }
    }
}

/// Name of the pod in a VM.
fn pod(vm: &VmNode) -> String {
    format!("in-{}", vm.node.name)
}

fn ping(vm: &mut VmNode, to: IpAddr) -> Result<String> {
    let pod = pod(vm);
    vm.shell(&format!("ip netns exec {pod} ping -n -c 1 -W 1 {to}"))
}

/// Pods in the VMs among each other, and with all others.
fn all_reach_each_other(world: &World, vms: &mut [(VmNode, IpAddr); 2]) -> Result<()> {
    let [(home, in_home), (_, in_farm)] = vms;
    ping(home, *in_farm)?;
    world.pods.iter().try_for_each(|pod| {
        [*in_home, *in_farm].iter().try_for_each(|inside| probe::ping(pod, *inside).map(drop))
    })
}

fn peers(vm: &mut VmNode) -> Result<Vec<Value>> {
    let status = vm.status()?;
    ensure!(status["wireguard"] == "kernel" && status["problems"] == json!([]), "{status:#}");
    Ok(status["peers"].as_array().context("no peers")?.clone())
}

fn is_relayed(peer: &Value) -> bool {
    peer["endpoint"].as_str().is_some_and(|endpoint| endpoint.contains("://"))
}

/// Each peer answers probes on a direct path, which the kernel uses.
fn all_direct_by_probes(vm: &mut VmNode) -> Result<()> {
    let peers = peers(vm).with_context(|| vm.node.name.clone())?;
    let is_direct = |peer: &Value| {
        peer["state"] == "up" && !is_relayed(peer) && peer["roundTripSeconds"].as_f64().is_some()
    };
    ensure!(peers.len() == 3 && peers.iter().all(is_direct), "{peers:#?}");
    Ok(())
}

fn rules_that_are_flushed_are_mended(vm: &mut VmNode) {
    vm.shell("nft flush ruleset").unwrap();
    let flushed = Instant::now();
    let mended = || {
        let table = vm.shell("nft list table inet fairlead_path_socket")?;
        ensure!(table.contains("udp sport set 51820") && table.contains("@pinned_ports"), "{table}");
        Ok(())
    };
    eventually(TIMEOUT, mended).unwrap();
    println!("the table is back {:.1?} after nftables was flushed", flushed.elapsed());
}

/// Nothing passes between both any more, but by way of the relay.
fn a_black_hole_is_left_for_the_relay(world: &World, vms: &mut [(VmNode, IpAddr); 2]) {
    let [(home, _), (farm, in_farm)] = vms;
    let ends: [Ipv4Addr; 2] = [home.node.public_address(), farm.node.public_address()];
    let inside = pod(home);
    home.shell(&format!(
        "ip netns exec {inside} ping -n -D -i 0.05 {in_farm} >{PINGS} 2>&1 &\necho $! >{PINGS}.pid"
    ))
    .unwrap();
    // Longer than a session is idle, and until what flows is observed.
    eventually(TIMEOUT, || answers(home, 60)).unwrap();
    let [a, b] = ends;
    let drop = format!(
        "nft -f - <<'END'\ntable inet hole {{ chain forward {{ type filter hook forward priority 0; \
         ip saddr {{ {a}, {b} }} ip daddr {{ {a}, {b} }} drop; }}; }}\nEND"
    );
    world.lab().internet().shell(&drop).unwrap();
    let lost = Instant::now();
    let relayed = || {
        let peers = peers(home)?;
        let farm = peers.iter().find(|peer| peer["name"] == "farm-vm").context("no such peer")?;
        ensure!(is_relayed(farm), "{farm:#}");
        Ok(())
    };
    eventually(TIMEOUT, relayed).unwrap();
    println!("the relay is the endpoint {:.1?} after the path became a black hole", lost.elapsed());
    let before = answers(home, 0).unwrap().len();
    let times = eventually(TIMEOUT, || answers(home, before + 20)).unwrap();
    home.shell(&format!("kill -INT $(cat {PINGS}.pid)")).unwrap();
    let back = times.windows(2).map(|pair| pair[1] - pair[0]).fold(0.0, f64::max);
    println!("traffic is back {back:.2} s after the last answer on the direct path");
    let left = || {
        let pins = pinned_endpoints(home)?;
        ensure!(!pins.iter().any(|pin| pin.contains(&b.to_string())), "{pins:?}");
        Ok(())
    };
    eventually(TIMEOUT, left).unwrap();
    assert!(back <= OTHER_PATH.as_secs_f64(), "back after {back} s");
}

/// When the pings were answered, in seconds of the VM's clock; at least so many.
fn answers(vm: &mut VmNode, at_least: usize) -> Result<Vec<f64>> {
    let output = vm.shell(&format!("cat {PINGS}"))?;
    let time = |line: &str| line.strip_prefix('[')?.split_once(']')?.0.parse().ok();
    let times: Vec<f64> = output.lines().filter(|line| line.contains("icmp_seq=")).filter_map(time).collect();
    ensure!(times.len() >= at_least, "{} answers, not {at_least}: {output}", times.len());
    Ok(times)
}

/// All probes that left the VM left it from the WireGuard port; behind the symmetric NAT, also from pinned ports.
fn judge(vm: &VmNode) {
    let counted = vm.node.host.shell("nft list counters table bridge judge").unwrap();
    let count = |name: &str| -> u64 {
        let (_, rest) = counted.split_once(&format!("{name} {{")).unwrap();
        rest.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    println!("{}: {} probes from the WireGuard port", vm.node.name, count("from_wireguard"));
    let is_pinned = vm.node.name.starts_with("home");
    assert!(count("from_wireguard") > 5 && (count("from_elsewhere") > 0) == is_pinned, "{counted}");
}
