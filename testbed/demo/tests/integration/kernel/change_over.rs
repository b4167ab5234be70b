//! A gateway with the kernel's WireGuard replaces it by the embedded one.

use std::net::IpAddr;
use std::time::Duration;

use fairlead_demo::World;
use fairlead_demo::cni::Pod;
use fairlead_demo::node::Node;
use fairlead_demo::probe;
use fairlead_demo::vm_node::VmNode;
use fairlead_demo::vm_pings::VmPings;

use super::{POD, TIMEOUT, device, until};

/// The gateways of the office, and the node behind them.
const GATEWAYS: [&str; 2] = ["office-1", "office-2"];
const BEHIND: &str = "office-3";

/// The node in the VM is alone in its location, and so the gateway of it.
pub(crate) fn a_gateway_changes_to_the_embedded_one_unless_that_is_missing_or_the_kernel_s_was_chosen(
    world: &mut World,
    vm: &mut VmNode,
    inside: &[IpAddr],
) {
    // As systemd does on a Debian system, which makes the device file of each module that is there.
    vm.shell("modprobe tun").unwrap();
    join(world, GATEWAYS[1]);
    join(world, BEHIND);
    annotate(world);
    reach_each_other(world, vm, inside);
    let (kernel_s, (index, _)) = (own(vm), device(vm));
    pause(world, vm);
    assert_eq!(own(vm), kernel_s, "keys, port and mark stay");
    let (embedded, _) = device(vm);
    assert_ne!(embedded, index);
    until("gateways are used", || {
        let key = world.node(BEHIND)?.status()?["publicKey"].clone();
        let shown = vm.shell("wg show wire_kube allowed-ips")?;
        let direct = shown.lines().find(|line| line.starts_with(key.as_str().unwrap_or("-")));
        anyhow::ensure!(direct.is_none_or(|line| line.ends_with("(none)")), "{shown}");
        Ok(())
    });
    reach_each_other(world, vm, inside);
    each_gateway_forwards(world, vm, inside);

    vm.kill().unwrap();
    vm.start(TIMEOUT).unwrap();
    until("the embedded WireGuard", || is_embedded(vm));
    reach_each_other(world, vm, inside);
    assert_eq!(device(vm).0, embedded, "the next node program takes over the device");

    vm.kill().unwrap();
    vm.shell("ip link delete wire_kube\nmv /dev/net/tun /dev/net/away").unwrap();
    vm.start(TIMEOUT).unwrap();
    until("the reason", || keeps_the_kernel_s(vm, "cannot open /dev/net/tun"));
    let (kept, _) = device(vm);
    vm.kill().unwrap();
    vm.shell("mv /dev/net/away /dev/net/tun").unwrap();
    vm.arguments = "--wireguard=kernel";
    vm.start(TIMEOUT).unwrap();
    until("what to do", || keeps_the_kernel_s(vm, "without --wireguard=kernel"));
    assert_eq!(device(vm).0, kept);
    until("the Event", || {
        anyhow::ensure!(!world.events("reason=GatewaysNeedEmbedded")?.is_empty(), "no Event");
        Ok(())
    });
}

fn keeps_the_kernel_s(vm: &mut VmNode, why: &str) -> anyhow::Result<()> {
    let status = vm.status()?;
    let says_so = status["problems"].to_string().contains(why);
    anyhow::ensure!(says_so && status["wireguard"] == "kernel", "{status:#}");
    Ok(())
}

/// One more node of the office, with a pod.
fn join(world: &mut World, name: &str) {
    let office = world.sites.iter().find(|site| site.name() == "office").unwrap();
    let directory = world.directory().join(name);
    std::fs::create_dir(&directory).unwrap();
    let mut node = Node::new(name, "office", office.host(name).unwrap(), directory);
    world.join(&node).unwrap();
    node.start().unwrap();
    node.wait_ready(TIMEOUT).unwrap();
    world.nodes.push(node);
    world.start_pod(&format!("pod-{name}"), name).unwrap();
}

fn annotate(world: &World) {
    for (node, location) in [("home-vm", "home"), ("cloud-1", "cloud"), (BEHIND, "office")] {
        let location = format!("kilo.squat.ai/location={location}");
        world.plane.kubectl(&["annotate", "node", node, &location]).unwrap();
    }
    let [one, other] = GATEWAYS;
    let gateway = ["kilo.squat.ai/location=office", "kilo.squat.ai/leader=true"];
    world.plane.kubectl(&["annotate", "node", one, other, gateway[0], gateway[1]]).unwrap();
}

/// Keys, port and mark of the device itself.
fn own(vm: &mut VmNode) -> String {
    let dump = vm.shell("wg show wire_kube dump").unwrap();
    dump.lines().next().unwrap().to_owned()
}

fn pod<'a>(world: &'a World, node: &str) -> &'a Pod {
    world.pods.iter().find(|pod| pod.node == node).unwrap()
}

/// Says how long tunnels pause while the device is replaced.
fn pause(world: &World, vm: &mut VmNode) {
    let names = ["cloud-1", GATEWAYS[0], BEHIND];
    let pings = names.map(|name| {
        VmPings::start(vm, POD, pod(world, name).addresses[0], Duration::from_millis(50)).unwrap()
    });
    until("pings", || {
        let answers = pings.iter().map(|pings| pings.so_far(vm)).collect::<anyhow::Result<Vec<_>>>()?;
        anyhow::ensure!(answers.iter().all(|answers| answers.count() > 10), "{answers:?}");
        Ok(())
    });
    let patch = r#"{"spec": {"topology": {"granularity": "location"}}}"#;
    world.plane.kubectl(&["patch", "wkmesh", "default", "--type=merge", "-p", patch]).unwrap();
    until("the embedded WireGuard", || is_embedded(vm));
    for name in names {
        let ping = format!("ip netns exec {POD} ping -n -c 1 -W 2 {}", pod(world, name).addresses[0]);
        until("ping from the VM", || vm.shell(&ping));
    }
    std::thread::sleep(Duration::from_secs(1));
    for (pings, name) in pings.into_iter().zip(names) {
        let answers = pings.end(vm).unwrap();
        let (gap, lost) = (answers.longest_gap() * 1000.0, answers.lost().unwrap());
        println!("change to the embedded WireGuard: {POD} -> {name}: {lost} lost, longest gap {gap:.0} ms");
    }
    for line in vm.log().unwrap().lines().filter(|line| line.contains("took the place")) {
        println!("{line}");
    }
}

/// The other one does not, meanwhile.
fn each_gateway_forwards(world: &World, vm: &mut VmNode, inside: &[IpAddr]) {
    let behind = pod(world, BEHIND);
    let ping = format!("ip netns exec {POD} ping -n -c 1 -W 2 {}", behind.addresses[0]);
    for (forwards, lost) in [(GATEWAYS[0], GATEWAYS[1]), (GATEWAYS[1], GATEWAYS[0])] {
        let host = &world.nodes.iter().find(|node| node.name == lost).unwrap().host;
        host.shell(
            "nft add table inet judge\n\
             nft 'add chain inet judge forward { type filter hook forward priority -300; policy drop; }'",
        )
        .unwrap();
        until(forwards, || vm.shell(&ping));
        until(forwards, || probe::ping(behind, inside[0]));
        host.shell("nft delete table inet judge").unwrap();
        println!("{forwards} forwards to {BEHIND} while {lost} does not");
    }
}

fn is_embedded(vm: &mut VmNode) -> anyhow::Result<()> {
    let status = vm.status()?;
    let reason = status["wireguardReason"].as_str().unwrap_or_default();
    anyhow::ensure!(status["wireguard"] == "embedded" && reason.contains("several gateways"), "{status:#}");
    Ok(())
}

fn reach_each_other(world: &World, vm: &mut VmNode, inside: &[IpAddr]) {
    for outside in &world.pods {
        until("ping to the VM", || probe::ping(outside, inside[0]));
        let ping = format!("ip netns exec {POD} ping -n -c 1 -W 2 {}", outside.addresses[0]);
        until("ping from the VM", || vm.shell(&ping));
    }
}
