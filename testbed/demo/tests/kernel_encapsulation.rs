//! Nodes of one location, whose internal addresses are on different subnets, in VMs with a kernel that has IPIP: packets between their pods take it,
//! and the encrypted tunnel while the network drops it. Nothing is fake but the kubelet. `cargo xtask test demo -- --ignored ipip` runs it.

#![cfg(test)]

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use fairlead_demo::vm_node::VmNode;
use fairlead_demo::{World, topology};
use testbed_lab::{Nat, Progress, eventually};

/// Only bounds a test that would hang; everything in the VMs is emulated and slow.
const TIMEOUT: Duration = Duration::from_secs(120);
const PINGS: &str = "/tmp/pings";
/// On the switch between a VM and its LAN.
const DROP: &str = "nft add table bridge judge\n\
    nft 'add chain bridge judge forward { type filter hook forward priority 0; }'\n\
    nft add rule bridge judge forward ip protocol 4 drop";

/// A node in a VM, its address inside of the location, and that of its pod.
struct Machine {
    vm: VmNode,
    internal: IpAddr,
    pod: IpAddr,
}

#[test]
#[ignore = "two emulated machines: a minute of both cores: cargo xtask test demo -- --ignored ipip"]
fn pods_reach_each_other_by_ipip_and_by_the_encrypted_tunnel_while_that_is_blocked() {
    let mut world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    let lan = "192.168.7.0/24".parse().unwrap();
    let home = world.lab().nat_site("home", Nat::PortRestricted, lan).unwrap();
    world.apply_mesh_and_pool().unwrap();
    world.start_pods().unwrap();
    let mut machines = ["home-1", "home-2"].map(|name| {
        let mut vm = VmNode::boot(&world, &home, name, "").unwrap();
        let internal = vm.node.host.address().into();
        // A subnet of its own, as another rack has.
        let address = format!("kilo.squat.ai/force-internal-ip={internal}/32");
        world.plane.kubectl(&["annotate", "node", name, "kilo.squat.ai/location=lab", &address]).unwrap();
        vm.start(TIMEOUT).unwrap();
        let pod = vm.start_pod(&world, &format!("inside-{name}")).unwrap()[0];
        Machine { vm, internal, pod }
    });
    let [first, second] = &mut machines;
    set_topology(&world, "cross", "never");
    eventually(TIMEOUT, || takes(first, second.pod, "dev wire_kube")).unwrap();
    eventually(TIMEOUT, || pings(first, second.pod, "")).unwrap();

    let mark = Instant::now();
    set_topology(&world, "cross", "crosssubnet");
    for (from, to) in [(0, 1), (1, 0)] {
        let to = machines[to].pod;
        eventually(TIMEOUT, || takes(&mut machines[from], to, "dev fairlead_ipip")).unwrap();
    }
    println!("both use IPIP {:.1?} after the change", mark.elapsed());
    let [first, second] = &mut machines;
    it_is_ipip_on_the_wire(first, second);
    blocked_ipip_is_left_and_comes_back(first, second);
    a_restart_changes_nothing_and_what_is_deleted_comes_back(first, second);
    world.plane.kubectl(&["delete", "wkmesh", "default"]).unwrap();
    let is_gone = || {
        let left = first.vm.shell("ip -o link; nft list tables")?;
        ensure!(!left.contains("fairlead_ipip") && !left.contains("fairlead_encapsulation"), "{left}");
        Ok(())
    };
    eventually(TIMEOUT, is_gone).unwrap();
}

fn set_topology(world: &World, granularity: &str, encapsulation: &str) {
    let topology = format!(r#"{{"granularity": "{granularity}", "encapsulation": "{encapsulation}"}}"#);
    let patch = format!(r#"{{"spec": {{"topology": {topology}}}}}"#);
    world.plane.kubectl(&["patch", "wkmesh", "default", "--type=merge", "-p", &patch]).unwrap();
}

/// How packets to an address leave, as the kernel says.
fn takes(from: &mut Machine, to: IpAddr, way: &str) -> Result<()> {
    let found = from.vm.shell(&format!("ip route get {to} mark 0x40"))?;
    ensure!(found.contains(way), "{found}");
    Ok(())
}

fn pings(from: &mut Machine, to: IpAddr, more: &str) -> Result<()> {
    let name = &from.vm.node.name;
    let ping = format!("ip netns exec inside-{name} ping -n -c 1 -W 2 {more} {to}");
    from.vm.shell(&ping).map(drop)
}

fn it_is_ipip_on_the_wire(from: &mut Machine, to: &mut Machine) {
    let shown = from.vm.shell("ip -d link show fairlead_ipip").unwrap();
    for word in ["mtu 1480", &format!("remote any local {}", from.internal)] {
        assert!(shown.contains(word), "`{word}` is missing in\n{shown}");
    }
    from.vm
        .shell("tcpdump -ni eth0 -c 4 -w /tmp/capture 'proto 4 and greater 80' >/tmp/tcpdump 2>&1 &\nsleep 2")
        .unwrap();
    for _ in 0..4 {
        pings(from, to.pod, "").unwrap();
    }
    let captured = || {
        let text = from.vm.shell("tcpdump -nr /tmp/capture 2>/dev/null")?;
        let outer = format!(
            "IP {} > {}: IP {} > {}: ICMP echo request",
            from.internal, to.internal, from.pod, to.pod
        );
        ensure!(text.contains(&outer), "{text}");
        println!("{text}");
        Ok(())
    };
    eventually(TIMEOUT, captured).unwrap();
    // The longest that pods send, without the headers of IP and ICMP.
    pings(from, to.pod, "-M do -s 1392").unwrap();
}

/// Without losing more than it takes to notice.
fn blocked_ipip_is_left_and_comes_back(from: &mut Machine, to: &mut Machine) {
    let ping = format!(
        "ip netns exec inside-{} ping -n -D -i 0.1 {} >{PINGS} 2>&1 &\necho $! >{PINGS}.pid",
        from.vm.node.name, to.pod
    );
    from.vm.shell(&ping).unwrap();
    let mark = Instant::now();
    from.vm.node.host.shell(DROP).unwrap();
    eventually(TIMEOUT, || takes(from, to.pod, "dev wire_kube")).unwrap();
    println!("IPIP is left {:.1?} after it was blocked", mark.elapsed());
    let pod = to.pod;
    eventually(TIMEOUT, || pings(from, pod, "")).unwrap();
    let says_so = || {
        let problems = from.vm.status()?["problems"].to_string();
        ensure!(problems.contains("does not answer ICMP echo requests in an IP tunnel"), "{problems}");
        Ok(())
    };
    eventually(TIMEOUT, says_so).unwrap();
    from.vm.node.host.shell("nft delete table bridge judge").unwrap();
    let mark = Instant::now();
    eventually(TIMEOUT, || takes(from, pod, "dev fairlead_ipip")).unwrap();
    eventually(TIMEOUT, || takes(to, from.pod, "dev fairlead_ipip")).unwrap();
    println!("IPIP is back {:.1?} after it passes", mark.elapsed());
    from.vm.shell(&format!("kill -INT $(cat {PINGS}.pid)\nsleep 1")).unwrap();
    println!("{}", from.vm.shell(&format!("tail -n 2 {PINGS}")).unwrap());
    let no_problem = || {
        let problems = from.vm.status()?["problems"].to_string();
        ensure!(problems == "[]", "{problems}");
        Ok(())
    };
    eventually(TIMEOUT, no_problem).unwrap();
}

fn a_restart_changes_nothing_and_what_is_deleted_comes_back(from: &mut Machine, to: &mut Machine) {
    let state = |machine: &mut Machine| {
        machine
            .vm
            .shell(
                "ip -o link show fairlead_ipip | cut -d: -f1; ip route show table 180 | grep fairlead_ipip",
            )
            .unwrap()
    };
    let before = state(from);
    from.vm.shell("ip -t monitor route link >/tmp/monitor 2>&1 &\necho $! >/tmp/monitor.pid").unwrap();
    from.vm.kill().unwrap();
    pings(from, to.pod, "").unwrap();
    from.vm.start(TIMEOUT).unwrap();
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(state(from), before);
    let changes =
        from.vm.shell("kill $(cat /tmp/monitor.pid); grep -A1 fairlead_ipip /tmp/monitor || true").unwrap();
    assert!(changes.is_empty(), "nothing is made anew:\n{changes}");

    from.vm.shell("ip link delete fairlead_ipip\nnft delete table inet fairlead_encapsulation").unwrap();
    let pod = to.pod;
    eventually(TIMEOUT, || takes(from, pod, "dev fairlead_ipip")).unwrap();
    eventually(TIMEOUT, || from.vm.shell("nft list table inet fairlead_encapsulation").map(drop)).unwrap();
    eventually(TIMEOUT, || takes(to, from.pod, "dev fairlead_ipip")).unwrap();
    pings(from, pod, "").unwrap();
}
