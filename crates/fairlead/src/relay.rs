//! `fairlead relay`: a relay with its metrics and health.

mod members;

use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use fairlead_cluster::resumption;
use fairlead_cluster::subsystem::Supervisor;
use fairlead_relay::access::{Authorizer, FileAuthorizer};
use fairlead_relay::core::AllocationLimits;
use fairlead_relay::server::{CertificateFiles, ReplicaSettings, Server, Settings};
use kube::Client;

use self::members::Members;
use crate::arguments::relay::RelayArguments;
use crate::endpoints::{serve_health, serve_metrics};
use crate::programs::cluster;

const NAME: &str = "relay";
/// UDP ports that one node may ask for: it has few peers that it does not reach directly.
const UDP_PORTS_PER_CLIENT: usize = 1024;
/// Time for a subsystem to stop.
const STOP_TIMEOUT: Duration = Duration::from_secs(3);

/// Serves clients until `stop` resolves and they are gone.
///
/// # Errors
/// The relay cannot start, or one of its tasks ended.
pub(crate) async fn serve(arguments: RelayArguments, stop: impl Future<Output = ()>) -> anyhow::Result<()> {
    let mut supervisor = Supervisor::default();
    serve_health(&mut supervisor, arguments.health_addr);
    let mut stop = std::pin::pin!(stop);
    let authorizer = async { authorizer(&arguments, &mut supervisor).await };
    let access = tokio::select! {
        access = authorizer => access?,
        () = &mut stop => return Ok(()),
    };

    let server = Server::bind(settings(&arguments), access)?;
    let address = server.local_address().context("cannot read the address of the relay")?;
    let replica_address = server.replica_address().context("cannot read the address for replicas")?;
    let observer = server.observer();
    serve_metrics(&mut supervisor, arguments.metrics_addr, |registry| {
        fairlead_relay::metrics::register(registry, observer);
    });
    supervisor.subsystem(NAME).spawn_graceful("server", |stop| server.run(stop.cancelled_owned()));
    tracing::info!(%address, replica_address = replica_address.map(tracing::field::display), "serving");

    let outcome = supervisor.run_until(stop).await;
    supervisor.stop(NAME, arguments.drain.saturating_add(STOP_TIMEOUT)).await;
    supervisor.shutdown(&[], STOP_TIMEOUT).await;
    Ok(outcome?)
}

/// Authorizer of the clients of the relay. With members of a cluster this waits for the first list of them.
async fn authorizer(
    arguments: &RelayArguments,
    supervisor: &mut Supervisor,
) -> anyhow::Result<Arc<dyn Authorizer>> {
    if arguments.allow_wirekube_peers {
        let client = Client::try_from(cluster().await?).context("cannot create a Kubernetes client")?;
        let client = resumption::checking_client(client);
        let members = Members::watch(supervisor.subsystem("members"), client);
        tracing::info!("waiting for the API server's WireKubePeers");
        members.wait_for_first_list().await;
        return Ok(members);
    }
    let files = FileAuthorizer::read(arguments.allowed_keys.clone(), arguments.token_file.clone());
    Ok(Arc::new(files?))
}

fn settings(arguments: &RelayArguments) -> Settings {
    let client_rate = arguments.client_rate.map(Into::into);
    let limits = AllocationLimits { per_client: UDP_PORTS_PER_CLIENT, client_rate };
    let files = arguments.tls_cert_file.clone().zip(arguments.tls_private_key_file.clone());
    Settings {
        listen: arguments.addr,
        stun: Some(arguments.stun_addr).filter(|address| address.port() != 0),
        relay_ports: arguments.udp_ports.map(|(first, last)| (first..=last, limits)),
        certificate: files.map(|(chain, key)| CertificateFiles { chain, key }),
        replicas: replicas(arguments),
        names: arguments.name.clone(),
        limits: fairlead_relay::core::Limits {
            links: arguments.max_clients,
            client_rate,
            ..Default::default()
        },
        drain: arguments.drain,
    }
}

/// Settings of the replicas, if there are others.
fn replicas(arguments: &RelayArguments) -> Option<ReplicaSettings> {
    let known = arguments.replica_ca_file.clone().zip(arguments.replica_name.clone());
    known.map(|(authorities, name)| ReplicaSettings {
        listen: arguments.replica_addr,
        peers: arguments.replica.clone(),
        authorities,
        name,
    })
}
