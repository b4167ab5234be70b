//! Functions for programs that were built beside a bed's own.

use std::path::PathBuf;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

/// Interval at which [`eventually`] checks its condition.
const POLL_INTERVAL: Duration = Duration::from_millis(100);

/// An executable of this workspace, beside this program or one directory above a test's.
///
/// # Errors
/// It was not built.
pub fn executable(name: &str) -> Result<PathBuf> {
    let own = std::env::current_exe()?;
    let found =
        own.ancestors().skip(1).take(2).map(|directory| directory.join(name)).find(|path| path.is_file());
    found.with_context(|| {
        format!("{name} is not built: run `cargo build --workspace --bins`, or use `cargo xtask`")
    })
}

/// Waits until `condition` gives a value, trying every 100 ms, or less often if to try takes long.
///
/// # Errors
/// The last error, when `timeout` ran out.
pub fn eventually<T>(timeout: Duration, mut condition: impl FnMut() -> Result<T>) -> Result<T> {
    let deadline = Instant::now() + timeout;
    loop {
        let asked = Instant::now();
        match condition() {
            Ok(value) => return Ok(value),
            Err(error) if Instant::now() > deadline => return Err(error),
            // What is expensive to ask (kubectl) is asked less often, or the asking keeps it from happening.
            Err(_) => thread::sleep(POLL_INTERVAL.max(asked.elapsed().saturating_mul(2))),
        }
    }
}
