//! wireguard-go from its Go module, built once per machine and version.

use std::fs::{self, File};
use std::path::PathBuf;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};

use crate::progress;

const MODULE: &str = "golang.zx2c4.com/wireguard";
/// The same that judges the embedded WireGuard in the tests of `fairlead-tunnel`; they share the built program.
const VERSION: &str = "v0.0.0-20260522210424-ecfc5a8d5446";

/// The program, in `$XDG_CACHE_HOME` (or `~/.cache`) `/fairlead/wireguard-go-VERSION/`.
///
/// # Errors
/// Go is missing, the module cannot be downloaded or compiled, or the cache is not writable.
pub(super) fn program() -> Result<PathBuf> {
    let directory = cache()?.join(format!("wireguard-go-{VERSION}"));
    fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let path = directory.join("lock");
    let lock = File::create(&path).with_context(|| format!("cannot create {}", path.display()))?;
    lock.lock().with_context(|| format!("cannot lock {}", path.display()))?;
    let program = directory.join("wireguard");
    if !program.exists() {
        progress(&format!("    building wireguard-go {VERSION} into {}", directory.display()));
        let status = Command::new("go")
            .args(["install", &format!("{MODULE}@{VERSION}")])
            .env("GOBIN", &directory)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .status()
            .context("cannot run go, which builds wireguard-go: install it from https://go.dev/dl")?;
        ensure!(status.success(), "building {MODULE}@{VERSION} failed ({status}); the messages are above");
    }
    Ok(program)
}

fn cache() -> Result<PathBuf> {
    let set = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    let base = set("XDG_CACHE_HOME").or_else(|| set("HOME").map(|home| home.join(".cache")));
    Ok(base
        .context("neither XDG_CACHE_HOME nor HOME is set: no place to keep wireguard-go")?
        .join("fairlead"))
}
