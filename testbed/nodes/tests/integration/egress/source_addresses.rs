//! Source addresses that gateways take over from each other, with their connections. They are addresses of the network of both nodes: its
//! router asks for them by ARP and NDP.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime};

use anyhow::{Context, Result, ensure};
use testbed_lab::{ForeignNetwork, Place as _, eventually};
use testbed_nodes::Cluster;

use crate::bed::{Pod, Room, TIMEOUT, network, server};
use crate::egress::BED;
use crate::egress::failures::{Outgoing, kill};
use crate::egress::outside::{ask_by_udp, connect, no_client_address_was_seen, outside, run};
use crate::egress::setup::{FLOATING, Gateway, gateways, source_addresses};

/// The node that has gateways and no API server.
const SECOND: &str = "cloud-2";

/// Longest time from a kill until the program holds the addresses again. The kernel ends their use 1.5 s after the kill at the earliest,
/// and hears of it a moment after the log, on a busy machine some 100 ms.
const IN_TIME: Duration = Duration::from_secs(1);

/// Client pods of the Egress with source addresses.
fn clients(room: &Room<'_>, replicas: usize) -> Vec<Pod> {
    let annotations = format!("egress.coil.cybozu.com/{FLOATING}: nat");
    let metadata = format!("metadata: {{labels: {{app: client}}, annotations: {{{annotations}}}}}");
    room.run(
        "deployment/client",
        &server("client", replicas).replace("metadata: {labels: {app: client}}", &metadata),
    )
}

/// The gateway that holds the addresses, as the Egress shows it.
fn holder(cluster: &Cluster) -> Gateway {
    eventually(TIMEOUT, || {
        let path = "jsonpath={.status.sourceAddresses[0].gateway}";
        let name = cluster.kubectl(&["-n", FLOATING, "get", "egress", "nat", "-o", path])?;
        let found = gateways(cluster, FLOATING)?.into_iter().find(|gateway| gateway.name == name);
        found.with_context(|| format!("no living gateway holds the addresses: {name:?}"))
    })
    .with_context(|| cluster.explain())
    .unwrap()
}

/// The holder, on the node without the API server: no address can be taken over without that.
fn holder_on_the_second_node(cluster: &Cluster) -> Gateway {
    eventually(TIMEOUT, || {
        let found = holder(cluster);
        if found.node != SECOND {
            // It hands over.
            cluster.kubectl(&["-n", FLOATING, "delete", "pod", &found.name, "--wait=false"])?;
        }
        ensure!(found.node == SECOND, "{found:?}");
        cluster.kubectl(&["-n", FLOATING, "rollout", "status", "deployment/nat", "--timeout=120s"])?;
        Ok(found)
    })
    .unwrap()
}

/// New connections have the address.
fn is_held(cluster: &Cluster, place: &ForeignNetwork) {
    let held = source_addresses(cluster).unwrap();
    let works = || -> Result<()> {
        for to in outside(cluster).addresses() {
            let (_, seen) = connect(place, to)?;
            ensure!(held.contains(&seen), "{to} sees {seen}");
        }
        Ok(())
    };
    eventually(TIMEOUT, works).with_context(|| cluster.explain()).unwrap();
}

#[test]
fn connections_have_the_source_address_whichever_node_the_client_is_on() {
    let cluster = BED.shared();
    let room = Room::new(&cluster, "source");
    let held = source_addresses(&cluster).unwrap();
    for pod in clients(&room, 3) {
        let place = network(&cluster, &pod);
        for to in outside(&cluster).addresses() {
            let (_, seen) = connect(&place, to).with_context(|| cluster.explain()).unwrap();
            assert!(held.contains(&seen), "TCP of {pod:?} to {to} came from {seen}");
            let seen = ask_by_udp(&place, to).unwrap();
            assert!(held.contains(&seen), "UDP of {pod:?} to {to} came from {seen}");
            run(&place, &format!("ping -n -c 3 -i 0.2 -W 5 {to}")).unwrap();
        }
    }
    no_client_address_was_seen(&cluster);
}

/// Tuples and states of the connections of these clients, without what differs by time.
fn tuples(cluster: &Cluster, gateway: &Gateway, clients: &BTreeSet<IpAddr>) -> Result<BTreeSet<String>> {
    let place = cluster.node(&gateway.node)?.pod_network(gateway.addresses[0])?;
    let mut found = BTreeSet::new();
    for family in ["ipv4", "ipv6"] {
        let listed = run(&place, &format!("conntrack -L -f {family} 2>/dev/null"))?;
        let of_clients = |line: &&str| {
            line.split_whitespace()
                .find_map(|word| word.strip_prefix("src="))
                .and_then(|source| source.parse().ok())
                .is_some_and(|source: IpAddr| clients.contains(&source))
        };
        let differs = ["use=", "mark=", "packets=", "bytes="];
        let keep =
            |word: &&str| word.contains('=') && !differs.iter().any(|beginning| word.starts_with(beginning));
        found.extend(listed.lines().filter(of_clients).map(|line| {
            let protocol = line.split_whitespace().next().unwrap_or_default();
            [protocol].into_iter().chain(line.split_whitespace().filter(keep)).collect::<Vec<_>>().join(" ")
        }));
    }
    Ok(found)
}

/// Whether the program of a holder that was killed held an address again well before the kernel would end its use.
fn was_back_in_time(cluster: &Cluster, gateway: &Gateway, killed: SystemTime) -> bool {
    let logs = cluster.kubectl(&["-n", FLOATING, "logs", "--timestamps", &gateway.name]).unwrap();
    let end = (killed + IN_TIME).duration_since(SystemTime::UNIX_EPOCH).unwrap().as_secs_f64();
    let end =
        Command::new("date").args(["-u", "-d", &format!("@{end:.9}"), "+%FT%T.%N"]).output().unwrap().stdout;
    let end = String::from_utf8(end).unwrap();
    let mut holds = logs.lines().filter(|line| line.contains("this gateway holds a source address"));
    // The times of CRI logs are RFC 3339 in UTC, which sorts as text.
    holds.next().is_some_and(|line| line < end.trim())
}

#[test]
fn all_gateways_know_the_connections_and_none_is_lost_when_programs_and_gateways_end() {
    let cluster = BED.alone();
    let room = Room::new(&cluster, "takeover");
    let pods = clients(&room, 3);
    let targets = outside(&cluster).addresses();
    let outgoing = Outgoing::start(&cluster, &pods, &targets, true);
    let connections = Outgoing::start(&cluster, &pods, &targets, false);
    let addresses: BTreeSet<IpAddr> = pods.iter().flat_map(|pod| pod.addresses.clone()).collect();
    let same = || {
        let of: Vec<_> = gateways(&cluster, FLOATING)?
            .iter()
            .map(|gateway| tuples(&cluster, gateway, &addresses))
            .collect::<Result<_>>()?;
        ensure!(
            of.len() == 2 && of[0].len() >= outgoing.len() && of[0] == of[1],
            "conntrack -L prints {of:#?}"
        );
        Ok(of[0].len())
    };
    let known = eventually(TIMEOUT, same).unwrap();
    println!("conntrack -L prints the same {known} connections on both gateways");

    for gateway in gateways(&cluster, FLOATING).unwrap() {
        let is_holder = holder(&cluster).name == gateway.name;
        let mark = Instant::now();
        let killed = kill(&cluster, FLOATING, &gateway.name);
        let lost = outgoing.lost(mark, "kill -9 of a gateway program");
        if !is_holder || was_back_in_time(&cluster, &gateway, killed) {
            assert_eq!(lost, 0, "{gateway:?} was killed; it holds the addresses: {is_holder}");
        } else {
            println!(
                "kubelet started the holder's program too late: another gateway could take the addresses"
            );
        }
    }
    let mark = Instant::now();
    let before = holder(&cluster);
    cluster.kubectl(&["-n", FLOATING, "delete", "pod", &before.name, "--wait=false"]).unwrap();
    let moved = || {
        ensure!(holder(&cluster).name != before.name, "still {before:?}");
        Ok(())
    };
    eventually(TIMEOUT, moved).unwrap();
    outgoing.lost_next_to_nothing(mark, "the holder is deleted, with a datagram every 10 ms");
    connections.lost_nothing(mark, "the holder is deleted");
    let status = ["-n", FLOATING, "rollout", "status", "deployment/nat", "--timeout=120s"];
    cluster.kubectl(&status).unwrap();
    let mark = Instant::now();
    cluster.kubectl(&["-n", FLOATING, "rollout", "restart", "deployment/nat"]).unwrap();
    cluster.kubectl(&status).unwrap();
    outgoing.lost_next_to_nothing(mark, "gateways replaced, with a datagram every 10 ms");
    connections.lost_nothing(mark, "gateways replaced");
    is_held(&cluster, &network(&cluster, &pods[0]));
    no_client_address_was_seen(&cluster);
}

/// As is done to look at a pod while others take its place.
#[test]
fn a_gateway_whose_labels_are_changed_leaves_its_addresses_to_another_one() {
    let cluster = BED.alone();
    let room = Room::new(&cluster, "relabelled");
    let place = network(&cluster, &clients(&room, 1)[0]);
    is_held(&cluster, &place);
    let before = holder(&cluster);
    let label =
        ["-n", FLOATING, "label", "pod", &before.name, "--overwrite", "app.kubernetes.io/instance=looked-at"];
    let began = Instant::now();
    cluster.kubectl(&label).unwrap();
    let moved = || {
        let found = holder(&cluster);
        ensure!(found.name != before.name, "still {before:?}");
        Ok(())
    };
    eventually(TIMEOUT, moved).unwrap();
    is_held(&cluster, &place);
    println!("another gateway is used {:.1} s after the labels were changed", began.elapsed().as_secs_f64());
    cluster.kubectl(&["-n", FLOATING, "delete", "pod", &before.name]).unwrap();
    cluster.kubectl(&["-n", FLOATING, "rollout", "status", "deployment/nat", "--timeout=120s"]).unwrap();
}

#[test]
fn connections_go_on_when_the_holders_node_loses_its_power() {
    let mut cluster = BED.alone();
    let room = Room::new(&cluster, "holder-power");
    let victim = holder_on_the_second_node(&cluster);
    let pods: Vec<Pod> = clients(&room, 6).into_iter().filter(|pod| pod.node != victim.node).collect();
    let outgoing = Outgoing::start(&cluster, &pods, &outside(&cluster).addresses(), true);
    let place = network(&cluster, &pods[0]);
    room.keep();
    let cut = Instant::now();
    cluster.node_mut(&victim.node).unwrap().power_cut().unwrap();
    let took = eventually(TIMEOUT, || {
        let to = outside(&cluster).addresses()[0];
        crate::egress::failures::try_connect_soon(&place, to).map(|()| cut.elapsed())
    })
    .unwrap();
    outgoing.flow();
    let ended = outgoing.ended();
    println!(
        "power cut of the holder: new connections after {took:.2?}, {} of {} flows ended, longest gap {:.2?}",
        ended.len(),
        outgoing.len(),
        outgoing.longest_gap(cut)
    );
    assert!(ended.is_empty(), "{ended:?}");
    is_held(&cluster, &place);
    drop(outgoing);
    cluster.node_mut(&victim.node).unwrap().power_on().unwrap();
    let status = ["-n", FLOATING, "rollout", "status", "deployment/nat", "--timeout=180s"];
    cluster.kubectl(&status).with_context(|| cluster.explain()).unwrap();
    drop(Room::again(&cluster, "holder-power"));
    no_client_address_was_seen(&cluster);
}

/// `tcpdump` on the network of the nodes: when which node sent a packet with a source address.
struct Capture {
    child: Child,
    output: tempfile::NamedTempFile,
}

impl Capture {
    fn start(cluster: &Cluster, addresses: &BTreeSet<IpAddr>) -> Self {
        let sources: Vec<String> = addresses.iter().map(|address| format!("src host {address}")).collect();
        let filter = format!("({})", sources.join(" or "));
        let router = cluster.sites()[0].router();
        let mut command = Command::new("tcpdump");
        command.args(["-l", "-n", "-e", "-tt", "-Q", "in", "-i", "lan", &filter]);
        let output = tempfile::NamedTempFile::new().unwrap();
        command.stdout(output.reopen().unwrap()).stderr(Stdio::null());
        let child = router.inside(|| command.spawn()).unwrap().unwrap();
        std::thread::sleep(Duration::from_secs(1));
        Self { child, output }
    }

    /// Seconds of the first and last packet of each node, by its MAC address, and the times of all.
    fn end(mut self) -> BTreeMap<String, Vec<f64>> {
        std::thread::sleep(Duration::from_secs(1));
        self.child.kill().unwrap();
        let _ = self.child.wait();
        let text = std::fs::read_to_string(self.output.path()).unwrap();
        let mut found: BTreeMap<String, Vec<f64>> = BTreeMap::new();
        for line in text.lines() {
            let mut words = line.split_whitespace();
            if let (Some(Ok(time)), Some(mac)) = (words.next().map(str::parse), words.next()) {
                found.entry(mac.to_owned()).or_default().push(time);
            }
        }
        found
    }
}

#[test]
fn a_holder_that_is_cut_off_does_not_use_its_addresses_when_it_is_back() {
    let cluster = BED.alone();
    let room = Room::new(&cluster, "cut");
    let victim = holder_on_the_second_node(&cluster);
    let pods: Vec<Pod> = clients(&room, 6).into_iter().filter(|pod| pod.node != victim.node).collect();
    let outgoing = Outgoing::start(&cluster, &pods, &outside(&cluster).addresses(), true);
    let capture = Capture::start(&cluster, &source_addresses(&cluster).unwrap());
    let node = cluster.node(&victim.node).unwrap();
    node.host().partition().unwrap();
    std::thread::sleep(Duration::from_secs(8));
    node.host().heal().unwrap();
    std::thread::sleep(Duration::from_secs(5));
    outgoing.flow();
    assert!(outgoing.ended().is_empty(), "{:?}", outgoing.ended());
    let senders = capture.end();
    let spans: Vec<(f64, f64)> = senders.values().map(|times| (times[0], times[times.len() - 1])).collect();
    let [one, other] = spans[..] else { panic!("senders: {:?}", senders.keys()) };
    let both = (one.1.min(other.1) - one.0.max(other.0)).max(0.0);
    println!(
        "network cut of the holder: for {both:.2} s both nodes sent with its addresses ({} and {} packets)",
        senders.values().next().map_or(0, Vec::len),
        senders.values().nth(1).map_or(0, Vec::len)
    );
    assert!(both < 1.0, "{spans:?}");
    no_client_address_was_seen(&cluster);
}
