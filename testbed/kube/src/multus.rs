//! Multus, which calls a CNI plugin once for each interface of a pod.
//!
//! From a module of its own: `go install` of a version asks the proxy for a list of versions, which not every proxy has.

use std::path::PathBuf;

use crate::go::{Module, Package};

/// The plugin, built from its Go module.
///
/// # Errors
/// Go is missing, a module cannot be downloaded or compiled, or the cache is not writable.
pub fn multus() -> anyhow::Result<PathBuf> {
    let module = Module::read("multus", "gopkg.in/k8snetworkplumbingwg/multus-cni.v4")?;
    let package = Package::Program("gopkg.in/k8snetworkplumbingwg/multus-cni.v4/cmd/multus");
    module.shelf("multus")?.file("multus", |path| module.build(package, path))
}
