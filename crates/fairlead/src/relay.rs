//! `fairlead relay`: a relay with its metrics and health.

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use fairlead_cluster::http::{self, Limits, Plain};
use fairlead_cluster::subsystem::Supervisor;
use fairlead_cluster::{metrics, process};
use fairlead_relay::access::FileAuthorizer;
use fairlead_relay::server::{CertificateFiles, Server, Settings};
use prometheus_client::registry::Registry;

use crate::arguments::RelayArguments;

const NAME: &str = "relay";
/// Time for a subsystem to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);

/// Serves clients until `stop` resolves and they are gone.
///
/// # Errors
/// The relay cannot start, or one of its tasks ended.
pub(crate) async fn serve(arguments: RelayArguments, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
    let access = FileAuthorizer::read(arguments.allowed_keys, arguments.token_file)?;
    let files = arguments.tls_cert_file.zip(arguments.tls_private_key_file);
    let settings = Settings {
        listen: arguments.addr,
        certificate: files.map(|(chain, key)| CertificateFiles { chain, key }),
        names: arguments.name,
        limits: fairlead_relay::core::Limits {
            links: arguments.max_clients,
            client_rate: arguments.client_rate.map(Into::into),
            ..Default::default()
        },
        drain: arguments.drain,
    };
    let server = Server::bind(settings, Arc::new(access))?;
    let address = server.local_address().context("cannot read the address of the relay")?;
    let mut registry = Registry::default();
    process::register_process(&mut registry);
    fairlead_relay::metrics::register(&mut registry, server.observer());

    let mut supervisor = Supervisor::default();
    if arguments.metrics_addr.port() != 0 {
        let routes = http::metrics(move |exposition| metrics::text(&registry, exposition));
        let serve = http::serve("metrics", arguments.metrics_addr, Limits::PROBES, Plain, routes);
        supervisor.subsystem("metrics").spawn("server", serve);
    }
    let probes = http::probes(supervisor.health());
    let health = http::serve("health", arguments.health_addr, Limits::PROBES, Plain, probes);
    supervisor.subsystem("health").spawn("server", health);
    supervisor.subsystem(NAME).spawn_graceful("server", |stop| server.run(stop.cancelled_owned()));
    tracing::info!(%address, "serving");

    let outcome = supervisor.run_until(stop).await;
    supervisor.stop(NAME, arguments.drain.saturating_add(STOP_TIMEOUT)).await;
    supervisor.shutdown(&[], STOP_TIMEOUT).await;
    Ok(outcome?)
}
