//! Narrow paths, firewalls, and machines without time.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use anyhow::Context;
use testbed_nodes::Cluster;

use crate::bed::outside::{addresses_of, serve};
use crate::bed::{Pod, Room, network};
use crate::egress::BED;
use crate::egress::outside::{connect, echoed, no_client_address_was_seen, outside, run};
use crate::egress::setup::{FLOATING, clients};

/// Smallest MTU of a link that IPv6 allows.
const NARROW: u32 = 1280;

/// Firewall on the pod's node: of the pod's packets, only those from and to UDP port 5555 pass.
struct Firewall<'a> {
    cluster: &'a Cluster,
    pod: &'a Pod,
}

impl<'a> Firewall<'a> {
    fn new(cluster: &'a Cluster, pod: &'a Pod) -> Self {
        let rules: String = pod
            .addresses
            .iter()
            .flat_map(|address| {
                let family = if address.is_ipv4() { "ip" } else { "ip6" };
                ["saddr", "daddr"].map(|end| {
                    format!(
                        "{family} {end} {address} meta l4proto != udp counter drop\n\
                         {family} {end} {address} udp dport != 5555 counter drop\n"
                    )
                })
            })
            .collect();
        let table = format!(
            "table inet judge {{ chain forward {{ type filter hook forward priority -10; {rules} }}; }}"
        );
        let node = cluster.node(&pod.node).unwrap();
        node.host().shell(&format!("nft -f - <<'END'\n{table}\nEND")).unwrap();
        Self { cluster, pod }
    }
}

impl Drop for Firewall<'_> {
    fn drop(&mut self) {
        // It ends with the node at the latest.
        let node = self.cluster.node(&self.pod.node);
        let _ = node.and_then(|node| node.host().shell("nft delete table inet judge"));
    }
}

/// ICMP errors of the narrow hop reach the client through the tunnel, as nothing else does.
#[test]
fn a_narrow_next_hop_is_found_through_a_firewall_that_passes_only_the_tunnel() {
    let cluster = BED.shared();
    let room = Room::new(&cluster, "narrow");
    // Routes to the gateways.
    outside(&cluster);
    let host = cluster.lab().dual_stack_site("narrow").host("narrow").unwrap();
    let targets = addresses_of(&host);
    serve(&host, targets.clone()).unwrap();
    let narrow = format!(
        "ip link set mtu {NARROW} dev $(ip route get {} | grep -o 'dev [^ ]*' | cut -d' ' -f2)",
        targets[0]
    );
    cluster.lab().internet().shell(&narrow).unwrap();
    let pod = clients(&room, 1).remove(0);
    let place = network(&cluster, &pod);
    let _firewall = Firewall::new(&cluster, &pod);
    let message: Vec<u8> = (0..1usize << 20).map(|at| at.to_le_bytes()[0]).collect();
    for to in targets {
        let path = run(&place, &format!("tracepath -n -m 8 {to}")).unwrap();
        assert!(path.contains(&format!("pmtu {NARROW}")), "{path}");
        let (mut connection, _) = connect(&place, to).unwrap();
        echoed(&mut connection, &message).with_context(|| format!("to {to}: {path}")).unwrap();
    }
    no_client_address_was_seen(&cluster);
}

/// Time for which the machine is overloaded: 20 s, or `FAIRLEAD_LOAD_SECONDS`; 600 s were shown by hand (docs/outages.md).
fn load_time() -> Duration {
    let wanted = std::env::var("FAIRLEAD_LOAD_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(wanted.unwrap_or(20))
}

/// Threads that use all processors until they are dropped.
struct Load {
    stop: Arc<AtomicBool>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Load {
    fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let processors = std::thread::available_parallelism().map_or(2, usize::from);
        let threads = (0..2 * processors)
            .map(|_| {
                let stop = Arc::clone(&stop);
                std::thread::spawn(move || {
                    while !stop.load(Ordering::Relaxed) {
                        std::hint::spin_loop();
                    }
                })
            })
            .collect();
        Self { stop, threads }
    }
}

impl Drop for Load {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.drain(..).for_each(|thread| drop(thread.join()));
    }
}

#[test]
fn a_machine_without_time_is_no_reason_to_leave_a_gateway() {
    let cluster = BED.alone();
    let room = Room::new(&cluster, "load");
    let to = outside(&cluster).addresses()[0];
    let pods = clients(&room, 6);
    let places: Vec<_> = pods.iter().map(|pod| network(&cluster, pod)).collect();
    let gateway_of = |place| connect(place, to).map(|(_, seen)| seen);
    let before: BTreeMap<&str, IpAddr> = pods
        .iter()
        .zip(&places)
        .map(|(pod, place)| (pod.name.as_str(), gateway_of(place).unwrap()))
        .collect();
    let terms = || {
        let path = "jsonpath={.items[*].spec.leaseTransitions}";
        cluster.kubectl(&["-n", FLOATING, "get", "leases", "-o", path]).unwrap()
    };
    let held = terms();
    assert!(!held.trim().is_empty(), "no source address is held");
    let load = Load::start();
    let (begun, mut asked) = (Instant::now(), 0u32);
    while begun.elapsed() < load_time() {
        for (pod, place) in pods.iter().zip(&places) {
            let seen = gateway_of(place).unwrap();
            assert_eq!(
                seen,
                before[pod.name.as_str()],
                "{pod:?} went to another gateway, {:.0?} after the begin",
                begun.elapsed()
            );
            asked += 1;
        }
        std::thread::sleep(Duration::from_millis(200));
    }
    drop(load);
    assert_eq!(terms(), held, "source addresses were taken over");
    println!(
        "{asked} connections in {:.0?} without a free processor: each client kept its gateway",
        begun.elapsed()
    );
    no_client_address_was_seen(&cluster);
}
