//! Metrics and health, as an HTTP client sees them.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

use fairlead_demo::node::Node;

/// The answer to a GET inside the node's network: status line, headers and body.
fn get(node: &Node, port: u16, path: &str) -> String {
    let mut stream = node.host.run(|| TcpStream::connect(("127.0.0.1", port))).unwrap().unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(10))).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: node\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

pub(crate) fn metrics_and_health_are_served(node: &Node) {
    let answer = get(node, 9384, "/metrics");
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
    let values: BTreeMap<&str, f64> = answer
        .lines()
        .filter(|line| line.starts_with("fairlead_"))
        .filter_map(|line| line.rsplit_once(' '))
        .map(|(name, value)| (name, value.parse().unwrap()))
        .collect();
    let value = |name: &str| *values.get(name).unwrap_or_else(|| panic!("no {name} in:\n{answer}"));
    for peer in node.status().unwrap()["peers"].as_array().unwrap() {
        let of = |name: &str| {
            value(&format!("fairlead_peer_{name}{{peer=\"{}\"}}", peer["name"].as_str().unwrap()))
        };
        assert_eq!(of("up"), 1.0);
        for name in ["last_handshake_timestamp_seconds", "received_bytes_total", "sent_bytes_total"] {
            assert!(of(name) > 0.0, "{name} of {peer}");
        }
    }
    assert_eq!(value("fairlead_cni_operations_total{operation=\"ADD\",result=\"ok\"}"), 1.0);
    assert_eq!(value("fairlead_cni_add_duration_seconds_count"), 1.0);
    assert_eq!(value("fairlead_mesh_problems"), 1.0);
    assert!(value("fairlead_netlink_changes_total") > 0.0);
    for path in ["/healthz", "/readyz"] {
        let answer = get(node, 9385, path);
        assert!(answer.starts_with("HTTP/1.1 200 "), "{path}: {answer}");
    }
}
