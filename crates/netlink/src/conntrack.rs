//! Connection tracking (`linux/netfilter/nfnetlink_conntrack.h`): which connections of this network namespace are alive, and those whose
//! source should have been translated. [`ConnectionEvents`] says what happens to connections, as it happens; [`ConnectionTable`] lists,
//! adds, changes and deletes them.

mod events;
mod flow;
mod statistics;
mod table;
#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use nix::libc;

use crate::nftables::attributes::{AttributeWriter, Parsed, array, explain, find, require};
use crate::{Family, Message, Result, Socket};

pub use events::{ConnectionEvent, ConnectionEvents};
pub use flow::{
    Flow, FlowCounters, Ports, STATUS_ASSURED, STATUS_CONFIRMED, STATUS_DESTINATION_TRANSLATED,
    STATUS_SEEN_REPLY, STATUS_SOURCE_TRANSLATED, TCP_FLAG_LIBERAL, Tcp, Tuple,
};
pub use statistics::{Statistics, statistics};
pub use table::{ConnectionTable, TableChange};

pub(crate) use events::count_events;
pub(crate) use statistics::of_cpu;

/// `IPCTNL_MSG_CT_NEW`, `IPCTNL_MSG_CT_GET`, `IPCTNL_MSG_CT_DELETE`
const NEW: i32 = 0;
const GET: i32 = 1;
const DELETE: i32 = 2;
/// `struct nfgenmsg` in bytes.
const FAMILY_HEADER: usize = 4;
/// `CTA_TUPLE_ORIG`, `CTA_TUPLE_REPLY`, `CTA_TUPLE_IP`, `CTA_IP_V4_SRC`, `CTA_IP_V4_DST`, `CTA_IP_V6_SRC`, `CTA_IP_V6_DST`
const TUPLE_ORIGINAL: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const TUPLE_ADDRESSES: u16 = 1;
const SOURCE_IPV4: u16 = 1;
const DESTINATION_IPV4: u16 = 2;
const SOURCE_IPV6: u16 = 3;
const DESTINATION_IPV6: u16 = 4;
/// `CTA_STATUS`, `CTA_STATUS_MASK`
const STATUS: u16 = 3;
const STATUS_MASK: u16 = 26;
/// `CTA_ID`
const ID: u16 = 12;
/// `CTA_PROTOINFO`, `CTA_PROTOINFO_TCP`, `CTA_PROTOINFO_TCP_STATE`
const PROTOCOL_STATE: u16 = 4;
const PROTOCOL_STATE_TCP: u16 = 1;
const TCP_STATE: u16 = 1;
/// `TCP_CONNTRACK_TIME_WAIT`, `TCP_CONNTRACK_CLOSE` (`linux/netfilter/nf_conntrack_tcp.h`)
const TCP_ENDED: [u8; 2] = [7, 8];

/// Number of connections that each host has opened, by their original sources. TCP connections that have ended and only wait to be forgotten
/// are left out, and those that are translated to one of the addresses `except`. The answer is as large as the table: some 250 bytes for
/// each connection.
///
/// # Errors
/// The kernel refuses (no `CONFIG_NF_CT_NETLINK`, no CAP_NET_ADMIN), or its answer cannot be decoded.
pub fn connections_by_source(except: &BTreeSet<IpAddr>) -> Result<BTreeMap<IpAddr, usize>> {
    let request = message(GET, header(libc::AF_UNSPEC as u8).to_vec(), "list tracked connections");
    let mut found = BTreeMap::new();
    for reply in Socket::open(Family::Netfilter)?.dump(&request)? {
        let attributes = reply.payload.get(FAMILY_HEADER..).unwrap_or_default();
        let is_left_out = !except.is_empty()
            && explain(&request.what, replies_to(attributes))?.is_some_and(|it| except.contains(&it));
        let source = explain(&request.what, live_source(attributes))?;
        if let Some(source) = source.filter(|_| !is_left_out) {
            let count: &mut usize = found.entry(source).or_default();
            *count = count.saturating_add(1);
        }
    }
    Ok(found)
}

/// Forgets the connections that these hosts have opened and whose source is not translated, and returns their number. Rules of nat chains
/// see only the first packet of a connection, so those that were opened while the chain was missing would never be translated.
///
/// # Errors
/// As [`connections_by_source`].
pub fn forget_untranslated(sources: &BTreeSet<IpAddr>) -> Result<usize> {
    let what = "list connections without translation";
    // Kernels before 5.15 list all of them.
    let mut filter = AttributeWriter::new(&header(libc::AF_UNSPEC as u8));
    filter.be32(STATUS, 0);
    filter.be32(STATUS_MASK, STATUS_SOURCE_TRANSLATED);
    let request = message(GET, filter.finish(what)?, what);
    let mut socket = Socket::open(Family::Netfilter)?;
    let mut messages = Vec::new();
    for reply in socket.dump(&request)? {
        let Some((family, attributes)) = reply.payload.split_first() else { continue };
        let attributes = attributes.get(FAMILY_HEADER.saturating_sub(1)..).unwrap_or_default();
        let source = explain(what, untranslated_source(attributes))?;
        if source.is_some_and(|source| sources.contains(&source)) {
            messages.push(forget(*family, attributes)?);
        }
    }
    let mut forgotten = 0usize;
    for outcome in socket.change_each(&messages)? {
        match outcome {
            Ok(()) => forgotten = forgotten.saturating_add(1),
            Err(error) if error.is_missing() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(forgotten)
}

/// Deletes a connection, by its tuple and, should another have the tuple by now, by its ID.
fn forget(family: u8, connection: &[u8]) -> Result<Message> {
    let what = "forget a connection without translation";
    let mut writer = AttributeWriter::new(&header(family));
    let tuple = explain(what, require(connection, TUPLE_ORIGINAL))?;
    writer.nested(TUPLE_ORIGINAL, |inner| inner.raw(tuple));
    if let Some(id) = explain(what, find(connection, ID))? {
        writer.bytes(ID, id);
    }
    Ok(message(DELETE, writer.finish(what)?, what))
}

/// `struct nfgenmsg`.
fn header(family: u8) -> [u8; FAMILY_HEADER] {
    [family, libc::NFNETLINK_V0 as u8, 0, 0]
}

fn message(kind: i32, payload: Vec<u8>, what: &str) -> Message {
    let kind = (libc::NFNL_SUBSYS_CTNETLINK << 8 | kind) as u16;
    Message { kind, flags: 0, payload, what: what.to_owned() }
}

/// The original source of a connection that replies are addressed to as well.
pub(crate) fn untranslated_source(connection: &[u8]) -> Parsed<Option<IpAddr>> {
    let source = end(require(connection, TUPLE_ORIGINAL)?, SOURCE_IPV4, SOURCE_IPV6)?;
    let replies_to = replies_to(connection)?;
    Ok(source.filter(|source| replies_to == Some(*source)))
}

/// Address that replies are sent to.
fn replies_to(connection: &[u8]) -> Parsed<Option<IpAddr>> {
    end(require(connection, TUPLE_REPLY)?, DESTINATION_IPV4, DESTINATION_IPV6)
}

/// The address of one end of a tuple.
fn end(tuple: &[u8], ipv4: u16, ipv6: u16) -> Parsed<Option<IpAddr>> {
    let addresses = require(tuple, TUPLE_ADDRESSES)?;
    if let Some(address) = find(addresses, ipv4)? {
        return array::<4>(address).map(|octets| Some(octets.into()));
    }
    find(addresses, ipv6)?.map(|address| array::<16>(address).map(IpAddr::from)).transpose()
}

/// The original source of a connection that is alive.
pub(crate) fn live_source(connection: &[u8]) -> Parsed<Option<IpAddr>> {
    let state = match find(connection, PROTOCOL_STATE)? {
        Some(state) => {
            find(state, PROTOCOL_STATE_TCP)?.map(|tcp| find(tcp, TCP_STATE)).transpose()?.flatten()
        }
        None => None,
    };
    if state.and_then(|state| state.first()).is_some_and(|state| TCP_ENDED.contains(state)) {
        return Ok(None);
    }
    end(require(connection, TUPLE_ORIGINAL)?, SOURCE_IPV4, SOURCE_IPV6)
}
