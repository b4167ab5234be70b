//! Data of an etcd in whose control plane a kustomization is installed: control planes that shall have it begin with a copy.
//!
//! To install `deploy/` takes kubectl and a new API server longer than the start of that server; and a server that finds the roles of
//! Kubernetes in its etcd starts faster than one that makes them.
//!
//! Bindings of admission policies are kept apart, for when the API server is ready: it looks for the kind of a policy's parameters as soon as
//! the policy is bound, and then only half a minute later again. While it starts, it does not know its custom resources yet, and such a policy
//! would refuse everything until then.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use serde_json::{Value, json};
use testbed_cache::{Fnv1a, Shelf, progress};

use crate::Options;
use crate::control_plane::{ControlPlane, copy};
use crate::programs::Programs;

/// Path in the API of all bindings of admission policies.
const BINDINGS: &str = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolicybindings";
/// Fields of the metadata of an object that its author writes.
const WRITTEN: [&str; 3] = ["annotations", "labels", "name"];

/// Directory with the data of an etcd and the bindings that are missing there.
pub(crate) struct Template(PathBuf);

impl Template {
    /// The template for a kustomization that has all its files below its directory; made if it is the first for their content and for these
    /// programs.
    pub(crate) fn of(kustomization: &Path, kubebed: &Path) -> anyhow::Result<Self> {
        let mut hash = Fnv1a::default();
        // The path says what the programs were built from; and how a template is made may change, too.
        hash.add(kubebed.as_os_str().as_encoded_bytes());
        hash.add(include_bytes!("template.rs"));
        add_files(&mut hash, kustomization)
            .with_context(|| format!("cannot read {}", kustomization.display()))?;
        let shelf = Shelf::new(&format!("installed-{:016x}", hash.value()))?;
        Ok(Self(shelf.file("cluster", |path| make(kustomization, kubebed, path))?))
    }

    /// Makes the data of an etcd in the state directory of a control plane that has not started yet.
    pub(crate) fn copy(&self, directory: &Path) -> anyhow::Result<()> {
        copy(&self.0.join("etcd"), &directory.join("etcd"))
    }

    /// Makes the bindings in a control plane that has started with the copy.
    pub(crate) fn bind(&self, plane: &ControlPlane) -> anyhow::Result<()> {
        let text = fs::read_to_string(self.0.join("bindings.json")).context("cannot read the bindings")?;
        let list: Value = serde_json::from_str(&text).context("the bindings are not JSON")?;
        let bindings = list.get("items").and_then(Value::as_array).into_iter().flatten();
        bindings.filter_map(written).try_for_each(|(name, binding)| {
            plane.apply_at(&format!("{BINDINGS}/{name}"), &binding.to_string()).map(drop)
        })
    }
}

/// The name of a binding, and what its author wrote of it.
fn written(binding: &Value) -> Option<(String, Value)> {
    let mut metadata = binding.get("metadata")?.as_object()?.clone();
    metadata.retain(|field, _| WRITTEN.contains(&field.as_str()));
    let name = metadata.get("name")?.as_str()?.to_owned();
    let object = json!({
        "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
        "metadata": metadata, "spec": binding.get("spec")?,
    });
    Some((name, object))
}

fn make(kustomization: &Path, kubebed: &Path, to: &Path) -> anyhow::Result<()> {
    progress(&format!("installing {} in a control plane that others are copies of", kustomization.display()));
    if to.exists() {
        fs::remove_dir_all(to).context("cannot remove what an earlier attempt left")?;
    }
    fs::create_dir(to)?;
    let plane = ControlPlane::start_with(Programs::Kubebed(kubebed.to_owned()), Options::default())?;
    plane.install(kustomization)?;
    fs::write(to.join("bindings.json"), plane.get(BINDINGS)?.to_string())?;
    plane.kubectl(&["delete", "validatingadmissionpolicybindings", "--all"])?;
    plane.leave_etcd(&to.join("etcd"))
}

/// Adds the names and the content of all files below a directory.
fn add_files(hash: &mut Fnv1a, directory: &Path) -> std::io::Result<()> {
    let entries = fs::read_dir(directory)?.map(|entry| entry.map(|entry| entry.path()));
    let mut paths: Vec<PathBuf> = entries.collect::<std::io::Result<_>>()?;
    paths.sort();
    for path in paths {
        hash.add(path.file_name().unwrap_or_default().as_encoded_bytes());
        if path.is_dir() {
            add_files(hash, &path)?;
        } else {
            hash.add(&fs::read(&path)?);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bindings_are_made_again_as_their_author_wrote_them() {
        let kept = json!({
            "metadata": { "name": "a", "labels": { "b": "c" }, "uid": "d", "resourceVersion": "7" },
            "spec": { "policyName": "e" },
        });
        let expected = json!({
            "apiVersion": "admissionregistration.k8s.io/v1", "kind": "ValidatingAdmissionPolicyBinding",
            "metadata": { "name": "a", "labels": { "b": "c" } }, "spec": { "policyName": "e" },
        });
        assert_eq!(written(&kept), Some(("a".to_owned(), expected)));
        assert_eq!(written(&json!({ "metadata": {} })), None);
    }

    #[test]
    fn every_change_below_the_directory_is_seen() {
        let directory = tempfile::tempdir().unwrap();
        let hash = || {
            let mut hash = Fnv1a::default();
            add_files(&mut hash, directory.path()).unwrap();
            hash.value()
        };
        fs::create_dir(directory.path().join("base")).unwrap();
        fs::write(directory.path().join("base/one"), "1").unwrap();
        let first = hash();
        assert_eq!(hash(), first);
        fs::write(directory.path().join("base/one"), "2").unwrap();
        let second = hash();
        assert_ne!(second, first);
        fs::rename(directory.path().join("base/one"), directory.path().join("base/two")).unwrap();
        assert_ne!(hash(), second);
    }
}
