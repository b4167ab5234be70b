//! The programs, built once per machine and version: those of others are no part of this workspace.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use testbed_cache::{Fnv1a, Shelf, progress};

/// Where the projects of other relays are, in the checkout that this program was compiled from.
const DIRECTORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/peers");
/// What derper and its load are built from.
const DERPER: &[&[u8]] = &[
    include_bytes!("../../peers/derper/go.mod"),
    include_bytes!("../../peers/derper/go.sum"),
    include_bytes!("../../peers/derper/main.go"),
];
/// What iroh-relay and its load are built from.
const IROH_RELAY: &[&[u8]] = &[
    include_bytes!("../../peers/iroh-relay/Cargo.toml"),
    include_bytes!("../../peers/iroh-relay/Cargo.lock"),
    include_bytes!("../../peers/iroh-relay/src/main.rs"),
    include_bytes!("flow.rs"),
];

/// Paths of all programs.
pub(super) struct Peers {
    pub(super) derper: PathBuf,
    pub(super) derper_load: PathBuf,
    pub(super) fairlead: PathBuf,
    pub(super) fairlead_load: PathBuf,
    pub(super) iroh_relay: PathBuf,
}

impl Peers {
    pub(super) fn build() -> Result<Self> {
        let derper = shelf("derper", DERPER)?;
        let iroh_relay = shelf("iroh-relay", IROH_RELAY)?;
        Ok(Self {
            derper: derper.file("derper", |path| go("tailscale.com/cmd/derper", path))?,
            derper_load: derper.file("load", |path| go(".", path))?,
            fairlead: testbed_lab::executable("fairlead")?,
            fairlead_load: std::env::current_exe().context("cannot find out where this program is")?,
            iroh_relay: iroh_relay.file("iroh-relay-bench", |path| cargo("iroh-relay", path))?,
        })
    }
}

fn shelf(name: &str, files: &[&[u8]]) -> Result<Shelf> {
    let mut hash = Fnv1a::default();
    files.iter().for_each(|file| hash.add(file));
    Shelf::new(&format!("{name}-bench-{:016x}", hash.value()))
}

fn go(package: &str, output: &Path) -> Result<()> {
    progress(&format!("building {package} for derper (takes minutes with an empty Go cache)"));
    let mut command = Command::new("go");
    command.args(["build", "-trimpath", "-ldflags=-s -w", "-o"]).arg(output).arg(package);
    command.env("CGO_ENABLED", "0").env("GOFLAGS", "-mod=readonly -buildvcs=false");
    run(command.current_dir(format!("{DIRECTORY}/derper")))
}

fn cargo(project: &str, output: &Path) -> Result<()> {
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
