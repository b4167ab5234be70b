//! Announcements of source addresses to the data path and to node programs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Instant;

use fairlead_address::IpFamily;
use fairlead_dataplane::egress_gateway::Sources;
use fairlead_wire::egress as wire;
use tokio::sync::watch;
use tokio::sync::watch::error::RecvError;

/// A source address that this gateway holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct HeldAddress {
    pub(crate) address: IpAddr,
    pub(crate) term: u64,
    /// Time until which it is held, unless that is said again.
    pub(crate) until: Instant,
    /// It was handed over a moment ago, and clients are not to come for it yet.
    pub(crate) settling: bool,
}

impl HeldAddress {
    /// As node programs are told now; `None` if it is over.
    pub(crate) fn to_wire(self, now: Instant) -> Option<wire::Hold> {
        let address = wire::octets(self.address);
        let left = self.until.checked_duration_since(now)?.as_millis();
        let valid_milliseconds = u32::try_from(left).unwrap_or(u32::MAX);
        let Self { term, settling, .. } = self;
        (left > 0).then_some(wire::Hold { address, term, valid_milliseconds, settling })
    }
}

/// Source addresses of the Egress. Connections that are translated to one that the gateway does not hold are copies of another's.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Floating {
    pub(crate) held: BTreeSet<IpAddr>,
    pub(crate) not_held: BTreeSet<IpAddr>,
}

/// Tells it.
#[derive(Default)]
pub(crate) struct Announcer {
    /// Source addresses, as far as the data path needs to know.
    sources: watch::Sender<Option<Sources>>,
    /// Source addresses that the gateway holds.
    held: watch::Sender<Arc<Vec<HeldAddress>>>,
}

impl Announcer {
    pub(crate) fn set_sources(&self, sources: Option<Sources>) {
        self.sources.send_if_modified(|known| {
            let is_new = *known != sources;
            *known = sources;
            is_new
        });
    }

    /// Every call is sent to node programs, also one that says the same, unless it is again that nothing is held.
    pub(crate) fn set_held(&self, held: Vec<HeldAddress>) {
        self.held.send_if_modified(|known| {
            let is_new = !(known.is_empty() && held.is_empty());
            *known = Arc::new(held);
            is_new
        });
    }

    pub(crate) fn announced(&self) -> Announced {
        Announced { sources: self.sources.subscribe(), held: self.held.subscribe() }
    }
}

/// Announcements that were made last.
#[derive(Clone)]
pub(crate) struct Announced {
    pub(crate) sources: watch::Receiver<Option<Sources>>,
    pub(crate) held: watch::Receiver<Arc<Vec<HeldAddress>>>,
}

impl Announced {
    /// Source addresses that the gateway holds, and those that it does not.
    pub(crate) fn floating(&self) -> Floating {
        let sources = self.sources.borrow();
        let held = self.held.borrow();
        let Some(Sources { floating, translate, .. }) = &*sources else { return Floating::default() };
        // What is translated to is held; a program that has just begun says that before the rest.
        let is_held = |address: &IpAddr| {
            held.iter().any(|it| it.address == *address) || translate.values().any(|it| it == address)
        };
        let (held, not_held) = floating.iter().copied().partition(is_held);
        Floating { held, not_held }
    }

    /// Resolves when something else is told.
    ///
    /// # Errors
    /// Nothing will be told any more.
    pub(crate) async fn changed(&mut self) -> Result<(), RecvError> {
        tokio::select! {
            changed = self.sources.changed() => changed,
            changed = self.held.changed() => changed,
        }
    }
}

/// State of the data path when these addresses are held. New connections get one that was handed over just now only where there is no other:
/// answers to it do not come here yet.
pub(crate) fn sources(
    slots: &[Vec<IpAddr>],
    held: &BTreeSet<IpAddr>,
    settling: &BTreeMap<u32, Instant>,
) -> Sources {
    let first = |family| {
        let all =
            (0u32..).zip(slots).flat_map(|(number, all)| all.iter().map(move |address| (number, address)));
        let own = all.filter(|(_, address)| IpFamily::of(**address) == family && held.contains(*address));
        own.min_by_key(|(number, _)| settling.contains_key(number)).map(|(_, address)| *address)
    };
    Sources {
        floating: slots.iter().flatten().copied().collect(),
        translate: IpFamily::BOTH.into_iter().filter_map(|family| Some((family, first(family)?))).collect(),
        standby: held.is_empty(),
    }
}
