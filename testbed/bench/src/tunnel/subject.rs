//! The implementations, and how the device of each is started.

use std::fmt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};
use testbed_kube::Published;

use super::DEVICE_COMMAND;
use super::pair::INTERFACE;
use crate::peers::{cargo, shelf};

/// The same that judges the embedded WireGuard in the tests of `fairlead-tunnel`; they share the built program, which
/// is named by the last part of the module's path.
const WIREGUARD_GO: Published = Published {
    name: "wireguard-go",
    version: "v0.0.0-20260522210424-ecfc5a8d5446",
    packages: &["golang.zx2c4.com/wireguard"],
};
/// Sources of the devices of gotatun and boringtun.
const RUST_WIREGUARD: &[&[u8]] = &[
    include_bytes!("../../peers/rust-wireguard/Cargo.toml"),
    include_bytes!("../../peers/rust-wireguard/Cargo.lock"),
    include_bytes!("../../peers/rust-wireguard/src/main.rs"),
];

/// In the order of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Subject {
    Fairlead,
    WireguardGo,
    Gotatun,
    Boringtun,
    /// The cipher of WireGuard on one core, without network.
    Cipher,
    /// The cable without a tunnel.
    PlainVeth,
}

impl Subject {
    pub(super) const ALL: [Self; 6] =
        [Self::Fairlead, Self::WireguardGo, Self::Gotatun, Self::Boringtun, Self::Cipher, Self::PlainVeth];

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Boringtun => "boringtun",
            Self::Cipher => "cipher alone",
            Self::Fairlead => "fairlead",
            Self::Gotatun => "gotatun",
            Self::PlainVeth => "plain veth",
            Self::WireguardGo => "wireguard-go",
        }
    }

    /// Whether it is an implementation of WireGuard.
    pub(super) fn is_tunnel(self) -> bool {
        !matches!(self, Self::Cipher | Self::PlainVeth)
    }

    /// Whether it carries packets between two network namespaces.
    pub(super) fn is_path(self) -> bool {
        self != Self::Cipher
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The embedded device in a process of its own, which takes over from one that hands over at this path, and hands over there itself.
pub(super) fn device_with_handover(path: &Path) -> Result<Command> {
    let mut command = Command::new(own_program()?);
    command.args([DEVICE_COMMAND, INTERFACE]).arg(path);
    Ok(command)
}

fn own_program() -> Result<PathBuf> {
    std::env::current_exe().context("cannot find out where this program is")
}

/// Paths of the programs with a device.
pub(super) struct Programs {
    own: PathBuf,
    wireguard_go: PathBuf,
    rust_wireguard: PathBuf,
}

impl Programs {
    /// Builds those of others.
    pub(super) fn build() -> Result<Self> {
        let rust_wireguard = shelf("rust-wireguard", RUST_WIREGUARD)?;
        Ok(Self {
            own: own_program()?,
            wireguard_go: WIREGUARD_GO.programs()?.join("wireguard"),
            rust_wireguard: rust_wireguard
                .file("rust-wireguard-bench", |path| cargo("rust-wireguard", path))?,
        })
    }

    /// A device that runs in the foreground until it is killed; `None` for a subject without one.
    pub(super) fn device(&self, subject: Subject) -> Option<Command> {
        let (program, word) = match subject {
            Subject::Boringtun => (&self.rust_wireguard, "boringtun"),
            Subject::Cipher | Subject::PlainVeth => return None,
            Subject::Fairlead => (&self.own, DEVICE_COMMAND),
            Subject::Gotatun => (&self.rust_wireguard, "gotatun"),
            Subject::WireguardGo => (&self.wireguard_go, "-f"),
        };
        let mut command = Command::new(program);
        command.args([word, INTERFACE]);
        Some(command)
    }
}
