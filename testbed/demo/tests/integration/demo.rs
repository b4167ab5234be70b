//! The demo itself in both topologies: every pair, and what nodes and API server say of the mesh.
//!
//! `three-sites` runs as the program a user starts, with `--json --keep`, and is looked at through what it prints;
//! `rough-edges` runs from the library. Nothing is fake but the kubelet.

use std::fs::{self, File};
use std::io::{BufRead, BufReader};
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use fairlead_demo::cni::Pod;
use fairlead_demo::objects::PEERS;
use fairlead_demo::world::eventually;
use fairlead_demo::{World, probe, report, topology};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use serde_json::Value;
use testbed_lab::Progress;

/// Bounds what hangs; nothing here is measured by it.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Home-1's and office-1's, each behind its own router.
const DUPLICATE: &str = "192.168.1.10";
/// Enough for many full windows: a path that loses large packets does not carry it.
const LARGE: usize = 4 << 20;

#[test]
fn three_sites_is_one_json_object_and_a_world_to_look_around_in() {
    let mut demo = Demo::start("three-sites").unwrap();
    let report = demo.report().unwrap();
    every_pair_works(&report, &["cloud-1", "cloud-2", "home-1", "home-2", "office-1", "office-2"]);
    assert_eq!(report["sites"], serde_json::json!(["cloud", "home", "office"]));
    let nodes = demo.nodes();
    assert_eq!(nodes.len(), 6, "{nodes:?}");
    for line in demo.status_lines() {
        // Exit code 3, because there is a problem to report.
        let status = run(&format!("{line} || test $? = 3")).unwrap();
        assert!(status.contains(&format!("problem: {DUPLICATE}/32")), "{line}: {status}");
    }
    assert_eq!(demo.status_lines().len(), 6);

    let natted = ["home-1", "home-2", "office-1", "office-2"];
    eventually(TIMEOUT, || published(&demo.peers()?, &["cloud-1", "cloud-2"], &natted)).unwrap();
    columns_name_nat_and_mode(&demo.kubectl(&["get", "wirekubepeers"]).unwrap());

    for (node, problems) in report["problems"].as_object().unwrap() {
        assert!(names_the_duplicate(problems), "{node} does not report {DUPLICATE}: {problems}");
    }
    // Those it is about publish it; the others only if they were chosen.
    let holders = ["home-1", "office-1"];
    for peer in demo
        .peers()
        .unwrap()
        .iter()
        .filter(|peer| holders.iter().any(|name| peer["metadata"]["name"] == **name))
    {
        assert!(names_the_duplicate(&peer["status"]["problems"]), "not in kubectl: {peer:#}");
    }
    for (name, enter) in &nodes {
        let allowed = run(&format!("{enter} wg show all allowed-ips")).unwrap();
        assert_eq!(allowed.lines().count(), 5, "{name}: {allowed}");
        // It stays with the one that joined first; the two themselves keep their own.
        let expected = usize::from(!holders.contains(&name.as_str()));
        assert_eq!(allowed.matches(&format!("{DUPLICATE}/")).count(), expected, "{name}: {allowed}");
    }
    let directory = demo.directory().unwrap();
    assert!(directory.is_dir());
    assert_eq!(demo.end().unwrap(), Some(0));
    assert!(!directory.exists(), "{} is left", directory.display());
}

#[test]
fn rough_edges_carry_large_packets_both_ways() {
    let topology = topology::rough_edges();
    let mut world = World::start(&topology, &Progress::default()).unwrap();
    let report = report::run(&mut world, &topology).unwrap();
    println!("{}", report.table());
    let report = serde_json::to_value(&report).unwrap();
    every_pair_works(&report, &["cafe-1", "cafe-2", "cloud-1", "cloud-2", "farm-1", "farm-2"]);
    let problems = report["problems"].as_object().unwrap();
    assert!(problems.values().all(|problems| problems == &serde_json::json!([])), "{problems:?}");

    let peers = |world: &World| items(world.plane.get(PEERS)?);
    let natted = ["cafe-1", "cafe-2", "farm-1", "farm-2"];
    world.wait_for(TIMEOUT, |world| published(&peers(world)?, &["cloud-1", "cloud-2"], &natted)).unwrap();

    let pod = |node: &str| world.pods.iter().find(|pod| pod.node == node).unwrap();
    let (cafe, cloud) = (pod("cafe-1"), pod("cloud-1"));
    let mtu =
        |node: &str| world.nodes.iter().find(|n| n.name == node).unwrap().status().unwrap()["mtu"].clone();
    println!("mesh MTU: cafe-1 {}, cloud-1 {}", mtu("cafe-1"), mtu("cloud-1"));
    assert_eq!(mtu("cafe-1"), mtu("cafe-2"));
    let _servers = probe::Servers::start(&[cafe.clone(), cloud.clone()]).unwrap();
    for (from, to) in [(cafe, cloud), (cloud, cafe)] {
        large_echo(from, to);
    }
}

fn large_echo(from: &Pod, to: &Pod) {
    assert_eq!(to.addresses.len(), 2, "{to:?}");
    for address in &to.addresses {
        let start = Instant::now();
        probe::tcp(from, *address, LARGE).unwrap_or_else(|error| {
            panic!("4 MiB from {} to {address} of {}: {error:#}", from.name, to.name)
        });
        println!("4 MiB from {} to {address} and back: {:.2} s", from.name, start.elapsed().as_secs_f64());
    }
}

/// Checks every documented key of the report, and that the pairs are all ordered pairs in both families.
fn every_pair_works(report: &Value, nodes: &[&str]) {
    let mut keys: Vec<&String> = report.as_object().unwrap().keys().collect();
    keys.sort();
    assert_eq!(
        keys,
        ["node_rss_mib", "nodes", "ok", "pairs", "problems", "seconds_to_all_reachable", "sites"]
    );
    let mut named: Vec<&str> =
        report["nodes"].as_array().unwrap().iter().map(|node| node.as_str().unwrap()).collect();
    named.sort_unstable();
    assert_eq!(named, nodes);
    assert_eq!(report["ok"], true, "{report:#}");

    let pairs = report["pairs"].as_array().unwrap();
    pairs_are_complete(pairs, nodes);
    for pair in pairs {
        assert_eq!((&pair["tcp"], &pair["icmp"]), (&true.into(), &true.into()), "{pair}");
        assert!(pair["rtt_ms"].as_f64().is_some_and(|rtt| rtt > 0.0), "{pair}");
        assert!(pair["path"].as_str().unwrap().starts_with("direct "), "{pair}");
    }
    let figure = |key: &str| report[key].as_f64().unwrap();
    let (seconds, memory) = (figure("seconds_to_all_reachable"), figure("node_rss_mib"));
    println!(
        "all reachable after {seconds:.2} s (budget 10 s); largest node program {memory:.1} MiB (goal 30 MiB)"
    );
    assert!(seconds > 0.0 && seconds <= 60.0);
    assert!(memory > 0.0);
}

fn pairs_are_complete(pairs: &[Value], nodes: &[&str]) {
    let mut expected: Vec<(String, String, &str)> = Vec::new();
    for from in nodes {
        for to in nodes.iter().filter(|to| *to != from) {
            expected
                .extend(["ipv4", "ipv6"].map(|family| (format!("pod-{from}"), format!("pod-{to}"), family)));
        }
    }
    let text = |pair: &Value, key: &str| pair[key].as_str().unwrap().to_owned();
    let mut found: Vec<(String, String, &str)> = pairs
        .iter()
        .map(|pair| (text(pair, "from"), text(pair, "to"), pair["family"].as_str().unwrap()))
        .collect();
    found.sort();
    expected.sort();
    assert_eq!(found, expected);
}

/// Checks the status that nodes publish once they have seen each other.
fn published(peers: &[Value], open: &[&str], cone: &[&str]) -> Result<()> {
    let names: Vec<&str> = peers.iter().filter_map(|peer| peer["metadata"]["name"].as_str()).collect();
    ensure!(names.len() == open.len() + cone.len(), "WireKubePeers: {names:?}");
    for peer in peers {
        let (name, status) = (peer["metadata"]["name"].as_str().unwrap_or_default(), &peer["status"]);
        let nat = if open.contains(&name) { "open" } else { "cone" };
        ensure!(status["natType"] == nat, "{name} should be {nat}: {status:#}");
        ensure!(status["transportMode"] == "direct" && status["connected"] == true, "{name}: {status:#}");
        let transports = status["peerTransports"].as_object().context("no peerTransports")?;
        let mut others: Vec<&str> = names.iter().filter(|other| **other != name).copied().collect();
        others.sort_unstable();
        let mut reached: Vec<&String> = transports.keys().collect();
        reached.sort();
        ensure!(reached == others, "{name} reaches {reached:?}, not {others:?}");
        ensure!(transports.values().all(|transport| transport == "direct"), "{name}: {transports:?}");
    }
    Ok(())
}

fn columns_name_nat_and_mode(table: &str) {
    let mut lines = table.lines().map(|line| line.split_whitespace().collect::<Vec<_>>());
    let header = lines.next().unwrap();
    assert_eq!(header, ["NAME", "ENDPOINT", "ALLOWEDIP", "CONNECTED", "NAT", "MODE", "AGE"]);
    for line in lines {
        let nat = if line[0].starts_with("cloud") { "open" } else { "cone" };
        assert_eq!(line[3..6], ["true", nat, "direct"], "{line:?}");
    }
}

fn names_the_duplicate(problems: &Value) -> bool {
    let listed = problems.as_array().into_iter().flatten().filter_map(Value::as_str);
    listed.filter(|text| [DUPLICATE, "home-1", "office-1"].iter().all(|name| text.contains(name))).count()
        == 1
}

fn items(list: Value) -> Result<Vec<Value>> {
    Ok(list["items"].as_array().context("no items")?.clone())
}

fn run(line: &str) -> Result<String> {
    let output = Command::new("sh").args(["-ec", line]).output()?;
    ensure!(output.status.success(), "{line}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(String::from_utf8(output.stdout)?)
}

/// The program, run with `--json --keep`. Dropping it ends it.
struct Demo {
    child: Child,
    stdout: BufReader<ChildStdout>,
    log: PathBuf,
    _directory: tempfile::TempDir,
}

impl Demo {
    fn start(topology: &str) -> Result<Self> {
        let directory = tempfile::tempdir()?;
        let log = directory.path().join("stderr");
        let mut child = Command::new(env!("CARGO_BIN_EXE_fairlead-demo"))
            .args(["--json", "--keep", "--topology", topology])
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(File::create(&log)?)
            .spawn()?;
        let stdout = BufReader::new(child.stdout.take().context("no stdout")?);
        Ok(Self { child, stdout, log, _directory: directory })
    }

    fn said(&self) -> String {
        fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// The one line on stdout, once it has also printed how to inspect it.
    fn report(&mut self) -> Result<Value> {
        let mut line = String::new();
        self.stdout.read_line(&mut line)?;
        let said = self.said();
        let report =
            serde_json::from_str(&line).with_context(|| format!("no JSON in {line:?}; it said {said}"))?;
        eventually(TIMEOUT, || {
            ensure!(
                self.said().contains("\nlogs, keys and sockets: "),
                "it does not print how to inspect it"
            );
            Ok(())
        })?;
        println!("{}", self.said());
        Ok(report)
    }

    /// Rest of the line that begins with `start`.
    fn line(&self, start: &str) -> Result<String> {
        let said = self.said();
        let line = said.lines().find_map(|line| line.trim().strip_prefix(start).map(str::to_owned));
        line.with_context(|| format!("it does not say {start:?}: {said}"))
    }

    /// Shell commands that enter each node, by its name, as the demo prints them.
    fn nodes(&self) -> Vec<(String, String)> {
        let said = self.said();
        let shells = said.lines().filter_map(|line| line.split_once(" sh    # "));
        // Those in a pod have its addresses behind its name.
        let nodes = shells.filter(|(_, name)| !name.contains(' '));
        nodes.map(|(enter, name)| (name.to_owned(), enter.to_owned())).collect()
    }

    /// The lines that show what each node says.
    fn status_lines(&self) -> Vec<String> {
        self.said().lines().filter(|line| line.contains(" status --socket ")).map(str::to_owned).collect()
    }

    fn directory(&self) -> Result<PathBuf> {
        self.line("logs, keys and sockets: ").map(PathBuf::from)
    }

    /// kubectl as its lines have it, with other arguments.
    fn kubectl(&self, args: &[&str]) -> Result<String> {
        let (kubeconfig, said) = (self.line("export KUBECONFIG=")?, self.said());
        let line = said.lines().find_map(|line| line.split_once(" kubectl get "));
        let (enter, _) = line.context("it does not say how to call kubectl")?;
        run(&format!("KUBECONFIG={kubeconfig} {enter} kubectl {}", args.join(" ")))
    }

    fn peers(&self) -> Result<Vec<Value>> {
        items(serde_json::from_str(&self.kubectl(&["get", "wirekubepeers", "-o", "json"])?)?)
    }

    /// Ctrl-C; the exit code.
    fn end(&mut self) -> Result<Option<i32>> {
        kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGINT)?;
        let mut rest = String::new();
        self.stdout.read_line(&mut rest)?;
        ensure!(rest.is_empty(), "more than one object on stdout: {rest}");
        Ok(self.child.wait()?.code())
    }
}

impl Drop for Demo {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            // So that it takes its processes and namespaces with it.
            let _ = kill(Pid::from_raw(self.child.id().cast_signed()), Signal::SIGTERM);
            let _ = self.child.wait();
        }
    }
}
