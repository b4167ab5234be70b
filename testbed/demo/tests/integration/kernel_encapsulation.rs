//! Nodes of one location, whose internal addresses are on different subnets, in VMs with a kernel that has IPIP: packets between their pods take it,
//! and the encrypted tunnel while the network drops it. Nothing is fake but the kubelet. `cargo xtask test demo -- --ignored ipip` runs it.

use std::net::{IpAddr, Ipv6Addr};
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

/// A node in a VM, its addresses inside of the location, and those of its pod, IPv4 first.
struct Machine {
    vm: VmNode,
    internal: [IpAddr; 2],
    pod: [IpAddr; 2],
}

#[test]
#[ignore = "two emulated machines: a minute of both cores: cargo xtask test soak"]
fn pods_reach_each_other_by_ipip_and_by_the_encrypted_tunnel_while_that_is_blocked() {
    let mut world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    let lan = "192.168.7.0/24".parse().unwrap();
    let home = world.lab().nat_site("home", Nat::PortRestricted, lan).unwrap();
    world.apply_mesh_and_pool().unwrap();
    world.start_pods().unwrap();
    let mut machines = ["home-1", "home-2"].map(|name| {
        let mut vm = VmNode::boot(&world, &home, name, "").unwrap();
        let ipv4 = vm.node.host.address();
        let ipv6 = Ipv6Addr::new(0xfd00, 7, 0, 0, 0, 0, 0, ipv4.octets()[3].into());
        // On one subnet, as with `encapsulation: always`.
        vm.shell(&format!("ip address add {ipv6}/64 dev eth0 nodad\nip -6 route add default dev eth0"))
            .unwrap();
        let internal = [IpAddr::from(ipv4), ipv6.into()];
        // Subnets of its own, as another rack has.
        let address = format!("kilo.squat.ai/force-internal-ip={ipv4}/32,{ipv6}/128");
        world.plane.kubectl(&["annotate", "node", name, "kilo.squat.ai/location=lab", &address]).unwrap();
        vm.start(TIMEOUT).unwrap();
        let pod = vm.start_pod(&world, &format!("inside-{name}")).unwrap().try_into().unwrap();
        Machine { vm, internal, pod }
    });
    let [first, second] = &mut machines;
    set_topology(&world, "cross", "never");
    for to in second.pod {
        eventually(TIMEOUT, || takes(first, to, "dev wire_kube")).unwrap();
        eventually(TIMEOUT, || pings(first, to, "")).unwrap();
    }

    let mark = Instant::now();
    set_topology(&world, "cross", "crosssubnet");
    for (from, to) in [(0, 1), (1, 0)] {
        let [ipv4, ipv6] = machines[to].pod;
        eventually(TIMEOUT, || takes(&mut machines[from], ipv4, "dev fairlead_ipip")).unwrap();
        eventually(TIMEOUT, || takes(&mut machines[from], ipv6, "dev fairlead_ip6tnl")).unwrap();
    }
    println!("both use IP tunnels of both families {:.1?} after the change", mark.elapsed());
    let [first, second] = &mut machines;
    it_is_ipip_on_the_wire(first, second);
    it_is_ipv6_in_ipv6_on_the_wire(first, second);
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

/// Checks the route that the kernel takes for packets to an address.
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
    let ([internal, _], [other, _]) = (from.internal, to.internal);
    for word in ["mtu 1480", &format!("remote any local {internal}")] {
        assert!(shown.contains(word), "`{word}` is missing in\n{shown}");
    }
    let ([pod, _], [to, _]) = (from.pod, to.pod);
    let packet = format!("IP {internal} > {other}: IP {pod} > {to}: ICMP echo request");
    is_captured(from, to, "ip proto 4 and greater 118", &packet);
    // The longest that pods send, without the headers of IP and ICMP.
    pings(from, to, "-M do -s 1392").unwrap();
}

/// Protocol 41, on the link for IPv6.
fn it_is_ipv6_in_ipv6_on_the_wire(from: &mut Machine, to: &mut Machine) {
    let shown = from.vm.shell("ip -d link show fairlead_ip6tnl").unwrap();
    let ([_, internal], [_, other]) = (from.internal, to.internal);
    for word in ["mtu 1460", &format!("remote any local {internal}")] {
        assert!(shown.contains(word), "`{word}` is missing in\n{shown}");
    }
    let ([_, pod], [_, to]) = (from.pod, to.pod);
    let packet = format!("IP6 {internal} > {other}: IP6 {pod} > {to}: ICMP6, echo request");
    is_captured(from, to, "ip6 proto 41 and greater 158", &packet);
    pings(from, to, "-M do -s 1372").unwrap();
}

/// Echo requests of a pod to another are such packets on the link of the node. Requests through the tunnel itself are shorter.
fn is_captured(from: &mut Machine, to: IpAddr, filter: &str, packet: &str) {
    let capture = format!(
        "rm -f /tmp/capture; tcpdump -ni eth0 -c 4 -w /tmp/capture '{filter}' >/tmp/tcpdump 2>&1 &\n\
         sleep 2"
    );
    from.vm.shell(&capture).unwrap();
    for _ in 0..4 {
        pings(from, to, "").unwrap();
    }
    let captured = || {
        let text = from.vm.shell("tcpdump -nr /tmp/capture 2>/dev/null")?;
        ensure!(text.contains(packet), "{text}");
        println!("{text}");
        Ok(())
    };
    eventually(TIMEOUT, captured).unwrap();
}

/// Without losing more than it takes to notice.
fn blocked_ipip_is_left_and_comes_back(from: &mut Machine, to: &mut Machine) {
    let ping = format!(
        "ip netns exec inside-{} ping -n -D -i 0.1 {} >{PINGS} 2>&1 &\necho $! >{PINGS}.pid",
        from.vm.node.name, to.pod[0]
    );
    from.vm.shell(&ping).unwrap();
    let mark = Instant::now();
    from.vm.node.host.shell(DROP).unwrap();
    eventually(TIMEOUT, || takes(from, to.pod[0], "dev wire_kube")).unwrap();
    println!("IPIP is left {:.1?} after it was blocked", mark.elapsed());
    let pod = to.pod[0];
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
    eventually(TIMEOUT, || takes(to, from.pod[0], "dev fairlead_ipip")).unwrap();
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
    pings(from, to.pod[0], "").unwrap();
    from.vm.start(TIMEOUT).unwrap();
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(state(from), before);
    let changes =
        from.vm.shell("kill $(cat /tmp/monitor.pid); grep -A1 fairlead_ipip /tmp/monitor || true").unwrap();
    assert!(changes.is_empty(), "nothing is made anew:\n{changes}");

    from.vm.shell("ip link delete fairlead_ipip\nnft delete table inet fairlead_encapsulation").unwrap();
    let pod = to.pod[0];
    eventually(TIMEOUT, || takes(from, pod, "dev fairlead_ipip")).unwrap();
    eventually(TIMEOUT, || from.vm.shell("nft list table inet fairlead_encapsulation").map(drop)).unwrap();
    eventually(TIMEOUT, || takes(to, from.pod[0], "dev fairlead_ipip")).unwrap();
    pings(from, pod, "").unwrap();
}
