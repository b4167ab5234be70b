//! Matches and targets of iptables that are about a packet's destination, in iptables-nft's own form (`linux/netfilter/nf_tables_compat.h`).

use super::super::extensions::word;
use super::steps::{Operand, Step, Translation};

/// `XT_UDP_INV_SRCPT`, `_DSTPT` (`linux/netfilter/xt_tcpudp.h`)
const UDP_INVERTED_SOURCE: u8 = 1;
const UDP_INVERTED_DESTINATION: u8 = 2;
/// `XT_MULTIPORT_DESTINATION` (`linux/netfilter/xt_multiport.h`)
const MULTIPORT_DESTINATION: u8 = 1;
/// `XT_ADDRTYPE_LOCAL`, `XT_ADDRTYPE_INVERT_DEST` (`linux/netfilter/xt_addrtype.h`)
const ADDRESS_LOCAL: u16 = 4;
const ADDRESS_INVERTED_DESTINATION: u32 = 2;
/// `NF_NAT_RANGE_MAP_IPS`, `_PROTO_SPECIFIED` (`linux/netfilter/nf_nat.h`)
const RANGE_ADDRESSES: u32 = 1;
const RANGE_PORTS: u32 = 2;
/// `struct nf_nat_range` in bytes.
const RANGE: usize = 40;
const ALL_PORTS: (u16, u16) = (0, u16::MAX);

/// Conditions of a match of this name and revision.
pub(super) fn conditions(name: &str, revision: u32, info: &[u8]) -> Vec<Step> {
    let known = match (name, revision) {
        ("addrtype", 1) => address_type(info),
        ("comment", _) => Some(Vec::new()),
        ("multiport", 1) => multiport(info),
        ("udp", 0) => udp(info),
        _ => None,
    };
    known.unwrap_or_else(|| vec![Step::Unknown])
}

/// `struct xt_addrtype_info_v1`: types of the source and of the destination, flags.
fn address_type(info: &[u8]) -> Option<Vec<Step>> {
    let (source, destination, flags) = (half(info, 0)?, half(info, 2)?, word(info, 4)?);
    let is_local = destination & ADDRESS_LOCAL != 0;
    let is_inverted = flags & ADDRESS_INVERTED_DESTINATION != 0;
    let is_met = destination == 0 || is_local != is_inverted;
    let of_source = (source != 0).then_some(Step::Unknown);
    Some((!is_met).then_some(Step::Never).into_iter().chain(of_source).collect())
}

/// `struct xt_multiport_v1`: kind, number of ports, fifteen ports, for each whether the next one ends its range, whether to invert.
fn multiport(info: &[u8]) -> Option<Vec<Step>> {
    if *info.first()? != MULTIPORT_DESTINATION {
        return None;
    }
    let count = usize::from(*info.get(1)?);
    let ports = info.get(2..32)?.chunks_exact(2).filter_map(|port| half(port, 0));
    let mut numbers = ports.zip(info.get(32..47)?).take(count);
    let mut ranges = Vec::new();
    while let Some((first, begins_range)) = numbers.next() {
        let last = if *begins_range == 0 { first } else { numbers.next()?.0 };
        ranges.push((first, last));
    }
    Some(vec![Step::Ports { ranges, is_inverted: *info.get(47)? != 0 }])
}

/// `struct xt_udp`: first and last port of the source and of the destination, what to invert.
fn udp(info: &[u8]) -> Option<Vec<Step>> {
    let sources = (half(info, 0)?, half(info, 2)?);
    let ports = (half(info, 4)?, half(info, 6)?);
    let inverted = *info.get(8)?;
    let is_for_all = |ports, bit| ports == ALL_PORTS && inverted & bit == 0;
    let of_source = (!is_for_all(sources, UDP_INVERTED_SOURCE)).then_some(Step::Unknown);
    let of_port = (!is_for_all(ports, UDP_INVERTED_DESTINATION))
        .then(|| Step::Ports { ranges: vec![ports], is_inverted: inverted & UDP_INVERTED_DESTINATION != 0 });
    Some(of_source.into_iter().chain(of_port).collect())
}

/// Translation of the destination by a target of this name; `None` if there is none.
pub(super) fn translation(name: &str, info: &[u8]) -> Option<Translation> {
    let unknown = || Translation { family: None, address: Operand::Other, port: Operand::Other };
    match name {
        "DNAT" | "REDIRECT" => Some(range(info).unwrap_or_else(unknown)),
        "NETMAP" => Some(unknown()),
        _ => None,
    }
}

/// `struct nf_nat_range` and `nf_nat_range2` (`linux/netfilter/nf_nat.h`): flags, first and last address in 16 bytes each, first and last port. The shorter
/// `struct nf_nat_ipv4_multi_range_compat` has a number before, which is 1, and four bytes for each address.
fn range(info: &[u8]) -> Option<Translation> {
    let (flags, addresses, ports) = if info.len() < RANGE {
        (word(info, 4)?, (info.get(8..12)?, info.get(12..16)?), (info.get(16..18)?, info.get(18..20)?))
    } else {
        (word(info, 0)?, (info.get(4..20)?, info.get(20..36)?), (info.get(36..38)?, info.get(38..40)?))
    };
    let operand = |bit, (first, last): (&[u8], &[u8])| match flags & bit {
        0 => Operand::Same,
        _ if first == last => Operand::Bytes(first.to_vec()),
        _ => Operand::Other,
    };
    let address = operand(RANGE_ADDRESSES, addresses);
    Some(Translation { family: None, address, port: operand(RANGE_PORTS, ports) })
}

/// Two bytes in host order.
fn half(info: &[u8], offset: usize) -> Option<u16> {
    info.get(offset..)?.first_chunk().copied().map(u16::from_ne_bytes)
}
