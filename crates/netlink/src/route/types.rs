//! Links, addresses, routes, rules and settings as plain values.

use std::fmt;
use std::net::{IpAddr, Ipv6Addr};

pub use fairlead_address::IpFamily;
use ipnet::IpNet;

/// `RT_TABLE_DEFAULT` (`linux/rtnetlink.h`).
pub const TABLE_DEFAULT: u32 = 253;
/// `RT_TABLE_MAIN` (`linux/rtnetlink.h`).
pub const TABLE_MAIN: u32 = 254;
/// `RT_TABLE_LOCAL` (`linux/rtnetlink.h`).
pub const TABLE_LOCAL: u32 = 255;

/// Metric that the kernel assigns to IPv6 routes without one (`IP6_RT_PRIO_USER`, `linux/ipv6_route.h`).
const IPV6_DEFAULT_METRIC: u32 = 1024;

/// A 48-bit link-layer address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct MacAddress(pub [u8; 6]);

impl MacAddress {
    /// The link-local IPv6 address made of it (modified EUI-64: RFC 4291, appendix A).
    pub fn link_local(self) -> Ipv6Addr {
        let [a, b, c, d, e, f] = self.0;
        let pair = |high: u8, low: u8| u16::from_be_bytes([high, low]);
        Ipv6Addr::new(0xfe80, 0, 0, 0, pair(a ^ 2, b), pair(c, 0xff), pair(0xfe, d), pair(e, f))
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, f] = self.0;
        write!(out, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{f:02x}")
    }
}

/// Reach of an address or route: `rtm_scope`, `ifa_scope` (`linux/rtnetlink.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Scope(pub u8);

impl Scope {
    /// Everywhere.
    pub const UNIVERSE: Self = Self(0);
    /// Within the site.
    pub const SITE: Self = Self(200);
    /// On this link.
    pub const LINK: Self = Self(253);
    /// On this host.
    pub const HOST: Self = Self(254);
    /// Nowhere; in a deletion: any.
    pub const NOWHERE: Self = Self(255);
}

/// Treatment of packets on a route: `rtm_type` (`linux/rtnetlink.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RouteKind(pub u8);

impl RouteKind {
    /// Sent on.
    pub const UNICAST: Self = Self(1);
    /// Delivered here.
    pub const LOCAL: Self = Self(2);
    /// Dropped silently.
    pub const BLACKHOLE: Self = Self(6);
    /// Refused with ICMP host unreachable.
    pub const UNREACHABLE: Self = Self(7);
    /// Refused with ICMP administratively prohibited.
    pub const PROHIBIT: Self = Self(8);
    /// Left to the rules after the one that looked up the table.
    pub const THROW: Self = Self(9);
}

/// The device class of a link, as far as it matters here (`ARPHRD_…`, `linux/if_arp.h`).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub enum LinkLayer {
    /// Ethernet, real or virtual.
    Ethernet,
    /// The loopback device.
    Loopback,
    /// Tunnels and everything else.
    #[default]
    Other,
}

/// A network device (`RTM_NEWLINK`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Link {
    /// Number of the device in its namespace.
    pub index: u32,
    /// Name of the device.
    pub name: String,
    /// `ifalias`, free text.
    pub alias: Option<String>,
    /// Largest packet in bytes.
    pub mtu: u32,
    /// Administratively up (`IFF_UP`).
    pub up: bool,
    /// The carrier is up (`IFF_LOWER_UP`).
    pub carrier: bool,
    /// Whether the link can send (`IF_OPER_UP`; a device that does not report its state counts as up). After the carrier comes up the kernel
    /// takes a moment to reach this state, and drops packets sent before (RFC 2863, section 3.1.13).
    pub operational: bool,
    /// Class of the link.
    pub layer: LinkLayer,
    /// Link-layer address, if it has one of 48 bits.
    pub mac: Option<MacAddress>,
    /// Software device type ("veth", "wireguard", "bridge"); hardware has none.
    pub kind: Option<String>,
    /// Device this one belongs to: the other end of a veth, the device below a VLAN (`IFLA_LINK`).
    pub peer_index: Option<u32>,
    /// Namespace [`peer_index`](Self::peer_index) counts in, if not this one (`IFLA_LINK_NETNSID`).
    pub peer_netns: Option<i32>,
    /// Group of the link (`IFLA_GROUP`); 0 unless it was given one.
    pub group: u32,
    /// Both ends of an IP tunnel; `None` for links of other types.
    pub tunnel: Option<TunnelEnds>,
}

impl Link {
    /// Whether hardware (or a hypervisor) is behind it, as far as the kernel reports it.
    pub fn is_physical(&self) -> bool {
        self.kind.is_none() && self.layer == LinkLayer::Ethernet
    }
}

/// The ends of an IP tunnel (`IFLA_IPTUN_LOCAL`, `IFLA_IPTUN_REMOTE`, `linux/if_tunnel.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct TunnelEnds {
    /// The address it sends from and receives at; `None` is any of this host.
    pub local: Option<IpAddr>,
    /// The other end; `None` is any: each packet goes to the next hop of its route.
    pub remote: Option<IpAddr>,
}

/// Properties of an address: `ifa_flags` (`linux/if_addr.h`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AddressFlags(pub u32);

impl AddressFlags {
    /// IPv6: made for privacy, soon replaced by another (`IFA_F_TEMPORARY`).
    pub const TEMPORARY: Self = Self(0x01);
    /// IPv6: usable at once, no duplicate address detection.
    pub const NODAD: Self = Self(0x02);
    /// IPv6: another host has it.
    pub const DADFAILED: Self = Self(0x08);
    /// Valid, but not for new connections.
    pub const DEPRECATED: Self = Self(0x20);
    /// IPv6: not usable yet, duplicate address detection runs.
    pub const TENTATIVE: Self = Self(0x40);
    /// Without a lifetime.
    pub const PERMANENT: Self = Self(0x80);

    /// Whether one of the given flags is set.
    pub fn intersects(self, other: Self) -> bool {
        self.0 & other.0 != 0
    }

    /// Both together.
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// An address of a link (`RTM_NEWADDR`).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Address {
    /// Index of the link.
    pub link: u32,
    /// The address with the prefix length of its network.
    pub prefix: IpNet,
    /// Scope in which it may be used.
    pub scope: Scope,
    /// Properties of the address.
    pub flags: AddressFlags,
}

/// Settings below `/proc/sys/net/ipv4/conf` or `/proc/sys/net/ipv6/conf` (`RTM_NEWNETCONF`, `linux/netconf.h`). A
/// notification has only those that changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Netconf {
    /// The family it applies to.
    pub family: IpFamily,
    /// Index of the link; `None` for `all` and `default`.
    pub link: Option<u32>,
    /// Whether packets are forwarded.
    pub forwarding: Option<bool>,
    /// IPv4: `rp_filter`.
    pub reverse_path_filter: Option<u32>,
}

/// One of several ways of a multipath route (`struct rtnexthop`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct NextHop {
    /// Index of the link.
    pub link: u32,
    /// Router on that link.
    pub gateway: Option<IpAddr>,
}

/// A route (`RTM_NEWROUTE`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Route {
    /// Table it is in.
    pub table: u32,
    /// Destination prefix.
    pub destination: IpNet,
    /// Treatment of packets.
    pub kind: RouteKind,
    /// Next router; may be IPv6 for an IPv4 route (RFC 5549).
    pub gateway: Option<IpAddr>,
    /// Index of the link.
    pub link: Option<u32>,
    /// Origin of the route (`rtm_protocol`, `/etc/iproute2/rt_protos`).
    pub protocol: u8,
    /// IPv4: how far the destination is. Always [`Scope::UNIVERSE`] in IPv6.
    pub scope: Scope,
    /// Source address of packets that start here.
    pub prefsrc: Option<IpAddr>,
    /// Less is preferred (`RTA_PRIORITY`).
    pub metric: u32,
    /// Path MTU in bytes (`RTAX_MTU`).
    pub mtu: Option<u32>,
    /// The gateway is on the link even though no address says so (`RTNH_F_ONLINK`).
    pub onlink: bool,
    /// The ways of a multipath route as dumps show them; ignored when a route is added.
    pub next_hops: Vec<NextHop>,
}

impl Route {
    /// A unicast route straight onto a link, of scope link in IPv4 as `ip route add` would choose.
    pub fn onto(table: u32, protocol: u8, destination: IpNet, link: u32) -> Self {
        let scope = if matches!(destination, IpNet::V4(_)) { Scope::LINK } else { Scope::UNIVERSE };
        Self {
            table,
            destination,
            kind: RouteKind::UNICAST,
            gateway: None,
            link: Some(link),
            protocol,
            scope,
            prefsrc: None,
            metric: 0,
            mtu: None,
            onlink: false,
            next_hops: Vec::new(),
        }
    }

    /// A unicast route through a router on a link.
    pub fn via(table: u32, protocol: u8, destination: IpNet, gateway: IpAddr, link: u32) -> Self {
        let direct = Self::onto(table, protocol, destination, link);
        Self { gateway: Some(gateway), scope: Scope::UNIVERSE, ..direct }
    }

    /// The family of its destination.
    pub fn family(&self) -> IpFamily {
        IpFamily::of(self.destination.addr())
    }

    /// Every link it uses.
    pub fn links(&self) -> impl Iterator<Item = u32> + '_ {
        self.link.into_iter().chain(self.next_hops.iter().map(|hop| hop.link))
    }

    /// The same route as the kernel shows it after it was added: host bits cleared, IPv6 without scope and with the
    /// kernel's default metric. Only routes in this form can be compared.
    #[must_use]
    pub fn canonical(&self) -> Self {
        let mut route = Self { destination: self.destination.trunc(), ..self.clone() };
        if route.family() == IpFamily::V6 {
            route.scope = Scope::UNIVERSE;
            if route.metric == 0 {
                route.metric = IPV6_DEFAULT_METRIC;
            }
        }
        route
    }
}

impl fmt::Display for Route {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "route {}", self.destination)?;
        if let Some(gateway) = self.gateway {
            write!(f, " via {gateway}")?;
        }
        if let Some(link) = self.link {
            write!(f, " on link {link}")?;
        }
        write!(f, " in table {}", self.table)
    }
}

/// A value of some bits of the packet mark.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Mark {
    /// Value that the bits must have.
    pub value: u32,
    /// Mask of the bits that count.
    pub mask: u32,
}

/// Protocol and ports of packets that a rule applies to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Transport {
    /// Protocol (`FRA_IP_PROTO`).
    pub protocol: u8,
    /// Source port, if it counts (`FRA_SPORT_RANGE`).
    pub source_port: Option<u16>,
    /// Destination port, if it counts (`FRA_DPORT_RANGE`).
    pub destination_port: Option<u16>,
}

impl Transport {
    /// All packets of a protocol.
    pub const fn protocol(protocol: u8) -> Self {
        Self { protocol, source_port: None, destination_port: None }
    }
}

/// A routing rule (`RTM_NEWRULE`, `linux/fib_rules.h`).
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Rule {
    /// The family it applies to.
    pub family: IpFamily,
    /// Less comes first.
    pub priority: u32,
    /// Table it looks up.
    pub table: u32,
    /// Packets with this mark only.
    pub mark: Option<Mark>,
    /// Packets that came in here only.
    pub iif: Option<String>,
    /// Packets bound to go out here only.
    pub oif: Option<String>,
    /// Packets from here only.
    pub source: Option<IpNet>,
    /// Packets to there only.
    pub destination: Option<IpNet>,
    /// Routes with prefixes of this length, in bits, or shorter do not count: the lookup goes on (`FRA_SUPPRESS_PREFIXLEN`).
    pub suppressed_length: Option<u32>,
    /// Packets of this protocol and with these ports only.
    pub transport: Option<Transport>,
    /// Packets to which the conditions above do not apply, taken together, instead of those to which they do (`FIB_RULE_INVERT`).
    pub is_inverted: bool,
    /// Instead of a lookup: goes on at the first rule of this priority, which has to be greater (`FR_ACT_GOTO`). The table is 0 then.
    pub goto: Option<u32>,
    /// Program that made it (`FRA_PROTOCOL`).
    pub protocol: u8,
    /// A dumped rule has conditions or an action that this type cannot express; such a rule cannot be added.
    pub has_more: bool,
}

impl Rule {
    /// A rule for all packets of a family.
    pub fn lookup(family: IpFamily, priority: u32, table: u32, protocol: u8) -> Self {
        Self {
            family,
            priority,
            table,
            mark: None,
            iif: None,
            oif: None,
            source: None,
            destination: None,
            suppressed_length: None,
            transport: None,
            is_inverted: false,
            goto: None,
            protocol,
            has_more: false,
        }
    }

    /// A rule for all packets of a family that passes over the rules before another priority.
    pub fn pass_over(family: IpFamily, priority: u32, goto: u32, protocol: u8) -> Self {
        Self { goto: Some(goto), ..Self::lookup(family, priority, 0, protocol) }
    }

    /// Whether both do the same to packets, regardless of their protocol.
    pub fn same_effect(&self, other: &Self) -> bool {
        Self { protocol: other.protocol, ..self.clone() } == *other
    }
}

impl fmt::Display for Rule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} rule {}", self.family, self.priority)?;
        if self.is_inverted {
            write!(f, " for all but those")?;
        }
        if let Some(Mark { value, mask }) = self.mark {
            write!(f, " for mark {value:#x}/{mask:#x}")?;
        }
        for (word, name) in [("from link", &self.iif), ("to link", &self.oif)] {
            if let Some(name) = name {
                write!(f, " {word} {name}")?;
            }
        }
        for (word, prefix) in [("from", self.source), ("to", self.destination)] {
            if let Some(prefix) = prefix {
                write!(f, " {word} {prefix}")?;
            }
        }
        if let Some(Transport { protocol, source_port, destination_port }) = self.transport {
            write!(f, " of protocol {protocol}")?;
            for (word, port) in [("from", source_port), ("to", destination_port)] {
                if let Some(port) = port {
                    write!(f, " {word} port {port}")?;
                }
            }
        }
        if let Some(goto) = self.goto {
            return write!(f, " to rule {goto}");
        }
        write!(f, " to table {}", self.table)?;
        self.suppressed_length.map_or(Ok(()), |length| write!(f, " for prefixes longer than {length}"))
    }
}
