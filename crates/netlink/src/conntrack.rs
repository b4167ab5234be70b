//! Connection tracking (`linux/netfilter/nfnetlink_conntrack.h`): which connections of this network namespace are alive, and those whose
//! source should have been translated.

mod statistics;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use nix::libc;

use crate::nftables::attributes::{AttributeWriter, Parsed, array, explain, find, require};
use crate::{Family, Message, Result, Socket};

pub use statistics::{Statistics, statistics};

/// `IPCTNL_MSG_CT_GET`, `IPCTNL_MSG_CT_DELETE`
const GET: i32 = 1;
const DELETE: i32 = 2;
/// `struct nfgenmsg` in bytes.
const FAMILY_HEADER: usize = 4;
/// `CTA_TUPLE_ORIG`, `CTA_TUPLE_REPLY`, `CTA_TUPLE_IP`, `CTA_IP_V4_SRC`, `CTA_IP_V4_DST`, `CTA_IP_V6_SRC`, `CTA_IP_V6_DST`
const TUPLE_ORIGINAL: u16 = 1;
const TUPLE_REPLY: u16 = 2;
const TUPLE_ADDRESSES: u16 = 1;
const SOURCE_IPV4: u16 = 1;
const DESTINATION_IPV4: u16 = 2;
const SOURCE_IPV6: u16 = 3;
const DESTINATION_IPV6: u16 = 4;
/// `CTA_STATUS`, `CTA_STATUS_MASK`, `IPS_SRC_NAT`
const STATUS: u16 = 3;
const STATUS_MASK: u16 = 26;
const SOURCE_TRANSLATED: u32 = 1 << 4;
/// `CTA_ID`
const ID: u16 = 12;
/// `CTA_PROTOINFO`, `CTA_PROTOINFO_TCP`, `CTA_PROTOINFO_TCP_STATE`
const PROTOCOL_STATE: u16 = 4;
const PROTOCOL_STATE_TCP: u16 = 1;
const TCP_STATE: u16 = 1;
/// `TCP_CONNTRACK_TIME_WAIT`, `TCP_CONNTRACK_CLOSE` (`linux/netfilter/nf_conntrack_tcp.h`)
const TCP_ENDED: [u8; 2] = [7, 8];

/// How many connections each host has opened, by their original sources. TCP connections that have ended and only wait to be forgotten
/// are left out. The answer is as large as the table: some 250 bytes for each connection.
///
/// # Errors
/// The kernel refuses (no `CONFIG_NF_CT_NETLINK`, no CAP_NET_ADMIN), or its answer cannot be decoded.
pub fn connections_by_source() -> Result<BTreeMap<IpAddr, usize>> {
    let request = message(GET, header(libc::AF_UNSPEC as u8).to_vec(), "list tracked connections");
    let mut found = BTreeMap::new();
    for reply in Socket::open(Family::Netfilter)?.dump(&request)? {
        let attributes = reply.payload.get(FAMILY_HEADER..).unwrap_or_default();
        if let Some(source) = explain(&request.what, live_source(attributes))? {
            let count: &mut usize = found.entry(source).or_default();
            *count = count.saturating_add(1);
        }
    }
    Ok(found)
}

/// Forgets the connections that these hosts have opened and whose source is not translated, and returns their number. Rules of nat chains
/// see only the first packet of a connection, so those that were opened while the chain was missing would never be translated.
///
/// # Errors
/// As [`connections_by_source`].
pub fn forget_untranslated(sources: &BTreeSet<IpAddr>) -> Result<usize> {
    let what = "list connections without translation";
    // Kernels before 5.15 list all of them.
    let mut filter = AttributeWriter::new(&header(libc::AF_UNSPEC as u8));
    filter.be32(STATUS, 0);
    filter.be32(STATUS_MASK, SOURCE_TRANSLATED);
    let request = message(GET, filter.finish(what)?, what);
    let mut socket = Socket::open(Family::Netfilter)?;
    let mut messages = Vec::new();
    for reply in socket.dump(&request)? {
        let Some((family, attributes)) = reply.payload.split_first() else { continue };
        let attributes = attributes.get(FAMILY_HEADER.saturating_sub(1)..).unwrap_or_default();
        let source = explain(what, untranslated_source(attributes))?;
        if source.is_some_and(|source| sources.contains(&source)) {
            messages.push(forget(*family, attributes)?);
        }
    }
    let mut forgotten = 0usize;
    for outcome in socket.change_each(&messages)? {
        match outcome {
            Ok(()) => forgotten = forgotten.saturating_add(1),
            Err(error) if error.is_missing() => {}
            Err(error) => return Err(error),
        }
    }
    Ok(forgotten)
}

/// Deletes a connection, by its tuple and, should another have the tuple by now, by its ID.
fn forget(family: u8, connection: &[u8]) -> Result<Message> {
    let what = "forget a connection without translation";
    let mut writer = AttributeWriter::new(&header(family));
    let tuple = explain(what, require(connection, TUPLE_ORIGINAL))?;
    writer.nested(TUPLE_ORIGINAL, |inner| inner.raw(tuple));
    if let Some(id) = explain(what, find(connection, ID))? {
        writer.bytes(ID, id);
    }
    Ok(message(DELETE, writer.finish(what)?, what))
}

/// `struct nfgenmsg`.
fn header(family: u8) -> [u8; FAMILY_HEADER] {
    [family, libc::NFNETLINK_V0 as u8, 0, 0]
}

fn message(kind: i32, payload: Vec<u8>, what: &str) -> Message {
    let kind = (libc::NFNL_SUBSYS_CTNETLINK << 8 | kind) as u16;
    Message { kind, flags: 0, payload, what: what.to_owned() }
}

/// The original source of a connection that replies are addressed to as well.
pub(crate) fn untranslated_source(connection: &[u8]) -> Parsed<Option<IpAddr>> {
    let source = end(require(connection, TUPLE_ORIGINAL)?, SOURCE_IPV4, SOURCE_IPV6)?;
    let replies_to = end(require(connection, TUPLE_REPLY)?, DESTINATION_IPV4, DESTINATION_IPV6)?;
    Ok(source.filter(|source| replies_to == Some(*source)))
}

/// The address of one end of a tuple.
fn end(tuple: &[u8], ipv4: u16, ipv6: u16) -> Parsed<Option<IpAddr>> {
    let addresses = require(tuple, TUPLE_ADDRESSES)?;
    if let Some(address) = find(addresses, ipv4)? {
        return array::<4>(address).map(|octets| Some(octets.into()));
    }
    find(addresses, ipv6)?.map(|address| array::<16>(address).map(IpAddr::from)).transpose()
}

/// The original source of a connection that is alive.
pub(crate) fn live_source(connection: &[u8]) -> Parsed<Option<IpAddr>> {
    let state = match find(connection, PROTOCOL_STATE)? {
        Some(state) => {
            find(state, PROTOCOL_STATE_TCP)?.map(|tcp| find(tcp, TCP_STATE)).transpose()?.flatten()
        }
        None => None,
    };
    if state.and_then(|state| state.first()).is_some_and(|state| TCP_ENDED.contains(state)) {
        return Ok(None);
    }
    end(require(connection, TUPLE_ORIGINAL)?, SOURCE_IPV4, SOURCE_IPV6)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::nftables::attributes::AttributeWriter;

    fn connection(tcp_state: Option<u8>, source: (u16, &[u8])) -> Vec<u8> {
        let mut writer = AttributeWriter::new(&[]);
        writer.nested(TUPLE_ORIGINAL, |tuple| {
            tuple.nested(TUPLE_ADDRESSES, |addresses| addresses.bytes(source.0, source.1));
        });
        if let Some(state) = tcp_state {
            writer.nested(PROTOCOL_STATE, |info| {
                info.nested(PROTOCOL_STATE_TCP, |tcp| tcp.bytes(TCP_STATE, &[state]));
            });
        }
        writer.finish("test").unwrap()
    }

    #[test]
    fn connections_that_ended_are_left_out() {
        let ipv4 = (SOURCE_IPV4, &[10, 0, 0, 1][..]);
        let found = |state| live_source(&connection(state, ipv4)).unwrap();
        let source: IpAddr = "10.0.0.1".parse().unwrap();
        assert_eq!((found(None), found(Some(3))), (Some(source), Some(source)));
        assert_eq!((found(Some(7)), found(Some(8))), (None, None));
        let ipv6 = connection(None, (SOURCE_IPV6, &[0xfd; 16]));
        assert_eq!(live_source(&ipv6).unwrap(), Some(IpAddr::from([0xfd; 16])));
        assert!(live_source(&connection(None, (SOURCE_IPV4, &[1]))).is_err());
    }

    #[test]
    fn connections_of_a_namespace_are_listed() {
        testbed_netns::in_namespace(|| {
            // Loopback is tracked as soon as a rule asks for it.
            testbed_netns::sh(
                "nft 'table inet t { chain c { type filter hook input priority 0; ct state new accept; }; }'",
            );
            assert_eq!(connections_by_source().unwrap(), BTreeMap::new());
            let server = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            let client = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            client.send_to(b"x", server.local_addr().unwrap()).unwrap();
            let found = connections_by_source().unwrap();
            assert_eq!(found.into_iter().collect::<Vec<_>>(), [([127, 0, 0, 1].into(), 1)]);
        });
    }

    #[test]
    fn only_connections_of_these_hosts_without_translation_are_forgotten() {
        let router = testbed_netns::Namespace::new();
        let [host, other] = ["host", "other"].map(|name| {
            let namespace = testbed_netns::Namespace::new();
            namespace.veth("eth0", &router, name);
            namespace
        });
        router.sh("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
            ip addr add 10.0.0.1/24 dev host; ip addr add 10.0.1.1/24 dev other
            ip addr add fd00::1/64 dev host nodad; ip addr add fd00:1::1/64 dev other nodad
            nft 'table inet t { chain c { type filter hook forward priority 0; ct state new accept; }; chain n { type nat hook postrouting priority 100; udp dport 7 masquerade; }; }'");
        host.sh("ip addr add 10.0.0.2/24 dev eth0; ip addr add 10.0.0.3/24 dev eth0; ip addr add fd00::2/64 dev eth0 nodad
            ip route add default via 10.0.0.1; ip -6 route add default via fd00::1");
        other.sh("ip addr add 10.0.1.2/24 dev eth0; ip addr add fd00:1::2/64 dev eth0 nodad
            ip route add default via 10.0.1.1; ip -6 route add default via fd00:1::1");
        for (from, to) in [("10.0.0.2", "10.0.1.2:7"), ("10.0.0.2", "10.0.1.2:8"), ("10.0.0.3", "10.0.1.2:8")]
        {
            let socket = host.run(|| std::net::UdpSocket::bind((from, 0))).unwrap();
            host.run(|| socket.send_to(b"x", to)).unwrap();
        }
        let socket = host.run(|| std::net::UdpSocket::bind("[fd00::2]:0")).unwrap();
        host.run(|| socket.send_to(b"x", "[fd00:1::2]:8")).unwrap();
        // The kernel has forwarded them when the last one has found its neighbour.
        std::thread::sleep(std::time::Duration::from_millis(300));
        let sources = ["10.0.0.2", "fd00::2"].map(|text| text.parse().unwrap()).into();
        assert_eq!(router.run(|| forget_untranslated(&sources)).unwrap(), 2);
        assert_eq!(router.run(|| forget_untranslated(&sources)).unwrap(), 0);
        let left = router.run(connections_by_source).unwrap();
        assert_eq!((left.get(&[10, 0, 0, 2].into()), left.get(&[10, 0, 0, 3].into())), (Some(&1), Some(&1)));
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_or_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = (live_source(&bytes), untranslated_source(&bytes));
        }
    }
}
