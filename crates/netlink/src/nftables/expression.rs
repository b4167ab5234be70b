//! Steps of a rule, through one register (`linux/netfilter/nf_tables.h`, `enum nft_*_attributes`).

use std::net::IpAddr;

use fairlead_address::{IpFamily, octets};

use super::attributes::AttributeWriter;
use super::operands::{
    AddressEnd, CONNECTION_ORIGINAL, Comparison, DestinationType, Header, Meta, TcpOption,
};

/// `NFT_REG_1`: 16 bytes, enough for everything here.
const REGISTER: u32 = 1;
/// `NFT_REG32_01`: its second four bytes.
const SECOND_REGISTER: u32 = 9;
/// `NFT_REG_VERDICT`
const VERDICT_REGISTER: u32 = 0;
/// `NF_DROP`
const DROP: u32 = 0;
/// `NF_ACCEPT`
const ACCEPT: u32 = 1;
/// `NFPROTO_IPV4`, `NFPROTO_IPV6` (`linux/netfilter.h`)
const PROTOCOL_IPV4: u8 = 2;
const PROTOCOL_IPV6: u8 = 10;
/// `NFT_EXTHDR_OP_TCPOPT`
const TCP_OPTION: u32 = 1;
/// `NFT_PAYLOAD_CSUM_INET`
const CHECKSUM_INTERNET: u32 = 1;
/// `NFT_FIB_RESULT_ADDRTYPE`
const FIB_RESULT_ADDRESS_TYPE: u32 = 3;
/// `NFTA_FIB_F_DADDR`
const FIB_BY_DESTINATION: u32 = 2;
/// `NFTA_FIB_F_SADDR`
const FIB_BY_SOURCE: u32 = 1;
/// `NFT_FIB_RESULT_OIF`
const FIB_RESULT_INTERFACE: u32 = 1;
/// `NFTA_FIB_F_SADDR | NFTA_FIB_F_IIF | NFTA_FIB_F_PRESENT`
const FIB_SOURCE_BY_INPUT: u32 = 1 | 8 | 32;
/// `NFT_CT_STATE`
const CONNECTION_STATE: u32 = 0;
/// `NFT_CT_DIRECTION`
const CONNECTION_DIRECTION: u32 = 1;
/// `NFT_CT_MARK`
const CONNECTION_MARK: u32 = 3;
/// `NFT_CT_DST_IP`, `NFT_CT_DST_IP6`
const CONNECTION_DESTINATION_IPV4: u32 = 20;
const CONNECTION_DESTINATION_IPV6: u32 = 22;
/// `NFT_RT_TCPMSS`
const ROUTE_TCP_MSS: u32 = 3;
/// `NFT_BYTEORDER_HTON`
const HOST_TO_NETWORK: u32 = 1;
/// `NFT_LOOKUP_F_INV`
const LOOKUP_INVERTED: u32 = 1;
/// `NFT_NAT_SNAT`
const NAT_SOURCE: u32 = 0;
/// `NF_NAT_RANGE_PROTO_RANDOM_FULLY` (`linux/netfilter/nf_nat.h`)
const NAT_RANDOM_FULLY: u32 = 0x10;
/// `NFT_DYNSET_OP_ADD`
const ADD_TO_SET: u32 = 0;
/// `NFT_CONNLIMIT_F_INV`: more than so many, instead of at most.
const CONNLIMIT_INVERTED: u32 = 1;
/// `NFT_REJECT_ICMPX_UNREACH`: ICMP or ICMPv6, as the packet is.
const REJECT_BY_ICMP: u32 = 2;
/// `NFT_REJECT_ICMPX_ADMIN_PROHIBITED`
const ADMIN_PROHIBITED: u8 = 3;
/// `IFNAMSIZ`: interface names are compared with their zeros.
const INTERFACE_NAME: usize = 16;

/// One step of a rule. A comparison or lookup that fails ends the rule.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Expression {
    /// Loads a property.
    LoadMeta(Meta),
    /// Sets a property to what was loaded.
    StoreMeta(Meta),
    /// Loads bytes of the packet.
    LoadPayload {
        /// Header from which `offset` counts.
        header: Header,
        /// First byte.
        offset: u32,
        /// Number of bytes, at most 16.
        length: u32,
    },
    /// Loads a port of the UDP or TCP header behind the IPv4 address that was loaded: the key of an
    /// [`EndpointMap`](super::EndpointMap).
    LoadPortBehind {
        /// First byte of the port in the header.
        offset: u32,
    },
    /// Overwrites bytes of the packet with what was loaded.
    StorePayload {
        /// Header from which `offset` counts.
        header: Header,
        /// First byte.
        offset: u32,
        /// Number of bytes, as many as were loaded.
        length: u32,
        /// Offset in the same header of the Internet checksum (RFC 1071) over these bytes; the kernel repairs it, unless the
        /// network card is yet to compute it.
        checksum: Option<u32>,
    },
    /// Loads the direction of the packet in its connection, one byte: [`CONNECTION_REPLY`] if it is an answer, [`CONNECTION_ORIGINAL`] if
    /// not. Ends the rule for packets that the kernel does not track.
    LoadConnectionDirection,
    /// Loads the address to which the packet's connection was opened, before any translation, of a packet that is known to be of this family.
    /// Ends the rule for packets that the kernel does not track, and for connections of the other family.
    LoadConnectionDestination(IpFamily),
    /// Loads the state of the packet's connection, four bytes in host order: one of [`STATE_INVALID`], [`STATE_NEW`] and others.
    LoadConnectionState,
    /// Loads the mark of the packet's connection, four bytes in host order. Ends the rule for packets that the kernel does not track.
    LoadConnectionMark,
    /// Sets the mark of the packet's connection to what was loaded.
    StoreConnectionMark,
    /// Loads the TCP segment size, two bytes in host order, that the path MTU leaves on the routes to the packet's destination
    /// and to its source. Ends the rule where there is no route.
    LoadRouteSegment,
    /// Brings two bytes from host to network order.
    ToNetworkOrder,
    /// Loads a [`DestinationType`], four bytes in host order, by looking the packet's destination up.
    LoadDestinationType,
    /// Loads the same of the packet's source.
    LoadSourceType,
    /// Loads whether the packet came in by the interface that a route leads to its source (RFC 3704, section 2.2): four bytes,
    /// zero if not. Always 1 for sources of neighbour discovery that have no route.
    LoadSourceIsReachable,
    /// Loads a field of a TCP option; ends the rule if the packet lacks the option.
    LoadTcpOption(TcpOption),
    /// Overwrites a field of a TCP option with what was loaded; the kernel repairs the checksum.
    StoreTcpOption(TcpOption),
    /// Loads these bytes.
    LoadConstant(Vec<u8>),
    /// `(loaded & mask) ^ xor`, for two values of the same length.
    Bitwise {
        /// Bits to keep.
        mask: Vec<u8>,
        /// Bits to flip then.
        xor: Vec<u8>,
    },
    /// Continues if the comparison of what was loaded with these bytes holds.
    Compare(Comparison, Vec<u8>),
    /// Continues if what was loaded is in this set of the same table.
    Lookup(String),
    /// Continues if what was loaded is not in this set of the same table.
    LookupAbsent(String),
    /// Loads what this map of the same table has for what was loaded; ends the rule if it has nothing.
    LookupMap(String),
    /// Counts the connection of the packet among those of the address that was loaded, and continues if these are more than `most`.
    /// Connections that end are no longer counted. For packets that begin one: of others each would be looked up among all of the
    /// address. The table has the set because this names it; it holds up to [`COUNTED_ADDRESSES`], and more are not limited.
    ConnectionsOver {
        /// Name of the set, which is for this alone.
        set: String,
        /// Family of the address.
        family: IpFamily,
        /// Most connections that do not end the rule.
        most: u32,
    },
    /// Ends the chain, drops the packet and tells its source so by ICMP: communication is administratively prohibited (RFC 1812 section 5.2.7.1,
    /// RFC 4443 section 3.1).
    Reject,
    /// Ends the chain and lets the packet pass.
    Accept,
    /// Counts packets and bytes.
    Counter,
    /// Ends the chain and drops the packet.
    Drop,
    /// Translates the connection's source to the address of this family that was loaded, and a random port. Only in a chain of
    /// [`Hook::NatPostrouting`](super::Hook::NatPostrouting).
    SourceNat(IpFamily),
    /// Translates the connection's source to the address of the outgoing interface and a random port. Only in a chain of
    /// [`Hook::NatPostrouting`](super::Hook::NatPostrouting).
    Masquerade,
}

impl Expression {
    /// Keeps the bits of `mask` of a number in host order and sets those of `value`: `(x & mask) | value`.
    pub fn replace_bits(mask: u32, value: u32) -> Self {
        // The kernel can only flip: bits to be set must be cleared first.
        Self::Bitwise { mask: (mask & !value).to_ne_bytes().to_vec(), xor: value.to_ne_bytes().to_vec() }
    }

    /// Continues if the bits of the mask in the packet's mark have this value.
    pub fn mark_is(value: u32, mask: u32) -> Vec<Self> {
        let masked = (mask != u32::MAX).then(|| Self::replace_bits(mask, 0));
        let is_equal = Self::Compare(Comparison::Equal, value.to_ne_bytes().to_vec());
        [Self::LoadMeta(Meta::Mark)].into_iter().chain(masked).chain([is_equal]).collect()
    }

    /// Keeps the bits of the mask in the packet's mark and sets those of the value.
    pub fn replace_mark(mask: u32, value: u32) -> [Self; 3] {
        [Self::LoadMeta(Meta::Mark), Self::replace_bits(mask, value), Self::StoreMeta(Meta::Mark)]
    }

    /// Continues if the packet's source is an address of this host.
    pub fn source_is_local() -> [Self; 2] {
        [Self::LoadSourceType, Self::is_local_type()]
    }

    /// Continues if the packet's destination is an address of this host.
    pub fn destination_is_local() -> [Self; 2] {
        [Self::LoadDestinationType, Self::is_local_type()]
    }

    fn is_local_type() -> Self {
        Self::Compare(Comparison::Equal, DestinationType::Local.number().to_ne_bytes().to_vec())
    }

    /// Continues if the state of the packet in its connection has this bit, such as [`super::STATE_INVALID`].
    pub fn state_has(bit: u32) -> [Self; 3] {
        let bytes = bit.to_ne_bytes().to_vec();
        [
            Self::LoadConnectionState,
            Self::Bitwise { mask: bytes.clone(), xor: vec![0; bytes.len()] },
            Self::Compare(Comparison::Equal, bytes),
        ]
    }

    /// Continues if an address of the packet is in a set of the same table; packets of the other family do not.
    pub fn address_in(family: IpFamily, end: AddressEnd, set: &str) -> Vec<Self> {
        vec![
            Self::LoadMeta(Meta::NetworkProtocol),
            Self::is_protocol(family),
            Self::load_address(family, end),
            Self::Lookup(set.to_owned()),
        ]
    }

    /// Continues if an address of the packet is this one.
    pub fn address_is(end: AddressEnd, address: IpAddr) -> Vec<Self> {
        let family = IpFamily::of(address);
        vec![
            Self::LoadMeta(Meta::NetworkProtocol),
            Self::is_protocol(family),
            Self::load_address(family, end),
            Self::Compare(Comparison::Equal, octets(address)),
        ]
    }

    /// Loads an address of a packet that is known to be of this family.
    pub fn load_address(family: IpFamily, end: AddressEnd) -> Self {
        let (offset, length) = match (family, end) {
            (IpFamily::V4, AddressEnd::Source) => (12, 4),
            (IpFamily::V4, AddressEnd::Destination) => (16, 4),
            (IpFamily::V6, AddressEnd::Source) => (8, 16),
            (IpFamily::V6, AddressEnd::Destination) => (24, 16),
        };
        Self::LoadPayload { header: Header::Network, offset, length }
    }

    /// Continues if the network protocol was loaded and is this family.
    pub fn is_protocol(family: IpFamily) -> Self {
        Self::Compare(Comparison::Equal, vec![protocol(family)])
    }

    /// Compares with an interface's whole name.
    pub fn is_interface(name: &str) -> Self {
        Self::Compare(Comparison::Equal, interface_name(name))
    }

    /// Continues if an interface's name was loaded and is another one.
    pub fn is_other_interface(name: &str) -> Self {
        Self::Compare(Comparison::NotEqual, interface_name(name))
    }

    /// Writes the list element `NFTA_LIST_ELEM` with this expression.
    pub(super) fn write(&self, list: &mut AttributeWriter) {
        const LIST_ELEMENT: u16 = 1;
        list.nested(LIST_ELEMENT, |element| {
            element.text(EXPRESSION_NAME, self.name());
            element.nested(EXPRESSION_DATA, |data| self.write_data(data));
        });
    }

    const fn name(&self) -> &'static str {
        match self {
            Self::LoadMeta(_) | Self::StoreMeta(_) => "meta",
            Self::LoadPayload { .. } | Self::LoadPortBehind { .. } | Self::StorePayload { .. } => "payload",
            Self::LoadConnectionDestination(_)
            | Self::LoadConnectionDirection
            | Self::LoadConnectionMark
            | Self::LoadConnectionState
            | Self::StoreConnectionMark => "ct",
            Self::LoadRouteSegment => "rt",
            Self::ToNetworkOrder => "byteorder",
            Self::LoadDestinationType | Self::LoadSourceIsReachable | Self::LoadSourceType => "fib",
            Self::LoadTcpOption(_) | Self::StoreTcpOption(_) => "exthdr",
            Self::LoadConstant(_) | Self::Accept | Self::Drop => "immediate",
            Self::ConnectionsOver { .. } => "dynset",
            Self::Reject => "reject",
            Self::Counter => "counter",
            Self::Masquerade => "masq",
            Self::SourceNat(_) => "nat",
            Self::Bitwise { .. } => "bitwise",
            Self::Compare(..) => "cmp",
            Self::Lookup(_) | Self::LookupAbsent(_) | Self::LookupMap(_) => "lookup",
        }
    }

    fn write_data(&self, data: &mut AttributeWriter) {
        match self {
            Self::LoadMeta(key) => data.be32s(&[(2, key.number()), (1, REGISTER)]),
            Self::StoreMeta(key) => data.be32s(&[(2, key.number()), (3, REGISTER)]),
            Self::LoadPayload { header, offset, length } => {
                data.be32s(&[(1, REGISTER), (2, header.number()), (3, *offset), (4, *length)])
            }
            Self::LoadPortBehind { offset } => {
                data.be32s(&[(1, SECOND_REGISTER), (2, Header::Transport.number()), (3, *offset), (4, 2)])
            }
            Self::StorePayload { header, offset, length, checksum } => {
                data.be32(5, REGISTER);
                data.be32(2, header.number());
                data.be32(3, *offset);
                data.be32(4, *length);
                if let Some(checksum) = checksum {
                    data.be32(6, CHECKSUM_INTERNET);
                    data.be32(7, *checksum);
                }
            }
            Self::LoadConnectionDestination(family) => {
                let key = match family {
                    IpFamily::V4 => CONNECTION_DESTINATION_IPV4,
                    IpFamily::V6 => CONNECTION_DESTINATION_IPV6,
                };
                data.be32s(&[(1, REGISTER), (2, key)]);
                data.bytes(3, &[CONNECTION_ORIGINAL]);
            }
            Self::LoadConnectionDirection => data.be32s(&[(1, REGISTER), (2, CONNECTION_DIRECTION)]),
            Self::LoadConnectionMark => data.be32s(&[(1, REGISTER), (2, CONNECTION_MARK)]),
            Self::LoadConnectionState => data.be32s(&[(1, REGISTER), (2, CONNECTION_STATE)]),
            Self::StoreConnectionMark => data.be32s(&[(2, CONNECTION_MARK), (4, REGISTER)]),
            Self::LoadRouteSegment => data.be32s(&[(1, REGISTER), (2, ROUTE_TCP_MSS)]),
            Self::ToNetworkOrder => {
                data.be32s(&[(1, REGISTER), (2, REGISTER), (3, HOST_TO_NETWORK), (4, 2), (5, 2)])
            }
            Self::LoadDestinationType => {
                data.be32s(&[(1, REGISTER), (2, FIB_RESULT_ADDRESS_TYPE), (3, FIB_BY_DESTINATION)])
            }
            Self::LoadSourceType => {
                data.be32s(&[(1, REGISTER), (2, FIB_RESULT_ADDRESS_TYPE), (3, FIB_BY_SOURCE)])
            }
            Self::LoadSourceIsReachable => {
                data.be32s(&[(1, REGISTER), (2, FIB_RESULT_INTERFACE), (3, FIB_SOURCE_BY_INPUT)])
            }
            Self::LoadTcpOption(option) => write_tcp_option(data, 1, *option),
            Self::StoreTcpOption(option) => write_tcp_option(data, 7, *option),
            Self::LoadConstant(bytes) => {
                data.be32(1, REGISTER);
                data.nested(2, |immediate| immediate.bytes(DATA_VALUE, bytes));
            }
            Self::Bitwise { mask, xor } => {
                data.be32(1, REGISTER);
                data.be32(2, REGISTER);
                data.be32(3, u32::try_from(mask.len()).unwrap_or(u32::MAX));
                data.nested(4, |value| value.bytes(DATA_VALUE, mask));
                data.nested(5, |value| value.bytes(DATA_VALUE, xor));
            }
            Self::Compare(comparison, bytes) => {
                data.be32(1, REGISTER);
                data.be32(2, comparison.number());
                data.nested(3, |value| value.bytes(DATA_VALUE, bytes));
            }
            Self::Lookup(set) => {
                data.text(1, set);
                data.be32(2, REGISTER);
            }
            Self::LookupAbsent(set) => {
                data.text(1, set);
                data.be32(2, REGISTER);
                data.be32(5, LOOKUP_INVERTED);
            }
            Self::LookupMap(map) => {
                data.text(1, map);
                data.be32(2, REGISTER);
                data.be32(3, REGISTER);
            }
            Self::ConnectionsOver { set, most, .. } => {
                data.text(1, set);
                data.be32(3, ADD_TO_SET);
                data.be32(4, REGISTER);
                data.nested(7, |limit| {
                    limit.text(EXPRESSION_NAME, "connlimit");
                    limit.nested(EXPRESSION_DATA, |data| {
                        data.be32(1, *most);
                        data.be32(2, CONNLIMIT_INVERTED);
                    });
                });
            }
            Self::Reject => {
                data.be32(1, REJECT_BY_ICMP);
                data.bytes(2, &[ADMIN_PROHIBITED]);
            }
            Self::Accept => write_verdict(data, ACCEPT),
            // It begins at zero.
            Self::Counter => {}
            Self::Drop => write_verdict(data, DROP),
            Self::Masquerade => data.be32(1, NAT_RANDOM_FULLY),
            Self::SourceNat(family) => data.be32s(&[
                (1, NAT_SOURCE),
                (2, u32::from(protocol(*family))),
                (3, REGISTER),
                (7, NAT_RANDOM_FULLY),
            ]),
        }
    }
}

/// Name as the kernel compares it, filled up with zeros.
fn interface_name(name: &str) -> Vec<u8> {
    let mut bytes: Vec<u8> = name.bytes().take(INTERFACE_NAME.saturating_sub(1)).collect();
    bytes.resize(INTERFACE_NAME, 0);
    bytes
}

/// `NFTA_EXPR_NAME`, `NFTA_EXPR_DATA`
const EXPRESSION_NAME: u16 = 1;
const EXPRESSION_DATA: u16 = 2;
const fn protocol(family: IpFamily) -> u8 {
    match family {
        IpFamily::V4 => PROTOCOL_IPV4,
        IpFamily::V6 => PROTOCOL_IPV6,
    }
}

/// `NFTA_DATA_VALUE`
const DATA_VALUE: u16 = 1;
/// `NFTA_DATA_VERDICT`
const DATA_VERDICT: u16 = 2;

fn write_verdict(data: &mut AttributeWriter, verdict: u32) {
    data.be32(1, VERDICT_REGISTER);
    data.nested(2, |immediate| immediate.nested(DATA_VERDICT, |code| code.be32(1, verdict)));
}

/// `register` is `NFTA_EXTHDR_DREG` to read, `NFTA_EXTHDR_SREG` to write.
fn write_tcp_option(data: &mut AttributeWriter, register: u16, option: TcpOption) {
    data.be32(register, REGISTER);
    data.bytes(2, &[option.kind]);
    data.be32s(&[(3, option.offset), (4, option.length), (6, TCP_OPTION)]);
}
