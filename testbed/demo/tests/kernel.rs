//! A node with the kernel's WireGuard among nodes with the embedded one: both speak to each other, and the death of
//! the node program is nothing to the kernel.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "helpers of tests may panic as tests do"
)]

use std::net::IpAddr;
use std::time::{Duration, Instant};

use fairlead_demo::cni::Pod;
use fairlead_demo::probe::{self, Servers};
use fairlead_demo::progress::Progress;
use fairlead_demo::vm_node::VmNode;
use fairlead_demo::{World, topology};
use nix::sys::signal::Signal;
use serde_json::Value;
use testbed_lab::{Nat, Process};

/// Only bounds a test that would hang; everything in the VM is emulated and slow.
const PATIENCE: Duration = Duration::from_secs(60);
/// Name of the pod in the VM, and of its network namespace.
const POD: &str = "inside";
/// Seconds between two pings.
const PACE: f64 = 0.05;
/// Answers that may be under way when a ping is ended.
const UNDER_WAY: u64 = 20;

/// The node in the VM is at home, behind a port-restricted NAT; the other is in the cloud and has the embedded
/// WireGuard, as this machine's kernel may have none.
#[test]
fn a_killed_node_program_loses_nothing_where_the_kernel_has_wireguard() {
    let mut world = World::start(&topology::one_cloud(), &Progress::default()).unwrap();
    let home = world.lab().nat_site("home", Nat::PortRestricted, "192.168.7.0/24".parse().unwrap()).unwrap();
    let start = Instant::now();
    let mut vm = VmNode::boot(&world, &home, "home-vm").unwrap();
    println!("the VM was ready after {:.1?}", start.elapsed());
    world.apply_mesh_and_pool().unwrap();
    world.start_pods().unwrap();
    let started = vm.start(PATIENCE).unwrap();
    println!("the node program was up {started:.1?} after its start");
    let inside = vm.start_pod(&world, POD).unwrap();
    assert!(matches!(inside[..], [IpAddr::V4(_), IpAddr::V6(_)]), "{inside:?}");
    let outside = world.pods[0].clone();

    kernel_and_embedded_understand_each_other(&world, &mut vm, &outside, &inside);
    the_kernel_shows_what_was_asked_for(&world, &mut vm);
    nothing_is_lost_while_the_node_program_is_away(&mut vm, &outside, &inside);
}

fn until<T>(what: &str, mut condition: impl FnMut() -> anyhow::Result<T>) -> T {
    let deadline = Instant::now() + PATIENCE;
    loop {
        match condition() {
            Ok(value) => return value,
            Err(error) => assert!(Instant::now() < deadline, "{what}: {error:#}"),
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// TCP and ICMP, IPv4 and IPv6, in both directions.
fn kernel_and_embedded_understand_each_other(
    world: &World,
    vm: &mut VmNode,
    outside: &Pod,
    inside: &[IpAddr],
) {
    let start = Instant::now();
    vm.shell(&format!("ip netns exec {POD} busybox nc -ll -p {} -e cat >/dev/null 2>&1 &", probe::PORT))
        .unwrap();
    let servers = Servers::start(std::slice::from_ref(outside)).unwrap();
    for address in inside {
        let rtt = until("ping to the VM", || probe::ping(outside, *address));
        println!("{} -> {POD} ({address}): {rtt} ms", outside.name);
        // Much more than fits into a packet or a window.
        until("TCP to the VM", || probe::tcp(outside, *address, 200_000));
    }
    for address in &outside.addresses {
        until("ping from the VM", || vm.shell(&format!("ip netns exec {POD} ping -n -c 1 -W 2 {address}")));
        let port = probe::PORT;
        let echo = format!(
            "seq 20000 >/tmp/sent\nip netns exec {POD} busybox nc -w 5 {address} {port} </tmp/sent >/tmp/received\n\
             cmp /tmp/sent /tmp/received"
        );
        until("TCP from the VM", || vm.shell(&echo));
    }
    drop(servers);
    println!("all reached each other after {:.1?}", start.elapsed());

    let (own, other) = (vm.status().unwrap(), world.nodes[0].status().unwrap());
    assert_eq!((&own["wireguard"], &other["wireguard"]), (&"kernel".into(), &"embedded".into()));
    for (status, peer) in [(&own, "cloud-1"), (&other, "home-vm")] {
        let peers = status["peers"].as_array().unwrap();
        assert!(matches!(&peers[..], [only] if only["name"] == peer && only["state"] == "up"), "{status:#}");
        assert_eq!(status["problems"], Value::Array(Vec::new()));
    }
}

/// The same as the systems that Fairlead takes the place of leave behind, seen by the kernel's own tools.
fn the_kernel_shows_what_was_asked_for(world: &World, vm: &mut VmNode) {
    let node = &world.nodes[0];
    let status = node.status().unwrap();
    let key = status["publicKey"].as_str().unwrap();
    let shown = vm.shell("wg show wire_kube").unwrap();
    println!("{shown}");
    let endpoint = format!("endpoint: {}:51820", node.public_address());
    let lines =
        ["listening port: 51820", "fwmark: 0x20", &endpoint, "persistent keepalive: every 25 seconds"];
    for line in lines.iter().chain(&[format!("peer: {key}").as_str(), "latest handshake: "]) {
        assert!(shown.contains(line), "`wg show` has no `{line}`");
    }
    for prefix in status["prefixes"].as_array().unwrap() {
        let prefix = prefix.as_str().unwrap();
        assert!(shown.contains(prefix), "`wg show` has no {prefix}");
    }
    let table = vm.shell("nft list table inet talos_kubespan").unwrap();
    println!("{table}");
    for word in [
        "set kubespan_targets_ipv4",
        "set kubespan_targets_ipv6",
        "chain kubespan_prerouting",
        "chain kubespan_outgoing",
    ] {
        assert!(table.contains(word), "`nft list table` has no `{word}`");
    }
    for family in ["-4", "-6"] {
        let rules = vm.shell(&format!("ip {family} rule")).unwrap();
        println!("{rules}");
        assert!(rules.contains("32500:\tfrom all fwmark 0x40/0x60 lookup 180"), "{rules}");
        let routes = vm.shell(&format!("ip {family} route show table 180")).unwrap();
        println!("{routes}");
        assert!(routes.starts_with("default dev wire_kube"), "{routes}");
    }
}

/// What must be the same, or have grown, when another node program takes over.
#[derive(Debug, PartialEq, Eq)]
struct Device {
    index: String,
    handshake: u64,
    received: u64,
    sent: u64,
}

fn device(vm: &mut VmNode) -> Device {
    let index = vm.shell("cat /sys/class/net/wire_kube/ifindex").unwrap();
    let dump = vm.shell("wg show wire_kube dump").unwrap();
    let peer: Vec<&str> = dump.lines().nth(1).expect(&dump).split('\t').collect();
    let number = |field: usize| peer[field].parse().unwrap();
    Device { index, handshake: number(4), received: number(5), sent: number(6) }
}

fn nothing_is_lost_while_the_node_program_is_away(vm: &mut VmNode, outside: &Pod, inside: &[IpAddr]) {
    let address = outside.addresses[0];
    let background = |number: usize, address: &IpAddr| {
        format!(
            "ip netns exec {POD} ping -n -D -i {PACE} {address} >/tmp/ping-{number} 2>&1 &\necho $! >>/tmp/pings\n"
        )
    };
    let pings: String =
        outside.addresses.iter().enumerate().map(|(number, address)| background(number, address)).collect();
    vm.shell(&pings).unwrap();
    let mut inward: Vec<(IpAddr, Process)> = inside
        .iter()
        .map(|to| {
            let mut command = outside.namespace.command("ping").unwrap();
            command.args(["-n", "-D", "-i", &PACE.to_string(), &to.to_string()]);
            let log = vm.node.directory.join(format!("ping-{}", if to.is_ipv4() { 4 } else { 6 }));
            (*to, outside.namespace.spawn(&mut command, log).unwrap())
        })
        .collect();
    std::thread::sleep(Duration::from_secs(1));

    let before = device(vm);
    vm.kill().unwrap();
    let dead = Instant::now();
    std::thread::sleep(Duration::from_secs(3));
    let away = device(vm);
    let back = vm.start(PATIENCE).unwrap();
    println!("dead for {:.1?}, up {back:.1?} after its start", dead.elapsed() - back);
    let settled = until("the peer is up again", || {
        let status = vm.status()?;
        anyhow::ensure!(status["peers"][0]["state"] == "up", "{status:#}");
        Ok(status)
    });
    // It looks around again and again, and has nothing to do.
    std::thread::sleep(Duration::from_secs(3));
    let (after, later) = (device(vm), vm.status().unwrap());
    println!("before {before:?}\naway   {away:?}\nafter  {after:?}");
    println!(
        "netlink changes of the new program: {}, later {}",
        settled["netlinkChanges"], later["netlinkChanges"]
    );
    println!("{later:#}");
    println!("{}", vm.log().unwrap());

    let _ = address;
    vm.shell("kill -INT $(cat /tmp/pings)").unwrap();
    for (to, process) in &mut inward {
        process.signal(Signal::SIGINT).unwrap();
        process.wait(PATIENCE).unwrap();
        loses_nothing(&format!("{} -> {to}", outside.name), &process.output().unwrap());
    }
    for (number, to) in outside.addresses.iter().enumerate() {
        let output = until("the end of ping", || {
            let output = vm.shell(&format!("cat /tmp/ping-{number}"))?;
            anyhow::ensure!(output.contains("packets transmitted"), "{output}");
            Ok(output)
        });
        loses_nothing(&format!("{POD} -> {to}"), &output);
    }
    assert_eq!(after.index, before.index, "the device was adopted, not made anew");
    assert!(after.handshake >= before.handshake, "the session was lost");
    assert!(before.received < away.received && away.received < after.received);
    assert!(before.sent < away.sent && away.sent < after.sent);
}

/// Every ping was answered, but for those that may have been under way when it was ended.
fn loses_nothing(what: &str, output: &str) {
    let mut answers: Vec<(u64, f64)> = output.lines().filter_map(answer).collect();
    answers.sort_unstable_by_key(|(number, _)| *number);
    answers.dedup_by_key(|(number, _)| *number);
    let transmitted: u64 = output
        .lines()
        .find_map(|line| line.split_once(" packets transmitted")?.0.parse().ok())
        .unwrap_or_else(|| panic!("{what}: {output}"));
    let last = answers.last().map_or(0, |(number, _)| *number);
    let lost = last - answers.len() as u64;
    let mut times: Vec<f64> = answers.iter().map(|(_, at)| *at).collect();
    times.sort_unstable_by(f64::total_cmp);
    let gap = times.windows(2).map(|pair| pair[1] - pair[0]).fold(0.0, f64::max);
    println!(
        "{what}: {transmitted} sent, {} answered, {lost} lost, {} under way at the end, longest gap {:.0} ms",
        answers.len(),
        transmitted - last,
        gap * 1000.0
    );
    assert_eq!(lost, 0, "{what}: {output}");
    assert!(last > 100 && transmitted - last <= UNDER_WAY, "{what}: {output}");
}

/// Sequence number, and when it was answered in seconds of the clock.
fn answer(line: &str) -> Option<(u64, f64)> {
    let (at, rest) = line.strip_prefix('[')?.split_once(']')?;
    let number = rest.split_once("icmp_seq=")?.1.split(' ').next()?;
    rest.contains("time=").then_some((number.parse().ok()?, at.parse().ok()?))
}
