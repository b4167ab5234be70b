//! A member of a cluster as a client of one discovery server: it publishes this node and watches the others.
//!
//! [`Publication`] and [`Members`] decide without I/O which parts of this node are published, and which messages of a
//! server are believed. This module connects: a session is a greeting, then a watch, and beside it the updates of this
//! node. When an update fails, the watch goes on; when the session ends, the members known so far stay, and the next
//! session begins after a pause.

mod connect;
mod endpoint;
mod members;
mod publication;
mod session;

use std::fmt;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aws_lc_rs::hmac;
use fairlead_wire::discovery::ClusterSecret;
use rustls::RootCertStore;
use tokio::sync::watch;
use tokio::task::JoinHandle;

pub use endpoint::{InvalidServerEndpoint, ServerEndpoint};
pub use members::{Member, Members, Rejection};
pub use publication::{Local, Omission, Publication, TooLong};
pub use session::LeaveError;

/// Default and longest value of [`Settings::ttl`].
const TTL: Duration = Duration::from_secs(30 * 60);
/// Default of [`Settings::ask_within`].
const ASK_WITHIN: Duration = Duration::from_secs(10);

/// Reads an environment variable.
pub type Environment = Arc<dyn Fn(&str) -> Option<String> + Send + Sync>;

/// Settings of a client.
#[derive(Clone)]
pub struct Settings {
    /// The server.
    pub server: ServerEndpoint,
    /// Identifier of the cluster.
    pub cluster_id: String,
    /// Secret of the cluster.
    pub secret: ClusterSecret,
    /// Identifier of this node, which its affiliate has as `node_id`.
    pub node_id: String,
    /// The authorities that may certify the server: see [`authorities`].
    pub roots: Arc<RootCertStore>,
    /// Environment variables, for `HTTPS_PROXY` and `NO_PROXY`.
    pub environment: Environment,
    /// `SO_MARK` of the connection; zero for none. On a node it keeps the connection out of the mesh.
    pub mark: u32,
    /// Time to live of the published affiliate, at most half an hour; it is published again after half of it.
    pub ttl: Duration,
    /// Longest random time before the server is asked whether it still has members that it calls deleted, and shortest time between two such
    /// questions. Only servers that do not say what has expired are asked.
    pub ask_within: Duration,
}

impl Settings {
    /// For a server whose authorities are known, with the environment of this process and the longest time to live.
    pub fn new(
        server: ServerEndpoint,
        cluster_id: String,
        secret: ClusterSecret,
        node_id: String,
        roots: Arc<RootCertStore>,
    ) -> Self {
        let environment: Environment = Arc::new(|name| std::env::var(name).ok());
        Self {
            server,
            cluster_id,
            secret,
            node_id,
            roots,
            environment,
            mark: 0,
            ttl: TTL,
            ask_within: ASK_WITHIN,
        }
    }
}

impl fmt::Debug for Settings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Settings");
        shown.field("server", &self.server).field("cluster_id", &self.cluster_id);
        shown.field("node_id", &self.node_id).finish_non_exhaustive()
    }
}

/// The identifier of the node of a name, the same for each of its runs and keys. Without the secret of the cluster it says nothing
/// of the name.
pub fn node_id(secret: &[u8; 32], node: &str) -> String {
    let key = hmac::Key::new(hmac::HMAC_SHA256, secret);
    let mut context = hmac::Context::with_key(&key);
    context.update(b"fairlead discovery node ID\0");
    context.update(node.as_bytes());
    context.sign().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The authorities of this host, and those of a bundle in PEM.
///
/// # Errors
/// The bundle has none, or there is no bundle and this host trusts none.
pub fn authorities(bundle: Option<&[u8]>) -> Result<RootCertStore, io::Error> {
    let system = fairlead_transport::system_roots();
    let Some(bundle) = bundle else { return system };
    let mut roots = fairlead_transport::trust(bundle)?;
    roots.extend(system.map(|system| system.roots).unwrap_or_default());
    Ok(roots)
}

/// State of a client.
#[derive(Debug, Clone, Default)]
pub struct View {
    /// The other members; what was known when a connection ended stays.
    pub members: Members,
    /// Time since which the first snapshot of this connection is complete; `None` without a connection.
    pub connected: Option<Instant>,
    /// Address of this node as the server sees it.
    pub client_ip: Option<IpAddr>,
    /// Time at which this node was last published.
    pub published: Option<Instant>,
    /// Parts of this node that were left out of the last publication.
    pub omissions: Vec<Omission>,
    /// Reason why there is no connection.
    pub connection_error: Option<String>,
    /// Reason why this node is not published.
    pub publication_error: Option<String>,
}

/// A running client. It ends when it is dropped; what it published then expires.
#[derive(Debug)]
pub struct Client {
    settings: Settings,
    local: watch::Sender<Option<Local>>,
    view: watch::Receiver<View>,
    task: JoinHandle<()>,
}

impl Client {
    /// Connects. Nothing is published before [`Client::publish`].
    pub fn start(settings: Settings) -> Self {
        let (local, published) = watch::channel(None);
        let (sender, view) = watch::channel(View::default());
        let task = tokio::spawn(session::run(settings.clone(), published, sender));
        Self { settings, local, view, task }
    }

    /// Publishes what this node says of itself, now and from now on. Its `node_id` becomes that of the settings.
    pub fn publish(&self, mut local: Local) {
        local.affiliate.node_id.clone_from(&self.settings.node_id);
        self.local.send_if_modified(|current| {
            let is_other = current.as_ref() != Some(&local);
            if is_other {
                *current = Some(local);
            }
            is_other
        });
    }

    /// State of the client; the receiver sees each change.
    pub fn view(&self) -> watch::Receiver<View> {
        self.view.clone()
    }

    /// Ends, and deletes what this node published.
    ///
    /// # Errors
    /// The server cannot be told; what was published expires.
    pub async fn leave(self) -> Result<(), LeaveError> {
        self.task.abort();
        session::leave(&self.settings).await
    }
}

/// Deletes what a client with these settings published, which runs no more.
///
/// # Errors
/// The server cannot be told; what was published expires.
pub async fn leave(settings: &Settings) -> Result<(), LeaveError> {
    session::leave(settings).await
}

impl Drop for Client {
    fn drop(&mut self) {
        self.task.abort();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bundle_adds_authorities_to_those_of_the_host() {
        let system = fairlead_transport::system_roots().expect("install ca-certificates").roots;
        let own = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap().cert.pem();
        let roots = authorities(Some(own.as_bytes())).unwrap().roots;
        let own = fairlead_transport::trust(own.as_bytes()).unwrap().roots;
        assert_eq!(roots.len(), system.len() + 1);
        assert!(system.iter().chain(&own).all(|authority| roots.contains(authority)));
        assert_eq!(authorities(None).unwrap().roots, system);
        assert!(authorities(Some(b"none")).is_err());
    }
}
