//! Health and metrics of the programs that run outside of Kubernetes.

use std::net::SocketAddr;

use fairlead_cluster::http::{self, Limits, Plain};
use fairlead_cluster::subsystem::Supervisor;
use fairlead_cluster::{metrics, process};
use prometheus_client::registry::Registry;

/// Serves `/healthz` and `/readyz`.
pub(crate) fn serve_health(supervisor: &mut Supervisor, address: SocketAddr) {
    let probes = http::probes(supervisor.health());
    let serve = http::serve("health", address, Limits::PROBES, Plain, probes);
    supervisor.subsystem("health").spawn("server", serve);
}

/// Serves `/metrics`: those of the process, and what `register` adds. Port 0 serves none.
pub(crate) fn serve_metrics(
    supervisor: &mut Supervisor,
    address: SocketAddr,
    register: impl FnOnce(&mut Registry),
) {
    if address.port() == 0 {
        return;
    }
    let mut registry = Registry::default();
    process::register_process(&mut registry);
    register(&mut registry);
    let routes = http::metrics(move |exposition| metrics::text(&registry, exposition));
    let serve = http::serve("metrics", address, Limits::PROBES, Plain, routes);
    supervisor.subsystem("metrics").spawn("server", serve);
}
