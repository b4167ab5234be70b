//! The control plane's binary, built once per content of its Go module.

use std::path::PathBuf;

use crate::go::{Module, Package};

/// The path of the `kubebed` binary, built first if need be.
///
/// It is kept in `$XDG_CACHE_HOME` (or `~/.cache`) `/fairlead/kubebed-VERSION-HASH/`, where the hash
/// covers the module's files, so that a changed module is built anew and an unchanged one never is.
/// Building takes minutes the first time and reports progress on stderr; when several processes ask at
/// once, one builds and the others wait.
///
/// # Errors
/// Go is missing or too old, the modules cannot be downloaded or compiled, or the cache is not writable.
pub fn binary() -> anyhow::Result<PathBuf> {
    let module = Module::read("kubebed", "k8s.io/kubernetes")?;
    module.shelf("kubebed")?.file("kubebed", |path| module.build(Package::Program("."), path))
}
