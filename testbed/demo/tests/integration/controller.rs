//! The controller against a real API server: pools that are judged and emptied, and several replicas of which one leads.

use std::net::Ipv4Addr;
use std::ops::RangeFrom;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fairlead_demo::node::executable;
use fairlead_demo::objects::{BLOCKS, POOLS, REQUESTS};
use fairlead_demo::{World, topology};
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use testbed_lab::Process;
use testbed_lab::Progress;

use crate::outage::{TIMEOUT, container, node};

const FINALIZER: &str = "coil.cybozu.com";
const LEASE: &str = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases/coil-ipam-leader";

fn pool(name: &str, spec: &Value) -> String {
    json!({ "apiVersion": "coil.cybozu.com/v2", "kind": "AddressPool", "metadata": { "name": name }, "spec": spec })
        .to_string()
}

fn create_dry(world: &World, yaml: &str) -> Result<Value> {
    let text = world.plane.kubectl_stdin(&["create", "--dry-run=server", "-o", "json", "-f", "-"], yaml)?;
    Ok(serde_json::from_str(&text)?)
}

#[track_caller]
fn refused(result: Result<impl std::fmt::Debug>, words: &str) {
    let error = format!("{:#}", result.expect_err(words));
    println!("  {}", error.trim());
    assert!(error.contains(words), "{words:?} is not in {error}");
}

/// A condition of a pool, when it has this status.
fn condition(world: &World, pool: &str, wanted: &str, status: &str) -> Result<Value> {
    let object = world.plane.get(&format!("{POOLS}/{pool}"))?;
    let conditions = object["status"]["conditions"].as_array().context("no conditions")?;
    let found =
        conditions.iter().find(|condition| condition["type"] == wanted).context("no such condition")?;
    ensure!(found["status"] == status, "{found}");
    ensure!(found["observedGeneration"] == object["metadata"]["generation"], "{found}");
    Ok(found.clone())
}

fn blocks_of(world: &World, pool: &str) -> Result<Vec<Value>> {
    let list = world.plane.get(&format!("{BLOCKS}?labelSelector=coil.cybozu.com/pool={pool}"))?;
    Ok(list["items"].as_array().context("no list")?.clone())
}

/// Request for a block, of a node without a program, so that its blocks are not released.
fn request(name: &str, pool: &str) -> String {
    json!({
        "apiVersion": "coil.cybozu.com/v2", "kind": "BlockRequest", "metadata": { "name": name },
        "spec": { "poolName": pool, "nodeName": "idle" },
    })
    .to_string()
}

fn idle_node(world: &World) {
    world.plane.apply("apiVersion: v1\nkind: Node\nmetadata: {name: idle}\n").unwrap();
    // Room for the many blocks that the tests ask for.
    let patch = r#"{"status": {"capacity": {"pods": "1000"}}}"#;
    let arguments = ["patch", "node", "idle", "--subresource=status", "--type=merge", "-p", patch];
    world.plane.kubectl(&arguments).unwrap();
}

#[test]
fn pools_are_judged_emptied_and_told_when_dry() {
    let mut world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    world.apply_mesh_and_pool().unwrap();
    pools_are_completed_and_judged(&world);
    a_disabled_pool_is_emptied(&mut world);
    a_dry_pool_has_an_event(&world);
    what_has_no_effect_has_a_condition(&world);
    without_a_controller_pools_are_judged_and_can_go(&mut world);
}

fn what_has_no_effect_has_a_condition(world: &World) {
    let condition = |wanted: &str| -> Result<(String, String)> {
        let object = world.mesh()?;
        let conditions = object["status"]["conditions"].as_array().context("no conditions")?;
        let found =
            conditions.iter().find(|condition| condition["type"] == wanted).context("no such condition")?;
        ensure!(found["observedGeneration"] == object["metadata"]["generation"], "{found}");
        let word = |name: &str| found[name].as_str().unwrap_or_default().to_owned();
        Ok((word("status"), word("message")))
    };
    let patch = |spec: Value| {
        let patch = json!({ "spec": spec }).to_string();
        world.plane.kubectl(&["patch", "wkmesh", "default", "--type=merge", "-p", &patch]).unwrap();
    };
    let ignored = |status: &str| {
        world.wait_for(TIMEOUT, |_| {
            let (found, message) = condition("FieldsIgnored")?;
            ensure!(found == status, "{found}");
            Ok(message)
        })
    };
    ignored("False").unwrap();
    patch(json!({ "apiServerURL": "https://192.0.2.1:6443" }));
    assert!(ignored("True").unwrap().contains("have no effect: spec.apiServerURL ("));
    patch(json!({ "apiServerURL": null }));
    ignored("False").unwrap();
}

fn pools_are_completed_and_judged(world: &World) {
    let apart = json!({ "subnets": [{ "ipv4": "10.70.0.0/16" }] });
    create_dry(world, &pool("apart", &apart)).unwrap();
    // The policy comes into force, and sees a pool, a moment after it was made.
    let same = json!({ "subnets": [{ "ipv4": "10.64.0.0/16" }] });
    let judged = |world: &World| {
        ensure!(create_dry(world, &pool("bad", &same)).is_err(), "an overlap is accepted");
        Ok(())
    };
    world.wait_for(TIMEOUT, judged).unwrap();

    let v4 = |subnets: &[&str]| json!({ "subnets": subnets.iter().map(|net| json!({ "ipv4": net })).collect::<Vec<_>>() });
    for (spec, words) in [
        (v4(&["10.64.0.0/16"]), "subnet 10.64.0.0/16 of pool bad overlaps 10.64.0.0/16 of pool default"),
        // Wider than the pool, and apart from Services, whose policy would answer instead.
        (v4(&["10.64.0.0/15"]), "overlaps 10.64.0.0/16 of pool default: no address may be in two pools"),
        (v4(&["10.71.0.0/16", "10.64.255.0/24"]), "subnet 10.64.255.0/24 of pool bad overlaps"),
        (
            json!({ "subnets": [{ "ipv6": "fd02:fa1e::80/121" }] }),
            "subnet fd02:fa1e::80/121 of pool bad overlaps fd02:fa1e::/112 of pool default",
        ),
        // What the rules of the resource see without us, though Coil did not.
        (v4(&["10.72.0.0/16", "10.72.1.0/24"]), "overlaps another subnet of the pool"),
        (
            json!({ "subnets": [{ "ipv4": "10.72.0.0/16" }, { "ipv6": "fd00::/112" }] }),
            "same address families",
        ),
        (json!({ "blockSizeBits": 21, "subnets": [{ "ipv6": "fd00::/64" }] }), "less than or equal to 20"),
        (json!({ "blockSizeBits": 64, "subnets": [{ "ipv6": "fd00::/48" }] }), "less than or equal to 20"),
        (v4(&["10.72.0.0/28"]), "too narrow subnet"),
    ] {
        refused(create_dry(world, &pool("bad", &spec)), words);
    }
    // More blocks than can be numbered: Coil gave none at all of such a pool.
    let huge = json!({ "blockSizeBits": 8, "subnets": [{ "ipv6": "fd05::/48" }] });
    world.plane.apply(&pool("huge", &huge)).unwrap();
    world.wait_for(TIMEOUT, |world| condition(world, "huge", "Ready", "True")).unwrap();

    world.plane.apply(&pool("apart", &apart)).unwrap();
    world
        .wait_for(TIMEOUT, |world| {
            let finalizers = world.plane.get(&format!("{POOLS}/apart"))?["metadata"]["finalizers"].take();
            ensure!(finalizers == json!([FINALIZER]), "{finalizers}");
            Ok(())
        })
        .unwrap();
    let grow = |subnet: &str| {
        let patch = json!({ "spec": { "subnets": [{ "ipv4": "10.70.0.0/16" }, { "ipv4": subnet }] } });
        world.plane.kubectl(&["patch", "addresspool", "apart", "--type=merge", "-p", &patch.to_string()])
    };
    refused(grow("10.64.3.0/24"), "subnet 10.64.3.0/24 of pool apart overlaps 10.64.0.0/16 of pool default");
    grow("10.73.0.0/24").unwrap();
    world.plane.kubectl(&["delete", "addresspool", "apart", "huge", "--timeout=60s"]).unwrap();
}

fn a_disabled_pool_is_emptied(world: &mut World) {
    let stays = world.start_pod("stays", "cloud-1").unwrap().clone();
    let plugin = node(world, "cloud-1").plugin().unwrap();
    let disable = |world: &World, disabled: bool| {
        let patch = json!({ "spec": { "disabled": disabled } }).to_string();
        world.plane.kubectl(&["patch", "addresspool", "default", "--type=merge", "-p", &patch]).unwrap();
    };
    disable(world, true);
    let reported = world.wait_for(TIMEOUT, |world| condition(world, "default", "Disabled", "True")).unwrap();
    assert_eq!(reported["reason"], "SpecDisabled");
    assert_eq!(condition(world, "default", "Ready", "False").unwrap()["reason"], "Disabled");
    // The block of this node has room, and yet.
    let late = container(world, "late", "demo");
    world
        .wait_for(TIMEOUT, |_| {
            let error = plugin.add(&late).err().context("it got an address")?.to_string();
            ensure!(error.contains("pool default is disabled"), "{error}");
            println!("  {error}");
            Ok(())
        })
        .unwrap();
    assert_eq!(plugin.add(&stays.container).unwrap(), stays.addresses, "a pod keeps what it has");
    // Five minutes of grace are for pools in use.
    plugin.del(&stays.container).unwrap();
    let begun = Instant::now();
    world
        .wait_for(TIMEOUT, |world| {
            let left = blocks_of(world, "default")?;
            ensure!(left.is_empty(), "{left:?}");
            let status = world.plane.get(&format!("{POOLS}/default"))?["status"].take();
            ensure!(status["blocks"] == 0 && status["nodeCount"] == 0 && status["used"] == 0, "{status}");
            Ok(())
        })
        .unwrap();
    println!("  the last block was back after {:.1} s", begun.elapsed().as_secs_f64());
    disable(world, false);
    world.wait_for(TIMEOUT, |_| plugin.add(&late)).unwrap();
    let status = world.wait_for(TIMEOUT, |world| {
        condition(world, "default", "Disabled", "False")?;
        let status = world.plane.get(&format!("{POOLS}/default"))?["status"].take();
        ensure!(status["blocks"] != 0, "{status}");
        Ok(status)
    });
    assert_eq!(status.unwrap()["nodes"][0]["name"], "cloud-1");
}

fn a_dry_pool_has_an_event(world: &World) {
    idle_node(world);
    let spec = json!({ "blockSizeBits": 1, "subnets": [{ "ipv4": "10.99.0.0/31" }] });
    world.plane.apply(&pool("puddle", &spec)).unwrap();
    world.plane.apply(&request("drinks", "puddle")).unwrap();
    world.wait_for(TIMEOUT, |world| condition(world, "puddle", "Exhausted", "True")).unwrap();
    assert_eq!(condition(world, "puddle", "Ready", "False").unwrap()["reason"], "Exhausted");
    let event = world.wait_for(TIMEOUT, |world| {
        world.events("regarding.name=puddle")?.into_iter().next().context("no event")
    });
    let event = event.unwrap();
    assert_eq!((event["reason"].as_str(), event["type"].as_str()), (Some("OutOfBlocks"), Some("Warning")));
    println!("  {}", event["note"]);
    world.plane.apply(&request("thirsts", "puddle")).unwrap();
    world
        .wait_for(TIMEOUT, |world| {
            let status = world.plane.get(&format!("{REQUESTS}/thirsts"))?["status"].take();
            let failed = status["conditions"].as_array().context("pending")?.last().cloned().unwrap();
            ensure!(failed["type"] == "Failed" && failed["reason"] == "out of blocks", "{failed}");
            Ok(())
        })
        .unwrap();
    let page = http(world, 9386, "/metrics");
    assert!(page.contains("fairlead_controller_block_refusals_total{reason=\"PoolExhausted\"} 1"), "{page}");
}

fn without_a_controller_pools_are_judged_and_can_go(world: &mut World) {
    let v4 = |subnet: &str| json!({ "subnets": [{ "ipv4": subnet }] });
    world.plane.apply(&pool("leaves", &v4("10.75.0.0/16"))).unwrap();
    world.kill_controller().unwrap();
    refused(world.plane.apply(&pool("bad", &v4("10.64.3.0/24"))), "overlaps 10.64.0.0/16 of pool default");
    world.plane.apply(&pool("comes", &v4("10.76.0.0/16"))).unwrap();
    world.plane.kubectl(&["delete", "addresspool", "leaves", "--wait=false"]).unwrap();
    world.start_controller().unwrap();
    world.wait_for(TIMEOUT, |world| condition(world, "comes", "Ready", "True")).unwrap();
    world.plane.kubectl(&["wait", "--for=delete", "addresspool/leaves", "--timeout=60s"]).unwrap();
    world.plane.kubectl(&["delete", "addresspool", "comes", "--timeout=60s"]).unwrap();
}

/// A GET on the machine of the controllers.
fn http(world: &World, port: u16, path: &str) -> String {
    let get = format!(
        "bash -c 'exec 3<>/dev/tcp/127.0.0.1/{port}; printf \"GET {path} HTTP/1.0\\r\\n\\r\\n\" >&3; cat <&3'"
    );
    world.plane_host().shell(&get).unwrap_or_default()
}

/// One replica of the controller.
struct Replica {
    name: String,
    ports: u16,
    process: Process,
}

impl Replica {
    fn start(world: &World, name: &str, ports: u16, arguments: &[&str]) -> Self {
        let mut command = world.plane_host().command(executable("fairlead").unwrap()).unwrap();
        command.args(["controller", "--identity", name]).args(arguments);
        for (flag, port) in [("metrics", ports), ("health", ports + 1)] {
            command.arg(format!("--{flag}-addr=:{port}"));
        }
        command.env("KUBECONFIG", world.directory().join("controller.kubeconfig"));
        let log = world.directory().join(format!("{name}.log"));
        let process = world.plane_host().spawn(&mut command, log).unwrap();
        Self { name: name.to_owned(), ports, process }
    }

    fn wait_ready(&self, world: &World) {
        world
            .wait_for(TIMEOUT, |world| {
                let answer = http(world, self.ports + 1, "/readyz");
                ensure!(answer.contains(" 200 ") && answer.ends_with("ok"), "{}: {answer}", self.name);
                Ok(())
            })
            .unwrap();
    }

    fn kill(mut self) {
        self.process.signal(Signal::SIGKILL).unwrap();
        self.process.wait(Duration::from_secs(5)).unwrap();
    }
}

/// Two replicas of the controller, and no other one.
fn two_replicas(world: &mut World, arguments: &[&str]) -> [Replica; 2] {
    world.kill_controller().unwrap();
    let replicas =
        [Replica::start(world, "one", 9500, arguments), Replica::start(world, "two", 9510, arguments)];
    replicas.iter().for_each(|replica| replica.wait_ready(world));
    replicas
}

/// The leader dies in the middle of its work; the other replica takes over the Lease. No block is given twice, every
/// request is answered once, and grants go on.
#[test]
fn another_replica_takes_over_from_a_leader_that_was_killed() {
    let mut world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    let [one, two] = two_replicas(&mut world, &[]);
    idle_node(&world);
    let many = json!({ "blockSizeBits": 2, "subnets": [{ "ipv4": "10.90.0.0/20" }] });
    world.wait_for(TIMEOUT, |world| world.plane.apply(&pool("many", &many))).unwrap();
    let leader = |world: &World| -> Result<String> {
        let lease = world.plane.get(LEASE)?;
        Ok(lease["spec"]["holderIdentity"].as_str().context("no holder")?.to_owned())
    };
    let first = world.wait_for(TIMEOUT, |world| {
        let holder = leader(world)?;
        ensure!(holder == one.name || holder == two.name, "{holder}");
        Ok(holder)
    });
    let first = first.unwrap();
    let ask = |world: &World, batch: usize, count: usize| {
        let requests: Vec<String> = (0..count).map(|n| request(&format!("r-{batch}-{n}"), "many")).collect();
        world.plane.apply(&requests.join("\n---\n")).unwrap();
    };
    let answered = |world: &World, wanted: RangeFrom<usize>| -> Result<Vec<Value>> {
        let requests = world.plane.get(REQUESTS)?["items"].take();
        let requests: Vec<Value> = requests.as_array().context("no list")?.clone();
        let done = requests.iter().filter(|request| request["spec"]["poolName"] == "many");
        let done: Vec<Value> =
            done.filter(|request| request["status"]["addressBlockName"].is_string()).cloned().collect();
        ensure!(wanted.contains(&done.len()), "{} of {wanted:?}", done.len());
        Ok(done)
    };
    ask(&world, 1, 40);
    world.wait_for(TIMEOUT, |world| answered(world, 40..)).unwrap();
    let (dies, lives) = if first == one.name { (one, two) } else { (two, one) };
    let (begun, left) = std::thread::scope(|scope| {
        let asking = scope.spawn(|| ask(&world, 2, 120));
        world.wait_for(TIMEOUT, |world| answered(world, 41..)).unwrap();
        dies.kill();
        let begun = Instant::now();
        // The other replica does not have the Lease yet.
        let left = 160 - answered(&world, 41..).unwrap().len();
        asking.join().unwrap();
        (begun, left)
    });
    println!("the leader died with {left} requests of 160 unanswered");
    assert!(left > 0, "the leader had nothing left to do when it died");
    world.wait_for(TIMEOUT, |world| answered(world, 160..)).unwrap();
    println!("all requests were answered {:.1} s after the leader died", begun.elapsed().as_secs_f64());
    ask(&world, 3, 40);
    let requests = world.wait_for(TIMEOUT, |world| answered(world, 200..)).unwrap();
    assert_eq!(leader(&world).unwrap(), lives.name);

    let blocks = blocks_of(&world, "many").unwrap();
    assert_eq!(blocks.len(), 200, "one for each request");
    let mut subnets: Vec<Ipv4Addr> = Vec::new();
    for block in &blocks {
        let name = block["metadata"]["name"].as_str().unwrap();
        let uid = &block["metadata"]["labels"]["coil.cybozu.com/request"];
        let of: Vec<&Value> = requests.iter().filter(|request| request["metadata"]["uid"] == *uid).collect();
        assert_eq!(of.len(), 1, "{name}");
        assert_eq!(of[0]["status"]["addressBlockName"], name);
        subnets.push(block["ipv4"].as_str().unwrap().trim_end_matches("/30").parse().unwrap());
    }
    subnets.sort_unstable();
    subnets.dedup();
    assert_eq!(subnets.len(), 200, "a block was granted twice");
}
