//! How many connections a server has open: in all, and of one source.

use std::collections::HashMap;
use std::hash::Hash;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// The open connections of a server, by source: an address, or whatever stands for one client.
#[derive(Debug)]
pub struct ConnectionLimits<S: Eq + Hash> {
    total: usize,
    per_source: usize,
    open: Mutex<HashMap<S, usize>>,
    rejected: AtomicU64,
}

/// An open connection; it counts until it is dropped.
#[derive(Debug)]
pub struct Counted<S: Copy + Eq + Hash> {
    source: S,
    all: Arc<ConnectionLimits<S>>,
}

impl<S: Eq + Hash> ConnectionLimits<S> {
    /// At most `total` connections, and `per_source` of one source.
    pub fn new(total: usize, per_source: usize) -> Arc<Self> {
        Arc::new(Self { total, per_source, open: Mutex::default(), rejected: AtomicU64::new(0) })
    }

    /// How many are open.
    pub fn open(&self) -> usize {
        self.sources().values().copied().fold(0, usize::saturating_add)
    }

    /// How many were beyond a limit so far.
    pub fn rejected(&self) -> u64 {
        self.rejected.load(Ordering::Relaxed)
    }

    fn sources(&self) -> MutexGuard<'_, HashMap<S, usize>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Copy + Eq + Hash> ConnectionLimits<S> {
    /// Counts one more connection; `None` at a limit.
    pub fn begin(self: &Arc<Self>, source: S) -> Option<Counted<S>> {
        let mut open = self.sources();
        let all = open.values().copied().fold(0, usize::saturating_add);
        let of_source = open.get(&source).copied().unwrap_or_default();
        if all >= self.total || of_source >= self.per_source {
            self.rejected.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        open.insert(source, of_source.saturating_add(1));
        Some(Counted { source, all: Arc::clone(self) })
    }
}

impl<S: Copy + Eq + Hash> Counted<S> {
    /// Where the connection comes from.
    pub fn source(&self) -> S {
        self.source
    }
}

impl<S: Copy + Eq + Hash> Drop for Counted<S> {
    fn drop(&mut self) {
        let mut open = self.all.sources();
        if let Some(count) = open.get_mut(&self.source) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                open.remove(&self.source);
            }
        }
    }
}

/// By what a caller is limited: its address, or of IPv6 the network (/64) in which one host has all addresses it likes.
pub fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() >> 64 << 64).into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_connection_counts_until_it_is_dropped() {
        let limits = ConnectionLimits::new(3, 2);
        let mut of_a: Vec<_> = (0..2).map(|_| limits.begin('a').unwrap()).collect();
        assert!(limits.begin('a').is_none(), "the limit of one source");
        let of_b = limits.begin('b').unwrap();
        assert!(limits.begin('c').is_none(), "the limit in all");
        assert_eq!((limits.open(), limits.rejected(), of_b.source()), (3, 2, 'b'));
        of_a.pop();
        drop(of_b);
        assert_eq!(limits.open(), 1);
        assert!(limits.begin('c').is_some());
        drop(of_a);
        assert!(limits.sources().is_empty());
    }
}
