//! What the protocol library needs of the device, for all peers.

use std::sync::Arc;

use fairlead_api::wireguard::PublicKey;
use gotatun::noise::Tunn;
use gotatun::noise::index_table::IndexTable;
use gotatun::noise::rate_limiter::RateLimiter;
use gotatun::x25519;

/// This device's identity, and the session indexes it gives out.
pub(crate) struct Protocol {
    pub(crate) private: x25519::StaticSecret,
    pub(crate) public: x25519::PublicKey,
    pub(crate) indexes: IndexTable,
    pub(crate) limiter: Arc<RateLimiter>,
}

impl Protocol {
    /// State for the sessions and handshakes with one peer.
    pub(super) fn tunnel(&self, peer: &PublicKey, preshared_key: Option<[u8; 32]>) -> Box<Tunn> {
        Box::new(Tunn::new(
            self.private.clone(),
            x25519::PublicKey::from(peer.0),
            preshared_key,
            // `Peer` sends persistent keepalives: the library stops them when a handshake fails.
            None,
            self.indexes.clone(),
            Arc::clone(&self.limiter),
        ))
    }
}
