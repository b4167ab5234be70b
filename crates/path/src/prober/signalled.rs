//! Candidates that the two nodes tell each other over the relay, as Tailscale's `CallMeMaybe` does: what is published reaches the peer
//! later, and a NAT may have changed its mapping since.

use std::net::SocketAddr;
use std::time::Duration;

use super::Prober;
use super::path::{Origin, Path};
use crate::candidates::Candidate;

/// Time for which candidates that the peer has named are tried, unless it names others. It names them again in every round.
const LIFETIME: Duration = Duration::from_secs(120);
/// The most candidates that only the peer itself names.
const MAX_SIGNALLED: usize = 8;

impl Prober {
    /// Takes the candidates that the peer names in a request over the relay, best first, in place of those that it named before. They
    /// displace none that are published, and obey the same limits.
    pub(crate) fn set_signalled(&mut self, now: Duration, candidates: &[Candidate]) {
        if self.network.is_relay_only() {
            return;
        }
        self.forget_signalled(|path| !candidates.iter().any(|named| named.address == path.candidate.address));
        let tries_now = !self.traffic.is_idle(now);
        let until = now.saturating_add(LIFETIME);
        let mut is_new = false;
        let ports = self.network.relay_ports;
        let is_port = |address| ports.is_some_and(|ports| ports.contains(address));
        for candidate in candidates.iter().filter(|candidate| !is_port(candidate.address)) {
            let signalled =
                self.paths.iter().filter(|path| matches!(path.origin, Origin::Signalled(_))).count();
            let known = self.paths.iter_mut().find(|path| path.candidate.address == candidate.address);
            match known {
                Some(path) if path.origin == Origin::Published => {}
                Some(path) => {
                    path.origin = Origin::Signalled(until);
                    path.candidate = *candidate;
                }
                None if signalled < MAX_SIGNALLED => {
                    is_new = true;
                    let attempt = tries_now.then_some((now, 0));
                    let origin = Origin::Signalled(until);
                    self.paths.all.push(Path { origin, attempt, ..Path::new(*candidate, now) });
                }
                None => {}
            }
        }
        if is_new && tries_now {
            self.rounds.in_vain = 0;
            self.plan_round(now);
        }
        self.rounds.has_untried |= is_new && !tries_now;
    }

    /// This node's own candidates are others now: a peer that the relay reaches is told, and tries them while this node's requests
    /// open its own NAT for it. Whether this is such a peer.
    pub(crate) fn own_candidates_changed(&mut self, now: Duration) -> bool {
        let hears = self.paths.iter().any(|path| path.is_relay() && path.is_fresh(now));
        let is_told =
            hears && self.needs_round(now) && !self.traffic.is_idle(now) && !self.network.is_relay_only();
        if is_told {
            self.rounds.in_vain = 0;
            self.start_round(now);
        }
        is_told
    }

    /// Whether an address stands for the peer by way of the relay.
    pub(crate) fn is_relay(&self, address: SocketAddr) -> bool {
        self.paths.is_relay(address)
    }

    /// Forgets what the peer has not repeated for long.
    pub(super) fn expire_signalled(&mut self, now: Duration) {
        self.forget_signalled(|path| matches!(path.origin, Origin::Signalled(until) if until <= now));
    }

    fn forget_signalled(&mut self, is_gone: impl Fn(&Path) -> bool) {
        let current = self.paths.current;
        self.paths.all.retain_mut(|path| {
            let is_gone = matches!(path.origin, Origin::Signalled(_)) && is_gone(path);
            if is_gone && Some(path.candidate.address) == current {
                path.origin = Origin::Request;
                return true;
            }
            !is_gone
        });
    }
}
