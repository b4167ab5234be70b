//! Permission of Egresses to have source addresses.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fairlead_api::resources::Egress;
use fairlead_egress::EgressName;
use ipnet::IpNet;
use k8s_openapi::api::coordination::v1::Lease;

use super::{addresses_of, slots};

/// Prefixes by which the controller permits or refuses source addresses.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Ranges {
    /// Prefixes of `--egress-source-addresses`.
    pub permitted: Vec<IpNet>,
    /// Prefixes inside of the cluster, each with its kind in words: pools, blocks, ranges of Nodes and Services, addresses of Nodes.
    pub cluster: Vec<(IpNet, String)>,
}

/// Reason why an Egress does not get one of its source addresses.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// The controller's arguments do not permit it.
    #[error("{0} is in none of the prefixes of the controller's --egress-source-addresses")]
    NotPermitted(IpAddr),
    /// It is an address of the cluster.
    #[error("{address} is in {what}: choose an address that nothing in the cluster uses")]
    InCluster {
        /// The address.
        address: IpAddr,
        /// Object or range of the cluster that has the address, in words.
        what: String,
    },
    /// An older Egress lists it.
    #[error("{address} is one of Egress {other}, which is older")]
    InUse {
        /// The address.
        address: IpAddr,
        /// The older Egress.
        other: EgressName,
    },
}

impl Refusal {
    /// The reason in conditions and Events, one CamelCase word.
    pub fn reason(&self) -> &'static str {
        match self {
            Self::NotPermitted(_) => "SourceAddressNotPermitted",
            Self::InCluster { .. } => "SourceAddressInCluster",
            Self::InUse { .. } => "SourceAddressInUse",
        }
    }
}

/// Egress of each address: the oldest that lists it, and of those that are as old the first by namespace and name.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Claimed(BTreeMap<IpAddr, EgressName>);

impl Claimed {
    /// Claims of all Egresses.
    pub fn new<'a>(egresses: impl IntoIterator<Item = &'a Egress>) -> Self {
        let mut all: Vec<_> = egresses
            .into_iter()
            .map(|egress| {
                let created = egress.metadata.creation_timestamp.as_ref().map(|time| time.0);
                (created, name(egress), slots(egress.spec.source_addresses.as_deref().unwrap_or_default()))
            })
            .collect();
        // One without a time, which does not exist, is the youngest.
        all.sort_by(|a, b| (a.0.is_none(), a.0, &a.1).cmp(&(b.0.is_none(), b.0, &b.1)));
        let mut claimed = BTreeMap::new();
        for (_, egress, slots) in all {
            for address in slots.into_iter().flatten() {
                claimed.entry(address).or_insert_with(|| egress.clone());
            }
        }
        Self(claimed)
    }
}

fn name(egress: &Egress) -> EgressName {
    let text = |text: &Option<String>| text.clone().unwrap_or_default();
    EgressName { namespace: text(&egress.metadata.namespace), name: text(&egress.metadata.name) }
}

/// The slots of an Egress with the addresses that it may have, and the reasons why it may not have the others. An address that it has already
/// (`live`, its Leases) stays when the cluster gets a range around it: a kubelet can say any address of its Node, and connections would end.
pub fn permit(
    egress: &Egress,
    ranges: &Ranges,
    claimed: &Claimed,
    live: &[&Lease],
) -> (Vec<Vec<IpAddr>>, Vec<Refusal>) {
    let own = name(egress);
    let had: BTreeSet<IpAddr> = live.iter().flat_map(|lease| addresses_of(lease)).collect();
    let mut refusals = Vec::new();
    let mut slots = slots(egress.spec.source_addresses.as_deref().unwrap_or_default());
    for slot in &mut slots {
        slot.retain(|address| match refuse(*address, &own, ranges, claimed) {
            Some(refusal) => {
                let stays = had.contains(address) && matches!(refusal, Refusal::InCluster { .. });
                refusals.push(refusal);
                stays
            }
            None => true,
        });
    }
    (slots, refusals)
}

fn refuse(address: IpAddr, own: &EgressName, ranges: &Ranges, claimed: &Claimed) -> Option<Refusal> {
    if !ranges.permitted.iter().any(|prefix| prefix.contains(&address)) {
        return Some(Refusal::NotPermitted(address));
    }
    if let Some((_, what)) = ranges.cluster.iter().find(|(prefix, _)| prefix.contains(&address)) {
        return Some(Refusal::InCluster { address, what: what.clone() });
    }
    let other = claimed.0.get(&address).filter(|other| *other != own)?;
    Some(Refusal::InUse { address, other: other.clone() })
}
