//! Annotations of a Node that cannot be read: each is left out, with a reason wherever users look, and what can be read counts.

use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use fairlead_demo::World;
use serde_json::Value;

use crate::outage::{TIMEOUT, loses_nothing, node, tcp, udp};

const NODE: &str = "home-2";
/// Annotation, two values that cannot be read, and the reason of the problem.
const BAD: [(&str, [&str; 2], &str); 6] = [
    ("kilo.squat.ai/force-endpoint", ["nonsense", "198.51.100.300:51820:1"], "InvalidEndpoint"),
    ("kilo.squat.ai/force-internal-ip", ["10.7.0.1", "10.7.0.1/33"], "InvalidLocation"),
    ("kilo.squat.ai/persistent-keepalive", ["often", "-1"], "InvalidKeepalive"),
    ("kilo.squat.ai/allowed-location-ips", ["printer", "10.7.0.300/24"], "InvalidLocation"),
    ("kilo.squat.ai/location", [TOO_LONG, ALSO_TOO_LONG], "InvalidLocation"),
    ("networking.talos.dev/kubespan-exclude-advertised-networks", ["all", "fd00::/129"], "InvalidNodeFilter"),
];
/// 254 letters.
const TOO_LONG: &str = concat!(
    "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
    "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx",
);
const ALSO_TOO_LONG: &str = concat!(
    "yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy",
    "yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy",
    "yyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyyy",
);
/// Number of bytes of a long value that are shown at least.
const SHOWN: usize = 40;

pub(crate) fn annotations_that_cannot_be_read_are_left_out_with_a_reason(world: &mut World) {
    let world = &*world;
    let flows = [udp(world, NODE, "cloud-1"), tcp(world, "office-2", NODE)];
    std::thread::sleep(Duration::from_secs(1));
    let mark = std::time::Instant::now();
    for round in 0..2 {
        annotate(BAD.map(|(annotation, values, _)| format!("{annotation}={}", values[round])), world);
        world.wait_for(TIMEOUT, |world| are_named(world, round)).unwrap();
        world.wait_for(TIMEOUT, events).unwrap();
    }
    // As often as a node program looks for what has changed.
    std::thread::sleep(Duration::from_secs(5));
    let counts = events(world).unwrap();
    println!("  Events by reason: {counts:?}");
    assert!(counts.values().all(|count| *count == 1), "{counts:?}");
    annotate(BAD.map(|(annotation, ..)| format!("{annotation}-")), world);
    let are_gone = |world: &World| {
        let problems = node(world, NODE).status()?["problems"].to_string();
        ensure!(BAD.iter().all(|(annotation, ..)| !problems.contains(annotation)), "{problems}");
        Ok(())
    };
    world.wait_for(TIMEOUT, are_gone).unwrap();
    loses_nothing("annotations that cannot be read", &flows, mark);
}

fn annotate<const N: usize>(annotations: [String; N], world: &World) {
    let annotations = annotations.each_ref().map(String::as_str);
    world.plane.kubectl(&[&["annotate", "--overwrite", "node", NODE], &annotations[..]].concat()).unwrap();
}

/// In `fairlead status` of the node and in its WireKubePeer.
fn are_named(world: &World, round: usize) -> Result<()> {
    let listed = node(world, NODE).status()?["problems"].clone();
    let published = world.published(NODE)?["status"]["problems"].clone();
    for (place, problems) in [("status", listed), ("WireKubePeer", published)] {
        let problems = problems.as_array().with_context(|| format!("{place} has no problems"))?;
        let problems: Vec<&str> = problems.iter().filter_map(Value::as_str).collect();
        for (annotation, values, _) in BAD {
            let value = values[round];
            let value = value.get(..SHOWN).unwrap_or(value);
            let is_named = problems.iter().any(|it| it.contains(annotation) && it.contains(value));
            ensure!(is_named, "{place}: no {annotation} with {value} in {problems:?}");
        }
    }
    Ok(())
}

/// Number of times that each reason was published of this Node; an error if one was not.
fn events(world: &World) -> Result<BTreeMap<&'static str, u64>> {
    let listed = world.events(&format!("regarding.name={NODE}"))?;
    let count = |reason: &str| {
        let of_reason = listed.iter().filter(|event| event["reason"] == reason);
        of_reason.map(|event| event["series"]["count"].as_u64().unwrap_or(1)).sum::<u64>()
    };
    let counts: BTreeMap<_, _> = BAD.iter().map(|(_, _, reason)| (*reason, count(reason))).collect();
    ensure!(counts.values().all(|count| *count > 0), "{counts:?}");
    Ok(counts)
}
