//! Affiliates as clients publish them, as they are kept, and as replicas share them; what they say is encrypted.

use std::sync::Arc;
use std::time::Duration;

use prost::bytes::Bytes;

use super::Source;

/// Update of an affiliate, as a client publishes it.
#[derive(Debug, Clone, Default)]
pub struct Update {
    /// Identifier of the cluster.
    pub cluster: String,
    /// Identifier of the affiliate.
    pub affiliate: String,
    /// The encrypted affiliate; what is stored stays without it.
    pub data: Option<Bytes>,
    /// Encrypted endpoints, which are added.
    pub endpoints: Vec<Bytes>,
    /// Time to live of all this.
    pub ttl: Duration,
}

/// An affiliate as it is kept on disk.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stored {
    /// Identifier of its cluster.
    pub cluster: Arc<str>,
    /// Identifier of the affiliate.
    pub affiliate: Arc<str>,
    /// The encrypted affiliate.
    pub data: Bytes,
    /// Time that it is still to live.
    pub ttl: Duration,
    /// Encrypted endpoints, and how long they are still to live.
    pub endpoints: Vec<(Bytes, Duration)>,
}

/// An affiliate as replicas share it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SharedAffiliate {
    /// Affiliate as it is stored.
    pub stored: Stored,
    /// Caller that created it.
    pub source: Source,
}
