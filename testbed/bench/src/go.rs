//! Peers that are Go programs: built from their modules, once per machine and version.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::progress;

/// Programs of one Go module.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Peer {
    /// What the directory in the cache is named after, together with the version.
    pub(crate) name: &'static str,
    /// The module's version.
    pub(crate) version: &'static str,
    /// Import paths of the programs.
    pub(crate) packages: &'static [&'static str],
}

impl Peer {
    /// The directory with the programs, each named by the last part of its import path:
    /// `$XDG_CACHE_HOME` (or `~/.cache`) `/fairlead/NAME-VERSION/`.
    ///
    /// # Errors
    /// Go is missing, the module cannot be downloaded or compiled, or the cache is not writable.
    pub(crate) fn programs(&self) -> Result<PathBuf> {
        let Self { name, version, packages } = *self;
        let directory = cache()?.join(format!("{name}-{version}"));
        fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
        let path = directory.join("lock");
        let lock = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
        lock.lock().with_context(|| format!("cannot lock {}", path.display()))?;
        let missing =
            |package: &&&str| !directory.join(package.rsplit('/').next().unwrap_or(package)).exists();
        for package in packages.iter().filter(missing) {
            progress(&format!("    building {package} {version} into {}", directory.display()));
            let status = Command::new("go")
                .args(["install", &format!("{package}@{version}")])
                .env("GOBIN", &directory)
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .status()
                .with_context(|| {
                    format!("cannot run go, which builds {name}: install it from https://go.dev/dl")
                })?;
            ensure!(
                status.success(),
                "building {package}@{version} failed ({status}); the messages are above"
            );
        }
        Ok(directory)
    }
}

fn cache() -> Result<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    Ok(base
        .context("neither XDG_CACHE_HOME nor HOME is set: no place to keep the programs to compare with")?
        .join("fairlead"))
}
