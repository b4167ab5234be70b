//! One connection of a client, from its first byte to its last.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fairlead_transport::Stream;
use fairlead_wire::relay::{AllocatedPort, ErrorReason, MAX_BODY};
use tokio::net::TcpStream;
use tokio::sync::Notify;
use tokio::time::timeout;

use super::handshakes::Handshake;
use super::register::{Established, Rejected, establish};
use super::state::Shared;
use super::statistics::Rejection;
use crate::core::{AllocationRequest, LinkId, Transmit};
use crate::stream::{FrameReader, FrameWriter, StreamError};

/// Time for everything before the link: TLS, WebSocket, registration.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(10);
/// Bytes written at once: as many as the kernel holds unsent, so that probes do not wait behind more.
const BUDGET: usize = 16 << 10;
/// Time limit of one write to a client.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// The same for a link that is to end.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);

/// Serves a connection until it ends.
pub(super) async fn serve(shared: Arc<Shared>, stream: TcpStream, source: SocketAddr, handshake: Handshake) {
    let established = tokio::select! {
        established = timeout(HANDSHAKE_TIMEOUT, establish(&shared, stream)) => established.unwrap_or_else(|_| {
            Err(Rejected { reason: Rejection::Timeout, error: "the registration took too long".to_owned() })
        }),
        () = handshake.displaced.cancelled() => {
            Err(Rejected { reason: Rejection::Displaced, error: "a newer connection needed its place".to_owned() })
        }
    };
    drop(handshake);
    match established {
        Ok(established) => {
            tracing::debug!(%source, link = ?established.id, "registered");
            let ended = run(&shared, established).await;
            tracing::debug!(%source, ended, "link ended");
        }
        Err(Rejected { reason, error }) => {
            shared.statistics.count(reason);
            tracing::debug!(%source, error, "connection refused");
        }
    }
}

async fn run(shared: &Shared, established: Established) -> String {
    let Established { id, waker, reader, writer } = established;
    // Also when the task is aborted.
    let _registered = Registered { shared, id };
    let error = tokio::select! {
        error = read(shared, id, reader, &waker) => error.to_string(),
        written = write(shared, id, writer, &waker) => written.err().map_or_else(String::new, |error| error.to_string()),
    };
    error
}

/// A link that is forgotten when it is dropped.
struct Registered<'a> {
    shared: &'a Shared,
    id: LinkId,
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        let mut links = self.shared.links();
        links.relay.remove(self.id);
        links.wakers.remove(&self.id);
    }
}

/// Hands frames to the core until the connection ends.
async fn read(
    shared: &Shared,
    id: LinkId,
    mut reader: FrameReader<Box<dyn Stream>>,
    waker: &Notify,
) -> StreamError {
    loop {
        let filled = reader.fill().await;
        let drained = filled.and_then(|()| {
            let mut links = shared.links();
            let now = Instant::now();
            let drained = reader.drain(MAX_BODY, |parsed| links.relay.handle_frame(now, id, &parsed.frame));
            let requests = links.relay.take_allocation_requests();
            links.wake();
            drop(links);
            answer(shared, requests);
            drained
        });
        match drained {
            Ok(()) if reader.has_ping() => waker.notify_one(),
            Ok(()) => {}
            Err(StreamError::Frame(error)) => {
                tracing::debug!(%error, link = ?id, "malformed frame");
                shared.close(id, ErrorReason::MalformedFrame);
                // The writer says so and ends.
                std::future::pending::<()>().await;
            }
            Err(error) => return error,
        }
    }
}

/// Opens the UDP ports that a client asked for.
fn answer(shared: &Shared, requests: Vec<AllocationRequest>) {
    let Some(ports) = &shared.relay_ports else { return };
    for AllocationRequest { link, client, peer, refusal } in requests {
        if let Some(reason) = refusal {
            ports.refuse(reason);
            continue;
        }
        match ports.allocate(&client, peer) {
            Ok((port, token)) => {
                let mut links = shared.links();
                links.relay.answer_allocation(link, AllocatedPort { peer: peer.0, port, token });
                links.wake();
            }
            // The client asks again.
            Err(reason) => tracing::debug!(link = ?link, reason = reason.label(), "no UDP port for a client"),
        }
    }
}

/// Writes what the core has for the client until the link is to end.
async fn write(
    shared: &Shared,
    id: LinkId,
    mut writer: FrameWriter<Box<dyn Stream>>,
    waker: &Notify,
) -> io::Result<()> {
    let mut out = Vec::new();
    loop {
        out.clear();
        let transmit = shared.links().relay.poll_transmit(Instant::now(), id, BUDGET, &mut out);
        match transmit {
            Transmit::Frames => within_limits(shared, id, writer.write(&out)).await?,
            Transmit::Nothing => {
                out.shrink_to(0);
                waker.notified().await;
                // The answer to a ping of the WebSocket, if there is one.
                within_limits(shared, id, writer.write(&[])).await?;
            }
            Transmit::Close => {
                return timeout(CLOSE_TIMEOUT, writer.close()).await.unwrap_or(Ok(()));
            }
        }
    }
}

/// A client that reads nothing holds its link no longer than [`WRITE_TIMEOUT`], nor [`CLOSE_TIMEOUT`] once it is to end.
async fn within_limits(
    shared: &Shared,
    id: LinkId,
    write: impl Future<Output = io::Result<()>>,
) -> io::Result<()> {
    let ended = async {
        let begun = Instant::now();
        let mut closing = None;
        loop {
            tokio::time::sleep(CLOSE_TIMEOUT / 4).await;
            if closing.is_none() && shared.links().relay.is_closing(id) {
                closing = Some(Instant::now());
            }
            let is_over = closing.is_some_and(|at| at.elapsed() >= CLOSE_TIMEOUT);
            if is_over || begun.elapsed() >= WRITE_TIMEOUT {
                return;
            }
        }
    };
    tokio::select! {
        biased;
        written = write => written,
        () = ended => Err(io::Error::new(io::ErrorKind::TimedOut, "the client does not read")),
    }
}
