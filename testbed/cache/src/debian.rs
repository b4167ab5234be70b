//! Files of Debian packages, without installing them: no service starts, and the machine stays unchanged.

use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};

use crate::Shelf;

/// A program of a package, downloaded once per machine. `path` is where the package would install it.
///
/// # Errors
/// The package cannot be downloaded or has no such file.
pub fn program(package: &str, path: &str) -> anyhow::Result<PathBuf> {
    let name = Path::new(path).file_name().and_then(OsStr::to_str).context("not the path of a program")?;
    Shelf::new(&format!("debian-{package}"))?.file(name, |target| {
        crate::progress(&format!("downloading {name} from Debian's package {package}"));
        let work = tempfile::TempDir::new_in(target.parent().unwrap_or(Path::new("/")))?;
        let unpacked = unpack(package, work.path())?;
        let file = unpacked.join(path.trim_start_matches('/'));
        fs::rename(&file, target).with_context(|| format!("{package} has no {path}"))
    })
}

/// Downloads a package into the empty directory `work` and unpacks it there; returns the directory of its files.
///
/// # Errors
/// apt does not know the package, or cannot download it.
pub fn unpack(package: &str, work: &Path) -> anyhow::Result<PathBuf> {
    output(Command::new("apt-get").args(["download", "--quiet", package]).current_dir(work)).with_context(
        || format!("cannot download {package} (run `apt-get update` if apt does not find it)"),
    )?;
    let files = fs::read_dir(work).context("cannot list the download")?;
    let deb = files
        .filter_map(Result::ok)
        .map(|entry| entry.path())
        .find(|path| path.extension() == Some(OsStr::new("deb")));
    let deb = deb.context("apt-get download left no package")?;
    output(Command::new("dpkg").arg("-x").arg(deb).arg("unpacked").current_dir(work))?;
    Ok(work.join("unpacked"))
}

/// Directory of the files that packages, and what they need, would add to this machine, downloaded once per machine. Their scripts do not run.
///
/// # Errors
/// apt does not know a package, or cannot download it.
pub fn files(packages: &[&str]) -> anyhow::Result<PathBuf> {
    Shelf::new(&format!("debian-files-{}", packages.join("-")))?.file("files", |target| {
        crate::progress(&format!("downloading Debian's packages {}", packages.join(", ")));
        let work = tempfile::TempDir::new_in(target.parent().unwrap_or(Path::new("/")))?;
        fs::create_dir(work.path().join("partial")).context("cannot prepare the download")?;
        let archives = format!("Dir::Cache::archives={}", work.path().display());
        let mut download = Command::new("apt-get");
        download.args(["--quiet", "--yes", "--no-install-recommends", "--download-only", "-o", &archives]);
        output(download.arg("install").args(packages))
            .context("cannot download them (run `apt-get update` if apt does not find them)")?;
        if target.exists() {
            fs::remove_dir_all(target).context("cannot remove what an earlier attempt left")?;
        }
        for entry in fs::read_dir(work.path()).context("cannot list the download")? {
            let archive = entry.context("cannot list the download")?.path();
            if archive.extension() == Some(OsStr::new("deb")) {
                output(Command::new("dpkg").arg("-x").arg(archive).arg(target))?;
            }
        }
        Ok(())
    })
}

/// Runs a program that must succeed and returns its standard output.
///
/// # Errors
/// It cannot be run, or failed; its standard error is in the message.
pub fn output(command: &mut Command) -> anyhow::Result<String> {
    let output = command.output().with_context(|| format!("cannot run {command:?}"))?;
    if !output.status.success() {
        bail!(
            "{command:?} failed ({}): {}",
            output.status,
            String::from_utf8_lossy(&output.stderr).trim_end()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}
