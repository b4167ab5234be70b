//! Nodes in two networks that let out nothing but TCP to an HTTP proxy, which wants a password: squid. They reach each other's pods and
//! those of other nodes by way of a relay, and of one behind nginx, which terminates TLS; also after relay and proxy have been started
//! again. Nothing is fake but the kubelet; the API server, which the
//! node program does not reach by proxies, is let through.

use std::time::{Duration, Instant};

use crate::outage::{TIMEOUT, loses_nothing, node, peer, resumes, tcp, udp};
use anyhow::{Context, Result, ensure};
use fairlead_demo::proxies::{Nginx, PASSWORD, Squid};
use fairlead_demo::{World, probe, servers, topology};
use serde_json::{Value, json};
use testbed_lab::relay::{Relay, TOKEN};
use testbed_lab::traffic::Flow;
use testbed_lab::{Host, Progress, eventually};

/// The nodes behind the proxy, of different sites.
const BEHIND: [&str; 2] = ["fort-1", "club-1"];
/// Downtime of relay and proxy when they are started again.
const AWAY: Duration = Duration::from_secs(1);
/// Longest time until traffic is back then.
const BACK: Duration = Duration::from_secs(30);
/// Time for which traffic is watched.
const WATCHED: Duration = Duration::from_secs(3);

/// Starts the node programs anew with a proxy in their environment.
fn restart_with(world: &mut World, proxy: &str) {
    let exempt = world.plane_host().address().to_string();
    for name in BEHIND {
        let behind = world.node(name).unwrap();
        behind.stop().unwrap();
        behind.environment = vec![("HTTPS_PROXY", proxy.to_owned()), ("NO_PROXY", exempt.clone())];
        behind.start().unwrap();
        behind.wait_ready(TIMEOUT).unwrap();
    }
}

/// A node says that the proxy refuses it.
fn is_refused(world: &World, name: &str) -> Result<String> {
    let status = node(world, name).status()?;
    let problems = status["problems"].as_array().context("no problems")?;
    let found = problems.iter().filter_map(Value::as_str).find(|problem| problem.contains("status 407"));
    found.map(str::to_owned).with_context(|| format!("{status:#}"))
}

/// Between the pods of the nodes behind the proxy, and between these and others, each way.
fn flows(world: &World) -> [Flow; 6] {
    let [one, other] = BEHIND;
    [
        udp(world, one, other),
        udp(world, other, one),
        udp(world, one, "cloud-1"),
        udp(world, "cloud-1", other),
        tcp(world, "hotel-1", one),
        tcp(world, other, one),
    ]
}

/// Waits until the nodes behind the proxy send by this relay.
fn use_relay(world: &World, relay: &str) {
    let [one, other] = BEHIND;
    let is_used = || {
        for (from, to) in [(one, other), (other, one), (one, "cloud-1"), (other, "cloud-1")] {
            let seen = peer(node(world, from), to).context("no peer")?;
            ensure!(seen["state"] == "up" && seen["endpoint"] == relay, "{from} to {to}: {seen}");
        }
        Ok(())
    };
    eventually(TIMEOUT, is_used).unwrap();
}

/// All pods reach each other, those of the nodes behind the proxy by this relay, and nothing is lost.
fn all_reach_each_other(world: &World, what: &str, relay: &str) {
    use_relay(world, relay);
    let (pairs, _) = probe::all_pairs(&world.pods, Instant::now() + TIMEOUT, |_, _| String::new()).unwrap();
    assert!(pairs.iter().all(|pair| pair.tcp && pair.icmp), "{pairs:?}");
    println!("{what}: all pairs, {BEHIND:?} by {relay}");
    let flows = flows(world);
    std::thread::sleep(Duration::from_secs(1));
    let mark = Instant::now();
    std::thread::sleep(WATCHED);
    loses_nothing(what, &flows, mark);
}

/// Number of connections that a machine has from another one.
fn connections(at: &Host, from: &Host) -> usize {
    let address = from.public_address();
    at.shell(&format!("ss -Htn state established sport = :443 dst {address}")).unwrap().lines().count()
}

/// Relay and proxy are killed and start again; nothing else has to be done.
fn survive_restarts(world: &World, relay: &mut Relay, squid: &mut Squid) {
    let flows = flows(world);
    std::thread::sleep(Duration::from_secs(1));
    let mark = Instant::now();
    relay.kill().unwrap();
    std::thread::sleep(AWAY);
    let from = Instant::now();
    relay.run().unwrap();
    resumes("the relay is killed and starts again", &flows, mark, from, BACK);
    let mark = Instant::now();
    squid.restart(AWAY).unwrap();
    resumes("the proxy is killed and starts again", &flows, mark, Instant::now(), BACK);
    use_relay(world, &format!("tcp://{}", relay.address()));
}

#[test]
fn nodes_behind_squid_use_a_relay_and_one_behind_nginx() {
    let mut world = World::start(&topology::relayed(), &Progress::default()).unwrap();
    let mut squid = Squid::start(&world).unwrap();
    let mut relay = servers::relay(&world).unwrap();
    let nginx = Nginx::start(&world).unwrap();
    let rules = squid.only_way(&world.plane_host().address().to_string());
    for name in BEHIND {
        let router = node(&world, name).host.router().unwrap();
        router.shell(&format!("nft -f - <<'END'\n{rules}\nEND")).unwrap();
    }
    restart_with(&mut world, &squid.url("wrong"));
    world.apply_pool().unwrap();
    servers::apply_token(&world, TOKEN).unwrap();
    servers::apply_mesh(&world, &json!({ "relay": relay.spec("auto") })).unwrap();
    world.start_pods().unwrap();
    for name in BEHIND {
        println!("{name}: {}", eventually(TIMEOUT, || is_refused(&world, name)).unwrap());
    }

    restart_with(&mut world, &squid.url(PASSWORD));
    all_reach_each_other(&world, "squid", &format!("tcp://{}", relay.address()));
    assert!(connections(&relay.host, &squid.host) > 0, "squid has no connection to the relay");
    for name in BEHIND {
        assert_eq!(connections(&relay.host, &node(&world, name).host), 0);
    }
    survive_restarts(&world, &mut relay, &mut squid);

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
