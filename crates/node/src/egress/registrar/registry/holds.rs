//! Which gateway holds which source address, as far as gateways have said it to this node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use fairlead_egress::EgressName;
use fairlead_wire::egress::State;

use super::{Gateway, GatewayUid, Hold};
use crate::egress::registrar::HeardHold;
use crate::egress::registrar::session::MAX_HOLDS;

/// How long after its end the term of a hold still counts.
const FORGOTTEN: Duration = Duration::from_secs(10);

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Holds {
    /// Gateways on this node that may hold source addresses.
    local: BTreeSet<(EgressName, GatewayUid)>,
    /// The newest hold that any gateway of an Egress said of an address.
    newest: BTreeMap<EgressName, BTreeMap<IpAddr, Hold>>,
}

impl Holds {
    /// Takes which gateways are on this node. Returns whether anything differs.
    pub(super) fn set_local(&mut self, local: BTreeSet<(EgressName, GatewayUid)>) -> bool {
        let differs = self.local != local;
        self.local = local;
        differs
    }

    /// Whether a gateway is one of them.
    pub(super) fn is_local(&self, egress: &EgressName, uid: &GatewayUid) -> bool {
        !self.local.is_empty() && self.local.contains(&(egress.clone(), uid.clone()))
    }

    /// Those of the gateways on this node that have ever answered.
    pub(super) fn heard_local(
        &self,
        gateways: &BTreeMap<EgressName, BTreeMap<GatewayUid, Gateway>>,
    ) -> BTreeSet<(EgressName, GatewayUid)> {
        let has_answered = |(egress, uid): &&(EgressName, GatewayUid)| {
            let gateway = gateways.get(egress).and_then(|gateways| gateways.get(uid));
            gateway.is_some_and(|gateway| gateway.session.has_registered())
        };
        self.local.iter().filter(has_answered).cloned().collect()
    }

    /// Takes what a gateway said.
    pub(super) fn hear(&mut self, egress: &EgressName, held: &BTreeMap<IpAddr, Hold>, now: Instant) {
        let newest = self.newest.entry(egress.clone()).or_default();
        // Terms begin anew where the Lease was deleted.
        newest.retain(|_, hold| hold.until.checked_add(FORGOTTEN).is_none_or(|at| at > now));
        for (address, hold) in held {
            // A gateway may say any address: what it says too much is its own Egress's loss.
            if newest.len() >= MAX_HOLDS && !newest.contains_key(address) {
                continue;
            }
            let known = newest.entry(*address).or_insert(*hold);
            if hold.term >= known.term {
                *known = *hold;
            }
        }
    }

    /// Forgets all other Egresses.
    pub(super) fn keep(&mut self, is_kept: impl Fn(&EgressName) -> bool) {
        self.newest.retain(|egress, _| is_kept(egress));
    }

    /// What the gateways on this node hold by the greatest terms that were heard of each address.
    pub(super) fn of_local(
        &self,
        gateways: &BTreeMap<EgressName, BTreeMap<GatewayUid, Gateway>>,
        now: Instant,
    ) -> Vec<HeardHold> {
        let mut found = Vec::new();
        for (egress, uid) in &self.local {
            let gateway = gateways.get(egress).and_then(|gateways| gateways.get(uid));
            let holds = gateway.into_iter().flat_map(|gateway| gateway.session.holds());
            let valid =
                holds.filter(|(address, hold)| hold.until > now && !self.has_newer(egress, address, hold));
            found.extend(valid.map(|(address, hold)| HeardHold {
                egress: egress.clone(),
                gateway: uid.clone(),
                address: *address,
                term: hold.term,
                until: hold.until,
            }));
        }
        found
    }

    /// Whether flows are better off at another gateway: it says that it forwards nothing, or all that it held is held with greater
    /// terms now.
    pub(super) fn has_handed_over(&self, egress: &EgressName, gateway: &Gateway) -> bool {
        let holds = gateway.session.holds();
        let is_superseded = |(address, hold): (&IpAddr, &Hold)| self.has_newer(egress, address, hold);
        gateway.session.state() == State::Standby || (!holds.is_empty() && holds.iter().all(is_superseded))
    }

    fn has_newer(&self, egress: &EgressName, address: &IpAddr, hold: &Hold) -> bool {
        let newest = self.newest.get(egress).and_then(|newest| newest.get(address));
        newest.is_some_and(|newest| newest.term > hold.term)
    }
}
