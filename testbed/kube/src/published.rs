//! Programs of published Go modules, as they are: judges and peers.

use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use testbed_cache::{Shelf, progress};

/// Programs of one Go module.
#[derive(Debug, Clone, Copy)]
pub struct Published {
    /// Name of the directory in the cache, before the version.
    pub name: &'static str,
    /// The module's version, with its `v`.
    pub version: &'static str,
    /// Import paths of the programs.
    pub packages: &'static [&'static str],
}

/// The plugins of the CNI project that need no cluster: `ptp` makes pods, `host-local` gives them addresses.
pub const CNI_PLUGINS: Published = Published {
    name: "cni-plugins",
    version: "v1.9.1",
    packages: &[
        "github.com/containernetworking/plugins/plugins/main/ptp",
        "github.com/containernetworking/plugins/plugins/ipam/host-local",
    ],
};

impl Published {
    /// The directory with the programs, each named by the last part of its import path. They are built once per machine
    /// and version, into `$XDG_CACHE_HOME` (or `~/.cache`) `/fairlead/NAME-VERSION/`.
    ///
    /// # Errors
    /// Go is missing, the module cannot be downloaded or compiled, or the cache is not writable.
    pub fn programs(&self) -> anyhow::Result<PathBuf> {
        let Self { name, version, packages } = *self;
        let shelf = Shelf::new(&format!("{name}-{version}"))?;
        for package in packages {
            let program = package.rsplit('/').next().unwrap_or(package);
            shelf.file(program, |path| {
                // `go install` chooses the name itself.
                let directory = path.with_extension("d");
                install(package, version, &directory)?;
                fs::rename(directory.join(program), path)?;
                Ok(fs::remove_dir(&directory)?)
            })?;
        }
        Ok(shelf.directory().to_owned())
    }
}

fn install(package: &str, version: &str, directory: &std::path::Path) -> anyhow::Result<()> {
    progress(&format!("building {package} {version}"));
    let status = Command::new("go")
        .args(["install", &format!("{package}@{version}")])
        .env("GOBIN", directory)
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .status()
        .context("cannot run `go`: install it from https://go.dev/dl")?;
    ensure!(status.success(), "building {package}@{version} failed ({status}); the messages are above");
    Ok(())
}
