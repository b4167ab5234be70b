//! A node in a network without IPv4 reaches IPv4-only nodes directly through the NAT64 of its network: tayga on the router, and
//! dnsmasq as its DNS64.

use std::fs;
use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use crate::outage::{TIMEOUT, node, peer, pod};
use anyhow::{Context, ensure};
use fairlead_demo::judge::{count_tunnel_packets, counted_tunnel_packets};
use fairlead_demo::node::Node;
use fairlead_demo::objects::PEERS;
use fairlead_demo::servers::{apply_mesh, apply_token, dual_stack_relay, relay, stun_server};
use fairlead_demo::{World, probe, topology};
use serde_json::{Value, json};
use testbed_lab::relay::TOKEN;
use testbed_lab::{Ipv6, Nat, Nat64, NatSite, Progress, SiteOptions};

const MOBILE: &str = "mobile-1";

/// The site, and its node, which reaches the API server through the NAT64 as well.
fn join_mobile(world: &mut World, has_dns64: bool) -> (NatSite, Nat64) {
    let lan = "10.9.0.0/24".parse().unwrap();
    let options = SiteOptions { ipv6: Ipv6::Global, ..SiteOptions::new(Nat::PortRestricted, lan) };
    let site = world.lab().site("mobile", options).unwrap();
    let directory = world.directory().join(MOBILE);
    fs::create_dir(&directory).unwrap();
    let nat64 = Nat64::start(&site, &directory, has_dns64).unwrap();
    let host = nat64.host(MOBILE).unwrap();
    let mut node = Node::new(MOBILE, "mobile", host, directory);
    node.is_ipv6_only = true;
    world.join(&node).unwrap();
    let api = world.plane_host().address();
    translate_server(&node, api, &format!("[{}]", nat64.address_of(api)));
    node.start().unwrap();
    node.wait_ready(TIMEOUT).unwrap();
    world.nodes.push(node);
    (site, nat64)
}

/// The certificate of the API server has its IPv4 address.
fn translate_server(node: &Node, address: Ipv4Addr, translated: &str) {
    let text = fs::read_to_string(node.kubeconfig()).unwrap();
    let mut config: Value = serde_json::from_str(&text).unwrap();
    let cluster = &mut config["clusters"][0]["cluster"];
    let server = cluster["server"].as_str().unwrap().replace(&address.to_string(), translated);
    cluster["server"] = json!(server);
    cluster["tls-server-name"] = json!(address.to_string());
    fs::write(node.kubeconfig(), config.to_string()).unwrap();
}

fn reach_each_other(world: &World, names: [&str; 2]) {
    let pair = names.map(|name| pod(world, name).clone());
    let (pairs, _) = probe::all_pairs(&pair, Instant::now() + TIMEOUT, |_, _| String::new()).unwrap();
    assert!(pairs.iter().all(|pair| pair.tcp && pair.icmp), "{pairs:?}");
}

#[test]
fn a_node_without_ipv4_reaches_nodes_without_ipv6_through_the_nat64() {
    let mut world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    world.apply_mesh_and_pool().unwrap();
    let (site, nat64) = join_mobile(&mut world, true);
    let (outside, cloud) = (site.router().address(), node(&world, "cloud-1").host.address());
    count_tunnel_packets(&world, outside, cloud).unwrap();
    world.start_pods().unwrap();
    let translated = format!("[{}]:51820", nat64.address_of(cloud));
    let reaches = |world: &World| {
        let seen = peer(node(world, MOBILE), "cloud-1").context("no peer")?;
        ensure!(seen["state"] == "up" && seen["endpoint"] == translated.as_str(), "{seen}");
        ensure!(seen["endpointSource"] == "nat64", "{seen}");
        Ok(())
    };
    world.wait_for(TIMEOUT, reaches).unwrap();
    let status = node(&world, MOBILE).status().unwrap();
    assert_eq!(status["nat64Prefixes"], json!([nat64.prefix().to_string()]));
    reach_each_other(&world, [MOBILE, "cloud-1"]);
    let packets = counted_tunnel_packets(&world).unwrap();
    assert!(packets.len() == 2 && packets.iter().all(|count| *count > 0), "{packets:?}");
    // The other one is behind a NAT of IPv4; nodes see it and publish that.
    reach_each_other(&world, [MOBILE, "office-1"]);

    // STUN servers with IPv4 addresses say what the NAT64 does, as they would of any NAT; a relay with one is reached too.
    let servers = ["stun-1", "stun-2"].map(|name| stun_server(&world, name).unwrap());
    let names: Vec<String> = servers.iter().map(|(host, _)| format!("stun:{}", host.address())).collect();
    let relay = relay(&world).unwrap();
    apply_token(&world, TOKEN).unwrap();
    apply_mesh(&world, &json!({ "stunServers": names, "relay": relay.spec("auto") })).unwrap();
    let is_known = |world: &World| {
        let mobile = world.published(MOBILE)?;
        // What it lets in is known once the relay has tried.
        let nat = mobile["status"]["natType"].as_str().context("no type of the NAT")?;
        ensure!(matches!(nat, "cone" | "port-restricted-cone"), "{mobile}");
        let endpoint = mobile["spec"]["endpoint"].as_str().context("no endpoint")?;
        ensure!(endpoint.starts_with(&format!("{outside}:")), "{endpoint}");
        Ok(())
    };
    world.wait_for(TIMEOUT, is_known).unwrap();
    let has_relay = |world: &World| {
        let status = node(world, MOBILE).status()?;
        ensure!(status["relay"]["connected"] == true, "{}", status["relay"]);
        Ok(())
    };
    world.wait_for(TIMEOUT, has_relay).unwrap();
    std::thread::sleep(Duration::from_secs(1));
    let all = world.plane.get(PEERS).unwrap().to_string();
    let prefix = nat64.prefix().network().to_string();
    assert!(!all.contains(prefix.trim_end_matches(':')), "published beyond the NAT64: {all}");
}

/// The name of the relay, which has addresses of both families.
const RELAY: &str = "relay.example";

#[test]
fn without_a_nat64_a_relay_with_both_families_is_between_ipv4_and_ipv6() {
    let mut world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    world.apply_pool().unwrap();
    let relay = dual_stack_relay(&world, RELAY).unwrap();
    let hosts = world.directory().join("hosts");
    let addresses = [relay.host.address().to_string(), relay.host.address6().unwrap().to_string()];
    fs::write(&hosts, addresses.map(|address| format!("{address} {RELAY}\n")).concat()).unwrap();
    // The node knows no prefix: only its kubeconfig has an address of the NAT64.
    let _site = join_mobile(&mut world, false);
    for node in &world.nodes {
        node.host.shell(&format!("mount --bind {} /etc/hosts", hosts.display())).unwrap();
    }
    apply_token(&world, TOKEN).unwrap();
    apply_mesh(&world, &json!({ "relay": relay.spec("auto") })).unwrap();
    world.start_pods().unwrap();
    let reaches = |world: &World| {
        let seen = peer(node(world, MOBILE), "office-1").context("no peer")?;
        ensure!(seen["state"] == "up" && seen["endpointSource"] == "relay", "{seen}");
        Ok(())
    };
    world.wait_for(TIMEOUT, reaches).unwrap();
    reach_each_other(&world, [MOBILE, "office-1"]);
    assert_eq!(node(&world, MOBILE).status().unwrap()["nat64Prefixes"], json!([]));
}
