//! Addresses that move between members, as virtual addresses do: no member has them.
//!
//! A node of Talos publishes every address that its links have, and not which of them is a virtual one. What shows it is the first move: another
//! member, which did not have the address, publishes it while the member that had it is still one. Two members that had the same address from the
//! beginning are another thing, two networks with the same numbers, of which the plan leaves one its address.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fairlead_topology::Member;
use ipnet::IpNet;

/// Most addresses whose members are remembered: a service can tell of any number.
const MAX_ADDRESSES: usize = 1 << 16;

/// Which member had which address, and which addresses moved.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    holders: BTreeMap<IpAddr, String>,
    moving: BTreeSet<IpAddr>,
}

impl Addresses {
    /// Takes what members claim now. `before` is what a member was until now, if it was one.
    pub(super) fn update<'a, 'b>(
        &mut self,
        members: impl Iterator<Item = &'a Member> + Clone,
        before: impl Fn(&str) -> Option<&'b Member>,
    ) {
        self.holders.retain(|_, holder| before(holder).is_some());
        for member in members.clone() {
            let had = before(&member.name);
            for address in addresses(member) {
                let is_new = !had.is_some_and(|had| addresses(had).any(|known| known == address));
                let is_others = self.holders.get(&address).is_some_and(|holder| *holder != member.name);
                if is_new && is_others && self.moving.len() < MAX_ADDRESSES && self.moving.insert(address) {
                    let (member, before) = (&member.name, self.holders.get(&address));
                    tracing::info!(%address, member, ?before, "an address moves between members, as virtual ones do: it is not in the mesh");
                }
            }
        }
        for member in members {
            for address in addresses(member) {
                if self.holders.len() < MAX_ADDRESSES {
                    self.holders.entry(address).or_insert_with(|| member.name.clone());
                }
            }
        }
    }

    /// Takes the addresses that move out of what a member claims.
    pub(super) fn strip(&self, member: &mut Member) {
        if publishes_all(member) {
            member.claims.retain(|claim| host(*claim).is_none_or(|address| !self.moving.contains(&address)));
        }
    }
}

/// The single addresses that a member claims, if it may claim virtual ones.
fn addresses(member: &Member) -> impl Iterator<Item = IpAddr> {
    member.claims.iter().filter(|_| publishes_all(member)).filter_map(|claim| host(*claim))
}

/// Nodes of Fairlead, which say that they need no preshared key, publish the addresses of their Nodes only.
fn publishes_all(member: &Member) -> bool {
    member.needs_preshared_key
}

fn host(prefix: IpNet) -> Option<IpAddr> {
    (prefix.prefix_len() == prefix.max_prefix_len()).then(|| prefix.addr())
}
