//! `fairlead peer revoke` and `unrevoke`: they change `spec.revokedPeers` of the WireKubeMesh.

use anyhow::Context as _;
use fairlead_api::resources::{RevokedPeer, WireKubeMesh, WireKubePeer};
use fairlead_keys::PublicKey;
use kube::api::{DeleteParams, ListParams, Patch, PatchParams};
use kube::{Api, Client, ResourceExt};
use serde_json::json;

use crate::api;
use crate::arguments::peer::RevokeArguments;

/// Attempts at a change that others overtake.
const ATTEMPTS: usize = 5;

/// Says what was done.
pub(super) async fn revoke(arguments: &RevokeArguments) -> anyhow::Result<String> {
    let client = arguments.api.client().await?;
    let name = &arguments.name;
    let peers = Api::<WireKubePeer>::all(client.clone());
    let peer = peers.get_opt(name).await.with_context(|| format!("cannot read WireKubePeer '{name}'"))?;
    let published = peer.as_ref().and_then(|peer| peer.spec.parse_public_key().ok());
    let all = api::list(&peers, "WireKubePeers", ListParams::default()).await?;
    let key = arguments.key.or_else(|| published.filter(|key| !is_shared(&all, name, key)));
    let key = key.map(|key| key.to_string());
    let next = peer.as_ref().and_then(|peer| peer.spec.parse_next_public_key().ok().flatten());
    let next = next.filter(|next| !is_shared(&all, name, next)).map(|next| next.to_string());
    // Before it is deleted: the node writes it again at once.
    let revoking = |revoked: &[RevokedPeer]| {
        let revoked = with(revoked, name, key.as_deref());
        if next.is_some() { with(&revoked, name, next.as_deref()) } else { revoked }
    };
    change(&client, revoking).await?;
    if peer.is_some() {
        let deleted = peers.delete(name, &DeleteParams::default()).await;
        match deleted {
            Err(kube::Error::Api(status)) if status.code == 404 => {}
            deleted => drop(deleted.with_context(|| {
                format!("revoked node '{name}', but cannot delete its WireKubePeer; nodes leave it out all the same")
            })?),
        }
    }
    let what = match key {
        Some(key) => format!(", key {key}"),
        None if published.is_some() => ", not its key: another node publishes the same".to_owned(),
        None => ": its key is not known, give it with --key".to_owned(),
    };
    Ok(format!("revoked node '{name}'{what}"))
}

/// Says what was done.
pub(super) async fn unrevoke(arguments: &RevokeArguments) -> anyhow::Result<String> {
    let client = arguments.api.client().await?;
    let name = &arguments.name;
    let key = arguments.key.map(|key| key.to_string());
    let changed = change(&client, |revoked| without(revoked, name, key.as_deref())).await?;
    anyhow::ensure!(changed, "node '{name}' is not in spec.revokedPeers of the WireKubeMesh");
    Ok(format!("node '{name}' may be in the mesh again"))
}

/// Changes the list of the WireKubeMesh that counts; returns whether it differs.
async fn change(
    client: &Client,
    changed: impl Fn(&[RevokedPeer]) -> Vec<RevokedPeer>,
) -> anyhow::Result<bool> {
    let meshes = Api::<WireKubeMesh>::all(client.clone());
    for _ in 0..ATTEMPTS {
        let found = api::list(&meshes, "WireKubeMeshes", ListParams::default()).await?;
        let mesh = found.into_iter().min_by_key(ResourceExt::name_any).context("there is no WireKubeMesh")?;
        let revoked = changed(&mesh.spec.revoked_peers);
        if revoked == mesh.spec.revoked_peers {
            return Ok(false);
        }
        // The version makes the API server refuse what would undo another change.
        let patch = json!({
            "metadata": { "resourceVersion": mesh.metadata.resource_version },
            "spec": { "revokedPeers": revoked },
        });
        let name = mesh.name_any();
        match meshes.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await {
            Err(kube::Error::Api(status)) if status.code == 409 => {}
            patched => {
                return patched
                    .map(|_| true)
                    .with_context(|| format!("cannot change spec.revokedPeers of WireKubeMesh '{name}'"));
            }
        }
    }
    anyhow::bail!("others keep changing the WireKubeMesh; try again")
}

/// Whether another node publishes the key: one of the two copied it, and the other must not suffer.
fn is_shared(peers: &[WireKubePeer], name: &str, key: &PublicKey) -> bool {
    let has_it = |peer: &&WireKubePeer| {
        let next = peer.spec.parse_next_public_key().ok().flatten();
        peer.spec.parse_public_key().is_ok_and(|other| other == *key) || next == Some(*key)
    };
    peers.iter().filter(has_it).any(|peer| peer.name_any() != name)
}

fn with(revoked: &[RevokedPeer], name: &str, key: Option<&str>) -> Vec<RevokedPeer> {
    let entry = RevokedPeer { name: Some(name.to_owned()), public_key: key.map(str::to_owned) };
    // An older entry with another key of the node stays: that key is refused, too.
    let says_no_more = |old: &RevokedPeer| old.name == entry.name && old.public_key.is_none();
    let mut all: Vec<RevokedPeer> = revoked.iter().filter(|old| !says_no_more(old)).cloned().collect();
    let is_covered = key.is_none() && all.iter().any(|old| old.name == entry.name) || all.contains(&entry);
    if !is_covered {
        all.push(entry);
    }
    all
}

fn without(revoked: &[RevokedPeer], name: &str, key: Option<&str>) -> Vec<RevokedPeer> {
    let is_it = |old: &RevokedPeer| {
        old.name.as_deref() == Some(name) || (key.is_some() && old.public_key.as_deref() == key)
    };
    revoked.iter().filter(|old| !is_it(old)).cloned().collect()
}

#[cfg(test)]
mod tests {
    use fairlead_api::resources::WireKubePeerSpec;

    use super::*;

    fn entry(name: &str, key: Option<&str>) -> RevokedPeer {
        RevokedPeer { name: Some(name.to_owned()), public_key: key.map(str::to_owned) }
    }

    #[test]
    fn a_key_that_another_node_publishes_is_not_revoked() {
        let peer = |name: &str, byte| {
            let public_key = PublicKey([byte; 32]).to_string();
            WireKubePeer::new(name, WireKubePeerSpec { public_key, ..WireKubePeerSpec::default() })
        };
        let peers = [peer("n1", 1), peer("n2", 2), peer("thief", 2)];
        assert!(!is_shared(&peers, "n1", &PublicKey([1; 32])));
        assert!(is_shared(&peers, "thief", &PublicKey([2; 32])));
    }

    #[test]
    fn a_node_is_in_the_list_with_each_key_it_had() {
        let mut list = with(&[entry("other", Some("k"))], "n1", None);
        assert_eq!(list, [entry("other", Some("k")), entry("n1", None)]);
        list = with(&list, "n1", Some("a"));
        assert_eq!(list, [entry("other", Some("k")), entry("n1", Some("a"))]);
        assert_eq!(with(&list, "n1", None), list, "its name is there");
        assert_eq!(with(&list, "n1", Some("a")), list);
        list = with(&list, "n1", Some("b"));
        assert_eq!(list.len(), 3);
        assert_eq!(without(&list, "n1", None), [entry("other", Some("k"))]);
        assert_eq!(without(&list, "nobody", Some("k")).len(), 2);
        assert_eq!(without(&list, "nobody", None), list);
    }
}
