//! Holds of source addresses by gateways, as far as gateways have said them to this node.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use fairlead_egress::EgressName;
use fairlead_wire::egress::State;

use super::{Gateway, GatewayUid, Hold};
use crate::registrar::HeardHold;
use crate::registrar::session::MAX_HOLDS;

/// Time for which the term of a hold still counts after its end.
const FORGOTTEN: Duration = Duration::from_secs(10);

/// Time for which an address is announced beyond the end of the hold that its gateway has said: that program may just be starting again.
/// The kernel of the gateway ends the use of the address in time, and another gateway takes it 0.2 s after that at the earliest.
const ANNOUNCED_LONGER: Duration = Duration::from_secs(1);

/// Time for which an address stays announced here after a gateway elsewhere has said that it holds it: until that is announced there, and
/// clients send there. Less than the 0.9 s for which a gateway uses what it has handed over.
const SUPERSEDED: Duration = Duration::from_millis(600);

/// Newest hold of an address that a gateway has said.
#[derive(Debug, Clone, Copy)]
struct Newest {
    hold: Hold,
    /// Time at which its term was heard first.
    since: Instant,
    /// Whether that gateway wants clients to send to it already.
    forwards: bool,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Holds {
    /// Gateways on this node that may hold source addresses.
    local: BTreeSet<(EgressName, GatewayUid)>,
    /// The newest hold that any gateway of an Egress said of an address.
    newest: BTreeMap<EgressName, BTreeMap<IpAddr, Newest>>,
}

impl Holds {
    /// Takes which gateways are on this node. Returns whether anything differs.
    pub(super) fn set_local(&mut self, local: BTreeSet<(EgressName, GatewayUid)>) -> bool {
        let differs = self.local != local;
        self.local = local;
        differs
    }

    /// Whether a gateway is one of [`Self::set_local`].
    pub(super) fn is_local(&self, egress: &EgressName, uid: &GatewayUid) -> bool {
        !self.local.is_empty() && self.local.contains(&(egress.clone(), uid.clone()))
    }

    /// Gateways on this node that have ever answered.
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

    /// Takes what a gateway has said of what it holds and of its state.
    pub(super) fn hear(&mut self, egress: &EgressName, gateway: &Gateway, now: Instant) {
        let takes_clients = gateway.session.state() != State::Standby;
        let newest = self.newest.entry(egress.clone()).or_default();
        // Terms begin anew where the Lease was deleted.
        newest.retain(|_, newest| newest.hold.until.checked_add(FORGOTTEN).is_none_or(|at| at > now));
        for (address, hold) in gateway.session.holds().iter().filter(|(_, hold)| hold.until > now) {
            // A gateway may say any address: what it says too much is its own Egress's loss.
            if newest.len() >= MAX_HOLDS && !newest.contains_key(address) {
                continue;
            }
            let forwards = takes_clients && !hold.settling;
            let known = newest.entry(*address).or_insert(Newest { hold: *hold, since: now, forwards });
            if hold.term > known.hold.term {
                known.since = now;
            }
            if hold.term >= known.hold.term {
                (known.hold, known.forwards) = (*hold, forwards);
            }
        }
    }

    /// Forgets all other Egresses.
    pub(super) fn keep(&mut self, is_kept: impl Fn(&EgressName) -> bool) {
        self.newest.retain(|egress, _| is_kept(egress));
    }

    /// Holds of the gateways on this node. One that another gateway has with a greater term is left out [`SUPERSEDED`] after that was heard.
    pub(super) fn of_local(
        &self,
        gateways: &BTreeMap<EgressName, BTreeMap<GatewayUid, Gateway>>,
        now: Instant,
    ) -> Vec<HeardHold> {
        let mut found = Vec::new();
        for (egress, uid) in &self.local {
            let gateway = gateways.get(egress).and_then(|gateways| gateways.get(uid));
            let takes_clients = gateway.is_some_and(|gateway| gateway.session.state() != State::Standby);
            let holds = gateway.into_iter().flat_map(|gateway| gateway.session.holds());
            let announced = holds.filter_map(|(address, hold)| {
                let until = hold.until.checked_add(ANNOUNCED_LONGER)?;
                let superseded = self.newer(egress, address, hold);
                let left = superseded.and_then(|newer| newer.since.checked_add(SUPERSEDED));
                let until = left.map_or(until, |left| left.min(until));
                let (egress, gateway) = (egress.clone(), uid.clone());
                (until > now).then_some(HeardHold {
                    egress,
                    gateway,
                    address: *address,
                    term: hold.term,
                    until,
                    is_ready: takes_clients && !hold.settling,
                })
            });
            found.extend(announced);
        }
        found
    }

    /// Whether flows are better off at another gateway: it says that it is standby, or others, which take clients, hold all that it
    /// held with greater terms.
    pub(super) fn has_handed_over(&self, egress: &EgressName, gateway: &Gateway) -> bool {
        let holds = gateway.session.holds();
        let is_superseded = |(address, hold): (&IpAddr, &Hold)| {
            self.newer(egress, address, hold).is_some_and(|newer| newer.forwards)
        };
        gateway.session.state() == State::Standby || (!holds.is_empty() && holds.iter().all(is_superseded))
    }

    /// Hold of another gateway with a greater term, if one was heard.
    fn newer(&self, egress: &EgressName, address: &IpAddr, hold: &Hold) -> Option<&Newest> {
        let newest = self.newest.get(egress)?.get(address)?;
        (newest.hold.term > hold.term).then_some(newest)
    }
}
