//! Metrics and health for kubelets and Prometheus, on two ports as Coil has them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::{StatusCode, Uri, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::TcpListener;

use crate::subsystem::{Health, Report};

/// The content type of OpenMetrics text.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Pause before a port that is in use is tried again.
const RETRY_INTERVAL: Duration = Duration::from_millis(500);

/// Says why the program is not ready, or nothing when it is.
pub type Readiness = Arc<dyn Fn() -> Option<String> + Send + Sync>;

/// Routes of the health port: `/healthz` and `/readyz`.
pub fn health(readiness: Readiness) -> Router {
    Router::new().route("/healthz", get(|| async { "ok" })).route(
        "/readyz",
        get(move || {
            let reason = readiness();
            async move {
                match reason {
                    None => (StatusCode::OK, "ok".to_owned()),
                    Some(reason) => (StatusCode::SERVICE_UNAVAILABLE, reason),
                }
            }
        }),
    )
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

/// Routes of the metrics port: `/metrics`.
pub fn metrics(text: impl Fn() -> String + Clone + Send + Sync + 'static) -> Router {
    let answer = move || {
        let text = text();
        async move { ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response() }
    };
    Router::new().route("/metrics", get(answer))
}

/// Serves `routes` until the task is dropped. A port that is in use is logged and tried again; pods start without it.
pub async fn serve(what: &'static str, address: SocketAddr, routes: Router) {
    let listener = listen(what, address).await;
    if let Err(error) = axum::serve(listener, routes).await {
        tracing::error!(what, %address, %error, "stopped serving");
    }
}

/// A predecessor that is ending releases its port a moment later.
async fn listen(what: &'static str, address: SocketAddr) -> TcpListener {
    let mut reported = false;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return listener,
            Err(error) if reported => tracing::debug!(what, %address, %error, "still cannot listen"),
            Err(error) => {
                tracing::error!(what, %address, %error, "cannot listen; is another program on this port?");
                reported = true;
            }
        }
        tokio::time::sleep(RETRY_INTERVAL).await;
    }
}
