//! The call to the node program: the only I/O besides standard input and output.

use std::time::Duration;

use fairlead_wire::cni::CniArgs;
use fairlead_wire::cni::cni_client::CniClient;
use tonic::Request;
use tonic::transport::{Channel, Endpoint};

use crate::failure::{Failure, reasons};

/// How long one call may take, connecting included (Coil v2: one minute). Runtimes give up later than that.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// ADD. The answer is a CNI result in JSON, not looked at here.
///
/// # Errors
/// What the node program says, or code 11 when it cannot be reached or is too slow.
pub async fn add(socket: &str, request: CniArgs, deadline: Duration) -> Result<Vec<u8>, Failure> {
    bounded(socket, deadline, async {
        let answer = connect(socket).await?.add(with_deadline(request, deadline)).await;
        answer.map(|answer| answer.into_inner().result).map_err(|status| Failure::of_status(&status, socket))
    })
    .await
}

/// DEL.
///
/// # Errors
/// As [`add`].
pub async fn del(socket: &str, request: CniArgs, deadline: Duration) -> Result<(), Failure> {
    bounded(socket, deadline, async {
        let answer = connect(socket).await?.del(with_deadline(request, deadline)).await;
        answer.map(|_| ()).map_err(|status| Failure::of_status(&status, socket))
    })
    .await
}

async fn connect(socket: &str) -> Result<CniClient<Channel>, Failure> {
    let broken = |error: tonic::transport::Error| Failure::unreachable(socket, &reasons(&error));
    let endpoint = Endpoint::from_shared(format!("unix://{socket}")).map_err(broken)?;
    Ok(CniClient::new(endpoint.connect().await.map_err(broken)?))
}

/// The node program learns the deadline too, and need not go on for a caller that is gone.
fn with_deadline(request: CniArgs, deadline: Duration) -> Request<CniArgs> {
    let mut request = Request::new(request);
    request.set_timeout(deadline);
    request
}

async fn bounded<T>(
    socket: &str,
    deadline: Duration,
    call: impl Future<Output = Result<T, Failure>>,
) -> Result<T, Failure> {
    match tokio::time::timeout(deadline, call).await {
        Ok(outcome) => outcome,
        Err(_) => Err(Failure::unreachable(socket, &format!("no answer in {} s", deadline.as_secs()))),
    }
}
