//! Path probes of nodes with the kernel's WireGuard, among each other and with a node that has the embedded one. All of
//! them but one are behind port-restricted NATs. Nothing is fake but the kubelet; the kernels with WireGuard are in VMs.
//! One VM has a firewall that lets its probes pass by raw sockets only. `cargo xtask test demo -- --ignored
//! kernel_s_wireguard` runs it.

#![cfg(test)]

use std::net::{IpAddr, Ipv4Addr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fairlead_demo::vm_node::VmNode;
use fairlead_demo::{World, probe, servers, topology};
use serde_json::{Value, json};
use testbed_lab::relay::TOKEN;
use testbed_lab::{Nat, NatSite, Progress, eventually};

/// Only bounds a test that would hang; everything in the VMs is emulated and slow.
const TIMEOUT: Duration = Duration::from_secs(90);
/// Until traffic is back after its path has failed: 3 times what the embedded WireGuard may take on a kernel that is not emulated.
/// Without probes, silence is noticed after 12 s.
const OTHER_PATH: Duration = Duration::from_millis(4500);
/// Output of the ping that shows how long.
const PINGS: &str = "/tmp/pings";
/// The nodes in VMs, and the LANs they are in.
const VMS: [(&str, &str); 2] = [("home", "192.168.7.0/24"), ("farm", "192.168.8.0/24")];
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
#[ignore = "two emulated machines: a minute of both cores: cargo xtask test demo -- --ignored kernel_s_wireguard"]
fn nodes_with_the_kernel_s_wireguard_find_paths_and_leave_those_that_fail() {
    let mut world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    let relay = servers::relay(&world).unwrap();
    let sites =
        VMS.map(|(name, lan)| world.lab().nat_site(name, Nat::PortRestricted, lan.parse().unwrap()).unwrap());
    world.apply_pool().unwrap();
    servers::apply_token(&world, TOKEN).unwrap();
    world.start_pods().unwrap();
    let applied = Instant::now();
    servers::apply_mesh(&world, &json!({ "relay": relay.spec("auto") })).unwrap();
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

    let settled = || {
        // A session that is not used looks for no better path.
        all_reach_each_other(&world, &mut vms)?;
        let missing: Vec<_> = vms.iter_mut().filter_map(|(vm, _)| all_direct_by_probes(vm).err()).collect();
        ensure!(missing.is_empty(), "{missing:#?}");
        Ok(())
    };
    eventually(TIMEOUT, settled).unwrap();
    println!("all paths are direct {:.1?} after the mesh", applied.elapsed());
    for ((vm, _), access) in vms.iter_mut().zip(["nftables", "raw-socket"]) {
        let status = vm.status().unwrap();
        assert_eq!(status["portAccess"], access, "{status:#}");
    }

    for (vm, _) in &vms {
        vm.node.host.shell(&format!("nft -f - <<'END'\n{JUDGE}END")).unwrap();
    }
    a_black_hole_is_left_for_the_relay(&world, &mut vms);
    rules_that_are_flushed_are_mended(&mut vms[0].0);
    vms.iter().for_each(|(vm, _)| judge(vm));
}

fn in_both<T: Send, U: Send>(each: [T; 2], work: impl Fn(T) -> U + Sync) -> [U; 2] {
    let work = &work;
    std::thread::scope(|scope| {
        let working = each.map(|it| scope.spawn(move || work(it)));
        working.map(|thread| thread.join().unwrap())
    })
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
        ensure!(table.contains("udp sport set 51820"), "{table}");
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

/// All probes that left the VM left it from the WireGuard port.
fn judge(vm: &VmNode) {
    let counted = vm.node.host.shell("nft list counters table bridge judge").unwrap();
    let count = |name: &str| -> u64 {
        let (_, rest) = counted.split_once(&format!("{name} {{")).unwrap();
        rest.split_whitespace().nth(1).unwrap().parse().unwrap()
    };
    println!("{}: {} probes from the WireGuard port", vm.node.name, count("from_wireguard"));
    assert!(count("from_wireguard") > 5 && count("from_elsewhere") == 0, "{counted}");
}
