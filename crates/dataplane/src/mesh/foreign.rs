//! Rules of other programs that work against the mesh, of routing and of nftables.

use std::fmt;

use super::foreign_packets::ForeignPacketRule;
use super::foreign_rules::ForeignRule;

/// A rule of another program. `Display` is a sentence for status and Events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Foreign {
    /// A rule of nftables.
    Packets(Box<ForeignPacketRule>),
    /// A rule of routing.
    Routing(Box<ForeignRule>),
}

impl Foreign {
    /// All words that [`Self::reason`] may be.
    pub const REASONS: [&'static str; 4] = [
        ForeignPacketRule::MARK,
        ForeignPacketRule::PORT_TRANSLATION,
        ForeignRule::REASON,
        ForeignPacketRule::SOURCE_CHECK,
    ];

    /// One word for conditions, Events and metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::Packets(rule) => rule.reason(),
            Self::Routing(_) => ForeignRule::REASON,
        }
    }
}

impl fmt::Display for Foreign {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Packets(rule) => rule.fmt(f),
            Self::Routing(rule) => rule.fmt(f),
        }
    }
}
