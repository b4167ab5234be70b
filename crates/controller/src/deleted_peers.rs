//! Records WireKubePeers whose deletion the watch shows in the status of the mesh, for nodes that were off or cut off then. Nodes that watched
//! remember it themselves. One write for the deletions of a moment; what is missing after an interruption of the watch was not seen to be
//! deleted and is not recorded: the cluster may have been restored from a backup.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use fairlead_api::resources::{DeletedPeer, MAX_DELETED_PEERS, WireKubeMesh, WireKubePeer};
use fairlead_cluster::writes::apply_status;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::runtime::reflector::Store;
use kube::{Api, Client, ResourceExt};
use serde_json::json;
use tokio::sync::watch;

use crate::changes::Changes;

/// Field manager of `status.deletedPeers`.
const MANAGER: &str = "fairlead-controller-deleted";
/// Lifetime of a recorded deletion: 7 days, as on the nodes.
const KEEP: SignedDuration = SignedDuration::from_hours(7 * 24);
/// Changes are collected this long: of a node that is deleted others are to know within seconds.
const DEBOUNCE: Duration = Duration::from_millis(500);
/// Interval without a change, for writes that failed and for what is over.
const RESYNC_INTERVAL: Duration = Duration::from_secs(30);

/// Deletions that the watch has shown, until they are taken.
#[derive(Clone, Default)]
pub(crate) struct Noted(Arc<Mutex<Vec<DeletedPeer>>>);

impl Noted {
    /// Notes a deletion. Without a key the peer had no tunnel.
    pub(crate) fn note(&self, peer: &WireKubePeer) {
        if let Some(deleted) = deleted(peer, Timestamp::now()) {
            let mut noted = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            noted.push(deleted);
            let beyond = noted.len().saturating_sub(MAX_DELETED_PEERS);
            noted.drain(..beyond);
        }
    }

    fn take(&self) -> Vec<DeletedPeer> {
        std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

fn deleted(peer: &WireKubePeer, now: Timestamp) -> Option<DeletedPeer> {
    let public_key = peer.spec.parse_public_key().ok()?;
    let until = now.checked_add(KEEP).ok()?;
    Some(DeletedPeer {
        name: peer.name_any(),
        public_key: public_key.to_string(),
        next_public_key: peer.spec.parse_next_public_key().ok().flatten().map(|key| key.to_string()),
        // Times in objects have whole seconds.
        until: Time(Timestamp::from_second(until.as_second()).unwrap_or(until)),
    })
}

/// Keeps the record current, after the first lists; never returns.
pub(crate) async fn run(
    client: Client,
    meshes: Store<WireKubeMesh>,
    peers: Store<WireKubePeer>,
    noted: Noted,
    watches: [watch::Receiver<u64>; 2],
) {
    let mut first_lists = watches.clone();
    for list in &mut first_lists {
        if list.wait_for(|generation| *generation > 0).await.is_err() {
            return;
        }
    }
    let mut changes = Changes { watches, resync: RESYNC_INTERVAL, debounce: DEBOUNCE };
    let mut record = Record::default();
    loop {
        if let Some(mesh) = WireKubeMesh::selected(&meshes.state()) {
            let published =
                mesh.status.as_ref().map(|status| status.deleted_peers.as_slice()).unwrap_or_default();
            let names = peers.state().iter().map(|peer| peer.name_any()).collect();
            record.update(published, noted.take(), &names, Timestamp::now());
            if record.is_due(published, Instant::now()) {
                write(&client, &mesh.name_any(), &record.entries()).await;
            }
        }
        changes.next().await;
    }
}

async fn write(client: &Client, mesh: &str, entries: &[DeletedPeer]) {
    let patch = json!({
        "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubeMesh", "metadata": { "name": mesh },
        "status": { "deletedPeers": entries },
    });
    let api = Api::<WireKubeMesh>::all(client.clone());
    if let Err(error) = apply_status(&api, mesh, MANAGER, &patch).await {
        tracing::warn!(mesh, %error, "cannot record deleted WireKubePeers; retrying");
    }
}

/// Record of deletions for the status. The watch shows a write only later, so after the first read this copy counts.
#[derive(Default)]
struct Record {
    deleted: Option<BTreeMap<String, DeletedPeer>>,
    written: Option<(Vec<DeletedPeer>, Instant)>,
}

impl Record {
    /// Without those that are published again, or over; of too many the newest.
    fn update(
        &mut self,
        published: &[DeletedPeer],
        noted: Vec<DeletedPeer>,
        names: &BTreeSet<String>,
        now: Timestamp,
    ) {
        let by_name =
            |peers: &[DeletedPeer]| peers.iter().map(|peer| (peer.name.clone(), peer.clone())).collect();
        let deleted = self.deleted.get_or_insert_with(|| by_name(published));
        deleted.extend(noted.into_iter().map(|peer| (peer.name.clone(), peer)));
        deleted.retain(|name, peer| peer.until.0 > now && !names.contains(name));
        while deleted.len() > MAX_DELETED_PEERS {
            let oldest = deleted.values().min_by_key(|peer| peer.until.0).map(|peer| peer.name.clone());
            let Some(oldest) = oldest else { break };
            deleted.remove(&oldest);
        }
    }

    fn entries(&self) -> Vec<DeletedPeer> {
        self.deleted.iter().flat_map(BTreeMap::values).cloned().collect()
    }

    /// Whether to write. The same is written again only if the status still does not have it after a while.
    fn is_due(&mut self, published: &[DeletedPeer], now: Instant) -> bool {
        let entries = self.entries();
        if entries == published {
            return false;
        }
        let is_recent = |at: Instant| now.saturating_duration_since(at) < RESYNC_INTERVAL;
        if self.written.as_ref().is_some_and(|(written, at)| *written == entries && is_recent(*at)) {
            return false;
        }
        self.written = Some((entries, now));
        true
    }
}

#[cfg(test)]
mod tests {
    use fairlead_api::resources::WireKubePeerSpec;
    use fairlead_keys::PublicKey;

    use super::*;

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).unwrap()
    }

    fn gone(name: &str, second: i64) -> DeletedPeer {
        let spec = WireKubePeerSpec {
            public_key: PublicKey([7; 32]).to_string(),
            next_public_key: Some(PublicKey([8; 32]).to_string()),
            ..WireKubePeerSpec::default()
        };
        deleted(&WireKubePeer::new(name, spec), at(second)).unwrap()
    }

    fn names(record: &Record) -> Vec<String> {
        record.entries().into_iter().map(|peer| peer.name).collect()
    }

    #[test]
    fn a_deletion_is_written_once_and_forgotten_when_the_peer_is_back_or_a_week_has_passed() {
        let (mut record, none, now) = (Record::default(), BTreeSet::new(), Instant::now());
        record.update(&[], vec![gone("n1", 0), gone("n2", 3600)], &none, at(3600));
        assert_eq!(names(&record), ["n1", "n2"]);
        assert!(record.is_due(&[], now));
        // The watch does not show it yet.
        record.update(&[], Vec::new(), &none, at(3601));
        assert!(!record.is_due(&[], now) && names(&record).len() == 2);
        let published = record.entries();
        assert!(!record.is_due(&published, now));
        assert!(record.is_due(&[], now + RESYNC_INTERVAL), "it was lost");
        record.update(&published, Vec::new(), &["n2".to_owned()].into(), at(3602));
        assert_eq!(names(&record), ["n1"]);
        record.update(&published, Vec::new(), &none, at(7 * 24 * 3600));
        assert!(record.entries().is_empty() && record.is_due(&published, now));
    }

    #[test]
    fn another_leader_goes_on_with_what_was_written_and_the_newest_stay() {
        let mut record = Record::default();
        record.update(&[gone("old", 0)], Vec::new(), &BTreeSet::new(), at(1));
        assert_eq!(names(&record), ["old"]);
        let many = (0..300).map(|number| gone(&format!("n{number}"), 10 + number)).collect();
        record.update(&[], many, &BTreeSet::new(), at(400));
        assert_eq!(names(&record).len(), MAX_DELETED_PEERS);
        assert!(!names(&record).contains(&"old".to_owned()) && names(&record).contains(&"n299".to_owned()));
    }

    #[test]
    fn a_peer_without_a_key_is_not_remembered() {
        let noted = Noted::default();
        noted.note(&WireKubePeer::new("n1", WireKubePeerSpec::default()));
        assert!(noted.take().is_empty());
    }
}
