//! Limits of clusters and callers, and reasons to refuse a request.

use std::time::Duration;

use fairlead_wire::discovery::{MAX_DATA, MAX_ENDPOINT, MAX_ENDPOINTS, MAX_ID};

use super::Update;

/// Length of a block of the cipher that endpoints are encrypted with.
const BLOCK: usize = 16;

/// Limits of clusters and callers. The defaults are those of the published protocol, where it has one.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Clusters with affiliates or watches.
    pub clusters: usize,
    /// Affiliates of a cluster.
    pub affiliates: usize,
    /// Affiliates of all clusters: each takes 4 KiB at most.
    pub affiliates_in_all: usize,
    /// Affiliates that callers of one address have created.
    pub affiliates_per_source: usize,
    /// Endpoints of an affiliate.
    pub endpoints: usize,
    /// Longest time to live.
    pub ttl: Duration,
    /// Watches, of all clusters.
    pub watches: usize,
    /// Watches of callers of one address: nodes may share the address of a NAT.
    pub watches_per_source: usize,
    /// Requests a second of callers of one address; zero for no limit.
    pub rate: u32,
    /// Requests that callers of one address may make at once after a pause.
    pub burst: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            clusters: 10_000,
            affiliates: 1024,
            affiliates_in_all: 200_000,
            affiliates_per_source: 4096,
            endpoints: MAX_ENDPOINTS,
            ttl: Duration::from_secs(30 * 60),
            watches: 20_000,
            watches_per_source: 4096,
            rate: 15,
            burst: 60,
        }
    }
}

/// Reason why a request is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, thiserror::Error)]
pub enum Refusal {
    /// The identifier of the affiliate is empty or too long.
    #[error("an affiliate ID has 1 to {MAX_ID} bytes")]
    AffiliateId,
    /// The cluster is full.
    #[error("the cluster has too many affiliates")]
    Affiliates,
    /// The identifier of the cluster is empty or too long.
    #[error("a cluster ID has 1 to {MAX_ID} bytes")]
    ClusterId,
    /// The server is full.
    #[error("the server has too many clusters")]
    Clusters,
    /// The encrypted affiliate is too long.
    #[error("affiliate data has at most {MAX_DATA} bytes")]
    Data,
    /// An endpoint cannot be one.
    #[error("an encrypted endpoint has 16 or 32 bytes")]
    Endpoint,
    /// The affiliate is full.
    #[error("the affiliate has too many endpoints")]
    Endpoints,
    /// The operator lists what is accepted, and this is not on the list.
    #[error("the operator of this server has not listed it")]
    NotListed,
    /// The caller's address makes too many requests.
    #[error("too many requests of this address")]
    Rate,
    /// The server has too many affiliates.
    #[error("the server has too many affiliates")]
    ServerAffiliates,
    /// The caller's address has created too many affiliates.
    #[error("too many affiliates of this address")]
    SourceAffiliates,
    /// The caller's address has too many watches.
    #[error("too many watches of this address")]
    SourceWatches,
    /// The time to live is too long.
    #[error("the TTL is too long")]
    Ttl,
    /// The server has too many watches.
    #[error("the server has too many watches")]
    Watches,
}

impl Refusal {
    /// All reasons.
    pub const ALL: [Self; 14] = [
        Self::AffiliateId,
        Self::Affiliates,
        Self::ClusterId,
        Self::Clusters,
        Self::Data,
        Self::Endpoint,
        Self::Endpoints,
        Self::NotListed,
        Self::Rate,
        Self::ServerAffiliates,
        Self::SourceAffiliates,
        Self::SourceWatches,
        Self::Ttl,
        Self::Watches,
    ];

    /// Value of the reason's label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::AffiliateId => "affiliate_id",
            Self::Affiliates => "affiliates",
            Self::ClusterId => "cluster_id",
            Self::Clusters => "clusters",
            Self::Data => "data",
            Self::Endpoint => "endpoint",
            Self::Endpoints => "endpoints",
            Self::NotListed => "not_listed",
            Self::Rate => "rate",
            Self::ServerAffiliates => "all_affiliates",
            Self::SourceAffiliates => "address_affiliates",
            Self::SourceWatches => "address_watches",
            Self::Ttl => "ttl",
            Self::Watches => "watches",
        }
    }

    /// Whether the request itself is wrong. Others may be accepted at another time.
    pub fn is_invalid(self) -> bool {
        matches!(self, Self::AffiliateId | Self::ClusterId | Self::Data | Self::Endpoint | Self::Ttl)
    }
}

impl Limits {
    pub(super) fn check_cluster_id(&self, id: &str) -> Result<(), Refusal> {
        if is_id(id) { Ok(()) } else { Err(Refusal::ClusterId) }
    }

    pub(super) fn check_affiliate_id(&self, id: &str) -> Result<(), Refusal> {
        if is_id(id) { Ok(()) } else { Err(Refusal::AffiliateId) }
    }

    pub(super) fn check_update(&self, update: &Update) -> Result<(), Refusal> {
        self.check_affiliate_id(&update.affiliate)?;
        if update.data.as_ref().is_some_and(|data| data.len() > MAX_DATA) {
            return Err(Refusal::Data);
        }
        // Older clients panic when they decrypt any other length.
        let is_endpoint =
            |length: usize| length > 0 && length <= MAX_ENDPOINT && length.is_multiple_of(BLOCK);
        if !update.endpoints.iter().all(|endpoint| is_endpoint(endpoint.len())) {
            return Err(Refusal::Endpoint);
        }
        if update.endpoints.len() > self.endpoints {
            return Err(Refusal::Endpoints);
        }
        if update.ttl > self.ttl { Err(Refusal::Ttl) } else { Ok(()) }
    }
}

fn is_id(id: &str) -> bool {
    (1..=MAX_ID).contains(&id.len())
}
