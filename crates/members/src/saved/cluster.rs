//! Facts that the cluster said last, in a file: with it the mesh comes up again while the API server does not answer, after a
//! reboot or a crash of this program.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use fairlead_api::resources::WireKubeMesh;
use fairlead_keys::PublicKey;
use fairlead_topology::{Member, SourceNodes};
use ipnet::IpNet;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::{Node, NodeStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;
use tokio::time::sleep;

use crate::SourceProblem;
use crate::departures::Departures;
use crate::saved::{SavedDepartures, SavedMember};
use crate::state_file::{self, StateFile, VERSION, age};

/// Names of the files in the state directory.
const FILE: &str = "mesh.json";
const TOKEN_FILE: &str = "relay-token.json";
/// Least pause between two writes, and for each member: flash memory wears out.
const MIN_PAUSE: Duration = Duration::from_secs(5);
const PAUSE_PER_MEMBER: Duration = Duration::from_millis(100);

/// Facts that the cluster says of the mesh, unmerged with what this host says.
#[derive(Debug, Clone)]
pub struct Facts {
    /// The mesh resource.
    pub mesh: Arc<WireKubeMesh>,
    /// This node's object; from the file without what the mesh does not need.
    pub node: Arc<Node>,
    /// All members, this node included.
    pub members: Vec<Member>,
    /// TCP endpoints of the API server.
    pub api_server: Vec<SocketAddr>,
    /// Prefixes from which Services have their addresses.
    pub services: Vec<IpNet>,
    /// Nodes that may have source addresses of egress gateways, by address.
    pub sources: Arc<BTreeMap<IpAddr, SourceNodes>>,
    /// Parts that could not be read.
    pub problems: Vec<SourceProblem>,
}

/// Facts that [`StateFile::keep`] writes.
#[derive(Debug, Clone)]
pub struct Unsaved {
    /// The mesh resource.
    pub mesh: Arc<WireKubeMesh>,
    /// This node's object.
    pub node: Arc<Node>,
    /// The public key of this node.
    pub public_key: PublicKey,
    /// All members, this node included.
    pub members: Vec<Arc<Member>>,
    /// TCP endpoints of the API server.
    pub api_server: Vec<SocketAddr>,
    /// Prefixes from which Services have their addresses.
    pub services: Vec<IpNet>,
    /// Nodes that may have source addresses of egress gateways, by address.
    pub sources: Arc<BTreeMap<IpAddr, SourceNodes>>,
    /// Members that left.
    pub departures: Departures,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Content {
    version: u32,
    saved: Timestamp,
    node: String,
    /// Public key of this node, for programs of version 0.1, which read no file of another key. A node that replaces its key
    /// stays the same node.
    public_key: String,
    mesh: WireKubeMesh,
    node_object: Node,
    /// Members that the cluster knows.
    members: Vec<SavedMember>,
    api_server: Vec<SocketAddr>,
    #[serde(default)]
    services: Vec<IpNet>,
    #[serde(default)]
    sources: BTreeMap<IpAddr, SavedSource>,
    #[serde(default)]
    departures: SavedDepartures,
}

/// Facts of a file.
#[derive(Debug)]
pub struct Saved {
    /// The facts.
    pub facts: Facts,
    /// Members that had left.
    pub departures: Departures,
    /// Time since the file was written.
    pub age: Duration,
}

/// The token of the relay.
#[derive(Serialize, Deserialize)]
struct SavedToken {
    secret: String,
    token: Vec<u8>,
}

/// A [`SourceNodes`].
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct SavedSource {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    holder: Option<String>,
    gateways: BTreeSet<String>,
}

impl From<&SourceNodes> for SavedSource {
    fn from(nodes: &SourceNodes) -> Self {
        let SourceNodes { holder, gateways } = nodes.clone();
        Self { holder, gateways }
    }
}

impl From<SavedSource> for SourceNodes {
    fn from(saved: SavedSource) -> Self {
        let SavedSource { holder, gateways } = saved;
        Self { holder, gateways }
    }
}

/// Members without those that only discovery services know, which are in another file.
fn of_cluster(members: &[Arc<Member>]) -> impl Iterator<Item = &Member> {
    members.iter().map(|member| &**member).filter(|member| !member.discovery.is_only_source)
}

/// Parts of this node's object that the mesh reads: name, annotations and addresses.
fn needed(node: &Node) -> Node {
    let metadata = ObjectMeta {
        name: node.metadata.name.clone(),
        annotations: node.metadata.annotations.clone(),
        ..ObjectMeta::default()
    };
    let addresses = node.status.as_ref().and_then(|status| status.addresses.clone());
    Node { metadata, status: Some(NodeStatus { addresses, ..NodeStatus::default() }), ..Node::default() }
}

impl StateFile {
    fn path(&self) -> PathBuf {
        self.directory.join(FILE)
    }

    /// Reads what was written last; `None` if there is no file.
    ///
    /// # Errors
    /// The file cannot be read, or is not of this node. It is left as it is, and replaced by the next [`Self::write`].
    pub fn read(&self, now: (Instant, Timestamp)) -> Result<Option<Saved>> {
        let path = self.path();
        let what = || format!("cannot use {}", path.display());
        let Some(bytes) = state_file::read(&path).with_context(what)? else { return Ok(None) };
        self.parse(&bytes, now).with_context(what).map(Some)
    }

    fn parse(&self, bytes: &[u8], now: (Instant, Timestamp)) -> Result<Saved> {
        let content: Content = serde_json::from_slice(bytes)?;
        ensure!(content.version == VERSION, "it has format {}, not {VERSION}", content.version);
        ensure!(content.node == self.node, "it is of node {}", content.node);
        let members = content.members.into_iter().map(Member::try_from);
        let sources = content.sources.into_iter().map(|(address, nodes)| (address, nodes.into()));
        let facts = Facts {
            mesh: Arc::new(content.mesh),
            node: Arc::new(content.node_object),
            members: members.collect::<Result<_>>()?,
            api_server: content.api_server,
            services: content.services,
            sources: Arc::new(sources.collect()),
            problems: vec![SourceProblem::ApiServerSilent { saved: content.saved.to_string() }],
        };
        let departures = content.departures.restored(now)?;
        Ok(Saved { facts, departures, age: age(content.saved, now.1) })
    }

    /// Replaces the file; after a crash it is the old or the new one.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn write(&self, unsaved: &Unsaved, (instant, now): (Instant, Timestamp)) -> Result<()> {
        let content = Content {
            version: VERSION,
            saved: now,
            node: self.node.clone(),
            public_key: unsaved.public_key.to_string(),
            mesh: WireKubeMesh::clone(&unsaved.mesh),
            node_object: needed(&unsaved.node),
            members: of_cluster(&unsaved.members).map(SavedMember::from).collect(),
            api_server: unsaved.api_server.clone(),
            services: unsaved.services.clone(),
            sources: unsaved.sources.iter().map(|(address, nodes)| (*address, nodes.into())).collect(),
            departures: SavedDepartures::of(&unsaved.departures, (instant, now)),
        };
        Ok(state_file::replace(&self.path(), &serde_json::to_vec(&content)?)?)
    }

    /// Removes the files: this node is in no mesh.
    pub fn remove(&self) {
        for path in [self.path(), self.directory.join(TOKEN_FILE)] {
            match fs::remove_file(&path) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::warn!(path = %path.display(), %error, "cannot remove what was saved of the mesh");
                }
                _ => {}
            }
        }
    }

    /// Keeps the token of the relay, as its Secret has it.
    ///
    /// # Errors
    /// The file system refuses.
    pub fn write_token(&self, secret: &str, token: &[u8]) -> Result<()> {
        let content = SavedToken { secret: secret.to_owned(), token: token.to_owned() };
        Ok(state_file::replace(&self.directory.join(TOKEN_FILE), &serde_json::to_vec(&content)?)?)
    }

    /// Token that this Secret had last, if it was kept.
    pub fn read_token(&self, secret: &str) -> Option<Vec<u8>> {
        let bytes = state_file::read(&self.directory.join(TOKEN_FILE)).ok()??;
        let saved: SavedToken = serde_json::from_slice(&bytes).ok()?;
        (saved.secret == secret).then_some(saved.token)
    }

    /// Writes what comes, the newest only, and not too often. Runs until it is dropped.
    pub async fn keep(self, mut news: watch::Receiver<Option<Unsaved>>) {
        while news.changed().await.is_ok() {
            let Some(current) = news.borrow_and_update().clone() else { continue };
            let members = u32::try_from(current.members.len()).unwrap_or(u32::MAX);
            let file = self.clone();
            let written =
                tokio::task::spawn_blocking(move || file.write(&current, (Instant::now(), Timestamp::now())))
                    .await;
            if news.borrow().is_none() {
                // There is no mesh any more, as was found meanwhile.
                self.remove();
            }
            if let Ok(Err(error)) = written {
                let path = self.path();
                tracing::warn!(path = %path.display(), error = %format!("{error:#}"), "cannot save what the cluster says of the mesh");
            }
            sleep(MIN_PAUSE.max(PAUSE_PER_MEMBER.saturating_mul(members))).await;
        }
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests;
