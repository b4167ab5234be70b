//! What an operator asks of the paths to a peer.

use std::time::Duration;

use fairlead_api::wireguard::PublicKey;

use super::PathAgent;
use crate::prober::CandidateStatus;
use crate::probing::{ProbeCounts, Probing};

impl PathAgent {
    /// Asks every candidate of a peer now, within the limits on probes; [`Self::candidates`] has what they answer. Whether that is
    /// possible: the peer must be known, and probes [enabled](Self::enable_probes).
    pub fn ping(&mut self, now: Duration, key: &PublicKey) -> bool {
        let Some(peer) = self.peers.get_mut(key).filter(|_| self.probing.is_some()) else { return false };
        peer.prober.ping(now);
        self.conclude_probing(now, key);
        true
    }

    /// The candidates of a peer, and addresses that its requests came from; empty where no probes can be sent.
    pub fn candidates(&self, now: Duration, key: &PublicKey) -> Vec<CandidateStatus> {
        self.peers.get(key).map(|peer| peer.prober.candidates(now)).unwrap_or_default()
    }

    /// How many probes were sent, received and dropped.
    pub fn probe_counts(&self) -> ProbeCounts {
        self.probing.as_ref().map(Probing::counts).unwrap_or_default()
    }
}
