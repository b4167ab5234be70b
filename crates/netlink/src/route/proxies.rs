//! Addresses for which the kernel answers ARP and neighbour discovery in place of others (`ip neigh add proxy`).

use std::net::IpAddr;

use netlink_packet_core::{DecodeError, NlasIterator, parse_ip, parse_u8};
use netlink_packet_route::AddressFamily;
use netlink_packet_route::neighbour::{NeighbourAttribute, NeighbourFlags, NeighbourMessage};
use nix::libc;

use super::changes::{CREATE, REPLACE, message, neighbour};
use super::dumps::RouteSocket;
use crate::{Error, Message, Result};

/// `struct ndmsg` in bytes, and where it has the link and the flags (`linux/neighbour.h`).
const HEADER: usize = 12;
const LINK_AT: std::ops::Range<usize> = 4..8;
const FLAGS_AT: usize = 10;
/// `NDA_DST`, `NDA_PROTOCOL`
const DESTINATION: u16 = 1;
const PROTOCOL: u16 = 12;

/// An address for which the kernel answers on a link: ARP while the host forwards IPv4 and its route to the address leads elsewhere
/// (`arp_process`, `net/ipv4/arp.c`), neighbour discovery while `proxy_ndp` of the link is set (`ndisc_recv_ns`, `net/ipv6/ndisc.c`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Proxy {
    /// The address.
    pub address: IpAddr,
    /// Index of the link.
    pub link: u32,
    /// Program that added it (`NDA_PROTOCOL`, the numbers of routes); 0 if that was not said.
    pub protocol: u8,
}

/// Lets the kernel answer for an address; no error if it does.
pub fn add_proxy(proxy: &Proxy) -> Message {
    let mut wire = neighbour(proxy.link, proxy.address);
    wire.header.flags = NeighbourFlags::Proxy;
    wire.attributes.push(NeighbourAttribute::Protocol(proxy.protocol.into()));
    let what = format!("answer for {} on link {}", proxy.address, proxy.link);
    message(libc::RTM_NEWNEIGH, CREATE | REPLACE, &wire, what)
}

/// Ends that; refused if the kernel does not answer.
pub fn delete_proxy(proxy: &Proxy) -> Message {
    let mut wire = neighbour(proxy.link, proxy.address);
    wire.header.flags = NeighbourFlags::Proxy;
    let what = format!("stop answering for {} on link {}", proxy.address, proxy.link);
    message(libc::RTM_DELNEIGH, 0, &wire, what)
}

impl RouteSocket {
    /// All addresses for which the kernel answers, of all links.
    ///
    /// # Errors
    /// The kernel's refusal or an unreadable answer.
    pub fn proxies(&mut self) -> Result<Vec<Proxy>> {
        let mut request = NeighbourMessage::default();
        request.header.family = AddressFamily::Unspec;
        request.header.flags = NeighbourFlags::Proxy;
        let what = "list addresses that are answered for";
        let request = message(libc::RTM_GETNEIGH, 0, &request, what.to_owned());
        let malformed =
            |error: DecodeError| Error::Malformed { what: what.to_owned(), reason: error.to_string() };
        let replies = self.dump(&request)?;
        let wanted = replies.iter().filter(|reply| reply.kind == libc::RTM_NEWNEIGH);
        let decoded = wanted.map(|reply| decode(&reply.payload).map_err(malformed));
        decoded.filter_map(Result::transpose).collect()
    }
}

/// Reads `RTM_NEWNEIGH`; `None` for other neighbours, and for proxies of all links.
pub(super) fn decode(payload: &[u8]) -> std::result::Result<Option<Proxy>, DecodeError> {
    let link = payload.get(LINK_AT).and_then(|bytes| bytes.try_into().ok()).map(u32::from_ne_bytes);
    let flags = payload.get(FLAGS_AT).copied().map(NeighbourFlags::from_bits_retain);
    let (Some(link), Some(flags)) = (link, flags) else {
        return Err(DecodeError::from("a neighbour is shorter than its header".to_owned()));
    };
    if link == 0 || !flags.contains(NeighbourFlags::Proxy) {
        return Ok(None);
    }
    let mut address = None;
    let mut protocol = 0;
    for attribute in NlasIterator::new(payload.get(HEADER..).unwrap_or_default()) {
        let attribute = attribute?;
        match attribute.kind() {
            DESTINATION => address = Some(parse_ip(attribute.value())?),
            PROTOCOL => protocol = parse_u8(attribute.value())?,
            _ => {}
        }
    }
    Ok(address.map(|address| Proxy { address, link, protocol }))
}
