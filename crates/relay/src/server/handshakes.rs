//! Connections that have not registered yet. A new one is always accepted; at a limit an older one is closed. A handshake takes a
//! few round trips, so floods close their own first.

use std::net::IpAddr;
use std::sync::Arc;

use fairlead_limits::{ConnectionTable, Counted, network};
use tokio_util::sync::{CancellationToken, DropGuard};

/// All of a relay, or of its port for other replicas.
pub(super) type Handshakes = ConnectionTable<IpAddr, DropGuard>;

/// One of them; it counts until it is dropped.
#[derive(Debug)]
pub(super) struct Handshake {
    _counted: Counted<IpAddr, DropGuard>,
    /// Cancelled when it has to make room.
    pub(super) displaced: CancellationToken,
}

impl Handshake {
    pub(super) fn begin(all: &Arc<Handshakes>, source: IpAddr) -> Self {
        let displaced = CancellationToken::new();
        let counted = all.displace(network(source), displaced.clone().drop_guard());
        Self { _counted: counted, displaced }
    }
}

#[cfg(test)]
mod tests {
    use super::super::{HANDSHAKES, HANDSHAKES_PER_SOURCE};
    use super::*;

    fn begin(all: &Arc<Handshakes>, source: u8, count: usize) -> Vec<Handshake> {
        (0..count).map(|_| Handshake::begin(all, IpAddr::from([10, 0, 0, source]))).collect()
    }

    fn displaced(handshakes: &[Handshake]) -> Vec<bool> {
        handshakes.iter().map(|handshake| handshake.displaced.is_cancelled()).collect()
    }

    #[test]
    fn an_address_with_its_share_displaces_its_own() {
        let all = Handshakes::new(8, 2);
        let (other, flood) = (begin(&all, 1, 1), begin(&all, 2, 4));
        assert_eq!((displaced(&other), displaced(&flood)), (vec![false], vec![true, true, false, false]));
    }

    #[test]
    fn a_full_relay_displaces_the_oldest() {
        let all = Handshakes::new(2, 2);
        let one_each: Vec<Handshake> = (1..=3).flat_map(|source| begin(&all, source, 1)).collect();
        assert_eq!(displaced(&one_each), [true, false, false]);
    }

    #[test]
    fn nothing_is_kept_of_those_that_ended() {
        let all = Handshakes::new(1, 1);
        for source in 0..3 {
            assert_eq!(displaced(&begin(&all, source, 1)), [false]);
        }
        assert_eq!(all.open(), 0);
    }

    #[test]
    fn clients_of_one_network_of_ipv6_displace_only_each_other() {
        let all = Handshakes::new(HANDSHAKES, HANDSHAKES_PER_SOURCE);
        let of = |network, host| Handshake::begin(&all, [0x2001, 0xdb8, 0, network, 0, 0, 0, host].into());
        let other = of(2, 1);
        let flood: Vec<Handshake> = (0..129).map(|host| of(1, host)).collect();
        let oldest: Vec<bool> = (0..129).map(|number| number == 0).collect();
        assert_eq!(displaced(&flood), oldest);
        assert!(!other.displaced.is_cancelled());
    }
}
