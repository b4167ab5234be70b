//! Peers of which nothing is known that was not known before: they stay as they are.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;

use fairlead_address::PrefixSet;
use fairlead_keys::PublicKey;
use fairlead_path::{NatType, OwnSide};
use fairlead_topology::{Member, PeerPlan, changes};

use super::own_endpoints::Location;
use super::peer::DesiredPeer;
use crate::model::inputs::Inputs;

/// Last desired state, with the inputs that it followed from.
pub(super) struct Known<'a> {
    pub(super) inputs: &'a Inputs,
    pub(super) peers: &'a BTreeMap<PublicKey, Arc<DesiredPeer>>,
    pub(super) own_side: &'a OwnSide,
    pub(super) nat: NatType,
}

/// Peers of the last desired state, and names of members whose peers may be others now.
pub(super) struct Reuse<'a> {
    peers: &'a BTreeMap<PublicKey, Arc<DesiredPeer>>,
    changed: BTreeSet<&'a str>,
}

impl<'a> Reuse<'a> {
    /// `None` if something changed from which all peers follow.
    pub(super) fn new(
        before: Option<Known<'a>>,
        inputs: &'a Inputs,
        location: &Location,
        cluster_addresses: &PrefixSet,
    ) -> Option<Self> {
        let own = &location.view;
        let Known { inputs: known, peers, own_side, nat: known_nat } = before?;
        let is_alike = known.node == inputs.node
            && known.settings == inputs.settings
            && known.own.keepalive == inputs.own.keepalive
            && known.own.filters == inputs.own.filters
            && known.resolved == inputs.resolved
            && known.cluster == inputs.cluster
            && known_nat == location.nat
            && own_side.view == *own;
        let mut changed = BTreeSet::new();
        let mut is_own_changed = false;
        for member in changes(&known.members, &inputs.members).flat_map(|(a, b)| [a, b]).flatten() {
            changed.insert(member.name.as_str());
            is_own_changed |= member.name == inputs.node;
            // Its sightings are endpoints of others.
            changed.extend(member.endpoints.sightings.keys().map(String::as_str));
        }
        if !is_alike || is_own_changed {
            return None;
        }
        let inside = &own_side.cluster_addresses;
        if inside != cluster_addresses {
            // Which endpoints count depends on it.
            let turned = [inside.subtract(cluster_addresses), cluster_addresses.subtract(inside)];
            if !own.nat64.prefixes.is_empty() {
                return None;
            }
            inputs.members.iter().for_each(|member| note_turned(member, inputs, &turned, &mut changed));
        }
        Some(Self { peers, changed })
    }

    /// The peer, if it is as it was.
    pub(super) fn peer(&self, key: &PublicKey, planned: &Arc<PeerPlan>) -> Option<Arc<DesiredPeer>> {
        let known = self.peers.get(key).filter(|known| Arc::ptr_eq(&known.planned, planned))?;
        let is_changed = planned.members.iter().any(|name| self.changed.contains(name.as_str()));
        (!is_changed).then(|| Arc::clone(known))
    }
}

/// Notes members that may be reached at an address that has become one of pods or Services, or is none any more.
fn note_turned<'a>(
    member: &'a Member,
    inputs: &Inputs,
    turned: &[PrefixSet; 2],
    changed: &mut BTreeSet<&'a str>,
) {
    let is_turned = |endpoint: &SocketAddr| turned.iter().any(|turned| turned.contains(endpoint.ip()));
    let endpoints = &member.endpoints;
    let manual = endpoints.manual.iter();
    let resolved = manual.clone().filter_map(|it| inputs.resolved.get(it)).flatten().copied();
    let manual = manual.filter_map(|it| it.address()).chain(resolved).any(|it| is_turned(&it));
    let published = endpoints.host.iter().chain(&endpoints.preferred).chain(&endpoints.reflexive);
    if manual || published.chain(&endpoints.discovered).any(is_turned) {
        changed.insert(&member.name);
    }
    let seen = endpoints.sightings.iter().filter(|(_, (_, endpoint))| is_turned(endpoint));
    changed.extend(seen.map(|(name, _)| name.as_str()));
}

#[cfg(test)]
mod tests;
