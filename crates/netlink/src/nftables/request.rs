//! Single messages to the kernel, and what its replies begin with.

use nix::libc;

use super::attributes::{AttributeWriter, Parsed};
use super::uapi::NFPROTO_INET;
use crate::{Message, Reply, Result};

/// `struct nfgenmsg` in bytes.
const FAMILY_HEADER: usize = 4;

/// `struct nfgenmsg`; `resource` is the number of the subsystem in batch limits and zero elsewhere.
pub(super) fn family_header(family: u8, resource: u16) -> Vec<u8> {
    let [high, low] = resource.to_be_bytes();
    vec![family, libc::NFNETLINK_V0 as u8, high, low]
}

/// `nlmsg_type` of an nftables message.
pub(super) const fn kind(message: i32) -> u16 {
    (libc::NFNL_SUBSYS_NFTABLES << 8 | message) as u16
}

/// A message about a table of family `inet`.
pub(super) fn message(
    number: i32,
    flags: i32,
    what: String,
    write: impl FnOnce(&mut AttributeWriter),
) -> Result<Message> {
    let mut writer = AttributeWriter::new(&family_header(NFPROTO_INET, 0));
    write(&mut writer);
    Ok(Message { kind: kind(number), flags: flags as u16, payload: writer.finish(&what)?, what })
}

/// A request that changes nothing.
pub(super) fn request(number: i32, what: &str, write: impl FnOnce(&mut AttributeWriter)) -> Result<Message> {
    message(number, 0, what.to_owned(), write)
}

/// Part of a reply behind the family's header.
pub(super) fn body(reply: &Reply) -> Parsed<&[u8]> {
    reply.payload.get(FAMILY_HEADER..).ok_or("a truncated message")
}
