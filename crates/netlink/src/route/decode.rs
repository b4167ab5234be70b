//! Decodes the kernel's messages. Unknown attributes are skipped.

use std::net::IpAddr;

use ipnet::IpNet;
use netlink_packet_core::{DecodeError, NlasIterator, parse_ip, parse_string, parse_u8, parse_u32};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::address::AddressHeader;
use netlink_packet_route::link::{LinkFlags, LinkHeader, LinkLayerType};
use netlink_packet_route::route::{RouteFlags, RouteHeader, RouteVia};
use netlink_packet_route::rule::{RuleAction, RuleFlags, RuleHeader};
use nix::libc;

use super::changes::{KIND_IP6TNL, KIND_IPIP};
use super::types::{
    Address, AddressFlags, IpFamily, Link, LinkLayer, MacAddress, Mark, Netconf, NextHop, Route, RouteKind,
    Rule, Scope, Transport, TunnelEnds,
};

type Decoded<T> = Result<T, DecodeError>;

/// Lengths of the fixed parts: `ifinfomsg`, `ifaddrmsg`, `rtmsg`, `fib_rule_hdr`, `rtnexthop`.
const LINK_HEADER: usize = 16;
const ADDRESS_HEADER: usize = 8;
const ROUTE_HEADER: usize = 12;
const RULE_HEADER: usize = 12;
const NEXT_HOP_HEADER: usize = 8;
/// `struct netconfmsg`, one byte, and the padding behind it.
const NETCONF_HEADER: usize = 4;

/// `IF_OPER_UNKNOWN` and `IF_OPER_UP` (`linux/if.h`).
const OPER_UNKNOWN: u8 = 0;
const OPER_UP: u8 = 6;
/// `IFLA_INFO_KIND`, `IFLA_INFO_DATA` (`linux/if_link.h`).
const INFO_KIND: u16 = 1;
const INFO_DATA: u16 = 2;
/// `IFLA_IPTUN_LOCAL`, `IFLA_IPTUN_REMOTE` (`linux/if_tunnel.h`).
const TUNNEL_LOCAL: u16 = 2;
const TUNNEL_REMOTE: u16 = 3;
/// `RTAX_MTU` (`linux/rtnetlink.h`).
const METRIC_MTU: u16 = 2;
/// `RTA_VIA` (`linux/rtnetlink.h`).
const ROUTE_VIA: u16 = 18;
/// `IFA_FLAGS` (`linux/if_addr.h`).
const ADDRESS_FLAGS: u16 = 8;

/// `NETCONFA_…` (`linux/netconf.h`).
mod netconfa {
    pub(super) const IFINDEX: u16 = 1;
    pub(super) const FORWARDING: u16 = 2;
    pub(super) const RP_FILTER: u16 = 3;
}

/// `FRA_…` (`linux/fib_rules.h`).
mod fra {
    pub(super) const DST: u16 = 1;
    pub(super) const SRC: u16 = 2;
    pub(super) const IIFNAME: u16 = 3;
    pub(super) const GOTO: u16 = 4;
    pub(super) const PRIORITY: u16 = 6;
    pub(super) const FWMARK: u16 = 10;
    pub(super) const SUPPRESS_IFGROUP: u16 = 13;
    pub(super) const SUPPRESS_PREFIXLEN: u16 = 14;
    pub(super) const TABLE: u16 = 15;
    pub(super) const FWMASK: u16 = 16;
    pub(super) const OIFNAME: u16 = 17;
    pub(super) const PAD: u16 = 18;
    pub(super) const PROTOCOL: u16 = 21;
    pub(super) const IP_PROTO: u16 = 22;
    pub(super) const SPORT_RANGE: u16 = 23;
    pub(super) const DPORT_RANGE: u16 = 24;
    pub(super) const SPORT_MASK: u16 = 28;
    pub(super) const DPORT_MASK: u16 = 29;
}

fn after(payload: &[u8], header: usize) -> &[u8] {
    payload.get(header..).unwrap_or_default()
}

fn family(raw: AddressFamily) -> Option<IpFamily> {
    match raw {
        AddressFamily::Inet => Some(IpFamily::V4),
        AddressFamily::Inet6 => Some(IpFamily::V6),
        _ => None,
    }
}

fn prefix(address: IpAddr, length: u8) -> Decoded<IpNet> {
    IpNet::new(address, length)
        .map_err(|_| DecodeError::from(format!("{address} cannot have the prefix length {length}")))
}

/// Names of devices and aliases are bytes to the kernel.
fn text(value: &[u8]) -> String {
    let end = value.iter().position(|byte| *byte == 0).unwrap_or(value.len());
    String::from_utf8_lossy(value.get(..end).unwrap_or_default()).into_owned()
}

/// Reads `RTM_NEWLINK` and `RTM_DELLINK`.
pub(super) fn link(payload: &[u8]) -> Decoded<Link> {
    let header = LinkHeader::parse(payload)?;
    let mut link = Link {
        index: header.index,
        up: header.flags.contains(LinkFlags::Up),
        carrier: header.flags.contains(LinkFlags::LowerUp),
        operational: true,
        layer: match header.link_layer_type {
            LinkLayerType::Ether => LinkLayer::Ethernet,
            LinkLayerType::Loopback => LinkLayer::Loopback,
            _ => LinkLayer::Other,
        },
        ..Link::default()
    };
    for attribute in NlasIterator::new(after(payload, LINK_HEADER)) {
        let attribute = attribute?;
        let value = attribute.value();
        match attribute.kind() {
            libc::IFLA_IFNAME => link.name = text(value),
            libc::IFLA_IFALIAS => link.alias = Some(text(value)),
            libc::IFLA_MTU => link.mtu = parse_u32(value)?,
            libc::IFLA_ADDRESS => link.mac = <[u8; 6]>::try_from(value).ok().map(MacAddress),
            libc::IFLA_LINK => link.peer_index = Some(parse_u32(value)?),
            libc::IFLA_LINK_NETNSID => link.peer_netns = Some(parse_u32(value)?.cast_signed()),
            libc::IFLA_OPERSTATE => link.operational = matches!(parse_u8(value)?, OPER_UNKNOWN | OPER_UP),
            libc::IFLA_GROUP => link.group = parse_u32(value)?,
            libc::IFLA_LINKINFO => (link.kind, link.tunnel) = info(value)?,
            _ => {}
        }
    }
    Ok(link)
}

/// The software type, and of IP tunnels their ends.
fn info(nested: &[u8]) -> Decoded<(Option<String>, Option<TunnelEnds>)> {
    let mut kind = None;
    let mut data = None;
    for attribute in NlasIterator::new(nested) {
        let attribute = attribute?;
        match attribute.kind() {
            INFO_KIND => kind = Some(parse_string(attribute.value())?),
            INFO_DATA => data = Some(attribute.value().to_vec()),
            _ => {}
        }
    }
    let is_tunnel = matches!(kind.as_deref(), Some(KIND_IPIP | KIND_IP6TNL));
    Ok((kind, is_tunnel.then(|| tunnel_ends(&data.unwrap_or_default()))))
}

/// Addresses of a tunnel. An address that cannot be read counts as any address: the link is there all the same.
fn tunnel_ends(nested: &[u8]) -> TunnelEnds {
    let mut ends = TunnelEnds::default();
    for attribute in NlasIterator::new(nested).map_while(Decoded::ok) {
        let address = || parse_ip(attribute.value()).ok().filter(|address| !address.is_unspecified());
        match attribute.kind() {
            TUNNEL_LOCAL => ends.local = address(),
            TUNNEL_REMOTE => ends.remote = address(),
            _ => {}
        }
    }
    ends
}

/// Reads `RTM_NEWADDR` and `RTM_DELADDR`; `None` is an address of another family.
pub(super) fn address(payload: &[u8]) -> Decoded<Option<Address>> {
    let header = AddressHeader::parse(payload)?;
    if family(header.family).is_none() {
        return Ok(None);
    }
    let mut own = None;
    let mut shown = None;
    let mut flags = u32::from(header.flags.bits());
    for attribute in NlasIterator::new(after(payload, ADDRESS_HEADER)) {
        let attribute = attribute?;
        match attribute.kind() {
            libc::IFA_LOCAL => own = Some(parse_ip(attribute.value())?),
            libc::IFA_ADDRESS => shown = Some(parse_ip(attribute.value())?),
            ADDRESS_FLAGS => flags = parse_u32(attribute.value())?,
            _ => {}
        }
    }
    // On a point-to-point link IFA_ADDRESS is the other end; IFA_LOCAL is missing in IPv6 without a peer.
    let ip = own.or(shown).ok_or_else(|| DecodeError::from("an address message without an address"))?;
    Ok(Some(Address {
        link: header.index,
        prefix: prefix(ip, header.prefix_len)?,
        scope: Scope(header.scope.into()),
        flags: AddressFlags(flags),
    }))
}

/// Reads `RTM_NEWROUTE` and `RTM_DELROUTE`; `None` is another family or a cached clone of a route.
pub(super) fn route(payload: &[u8]) -> Decoded<Option<Route>> {
    let header = RouteHeader::parse(payload)?;
    let Some(family) = family(header.address_family) else { return Ok(None) };
    if header.flags.contains(RouteFlags::Cloned) {
        return Ok(None);
    }
    let mut route = Route {
        table: header.table.into(),
        destination: family.everything(),
        kind: RouteKind(header.kind.into()),
        gateway: None,
        link: None,
        protocol: header.protocol.into(),
        scope: Scope(header.scope.into()),
        prefsrc: None,
        metric: 0,
        mtu: None,
        onlink: header.flags.contains(RouteFlags::Onlink),
        next_hops: Vec::new(),
    };
    let mut destination = family.everything().addr();
    for attribute in NlasIterator::new(after(payload, ROUTE_HEADER)) {
        let attribute = attribute?;
        let value = attribute.value();
        match attribute.kind() {
            libc::RTA_DST => destination = parse_ip(value)?,
            libc::RTA_TABLE => route.table = parse_u32(value)?,
            libc::RTA_OIF => route.link = Some(parse_u32(value)?),
            libc::RTA_GATEWAY => route.gateway = Some(parse_ip(value)?),
            ROUTE_VIA => route.gateway = via(value)?,
            libc::RTA_PREFSRC => route.prefsrc = Some(parse_ip(value)?),
            libc::RTA_PRIORITY => route.metric = parse_u32(value)?,
            libc::RTA_METRICS => route.mtu = metric_mtu(value)?,
            libc::RTA_MULTIPATH => route.next_hops = next_hops(value)?,
            _ => {}
        }
    }
    route.destination = prefix(destination, header.destination_prefix_length)?;
    Ok(Some(route))
}

fn via(value: &[u8]) -> Decoded<Option<IpAddr>> {
    Ok(match RouteVia::parse(value)? {
        RouteVia::Inet(address) => Some(address.into()),
        RouteVia::Inet6(address) => Some(address.into()),
        _ => None,
    })
}

fn metric_mtu(nested: &[u8]) -> Decoded<Option<u32>> {
    for attribute in NlasIterator::new(nested) {
        let attribute = attribute?;
        if attribute.kind() == METRIC_MTU {
            return Ok(Some(parse_u32(attribute.value())?));
        }
    }
    Ok(None)
}

/// Reads a sequence of `struct rtnexthop`: length, flags, hops, index of the link, attributes.
fn next_hops(mut rest: &[u8]) -> Decoded<Vec<NextHop>> {
    let truncated = || DecodeError::from("a truncated next hop");
    let mut hops = Vec::new();
    while let Some((length, _)) = rest.split_first_chunk::<2>() {
        let length = usize::from(u16::from_ne_bytes(*length));
        let hop = rest.get(..length).filter(|_| length >= NEXT_HOP_HEADER).ok_or_else(truncated)?;
        let link = parse_u32(hop.get(4..NEXT_HOP_HEADER).ok_or_else(truncated)?)?;
        let mut gateway = None;
        for attribute in NlasIterator::new(after(hop, NEXT_HOP_HEADER)) {
            let attribute = attribute?;
            match attribute.kind() {
                libc::RTA_GATEWAY => gateway = Some(parse_ip(attribute.value())?),
                ROUTE_VIA => gateway = via(attribute.value())?,
                _ => {}
            }
        }
        hops.push(NextHop { link, gateway });
        rest = after(rest, length.next_multiple_of(4));
    }
    Ok(hops)
}

/// Reads `RTM_NEWRULE` and `RTM_DELRULE`; `None` is a rule of another family.
pub(super) fn rule(payload: &[u8]) -> Decoded<Option<Rule>> {
    let header = RuleHeader::parse(payload)?;
    let Some(family) = family(header.family) else { return Ok(None) };
    let mut rule = Rule::lookup(family, 0, header.table.into(), 0);
    rule.has_more = !matches!(header.action, RuleAction::ToTable | RuleAction::Goto)
        || header.tos != 0
        || header.flags.contains(RuleFlags::Permanent);
    rule.is_inverted = header.flags.contains(RuleFlags::Invert);
    let mut value = 0;
    let mut mask = 0;
    let mut protocol = None;
    let (mut source_port, mut destination_port) = (None, None);
    for attribute in NlasIterator::new(after(payload, RULE_HEADER)) {
        let attribute = attribute?;
        let bytes = attribute.value();
        match attribute.kind() {
            fra::PRIORITY => rule.priority = parse_u32(bytes)?,
            fra::TABLE => rule.table = parse_u32(bytes)?,
            fra::PROTOCOL => rule.protocol = parse_u8(bytes)?,
            fra::FWMARK => value = parse_u32(bytes)?,
            fra::FWMASK => mask = parse_u32(bytes)?,
            fra::IIFNAME => rule.iif = Some(text(bytes)),
            fra::OIFNAME => rule.oif = Some(text(bytes)),
            fra::SRC => rule.source = Some(prefix(parse_ip(bytes)?, header.src_len)?),
            fra::DST => rule.destination = Some(prefix(parse_ip(bytes)?, header.dst_len)?),
            fra::GOTO => rule.goto = Some(parse_u32(bytes)?),
            fra::IP_PROTO => protocol = Some(parse_u8(bytes)?),
            fra::SPORT_RANGE => (source_port, rule.has_more) = port(bytes, rule.has_more)?,
            fra::DPORT_RANGE => (destination_port, rule.has_more) = port(bytes, rule.has_more)?,
            fra::PAD => {}
            // Kernels from 6.15 on send these with every port.
            fra::SPORT_MASK | fra::DPORT_MASK => rule.has_more |= bytes != u16::MAX.to_ne_bytes(),
            // The kernel always sends these two; all ones means that nothing is suppressed.
            fra::SUPPRESS_PREFIXLEN => {
                rule.suppressed_length = Some(parse_u32(bytes)?).filter(|length| *length != u32::MAX);
            }
            fra::SUPPRESS_IFGROUP => rule.has_more |= parse_u32(bytes)? != u32::MAX,
            _ => rule.has_more = true,
        }
    }
    rule.mark = (value | mask != 0).then_some(Mark { value, mask });
    rule.has_more |= protocol.is_none() && (source_port.is_some() || destination_port.is_some());
    rule.has_more |= rule.goto.is_some() != (header.action == RuleAction::Goto);
    rule.transport = protocol.map(|protocol| Transport { protocol, source_port, destination_port });
    Ok(Some(rule))
}

/// Reads `struct fib_rule_port_range`: a single port, and whether the rule has what a [`Rule`] cannot express.
fn port(bytes: &[u8], has_more: bool) -> Decoded<(Option<u16>, bool)> {
    let &[a, b, c, d] = bytes else {
        return Err(DecodeError::from("a range of ports that is not two ports"));
    };
    let (first, last) = (u16::from_ne_bytes([a, b]), u16::from_ne_bytes([c, d]));
    Ok(if first == last { (Some(first), has_more) } else { (None, true) })
}

/// Reads `RTM_NEWNETCONF`; `None` is another family.
pub(super) fn netconf(payload: &[u8]) -> Decoded<Option<Netconf>> {
    let Some(family) = payload.first().and_then(|raw| family(AddressFamily::from(*raw))) else {
        return Ok(None);
    };
    let mut netconf = Netconf { family, link: None, forwarding: None, reverse_path_filter: None };
    for attribute in NlasIterator::new(after(payload, NETCONF_HEADER)) {
        let attribute = attribute?;
        let value = attribute.value();
        match attribute.kind() {
            // Negative for "all" and "default" (`NETCONFA_IFINDEX_ALL`, `NETCONFA_IFINDEX_DEFAULT`).
            netconfa::IFINDEX => netconf.link = u32::try_from(parse_u32(value)?.cast_signed()).ok(),
            netconfa::FORWARDING => netconf.forwarding = Some(parse_u32(value)? != 0),
            netconfa::RP_FILTER => netconf.reverse_path_filter = Some(parse_u32(value)?),
            _ => {}
        }
    }
    Ok(Some(netconf))
}
