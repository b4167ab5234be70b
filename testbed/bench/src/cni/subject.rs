//! Plugins that are compared, called as the CNI specification has runtimes do it.

use std::fmt;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};

/// UID that the runtime passes for every pod.
pub(super) const POD_UID: &str = "bench";

/// Address families of a pod.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Family {
    Dual,
    Ipv4,
    Ipv6,
}

impl Family {
    pub(crate) const ALL: [Self; 3] = [Self::Ipv4, Self::Ipv6, Self::Dual];

    /// Name of the family in objects and rows.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Dual => "dual",
            Self::Ipv4 => "ipv4",
            Self::Ipv6 => "ipv6",
        }
    }

    fn addresses(self) -> usize {
        match self {
            Self::Dual => 2,
            Self::Ipv4 | Self::Ipv6 => 1,
        }
    }
}

impl fmt::Display for Family {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// A CNI plugin with its network configuration.
#[derive(Debug, Clone)]
pub(crate) struct Plugin {
    executable: PathBuf,
    /// Directory of the plugins that it calls itself: `CNI_PATH`.
    path: PathBuf,
    configuration: String,
    /// The pods' Kubernetes namespace.
    namespace: String,
    addresses: usize,
}

impl Plugin {
    /// Our plugin, for the pods of a Kubernetes namespace.
    pub(crate) fn ours(executable: &Path, socket: &Path, namespace: String, family: Family) -> Self {
        let configuration =
            json!({"cniVersion": "1.0.0", "name": "k8s-pod-network", "type": "coil", "socket": socket});
        Self::new(executable, &configuration, namespace, family)
    }

    /// `ptp` with `host-local`, which keeps its files in `data`.
    pub(crate) fn ptp(executable: &Path, data: &Path, family: Family) -> Self {
        let v4 = (json!([{"subnet": "10.88.0.0/16"}]), json!({"dst": "0.0.0.0/0"}));
        let v6 = (json!([{"subnet": "fd00:88::/64"}]), json!({"dst": "::/0"}));
        let (ranges, routes): (Vec<Value>, Vec<Value>) = match family {
            Family::Dual => vec![v4, v6],
            Family::Ipv4 => vec![v4],
            Family::Ipv6 => vec![v6],
        }
        .into_iter()
        .unzip();
        let name = format!("bench-{family}");
        let ipam = json!({"type": "host-local", "dataDir": data, "ranges": ranges, "routes": routes});
        let configuration = json!({"cniVersion": "1.0.0", "name": name, "type": "ptp", "ipam": ipam});
        Self::new(executable, &configuration, "bench".to_owned(), family)
    }

    fn new(executable: &Path, configuration: &Value, namespace: String, family: Family) -> Self {
        Self {
            executable: executable.to_owned(),
            path: executable.parent().unwrap_or(Path::new("/")).to_owned(),
            configuration: configuration.to_string(),
            namespace,
            addresses: family.addresses(),
        }
    }

    /// Whether its executable is in this directory.
    pub(crate) fn is_in(&self, directory: &Path) -> bool {
        self.path == directory
    }

    /// ADD; the result must have an address of each family.
    pub(crate) fn add(&self, container: &str, netns: &Path) -> Result<()> {
        let output = self.call("ADD", container, netns)?;
        let result: Value = serde_json::from_slice(&output).context("the result of ADD is no JSON")?;
        let found = result.get("ips").and_then(Value::as_array).map_or(0, Vec::len);
        ensure!(found == self.addresses, "{found} addresses instead of {}: {result}", self.addresses);
        Ok(())
    }

    /// DEL.
    pub(crate) fn del(&self, container: &str, netns: &Path) -> Result<()> {
        self.call("DEL", container, netns).map(drop)
    }

    /// An operation that calls no server: what remains is starting the process.
    pub(crate) fn version(&self) -> Result<()> {
        self.call("VERSION", "", Path::new("")).map(drop)
    }

    fn call(&self, operation: &str, container: &str, netns: &Path) -> Result<Vec<u8>> {
        let arguments = format!(
            "IgnoreUnknown=1;K8S_POD_NAMESPACE={};K8S_POD_NAME=pod;K8S_POD_INFRA_CONTAINER_ID={container};\
             K8S_POD_UID={POD_UID}",
            self.namespace
        );
        let mut child = Command::new(&self.executable)
            .env("CNI_COMMAND", operation)
            .env("CNI_CONTAINERID", container)
            .env("CNI_NETNS", netns)
            .env("CNI_IFNAME", "eth0")
            .env("CNI_PATH", &self.path)
            .env("CNI_ARGS", arguments)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .with_context(|| format!("cannot run {}", self.executable.display()))?;
        // One that ends without reading has its reasons; they are in its answer.
        let _ = child.stdin.take().map(|mut stdin| stdin.write_all(self.configuration.as_bytes()));
        let output = child.wait_with_output().context("cannot wait for the plugin")?;
        let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
        ensure!(
            output.status.success(),
            "{operation} failed ({}): {} {}",
            output.status,
            said(&output.stdout),
            said(&output.stderr)
        );
        Ok(output.stdout)
    }
}
