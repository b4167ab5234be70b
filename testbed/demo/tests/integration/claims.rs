//! Addresses that a node announces and its Node does not have: left out on every node, until the mesh grants them.

use anyhow::{Context, Result, ensure};
use fairlead_demo::World;
use serde_json::{Value, json};

use crate::outage::{TIMEOUT, node};

const OBSERVERS: [&str; 3] = ["cloud-1", "home-1", "office-2"];
/// Any key: no program has it.
const KEY: &str = "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=";
const OWN: &str = "192.0.2.66";
/// Address of a server outside of the cluster.
const FOREIGN: &str = "198.51.100.80";

pub(crate) fn a_foreign_address_is_left_out(world: &mut World) {
    world.plane.apply("apiVersion: v1\nkind: Node\nmetadata: {name: thief}\n").unwrap();
    let addresses = json!({ "status": { "addresses": [{ "type": "InternalIP", "address": OWN }] } });
    patch(world, &["node", "thief", "--subresource=status"], &addresses);
    let peer = json!({
        "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer", "metadata": { "name": "thief" },
        "spec": { "publicKey": KEY, "allowedIPs": [format!("{OWN}/32"), format!("{FOREIGN}/32")] },
    });
    world.plane.apply(&peer.to_string()).unwrap();
    world.wait_for(TIMEOUT, copied).unwrap();
    wait(world, |world, name| carries(world, name, &[OWN], &[FOREIGN]));
    let grants = json!({ "spec": { "grants": [{ "node": "thief", "cidrs": ["198.51.100.0/24"] }] } });
    patch(world, &["wkmesh", "default"], &grants);
    wait(world, |world, name| carries(world, name, &[OWN, FOREIGN], &[]));
    patch(world, &["wkmesh", "default"], &json!({ "spec": { "grants": null } }));
    wait(world, |world, name| carries(world, name, &[OWN], &[FOREIGN]));
    world.plane.kubectl(&["delete", "wkpeer/thief", "node/thief"]).unwrap();
    wait(world, |world, name| carries(world, name, &[], &[]));
}

fn patch(world: &World, object: &[&str], patch: &Value) {
    let patch = patch.to_string();
    let arguments = [&["patch"], object, &["--type=merge", "-p", &patch]].concat();
    world.plane.kubectl(&arguments).unwrap();
}

/// The controller has copied what the Node says.
fn copied(world: &World) -> Result<()> {
    let peer = world.published("thief")?;
    ensure!(peer["status"]["node"]["internalIPs"] == json!([OWN]), "{peer}");
    Ok(())
}

fn wait(world: &World, check: impl Fn(&World, &str) -> Result<()>) {
    for name in OBSERVERS {
        world.wait_for(TIMEOUT, |world| check(world, name)).unwrap();
    }
}

/// The device sends exactly these addresses to the key, they alone are led into the mesh, and the others are problems.
fn carries(world: &World, name: &str, addresses: &[&str], refused: &[&str]) -> Result<()> {
    let host = &node(world, name).host;
    let device = host.shell("wg show wire_kube allowed-ips")?;
    let shown = device.lines().find(|line| line.starts_with(KEY)).unwrap_or_default();
    let targets = host.shell("nft list set inet talos_kubespan kubespan_targets_ipv4")?;
    for address in [OWN, FOREIGN] {
        let is_carried = addresses.contains(&address);
        ensure!(shown.contains(address) == is_carried, "{name}: {address} in {device}");
        ensure!(targets.contains(address) == is_carried, "{name}: {address} in {targets}");
    }
    let status = node(world, name).status()?;
    let problems = status["problems"].as_array().context("no problems")?;
    let told: Vec<&str> = problems.iter().filter_map(Value::as_str).collect();
    for address in [OWN, FOREIGN] {
        let words = format!("thief announces {address}/32");
        let is_told = told.iter().any(|problem| problem.contains(&words));
        ensure!(is_told == refused.contains(&address), "{name}: {told:?}");
    }
    Ok(())
}
