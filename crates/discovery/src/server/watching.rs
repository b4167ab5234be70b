//! Watches over HTTP/2: a body that takes each message as the core made it once for all watches that are told the same.
//!
//! tonic encodes each message for each stream, into a buffer of 8 KiB of its own. So the generated service only reads the request of a
//! watch, and its empty answer gets this body.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use http_body::Frame;
use prost::bytes::Bytes;
use tonic::Status;
use tonic::body::Body;
use tonic::codegen::{Service, http};
use tonic::server::NamedService;

use super::state::Shared;
use crate::core::{Notification, WatchId};

/// A watch of a caller; it ends when it is dropped.
#[derive(Debug)]
pub(super) struct Watch {
    id: WatchId,
    /// The number of its connection.
    connection: u64,
    shared: Arc<Shared>,
}

impl Watch {
    pub(super) fn new(id: WatchId, connection: u64, shared: Arc<Shared>) -> Self {
        Self { id, connection, shared }
    }

    /// The next message, or how the watch ended.
    fn poll(&self, context: &Context<'_>) -> Poll<Result<Bytes, Status>> {
        let mut state = self.shared.state();
        match state.discovery.poll_frame(self.id) {
            Notification::Message(message) => Poll::Ready(Ok(message)),
            Notification::Ended => Poll::Ready(Err(Status::aborted(
                "the watch read too slowly, or its cluster is not accepted any more",
            ))),
            // Checked under the lock: a server that stops cancels this first, then takes the lock and wakes all watches.
            Notification::Nothing if self.shared.stopping.is_cancelled() => {
                Poll::Ready(Err(Status::unavailable("the server ends")))
            }
            Notification::Nothing => {
                let former = state.wakers.insert(self.id, (self.connection, context.waker().clone()));
                drop(state);
                drop(former);
                Poll::Pending
            }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        let mut state = self.shared.state();
        state.discovery.unwatch(self.id);
        let waker = state.wakers.remove(&self.id);
        drop(state);
        // Without the lock: a waker may be the last that holds a task.
        drop(waker);
    }
}

/// Hands a watch from the generated service to [`Watching`], in the extensions of its answer, which have to be `Clone`.
#[derive(Debug, Clone)]
pub(super) struct Handover(Arc<Mutex<Option<Watch>>>);

impl Handover {
    pub(super) fn new(watch: Watch) -> Self {
        Self(Arc::new(Mutex::new(Some(watch))))
    }

    fn take(&self) -> Option<Watch> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Body of the response to a watch: its messages, until it ends.
#[derive(Debug)]
struct Messages(Option<Watch>);

impl http_body::Body for Messages {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Some(watch) = &self.0 else { return Poll::Ready(None) };
        let frame = match std::task::ready!(watch.poll(context)) {
            Ok(message) => Frame::data(message),
            Err(status) => {
                self.0 = None;
                let mut trailers = http::HeaderMap::new();
                // The texts above are valid in headers.
                let _ = status.add_header(&mut trailers);
                Frame::trailers(trailers)
            }
        };
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.0.is_none()
    }
}

/// The generated service, with watches' own bodies.
#[derive(Debug, Clone)]
pub(super) struct Watching<S>(pub(super) S);

impl<S: NamedService> NamedService for Watching<S> {
    const NAME: &'static str = S::NAME;
}

impl<S, B> Service<http::Request<B>> for Watching<S>
where
    S: Service<http::Request<B>, Response = http::Response<Body>>,
    S::Future: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(context)
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        let answer = self.0.call(request);
        Box::pin(async move {
            let mut answer = answer.await?;
            let watch = answer.extensions_mut().remove::<Handover>().and_then(|handover| handover.take());
            Ok(match watch {
                Some(watch) => answer.map(|_| Body::new(Messages(Some(watch)))),
                None => answer,
            })
        })
    }
}
