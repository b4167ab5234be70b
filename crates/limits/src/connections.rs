//! The connections that a server has open: in all, and of one source.
//!
//! At a limit a server either refuses what is new ([`ConnectionTable::admit`]), or accepts it and closes another
//! ([`ConnectionTable::displace`]): the oldest of the same source at the limit of one source, else the oldest of the source that has
//! most. A client that opens thousands closes its own.

use std::cmp::Reverse;
use std::collections::{BTreeMap, HashMap};
use std::hash::Hash;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Open connections, by source: see [`crate::network`], or whatever stands for one client. `V` closes one of them when it
/// is dropped.
#[derive(Debug)]
pub struct ConnectionTable<S: Copy + Eq + Hash, V = ()> {
    total: usize,
    per_source: usize,
    open: Mutex<Open<S, V>>,
    rejected: AtomicU64,
}

#[derive(Debug)]
struct Open<S, V> {
    /// Number of the next connection.
    number: u64,
    count: usize,
    /// In the order in which they were opened.
    sources: HashMap<S, BTreeMap<u64, V>>,
}

/// Open connection; it counts until it is dropped or displaced.
#[derive(Debug)]
pub struct Counted<S: Copy + Eq + Hash, V = ()> {
    source: S,
    number: u64,
    all: Arc<ConnectionTable<S, V>>,
}

impl<S: Copy + Eq + Hash, V> ConnectionTable<S, V> {
    /// Table of at most `total` connections, and `per_source` of one source.
    pub fn new(total: usize, per_source: usize) -> Arc<Self> {
        let open = Mutex::new(Open { number: 0, count: 0, sources: HashMap::new() });
        Arc::new(Self { total, per_source, open, rejected: AtomicU64::new(0) })
    }

    /// Number of open connections, without those that were displaced and are ending.
    pub fn open(&self) -> usize {
        self.lock().count
    }

    /// Number of connections that were beyond a limit so far.
    pub fn rejected(&self) -> u64 {
        self.rejected.load(Ordering::Relaxed)
    }

    /// One more connection; `None` at a limit.
    pub fn admit(self: &Arc<Self>, source: S, value: V) -> Option<Counted<S, V>> {
        let mut open = self.lock();
        if open.count >= self.total || open.of(source) >= self.per_source {
            self.rejected.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        let number = open.insert(source, value);
        Some(Counted { source, number, all: Arc::clone(self) })
    }

    /// One more connection. If there is no room, the value of another is dropped, and it counts no more.
    pub fn displace(self: &Arc<Self>, source: S, value: V) -> Counted<S, V> {
        let mut open = self.lock();
        let crowded = if open.of(source) >= self.per_source {
            Some(source)
        } else if open.count >= self.total {
            open.largest()
        } else {
            None
        };
        let displaced = crowded.and_then(|source| open.pop_oldest(source));
        let number = open.insert(source, value);
        drop(open);
        drop(displaced);
        Counted { source, number, all: Arc::clone(self) }
    }

    fn lock(&self) -> MutexGuard<'_, Open<S, V>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<S: Copy + Eq + Hash, V> Open<S, V> {
    fn of(&self, source: S) -> usize {
        self.sources.get(&source).map_or(0, BTreeMap::len)
    }

    /// The source with most connections; among equals that with the oldest.
    fn largest(&self) -> Option<S> {
        let rank =
            |of_source: &BTreeMap<u64, V>| (of_source.len(), Reverse(of_source.keys().next().copied()));
        self.sources.iter().max_by_key(|(_, of_source)| rank(of_source)).map(|(source, _)| *source)
    }

    fn insert(&mut self, source: S, value: V) -> u64 {
        let number = self.number;
        self.number = self.number.wrapping_add(1);
        self.sources.entry(source).or_default().insert(number, value);
        self.count = self.count.saturating_add(1);
        number
    }

    fn pop_oldest(&mut self, source: S) -> Option<V> {
        let number = self.sources.get(&source)?.keys().next().copied()?;
        self.remove(source, number)
    }

    fn remove(&mut self, source: S, number: u64) -> Option<V> {
        let of_source = self.sources.get_mut(&source)?;
        let value = of_source.remove(&number)?;
        if of_source.is_empty() {
            self.sources.remove(&source);
        }
        self.count = self.count.saturating_sub(1);
        Some(value)
    }
}

impl<S: Copy + Eq + Hash, V> Counted<S, V> {
    /// Source of the connection.
    pub fn source(&self) -> S {
        self.source
    }
}

impl<S: Copy + Eq + Hash, V> Drop for Counted<S, V> {
    fn drop(&mut self) {
        // Dropped only when the table is free again.
        let _value = self.all.lock().remove(self.source, self.number);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use super::*;

    type Table = Arc<ConnectionTable<char, Arc<()>>>;
    type Opened = (Counted<char, Arc<()>>, Weak<()>);

    /// So many connections of a source, each with what tells whether it was closed.
    fn open(all: &Table, source: char, count: usize) -> Vec<Opened> {
        let connection = |_| {
            let value = Arc::new(());
            let weak = Arc::downgrade(&value);
            (all.displace(source, value), weak)
        };
        (0..count).map(connection).collect()
    }

    fn closed(connections: &[Opened]) -> Vec<bool> {
        connections.iter().map(|(_, value)| value.strong_count() == 0).collect()
    }

    #[test]
    fn a_connection_counts_until_it_is_dropped() {
        let limits = ConnectionTable::new(3, 2);
        let mut of_a: Vec<_> = (0..2).map(|_| limits.admit('a', ()).unwrap()).collect();
        assert!(limits.admit('a', ()).is_none(), "the limit of one source");
        let of_b = limits.admit('b', ()).unwrap();
        assert!(limits.admit('c', ()).is_none(), "the limit in all");
        assert_eq!((limits.open(), limits.rejected(), of_b.source()), (3, 2, 'b'));
        of_a.pop();
        drop(of_b);
        assert_eq!(limits.open(), 1);
        assert!(limits.admit('c', ()).is_some());
        drop(of_a);
        assert!(limits.lock().sources.is_empty());
    }

    #[test]
    fn at_the_limit_of_an_address_its_own_oldest_connection_is_closed() {
        let all = ConnectionTable::new(8, 2);
        let (other, flood) = (open(&all, 'a', 1), open(&all, 'b', 4));
        assert_eq!((closed(&other), closed(&flood)), (vec![false], vec![true, true, false, false]));
        assert_eq!(all.open(), 3);
    }

    #[test]
    fn at_the_limit_of_the_port_the_address_with_most_connections_makes_room() {
        let all = ConnectionTable::new(4, 3);
        let (few, most, new) = (open(&all, 'a', 1), open(&all, 'b', 3), open(&all, 'c', 2));
        assert_eq!(closed(&few), [false]);
        assert_eq!(closed(&most), [true, true, false]);
        assert_eq!(closed(&new), [false, false]);
    }

    #[test]
    fn among_equals_the_oldest_connection_is_closed() {
        let all = ConnectionTable::new(2, 2);
        let one_each: Vec<_> = ['a', 'b', 'c'].into_iter().flat_map(|source| open(&all, source, 1)).collect();
        assert_eq!(closed(&one_each), [true, false, false]);
    }

    #[test]
    fn a_connection_that_ended_counts_no_more() {
        let all = ConnectionTable::new(1, 1);
        for source in ['a', 'b', 'c'] {
            assert_eq!(closed(&open(&all, source, 1)), [false]);
        }
        let (first, second) = (open(&all, 'a', 1), open(&all, 'a', 1));
        assert_eq!((closed(&first), closed(&second)), (vec![true], vec![false]));
        drop(first);
        assert_eq!(all.open(), 1, "one that was closed counts no more");
        drop(second);
        assert!(all.lock().sources.is_empty());
    }
}
