//! Bad input of every kind, one after another in one world. Each is answered by an error that names the thing; nothing
//! is lost by it, and pods on other nodes do not notice. Nothing is fake but the kubelet.

use std::fs;
use std::io::{Read, Write};
use std::net::IpAddr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fairlead_demo::cni::{Container, Plugin, Pod};
use fairlead_demo::node::{Node, executable};
use fairlead_demo::objects::POOLS;
use fairlead_demo::{World, probe};
use serde_json::{Value, json};

use crate::annotations;
use crate::claims;
use crate::outage;
use crate::outage::{TIMEOUT, container, node, pod, used};

/// Pods that the tests leave alone: one of each site.
const BYSTANDERS: [&str; 3] = ["cloud-1", "home-1", "office-2"];
/// More connections than any plugin would open, few enough for the limit of open files.
const CONNECTIONS: usize = 200;
/// `CNI_ERROR` codes of the CNI specification.
const INCOMPATIBLE_VERSION: u64 = 1;
const UNKNOWN_CONTAINER: u64 = 3;
const ENVIRONMENT: u64 = 4;
const DECODING: u64 = 6;
const NETWORK_CONFIG: u64 = 7;
const TRY_AGAIN_LATER: u64 = 11;

#[test]
fn bad_input_is_named_and_disturbs_nothing_else() {
    let mut world = outage::mesh();
    type Step = fn(&mut World);
    let steps: [(&str, Step, &[&str]); 11] = [
        ("a pool with a bad subnet", a_pool_with_a_bad_subnet_is_refused, &BYSTANDERS),
        ("pools that overlap", pools_that_overlap_are_told, &BYSTANDERS),
        ("an unknown pool", an_unknown_pool_is_named_until_it_is_made, &BYSTANDERS),
        ("garbage on the socket", garbage_on_the_socket_is_survived, &BYSTANDERS),
        ("calls that make no sense", calls_that_make_no_sense_have_their_codes, &BYSTANDERS),
        ("a pool that runs dry", a_dry_pool_says_so_and_recovers, &BYSTANDERS),
        ("no node program", without_a_node_program_the_socket_is_named, &BYSTANDERS),
        ("a foreign address", claims::a_foreign_address_is_left_out, &BYSTANDERS),
        ("annotations", annotations::annotations_that_cannot_be_read_are_left_out_with_a_reason, &BYSTANDERS),
        ("a corrupt key file", a_corrupt_key_file_is_named_and_kept, &BYSTANDERS),
        ("one key on two nodes", a_key_on_two_nodes_stays_one_peer, &["home-1", "home-2", "office-2"]),
    ];
    let pods = world.pods.clone();
    // Between nodes that the tests leave alone, all the time.
    let flows = [outage::udp(&world, "home-1", "office-2"), outage::tcp(&world, "office-2", "home-1")];
    let mark = Instant::now();
    for (name, step, bystanders) in steps {
        let start = Instant::now();
        step(&mut world);
        pods_reach_each_other(name, &world, bystanders);
        println!("{name}: ok, {:.1} s", start.elapsed().as_secs_f64());
    }
    outage::loses_nothing("bad input", &flows, mark);
    drop(flows);
    all_is_well_again(&world, &pods);
}

/// Every pair of the pods of these nodes, by TCP and ICMP in both families.
fn pods_reach_each_other(after: &str, world: &World, nodes: &[&str]) {
    let pods: Vec<Pod> = nodes.iter().map(|node| pod(world, node).clone()).collect();
    reach(after, &pods);
}

fn reach(after: &str, pods: &[Pod]) {
    let (pairs, _) = probe::all_pairs(pods, Instant::now() + TIMEOUT, |_, _| String::new()).unwrap();
    let failed: Vec<_> = pairs.iter().filter(|pair| !(pair.tcp && pair.icmp)).collect();
    assert!(!pairs.is_empty() && failed.is_empty(), "after {after}: {failed:?}");
}

fn all_is_well_again(world: &World, pods: &[Pod]) {
    reach("everything", pods);
    for node in &world.nodes {
        let status = node.status().unwrap();
        // The duplicate address belongs to this topology.
        let problems = status["problems"].as_array().unwrap();
        assert!(
            matches!(&problems[..], [only] if only.as_str().unwrap().contains("192.168.1.10/32")),
            "{problems:?}"
        );
    }
}

/// Error that the plugin prints when it fails.
#[derive(Debug)]
struct Refusal {
    code: u64,
    text: String,
}

fn refusal(output: &Output) -> Refusal {
    assert!(!output.status.success(), "it succeeded: {}", String::from_utf8_lossy(&output.stdout));
    let answer: Value = serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|error| panic!("{error}: {:?}", String::from_utf8_lossy(&output.stdout)));
    assert!(answer["cniVersion"].is_string() && !answer["msg"].as_str().unwrap().is_empty(), "{answer}");
    let text =
        format!("{} {}", answer["msg"].as_str().unwrap(), answer["details"].as_str().unwrap_or_default());
    println!("  {} {text}", answer["code"]);
    Refusal { code: answer["code"].as_u64().unwrap(), text }
}

fn add_fails(plugin: &Plugin, container: &Container) -> Refusal {
    refusal(&plugin.call("ADD", container, &plugin.configuration()).unwrap())
}

/// A namespace whose pods get their addresses from a pool.
fn namespace_of_pool(world: &World, pool: &str) {
    let yaml = json!({
        "apiVersion": "v1", "kind": "Namespace",
        "metadata": { "name": pool, "annotations": { "coil.cybozu.com/pool": pool } },
    });
    world.plane.apply(&yaml.to_string()).unwrap();
}

fn pool(name: &str, bits: u8, ipv4: &str) -> String {
    json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "AddressPool", "metadata": { "name": name },
        "spec": { "blockSizeBits": bits, "subnets": [{ "ipv4": ipv4 }] },
    })
    .to_string()
}

fn ready(world: &World, pool: &str) -> Result<Value> {
    condition(world, pool, "Ready")
}

fn condition(world: &World, pool: &str, wanted: &str) -> Result<Value> {
    let object = world.plane.get(&format!("{POOLS}/{pool}"))?;
    let conditions = object["status"]["conditions"].as_array().context("no conditions")?;
    conditions.iter().find(|condition| condition["type"] == wanted).cloned().context("no such condition")
}

fn wait_for_reason(world: &World, pool: &str, status: &str, reason: &str) -> String {
    let message = world.wait_for(TIMEOUT, |world| {
        let ready = ready(world, pool)?;
        ensure!(ready["status"] == status && ready["reason"] == reason, "{pool}: {ready}");
        Ok(ready["message"].as_str().unwrap_or_default().to_owned())
    });
    message.unwrap()
}

fn a_pool_with_a_bad_subnet_is_refused(world: &mut World) {
    for (name, subnet, word) in [
        ("words", "ten-sixty-four", "'ten-sixty-four' is not an IPv4 prefix"),
        ("octets", "10.300.0.0/16", "'10.300.0.0/16' is not an IPv4 prefix"),
        ("family", "fd00::/112", "'fd00::/112' is not an IPv4 prefix"),
        ("narrow", "10.9.0.0/30", "too narrow subnet: 10.9.0.0/30"),
    ] {
        let error = format!("{:#}", world.plane.apply(&pool(name, 5, subnet)).unwrap_err());
        println!("  {}", error.trim());
        assert!(error.contains(&format!("AddressPool \"{name}\" is invalid")), "{error}");
        assert!(error.contains(word), "{error}");
        assert!(world.plane.kubectl(&["get", "addresspool", name]).is_err(), "{name} is there");
    }
    // Nor may a pool that is in use be made bad.
    let patch = r#"{"spec": {"subnets": [{"ipv4": "10.65.0.0/16", "ipv6": "fd02:fa1e::/112"}]}}"#;
    let refused = world.plane.kubectl(&["patch", "addresspool", "default", "--type=merge", "-p", patch]);
    assert!(format!("{:#}", refused.unwrap_err()).contains("spec.subnets may only grow"));
    wait_for_reason(world, "default", "True", "Available");
}

fn pools_that_overlap_are_told(world: &mut World) {
    let clash = pool("clash", 5, "10.64.128.0/17");
    let denied = |world: &World| {
        let create = ["create", "--dry-run=server", "-f", "-"];
        let error = world.plane.kubectl_stdin(&create, &clash).err().context("accepted")?.to_string();
        let words =
            "denied request: subnet 10.64.128.0/17 of pool clash overlaps 10.64.0.0/16 of pool default";
        ensure!(error.contains(words), "{error}");
        Ok(())
    };
    world.wait_for(TIMEOUT, denied).unwrap();
    // Of two made at the same moment the policy sees neither. Here it is not in force.
    let policy = "validatingadmissionpolicybinding/fairlead-pools-do-not-overlap";
    world.plane.kubectl(&["delete", policy]).unwrap();
    world.wait_for(TIMEOUT, |world| world.plane.apply(&clash)).unwrap();
    let message = wait_for_reason(world, "clash", "False", "Overlap");
    println!("  clash: {message}");
    for name in ["clash", "default"] {
        let overlapping = || condition(world, name, "Overlapping");
        let reported = world.wait_for(TIMEOUT, |_| {
            overlapping().and_then(|reported| {
                ensure!(reported["status"] == "True", "{reported}");
                Ok(reported["message"].as_str().unwrap_or_default().to_owned())
            })
        });
        let reported = reported.unwrap();
        println!("  {name}: {reported}");
        for word in ["10.64.128.0/17", "10.64.0.0/16", "clash", "only default, the older one"] {
            assert!(reported.contains(word), "{word} is not in {reported}");
        }
    }
    wait_for_reason(world, "default", "True", "Available");
    // What is in one pool only is still given.
    let before = used(node(world, "cloud-1"));
    let late = world.start_pod("beside-overlap", "cloud-1").unwrap().clone();
    assert_eq!(used(node(world, "cloud-1")), before + 1);
    probe::ping(&late, pod(world, "home-2").addresses[0]).unwrap();

    let policies = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../deploy/policy");
    world.plane.kubectl(&["apply", "--server-side", "-k", &policies.to_string_lossy()]).unwrap();
    world.wait_for(TIMEOUT, denied).unwrap();
    // The policy holds up nothing that adds no subnet.
    world.plane.kubectl(&["label", "addresspool", "clash", "seen=yes"]).unwrap();
    let drain = r#"{"spec": {"disabled": true}}"#;
    world.plane.kubectl(&["patch", "addresspool", "clash", "--type=merge", "-p", drain]).unwrap();
    world.plane.kubectl(&["delete", "addresspool", "clash", "--timeout=30s"]).unwrap();
}

fn an_unknown_pool_is_named_until_it_is_made(world: &mut World) {
    namespace_of_pool(world, "nowhere");
    let at = node(world, "home-2");
    let (plugin, before) = (at.plugin().unwrap(), used(at));
    let one = container(world, "of-nowhere", "nowhere");
    let start = Instant::now();
    let refused = add_fails(&plugin, &one);
    println!("  refused after {:.0} ms", start.elapsed().as_secs_f64() * 1000.0);
    assert_eq!(refused.code, NETWORK_CONFIG);
    assert!(refused.text.contains("pool nowhere does not exist"), "{refused:?}");
    assert!(refused.text.contains("coil.cybozu.com/pool"), "{refused:?}");
    assert_eq!(used(at), before);

    world.plane.apply(&pool("nowhere", 2, "10.77.0.0/24")).unwrap();
    let addresses = world.wait_for(TIMEOUT, |_| plugin.add(&one)).unwrap();
    assert!(matches!(addresses[..], [IpAddr::V4(ip)] if ip.octets()[..3] == [10, 77, 0]), "{addresses:?}");
    // Pods of every pool are in the mesh, without being announced.
    let (from, to) = (pod(world, "office-2"), addresses[0]);
    world.wait_for(TIMEOUT, |_| probe::ping(from, to)).unwrap();
    plugin.del(&one).unwrap();
    assert_eq!(used(at), before);
}

/// Bytes that repeat in every run (xorshift64, Marsaglia 2003).
fn noise(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.to_le_bytes()[0]
    };
    (0..length).map(|_| next()).collect()
}

fn garbage_on_the_socket_is_survived(world: &mut World) {
    const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
    let at = node(world, "home-2");
    let memory = at.resident_mib().unwrap();
    let connect = || UnixStream::connect(at.socket()).unwrap();
    for seed in 1..=20 {
        // It may hang up in the middle; that is an answer.
        let _ = connect().write_all(&noise(seed, 100_000));
        let mut polite = connect();
        let _ = polite.write_all(&[PREFACE, &noise(seed, 10_000)].concat());
        polite.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
        let _ = polite.read_to_end(&mut Vec::new());
        // The largest frame that can be announced, on which nothing follows.
        let _ = connect().write_all(&[PREFACE, &[0xff, 0xff, 0xff, 0, 0, 0, 0, 0, 1]].concat());
    }
    let half: Vec<UnixStream> = (0..CONNECTIONS)
        .map(|index| {
            let mut stream = connect();
            stream.write_all(&PREFACE[..index % PREFACE.len()]).unwrap();
            stream
        })
        .collect();
    let answered = Instant::now();
    at.status().unwrap();
    println!(
        "  with {} half-open connections status took {:.0} ms; memory {memory:.1} MiB before, {:.1} MiB now",
        half.len(),
        answered.elapsed().as_secs_f64() * 1000.0,
        at.resident_mib().unwrap()
    );
    let one = container(world, "amid-garbage", "demo");
    let addresses = at.plugin().unwrap().add(&one).unwrap();
    assert_eq!(addresses.len(), 2);
    drop(half);
    at.plugin().unwrap().del(&one).unwrap();
}

fn calls_that_make_no_sense_have_their_codes(world: &mut World) {
    let at = node(world, "home-2");
    let (plugin, before) = (at.plugin().unwrap(), used(at));
    let one = container(world, "senseless", "demo");
    let add = |configuration: &str| refusal(&plugin.call("ADD", &one, configuration).unwrap());

    for no_json in ["{\"cniVersion\": \"1.0.0\", ", "", "cniVersion: 1.0.0", "[1]"] {
        let refused = add(no_json);
        assert_eq!(refused.code, DECODING, "{refused:?}");
        assert!(refused.text.contains("network configuration on standard input"), "{refused:?}");
    }
    let refused = add(&plugin.configuration().replace("1.0.0", "9.9.9"));
    assert_eq!(refused.code, INCOMPATIBLE_VERSION, "{refused:?}");
    assert!(refused.text.contains("9.9.9") && refused.text.contains("0.3.1, 0.4.0, 1.0.0"), "{refused:?}");

    let bare = at
        .host
        .command(executable("fairlead-cni").unwrap())
        .unwrap()
        .env("CNI_COMMAND", "ADD")
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let refused = refusal(&bare);
    assert_eq!(refused.code, ENVIRONMENT, "{refused:?}");
    for name in ["CNI_CONTAINERID", "CNI_NETNS", "CNI_IFNAME"] {
        assert!(refused.text.contains(name), "{refused:?}");
    }
    let no_namespace = world.directory().join("no-namespace");
    fs::write(&no_namespace, "a file").unwrap();
    for path in [PathBuf::from("/var/run/netns/gone"), no_namespace] {
        let refused = add_fails(&plugin, &Container { netns: path.clone(), ..one.clone() });
        assert_eq!(refused.code, UNKNOWN_CONTAINER, "{refused:?}");
        assert!(refused.text.contains(&path.display().to_string()), "{refused:?}");
        assert!(refused.text.contains(&one.id), "{refused:?}");
    }
    assert_eq!(used(at), before, "an ADD that failed keeps an address");
}

fn a_dry_pool_says_so_and_recovers(world: &mut World) {
    // Two blocks of two addresses.
    world.plane.apply(&pool("puddle", 1, "10.99.0.0/30")).unwrap();
    namespace_of_pool(world, "puddle");
    let (here, there) = (node(world, "home-2"), node(world, "cloud-2"));
    let plugin = here.plugin().unwrap();
    let first = container(world, "puddle-0", "puddle");
    let address = world.wait_for(TIMEOUT, |_| plugin.add(&first)).unwrap();
    for index in 1..4 {
        plugin.add(&container(world, &format!("puddle-{index}"), "puddle")).unwrap();
    }
    let full = used(here);
    let late = container(world, "puddle-late", "puddle");
    for plugin in [&plugin, &there.plugin().unwrap()] {
        let start = Instant::now();
        let refused = add_fails(plugin, &late);
        println!("  refused after {:.0} ms", start.elapsed().as_secs_f64() * 1000.0);
        assert_eq!(refused.code, TRY_AGAIN_LATER, "{refused:?}");
        assert_eq!(
            refused.text.trim(),
            "no address block: pool puddle does not have free blocks PoolExhausted"
        );
    }
    assert_eq!(used(here), full);
    let message = wait_for_reason(world, "puddle", "False", "Exhausted");
    assert!(message.contains("spec.subnets"), "{message}");

    plugin.del(&first).unwrap();
    assert_eq!(plugin.add(&late).unwrap(), address, "the freed address is the only one");
    // Other pools have nothing to do with it.
    let other = container(world, "beside-puddle", "demo");
    assert_eq!(plugin.add(&other).unwrap().len(), 2);
}

fn without_a_node_program_the_socket_is_named(world: &mut World) {
    world.node("home-2").unwrap().kill().unwrap();
    let at = node(world, "home-2");
    let plugin = at.plugin().unwrap();
    let socket = at.socket().display().to_string();
    let one = container(world, "too-early", "demo");
    let left = add_fails(&plugin, &one);
    fs::remove_file(at.socket()).unwrap();
    let gone = add_fails(&plugin, &one);
    for refused in [left, gone] {
        assert_eq!(refused.code, TRY_AGAIN_LATER, "{refused:?}");
        assert!(refused.text.contains(&socket) && refused.text.contains("fairlead node"), "{refused:?}");
    }
    restart(world, "home-2");
    let at = node(world, "home-2");
    world.wait_for(TIMEOUT, |_| plugin.add(&one)).unwrap();
    plugin.del(&one).unwrap();
    is_in_the_mesh(world, at);
}

fn restart(world: &mut World, name: &str) {
    let node = world.node(name).unwrap();
    node.start().unwrap();
    node.wait_ready(TIMEOUT).unwrap();
}

fn key_file(node: &Node) -> PathBuf {
    node.directory.join("state/wireguard.key")
}

fn public_key(node: &Node) -> String {
    node.status().unwrap()["publicKey"].as_str().unwrap().to_owned()
}

fn problems(node: &Node) -> Result<Vec<String>> {
    let status = node.status()?;
    let listed = status["problems"].as_array().context("no problems")?;
    Ok(listed.iter().filter_map(Value::as_str).map(str::to_owned).collect())
}

/// Waits until the node's pod reaches the pods of the other sites, and they reach it.
fn is_in_the_mesh(world: &World, node: &Node) {
    for other in ["cloud-1", "office-2"] {
        let pair = [pod(world, &node.name), pod(world, other)];
        for (from, to) in [(pair[0], pair[1]), (pair[1], pair[0])] {
            for address in &to.addresses {
                world.wait_for(TIMEOUT, |_| probe::ping(from, *address)).unwrap();
            }
        }
    }
}

fn a_corrupt_key_file_is_named_and_kept(world: &mut World) {
    let at = world.node("home-2").unwrap();
    let (path, identity) = (key_file(at), public_key(at));
    let saved = fs::read(&path).unwrap();
    let garbage = noise(7, 44);
    at.kill().unwrap();
    fs::write(&path, &garbage).unwrap();
    restart(world, "home-2");

    let at = node(world, "home-2");
    let reported = problems(at).unwrap();
    println!("  {reported:?}");
    let named = format!("WireGuard key file {} is corrupt", path.display());
    assert!(reported.iter().any(|problem| problem.contains(&named)), "{reported:?}");
    assert_eq!(fs::read(&path).unwrap(), garbage, "the file was changed");
    // Pods of this node still come, go and reach each other.
    let local = world.start_pod("without-mesh", "home-2").unwrap().clone();
    for address in &local.addresses {
        probe::ping(pod(world, "home-2"), *address).unwrap();
    }
    node(world, "home-2").plugin().unwrap().del(&local.container).unwrap();
    pods_reach_each_other("a corrupt key, while it lasts", world, &BYSTANDERS);

    world.node("home-2").unwrap().kill().unwrap();
    fs::write(&path, &saved).unwrap();
    restart(world, "home-2");
    let at = node(world, "home-2");
    assert_eq!(public_key(at), identity);
    is_in_the_mesh(world, at);
}

fn a_key_on_two_nodes_stays_one_peer(world: &mut World) {
    let copied = fs::read(key_file(node(world, "cloud-1"))).unwrap();
    let shared = public_key(node(world, "cloud-1"));
    let twin = world.node("cloud-2").unwrap();
    let (path, identity) = (key_file(twin), public_key(twin));
    let own = fs::read(&path).unwrap();
    twin.kill().unwrap();
    fs::write(&path, copied).unwrap();
    restart(world, "cloud-2");

    let others = ["home-1", "home-2", "office-1", "office-2"];
    world
        .wait_for(TIMEOUT, |world| {
            others.iter().try_for_each(|name| has_one_peer(node(world, name), &shared))
        })
        .unwrap();
    for name in ["cloud-1", "cloud-2"] {
        world.wait_for(TIMEOUT, |world| names_both(node(world, name), &shared)).unwrap();
    }
    println!("  {:?}", problems(node(world, "cloud-1")).unwrap());
    pods_reach_each_other("one key on two nodes, while it lasts", world, &others);

    world.node("cloud-2").unwrap().kill().unwrap();
    fs::write(&path, own).unwrap();
    restart(world, "cloud-2");
    assert_eq!(public_key(node(world, "cloud-2")), identity);
    let all = ["cloud-1", "cloud-2", "home-1", "office-2"];
    pods_reach_each_other("one key on two nodes", world, &all);
}

fn names_both(node: &Node, key: &str) -> Result<()> {
    let reported = problems(node)?;
    let both = |problem: &String| ["cloud-1 and cloud-2", key].iter().all(|word| problem.contains(word));
    ensure!(reported.iter().any(both), "{} does not say it: {reported:?}", node.name);
    Ok(())
}

fn has_one_peer(node: &Node, key: &str) -> Result<()> {
    names_both(node, key)?;
    let shown = node.host.shell("wg show wire_kube peers")?;
    let with_key = shown.lines().filter(|line| *line == key).count();
    ensure!((shown.lines().count(), with_key) == (4, 1), "{}: {shown}", node.name);
    Ok(())
}
