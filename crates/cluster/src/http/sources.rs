//! Routes that only some addresses may read. The address of a client is that of its TCP connection, to which answers go.

use std::net::IpAddr;

use axum::Router;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::{Next, from_fn};
use axum::response::{IntoResponse, Response};

/// Address of the client of a request; an address of IPv4 in a dual-stack socket is one of IPv4.
#[derive(Debug, Clone, Copy)]
pub(super) struct Source(pub(super) IpAddr);

/// Answers requests to `routes` only to clients on this host, and to those whose address `may_read` accepts. Others get the status 403
/// with the sentence `why`.
pub fn restrict(
    routes: Router,
    why: &'static str,
    may_read: impl Fn(IpAddr) -> bool + Clone + Send + Sync + 'static,
) -> Router {
    let check = move |request: Request, next: Next| {
        let source = request.extensions().get::<Source>().map(|source| source.0);
        let may = source.is_some_and(|source| source.is_loopback() || may_read(source));
        async move { if may { next.run(request).await } else { refusal(why) } }
    };
    routes.route_layer(from_fn(check))
}

fn refusal(why: &'static str) -> Response {
    (StatusCode::FORBIDDEN, format!("{why}\n")).into_response()
}
