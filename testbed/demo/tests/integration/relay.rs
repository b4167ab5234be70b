//! Nodes that do not reach each other, by way of `fairlead relay` on the lab's Internet.

use std::time::{Duration, Instant};

use crate::outage;
use crate::outage::{TIMEOUT, loses_nothing, node, peer, resumes, tcp, udp};
use anyhow::{Context, Result, ensure};
use fairlead_demo::servers;
use fairlead_demo::{World, probe, topology};
use serde_json::{Value, json};
use testbed_lab::Progress;
use testbed_lab::relay::{Relay, TOKEN};
use testbed_lab::traffic::Flow;

/// Longest time until traffic is back after a path has failed: it takes 2 to 3 s.
const OTHER_PATH: Duration = Duration::from_secs(15);
/// The same if a node program starts that knows the mesh and its relay from its state directory: it waits 3 s for the API server.
const FROM_SAVED_STATE: Duration = Duration::from_secs(40);
/// Nodes without a direct path to each other.
const RELAYED: [(&str, &str); 4] =
    [("hotel-1", "club-1"), ("fort-1", "hotel-1"), ("fort-1", "club-1"), ("fort-1", "cloud-1")];

fn apply_mesh(world: &World, spec: &Value) {
    servers::apply_mesh(world, spec).unwrap();
}

fn published(world: &World, name: &str) -> Result<Value> {
    Ok(world.published(name)?["status"].clone())
}

/// Endpoint of a peer: `tcp://` or `udp://` before the relay's address.
fn endpoint(world: &World, from: &str, to: &str) -> Result<String> {
    let seen = peer(node(world, from), to).with_context(|| format!("{from} has no peer {to}"))?;
    ensure!(seen["state"] == "up", "{from} to {to}: {seen}");
    Ok(seen["endpoint"].as_str().unwrap_or_default().to_owned())
}

fn is_relayed(world: &World, from: &str, to: &str) -> Result<bool> {
    Ok(endpoint(world, from, to)?.contains("://"))
}

/// Waits until the relayed pairs go over UDP where both nodes have UDP, and else over TCP.
fn use_udp_where_they_can(world: &World) {
    let all = || {
        for (from, to) in RELAYED.iter().flat_map(|(one, other)| [(*one, *other), (*other, *one)]) {
            let expected = if [from, to].contains(&"fort-1") { "tcp://" } else { "udp://" };
            let endpoint = endpoint(world, from, to)?;
            ensure!(endpoint.starts_with(expected), "{from} to {to}: {endpoint}, not {expected}");
        }
        Ok(())
    };
    testbed_lab::eventually(TIMEOUT, all).unwrap();
}

/// The links to the relay end, and no node can connect again. What goes over UDP needs none.
fn links_are_cut(world: &World, relay: &Relay, flows: &[Flow]) {
    use_udp_where_they_can(world);
    std::thread::sleep(Duration::from_secs(1));
    let mark = Instant::now();
    let rules = "table inet testcut {\nchain input {\ntype filter hook input priority 0\n\
                 tcp dport 443 reject with tcp reset\n}\n}";
    relay.host.shell(&format!("nft -f - <<'END'\n{rules}\nEND")).unwrap();
    testbed_lab::eventually(TIMEOUT, || {
        let relay = node(world, "hotel-1").status()?["relay"].clone();
        ensure!(relay["connected"] == false, "{relay}");
        Ok(())
    })
    .unwrap();
    std::thread::sleep(Duration::from_secs(10));
    loses_nothing("the links to the relay are cut", flows, mark);
    assert!(endpoint(world, "hotel-1", "club-1").unwrap().starts_with("udp://"));
    relay.host.shell("nft delete table inet testcut").unwrap();
}

/// The router of a node whose only way is its connection to the relay gets another address.
fn the_nat_of_a_node_without_udp_rebinds(world: &World) {
    // Messages of their own: those of a connection in the tunnel are repeated after pauses that double.
    let flows = [udp(world, "fort-1", "cloud-1"), udp(world, "hotel-1", "fort-1")];
    std::thread::sleep(Duration::from_secs(1));
    let router = world.sites.iter().find(|site| site.name() == "fort").unwrap().router().clone();
    let mark = Instant::now();
    router.change_address().unwrap();
    resumes("the NAT of a node without UDP rebinds", &flows, mark, mark, OTHER_PATH);
}

/// The relay has three replicas, and the one that passes most of the traffic on is killed.
fn a_replica_is_killed(relay: &mut Relay, flows: &[Flow]) {
    let mark = Instant::now();
    relay.run_replicas(3).unwrap();
    // Nodes whose links were cut for long try again after pauses of up to 30 s, and TCP then waits for its own next attempt.
    resumes("one relay becomes three replicas", flows, mark, mark, TIMEOUT);
    let links = |relay: &Relay| {
        let links =
            |number| relay.replica_metric(number, "fairlead_relay_links").map(Option::unwrap_or_default);
        (0..3).map(links).sum::<Result<u64>>()
    };
    let all = || {
        let links = links(relay)?;
        // Two of each of four nodes. Those that were replaced drain.
        ensure!(links == 8, "{links} links");
        Ok(())
    };
    testbed_lab::eventually(TIMEOUT, all).unwrap();
    let bytes = |number| relay.replica_metric(number, "fairlead_relay_datagram_bytes_total").unwrap();
    let before = [0, 1, 2].map(bytes);
    std::thread::sleep(Duration::from_secs(2));
    let grown = |number: &u16| bytes(*number).unwrap() - before[usize::from(*number)].unwrap();
    let busiest = (0..3).max_by_key(grown).unwrap();
    println!("links {:?}, bytes {:?}", links(relay).unwrap(), [0, 1, 2].map(|number| grown(&number)));
    let mark = Instant::now();
    relay.kill_replica(busiest).unwrap();
    resumes("the replica that carries the traffic is killed", flows, mark, mark, OTHER_PATH);
    for flow in flows {
        let gap = flow.figures_since(mark).longest_gap;
        // Ten times the goal of 0.5 s would be as long as without a second link.
        assert!(gap < Duration::from_millis(1500), "{}: {gap:?}", flow.name());
    }
}

/// Waits until all pairs go the way they should.
fn settles(world: &World, expected: impl Fn(&str, &str) -> bool) {
    let names: Vec<&str> = world.nodes.iter().map(|node| node.name.as_str()).collect();
    let all = || {
        for (from, to) in names.iter().flat_map(|from| names.iter().map(move |to| (*from, *to))) {
            if from != to {
                let relayed = is_relayed(world, from, to)?;
                ensure!(relayed == expected(from, to), "{from} to {to}: relayed is {relayed}");
            }
        }
        Ok(())
    };
    testbed_lab::eventually(TIMEOUT, all).unwrap();
}

fn needs_relay(from: &str, to: &str) -> bool {
    RELAYED.contains(&(from, to)) || RELAYED.contains(&(to, from))
}

fn assert_all_reach_each_other(world: &World) {
    let deadline = Instant::now() + TIMEOUT;
    let (pairs, took) = probe::all_pairs(&world.pods, deadline, |_, _| String::new()).unwrap();
    assert!(pairs.iter().all(|pair| pair.tcp && pair.icmp), "{pairs:?}");
    println!("all pairs after {took:?}");
}

fn problem_of(world: &World, name: &str, words: &str) -> Result<String> {
    let status = node(world, name).status()?;
    let problems = status["problems"].as_array().context("no problems")?;
    let found = problems.iter().filter_map(Value::as_str).find(|problem| problem.contains(words));
    found.map(str::to_owned).with_context(|| format!("{}", status["problems"]))
}

/// A node starts again whose only way to the API server may be the relay.
fn knows_the_relay_without_the_api_server(world: &mut World, flows: &[Flow]) {
    world.plane.stop_apiserver().unwrap();
    let restarted = Instant::now();
    let fort = world.node("fort-1").unwrap();
    fort.kill().unwrap();
    fort.start().unwrap();
    fort.wait_ready(TIMEOUT).unwrap();
    let what = "the API server is down, and a node without UDP restarts";
    resumes(what, flows, restarted, restarted, FROM_SAVED_STATE);
    world.plane.start_apiserver().unwrap();
}

/// `fairlead status PEER` and `fairlead ping`, of a peer behind the relay and of another.
fn commands_explain_the_paths(world: &World, relay: &Relay) {
    let hotel = node(world, "hotel-1");
    // Over TCP, and soon over UDP.
    let is_relayed = || {
        let (code, ping) = hotel.ask(&["ping", "club-1", "--count", "1"])?;
        let candidates = ping["rounds"][0]["candidates"].as_array().context("no candidates")?;
        let (relayed, direct): (Vec<&Value>, Vec<&Value>) =
            candidates.iter().partition(|candidate| candidate["kind"] == "relay");
        ensure!(code == Some(0) && ping["peer"] == "club-1", "{code:?} {ping}");
        ensure!(relayed.iter().any(|it| it["inUse"] == true && it["answered"] == true), "{ping}");
        ensure!(!direct.is_empty() && direct.iter().all(|it| it["answered"] == false), "{ping}");
        let host = relay.host.address().to_string();
        ensure!(relayed.iter().all(|it| it["address"].to_string().contains(&host)), "{ping}");
        Ok(ping)
    };
    println!("{}", testbed_lab::eventually(TIMEOUT, is_relayed).unwrap());

    let (_, ping) = hotel.ask(&["ping", "cloud-1", "--count", "2", "--interval", "200ms"]).unwrap();
    let candidates = ping["rounds"][1]["candidates"].as_array().unwrap();
    let used: Vec<&Value> = candidates.iter().filter(|it| it["inUse"] == true).collect();
    assert!(used.len() == 1 && used[0]["answered"] == true && used[0]["kind"] != "relay", "{ping}");
    assert_eq!(hotel.ask(&["ping", "nowhere"]).unwrap(), (Some(1), Value::Null));

    let explained = || {
        let (_, status) = hotel.ask(&["status", "club-1"])?;
        let seen = &status["peers"][0];
        ensure!(seen["relayReason"] == "both symmetric NAT" && status["peers"][1].is_null(), "{status}");
        let last = seen["pathChanges"].as_array().and_then(|changes| changes.last()).context("no change")?;
        ensure!(last["toSource"] == "relay" && last["to"] == seen["endpoint"], "{status}");
        Ok(status)
    };
    println!("{:#}", testbed_lab::eventually(TIMEOUT, explained).unwrap());
    let (_, netcheck) = hotel.ask(&["netcheck"]).unwrap();
    let relay = &netcheck["relays"][0];
    assert!(relay["connected"] == true && netcheck["udp"] == "works", "{netcheck}");
}

#[test]
fn nodes_without_a_direct_path_reach_each_other_by_a_relay() {
    let mut world = World::start(&topology::relayed(), &Progress::default()).unwrap();
    let mut relay = servers::relay(&world).unwrap();
    world.apply_pool().unwrap();
    servers::apply_token(&world, "wrong").unwrap();
    apply_mesh(&world, &json!({ "relay": relay.spec("auto") }));
    world.start_pods().unwrap();
    let refused = || problem_of(&world, "fort-1", "key or token not allowed");
    println!("{}", testbed_lab::eventually(TIMEOUT, refused).unwrap());
    servers::apply_token(&world, TOKEN).unwrap();
    assert_all_reach_each_other(&world);
    settles(&world, needs_relay);
    commands_explain_the_paths(&world, &relay);

    let hotel = || {
        let status = published(&world, "hotel-1")?;
        let expected = json!({ "cloud-1": "direct", "club-1": "relay", "fort-1": "relay" });
        ensure!(status["peerTransports"] == expected && status["transportMode"] == "mixed", "{status}");
        ensure!(status["peers"] == json!({ "total": 3, "direct": 1, "unreachable": 0 }), "{status}");
        ensure!(!status["observedEndpoints"].to_string().contains("127."), "{status}");
        Ok(status)
    };
    let status = testbed_lab::eventually(TIMEOUT, hotel).unwrap();
    let candidates = status["iceCandidates"].as_array().unwrap();
    let of_relay: Vec<&Value> = candidates.iter().filter(|candidate| candidate["type"] == "relay").collect();
    assert_eq!(of_relay, [&json!({ "type": "relay", "address": relay.address(), "priority": 10 })]);

    use_udp_where_they_can(&world);
    let direct = [udp(&world, "cloud-1", "hotel-1"), tcp(&world, "club-1", "cloud-1")];
    let relayed = [udp(&world, "hotel-1", "club-1"), tcp(&world, "fort-1", "cloud-1")];
    std::thread::sleep(Duration::from_secs(3));
    let mark = Instant::now();
    std::thread::sleep(Duration::from_secs(5));
    loses_nothing("at rest", &relayed, mark);

    let mark = Instant::now();
    relay.kill().unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let from = Instant::now();
    relay.run().unwrap();
    resumes("the relay is killed and starts again", &relayed, mark, from, OTHER_PATH);
    loses_nothing("direct paths meanwhile", &direct, mark);

    let mark = Instant::now();
    // Again: what nodes publish of each other meanwhile must not mislead them.
    for _ in 0..3 {
        apply_mesh(&world, &json!({ "relay": relay.spec("always") }));
        settles(&world, |_, _| true);
        apply_mesh(&world, &json!({ "relay": relay.spec("auto") }));
        settles(&world, needs_relay);
    }
    outage::report("everything relayed, and back", &direct, mark);

    let from = Instant::now();
    node(&world, "cloud-1").host.set_faults(|faults| faults.blackholed_udp = [51820].into()).unwrap();
    resumes("a direct path becomes a black hole", &direct, from, from, OTHER_PATH);
    settles(&world, |_, _| true);
    node(&world, "cloud-1").host.set_faults(|faults| faults.blackholed_udp.clear()).unwrap();
    the_nat_of_a_node_without_udp_rebinds(&world);
    knows_the_relay_without_the_api_server(&mut world, &relayed[1..]);
    links_are_cut(&world, &relay, &relayed[..1]);
    a_replica_is_killed(&mut relay, &relayed);
    apply_mesh(&world, &json!({ "relay": relay.spec("never") }));
    let unreachable = || {
        let seen = peer(node(&world, "fort-1"), "cloud-1").context("no peer")?;
        ensure!(seen["state"] != "up", "{seen}");
        Ok(())
    };
    testbed_lab::eventually(TIMEOUT, unreachable).unwrap();
}
