//! The programs: ours, and those of others.

use std::path::PathBuf;

use anyhow::{Context, Result};

use crate::peers::{cargo, go, shelf};

/// Sources of derper and its load.
const DERPER: &[&[u8]] = &[
    include_bytes!("../../peers/derper/go.mod"),
    include_bytes!("../../peers/derper/go.sum"),
    include_bytes!("../../peers/derper/main.go"),
];
/// Sources of iroh-relay and its load.
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
            derper: derper.file("derper", |path| go("derper", "tailscale.com/cmd/derper", path))?,
            derper_load: derper.file("load", |path| go("derper", ".", path))?,
            fairlead: testbed_lab::executable("fairlead")?,
            fairlead_load: std::env::current_exe().context("cannot find out where this program is")?,
            iroh_relay: iroh_relay.file("iroh-relay-bench", |path| cargo("iroh-relay", path))?,
        })
    }
}
