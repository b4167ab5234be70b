//! DEL while the node program does not answer: left in a file, for the node program to finish.
//!
//! Some runtimes do not repeat a DEL that failed; its address would leak. The plugin cannot release the address, and a link
//! that it removed itself could vanish while a starting node program adopts it. So it writes a file beside the socket and
//! reports success; the node program removes link and address before it serves other calls, and every few seconds after.

use std::fs::{DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use fairlead_wire::spool;

/// Leaves the DEL of this attachment for the node program. One with invalid names was never attached and needs none.
///
/// # Errors
/// The file cannot be written; the DEL must fail then, so that the runtime repeats it.
pub fn write(socket: &str, container_id: &str, ifname: &str) -> std::io::Result<()> {
    let Some(name) = spool::file_name(container_id, ifname) else { return Ok(()) };
    let directory = spool::pending_deletions(Path::new(socket));
    DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
    File::create(directory.join(name)).map(drop)
}
