//! Messages that change state. The caller sends them in batches.

use std::net::IpAddr;
use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_core::Emitable;
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::{
    AddressAttribute, AddressFlags as WireAddressFlags, AddressHeaderFlags, AddressMessage,
};
use netlink_packet_route::link::{
    AfSpecInet6, AfSpecUnspec, In6AddrGenMode, InfoData, InfoIpTunnel, InfoKind, InfoVeth, Ip6TunnelFlags,
    LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{RouteAttribute, RouteFlags, RouteMessage, RouteMetric, RouteVia};
use netlink_packet_route::rule::{RuleAction, RuleAttribute, RuleFlags, RuleMessage, RulePortRange};
use nix::libc;

use super::types::{Address, IpFamily, MacAddress, Route, Rule};
use crate::Message;

pub(super) const CREATE: u16 = libc::NLM_F_CREATE as u16;
const EXCLUSIVE: u16 = libc::NLM_F_EXCL as u16;
pub(super) const REPLACE: u16 = libc::NLM_F_REPLACE as u16;

pub(super) fn family(family: IpFamily) -> AddressFamily {
    match family {
        IpFamily::V4 => AddressFamily::Inet,
        IpFamily::V6 => AddressFamily::Inet6,
    }
}

pub(super) fn message(kind: u16, flags: u16, body: &impl Emitable, what: String) -> Message {
    let mut payload = vec![0; body.buffer_len()];
    body.emit(&mut payload);
    Message { kind, flags, payload, what }
}

/// One end of a veth pair that is created.
#[derive(Debug, Clone, Copy)]
pub struct VethEnd<'a> {
    /// Name of the link, at most 15 bytes.
    pub name: &'a str,
    /// Link-layer address; the kernel draws one if it is missing.
    pub mac: Option<MacAddress>,
    /// MTU in bytes; the kernel's default is 1500.
    pub mtu: Option<u32>,
    /// Group of the link; 0 is the default.
    pub group: u32,
}

impl VethEnd<'_> {
    fn attributes(&self) -> Vec<LinkAttribute> {
        let mut attributes = vec![LinkAttribute::IfName(self.name.to_owned())];
        attributes.extend(self.mac.map(|mac| LinkAttribute::Address(mac.0.to_vec())));
        attributes.extend(self.mtu.map(LinkAttribute::Mtu));
        if self.group != 0 {
            attributes.push(LinkAttribute::Group(self.group));
        }
        attributes
    }
}

/// Creates a veth pair whose peer is in another network namespace. Neither end can be set up in the same
/// message: the kernel refuses that for the first of the two.
///
/// The message holds the descriptor's number, so `peer_netns` must stay open until it is sent.
pub fn add_veth(end: &VethEnd<'_>, peer: &VethEnd<'_>, peer_netns: BorrowedFd<'_>) -> Message {
    let mut inner = LinkMessage::default();
    inner.attributes = peer.attributes();
    inner.attributes.push(LinkAttribute::NetNsFd(peer_netns.as_raw_fd()));
    let mut outer = LinkMessage::default();
    outer.attributes = end.attributes();
    outer.attributes.push(LinkAttribute::LinkInfo(vec![
        LinkInfo::Kind(InfoKind::Veth),
        LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(inner))),
    ]));
    let what = format!("add veth pair {} and {}", end.name, peer.name);
    message(libc::RTM_NEWLINK, CREATE | EXCLUSIVE, &outer, what)
}

/// Software type of a tunnel of IPv4 in IPv4 (RFC 2003).
pub const KIND_IPIP: &str = "ipip";
/// Software type of a tunnel in IPv6 (RFC 2473).
pub const KIND_IP6TNL: &str = "ip6tnl";
/// Hop limit of the outer header: that of the inner one would let traceroute end inside of the tunnel.
const TUNNEL_HOP_LIMIT: u8 = 64;

/// Creates a tunnel that carries packets of the family of `local` in packets of the same family, from `local` to the next hop of
/// the packet's route. Outer IPv4 headers have the bit "don't fragment"; outer IPv6 packets have no option for the limit of
/// nested tunnels (RFC 2473, section 4.1.1), so a packet grows by its outer header alone.
pub fn add_ip_tunnel(name: &str, local: IpAddr, mtu: u32) -> Message {
    let mut data = vec![InfoIpTunnel::Local(local), InfoIpTunnel::Ttl(TUNNEL_HOP_LIMIT)];
    let (kind, more) = match local {
        IpAddr::V4(_) => (InfoKind::IpIp, InfoIpTunnel::PMtuDisc(true)),
        IpAddr::V6(_) => {
            (InfoKind::Ip6Tnl, InfoIpTunnel::Ipv6Flags(Ip6TunnelFlags::from_bits_retain(IGNORE_ENCAP_LIMIT)))
        }
    };
    let inner = if local.is_ipv4() { libc::IPPROTO_IPIP } else { libc::IPPROTO_IPV6 };
    data.extend([more, InfoIpTunnel::Protocol(u8::try_from(inner).unwrap_or_default().into())]);
    let mut link = LinkMessage::default();
    link.attributes = vec![
        LinkAttribute::IfName(name.to_owned()),
        LinkAttribute::Mtu(mtu),
        LinkAttribute::LinkInfo(vec![LinkInfo::Kind(kind), LinkInfo::Data(InfoData::IpTunnel(data))]),
    ];
    message(libc::RTM_NEWLINK, CREATE | EXCLUSIVE, &link, format!("add tunnel {name} at {local}"))
}

/// `IP6_TNL_F_IGN_ENCAP_LIMIT` (`linux/ip6_tunnel.h`).
const IGNORE_ENCAP_LIMIT: u32 = 1;

/// Software type of an intermediate functional block, a link whose packets go where tc filters send them.
pub const KIND_IFB: &str = "ifb";

/// Creates an intermediate functional block (`CONFIG_IFB`). Its link-layer address can be set only at its creation. A packet
/// sent by it is dropped unless a tc filter redirects it.
pub fn add_ifb(name: &str, mac: Option<MacAddress>, mtu: u32) -> Message {
    let mut link = LinkMessage::default();
    link.attributes = vec![LinkAttribute::IfName(name.to_owned()), LinkAttribute::Mtu(mtu)];
    link.attributes.extend(mac.map(|mac| LinkAttribute::Address(mac.0.to_vec())));
    link.attributes.push(LinkAttribute::LinkInfo(vec![LinkInfo::Kind(InfoKind::Ifb)]));
    message(libc::RTM_NEWLINK, CREATE | EXCLUSIVE, &link, format!("add the ifb link {name}"))
}

/// Deletes a link, and the other end with it if it is a veth.
pub fn delete_link(index: u32) -> Message {
    let mut link = LinkMessage::default();
    link.header.index = index;
    message(libc::RTM_DELLINK, 0, &link, format!("delete link {index}"))
}

fn set(index: u32, attribute: LinkAttribute, what: String) -> Message {
    let mut link = LinkMessage::default();
    link.header.index = index;
    link.attributes.push(attribute);
    message(libc::RTM_SETLINK, 0, &link, what)
}

/// Sets a link up or down.
pub fn set_up(index: u32, up: bool) -> Message {
    let mut link = LinkMessage::default();
    link.header.index = index;
    link.header.change_mask = LinkFlags::Up;
    link.header.flags = if up { LinkFlags::Up } else { LinkFlags::empty() };
    message(libc::RTM_SETLINK, 0, &link, format!("set link {index} {}", if up { "up" } else { "down" }))
}

/// Sets the MTU of a link, in bytes.
pub fn set_mtu(index: u32, mtu: u32) -> Message {
    set(index, LinkAttribute::Mtu(mtu), format!("set the MTU of link {index} to {mtu}"))
}

/// Sets the alias of a link: free text of at most 255 bytes.
pub fn set_alias(index: u32, alias: &str) -> Message {
    let what = format!("set the alias of link {index} to \"{alias}\"");
    set(index, LinkAttribute::IfAlias(alias.to_owned()), what)
}

/// Puts a link into a group (`IFLA_GROUP`), by which nftables can match it.
pub fn set_group(index: u32, group: u32) -> Message {
    set(index, LinkAttribute::Group(group), format!("put link {index} into group {group}"))
}

/// Renames a link.
pub fn set_name(index: u32, name: &str) -> Message {
    set(index, LinkAttribute::IfName(name.to_owned()), format!("rename link {index} to {name}"))
}

/// Stops the kernel from generating a link-local IPv6 address for a link (`IN6_ADDR_GEN_MODE_NONE`), which would go through
/// duplicate address detection for one to two seconds. Send it before the link is set up; the kernel applies it after the
/// flags of the same message.
pub fn disable_address_generation(index: u32) -> Message {
    let mode = AfSpecInet6::AddrGenMode(In6AddrGenMode::None);
    let spec = LinkAttribute::AfSpecUnspec(vec![AfSpecUnspec::Inet6(vec![mode])]);
    set(index, spec, format!("disable IPv6 address generation on link {index}"))
}

fn address(kind: u16, flags: u16, address: &Address, verb: &str) -> Message {
    let mut wire = AddressMessage::default();
    let ip = address.prefix.addr();
    wire.header.family = family(IpFamily::of(ip));
    wire.header.prefix_len = address.prefix.prefix_len();
    wire.header.scope = address.scope.0.into();
    wire.header.index = address.link;
    let bits = address.flags.0;
    wire.header.flags = AddressHeaderFlags::from_bits_retain(bits.to_le_bytes()[0]);
    // Without IFA_LOCAL the kernel takes an IPv4 address for the other end of a point-to-point link.
    wire.attributes = vec![AddressAttribute::Local(ip), AddressAttribute::Address(ip)];
    if bits > 0xff {
        wire.attributes.push(AddressAttribute::Flags(WireAddressFlags::from_bits_retain(bits)));
    }
    message(kind, flags, &wire, format!("{verb} address {} on link {}", address.prefix, address.link))
}

/// Adds an address; refused if the link has it.
pub fn add_address(it: &Address) -> Message {
    address(libc::RTM_NEWADDR, CREATE | EXCLUSIVE, it, "add")
}

/// Adds an address or changes the properties of the one that is there.
pub fn replace_address(it: &Address) -> Message {
    address(libc::RTM_NEWADDR, CREATE | REPLACE, it, "set")
}

/// Deletes an address.
pub fn delete_address(it: &Address) -> Message {
    address(libc::RTM_DELADDR, 0, it, "delete")
}

fn route(kind: u16, flags: u16, route: &Route, verb: &str) -> Message {
    let mut wire = RouteMessage::default();
    let destination = route.destination.trunc();
    wire.header.address_family = family(route.family());
    wire.header.destination_prefix_length = destination.prefix_len();
    // The header has room for tables below 256 only; the attribute counts.
    wire.header.table = u8::try_from(route.table).unwrap_or(0);
    wire.header.protocol = route.protocol.into();
    wire.header.scope = route.scope.0.into();
    wire.header.kind = route.kind.0.into();
    wire.header.flags.set(RouteFlags::Onlink, route.onlink);
    wire.attributes.push(RouteAttribute::Table(route.table));
    if destination.prefix_len() > 0 {
        wire.attributes.push(RouteAttribute::Destination(destination.addr().into()));
    }
    wire.attributes.extend(route.gateway.map(|gateway| match gateway {
        IpAddr::V6(address) if route.family() == IpFamily::V4 => {
            RouteAttribute::Via(RouteVia::Inet6(address))
        }
        same_family => RouteAttribute::Gateway(same_family.into()),
    }));
    wire.attributes.extend(route.link.map(RouteAttribute::Oif));
    wire.attributes.extend(route.prefsrc.map(|source| RouteAttribute::PrefSource(source.into())));
    if route.metric != 0 {
        wire.attributes.push(RouteAttribute::Priority(route.metric));
    }
    wire.attributes.extend(route.mtu.map(|mtu| RouteAttribute::Metrics(vec![RouteMetric::Mtu(mtu)])));
    message(kind, flags, &wire, format!("{verb} {route}"))
}

/// Adds a route; refused if there is one to the same destination with the same metric.
pub fn add_route(it: &Route) -> Message {
    route(libc::RTM_NEWROUTE, CREATE | EXCLUSIVE, it, "add")
}

/// Adds a route or replaces the one to the same destination with the same metric.
pub fn replace_route(it: &Route) -> Message {
    route(libc::RTM_NEWROUTE, CREATE | REPLACE, it, "set")
}

/// Deletes the route that matches all given attributes.
pub fn delete_route(it: &Route) -> Message {
    route(libc::RTM_DELROUTE, 0, it, "delete")
}

fn rule(kind: u16, flags: u16, rule: &Rule, verb: &str) -> Message {
    let mut wire = RuleMessage::default();
    wire.header.family = family(rule.family);
    wire.header.action = if rule.goto.is_some() { RuleAction::Goto } else { RuleAction::ToTable };
    if rule.is_inverted {
        wire.header.flags = RuleFlags::Invert;
    }
    wire.header.table = u8::try_from(rule.table).unwrap_or(0);
    wire.attributes = vec![
        RuleAttribute::Priority(rule.priority),
        RuleAttribute::Table(rule.table),
        RuleAttribute::Protocol(rule.protocol.into()),
    ];
    if let Some(mark) = rule.mark {
        wire.attributes.extend([RuleAttribute::FwMark(mark.value), RuleAttribute::FwMask(mark.mask)]);
    }
    wire.attributes.extend(rule.iif.clone().map(RuleAttribute::Iifname));
    wire.attributes.extend(rule.oif.clone().map(RuleAttribute::Oifname));
    wire.attributes.extend(rule.suppressed_length.map(RuleAttribute::SuppressPrefixLen));
    wire.attributes.extend(rule.goto.map(RuleAttribute::Goto));
    if let Some(transport) = rule.transport {
        let range = |port| RulePortRange { start: port, end: port };
        wire.attributes.push(RuleAttribute::IpProtocol(transport.protocol.into()));
        wire.attributes.extend(transport.source_port.map(|port| RuleAttribute::SourcePortRange(range(port))));
        wire.attributes
            .extend(transport.destination_port.map(|port| RuleAttribute::DestinationPortRange(range(port))));
    }
    if let Some(source) = rule.source {
        wire.header.src_len = source.prefix_len();
        wire.attributes.push(RuleAttribute::Source(source.network()));
    }
    if let Some(destination) = rule.destination {
        wire.header.dst_len = destination.prefix_len();
        wire.attributes.push(RuleAttribute::Destination(destination.network()));
    }
    message(kind, flags, &wire, format!("{verb} {rule}"))
}

/// Adds a rule; refused if there is an identical one. The kernel accepts copies that differ only in protocol.
pub fn add_rule(it: &Rule) -> Message {
    rule(libc::RTM_NEWRULE, CREATE | EXCLUSIVE, it, "add")
}

/// Deletes the first rule that matches all given attributes.
pub fn delete_rule(it: &Rule) -> Message {
    rule(libc::RTM_DELRULE, 0, it, "delete")
}

pub(super) fn neighbour(link: u32, ip: IpAddr) -> NeighbourMessage {
    let mut wire = NeighbourMessage::default();
    wire.header.family = family(IpFamily::of(ip));
    wire.header.ifindex = link;
    wire.attributes.push(NeighbourAttribute::Destination(match ip {
        IpAddr::V4(address) => NeighbourAddress::Inet(address),
        IpAddr::V6(address) => NeighbourAddress::Inet6(address),
    }));
    wire
}

fn known_neighbour(link: u32, ip: IpAddr, mac: MacAddress, state: NeighbourState) -> Message {
    let mut wire = neighbour(link, ip);
    wire.header.state = state;
    wire.attributes.push(NeighbourAttribute::LinkLayerAddress(mac.0.to_vec()));
    let what = format!("set neighbour {ip} on link {link} to {mac}");
    message(libc::RTM_NEWNEIGH, CREATE | REPLACE, &wire, what)
}

/// Sets the link-layer address of an address on a link permanently (`NUD_PERMANENT`).
pub fn permanent_neighbour(link: u32, ip: IpAddr, mac: MacAddress) -> Message {
    known_neighbour(link, ip, mac, NeighbourState::Permanent)
}

/// Sets the link-layer address of an address on a link until it is confirmed: packets go there at once, and the kernel confirms
/// or corrects it a few seconds after the first (`NUD_STALE`; RFC 4861, section 7.3.2).
pub fn presumed_neighbour(link: u32, ip: IpAddr, mac: MacAddress) -> Message {
    known_neighbour(link, ip, mac, NeighbourState::Stale)
}

/// Deletes the link-layer address of an address on a link.
pub fn delete_neighbour(link: u32, ip: IpAddr) -> Message {
    message(libc::RTM_DELNEIGH, 0, &neighbour(link, ip), format!("delete neighbour {ip} on link {link}"))
}
