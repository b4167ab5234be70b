//! A tracked connection as a value: decoded from what the kernel sends, encoded as what it takes (`linux/netfilter/nfnetlink_conntrack.h`).

use std::net::IpAddr;

use nix::libc;

use super::{
    DESTINATION_IPV4, DESTINATION_IPV6, FAMILY_HEADER, ID, PROTOCOL_STATE, PROTOCOL_STATE_TCP, SOURCE_IPV4,
    SOURCE_IPV6, STATUS, TCP_STATE, TUPLE_ADDRESSES, TUPLE_ORIGINAL, TUPLE_REPLY, end, header,
};
use crate::nftables::attributes::{AttributeWriter, Parsed, array, be32, find, require};

/// `CTA_TUPLE_PROTO`, and in it `CTA_PROTO_NUM`, `CTA_PROTO_SRC_PORT`, `CTA_PROTO_DST_PORT`.
const TUPLE_PROTOCOL: u16 = 2;
const PROTOCOL_NUMBER: u16 = 1;
const PORT_SOURCE: u16 = 2;
const PORT_DESTINATION: u16 = 3;
/// `CTA_PROTO_ICMP_ID`, `CTA_PROTO_ICMP_TYPE`, `CTA_PROTO_ICMP_CODE`; `CTA_PROTO_ICMPV6_ID` and so on are three more.
const ICMP: [u16; 3] = [4, 5, 6];
const ICMPV6: [u16; 3] = [7, 8, 9];
/// `CTA_NAT_SRC`, and in it `CTA_NAT_V4_MINIP`, `CTA_NAT_V6_MINIP`, `CTA_NAT_PROTO`. Without a maximum, the minimum is the maximum.
const NAT_SOURCE: u16 = 6;
const NAT_IPV4: u16 = 1;
const NAT_PORTS: u16 = 3;
const NAT_IPV6: u16 = 4;
/// `CTA_PROTONAT_PORT_MIN`.
const NAT_PORT: u16 = 1;
/// `CTA_TIMEOUT`, `CTA_MARK`, `CTA_COUNTERS_ORIG`, `CTA_COUNTERS_REPLY`, `CTA_ZONE`.
const TIMEOUT: u16 = 7;
const MARK: u16 = 8;
const COUNTERS: [u16; 2] = [9, 10];
const ZONE: u16 = 18;
/// `CTA_COUNTERS_PACKETS`, `CTA_COUNTERS_BYTES`.
const COUNTER_PACKETS: u16 = 1;
const COUNTER_BYTES: u16 = 2;
/// `CTA_PROTOINFO_TCP_WSCALE_ORIGINAL`, `…_REPLY`, `CTA_PROTOINFO_TCP_FLAGS_ORIGINAL`, `…_REPLY`.
const TCP_SCALES: [u16; 2] = [2, 3];
const TCP_FLAGS: [u16; 2] = [4, 5];
/// Flags that a new connection can be given: `IP_CT_TCP_FLAG_WINDOW_SCALE`, `_SACK_PERM`, `_CLOSE_INIT` and `_BE_LIBERAL`
/// (`linux/netfilter/nf_conntrack_tcp.h`). The others are about packets that this kernel has not seen.
const TCP_FLAGS_TAKEN: u8 = 0x0f;

/// `IPS_SEEN_REPLY`, `IPS_ASSURED`, `IPS_CONFIRMED`, `IPS_SRC_NAT`, `IPS_DST_NAT` (`linux/netfilter/nf_conntrack_common.h`).
pub const STATUS_SEEN_REPLY: u32 = 1 << 1;
/// See [`STATUS_SEEN_REPLY`].
pub const STATUS_ASSURED: u32 = 1 << 2;
/// See [`STATUS_SEEN_REPLY`].
pub const STATUS_CONFIRMED: u32 = 1 << 3;
/// See [`STATUS_SEEN_REPLY`].
pub const STATUS_SOURCE_TRANSLATED: u32 = 1 << 4;
/// See [`STATUS_SEEN_REPLY`].
pub const STATUS_DESTINATION_TRANSLATED: u32 = 1 << 5;
/// `IP_CT_TCP_FLAG_BE_LIBERAL`: packets outside of the window belong to the connection all the same.
pub const TCP_FLAG_LIBERAL: u8 = 0x08;

/// One direction of a connection. Ports are in host order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Tuple {
    /// IANA, "Protocol Numbers".
    pub protocol: u8,
    /// Source address.
    pub source: IpAddr,
    /// Destination address.
    pub destination: IpAddr,
    /// Ports, or the identifier, type and code of ICMP.
    pub ports: Ports,
}

/// Part of a packet that, besides addresses and protocol, tells its connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Ports {
    /// ICMP and ICMPv6: requests and their replies.
    Icmp {
        /// The identifier.
        id: u16,
        /// The type.
        kind: u8,
        /// The code.
        code: u8,
    },
    /// Nothing.
    None,
    /// TCP, UDP and other protocols with ports.
    Ports {
        /// Port of the sender.
        source: u16,
        /// Port of the receiver.
        destination: u16,
    },
}

/// State of a TCP connection; pairs are of the original direction, then of replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Tcp {
    /// `enum tcp_conntrack` (`linux/netfilter/nf_conntrack_tcp.h`).
    pub state: u8,
    /// Shifts of the windows (RFC 7323).
    pub scales: [u8; 2],
    /// `IP_CT_TCP_FLAG_…`.
    pub flags: [u8; 2],
}

/// Packets and bytes of one direction.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct FlowCounters {
    /// Packets.
    pub packets: u64,
    /// Bytes.
    pub bytes: u64,
}

/// A tracked connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Flow {
    /// The direction of its first packet, before any translation.
    pub original: Tuple,
    /// Direction of replies, before they are translated back.
    pub reply: Tuple,
    /// Zone of connection tracking; 0 unless rules set one.
    pub zone: u16,
    /// `enum ip_conntrack_status`, such as [`STATUS_ASSURED`].
    pub status: u32,
    /// State of TCP, if the message has it: notifications do when the state has changed.
    pub tcp: Option<Tcp>,
    /// Seconds until the kernel forgets it; notifications that it has ended have none.
    pub timeout: Option<u32>,
    /// The mark.
    pub mark: u32,
    /// Number that tells it from others that have the same tuples later.
    pub id: Option<u32>,
    /// Counters of the original direction and of replies, where the kernel counts (`net.netfilter.nf_conntrack_acct`).
    pub counters: Option<[FlowCounters; 2]>,
}

impl Tuple {
    /// Tuple of packets in the other direction, without translation. `None` for ICMP messages that have no reply.
    pub fn inverted(&self) -> Option<Self> {
        let ports = match self.ports {
            Ports::Icmp { id, kind, code } => {
                let kind = if self.source.is_ipv4() { icmp_reply(kind) } else { icmpv6_reply(kind) };
                Ports::Icmp { id, kind: kind?, code }
            }
            Ports::None => Ports::None,
            Ports::Ports { source, destination } => Ports::Ports { source: destination, destination: source },
        };
        Some(Self { source: self.destination, destination: self.source, ports, ..*self })
    }

    fn decode(tuple: &[u8]) -> Parsed<Self> {
        let address =
            |ipv4, ipv6| end(tuple, ipv4, ipv6).and_then(|it| it.ok_or("a tuple without an address"));
        let source = address(SOURCE_IPV4, SOURCE_IPV6)?;
        let destination = address(DESTINATION_IPV4, DESTINATION_IPV6)?;
        if source.is_ipv4() != destination.is_ipv4() {
            return Err("a tuple of two address families");
        }
        let inner = require(tuple, TUPLE_PROTOCOL)?;
        let [protocol] = array(require(inner, PROTOCOL_NUMBER)?)?;
        Ok(Self { protocol, source, destination, ports: ports(inner)? })
    }

    fn encode(&self, kind: u16, writer: &mut AttributeWriter) {
        writer.nested(kind, |tuple| {
            tuple.nested(TUPLE_ADDRESSES, |addresses| {
                address(addresses, [SOURCE_IPV4, SOURCE_IPV6], self.source);
                address(addresses, [DESTINATION_IPV4, DESTINATION_IPV6], self.destination);
            });
            tuple.nested(TUPLE_PROTOCOL, |inner| {
                inner.bytes(PROTOCOL_NUMBER, &[self.protocol]);
                match self.ports {
                    Ports::Icmp { id, kind, code } => {
                        let [id_attribute, kind_attribute, code_attribute] =
                            if self.source.is_ipv4() { ICMP } else { ICMPV6 };
                        inner.bytes(id_attribute, &id.to_be_bytes());
                        inner.bytes(kind_attribute, &[kind]);
                        inner.bytes(code_attribute, &[code]);
                    }
                    Ports::None => {}
                    Ports::Ports { source, destination } => {
                        inner.bytes(PORT_SOURCE, &source.to_be_bytes());
                        inner.bytes(PORT_DESTINATION, &destination.to_be_bytes());
                    }
                }
            });
        });
    }

    /// The port or identifier that packets of this direction are addressed to.
    pub fn destination_port(&self) -> Option<u16> {
        match self.ports {
            Ports::Icmp { id, .. } => Some(id),
            Ports::None => None,
            Ports::Ports { destination, .. } => Some(destination),
        }
    }
}

fn ports(inner: &[u8]) -> Parsed<Ports> {
    if let Some(source) = find(inner, PORT_SOURCE)? {
        let destination = be16(require(inner, PORT_DESTINATION)?)?;
        return Ok(Ports::Ports { source: be16(source)?, destination });
    }
    for [id, kind, code] in [ICMP, ICMPV6] {
        if let Some(id) = find(inner, id)? {
            let ([kind], [code]) = (array(require(inner, kind)?)?, array(require(inner, code)?)?);
            return Ok(Ports::Icmp { id: be16(id)?, kind, code });
        }
    }
    Ok(Ports::None)
}

/// Echo, timestamp, information, address mask (`invmap` in `nf_conntrack_proto_icmp.c`).
fn icmp_reply(kind: u8) -> Option<u8> {
    Some(match kind {
        0 => 8,
        8 => 0,
        13 | 15 | 17 => kind.saturating_add(1),
        14 | 16 | 18 => kind.saturating_sub(1),
        _ => return None,
    })
}

/// Echo, node information (`invmap` in `nf_conntrack_proto_icmpv6.c`).
fn icmpv6_reply(kind: u8) -> Option<u8> {
    Some(match kind {
        128 | 139 => kind.saturating_add(1),
        129 | 140 => kind.saturating_sub(1),
        _ => return None,
    })
}

fn be16(value: &[u8]) -> Parsed<u16> {
    array(value).map(u16::from_be_bytes)
}

fn address(writer: &mut AttributeWriter, [ipv4, ipv6]: [u16; 2], address: IpAddr) {
    match address {
        IpAddr::V4(address) => writer.bytes(ipv4, &address.octets()),
        IpAddr::V6(address) => writer.bytes(ipv6, &address.octets()),
    }
}

impl Flow {
    /// Reads the attributes of a connection, behind `struct nfgenmsg`.
    pub(crate) fn decode(attributes: &[u8]) -> Parsed<Self> {
        let number = |kind| find(attributes, kind).and_then(|value| value.map(be32).transpose());
        Ok(Self {
            original: Tuple::decode(require(attributes, TUPLE_ORIGINAL)?)?,
            reply: Tuple::decode(require(attributes, TUPLE_REPLY)?)?,
            zone: find(attributes, ZONE)?.map(be16).transpose()?.unwrap_or(0),
            status: number(STATUS)?.unwrap_or(0),
            tcp: tcp(attributes)?,
            timeout: number(TIMEOUT)?,
            mark: number(MARK)?.unwrap_or(0),
            id: number(ID)?,
            counters: counters(attributes)?,
        })
    }

    /// The connection as a message: what the kernel sends, apart from the counters. For [`Flow::decode`].
    #[cfg(test)]
    pub(crate) fn encode(&self) -> crate::Result<Vec<u8>> {
        let mut writer = AttributeWriter::new(&[]);
        self.original.encode(TUPLE_ORIGINAL, &mut writer);
        self.reply.encode(TUPLE_REPLY, &mut writer);
        self.encode_state(&mut writer);
        writer.bytes(ZONE, &self.zone.to_be_bytes());
        if let Some(id) = self.id {
            writer.be32(ID, id);
        }
        for (kind, it) in COUNTERS.into_iter().zip(self.counters.into_iter().flatten()) {
            writer.nested(kind, |inner| {
                inner.bytes(COUNTER_PACKETS, &it.packets.to_be_bytes());
                inner.bytes(COUNTER_BYTES, &it.bytes.to_be_bytes());
            });
        }
        writer.finish("encode a connection")
    }

    /// Encodes a connection that is not there yet for `IPCTNL_MSG_CT_NEW`. The kernel sets the bits of the status that say what is
    /// translated by itself, and only if it is told the replies without and the translation beside them.
    pub(super) fn encode_new(&self, what: &str) -> crate::Result<Vec<u8>> {
        let mut writer = AttributeWriter::new(&header(self.family()));
        self.original.encode(TUPLE_ORIGINAL, &mut writer);
        self.original.inverted().unwrap_or(self.reply).encode(TUPLE_REPLY, &mut writer);
        writer.nested(NAT_SOURCE, |nat| {
            address(nat, [NAT_IPV4, NAT_IPV6], self.reply.destination);
            if let Some(port) = self.reply.destination_port() {
                nat.nested(NAT_PORTS, |ports| ports.bytes(NAT_PORT, &port.to_be_bytes()));
            }
        });
        self.encode_state(&mut writer);
        self.encode_zone(&mut writer);
        writer.finish(what)
    }

    /// Encodes the changeable part of a connection that is there. The kernel finds it by its replies, so that one that only has the same
    /// original direction is left alone.
    pub(super) fn encode_update(&self, what: &str) -> crate::Result<Vec<u8>> {
        let mut writer = AttributeWriter::new(&header(self.family()));
        self.reply.encode(TUPLE_REPLY, &mut writer);
        self.encode_state(&mut writer);
        self.encode_zone(&mut writer);
        writer.finish(what)
    }

    /// Encodes a reference to a connection by one of its tuples.
    pub(super) fn encode_key(tuple: &Tuple, is_reply: bool, zone: u16, what: &str) -> crate::Result<Vec<u8>> {
        let family = if tuple.source.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
        let mut writer = AttributeWriter::new(&header(family as u8));
        tuple.encode(if is_reply { TUPLE_REPLY } else { TUPLE_ORIGINAL }, &mut writer);
        if zone != 0 {
            writer.bytes(ZONE, &zone.to_be_bytes());
        }
        writer.finish(what)
    }

    fn encode_state(&self, writer: &mut AttributeWriter) {
        writer.be32(STATUS, self.status);
        if let Some(timeout) = self.timeout {
            writer.be32(TIMEOUT, timeout);
        }
        if self.mark != 0 {
            writer.be32(MARK, self.mark);
        }
        let Some(tcp) = self.tcp else { return };
        writer.nested(PROTOCOL_STATE, |info| {
            info.nested(PROTOCOL_STATE_TCP, |inner| {
                inner.bytes(TCP_STATE, &[tcp.state]);
                for (kind, scale) in TCP_SCALES.into_iter().zip(tcp.scales) {
                    inner.bytes(kind, &[scale]);
                }
                for (kind, flags) in TCP_FLAGS.into_iter().zip(tcp.flags) {
                    // struct nf_ct_tcp_flags: the flags, and which of them are meant.
                    inner.bytes(kind, &[flags, TCP_FLAGS_TAKEN]);
                }
            });
        });
    }

    fn encode_zone(&self, writer: &mut AttributeWriter) {
        if self.zone != 0 {
            writer.bytes(ZONE, &self.zone.to_be_bytes());
        }
    }

    fn family(&self) -> u8 {
        (if self.original.source.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 }) as u8
    }
}

fn tcp(attributes: &[u8]) -> Parsed<Option<Tcp>> {
    let Some(info) = find(attributes, PROTOCOL_STATE)? else { return Ok(None) };
    let Some(inner) = find(info, PROTOCOL_STATE_TCP)? else { return Ok(None) };
    let [state] = array(require(inner, TCP_STATE)?)?;
    let mut tcp = Tcp { state, ..Tcp::default() };
    for (kind, scale) in TCP_SCALES.into_iter().zip(&mut tcp.scales) {
        if let Some(value) = find(inner, kind)? {
            [*scale] = array(value)?;
        }
    }
    for (kind, flags) in TCP_FLAGS.into_iter().zip(&mut tcp.flags) {
        if let Some(value) = find(inner, kind)? {
            [*flags, _] = array(value)?;
        }
    }
    Ok(Some(tcp))
}

fn counters(attributes: &[u8]) -> Parsed<Option<[FlowCounters; 2]>> {
    let of = |kind| -> Parsed<Option<FlowCounters>> {
        let Some(inner) = find(attributes, kind)? else { return Ok(None) };
        let number = |kind| require(inner, kind).and_then(array).map(u64::from_be_bytes);
        Ok(Some(FlowCounters { packets: number(COUNTER_PACKETS)?, bytes: number(COUNTER_BYTES)? }))
    };
    let [original, reply] = COUNTERS;
    Ok(of(original)?.zip(of(reply)?).map(|(original, reply)| [original, reply]))
}

/// The attributes behind `struct nfgenmsg`.
pub(super) fn behind_header(payload: &[u8]) -> &[u8] {
    payload.get(FAMILY_HEADER..).unwrap_or_default()
}
