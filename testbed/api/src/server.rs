//! An API server that is a function.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use kube::Client;
use kube::client::Body;
use tonic::codegen::Service;
use tonic::codegen::http::{Request, Response};

/// A status and a body, now or never.
pub type Answer = BoxFuture<'static, (u16, String)>;

/// Function from a method and a path, as `GET /api`, to an answer.
#[derive(Clone)]
struct Server(Arc<dyn Fn(&str) -> Answer + Send + Sync>);

impl Service<Request<Body>> for Server {
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let answer = (self.0)(&format!("{} {}", request.method(), request.uri().path()));
        Box::pin(async move {
            let (code, body) = answer.await;
            Ok(Response::builder().status(code).body(Body::from(body.into_bytes())).unwrap())
        })
    }
}

/// A client of an API server that answers with what this function returns.
pub fn client(answer: impl Fn(&str) -> Answer + Send + Sync + 'static) -> Client {
    Client::new(Server(Arc::new(answer)), "default")
}
