//! A node with the kernel's WireGuard among nodes with the embedded one: they understand each other, and the death of
//! the node program is nothing to the kernel. And a node whose kernel has no IPv6.

mod change_over;

use std::net::IpAddr;
use std::time::{Duration, Instant};

use fairlead_demo::cni::Pod;
use fairlead_demo::probe::{self, Servers};
use fairlead_demo::vm_node::VmNode;
use fairlead_demo::{World, topology};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use testbed_lab::Progress;
use testbed_lab::{Nat, Process};

/// Only bounds a test that would hang; everything in the VM is emulated and slow.
const TIMEOUT: Duration = Duration::from_secs(90);
/// Name of the pod in the VM, and of its network namespace.
const POD: &str = "inside";
/// Options of every ping: no names, times of answers, 20 a second.
const PING: &str = "-n -D -i 0.05";
/// Number of the last pings that may be under way when they are ended: a second of them.
const UNDER_WAY: u64 = 20;

/// The node in the VM is at home, behind a port-restricted NAT. The others, in the cloud and in an office that has such
/// a NAT too, have the embedded WireGuard: this machine's kernel need not have one.
#[test]
fn a_killed_node_program_loses_nothing_where_the_kernel_has_wireguard() {
    let mut world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    let home = world.lab().nat_site("home", Nat::PortRestricted, "192.168.7.0/24".parse().unwrap()).unwrap();
    let start = Instant::now();
    let mut vm = VmNode::boot(&world, &home, "home-vm", "").unwrap();
    println!("the VM was ready {:.1?} after its start", start.elapsed());
    world.apply_mesh_and_pool().unwrap();
    world.start_pods().unwrap();
    let start = vm.start(TIMEOUT).unwrap();
    println!("the node program in the VM was up {start:.1?} after its start");
    let inside = vm.start_pod(&world, POD).unwrap();
    assert!(matches!(inside[..], [IpAddr::V4(_), IpAddr::V6(_)]), "{inside:?}");

    kernel_and_embedded_understand_each_other(&world, &mut vm, &inside);
    the_kernel_has_what_was_planned(&world, &mut vm);
    nothing_is_lost_while_the_node_program_is_away(&world, &mut vm, &inside);
    a_peer_with_its_clock_set_back_is_sent_a_handshake(&mut world, &mut vm, &inside);
    the_kernel_listens_on_the_port_of_its_node_unless_it_is_taken(&world, &mut vm, &inside);
    let start = Instant::now();
    change_over::a_gateway_changes_to_the_embedded_one_unless_that_is_missing_or_the_kernel_s_was_chosen(
        &mut world, &mut vm, &inside,
    );
    println!("the change to the embedded WireGuard took {:.1?} of this test", start.elapsed());
}

/// The node's pods have IPv4 of a dual-stack pool, before and after a restart of the node program, and its listeners answer.
#[test]
fn a_node_without_ipv6_serves_a_dual_stack_pool_with_ipv4() {
    let mut world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    let home = world.lab().nat_site("home", Nat::PortRestricted, "192.168.7.0/24".parse().unwrap()).unwrap();
    let mut vm = VmNode::boot(&world, &home, "home-vm", "ipv6.disable=1").unwrap();
    world.apply_mesh_and_pool().unwrap();
    world.start_pods().unwrap();
    vm.start(TIMEOUT).unwrap();
    let inside = vm.start_pod(&world, POD).unwrap();
    assert!(matches!(inside[..], [IpAddr::V4(_)]), "{inside:?}");
    for port in [9384, 9385] {
        let path = if port == 9384 { "metrics" } else { "healthz" };
        until("a listener", || vm.shell(&format!("busybox wget -q -O - http://127.0.0.1:{port}/{path}")));
    }
    for pod in &world.pods {
        until("ping to the VM", || probe::ping(pod, inside[0]));
        let ping = format!("ip netns exec {POD} ping -n -c 1 -W 2 {}", pod.addresses[0]);
        until("ping from the VM", || vm.shell(&ping));
    }
    vm.kill().unwrap();
    vm.start(TIMEOUT).unwrap();
    let again = vm.start_pod(&world, "second").unwrap();
    assert!(matches!(again[..], [IpAddr::V4(_)]) && again != inside, "{again:?}");
    until("a consistent state", || vm.shell("fairlead ipam check --socket /run/coild.sock"));

    world.plane.apply(IPV6_POOL).unwrap();
    let error = format!("{:#}", vm.start_pod_in(&world, "ipv6-only", "third").unwrap_err());
    assert!(error.contains("Ipv6Disabled") && error.contains("pool ipv6 has only IPv6"), "{error}");
}

/// With a namespace whose pods are from it.
const IPV6_POOL: &str = "\
apiVersion: coil.cybozu.com/v2
kind: AddressPool
metadata: {name: ipv6}
spec: {blockSizeBits: 2, subnets: [{ipv6: 'fd02:fa20::/120'}]}
---
apiVersion: v1
kind: Namespace
metadata: {name: ipv6-only, annotations: {coil.cybozu.com/pool: ipv6}}
";

fn until<T>(what: &str, mut condition: impl FnMut() -> anyhow::Result<T>) -> T {
    let deadline = Instant::now() + TIMEOUT;
    loop {
        match condition() {
            Ok(value) => return value,
            Err(error) => assert!(Instant::now() < deadline, "{what}: {error:#}"),
        }
        std::thread::sleep(Duration::from_millis(100));
    }
}

/// TCP and ICMP, IPv4 and IPv6, to and from every other pod.
fn kernel_and_embedded_understand_each_other(world: &World, vm: &mut VmNode, inside: &[IpAddr]) {
    let start = Instant::now();
    vm.shell(&format!("ip netns exec {POD} busybox nc -ll -p {} -e cat >/dev/null 2>&1 &", probe::PORT))
        .unwrap();
    let servers = Servers::start(&world.pods).unwrap();
    for outside in &world.pods {
        reach(vm, outside, inside);
        println!("{}: all reached after {:.1?}", outside.name, start.elapsed());
    }
    drop(servers);

    let own = vm.status().unwrap();
    assert_eq!((&own["wireguard"], &own["problems"]), (&json!("kernel"), &json!([])));
    let peers = own["peers"].as_array().unwrap();
    assert_eq!(peers.len(), 2, "{own:#}");
    assert!(peers.iter().all(|peer| peer["state"] == "up"), "{own:#}");
    for node in &world.nodes {
        let status = node.status().unwrap();
        assert_eq!((&status["wireguard"], &status["problems"]), (&json!("embedded"), &json!([])));
        let peer = status["peers"].as_array().unwrap().iter().find(|peer| peer["name"] == "home-vm").unwrap();
        assert_eq!(peer["state"], "up", "{status:#}");
        println!("{} sends to home-vm at {} ({})", node.name, peer["endpoint"], peer["endpointSource"]);
    }
}

fn reach(vm: &mut VmNode, outside: &Pod, inside: &[IpAddr]) {
    for address in inside {
        let rtt = until("ping to the VM", || probe::ping(outside, *address));
        println!("{} -> {POD} ({address}): {rtt} ms", outside.name);
        // Much more than fits into a packet or a window.
        until("TCP to the VM", || probe::tcp(outside, *address, 200_000));
    }
    for address in &outside.addresses {
        until("ping from the VM", || vm.shell(&format!("ip netns exec {POD} ping -n -c 1 -W 2 {address}")));
        let echo = format!(
            "seq 20000 >/tmp/sent\nip netns exec {POD} busybox nc -w 5 {address} {} </tmp/sent >/tmp/received\n\
             cmp /tmp/sent /tmp/received",
            probe::PORT
        );
        until("TCP from the VM", || vm.shell(&echo));
    }
}

/// The same as the systems leave behind that Fairlead takes the place of, seen by independent tools.
fn the_kernel_has_what_was_planned(world: &World, vm: &mut VmNode) {
    let mut wanted: Vec<String> =
        ["listening port: 51820", "fwmark: 0x20", "persistent keepalive: every 25 seconds"]
            .map(str::to_owned)
            .to_vec();
    let mut prefixes = Vec::new();
    for node in &world.nodes {
        let status = node.status().unwrap();
        wanted.push(format!("peer: {}", status["publicKey"].as_str().unwrap()));
        wanted.push(format!("endpoint: {}:", node.public_address()));
        let own = status["prefixes"].as_array().unwrap().clone();
        prefixes.extend(own.iter().map(|prefix| prefix.as_str().unwrap().to_owned()));
    }
    let shown = vm.shell("wg show wire_kube").unwrap();
    for line in wanted.iter().chain(&prefixes) {
        assert!(shown.contains(line), "`{line}` is missing in\n{shown}");
    }
    assert_eq!(shown.matches("latest handshake: ").count(), world.nodes.len(), "{shown}");

    let table = vm.shell("nft list table inet talos_kubespan").unwrap();
    let names = ["set kubespan_targets_ipv4", "set kubespan_targets_ipv6"];
    let chains = ["chain kubespan_prerouting", "chain kubespan_outgoing"];
    for word in names.iter().chain(&chains) {
        assert!(table.contains(word), "`{word}` is missing in\n{table}");
    }
    for prefix in &prefixes {
        // Adjacent prefixes are one interval, so the table's text need not have them.
        let (address, _) = prefix.split_once('/').unwrap();
        let family = if address.contains(':') { "ipv6" } else { "ipv4" };
        vm.shell(&format!("nft get element inet talos_kubespan kubespan_targets_{family} '{{ {address} }}'"))
            .unwrap();
    }
    for family in ["-4", "-6"] {
        let rules = vm.shell(&format!("ip {family} rule")).unwrap();
        assert!(rules.contains("32500:\tfrom all fwmark 0x40/0x60 lookup 180"), "{rules}");
        let routes = vm.shell(&format!("ip {family} route show table 180")).unwrap();
        assert!(routes.lines().any(|route| route.starts_with("default dev wire_kube")), "{routes}");
    }
    println!("{shown}\n{table}");
}

/// Pings between all other pods and that in the VM, in both directions and families.
struct Pings {
    from_outside: Vec<(String, Process)>,
    /// Description of each ping, and the file in the VM that has its output.
    from_inside: Vec<(String, String)>,
}

impl Pings {
    fn start(world: &World, vm: &mut VmNode, inside: &[IpAddr]) -> Self {
        let (mut from_outside, mut from_inside) = (Vec::new(), Vec::new());
        for pod in &world.pods {
            for to in inside {
                let mut command = pod.namespace.command("ping").unwrap();
                command.args(PING.split(' ')).arg(to.to_string());
                let log = vm.node.directory.join(format!("{} to {to}", pod.name));
                let process = pod.namespace.spawn(&mut command, log).unwrap();
                from_outside.push((format!("{} -> {to}", pod.name), process));
            }
            for to in &pod.addresses {
                let log = format!("/tmp/to-{to}");
                vm.shell(&format!(
                    "ip netns exec {POD} ping {PING} {to} >{log} 2>&1 &\necho $! >>/tmp/pings\n"
                ))
                .unwrap();
                from_inside.push((format!("{POD} -> {to}"), log));
            }
        }
        Self { from_outside, from_inside }
    }

    /// Ends them; not one may have been lost.
    fn end(mut self, vm: &mut VmNode) {
        for (_, process) in &mut self.from_outside {
            process.signal(Signal::SIGINT).unwrap();
        }
        vm.shell("kill -INT $(cat /tmp/pings)").unwrap();
        for (what, process) in &mut self.from_outside {
            process.wait(TIMEOUT).unwrap();
            loses_nothing(what, &process.output().unwrap());
        }
        for (what, log) in &self.from_inside {
            let output = until("the end of ping", || {
                let output = vm.shell(&format!("cat {log}"))?;
                anyhow::ensure!(output.contains(" packets transmitted"), "{what}: {output}");
                Ok(output)
            });
            loses_nothing(what, &output);
        }
    }
}

/// Every ping was answered, but for those that may have been under way when it was ended.
fn loses_nothing(what: &str, output: &str) {
    let mut answers: Vec<(u64, f64)> = output.lines().filter_map(answer).collect();
    answers.sort_unstable_by_key(|(number, _)| *number);
    answers.dedup_by_key(|(number, _)| *number);
    let sent = output.lines().find_map(|line| line.split_once(" packets transmitted")?.0.parse().ok());
    let sent: u64 = sent.expect(output);
    let last = answers.last().expect(output).0;
    let lost = last - answers.len() as u64;
    let mut times: Vec<f64> = answers.iter().map(|(_, at)| *at).collect();
    times.sort_unstable_by(f64::total_cmp);
    let gap = times.windows(2).map(|pair| pair[1] - pair[0]).fold(0.0, f64::max);
    println!(
        "{what:<32} {sent} sent, {lost} lost, {} under way at the end, longest gap {:.0} ms",
        sent - last,
        gap * 1000.0
    );
    assert!(lost == 0 && sent - last <= UNDER_WAY, "{what}: {output}");
}

/// Sequence number, and when it was answered in seconds of the clock.
fn answer(line: &str) -> Option<(u64, f64)> {
    let (at, rest) = line.strip_prefix('[')?.split_once(']')?;
    let number = rest.split_once("icmp_seq=")?.1.split(' ').next()?;
    rest.contains("time=").then_some((number.parse().ok()?, at.parse().ok()?))
}

/// State of one peer in the kernel, which must survive when another node program takes over.
#[derive(Debug, PartialEq, Eq)]
struct Session {
    peer: String,
    endpoint: String,
    handshake: u64,
    received: u64,
    sent: u64,
}

/// Index of the device, and its peers.
fn device(vm: &mut VmNode) -> (String, Vec<Session>) {
    let index = vm.shell("cat /sys/class/net/wire_kube/ifindex").unwrap().trim().to_owned();
    let session = |line: &str| {
        let fields: Vec<&str> = line.split('\t').collect();
        let number = |field: usize| fields[field].parse().unwrap();
        Session {
            peer: fields[0].to_owned(),
            endpoint: fields[2].to_owned(),
            handshake: number(4),
            received: number(5),
            sent: number(6),
        }
    };
    let mut peers: Vec<Session> =
        vm.shell("wg show wire_kube dump").unwrap().lines().skip(1).map(session).collect();
    peers.sort_unstable_by(|a, b| a.peer.cmp(&b.peer));
    (index, peers)
}

/// The node program is killed with SIGKILL, is away for some seconds, and comes back. The new one finds everything as
/// it should be and changes nothing at all.
fn nothing_is_lost_while_the_node_program_is_away(world: &World, vm: &mut VmNode, inside: &[IpAddr]) {
    let pings = Pings::start(world, vm, inside);
    std::thread::sleep(Duration::from_secs(1));
    let status = vm.status().unwrap();
    assert!(status["netlinkChanges"].as_u64().unwrap() > 0, "what made everything is counted: {status:#}");
    let blocks = &status["blocks"];
    let (index, before) = device(vm);
    vm.kill().unwrap();
    let dead = Instant::now();
    std::thread::sleep(Duration::from_secs(3));
    let (_, away) = device(vm);
    println!("the node program was away for {:.1?}", dead.elapsed());
    let start = vm.start(TIMEOUT).unwrap();
    println!("it was up again {start:.1?} after its start");
    until("the new node program knows its peers", || {
        let status = vm.status()?;
        let up = |peers: &Vec<Value>| peers.len() == 2 && peers.iter().all(|peer| peer["state"] == "up");
        anyhow::ensure!(status["peers"].as_array().is_some_and(up), "{status:#}");
        Ok(())
    });
    // It looks around some more times.
    std::thread::sleep(Duration::from_secs(3));
    let (index_after, after) = device(vm);
    let adopted = vm.status().unwrap();
    pings.end(vm);

    let (made, changed) = (&status["netlinkChanges"], &adopted["netlinkChanges"]);
    println!(
        "netlink messages that change anything: {made} of the first node program, {changed} of the second"
    );
    println!("before {before:?}\naway   {away:?}\nafter  {after:?}");
    assert_eq!(*changed, 0, "{adopted:#}\n{}", vm.log().unwrap());
    assert_eq!(&adopted["blocks"], blocks, "addresses were forgotten");
    assert_eq!(index_after, index, "the device was made anew");
    for (earlier, later) in before.iter().zip(&away).chain(away.iter().zip(&after)) {
        assert_eq!((&earlier.peer, &earlier.endpoint), (&later.peer, &later.endpoint));
        assert!(earlier.handshake <= later.handshake, "the session of {} was lost", later.peer);
        assert!(earlier.received < later.received && earlier.sent < later.sent, "{} stood still", later.peer);
    }
}

/// The kernel refuses the handshakes of the peer, and starts none itself while it takes the old session for alive, but 15 s after
/// data that was not answered.
fn a_peer_with_its_clock_set_back_is_sent_a_handshake(world: &mut World, vm: &mut VmNode, inside: &[IpAddr]) {
    let name = world.pods[0].node.clone();
    for clock_ahead in [Some("+1h"), None] {
        let node = world.node(&name).unwrap();
        node.kill().unwrap();
        node.clock_ahead = clock_ahead;
        node.start().unwrap();
        let start = Instant::now();
        until("ping to the VM", || probe::ping(&world.pods[0], inside[0]));
        println!("{name}, its clock ahead by {clock_ahead:?}: ping after {:.1?}", start.elapsed());
    }
    let log = vm.log().unwrap();
    assert!(log.contains("starting a handshake"), "{log}");
}

/// `wg` is the judge. Neither another port nor one that is taken costs a session.
fn the_kernel_listens_on_the_port_of_its_node_unless_it_is_taken(
    world: &World,
    vm: &mut VmNode,
    inside: &[IpAddr],
) {
    let address = vm.node.public_address();
    let annotate = |port: &str| {
        let annotation = format!("kilo.squat.ai/force-endpoint={address}:{port}");
        world.plane.kubectl(&["annotate", "--overwrite", "node", "home-vm", &annotation]).unwrap();
    };
    let (index, before) = device(vm);
    annotate("51821");
    until("the port of the node", || listens_on(vm, 51821));
    for outside in &world.pods {
        until("ping to the VM", || probe::ping(outside, inside[0]));
    }
    // As the device of Kilo has it.
    vm.shell("ip link add kilo0 type wireguard && wg set kilo0 listen-port 51822 && ip link set kilo0 up")
        .unwrap();
    annotate("51822");
    until("the problem", || {
        let problems = vm.status()?["problems"].to_string();
        anyhow::ensure!(problems.contains("cannot listen on port 51822"), "{problems}");
        Ok(())
    });
    listens_on(vm, 51821).unwrap();
    for outside in &world.pods {
        until("ping to the VM", || probe::ping(outside, inside[0]));
    }
    vm.shell("ip link delete kilo0").unwrap();
    until("the port that is free", || listens_on(vm, 51822));
    world.plane.kubectl(&["annotate", "node", "home-vm", "kilo.squat.ai/force-endpoint-"]).unwrap();
    until("the port of the mesh", || listens_on(vm, 51820));
    for outside in &world.pods {
        until("ping to the VM", || probe::ping(outside, inside[0]));
    }
    until("no problem", || {
        let problems = vm.status()?["problems"].clone();
        anyhow::ensure!(problems == json!([]), "{problems}");
        Ok(())
    });
    let (index_after, after) = device(vm);
    let keys = |sessions: &[Session]| sessions.iter().map(|it| it.peer.clone()).collect::<Vec<_>>();
    assert_eq!((index, keys(&before)), (index_after, keys(&after)), "the device stays");
}

fn listens_on(vm: &mut VmNode, port: u16) -> anyhow::Result<()> {
    let shown = vm.shell("wg show wire_kube listen-port")?;
    anyhow::ensure!(shown.trim() == port.to_string(), "{shown}");
    let status = vm.status()?;
    anyhow::ensure!(status["listenPort"] == port, "{}", status["listenPort"]);
    Ok(())
}
