//! Connections that have not registered yet. A new one is always accepted; at the limit an older one is closed: one of the same
//! address if that has its share, else the oldest of all. A handshake takes a few round trips, so floods close their own first.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, PoisonError};

use tokio_util::sync::CancellationToken;

/// All of a relay.
#[derive(Debug)]
pub(super) struct Handshakes {
    total: usize,
    per_source: usize,
    open: Mutex<Open>,
}

#[derive(Debug, Default)]
struct Open {
    next: u64,
    /// In the order in which they began.
    all: BTreeMap<u64, (IpAddr, CancellationToken)>,
    /// The numbers of each address, the oldest first.
    sources: HashMap<IpAddr, BTreeSet<u64>>,
}

/// One of them; it counts until it is dropped.
#[derive(Debug)]
pub(super) struct Handshake {
    number: u64,
    all: Arc<Handshakes>,
    /// Cancelled when it has to make room.
    pub(super) displaced: CancellationToken,
}

impl Handshakes {
    pub(super) fn new(total: usize, per_source: usize) -> Arc<Self> {
        Arc::new(Self { total, per_source, open: Mutex::default() })
    }

    pub(super) fn begin(self: &Arc<Self>, source: IpAddr) -> Handshake {
        // An IPv4 client of a dual-stack socket.
        let source = source.to_canonical();
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        let of_source = open.sources.get(&source).filter(|numbers| numbers.len() >= self.per_source);
        let oldest_of_source = of_source.and_then(|numbers| numbers.first().copied());
        let is_full = open.all.len() >= self.total;
        let oldest = || open.all.keys().next().copied().filter(|_| is_full);
        if let Some((_, token)) = oldest_of_source.or_else(oldest).and_then(|number| open.remove(number)) {
            token.cancel();
        }
        let (number, displaced) = (open.next, CancellationToken::new());
        open.next = open.next.wrapping_add(1);
        open.all.insert(number, (source, displaced.clone()));
        open.sources.entry(source).or_default().insert(number);
        Handshake { number, all: Arc::clone(self), displaced }
    }
}

impl Open {
    fn remove(&mut self, number: u64) -> Option<(IpAddr, CancellationToken)> {
        let (source, token) = self.all.remove(&number)?;
        if let Some(numbers) = self.sources.get_mut(&source) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.sources.remove(&source);
            }
        }
        Some((source, token))
    }
}

impl Drop for Handshake {
    fn drop(&mut self) {
        self.all.open.lock().unwrap_or_else(PoisonError::into_inner).remove(self.number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn begin(all: &Arc<Handshakes>, source: u8, count: usize) -> Vec<Handshake> {
        (0..count).map(|_| all.begin(IpAddr::from([10, 0, 0, source]))).collect()
    }

    fn displaced(handshakes: &[Handshake]) -> Vec<bool> {
        handshakes.iter().map(|handshake| handshake.displaced.is_cancelled()).collect()
    }

    #[test]
    fn an_address_with_its_share_displaces_its_own() {
        let all = Handshakes::new(8, 2);
        let (other, flood) = (begin(&all, 1, 1), begin(&all, 2, 4));
        assert_eq!((displaced(&other), displaced(&flood)), (vec![false], vec![true, true, false, false]));
    }

    #[test]
    fn a_full_relay_displaces_the_oldest() {
        let all = Handshakes::new(2, 2);
        let one_each: Vec<Handshake> = (1..=3).flat_map(|source| begin(&all, source, 1)).collect();
        assert_eq!(displaced(&one_each), [true, false, false]);
    }

    #[test]
    fn nothing_is_kept_of_those_that_ended() {
        let all = Handshakes::new(1, 1);
        for source in 0..3 {
            assert_eq!(displaced(&begin(&all, source, 1)), [false]);
        }
        let open = all.open.lock().unwrap();
        assert!(open.all.is_empty() && open.sources.is_empty());
    }
}
