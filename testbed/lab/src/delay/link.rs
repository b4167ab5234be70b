//! When packets have passed links that are slow. Pure: time is an argument.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

/// The link of a host or router to the Internet, with a rate in each direction, and before each a queue that drops what finds no room
/// (tail drop), as the queues of home routers and modems do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SlowLink {
    /// The public address behind it: what has another one is not limited.
    pub address: IpAddr,
    /// Bits of IP packets that pass in a second, in each direction.
    pub bits_per_second: u32,
    /// Bytes that may wait, in each direction.
    pub queue_bytes: u32,
}

/// Both directions of all slow links.
#[derive(Debug)]
pub(super) struct Links(Vec<Link>);

#[derive(Debug)]
struct Link {
    slow: SlowLink,
    from: Direction,
    to: Direction,
}

/// When a direction has sent all that it has taken.
#[derive(Debug, Default)]
struct Direction {
    idle_at: Option<Instant>,
}

impl Links {
    pub(super) fn new(slow: &[SlowLink]) -> Self {
        let link =
            |slow: &SlowLink| Link { slow: *slow, from: Direction::default(), to: Direction::default() };
        Self(slow.iter().map(link).collect())
    }

    /// When a packet has passed the links of its sender and its receiver; `None` if it found no room in a queue.
    pub(super) fn pass(&mut self, now: Instant, packet: &[u8]) -> Option<Instant> {
        let Some((source, destination)) = ends(packet) else { return Some(now) };
        let mut passed = now;
        for link in &mut self.0 {
            if link.slow.address == source {
                passed = link.from.pass(passed, packet.len(), &link.slow)?;
            }
        }
        for link in &mut self.0 {
            if link.slow.address == destination {
                passed = link.to.pass(passed, packet.len(), &link.slow)?;
            }
        }
        Some(passed)
    }
}

impl Direction {
    /// A token bucket for one packet: the next one leaves when this one has.
    fn pass(&mut self, now: Instant, length: usize, slow: &SlowLink) -> Option<Instant> {
        let begins = self.idle_at.map_or(now, |idle_at| idle_at.max(now));
        let waiting = begins.saturating_duration_since(now);
        if waiting > time_of(slow.queue_bytes.into(), slow) {
            return None;
        }
        let length = u64::try_from(length).unwrap_or(u64::MAX);
        let passed = begins + time_of(length, slow);
        self.idle_at = Some(passed);
        Some(passed)
    }
}

/// Time that a link takes to send so many bytes.
fn time_of(bytes: u64, slow: &SlowLink) -> Duration {
    let bits = bytes.saturating_mul(8).saturating_mul(1_000_000_000);
    Duration::from_nanos(bits.checked_div(slow.bits_per_second.into()).unwrap_or(u64::MAX))
}

/// Source and destination of an IP packet (RFC 791, RFC 8200).
fn ends(packet: &[u8]) -> Option<(IpAddr, IpAddr)> {
    let ipv4 = |at| packet.get(at..)?.first_chunk::<4>().map(|bytes| IpAddr::from(Ipv4Addr::from(*bytes)));
    let ipv6 = |at| packet.get(at..)?.first_chunk::<16>().map(|bytes| IpAddr::from(Ipv6Addr::from(*bytes)));
    match packet.first()? >> 4 {
        4 => Some((ipv4(12)?, ipv4(16)?)),
        6 => Some((ipv6(8)?, ipv6(24)?)),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SLOW: SlowLink = SlowLink {
        address: IpAddr::V4(Ipv4Addr::new(203, 0, 113, 10)),
        bits_per_second: 10_000_000,
        queue_bytes: 12_500,
    };

    fn packet(source: u8, destination: u8) -> [u8; 1250] {
        let mut packet = [0; 1250];
        packet[0] = 0x45;
        packet[12..16].copy_from_slice(&[203, 0, 113, source]);
        packet[16..20].copy_from_slice(&[203, 0, 113, destination]);
        packet
    }

    #[test]
    fn each_direction_passes_packets_at_its_rate_and_drops_what_finds_no_room() {
        let (mut links, now) = (Links::new(&[SLOW]), Instant::now());
        // 1,250 bytes take 1 ms, and ten of them may wait beside the one that is sent.
        for number in 1..=11 {
            assert_eq!(links.pass(now, &packet(10, 11)), Some(now + Duration::from_millis(number)));
        }
        assert_eq!(links.pass(now, &packet(10, 11)), None);
        let later = now + Duration::from_millis(5);
        assert_eq!(links.pass(later, &packet(10, 11)), Some(now + Duration::from_millis(12)));
        assert_eq!(
            links.pass(later, &packet(11, 10)),
            Some(later + Duration::from_millis(1)),
            "the other direction"
        );
        assert_eq!(links.pass(later, &packet(11, 12)), Some(later), "another link");
        let idle = now + Duration::from_secs(1);
        assert_eq!(
            links.pass(idle, &packet(10, 11)),
            Some(idle + Duration::from_millis(1)),
            "nothing is saved up"
        );
    }

    #[test]
    fn a_packet_between_two_slow_links_passes_one_after_the_other() {
        let other = SlowLink { address: "203.0.113.11".parse().unwrap(), bits_per_second: 1_000_000, ..SLOW };
        let (mut links, now) = (Links::new(&[other, SLOW]), Instant::now());
        assert_eq!(links.pass(now, &packet(10, 11)), Some(now + Duration::from_millis(11)));
    }

    proptest! {
        #[test]
        fn what_is_no_ip_packet_passes_at_once(packet in proptest::collection::vec(any::<u8>(), 0..60)) {
            let now = Instant::now();
            let passed = Links::new(&[SLOW]).pass(now, &packet);
            prop_assert!(passed.is_some_and(|passed| passed >= now));
        }
    }
}
