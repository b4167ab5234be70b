//! Connection tracking (`linux/netfilter/nfnetlink_conntrack.h`): which connections of this network namespace are alive.

use std::collections::BTreeMap;
use std::net::IpAddr;

use nix::libc;

use crate::nftables::attributes::{Parsed, array, explain, find, require};
use crate::{Family, Message, Result, Socket};

/// `IPCTNL_MSG_CT_GET`
const GET: i32 = 1;
/// `struct nfgenmsg` in bytes.
const FAMILY_HEADER: usize = 4;
/// `CTA_TUPLE_ORIG`, `CTA_TUPLE_IP`, `CTA_IP_V4_SRC`, `CTA_IP_V6_SRC`
const TUPLE_ORIGINAL: u16 = 1;
const TUPLE_ADDRESSES: u16 = 1;
const SOURCE_IPV4: u16 = 1;
const SOURCE_IPV6: u16 = 3;
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
    let what = "list tracked connections".to_owned();
    let payload = vec![libc::AF_UNSPEC as u8, libc::NFNETLINK_V0 as u8, 0, 0];
    let kind = (libc::NFNL_SUBSYS_CTNETLINK << 8 | GET) as u16;
    let request = Message { kind, flags: 0, payload, what };
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
    let addresses = require(require(connection, TUPLE_ORIGINAL)?, TUPLE_ADDRESSES)?;
    if let Some(source) = find(addresses, SOURCE_IPV4)? {
        return array::<4>(source).map(|octets| Some(octets.into()));
    }
    let source = find(addresses, SOURCE_IPV6)?;
    source.map(|source| array::<16>(source).map(IpAddr::from)).transpose()
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

    proptest! {
        #[test]
        fn garbage_is_an_error_or_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = live_source(&bytes);
        }
    }
}
