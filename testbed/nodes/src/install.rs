//! Fairlead, installed as a user would: an image, `kubectl apply -k`, a pool and perhaps a mesh.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testbed_kube::images;
use testbed_lab::{eventually, executable};

use crate::cluster::{Cluster, tail};
use crate::topology::Families;

/// How long the programs may take to come up on a busy machine.
const PATIENCE: Duration = Duration::from_secs(180);

/// How nodes reach each other's pods.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// `deploy/`, and a mesh of all nodes.
    Mesh,
    /// `deploy/overlays/router`: plain routes, for nodes on one network.
    Router,
}

/// The ranges of `deploy/examples/pool.yaml`, separated by commas.
pub const POOL_RANGES: &str = "10.64.0.0/16,fd02:fa1e::/112";

/// The checkout that this crate was compiled from.
fn checkout() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// The pool of `deploy/examples`, without IPv6 where the cluster has none.
pub fn pool(families: Families) -> Result<String> {
    let path = checkout().join("deploy/examples/pool.yaml");
    let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let kept = text.lines().filter(|line| families == Families::Dual || !line.contains("ipv6:"));
    Ok(kept.map(|line| format!("{line}\n")).collect())
}

/// Makes Fairlead's image from the programs that are built, as `cargo xtask image --debug` does.
///
/// # Errors
/// The programs are not built.
pub fn image(directory: &Path, tag: &str) -> Result<PathBuf> {
    let path = directory.join(format!("{}.tar", tag.replace(['/', ':'], "-")));
    let mut command = std::process::Command::new(executable("fairlead-image")?);
    command.arg("--fairlead").arg(executable("fairlead")?).arg("--plugin").arg(executable("fairlead-cni")?);
    let output = command.arg("--output").arg(&path).args(["--tag", tag, "--local"]).output()?;
    ensure!(output.status.success(), "cannot make {tag}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(path)
}

/// What pods of a test cluster run: pause, busybox, agnhost, CoreDNS; made first if need be, see `testbed_kube::images`.
///
/// # Errors
/// One cannot be made; the message says what is missing.
pub fn test_images() -> Result<Vec<PathBuf>> {
    Ok(vec![images::pause()?, images::busybox()?, images::agnhost()?, images::coredns()?])
}

/// CoreDNS under the address that kubelets give to pods. Its image is one of [`test_images`].
const DNS: &str = include_str!("../manifests/coredns.yaml");

/// The image that `deploy/` names.
pub const IMAGE: &str = concat!("localhost/fairlead:", env!("CARGO_PKG_VERSION"));

impl Cluster {
    /// Imports the image, applies `deploy/`, the pool and, in a mesh, the mesh, and waits until every node is Ready.
    ///
    /// # Errors
    /// The API server refuses an object, or a program does not come up; the message shows what it said.
    pub fn install_fairlead(&self, mode: Mode) -> Result<()> {
        self.import_image(&image(self.directory(), IMAGE)?)?;
        let kustomization = match mode {
            Mode::Mesh => "deploy",
            Mode::Router => "deploy/overlays/router",
        };
        self.kubectl(&["apply", "-k", &checkout().join(kustomization).to_string_lossy()])?;
        self.kubectl(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"])?;
        let pool = pool(self.families())?;
        // The webhook may not answer yet: a user would try again, too.
        eventually(PATIENCE, || self.apply(&pool))?;
        if mode == Mode::Mesh {
            let mesh = checkout().join("deploy/examples/mesh.yaml");
            eventually(PATIENCE, || self.kubectl(&["apply", "-f", &mesh.to_string_lossy()]))?;
        }
        self.progress().step(&format!(
            "kubectl apply -k {kustomization}, a pool{}",
            match mode {
                Mode::Mesh => " and a mesh",
                Mode::Router => "",
            }
        ));
        self.wait_fairlead()?;
        self.wait_ready()
    }

    /// Waits until the DaemonSet and the Deployment of `deploy/` have what they want.
    ///
    /// # Errors
    /// They do not; the message shows their pods and logs.
    pub fn wait_fairlead(&self) -> Result<()> {
        let timeout = format!("--timeout={}s", PATIENCE.as_secs());
        for what in ["daemonset/coild", "deployment/coil-ipam-controller"] {
            self.kubectl(&["-n", "kube-system", "rollout", "status", what, &timeout])
                .with_context(|| self.explain())?;
        }
        Ok(())
    }

    /// Starts the cluster's DNS and waits until it answers. Pods need a network by then.
    ///
    /// # Errors
    /// It does not come up; the message shows pods and logs.
    pub fn install_dns(&self) -> Result<()> {
        self.apply(DNS)?;
        let timeout = format!("--timeout={}s", PATIENCE.as_secs());
        self.kubectl(&["-n", "kube-system", "rollout", "status", "deployment/coredns", &timeout])
            .with_context(|| self.explain())?;
        self.progress().step("CoreDNS answers");
        Ok(())
    }

    /// What a person would look at first when something does not work: pods, nodes, warnings, ends of logs.
    pub fn explain(&self) -> String {
        let ask = |arguments: &[&str]| match self.kubectl(arguments) {
            Ok(text) => text,
            Err(error) => format!("{error:#}\n"),
        };
        let mut text = ask(&["get", "pods,nodes", "-A", "-o", "wide"]);
        text += &ask(&["get", "events", "-A", "--field-selector", "type=Warning"]);
        for component in ["coild", "coil-ipam-controller"] {
            let selector = format!("app.kubernetes.io/component={component}");
            text += &ask(&["-n", "kube-system", "logs", "--prefix", "--tail=15", "-l", &selector]);
        }
        for node in self.nodes() {
            text += &tail(&node.log("kubelet"));
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manifest_of_dns_runs_the_image_that_is_made() {
        assert!(DNS.contains(&format!("image: {}\n", images::COREDNS)), "{DNS}");
    }
}
