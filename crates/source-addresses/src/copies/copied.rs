//! Parts of a tracked connection that are copied to other gateways, and their form on the wire.

use std::net::IpAddr;

use fairlead_netlink::conntrack::{
    Flow, Ports, STATUS_ASSURED, STATUS_CONFIRMED, STATUS_DESTINATION_TRANSLATED, STATUS_SEEN_REPLY,
    STATUS_SOURCE_TRANSLATED, TCP_FLAG_LIBERAL, Tcp, Tuple,
};
use fairlead_wire::egress::octets;
use fairlead_wire::egress_peers as wire;

/// Protocols whose connections are copied: ICMP, TCP, UDP, ICMPv6 (IANA, "Protocol Numbers").
const ICMP: u8 = 1;
const TCP: u8 = 6;
const UDP: u8 = 17;
const ICMPV6: u8 = 58;
/// `TCP_CONNTRACK_ESTABLISHED` to `TCP_CONNTRACK_LAST_ACK` (`linux/netfilter/nf_conntrack_tcp.h`). Before, the client repeats its SYN;
/// after, both ends have sent all.
const TCP_ALIVE: std::ops::RangeInclusive<u8> = 3..=6;
/// The largest shift of a window (RFC 7323, section 2.3).
const MAX_SCALE: u8 = 14;
/// `IP_CT_TCP_FLAG_WINDOW_SCALE`, `IP_CT_TCP_FLAG_SACK_PERM`, `IP_CT_TCP_FLAG_CLOSE_INIT`.
const TCP_FLAGS: u8 = 0x07;
/// Seconds that a copy lasts in the kernel: that of TCP as long as the kernel keeps an idle connection. Others get no packet there that would
/// renew them, so that it is longer than [`REFRESH`](super::incoming::REFRESH).
const MAX_TIMEOUT: u32 = 432_000;
const MIN_TIMEOUT: u32 = 600;

/// Key of a connection of a client: its original direction, before translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// IANA, "Protocol Numbers".
    pub protocol: u8,
    /// Source of what the client sends.
    pub client: IpAddr,
    /// Destination of what the client sends.
    pub server: IpAddr,
    /// The client's port, or the identifier of ICMP.
    pub client_port: u16,
    /// The server's port, or the type of what the client sends.
    pub server_port: u16,
}

/// State of a connection that is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copied {
    /// Source address that the client's address is translated to: an address of a slot.
    pub source: IpAddr,
    /// Port of the translated source, or the identifier of ICMP.
    pub source_port: u16,
    /// Whether the server has answered.
    pub is_replied: bool,
    /// Whether the kernel keeps it when its table is full.
    pub is_assured: bool,
    /// Seconds until the holder's kernel forgets it.
    pub timeout: u32,
    /// State of TCP; only for connections of TCP.
    pub tcp: Option<Tcp>,
}

impl Copied {
    /// Whether the copies of others have to change for it.
    pub fn differs(&self, other: &Self) -> bool {
        let matters = |it: &Self| {
            (it.source, it.source_port, it.is_replied, it.is_assured, it.tcp.map(|tcp| tcp.state))
        };
        matters(self) != matters(other)
    }

    /// Whether both translate to the same.
    pub fn has_source_of(&self, other: &Self) -> bool {
        (self.source, self.source_port) == (other.source, other.source_port)
    }
}

/// Judgement whether a connection is copied.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Judged {
    /// One that is copied.
    Alive(Key, Copied),
    /// One that is not copied yet or any more.
    Ended(Key),
    /// One of TCP, of which the notification does not say its state: what is known of it stays.
    Unchanged(Key),
}

/// `None` for connections that are never copied: without a translated source, with a translated destination, of other protocols and zones.
pub fn judge(flow: &Flow) -> Option<Judged> {
    let is_ours = flow.status & STATUS_SOURCE_TRANSLATED != 0
        && flow.status & STATUS_DESTINATION_TRANSLATED == 0
        && flow.original.destination == flow.reply.source
        && flow.zone == 0;
    let (key, source_port) = is_ours.then(|| key(&flow.original).zip(flow.reply.destination_port()))??;
    let copied = Copied {
        source: flow.reply.destination,
        source_port,
        is_replied: flow.status & STATUS_SEEN_REPLY != 0,
        is_assured: flow.status & STATUS_ASSURED != 0,
        timeout: flow.timeout.unwrap_or_default(),
        tcp: flow.tcp,
    };
    Some(match flow.tcp {
        Some(tcp) if !TCP_ALIVE.contains(&tcp.state) => Judged::Ended(key),
        None if key.protocol == TCP => Judged::Unchanged(key),
        _ => Judged::Alive(key, copied),
    })
}

/// Key of the connection with this original direction; `None` if it is of a kind that is not copied.
pub fn key(original: &Tuple) -> Option<Key> {
    let (client_port, server_port) = match (original.protocol, original.ports) {
        (TCP | UDP, Ports::Ports { source, destination }) => (source, destination),
        (ICMP | ICMPV6, Ports::Icmp { id, kind, code: 0 }) => (id, kind.into()),
        _ => return None,
    };
    let Tuple { protocol, source: client, destination: server, .. } = *original;
    Some(Key { protocol, client, server, client_port, server_port })
}

impl Key {
    /// The direction from the client to the server.
    pub fn original(&self) -> Tuple {
        let Self { protocol, client, server, client_port, server_port } = *self;
        let ports = match protocol {
            // What was received has such a type.
            ICMP | ICMPV6 => Ports::Icmp { id: client_port, kind: server_port.to_le_bytes()[0], code: 0 },
            _ => Ports::Ports { source: client_port, destination: server_port },
        };
        Tuple { protocol, source: client, destination: server, ports }
    }

    /// For the wire.
    pub fn encode(&self) -> wire::FlowKey {
        wire::FlowKey {
            protocol: self.protocol.into(),
            client: octets(self.client),
            server: octets(self.server),
            client_port: self.client_port.into(),
            server_port: self.server_port.into(),
        }
    }

    /// From the wire; `None` for what is no connection that could be copied.
    pub fn decode(key: &wire::FlowKey) -> Option<Self> {
        let decoded = Self {
            protocol: u8::try_from(key.protocol).ok()?,
            client: address(&key.client)?,
            server: address(&key.server)?,
            client_port: u16::try_from(key.client_port).ok()?,
            server_port: u16::try_from(key.server_port).ok()?,
        };
        let is_of_family = match decoded.protocol {
            ICMP => decoded.client.is_ipv4() && decoded.server_port <= 0xff,
            ICMPV6 => decoded.client.is_ipv6() && decoded.server_port <= 0xff,
            TCP | UDP => true,
            _ => false,
        };
        let is_one = is_of_family && decoded.client.is_ipv4() == decoded.server.is_ipv4();
        (is_one && decoded.original().inverted().is_some()).then_some(decoded)
    }
}

/// The connection as the kernel takes it. Its TCP window is not known to the kernel, which so accepts packets outside of it.
pub fn flow(key: &Key, copied: &Copied) -> Flow {
    let original = key.original();
    // Those of ICMP without a reply are refused by Key::decode.
    let inverse = original.inverted().unwrap_or(original);
    let ports = match inverse.ports {
        Ports::Icmp { kind, code, .. } => Ports::Icmp { id: copied.source_port, kind, code },
        Ports::Ports { source, .. } => Ports::Ports { source, destination: copied.source_port },
        Ports::None => Ports::None,
    };
    let bit = |is_set: bool, bit: u32| if is_set { bit } else { 0 };
    let tcp = copied.tcp.map(|tcp| Tcp { flags: tcp.flags.map(|it| it | TCP_FLAG_LIBERAL), ..tcp });
    Flow {
        original,
        reply: Tuple { destination: copied.source, ports, ..inverse },
        zone: 0,
        status: STATUS_CONFIRMED
            | bit(copied.is_replied, STATUS_SEEN_REPLY)
            | bit(copied.is_assured, STATUS_ASSURED),
        tcp,
        timeout: Some(copied.timeout.clamp(MIN_TIMEOUT, MAX_TIMEOUT)),
        mark: 0,
        id: None,
        counters: None,
    }
}

/// For the wire.
pub fn encode(key: &Key, copied: &Copied) -> wire::Flow {
    let bit = |is_set: bool, bit: u32| if is_set { bit } else { 0 };
    let Tcp { state, scales: [client_scale, server_scale], flags: [client_flags, server_flags] } =
        copied.tcp.unwrap_or_default();
    wire::Flow {
        key: Some(key.encode()),
        source: octets(copied.source),
        source_port: copied.source_port.into(),
        status: bit(copied.is_replied, STATUS_SEEN_REPLY) | bit(copied.is_assured, STATUS_ASSURED),
        timeout_seconds: copied.timeout,
        tcp_state: state.into(),
        tcp_flags_client: client_flags.into(),
        tcp_flags_server: server_flags.into(),
        tcp_scale_client: client_scale.into(),
        tcp_scale_server: server_scale.into(),
    }
}

/// From the wire; `None` for what is no connection that could be copied.
pub fn decode(flow: &wire::Flow) -> Option<(Key, Copied)> {
    let key = Key::decode(flow.key.as_ref()?)?;
    let byte = |value: u32| u8::try_from(value).ok();
    let tcp = if key.protocol == TCP {
        let state = byte(flow.tcp_state).filter(|state| TCP_ALIVE.contains(state))?;
        let flags = [byte(flow.tcp_flags_client)? & TCP_FLAGS, byte(flow.tcp_flags_server)? & TCP_FLAGS];
        let scales = [byte(flow.tcp_scale_client)?, byte(flow.tcp_scale_server)?];
        Some(Tcp { state, scales: scales.map(|scale| scale.min(MAX_SCALE)), flags })
    } else {
        None
    };
    let source = address(&flow.source).filter(|source| source.is_ipv4() == key.client.is_ipv4())?;
    let copied = Copied {
        source,
        source_port: u16::try_from(flow.source_port).ok()?,
        is_replied: flow.status & STATUS_SEEN_REPLY != 0,
        is_assured: flow.status & STATUS_ASSURED != 0,
        timeout: flow.timeout_seconds.min(MAX_TIMEOUT),
        tcp,
    };
    Some((key, copied))
}

fn address(octets: &[u8]) -> Option<IpAddr> {
    let ipv4 = <[u8; 4]>::try_from(octets).map(IpAddr::from);
    ipv4.or_else(|_| <[u8; 16]>::try_from(octets).map(IpAddr::from)).ok()
}
