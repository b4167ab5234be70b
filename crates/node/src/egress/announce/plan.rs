//! Which source addresses this node announces. Without I/O and without a clock.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use fairlead_address::{DualStackAddrs, IpFamily};
use fairlead_dataplane::source_addresses::Source;
use fairlead_egress::EgressName;

use super::facts::Permitted;
use crate::egress::registrar::HeardHold;

/// How long what was there at the start stays without being confirmed, once it is known which gateways there are, and in any case.
const CONFIRMED: Duration = Duration::from_secs(2);
const CONFIRMED_WITHOUT_FACTS: Duration = Duration::from_secs(30);

/// A gateway pod of this node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Gateway {
    pub(super) egress: EgressName,
    /// Of the pod.
    pub(super) uid: String,
    /// Name of the pod.
    pub(super) pod: String,
    pub(super) addresses: DualStackAddrs,
}

/// An address that is announced.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Announced {
    pub(super) source: Source,
    pub(super) egress: EgressName,
    /// Name of the pod.
    pub(super) pod: String,
    pub(super) term: u64,
}

/// Why an address that a gateway of this node says it holds is not announced. `Display` is a sentence for log and status.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Problem {
    /// Two gateways say that they hold it, with the same term.
    HeldTwice { address: IpAddr, pods: [String; 2] },
    /// No route of this node leads to the pod.
    NoLink { address: IpAddr, egress: String, pod: String },
    /// `status.sourceAddresses` does not have it.
    NotListed { address: IpAddr, egress: String, pod: String },
    /// A link of this node has it.
    OfNode { address: IpAddr, egress: String },
    /// The kernel refuses routes or entries.
    Refused { error: String },
}

impl Problem {
    /// One CamelCase word.
    pub(super) const fn reason(&self) -> &'static str {
        match self {
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
            Self::HeldTwice { address, pods: [one, other] } => write!(
                f,
                "gateways {one} and {other} both say that they hold {address}; the one that had it keeps it, and else it is not \
                 announced"
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

/// What is announced, and what is not.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    /// By address.
    pub(super) announced: BTreeMap<IpAddr, Announced>,
    pub(super) problems: BTreeSet<Problem>,
}

/// What the kernel says.
pub(super) trait Host {
    /// Index of the link that leads to a pod's address.
    fn link_of(&self, pod: IpAddr) -> Option<u32>;
    /// Whether this host has the address itself.
    fn has(&self, address: IpAddr) -> bool;
}

/// Decides. `holds` are those of gateways on this node that have not ended; `before` is what is announced now.
pub(super) fn plan(
    permitted: &Permitted,
    gateways: &[Gateway],
    holds: &[HeardHold],
    before: &BTreeMap<IpAddr, Announced>,
    host: &dyn Host,
) -> Plan {
    let mut plan = Plan::default();
    let mut by_address: BTreeMap<IpAddr, Vec<Announced>> = BTreeMap::new();
    for hold in holds {
        let is_it = |gateway: &&Gateway| gateway.uid == hold.gateway && gateway.egress == hold.egress;
        let Some(gateway) = gateways.iter().find(is_it) else { continue };
        match announced(permitted, gateway, hold, host) {
            Ok(announced) => by_address.entry(hold.address).or_default().push(announced),
            Err(problem) => drop(plan.problems.insert(problem)),
        }
    }
    for (address, mut rivals) in by_address {
        rivals.sort_by(|a, b| (b.term, &a.pod).cmp(&(a.term, &b.pod)));
        let newest = rivals.first().map(|first| first.term);
        rivals.retain(|rival| Some(rival.term) == newest);
        if let [one, other, ..] = rivals.as_slice() {
            plan.problems.insert(Problem::HeldTwice { address, pods: [one.pod.clone(), other.pod.clone()] });
            let known = before.get(&address).map(|known| known.source.pod);
            rivals.retain(|rival| Some(rival.source.pod) == known);
        }
        plan.announced.extend(rivals.into_iter().next().map(|announced| (address, announced)));
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

/// Whether an address is here after it was elsewhere: the controller names another gateway as its holder, or this is not its first term.
pub(super) fn is_takeover(announced: &Announced, permitted: &Permitted) -> bool {
    let named = permitted.get(&announced.egress).and_then(|listed| listed.get(&announced.source.address));
    let named = named.and_then(Option::as_ref);
    named.map_or(announced.term > 1, |pod| *pod != announced.pod)
}

/// The addresses that the kernel had at the start and that no gateway has confirmed yet.
#[derive(Debug)]
pub(super) struct Adopted {
    addresses: BTreeSet<IpAddr>,
    started: Instant,
    /// When it was known which gateways there are.
    known: Option<Instant>,
}

impl Adopted {
    pub(super) fn new(addresses: BTreeSet<IpAddr>, now: Instant) -> Self {
        Self { addresses, started: now, known: None }
    }

    /// Which of them stay as they are. `has_facts` is whether it is known which gateways there are.
    pub(super) fn kept(&mut self, plan: &Plan, has_facts: bool, now: Instant) -> &BTreeSet<IpAddr> {
        if has_facts {
            self.known.get_or_insert(now);
        }
        self.addresses.retain(|address| !plan.announced.contains_key(address));
        if self.end().is_some_and(|end| end <= now) {
            self.addresses.clear();
        }
        &self.addresses
    }

    /// When those that are left are removed; `None` if none is left.
    pub(super) fn end(&self) -> Option<Instant> {
        let latest = self.started.checked_add(CONFIRMED_WITHOUT_FACTS);
        let usual = self.known.and_then(|known| known.checked_add(CONFIRMED));
        usual.into_iter().chain(latest).min().filter(|_| !self.addresses.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Kernel;

    impl Host for Kernel {
        fn link_of(&self, pod: IpAddr) -> Option<u32> {
            (pod != address("10.1.0.9")).then_some(7)
        }

        fn has(&self, address: IpAddr) -> bool {
            address == "192.0.2.10".parse::<IpAddr>().unwrap()
        }
    }

    fn address(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn nat() -> EgressName {
        EgressName { namespace: "internet-egress".to_owned(), name: "nat".to_owned() }
    }

    fn gateway(number: u8) -> Gateway {
        let addresses = [IpAddr::from([10, 1, 0, number])].into_iter().collect();
        Gateway { egress: nat(), uid: format!("u{number}"), pod: format!("nat-{number}"), addresses }
    }

    fn hold(number: u8, held: &str, term: u64) -> HeardHold {
        let (gateway, until) = (format!("u{number}"), Instant::now());
        HeardHold { egress: nat(), gateway, address: address(held), term, until }
    }

    fn listed(addresses: &[&str]) -> Permitted {
        [(nat(), addresses.iter().map(|text| (address(text), None)).collect())].into()
    }

    fn planned(holds: &[HeardHold], before: &BTreeMap<IpAddr, Announced>) -> Plan {
        let gateways = [gateway(5), gateway(6), gateway(9)];
        let permitted = listed(&["192.0.2.10", "192.0.2.40", "192.0.2.41", "2001:db8::40"]);
        plan(&permitted, &gateways, holds, before, &Kernel)
    }

    fn shown(plan: &Plan) -> Vec<String> {
        let shown = |it: &Announced| format!("{} {} {}", it.source.address, it.pod, it.term);
        plan.announced.values().map(shown).collect()
    }

    fn reasons(plan: &Plan) -> Vec<&'static str> {
        plan.problems.iter().map(Problem::reason).collect()
    }

    #[test]
    fn what_a_gateway_of_this_node_holds_and_its_egress_may_have_is_announced() {
        let none = BTreeMap::new();
        let plan = planned(&[hold(5, "192.0.2.40", 3), hold(6, "192.0.2.41", 1)], &none);
        assert_eq!(shown(&plan), ["192.0.2.40 nat-5 3", "192.0.2.41 nat-6 1"]);
        let source = plan.announced[&address("192.0.2.40")].source;
        assert_eq!(source, Source { address: address("192.0.2.40"), pod: address("10.1.0.5"), link: 7 });
        assert!(plan.problems.is_empty());
        let plan = planned(&[hold(7, "192.0.2.40", 3)], &none);
        assert_eq!(plan, Plan::default(), "it is no gateway of this node");
    }

    #[test]
    fn what_cannot_be_announced_has_a_reason() {
        for (held, reason) in [
            (hold(5, "203.0.113.9", 1), "SourceAddressNotListed"),
            (hold(5, "192.0.2.10", 1), "SourceAddressOfNode"),
            (hold(9, "192.0.2.40", 1), "SourceAddressWithoutLink"),
            (hold(5, "2001:db8::40", 1), "SourceAddressWithoutLink"),
        ] {
            let plan = planned(&[held], &BTreeMap::new());
            assert_eq!((shown(&plan).len(), reasons(&plan)), (0, vec![reason]));
        }
    }

    #[test]
    fn of_two_holders_the_newer_one_counts_and_of_equal_ones_the_one_before() {
        let (five, six) = (hold(5, "192.0.2.40", 3), hold(6, "192.0.2.40", 4));
        let plan = planned(&[five.clone(), six], &BTreeMap::new());
        assert_eq!((shown(&plan), reasons(&plan)), (vec!["192.0.2.40 nat-6 4".to_owned()], vec![]));
        let both = [five.clone(), hold(6, "192.0.2.40", 3)];
        let plan = planned(&both, &BTreeMap::new());
        assert_eq!((shown(&plan).len(), reasons(&plan)), (0, vec!["SourceAddressHeldTwice"]));
        let before = planned(&[five], &BTreeMap::new()).announced;
        assert_eq!(shown(&planned(&both, &before)), ["192.0.2.40 nat-5 3"]);
    }

    #[test]
    fn what_was_there_at_the_start_stays_until_it_is_confirmed_or_two_seconds_after_it_could_have_been() {
        let second = Duration::from_secs(1);
        let (start, both) = (Instant::now(), ["192.0.2.40", "192.0.2.41"].map(address));
        let mut adopted = Adopted::new(both.into(), start);
        let nothing = Plan::default();
        assert_eq!(adopted.kept(&nothing, false, start + 20 * second).len(), 2, "the API server is away");
        assert_eq!(adopted.kept(&nothing, true, start + 21 * second).len(), 2);
        assert_eq!(adopted.end(), Some(start + 23 * second));
        let confirmed = planned(&[hold(5, "192.0.2.40", 3)], &BTreeMap::new());
        assert_eq!(adopted.kept(&confirmed, true, start + 22 * second), &[both[1]].into());
        assert!(adopted.kept(&confirmed, true, start + 23 * second).is_empty());
        assert_eq!(adopted.end(), None);
        let mut adopted = Adopted::new(both.into(), start);
        assert!(adopted.kept(&nothing, false, start + 30 * second).is_empty(), "not for ever");
    }

    #[test]
    fn a_takeover_is_an_address_that_another_gateway_had() {
        let held = |term| planned(&[hold(5, "192.0.2.40", term)], &BTreeMap::new()).announced;
        let named = |pod: Option<&str>| -> Permitted {
            [(nat(), [(address("192.0.2.40"), pod.map(str::to_owned))].into())].into()
        };
        for (pod, term, expected) in
            [(None, 1, false), (None, 2, true), (Some("nat-5"), 2, false), (Some("nat-6"), 2, true)]
        {
            assert_eq!(is_takeover(&held(term)[&address("192.0.2.40")], &named(pod)), expected);
        }
    }
}
