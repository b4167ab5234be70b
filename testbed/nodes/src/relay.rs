//! A relay on the Internet, for nodes that do not reach each other.

use std::time::Duration;

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use testbed_lab::eventually;
use testbed_lab::relay::{Relay, TOKEN};

use crate::cluster::Cluster;

/// Longest wait for the program and for the nodes on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(120);

impl Cluster {
    /// Starts `fairlead relay` outside of the cluster, has the mesh use it, and waits until the API server reaches every node. The relay
    /// ends with the handle.
    ///
    /// # Errors
    /// It does not come up, or a node is not reached; the message shows logs.
    pub fn install_relay(&self) -> Result<Relay> {
        let host = self.lab().public_site("internet").host("relay")?;
        let relay = Relay::start(host, self.directory().join("relay"))?;
        self.apply(&Relay::secret(TOKEN).to_string())?;
        let spec = json!({ "spec": { "relay": relay.spec("auto") } });
        self.kubectl(&["patch", "wirekubemesh", "default", "--type=merge", "-p", &spec.to_string()])?;
        for node in self.nodes() {
            let path = format!("/api/v1/nodes/{}/proxy/healthz", node.name());
            eventually(TIMEOUT, || self.kubectl(&["get", "--raw", &path]))
                .with_context(|| format!("the relay wrote: {}", relay.output()))
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
