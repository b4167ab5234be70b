//! CNI operations that run to completion even when the plugin is killed.
//!
//! tonic drops a call whose client has disconnected where it waits. Its lock on the container would be released while its
//! link is still being made: a DEL could overtake it, and its address could go to another pod.

use std::sync::Arc;

use fairlead_wire::cni::cni_server::Cni;
use fairlead_wire::cni::{AddResponse, CniArgs};
use tonic::{Request, Response, Status};

/// Serves each CNI operation of the service inside on a task of its own.
pub(crate) struct RunToCompletion<S>(pub(crate) Arc<S>);

/// The answer of a task that a disconnected client does not end.
async fn completed<T: Send + 'static>(
    operation: impl Future<Output = Result<T, Status>> + Send + 'static,
) -> Result<T, Status> {
    let ended =
        |error| Err(Status::internal(format!("the CNI operation stopped before it finished: {error}")));
    tokio::spawn(operation).await.unwrap_or_else(ended)
}

#[tonic::async_trait]
impl<S: Cni> Cni for RunToCompletion<S> {
    async fn add(&self, request: Request<CniArgs>) -> Result<Response<AddResponse>, Status> {
        let service = Arc::clone(&self.0);
        completed(async move { service.add(request).await }).await
    }

    async fn del(&self, request: Request<CniArgs>) -> Result<Response<()>, Status> {
        let service = Arc::clone(&self.0);
        completed(async move { service.del(request).await }).await
    }

    async fn check(&self, request: Request<CniArgs>) -> Result<Response<()>, Status> {
        let service = Arc::clone(&self.0);
        completed(async move { service.check(request).await }).await
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::watch;

    use super::*;

    /// Says when an operation began and when it ended; in between it waits for the go-ahead.
    struct Slow {
        began: watch::Sender<bool>,
        go_ahead: watch::Receiver<bool>,
        ended: watch::Sender<bool>,
    }

    #[tonic::async_trait]
    impl Cni for Slow {
        async fn add(&self, _: Request<CniArgs>) -> Result<Response<AddResponse>, Status> {
            self.began.send_replace(true);
            let _ = self.go_ahead.clone().wait_for(|go| *go).await;
            self.ended.send_replace(true);
            Ok(Response::new(AddResponse::default()))
        }

        async fn del(&self, _: Request<CniArgs>) -> Result<Response<()>, Status> {
            Err(Status::not_found("inside"))
        }

        async fn check(&self, _: Request<CniArgs>) -> Result<Response<()>, Status> {
            panic!("inside")
        }
    }

    #[tokio::test]
    async fn an_add_whose_client_disconnected_runs_to_completion() {
        let (go, go_ahead) = watch::channel(false);
        let (began, mut has_begun) = watch::channel(false);
        let (ended, mut has_ended) = watch::channel(false);
        let service = Arc::new(RunToCompletion(Arc::new(Slow { began, go_ahead, ended })));
        let client = tokio::spawn(async move { service.add(Request::new(CniArgs::default())).await });
        has_begun.wait_for(|yes| *yes).await.unwrap();
        client.abort();
        assert!(client.await.unwrap_err().is_cancelled());
        go.send_replace(true);
        has_ended.wait_for(|yes| *yes).await.unwrap();
    }

    #[tokio::test]
    async fn answers_and_panics_are_passed_on() {
        let (_, go_ahead) = watch::channel(true);
        let slow = Slow { began: watch::Sender::new(false), go_ahead, ended: watch::Sender::new(false) };
        let service = RunToCompletion(Arc::new(slow));
        assert!(service.add(Request::new(CniArgs::default())).await.is_ok());
        assert_eq!(service.del(Request::new(CniArgs::default())).await.unwrap_err().message(), "inside");
        let panicked = service.check(Request::new(CniArgs::default())).await.unwrap_err();
        assert!(panicked.message().contains("before it finished"), "{panicked}");
    }
}
