//! What nodes find each other with on the lab's Internet: STUN servers and a relay, and the mesh that names them.

use std::fs;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::Context;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use nix::sys::signal::Signal;
use serde_json::{Value, json};
use testbed_lab::{Host, Process};

use crate::World;
use crate::node::executable;

/// TCP port of the relay.
pub const RELAY_PORT: u16 = 443;
/// The token of the relay.
pub const TOKEN: &str = "correct horse battery staple";
/// Name of the Secret with the token.
const SECRET: &str = "fairlead-relay";
/// Only bounds what would hang.
const TIMEOUT: Duration = Duration::from_secs(60);

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

/// `fairlead relay` with a certificate for its address.
#[derive(Debug)]
pub struct Relay {
    /// The machine.
    pub host: Host,
    directory: PathBuf,
    certificate: String,
    process: Option<Process>,
}

impl Relay {
    /// Starts it on a machine of its own.
    ///
    /// # Errors
    /// As [`Relay::run`].
    pub fn start(world: &World) -> anyhow::Result<Self> {
        let host = world.lab().public_site("internet").host("relay")?;
        let directory = world.directory().join("relay");
        fs::create_dir(&directory)?;
        let made = rcgen::generate_simple_self_signed([host.address().to_string()])?;
        let certificate = made.cert.pem();
        fs::write(directory.join("tls.crt"), &certificate)?;
        fs::write(directory.join("tls.key"), made.signing_key.serialize_pem())?;
        fs::write(directory.join("tokens"), TOKEN)?;
        let mut relay = Self { host, directory, certificate, process: None };
        relay.run()?;
        Ok(relay)
    }

    /// Starts the program and waits until it serves.
    ///
    /// # Errors
    /// It is not built, or did not come up; its output is in the message.
    pub fn run(&mut self) -> anyhow::Result<()> {
        let mut program = self.host.command(executable("fairlead")?)?;
        program.args(["relay", "--addr", &self.address()]);
        program.args(["--metrics-addr=127.0.0.1:9388", "--health-addr=127.0.0.1:9389", "--drain=2s"]);
        for (option, file) in [
            ("--tls-cert-file", "tls.crt"),
            ("--tls-private-key-file", "tls.key"),
            ("--token-file", "tokens"),
        ] {
            program.arg(option).arg(self.directory.join(file));
        }
        let log = self.directory.join("log");
        let mut process = self.host.spawn(&mut program, log)?;
        process.wait_for_output("serving", TIMEOUT)?;
        self.process = Some(process);
        Ok(())
    }

    /// Kills the program with SIGKILL.
    ///
    /// # Errors
    /// It does not run.
    pub fn kill(&mut self) -> anyhow::Result<()> {
        let mut process = self.process.take().context("the relay does not run")?;
        process.signal(Signal::SIGKILL)?;
        process.wait(TIMEOUT).map(drop)
    }

    /// Its address and port.
    pub fn address(&self) -> String {
        format!("{}:{RELAY_PORT}", self.host.address())
    }

    /// `spec.relay` of the mesh.
    pub fn spec(&self, mode: &str) -> Value {
        json!({
            "mode": mode, "provider": "external",
            "external": {
                "endpoint": self.address(),
                "caBundle": STANDARD.encode(&self.certificate),
                "authSecretRef": { "name": SECRET },
            },
        })
    }
}

/// Applies the mesh with this specification.
///
/// # Errors
/// The API server refuses.
pub fn apply_mesh(world: &World, spec: &Value) -> anyhow::Result<()> {
    let metadata = json!({ "name": "default" });
    let (kind, version) = ("WireKubeMesh", "wirekube.io/v1alpha1");
    let mesh = json!({ "apiVersion": version, "kind": kind, "metadata": metadata, "spec": spec });
    world.plane.apply(&mesh.to_string()).map(drop)
}

/// Applies the Secret with the token of the relay.
///
/// # Errors
/// The API server refuses.
pub fn apply_token(world: &World, token: &str) -> anyhow::Result<()> {
    let metadata = json!({ "name": SECRET, "namespace": "kube-system" });
    let secret = json!({
        "apiVersion": "v1", "kind": "Secret", "metadata": metadata, "stringData": { "token": token },
    });
    world.plane.apply(&secret.to_string()).map(drop)
}
