//! The HTTP ports of a real node program and a real controller, which pods reach without credentials.

use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::process::Command;
use std::time::Duration;

use anyhow::ensure;
use fairlead_demo::world::eventually;
use fairlead_demo::{World, topology};
use testbed_lab::{Host, Progress};
use testbed_metrics::promtool;

const TIMEOUT: Duration = Duration::from_secs(60);
/// Connections to each port; the attacker has one address.
const FLOOD: usize = 2_000;
/// Descriptors of one port at most: connections, and as many that are just being closed.
const PER_PORT: usize = 2 * 16;
/// Number of file descriptors that the program may open meanwhile for itself.
const OWN: usize = 8;
const METRICS: u16 = 9384;
const HEALTH: u16 = 9385;
const CONTROLLER_METRICS: u16 = 9386;

#[test]
fn http_ports_serve_those_they_are_for_and_cannot_be_exhausted() {
    let mut world = World::start(&topology::two_sites(), &Progress::default()).unwrap();
    world.apply_mesh_and_pool().unwrap();
    world.start_pods().unwrap();
    promtool_accepts_what_is_exposed(&world);
    connections_without_a_request_exhaust_nothing(&mut world);
    secure_metrics_are_for_whom_the_api_server_allows_them(&mut world);
}

fn promtool_accepts_what_is_exposed(world: &World) {
    for (host, port) in [(&world.nodes[0].host, METRICS), (world.plane_host(), CONTROLLER_METRICS)] {
        let scrape = host.shell(&format!("curl -sS http://127.0.0.1:{port}/metrics")).unwrap();
        // WireKube has gauges whose names end as those of counters, which promtool takes for a mistake.
        let is_judged = |line: &&str| !(line.contains("wirekube_") && line.contains("peers_total"));
        let judged: String = scrape.lines().filter(is_judged).flat_map(|line| [line, "\n"]).collect();
        promtool::check_metrics(&judged).unwrap();
        let open_metrics = "curl -sS -H 'Accept: application/openmetrics-text; version=1.0.0'";
        let scrape = host.shell(&format!("{open_metrics} http://127.0.0.1:{port}/metrics")).unwrap();
        assert!(scrape.ends_with("# EOF\n"), "{scrape}");
    }
}

fn descriptors(process: u32) -> usize {
    std::fs::read_dir(format!("/proc/{process}/fd")).unwrap().count()
}

/// Connections that begin a request and never finish it.
fn flood(from: &Host, to: IpAddr) -> Vec<TcpStream> {
    let connect = |port| {
        let mut stream = TcpStream::connect_timeout(&SocketAddr::new(to, port), TIMEOUT)?;
        // One that was closed at once is as good.
        let _ = stream.write_all(b"GET /metrics HTTP/1.1\r\nX-Slow: ");
        std::io::Result::Ok(stream)
    };
    let all = (0..FLOOD).flat_map(|_| [METRICS, HEALTH]);
    from.run(|| all.map(connect).collect::<std::io::Result<_>>()).unwrap().unwrap()
}

fn connections_without_a_request_exhaust_nothing(world: &mut World) {
    // This process holds the other ends.
    let process = std::process::id().to_string();
    let raised = Command::new("prlimit").args(["--pid", &process, "--nofile=16384"]).status().unwrap();
    assert!(raised.success());
    let attacker = world.plane_host().clone();
    let node = &world.nodes[0];
    let process = node.process().unwrap();
    let before = descriptors(process);
    let held = flood(&attacker, node.addresses()[0]);
    let during = descriptors(process);
    println!("{} connections: {before} descriptors before, {during} during", held.len());
    assert!(during <= before + 2 * PER_PORT + OWN, "{before} descriptors became {during}");
    let health = "curl -sS -m 10 -o /dev/null -w '%{http_code}' http://127.0.0.1:9385/healthz";
    assert_eq!(node.host.shell(health).unwrap(), "200");
    // The attacker's own next request is served, too.
    let scrape = format!("curl -sS -m 10 http://{}:{METRICS}/metrics", node.addresses()[0]);
    assert!(attacker.shell(&scrape).unwrap().contains("process_open_fds"));
    let name = node.name.clone();
    world.start_pod("during-the-flood", &name).unwrap();
    drop(held);
}

fn secure_metrics_are_for_whom_the_api_server_allows_them(world: &mut World) {
    let rights = include_str!("../../../../deploy/components/secure-metrics/rbac.yaml");
    world.plane.apply(rights).unwrap();
    let token = |account: &str| world.plane.token(account, "kube-system", None).unwrap();
    let (reader, other) = (token("fairlead-metrics-reader"), token("fairlead-controller"));
    let node = &mut world.nodes[0];
    node.stop().unwrap();
    node.arguments.push("--metrics-secure".to_owned());
    node.start().unwrap();
    node.wait_ready(TIMEOUT).unwrap();
    let ask = |token: &str| {
        let header =
            if token.is_empty() { String::new() } else { format!("-H 'Authorization: Bearer {token}'") };
        node.host.shell(&format!(
            "curl -ksS -m 10 -w ' %{{http_code}}' {header} https://127.0.0.1:{METRICS}/metrics"
        ))
    };
    // The API server puts rights into force some time after it has accepted them.
    let read = || {
        let answer = ask(&reader)?;
        ensure!(answer.ends_with(" 200") && answer.contains("process_open_fds"), "{answer}");
        Ok(())
    };
    eventually(TIMEOUT, read).unwrap();
    assert_eq!(ask(&other).unwrap(), " 403");
    assert_eq!(ask("").unwrap(), " 401");
    assert_eq!(ask("nonsense").unwrap(), " 401");
}
