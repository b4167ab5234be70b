//! `spec.healthCheck`: nodes whose way to a network outside is dead, while everything else of theirs works.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use serde_json::Value;
use testbed_lab::traffic::Flow;
use testbed_lab::{Host, Place, eventually};
use testbed_nodes::Cluster;

use crate::bed::outside::{addresses_of, serve};
use crate::bed::{Room, TIMEOUT, fairlead, network};
use crate::egress::BED;
use crate::egress::failures::try_connect_soon;
use crate::egress::outside::{PORT, connect, no_client_address_was_seen, outside, route_to};
use crate::egress::setup::{Gateway, client_on, own_egress};

/// Namespace of the Egress.
const NAMESPACE: &str = "health-egress";
/// New connections by which a gateway is known.
const CONNECTIONS: usize = 5;

/// A node whose packets to a network outside are lost, until it is dropped.
struct DeadUplink(Host);

impl DeadUplink {
    fn new(cluster: &Cluster, node: &str, beyond: &[IpAddr]) -> Self {
        let family = |address: &IpAddr| if address.is_ipv4() { "ip" } else { "ip6" };
        let rules: String =
            beyond.iter().map(|address| format!("{} daddr {address} drop\n", family(address))).collect();
        let table = format!(
            "table inet uplink {{ chain forward {{ type filter hook forward priority -10; {rules} }}; }}"
        );
        let host = cluster.node(node).unwrap().host().clone();
        host.shell(&format!("nft -f - <<'END'\n{table}\nEND")).unwrap();
        Self(host)
    }
}

impl Drop for DeadUplink {
    fn drop(&mut self) {
        // It ends with the node at the latest.
        let _ = self.0.shell("nft delete table inet uplink");
    }
}

/// Waits until `fairlead egress status` has these states of the gateways.
fn are(cluster: &Cluster, states: [(&Gateway, &str); 2]) {
    let name = format!("{NAMESPACE}/nat");
    let as_expected = || {
        let (_, text, _) = fairlead(cluster, &["egress", "status", &name, "-o", "json"])?;
        let report: Value = serde_json::from_str(&text)?;
        let shown = report["gateways"].as_array().context("no gateways")?;
        for (gateway, state) in states {
            let is_so = |shown: &Value| shown["pod"] == gateway.name.as_str() && shown["state"] == state;
            ensure!(shown.iter().any(is_so), "{} is not {state}: {shown:?}", gateway.name);
        }
        // It is no matter of readiness.
        ensure!(report["available"] == 2, "{report:#}");
        Ok(())
    };
    eventually(TIMEOUT, as_expected).with_context(|| cluster.explain()).unwrap();
}

/// The gateway that a new connection uses.
fn used<'a>(place: &impl Place, to: IpAddr, gateways: &'a [Gateway]) -> Result<&'a Gateway> {
    let (_, seen) = connect(place, to)?;
    let gateway = gateways.iter().find(|gateway| gateway.addresses.contains(&seen));
    gateway.with_context(|| format!("{to} sees {seen}, which is no gateway of {gateways:?}"))
}

/// Waits until connections come about again, and sees that new ones use this gateway.
fn serves(place: &impl Place, targets: &[IpAddr], gateway: &Gateway, gateways: &[Gateway]) {
    for to in targets {
        eventually(TIMEOUT, || try_connect_soon(place, *to)).unwrap();
        for _ in 0..CONNECTIONS {
            assert_eq!(used(place, *to, gateways).unwrap(), gateway, "a connection to {to}");
        }
    }
}

#[test]
fn a_gateway_with_a_dead_uplink_leaves_and_comes_back_and_when_all_would_leave_none_does() {
    let cluster = BED.shared();
    let beyond = cluster.lab().dual_stack_site("beyond").host("beyond").unwrap();
    let targets = addresses_of(&beyond);
    serve(&beyond, targets.clone()).unwrap();
    let (_egress, gateways) = own_egress(&cluster, NAMESPACE);
    let elsewhere = outside(&cluster);
    route_to(&cluster, &gateways).unwrap();
    let room = Room::new(&cluster, "health");
    let place = network(&cluster, &client_on(&room, NAMESPACE, "home-1"));
    has_targets(&cluster, &targets);

    let first = used(&place, targets[0], &gateways).unwrap();
    let other = gateways.iter().find(|gateway| gateway.node != first.node).expect("both are on one node");
    are(&cluster, [(first, "ready"), (other, "ready")]);
    let flow = Flow::tcp(&place, &*elsewhere.host, elsewhere.addresses()[0]).unwrap();
    let mark = Instant::now();
    let dead = DeadUplink::new(&cluster, &first.node, &targets);
    eventually(TIMEOUT, || try_connect_soon(&place, targets[0])).unwrap();
    println!("a dead uplink: new connections after {:.2?}", mark.elapsed());
    are(&cluster, [(first, "unhealthy"), (other, "ready")]);
    serves(&place, &targets, other, &gateways);

    // Both would leave: what they still reach is reached.
    let other_dead = DeadUplink::new(&cluster, &other.node, &targets);
    are(&cluster, [(first, "unhealthy"), (other, "unhealthy")]);
    for to in elsewhere.addresses().iter().cycle().take(4 * CONNECTIONS) {
        used(&place, *to, &gateways).unwrap();
        std::thread::sleep(Duration::from_millis(100));
    }

    drop(dead);
    are(&cluster, [(first, "ready"), (other, "unhealthy")]);
    serves(&place, &targets, first, &gateways);
    drop(other_dead);
    are(&cluster, [(first, "ready"), (other, "ready")]);
    let figures = flow.figures_since(mark);
    println!("meanwhile, an older connection elsewhere: {figures:?}");
    assert!(figures.lost == 0 && flow.ended().is_none(), "{figures:?} {:?}", flow.ended());
    no_client_address_was_seen(&cluster);
}

/// The machine is what gateways probe: by an echo request in one family and a connection in the other.
fn has_targets(cluster: &Cluster, targets: &[IpAddr]) {
    let [ipv4, ipv6] = targets else { panic!("{targets:?}") };
    let patch = format!(
        r#"{{"spec":{{"healthCheck":{{"targets":["{ipv4}","[{ipv6}]:{PORT}"],"intervalSeconds":1,"failureThreshold":3}}}}}}"#
    );
    cluster.kubectl(&["-n", NAMESPACE, "patch", "egress", "nat", "--type=merge", "-p", &patch]).unwrap();
}
