//! `fairlead discovery`: a discovery server with its metrics and health, and the lines of its admission file.

use std::io::Write as _;
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use fairlead_cluster::subsystem::{Readiness, Supervisor};
use fairlead_discovery::server::{CertificateFiles, EtcdSettings, Observer, Server, Settings};
use fairlead_members::discovery_client::admission;

use crate::arguments::discovery::{DiscoveryArguments, DiscoveryIdArguments};
use crate::endpoints::{serve_health, serve_metrics};

const NAME: &str = "discovery";
/// Time for requests to finish and for the last snapshot.
const STOP_TIMEOUT: Duration = Duration::from_secs(10);
/// Connections beside those of watches.
const OTHER_CONNECTIONS: usize = 1024;

/// Serves clients until `stop` resolves.
///
/// # Errors
/// The server cannot start, or one of its tasks ended.
pub(crate) async fn serve(
    arguments: DiscoveryArguments,
    stop: impl Future<Output = ()>,
) -> anyhow::Result<()> {
    let mut supervisor = Supervisor::default();
    serve_health(&mut supervisor, arguments.health_addr);

    let server = Server::bind(settings(&arguments))?;
    let address = server.local_address().context("cannot read the address of the discovery server")?;
    let observer = server.observer();
    let readiness = Arc::new(Replica(observer.clone()));
    serve_metrics(&mut supervisor, arguments.metrics_addr, |registry| {
        fairlead_discovery::metrics::register(registry, observer);
    });
    let subsystem = supervisor.subsystem(NAME);
    subsystem.readiness(readiness);
    subsystem.spawn_graceful("server", |stop| server.run(stop.cancelled_owned()));
    tracing::info!(%address, "serving");

    let outcome = supervisor.run_until(stop).await;
    supervisor.stop(NAME, STOP_TIMEOUT).await;
    supervisor.shutdown(&[], STOP_TIMEOUT).await;
    Ok(outcome?)
}

/// Prints the lines of an admission file that accept these nodes.
///
/// # Errors
/// A file cannot be read, or has something else.
pub(crate) fn print_ids(arguments: &DiscoveryIdArguments) -> anyhow::Result<ExitCode> {
    let read =
        |path: &Path| std::fs::read(path).with_context(|| format!("cannot read file {}", path.display()));
    let id = read(&arguments.cluster_id_file)?;
    let secret = read(&arguments.cluster_secret_file)?;
    let lines = admission::lines(id, secret, &arguments.nodes)?;
    // A closed pipe (`| head`) is not a failure.
    drop(write!(std::io::stdout(), "{lines}"));
    Ok(ExitCode::SUCCESS)
}

/// Ready while it can write to etcd, if it has to.
struct Replica(Observer);

impl Readiness for Replica {
    fn not_ready(&self) -> Option<String> {
        self.0.not_ready()
    }
}

fn settings(arguments: &DiscoveryArguments) -> Settings {
    let files = arguments.tls_cert_file.clone().zip(arguments.tls_private_key_file.clone());
    let per_address = arguments.max_connections_per_address;
    Settings {
        listen: arguments.addr,
        certificate: files.map(|(chain, key)| CertificateFiles { chain, key }),
        trusted_proxies: arguments.trusted_proxy.clone(),
        reports_client_address: !arguments.no_client_ip,
        redirect: arguments.redirect_endpoint.clone(),
        admission: arguments.admission_file.clone(),
        snapshot: arguments.snapshot_path.clone().map(|path| (path, arguments.snapshot_interval)),
        etcd: etcd(arguments),
        limits: fairlead_discovery::core::Limits {
            clusters: arguments.max_clusters,
            affiliates: arguments.max_affiliates,
            affiliates_in_all: arguments.max_affiliates_in_all,
            affiliates_per_source: arguments.max_affiliates_per_address,
            watches: arguments.max_watches,
            watches_per_source: per_address,
            rate: arguments.address_rate,
            burst: arguments.address_burst,
            ..Default::default()
        },
        connections: (arguments.max_watches.saturating_add(OTHER_CONNECTIONS), per_address),
    }
}

fn etcd(arguments: &DiscoveryArguments) -> Option<EtcdSettings> {
    let certificate = arguments.etcd_cert_file.clone().zip(arguments.etcd_key_file.clone());
    (!arguments.etcd_endpoints.is_empty()).then(|| EtcdSettings {
        endpoints: arguments.etcd_endpoints.clone(),
        authorities: arguments.etcd_ca_file.clone(),
        certificate: certificate.map(|(chain, key)| CertificateFiles { chain, key }),
        prefix: arguments.etcd_prefix.clone(),
    })
}
