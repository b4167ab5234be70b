//! Choice of the entry node of this machine, and of the time at which it tries another one.

use std::time::{Duration, Instant, SystemTime};

use fairlead_address::{Endpoint, is_private};
use fairlead_api::resources::{EndpointDiscoveryMethod, NatType, WireKubePeer};
use fairlead_keys::PeerState;
use kube::ResourceExt as _;

/// Entry nodes of a Peer whose user names none.
const CHOSEN: usize = 3;
/// Longest time for which data stay unanswered: a receiver that has nothing to send answers after 10 s (`KEEPALIVE_TIMEOUT`, WireGuard paper 6.5).
const UNANSWERED_DATA: Duration = Duration::from_secs(12);
/// Longest time for which handshakes stay unanswered: the second is sent after 5 s (`REKEY_TIMEOUT`).
const UNANSWERED_HANDSHAKE: Duration = Duration::from_secs(6);
/// Age at which a session ends (`REJECT_AFTER_TIME`).
const SESSION: Duration = Duration::from_secs(180);
/// Bytes of a keepalive, which is never answered.
const KEEPALIVE: u64 = 32;
/// Rounds through all entry nodes after which each has no more time than in this one.
const MAX_ROUNDS: u32 = 4;

/// The nodes through which a machine anywhere can probably enter, the best first.
pub(super) fn choose(peers: &[WireKubePeer]) -> Vec<String> {
    let mut ranked: Vec<(u8, String)> =
        peers.iter().filter_map(|peer| Some((rank(peer)?, peer.name_any()))).collect();
    ranked.sort_unstable();
    ranked.into_iter().map(|(_, name)| name).take(CHOSEN).collect()
}

/// Rank of a node by how well others reach it that they have not heard of; less is better.
fn rank(peer: &WireKubePeer) -> Option<u8> {
    use EndpointDiscoveryMethod as Method;
    peer.spec.parse_public_key().ok()?;
    let endpoint: Endpoint = peer.spec.endpoint.as_deref()?.parse().ok()?;
    let status = peer.status.as_ref();
    let nat = status.and_then(|status| status.nat_type).unwrap_or_default();
    let method = status.and_then(|status| status.endpoint_discovery_method).unwrap_or_default();
    let is_private = match &endpoint {
        Endpoint::Address(address) => is_private(address.ip()),
        Endpoint::Name { .. } => false,
    };
    Some(match (method, nat) {
        (Method::Manual | Method::Upnp, _) => 0,
        _ if is_private => 3,
        (Method::AwsMetadata | Method::InternalIp | Method::Ipv6, _) | (_, NatType::Open) => 0,
        (_, NatType::Cone) => 1,
        (_, NatType::Unknown) => 2,
        (_, NatType::PortRestrictedCone | NatType::Symmetric) => 4,
    })
}

/// The entry node in use.
#[derive(Debug, Default)]
pub(super) struct Entries {
    names: Vec<String>,
    /// Position of the one in use, and of its endpoint: a name may have several addresses.
    current: usize,
    address: usize,
    /// Number of rounds through all nodes since the last answer.
    rounds: u32,
    silence: Silence,
}

impl Entries {
    /// The names that the Peer has; the one in use stays if it is among them.
    pub(super) fn set(&mut self, names: Vec<String>) {
        if names != self.names {
            let current = self.name().and_then(|name| names.iter().position(|other| other == name));
            if current.is_none() {
                self.begin();
            }
            self.current = current.unwrap_or_default();
            self.names = names;
        }
    }

    /// The one in use; `None` where every node has a tunnel with this machine.
    pub(super) fn name(&self) -> Option<&str> {
        self.names.get(self.current).map(String::as_str)
    }

    /// Index of the address of its endpoint that is in use.
    pub(super) fn address(&self) -> usize {
        self.address
    }

    /// Takes note of what the device says of the one in use; returns whether another one, or another address, is to be tried.
    pub(super) fn observe(&mut self, state: &PeerState, now: Instant) -> bool {
        let factor = 1 + self.rounds.min(MAX_ROUNDS);
        let is_gone = self.silence.is_gone(state, now, factor);
        if self.silence.is_answered {
            self.rounds = 0;
        }
        is_gone
    }

    /// Tries the next: the next of `addresses` of the endpoint, or the next node.
    pub(super) fn next(&mut self, addresses: usize) {
        let address = self.address + 1;
        self.begin();
        if address < addresses {
            self.address = address;
            return;
        }
        self.current += 1;
        if self.current >= self.names.len() {
            self.current = 0;
            self.rounds = self.rounds.saturating_add(1);
        }
    }

    fn begin(&mut self) {
        self.address = 0;
        self.silence = Silence::default();
    }
}

/// Whether what was sent to a peer is answered. Silence alone says nothing: the one of a tunnel without traffic may last for hours.
#[derive(Debug, Default)]
struct Silence {
    /// Bytes received and sent.
    counters: Option<(u64, u64)>,
    /// The first that was sent since something was received.
    asked: Option<Instant>,
    /// The last handshake, and when it was noticed: the clock that dates it may be set.
    handshake: Option<(SystemTime, Instant)>,
    is_answered: bool,
}

impl Silence {
    fn is_gone(&mut self, state: &PeerState, now: Instant, factor: u32) -> bool {
        let received = state.rx_bytes;
        let sent = state.tx_bytes;
        // What an earlier process has sent and received says nothing.
        let unseen = (received, if received == 0 { 0 } else { sent });
        let before = self.counters.replace((received, sent)).unwrap_or(unseen);
        self.is_answered = received != before.0;
        let sent = sent.saturating_sub(before.1);
        if state.last_handshake != self.handshake.map(|(at, _)| at) {
            self.handshake = state.last_handshake.map(|at| (at, now));
        }
        let has_session = self.handshake.is_some_and(|(_, noticed)| now.duration_since(noticed) < SESSION);
        if self.is_answered {
            self.asked = None;
        } else if sent > 0 && !(has_session && sent == KEEPALIVE) {
            self.asked.get_or_insert(now);
        }
        let limit = if has_session { UNANSWERED_DATA } else { UNANSWERED_HANDSHAKE };
        self.asked.is_some_and(|asked| now.duration_since(asked) >= limit * factor)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn node(name: &str, endpoint: Option<&str>, method: &str, nat: &str) -> WireKubePeer {
        serde_json::from_value(json!({
            "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubePeer", "metadata": { "name": name },
            "spec": { "publicKey": fairlead_keys::PublicKey([1; 32]).to_string(), "endpoint": endpoint },
            "status": { "endpointDiscoveryMethod": method, "natType": nat },
        }))
        .unwrap()
    }

    #[test]
    fn nodes_that_others_reach_come_first() {
        let nodes = [
            node("a-symmetric", Some("198.51.100.1:7"), "stun", "symmetric"),
            node("b-private", Some("192.168.1.7:51820"), "internal-ip", ""),
            node("c-silent", None, "stun", "cone"),
            node("d-cone", Some("198.51.100.2:7"), "stun", "cone"),
            node("e-public", Some("198.51.100.3:51820"), "internal-ip", ""),
            node("f-manual", Some("gate.example:51820"), "manual", ""),
        ];
        assert_eq!(choose(&nodes), ["e-public", "f-manual", "d-cone"]);
        assert_eq!(choose(&nodes[..2]), ["b-private", "a-symmetric"]);
        assert!(choose(&nodes[2..3]).is_empty());
    }

    fn entries() -> Entries {
        let mut entries = Entries::default();
        entries.set(vec!["a".to_owned(), "b".to_owned()]);
        entries
    }

    fn state(received: u64, sent: u64, handshake: u64) -> PeerState {
        let last_handshake = (handshake > 0).then(|| SystemTime::UNIX_EPOCH + Duration::from_secs(handshake));
        PeerState { rx_bytes: received, tx_bytes: sent, last_handshake, ..PeerState::default() }
    }

    #[test]
    fn only_what_is_not_answered_shows_that_an_entry_node_is_gone() {
        let (mut entries, start) = (entries(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(!entries.observe(&state(92, 148, 1), at(0)));
        // Keepalives go one way.
        for second in 1..100 {
            assert!(!entries.observe(&state(92, 148 + second * KEEPALIVE, 1), at(second)), "{second}");
        }
        let sent = 148 + 99 * KEEPALIVE;
        assert!(!entries.observe(&state(92, sent + 128, 1), at(100)));
        assert!(!entries.observe(&state(92, sent + 256, 1), at(111)), "it may answer yet");
        assert!(entries.observe(&state(92, sent + 256, 1), at(112)));
        assert!(!entries.observe(&state(124, sent + 256, 1), at(113)), "it has answered");
        assert!(!entries.observe(&state(124, sent + 256, 1), at(900)), "nothing was sent");
    }

    #[test]
    fn a_node_that_never_answers_has_time_for_two_handshakes_and_longer_in_each_round() {
        let (mut entries, start) = (entries(), Instant::now());
        let at = |seconds| start + Duration::from_secs(seconds);
        assert!(!entries.observe(&state(0, 148, 0), at(0)));
        assert!(!entries.observe(&state(0, 296, 0), at(5)));
        assert!(entries.observe(&state(0, 296, 0), at(6)));
        entries.next(2);
        assert_eq!((entries.name(), entries.address()), (Some("a"), 1));
        entries.next(2);
        assert_eq!((entries.name(), entries.address()), (Some("b"), 0));
        entries.next(1);
        assert_eq!(entries.name(), Some("a"));
        assert!(!entries.observe(&state(0, 148, 0), at(10)));
        assert!(!entries.observe(&state(0, 148, 0), at(21)));
        assert!(entries.observe(&state(0, 148, 0), at(22)));
        assert!(!entries.observe(&state(92, 148, 2), at(23)));
        assert_eq!(entries.rounds, 0);
    }

    #[test]
    fn the_node_in_use_stays_while_the_peer_names_it() {
        let mut entries = entries();
        entries.next(0);
        entries.set(vec!["c".to_owned(), "b".to_owned()]);
        assert_eq!(entries.name(), Some("b"));
        entries.set(vec!["c".to_owned()]);
        assert_eq!(entries.name(), Some("c"));
        entries.set(Vec::new());
        assert_eq!(entries.name(), None);
    }
}
