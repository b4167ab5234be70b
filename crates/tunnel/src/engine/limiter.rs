//! Limits the handshakes that cost computation.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use gotatun::noise::TunnResult;
use gotatun::noise::rate_limiter::RateLimiter;
use gotatun::packet::{Packet, WgKind};
use gotatun::x25519;

/// Handshake messages of one address per second before it has to answer with a cookie.
pub(super) const MAX_HANDSHAKES_PER_ADDRESS: u64 = 100;
/// Handshake messages of all addresses per second before every sender has to.
pub(super) const MAX_HANDSHAKES: u32 = 1_000;

/// Checks message formats and MACs; under load it demands cookies (WireGuard paper 5.3).
pub(super) struct HandshakeLimiter {
    per_address: Arc<RateLimiter>,
    /// Demands a cookie from every sender: for floods from many (or forged) addresses.
    strict: RateLimiter,
    second: Instant,
    handshakes: u32,
}

impl HandshakeLimiter {
    pub(super) fn new(public: &x25519::PublicKey, now: Instant) -> Self {
        Self {
            per_address: Arc::new(RateLimiter::new(public, MAX_HANDSHAKES_PER_ADDRESS)),
            strict: RateLimiter::new(public, 0),
            second: now,
            handshakes: 0,
        }
    }

    /// The limiter per address, which the protocol library wants to have too.
    pub(super) fn per_address(&self) -> Arc<RateLimiter> {
        Arc::clone(&self.per_address)
    }

    /// The message, or the cookie to answer with, or an error.
    pub(super) fn verify(&mut self, from: SocketAddr, datagram: &[u8]) -> Result<WgKind, TunnResult> {
        let is_flood = self.handshakes >= MAX_HANDSHAKES;
        let limiter = if is_flood { &self.strict } else { &*self.per_address };
        let verified = limiter.verify_packet(from, Packet::copy_from(datagram));
        // Only what has the right form and MAC costs a Diffie-Hellman computation, or would have: a sender that does not
        // know our public key makes no one else wait.
        let is_handshake = match &verified {
            Ok(message) => matches!(message, WgKind::HandshakeInit(_) | WgKind::HandshakeResp(_)),
            Err(result) => matches!(result, TunnResult::WriteToNetwork(_)),
        };
        if is_handshake {
            self.handshakes = self.handshakes.saturating_add(1);
        }
        verified
    }

    /// Begins another second when it is time.
    pub(super) fn tick(&mut self, now: Instant) {
        if now.saturating_duration_since(self.second) >= Duration::from_secs(1) {
            self.second = now;
            self.handshakes = 0;
            self.per_address.try_reset_count();
            self.strict.try_reset_count();
        }
    }
}
