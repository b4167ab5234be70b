//! Registrations at all gateways: the registry, and how tasks hear that it has changed.

use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::{Notify, watch};

use super::metrics::RegistrarMetrics;
use super::registry::Registry;
use super::token::RequestToken;

/// Registrations of this node's clients, which the tasks of the registrar share.
pub(super) struct Registrations {
    registry: Mutex<Registry>,
    pub(super) changes: watch::Sender<u64>,
    /// Changes whenever [`super::Registrar::local_holds`] may return something else.
    pub(super) holds: watch::Sender<()>,
    /// There may be gateways without a task.
    pub(super) tasks: Notify,
    /// There may be gateways to probe.
    pub(super) probes: Notify,
    pub(super) request_token: RequestToken,
    pub(super) port: u16,
    pub(super) metrics: RegistrarMetrics,
}

impl Registrations {
    pub(super) fn new(request_token: RequestToken, port: u16, metrics: RegistrarMetrics) -> Self {
        Self {
            registry: Mutex::default(),
            changes: watch::Sender::new(0),
            holds: watch::Sender::new(()),
            tasks: Notify::new(),
            probes: Notify::new(),
            request_token,
            port,
            metrics,
        }
    }

    /// Held for moments only. Each change of it is complete before anything could panic.
    pub(super) fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn changed(&self, changed: bool) {
        if changed {
            self.changes.send_modify(|count| *count = count.wrapping_add(1));
        }
    }

    pub(super) fn clients_changed(&self, changed: bool) {
        if changed {
            self.tasks.notify_one();
            self.probes.notify_one();
            self.changed(true);
        }
    }
}
