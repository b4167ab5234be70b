//! Descriptors of sockets that may be closed while they are waited for: each is a copy.

use std::os::fd::{BorrowedFd, OwnedFd};

use tokio::io::Interest;
use tokio::io::unix::{AsyncFd, AsyncFdReadyGuard};

/// `None` if it cannot be waited for.
pub(super) fn register(descriptor: BorrowedFd<'_>) -> Option<AsyncFd<OwnedFd>> {
    let descriptor = descriptor.try_clone_to_owned();
    #[expect(
        deprecated,
        reason = "unsound only for types that do not own or borrow their descriptor; `register` is unsafe"
    )]
    let registered = descriptor.and_then(|descriptor| AsyncFd::with_interest(descriptor, Interest::READABLE));
    registered
        .inspect_err(|error| tracing::warn!(%error, "cannot wait for datagrams of the path socket"))
        .ok()
}

/// Resolves when it is readable, or it cannot be waited for; never without one.
pub(super) async fn readiness(
    descriptor: Option<&AsyncFd<OwnedFd>>,
) -> Option<AsyncFdReadyGuard<'_, OwnedFd>> {
    match descriptor {
        Some(descriptor) => descriptor.readable().await.ok(),
        None => std::future::pending().await,
    }
}
