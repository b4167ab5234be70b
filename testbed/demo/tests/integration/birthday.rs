//! A node behind a symmetric NAT with random ports and one behind a port-restricted NAT find a direct path by trying many ports.
//! Nothing is fake but the kubelet.

use std::net::Ipv4Addr;
use std::time::{Duration, Instant};

use crate::outage::{TIMEOUT, loses_nothing, node, peer, udp};
use anyhow::{Context, Result, ensure};
use fairlead_demo::judge::{count_tunnel_packets, counted_tunnel_packets};
use fairlead_demo::nat_matrix;
use fairlead_demo::servers::{apply_mesh, apply_token, relay, stun_server};
use fairlead_demo::{World, probe};
use jiff::Timestamp;
use serde_json::{Value, json};
use testbed_lab::Progress;
use testbed_lab::relay::TOKEN;
use testbed_lab::traffic::Flow;

const RESTRICTED: &str = "port-b-1";
const SYMMETRIC: &str = "random-a-1";
/// Entries of connection tracking at a router: what an attempt may send, and everything else.
const BUDGET: usize = 2048 + 500;

/// Three nodes, of which `open-a-1` has the API server, with STUN servers and a relay.
struct Bed {
    world: World,
    _servers: Vec<Box<dyn std::any::Any>>,
}

fn bed(birthday: Option<&str>) -> Bed {
    let names = ["open-a-1", RESTRICTED, SYMMETRIC];
    let places: Vec<_> =
        nat_matrix::places().into_iter().filter(|place| names.contains(&place.node)).collect();
    let mut world = World::start(&nat_matrix::topology(&places), &Progress::default()).unwrap();
    let servers = ["stun-1", "stun-2"].map(|name| stun_server(&world, name).unwrap());
    let relay = relay(&world).unwrap();
    world.apply_pool().unwrap();
    apply_token(&world, TOKEN).unwrap();
    let stun: Vec<String> = servers.iter().map(|(host, _)| format!("stun:{}", host.address())).collect();
    let mut spec = json!({ "stunServers": stun, "relay": relay.spec("auto") });
    if let Some(birthday) = birthday {
        spec["natTraversal"] = json!({ "birthdayAttack": birthday });
    }
    apply_mesh(&world, &spec).unwrap();
    world.start_pods().unwrap();
    let (pairs, _) = probe::all_pairs(&world.pods, Instant::now() + TIMEOUT, |_, _| String::new()).unwrap();
    assert!(pairs.iter().all(|pair| pair.tcp && pair.icmp), "{pairs:?}");
    Bed { world, _servers: vec![Box::new(servers), Box::new(relay)] }
}

impl Bed {
    /// Endpoint at which each of the two nodes has the other one; `None` by way of the relay.
    fn endpoints(&self) -> Result<[Option<String>; 2]> {
        let endpoint = |from: &str, to: &str| {
            let peer = peer(node(&self.world, from), to).context("no peer")?;
            ensure!(peer["state"] == "up", "{peer}");
            let endpoint = peer["endpoint"].as_str().context("no endpoint")?;
            Ok((!endpoint.contains("://")).then(|| endpoint.to_owned()))
        };
        Ok([endpoint(RESTRICTED, SYMMETRIC)?, endpoint(SYMMETRIC, RESTRICTED)?])
    }

    fn wait_for_direct(&self) {
        let is_direct = || {
            let ends = self.endpoints()?;
            ensure!(ends.iter().all(Option::is_some), "{ends:?} {:?}", self.reasons());
            Ok(())
        };
        testbed_lab::eventually(TIMEOUT, is_direct).unwrap();
    }

    fn reasons(&self) -> [Value; 2] {
        [(RESTRICTED, SYMMETRIC), (SYMMETRIC, RESTRICTED)]
            .map(|(from, to)| peer(node(&self.world, from), to).unwrap_or_default()["relayReason"].clone())
    }

    fn tracked(&self, name: &str) -> usize {
        let router = node(&self.world, name).host.router().unwrap();
        router.shell("conntrack -C").unwrap().trim().parse().unwrap()
    }

    /// Makes the router in front of a node forget its UDP mappings. `conntrack -D` ends early when an entry expires between its dump and
    /// its deletion, as those of an attempt do by the hundred.
    fn forget_mappings(&self, name: &str) {
        let router = node(&self.world, name).host.router().unwrap();
        testbed_lab::eventually(TIMEOUT, || router.shell("conntrack -D -p udp >/dev/null")).unwrap();
    }

    fn public_address(&self, name: &str) -> Ipv4Addr {
        node(&self.world, name).host.public_address()
    }

    /// When a node wrote such lines.
    fn logged(&self, name: &str, is_it: impl Fn(&Value) -> bool) -> Vec<Timestamp> {
        let text = std::fs::read_to_string(node(&self.world, name).log()).unwrap();
        let lines = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        lines.filter(is_it).map(|line| line["timestamp"].as_str().unwrap().parse().unwrap()).collect()
    }

    /// Duration of each attempt, from the opening of the sockets to the path that is used.
    fn times(&self) -> Vec<Duration> {
        let opened =
            self.logged(SYMMETRIC, |line| line["message"] == "opening sockets for a birthday attempt");
        let mut chosen: Vec<Timestamp> = [RESTRICTED, SYMMETRIC]
            .iter()
            .flat_map(|name| self.logged(name, |line| line["reason"] == "BirthdayAttack"))
            .collect();
        chosen.sort();
        let took = |at: &Timestamp| {
            let end = chosen.iter().find(|chosen| *chosen >= at)?;
            Duration::try_from(end.duration_since(*at)).ok()
        };
        opened.iter().filter_map(took).collect()
    }
}

#[test]
fn a_symmetric_and_a_port_restricted_nat_get_a_direct_path_by_trying_ports_unless_that_is_disabled() {
    let bed = bed(Some("disabled"));
    let world = &bed.world;
    let flow = udp(world, SYMMETRIC, RESTRICTED);
    let says_why = || {
        let reasons = bed.reasons();
        let is_disabled = |reason: &Value| reason.as_str().is_some_and(|why| why.ends_with("is disabled"));
        ensure!(reasons.iter().all(is_disabled), "{reasons:?}");
        Ok(())
    };
    testbed_lab::eventually(TIMEOUT, says_why).unwrap();
    count_tunnel_packets(world, bed.public_address(RESTRICTED), bed.public_address(SYMMETRIC)).unwrap();
    let mark = Instant::now();
    let patch = json!({ "spec": { "natTraversal": { "birthdayAttack": null } } }).to_string();
    world.plane.kubectl(&["patch", "wirekubemesh", "default", "--type=merge", "-p", &patch]).unwrap();
    bed.wait_for_direct();
    println!("direct {:.1?} after it was allowed; attempts took {:.1?}", mark.elapsed(), bed.times());
    let tracked = [RESTRICTED, SYMMETRIC].map(|name| bed.tracked(name));
    println!("entries of connection tracking: {tracked:?}");
    assert!(tracked.iter().all(|count| *count <= BUDGET), "{tracked:?}");
    std::thread::sleep(Duration::from_secs(3));
    loses_nothing("relay to direct", std::slice::from_ref(&flow), mark);
    let packets = counted_tunnel_packets(world).unwrap();
    assert!(packets.len() == 2 && packets.iter().all(|count| *count > 0), "{packets:?}");
    let changes = [(RESTRICTED, SYMMETRIC), (SYMMETRIC, RESTRICTED)].map(|(from, to)| {
        let (_, status) = node(world, from).ask(&["status", to]).unwrap();
        status["peers"][0]["pathChanges"].to_string()
    });
    assert!(changes.iter().any(|changes| changes.contains("BirthdayAttack")), "{changes:?}");
}

/// `FAIRLEAD_BIRTHDAY_RUNS` says how often (200): about ten seconds each.
#[test]
#[ignore = "takes half an hour: cargo xtask test soak"]
fn birthday_attempts_succeed_in_99_of_100_runs() {
    let runs = std::env::var("FAIRLEAD_BIRTHDAY_RUNS").map_or(200, |runs| runs.parse().unwrap());
    let bed = bed(None);
    let flow: Flow = udp(&bed.world, SYMMETRIC, RESTRICTED);
    let mut most = 0;
    for run in 0..runs {
        bed.wait_for_direct();
        most = most.max(bed.tracked(RESTRICTED)).max(bed.tracked(SYMMETRIC));
        let [mapping, _] = bed.endpoints().unwrap();
        println!("{run}: {mapping:?} {}", flow.name());
        bed.forget_mappings(SYMMETRIC);
        // The next attempt may have found another port before anyone looked.
        let is_lost = || {
            let ends = bed.endpoints()?;
            ensure!(ends[0] != mapping, "{ends:?}");
            Ok(())
        };
        testbed_lab::eventually(TIMEOUT, is_lost).unwrap();
    }
    let opened = bed.logged(SYMMETRIC, |line| line["message"] == "opening sockets for a birthday attempt");
    let mut times = bed.times();
    times.sort();
    let within = times.iter().filter(|took| **took <= Duration::from_secs(5)).count();
    let at = |percent: usize| times[(times.len() - 1) * percent / 100];
    println!(
        "{} attempts, {within} with a path within 5 s; p50 {:.2?}, p99 {:.2?}, longest {:.2?}; at most {most} entries of \
         connection tracking",
        opened.len(),
        at(50),
        at(99),
        at(100)
    );
    assert!(within * 100 >= opened.len() * 99, "{within} of {}", opened.len());
    assert!(most <= BUDGET, "{most}");
}
