//! Conformance tests of Kubernetes, built from Kubernetes's own modules and CoreDNS's.
//!
//! The suite asks for images by name; [`crate::images`] makes those that its network tests use.

use std::path::PathBuf;

use crate::go::{Module, Package};

/// Kubernetes's end-to-end suite, the program `e2e.test`. Started through [`ginkgo`] it runs tests concurrently.
///
/// # Errors
/// As for [`crate::binary`].
pub fn e2e_test() -> anyhow::Result<PathBuf> {
    let module = kubernetes()?;
    module
        .shelf("conformance")?
        .file("e2e.test", |path| module.build(Package::Tests("k8s.io/kubernetes/test/e2e"), path))
}

/// The runner of the suite, of the version that the suite was built with.
///
/// # Errors
/// As for [`crate::binary`].
pub fn ginkgo() -> anyhow::Result<PathBuf> {
    let module = kubernetes()?;
    module
        .shelf("conformance")?
        .file("ginkgo", |path| module.build(Package::Program("github.com/onsi/ginkgo/v2/ginkgo"), path))
}

/// The program of upstream's test image that is every client and server.
pub(crate) fn agnhost() -> anyhow::Result<PathBuf> {
    let module = kubernetes()?;
    module
        .shelf("conformance")?
        .file("agnhost", |path| module.build(Package::Program("k8s.io/kubernetes/test/images/agnhost"), path))
}

/// CoreDNS.
pub(crate) fn coredns() -> anyhow::Result<PathBuf> {
    let module = Module::read("coredns", "github.com/coredns/coredns")?;
    module
        .shelf("coredns")?
        .file("coredns", |path| module.build(Package::Program("github.com/coredns/coredns"), path))
}

/// The module of everything but CoreDNS.
pub(crate) fn kubernetes() -> anyhow::Result<Module> {
    Module::read("conformance", "k8s.io/kubernetes")
}
