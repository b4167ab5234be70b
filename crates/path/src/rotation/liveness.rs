//! Whether a session is alive, as observations of the device say.

use std::net::SocketAddr;
use std::time::Duration;

use super::Config;

/// Sent bytes that need no answer: two persistent keepalives of 32 bytes each.
const MAX_UNANSWERED_BYTES: u64 = 64;

/// The WireGuard device's state of the peer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Observation {
    /// Endpoint that packets go to now; `None` if there is none.
    pub endpoint: Option<SocketAddr>,
    /// Time since the last completed handshake.
    pub handshake_age: Option<Duration>,
    /// Bytes received from the peer, authenticated, since it was added to the device.
    pub rx_bytes: u64,
    /// Bytes sent to the peer since then.
    pub tx_bytes: u64,
}

/// Reason why a session is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Loss {
    Expired,
    Silent,
}

/// Signs of life of a session.
#[derive(Debug, Clone, Default)]
pub(super) struct Liveness {
    /// See [`crate::PeerPaths::silence`].
    pub(super) silence: Option<Duration>,
    /// The last observation; nothing is decided before the first.
    pub(super) device: Option<Observation>,
    /// Time at which the last handshake was completed.
    pub(super) handshake: Option<Duration>,
    /// Time at which the peer's last packet was observed.
    pub(super) received: Option<Duration>,
    /// The device's count of sent bytes at that time.
    sent_when_received: u64,
    /// Time at which an answer to more than keepalives became outstanding.
    unanswered_since: Option<Duration>,
}

impl Liveness {
    /// Takes the device's state of the peer. Returns whether it shows packets that were not known.
    pub(super) fn observe(&mut self, now: Duration, observation: Observation) -> bool {
        let handshake = observation.handshake_age.map(|age| now.saturating_sub(age));
        // Ages are rounded: the same handshake may seem to move by a second.
        let newer = handshake > self.handshake.map(|known| known.saturating_add(Duration::from_secs(2)));
        // A recreated device counts from zero.
        let received = match self.device {
            Some(before) if observation.rx_bytes < before.rx_bytes => observation.rx_bytes > 0,
            Some(before) => observation.rx_bytes > before.rx_bytes,
            // The first observation shows a session of another process: it counts as alive.
            None => handshake.is_some(),
        };
        if received || newer {
            self.received = Some(now);
        }
        self.update_unanswered(now, observation.tx_bytes, received || newer);
        if newer || handshake.is_none() {
            self.handshake = handshake;
        }
        self.device = Some(observation);
        received
    }

    fn update_unanswered(&mut self, now: Duration, sent: u64, received: bool) {
        // A recreated device counts from zero.
        if received || sent < self.sent_when_received {
            self.sent_when_received = sent;
            self.unanswered_since = None;
        } else if sent.saturating_sub(self.sent_when_received) > MAX_UNANSWERED_BYTES {
            self.unanswered_since.get_or_insert(now);
        }
    }

    /// A peer that sends no keepalives has nothing to shake hands for while nothing is sent.
    pub(super) fn is_expired(&self, now: Duration, config: &Config) -> bool {
        let is_old = |at| self.silence.is_some() && now.saturating_sub(at) > config.session_lifetime;
        self.handshake.is_none_or(is_old)
    }

    /// Whether the peer has sent nothing for too long, or not answered.
    pub(super) fn is_silent(&self, now: Duration, config: &Config) -> bool {
        let longer = |since: Option<Duration>, limit| since.is_some_and(|at| now.saturating_sub(at) > limit);
        longer(self.unanswered_since, config.unanswered)
            || self.silence.is_some_and(|limit| self.received.is_none() || longer(self.received, limit))
    }

    /// The last moment of the session, if nothing happens before.
    pub(super) fn ends(&self, config: &Config) -> Option<Duration> {
        let expires = self.handshake.filter(|_| self.silence.is_some());
        let expires = expires.map(|at| at.saturating_add(config.session_lifetime));
        let silent = self.received.zip(self.silence).map(|(at, limit)| at.saturating_add(limit));
        let unanswered = self.unanswered_since.map(|at| at.saturating_add(config.unanswered));
        expires.into_iter().chain(silent).chain(unanswered).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_lives_until_its_last_moment() {
        let (mut liveness, config) = (Liveness::default(), Config::default());
        assert!(liveness.is_expired(Duration::ZERO, &config), "there was no handshake");
        let second = Duration::from_secs(1);
        let handshake = |tx_bytes| Observation {
            handshake_age: Some(Duration::ZERO),
            rx_bytes: 92,
            tx_bytes,
            ..Observation::default()
        };
        assert!(liveness.observe(second, handshake(0)));
        assert_eq!(liveness.ends(&config), None, "the peer need not send keepalives");
        assert!(!liveness.observe(2 * second, handshake(MAX_UNANSWERED_BYTES + 1)));
        let end = 2 * second + config.unanswered;
        assert_eq!(liveness.ends(&config), Some(end));
        let is_alive = |now| !liveness.is_expired(now, &config) && !liveness.is_silent(now, &config);
        assert!(is_alive(end) && !is_alive(end + Duration::from_millis(1)));
    }
}
