//! Use of the gateways by client pods, and by others.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use testbed_lab::eventually;

use crate::bed::{Pod, Room, TIMEOUT, fairlead, network, server};
use crate::egress::BED;
use crate::egress::outside::{
    IN_DOMESTIC, ask_by_udp, connect, echoed, no_client_address_was_seen, outside, run,
};
use crate::egress::setup::{DOMESTIC, Gateway, INTERNET, addresses, clients, connects_once, gateways};

/// Bytes of one message, and how many there are.
const MESSAGE: usize = 1 << 20;
const MESSAGES: usize = 100;

#[test]
fn clients_on_every_node_leave_by_their_gateways_by_tcp_udp_and_icmp() {
    let cluster = BED.shared();
    let room = Room::new(&cluster, "clients");
    let pods = clients(&room, 3);
    let nodes: BTreeSet<&str> = pods.iter().map(|pod| pod.node.as_str()).collect();
    assert_eq!(nodes.len(), 3, "{pods:?}");
    let outside = outside(&cluster);
    let internet = addresses(&gateways(&cluster, INTERNET).unwrap());
    let domestic = addresses(&gateways(&cluster, DOMESTIC).unwrap());
    for pod in &pods {
        let place = network(&cluster, pod);
        let ways =
            outside.addresses().into_iter().map(|to| (to, &internet)).chain([(IN_DOMESTIC, &domestic)]);
        for (to, gateways) in ways {
            let explain = || format!("{pod:?} to {to}\n{}", explain(&place));
            let (_, seen) = connect(&place, to).with_context(explain).unwrap();
            assert!(gateways.contains(&seen), "TCP of {pod:?} to {to} came from {seen}, not of {gateways:?}");
            let seen = ask_by_udp(&place, to).with_context(explain).unwrap();
            assert!(gateways.contains(&seen), "UDP of {pod:?} to {to} came from {seen}, not of {gateways:?}");
            run(&place, &format!("ping -n -c 3 -i 0.2 -W 5 {to}")).with_context(explain).unwrap();
        }
        prints_what_the_article_prints(&place, pod);
    }
    no_client_address_was_seen(&cluster);
}

fn explain(place: &impl testbed_lab::Place) -> String {
    let show = "ip rule; ip route show table 117; ip route show table 118; ip -d link; tc -s filter show dev eth0 egress; \
                tc -s filter show dev eth0 ingress";
    run(place, show).unwrap_or_else(|error| format!("{error:#}"))
}

/// Rules, tables and names of links as in seed 003, apart from addresses, and with ranges of the cluster as rules 2003 to 2099.
fn prints_what_the_article_prints(place: &impl testbed_lab::Place, pod: &Pod) {
    let rules = run(place, "ip rule").unwrap();
    let own: Vec<String> = rules
        .lines()
        .map(|line| line.replace('\t', " ").trim_end().to_owned())
        .filter(|line| !("2003".."2100").contains(&line.split(':').next().unwrap_or_default()))
        .collect();
    let expected = [
        "0: from all lookup local",
        "1800: from all to 169.254.0.0/16 lookup main",
        "1900: from all lookup 117",
        "2000: from all to 10.0.0.0/8 lookup main",
        "2001: from all to 172.16.0.0/12 lookup main",
        "2002: from all to 192.168.0.0/16 lookup main",
        "2100: from all lookup 118",
        "32766: from all lookup main",
        "32767: from all lookup default",
    ];
    assert_eq!(own, expected, "{pod:?}");
    let route =
        |table: u32| run(place, &format!("ip route show table {table} | grep -v unreachable")).unwrap();
    let (narrow, wide) = (route(117), route(118));
    let is_link = |name: &str| name.len() == 13 && name.starts_with("fou4_");
    let link =
        narrow.trim().strip_prefix("192.168.10.0/24 dev ").and_then(|rest| rest.strip_suffix(" proto 30"));
    assert!(link.is_some_and(|link| is_link(link.trim_end_matches(" scope link"))), "{narrow}");
    let link = wide.trim().strip_prefix("default dev ").and_then(|rest| rest.strip_suffix(" proto 30"));
    assert!(link.is_some_and(|link| is_link(link.trim_end_matches(" scope link"))), "{wide}");
}

#[test]
fn much_is_echoed_through_a_gateway_in_both_families() {
    let cluster = BED.shared();
    let room = Room::new(&cluster, "much");
    let pods = clients(&room, 1);
    let place = network(&cluster, &pods[0]);
    let message: Vec<u8> = (0..MESSAGE).map(|at| at.to_le_bytes()[0]).collect();
    for to in outside(&cluster).addresses() {
        let (mut connection, _) = connect(&place, to).unwrap();
        for number in 0..MESSAGES {
            echoed(&mut connection, &message).with_context(|| format!("message {number} to {to}")).unwrap();
        }
    }
    no_client_address_was_seen(&cluster);
}

/// Neither to the Internet nor to 192.168.10.0/24, which the nodes lead on as any other network: the machine there would answer them.
#[test]
fn pods_that_ask_for_no_gateway_are_not_translated_by_one() {
    let cluster = BED.shared();
    let room = Room::new(&cluster, "others");
    let pods = room.run("deployment/other", &server("other", 3));
    let targets = [outside(&cluster).addresses()[0], IN_DOMESTIC];
    let all: Vec<Gateway> =
        [INTERNET, DOMESTIC].iter().flat_map(|namespace| gateways(&cluster, namespace).unwrap()).collect();
    let (translated, mut sources) = (addresses(&all), Vec::new());
    for pod in &pods {
        let place = network(&cluster, pod);
        let rules = run(&place, "ip rule").unwrap();
        assert!(["1900:", "2100:"].iter().all(|rule| !rules.contains(rule)), "{pod:?}: {rules}");
        for to in targets {
            let route = run(&place, &format!("ip route get {to}")).unwrap();
            assert!(route.contains("dev eth0"), "{pod:?}: {route}");
            let (connection, seen) = connect(&place, to).unwrap();
            println!("TCP of a pod on {} to {to} came from {seen}", pod.node);
            assert!(!translated.contains(&seen), "TCP of {pod:?} to {to} came from {seen}");
            sources.push(connection.local_addr().unwrap());
            let seen = ask_by_udp(&place, to).unwrap();
            assert!(!translated.contains(&seen), "UDP of {pod:?} to {to} came from {seen}");
        }
    }
    for gateway in &all {
        let place = cluster.node(&gateway.node).unwrap().pod_network(gateway.addresses[0]).unwrap();
        for source in &sources {
            let (address, port) = (source.ip(), source.port());
            let list = format!("conntrack -L -p tcp -s {address} --sport {port} 2>/dev/null");
            let known = run(&place, &list).unwrap();
            assert_eq!(known, "", "{gateway:?} has a connection of a pod that asks for no gateway");
        }
    }
    no_client_address_was_seen(&cluster);
}

/// A server outside complains about an address and a port: gateways and their logs name the pod.
#[test]
fn the_pod_that_used_an_address_and_a_port_is_found() {
    let cluster = BED.shared();
    let room = Room::new(&cluster, "who");
    outside(&cluster);
    let pod = clients(&room, 1).remove(0);
    let patch = |value: bool| {
        let patch = format!(r#"{{"spec":{{"logConnections":{value}}}}}"#);
        let words = ["-n", DOMESTIC, "patch", "egress", "nat", "--type=merge", "-p", &patch];
        cluster.kubectl(&words).unwrap();
    };
    patch(true);
    let (connection, seen) = connect(&network(&cluster, &pod), IN_DOMESTIC).unwrap();
    let gateways = gateways(&cluster, DOMESTIC).unwrap();
    let gateway = gateways.iter().find(|gateway| gateway.addresses.contains(&seen)).unwrap();
    let place = cluster.node(&gateway.node).unwrap().pod_network(gateway.addresses[0]).unwrap();
    let client = pod.addresses[0];
    let port = || {
        let listed = run(&place, &format!("conntrack -L -p tcp -s {client} -d {IN_DOMESTIC}"))?;
        let mut ports = listed.split_whitespace().filter_map(|word| word.strip_prefix("dport="));
        let all = run(&place, "ip -brief address; conntrack -L; conntrack -S")?;
        ports
            .next_back()
            .map(str::to_owned)
            .with_context(|| format!("{gateway:?} has no connection of {pod:?}: {listed:?}, only {all}"))
    };
    let port = eventually(TIMEOUT, port).unwrap();
    let (source, egress) = (seen.to_string(), format!("{DOMESTIC}/nat"));
    let ask = ["egress", "who", &source, &port, "--egress", &egress, "-o", "json"];
    let name = format!("who/{}", pod.name);
    let is_known = |ended: bool| {
        let (code, text, _) = fairlead(&cluster, &ask)?;
        let report: serde_json::Value = serde_json::from_str(&text)?;
        let known = &report["connections"][0];
        let found =
            format!("{}/{}", known["namespace"].as_str().unwrap_or(""), known["pod"].as_str().unwrap_or(""));
        ensure!(code == Some(0) && found == name && known["end"].is_string() == ended, "{report:#}");
        Ok(())
    };
    eventually(TIMEOUT, || is_known(false)).unwrap();
    drop(connection);
    run(&place, &format!("conntrack -D -p tcp -s {client} -d {IN_DOMESTIC}")).unwrap();
    eventually(TIMEOUT, || is_known(true)).unwrap();
    let logged = || {
        let log = cluster.kubectl(&["-n", DOMESTIC, "logs", &gateway.name])?;
        let has = |line: &str| {
            line.contains(&pod.name) && line.contains(&client.to_string()) && line.contains(&port)
        };
        ensure!(log.lines().any(has), "no line of this connection:\n{log}");
        Ok(())
    };
    eventually(TIMEOUT, logged).unwrap();
    patch(false);
    let (code, ..) = fairlead(&cluster, &["egress", "who", &source, "1", "--egress", &egress]).unwrap();
    assert_eq!(code, Some(3), "no connection has that port");
}

/// Ready means that the gateways know the pod.
#[test]
fn the_first_connection_of_each_pod_succeeds() {
    every_first_connection_succeeds("first", 24);
}

#[test]
#[ignore = "two minutes, for rare races of a pod's start: cargo xtask test soak"]
fn the_first_connection_of_each_of_200_pods_succeeds() {
    every_first_connection_succeeds("first-200", 200);
}

fn every_first_connection_succeeds(room: &str, count: usize) {
    let cluster = BED.shared();
    let room = Room::new(&cluster, room);
    let outside = outside(&cluster);
    let target = format!("{}:{}", outside.addresses()[0], crate::egress::outside::PORT);
    room.apply(&connects_once(&target, count, 24)).unwrap();
    let finished = || -> Result<()> {
        let counts = room.kubectl("get job once -o jsonpath={.status.succeeded}/{.status.failed}")?;
        let (succeeded, failed) = counts.split_once('/').context("no counts")?;
        ensure!(succeeded == count.to_string() || !failed.is_empty(), "{counts}");
        Ok(())
    };
    eventually(5 * TIMEOUT, finished).unwrap();
    let counts = room.kubectl("get job once -o jsonpath={.status.succeeded}/{.status.failed}").unwrap();
    let events = || room.kubectl("get events --field-selector type=Warning").unwrap();
    assert_eq!(counts, format!("{count}/"), "{}", events());
    let pods = room.kubectl("get pods -l batch.kubernetes.io/job-name=once -o name").unwrap();
    assert_eq!(pods.lines().count(), count, "a pod was made again");
    no_client_address_was_seen(&cluster);
}
