//! Servers with which nodes find each other on the lab's Internet: STUN servers and a relay, and the mesh that names them.

use std::process::Command;

use anyhow::Context;
use serde_json::{Value, json};
use testbed_lab::relay::Relay;
use testbed_lab::{Host, Process};

use crate::World;
use crate::objects::{self, MESHES};

/// Starts a STUN server: coturn.
///
/// # Errors
/// It is not installed or cannot be started.
pub fn stun_server(world: &World, name: &str) -> anyhow::Result<(Host, Process)> {
    let host = world.lab().public_site("internet").host(name)?;
    let address = host.address().to_string();
    let mut turnserver = Command::new("turnserver");
    turnserver.args(["-n", "--stun-only", "--no-cli", "--no-tls", "--no-dtls", "--log-file=stdout"]);
    turnserver.args(["--listening-ip", &address, "--listening-port=3478", "--pidfile"]);
    turnserver.arg(world.directory().join(format!("{name}.pid")));
    let log = world.directory().join(format!("{name}.log"));
    let process = host.spawn(&mut turnserver, log)?;
    Ok((host, process))
}

/// Starts `fairlead relay` on a machine of its own.
///
/// # Errors
/// It is not built, or did not come up.
pub fn relay(world: &World) -> anyhow::Result<Relay> {
    Relay::start(world.lab().public_site("internet").host("relay")?, world.directory().join("relay"))
}

/// The same on a machine with IPv4 and IPv6, known by a name.
///
/// # Errors
/// As [`relay`].
pub fn dual_stack_relay(world: &World, name: &str) -> anyhow::Result<Relay> {
    let host = world.lab().dual_stack_site("internet").host("relay")?;
    Relay::start_named(host, name, world.directory().join("relay"))
}

/// Applies the mesh with this specification.
///
/// # Errors
/// The API server refuses.
pub fn apply_mesh(world: &World, spec: &Value) -> anyhow::Result<()> {
    let metadata = json!({ "name": "default" });
    let (kind, version) = ("WireKubeMesh", "wirekube.io/v1alpha1");
    let mesh = json!({ "apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec });
    world.plane.apply_at(&format!("{MESHES}/default"), &mesh.to_string()).map(drop)
}

/// Applies the Secret with the token of the relay.
///
/// # Errors
/// The API server refuses.
pub fn apply_token(world: &World, token: &str) -> anyhow::Result<()> {
    let secret = Relay::secret(token);
    let name = secret.pointer("/metadata/name").and_then(Value::as_str).context("a Secret without a name")?;
    let path = format!("{}/secrets/{name}", objects::namespace_path("kube-system"));
    world.plane.apply_at(&path, &secret.to_string()).map(drop)
}
