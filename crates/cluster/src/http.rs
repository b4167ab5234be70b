//! HTTP of the programs: health for kubelets, and metrics for Prometheus.
//!
//! * [`Limits`] and [`serve`]: a server that clients without credentials cannot exhaust.
//! * [`probes`]: `/healthz` and `/readyz`.
//! * [`restrict`]: routes that only some addresses may read.
//! * [`metrics`]: `/metrics`, in both formats of Prometheus; [`serve_metrics`] can restrict it to those whom the API server
//!   allows it. [`json`] adds data beside them.

mod auth;
mod encoded;
mod server;
mod sources;
mod tls;

use std::net::SocketAddr;
use std::sync::Arc;

use anyhow::Context as _;
use axum::Router;
use axum::http::{HeaderMap, StatusCode, Uri, header};
use axum::response::IntoResponse;
use axum::routing::get;
use kube::Client;
use serde::Serialize;

pub use server::{Limits, Plain, Transport, serve};
pub use sources::restrict;

use self::encoded::Encoded;
use crate::metrics::Exposition;
use crate::subsystem::{Health, Report, Subsystem};

/// Listening address of metrics, and the scrapers that may read them.
#[derive(Debug, Clone, Copy)]
pub struct MetricsAddress {
    /// The address; port 0 serves none.
    pub address: SocketAddr,
    /// Whether with TLS, and only for tokens whose user may `get` the path `/metrics`.
    pub secure: bool,
}

/// Routes of the health port: `/healthz` says whether every task runs, `/readyz` which subsystems are not ready and why; both
/// name every subsystem with `?verbose`.
pub fn probes(health: Health) -> Router {
    let ready = health.clone();
    Router::new()
        .route("/healthz", get(move |uri: Uri| async move { probe(&health.liveness(), &uri) }))
        .route("/readyz", get(move |uri: Uri| async move { probe(&ready.readiness(), &uri) }))
}

fn probe(report: &Report, uri: &Uri) -> (StatusCode, String) {
    let verbose = uri.query().is_some_and(|query| query.split('&').any(|part| part.starts_with("verbose")));
    let status = if report.is_ok() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, report.text(verbose))
}

/// Serves metrics as `at` says; `client` asks the API server about tokens.
///
/// # Errors
/// No certificate can be issued.
pub fn serve_metrics(
    subsystem: &mut Subsystem,
    at: MetricsAddress,
    routes: Router,
    client: &Client,
) -> anyhow::Result<()> {
    const WHAT: &str = "metrics";
    let MetricsAddress { address, secure } = at;
    if address.port() == 0 {
        return Ok(());
    }
    if secure {
        let tls = tls::self_signed().context("cannot issue a certificate for metrics")?;
        let routes = auth::require(routes, client.clone());
        subsystem.spawn(WHAT, serve(WHAT, address, Limits::PROBES, tls, routes));
    } else {
        subsystem.spawn(WHAT, serve(WHAT, address, Limits::PROBES, Plain, routes));
    }
    Ok(())
}

/// Routes of the metrics port: `/metrics`. Clients that accept OpenMetrics get it, others the text format, which may be as old as ten times the time
/// that its encoding took.
pub fn metrics(scrape: impl Fn(Exposition) -> String + Send + Sync + 'static) -> Router {
    let scrape = Encoded::new(scrape);
    let answer = move |headers: HeaderMap| async move {
        let accepted = headers.get_all(header::ACCEPT).iter().filter_map(|value| value.to_str().ok());
        let exposition = Exposition::accepted(accepted);
        ([(header::CONTENT_TYPE, exposition.content_type())], scrape.text(exposition)).into_response()
    };
    Router::new().route("/metrics", get(answer))
}

/// A route that answers with data in JSON, of which `answer` is given the query. The error is one of the client.
pub fn json<T: Serialize>(
    path: &str,
    answer: impl Fn(&str) -> Result<T, String> + Send + Sync + 'static,
) -> Router {
    let answer = Arc::new(answer);
    let answer = move |uri: Uri| async move {
        match answer(uri.query().unwrap_or_default()).map(|data| serde_json::to_string(&data)) {
            Ok(Ok(text)) => ([(header::CONTENT_TYPE, "application/json")], text).into_response(),
            Ok(Err(error)) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
            Err(message) => (StatusCode::BAD_REQUEST, message).into_response(),
        }
    };
    Router::new().route(path, get(answer))
}
