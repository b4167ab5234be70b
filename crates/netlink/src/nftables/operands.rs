//! Operands of the steps of a rule: properties and headers of packets, ends of addresses, comparisons.

/// A property of a packet that is not in its bytes (`enum nft_meta_keys`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Meta {
    /// Name of the incoming interface, 16 bytes filled up with zeros.
    InputInterface,
    /// Group of the incoming interface, four bytes in host order.
    InputInterfaceGroup,
    /// The packet mark, four bytes in host order.
    Mark,
    /// Name of the outgoing interface, 16 bytes filled up with zeros.
    OutputInterface,
    /// Group of the outgoing interface, four bytes in host order.
    OutputInterfaceGroup,
    /// Index of the outgoing interface, four bytes in host order.
    OutputInterfaceIndex,
    /// `NFPROTO_IPV4` or `NFPROTO_IPV6`, one byte.
    NetworkProtocol,
    /// `IPPROTO_*`, one byte.
    TransportProtocol,
}

impl Meta {
    pub(super) const fn number(self) -> u32 {
        match self {
            Self::InputInterface => 6,
            Self::InputInterfaceGroup => 21,
            Self::Mark => 3,
            Self::OutputInterface => 7,
            Self::OutputInterfaceGroup => 22,
            Self::OutputInterfaceIndex => 5,
            Self::NetworkProtocol => 15,
            Self::TransportProtocol => 16,
        }
    }
}

/// Header from which a payload's offset counts (`enum nft_payload_bases`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Header {
    /// The IP header.
    Network,
    /// The TCP or UDP header.
    Transport,
}

impl Header {
    pub(super) const fn number(self) -> u32 {
        match self {
            Self::Network => 1,
            Self::Transport => 2,
        }
    }
}

/// Type of the destination address, or of the source, for this host (`enum nft_fib_result`, `linux/rtnetlink.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DestinationType {
    /// `RTN_LOCAL`: an address of this host.
    Local,
}

impl DestinationType {
    /// As [`super::Expression::LoadDestinationType`] and [`super::Expression::LoadSourceType`] load it.
    pub const fn number(self) -> u32 {
        match self {
            Self::Local => 2,
        }
    }
}

/// An address in the IP header (RFC 791, section 3.1; RFC 8200, section 3).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AddressEnd {
    /// Destination of the packet.
    Destination,
    /// Source of the packet.
    Source,
}

/// Comparison of a register: byte by byte, so greater and less are meaningful for network order only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Comparison {
    /// `NFT_CMP_GTE`
    AtLeast,
    /// `NFT_CMP_LTE`
    AtMost,
    /// `NFT_CMP_EQ`
    Equal,
    /// `NFT_CMP_GT`
    Greater,
    /// `NFT_CMP_LT`
    Less,
    /// `NFT_CMP_NEQ`
    NotEqual,
}

impl Comparison {
    pub(super) const fn number(self) -> u32 {
        match self {
            Self::AtLeast => 5,
            Self::AtMost => 3,
            Self::Equal => 0,
            Self::Greater => 4,
            Self::Less => 2,
            Self::NotEqual => 1,
        }
    }

    pub(super) const fn of(number: u32) -> Option<Self> {
        Some(match number {
            0 => Self::Equal,
            1 => Self::NotEqual,
            2 => Self::Less,
            3 => Self::AtMost,
            4 => Self::Greater,
            5 => Self::AtLeast,
            _ => return None,
        })
    }
}

/// A field of a TCP option (RFC 9293, section 3.1): offset and length count from the option's kind byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TcpOption {
    /// The option's kind.
    pub kind: u8,
    /// First byte of the field.
    pub offset: u32,
    /// Bytes of the field.
    pub length: u32,
}

/// Maximum segment size (kind 2), in bytes, network order.
pub const TCP_MAXIMUM_SEGMENT: TcpOption = TcpOption { kind: 2, offset: 2, length: 2 };

/// Bit of [`super::Expression::LoadConnectionState`]: the packet cannot belong to any connection (`NF_CT_STATE_INVALID_BIT`,
/// `linux/netfilter/nf_conntrack_common.h`).
pub const STATE_INVALID: u32 = 1;
/// The same: the packet begins a connection (`NF_CT_STATE_BIT(IP_CT_NEW)`).
pub const STATE_NEW: u32 = 8;

/// `IP_CT_DIR_ORIGINAL` (`linux/netfilter/nf_conntrack_tuple_common.h`)
pub const CONNECTION_ORIGINAL: u8 = 0;
/// `IP_CT_DIR_REPLY` (`linux/netfilter/nf_conntrack_tuple_common.h`)
pub const CONNECTION_REPLY: u8 = 1;

/// Most addresses in a set of [`super::Expression::ConnectionsOver`].
pub const COUNTED_ADDRESSES: u32 = 65_536;
