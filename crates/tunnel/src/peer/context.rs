//! Parts of the device that a peer needs to act.

use std::collections::HashMap;
use std::time::SystemTime;

use fairlead_keys::PublicKey;
use fairlead_wireguard::{Now, Random};

use crate::engine::BothWays;
use crate::outbox::Outbox;

const MIN_INDEXES: usize = 64;

/// The clocks and randomness of one moment, and what the peers of a device share.
pub(crate) struct Context<'a> {
    pub(crate) now: Now,
    /// For the time stamps of handshakes: the wall clock when the device started, and the time since then. Peers refuse one that is
    /// older than the last (WireGuard paper 5.1), so a wall clock that is set back must not show in them.
    pub(crate) steady_wall: SystemTime,
    pub(crate) random: &'a mut dyn Random,
    pub(crate) indexes: &'a mut Indexes,
    pub(crate) both_ways: &'a mut BothWays,
    pub(crate) out: &'a mut Outbox,
    /// MTU of the interface, in bytes: no packet is padded beyond it.
    pub(crate) mtu: u16,
}

/// The session indexes that this device gave out (WireGuard paper 5.4.2), with the peer of each.
#[derive(Default)]
pub(crate) struct Indexes {
    owners: HashMap<u32, PublicKey>,
    /// Number of indexes at which those that are not in use any more are removed.
    max: usize,
}

impl Indexes {
    /// An index that is not in use.
    pub(super) fn free(&self, random: &mut dyn Random) -> u32 {
        loop {
            let mut bytes = [0; 4];
            random.fill(&mut bytes);
            let index = u32::from_ne_bytes(bytes);
            if !self.owners.contains_key(&index) {
                return index;
            }
        }
    }

    pub(super) fn insert(&mut self, index: u32, owner: PublicKey) {
        self.owners.insert(index, owner);
    }

    /// The peer whose session, or handshake, has this index.
    pub(crate) fn owner(&self, index: u32) -> Option<PublicKey> {
        self.owners.get(&index).copied()
    }

    /// Removes those not in use, if there are so many that it costs little for each, or [`Self::sweep_soon`] was called.
    pub(crate) fn sweep(&mut self, is_used: impl Fn(u32, &PublicKey) -> bool) {
        if self.owners.len() >= self.max {
            self.owners.retain(|index, owner| is_used(*index, owner));
            self.max = self.owners.len().saturating_mul(2).max(MIN_INDEXES);
        }
    }

    /// The next [`Self::sweep`] removes what is not in use.
    pub(crate) fn sweep_soon(&mut self) {
        self.max = 0;
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.owners.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Gives these numbers, one after the other.
    struct Numbers(std::vec::IntoIter<u32>);

    impl Random for Numbers {
        fn fill(&mut self, bytes: &mut [u8]) {
            bytes.copy_from_slice(&self.0.next().unwrap().to_ne_bytes());
        }
    }

    #[test]
    fn an_index_in_use_is_not_given_out_again_and_one_that_is_not_is_removed_in_time() {
        let mut indexes = Indexes::default();
        let mut random = Numbers(vec![7, 7, 7, 8].into_iter());
        let first = indexes.free(&mut random);
        indexes.insert(first, PublicKey([1; 32]));
        assert_eq!((first, indexes.free(&mut random)), (7, 8));
        assert_eq!((indexes.owner(7), indexes.owner(8)), (Some(PublicKey([1; 32])), None));
        indexes.sweep(|_, _| true);
        (100..162).for_each(|index| indexes.insert(index, PublicKey([2; 32])));
        indexes.sweep(|_, _| false);
        assert_eq!(indexes.len(), 63, "it is worth the cost from 64 on");
        indexes.sweep_soon();
        indexes.sweep(|index, _| index == 7);
        assert_eq!(indexes.len(), 1);
    }
}
