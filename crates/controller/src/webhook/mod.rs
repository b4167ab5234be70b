//! The admission webhook: what the API server's own rules cannot decide about a pool, because it depends on other objects.
//!
//! * [`review`]: the answer to one review.
//! * [`server`]: HTTPS on the port of the Service.
//! * [`certificates`]: what to do with the Secret of certificates now. Pure; new ones are made in [`issue`].
//! * [`rotator`]: Secret and webhook configurations; [`files`]: certificates that something else puts into a directory.
//! * [`probe`]: readiness, by a TLS handshake with the own port.
//!
//! Every replica serves, whether it leads or not, and all share one Secret.

mod certificates;
mod files;
mod issue;
mod metrics;
mod probe;
mod review;
mod rotator;
mod server;

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use fairlead_cluster::subsystem::Supervisor;
use kube::Client;

pub use certificates::Policy;
pub(crate) use metrics::WebhookMetrics;

/// Name of the subsystem.
pub(crate) const NAME: &str = "webhook";

/// Name of the certificate within [`Settings::directory`] and within the Secret.
const CERTIFICATE: &str = "tls.crt";
/// Name of its key there.
const KEY: &str = "tls.key";

/// Settings of the webhook.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Address of the HTTPS server.
    pub address: SocketAddr,
    /// Directory of `tls.crt` and `tls.key` if something else issues them.
    pub directory: PathBuf,
    /// Whether certificates are issued and rotated here. By default, unless the directory has one.
    pub rotate: Option<bool>,
    /// Lifetimes of certificates issued here.
    pub policy: Policy,
}

impl Settings {
    fn rotates(&self) -> bool {
        self.rotate.unwrap_or_else(|| !self.directory.join(CERTIFICATE).exists())
    }
}

/// Starts the webhook.
pub(crate) fn start(
    supervisor: &mut Supervisor,
    settings: &Settings,
    client: &Client,
    metrics: &WebhookMetrics,
) {
    let served = Arc::new(server::Served::new(metrics.clone()));
    let routes = review::routes(client.clone(), metrics.clone());
    let subsystem = supervisor.subsystem(NAME);
    subsystem.spawn("server", server::run(settings.address, Arc::clone(&served), routes));
    if settings.rotates() {
        rotator::start(subsystem, client, settings.policy, Arc::clone(&served));
    } else {
        subsystem.spawn("files", files::run(settings.directory.clone(), Arc::clone(&served)));
    }
    let handshake = Arc::new(probe::Handshake::default());
    subsystem.readiness(Arc::<probe::Handshake>::clone(&handshake));
    subsystem.spawn("probe", probe::run(settings.address, served, handshake));
}
