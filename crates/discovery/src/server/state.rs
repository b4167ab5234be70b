//! State of a discovery server that all requests share.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Waker;

use fairlead_limits::ConnectionTable;
use ipnet::IpNet;
use tokio_util::sync::CancellationToken;

use super::etcd::Etcd;
use super::statistics::Statistics;
use crate::core::{Discovery, Source, WatchId};

/// State that all requests share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) state: Mutex<State>,
    pub(super) connections: Arc<ConnectionTable<Source>>,
    pub(super) statistics: Statistics,
    pub(super) etcd: Option<Etcd>,
    pub(super) trusted_proxies: Vec<IpNet>,
    pub(super) reports_client_address: bool,
    pub(super) redirect: Option<String>,
    /// Ends watches.
    pub(super) stopping: CancellationToken,
}

/// Waker of the task of a watch, and the number of its connection.
pub(super) type ConnectionWaker = (u64, Waker);

/// The core, and the wakers of the tasks of watches that wait.
#[derive(Debug)]
pub(super) struct State {
    pub(super) discovery: Discovery,
    pub(super) wakers: HashMap<WatchId, ConnectionWaker>,
}

impl State {
    /// Wakes watches that have something to be told.
    pub(super) fn wake(&mut self) {
        wake(self.take_wakers());
    }

    /// Takes the wakers of watches that have something to be told.
    pub(super) fn take_wakers(&mut self) -> Vec<ConnectionWaker> {
        let ready = self.discovery.take_ready();
        ready.into_iter().filter_map(|id| self.wakers.remove(&id)).collect()
    }
}

/// Wakes tasks, those of a connection one after the other, so that one write has the messages of all of them.
pub(super) fn wake(mut wakers: Vec<ConnectionWaker>) {
    wakers.sort_unstable_by_key(|(connection, _)| *connection);
    wakers.into_iter().for_each(|(_, waker)| waker.wake());
}

impl Shared {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// After [`Shared::stopping`] is set: watches that wait see it.
    pub(super) fn end_watches(&self) {
        let wakers = std::mem::take(&mut self.state().wakers);
        wake(wakers.into_values().collect());
    }
}
