//! The controller's right on the status of Nodes ends at one condition.

use crate::crds::bed::{Program, bed, is_refused_soon, refused};

/// Server-side apply of a part of the status of a Node, as the controller writes it.
fn apply(program: &Program<'_>, node: &str, metadata: &str, status: &str) -> Result<String, String> {
    let object =
        format!("{{apiVersion: v1, kind: Node, metadata: {{name: {node}{metadata}}}, status: {{{status}}}}}");
    // Without checks of kubectl, which reads more than the controller may.
    let arguments = [
        "apply",
        "--server-side",
        "--force-conflicts",
        "--subresource=status",
        "--field-manager=fairlead-test",
        "--validate=false",
    ];
    program.run(&[&arguments[..], &["-f", "-"]].concat(), &object)
}

fn condition(type_: &str, status: &str) -> String {
    let time = "2026-01-01T00:00:00Z";
    format!(
        "conditions: [{{type: {type_}, status: '{status}', reason: FairleadIsUp, message: m, lastHeartbeatTime: '{time}', lastTransitionTime: '{time}'}}]"
    )
}

#[test]
fn a_stolen_token_of_the_controller_changes_one_condition_of_a_node_and_nothing_else() {
    let bed = bed();
    let controller = bed.program("fairlead-controller", None);
    bed.plane.apply("{apiVersion: v1, kind: Node, metadata: {name: n11}}").unwrap();
    let of_cloud = |patch: &str| {
        let arguments = ["patch", "node", "n11", "--subresource=status", "--type=strategic", "-p", patch];
        bed.plane.kubectl(&arguments).unwrap();
    };
    // Without the condition of another program there is nothing to change.
    let available = condition("NetworkUnavailable", "False");
    let words = "only to False, and only where another program has set it";
    is_refused_soon(words, || apply(&controller, "n11", "", &available));
    of_cloud(
        r#"{"status": {"conditions": [{"type": "Ready", "status": "True"},
        {"type": "NetworkUnavailable", "status": "True", "reason": "NoRouteCreated"}],
        "addresses": [{"type": "InternalIP", "address": "192.0.2.1"}]}}"#,
    );
    let only = "fairlead-controller may change only the condition NetworkUnavailable of Node 'n11'";
    for (metadata, status) in [
        ("", "addresses: [{type: InternalIP, address: 192.0.2.66}]".to_owned()),
        ("", condition("Ready", "False")),
        ("", condition("MemoryPressure", "False")),
        ("", "capacity: {pods: '1'}".to_owned()),
        (", labels: {topology.kubernetes.io/region: lab}", available.clone()),
        (", annotations: {kilo.squat.ai/location: lab}", available.clone()),
    ] {
        refused(apply(&controller, "n11", metadata, &status), only);
    }
    refused(apply(&controller, "n11", "", &condition("NetworkUnavailable", "True")), words);
    apply(&controller, "n11", "", &available).unwrap();
    let node = bed.get(&["node", "n11"]);
    let conditions = node["status"]["conditions"].as_array().unwrap();
    let status = |type_: &str| conditions.iter().find(|it| it["type"] == type_).unwrap()["status"].clone();
    assert_eq!((status("Ready"), status("NetworkUnavailable")), ("True".into(), "False".into()), "{node}");
    assert_eq!(node["status"]["addresses"][0]["address"], "192.0.2.1");
    refused(apply(&bed.program("fairlead-node", Some("n1")), "n11", "", &available), "forbidden");
}
