//! A relay on the Internet, for nodes that do not reach each other.

use std::fs;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde_json::{Value, json};
use testbed_lab::{Process, eventually, executable};

use crate::cluster::Cluster;

const TOKEN: &str = "correct horse battery staple";
/// Name of the Secret with the token.
const SECRET: &str = "fairlead-relay";
/// How long the program and the nodes may take on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

impl Cluster {
    /// Starts `fairlead relay` outside of the cluster, has the mesh use it, and waits until the API server reaches every node. The relay
    /// ends with the handle.
    ///
    /// # Errors
    /// It does not come up, or a node is not reached; the message shows logs.
    pub fn install_relay(&self) -> Result<Process> {
        let host = self.lab().public_site("internet").host("relay")?;
        let directory = self.directory().join("relay");
        fs::create_dir(&directory)?;
        let made = rcgen::generate_simple_self_signed([host.address().to_string()])?;
        let certificate = made.cert.pem();
        fs::write(directory.join("tls.crt"), &certificate)?;
        fs::write(directory.join("tls.key"), made.signing_key.serialize_pem())?;
        fs::write(directory.join("tokens"), TOKEN)?;
        let endpoint = format!("{}:443", host.address());
        let mut program = host.command(executable("fairlead")?)?;
        program.args(["relay", "--addr", &endpoint]);
        for (option, file) in [
            ("--tls-cert-file", "tls.crt"),
            ("--tls-private-key-file", "tls.key"),
            ("--token-file", "tokens"),
        ] {
            program.arg(option).arg(directory.join(file));
        }
        let mut relay = host.spawn(&mut program, directory.join("log"))?;
        relay.wait_for_output("serving", TIMEOUT)?;
        let secret = json!({
            "apiVersion": "v1", "kind": "Secret", "metadata": { "name": SECRET, "namespace": "kube-system" },
            "stringData": { "token": TOKEN },
        });
        self.apply(&secret.to_string())?;
        let spec = json!({ "spec": { "relay": {
            "mode": "auto", "provider": "external",
            "external": {
                "endpoint": endpoint,
                "caBundle": STANDARD.encode(&certificate),
                "authSecretRef": { "name": SECRET },
            },
        } } });
        self.kubectl(&["patch", "wirekubemesh", "default", "--type=merge", "-p", &spec.to_string()])?;
        for node in self.nodes() {
            let path = format!("/api/v1/nodes/{}/proxy/healthz", node.name());
            eventually(TIMEOUT, || self.kubectl(&["get", "--raw", &path]))
                .with_context(|| format!("the relay wrote: {}", relay.output().unwrap_or_default()))
                .with_context(|| self.explain())?;
        }
        eventually(TIMEOUT, || self.ensure_relayed()).with_context(|| self.explain())?;
        self.progress().step("every node reaches every other one by way of the relay only");
        Ok(relay)
    }

    /// Every node says so of every other one.
    fn ensure_relayed(&self) -> Result<()> {
        let list: Value = serde_json::from_str(&self.kubectl(&["get", "wirekubepeers", "-o", "json"])?)?;
        let peers = list.pointer("/items").and_then(Value::as_array).context("no list")?;
        ensure!(peers.len() == self.nodes().len(), "{} peers", peers.len());
        for peer in peers {
            let transports = peer.pointer("/status/peerTransports").and_then(Value::as_object);
            let relayed = transports.into_iter().flatten().filter(|(_, how)| *how == "relay");
            ensure!(relayed.count() == peers.len().saturating_sub(1), "not all are relayed: {peer}");
        }
        Ok(())
    }
}
