//! Plan of the source addresses that this node announces. Without I/O and without a clock.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use fairlead_address::IpFamily;
use fairlead_api::source_address::Source;
use fairlead_egress::EgressName;

use super::holds::HeardHold;
use super::pace::Pace;
use super::{Gateway, Permitted};

/// Longest times for which an address of before the start stays without being confirmed: once all gateways that may hold it have been heard,
/// and once it is known which gateways there are. Before, none could have confirmed it: that takes a token of the API server.
const CONFIRMED: Duration = Duration::from_secs(2);
const CONFIRMED_UNHEARD: Duration = Duration::from_secs(30);

/// An address that is announced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Announced {
    /// The address, and the way to the gateway that holds it.
    pub source: Source,
    /// Egress of the gateway.
    pub egress: EgressName,
    /// Name of the pod.
    pub pod: String,
    /// Term of the hold.
    pub term: u64,
}

/// Reason why an address that a gateway of this node says it holds is not announced. `Display` is a sentence for log and status.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub enum Problem {
    /// The gateways of an Egress changed who holds what too often.
    Flapping {
        /// Egress of the gateways.
        egress: String,
    },
    /// Two gateways say that they hold it, with the same term.
    HeldTwice {
        /// The address.
        address: IpAddr,
        /// Names of both gateway pods.
        pods: [String; 2],
    },
    /// No route of this node leads to the pod.
    NoLink {
        /// The address.
        address: IpAddr,
        /// Egress of the gateway.
        egress: String,
        /// Name of the gateway pod.
        pod: String,
    },
    /// `status.sourceAddresses` does not have it.
    NotListed {
        /// The address.
        address: IpAddr,
        /// Egress of the gateway.
        egress: String,
        /// Name of the gateway pod.
        pod: String,
    },
    /// A link of this node has it.
    OfNode {
        /// The address.
        address: IpAddr,
        /// Egress of the gateway.
        egress: String,
    },
    /// The kernel refuses routes or entries.
    Refused {
        /// Answer of the kernel.
        error: String,
    },
}

impl Problem {
    /// One CamelCase word.
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Flapping { .. } => "SourceAddressFlapping",
            Self::HeldTwice { .. } => "SourceAddressHeldTwice",
            Self::NoLink { .. } => "SourceAddressWithoutLink",
            Self::NotListed { .. } => "SourceAddressNotListed",
            Self::OfNode { .. } => "SourceAddressOfNode",
            Self::Refused { .. } => "DataPlaneFailed",
        }
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Flapping { egress } => write!(
                f,
                "gateways of Egress {egress} on this node begin to hold source addresses more often than once a second: some are announced \
                 later; look at the gateway pods"
            ),
            Self::HeldTwice { address, pods: [one, other] } => write!(
                f,
                "gateways {one} and {other} both say that they hold {address}: it stays with the one of them for which this node \
                 announced it before, and is not announced for a new one"
            ),
            Self::NoLink { address, egress, pod } => write!(
                f,
                "source address {address} of Egress {egress} is not announced: no route of this node leads to gateway {pod}"
            ),
            Self::NotListed { address, egress, pod } => write!(
                f,
                "gateway {pod} says that it holds {address}, which status.sourceAddresses of Egress {egress} does not have: \
                 it is not announced"
            ),
            Self::OfNode { address, egress } => write!(
                f,
                "source address {address} of Egress {egress} is not announced: this node has it itself; remove it from \
                 spec.sourceAddresses or from the node"
            ),
            Self::Refused { error } => {
                write!(
                    f,
                    "the kernel refuses routes or entries of source addresses of egress gateways: {error}"
                )
            }
        }
    }
}

/// Addresses to announce, and problems with others.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Addresses to announce, by address.
    pub announced: BTreeMap<IpAddr, Announced>,
    /// Problems with addresses that are not announced.
    pub problems: BTreeSet<Problem>,
}

/// Links and addresses of this node, as its kernel shows them.
pub trait Host {
    /// Index of the link that leads to a pod's address.
    fn link_of(&self, pod: IpAddr) -> Option<u32>;
    /// Whether this host has the address itself.
    fn has(&self, address: IpAddr) -> bool;
}

/// Decides. `holds` are those of gateways on this node that have not ended; `before` is what is announced now.
pub fn plan(
    permitted: &Permitted,
    gateways: &[Gateway],
    holds: &[HeardHold],
    before: &BTreeMap<IpAddr, Announced>,
    host: &dyn Host,
) -> Plan {
    let mut plan = Plan::default();
    let mut by_address: BTreeMap<IpAddr, Vec<(Announced, bool)>> = BTreeMap::new();
    for hold in holds {
        let is_it = |gateway: &&Gateway| gateway.uid == hold.gateway && gateway.egress == hold.egress;
        let Some(gateway) = gateways.iter().find(is_it) else { continue };
        match announced(permitted, gateway, hold, host) {
            Ok(announced) => by_address.entry(hold.address).or_default().push((announced, hold.is_ready)),
            Err(problem) => drop(plan.problems.insert(problem)),
        }
    }
    for (address, mut rivals) in by_address {
        rivals.sort_by(|(a, _), (b, _)| (b.term, &a.pod).cmp(&(a.term, &b.pod)));
        let known = before.get(&address).map(|known| known.source.pod);
        let is_known = |(rival, _): &(Announced, bool)| Some(rival.source.pod) == known;
        let newest = rivals.first().map(|(first, _)| first.term);
        let is_newest = |(rival, _): &(Announced, bool)| Some(rival.term) == newest;
        let is_ready = rivals.iter().any(|rival @ (_, is_ready)| is_newest(rival) && *is_ready);
        if !is_ready && rivals.iter().any(is_known) {
            // The other one has handed it over, and uses it until clients send to this one.
            rivals.retain(is_known);
        } else {
            rivals.retain(is_newest);
        }
        if let [(one, _), (other, _), ..] = rivals.as_slice() {
            plan.problems.insert(Problem::HeldTwice { address, pods: [one.pod.clone(), other.pod.clone()] });
            rivals.retain(is_known);
        }
        plan.announced.extend(rivals.into_iter().next().map(|(announced, _)| (address, announced)));
    }
    plan
}

fn announced(
    permitted: &Permitted,
    gateway: &Gateway,
    hold: &HeardHold,
    host: &dyn Host,
) -> Result<Announced, Problem> {
    let (address, egress, pod) = (hold.address, hold.egress.to_string(), gateway.pod.clone());
    let is_listed = permitted.get(&hold.egress).is_some_and(|listed| listed.contains_key(&address));
    if !is_listed {
        return Err(Problem::NotListed { address, egress, pod });
    }
    if host.has(address) {
        return Err(Problem::OfNode { address, egress });
    }
    let mut own = gateway.addresses.iter().filter(|own| IpFamily::of(*own) == IpFamily::of(address));
    let place = own.find_map(|own| Some((own, host.link_of(own)?)));
    let Some((own, link)) = place else { return Err(Problem::NoLink { address, egress, pod }) };
    Ok(Announced {
        source: Source { address, pod: own, link },
        egress: hold.egress.clone(),
        pod,
        term: hold.term,
    })
}

/// Holds back what is new of Egresses that change too often. Returns when it may come, if there is some.
pub fn hold_down(
    plan: &mut Plan,
    before: &BTreeMap<IpAddr, Announced>,
    pace: &mut Pace,
    now: Instant,
) -> Option<Instant> {
    let is_new = |new: &Announced| before.get(&new.source.address).is_none_or(|old| old.source != new.source);
    let changing: BTreeSet<EgressName> =
        plan.announced.values().filter(|it| is_new(it)).map(|it| it.egress.clone()).collect();
    let mut again: Option<Instant> = None;
    for egress in changing {
        if let Err(at) = pace.change(&egress, now) {
            plan.announced.retain(|_, it| it.egress != egress || !is_new(it));
            plan.problems.insert(Problem::Flapping { egress: egress.to_string() });
            again = again.into_iter().chain([at]).min();
        }
    }
    again
}

/// Whether an address is here after it was elsewhere: the controller names another gateway as its holder, or this is not its first term.
pub fn is_takeover(announced: &Announced, permitted: &Permitted) -> bool {
    let named = permitted.get(&announced.egress).and_then(|listed| listed.get(&announced.source.address));
    let named = named.and_then(Option::as_ref);
    named.map_or(announced.term > 1, |pod| *pod != announced.pod)
}

/// Addresses that a gateway of this node may hold without having been able to say so yet: `heard` are the UIDs of those that have answered. If
/// the controller names a holder, it is that one alone.
pub fn awaited(
    permitted: &Permitted,
    gateways: &[Gateway],
    heard: &BTreeSet<(EgressName, String)>,
) -> BTreeSet<IpAddr> {
    let is_unheard = |gateway: &&Gateway| !heard.contains(&(gateway.egress.clone(), gateway.uid.clone()));
    let mut awaited = BTreeSet::new();
    for gateway in gateways.iter().filter(is_unheard) {
        let listed = permitted.get(&gateway.egress).into_iter().flatten();
        let may_be = listed.filter(|(_, named)| named.as_ref().is_none_or(|pod| *pod == gateway.pod));
        awaited.extend(may_be.map(|(address, _)| *address));
    }
    awaited
}

/// The addresses that the kernel had at the start and that no gateway has confirmed yet.
#[derive(Debug)]
pub struct Adopted {
    /// Addresses, each with the time since when it could have been confirmed; `None` while it could not.
    addresses: BTreeMap<IpAddr, Option<Instant>>,
    /// Time since when it is known which gateways there are.
    known: Option<Instant>,
}

impl Adopted {
    /// The addresses that the kernel had at the start.
    pub fn new(addresses: BTreeSet<IpAddr>) -> Self {
        Self { addresses: addresses.into_iter().map(|address| (address, None)).collect(), known: None }
    }

    /// Whether none is left.
    pub fn is_empty(&self) -> bool {
        self.addresses.is_empty()
    }

    /// Addresses that stay as they are. `awaited` are those that gateways may still confirm that have not been heard yet ([`awaited`]);
    /// `None` while it is not known which gateways there are.
    pub fn kept(
        &mut self,
        plan: &Plan,
        awaited: Option<&BTreeSet<IpAddr>>,
        now: Instant,
    ) -> BTreeSet<IpAddr> {
        if awaited.is_some() {
            self.known.get_or_insert(now);
        }
        for (address, since) in &mut self.addresses {
            if awaited.is_some_and(|awaited| !awaited.contains(address)) {
                since.get_or_insert(now);
            }
        }
        let known = self.known;
        self.addresses.retain(|address, since| {
            let is_over = end(known, *since).is_some_and(|end| end <= now);
            !is_over && !plan.announced.contains_key(address)
        });
        self.addresses.keys().copied().collect()
    }

    /// Time at which the next of them is removed; `None` if none is left, or it is not known which gateways there are.
    pub fn end(&self) -> Option<Instant> {
        self.addresses.values().filter_map(|since| end(self.known, *since)).min()
    }
}

/// When an address ends that could have been confirmed since then.
fn end(known: Option<Instant>, since: Option<Instant>) -> Option<Instant> {
    let latest = known.and_then(|known| known.checked_add(CONFIRMED_UNHEARD));
    since.and_then(|since| since.checked_add(CONFIRMED)).into_iter().chain(latest).min()
}

#[cfg(test)]
mod tests;
