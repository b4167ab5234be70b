//! `fairlead ipam`, Events on pods, and what pods cost the API server: real programs, a real API server, the kernel.
//! Nothing is fake but the kubelet.

mod flags;

use std::fs;
use std::io::Write;
use std::process::{Output, Stdio};

use anyhow::{Context, Result, ensure};
use fairlead_demo::cni::{Container, Pod};
use fairlead_demo::node::{Node, executable};
use fairlead_demo::objects::{self, POOLS, REQUESTS};
use fairlead_demo::{World, topology};
use serde_json::{Value, json};

use crate::outage::{TIMEOUT, container, node, used};

const NODE: &str = "cloud-1";
const OTHER: &str = "office-1";
/// `CNI_ERROR` codes of the CNI specification, and ours for CHECK.
const ENVIRONMENT: u64 = 4;
const NETWORK_CONFIG: u64 = 7;
const TRY_AGAIN_LATER: u64 = 11;
const NOT_AVAILABLE: u64 = 50;
const CHANGED: u64 = 101;
/// Exit code of `fairlead ipam check` when it found something.
const FOUND: i32 = 3;

#[test]
fn every_address_is_explained_and_every_refusal_is_told() {
    let mut world = World::start(&topology::two_sites(), &Default::default()).unwrap();
    type Step = fn(&mut World);
    let steps: [(&str, Step); 9] = [
        ("an unknown pool", an_unknown_pool_is_told_at_the_pod),
        ("a dry pool", a_dry_pool_is_told_at_the_pod_and_by_status),
        ("a pool that is being deleted", a_terminating_pool_is_told_at_the_pod),
        ("where pods start without requests", a_pod_start_asks_the_api_server_nothing),
        ("who has which address", addresses_are_shown_with_their_pods),
        ("what does not fit together", disagreements_are_found_and_leaks_are_freed),
        ("an ADD after a DEL that was left", an_add_cancels_a_del_that_was_left),
        ("other numbers and names", flags::other_numbers_and_names_are_used),
        ("behind another plugin", flags::behind_another_plugin_nothing_is_made),
    ];
    for (name, step) in steps {
        let start = std::time::Instant::now();
        step(&mut world);
        println!("{name}: ok, {:.1} s", start.elapsed().as_secs_f64());
    }
}

/// Calls the plugin as containerd does, with a UID that no Pod of the API server has.
fn call(node: &Node, operation: &str, container: &Container, configuration: &Value) -> Output {
    call_with_uid(node, operation, container, configuration, &format!("uid-{}", container.pod))
}

fn call_with_uid(node: &Node, operation: &str, of: &Container, configuration: &Value, uid: &str) -> Output {
    let plugin = executable("fairlead-cni").unwrap();
    let Container { id, pod, namespace, netns, .. } = of;
    let args = format!("IgnoreUnknown=1;K8S_POD_NAMESPACE={namespace};K8S_POD_NAME={pod};K8S_POD_UID={uid}");
    let mut command = node.host.command(&plugin).unwrap();
    command
        .env("CNI_COMMAND", operation)
        .env("CNI_CONTAINERID", id)
        .env("CNI_NETNS", netns)
        .env("CNI_IFNAME", "eth0")
        .env("CNI_PATH", "/nonexistent")
        .env("CNI_ARGS", args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut child = command.spawn().unwrap();
    child.stdin.take().unwrap().write_all(configuration.to_string().as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

fn configuration(node: &Node) -> Value {
    json!({"cniVersion": "1.1.0", "name": "k8s-pod-network", "type": "coil", "socket": node.socket()})
}

/// Code and message of an operation that must fail.
fn refused(output: &Output) -> (u64, String) {
    assert!(!output.status.success(), "it succeeded: {output:?}");
    let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
    println!("  {answer}");
    (answer["code"].as_u64().unwrap(), format!("{} {}", answer["msg"], answer["details"]))
}

fn pool(name: &str, bits: u8, ipv4: &str) -> String {
    json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "AddressPool", "metadata": { "name": name },
        "spec": { "blockSizeBits": bits, "subnets": [{ "ipv4": ipv4 }] },
    })
    .to_string()
}

fn namespace(world: &World, name: &str) {
    let object = json!({
        "apiVersion": "v1", "kind": "Namespace",
        "metadata": { "name": name, "annotations": { "coil.cybozu.com/pool": name } },
    });
    world.plane.apply(&object.to_string()).unwrap();
}

fn events(world: &World, namespace: &str, name: &str, reason: &str) -> Result<Vec<Value>> {
    let selector = format!("involvedObject.name={name},reason={reason}");
    let path = objects::namespace_path(namespace);
    let list = world.plane.get(&format!("{path}/events?fieldSelector={selector}"))?;
    Ok(list["items"].as_array().context("no items")?.clone())
}

/// Waits for the one Event and returns it.
fn event(world: &World, namespace: &str, name: &str, reason: &str) -> Value {
    let found = world.wait_for(TIMEOUT, |world| {
        let found = events(world, namespace, name, reason)?;
        ensure!(!found.is_empty(), "no Event {reason} on {namespace}/{name}");
        Ok(found)
    });
    let found = found.unwrap();
    assert_eq!(found.len(), 1, "the same Event is published once: {found:#?}");
    println!("  {} {}: {}", found[0]["type"], found[0]["reason"], found[0]["message"]);
    found[0].clone()
}

fn an_unknown_pool_is_told_at_the_pod(world: &mut World) {
    let at = node(world, NODE);
    let one = container(world, "no-pool", objects::NAMESPACE);
    let (code, text) = refused(&call(at, "ADD", &one, &configuration(at)));
    assert!(code == NETWORK_CONFIG && text.contains("pool default does not exist"), "{code} {text}");
    let event = event(world, objects::NAMESPACE, "no-pool", "UnknownPool");
    assert_eq!(event["type"], "Warning");
    assert_eq!(event["involvedObject"]["uid"], "uid-no-pool", "`kubectl describe pod` looks for it");
    assert!(event["message"].as_str().unwrap().contains("coil.cybozu.com/pool"), "{event}");
    // Without a WireKubeMesh, a missing mesh is no problem.
    let (code, text) = refused(&call(at, "STATUS", &one, &configuration(at)));
    assert!(code == NOT_AVAILABLE && text.contains("no AddressPool"), "{code} {text}");
}

/// One address, and a key file that keeps the node out of the mesh: no pod can start, and those that run may be cut off.
fn a_dry_pool_is_told_at_the_pod_and_by_status(world: &mut World) {
    world.plane.apply(&pool("puddle", 0, "10.99.0.1/32")).unwrap();
    namespace(world, "puddle");
    let key = node(world, NODE).directory.join("state/wireguard.key");
    let saved = fs::read(&key).unwrap();
    world.node(NODE).unwrap().kill().unwrap();
    fs::write(&key, "garbage").unwrap();
    restart(world);
    let at = node(world, NODE);
    let (first, late) = (container(world, "wet", "puddle"), container(world, "dry", "puddle"));
    let added = |_: &World| {
        let output = call(at, "ADD", &first, &configuration(at));
        ensure!(output.status.success(), "{output:?}");
        Ok(())
    };
    world.wait_for(TIMEOUT, added).unwrap();
    for _ in 0..3 {
        let (code, text) = refused(&call(at, "ADD", &late, &configuration(at)));
        assert!(code == TRY_AGAIN_LATER && text.contains("does not have free blocks"), "{code} {text}");
    }
    let event = event(world, "puddle", "dry", "PoolExhausted");
    assert!(event["message"].as_str().unwrap().contains("puddle does not have free blocks"), "{event}");
    // A runtime makes the Node NotReady when STATUS fails, and the pods that run here are evicted.
    let status = call(at, "STATUS", &first, &configuration(at));
    assert!(status.status.success(), "{status:?}");
    // Events on Nodes are in the namespace `default`.
    let of_node = self::event(world, "default", NODE, "WireGuardKeyUnusable");
    assert!(of_node["message"].as_str().unwrap().contains("is corrupt"), "{of_node}");

    world.node(NODE).unwrap().kill().unwrap();
    fs::write(&key, saved).unwrap();
    restart(world);
    let at = node(world, NODE);
    assert!(call(at, "DEL", &first, &configuration(at)).status.success());
}

fn restart(world: &mut World) {
    let node = world.node(NODE).unwrap();
    node.start().unwrap();
    node.wait_ready(TIMEOUT).unwrap();
}

fn a_terminating_pool_is_told_at_the_pod(world: &mut World) {
    world.plane.apply(&pool("leaving", 0, "10.98.0.0/30")).unwrap();
    namespace(world, "leaving");
    let (here, there) = (node(world, NODE), node(world, OTHER));
    let (stays, late) = (container(world, "stays", "leaving"), container(world, "comes", "leaving"));
    let added = |_: &World| {
        let output = call(there, "ADD", &stays, &configuration(there));
        ensure!(output.status.success(), "{output:?}");
        Ok(())
    };
    world.wait_for(TIMEOUT, added).unwrap();
    // What keeps it until its last block is gone.
    world
        .wait_for(TIMEOUT, |world| {
            let held = world.plane.get(&format!("{POOLS}/leaving"))?["metadata"]["finalizers"].to_string();
            ensure!(held.contains("coil.cybozu.com"), "no finalizer yet: {held}");
            Ok(())
        })
        .unwrap();
    world.plane.kubectl(&["delete", "addresspool", "leaving", "--wait=false"]).unwrap();
    let (code, text) = refused(&call(here, "ADD", &late, &configuration(here)));
    assert!(code == NETWORK_CONFIG && text.contains("is being deleted"), "{code} {text}");
    event(world, "leaving", "comes", "PoolTerminating");
    assert!(call(there, "DEL", &stays, &configuration(there)).status.success());
}

fn metrics(node: &Node) -> String {
    let get = "exec 3<>/dev/tcp/127.0.0.1/9384; printf 'GET /metrics HTTP/1.0\\r\\n\\r\\n' >&3; cat <&3";
    let output = node.host.command("bash").unwrap().args(["-c", get]).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

/// Requests to the API server, but for watches that begin anew and the look-up of the API server's own address: both
/// come by the clock.
fn asked(node: &Node) -> Vec<String> {
    let text = metrics(node);
    let mut asked: Vec<String> = text
        .lines()
        .filter(|line| line.starts_with("fairlead_api_requests_total"))
        .filter(|line| !line.contains("verb=\"watch\"") && !line.contains("endpointslices"))
        .map(str::to_owned)
        .collect();
    asked.sort();
    asked
}

fn a_pod_start_asks_the_api_server_nothing(world: &mut World) {
    world.apply_pool().unwrap();
    let at = node(world, NODE);
    let first = container(world, "first", objects::NAMESPACE);
    let added = |_: &World| {
        let output = call(at, "ADD", &first, &configuration(at));
        ensure!(output.status.success(), "{output:?}");
        Ok(())
    };
    world.wait_for(TIMEOUT, added).unwrap();
    let pod = world.make_pod("known", NODE).unwrap();
    let uid = pod["metadata"]["uid"].as_str().unwrap();
    let known = container(world, "known", objects::NAMESPACE);
    let add_and_delete = || {
        for operation in ["ADD", "DEL"] {
            let output = call_with_uid(at, operation, &known, &configuration(at), uid);
            assert!(output.status.success(), "{output:?}");
        }
    };
    // The request for the first block is deleted after the pod has its address, and a pod whose Pod the cache does not show
    // yet is read from the API server.
    let before = world.wait_for(TIMEOUT, |world| {
        let requests = world.plane.get(REQUESTS)?;
        let mut left = requests["items"].as_array().context("no list")?.iter();
        ensure!(!left.any(|request| request["status"]["addressBlockName"].is_string()), "{requests}");
        let before = asked(at);
        add_and_delete();
        ensure!(asked(at) == before, "{before:#?}");
        Ok(before)
    });
    let before = before.unwrap();
    (0..10).for_each(|_| add_and_delete());
    assert_eq!(asked(at), before, "a pod in the cache and a block with room need no request");
    assert!(call(at, "DEL", &first, &configuration(at)).status.success());
    let log = fs::read_to_string(at.log()).unwrap();
    let line = log
        .lines()
        .find(|line| line.contains("\"known\"") && line.contains("\"operation\":\"ADD\""))
        .unwrap();
    println!("  {line}");
    let line: Value = serde_json::from_str(line).unwrap();
    assert_eq!((&line["pod"], &line["namespace"]), (&json!("known"), &json!(objects::NAMESPACE)));
    assert_eq!((&line["ifname"], &line["outcome"]), (&json!("eth0"), &json!("ok")));
    assert!(line["elapsed_ms"].as_f64().unwrap() > 0.0 && line["container"].is_string());
}

/// Runs `fairlead ipam`.
fn ipam(node: &Node, arguments: &[&str]) -> (Option<i32>, String) {
    let mut command = node.host.command(executable("fairlead").unwrap()).unwrap();
    let output = command
        .args(["--log-level", "error", "ipam"])
        .args(arguments)
        .arg("--socket")
        .arg(node.socket())
        .output()
        .unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    (output.status.code(), text)
}

fn shown(node: &Node) -> Value {
    let (code, text) = ipam(node, &["show", "-o", "json"]);
    assert_eq!(code, Some(0), "{text}");
    serde_json::from_str(&text).unwrap()
}

/// Writes the status of a pod as its kubelet does.
fn report(world: &World, pod: &Pod) {
    let ips: Vec<Value> = pod.addresses.iter().map(|ip| json!({ "ip": ip })).collect();
    let status =
        json!({"status": {"phase": "Running", "podIP": pod.addresses[0], "podIPs": ips}}).to_string();
    let of =
        ["-n", objects::NAMESPACE, "patch", "pod", &pod.name, "--subresource=status", "--type=merge", "-p"];
    world.plane.kubectl(&[&of[..], &[&status]].concat()).unwrap();
}

fn attachment<'a>(shown: &'a Value, pod: &Pod) -> &'a Value {
    let all = shown["attachments"].as_array().unwrap();
    all.iter()
        .find(|one| one["containerID"] == pod.container.id.as_str())
        .unwrap_or_else(|| panic!("{shown:#}"))
}

fn addresses_are_shown_with_their_pods(world: &mut World) {
    for name in ["one", "two", "three"] {
        let pod = world.start_pod(name, NODE).unwrap().clone();
        report(world, &pod);
    }
    let before = shown(node(world, NODE));
    // Who was attached before the start is known by the API server's word.
    world.node(NODE).unwrap().kill().unwrap();
    restart(world);
    let at = node(world, NODE);
    let after = world.wait_for(TIMEOUT, |_| {
        let now = shown(at);
        ensure!(attachment(&now, &world.pods[0])["pod"]["name"] == "one", "{now:#}");
        Ok(now)
    });
    for shown in [before, after.unwrap()] {
        assert_eq!(shown["node"], NODE);
        for pod in &world.pods {
            let one = attachment(&shown, pod);
            assert_eq!(one["pod"]["namespace"], objects::NAMESPACE, "{one:#}");
            assert_eq!(one["pod"]["name"], pod.name.as_str());
            assert_eq!(one["ipv4"], pod.addresses[0].to_string());
            assert_eq!(one["ipv6"], pod.addresses[1].to_string());
            assert_eq!((&one["pool"], &one["network"]), (&json!("default"), &json!("k8s-pod-network")));
            assert!(one["link"].as_str().unwrap().starts_with("veth"), "{one:#}");
            assert!(one["block"].as_str().unwrap().starts_with("default-"), "{one:#}");
            assert!(one["attachedUnixSeconds"].as_u64().unwrap() > 1_600_000_000, "{one:#}");
        }
        let default =
            shown["blocks"].as_array().unwrap().iter().find(|block| block["pool"] == "default").unwrap();
        assert_eq!((&default["used"], &default["state"]), (&json!(3), &json!("open")), "{shown:#}");
    }
    let (code, table) = ipam(at, &["show", "-o", "wide"]);
    println!("{table}");
    assert!(code == Some(0) && table.contains("demo/one") && table.contains(&world.pods[0].container.id));
}

/// The reasons of what `check` finds.
fn found(node: &Node) -> (Option<i32>, Vec<String>) {
    let (code, text) = ipam(node, &["check", "-o", "json"]);
    let answer: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"));
    assert_eq!(answer["unknown"], json!([]), "{text}");
    let reason = |finding: &Value| finding["reason"].as_str().unwrap().to_owned();
    (code, answer["findings"].as_array().unwrap().iter().map(reason).collect())
}

fn cluster_check(world: &World) -> (Option<i32>, String) {
    let at = node(world, NODE);
    let mut command = at.host.command(executable("fairlead").unwrap()).unwrap();
    let output = command
        .args(["ipam", "check", "--cluster"])
        .env("KUBECONFIG", world.plane.kubeconfig())
        .output()
        .unwrap();
    (output.status.code(), String::from_utf8(output.stdout).unwrap())
}

fn disagreements_are_found_and_leaks_are_freed(world: &mut World) {
    let at = node(world, NODE);
    let [one, two, three] = &world.pods[..] else { panic!("three pods") };
    world
        .wait_for(TIMEOUT, |_| {
            let found = found(at);
            ensure!(found == (Some(0), vec![]), "{found:?}: {}", ipam(at, &["check"]).1);
            Ok(())
        })
        .unwrap();
    let whole = cluster_check(world);
    assert!(whole.0 == Some(0) && whole.1.contains("agree"), "{whole:?}");

    let (lost, stray) = (one.addresses[0], "192.0.2.9");
    at.host.shell(&format!("ip route del {lost} table 116; ip route add {stray} dev lo table 116")).unwrap();
    two.namespace.shell("ip link delete eth0").unwrap();
    // The node program restores the route of a pod by itself.
    world
        .wait_for(TIMEOUT, |_| {
            let found = found(at);
            let wanted = (Some(FOUND), ["LeakedAddress", "StrayRoute"].map(String::from).to_vec());
            ensure!(found == wanted, "{found:?}");
            Ok(())
        })
        .unwrap();
    let route = at.host.shell(&format!("ip route show {lost} table 116")).unwrap();
    assert!(route.contains(&lost.to_string()), "{route}");
    let (_, words) = ipam(at, &["check"]);
    println!("{words}");
    for word in [stray, "demo/two", "ipam release"] {
        assert!(words.contains(word), "{word} is not in {words}");
    }
    at.host.shell(&format!("ip route del {stray} table 116")).unwrap();

    // A pod that lives is not robbed.
    let before = used(at);
    let (code, said) = ipam(at, &["release", &three.addresses[1].to_string()]);
    assert!(code == Some(1) && said.contains("is connected by link") && said.contains("--force"), "{said}");
    let (code, said) = ipam(at, &["release", &two.container.id]);
    assert!(code == Some(1) && said.contains("pod demo/two"), "{said}");
    assert_eq!(used(at), before);
    let gone = ["-n", objects::NAMESPACE, "delete", "pod", "two", "--force", "--grace-period=0"];
    world.plane.kubectl(&gone).unwrap();
    let freed = world.wait_for(TIMEOUT, |_| {
        let (code, said) = ipam(at, &["release", &two.addresses[0].to_string()]);
        // The collection of leaked addresses may be quicker.
        ensure!(code == Some(0) || said.contains("nothing on this node is reserved"), "{said}");
        Ok(said)
    });
    println!("  {}", freed.unwrap().trim());
    assert_eq!(used(at), before - 1);
    let (code, said) = ipam(at, &["release", &two.container.id]);
    assert!(code == Some(1) && said.contains("nothing on this node is reserved"), "{said}");

    let (code, said) = ipam(at, &["release", "--force", "-o", "json", &one.container.id]);
    assert!(code == Some(0) && said.contains(&lost.to_string()), "{said}");
    assert_eq!(used(at), before - 2);
    assert!(!at.host.shell("ip -o link").unwrap().contains(&one.container.id), "its link is gone");
    // Now its pod has an address that is not allocated, and so has another pod.
    let (code, reasons) = found(at);
    assert_eq!((code, &reasons[..]), (Some(FOUND), &["PodWithoutAddress".to_owned()][..]));
    world.plane.apply(&objects::pod("twin", OTHER)).unwrap();
    report(world, &Pod { name: "twin".to_owned(), ..three.clone() });
    let (code, words) = cluster_check(world);
    println!("{words}");
    assert_eq!(code, Some(FOUND));
    for word in ["DuplicateAddress", "demo/twin on office-1", "demo/three on cloud-1", "PodInForeignBlock"] {
        assert!(words.contains(word), "{word} is not in {words}");
    }
    for pod in ["one", "twin"] {
        let gone = ["-n", objects::NAMESPACE, "delete", "pod", pod, "--force", "--grace-period=0"];
        world.plane.kubectl(&gone).unwrap();
    }
}

/// The file is what a plugin leaves when it finds no node program.
fn an_add_cancels_a_del_that_was_left(world: &mut World) {
    let at = node(world, NODE);
    let (again, other) = (container(world, "again", "demo"), container(world, "other", "demo"));
    let before = used(at);
    for one in [&again, &other] {
        assert!(call(at, "ADD", one, &configuration(at)).status.success());
    }
    let pending = at.directory.join("coild.sock.d/pending-del");
    fs::create_dir_all(&pending).unwrap();
    let left = |one: &Container| pending.join(format!("{}:eth0", one.id));
    fs::write(left(&again), "").unwrap();
    assert!(call(at, "ADD", &again, &configuration(at)).status.success());
    assert!(!left(&again).exists(), "the ADD made it void");
    // The other one's is finished, and so the first would have been.
    fs::write(left(&other), "").unwrap();
    world
        .wait_for(TIMEOUT, |_| {
            ensure!(!left(&other).exists() && used(at) == before + 1, "not finished yet");
            Ok(())
        })
        .unwrap();
    let still = shown(at)["attachments"].to_string();
    assert!(still.contains(&again.id) && !still.contains(&other.id), "{still}");
    assert!(call(at, "DEL", &again, &configuration(at)).status.success());
}
