//! A debug build replaces itself by the release build.

use std::convert::Infallible;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::progress;

/// The workspace's root in the checkout that this program was compiled from.
const WORKSPACE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");

/// Builds the release program and executes it with the same arguments; returns only with an error.
pub(crate) fn become_release_build(arguments: &[String]) -> Result<()> {
    let program = std::env::current_exe().context("cannot find out where this program is")?;
    let target = target_directory(&program)
        .with_context(|| format!("cannot tell cargo's target directory from {}", program.display()))?;
    progress("==> release build of Fairlead and fairlead-bench (first time up to 15 minutes)");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .args(["build", "--release"])
        // At once, so that cargo unifies their features and builds each library once.
        .args(["--package", "fairlead-bench", "--package", "fairlead", "--package", "fairlead-cni-plugin"])
        .arg("--target-dir")
        .arg(&target)
        .current_dir(WORKSPACE)
        .stdin(Stdio::null())
        .status()
        .context("cannot run cargo, which builds what is measured")?;
    ensure!(status.success(), "the release build failed ({status}); its messages are above");
    execute(&target.join("release").join("fairlead-bench"), arguments).map(|never| match never {})
}

/// Cargo's target directory, however it was set: the one above `debug/fairlead-bench`.
pub(crate) fn target_directory(program: &Path) -> Option<PathBuf> {
    program.parent()?.parent().map(Path::to_owned)
}

fn execute(program: &Path, arguments: &[String]) -> Result<Infallible> {
    let error = Command::new(program).args(arguments).exec();
    Err(error).with_context(|| format!("cannot execute {}", program.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_target_directory_is_two_above_the_program() {
        let found = target_directory(Path::new("/src/target/debug/fairlead-bench"));
        assert_eq!(found, Some(PathBuf::from("/src/target")));
        assert_eq!(target_directory(Path::new("/")), None);
    }
}
