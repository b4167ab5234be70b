//! Which prefixes a mesh can carry, and arithmetic on sets of them.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// Why a prefix cannot be carried by a mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Unusable {
    /// `0.0.0.0/0` or `::/0`: it would draw all traffic of all nodes.
    EverythingThereIs,
    /// Overlaps `0.0.0.0/8` or is `::` (RFC 1122 3.2.1.3, RFC 4291 2.5.2).
    Unspecified,
    /// Overlaps `127.0.0.0/8` or is `::1`.
    Loopback,
    /// Overlaps `169.254.0.0/16` or `fe80::/10`: means something else on every link.
    LinkLocal,
    /// Overlaps `224.0.0.0/4`, `255.255.255.255` or `ff00::/8`.
    Multicast,
    /// Overlaps `::ffff:0:0/96`, which is IPv4 in disguise.
    Ipv4Mapped,
}

impl fmt::Display for Unusable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::EverythingThereIs => "it covers every address there is",
            Self::Unspecified => "it overlaps addresses that name no host",
            Self::Loopback => "it overlaps loopback addresses",
            Self::LinkLocal => "it overlaps link-local addresses",
            Self::Multicast => "it overlaps multicast or broadcast addresses",
            Self::Ipv4Mapped => "it overlaps IPv4-mapped IPv6 addresses",
        })
    }
}

const fn v4(a: u8, b: u8, c: u8, d: u8, length: u8) -> IpNet {
    IpNet::V4(Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), length))
}

const fn v6(address: u128, length: u8) -> IpNet {
    IpNet::V6(Ipv6Net::new_assert(Ipv6Addr::from_bits(address), length))
}

const SPECIAL: [(IpNet, Unusable); 10] = [
    (v4(0, 0, 0, 0, 8), Unusable::Unspecified),
    (v4(127, 0, 0, 0, 8), Unusable::Loopback),
    (v4(169, 254, 0, 0, 16), Unusable::LinkLocal),
    (v4(224, 0, 0, 0, 4), Unusable::Multicast),
    (v4(255, 255, 255, 255, 32), Unusable::Multicast),
    (v6(0, 128), Unusable::Unspecified),
    (v6(1, 128), Unusable::Loopback),
    (v6(0xfe80 << 112, 10), Unusable::LinkLocal),
    (v6(0xff00 << 112, 8), Unusable::Multicast),
    (v6(0xffff_0000_0000, 96), Unusable::Ipv4Mapped),
];

/// Why no mesh can carry the prefix; `None` if one can.
pub(crate) fn unusable(prefix: &IpNet) -> Option<Unusable> {
    if prefix.prefix_len() == 0 {
        return Some(Unusable::EverythingThereIs);
    }
    SPECIAL.iter().find(|(special, _)| overlap(special, prefix)).map(|(_, why)| *why)
}

fn overlap(a: &IpNet, b: &IpNet) -> bool {
    a.contains(b) || b.contains(a)
}

/// Whether the prefix is a single address.
pub(crate) fn is_host(prefix: &IpNet) -> bool {
    prefix.prefix_len() == prefix.max_prefix_len()
}

/// Sorted, without duplicates and without prefixes that lie in another one of the list.
pub(crate) fn outermost(mut prefixes: Vec<IpNet>) -> Vec<IpNet> {
    prefixes.sort_unstable();
    let mut kept: Vec<IpNet> = Vec::with_capacity(prefixes.len());
    for prefix in prefixes {
        if kept.last().is_none_or(|last| !last.contains(&prefix)) {
            kept.push(prefix);
        }
    }
    kept
}

/// The smallest lists of prefixes that cover `prefixes` and nothing of `without`.
pub(crate) fn cover_without<'a>(
    prefixes: impl Iterator<Item = &'a IpNet>,
    without: &[IpNet],
) -> (Vec<Ipv4Net>, Vec<Ipv6Net>) {
    let (mut ranges_v4, mut ranges_v6) = (Vec::new(), Vec::new());
    prefixes.for_each(|prefix| push(prefix, &mut ranges_v4, &mut ranges_v6));
    let (mut holes_v4, mut holes_v6) = (Vec::new(), Vec::new());
    without.iter().for_each(|prefix| push(prefix, &mut holes_v4, &mut holes_v6));
    let ipv4 = split(&subtract(&merge(ranges_v4), &merge(holes_v4)), 32)
        .filter_map(|(address, length)| {
            let address = Ipv4Addr::from_bits(u32::try_from(address).ok()?);
            Ipv4Net::new(address, length).ok()
        })
        .collect();
    let ipv6 = split(&subtract(&merge(ranges_v6), &merge(holes_v6)), 128)
        .filter_map(|(address, length)| Ipv6Net::new(Ipv6Addr::from_bits(address), length).ok())
        .collect();
    (ipv4, ipv6)
}

/// First and last address as numbers.
type Range = (u128, u128);

fn push(prefix: &IpNet, ipv4: &mut Vec<Range>, ipv6: &mut Vec<Range>) {
    match (prefix.network(), prefix.broadcast()) {
        (IpAddr::V4(first), IpAddr::V4(last)) => ipv4.push((first.to_bits().into(), last.to_bits().into())),
        (IpAddr::V6(first), IpAddr::V6(last)) => ipv6.push((first.to_bits(), last.to_bits())),
        _ => {}
    }
}

/// Sorted, disjoint, with neighbours joined.
fn merge(mut ranges: Vec<Range>) -> Vec<Range> {
    ranges.sort_unstable();
    let mut merged: Vec<Range> = Vec::with_capacity(ranges.len());
    for (first, last) in ranges {
        match merged.last_mut() {
            Some(open) if first <= open.1.saturating_add(1) => open.1 = open.1.max(last),
            _ => merged.push((first, last)),
        }
    }
    merged
}

/// Both arguments merged; so is the result.
fn subtract(ranges: &[Range], holes: &[Range]) -> Vec<Range> {
    let mut rest = Vec::with_capacity(ranges.len());
    let mut holes = holes.iter().peekable();
    for &(first, last) in ranges {
        let mut from = Some(first);
        while let (Some(start), Some(&&(hole_first, hole_last))) = (from, holes.peek()) {
            if hole_first > last {
                break;
            }
            if hole_first > start {
                rest.push((start, hole_first.saturating_sub(1)));
            }
            if hole_last >= start {
                from = hole_last.checked_add(1).filter(|next| *next <= last);
            }
            // A hole that reaches past this range may cut the next one too.
            if hole_last <= last {
                holes.next();
            }
        }
        rest.extend(from.map(|start| (start, last)));
    }
    rest
}

/// Address and length of the fewest prefixes that make up the ranges, for addresses of `width` bits.
fn split(ranges: &[Range], width: u32) -> impl Iterator<Item = (u128, u8)> {
    ranges.iter().flat_map(move |&(first, last)| {
        let mut next = Some(first);
        std::iter::from_fn(move || {
            let start = next?;
            // The largest block that starts here (alignment) and ends within the range (size).
            let room = last.checked_sub(start)?.checked_add(1).map_or(width, u128::ilog2);
            let bits = start.trailing_zeros().min(room).min(width);
            next = 1u128
                .checked_shl(bits)
                .and_then(|size| start.checked_add(size))
                .filter(|following| *following <= last);
            Some((start, u8::try_from(width.saturating_sub(bits)).unwrap_or_default()))
        })
    })
}
