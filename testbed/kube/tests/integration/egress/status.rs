//! Status that the controller writes, other than that of the gateways.

use anyhow::{Context as _, ensure};
use serde_json::json;

use crate::egress::bed::{bed, egress};

#[test]
fn the_ranges_of_the_cluster_are_in_the_status() {
    let (bed, namespace) = (bed(), "ranges");
    bed.namespace(namespace);
    bed.plane.apply(&egress(namespace, "nat", &json!({}))).unwrap();
    let has = |wanted: bool| {
        bed.until(namespace, &["egress", "nat"], |found| {
            let ranges = found["status"]["clusterRanges"].as_array().context("no ranges yet")?;
            ensure!(
                ranges.iter().all(|range| !range.as_str().unwrap().starts_with("10.")),
                "private: {ranges:?}"
            );
            ensure!(ranges.contains(&json!("100.100.0.0/24")) == wanted, "{ranges:?}");
            Ok(())
        });
    };
    has(false);
    let node = json!({
        "apiVersion": "v1", "kind": "Node", "metadata": { "name": "ranges-1" },
        "spec": { "podCIDR": "100.100.0.0/24", "podCIDRs": ["100.100.0.0/24"] },
    });
    bed.plane.apply(&node.to_string()).unwrap();
    has(true);
    bed.plane.kubectl(&["delete", "node", "ranges-1"]).unwrap();
    has(false);
}

#[test]
fn ranges_of_the_cluster_inside_of_a_private_destination_are_in_the_status_so_that_pods_can_use_it() {
    let (bed, namespace) = (bed(), "contained");
    bed.namespace(namespace);
    let of = |destination: &str| {
        bed.plane.apply(&egress(namespace, "nat", &json!({ "destinations": [destination] }))).unwrap();
    };
    let has = |wanted: bool| {
        bed.until(namespace, &["egress", "nat"], |found| {
            let ranges = found["status"]["clusterRanges"].as_array().context("no ranges yet")?;
            let has = ranges.iter().any(|range| range.as_str().unwrap().starts_with("10."));
            ensure!(has == wanted, "{ranges:?}");
            Ok(())
        });
    };
    of("192.0.2.0/24");
    has(false);
    of("10.0.0.0/8");
    has(true);
    // It has the address of its own Service.
    let service = bed.there(namespace, &["service", "nat"]);
    assert!(service["spec"]["clusterIP"].as_str().unwrap().starts_with("10."), "{service}");
    bed.ready(namespace, "nat", "False", "NoneAvailable");
}

#[test]
fn a_selector_that_cannot_be_has_a_condition_and_an_event_and_gateways_are_deployed() {
    let (bed, namespace) = (bed(), "selectors");
    bed.namespace(namespace);
    let of = |operator: &str| {
        let expressions = json!([{ "key": "app", "operator": operator }]);
        json!({ "selectors": [{ "podSelector": { "matchExpressions": expressions } }] })
    };
    bed.plane.apply(&egress(namespace, "nat", &of("exists"))).unwrap();
    let says = |status: &str, reason: &str| {
        bed.until(namespace, &["egress", "nat"], |found| {
            let conditions = found["status"]["conditions"].as_array().context("no conditions")?;
            let found =
                conditions.iter().find(|it| it["type"] == "SelectorsValid").context("no condition")?;
            ensure!((&found["status"], &found["reason"]) == (&json!(status), &json!(reason)));
            Ok(())
        });
    };
    says("False", "SelectorInvalid");
    bed.ready(namespace, "nat", "False", "NoneAvailable");
    bed.there(namespace, &["deployment", "nat"]);
    bed.until(namespace, &["events"], |found| {
        let events = found["items"].as_array().context("no events")?;
        ensure!(events.iter().any(|event| event["reason"] == "SelectorInvalid"));
        Ok(())
    });
    bed.plane.apply(&egress(namespace, "nat", &of("Exists"))).unwrap();
    says("True", "AllValid");
}
