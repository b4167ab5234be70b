//! ICMP errors for packets that either WireGuard or the agent sent from the WireGuard port: they were not delivered.

use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use fairlead_path::PathAgent;
use fairlead_tunnel::IcmpErrors;
use tokio::io::unix::AsyncFd;

use super::{MAX_DATAGRAMS, PathPort, register};

/// Socket that reads these errors.
#[derive(Default)]
pub(super) struct Refusals {
    /// The port they are about; zero before there is one.
    port: u16,
    /// `None` where they cannot be read: the agent then asks a path a little later.
    errors: Option<IcmpErrors>,
}

impl Refusals {
    /// Whether there may be more.
    pub(super) fn hand_to(&self, agent: &mut PathAgent, now: Duration) -> bool {
        let Some(errors) = &self.errors else { return false };
        let next = || errors.try_receive();
        let handed =
            std::iter::from_fn(next).take(MAX_DATAGRAMS).map(|remote| agent.unreachable(now, remote));
        handed.count() == MAX_DATAGRAMS
    }
}

impl PathPort {
    /// Reads messages about what leaves from this port, in the network namespace of the calling thread.
    pub(crate) fn watch_refusals(&self, port: u16) {
        let mut shared = self.lock();
        if shared.refusals.port == port {
            return;
        }
        let errors = IcmpErrors::open(port);
        let errors =
            errors.inspect_err(|error| tracing::debug!(%error, port, "cannot read ICMP errors")).ok();
        shared.refusals = Refusals { port, errors };
        shared.generation = shared.generation.wrapping_add(1);
        self.changed.notify_one();
    }

    /// Readable while messages wait.
    pub(super) fn refusals_descriptor(&self) -> Option<AsyncFd<OwnedFd>> {
        register(self.lock().refusals.errors.as_ref()?.as_fd())
    }
}
