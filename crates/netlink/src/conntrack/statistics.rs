//! Statistics of connection tracking in this network namespace (`IPCTNL_MSG_CT_GET_STATS_CPU`).

use nix::libc;

use super::{FAMILY_HEADER, header, message};
use crate::nftables::attributes::{Parsed, be32, explain, find};
use crate::{Family, Result, Socket};

/// `IPCTNL_MSG_CT_GET_STATS_CPU`
const GET_STATISTICS: i32 = 4;
/// `CTA_STATS_INSERT_FAILED`, `CTA_STATS_DROP`, `CTA_STATS_EARLY_DROP`
const INSERT_FAILED: u16 = 9;
const DROP: u16 = 10;
const EARLY_DROP: u16 = 11;

/// Connections that could not be tracked, summed over CPUs, modulo 2^32 of each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Statistics {
    /// Packets dropped because another connection had the same addresses and ports by the time theirs was to be tracked. With address
    /// translation that is how a lack of ports shows.
    pub insert_failed: u64,
    /// Packets dropped because their connection could not be tracked: the table is full, or memory is short.
    pub drop: u64,
    /// Connections that were forgotten before their time for others, since the table was full.
    pub early_drop: u64,
}

/// Reads them.
///
/// # Errors
/// The kernel refuses (no `CONFIG_NF_CT_NETLINK`, no CAP_NET_ADMIN), or its answer cannot be decoded.
pub fn statistics() -> Result<Statistics> {
    let what = "read the statistics of connection tracking";
    let request = message(GET_STATISTICS, header(libc::AF_UNSPEC as u8).to_vec(), what);
    let mut sum = Statistics::default();
    for reply in Socket::open(Family::Netfilter)?.dump(&request)? {
        let of_cpu = explain(what, of_cpu(reply.payload.get(FAMILY_HEADER..).unwrap_or_default()))?;
        sum.insert_failed = sum.insert_failed.wrapping_add(of_cpu.insert_failed);
        sum.drop = sum.drop.wrapping_add(of_cpu.drop);
        sum.early_drop = sum.early_drop.wrapping_add(of_cpu.early_drop);
    }
    Ok(sum)
}

/// Statistics of one CPU, from its attributes.
pub(crate) fn of_cpu(attributes: &[u8]) -> Parsed<Statistics> {
    let number = |kind| find(attributes, kind)?.map_or(Ok(0), be32).map(u64::from);
    Ok(Statistics {
        insert_failed: number(INSERT_FAILED)?,
        drop: number(DROP)?,
        early_drop: number(EARLY_DROP)?,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::nftables::attributes::AttributeWriter;

    #[test]
    fn numbers_are_read_and_those_that_are_missing_are_zero() {
        let mut writer = AttributeWriter::new(&[]);
        writer.be32(INSERT_FAILED, 3);
        writer.be32(EARLY_DROP, 5);
        let read = of_cpu(&writer.finish("test").unwrap()).unwrap();
        assert_eq!(read, Statistics { insert_failed: 3, drop: 0, early_drop: 5 });
    }

    /// All ports of the translation are one: the second connection has none.
    #[test]
    fn a_lack_of_ports_is_counted_as_insertions_that_failed() {
        testbed_netns::in_namespace(|| {
            assert_eq!(statistics().unwrap(), Statistics::default());
            testbed_netns::sh(
                "nft 'table inet t { chain n { type nat hook postrouting priority 100; udp dport 7 snat ip to 127.0.0.1:1024; }; }'",
            );
            let sockets: Vec<_> = (0..3).map(|_| std::net::UdpSocket::bind("127.0.0.1:0").unwrap()).collect();
            for socket in &sockets {
                let _ = socket.send_to(b"x", "127.0.0.1:7");
            }
            let counted = statistics().unwrap();
            assert!(counted.insert_failed + counted.drop >= 2, "{counted:?}");
        });
    }

    proptest! {
        #[test]
        fn garbage_is_an_error_or_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = of_cpu(&bytes);
        }
    }
}
