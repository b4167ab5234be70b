//! Programs of others, built once per machine and version: they are no part of this workspace.

use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use testbed_cache::{Fnv1a, Shelf, progress};

/// Directory of the projects of other programs, in the checkout that this program was compiled from.
const DIRECTORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/peers");

/// Directory in the cache for a project that is built from these files; other files have another one.
pub(crate) fn shelf(name: &str, files: &[&[u8]]) -> Result<Shelf> {
    let mut hash = Fnv1a::default();
    files.iter().for_each(|file| hash.add(file));
    Shelf::new(&format!("{name}-bench-{:016x}", hash.value()))
}

/// Builds a Go package, from the directory of a project.
pub(crate) fn go(project: &str, package: &str, output: &Path) -> Result<()> {
    progress(&format!("building {package} for {project} (takes minutes with an empty Go cache)"));
    let mut command = Command::new("go");
    command.args(["build", "-trimpath", "-ldflags=-s -w", "-o"]).arg(output).arg(package);
    command.env("CGO_ENABLED", "0").env("GOFLAGS", "-mod=readonly -buildvcs=false");
    run(command.current_dir(format!("{DIRECTORY}/{project}")))
}

/// Builds the program `PROJECT-bench`.
pub(crate) fn cargo(project: &str, output: &Path) -> Result<()> {
    progress(&format!("building {project} (5 minutes on two cores)"));
    let target = output.with_extension("target");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut command = Command::new(cargo);
    command.args(["build", "--release", "--locked", "--target-dir"]).arg(&target);
    run(command.current_dir(format!("{DIRECTORY}/{project}")))?;
    let program = target.join("release").join(format!("{project}-bench"));
    std::fs::rename(&program, output).with_context(|| format!("cargo left no {}", program.display()))?;
    std::fs::remove_dir_all(&target).with_context(|| format!("cannot remove {}", target.display()))
}

fn run(command: &mut Command) -> Result<()> {
    let status = command.stdin(Stdio::null()).stdout(Stdio::null()).status();
    let status = status.with_context(|| format!("cannot run {command:?}"))?;
    ensure!(status.success(), "{command:?} failed ({status}); its messages are above");
    Ok(())
}
