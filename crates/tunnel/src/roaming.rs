//! Whether a session moves to the endpoint that an authenticated packet came from (roaming, WireGuard paper 2.1), without I/O.
//!
//! Plain roaming is not enough where two ways deliver at once: each of two peers uses the one that it last heard the other on, and
//! their packets under way make both swap for ever. So a configured endpoint is held for a moment at the peer with the lower key, and
//! no session moves to a relay while its direct endpoint delivers: to relay packets is the decision of the caller, who asks both.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

/// Time that a session keeps its endpoint after it was established, or the endpoint configured, whatever arrives from elsewhere. The peer
/// with the lower key waits until no packet of another path is under way, and the other one follows it.
pub const HOLD: Duration = Duration::from_secs(1);
/// The same, for both peers, where a relay was configured: until the other one has left the direct path that one of them has lost.
pub const HOLD_AT_RELAY: Duration = Duration::from_secs(3);
/// Time in which packets come only by way of a relay, none from the direct endpoint, before the session moves to the relay: as long as a
/// path may be in doubt, for what sends both ways meanwhile.
pub const RELAYED_ALONE: Duration = Duration::from_secs(2);

/// Rule by which the session of one peer moves to another endpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Roaming {
    held_until: Option<Instant>,
    /// Time at which the first packet came by way of a relay since the direct endpoint in use last delivered.
    relayed_since: Option<Instant>,
}

impl Roaming {
    /// The session was established, and stays where it is for [`HOLD`].
    pub fn hold(&mut self, now: Instant) {
        self.held_until = now.checked_add(HOLD);
    }

    /// The endpoint of a session was configured. `is_first` is the peer with the lower key.
    pub fn configured(&mut self, endpoint: SocketAddr, is_first: bool, now: Instant) {
        *self = Self::default();
        if endpoint.ip().is_loopback() {
            self.held_until = now.checked_add(HOLD_AT_RELAY);
        } else if is_first {
            self.hold(now);
        }
    }

    /// Takes the source of an authenticated packet that no newer one has overtaken. Whether the session uses it from now on; `present`
    /// is what it uses so far. A relay is at a loopback address, as the way that this host has to it is.
    pub fn moves(&mut self, present: Option<SocketAddr>, from: SocketAddr, now: Instant) -> bool {
        let Some(present) = present.filter(|present| *present != from) else {
            self.relayed_since = None;
            return true;
        };
        if self.held_until.is_some_and(|until| now < until) {
            return false;
        }
        if from.ip().is_loopback() && !present.ip().is_loopback() {
            let since = *self.relayed_since.get_or_insert(now);
            if now.saturating_duration_since(since) < RELAYED_ALONE {
                return false;
            }
        }
        self.relayed_since = None;
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DIRECT: SocketAddr =
        SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1)), 7);
    const OTHER: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 2)), 7);
    const RELAY: SocketAddr =
        SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::new(127, 64, 0, 1)), 7);

    #[test]
    fn a_session_moves_to_any_direct_endpoint_at_once_unless_it_is_held() {
        let (mut roaming, now) = (Roaming::default(), Instant::now());
        assert!(roaming.moves(None, DIRECT, now));
        assert!(roaming.moves(Some(DIRECT), OTHER, now));
        assert!(roaming.moves(Some(RELAY), DIRECT, now));
        roaming.hold(now);
        assert!(!roaming.moves(Some(DIRECT), OTHER, now));
        assert!(roaming.moves(Some(DIRECT), DIRECT, now));
        assert!(roaming.moves(Some(DIRECT), OTHER, now + HOLD));
    }

    #[test]
    fn a_configured_endpoint_is_held_by_the_first_peer_and_a_relay_by_both() {
        let now = Instant::now();
        for (endpoint, is_first, hold) in [
            (DIRECT, true, HOLD),
            (DIRECT, false, Duration::ZERO),
            (RELAY, true, HOLD_AT_RELAY),
            (RELAY, false, HOLD_AT_RELAY),
        ] {
            let mut roaming = Roaming::default();
            roaming.configured(endpoint, is_first, now);
            let before = now + hold.saturating_sub(Duration::from_millis(1));
            assert_eq!(roaming.moves(Some(endpoint), OTHER, before), hold.is_zero());
            assert!(roaming.moves(Some(endpoint), OTHER, now + hold));
        }
    }

    #[test]
    fn a_session_moves_to_a_relay_that_has_delivered_alone_for_a_while() {
        let (mut roaming, start) = (Roaming::default(), Instant::now());
        let at = |milliseconds| start + Duration::from_millis(milliseconds);
        // What the direct endpoint delivers in between keeps it.
        for (from, milliseconds) in [(RELAY, 0), (RELAY, 1900), (DIRECT, 1950), (RELAY, 2100), (RELAY, 4000)]
        {
            assert_eq!(roaming.moves(Some(DIRECT), from, at(milliseconds)), from == DIRECT);
        }
        assert!(roaming.moves(Some(DIRECT), RELAY, at(4100)));
        assert!(roaming.moves(Some(RELAY), RELAY, at(4101)));
    }

    /// Two peers that send all the time, one of which uses the relay: whatever is under way, both soon use the direct path.
    #[test]
    fn two_peers_do_not_swap_their_paths_for_ever() {
        let (start, delay) = (Instant::now(), 20);
        let mut present = [RELAY, DIRECT];
        let mut roaming = [Roaming::default(); 2];
        let mut under_way: Vec<(u64, usize, SocketAddr)> = Vec::new();
        for millisecond in 0..3000_u64 {
            let now = start + Duration::from_millis(millisecond);
            let arrived: Vec<_> = under_way.extract_if(.., |(at, ..)| *at == millisecond).collect();
            for (_, to, from) in arrived {
                let one: &mut Roaming = if to == 0 { &mut roaming[0] } else { &mut roaming[1] };
                if one.moves(Some(present[to]), from, now) {
                    present[to] = from;
                }
            }
            under_way.extend([0, 1].map(|node: usize| (millisecond + delay, 1 - node, present[node])));
        }
        assert_eq!(present, [DIRECT; 2]);
    }
}
