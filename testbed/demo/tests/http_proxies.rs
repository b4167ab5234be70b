//! A node in a network that lets out nothing but TCP to an HTTP proxy, which wants a password: squid. It reaches the pods of other
//! nodes by way of a relay, and of one behind nginx, which terminates TLS. Nothing is fake but the kubelet; the API server, which the
//! node program does not reach by proxies, is let through.

#![cfg(test)]

mod outage;

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fairlead_demo::proxies::{Nginx, PASSWORD, Squid};
use fairlead_demo::{World, probe, servers, topology};
use outage::{TIMEOUT, loses_nothing, node, peer, tcp, udp};
use serde_json::{Value, json};
use testbed_lab::relay::TOKEN;
use testbed_lab::{Host, Progress, eventually};

/// The node behind the proxy.
const BEHIND: &str = "fort-1";
/// How long traffic is watched.
const WATCHED: Duration = Duration::from_secs(3);

/// Starts the node program anew with a proxy in its environment.
fn restart_with(world: &mut World, proxy: String) {
    let exempt = world.plane_host().address().to_string();
    let fort = world.node(BEHIND).unwrap();
    fort.stop().unwrap();
    fort.environment = vec![("HTTPS_PROXY", proxy), ("NO_PROXY", exempt)];
    fort.start().unwrap();
    fort.wait_ready(TIMEOUT).unwrap();
}

/// The node says that the proxy refuses it.
fn is_refused(world: &World) -> Result<String> {
    let status = node(world, BEHIND).status()?;
    let problems = status["problems"].as_array().context("no problems")?;
    let found = problems.iter().filter_map(Value::as_str).find(|problem| problem.contains("status 407"));
    found.map(str::to_owned).with_context(|| format!("{status:#}"))
}

/// All pods reach each other, those of the node behind the proxy by this relay, and nothing is lost.
fn all_reach_each_other(world: &World, what: &str, relay: &str) {
    let is_used = || {
        let seen = peer(node(world, BEHIND), "cloud-1").context("no peer")?;
        ensure!(seen["state"] == "up" && seen["endpoint"] == relay, "{seen}");
        Ok(())
    };
    eventually(TIMEOUT, is_used).unwrap();
    let (pairs, _) = probe::all_pairs(&world.pods, Instant::now() + TIMEOUT, |_, _| String::new()).unwrap();
    assert!(pairs.iter().all(|pair| pair.tcp && pair.icmp), "{pairs:?}");
    println!("{what}: all pairs, {BEHIND} to cloud-1 by {relay}");
    let flows = [udp(world, BEHIND, "cloud-1"), tcp(world, "hotel-1", BEHIND)];
    std::thread::sleep(Duration::from_secs(1));
    let mark = Instant::now();
    std::thread::sleep(WATCHED);
    loses_nothing(what, &flows, mark);
}

/// How many connections a machine has from another one.
fn connections(at: &Host, from: &Host) -> usize {
    let address = from.public_address();
    at.shell(&format!("ss -Htn state established sport = :443 dst {address}")).unwrap().lines().count()
}

#[test]
fn a_node_behind_squid_uses_a_relay_and_one_behind_nginx() {
    let mut world = World::start(&topology::relayed(), &Progress::default()).unwrap();
    let squid = Squid::start(&world).unwrap();
    let relay = servers::relay(&world).unwrap();
    let nginx = Nginx::start(&world).unwrap();
    let router = node(&world, BEHIND).host.router().unwrap().clone();
    let rules = squid.only_way(&world.plane_host().address().to_string());
    router.shell(&format!("nft -f - <<'END'\n{rules}\nEND")).unwrap();
    restart_with(&mut world, squid.url("wrong"));
    world.apply_pool().unwrap();
    servers::apply_token(&world, TOKEN).unwrap();
    servers::apply_mesh(&world, &json!({ "relay": relay.spec("auto") })).unwrap();
    world.start_pods().unwrap();
    println!("{}", eventually(TIMEOUT, || is_refused(&world)).unwrap());

    restart_with(&mut world, squid.url(PASSWORD));
    all_reach_each_other(&world, "squid", &format!("tcp://{}", relay.address()));
    assert!(connections(&relay.host, &squid.host) > 0, "squid has no connection to the relay");
    assert_eq!(connections(&relay.host, &node(&world, BEHIND).host), 0);

    // Registrations are not bound to the connection: nginx is an end of TLS.
    servers::apply_mesh(&world, &json!({ "relay": nginx.spec() })).unwrap();
    all_reach_each_other(&world, "squid, then nginx", &format!("wss://{}", nginx.relay.address()));
    assert!(connections(&nginx.relay.host, &squid.host) > 0, "squid has no connection to nginx");

    // Both write a line of a connection when it has ended.
    servers::apply_mesh(&world, &json!({ "relay": relay.spec("never") })).unwrap();
    let relays = [relay.host.address(), nginx.relay.host.address()];
    let logged = || {
        let (served, tunnels) = (nginx.log()?, squid.log()?);
        ensure!(served.contains("\"GET /relay HTTP/1.1\" 101 "), "nginx: {served}");
        ensure!(tunnels.contains("TCP_DENIED/407 "), "squid: {tunnels}");
        for relay in relays {
            let is_it = |line: &str| {
                line.contains("TCP_TUNNEL/200") && line.contains(&format!("CONNECT {relay}:443 node"))
            };
            ensure!(tunnels.lines().any(is_it), "no tunnel to {relay}: {tunnels}");
        }
        Ok(tunnels)
    };
    println!("{}", eventually(TIMEOUT, logged).unwrap());
}
