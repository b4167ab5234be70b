//! Members of which discovery services told last, and the secret for these: a node that is rebooted while neither they nor
//! the API server answer comes back with what it knew.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use fairlead_api::names::{DISCOVERY_CLUSTER_ID, DISCOVERY_CLUSTER_SECRET};
use fairlead_discovery::client::ServerEndpoint;
use fairlead_topology::Member;
use fairlead_wire::discovery::MAX_ID;
use jiff::Timestamp;
use k8s_openapi::ByteString;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use crate::saved::SavedMember;
use crate::state_file::{self, StateFile, VERSION, age};

/// Names of the files in the state directory. The secret has one of its own, so that the others can be shown to others.
const MEMBERS_FILE: &str = "discovery.json";
const SECRET_FILE: &str = "discovery-secret.json";
const SERVICES_FILE: &str = "discovery-services.json";
/// Longest age of saved members that are still used: 7 days.
const MAX_AGE: Duration = Duration::from_secs(7 * 24 * 3600);

/// Identifier and secret that the nodes of a cluster share for discovery.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    /// The identifier of the cluster.
    pub cluster_id: String,
    /// The secret of the cluster.
    pub secret: [u8; 32],
}

impl std::fmt::Debug for Credentials {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Credentials").field("cluster_id", &self.cluster_id).finish_non_exhaustive()
    }
}

/// Credentials that the nodes of a cluster share, and those of before while not all nodes have changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Secrets {
    pub(crate) current: Credentials,
    pub(crate) previous: Option<Previous>,
}

/// Credentials that they shared before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Previous {
    pub(crate) credentials: Credentials,
    /// Time at which this node saw the change.
    pub(crate) changed: Timestamp,
}

#[derive(Serialize, Deserialize)]
struct SavedMembers {
    version: u32,
    saved: Timestamp,
    node: String,
    members: Vec<SavedMember>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SavedCredentials {
    /// Namespace and name of the Secret.
    from: String,
    cluster_id: String,
    cluster_secret: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    previous: Option<SavedPrevious>,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SavedPrevious {
    cluster_id: String,
    cluster_secret: String,
    changed: Timestamp,
}

/// Discovery services at which a node publishes itself.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct SavedServices {
    /// Name of the node, of which its identifier there is made.
    pub(crate) node: String,
    /// URLs of the services.
    pub(crate) servers: Vec<String>,
    /// PEM certificates of the authorities that certify them.
    pub(crate) ca_bundle: Option<String>,
}

impl Credentials {
    /// Credentials as the Secret has them: the identifier as text; the secret as 32 bytes in base64, or as these bytes.
    ///
    /// # Errors
    /// A key is missing or has another length.
    pub(crate) fn of_secret(data: &BTreeMap<String, ByteString>) -> Result<Self> {
        let value = |key| data.get(key).map(|value| &value.0).ok_or_else(|| anyhow!("has no key {key}"));
        let cluster_id = std::str::from_utf8(value(DISCOVERY_CLUSTER_ID)?.trim_ascii());
        let cluster_id = cluster_id.map_err(|_| anyhow!("{DISCOVERY_CLUSTER_ID} is no text"))?.to_owned();
        ensure!(
            !cluster_id.is_empty() && cluster_id.len() <= MAX_ID,
            "{DISCOVERY_CLUSTER_ID} has not 1 to {MAX_ID} bytes"
        );
        let bytes = value(DISCOVERY_CLUSTER_SECRET)?;
        let secret = match <[u8; 32]>::try_from(bytes.as_slice()) {
            Ok(secret) => secret,
            Err(_) => decode(bytes.trim_ascii())?,
        };
        Ok(Self { cluster_id, secret })
    }
}

/// Decodes the secret. The text is not repeated in the error.
fn decode(text: &[u8]) -> Result<[u8; 32]> {
    let bytes = STANDARD.decode(text).ok();
    let secret = bytes.and_then(|bytes| <[u8; 32]>::try_from(bytes.as_slice()).ok());
    secret.with_context(|| format!("{DISCOVERY_CLUSTER_SECRET} is not 32 bytes in base64"))
}

impl StateFile {
    /// Members that [`Self::write_discovered`] wrote, and how long ago; empty if there is no file or it is too old.
    ///
    /// # Errors
    /// The file cannot be read, or is not of this node.
    pub(crate) fn read_discovered(&self, now: Timestamp) -> Result<(Vec<Member>, Duration)> {
        let Some(content) = self.read_json::<SavedMembers>(MEMBERS_FILE)? else {
            return Ok(Default::default());
        };
        ensure!(content.version == VERSION, "it has format {}, not {VERSION}", content.version);
        ensure!(content.node == self.node, "it is of node {}", content.node);
        let age = age(content.saved, now);
        if age > MAX_AGE {
            return Ok(Default::default());
        }
        Ok((content.members.into_iter().map(Member::try_from).collect::<Result<_>>()?, age))
    }

    /// Replaces what is kept of discovery services.
    ///
    /// # Errors
    /// The file system refuses.
    pub(crate) fn write_discovered(&self, members: &[Member], now: Timestamp) -> Result<()> {
        let members = members.iter().map(SavedMember::from).collect();
        let content = SavedMembers { version: VERSION, saved: now, node: self.node.clone(), members };
        Ok(state_file::replace(&self.directory.join(MEMBERS_FILE), &serde_json::to_vec(&content)?)?)
    }

    /// Credentials that this Secret had last, if they were kept.
    pub(crate) fn read_credentials(&self, from: &str) -> Option<Credentials> {
        self.secrets().filter(|(saved, _)| saved == from).map(|(_, secrets)| secrets.current)
    }

    /// Secrets that were used last, whichever Secret had them: until the Secret is read, tunnels keep their preshared key.
    pub(crate) fn saved_secrets(&self) -> Option<Secrets> {
        self.secrets().map(|(_, secrets)| secrets)
    }

    fn secrets(&self) -> Option<(String, Secrets)> {
        let saved: SavedCredentials = self.read_json(SECRET_FILE).ok()??;
        let credentials = |cluster_id: String, secret: &str| {
            Some(Credentials { cluster_id, secret: decode(secret.as_bytes()).ok()? })
        };
        let previous = saved.previous.and_then(|SavedPrevious { cluster_id, cluster_secret, changed }| {
            Some(Previous { credentials: credentials(cluster_id, &cluster_secret)?, changed })
        });
        Some((
            saved.from,
            Secrets { current: credentials(saved.cluster_id, &saved.cluster_secret)?, previous },
        ))
    }

    /// Keeps what this Secret has, and what nodes shared before.
    ///
    /// # Errors
    /// The file system refuses.
    pub(crate) fn write_secrets(&self, from: &str, secrets: &Secrets) -> Result<()> {
        if self.secrets().is_some_and(|(saved, known)| saved == from && known == *secrets) {
            return Ok(());
        }
        let Secrets { current, previous } = secrets;
        let content = SavedCredentials {
            from: from.to_owned(),
            cluster_id: current.cluster_id.clone(),
            cluster_secret: STANDARD.encode(current.secret),
            previous: previous.as_ref().map(|Previous { credentials, changed }| SavedPrevious {
                cluster_id: credentials.cluster_id.clone(),
                cluster_secret: STANDARD.encode(credentials.secret),
                changed: *changed,
            }),
        };
        Ok(state_file::replace(&self.directory.join(SECRET_FILE), &serde_json::to_vec(&content)?)?)
    }

    /// Services at which the node of this state directory publishes itself, whatever its name.
    ///
    /// # Errors
    /// The file cannot be read.
    pub(crate) fn read_services(&self) -> Result<Option<SavedServices>> {
        self.read_json(SERVICES_FILE)
    }

    /// Keeps the services at which this node publishes itself, from before it does.
    ///
    /// # Errors
    /// The file system refuses.
    pub(crate) fn write_services(&self, servers: &[ServerEndpoint], ca_bundle: Option<&[u8]>) -> Result<()> {
        let content = SavedServices {
            node: self.node.clone(),
            servers: servers.iter().map(ToString::to_string).collect(),
            ca_bundle: ca_bundle.map(|pem| String::from_utf8_lossy(pem).into_owned()),
        };
        if self.read_services().is_ok_and(|saved| saved.as_ref() == Some(&content)) {
            return Ok(());
        }
        Ok(state_file::replace(&self.directory.join(SERVICES_FILE), &serde_json::to_vec(&content)?)?)
    }

    /// Removes all of it: the mesh uses no discovery services.
    pub(crate) fn remove_discovered(&self) {
        for name in [MEMBERS_FILE, SECRET_FILE, SERVICES_FILE] {
            let path = self.directory.join(name);
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(path = %path.display(), %error, "cannot remove what was saved of discovery services");
                }
                _ => {}
            }
        }
    }

    /// Reads a file; `None` if there is no such file.
    fn read_json<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>> {
        let path = self.directory.join(name);
        let what = || format!("cannot use {}", path.display());
        let Some(bytes) = state_file::read(&path).with_context(what)? else { return Ok(None) };
        serde_json::from_slice(&bytes).with_context(what).map(Some)
    }
}

#[cfg(test)]
mod tests {
    use fairlead_keys::PublicKey;
    use jiff::SignedDuration;

    use super::*;

    fn file(directory: &tempfile::TempDir) -> StateFile {
        let directory = directory.path().to_owned();
        StateFile { directory, node: "n1".to_owned() }
    }

    fn secret(id: &[u8], secret: &[u8]) -> Result<Credentials> {
        let data = [(DISCOVERY_CLUSTER_ID, id), (DISCOVERY_CLUSTER_SECRET, secret)];
        let data = data.map(|(key, value)| (key.to_owned(), ByteString(value.to_vec())));
        Credentials::of_secret(&data.into())
    }

    #[test]
    fn the_secret_is_read_as_it_is_pasted() {
        let text = STANDARD.encode([9; 32]);
        for pasted in [text.as_bytes(), format!("{text}\n").as_bytes(), &[9; 32]] {
            let credentials = secret(b"abc=\n", pasted).unwrap();
            assert_eq!((credentials.cluster_id.as_str(), credentials.secret), ("abc=", [9; 32]));
        }
        for (id, bytes, words) in
            [(&b""[..], text.as_bytes(), "1 to 256 bytes"), (b"a", b"hunter2", "32 bytes in base64")]
        {
            let error = format!("{:#}", secret(id, bytes).unwrap_err());
            assert!(error.contains(words) && !error.contains("hunter2"), "{error}");
        }
        assert!(Credentials::of_secret(&BTreeMap::new()).unwrap_err().to_string().contains("clusterID"));
    }

    #[test]
    fn what_is_kept_is_read_back_for_seven_days() {
        let directory = tempfile::tempdir().unwrap();
        let (file, now) = (file(&directory), Timestamp::now());
        assert_eq!(file.read_discovered(now).unwrap().0, []);
        let mut member = Member { public_key: Some(PublicKey([2; 32])), ..Member::named("n2") };
        member.endpoints.discovered = vec![([192, 0, 2, 1], 1).into()];
        file.write_discovered(std::slice::from_ref(&member), now).unwrap();
        let minute = Duration::from_secs(60);
        assert_eq!(file.read_discovered(now + minute).unwrap(), (vec![member.clone()], minute));
        let behind = file.read_discovered(now - SignedDuration::from_hours(365 * 24)).unwrap();
        assert_eq!(behind, (vec![member], Duration::ZERO), "a host without a clock was rebooted");
        let later = now + SignedDuration::from_hours(7 * 24 + 1);
        assert_eq!(file.read_discovered(later).unwrap().0, []);
        let current = secret(b"a", &[9; 32]).unwrap();
        let previous = Previous { credentials: secret(b"b", &[8; 32]).unwrap(), changed: now };
        for previous in [None, Some(previous)] {
            let secrets = Secrets { current: current.clone(), previous };
            file.write_secrets("ns/name", &secrets).unwrap();
            assert_eq!(file.read_credentials("ns/name"), Some(current.clone()));
            assert_eq!(file.saved_secrets(), Some(secrets));
        }
        assert_eq!(file.read_credentials("ns/other"), None);
        file.remove_discovered();
        assert_eq!((file.read_credentials("ns/name"), file.read_discovered(now).unwrap().0), (None, vec![]));
    }
}
