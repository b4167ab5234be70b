//! Two nodes behind symmetric NATs reach each other directly when the router of one maps a port: miniupnpd on the lab's router.

use std::fs;
use std::net::SocketAddr;
use std::process::Command;
use std::time::Duration;

use crate::outage::{TIMEOUT, node, peer, pod};
use anyhow::{Context, ensure};
use fairlead_demo::{World, probe, servers, topology};
use serde_json::{Value, json};
use testbed_lab::{Process, Progress, Router};

/// A second public address of the router. miniupnpd takes none of those that the lab has, which are for documentation.
const EXTERNAL: &str = "11.0.0.5";
const PORT: u16 = 51820;
/// Time for which nodes that cannot find each other are watched.
const WATCHED: Duration = Duration::from_secs(5);

fn apply_mesh(world: &World, spec: &Value) {
    servers::apply_mesh(world, spec).unwrap();
}

/// miniupnpd with chains of its own, beside the rules of the lab.
fn miniupnpd(world: &World, router: &Router) -> Process {
    let internet = world.lab().internet();
    internet.shell(&format!("ip route add {EXTERNAL} via {}", router.address())).unwrap();
    let rules = "nft -f - <<END
table inet home {
  chain opened { }
  chain prerouting_miniupnpd { }
  chain postrouting_miniupnpd { }
  chain prerouting { type nat hook prerouting priority -90; jump prerouting_miniupnpd; }
}
insert rule ip lab forward iifname wan ct status dnat accept
END";
    router.shell(&format!("ip addr add {EXTERNAL}/32 dev wan; {rules}")).unwrap();
    let file = |name: &str| world.directory().join(format!("miniupnpd.{name}"));
    let configuration = format!(
        "ext_ifname=wan\next_ip={EXTERNAL}\nlistening_ip=lan\nhttp_port=0\nipv6_disable=yes\nenable_natpmp=yes\n\
         enable_upnp=yes\nupnp_table_name=home\nupnp_nat_table_name=home\nupnp_forward_chain=opened\n\
         upnp_nat_chain=prerouting_miniupnpd\nupnp_nat_postrouting_chain=postrouting_miniupnpd\n\
         uuid=00000000-0000-4000-8000-000000000001\nallow 1024-65535 10.0.0.0/8 1024-65535\n"
    );
    fs::write(file("conf"), configuration).unwrap();
    let mut command = Command::new("miniupnpd");
    command.arg("-d").arg("-f").arg(file("conf")).arg("-P").arg(file("pid"));
    router.spawn(&mut command, file("log")).unwrap()
}

fn is_mapped(router: &Router) -> bool {
    router.shell("nft list chain inet home prerouting_miniupnpd").unwrap().contains(&PORT.to_string())
}

#[test]
fn a_mapped_port_connects_nodes_behind_symmetric_nats() {
    let mut world = World::start(&topology::relayed(), &Progress::default()).unwrap();
    let router = node(&world, "hotel-1").host.router().unwrap();
    let _daemon = miniupnpd(&world, &router);
    world.apply_pool().unwrap();
    apply_mesh(&world, &json!({ "natTraversal": { "portMapping": "disabled" } }));
    world.start_pods().unwrap();
    let direct = || {
        let seen = peer(node(&world, "hotel-1"), "cloud-1").context("no peer")?;
        ensure!(seen["state"] == "up", "{seen}");
        Ok(())
    };
    testbed_lab::eventually(TIMEOUT, direct).unwrap();
    std::thread::sleep(WATCHED);
    let seen = peer(node(&world, "club-1"), "hotel-1").unwrap();
    assert!(seen["state"] != "up" && !is_mapped(&router), "{seen}");

    apply_mesh(&world, &json!({}));
    let external: SocketAddr = format!("{EXTERNAL}:{PORT}").parse().unwrap();
    let reaches = || {
        let seen = peer(node(&world, "club-1"), "hotel-1").context("no peer")?;
        ensure!(seen["state"] == "up" && seen["endpoint"] == external.to_string(), "{seen}");
        Ok(())
    };
    testbed_lab::eventually(TIMEOUT, reaches).unwrap();
    let says = || {
        let peer = world.published("hotel-1")?;
        ensure!(peer["spec"]["endpoint"] == external.to_string(), "{peer}");
        ensure!(peer["status"]["endpointDiscoveryMethod"] == "upnp", "{peer}");
        let candidates = peer["status"]["iceCandidates"].as_array().context("no candidates")?;
        let mapped = json!({ "type": "srflx", "address": external.to_string(), "priority": 200 });
        ensure!(candidates.contains(&mapped), "{peer}");
        Ok(())
    };
    testbed_lab::eventually(TIMEOUT, says).unwrap();
    let status = node(&world, "hotel-1").status().unwrap();
    let gateway = router.lan_address().to_string();
    let lifetime = status["portMappings"][0]["lifetimeSeconds"].as_u64().unwrap();
    assert!((1..=7200).contains(&lifetime), "{status}");
    let mapping = json!({
        "gateway": gateway, "protocol": "PCP", "external": external.to_string(), "error": "",
        "lifetimeSeconds": lifetime,
    });
    assert_eq!(status["portMappings"], json!([mapping]));
    assert_eq!(node(&world, "club-1").status().unwrap()["portMappings"], json!([]));
    let pair = [pod(&world, "hotel-1").clone(), pod(&world, "club-1").clone()];
    let deadline = std::time::Instant::now() + TIMEOUT;
    let (pairs, _) = probe::all_pairs(&pair, deadline, |_, _| String::new()).unwrap();
    assert!(pairs.iter().all(|pair| pair.tcp && pair.icmp), "{pairs:?}");

    // Switched off, the router has nothing of it any more. The connection itself lasts as long as the router tracks it, and the
    // other node says where it sees this one.
    apply_mesh(&world, &json!({ "natTraversal": { "portMapping": "disabled" } }));
    let is_gone = || {
        ensure!(!is_mapped(&router), "still mapped");
        let peer = world.published("hotel-1")?;
        let candidates = peer["status"]["iceCandidates"].to_string();
        ensure!(
            !candidates.contains(EXTERNAL) && peer["status"]["endpointDiscoveryMethod"] != "upnp",
            "{peer}"
        );
        Ok(())
    };
    testbed_lab::eventually(TIMEOUT, is_gone).unwrap();
}
