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

/// The other members of a cluster, as one server tells of them.
#[derive(Debug, Clone, Default)]
pub struct Members {
    members: BTreeMap<String, Member>,
    deleted: BTreeMap<String, Instant>,
    rejected: BTreeMap<String, Rejection>,
    /// The server last said that it does not have this node, or something else in its place.
    is_own_missing: bool,
    /// While the first messages of a watch come: those that they named.
    snapshot: Option<BTreeSet<String>>,
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

    /// Members that a client deleted while this one watched, with the time. A server of another make also calls expired
    /// ones deleted.
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

    /// A new watch begins. What was known stays until its snapshot is complete.
    pub fn begin(&mut self) {
        self.snapshot = Some(BTreeSet::new());
        self.is_own_missing = true;
    }

    /// Takes a message of a watch; `own` is this node's identifier.
    pub fn apply(&mut self, message: WatchResponse, own: &str, secret: &ClusterSecret, now: Instant) {
        for affiliate in message.affiliates {
            if affiliate.id == own {
                self.is_own_missing = message.deleted || Member::read(&affiliate, secret, now).is_err();
            } else if message.deleted {
                self.remove(affiliate.id, message.expired, now);
            } else {
                self.insert(affiliate, secret, now);
            }
        }
        if !message.snapshot_continues
            && let Some(named) = self.snapshot.take()
        {
            self.members.retain(|id, _| named.contains(id));
            self.rejected.retain(|id, _| named.contains(id));
        }
    }

    fn remove(&mut self, id: String, has_expired: bool, now: Instant) {
        self.rejected.remove(&id);
        if let Some(named) = &mut self.snapshot {
            named.remove(&id);
        }
        if self.members.remove(&id).is_some() && !has_expired {
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
        let read = match self.members.len() >= MAX_MEMBERS && !self.members.contains_key(&id) {
            true => Err(Rejection::Members),
            false => Member::read(&affiliate, secret, now),
        };
        match read {
            Ok(member) => {
                self.deleted.remove(&id);
                self.rejected.remove(&id);
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
        Ok(Self { affiliate, public_key, endpoints, heard: now, rejections })
    }
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
mod tests {
    use fairlead_wire::discovery::KubeSpan;
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const KEY: &str = "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=";

    fn secret() -> ClusterSecret {
        ClusterSecret::new([7; 32])
    }

    fn affiliate(id: &str, key: &str) -> server::Affiliate {
        let kubespan = KubeSpan { public_key: key.to_owned(), ..Default::default() };
        let plaintext = Affiliate { node_id: id.to_owned(), kubespan: Some(kubespan), ..Default::default() };
        server::Affiliate {
            id: id.to_owned(),
            data: secret().seal_data([1; 12], &plaintext.encode()).unwrap().into(),
            endpoints: vec![secret().seal_endpoint("192.0.2.1:51820".parse().unwrap()).into()],
        }
    }

    fn there(affiliates: Vec<server::Affiliate>) -> WatchResponse {
        WatchResponse { affiliates, ..Default::default() }
    }

    fn ids(members: &Members) -> Vec<&str> {
        members.iter().map(|(id, _)| id).collect()
    }

    fn told(members: &mut Members, message: WatchResponse) {
        members.apply(message, "own", &secret(), Instant::now());
    }

    #[test]
    fn members_come_change_and_go() {
        let mut members = Members::default();
        members.begin();
        told(&mut members, there(vec![affiliate("a", KEY), affiliate("b", KEY), affiliate("own", KEY)]));
        assert_eq!(ids(&members), ["a", "b"]);
        let a = members.member("a").unwrap();
        assert_eq!((a.public_key, a.endpoints.len(), a.rejections.len()), (KEY.parse().ok(), 1, 0));
        let gone = |id, expired| WatchResponse { deleted: true, expired, ..there(vec![affiliate(id, KEY)]) };
        told(&mut members, gone("a", false));
        told(&mut members, gone("b", true));
        told(&mut members, gone("unknown", false));
        assert_eq!(ids(&members), [] as [&str; 0]);
        assert_eq!(members.deleted().map(|(id, _)| id).collect::<Vec<_>>(), ["a"]);
        told(&mut members, there(vec![affiliate("a", KEY)]));
        assert_eq!((ids(&members), members.deleted().count()), (vec!["a"], 0));
    }

    #[test]
    fn a_node_notices_that_the_server_does_not_have_it() {
        let mut members = Members::default();
        assert!(!members.is_own_missing(), "without a connection");
        members.begin();
        told(&mut members, WatchResponse { snapshot_continues: true, ..there(vec![affiliate("a", KEY)]) });
        assert!(!members.is_own_missing(), "it may come yet");
        told(&mut members, there(vec![affiliate("b", KEY)]));
        assert!(members.is_own_missing());
        told(&mut members, there(vec![affiliate("own", KEY)]));
        assert!(!members.is_own_missing());
        for expired in [false, true] {
            let gone = WatchResponse { deleted: true, expired, ..there(vec![affiliate("own", KEY)]) };
            told(&mut members, gone);
            assert!(members.is_own_missing(), "expired: {expired}");
            told(&mut members, there(vec![affiliate("own", KEY)]));
        }
        let mut replaced = affiliate("own", KEY);
        replaced.data = vec![0; 60].into();
        told(&mut members, there(vec![replaced]));
        assert!(members.is_own_missing(), "a client without the secret replaced it");
        members.begin();
        told(&mut members, there(vec![affiliate("own", KEY)]));
        assert_eq!((members.is_own_missing(), ids(&members)), (false, vec![]));
    }

    #[test]
    fn absence_counts_once_a_snapshot_is_complete() {
        let mut members = Members::default();
        members.begin();
        told(&mut members, there(vec![affiliate("a", KEY), affiliate("b", KEY), affiliate("c", KEY)]));
        members.begin();
        assert_eq!(ids(&members), ["a", "b", "c"], "between two connections");
        told(&mut members, WatchResponse { snapshot_continues: true, ..there(vec![affiliate("b", KEY)]) });
        assert_eq!(ids(&members), ["a", "b", "c"]);
        told(&mut members, there(vec![affiliate("c", KEY)]));
        assert_eq!((ids(&members), members.deleted().count()), (vec!["b", "c"], 0));
        told(&mut members, there(vec![]));
        assert_eq!(ids(&members), ["b", "c"], "not a first message");
    }

    #[test]
    fn what_cannot_be_used_is_named_and_replaces_nothing_good() {
        let mut members = Members::default();
        members.begin();
        told(&mut members, there(vec![affiliate("a", KEY), affiliate("b", KEY)]));
        let mut swapped = affiliate("a", KEY);
        swapped.data = affiliate("b", KEY).data;
        let mut garbage = affiliate("b", KEY);
        garbage.data = vec![0; 60].into();
        let keyless = affiliate("c", "none");
        let mut hostile = affiliate("d", KEY);
        let endpoint = |text: &str| secret().seal_endpoint(text.parse().unwrap()).into();
        hostile.endpoints.extend([
            vec![].into(),
            vec![9; 16].into(),
            endpoint("127.0.0.1:1"),
            endpoint("[fe80::1]:1"),
        ]);
        told(&mut members, there(vec![swapped, garbage, keyless, hostile, affiliate("", KEY)]));
        assert_eq!(ids(&members), ["a", "b", "c", "d"]);
        let rejected: Vec<_> = members.rejected().collect();
        let expected = [
            ("", Rejection::Identifier),
            ("a", Rejection::Identity),
            ("b", Rejection::Data(OpenError::Decryption)),
        ];
        assert_eq!(rejected, expected);
        let c = members.member("c").unwrap();
        assert_eq!((c.public_key, &c.affiliate.kubespan), (None, &None));
        assert_eq!(c.rejections.iter().collect::<Vec<_>>(), [&Rejection::PublicKey]);
        let d = members.member("d").unwrap();
        assert_eq!(d.endpoints, ["192.0.2.1:51820".parse().unwrap()]);
        assert!(d.rejections.contains(&Rejection::Endpoint(OpenError::Length)), "{:?}", d.rejections);
        assert!(d.rejections.contains(&Rejection::EndpointAddress), "{:?}", d.rejections);
    }

    #[test]
    fn a_server_cannot_fill_the_memory() {
        let mut members = Members::default();
        for n in 0..3000 {
            let mut garbage = affiliate("a", KEY);
            garbage.id = format!("garbage {n}");
            told(&mut members, there(vec![garbage]));
            told(&mut members, there(vec![affiliate("x", KEY)]));
            let renamed = format!("{n}");
            told(&mut members, there(vec![affiliate(&renamed, KEY)]));
            told(&mut members, WatchResponse { deleted: true, ..there(vec![affiliate(&renamed, KEY)]) });
        }
        assert_eq!((members.rejected().count(), members.deleted().count()), (MAX_OTHERS, MAX_OTHERS));
    }

    proptest! {
        #[test]
        fn hostile_messages_never_panic(
            affiliates in vec((".{0,4}", vec(any::<u8>(), 0..80), vec(vec(any::<u8>(), 0..40), 0..4)), 0..5),
            flags: [bool; 3],
        ) {
            let mut members = Members::default();
            members.begin();
            let affiliates = affiliates.into_iter().map(|(id, data, endpoints)| server::Affiliate {
                id,
                data: data.into(),
                endpoints: endpoints.into_iter().map(Into::into).collect(),
            });
            let [deleted, expired, snapshot_continues] = flags;
            let affiliates = affiliates.collect();
            told(&mut members, WatchResponse { affiliates, deleted, expired, snapshot_continues });
            prop_assert_eq!(members.iter().count(), 0);
        }
    }
}
