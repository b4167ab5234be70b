//! nftables: one table of family `inet` with interval sets, sets of addresses that vanish after a time, maps of endpoints, base chains and rules (`linux/netfilter/nf_tables.h`).
//!
//! A [`Table`] is the desired state, [`read`] returns a [`TableState`], the actual one; both have a [`TableShape`]
//! (everything but the sets' elements), so that comparing is `==`. [`create`], [`delete`] and [`change_elements`] make
//! the messages and [`commit`] sends them as one transaction: all or nothing, and packets never see an intermediate state.
//!
//! The kernel does not dump a rule in the form in which it was added, so each rule carries a fingerprint of its expressions
//! as user data. `nft` ignores it when it prints a rule and drops it when it replaces one.

use std::collections::BTreeMap;
use std::net::SocketAddrV4;

use fairlead_address::{IntervalSet, IpFamily};
use nix::libc;

use crate::{Message, Result, Socket};

pub(crate) mod attributes;
mod dump;
mod elements;
mod endpoints;
mod expression;
pub mod foreign;
mod messages;
mod operands;
mod timed;

pub(crate) use dump::count;
pub use dump::{RuleTraffic, counters, exists, generation, read};
pub use elements::{Difference, Elements};
pub use expression::Expression;
pub use messages::{change_elements, change_map, create, delete};
pub use operands::{
    AddressEnd, CONNECTION_ORIGINAL, CONNECTION_REPLY, COUNTED_ADDRESSES, Comparison, DestinationType,
    Header, Meta, STATE_INVALID, STATE_NEW, TCP_MAXIMUM_SEGMENT, TcpOption,
};
pub use timed::{TimedSet, read_timed, replace_timed};

/// What a map has: a port for each IPv4 address and port (`ipv4_addr . inet_service : inet_service`). It takes up to
/// 16,384 elements; the kernel refuses more.
pub type EndpointMap = BTreeMap<SocketAddrV4, u16>;

/// A whole table of family `inet`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// Its name.
    pub name: String,
    /// Its sets by name.
    pub sets: BTreeMap<String, IntervalSet>,
    /// Its sets of addresses that vanish after a time, by name. What they have is no part of [`TableState`]: it changes by itself.
    pub timed: BTreeMap<String, TimedSet>,
    /// Its maps by name; sets and maps share one name space.
    pub maps: BTreeMap<String, EndpointMap>,
    /// Its chains by name.
    pub chains: BTreeMap<String, Chain>,
}

/// A base chain, policy accept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Chain {
    /// Type and hook.
    pub hook: Hook,
    /// Order among the chains of the hook; lower is earlier.
    pub priority: i32,
    /// In order.
    pub rules: Vec<Rule>,
}

/// Where a chain sees packets, and what changing them there means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hook {
    /// `type filter hook forward`: packets that pass through this host.
    FilterForward,
    /// `type filter hook input`: packets for this host, after they were routed.
    FilterInput,
    /// `type filter hook output`: packets of this host.
    FilterOutput,
    /// `type filter hook prerouting`: packets that came in, before they are routed.
    FilterPrerouting,
    /// `type filter hook postrouting`: packets that leave.
    FilterPostrouting,
    /// `type nat hook postrouting`: the first packet of each connection that leaves.
    NatPostrouting,
    /// `type route hook output`: packets of this host; they are routed again when their mark changes.
    RouteOutput,
}

impl Hook {
    const fn kind(self) -> &'static str {
        match self {
            Self::FilterForward
            | Self::FilterInput
            | Self::FilterOutput
            | Self::FilterPostrouting
            | Self::FilterPrerouting => "filter",
            Self::NatPostrouting => "nat",
            Self::RouteOutput => "route",
        }
    }

    /// `NF_INET_PRE_ROUTING`, `NF_INET_LOCAL_IN`, `NF_INET_FORWARD`, `NF_INET_LOCAL_OUT`, `NF_INET_POST_ROUTING`
    const fn number(self) -> u32 {
        match self {
            Self::FilterForward => 2,
            Self::FilterInput => 1,
            Self::FilterOutput => 3,
            Self::FilterPrerouting => 0,
            Self::FilterPostrouting | Self::NatPostrouting => 4,
            Self::RouteOutput => 3,
        }
    }
}

/// Expressions that are tried in order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Rule(pub Vec<Expression>);

impl Rule {
    /// Identifies the rule's expressions: FNV-1a over what is sent, so that any change of it is noticed.
    pub fn fingerprint(&self) -> u64 {
        let mut list = attributes::AttributeWriter::new(&[]);
        for expression in &self.0 {
            expression.write(&mut list);
        }
        // An expression that is too long is reported when the rule is sent.
        let bytes = list.finish("fingerprint a rule").unwrap_or_default();
        bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash: u64, byte| {
            (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
        })
    }
}

/// Everything of a table but its elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableShape {
    /// `enum nft_table_flags`; not zero means that the table is dormant or owned by a process.
    pub flags: u32,
    /// Sets and maps by name.
    pub sets: BTreeMap<String, SetShape>,
    /// Chains by name.
    pub chains: BTreeMap<String, ChainShape>,
}

/// What a set holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SetShape {
    /// An [`EndpointMap`].
    Endpoints,
    /// The connections of addresses: [`Expression::ConnectionsOver`].
    Connections(IpFamily),
    /// Intervals of addresses.
    Intervals(IpFamily),
    /// Addresses, each for a time.
    Timed(IpFamily),
    /// Something this module does not make.
    Foreign,
}

/// The properties of a chain that identify it as ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ChainShape {
    /// `None` for a chain without a hook.
    pub base: Option<BaseShape>,
    /// One per rule, in order; `None` for a rule without our fingerprint.
    pub rules: Vec<Option<u64>>,
}

/// How a base chain is hooked in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BaseShape {
    /// `filter`, `route` or `nat`.
    pub kind: String,
    /// `enum nf_inet_hooks`
    pub hook: u32,
    /// Order in the hook.
    pub priority: i32,
    /// Verdict at its end: `NF_DROP` 0, `NF_ACCEPT` 1.
    pub policy: u32,
}

/// A table as the kernel has it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableState {
    /// Everything but the elements.
    pub shape: TableShape,
    /// What the interval sets hold, by name.
    pub sets: BTreeMap<String, Elements>,
    /// What the maps have, by name.
    pub maps: BTreeMap<String, EndpointMap>,
}

impl From<Table> for TableState {
    /// What [`read`] reports once the table is created.
    fn from(table: Table) -> Self {
        let shape = table.shape();
        let sets = table.sets.into_iter().map(|(name, set)| (name, set.into())).collect();
        Self { shape, sets, maps: table.maps }
    }
}

impl Table {
    /// The sets in which rules count connections.
    fn counted_sets(&self) -> BTreeMap<&str, IpFamily> {
        let rules = self.chains.values().flat_map(|chain| &chain.rules);
        let counted = |expression| match expression {
            &Expression::ConnectionsOver { ref set, family, .. } => Some((set.as_str(), family)),
            _ => None,
        };
        rules.flat_map(|rule| &rule.0).filter_map(counted).collect()
    }

    /// What [`read`] reports once the table is in place.
    pub fn shape(&self) -> TableShape {
        let chain = |chain: &Chain| ChainShape {
            base: Some(BaseShape {
                kind: chain.hook.kind().to_owned(),
                hook: chain.hook.number(),
                priority: chain.priority,
                policy: NF_ACCEPT,
            }),
            rules: chain.rules.iter().map(|rule| Some(rule.fingerprint())).collect(),
        };
        let sets = self.sets.iter().map(|(name, set)| (name.clone(), SetShape::Intervals(set.family())));
        let timed = self.timed.iter().map(|(name, set)| (name.clone(), SetShape::Timed(set.family)));
        let maps = self.maps.keys().map(|name| (name.clone(), SetShape::Endpoints));
        let counted = self.counted_sets().into_iter();
        let counted = counted.map(|(name, family)| (name.to_owned(), SetShape::Connections(family)));
        TableShape {
            flags: 0,
            sets: sets.chain(timed).chain(maps).chain(counted).collect(),
            chains: self.chains.iter().map(|(name, made)| (name.clone(), chain(made))).collect(),
        }
    }
}

/// Sends the messages as one transaction; nothing at all if there are none.
///
/// # Errors
/// The kernel's first refusal, with the message and its object; then nothing was changed.
pub fn commit(socket: &mut Socket, messages: &[Message]) -> Result<()> {
    let limit = |kind: i32, what: &str| Message {
        kind: kind as u16,
        flags: 0,
        payload: messages::family_header(libc::AF_UNSPEC as u8, libc::NFNL_SUBSYS_NFTABLES as u16),
        what: what.to_owned(),
    };
    let begin = limit(libc::NFNL_MSG_BATCH_BEGIN, "begin the nftables transaction");
    let end = limit(libc::NFNL_MSG_BATCH_END, "commit the nftables transaction");
    socket.transaction(&begin, messages, &end)
}

/// `NF_ACCEPT`
const NF_ACCEPT: u32 = 1;
/// `NFPROTO_INET`: both address families in one table.
const NFPROTO_INET: u8 = 1;
/// `NFT_SET_INTERVAL`
const SET_INTERVAL: u32 = 4;
/// `NFT_SET_EVAL`: rules add elements.
const SET_DYNAMIC: u32 = 0x20;
/// `NFT_SET_MAP`
const SET_MAP: u32 = 8;
/// `NFT_SET_TIMEOUT`
const SET_TIMEOUT: u32 = 16;
/// `NFT_SET_ELEM_INTERVAL_END`
const ELEMENT_INTERVAL_END: u32 = 1;

/// `NFTA_TABLE_*`
mod table {
    pub(super) const NAME: u16 = 1;
    pub(super) const FLAGS: u16 = 2;
}

/// `NFTA_CHAIN_*` and `NFTA_HOOK_*`
mod chain {
    pub(super) const TABLE: u16 = 1;
    pub(super) const NAME: u16 = 3;
    pub(super) const HOOK: u16 = 4;
    pub(super) const POLICY: u16 = 5;
    pub(super) const TYPE: u16 = 7;
    pub(super) const HOOK_NUMBER: u16 = 1;
    pub(super) const HOOK_PRIORITY: u16 = 2;
}

/// `NFTA_RULE_*`
mod rule {
    pub(super) const TABLE: u16 = 1;
    pub(super) const CHAIN: u16 = 2;
    pub(super) const EXPRESSIONS: u16 = 4;
    pub(super) const USERDATA: u16 = 7;
    /// `NFTA_EXPR_NAME`, `NFTA_EXPR_DATA`
    pub(super) const EXPRESSION_NAME: u16 = 1;
    pub(super) const EXPRESSION_DATA: u16 = 2;
    /// `NFTA_COUNTER_BYTES`, `NFTA_COUNTER_PACKETS`
    pub(super) const COUNTER_BYTES: u16 = 1;
    pub(super) const COUNTER_PACKETS: u16 = 2;
    /// Type of our own entry in the user data (type, length, value, a byte each but the value). `nft` knows 0, the
    /// comment, and 1 and passes over all others.
    pub(super) const USERDATA_FINGERPRINT: u8 = 0xfa;
}

/// `NFTA_SET_*`
mod set {
    pub(super) const TABLE: u16 = 1;
    pub(super) const NAME: u16 = 2;
    pub(super) const FLAGS: u16 = 3;
    pub(super) const KEY_TYPE: u16 = 4;
    pub(super) const KEY_LENGTH: u16 = 5;
    pub(super) const DATA_TYPE: u16 = 6;
    pub(super) const DATA_LENGTH: u16 = 7;
    pub(super) const DESCRIPTION: u16 = 9;
    /// In a description: `NFTA_SET_DESC_SIZE`
    pub(super) const SIZE: u16 = 1;
    pub(super) const ID: u16 = 10;
}

/// `NFTA_SET_ELEM_LIST_*` and `NFTA_SET_ELEM_*`
mod element {
    pub(super) const LIST_TABLE: u16 = 1;
    pub(super) const LIST_SET: u16 = 2;
    pub(super) const LIST_ELEMENTS: u16 = 3;
    pub(super) const LIST_ELEMENT: u16 = 1;
    pub(super) const KEY: u16 = 1;
    pub(super) const DATA: u16 = 2;
    pub(super) const FLAGS: u16 = 3;
    /// In milliseconds: how long an element stays in all, and from now on.
    pub(super) const TIMEOUT: u16 = 4;
    pub(super) const EXPIRATION: u16 = 5;
    pub(super) const DATA_VALUE: u16 = 1;
}
