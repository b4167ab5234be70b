//! The direct path between two nodes loses everything, in one direction or both, while they have a relay. Nothing is fake but the
//! kubelet.

use std::time::{Duration, Instant};

use crate::outage::{TIMEOUT, node, peer, resumes, tcp, udp};
use anyhow::{Context, Result, ensure};
use fairlead_demo::servers;
use fairlead_demo::{World, probe, topology};
use serde_json::json;
use testbed_lab::Progress;
use testbed_lab::relay::TOKEN;

/// Longest time until traffic is back: it takes 0.1 to 0.8 s, over TCP up to 1.5 s.
const OTHER_PATH: Duration = Duration::from_secs(8);
const PAIR: [&str; 2] = ["cloud-1", "office-1"];

/// Waits until both nodes send to each other by way of the relay, or directly.
fn settles(world: &World, is_relayed: bool) {
    let settled = || {
        for (from, to) in [(PAIR[0], PAIR[1]), (PAIR[1], PAIR[0])] {
            let seen = peer(node(world, from), to).context("no peer")?;
            let endpoint = seen["endpoint"].as_str().unwrap_or_default();
            ensure!(seen["state"] == "up" && endpoint.contains("://") == is_relayed, "{from}: {seen}");
        }
        Ok(())
    };
    testbed_lab::eventually(TIMEOUT, settled).unwrap();
}

/// Drops all that WireGuard sends and receives on `cloud-1` other than by the relay's TCP connection.
fn black_hole(world: &World, hooks: &[&str]) {
    let chains: String = hooks
        .iter()
        .map(|hook| match *hook {
            "input" => {
                "chain input { type filter hook input priority 0; iifname != lo udp dport 51820 drop; }\n"
            }
            _ => "chain output { type filter hook output priority 0; oifname != lo udp sport 51820 drop; }\n",
        })
        .collect();
    let script = format!("nft -f - <<'END'\ntable inet testdrop {{\n{chains}}}\nEND");
    node(world, PAIR[0]).host.shell(&script).unwrap();
}

/// Another address of a host makes its node try all paths at once.
fn change_network(world: &World, round: usize) -> Result<()> {
    let verb = if round.is_multiple_of(2) { "add" } else { "del" };
    node(world, PAIR[0]).host.shell(&format!("ip address {verb} 192.0.2.77/32 dev eth0")).map(drop)
}

/// `FAIRLEAD_BLACK_HOLES` repeats it, for the figures of `docs/outages.md`.
#[test]
fn traffic_goes_on_by_way_of_the_relay_before_the_direct_path_is_given_up() {
    let mut world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    let relay = servers::relay(&world).unwrap();
    world.apply_pool().unwrap();
    servers::apply_token(&world, TOKEN).unwrap();
    servers::apply_mesh(&world, &json!({ "relay": relay.spec("auto") })).unwrap();
    world.start_pods().unwrap();
    let (pairs, _) = probe::all_pairs(&world.pods, Instant::now() + TIMEOUT, |_, _| String::new()).unwrap();
    assert!(pairs.iter().all(|pair| pair.tcp && pair.icmp), "{pairs:?}");
    let flows = [udp(&world, PAIR[0], PAIR[1]), udp(&world, PAIR[1], PAIR[0]), tcp(&world, PAIR[1], PAIR[0])];
    let rounds = std::env::var("FAIRLEAD_BLACK_HOLES").map_or(1, |rounds| rounds.parse().unwrap());
    let kinds: [(&str, &[&str]); 3] =
        [("both ways", &["input", "output"]), ("inwards", &["input"]), ("outwards", &["output"])];
    for round in 0..rounds * kinds.len() {
        let (what, hooks) = kinds[round % kinds.len()];
        settles(&world, false);
        // Until both nodes have seen that packets flow.
        std::thread::sleep(Duration::from_secs(6));
        let mark = Instant::now();
        black_hole(&world, hooks);
        resumes(&format!("a black hole {what}"), &flows, mark, mark, OTHER_PATH);
        settles(&world, true);
        node(&world, PAIR[0]).host.shell("nft delete table inet testdrop").unwrap();
        change_network(&world, round).unwrap();
    }
}
