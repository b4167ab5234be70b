//! Statistics that metrics report.

use std::sync::atomic::{AtomicU64, Ordering};

use super::etcd::EtcdSnapshot;
use crate::core::{Counters, Refusal, Totals};

/// A method of the gRPC service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    /// `AffiliateDelete`.
    AffiliateDelete,
    /// `AffiliateUpdate`.
    AffiliateUpdate,
    /// `Hello`.
    Hello,
    /// `List`.
    List,
    /// `Watch`.
    Watch,
}

impl Method {
    /// All methods.
    pub const ALL: [Self; 5] =
        [Self::AffiliateDelete, Self::AffiliateUpdate, Self::Hello, Self::List, Self::Watch];

    /// Value of the method's label in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::AffiliateDelete => "AffiliateDelete",
            Self::AffiliateUpdate => "AffiliateUpdate",
            Self::Hello => "Hello",
            Self::List => "List",
            Self::Watch => "Watch",
        }
    }
}

/// The numbers of a moment.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// Events in the core since the server started.
    pub counters: Counters,
    /// Clusters, affiliates, endpoints and watches at present.
    pub totals: Totals,
    /// Open connections.
    pub connections: usize,
    /// Connections beyond the limit, which were closed at once.
    pub rejected_connections: u64,
    /// Requests, by method.
    pub requests: Vec<(Method, u64)>,
    /// Requests that were refused, by reason.
    pub refusals: Vec<(Refusal, u64)>,
    /// Snapshots that were written.
    pub snapshots: u64,
    /// Snapshots that could not be written.
    pub failed_snapshots: u64,
    /// Statistics of the etcd that replicas share; all zero without one.
    pub etcd: EtcdSnapshot,
}

/// Counters of the shell.
#[derive(Debug, Default)]
pub(super) struct Statistics {
    requests: [AtomicU64; Method::ALL.len()],
    refusals: [AtomicU64; Refusal::ALL.len()],
    pub(super) snapshots: AtomicU64,
    pub(super) failed_snapshots: AtomicU64,
}

impl Statistics {
    pub(super) fn count(&self, method: Method) {
        count(&Method::ALL, &self.requests, &method);
    }

    pub(super) fn count_refusal(&self, refusal: Refusal) {
        count(&Refusal::ALL, &self.refusals, &refusal);
    }

    pub(super) fn requests(&self) -> Vec<(Method, u64)> {
        read(&Method::ALL, &self.requests)
    }

    pub(super) fn refusals(&self) -> Vec<(Refusal, u64)> {
        read(&Refusal::ALL, &self.refusals)
    }
}

fn count<T: PartialEq>(all: &[T], counts: &[AtomicU64], one: &T) {
    if let Some((_, count)) = all.iter().zip(counts).find(|(other, _)| *other == one) {
        count.fetch_add(1, Ordering::Relaxed);
    }
}

fn read<T: Copy>(all: &[T], counts: &[AtomicU64]) -> Vec<(T, u64)> {
    all.iter().copied().zip(counts.iter().map(|count| count.load(Ordering::Relaxed))).collect()
}
