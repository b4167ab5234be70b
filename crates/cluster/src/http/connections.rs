//! Which connections of a port stay open. A new one is always accepted; where that would exceed a limit, an older one is
//! closed: the oldest of the same address at the limit of one address, else the oldest of the address that has most. A client
//! that opens thousands therefore closes its own.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio_util::sync::CancellationToken;

/// The open connections of a port.
#[derive(Debug)]
pub(super) struct Connections {
    total: usize,
    per_source: usize,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    next: u64,
    /// In the order in which they were opened.
    connections: BTreeMap<u64, (IpAddr, CancellationToken)>,
}

/// A connection that counts until it is dropped.
#[derive(Debug)]
pub(super) struct Connection {
    id: u64,
    all: Arc<Connections>,
    /// Cancelled when the connection has to make room.
    pub(super) closed: CancellationToken,
}

impl Connections {
    pub(super) fn new(total: usize, per_source: usize) -> Arc<Self> {
        Arc::new(Self { total, per_source, open: Mutex::default() })
    }

    /// Connections that are open, without those that were closed and are ending.
    pub(super) fn count(&self) -> usize {
        self.open.lock().unwrap_or_else(PoisonError::into_inner).connections.len()
    }

    /// Counts a connection of a client and closes another if there is no room.
    pub(super) fn open(self: &Arc<Self>, source: IpAddr) -> Connection {
        // An IPv4 client of a dual-stack socket.
        let source = source.to_canonical();
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let displaced = open.displaced(source, self.total, self.per_source);
        if let Some((_, token)) = displaced.and_then(|id| open.connections.remove(&id)) {
            token.cancel();
        }
        let (id, closed) = (open.next, CancellationToken::new());
        open.next = open.next.wrapping_add(1);
        open.connections.insert(id, (source, closed.clone()));
        Connection { id, all: Arc::clone(self), closed }
    }
}

impl Open {
    /// The connection that is closed for a new one of `source`.
    fn displaced(&self, source: IpAddr, total: usize, per_source: usize) -> Option<u64> {
        let mut sources: BTreeMap<IpAddr, (usize, u64)> = BTreeMap::new();
        for (id, (source, _)) in &self.connections {
            let (count, _) = sources.entry(*source).or_insert((0, *id));
            *count = count.saturating_add(1);
        }
        if let Some((_, oldest)) = sources.get(&source).filter(|(count, _)| *count >= per_source) {
            return Some(*oldest);
        }
        let most = || sources.values().max_by_key(|(count, oldest)| (*count, std::cmp::Reverse(*oldest)));
        (self.connections.len() >= total).then(most).flatten().map(|(_, oldest)| *oldest)
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.all.open.lock().unwrap_or_else(PoisonError::into_inner).connections.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(last: u8) -> IpAddr {
        IpAddr::from([10, 0, 0, last])
    }

    fn open(all: &Arc<Connections>, source: u8, count: usize) -> Vec<Connection> {
        (0..count).map(|_| all.open(address(source))).collect()
    }

    fn closed(connections: &[Connection]) -> Vec<bool> {
        connections.iter().map(|connection| connection.closed.is_cancelled()).collect()
    }

    #[test]
    fn at_the_limit_of_an_address_its_own_oldest_connection_is_closed() {
        let all = Connections::new(8, 2);
        let (other, flood) = (open(&all, 1, 1), open(&all, 2, 4));
        assert_eq!((closed(&other), closed(&flood)), (vec![false], vec![true, true, false, false]));
    }

    #[test]
    fn at_the_limit_of_the_port_the_address_with_most_connections_makes_room() {
        let all = Connections::new(4, 3);
        let (few, most, new) = (open(&all, 1, 1), open(&all, 2, 3), open(&all, 3, 2));
        assert_eq!(closed(&few), [false]);
        assert_eq!(closed(&most), [true, true, false]);
        assert_eq!(closed(&new), [false, false]);
    }

    #[test]
    fn among_equals_the_oldest_connection_is_closed() {
        let all = Connections::new(2, 2);
        let one_each: Vec<Connection> = (1..=3).flat_map(|source| open(&all, source, 1)).collect();
        assert_eq!(closed(&one_each), [true, false, false]);
    }

    #[test]
    fn a_connection_that_ended_counts_no_more() {
        let all = Connections::new(1, 1);
        for _ in 0..3 {
            assert_eq!(closed(&open(&all, 1, 1)), [false]);
        }
        assert!(all.open.lock().unwrap().connections.is_empty());
    }

    #[test]
    fn an_ipv4_client_of_a_dual_stack_socket_is_one_client() {
        let all = Connections::new(8, 1);
        let first = all.open("::ffff:10.0.0.1".parse().unwrap());
        let _second = all.open(address(1));
        assert!(first.closed.is_cancelled());
    }
}
