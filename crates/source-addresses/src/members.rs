//! Members: the gateways of an Egress, in annotations of the Lease `NAME-gateways`.

use std::collections::BTreeMap;
use std::net::IpAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fairlead_egress::registration::{PublicKeyHash, claims};
use serde::{Deserialize, Serialize};

use crate::leases::ANNOTATION_MEMBER_PREFIX;

/// Gateways that count, at most, in the order of their names: each is connected to all others.
pub const MAX_MEMBERS: usize = 64;
/// Longest annotation that is read.
const MAX_ENTRY: usize = 1024;

/// A gateway of the Egress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    /// UID of its pod.
    pub uid: String,
    /// Addresses of its pod, of which it is reached at the first that answers.
    pub addresses: Vec<IpAddr>,
    /// The key that it proves to have.
    pub key: PublicKeyHash,
}

/// Gateways by the names of their pods.
pub type Members = BTreeMap<String, Member>;

/// The annotation in JSON.
#[derive(Serialize, Deserialize)]
struct Entry {
    uid: String,
    addresses: Vec<IpAddr>,
    /// SHA-256 of the public key info, in base64.
    key: String,
    /// The controller asks it to leave: its pod is no gateway of the Egress any more.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    leave: bool,
}

impl Member {
    /// The value of its annotation.
    pub fn encode(&self) -> String {
        let Self { uid, addresses, key } = self.clone();
        let entry = Entry { uid, addresses, key: STANDARD.encode(key), leave: false };
        // Texts and addresses are always JSON.
        serde_json::to_string(&entry).unwrap_or_default()
    }

    /// Reads the value of an annotation; the error says what is wrong with it.
    ///
    /// # Errors
    /// It is not what [`Member::encode`] writes.
    pub fn decode(text: &str) -> Result<Self, String> {
        if text.len() > MAX_ENTRY {
            return Err(format!("it is longer than {MAX_ENTRY} bytes"));
        }
        let Entry { uid, addresses, key, .. } =
            serde_json::from_str(text).map_err(|error| error.to_string())?;
        let key = STANDARD.decode(&key).map_err(|error| format!("the key is not base64: {error}"))?;
        let key = key.try_into().map_err(|_| "the key is no SHA-256".to_owned())?;
        if addresses.is_empty() || addresses.len() > 2 {
            return Err("a gateway has one address or two".to_owned());
        }
        Ok(Self { uid, addresses, key })
    }
}

/// Whether the controller asks the gateway of this annotation to leave.
pub fn is_asked_to_leave(text: &str) -> bool {
    text.len() <= MAX_ENTRY && serde_json::from_str::<Entry>(text).is_ok_and(|entry| entry.leave)
}

/// The gateways in the annotations of the Lease, and what is wrong with those that are left out.
pub fn members(annotations: &BTreeMap<String, String>) -> (Members, Vec<String>) {
    let mut members = Members::new();
    let mut wrong = Vec::new();
    let entries = annotations
        .iter()
        .filter_map(|(key, value)| Some((key.strip_prefix(ANNOTATION_MEMBER_PREFIX)?, value)));
    for (pod, value) in entries {
        if members.len() >= MAX_MEMBERS {
            wrong.push(format!("gateway {pod} is beyond the limit of {MAX_MEMBERS}"));
            break;
        }
        match Member::decode(value) {
            Ok(member) => drop(members.insert(pod.to_owned(), member)),
            Err(reason) => wrong.push(format!("the annotation of gateway {pod} cannot be read: {reason}")),
        }
    }
    (members, wrong)
}

/// The pod that the program runs in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct OwnPod {
    /// Name of the pod, by which it is a member.
    pub name: String,
    /// UID of the pod; empty if it is not known.
    pub uid: String,
}

impl OwnPod {
    /// The pod that the token of its ServiceAccount is bound to (claim `kubernetes.io`). Where that names none, it has the name that the program
    /// was told, which a template of pods can set to anything. Nothing is verified: it is the own token.
    pub fn of(token: &str, told: &str) -> Self {
        let claims = claims(token.trim());
        let claim = |name: &str| {
            let pod = claims.as_ref()?.pointer("/kubernetes.io/pod")?;
            pod.get(name)?.as_str().filter(|text| !text.is_empty()).map(str::to_owned)
        };
        Self { name: claim("name").unwrap_or_else(|| told.to_owned()), uid: claim("uid").unwrap_or_default() }
    }
}

#[cfg(test)]
mod tests {
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;

    use super::*;

    fn member() -> Member {
        let addresses = ["10.0.0.1", "fd00::1"].map(|text| text.parse().unwrap()).to_vec();
        Member { uid: "u-1".to_owned(), addresses, key: [7; 32] }
    }

    #[test]
    fn a_gateway_that_is_asked_to_leave_is_one_until_it_has() {
        let text = member().encode();
        let asked = text.replace("{\"uid\"", "{\"leave\":true,\"uid\"");
        assert_eq!(Member::decode(&asked), Ok(member()));
        assert!(
            is_asked_to_leave(&asked) && !is_asked_to_leave(&text) && !is_asked_to_leave("{\"leave\":true}")
        );
    }

    #[test]
    fn gateways_are_read_from_annotations_and_wrong_ones_named() {
        let annotation = |pod: &str| format!("{ANNOTATION_MEMBER_PREFIX}{pod}");
        let mut annotations = BTreeMap::from([
            (annotation("nat-a"), member().encode()),
            (annotation("nat-b"), "{}".to_owned()),
            (annotation("nat-c"), member().encode().replace("Bw", "")),
            (annotation("nat-d"), "x".repeat(MAX_ENTRY + 1)),
            ("other".to_owned(), String::new()),
        ]);
        let (found, wrong) = members(&annotations);
        assert_eq!(found, [("nat-a".to_owned(), member())].into());
        assert_eq!(wrong.len(), 3, "{wrong:?}");
        assert!(wrong[0].contains("nat-b") && wrong[1].contains("key"), "{wrong:?}");
        annotations.extend(
            (0..MAX_MEMBERS + 5).map(|number| (annotation(&format!("p{number}")), member().encode())),
        );
        let (found, wrong) = members(&annotations);
        assert_eq!((found.len(), wrong.len()), (MAX_MEMBERS, 4), "{wrong:?}");
    }

    #[test]
    fn the_own_pod_is_the_one_in_the_token_whatever_the_program_is_told() {
        let claims = URL_SAFE_NO_PAD.encode(r#"{"kubernetes.io":{"pod":{"name":"nat-a","uid":"u-1"}}}"#);
        let own = OwnPod { name: "nat-a".to_owned(), uid: "u-1".to_owned() };
        assert_eq!(OwnPod::of(&format!("e30.{claims}.c2ln\n"), "all-the-same"), own);
        for token in ["", "a.b.c", "e30.e30.x"] {
            assert_eq!(OwnPod::of(token, "nat-a"), OwnPod { uid: String::new(), ..own.clone() });
        }
    }
}
