//! The call to the node program: the only I/O besides standard input and output.

use std::time::Duration;

use fairlead_wire::cni::CniArgs;
use fairlead_wire::cni::cni_client::CniClient;
use fairlead_wire::network::network_client::NetworkClient;
use fairlead_wire::network::{GcRequest, GcResponse, StatusRequest};
use tonic::Request;
use tonic::transport::{Channel, Endpoint};

use crate::failure::{Failure, code, reasons};
use crate::netconf;

/// Longest one call may take, connecting included (Coil v2: one minute). Runtimes time out later.
pub const TIMEOUT: Duration = Duration::from_secs(60);

/// ADD. The answer is a CNI result in JSON, not parsed here.
///
/// # Errors
/// The node program's error, or code 11 when it cannot be reached or is too slow.
pub async fn add(socket: &str, request: CniArgs, limit: Duration) -> Result<Vec<u8>, Failure> {
    bounded(socket, limit, async {
        let answer = connect(socket).await?.add(with_timeout(request, limit)).await;
        answer.map(|answer| answer.into_inner().result).map_err(|status| Failure::of_status(&status, socket))
    })
    .await
}

/// DEL.
///
/// # Errors
/// As [`add`].
pub async fn del(socket: &str, request: CniArgs, limit: Duration) -> Result<(), Failure> {
    bounded(socket, limit, async {
        let answer = connect(socket).await?.del(with_timeout(request, limit)).await;
        answer.map(|_| ()).map_err(|status| Failure::of_status(&status, socket))
    })
    .await
}

/// CHECK.
///
/// # Errors
/// As [`add`]; also every difference from what ADD made.
pub async fn check(socket: &str, request: CniArgs, limit: Duration) -> Result<(), Failure> {
    bounded(socket, limit, async {
        let answer = connect(socket).await?.check(with_timeout(request, limit)).await;
        answer.map(|_| ()).map_err(|status| Failure::of_status(&status, socket))
    })
    .await
}

/// GC. The answer lists what was freed and what could not be.
///
/// # Errors
/// As [`add`].
pub async fn gc(socket: &str, request: GcRequest, limit: Duration) -> Result<GcResponse, Failure> {
    bounded(socket, limit, async {
        let mut client = NetworkClient::new(channel(socket).await?)
            .max_encoding_message_size(netconf::MAX_MESSAGE)
            .max_decoding_message_size(netconf::MAX_MESSAGE);
        let answer = client.gc(with_timeout(request, limit)).await;
        answer.map(tonic::Response::into_inner).map_err(|status| Failure::of_status(&status, socket))
    })
    .await
}

/// STATUS.
///
/// # Errors
/// Code 50 or 51 with the reason why ADD could not succeed now, for instance that the node program does not answer.
pub async fn status(socket: &str, limit: Duration) -> Result<(), Failure> {
    let asked = bounded(socket, limit, async {
        let mut client = NetworkClient::new(channel(socket).await?);
        let answer = client.status(with_timeout(StatusRequest {}, limit)).await;
        answer.map(|_| ()).map_err(|status| Failure::of_status(&status, socket))
    });
    asked.await.map_err(|failure| match failure.code {
        code::TRY_AGAIN_LATER => Failure { code: code::NOT_AVAILABLE, ..failure },
        _ => failure,
    })
}

async fn connect(socket: &str) -> Result<CniClient<Channel>, Failure> {
    channel(socket).await.map(CniClient::new)
}

async fn channel(socket: &str) -> Result<Channel, Failure> {
    let broken = |error: tonic::transport::Error| Failure::unreachable(socket, &reasons(&error));
    let endpoint = Endpoint::from_shared(format!("unix://{socket}")).map_err(broken)?;
    endpoint.connect().await.map_err(broken)
}

/// Sends the timeout too (gRPC header `grpc-timeout`).
fn with_timeout<T>(request: T, limit: Duration) -> Request<T> {
    let mut request = Request::new(request);
    request.set_timeout(limit);
    request
}

async fn bounded<T>(
    socket: &str,
    limit: Duration,
    call: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    match tokio::time::timeout(limit, call).await {
        Ok(outcome) => outcome,
        Err(_) => Err(Failure::unreachable(socket, &format!("no answer in {} s", limit.as_secs()))),
    }
}
