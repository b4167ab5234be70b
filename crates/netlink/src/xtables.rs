//! The forward chain of the older iptables: `iptables-legacy` keeps tables of its own, which nftables does not show
//! (`linux/netfilter_ipv4/ip_tables.h`, `linux/netfilter_ipv6/ip6_tables.h`, `linux/netfilter/x_tables.h`). Only read here: changing one
//! rule means replacing the whole table, which is `iptables`' own business.

use std::io;
use std::os::fd::{AsRawFd, OwnedFd};

use fairlead_address::IpFamily;
use nix::libc;
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socket};

use crate::{Error, Result};

/// `IPT_SO_GET_INFO`, `IPT_SO_GET_ENTRIES`; the same numbers for IPv6.
const GET_INFO: libc::c_int = 64;
const GET_ENTRIES: libc::c_int = 65;
/// `XT_TABLE_MAXNAMELEN`
const TABLE_NAME: usize = 32;
/// `struct ipt_getinfo`: name, hooks, `hook_entry` (5), `underflow` (5), count, size.
const INFO: usize = 84;
const INFO_HOOK_ENTRY: usize = 36;
const INFO_UNDERFLOW: usize = 56;
const INFO_SIZE: usize = 80;
/// `struct ipt_get_entries` before its entries.
const ENTRIES_HEADER: usize = 40;
/// `NF_INET_FORWARD`
const FORWARD: usize = 2;
/// `struct xt_entry_match` and `xt_entry_target` before their data: size, name, revision.
const PART_HEADER: usize = 32;
/// Largest table that is read.
const MAX_SIZE: usize = 64 << 20;
/// Verdicts of the standard target: `-NF_DROP - 1`, `-NF_ACCEPT - 1`.
const DROP: i32 = -1;
const ACCEPT: i32 = -2;

/// The forward chain of iptables-legacy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LegacyForward {
    /// Whether its policy is to drop.
    pub drops: bool,
    /// Whether one of its rules accepts each packet with the bits of the mark.
    pub accepts_mark: bool,
}

/// Offsets and sizes in an entry, in bytes, and the numbers and files of a family.
struct Layout {
    level: libc::c_int,
    /// `ip` or `ipv6`: what precedes the other fields.
    conditions: usize,
    target_offset: usize,
    /// Size of `struct ipt_entry`.
    entry: usize,
    names: &'static str,
}

const fn layout(family: IpFamily) -> Layout {
    match family {
        IpFamily::V4 => Layout {
            level: libc::IPPROTO_IP,
            conditions: 84,
            target_offset: 88,
            entry: 112,
            names: "/proc/net/ip_tables_names",
        },
        IpFamily::V6 => Layout {
            level: libc::IPPROTO_IPV6,
            conditions: 136,
            target_offset: 140,
            entry: 168,
            names: "/proc/net/ip6_tables_names",
        },
    }
}

/// The forward chain of table `filter`, in the network namespace of the calling thread; `None` if there is no such table. Nothing is
/// loaded or made by asking.
///
/// # Errors
/// The kernel refuses, or what it answers cannot be read.
pub fn legacy_forward(family: IpFamily, mark: u32) -> Result<Option<LegacyForward>> {
    let layout = layout(family);
    // Asking for a table that is not there would make it. The path is that of the thread: others may be in other namespaces.
    let names = layout.names.replace("/proc/net", "/proc/thread-self/net");
    let names = std::fs::read_to_string(names).unwrap_or_default();
    if !names.lines().any(|name| name == "filter") {
        return Ok(None);
    }
    let domain = match family {
        IpFamily::V4 => AddressFamily::Inet,
        IpFamily::V6 => AddressFamily::Inet6,
    };
    let socket = socket(domain, SockType::Raw, SockFlag::SOCK_CLOEXEC, raw_protocol())
        .map_err(|errno| Error::Socket { operation: "open a raw", source: errno.into() })?;
    let read = |option, buffer: &mut [u8]| {
        option_of(&socket, layout.level, option, buffer)
            .map_err(|source| Error::Socket { operation: "read the iptables rules by a", source })
    };
    let mut info = table_name(INFO);
    read(GET_INFO, &mut info)?;
    let malformed = || Error::Malformed {
        what: format!("read table filter of iptables-legacy, {family}"),
        reason: "an entry is truncated".to_owned(),
    };
    let size = number(&info, INFO_SIZE).filter(|size| *size <= MAX_SIZE).ok_or_else(malformed)?;
    let mut entries = table_name(ENTRIES_HEADER.saturating_add(size));
    if let Some(field) = entries.get_mut(TABLE_NAME..TABLE_NAME.saturating_add(4)) {
        field.copy_from_slice(&u32::try_from(size).unwrap_or_default().to_ne_bytes());
    }
    read(GET_ENTRIES, &mut entries)?;
    let entries = entries.get(ENTRIES_HEADER..).unwrap_or_default();
    let of_hook = |field: usize| number(&info, field.saturating_add(FORWARD.saturating_mul(4)));
    let chain = (of_hook(INFO_HOOK_ENTRY), of_hook(INFO_UNDERFLOW));
    let (Some(first), Some(policy)) = chain else { return Err(malformed()) };
    parse(&layout, entries, first, policy, mark).map(Some).ok_or_else(malformed)
}

/// `None` selects none of them: `IPPROTO_RAW`, with which nothing is received.
fn raw_protocol() -> Option<nix::sys::socket::SockProtocol> {
    Some(nix::sys::socket::SockProtocol::Raw)
}

fn table_name(size: usize) -> Vec<u8> {
    let mut buffer = b"filter".to_vec();
    buffer.resize(size, 0);
    buffer
}

#[expect(unsafe_code, reason = "nix has no wrapper for the options of iptables")]
fn option_of(socket: &OwnedFd, level: libc::c_int, option: libc::c_int, buffer: &mut [u8]) -> io::Result<()> {
    let mut length = libc::socklen_t::try_from(buffer.len()).unwrap_or(libc::socklen_t::MAX);
    // SAFETY: the kernel writes at most `length` bytes, which is the length of `buffer`; both outlive the call.
    let done = unsafe {
        libc::getsockopt(socket.as_raw_fd(), level, option, buffer.as_mut_ptr().cast(), &raw mut length)
    };
    if done == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

fn bytes<const N: usize>(buffer: &[u8], at: usize) -> Option<[u8; N]> {
    buffer.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn number(buffer: &[u8], at: usize) -> Option<usize> {
    usize::try_from(u32::from_ne_bytes(bytes(buffer, at)?)).ok()
}

/// `first` is where the chain begins, `policy` its last entry.
fn parse(layout: &Layout, entries: &[u8], first: usize, policy: usize, mark: u32) -> Option<LegacyForward> {
    let drops = target(layout, entries.get(policy..)?)? == Target::Verdict(DROP);
    let mut at = first;
    let mut accepts_mark = false;
    while at < policy {
        let entry = entries.get(at..)?;
        accepts_mark |=
            target(layout, entry)? == Target::Verdict(ACCEPT) && is_for_mark(layout, entry, mark)?;
        let length = usize::from(u16::from_ne_bytes(bytes(entry, layout.target_offset.checked_add(2)?)?));
        if length == 0 {
            return None;
        }
        at = at.checked_add(length)?;
    }
    Some(LegacyForward { drops, accepts_mark })
}

fn target_offset(layout: &Layout, entry: &[u8]) -> Option<usize> {
    bytes(entry, layout.target_offset).map(u16::from_ne_bytes).map(usize::from)
}

/// Target of an entry.
#[derive(PartialEq, Eq)]
enum Target {
    Other,
    /// Verdict of the standard target, whose name is empty.
    Verdict(i32),
}

fn target(layout: &Layout, entry: &[u8]) -> Option<Target> {
    let target = entry.get(target_offset(layout, entry)?..)?;
    let verdict = i32::from_ne_bytes(bytes(target, PART_HEADER)?);
    Some(if *target.get(2)? == 0 { Target::Verdict(verdict) } else { Target::Other })
}

/// Whether the mark is the entry's only condition.
fn is_for_mark(layout: &Layout, entry: &[u8], mark: u32) -> Option<bool> {
    let has_conditions = entry.get(..layout.conditions)?.iter().any(|byte| *byte != 0);
    let mut matches = entry.get(layout.entry..target_offset(layout, entry)?)?;
    let wanted = [mark.to_ne_bytes().as_slice(), &mark.to_ne_bytes(), &[0]].concat();
    let mut is_marked = false;
    while !matches.is_empty() {
        let length = usize::from(u16::from_ne_bytes(bytes(matches, 0)?));
        let name = matches.get(2..PART_HEADER.checked_sub(1)?)?.split(|byte| *byte == 0).next()?;
        let data = matches.get(PART_HEADER..length)?;
        match name {
            b"comment" => {}
            b"mark" if data.starts_with(&wanted) => is_marked = true,
            _ => return Some(false),
        }
        matches = matches.get(length..)?;
    }
    Some(is_marked && !has_conditions)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn garbage_is_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..600), first in 0usize..200, policy in 0usize..400) {
            for family in [IpFamily::V4, IpFamily::V6] {
                let _ = parse(&layout(family), &bytes, first, policy, 0x10);
            }
        }
    }
}
