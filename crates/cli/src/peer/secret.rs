//! The Secret with preshared keys of Peers.

use anyhow::Context as _;
use fairlead_api::names::{PEER_PRESHARED_KEYS_SECRET, SYSTEM_NAMESPACE};
use fairlead_members::preshared_keys::PresharedKeys;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Patch, PatchParams, PostParams};
use kube::{Api, Client, Error};
use serde_json::{Value, json};

use crate::output;

/// `NotFound`, `Conflict` (RFC 9110, section 15.5)
const NOT_FOUND: u16 = 404;
const CONFLICT: u16 = 409;

fn secrets(client: &Client) -> Api<Secret> {
    Api::namespaced(client.clone(), SYSTEM_NAMESPACE)
}

/// Preshared keys of the Secret. Without the right to read it Peers that name a key are left out, with that reason.
pub(super) async fn read(client: &Client) -> PresharedKeys {
    match secrets(client).get_opt(PEER_PRESHARED_KEYS_SECRET).await {
        Ok(secret) => secret.as_ref().map(PresharedKeys::new).unwrap_or_default(),
        Err(error) => {
            output::error(&format!(
                "cannot read Secret {SYSTEM_NAMESPACE}/{PEER_PRESHARED_KEYS_SECRET}: {error}"
            ));
            PresharedKeys::default()
        }
    }
}

/// Whether it has the key.
pub(super) async fn has(client: &Client, key: &str) -> anyhow::Result<bool> {
    let secret = secrets(client)
        .get_opt(PEER_PRESHARED_KEYS_SECRET)
        .await
        .with_context(|| format!("cannot read Secret {SYSTEM_NAMESPACE}/{PEER_PRESHARED_KEYS_SECRET}"))?;
    Ok(secret.and_then(|secret| secret.data).is_some_and(|data| data.contains_key(key)))
}

/// Sets one key, in a Secret that is made if it is missing.
pub(super) async fn set(client: &Client, key: &str, preshared_key: &str) -> anyhow::Result<()> {
    let what = || {
        format!("cannot write the preshared key to Secret {SYSTEM_NAMESPACE}/{PEER_PRESHARED_KEYS_SECRET}")
    };
    let entry = json!({ key: preshared_key });
    let data = json!({ "stringData": entry });
    match patch(client, &data).await {
        Err(Error::Api(status)) if status.code == NOT_FOUND => {}
        done => return done.map(drop).with_context(what),
    }
    let secret = json!({
        // By the label `fairlead uninstall` finds it.
        "metadata": {
            "name": PEER_PRESHARED_KEYS_SECRET,
            "labels": { "app.kubernetes.io/name": "fairlead", "app.kubernetes.io/component": "peers" },
        },
        "stringData": entry,
    });
    let secret = serde_json::from_value(secret).with_context(what)?;
    match secrets(client).create(&PostParams::default(), &secret).await {
        // Another command has made it meanwhile.
        Err(Error::Api(status)) if status.code == CONFLICT => patch(client, &data).await.map(drop),
        done => done.map(drop),
    }
    .with_context(what)
}

/// Deletes one key; it need not be there.
pub(super) async fn remove(client: &Client, key: &str) -> anyhow::Result<()> {
    match patch(client, &json!({ "data": { key: null } })).await {
        Err(Error::Api(status)) if status.code == NOT_FOUND => Ok(()),
        done => done.map(drop).with_context(|| {
            format!("cannot delete key '{key}' of Secret {SYSTEM_NAMESPACE}/{PEER_PRESHARED_KEYS_SECRET}")
        }),
    }
}

async fn patch(client: &Client, change: &Value) -> kube::Result<Secret> {
    secrets(client).patch(PEER_PRESHARED_KEYS_SECRET, &PatchParams::default(), &Patch::Merge(change)).await
}
