//! Nodes on one network without a mesh: plain routes to each other's pods, kept by the built-in router.

use std::time::{Duration, Instant};

use crate::outage::{loses_nothing, node, pod, tcp, udp};
use anyhow::ensure;
use fairlead_demo::{World, probe, topology};
use testbed_lab::Progress;
use testbed_lab::traffic::Flow;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Much less than the interval of the router's comparisons, and much more than a busy machine takes.
const AT_ONCE: Duration = Duration::from_secs(3);

/// Three nodes with `--router` and no WireKubeMesh: pods reach each other in both families by routes of protocol 31. What
/// others put into the main table stays, also where it is in the way. A killed node program loses nothing. When a Node is
/// deleted its blocks go, and with them the routes of the others; table 119 goes where it was asked for.
#[test]
fn nodes_on_one_network_need_no_mesh() {
    let topology = topology::one_network(&["--router", "--clear-routes-on-shutdown"]);
    let mut world = World::start(&topology, &Progress::default()).unwrap();
    let foreign = ["192.0.2.0/24 via 198.51.100.13 dev eth0 proto static", "blackhole 192.0.3.0/24 proto 77"];
    for route in foreign {
        node(&world, "rack-1").host.shell(&format!("ip route add {route}")).unwrap();
    }
    world.apply_pool().unwrap();
    world.start_pods().unwrap();
    every_pair_works(&world);
    there_is_no_mesh_and_no_problem(&world);
    routes_lead_to_the_nodes(&world);
    a_foreign_route_in_the_way_is_left_alone_and_said(&world);
    a_route_that_was_lost_comes_back(&world);
    a_killed_node_program_loses_nothing(&mut world);
    assert!(foreign.iter().all(|route| shown(&world, "rack-1", "ip route").contains(route.trim())));
    a_deleted_node_loses_its_routes(&mut world);
    table_119_is_cleared_only_when_the_node_is_gone(&mut world);
}

fn every_pair_works(world: &World) {
    let (pairs, _) = probe::all_pairs(&world.pods, Instant::now() + TIMEOUT, |_, _| String::new()).unwrap();
    let failed: Vec<_> = pairs.iter().filter(|pair| !(pair.tcp && pair.icmp)).collect();
    assert!(failed.is_empty(), "{failed:?}");
    assert_eq!(pairs.len(), 12, "three pods, both directions, both families");
}

fn there_is_no_mesh_and_no_problem(world: &World) {
    for node in &world.nodes {
        let status = node.status().unwrap();
        assert_eq!(status["problems"], serde_json::json!([]), "{status:#}");
        assert_eq!(status["router"]["routes"].as_array().unwrap().len(), 4, "{status:#}");
        assert!(!node.host.shell("ip -o link").unwrap().contains("wire_kube"));
    }
}

fn shown(world: &World, node_name: &str, command: &str) -> String {
    node(world, node_name).host.shell(command).unwrap()
}

/// The lines `ip route` prints of protocol 31, IPv4 then IPv6.
fn ours(world: &World, node_name: &str) -> Vec<String> {
    let text = shown(world, node_name, "ip -4 route show proto 31; ip -6 route show proto 31");
    text.lines().map(|line| line.trim().to_owned()).collect()
}

/// The prefixes of a node's blocks, IPv4 and IPv6, as the API server has them.
fn blocks(world: &World, node_name: &str) -> Vec<String> {
    let selector = format!("coil.cybozu.com/node={node_name}");
    let arguments =
        ["get", "addressblocks", "-l", &selector, "-o", "jsonpath={range .items[*]}{.ipv4} {.ipv6} {end}"];
    let text = world.plane.kubectl(&arguments).unwrap();
    text.split_whitespace().map(str::to_owned).collect()
}

fn routes_lead_to_the_nodes(world: &World) {
    let routes = ours(world, "rack-1");
    assert_eq!(routes.len(), 4, "{routes:?}");
    for other in ["rack-2", "rack-3"] {
        let addresses = node(world, other).addresses();
        for prefix in blocks(world, other) {
            let address = addresses.iter().find(|address| address.is_ipv6() == prefix.contains(':')).unwrap();
            let wanted = format!("{prefix} via {address} dev eth0");
            assert!(routes.iter().any(|line| line.starts_with(&wanted)), "{wanted} is missing in {routes:?}");
        }
    }
    let own = blocks(world, "rack-1");
    assert!(own.iter().all(|prefix| !routes.iter().any(|line| line.starts_with(prefix.as_str()))));
}

/// Another program takes the place of one of our routes: its route stays, and status reports it until it is gone.
fn a_foreign_route_in_the_way_is_left_alone_and_said(world: &World) {
    let block = blocks(world, "rack-2").into_iter().find(|prefix| prefix.contains('.')).unwrap();
    shown(world, "rack-1", &format!("ip route replace blackhole {block} proto static"));
    let said = |world: &World| {
        let status = node(world, "rack-1").status()?;
        let problems = status["problems"].as_array().unwrap();
        ensure!(problems.iter().any(|it| it.as_str().unwrap().contains(&block)), "{problems:?}");
        Ok(())
    };
    world.wait_for(TIMEOUT, said).unwrap();
    assert!(shown(world, "rack-1", "ip route").contains(&format!("blackhole {block} proto static")));
    assert_eq!(ours(world, "rack-1").len(), 3, "the others are not disturbed");
    shown(world, "rack-1", &format!("ip route del blackhole {block} proto static"));
    all_routes(world, "rack-1", 4);
}

fn all_routes(world: &World, node_name: &str, count: usize) {
    let there = |world: &World| {
        let routes = ours(world, node_name);
        ensure!(routes.len() == count, "{count} are wanted, there are {routes:?}");
        Ok(())
    };
    world.wait_for(TIMEOUT, there).unwrap();
}

/// At once, not with the next comparison after ten seconds.
fn a_route_that_was_lost_comes_back(world: &World) {
    for _ in 0..3 {
        shown(world, "rack-1", "ip -4 route flush proto 31; ip -6 route flush proto 31");
        let there = |world: &World| {
            let routes = ours(world, "rack-1");
            ensure!(routes.len() == 4, "4 are wanted, there are {routes:?}");
            Ok(())
        };
        world.wait_for(AT_ONCE, there).unwrap();
    }
    every_pair_works(world);
}

fn a_killed_node_program_loses_nothing(world: &mut World) {
    let before = ours(world, "rack-1");
    let mark = Instant::now();
    let flows: [Flow; 3] =
        [udp(world, "rack-1", "rack-2"), tcp(world, "rack-3", "rack-1"), tcp(world, "rack-2", "rack-3")];
    std::thread::sleep(Duration::from_secs(1));
    let killed = world.node("rack-1").unwrap();
    killed.kill().unwrap();
    std::thread::sleep(Duration::from_secs(2));
    killed.start().unwrap();
    killed.wait_ready(TIMEOUT).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    loses_nothing("kill -9 of the node program", &flows, mark);
    assert_eq!(ours(world, "rack-1"), before);
}

fn a_deleted_node_loses_its_routes(world: &mut World) {
    world.node("rack-3").unwrap().kill().unwrap();
    world.plane.kubectl(&["delete", "node", "rack-3"]).unwrap();
    all_routes(world, "rack-1", 2);
    all_routes(world, "rack-2", 2);
    let left: Vec<_> = world.pods.iter().filter(|pod| pod.node != "rack-3").cloned().collect();
    let (pairs, _) = probe::all_pairs(&left, Instant::now() + TIMEOUT, |_, _| String::new()).unwrap();
    assert!(pairs.len() == 4 && pairs.iter().all(|pair| pair.tcp && pair.icmp), "{pairs:?}");
}

/// Without the controller no blocks are deleted, so that only the ending program can clear the table.
fn table_119_is_cleared_only_when_the_node_is_gone(world: &mut World) {
    let table = "ip -4 route show table 119; ip -6 route show table 119";
    world.kill_controller().unwrap();
    for name in ["rack-1", "rack-2"] {
        assert_eq!(shown(world, name, table).lines().count(), 2, "{name}");
    }
    world.node("rack-1").unwrap().stop().unwrap();
    assert_eq!(shown(world, "rack-1", table).lines().count(), 2, "its Node exists");
    world.plane.kubectl(&["delete", "node", "rack-2"]).unwrap();
    world.node("rack-2").unwrap().stop().unwrap();
    assert_eq!(
        shown(world, "rack-2", table),
        "",
        "its Node is gone:\n{}",
        fairlead_demo::node::tail(&node(world, "rack-2").log())
    );
    let pod = pod(world, "rack-2").addresses[0].to_string();
    assert!(shown(world, "rack-2", "ip route show table 116").contains(&pod), "pods keep their routes");
}
