//! DEL while the node program is away: written down, to be finished by it later.
//!
//! A runtime repeats a DEL that fails only so often, and some never; what nobody finishes leaks an address. The plugin
//! could remove the link itself, but not free the address, and a link that vanishes under a node program that is
//! starting would confuse the two. So it leaves a note beside the socket and reports success; the node program removes
//! link and address, before it serves anything else and every few seconds after that.

use std::fs::{DirBuilder, File};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use fairlead_wire::spool;

/// Writes down that this attachment is to be removed. One that can never have been made needs no note.
///
/// # Errors
/// The note cannot be written; the DEL must fail then, so that the runtime repeats it.
pub fn note(socket: &str, container_id: &str, ifname: &str) -> std::io::Result<()> {
    let Some(name) = spool::file_name(container_id, ifname) else { return Ok(()) };
    let directory = spool::pending_deletions(Path::new(socket));
    DirBuilder::new().recursive(true).mode(0o700).create(&directory)?;
    File::create(directory.join(name)).map(drop)
}
