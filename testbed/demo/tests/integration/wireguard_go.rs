//! wireguard-go, an independent WireGuard, for machines that are no nodes of Fairlead.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context as _, Result, ensure};
use nix::fcntl::{Flock, FlockArg};

const MODULE: &str = "golang.zx2c4.com/wireguard";
/// The version that the tests of `crates/tunnel` use.
const VERSION: &str = "v0.0.0-20260522210424-ecfc5a8d5446";
/// The name of its device.
pub(crate) const INTERFACE: &str = "wg0";
/// The program, built once per machine into the user's cache.
pub(crate) fn wireguard_go() -> Result<PathBuf> {
    let cache = match std::env::var_os("XDG_CACHE_HOME") {
        Some(cache) => PathBuf::from(cache),
        None => {
            PathBuf::from(std::env::var_os("HOME").context("HOME says where the cache is")?).join(".cache")
        }
    };
    let directory = cache.join("fairlead").join(format!("wireguard-go-{VERSION}"));
    fs::create_dir_all(&directory)?;
    let lock = File::create(directory.join("lock"))?;
    let _lock = Flock::lock(lock, FlockArg::LockExclusive).map_err(|(_, errno)| errno)?;
    let program = directory.join("wireguard");
    if !program.exists() {
        let mut go = Command::new("go");
        let built = go.args(["install", &format!("{MODULE}@{VERSION}")]).env("GOBIN", &directory).output()?;
        ensure!(built.status.success(), "building wireguard-go: {}", String::from_utf8_lossy(&built.stderr));
    }
    Ok(program)
}
