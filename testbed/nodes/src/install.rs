//! Fairlead, installed as a user would: an image, `kubectl apply -k`, a pool and perhaps a mesh.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use testbed_kube::images;
use testbed_lab::executable;

use crate::cluster::{Cluster, tail};
use crate::control_plane::API_PORT;
use crate::topology::{Families, Placement};

/// Longest time until the programs are up on a busy machine.
const TIMEOUT: Duration = Duration::from_secs(180);

/// Network between the pods of different nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Mode {
    /// `deploy/`, and a mesh of all nodes.
    Mesh,
    /// `deploy/overlays/egress`, and a mesh of all nodes.
    MeshWithEgress,
    /// `deploy/overlays/egress-only`: egress gateways for pods of another plugin.
    EgressOnly,
    /// `deploy/overlays/router`: plain routes, for nodes on one network.
    Router,
}

impl Mode {
    /// The argument of `kubectl apply -k`, from the checkout.
    fn kustomization(self) -> &'static str {
        match self {
            Self::Mesh => "deploy",
            Self::MeshWithEgress => "deploy/overlays/egress",
            Self::EgressOnly => "deploy/overlays/egress-only",
            Self::Router => "deploy/overlays/router",
        }
    }

    fn has_mesh(self) -> bool {
        matches!(self, Self::Mesh | Self::MeshWithEgress)
    }
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
    ensure!(output.status.success(), "cannot build {tag}: {}", String::from_utf8_lossy(&output.stderr));
    Ok(path)
}

/// Images that pods of a test cluster run: pause, busybox, agnhost, CoreDNS; made first if need be, see `testbed_kube::images`.
///
/// # Errors
/// One cannot be built; the message names what is missing.
pub fn test_images() -> Result<Vec<PathBuf>> {
    Ok(vec![images::pause()?, images::busybox()?, images::agnhost()?, images::coredns()?])
}

/// CoreDNS under the address that kubelets give to pods. Its image is one of [`test_images`].
const DNS: &str = include_str!("../manifests/coredns.yaml");

/// The way from one absolute directory to another; kustomize takes no absolute ones.
fn from_directory(from: &Path, to: &Path) -> PathBuf {
    let up = from.components().skip(1).map(|_| "..");
    up.collect::<PathBuf>().join(to.strip_prefix("/").unwrap_or(to))
}

/// Part of an overlay by which each node program uses the API server of its own node.
fn own_api_server() -> String {
    let variable = |name: &str, value: &str| {
        let add = "op: add, path: /spec/template/spec/containers/0/env/-";
        format!("      - {{{add}, value: {{name: {name}, {value}}}}}\n")
    };
    "patches:\n  - target: {kind: DaemonSet, name: coild}\n    patch: |-\n".to_owned()
        + &variable("KUBERNETES_SERVICE_HOST", "valueFrom: {fieldRef: {fieldPath: status.hostIP}}")
        + &variable("KUBERNETES_SERVICE_PORT", &format!("value: \"{API_PORT}\""))
}

/// The image that `deploy/` names.
pub const IMAGE: &str = concat!("localhost/fairlead:", env!("CARGO_PKG_VERSION"));

impl Cluster {
    /// Imports the image, applies `deploy/`, the pool and, in a mesh, the mesh, and waits until every node is Ready.
    ///
    /// # Errors
    /// The API server refuses an object, or a program does not become ready; the message shows its output.
    pub fn install_fairlead(&self, mode: Mode) -> Result<()> {
        self.import_image(&image(self.directory(), IMAGE)?)?;
        let kustomization = match self.placement() {
            Placement::EveryNode => self.overlay(mode, "own-api-server", &own_api_server())?,
            Placement::FirstNode => checkout().join(mode.kustomization()),
        };
        self.apply_fairlead(mode, &kustomization)
    }

    /// Applies a kustomization of Fairlead, a pool unless another plugin has one, and, in a mesh, the mesh, each once: nothing may depend on what comes later.
    fn apply_fairlead(&self, mode: Mode, kustomization: &Path) -> Result<()> {
        self.kubectl(&["apply", "-k", &kustomization.to_string_lossy()])?;
        self.kubectl(&["wait", "--for=condition=Established", "crd", "--all", "--timeout=60s"])?;
        if mode != Mode::EgressOnly {
            self.apply(&pool(self.families())?)?;
        }
        if mode.has_mesh() {
            self.kubectl(&["apply", "-f", &checkout().join("deploy/examples/mesh.yaml").to_string_lossy()])?;
        }
        self.progress().step(&format!(
            "kubectl apply -k {}{}",
            kustomization.display(),
            match mode {
                Mode::Mesh | Mode::MeshWithEgress => ", a pool and a mesh",
                Mode::Router => ", a pool",
                Mode::EgressOnly => "",
            }
        ));
        self.wait_fairlead()?;
        self.wait_ready()
    }

    /// Installs Fairlead with its only controller on the given node, by an overlay as users write it.
    ///
    /// # Errors
    /// As for [`Cluster::install_fairlead`].
    pub fn install_fairlead_with_controller_on(&self, mode: Mode, node: &str) -> Result<()> {
        let patch = format!(
            "patches:\n  - target: {{kind: Deployment, name: coil-ipam-controller}}\n    patch: |-\n      \
             - {{op: replace, path: /spec/replicas, value: 1}}\n      \
             - {{op: add, path: /spec/template/spec/nodeSelector/kubernetes.io~1hostname, value: {node}}}\n"
        );
        let overlay = self.overlay(mode, "controller", &patch)?;
        self.apply_fairlead(mode, &overlay)
    }

    /// Removes Fairlead as `deploy/uninstall` does, and waits until that has ended.
    ///
    /// # Errors
    /// It does not end; the message shows its log.
    pub fn uninstall_fairlead(&self) -> Result<()> {
        let directory = checkout().join("deploy/uninstall");
        let directory = directory.to_string_lossy();
        self.kubectl(&["apply", "-k", &directory])?;
        let timeout = format!("--timeout={}s", 2 * TIMEOUT.as_secs());
        let job = "job/fairlead-uninstall";
        self.kubectl(&["-n", "kube-system", "wait", "--for=condition=complete", &timeout, job])
            .with_context(|| {
                self.kubectl(&["-n", "kube-system", "logs", "--tail=40", job]).unwrap_or_default()
            })
            .with_context(|| self.explain())?;
        self.kubectl(&["delete", "-k", &directory])?;
        self.progress().step("fairlead uninstall has ended");
        Ok(())
    }

    /// A kustomization on top of that of a mode.
    fn overlay(&self, mode: Mode, name: &str, more: &str) -> Result<PathBuf> {
        let overlay = self.directory().canonicalize()?.join(format!("overlay-{name}"));
        std::fs::create_dir_all(&overlay)?;
        let base = from_directory(&overlay, &checkout().canonicalize()?.join(mode.kustomization()));
        std::fs::write(
            overlay.join("kustomization.yaml"),
            format!("resources: [{}]\n{more}", base.display()),
        )?;
        Ok(overlay)
    }

    /// Rolls out the same programs as an image of another tag, by an overlay as users write it, and waits until every node
    /// has it.
    ///
    /// # Errors
    /// As for [`Cluster::install_fairlead`].
    pub fn upgrade_fairlead(&self, mode: Mode, tag: &str) -> Result<()> {
        let (name, _) = IMAGE.rsplit_once(':').context("the image has no tag")?;
        self.import_image(&image(self.directory(), &format!("{name}:{tag}"))?)?;
        let overlay = self.overlay(mode, tag, &format!("images: [{{name: {name}, newTag: {tag}}}]\n"))?;
        self.kubectl(&["apply", "-k", &overlay.to_string_lossy()])?;
        self.wait_fairlead()?;
        self.progress().step(&format!("{name}:{tag} runs everywhere"));
        Ok(())
    }

    /// Waits until the DaemonSet and the Deployments of `deploy/` have what they want.
    ///
    /// # Errors
    /// A rollout is not complete in time; the message shows pods and logs.
    pub fn wait_fairlead(&self) -> Result<()> {
        self.wake_daemonset_controller();
        let timeout = format!("--timeout={}s", TIMEOUT.as_secs());
        let egress = ["get", "deployment", "coil-egress-controller", "--ignore-not-found", "-o", "name"];
        let egress = self.kubectl(&[&["-n", "kube-system"], &egress[..]].concat())?;
        let egress = (!egress.trim().is_empty()).then_some("deployment/coil-egress-controller");
        for what in ["daemonset/coild", "deployment/coil-ipam-controller"].into_iter().chain(egress) {
            self.kubectl(&["-n", "kube-system", "rollout", "status", what, &timeout])
                .with_context(|| self.explain())?;
        }
        Ok(())
    }

    /// The DaemonSet controller of Kubernetes 1.36 was once seen to stand still: of an upgrade with `maxSurge` all pods were Ready, and
    /// for three minutes it did not delete the last old one. Any change of the object wakes it. Where a pod is not Ready, that is
    /// for Fairlead to explain, and nothing is done here.
    fn wake_daemonset_controller(&self) {
        let in_system = |words: &[&str]| self.kubectl(&[&["-n", "kube-system"], words].concat());
        if in_system(&["rollout", "status", "daemonset/coild", "--timeout=60s"]).is_ok() {
            return;
        }
        let selector = "app.kubernetes.io/component=coild";
        if in_system(&["wait", "pod", "--for=condition=Ready", "-l", selector, "--timeout=1s"]).is_ok()
            && in_system(&["annotate", "daemonset/coild", "--overwrite", "testbed/woken=true"]).is_ok()
        {
            self.progress().step(
                "all pods of coild are Ready, its rollout is not complete: woke the DaemonSet controller",
            );
        }
    }

    /// Starts the cluster's DNS and waits until it answers. Pods need a network by then.
    ///
    /// # Errors
    /// It does not come up; the message shows pods and logs.
    pub fn install_dns(&self) -> Result<()> {
        self.apply(DNS)?;
        let timeout = format!("--timeout={}s", TIMEOUT.as_secs());
        self.kubectl(&["-n", "kube-system", "rollout", "status", "deployment/coredns", &timeout])
            .with_context(|| self.explain())?;
        self.progress().step("CoreDNS answers");
        Ok(())
    }

    /// Report for people when something does not work: pods, nodes, warnings, ends of logs.
    pub fn explain(&self) -> String {
        let ask = |arguments: &[&str]| match self.kubectl(arguments) {
            Ok(text) => text,
            Err(error) => format!("{error:#}\n"),
        };
        let mut text = ask(&["get", "pods,nodes", "-A", "-o", "wide"]);
        text += &ask(&["get", "events", "-A", "--field-selector", "type=Warning"]);
        for component in ["coild", "coil-ipam-controller", "coil-egress-controller", "egress"] {
            let selector = format!("app.kubernetes.io/component={component}");
            let logs = ["logs", "-n", "kube-system", "--prefix", "--tail=15", "-l", &selector];
            text += &ask(&logs);
            // A program that was started again said the reason before it ended.
            text += &ask(&[&logs[..], &["--previous", "--ignore-errors"]].concat());
        }
        for node in self.nodes() {
            text += &tail(&node.log("kubelet"));
        }
        text + "\n" + &self.control_plane_logs()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_way_between_directories_leads_through_the_root() {
        assert_eq!(from_directory(Path::new("/tmp/x"), Path::new("/a/deploy")), Path::new("../../a/deploy"));
    }

    #[test]
    fn the_manifest_of_dns_runs_the_image_that_is_made() {
        assert!(DNS.contains(&format!("image: {}\n", images::COREDNS)), "{DNS}");
    }
}
