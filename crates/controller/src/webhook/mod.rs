//! The admission webhook: what the API server's own rules cannot decide about a pool, because it takes other objects.
//!
//! * [`review`]: the answer to one review.
//! * [`server`]: HTTPS on the port that the Service leads to.
//! * [`certificates`]: what to do with the Secret of certificates now. Pure; new ones are made in [`issue`].
//! * [`keeper`]: Secret and webhook configurations; [`files`]: certificates that somebody else puts into a directory.
//! * [`probe`]: readiness, by a TLS handshake with ourselves.
//!
//! Every copy serves, whether it leads or not, and all share one Secret.

mod certificates;
mod files;
mod issue;
mod keeper;
mod probe;
mod review;
mod server;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use kube::Client;
use tokio::task::JoinSet;

pub use certificates::Policy;

use crate::metrics::Metrics;

/// Name of the certificate within [`Settings::directory`] and within the Secret.
const CERTIFICATE: &str = "tls.crt";
/// Name of its key there.
const KEY: &str = "tls.key";

/// How the webhook is to run.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Where it is served.
    pub address: SocketAddr,
    /// Where `tls.crt` and `tls.key` are if somebody else makes them.
    pub directory: PathBuf,
    /// Whether certificates are made and rotated here. If nobody says: unless the directory has one.
    pub rotate: Option<bool>,
    /// Lifetimes of certificates made here.
    pub policy: Policy,
}

impl Settings {
    fn rotates(&self) -> bool {
        self.rotate.unwrap_or_else(|| !self.directory.join(CERTIFICATE).exists())
    }
}

/// Starts the webhook on `tasks`. What it returns says why it is not ready, or nothing when it is.
pub(crate) fn spawn(
    tasks: &mut JoinSet<()>,
    settings: &Settings,
    client: &Client,
    metrics: &Arc<Metrics>,
) -> fairlead_cluster::http::Readiness {
    let served = Arc::new(server::Served::new(Arc::clone(metrics)));
    let routes = review::routes(client.clone(), Arc::clone(metrics));
    tasks.spawn(server::run(settings.address, Arc::clone(&served), routes));
    if settings.rotates() {
        keeper::spawn(tasks, client, settings.policy, Arc::clone(&served));
    } else {
        tasks.spawn(files::run(settings.directory.clone(), Arc::clone(&served)));
    }
    let readiness = Arc::new(probe::Readiness::default());
    tasks.spawn(probe::run(settings.address, served, Arc::clone(&readiness)));
    Arc::new(move || readiness.reason())
}
