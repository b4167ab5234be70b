//! nftables tables and their sets, as desired and as read from the kernel.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddrV4};
use std::time::Duration;

use fairlead_address::{IntervalSet, IpFamily};

use super::attributes::AttributeWriter;
use super::elements::Elements;
use super::expression::Expression;
use super::uapi::NF_ACCEPT;

/// Elements of a map: a port for each IPv4 address and port (`ipv4_addr . inet_service : inet_service`). It takes up to
/// 16,384 elements; the kernel refuses more.
pub type EndpointMap = BTreeMap<SocketAddrV4, u16>;

/// A whole table of family `inet`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Table {
    /// Name of the table.
    pub name: String,
    /// Interval sets by name.
    pub sets: BTreeMap<String, IntervalSet>,
    /// Sets of addresses that vanish after a time, by name. Their elements are no part of [`TableState`]: they change by themselves.
    pub timed: BTreeMap<String, TimedSet>,
    /// Maps by name; sets and maps share one name space.
    pub maps: BTreeMap<String, EndpointMap>,
    /// Chains by name.
    pub chains: BTreeMap<String, Chain>,
}

/// The addresses of a set, each of which vanishes after its time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TimedSet {
    /// Family of all addresses; others are left out.
    pub family: IpFamily,
    /// Time from now for which each address is in the set, in whole milliseconds.
    pub addresses: BTreeMap<IpAddr, Duration>,
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

/// Hook of a chain: where it sees packets, and what changing them there means.
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
    pub(super) const fn kind(self) -> &'static str {
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
    pub(super) const fn number(self) -> u32 {
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
        let mut list = AttributeWriter::new(&[]);
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

/// Type of the elements of a set or map.
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

/// Hook, priority and policy of a base chain.
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
    /// Elements of the interval sets, by name.
    pub sets: BTreeMap<String, Elements>,
    /// Elements of the maps, by name.
    pub maps: BTreeMap<String, EndpointMap>,
}

impl From<Table> for TableState {
    /// State that [`read`](super::read) reports once the table is created.
    fn from(table: Table) -> Self {
        let shape = table.shape();
        let sets = table.sets.into_iter().map(|(name, set)| (name, set.into())).collect();
        Self { shape, sets, maps: table.maps }
    }
}

impl Table {
    /// The sets in which rules count connections.
    pub(super) fn counted_sets(&self) -> BTreeMap<&str, IpFamily> {
        let rules = self.chains.values().flat_map(|chain| &chain.rules);
        let counted = |expression| match expression {
            &Expression::ConnectionsOver { ref set, family, .. } => Some((set.as_str(), family)),
            _ => None,
        };
        rules.flat_map(|rule| &rule.0).filter_map(counted).collect()
    }

    /// Shape that [`read`](super::read) reports once the table is in place.
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
