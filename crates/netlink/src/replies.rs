//! The decoders of the kernel's replies without a socket, for bytes of another origin: fuzz targets and recorded replies. Programs use the typed calls of the other modules.

use fairlead_address::IpFamily;

use crate::nftables::{dump, elements, timed};
use crate::{conntrack, route, wireguard};

/// Kind of reply that bytes are read as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReplyKind {
    /// Frames with their headers, as a subscription to links, addresses, routes and rules receives them.
    Changes,
    /// The attributes of a chain, behind `struct nfgenmsg`.
    Chain,
    /// The attributes of a list of set elements.
    Elements,
    /// The attributes of a rule of a chain.
    Rule,
    /// The attributes of a set.
    Set,
    /// A message of `WG_CMD_GET_DEVICE`, behind the netlink header.
    WireGuardDevice,
    /// A message of `RTM_NEWTFILTER`, behind the netlink header.
    Filter,
    /// The attributes of a tracked connection, behind `struct nfgenmsg`.
    Connection,
    /// Frames with their headers, as a subscription to connections receives them.
    ConnectionEvents,
    /// The attributes of the statistics of connection tracking on a CPU, behind `struct nfgenmsg`.
    ConnectionStatistics,
}

impl ReplyKind {
    /// All kinds, in an order that does not change: corpora name them by position.
    pub const ALL: [Self; 10] = [
        Self::Changes,
        Self::Chain,
        Self::Elements,
        Self::Rule,
        Self::Set,
        Self::WireGuardDevice,
        Self::Filter,
        Self::Connection,
        Self::ConnectionEvents,
        Self::ConnectionStatistics,
    ];
}

/// Decodes bytes and returns the number of objects in them.
///
/// # Errors
/// A text that says what is wrong with the bytes.
pub fn read(kind: ReplyKind, bytes: &[u8]) -> Result<usize, String> {
    match kind {
        ReplyKind::Changes => route::count_changes(bytes).map_err(|error| error.to_string()),
        ReplyKind::Connection => {
            conntrack::live_source(bytes).map(|source| usize::from(source.is_some())).map_err(str::to_owned)
        }
        ReplyKind::ConnectionEvents => conntrack::count_events(bytes).map_err(|error| error.to_string()),
        ReplyKind::ConnectionStatistics => conntrack::of_cpu(bytes).map(|_| 1).map_err(str::to_owned),
        ReplyKind::Filter => route::count_filters(bytes).map_err(str::to_owned),
        ReplyKind::WireGuardDevice => wireguard::count_peers(bytes).map_err(str::to_owned),
        ReplyKind::Chain => flag(dump::parse_chain(bytes, TABLE)),
        ReplyKind::Elements => Ok(elements_in(bytes)),
        ReplyKind::Rule => flag(dump::parse_rule(bytes, TABLE)),
        ReplyKind::Set => flag(dump::parse_set(bytes, TABLE)),
    }
}

/// The name that corpora use.
const TABLE: &str = "t";

fn flag<T>(parsed: Result<Option<T>, &str>) -> Result<usize, String> {
    parsed.map(|found| usize::from(found.is_some())).map_err(str::to_owned)
}

fn elements_in(bytes: &[u8]) -> usize {
    let mut count = 0usize;
    for family in [IpFamily::V4, IpFamily::V6] {
        let mut found = Vec::new();
        if dump::parse_elements(bytes, family, &mut found).is_ok() {
            count = count.saturating_add(found.len());
            elements::parse(family, found);
        }
        drop(timed::parse(bytes, family));
    }
    count
}
