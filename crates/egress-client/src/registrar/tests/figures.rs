//! Cost of egress for an ADD and for the memory of the node program, with gateways that this process serves over TLS. No times are asserted.

use std::sync::atomic::{AtomicU16, Ordering};

use fairlead_fou::link_name;
use fairlead_ipam::Key;
use fairlead_pods::cni::{Attachment, EgressRequest};
use prometheus_client::registry::Registry as Metrics;

use super::gateway::Fake;
use super::*;
use crate::tests::bed::{Bed, Objects, Pod, egress, service};

const NAMES: [&str; 4] = ["one/nat", "two/nat", "three/nat", "four/nat"];
const ROUNDS: usize = 100;
const AT_ONCE: usize = 4;
const CLIENTS: usize = 200;

/// Gateways of four Egresses, and the node program's part.
struct Bench {
    bed: Bed,
    _gateways: Vec<Fake>,
    numbers: AtomicU16,
}

impl Bench {
    async fn new() -> Self {
        let mut gateways: Vec<Fake> = Vec::new();
        for number in 2..6 {
            let port = gateways.first().map_or(0, |first| first.address.port());
            gateways.push(Fake::start(&format!("127.0.0.{number}:{port}")).await);
        }
        let of_each = NAMES.iter().zip(&gateways).zip(1..);
        let mut objects = Objects::default();
        let mut endpoints = Endpoints::new();
        for ((name, gateway), number) in of_each {
            let (ipv4, ipv6) = (format!("198.51.{number}.0/24"), format!("2001:db8:{number}::/64"));
            objects.egresses.push(egress(name, &[&ipv4, &ipv6]));
            objects.services.push(service(name, &[&format!("10.68.0.{number}"), &format!("fd04::{number}")]));
            let addresses = [gateway.address.ip(), format!("fd02::50:{number}").parse().unwrap()];
            let endpoint = GatewayEndpoint {
                addresses: addresses.into_iter().collect(),
                ready: true,
                serving: true,
                ..GatewayEndpoint::default()
            };
            let (namespace, name) = name.split_once('/').unwrap();
            let name = EgressName { namespace: namespace.to_owned(), name: name.to_owned() };
            endpoints.insert(name, [(gateway.address.to_string(), endpoint)].into());
        }
        let metrics = RegistrarMetrics::register(&mut Metrics::default());
        let port = gateways[0].address.port();
        let registrar = Registrar::new(tokens(Duration::from_secs(3600)), port, metrics);
        let changed = registrar.shared.registry().set_endpoints(endpoints, Instant::now());
        registrar.shared.clients_changed(changed);
        let mut bed = Bed::with_gateways(Arc::new(registrar.clone()), objects);
        let subsystem = bed.supervisor.subsystem("registrar");
        subsystem.spawn("egress registrations", run(Arc::clone(&registrar.shared)));
        Self { bed, _gateways: gateways, numbers: AtomicU16::new(1) }
    }

    /// An ADD's stage of egress for a new pod with so many Egresses; how long it took.
    async fn add(&self, pod: &Pod, egresses: usize) -> (Key, Duration) {
        let number = self.numbers.fetch_add(1, Ordering::Relaxed);
        let key = Key { container_id: format!("c{number}"), ifname: "eth0".to_owned() };
        let annotations = NAMES.iter().take(egresses).map(|name| {
            let (namespace, name) = name.split_once('/').unwrap();
            (format!("egress.coil.cybozu.com/{namespace}"), name.to_owned())
        });
        let uid = Some(format!("u{number}"));
        let mut request = EgressRequest {
            uid,
            annotations: annotations.collect(),
            labels: BTreeMap::new(),
            selected: BTreeSet::new(),
            gateway_of: None,
        };
        let mut attachment = Attachment { key: key.clone(), ..pod.attachment() };
        attachment.pod.name = format!("web-{number}");
        let _guard = self.bed.locks.lock(&key.container_id).await;
        let started = Instant::now();
        self.bed.egress.examine("shop", &mut request).await.unwrap();
        self.bed.egress.attach(&attachment, pod.interface(), request).await.unwrap();
        (key, started.elapsed())
    }
}

/// The resident memory of this process in KiB.
fn resident() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().strip_suffix(" kB").unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "prints figures: cargo test -p fairlead-egress-client --lib figures_of_add -- --ignored --nocapture"]
async fn figures_of_add() {
    let bench = Bench::new().await;
    let mut times: [Vec<Duration>; 3] = Default::default();
    // The first ones connect to the gateways.
    for round in 0..ROUNDS + 5 {
        for (count, times) in [0, 1, 4].into_iter().zip(&mut times) {
            let pod = Pod::new();
            let (key, time) = bench.add(&pod, count).await;
            if round >= 5 {
                times.push(time);
            }
            let links = pod.inside.sh("ip -br link | grep -c fou || true");
            assert_eq!(
                links.trim().parse::<usize>().unwrap(),
                2 * count,
                "{}",
                link_name([10, 68, 0, 1].into())
            );
            bench.bed.egress.detach(&key);
            sleep(Duration::from_millis(20)).await;
        }
    }
    for (count, times) in [0, 1, 4].into_iter().zip(times) {
        print(&format!("{count} Egresses, {} ADDs", times.len()), times);
    }
}

fn print(what: &str, mut times: Vec<Duration>) {
    times.sort();
    let at = |share: usize| times[(times.len() * share).div_ceil(100) - 1];
    println!("{what}: p50 {:?}, p99 {:?}", at(50), at(99));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "prints figures: cargo test -p fairlead-egress-client --lib figures_of_adds_at_once -- --ignored --nocapture"]
async fn figures_of_adds_at_once() {
    let bench = Bench::new().await;
    for count in [1, 4] {
        let mut times = Vec::new();
        for round in 0..ROUNDS / AT_ONCE + 2 {
            let pods = [(); AT_ONCE].map(|()| Pod::new());
            let all = futures::future::join_all(pods.iter().map(|pod| bench.add(pod, count))).await;
            for (pod, (key, time)) in pods.iter().zip(all) {
                assert_eq!(
                    pod.inside.sh("ip -br link | grep -c fou").trim().parse::<usize>().unwrap(),
                    2 * count
                );
                bench.bed.egress.detach(&key);
                times.extend((round >= 2).then_some(time));
            }
            sleep(Duration::from_millis(20)).await;
        }
        print(&format!("{count} Egresses, {AT_ONCE} ADDs at once"), times);
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "prints figures: cargo test -p fairlead-egress-client --lib figures_of_memory -- --ignored --nocapture"]
async fn figures_of_memory() {
    for egresses in [1, 4] {
        let bench = Bench::new().await;
        let mut pods = Vec::new();
        let mut before = 0;
        // The first ones fill what is allocated once.
        for number in 0..CLIENTS + 50 {
            if number == 50 {
                sleep(Duration::from_secs(1)).await;
                before = resident();
            }
            let pod = Pod::new();
            bench.add(&pod, egresses).await;
            pods.push(pod);
        }
        sleep(Duration::from_secs(1)).await;
        let grown = resident().saturating_sub(before);
        println!("{egresses} Egresses, {CLIENTS} clients: {:.1} KiB each", grown as f64 / CLIENTS as f64);
    }
}
