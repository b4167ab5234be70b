//! Failures of the control plane, Fairlead's controller or the API server, as users see them.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use crate::outage::{TIMEOUT, container, loses_nothing, mesh, node, pod, resumes, tcp, took, udp, used};
use fairlead_demo::cni::{Container, Pod};
use fairlead_demo::{World, objects};
use testbed_lab::traffic::Flow;

/// Longest time until blocks are granted again after the start of the controller: it takes 0.3 to 0.5 s, on a busy machine 6.3 s.
const CONTROLLER_STARTED: Duration = Duration::from_secs(30);
/// Longest time until tunnels work again after the start of a node program without an API server. It gives that one 3 s first.
const TUNNELS_FROM_SAVED_STATE: Duration = Duration::from_secs(30);
/// Error code of CNI for what may work later.
const TRY_AGAIN: &str = r#""code":11"#;
/// A pool with blocks of two addresses, so that the third pod of a node needs a block.
const TINY: &str = r#"
apiVersion: coil.cybozu.com/v2
kind: AddressPool
metadata: {name: tiny}
spec:
  blockSizeBits: 1
  subnets: [{ipv4: 10.65.0.0/24}]
---
apiVersion: v1
kind: Namespace
metadata: {name: tiny, annotations: {coil.cybozu.com/pool: tiny}}
"#;

/// Traffic between all sites.
fn flows(world: &World) -> Vec<Flow> {
    let flows = vec![
        udp(world, "home-1", "cloud-1"),
        udp(world, "home-2", "office-1"),
        udp(world, "cloud-2", "office-2"),
        tcp(world, "office-1", "home-1"),
        tcp(world, "cloud-1", "office-2"),
    ];
    std::thread::sleep(Duration::from_secs(1));
    flows
}

/// The controller is killed with SIGKILL.
///
/// Stops: giving out address blocks. Goes on: all traffic, and the start of pods where a block has room. When it is
/// started again it leads again, and pods that waited for a block start.
#[test]
fn without_the_controller_pods_start_where_there_is_room() {
    let mut world = mesh();
    let flows = flows(&world);
    without_the_controller(&mut world, &flows);
}

/// The API server is killed.
///
/// Stops: what other nodes must learn, that is new blocks and new nodes. Goes on: all traffic, starts of pods where
/// a block has room, deletions, `fairlead status`. A node program that is killed in that time comes back without its
/// peers: with the embedded WireGuard its node is cut off from other nodes, but not its pods from each other, and no pod
/// starts there, until the API server is back.
#[test]
fn without_the_api_server_traffic_goes_on() {
    let mut world = mesh();
    let flows = flows(&world);
    without_the_api_server(&mut world, &flows);
}

fn without_the_controller(world: &mut World, flows: &[Flow]) {
    let what = "without the controller";
    world.plane.apply(TINY).unwrap();
    let plugin = node(world, "home-1").plugin().unwrap();
    let tiny: Vec<Container> = (0..12).map(|n| container(world, &format!("tiny-{n}"), "tiny")).collect();
    // The node program may not have seen the pool yet.
    world.wait_for(TIMEOUT, |_| plugin.add(&tiny[0])).unwrap();
    let mark = Instant::now();
    world.kill_controller().unwrap();
    let started = world.start_pod("without-controller", "home-1").unwrap().clone();
    println!("{what}: a pod started where a block has room, after {:.1} s", mark.elapsed().as_secs_f64());
    plugin.del(&started.container).unwrap();
    // Blocks granted in advance are used up until an ADD is refused or has to wait.
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let begun = Instant::now();
            let attempts = tiny[1..].iter().map(|pod| plugin.add(pod));
            (attempts.take_while(Result::is_ok).count(), begun.elapsed())
        });
        let (started, waited) = waiting.join().unwrap();
        println!("{what}: {started} more pods used up their blocks; the next was refused after {waited:.1?}");
        assert!(started < tiny.len() - 1, "blocks were granted without a controller");
    });
    loses_nothing(what, flows, mark);
    let begun = Instant::now();
    world.start_controller().unwrap();
    // A container runtime retries, as here.
    world.wait_for(TIMEOUT, |_| tiny[..8].iter().try_for_each(|pod| plugin.add(pod).map(drop))).unwrap();
    took(&format!("{what}, started after its Lease ended: 8 pods run"), begun, CONTROLLER_STARTED);
    // Now its Lease is still valid: only the name in it says that it belongs to no other replica.
    let begun = Instant::now();
    world.kill_controller().unwrap();
    world.start_controller().unwrap();
    world.wait_for(TIMEOUT, |_| tiny.iter().try_for_each(|pod| plugin.add(pod).map(drop))).unwrap();
    took(&format!("{what}, killed and started at once: 4 more pods run"), begun, CONTROLLER_STARTED);
    let mut addresses: Vec<_> = tiny.iter().map(|pod| plugin.add(pod).unwrap()).collect();
    addresses.sort();
    addresses.dedup();
    assert_eq!(addresses.len(), tiny.len(), "an address was allocated twice");
    tiny.iter().for_each(|pod| plugin.del(pod).unwrap());
    loses_nothing(what, flows, mark);
}

fn without_the_api_server(world: &mut World, flows: &[Flow]) {
    let what = "without the API server";
    let neighbour = world.start_pod("neighbour", "home-1").unwrap().clone();
    let first = pod(world, "home-1");
    let local = [
        Flow::udp(first, &neighbour, neighbour.addresses[0]).unwrap(),
        Flow::tcp(&neighbour, first, first.addresses[1]).unwrap(),
    ];
    // Pods that were bound before the outage: the node programs have seen them.
    for node in ["home-1", "cloud-2"] {
        world.make_pod(&comes_and_goes(node), node).unwrap();
    }
    let ran_here = with_uid(world, "ran-here", "home-1");
    let first_address = node(world, "home-1").plugin().unwrap().add(&ran_here).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    let mark = Instant::now();
    world.plane.stop_apiserver().unwrap();
    pods_come_and_go(world, what, "home-1");
    pods_come_and_go(world, what, "cloud-2");
    std::thread::sleep(Duration::from_secs(20).saturating_sub(mark.elapsed()));
    loses_nothing(what, flows, mark);
    loses_nothing(what, &local, mark);
    restarted_without_the_api_server(world, flows, local, &neighbour, (&ran_here, first_address));
}

/// A pod as a runtime that passes its UID names it.
fn with_uid(world: &World, name: &str, node: &str) -> Container {
    let pod = world.make_pod(name, node).unwrap();
    let uid = pod["metadata"]["uid"].as_str().map(str::to_owned);
    Container { uid, ..container(world, name, objects::NAMESPACE) }
}

/// A new sandbox of a pod that ran here, as after its sandbox has died: from what an earlier program left.
fn gets_a_new_sandbox(world: &World, what: &str, old: &Container, first: &[IpAddr]) {
    let plugin = node(world, "home-1").plugin().unwrap();
    plugin.del(old).unwrap();
    let anew = Container { id: format!("{}-anew", old.id), ..old.clone() };
    let begun = Instant::now();
    let addresses = plugin.add(&anew).unwrap();
    println!("{what}: a pod that ran here has a new sandbox after {:.1} s", begun.elapsed().as_secs_f64());
    assert!(addresses.iter().all(|address| !first.contains(address)), "{addresses:?} at once again");
    let others = world.pods.iter().flat_map(|pod| &pod.addresses);
    assert!(others.into_iter().all(|other| !addresses.contains(other)), "{addresses:?} twice");
    plugin.del(&anew).unwrap();
}

fn restarted_without_the_api_server(
    world: &mut World,
    flows: &[Flow],
    local: [Flow; 2],
    neighbour: &Pod,
    (ran_here, first_address): (&Container, Vec<IpAddr>),
) {
    let what = "without the API server, home-1 restarted";
    let used_before = used(node(world, "home-1"));
    let restarted = Instant::now();
    let home = world.node("home-1").unwrap();
    home.kill().unwrap();
    home.start().unwrap();
    home.wait_ready(TIMEOUT).unwrap();
    println!("{what}: serves its socket after {:.1} s", restarted.elapsed().as_secs_f64());
    let home = node(world, "home-1");
    let status = home.status().unwrap();
    println!("{what}: status says {} with peers {}", status["problems"], status["peers"]);
    assert!(
        !status["problems"].to_string().contains("delete the pod"),
        "an outage is no reason to delete pods"
    );
    loses_nothing(what, &local, restarted);
    drop(local);
    let plugin = home.plugin().unwrap();
    let newcomer = container(world, "during-outage", "demo");
    let error = plugin.add(&newcomer).unwrap_err().to_string();
    assert!(error.contains(TRY_AGAIN), "the runtime must try again: {error}");
    println!("{what}: a pod has to wait: {error}");
    plugin.del(&newcomer).unwrap();
    plugin.del(&neighbour.container).unwrap();
    gets_a_new_sandbox(world, what, ran_here, &first_address);
    // It knows its peers from its state directory.
    resumes(what, flows, restarted, restarted, TUNNELS_FROM_SAVED_STATE);
    loses_nothing(what, &flows[1..3], restarted);
    let status = node(world, "home-1").status().unwrap();
    assert!(status["problems"].to_string().contains("has not answered since"), "{status}");

    let begun = Instant::now();
    world.plane.start_apiserver().unwrap();
    println!("{what}: the API server took {:.1} s to start", begun.elapsed().as_secs_f64());
    let counted = |world: &World| {
        let now = used(node(world, "home-1"));
        anyhow::ensure!(now == used_before - 2, "{used_before} less two should be in use, not {now}");
        Ok(())
    };
    world.wait_for(TIMEOUT, counted).unwrap();
    let begun = Instant::now();
    let late = container(world, "late", "demo");
    world.wait_for(TIMEOUT, |_| plugin.add(&late)).unwrap();
    println!("{what}: a pod starts again {:.1} s after that", begun.elapsed().as_secs_f64());
}

fn comes_and_goes(node: &str) -> String {
    format!("comes-and-goes-{node}")
}

/// Work that needs no API server: a pod starts where a block has room, `fairlead status` answers, the pod goes.
fn pods_come_and_go(world: &World, what: &str, name: &str) {
    let node = node(world, name);
    let (plugin, before) = (node.plugin().unwrap(), used(node));
    let pod = container(world, &comes_and_goes(name), "demo");
    let begun = Instant::now();
    plugin.add(&pod).unwrap();
    println!("{what}: a pod started on {name} in {} ms", begun.elapsed().as_millis());
    assert_eq!(used(node), before + 1);
    plugin.del(&pod).unwrap();
    assert_eq!(used(node), before);
}
