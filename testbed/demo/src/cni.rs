//! Pods without a kubelet: a network namespace, and the CNI plugin called as a container runtime calls it.

use std::io::Write;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::process::{Output, Stdio};

use anyhow::{Context, bail};
use serde_json::Value;
use testbed_lab::{Host, Namespace, Place};

use crate::objects::NAMESPACE;

/// CNI plugin of one node, with all that a runtime needs to call it.
#[derive(Debug, Clone)]
pub struct Plugin {
    /// The executable.
    pub executable: PathBuf,
    /// Socket of the node program.
    pub socket: PathBuf,
    /// The host it runs on.
    pub host: Host,
}

/// One container's interface.
#[derive(Debug, Clone)]
pub struct Container {
    /// `CNI_CONTAINERID`
    pub id: String,
    /// Name of the Pod object.
    pub pod: String,
    /// Kubernetes namespace of the pod.
    pub namespace: String,
    /// `CNI_NETNS`
    pub netns: PathBuf,
    /// UID of the Pod object, of runtimes that pass it.
    pub uid: Option<String>,
}

/// A pod that has its interface.
#[derive(Debug, Clone)]
pub struct Pod {
    /// Name of the Pod object.
    pub name: String,
    /// Name of its node.
    pub node: String,
    /// Site of its node.
    pub site: String,
    /// Network namespace of the pod.
    pub namespace: Namespace,
    /// Container of the pod, as the runtime names it in calls of the plugin.
    pub container: Container,
    /// Addresses of the pod, IPv4 first.
    pub addresses: Vec<IpAddr>,
}

impl Place for Pod {
    fn name(&self) -> &str {
        &self.name
    }

    fn inside<T: Send>(&self, work: impl FnOnce() -> T + Send) -> anyhow::Result<T> {
        self.namespace.run(work)
    }
}

impl Plugin {
    /// The network configuration a runtime would pass on stdin.
    pub fn configuration(&self) -> String {
        configuration(&self.socket)
    }

    /// Calls the plugin with an operation and any configuration and returns what it printed.
    ///
    /// # Errors
    /// It cannot be run.
    pub fn call(
        &self,
        operation: &str,
        container: &Container,
        configuration: &str,
    ) -> anyhow::Result<Output> {
        let uid = container.uid.as_ref().map(|uid| format!(";K8S_POD_UID={uid}")).unwrap_or_default();
        let arguments = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME={};K8S_POD_INFRA_CONTAINER_ID={}{uid}",
            container.namespace, container.pod, container.id
        );
        let mut command = self.host.command(&self.executable)?;
        command
            .env("CNI_COMMAND", operation)
            .env("CNI_CONTAINERID", &container.id)
            .env("CNI_NETNS", &container.netns)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", self.executable.parent().unwrap_or(Path::new("/")))
            .env("CNI_ARGS", arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let mut child = command.spawn().context("cannot run the CNI plugin")?;
        if let Some(mut stdin) = child.stdin.take() {
            // A plugin that ends without reading its input has its reasons; they are in its answer.
            let _ = stdin.write_all(configuration.as_bytes());
        }
        child.wait_with_output().context("cannot wait for the CNI plugin")
    }

    /// ADD; returns the addresses.
    ///
    /// # Errors
    /// The plugin's own words.
    pub fn add(&self, container: &Container) -> anyhow::Result<Vec<IpAddr>> {
        let output = self.call("ADD", container, &self.configuration())?;
        let answer: Value = serde_json::from_slice(&output.stdout).with_context(|| {
            format!("ADD of {} printed no JSON: {}", container.pod, String::from_utf8_lossy(&output.stderr))
        })?;
        if !output.status.success() {
            bail!("ADD of {} failed: {answer}", container.pod);
        }
        addresses(&answer)
    }

    /// DEL.
    ///
    /// # Errors
    /// The plugin's own words.
    pub fn del(&self, container: &Container) -> anyhow::Result<()> {
        let output = self.call("DEL", container, &self.configuration())?;
        if !output.status.success() {
            bail!("DEL of {} failed: {}", container.pod, String::from_utf8_lossy(&output.stdout));
        }
        Ok(())
    }
}

/// The network configuration of a node whose program serves `socket`.
pub fn configuration(socket: &Path) -> String {
    serde_json::json!({
        "cniVersion": "1.0.0", "name": "k8s-pod-network", "type": "coil", "socket": socket,
    })
    .to_string()
}

/// The addresses in a result of ADD.
///
/// # Errors
/// It is no such result.
pub fn addresses(result: &Value) -> anyhow::Result<Vec<IpAddr>> {
    let listed = result.get("ips").and_then(Value::as_array).context("the result has no ips")?;
    listed
        .iter()
        .map(|ip| {
            let text = ip.get("address").and_then(Value::as_str).context("an ip has no address")?;
            Ok(text.parse::<ipnet::IpNet>()?.addr())
        })
        .collect()
}

/// The container of a pod in a namespace of the lab.
pub fn container(pod: &str, namespace: &Namespace) -> Container {
    Container {
        id: format!("{pod}-{:x}", namespace.network_inode()),
        pod: pod.to_owned(),
        namespace: NAMESPACE.to_owned(),
        netns: namespace.netns_path(),
        uid: None,
    }
}
