//! A pod in its node's network that asks for gateways.

use std::net::IpAddr;

use anyhow::ensure;
use serde_json::Value;
use testbed_kube::images::AGNHOST;
use testbed_lab::eventually;

use crate::bed::{Room, TIMEOUT, fairlead};
use crate::egress::BED;
use crate::egress::outside::{PORT, outside};
use crate::egress::setup::ANNOTATIONS;

/// The node of the pod, which has a public address.
const NODE: &str = "cloud-2";

#[test]
fn a_pod_in_its_nodes_network_starts_is_told_by_an_event_and_leaves_as_its_node_does() {
    let cluster = BED.shared();
    let room = Room::new(&cluster, "host-network");
    let node = cluster.node(NODE).unwrap();
    let manifest = format!(
        "\
apiVersion: v1
kind: Pod
metadata: {{name: client, labels: {{app: client}}, annotations: {{{ANNOTATIONS}}}}}
spec:
  hostNetwork: true
  nodeName: {NODE}
  terminationGracePeriodSeconds: 1
  containers: [{{name: main, image: {AGNHOST}, args: [pause]}}]
"
    );
    room.apply(&manifest).unwrap();
    assert_eq!(room.ready_pod("client").addresses[0], node.addresses()[0]);

    let select = "involvedObject.name=client,reason=EgressHostNetwork";
    let is_told = || {
        let path = "jsonpath={.items[*].type}:{.items[*].message}";
        let events = room.kubectl(&format!("get events --field-selector {select} -o {path}"))?;
        let is_event = events.starts_with("Warning:") && events.contains("spec.hostNetwork");
        ensure!(is_event, "no such Event: {events:?}");
        Ok(())
    };
    eventually(TIMEOUT, is_told).unwrap();

    let show = "ip rule; ip -6 rule; ip -br link; nft list tables";
    let shown = node.host().shell(show).unwrap();
    let of_clients = ["lookup 117", "lookup 118", "fou4_", "fou6_", "fairlead_egress_client"];
    assert!(of_clients.iter().all(|words| !shown.contains(words)), "{shown}");
    let to = outside(&cluster).addresses()[0];
    let answer = room.shell("client", &format!("curl -sS --http0.9 -m 10 http://{to}:{PORT}/")).unwrap();
    let seen: IpAddr = answer.trim().parse().unwrap();
    assert_eq!(seen, node.addresses()[0], "the pod left with another address than its node's");

    let to = to.to_string();
    let ask = ["egress", "explain", "host-network/client", &to, "-o", "json"];
    let (code, text, _) = fairlead(&cluster, &ask).unwrap();
    let answer: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((code, &answer["way"]), (Some(0), &Value::from("hostNetwork")), "{answer:#}");
}
