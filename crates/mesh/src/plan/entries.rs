//! Peers that come to this entry node while another one is in use. Pure.
//!
//! A Peer that is elsewhere is in the device without prefixes and without a session. So a handshake that the device shows is one
//! that the Peer began here since then: this node takes the next term, and all others follow once it is published.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use fairlead_api::resources::MAX_ENTRY_TERM;
use fairlead_keys::{DeviceState, PublicKey};
use fairlead_limits::{Rate, TokenBucket};

use super::external::DesiredExternal;

/// Budget of a Peer that comes to this node: five times in quick succession, then once per interval. Each time is a write that all nodes
/// read.
const BUDGET: Rate = Rate::one_each(Duration::from_secs(30), 5);

/// The terms that this node has taken since it started.
#[derive(Debug, Default)]
pub struct Entries {
    terms: BTreeMap<PublicKey, u64>,
    /// Remaining budget by the key of the Peer.
    budgets: BTreeMap<PublicKey, TokenBucket>,
}

impl Entries {
    /// Terms by the key of the Peer.
    pub fn terms(&self) -> &BTreeMap<PublicKey, u64> {
        &self.terms
    }

    /// Takes a term for each Peer that has come. Returns whether one has.
    pub fn observe(
        &mut self,
        planned: &BTreeMap<PublicKey, DesiredExternal>,
        device: &DeviceState,
        now: Instant,
    ) -> bool {
        self.terms.retain(|key, _| planned.contains_key(key));
        self.budgets.retain(|key, _| planned.contains_key(key));
        let mut has_come = false;
        for (key, peer) in planned {
            let Some(other) = peer.entry.and_then(|entry| entry.other_term) else { continue };
            let calls = device.peers.get(key).is_some_and(|present| {
                present.config.allowed_ips.is_empty() && present.last_handshake.is_some()
            });
            // The API server takes no higher one, and with it nothing else of this node.
            let term = other.saturating_add(1).min(MAX_ENTRY_TERM);
            let is_taken = self.terms.get(key).is_some_and(|own| *own >= term);
            let full = || TokenBucket::full(BUDGET, now);
            if calls && !is_taken && self.budgets.entry(*key).or_insert_with(full).take(now, 1).is_ok() {
                tracing::info!(peer = peer.name, term, "a Peer has come to this entry node");
                self.terms.insert(*key, term);
                has_come = true;
            }
        }
        has_come
    }
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use fairlead_keys::{PeerConfig, PeerState};
    use fairlead_topology::EntryRole;

    use super::*;

    const LAPTOP: PublicKey = PublicKey([9; 32]);

    fn planned(other_term: Option<u64>) -> BTreeMap<PublicKey, DesiredExternal> {
        let entry = Some(EntryRole { own_term: 0, other_term });
        let (name, config) = ("laptop".to_owned(), PeerConfig::default());
        [(LAPTOP, DesiredExternal { name, config, addresses: Vec::new(), entry })].into()
    }

    fn device(has_prefixes: bool, has_session: bool) -> DeviceState {
        let allowed_ips = has_prefixes.then(|| "10.9.0.1/32".parse().unwrap()).into_iter().collect();
        let last_handshake = has_session.then_some(SystemTime::UNIX_EPOCH);
        let config = PeerConfig { allowed_ips, ..PeerConfig::default() };
        let peer = PeerState { config, last_handshake, ..PeerState::default() };
        DeviceState { private_key: None, listen_port: 1, fwmark: 0, peers: [(LAPTOP, peer)].into() }
    }

    #[test]
    fn a_handshake_of_a_peer_that_is_elsewhere_takes_the_next_term_once() {
        let (mut entries, now) = (Entries::default(), Instant::now());
        assert!(!entries.observe(&planned(Some(4)), &device(false, false), now), "it has not come");
        assert!(
            !entries.observe(&planned(Some(4)), &device(true, true), now),
            "the session is from before it went"
        );
        assert!(!entries.observe(&planned(None), &device(false, true), now), "it is here already");
        assert!(entries.observe(&planned(Some(4)), &device(false, true), now));
        assert_eq!(entries.terms(), &[(LAPTOP, 5)].into());
        assert!(!entries.observe(&planned(Some(4)), &device(false, true), now), "the plan follows");
        // It went to another node and came back.
        assert!(entries.observe(&planned(Some(6)), &device(false, true), now));
        assert_eq!(entries.terms(), &[(LAPTOP, 7)].into());
        entries.observe(&BTreeMap::new(), &device(false, true), now);
        assert!(entries.terms().is_empty(), "the Peer was deleted");
    }

    #[test]
    fn a_key_that_two_machines_use_costs_few_writes() {
        let (mut entries, begin) = (Entries::default(), Instant::now());
        let mut taken = 0;
        for second in 0..3600 {
            let now = begin + Duration::from_secs(second);
            let other = entries.terms().get(&LAPTOP).copied().unwrap_or_default() + 1;
            taken += u32::from(entries.observe(&planned(Some(other)), &device(false, true), now));
        }
        assert!((100..=130).contains(&taken), "{taken}");
    }

    #[test]
    fn the_highest_term_is_not_exceeded_and_takes_no_turn() {
        let mut entries = Entries::default();
        for hostile in [MAX_ENTRY_TERM, u64::MAX] {
            entries.observe(&planned(Some(hostile)), &device(false, true), Instant::now());
            assert_eq!(entries.terms(), &[(LAPTOP, MAX_ENTRY_TERM)].into());
        }
    }
}
