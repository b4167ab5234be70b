//! The gateway program in its namespace, with real packets.

use std::io::{Read, Write};
use std::net::IpAddr;
use std::thread;
use std::time::{Duration, Instant};

use crate::bed::{API, Bed, MTU, REGISTRATION, api, client, egress, families};
use fairlead_cluster::http::MetricsAddress;
use fairlead_egress_gateway::Settings;
use fairlead_wire::egress::State;
use futures::stream;
use tokio::signal::unix::{SignalKind, signal};
use tonic::Code;

#[test]
#[ignore = "runs in another process that tests start: cargo xtask test lab -- gateway"]
fn gateway_process() {
    let api = std::env::var(API).unwrap();
    let settings = Settings {
        egress: egress(),
        pod: "nat-1".to_owned(),
        addresses: families().map(|family| family.gateway).to_vec(),
        uplink: "eth0".to_owned(),
        port: 5555,
        source_port_auto: false,
        registration: format!("[::]:{REGISTRATION}").parse().unwrap(),
        node_user: "system:serviceaccount:kube-system:fairlead-node".to_owned(),
        metrics: MetricsAddress { address: "[::]:8080".parse().unwrap(), secure: false },
        health: "[::]:8081".parse().unwrap(),
        drain: Duration::from_secs(20),
    };
    let _ = rustls::crypto::aws_lc_rs::default_provider().install_default();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let config = kube::Config::new(format!("http://127.0.0.1:{api}").parse().unwrap());
        let terminate = signal(SignalKind::terminate()).unwrap();
        let signals = stream::unfold(terminate, |mut terminate| async move {
            terminate.recv().await;
            Some(((), terminate))
        });
        fairlead_egress_gateway::run(settings, config, Box::pin(signals)).await.unwrap();
    });
}

#[test]
fn clients_reach_the_server_with_the_gateways_address() {
    let bed = Bed::new();
    let _node = bed.registered();
    for family in families() {
        assert_eq!(bed.flow(family.server).seen_as(), Some(family.gateway), "{family:?}");
        assert!(bed.ping("", family.server), "{family:?}");
        assert!(bed.tcp_echo(family.server, 1 << 20), "{family:?}");
    }
    assert_eq!(bed.leaked(), 0);
    let rules = bed.gateway.sh("ip rule");
    assert!(rules.contains("\n2000:\tfrom all iif eth0 lookup 118\n"), "{rules}");
    let routes = bed.gateway.sh("ip route show table 118");
    assert_eq!(routes, "10.20.30.40 dev fou4_0a141e28 proto 30 \n");
    // Counters are read now and then.
    bed.wait("the counter", Duration::from_secs(2), || {
        bed.metric("coil_egress_decapsulated_packets_total") > 20
    });
    assert_eq!(bed.metric("coil_egress_client_pod_count{namespace=\"internet-egress\",egress=\"nat\"}"), 1);
    assert_eq!(bed.metric("coil_egress_node_client_pods{node=\"n1\"}"), 1);
    // 1 MiB each way in each family, which is read every few seconds.
    let bytes = |direction: &str| {
        let text = bed.get(8080, "/metrics");
        let name = format!(
            "coil_egress_client_bytes_total{{client_namespace=\"default\",client_pod=\"c\",direction=\"{direction}\"}} "
        );
        text.lines().find_map(|line| line.strip_prefix(&name)?.parse().ok()).unwrap_or(0u64)
    };
    bed.wait("the bytes", Duration::from_secs(15), || bytes("sent") > 2 << 20 && bytes("received") > 2 << 20);
    assert!(bytes("sent") < 3 << 20 && bytes("received") < 3 << 20);
    let answer = bed.get(8080, "/clients");
    let body: serde_json::Value = serde_json::from_str(answer.split("\r\n\r\n").nth(1).unwrap()).unwrap();
    println!("{body}");
    let client = &body["clients"][0];
    assert_eq!((&client["name"], &client["node"]), (&"c".into(), &"n1".into()));
    assert!(client["connections"].as_u64().unwrap() > 0 && client["sentPackets"].as_u64().unwrap() > 100);
    assert!(bed.get(8080, "/load").contains("\"draining\":false"));
}

#[test]
fn pods_do_not_read_who_the_clients_are_and_the_host_does() {
    let bed = Bed::new();
    let _node = bed.registered();
    for family in families() {
        for path in ["/clients", "/load", "/connections"] {
            let answer = bed.get_from(&bed.client, family.gateway, 8080, path);
            assert!(answer.starts_with("HTTP/1.1 403"), "{path} of {}: {answer:?}", family.gateway);
            assert!(answer.ends_with("pods may not read what a gateway does for others\n"), "{answer:?}");
            let answer = bed.get_from(&bed.router, family.gateway, 8080, path);
            // The host is asked which connection it means.
            let status = if path == "/connections" { "HTTP/1.1 400" } else { "HTTP/1.1 200" };
            assert!(answer.starts_with(status), "{path} of {}: {answer:?}", family.gateway);
        }
        assert!(bed.get_from(&bed.client, family.gateway, 8080, "/metrics").starts_with("HTTP/1.1 200"));
    }
}

#[test]
fn what_no_client_may_send_is_dropped_and_counted() {
    let bed = Bed::new();
    let dropped =
        |reason: &str| bed.metric(&format!("coil_egress_dropped_packets_total{{reason=\"{reason}\"}}"));
    let refused = |options: &str, to: IpAddr, reason: &str| {
        let before = dropped(reason);
        assert!(!bed.ping(options, to), "{reason}: {to}");
        bed.wait(reason, Duration::from_secs(2), || dropped(reason) == before + 1);
    };
    for family in families() {
        refused("", family.server, "unknown_sender");
    }
    let mut node = bed.registered();
    for family in families() {
        assert!(bed.ping("", family.server), "{family:?}");
        refused(&format!("-I {}", family.other), family.server, "inner_source");
        refused(&format!("-I {}", family.client), family.service, "inner_destination");
    }
    // A client that is gone has no way 2 s later, and neither has an heir of its address.
    let start = Instant::now();
    assert_eq!(node.change(Vec::new(), &["c"]).unwrap(), []);
    for family in families() {
        refused("", family.server, "unknown_sender");
    }
    assert!(start.elapsed() < Duration::from_secs(5));
    assert_eq!(
        bed.gateway.sh("ip route show table 118; ip -6 route show table 118; ip -o link | grep fou || true"),
        ""
    );
    assert_eq!(bed.leaked(), 0);
}

#[test]
fn only_node_programs_register_and_only_their_own_pods() {
    let bed = Bed::new();
    let code = |token: fn(&str) -> String| bed.try_node(token).err().map(|status| status.code());
    assert_eq!(code(|_| api::token("n1", "https://kubernetes.default.svc")), Some(Code::Unauthenticated));
    assert_eq!(code(|audience| api::token("../n1", audience)), Some(Code::Unauthenticated));
    assert_eq!(code(|_| "x".repeat(10_000)), Some(Code::Unauthenticated));
    let mut other = bed.node("n2");
    let address = families()[0].client;
    let reason = |reason: &str| vec![("x".to_owned(), reason.to_owned())];
    assert_eq!(other.all(vec![client("x", [address])]).unwrap(), reason("AddressNotOfNode"));
    assert_eq!(other.change(vec![client("x", [])], &[]).unwrap(), reason("InvalidAddress"));
    let refused =
        |reason: &str| bed.metric(&format!("coil_egress_refused_clients_total{{reason=\"{reason}\"}}"));
    assert_eq!(["AddressNotOfNode", "InvalidAddress"].map(refused), [1, 1]);
    assert!(!bed.ping("", families()[0].server));
    let mut node = bed.registered();
    assert!(bed.ping("", families()[0].server));
    // A newer stream of the same Node replaces the older one, and a block that moves takes its clients along.
    let mut newer = bed.node("n1");
    assert_eq!(node.answer().map_err(|status| status.code()).err(), Some(Code::Aborted));
    assert!(bed.ping("", families()[0].server));
    let early = newer.change(Vec::new(), &[]).unwrap_err();
    assert_eq!(early.code(), Code::InvalidArgument, "{early}");
    let flood: Vec<_> = (0..8).map(|_| code(|_| api::token("n1", "other"))).collect();
    assert!(flood.contains(&Some(Code::ResourceExhausted)), "{flood:?}");
    bed.objects.lock().unwrap().retain(|(_, object)| object["metadata"]["name"] != "default-0");
    bed.wait("the client of a block that is gone", Duration::from_secs(5), || {
        !bed.ping("", families()[0].server)
    });
}

#[test]
fn what_others_delete_is_back_within_a_second() {
    let bed = Bed::new();
    let _node = bed.registered();
    let commands = [
        "nft flush ruleset",
        "ip rule del pref 2000; ip -6 rule del pref 2000",
        "ip route flush table 118; ip -6 route flush table 118",
        "tc qdisc del dev eth0 clsact",
        "for link in $(ip -o link | grep -o 'fou[46]_[0-9a-f]*'); do ip link del $link; done",
    ];
    for command in commands {
        bed.gateway.sh(command);
        let is_whole =
            || families().iter().all(|family| bed.flow(family.server).seen_as() == Some(family.gateway));
        let start = Instant::now();
        while !bed.gateway.sh("nft list tables").contains("fairlead_egress") || !is_whole() {
            assert!(start.elapsed() < Duration::from_secs(5), "{command}");
        }
        println!("{command}: {:?}", start.elapsed());
    }
    // Probes that time out take a second each, so what is missing is looked at here.
    bed.gateway.sh(
        "nft flush ruleset; ip rule del pref 2000; ip route flush table 118; tc qdisc del dev eth0 clsact",
    );
    let mended = bed.wait("mended", Duration::from_secs(1), || {
        bed.gateway.sh("nft list tables").contains("fairlead_egress")
            && bed.gateway.sh("ip rule").contains("2000:")
            && bed.gateway.sh("ip route show table 118").contains("10.20.30.40")
            && bed.gateway.sh("tc filter show dev eth0 ingress").contains("fou_ingress")
    });
    println!("all at once: {mended:?}");
}

#[test]
fn nothing_leaves_with_a_clients_address_while_nftables_is_flushed() {
    let bed = Bed::new();
    let _node = bed.registered();
    let is_whole = || bed.gateway.sh("nft list tables").contains("fairlead_egress");
    let (windows, sent) = bed.with_traffic(|| {
        let mut windows = Vec::new();
        for _ in 0..20 {
            thread::sleep(Duration::from_millis(120));
            bed.gateway.sh("nft flush ruleset");
            windows.push(bed.wait("the table", Duration::from_secs(3), is_whole));
        }
        windows
    });
    let dropped = || bed.metric("coil_egress_dropped_packets_total{reason=\"foreign_source\"}");
    bed.wait("the counter", Duration::from_secs(2), || dropped() > 0);
    let (dropped, leaked) = (dropped(), bed.leaked());
    println!(
        "{sent} packets, {dropped} dropped by their source, {leaked} leaked, table missing for {windows:?}"
    );
    assert_eq!(leaked, 0);
    for family in families() {
        assert_eq!(bed.flow(family.server).seen_as(), Some(family.gateway));
    }
}

#[test]
fn flows_that_began_while_the_table_was_missing_are_translated_afterwards() {
    let bed = Bed::new();
    let _node = bed.registered();
    // Another program's table has the kernel track connections meanwhile.
    bed.gateway.sh("nft 'table inet other { chain c { type filter hook forward priority 0; ct state new counter; }; chain n { type nat hook postrouting priority 110; }; }'");
    let before = families().map(|family| bed.flow(family.server));
    assert!(before.iter().zip(families()).all(|(flow, family)| flow.seen_as() == Some(family.gateway)));
    let flows = families().map(|family| bed.flow(family.server));
    let connection = thread::scope(|scope| {
        bed.gateway.sh("nft delete table inet fairlead_egress");
        let connection = scope.spawn(|| bed.connect(families()[0].server));
        for _ in 0..20 {
            flows.iter().chain(&before).for_each(testbed_netns::pods::Flow::send);
            thread::sleep(Duration::from_millis(2));
        }
        connection.join().unwrap()
    });
    drop(connection);
    bed.wait("the table", Duration::from_secs(3), || {
        bed.gateway.sh("nft list tables").contains("fairlead_egress")
    });
    for (flow, family) in flows.iter().chain(&before).zip(families().iter().chain(&families())) {
        let mut seen = (0..30).map(|_| flow.seen_as());
        assert!(seen.any(|source| source == Some(family.gateway)), "{family:?}");
    }
    assert_eq!(bed.leaked(), 0);
}

/// Test of the text in `docs/egress.md` on deletions at the same time.
#[test]
fn filters_that_are_deleted_together_with_nftables_let_nothing_out() {
    let bed = Bed::new();
    let _node = bed.registered();
    let is_whole = || {
        let filters = bed.gateway.sh("tc filter show dev eth0 ingress; tc filter show dev eth0 egress");
        bed.gateway.sh("nft list tables").contains("fairlead_egress")
            && ["fou_ingress", "fou_egress"].iter().all(|name| filters.contains(name))
    };
    let delete = |command: &str| {
        thread::sleep(Duration::from_millis(300));
        let before = bed.leaked();
        bed.gateway.sh(command);
        let mended = bed.wait(command, Duration::from_secs(3), is_whole);
        thread::sleep(Duration::from_millis(100));
        let leaked = bed.leaked() - before;
        println!("{command}: mended after {mended:?}, {leaked} leaked");
        leaked
    };
    bed.with_traffic(|| {
        assert_eq!(delete("tc filter del dev eth0 egress"), 0);
        for _ in 0..5 {
            assert_eq!(delete("tc qdisc del dev eth0 clsact; nft flush ruleset"), 0);
        }
        // The only way out: what lets packets in stays, and both that translate or drop are gone.
        delete("tc filter del dev eth0 egress; nft flush ruleset");
        let before = bed.leaked();
        thread::sleep(Duration::from_millis(300));
        assert_eq!(bed.leaked(), before, "it ended");
    });
}

#[test]
fn a_killed_gateway_loses_nothing_and_the_next_keeps_its_clients() {
    let mut bed = Bed::new();
    let node = bed.registered();
    let flows = families().map(|family| (bed.flow(family.server), family));
    let mut connections = families().map(|family| bed.connect(family.server));
    let stop = std::sync::atomic::AtomicBool::new(false);
    let seen = thread::scope(|scope| {
        let (flows, stop) = (&flows, &stop);
        let sender = scope.spawn(move || {
            let mut seen = Vec::new();
            while !stop.load(std::sync::atomic::Ordering::Relaxed) {
                seen.extend(flows.iter().map(|(flow, family)| (flow.seen_as(), family.gateway)));
                thread::sleep(Duration::from_millis(2));
            }
            seen
        });
        thread::sleep(Duration::from_millis(300));
        bed.kill();
        thread::sleep(Duration::from_millis(300));
        bed.start();
        bed.wait_ready();
        thread::sleep(Duration::from_millis(500));
        stop.store(true, std::sync::atomic::Ordering::Relaxed);
        sender.join().unwrap()
    });
    drop(node);
    let lost = seen.iter().filter(|(source, gateway)| *source != Some(*gateway)).count();
    println!("{} packets and answers, {lost} lost", seen.len());
    assert!(seen.len() > 200 && lost == 0, "{} {lost}", seen.len());
    for connection in &mut connections {
        connection.write_all(b"still").unwrap();
        let mut reply = [0; 5];
        connection.read_exact(&mut reply).unwrap();
    }
    // The client is adopted until its node has spoken.
    assert_eq!(bed.metric("coil_egress_adopted_client_addresses"), 2);
    let mut node = bed.node("n2");
    assert_eq!(node.all(Vec::new()).unwrap(), []);
    assert!(bed.ping("", families()[0].server), "n2 has nothing to say about it");
    let mut node = bed.node("n1");
    assert_eq!(node.all(Vec::new()).unwrap(), []);
    assert!(!bed.ping("", families()[0].server), "n1 has no such client");
    assert_eq!(bed.leaked(), 0);
}

#[test]
fn icmp_errors_come_back_through_the_tunnel() {
    let bed = Bed::new();
    let _node = bed.registered();
    for family in families() {
        let errors = |options: &str| {
            bed.client.sh(&format!("ping -c 1 -W 1 {options} {} 2>&1 || true", family.server))
        };
        // TTL 1 ends at the gateway, 2 at the router.
        let own = errors("-t 1");
        assert!(
            own.contains(&format!("From {}", family.gateway)) || own.contains("Time exceeded: Hop limit"),
            "{own}"
        );
        let next = errors("-t 2");
        assert!(next.contains("exceeded"), "{next}");
        let table = if family.server.is_ipv4() { "" } else { "-6" };
        bed.gateway.sh(&format!("ip {table} route add unreachable {}", family.server));
        let refused = errors("");
        assert!(refused.to_lowercase().contains("unreachable") || refused.contains("No route"), "{refused}");
        bed.gateway.sh(&format!("ip {table} route del unreachable {}", family.server));
    }
    assert_eq!(bed.leaked(), 0, "none of them came in clear");
}

#[test]
fn segments_fit_the_tunnel_and_a_smaller_path() {
    let bed = Bed::new();
    let _node = bed.registered();
    bed.server.sh("nft 'table inet seen { chain c { type filter hook input priority 0; tcp flags syn tcp option maxseg size > 1382 counter name large; }; counter large { }; }' 2>/dev/null || true");
    for family in families() {
        assert!(bed.tcp_echo(family.server, 1 << 18));
    }
    // What the client's own link says already; the gateway clamps also what a client with a larger link sends.
    let name = bed.client.sh("ip -o link | grep -o 'fou[46]_[0-9a-f]*'");
    for link in name.split_whitespace() {
        bed.client.sh(&format!("ip link set {link} mtu {}", MTU + 50));
    }
    let capture =
        "timeout 3 tcpdump -c 2 -n -v -i eth0 'tcp[tcpflags] & tcp-syn != 0' 2>/dev/null & sleep 1; wait";
    let seen = thread::scope(|scope| {
        let server = &bed.server;
        let capture = scope.spawn(move || server.sh(&format!("{capture} || true")));
        thread::sleep(Duration::from_millis(700));
        drop(bed.connect(families()[0].server));
        capture.join().unwrap()
    });
    assert!(seen.contains("mss 1382"), "{seen}");
    for link in name.split_whitespace() {
        let overhead = if link.starts_with("fou4") { 28 } else { 48 };
        bed.client.sh(&format!("ip link set {link} mtu {}", MTU - overhead));
    }
    bed.router.sh("ip link set server mtu 1280");
    bed.server.sh("ip link set eth0 mtu 1280");
    for family in families() {
        let too_big = bed.client.sh(&format!("ping -M do -s 1300 -c 2 -W 1 {} 2>&1 || true", family.server));
        let told = ["mtu = 1280", "mtu=1280", "Packet too big"].iter().any(|text| too_big.contains(text));
        assert!(told, "{too_big}");
        assert!(bed.tcp_echo(family.server, 1 << 20), "{family:?}");
    }
    assert_eq!(bed.leaked(), 0);
}

#[test]
fn a_drained_gateway_waits_for_its_flows() {
    let mut bed = Bed::new();
    let mut node = bed.registered();
    let mut connection = bed.connect(families()[0].server);
    connection.write_all(b"a").unwrap();
    bed.terminate();
    assert_eq!(node.answer().unwrap().state(), State::Draining);
    thread::sleep(Duration::from_secs(2));
    assert!(!bed.has_ended() && bed.get(8081, "/readyz").starts_with("HTTP/1.1 200"), "it stays ready");
    connection.write_all(b"b").unwrap();
    let mut reply = [0; 2];
    connection.read_exact(&mut reply).unwrap();
    assert_eq!(&reply, b"ab");
    bed.gateway.sh("conntrack -D -p tcp --dport 9000 >/dev/null 2>&1 || true");
    drop(connection);
    let start = Instant::now();
    while !bed.has_ended() {
        assert!(start.elapsed() < Duration::from_secs(15));
        thread::sleep(Duration::from_millis(100));
    }
    println!("ended {:?} after the last flow", start.elapsed());
    // The kernel still forwards.
    assert!(bed.ping("", families()[0].server));
}

/// Resident memory of the gateway program for each client. It asserts nothing.
#[test]
#[ignore = "prints figures: cargo test -p fairlead-egress-gateway --test integration figures_of_memory -- --ignored --nocapture"]
fn figures_of_memory() {
    let bed = Bed::new();
    let mut node = bed.node("n1");
    let clients = |count: u8| {
        let addresses =
            |number| [[10, 20, 30, number].into(), [0xfd00, 0x20, 0, 0, 0, 0, 0, number.into()].into()];
        (1..=count).map(|number| client(&format!("u{number}"), addresses(number))).collect::<Vec<_>>()
    };
    assert_eq!(node.all(clients(50)).unwrap(), []);
    thread::sleep(Duration::from_secs(2));
    let before = bed.resident_kib();
    assert_eq!(node.all(clients(250)).unwrap(), []);
    thread::sleep(Duration::from_secs(2));
    let grown = bed.resident_kib().saturating_sub(before);
    println!("200 clients of two addresses: {:.1} KiB each", f64::from(grown) / 200.0);
}
