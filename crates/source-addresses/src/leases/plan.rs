//! Plan of the controller for the Leases of source addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use fairlead_api::names::is_object_name;
use fairlead_api::resources::Egress;
use k8s_openapi::api::coordination::v1::Lease;

use super::{REUSE, addresses_of, is_ours, leases, slot_lease, slot_of};

/// Times since when addresses have had no Lease, on the controller's monotonic clock.
#[derive(Debug, Clone, Default)]
pub struct Resting {
    /// Time of the first look; before it, it is not known which addresses had a Lease.
    first: Option<Duration>,
    seen: BTreeMap<IpAddr, Duration>,
    /// The Leases that had an address in the last look, and are not being deleted.
    leases: BTreeMap<IpAddr, String>,
}

impl Resting {
    /// Takes note of all Leases that there are, of all Egresses, also of those that are being deleted.
    pub fn look<'a>(&mut self, leases: impl IntoIterator<Item = &'a Lease>, now: Duration) {
        self.first.get_or_insert(now);
        self.seen.retain(|_, at| now < at.saturating_add(REUSE));
        self.leases.clear();
        for lease in leases {
            for address in addresses_of(lease) {
                self.seen.insert(address, now);
                if lease.metadata.deletion_timestamp.is_none() {
                    self.leases.insert(address, full_name(lease));
                }
            }
        }
    }

    /// Lease that has an address, by its namespace and name, and will have it until it is deleted.
    fn lease_of(&self, address: IpAddr) -> Option<&str> {
        self.leases.get(&address).map(String::as_str)
    }

    /// Whether an address may get a Lease.
    pub fn is_free(&self, address: IpAddr, now: Duration) -> bool {
        let is_over = |at: Duration| now >= at.saturating_add(REUSE);
        self.first.is_some_and(is_over) && self.seen.get(&address).is_none_or(|at| is_over(*at))
    }
}

/// Leases of an Egress to create and to delete, and its slots.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Plan {
    /// Names of all of its Leases, to which gateways have a right.
    pub names: BTreeSet<String>,
    /// Leases to create.
    pub create: Vec<Lease>,
    /// Leases to delete, as they were read.
    pub delete: Vec<Lease>,
    /// The addresses of each slot that has its Lease, for the status.
    pub slots: Vec<Vec<IpAddr>>,
    /// Gateway pod that holds each slot; `None` if none does.
    pub holders: Vec<Option<String>>,
    /// Whether an address rests, so that another look is needed.
    pub waits: bool,
    /// Sentence on another Lease that has an address, which this Egress gets when that is gone.
    pub blocked: Option<String>,
}

/// Plan for an Egress with these permitted slots (none without source addresses), when it has these Leases.
pub fn plan(
    egress: &Egress,
    slots: &[Vec<IpAddr>],
    live: &[&Lease],
    resting: &Resting,
    now: Duration,
) -> Plan {
    let name = egress.metadata.name.as_deref().unwrap_or_default();
    let wanted = if slots.is_empty() { BTreeMap::new() } else { leases(egress, slots) };
    let mut plan = Plan {
        names: wanted.keys().cloned().collect(),
        slots: vec![Vec::new(); slots.len()],
        holders: vec![None; slots.len()],
        ..Plan::default()
    };
    let mut present = BTreeSet::new();
    for lease in live.iter().copied().filter(|lease| is_ours(name, lease)) {
        let named = lease.metadata.name.clone().unwrap_or_default();
        let is_right = wanted.get(&named).is_some_and(|it| addresses_of(it) == addresses_of(lease));
        let is_going = lease.metadata.deletion_timestamp.is_some();
        let slot = slot_of(name, &named).and_then(|slot| usize::try_from(slot).ok());
        match (is_right, is_going, slot) {
            (true, false, Some(slot)) => {
                if let (Some(addresses), Some(holder)) =
                    (plan.slots.get_mut(slot), plan.holders.get_mut(slot))
                {
                    *addresses = addresses_of(lease);
                    // Gateways write it.
                    *holder = slot_lease(lease)
                        .and_then(|lease| lease.lease.holder)
                        .filter(|holder| is_object_name(holder));
                }
            }
            (false, false, _) => plan.delete.push(lease.clone()),
            _ => {}
        }
        present.insert(named);
    }
    for (named, lease) in wanted {
        if present.contains(&named) {
            continue;
        }
        let addresses = addresses_of(&lease);
        if addresses.iter().all(|address| resting.is_free(*address, now)) {
            plan.create.push(lease);
            continue;
        }
        plan.waits = true;
        let is_own = |other: &&str| plan.delete.iter().any(|lease| full_name(lease) == **other);
        let mut others = addresses.iter().filter_map(|address| {
            Some((address, resting.lease_of(*address).filter(|other| !is_own(other))?))
        });
        let blocked = others.next().map(|(address, other)| {
            format!("the Lease {other} has {address}: delete it once no gateway that knows it is left")
        });
        plan.blocked = blocked.or(plan.blocked);
    }
    plan
}

fn full_name(lease: &Lease) -> String {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    format!("{}/{}", text(&lease.metadata.namespace), text(&lease.metadata.name))
}
