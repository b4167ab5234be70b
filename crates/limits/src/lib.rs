//! Limits that one caller, peer or program has, so that a faulty or hostile one does not take what is for all.
//!
//! * [`network`] says by what a caller is limited.
//! * [`TokenBucket`] is a rate with a burst, [`SourceBuckets`] one for each source, in bounded memory.
//! * [`ConnectionTable`] bounds what a server has open, in all and of one source.
//! * [`ReplayWindow`] lets each counter of authenticated messages pass once.
//! * [`Backoff`] and [`doubled`] say how long to wait after failures.
//!
//! Without I/O: time and randomness are arguments, and who waits or closes is the caller's. Not here: the handshake limiter of
//! WireGuard, which counts as the kernel does (`fairlead-wireguard`).

mod backoff;
mod bucket;
mod connections;
mod replay;
mod sources;

use std::net::{IpAddr, Ipv6Addr};

pub use backoff::{Backoff, doubled, part};
pub use bucket::{Moment, Rate, TokenBucket};
pub use connections::{ConnectionTable, Counted};
pub use replay::ReplayWindow;
pub use sources::SourceBuckets;

/// Source by which a caller is limited: its IPv4 address, also of an IPv4 client of a dual-stack socket, or the network (/64) of its
/// IPv6 address, in which one host has all addresses it likes (RFC 7421).
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_caller_is_an_ipv4_address_or_a_network_of_ipv6() {
        for (address, expected) in [
            ("192.0.2.1", "192.0.2.1"),
            ("::ffff:192.0.2.1", "192.0.2.1"),
            ("2001:db8:0:1:ffff::1", "2001:db8:0:1::"),
            ("2001:db8:0:2::1", "2001:db8:0:2::"),
        ] {
            let [address, expected]: [IpAddr; 2] = [address, expected].map(|text| text.parse().unwrap());
            assert_eq!(network(address), expected);
        }
    }
}
