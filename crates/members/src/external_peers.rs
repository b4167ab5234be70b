//! Peers of Kilo (`kilo.squat.ai/v1alpha1`) as a source of members: WireGuard peers outside of the cluster.
//!
//! The watch takes objects of any content: Kilo's own definition of the resource lets more pass than ours, and one object that cannot be
//! read must not hide the others.

use std::sync::Arc;
use std::time::Duration;

use fairlead_api::resources::{KiloPeer, KiloPeerSpec};
use fairlead_cluster::cached_by_name;
use fairlead_cluster::caches::Cache;
use fairlead_topology::{Endpoints, External, Keepalive, Member, MemberRecord, Since, Source};
use futures::FutureExt as _;
use futures::future::{BoxFuture, select};
use kube::ResourceExt;
use kube::api::DynamicObject;
use serde_json::Value;
use tokio::sync::watch;

use super::preshared_keys::PresharedKeys;
use super::{MemberSource, SourceProblem};

/// A Peer, parsed.
#[derive(Debug, Clone)]
pub struct CachedExternalPeer {
    /// Name of the object.
    name: String,
    member: Option<Member>,
    /// Key of the Secret under which the preshared key of the member is, without which it must not be connected to.
    reference: Option<String>,
    problems: Vec<SourceProblem>,
}

impl CachedExternalPeer {
    /// Parses a Peer. Without a readable key there is no member.
    pub fn new(object: &DynamicObject) -> Self {
        let name = object.name_any();
        let (member, reference, problems) = read(&name, object.data.get("spec").unwrap_or(&Value::Null));
        let created = object.metadata.creation_timestamp.as_ref().map(|at| at.0.as_second());
        let uid = object.metadata.uid.clone().unwrap_or_default();
        let since = created.map(|created| Since { created, uid });
        Self { name, member: member.map(|member| Member { since, ..member }), reference, problems }
    }

    /// Name of the object.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Member that it describes, without a preshared key that is in a Secret.
    pub fn described(&self) -> Option<&Member> {
        self.member.as_ref()
    }

    /// Member that it describes, with the preshared key that it names, and problems of what was left out of it. Without that key there
    /// is no member.
    pub fn resolved(&self, keys: Option<&PresharedKeys>) -> (Option<Member>, Vec<SourceProblem>) {
        let mut problems = self.problems.clone();
        let mut member = self.member.clone();
        let (Some(of), Some(key)) = (&mut member, &self.reference) else { return (member, problems) };
        match keys.map_or_else(|| Err(PresharedKeys::missing(key)), |keys| keys.find(key)) {
            Ok(found) => {
                if let Some(external) = &mut of.external {
                    external.preshared_key = Some(found);
                }
                (member, problems)
            }
            Err(error) => {
                problems.push(SourceProblem::PresharedKeyMissing { peer: self.name.clone(), error });
                (None, problems)
            }
        }
    }
}

cached_by_name!(CachedExternalPeer, KiloPeer, |cached| &cached.name);

/// The watch cache of Peers.
pub struct ExternalPeers {
    peers: Arc<Cache<CachedExternalPeer>>,
    keys: Arc<Cache<PresharedKeys>>,
    changes: [watch::Receiver<u64>; 2],
}

impl ExternalPeers {
    /// Members from this cache, with the preshared keys of the other one.
    pub fn new(peers: Arc<Cache<CachedExternalPeer>>, keys: Arc<Cache<PresharedKeys>>) -> Self {
        let mut changes = [peers.subscribe(), keys.subscribe()];
        // Only what changes from now on is news.
        changes.iter_mut().for_each(watch::Receiver::mark_unchanged);
        Self { peers, keys, changes }
    }

    /// Only those that name a preshared key wait for it.
    fn needs_keys(&self) -> bool {
        self.peers.store.state().iter().any(|peer| peer.reference.is_some())
    }
}

impl MemberSource for ExternalPeers {
    fn changed(&mut self) -> BoxFuture<'_, ()> {
        let [peers, keys] = &mut self.changes;
        select(peers.changed().boxed(), keys.changed().boxed()).map(drop).boxed()
    }

    /// A cluster without this resource, or without the right to read them, has a mesh all the same.
    fn is_ready(&self) -> bool {
        self.peers.has_answer() && (self.keys.has_answer() || !self.needs_keys())
    }

    fn records(&mut self, problems: &mut Vec<SourceProblem>) -> Vec<MemberRecord> {
        let mut peers = self.peers.store.state();
        peers.sort_unstable_by(|a, b| a.name.cmp(&b.name));
        let mut records = Vec::with_capacity(peers.len());
        let keys = self.keys.store.state();
        for peer in peers {
            let (member, of_peer) = peer.resolved(keys.first().map(|keys| &**keys));
            problems.extend(of_peer);
            let Some(member) = member else { continue };
            records.push(MemberRecord { age: Duration::ZERO, source: Source::Kubernetes, member });
        }
        records
    }
}

/// Reads the spec of one Peer: what it describes, where its preshared key is, if not there, and what was left out. A key that cannot be
/// read leaves out all of it: without its preshared key a peer must not be connected to.
pub fn read(name: &str, spec: &Value) -> (Option<Member>, Option<String>, Vec<SourceProblem>) {
    let left_out = |error: String| {
        let problem = SourceProblem::InvalidExternalPeer { peer: name.to_owned(), error };
        (None, None, vec![problem])
    };
    let spec: KiloPeerSpec = match serde_json::from_value(spec.clone()) {
        Ok(spec) => spec,
        Err(error) => return left_out(format!("its spec cannot be read ({error})")),
    };
    let keys = (spec.parse_public_key(), spec.parse_preshared_key());
    let (public_key, preshared_key) = match keys {
        (Ok(public), Ok(preshared)) => (public, preshared),
        (Err(error), _) => return left_out(format!("spec.publicKey is {error}")),
        (_, Err(error)) => return left_out(format!("spec.presharedKey is {error}")),
    };
    let reference = spec.preshared_key_ref.as_ref().map(|reference| reference.key.clone());
    if preshared_key.is_some() && reference.is_some() {
        return left_out("it has both spec.presharedKey and spec.presharedKeyRef".to_owned());
    }
    let (claims, unreadable) = spec.parse_allowed_ips();
    let invalid = |field, value: String| {
        let peer = name.to_owned();
        SourceProblem::InvalidExternalField { peer, field, value }
    };
    let mut problems: Vec<SourceProblem> =
        unreadable.into_iter().map(|entry| invalid("spec.allowedIPs", entry.to_owned())).collect();
    let manual = spec.parse_endpoint().unwrap_or_else(|error| {
        problems.push(invalid("spec.endpoint", error.0));
        None
    });
    let member = Member {
        public_key: Some(public_key),
        claims,
        // Absent is none: only the peer's side knows whether it is behind a NAT.
        keepalive: Keepalive::every(Some(spec.persistent_keepalive.unwrap_or_default())),
        endpoints: Endpoints { manual, ..Endpoints::default() },
        external: Some(External { preshared_key, entry_nodes: spec.entry_nodes.unwrap_or_default() }),
        ..Member::of_peer(name)
    };
    (Some(member), reference, problems)
}

#[cfg(test)]
mod tests {
    use fairlead_keys::{PresharedKey, PublicKey};
    use serde_json::json;
    use testbed_api::fields::assert_each_is_read_or_listed;

    use super::*;

    fn key(byte: u8) -> String {
        PublicKey([byte; 32]).to_string()
    }

    fn object(name: &str, spec: Value) -> DynamicObject {
        serde_json::from_value(json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "spec": spec,
            "metadata": { "name": name, "uid": "u", "creationTimestamp": "1970-01-01T00:00:07Z" },
        }))
        .unwrap()
    }

    #[test]
    fn a_peer_is_an_external_member() {
        let spec = json!({
            "publicKey": key(1), "presharedKey": key(2), "allowedIPs": ["10.9.0.1/32", "192.168.5.7/24"],
            "endpoint": { "dnsOrIP": { "dns": "gate.example" }, "port": 7 }, "persistentKeepalive": 10,
        });
        let cached = CachedExternalPeer::new(&object("laptop", spec));
        let member = cached.described().unwrap();
        assert_eq!((member.name.as_str(), member.peer_name()), ("peer/laptop", Some("laptop")));
        assert_eq!(
            member.external,
            Some(External { preshared_key: Some(PresharedKey([2; 32])), ..External::default() })
        );
        assert_eq!(member.claims, ["10.9.0.1/32", "192.168.5.0/24"].map(|text| text.parse().unwrap()));
        assert_eq!(member.endpoints.manual, "gate.example:7".parse().ok());
        assert_eq!(member.since, Some(Since { created: 7, uid: "u".to_owned() }));
        assert_eq!((cached.problems.len(), member.keepalive.interval), (0, Some(10)));
    }

    #[test]
    fn what_cannot_be_read_is_left_out_with_a_reason_that_shows_no_secret() {
        let good = json!({ "publicKey": key(1), "allowedIPs": ["10.9.0.1/32"] });
        let with = |field: &str, value: Value| {
            let mut spec = good.clone();
            spec[field] = value;
            let (member, _, problems) = read("laptop", &spec);
            let text = problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n");
            assert!(text.contains("Peer laptop") && text.contains(field), "{text}");
            (member.is_some(), text)
        };
        assert!(!with("publicKey", json!("nonsense")).0);
        let (is_member, text) = with("presharedKey", json!("secret nonsense"));
        assert!(!is_member && !text.contains("secret nonsense"), "{text}");
        assert!(with("allowedIPs", json!(["10.9.0.1/32", "10.0.0.0/99"])).1.contains("10.0.0.0/99"));
        let both = json!({ "dnsOrIP": { "dns": "a b" }, "port": 7 });
        assert!(with("endpoint", both).0);
        // Values that Kilo's definition of the resource lets pass.
        let (member, _, problems) =
            read("laptop", &json!({ "publicKey": key(1), "allowedIPs": [], "persistentKeepalive": 70_000 }));
        assert_eq!((member.is_some(), problems.len()), (false, 1));
        assert!(read("laptop", &Value::Null).0.is_none());
    }

    #[test]
    fn a_peer_whose_preshared_key_is_elsewhere_is_no_member_without_it() {
        let secret = |data: &[(&str, &str)]| {
            let bytes = |text: &str| k8s_openapi::ByteString(text.as_bytes().to_vec());
            let data = data.iter().map(|(key, text)| ((*key).to_owned(), bytes(text))).collect();
            PresharedKeys::new(&k8s_openapi::api::core::v1::Secret { data: Some(data), ..Default::default() })
        };
        let spec = json!({ "publicKey": key(1), "presharedKeyRef": { "key": "a" }, "allowedIPs": [], "entryNodes": ["n1"] });
        let cached = CachedExternalPeer::new(&object("laptop", spec.clone()));
        assert_eq!(cached.described().unwrap().external.as_ref().unwrap().entry_nodes, ["n1"]);
        let (good, bad) = (secret(&[("a", &key(2)), ("b", &key(3))]), secret(&[("a", "secret nonsense")]));
        let (member, problems) = cached.resolved(Some(&good));
        let external = member.unwrap().external.unwrap();
        assert_eq!((external.preshared_key, problems), (Some(PresharedKey([2; 32])), vec![]));
        for keys in [None, Some(&secret(&[("b", &key(3))])), Some(&bad)] {
            let (member, problems) = cached.resolved(keys);
            let [problem] = &problems[..] else { panic!("{problems:?}") };
            assert!(member.is_none() && problem.reason() == "PresharedKeyMissing", "{problem}");
            assert!(problem.to_string().contains("Peer laptop") && !problem.to_string().contains("nonsense"));
        }
        let mut both = spec;
        both["presharedKey"] = json!(key(5));
        assert!(CachedExternalPeer::new(&object("laptop", both)).resolved(Some(&good)).0.is_none());
    }

    #[test]
    fn every_field_of_a_peer_is_read() {
        let read = |mut spec: Value| {
            // Without these nothing else is read.
            for (field, value) in [("publicKey", json!(key(1))), ("allowedIPs", json!([]))] {
                if spec.get(field).is_none() {
                    spec[field] = value;
                }
            }
            if let Some(endpoint) = spec.get_mut("endpoint") {
                if endpoint.get("dnsOrIP").is_none() {
                    endpoint["dnsOrIP"] = json!({ "ip": "192.0.2.1" });
                }
                if endpoint.get("port").is_none() {
                    endpoint["port"] = json!(1);
                }
            }
            let (member, reference, _) = self::read("laptop", &spec);
            (member, reference)
        };
        let samples = [
            ("spec.publicKey", json!(key(2))),
            ("spec.presharedKey", json!(key(3))),
            ("spec.presharedKeyRef.key", json!("laptop")),
            ("spec.allowedIPs", json!(["10.0.0.1/32"])),
            ("spec.persistentKeepalive", json!(7)),
            ("spec.entryNodes", json!(["n1"])),
            ("spec.endpoint.dnsOrIP.dns", json!("gate.example")),
            ("spec.endpoint.dnsOrIP.ip", json!("192.0.2.2")),
            ("spec.endpoint.port", json!(9)),
        ];
        assert_each_is_read_or_listed::<KiloPeer, _>(None, read, &samples, &json!({}), None);
    }

    proptest::proptest! {
        #[test]
        fn hostile_peers_never_panic(texts in proptest::collection::vec("[0-9a-f.:/\\[\\]%+=A-Z-]{0,50}", 5), port: u16, name: String) {
            let (member, _, _) = read(&name, &json!({
                "publicKey": texts[0], "presharedKey": texts[1], "allowedIPs": [texts[2], "10.0.0.1/32"],
                "endpoint": { "dnsOrIP": { "dns": texts[3], "ip": texts[4] }, "port": port },
            }));
            proptest::prop_assert!(member.is_none_or(|member| member.claims.contains(&"10.0.0.1/32".parse().unwrap())));
        }
    }
}
