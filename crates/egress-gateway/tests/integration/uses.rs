//! Probes, limits, and who uses the gateway how much.

use std::net::SocketAddr;
use std::thread;
use std::time::{Duration, Instant};

use fairlead_wire::egress::State;

use crate::bed::{Bed, families};

/// `spec` of the Egress with more fields.
fn set_spec(bed: &Bed, more: serde_json::Value) {
    let mut objects = bed.objects.lock().unwrap();
    let (_, egress) = objects.iter_mut().find(|(kind, _)| *kind == "egresses").unwrap();
    egress["spec"] = serde_json::json!({ "destinations": ["0.0.0.0/0", "::/0"], "replicas": 1 });
    egress["spec"].as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
}

#[test]
fn a_gateway_whose_targets_do_not_answer_is_unhealthy_and_stays_ready() {
    let bed = Bed::new();
    let mut node = bed.registered();
    let [v4, v6] = families().map(|family| family.server);
    let check = |targets: &[String]| serde_json::json!({ "healthCheck": { "targets": targets, "intervalSeconds": 1, "failureThreshold": 2 } });
    let unhealthy = || bed.metric("coil_egress_unhealthy{reason=\"NoTargetAnswers\"}");
    // One that answers suffices, of each kind.
    for answering in [v4.to_string(), v6.to_string(), format!("{v4}:9000"), format!("[{v6}]:9000")] {
        set_spec(&bed, check(&["203.0.113.99".to_owned(), answering.clone(), format!("{v4}:9")]));
        let answered = || bed.metric("coil_egress_health_probes_total{result=\"answered\"}");
        let before = answered();
        bed.wait(&answering, Duration::from_secs(8), || answered() >= before + 2);
        assert_eq!(unhealthy(), 0, "{answering}");
    }
    bed.router.sh("ip link set server down");
    assert_eq!(node.answer().unwrap().state(), State::Unhealthy);
    assert!(bed.get(8081, "/readyz").starts_with("HTTP/1.1 200"), "it stays ready");
    assert_eq!(unhealthy(), 1);
    bed.router.sh("ip link set server up; ip -6 addr add 2001:db8:113::1/64 dev server nodad || true; ip route replace 10.96.0.0/12 via 203.0.113.10");
    assert_eq!(node.answer().unwrap().state(), State::Ready);
    // Nothing answers of these; without a check all is well at once.
    set_spec(&bed, check(&["203.0.113.99".to_owned()]));
    assert_eq!(node.answer().unwrap().state(), State::Unhealthy);
    set_spec(&bed, serde_json::json!({}));
    assert_eq!(node.answer().unwrap().state(), State::Ready);
}

#[test]
fn connections_beyond_the_limit_of_a_client_are_rejected() {
    let bed = Bed::new();
    let _node = bed.registered();
    let is_limited = |most: u32| {
        bed.gateway.sh("nft list table inet fairlead_egress").contains(&format!("ct count over {most} "))
    };
    let set = |most: u32| {
        set_spec(&bed, serde_json::json!({ "maxConnectionsPerClient": most }));
        bed.wait("the limit", Duration::from_secs(5), || is_limited(most));
    };
    set(3);
    for family in families() {
        let held: Vec<_> = (0..3).map(|_| bed.connect(family.server)).collect();
        let refused = bed.try_connect(family.server).unwrap_err();
        println!("{refused}");
        use std::io::ErrorKind::{HostUnreachable, PermissionDenied};
        let is_told = [HostUnreachable, PermissionDenied].contains(&refused.kind());
        assert!(is_told, "{refused}");
        assert!(!bed.ping("", family.server), "other protocols, too");
        let name = if family.server.is_ipv4() { "ipv4" } else { "ipv6" };
        let rejected = format!(
            "coil_egress_rejected_connections_total{{namespace=\"internet-egress\",pod=\"nat-1\",egress=\"nat\",protocol=\"{name}\"}}"
        );
        bed.wait("the counter", Duration::from_secs(2), || bed.metric(&rejected) >= 2);
        drop(held);
        bed.gateway.sh("conntrack -D -p tcp --dport 9000 >/dev/null 2>&1 || true");
        assert!(bed.tcp_echo(family.server, 1000), "connections that have ended do not count");
    }
    set(50);
    let more: Vec<_> = (0..10).map(|_| bed.connect(families()[0].server)).collect();
    assert_eq!(more.len(), 10);
    set_spec(&bed, serde_json::json!({}));
    bed.wait("no limit", Duration::from_secs(5), || {
        !bed.gateway.sh("nft list table inet fairlead_egress").contains("ct count")
    });
    assert_eq!(bed.leaked(), 0);
}

/// Connections of an address and port, as `/connections` lists them.
fn who(bed: &Bed, outside: SocketAddr, more: &str) -> Vec<serde_json::Value> {
    let path = format!("/connections?address={}&port={}{more}", outside.ip(), outside.port());
    let answer = bed.get(8080, &path);
    let body = answer.split("\r\n\r\n").nth(1).unwrap();
    let body: serde_json::Value = serde_json::from_str(body).unwrap_or_else(|_| panic!("{answer}"));
    body["connections"].as_array().unwrap_or_else(|| panic!("{answer}")).clone()
}

#[test]
fn who_had_an_address_and_port_outside_is_known_while_the_connection_is_open_and_later() {
    let bed = Bed::new();
    let _node = bed.registered();
    for family in families() {
        let stream = bed.connect(family.server);
        let seen = bed.outside_of(&stream, family.gateway);
        bed.wait("the connection", Duration::from_secs(2), || who(&bed, seen, "").len() == 1);
        let found = who(&bed, seen, "").remove(0);
        let own = stream.local_addr().unwrap();
        assert_eq!(found["namespace"], "default");
        assert_eq!(found["pod"], "c");
        assert_eq!(found["clientPort"], own.port());
        assert_eq!(found["client"], own.ip().to_string());
        assert_eq!(found["destination"], family.server.to_string());
        assert_eq!((&found["destinationPort"], &found["end"]), (&9000.into(), &serde_json::Value::Null));
        let at = found["begin"].as_str().unwrap();
        assert_eq!(who(&bed, seen, &format!("&at={at}")).len(), 1);
        assert_eq!(who(&bed, seen, "&at=2020-01-01T00:00:00Z").len(), 0);
        drop(stream);
        bed.gateway.sh("conntrack -D -p tcp --dport 9000 >/dev/null 2>&1 || true");
        bed.wait("the end", Duration::from_secs(2), || {
            who(&bed, seen, "").first().is_some_and(|found| found["end"].is_string())
        });
        assert_eq!(who(&bed, seen, &format!("&at={at}")).len(), 1);
        assert_eq!(who(&bed, seen, "&at=2099-01-01T00:00:00Z").len(), 0);
    }
    assert!(bed.get(8080, "/connections?port=1").starts_with("HTTP/1.1 400"));
}

/// CPU time that new connections cost the program.
#[test]
#[ignore = "prints figures: cargo test -p fairlead-egress-gateway --test integration figures_of_new -- --ignored --nocapture"]
fn figures_of_new_connections() {
    let bed = Bed::new();
    let _node = bed.registered();
    let cpu = || {
        let text = bed.get(8080, "/metrics");
        let line =
            text.lines().find_map(|line| line.strip_prefix("process_cpu_seconds_total ")?.parse().ok());
        line.unwrap_or_else(|| panic!("{text}"))
    };
    let server = SocketAddr::new(families()[0].server, 9002);
    let seconds = 10;
    let measure = |per_millisecond: usize| {
        let (start, before): (_, f64) = (Instant::now(), cpu());
        let mut sent = 0;
        bed.client.run(|| {
            while start.elapsed() < Duration::from_secs(seconds) {
                for _ in 0..per_millisecond {
                    let socket = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
                    sent += usize::from(socket.send_to(b"x", server).is_ok());
                }
                let next = u32::try_from(sent / per_millisecond.max(1)).unwrap();
                thread::sleep((Duration::from_millis(1) * next.max(1)).saturating_sub(start.elapsed()));
                if per_millisecond == 0 {
                    thread::sleep(Duration::from_millis(100));
                }
            }
        });
        let used = cpu() - before;
        println!(
            "{} new connections/s: {:.2} % of a core",
            sent as u64 / seconds,
            used * 100.0 / seconds as f64
        );
    };
    measure(0);
    measure(1);
}
