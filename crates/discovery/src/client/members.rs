//! Other members of a cluster, as a discovery server tells of them, without I/O. Every byte of it is hostile.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::time::Instant;

use fairlead_keys::PublicKey;
use fairlead_wire::discovery::server::{self, WatchResponse};
use fairlead_wire::discovery::{Affiliate, ClusterSecret, Leftover, MAX_ENDPOINTS, MAX_ID, OpenError};

/// Members of a cluster that are remembered, ten times what a server holds by default; and deleted or rejected ones.
const MAX_MEMBERS: usize = 10_240;
const MAX_OTHERS: usize = 1024;
/// Bytes that all members of a server may have, encrypted: 8,192 with 512 each, some of which are usual. Without a bound a holder of the
/// secret could fill the memory of every node.
const MAX_BYTES: usize = 4 << 20;

/// The other members of a cluster, as one server tells of them.
#[derive(Debug, Clone, Default)]
pub struct Members {
    members: BTreeMap<String, Member>,
    /// Sum of their sizes.
    bytes: usize,
    deleted: BTreeMap<String, Instant>,
    rejected: BTreeMap<String, Rejection>,
    /// The server last said that it does not have this node, or something else in its place.
    is_own_missing: bool,
    /// While the first messages of a watch come: those that they named.
    snapshot: Option<BTreeSet<String>>,
    /// The server says whether what is gone has expired.
    tells_expiry: bool,
    /// Members that a server which does not say that calls deleted: it may still have them. Each with the number of the claim.
    claimed: BTreeMap<String, u64>,
    claims: u64,
}

/// Another member of the cluster.
#[derive(Debug, Clone, PartialEq)]
pub struct Member {
    /// Affiliate as the member published it; its `node_id` is the member's identifier.
    pub affiliate: Affiliate,
    /// WireGuard key of the member, if it takes part in the mesh.
    pub public_key: Option<PublicKey>,
    /// Endpoints of its WireGuard, in its order of preference.
    pub endpoints: Vec<SocketAddr>,
    /// Time at which the server last said something of the member.
    pub heard: Instant,
    /// Reasons why parts of the member were left out.
    pub rejections: BTreeSet<Rejection>,
    /// Bytes in which the server told of it.
    size: usize,
}

/// Reason why a part of a server's message is not used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
pub enum Rejection {
    /// The decrypted affiliate is none.
    #[error("the affiliate is no message of the protocol")]
    Affiliate,
    /// The affiliate cannot be decrypted.
    #[error("the affiliate: {0}")]
    Data(OpenError),
    /// An endpoint cannot be decrypted.
    #[error("an endpoint: {0}")]
    Endpoint(OpenError),
    /// No peer can have this address.
    #[error("an endpoint is no address of a peer")]
    EndpointAddress,
    /// The member has more endpoints than the protocol permits.
    #[error("it has too many endpoints")]
    Endpoints,
    /// The identifier is empty or too long.
    #[error("its identifier is empty or too long")]
    Identifier,
    /// The server tells the affiliate of one node as that of another.
    #[error("the affiliate is that of another node")]
    Identity,
    /// A part of the affiliate cannot be read.
    #[error("{0}")]
    Leftover(Leftover),
    /// There are too many members.
    #[error("there are too many members")]
    Members,
    /// The key in the affiliate is none.
    #[error("its WireGuard public key is none")]
    PublicKey,
}

impl Members {
    /// All members, by identifier.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Member)> {
        self.members.iter().map(|(id, member)| (id.as_str(), member))
    }

    /// Member with this identifier.
    pub fn member(&self, id: &str) -> Option<&Member> {
        self.members.get(id)
    }

    /// Members that a client deleted while this one watched, with the time. Of a server of another make none is known to be: it also
    /// calls expired ones deleted.
    pub fn deleted(&self) -> impl Iterator<Item = (&str, Instant)> {
        self.deleted.iter().map(|(id, at)| (id.as_str(), *at))
    }

    /// Members of which nothing new is used, with the reason. One that was good before is still among the members.
    pub fn rejected(&self) -> impl Iterator<Item = (&str, Rejection)> {
        self.rejected.iter().map(|(id, rejection)| (id.as_str(), *rejection))
    }

    /// Whether the server does not have what this node published, or another client replaced that by something that other members
    /// cannot use. `false` while a first snapshot is incomplete.
    pub fn is_own_missing(&self) -> bool {
        self.is_own_missing && self.snapshot.is_none()
    }

    /// A new watch begins, at a server that says whether what is gone has expired or not (`tells_expiry`). What was known stays until its
    /// snapshot is complete.
    pub fn begin(&mut self, tells_expiry: bool) {
        self.snapshot = Some(BTreeSet::new());
        self.is_own_missing = true;
        self.tells_expiry = tells_expiry;
        self.claimed.clear();
    }

    /// Number of the latest claim that a member is gone, if there is one that a list of all affiliates, asked for now, decides.
    pub fn open_claim(&self) -> Option<u64> {
        (!self.claimed.is_empty()).then_some(self.claims)
    }

    /// Takes a list of all affiliates that was asked for after the claim of this number. Who is in it stays; who is not is gone, and
    /// whether by its own will is not known. Members that the watch told of meanwhile are as it said.
    pub fn decide(
        &mut self,
        claim: u64,
        affiliates: Vec<server::Affiliate>,
        secret: &ClusterSecret,
        now: Instant,
    ) {
        let decided = self.claimed.extract_if(.., |_, number| *number <= claim);
        let mut decided: BTreeSet<String> = decided.map(|(id, _)| id).collect();
        for affiliate in affiliates {
            if decided.remove(&affiliate.id) {
                self.insert(affiliate, secret, now);
            }
        }
        decided.into_iter().for_each(|id| self.remove(id, true, now));
    }

    /// Takes a message of a watch; `own` is this node's identifier.
    pub fn apply(&mut self, message: WatchResponse, own: &str, secret: &ClusterSecret, now: Instant) {
        for affiliate in message.affiliates {
            if affiliate.id == own {
                self.is_own_missing = message.deleted || Member::read(&affiliate, secret, now).is_err();
            } else if message.deleted && !self.tells_expiry && self.members.contains_key(&affiliate.id) {
                self.claims = self.claims.wrapping_add(1);
                self.claimed.insert(affiliate.id, self.claims);
            } else if message.deleted {
                self.remove(affiliate.id, message.expired, now);
            } else {
                self.claimed.remove(&affiliate.id);
                self.insert(affiliate, secret, now);
            }
        }
        if !message.snapshot_continues
            && let Some(named) = self.snapshot.take()
        {
            self.members.retain(|id, _| named.contains(id));
            self.bytes = self.members.values().map(|member| member.size).sum();
            self.rejected.retain(|id, _| named.contains(id));
        }
    }

    fn remove(&mut self, id: String, has_expired: bool, now: Instant) {
        self.rejected.remove(&id);
        if let Some(named) = &mut self.snapshot {
            named.remove(&id);
        }
        let Some(removed) = self.members.remove(&id) else { return };
        self.bytes = self.bytes.saturating_sub(removed.size);
        if !has_expired {
            while self.deleted.len() >= MAX_OTHERS {
                let oldest = self.deleted.iter().min_by_key(|(_, at)| **at).map(|(id, _)| id.clone());
                oldest.and_then(|id| self.deleted.remove(&id));
            }
            self.deleted.insert(id, now);
        }
    }

    fn insert(&mut self, affiliate: server::Affiliate, secret: &ClusterSecret, now: Instant) {
        let id = affiliate.id.clone();
        if let Some(named) = &mut self.snapshot
            && named.len() < MAX_MEMBERS
        {
            named.insert(id.clone());
        }
        // Only its endpoints are known yet.
        if affiliate.data.is_empty() {
            return;
        }
        let before = self.members.get(&id).map(|member| member.size);
        let others = self.bytes.saturating_sub(before.unwrap_or_default());
        let has_room = (before.is_some() || self.members.len() < MAX_MEMBERS)
            && others.saturating_add(size(&affiliate)) <= MAX_BYTES;
        let read = if has_room { Member::read(&affiliate, secret, now) } else { Err(Rejection::Members) };
        match read {
            Ok(member) => {
                self.deleted.remove(&id);
                self.rejected.remove(&id);
                self.bytes = others.saturating_add(member.size);
                self.members.insert(id, member);
            }
            Err(rejection) if self.rejected.len() < MAX_OTHERS && id.len() <= MAX_ID => {
                self.rejected.insert(id, rejection);
            }
            Err(_) => {}
        }
    }
}

impl Member {
    fn read(message: &server::Affiliate, secret: &ClusterSecret, now: Instant) -> Result<Self, Rejection> {
        if message.id.is_empty() || message.id.len() > MAX_ID {
            return Err(Rejection::Identifier);
        }
        let plaintext = secret.open_data(&message.data).map_err(Rejection::Data)?;
        let (mut affiliate, leftovers) = Affiliate::parse(&plaintext).map_err(|_| Rejection::Affiliate)?;
        // The encryption binds the affiliate to no identifier; the server could exchange two.
        if affiliate.node_id != message.id {
            return Err(Rejection::Identity);
        }
        let mut rejections: BTreeSet<_> = leftovers.into_iter().map(Rejection::Leftover).collect();
        let public_key = affiliate.kubespan.as_ref().map(|kubespan| kubespan.public_key.parse());
        let public_key = public_key.transpose().unwrap_or_else(|_| {
            rejections.insert(Rejection::PublicKey);
            None
        });
        if public_key.is_none() {
            affiliate.kubespan = None;
        }
        let endpoints = endpoints(message, secret, &mut rejections);
        let size = size(message);
        Ok(Self { affiliate, public_key, endpoints, heard: now, rejections, size })
    }
}

/// Bytes in which a server tells of a member; endpoints that are not used do not count.
fn size(message: &server::Affiliate) -> usize {
    let endpoints = message.endpoints.iter().take(MAX_ENDPOINTS).map(|sealed| sealed.len());
    message.id.len().saturating_add(message.data.len()).saturating_add(endpoints.sum())
}

fn endpoints(
    message: &server::Affiliate,
    secret: &ClusterSecret,
    rejections: &mut BTreeSet<Rejection>,
) -> Vec<SocketAddr> {
    let mut endpoints = Vec::new();
    for sealed in &message.endpoints {
        let rejection = match secret.open_endpoint(sealed) {
            Ok(_) if endpoints.len() >= MAX_ENDPOINTS => Rejection::Endpoints,
            Ok(endpoint) if !is_peer(endpoint.ip()) => Rejection::EndpointAddress,
            Ok(endpoint) => {
                if !endpoints.contains(&endpoint) {
                    endpoints.push(endpoint);
                }
                continue;
            }
            Err(error) => Rejection::Endpoint(error),
        };
        rejections.insert(rejection);
    }
    endpoints
}

/// Whether packets may be sent to an address because another host says so.
fn is_peer(ip: IpAddr) -> bool {
    let is_special = ip.is_unspecified() || ip.is_loopback() || ip.is_multicast();
    !is_special
        && match ip {
            IpAddr::V4(ip) => !ip.is_broadcast() && !ip.is_link_local(),
            // Without its zone it is the address of nothing.
            IpAddr::V6(ip) => !ip.is_unicast_link_local(),
        }
}

#[cfg(test)]
mod tests;
