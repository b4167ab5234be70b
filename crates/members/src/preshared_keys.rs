//! The Secret with the preshared keys of Peers: read, and matched with the Peers that name one of its keys.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::fmt;

use fairlead_api::names::{PEER_PRESHARED_KEYS_SECRET, SYSTEM_NAMESPACE};
use fairlead_keys::PresharedKey;
use k8s_openapi::api::core::v1::Secret;
use kube::ResourceExt as _;
use kube::api::DynamicObject;
use serde_json::{Value, json};

/// The preshared keys of a Secret; `Debug` shows none.
#[derive(Clone, Default)]
pub struct PresharedKeys {
    /// Name of the Secret.
    name: String,
    /// Preshared keys by their keys in the Secret; `None` for what is no WireGuard key.
    keys: BTreeMap<String, Option<PresharedKey>>,
}

impl PresharedKeys {
    /// Reads the preshared keys of the Secret.
    pub fn new(secret: &Secret) -> Self {
        let parse = |text: &[u8]| std::str::from_utf8(text).ok()?.trim().parse().ok();
        let data = secret.data.iter().flatten();
        let keys = data.map(|(key, value)| (key.clone(), parse(&value.0))).collect();
        Self { name: secret.name_any(), keys }
    }

    /// Reason why there is no preshared key where no Secret was read: a sentence for users.
    pub fn missing(key: &str) -> String {
        format!(
            "spec.presharedKeyRef: Secret {SYSTEM_NAMESPACE}/{PEER_PRESHARED_KEYS_SECRET} with key '{key}' is missing, or cannot be read"
        )
    }

    /// The preshared key under this key of the Secret.
    ///
    /// # Errors
    /// There is none, or it is none of WireGuard's: a sentence that does not show it.
    pub fn find(&self, key: &str) -> Result<PresharedKey, String> {
        let secret = format!("Secret {SYSTEM_NAMESPACE}/{PEER_PRESHARED_KEYS_SECRET}");
        match self.keys.get(key) {
            Some(Some(found)) => Ok(*found),
            Some(None) => Err(format!("spec.presharedKeyRef: key '{key}' of {secret} is no WireGuard key")),
            None => Err(format!("spec.presharedKeyRef: {secret} has no key '{key}'")),
        }
    }
}

impl fmt::Debug for PresharedKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_set().entries(self.keys.keys()).finish()
    }
}

impl kube::runtime::reflector::Lookup for PresharedKeys {
    type DynamicType = ();

    fn kind((): &()) -> Cow<'_, str> {
        <Secret as kube::Resource>::kind(&())
    }

    fn group((): &()) -> Cow<'_, str> {
        <Secret as kube::Resource>::group(&())
    }

    fn version((): &()) -> Cow<'_, str> {
        <Secret as kube::Resource>::version(&())
    }

    fn plural((): &()) -> Cow<'_, str> {
        <Secret as kube::Resource>::plural(&())
    }

    fn name(&self) -> Option<Cow<'_, str>> {
        Some(Cow::Borrowed(&self.name))
    }

    fn namespace(&self) -> Option<Cow<'_, str>> {
        Some(Cow::Borrowed(SYSTEM_NAMESPACE))
    }

    fn resource_version(&self) -> Option<Cow<'_, str>> {
        None
    }

    fn uid(&self) -> Option<Cow<'_, str>> {
        None
    }
}

/// The key of the Secret that a Peer names in `spec.presharedKeyRef`.
pub fn reference(peer: &DynamicObject) -> Option<&str> {
    peer.data.get("spec")?.get("presharedKeyRef")?.get("key")?.as_str()
}

/// Puts the preshared keys that Peers name into these Peers, as if they stood there. Those that are not in the Secret stay as they are, and
/// are left out with a reason.
pub fn insert(peers: &mut [DynamicObject], keys: &PresharedKeys) {
    for peer in peers {
        let found = reference(peer).and_then(|key| keys.find(key).ok());
        let spec = peer.data.get_mut("spec").and_then(Value::as_object_mut);
        if let (Some(found), Some(spec)) = (found, spec)
            && !spec.contains_key("presharedKey")
        {
            spec.remove("presharedKeyRef");
            spec.insert("presharedKey".to_owned(), json!(found.to_base64()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: PresharedKey = PresharedKey([7; 32]);

    fn keys() -> PresharedKeys {
        let text = |text: &str| json!(text);
        let data = json!({ "laptop": KEY.to_base64() + "\n", "broken": text("secret nonsense") });
        let secret: Secret = serde_json::from_value(json!({
            "metadata": { "name": PEER_PRESHARED_KEYS_SECRET }, "stringData": data,
        }))
        .unwrap();
        let data = secret.string_data.clone().unwrap_or_default();
        let data = data.into_iter().map(|(key, text)| (key, k8s_openapi::ByteString(text.into_bytes())));
        PresharedKeys::new(&Secret { data: Some(data.collect()), ..secret })
    }

    #[test]
    fn a_key_is_found_and_what_is_wrong_is_said_without_it() {
        let keys = keys();
        assert_eq!(keys.find("laptop"), Ok(KEY));
        assert!(keys.find("phone").unwrap_err().contains("fairlead-peer-preshared-keys has no key 'phone'"));
        let broken = keys.find("broken").unwrap_err();
        assert!(broken.contains("is no WireGuard key") && !broken.contains("nonsense"), "{broken}");
        let debug = format!("{keys:?}");
        assert!(debug.contains("laptop") && !debug.contains("nonsense"), "{debug}");
    }

    #[test]
    fn a_peer_gets_the_key_that_it_names_and_no_other_is_touched() {
        let peer = |spec: Value| -> DynamicObject {
            serde_json::from_value(json!({
                "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": { "name": "p" }, "spec": spec,
            }))
            .unwrap()
        };
        let own = json!({ "presharedKey": "own" });
        let missing = json!({ "presharedKeyRef": { "key": "phone" } });
        let both = json!({ "presharedKey": "own", "presharedKeyRef": { "key": "laptop" } });
        let named = json!({ "presharedKeyRef": { "key": "laptop" } });
        let mut peers = [own.clone(), missing.clone(), both.clone(), named].map(peer);
        insert(&mut peers, &keys());
        let specs: Vec<&Value> = peers.iter().map(|peer| &peer.data["spec"]).collect();
        assert_eq!(specs, [&own, &missing, &both, &json!({ "presharedKey": KEY.to_base64() })]);
    }
}
