//! Source addresses that float among the gateways of an Egress: which of them this gateway may use, until when, and rules that let the
//! kernel itself end that.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fairlead_address::{IntervalSet, IpFamily};
use fairlead_api::names::NFT_TABLE_EGRESS;
use fairlead_netlink::nftables::{self, AddressEnd, Chain, Expression, Hook, Meta, Rule, Table, TimedSet};
use fairlead_netlink::{Family, Result, Socket};
use ipnet::IpNet;

use super::{of_family, to_or_from};
use crate::nft_table::{Applied, Keeper};

/// `raw` (`NF_IP_PRI_RAW`): before connections are tracked.
const PRIORITY_IN: i32 = -300;
/// After the source was translated (`NF_IP_PRI_NAT_SRC` is 100).
const PRIORITY_OUT: i32 = 300;

/// If the kernel took a message later than this, the times in it are wrong by too much: a hold ends 0.2 s before another gateway may take the
/// address, of which the clocks of both may use 0.1 s.
const LATE: Duration = Duration::from_millis(50);
/// Most times that the kernel is told what is held, while its messages come too late.
const ATTEMPTS: usize = 3;

/// The source addresses of a gateway.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Sources {
    /// All of the Egress: this gateway uses one only while it holds it.
    pub floating: BTreeSet<IpAddr>,
    /// Source address of new connections, by family. Those of a family without one get the gateway's own address.
    pub translate: BTreeMap<IpFamily, IpAddr>,
    /// The gateway holds nothing: what clients send to the outside is dropped.
    pub standby: bool,
}

/// The nftables table of a gateway, which two tasks change: one brings all of it to a desired state, the other one says again and again
/// which addresses are held.
#[derive(Debug, Clone, Default)]
pub struct SourceTable(Arc<Mutex<Kept>>);

/// Says which addresses are held, until it is closed.
#[derive(Debug, Clone)]
pub struct Holding {
    table: SourceTable,
    number: u64,
}

#[derive(Debug, Default)]
struct Kept {
    keeper: Keeper,
    /// End of the time for which each address is held.
    held: BTreeMap<IpAddr, Instant>,
    /// Number of [`Holding`]s that have been opened.
    opened: u64,
    /// Number of the [`Holding`] that is open.
    open: Option<u64>,
}

impl SourceTable {
    /// The table with what an earlier process of this gateway held, as long as it was to hold it.
    ///
    /// # Errors
    /// The kernel cannot be asked.
    pub fn adopt() -> Result<Self> {
        let table = Self::default();
        let mut socket = Socket::open(Family::Netfilter)?;
        if let Some(present) = nftables::read(&mut socket, NFT_TABLE_EGRESS)? {
            let now = Instant::now();
            let sets = nftables::read_timed(&mut socket, NFT_TABLE_EGRESS, &present.shape)?;
            let until = |(address, left): (IpAddr, Duration)| Some((address, now.checked_add(left)?));
            table.locked().held =
                sets.into_values().flat_map(|set| set.addresses).filter_map(until).collect();
        }
        Ok(table)
    }

    /// The addresses that are held now.
    pub fn held(&self) -> BTreeSet<IpAddr> {
        let now = Instant::now();
        self.locked().held.iter().filter(|(_, until)| **until > now).map(|(address, _)| *address).collect()
    }

    /// End of the time for which each address is held, as was said last.
    pub fn deadlines(&self) -> BTreeMap<IpAddr, Instant> {
        self.locked().held.clone()
    }

    /// From now on another one says which addresses are held, and no earlier one any more.
    pub fn open(&self) -> Holding {
        let mut kept = self.locked();
        kept.opened = kept.opened.wrapping_add(1);
        kept.open = Some(kept.opened);
        Holding { table: self.clone(), number: kept.opened }
    }

    pub(super) fn apply(&self, mut wanted: Table) -> Result<Applied> {
        let mut kept = self.locked();
        if !wanted.timed.is_empty() {
            // Only when the table is made: what is in it is newer than what another task may have decided before.
            wanted.timed = sets(&kept.held, Instant::now());
        }
        let began = Instant::now();
        let applied = kept.keeper.apply(&wanted)?;
        if applied == Applied::Rebuilt && !wanted.timed.is_empty() && began.elapsed() >= LATE {
            kept.tell()?;
        }
        Ok(applied)
    }

    /// See [`super::Applier::is_table_in_place`].
    pub(super) fn is_in_place(&self) -> Result<bool> {
        self.locked().keeper.is_in_place()
    }

    fn locked(&self) -> MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Holding {
    /// Makes these the addresses that are held, each until its time. `false` if the table is not there (yet, or any more): it will have them when
    /// it is made. Once this is closed, also by a clone, nothing is done, and `false` is the answer: a call that was late sets nothing.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn hold(&self, held: BTreeMap<IpAddr, Instant>) -> Result<bool> {
        let mut kept = self.table.locked();
        if kept.open != Some(self.number) {
            return Ok(false);
        }
        kept.held = held;
        kept.tell()
    }

    /// No address is held any more.
    ///
    /// # Errors
    /// The kernel refuses, so that it ends their use when their times are over.
    pub fn close(self) -> Result<()> {
        let mut kept = self.table.locked();
        if kept.open != Some(self.number) {
            return Ok(());
        }
        kept.open = None;
        kept.held.clear();
        kept.tell().map(drop)
    }
}

impl Kept {
    /// Tells the kernel what is held; whether the table is there. The kernel counts each time from when it gets the message: where this thread
    /// had to wait before, it is told again what is left, less what that took. If it takes ever longer, nothing is held.
    fn tell(&mut self) -> Result<bool> {
        let mut allowance = Duration::ZERO;
        for _ in 0..ATTEMPTS {
            let began = Instant::now();
            let counts_from = began.checked_add(allowance).unwrap_or(began);
            let is_there = self.keeper.replace_timed(NFT_TABLE_EGRESS, &sets(&self.held, counts_from))?;
            let took = began.elapsed();
            if !is_there || self.held.is_empty() || took < allowance.saturating_add(LATE) {
                return Ok(is_there);
            }
            allowance = took;
        }
        tracing::warn!(
            ?allowance,
            "the kernel learns too late for how long source addresses are held: holding none for now"
        );
        self.keeper.replace_timed(NFT_TABLE_EGRESS, &sets(&BTreeMap::new(), Instant::now()))
    }
}

/// The sets `held_…` from now on.
fn sets(held: &BTreeMap<IpAddr, Instant>, now: Instant) -> BTreeMap<String, TimedSet> {
    let set = |family| {
        let of_family = held.iter().filter(|(address, _)| IpFamily::of(**address) == family);
        let addresses =
            of_family.map(|(address, until)| (*address, until.saturating_duration_since(now))).collect();
        (held_set(family).to_owned(), TimedSet { family, addresses })
    };
    IpFamily::BOTH.map(set).into()
}

/// Adds the rules and sets of source addresses to a gateway's table.
pub(super) fn add(table: &mut Table, sources: &Sources, uplink: &str) {
    let floating: Vec<IpNet> = sources.floating.iter().copied().map(IpNet::from).collect();
    for family in IpFamily::BOTH {
        let set = IntervalSet::from_prefixes(family, &floating);
        table.sets.insert(floating_set(family).to_owned(), set);
    }
    table.timed = sets(&BTreeMap::new(), Instant::now());
    if sources.standby
        && let Some(forward) = table.chains.get_mut("forward")
    {
        forward.rules.insert(0, drop_standby(uplink));
    }
    let chains = [
        (
            "source_in",
            Hook::FilterPrerouting,
            PRIORITY_IN,
            IpFamily::BOTH.map(|it| drop_not_held_in(it, uplink)),
        ),
        (
            "source_out",
            Hook::FilterPostrouting,
            PRIORITY_OUT,
            IpFamily::BOTH.map(|it| drop_not_held_out(it, uplink)),
        ),
    ];
    for (name, hook, priority, rules) in chains {
        table.chains.insert(name.to_owned(), Chain { hook, priority, rules: rules.into() });
    }
}

fn floating_set(family: IpFamily) -> &'static str {
    match family {
        IpFamily::V4 => "floating_ipv4",
        IpFamily::V6 => "floating_ipv6",
    }
}

fn held_set(family: IpFamily) -> &'static str {
    match family {
        IpFamily::V4 => "held_ipv4",
        IpFamily::V6 => "held_ipv6",
    }
}

/// Drops packets from clients to the outside, on a gateway that holds nothing.
pub(super) fn drop_standby(uplink: &str) -> Rule {
    Rule([to_or_from(Meta::OutputInterface, uplink), vec![Expression::Counter, Expression::Drop]].concat())
}

/// Drops incoming packets for an address that is not held.
pub(super) fn drop_not_held_in(family: IpFamily, uplink: &str) -> Rule {
    drop_not_held(family, Meta::InputInterface, uplink, AddressEnd::Destination)
}

/// Drops outgoing packets from an address that is not held.
pub(super) fn drop_not_held_out(family: IpFamily, uplink: &str) -> Rule {
    drop_not_held(family, Meta::OutputInterface, uplink, AddressEnd::Source)
}

fn drop_not_held(family: IpFamily, interface: Meta, uplink: &str, end: AddressEnd) -> Rule {
    let parts = [
        to_or_from(interface, uplink),
        of_family(family),
        vec![
            Expression::load_address(family, end),
            Expression::Lookup(floating_set(family).to_owned()),
            Expression::LookupAbsent(held_set(family).to_owned()),
            Expression::Counter,
            Expression::Drop,
        ],
    ];
    Rule(parts.concat())
}

/// An address as bytes of the packet.
pub(super) fn constant(address: IpAddr) -> Expression {
    Expression::LoadConstant(match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    })
}

#[cfg(test)]
mod tests;
