//! Metrics and health for kubelets and Prometheus, on two ports as Coil has them.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::{StatusCode, header};
use axum::response::IntoResponse;
use axum::routing::get;
use tokio::net::TcpListener;

/// The content type of OpenMetrics text.
const OPEN_METRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// How soon a port that is taken is tried again.
const AGAIN: Duration = Duration::from_millis(500);

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

/// Routes of the metrics port: `/metrics`.
pub fn metrics(text: impl Fn() -> String + Clone + Send + Sync + 'static) -> Router {
    let answer = move || {
        let text = text();
        async move { ([(header::CONTENT_TYPE, OPEN_METRICS)], text).into_response() }
    };
    Router::new().route("/metrics", get(answer))
}

/// Serves `routes` until the task is dropped. A port that is taken is logged and tried again; pods start without it.
pub async fn serve(what: &'static str, address: SocketAddr, routes: Router) {
    let listener = listen(what, address).await;
    if let Err(error) = axum::serve(listener, routes).await {
        tracing::error!(what, %address, %error, "stopped serving");
    }
}

/// A predecessor that is ending gives its port back a moment later.
async fn listen(what: &'static str, address: SocketAddr) -> TcpListener {
    let mut told = false;
    loop {
        match TcpListener::bind(address).await {
            Ok(listener) => return listener,
            Err(error) if told => tracing::debug!(what, %address, %error, "still cannot listen"),
            Err(error) => {
                tracing::error!(what, %address, %error, "cannot listen; is another program on this port?");
                told = true;
            }
        }
        tokio::time::sleep(AGAIN).await;
    }
}
