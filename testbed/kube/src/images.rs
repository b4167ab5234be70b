//! The images that test clusters run, made from files: no engine, no registry.
//!
//! Each function returns an OCI tar for `ctr -n k8s.io images import`, made first if need be and kept like
//! [`crate::binary`]. The names are those that upstream's suite asks for; a test compares them with the
//! suite's source.
//!
//! Their contents are not upstream's, but do the same: Debian's busybox, `agnhost` from Kubernetes's module with this machine's curl, dig
//! and nc, `pause` from Kubernetes's source.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, ensure};
use fairlead_image::{Image, Tree};
use testbed_cache::{Fnv1a, Shelf};

use crate::conformance;

/// Upstream's image of clients and servers.
pub const AGNHOST: &str = "registry.k8s.io/e2e-test-images/agnhost:2.63.0";
/// The one before it, for tests that change a pod's image. It has the same content.
pub const AGNHOST_BEFORE: &str = "registry.k8s.io/e2e-test-images/agnhost:2.55";
/// A shell and small tools.
pub const BUSYBOX: &str = "registry.k8s.io/e2e-test-images/busybox:1.37.0-1";
/// Another name of the same, which some tests use.
pub const BUSYBOX_BEFORE: &str = "registry.k8s.io/e2e-test-images/busybox:1.36.1-1";
/// The DNS server; its tag is the version in `coredns/go.mod`.
pub const COREDNS: &str = "registry.k8s.io/coredns/coredns:v1.15.0";
/// Image that looks up names as programs linked with the GNU C library do.
pub const GLIBC_DNS_TESTING: &str = "registry.k8s.io/e2e-test-images/glibc-dns-testing:2.0.0";
/// The process that holds a pod's namespaces; it is in the configuration of runtimes.
pub const PAUSE: &str = "registry.k8s.io/pause:3.10.2";

const BUSYBOX_PROGRAM: &str = "/usr/bin/busybox";

/// [`AGNHOST`], [`AGNHOST_BEFORE`] and [`GLIBC_DNS_TESTING`], one image with three names.
///
/// # Errors
/// A Debian package is missing (its program is named), or building agnhost fails.
pub fn agnhost() -> anyhow::Result<PathBuf> {
    made("agnhost.tar", |output| {
        let mut tree = Tree::new();
        tree.program(&conformance::agnhost()?, Path::new("/agnhost"))?;
        // What `agnhost porter` serves with.
        let sources = conformance::kubernetes()?.sources()?.join("test/images/agnhost/porter");
        for name in ["localhost.crt", "localhost.key"] {
            tree.bytes(&Path::new("/").join(name), 0o644, std::fs::read(sources.join(name))?);
        }
        for (program, package) in [
            ("/usr/bin/bash", "bash"),
            ("/usr/bin/curl", "curl"),
            ("/usr/bin/dig", "bind9-dnsutils"),
            ("/usr/bin/getent", "libc-bin"),
            ("/usr/bin/host", "bind9-host"),
            ("/usr/bin/nslookup", "bind9-dnsutils"),
            ("/usr/sbin/ip", "iproute2"),
            ("/usr/bin/ss", "iproute2"),
        ] {
            debian(&mut tree, program, program, package)?;
        }
        debian(&mut tree, "/usr/bin/nc.openbsd", "/usr/bin/nc", "netcat-openbsd")?;
        // Busybox's shell would run its own nc instead of the one above.
        debian(&mut tree, "/usr/bin/dash", "/usr/bin/sh", "dash")?;
        add_busybox(&mut tree)?;
        let mut image = image(&[AGNHOST, AGNHOST_BEFORE, GLIBC_DNS_TESTING], &["/agnhost"])?;
        image.command = vec!["pause".to_owned()];
        fairlead_image::write(&tree, &image, output).map(drop)
    })
}

/// [`BUSYBOX`] and [`BUSYBOX_BEFORE`].
///
/// # Errors
/// The Debian package busybox-static is missing.
pub fn busybox() -> anyhow::Result<PathBuf> {
    made("busybox.tar", |output| {
        let mut tree = Tree::new();
        add_busybox(&mut tree)?;
        let mut image = image(&[BUSYBOX, BUSYBOX_BEFORE], &[])?;
        image.command = vec!["sh".to_owned()];
        fairlead_image::write(&tree, &image, output).map(drop)
    })
}

/// [`COREDNS`].
///
/// # Errors
/// Building CoreDNS fails.
pub fn coredns() -> anyhow::Result<PathBuf> {
    made("coredns.tar", |output| {
        let mut tree = Tree::new();
        tree.program(&conformance::coredns()?, Path::new("/coredns"))?;
        fairlead_image::write(&tree, &image(&[COREDNS], &["/coredns"])?, output).map(drop)
    })
}

/// [`PAUSE`].
///
/// # Errors
/// gcc or a static C library is missing.
pub fn pause() -> anyhow::Result<PathBuf> {
    made("pause.tar", |output| {
        let source = conformance::kubernetes()?.sources()?.join("build/pause/linux/pause.c");
        let directory = tempfile::tempdir().context("cannot create a temporary directory")?;
        let program = directory.path().join("pause");
        let compiled = Command::new("gcc")
            .args(["-Os", "-static", "-DVERSION=fairlead", "-o"])
            .arg(&program)
            .arg(&source)
            .status()
            .context("cannot run gcc: install the Debian packages gcc and libc6-dev")?;
        ensure!(
            compiled.success(),
            "gcc cannot compile {} ({compiled}); its messages are above",
            source.display()
        );
        let mut tree = Tree::new();
        tree.program(&program, Path::new("/pause"))?;
        fairlead_image::write(&tree, &image(&[PAUSE], &["/pause"])?, output).map(drop)
    })
}

/// The tar of that name, made anew when this file, the recipes, or the versions in the module have changed.
fn made(name: &str, make: impl FnOnce(&Path) -> anyhow::Result<()>) -> anyhow::Result<PathBuf> {
    let module = conformance::kubernetes()?;
    let mut hash = Fnv1a::default();
    hash.add(&module.hash.to_le_bytes());
    hash.add(include_bytes!("images.rs"));
    Shelf::new(&format!("images-{}-{:016x}", module.version, hash.value()))?.file(name, make)
}

fn image(names: &[&str], entrypoint: &[&str]) -> anyhow::Result<Image> {
    Ok(Image {
        references: names.iter().map(|name| name.parse()).collect::<anyhow::Result<_>>()?,
        entrypoint: entrypoint.iter().map(|&word| word.to_owned()).collect(),
        ..Image::default()
    })
}

fn debian(tree: &mut Tree, program: &str, path: &str, package: &str) -> anyhow::Result<()> {
    tree.program(Path::new(program), Path::new(path))
        .with_context(|| format!("is the Debian package {package} installed?"))
}

/// Busybox and a link for everything it can be, except where there is something better.
fn add_busybox(tree: &mut Tree) -> anyhow::Result<()> {
    debian(tree, BUSYBOX_PROGRAM, BUSYBOX_PROGRAM, "busybox-static")?;
    let list = Command::new(BUSYBOX_PROGRAM).arg("--list").output().context("cannot run busybox")?;
    for applet in String::from_utf8_lossy(&list.stdout).lines() {
        let places = ["/usr/bin", "/usr/sbin"].map(|directory| Path::new(directory).join(applet));
        if let [place, _] = &places
            && !places.iter().any(|place| tree.contains(place))
        {
            tree.symlink(place, "busybox");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// From the source of the list that the suite prints, so that the suite need not be built for this.
    #[test]
    fn the_names_are_those_that_the_suite_asks_for() {
        let sources = conformance::kubernetes().unwrap().sources().unwrap();
        let list = std::fs::read_to_string(sources.join("test/utils/image/manifest.go")).unwrap();
        for (key, name) in [
            ("Agnhost", AGNHOST),
            ("AgnhostPrev", AGNHOST_BEFORE),
            ("BusyBox", BUSYBOX),
            ("GlibcDnsTesting", GLIBC_DNS_TESTING),
            ("Pause", PAUSE),
        ] {
            let (path, tag) = name.rsplit_once(':').unwrap();
            let base = path.rsplit_once('/').unwrap().1;
            let line = list.lines().find(|line| line.contains(&format!("configs[{key}] ="))).unwrap();
            assert!(
                line.contains(&format!("\"{base}\", \"{tag}\"")),
                "{name} is not what the suite says: {line}"
            );
        }
    }

    #[test]
    fn the_tag_of_coredns_is_the_version_that_is_built() {
        let manifest = include_str!("../coredns/go.mod");
        let tag = COREDNS.rsplit_once(':').unwrap().1;
        assert!(manifest.contains(&format!("github.com/coredns/coredns {tag}\n")), "{tag}");
    }
}
