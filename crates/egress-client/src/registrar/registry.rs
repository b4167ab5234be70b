//! Registry of this node's clients and of gateways, and the decisions that follow from both. Without I/O and without a clock.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::{Duration, Instant};

use fairlead_address::IpFamily;
use fairlead_api::fou::Gateway as Target;
use fairlead_egress::EgressName;
use fairlead_egress::client::plan::NextHop;
use fairlead_egress::endpoints::{Endpoints, GatewayUid};
use fairlead_source_addresses::announcements::holds::{HeardHold, Holds};
use fairlead_wire::egress::RegisterResponse;

use super::client::Client;
use super::health::{Changes, Health};
use super::not_registered::NotRegistered;
use super::session::{Clients, Ended, Heard, Step, Token};
pub(super) use gateway::Gateway;
use gateway::{Condition, usable};

mod gateway;

/// Longest time for which a way from before the start is left alone, while gateways are asked about its client.
const SETTLE: Duration = Duration::from_secs(10);

/// A gateway of an Egress.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct GatewayId {
    pub(super) egress: EgressName,
    pub(super) uid: GatewayUid,
    /// One that was gone and is shown again is another one: it has another task.
    instance: u64,
}

/// Next work of a gateway's task.
#[derive(Debug, PartialEq)]
pub(super) enum Poll {
    /// End: the gateway is gone, or has no clients of this node.
    Gone,
    Step(Step),
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Registry {
    clients: BTreeMap<EgressName, Clients>,
    /// Clients that [`Self::add_client`] has added and [`Self::set_clients`] has not had yet.
    added: BTreeSet<(EgressName, String)>,
    /// Clients that may have a way from before the start, and until when that is left alone; `None` until the gateways are known.
    unsettled: BTreeMap<(EgressName, String), Option<Instant>>,
    gateways: BTreeMap<EgressName, BTreeMap<GatewayUid, Gateway>>,
    holds: Holds,
    /// Egresses whose gateways may have clients of this node from before the start. Forgotten once EndpointSlices have shown which
    /// gateways there are.
    expected: BTreeSet<EgressName>,
    /// Whether clients from before the start are not known yet: a gateway that was told of others alone would drop them.
    is_waiting_for_all: bool,
    instances: u64,
    health: Health,
    has_endpoints: bool,
}

impl Registry {
    /// Takes all clients. Returns whether anything differs.
    pub(super) fn set_clients(&mut self, wanted: BTreeMap<EgressName, Vec<Client>>, now: Instant) -> bool {
        let mut all: BTreeMap<EgressName, Clients> = BTreeMap::new();
        for (egress, clients) in wanted {
            let clients: Clients = clients.into_iter().map(|client| (client.uid.clone(), client)).collect();
            if !clients.is_empty() {
                all.insert(egress, clients);
            }
        }
        if std::mem::take(&mut self.is_waiting_for_all) {
            self.gateways.keys().for_each(|egress| self.wake(egress));
        }
        self.added.retain(|(egress, uid)| all.get(egress).is_none_or(|clients| !clients.contains_key(uid)));
        for (egress, uid) in &self.added {
            if let Some(client) = self.clients.get(egress).and_then(|clients| clients.get(uid)) {
                all.entry(egress.clone()).or_default().insert(uid.clone(), client.clone());
            }
        }
        if self.clients == all {
            return false;
        }
        let until = self.has_endpoints.then(|| now.checked_add(SETTLE)).flatten();
        for (egress, clients) in &all {
            let known = self.clients.get(egress);
            let new = clients.keys().filter(|uid| known.is_none_or(|known| !known.contains_key(*uid)));
            self.unsettled.extend(new.map(|uid| ((egress.clone(), uid.clone()), until)));
        }
        let before = std::mem::replace(&mut self.clients, all);
        for egress in before.keys().chain(self.clients.keys()) {
            if before.get(egress) != self.clients.get(egress) {
                self.wake(egress);
            }
        }
        self.settle(now);
        true
    }

    /// Returns whether anything differs.
    pub(super) fn add_client(&mut self, egress: &EgressName, client: Client) -> bool {
        let id = (egress.clone(), client.uid.clone());
        self.unsettled.remove(&id);
        self.added.insert(id);
        let clients = self.clients.entry(egress.clone()).or_default();
        let differs = clients.get(&client.uid) != Some(&client);
        clients.insert(client.uid.clone(), client);
        if differs {
            self.wake(egress);
        }
        differs
    }

    /// Returns whether there was such a client.
    pub(super) fn remove_client(&mut self, egress: &EgressName, uid: &str) -> bool {
        let id = (egress.clone(), uid.to_owned());
        self.unsettled.remove(&id);
        self.added.remove(&id);
        let Some(clients) = self.clients.get_mut(egress) else { return false };
        let had = clients.remove(uid).is_some();
        if clients.is_empty() {
            self.clients.remove(egress);
        }
        if had {
            self.wake(egress);
        }
        had
    }

    /// Gateways of these Egresses may have clients of this node. Nothing is sent before [`Self::set_clients`].
    pub(super) fn expect_clients(&mut self, egresses: BTreeSet<EgressName>) {
        self.is_waiting_for_all = true;
        for egress in &egresses {
            let gateways = self.gateways.get_mut(egress).into_iter().flat_map(BTreeMap::values_mut);
            gateways.for_each(|gateway| gateway.session.expect_clients());
        }
        if !self.has_endpoints {
            self.expected = egresses;
        }
    }

    /// Takes which gateways on this node may hold source addresses. Returns whether anything differs.
    pub(super) fn set_local(&mut self, local: BTreeSet<(EgressName, GatewayUid)>) -> bool {
        let differs = self.holds.set_local(local);
        if differs {
            self.gateways.keys().for_each(|egress| self.wake(egress));
        }
        differs
    }

    /// Whether a gateway is one of them.
    pub(super) fn is_local(&self, id: &GatewayId) -> bool {
        self.holds.is_local(&id.egress, &id.uid)
    }

    /// Gateways of [`Self::set_local`] that have ever answered.
    pub(super) fn heard_local(&self) -> BTreeSet<(EgressName, GatewayUid)> {
        self.holds.heard_local(&self.gateways)
    }

    /// Holds of the gateways of [`Self::set_local`] that have not ended.
    pub(super) fn local_holds(&self, now: Instant) -> Vec<HeardHold> {
        self.holds.of_local(&self.gateways, now)
    }

    /// Takes what EndpointSlices show. Returns whether anything differs.
    pub(super) fn set_endpoints(&mut self, endpoints: Endpoints, now: Instant) -> bool {
        let mut changed = !std::mem::replace(&mut self.has_endpoints, true);
        let until = now.checked_add(SETTLE);
        for deadline in self.unsettled.values_mut() {
            *deadline = deadline.or(until);
        }
        self.gateways.retain(|egress, gateways| {
            let shown = endpoints.get(egress);
            gateways.retain(|uid, gateway| {
                let stays = shown.is_some_and(|shown| shown.contains_key(uid));
                if !stays {
                    changed = true;
                    gateway.wake.notify_one();
                }
                stays
            });
            !gateways.is_empty()
        });
        self.holds.keep(|egress| endpoints.contains_key(egress));
        let expected = std::mem::take(&mut self.expected);
        for (egress, shown) in endpoints {
            let is_expected = expected.contains(&egress);
            let gateways = self.gateways.entry(egress).or_default();
            for (uid, endpoint) in shown {
                let gateway = gateways.entry(uid).or_insert_with(|| {
                    self.instances = self.instances.wrapping_add(1);
                    Gateway { instance: self.instances, ..Gateway::default() }
                });
                if is_expected {
                    gateway.session.expect_clients();
                }
                changed |= gateway.show(endpoint);
            }
        }
        self.settle(now);
        changed
    }

    /// Gateways that need a task and have none. They count as having one from now on.
    pub(super) fn start_tasks(&mut self) -> Vec<GatewayId> {
        let mut started = Vec::new();
        for (egress, gateways) in &mut self.gateways {
            let has_clients = self.clients.contains_key(egress);
            for (uid, gateway) in gateways {
                let may_hold = self.holds.is_local(egress, uid);
                if !gateway.has_task && (has_clients || may_hold || gateway.session.has_clients()) {
                    gateway.has_task = true;
                    let instance = gateway.instance;
                    started.push(GatewayId { egress: egress.clone(), uid: uid.clone(), instance });
                }
            }
        }
        started
    }

    /// Next work of the gateway's task.
    pub(super) fn poll(&mut self, id: &GatewayId, now: Instant) -> Poll {
        let none = Clients::new();
        let clients = self.clients.get(&id.egress).unwrap_or(&none);
        let may_hold = self.holds.is_local(&id.egress, &id.uid);
        let Some(gateway) = find(&mut self.gateways, id) else { return Poll::Gone };
        if clients.is_empty() && !may_hold && gateway.session.is_idle() && !gateway.session.has_clients() {
            gateway.has_task = false;
            return Poll::Gone;
        }
        if self.is_waiting_for_all {
            return Poll::Step(Step::Wait(None));
        }
        Poll::Step(gateway.session.poll(clients, gateway.endpoint.answers(), may_hold, now))
    }

    /// Takes an answer.
    ///
    /// # Errors
    /// The connection is to be closed.
    pub(super) fn received(
        &mut self,
        id: &GatewayId,
        response: RegisterResponse,
        now: Instant,
        random: u32,
    ) -> Result<Heard, Ended> {
        let none = Clients::new();
        let clients = self.clients.get(&id.egress).unwrap_or(&none);
        let Some(gateway) = find(&mut self.gateways, id) else { return Err(Ended::NoClients) };
        let heard = gateway.session.received(clients, response, now, random)?;
        self.holds.hear(&id.egress, gateway, now);
        self.settle(now);
        Ok(heard)
    }

    /// The connection ended. Returns the failure if it is another one than before.
    pub(super) fn closed(
        &mut self,
        id: &GatewayId,
        ended: Ended,
        now: Instant,
        random: u32,
    ) -> Option<Ended> {
        let may_hold = self.holds.is_local(&id.egress, &id.uid);
        let gateway = find(&mut self.gateways, id)?;
        let before = gateway.session.failure().cloned();
        let is_ready = gateway.endpoint.ready;
        gateway.session.closed(ended, is_ready, may_hold, now, random);
        let failure = gateway.session.failure().cloned();
        self.settle(now);
        failure.filter(|failure| before.as_ref() != Some(failure))
    }

    /// Gateway of this task; `None` if it is gone.
    pub(super) fn gateway(&self, id: &GatewayId) -> Option<&Gateway> {
        self.gateways.get(&id.egress)?.get(&id.uid).filter(|gateway| gateway.instance == id.instance)
    }

    fn condition(&self, gateway: &Gateway, address: IpAddr) -> Condition {
        if self.health.is_lost(address) {
            Condition::Lost
        } else if self.health.is_down(address) || !gateway.is_healthy() {
            Condition::Doubtful
        } else {
            Condition::Works
        }
    }

    /// Begins a stream: there is a connection. No effect if the gateway is gone.
    pub(super) fn opened(&mut self, id: &GatewayId, token: Token, now: Instant) {
        if let Some(gateway) = find(&mut self.gateways, id) {
            gateway.session.opened(token, now);
        }
    }

    /// Takes another token, or that none could be had. No effect if the gateway is gone.
    pub(super) fn renewed(&mut self, id: &GatewayId, token: Option<Token>, now: Instant, random: u32) {
        if let Some(gateway) = find(&mut self.gateways, id) {
            gateway.session.renewed(token, now, random);
        }
    }

    /// The addresses of gateways that clients of this node use.
    pub(super) fn in_use(&self) -> BTreeSet<IpAddr> {
        let used = self.gateways.iter().filter(|(egress, _)| self.clients.contains_key(*egress));
        let alive = used.flat_map(|(_, gateways)| gateways.values()).filter(|it| it.endpoint.is_alive());
        alive.flat_map(|gateway| gateway.endpoint.addresses.iter()).collect()
    }

    /// Takes who has answered echo requests, and who is asked now.
    pub(super) fn observe(
        &mut self,
        now: Instant,
        replies: &BTreeSet<IpAddr>,
        asking: &BTreeSet<IpAddr>,
    ) -> Changes {
        self.health.observe(now, replies, asking)
    }

    /// Takes who has answered echo requests soon.
    pub(super) fn observe_early(&mut self, now: Instant, replies: &BTreeSet<IpAddr>) -> Changes {
        self.health.observe_early(now, replies)
    }

    /// Says of clients from before the start what is known, if all gateways have answered, or are Coil's, or it is time. Returns whether there
    /// were any.
    pub(super) fn settle(&mut self, now: Instant) -> bool {
        let before = self.unsettled.len();
        let mut unsettled = std::mem::take(&mut self.unsettled);
        unsettled.retain(|(egress, uid), until| {
            let client = self.clients.get(egress).and_then(|clients| clients.get(uid));
            let gateways = self.gateways.get(egress);
            let waits = |client: &Client| {
                let mut gateways = gateways.into_iter().flat_map(BTreeMap::values);
                until.is_none_or(|until| now < until)
                    && (!self.has_endpoints
                        || !self.do_not_register(egress) && gateways.any(|it| it.is_asked(client)))
            };
            client.is_some_and(waits)
        });
        self.unsettled = unsettled;
        self.unsettled.len() != before
    }

    /// Whether [`Self::settle`] has something to decide.
    pub(super) fn has_unsettled(&self) -> bool {
        !self.unsettled.is_empty()
    }

    /// See `Registrar::way`.
    pub(super) fn next_hop(&self, egress: &EgressName, uid: &str) -> NextHop {
        let Some(client) = self.client(egress, uid) else { return NextHop::Gateways(Vec::new()) };
        if !self.has_endpoints || self.unsettled.contains_key(&(egress.clone(), uid.to_owned())) {
            return NextHop::Unknown;
        }
        if self.do_not_register(egress) {
            return NextHop::Service;
        }
        let gateways = self.gateways.get(egress).into_iter().flat_map(BTreeMap::values);
        let mut registered: Vec<&Gateway> =
            gateways.filter(|it| it.endpoint.is_alive() && it.session.confirmed(client)).collect();
        // While none holds a source address, one is about to: what is sent meanwhile is sent again, and not refused.
        let forwards = |gateway: &&Gateway| !self.holds.has_handed_over(egress, *gateway);
        let known = registered.len();
        if registered.iter().any(forwards) {
            registered.retain(forwards);
        }
        // New flows stay at a holder that drains until it has handed over: they continue at its successor.
        let has_successor =
            registered.len() < known && registered.iter().all(|gateway| gateway.is_draining());
        let of_family = |family| {
            let all = registered.iter().flat_map(|gateway| {
                let of_family =
                    gateway.endpoint.addresses.iter().filter(move |it| IpFamily::of(*it) == family);
                of_family.map(|address| {
                    let target = gateway.target(address);
                    let is_draining = target.is_draining && !has_successor;
                    (Target { is_draining, ..target }, self.condition(gateway, address))
                })
            });
            usable(all.collect())
        };
        NextHop::Gateways([IpFamily::V4, IpFamily::V6].into_iter().flat_map(of_family).collect())
    }

    /// Addresses of all gateways of an Egress that have not ended.
    pub(super) fn addresses(&self, egress: &EgressName) -> BTreeSet<IpAddr> {
        let gateways = self.gateways.get(egress).into_iter().flat_map(BTreeMap::values);
        let alive = gateways.filter(|gateway| gateway.endpoint.is_alive());
        alive.flat_map(|gateway| gateway.endpoint.addresses.iter()).collect()
    }

    /// Result of the registration; `None` while it may still succeed.
    pub(super) fn registration(&self, egress: &EgressName, uid: &str) -> Option<Result<(), NotRegistered>> {
        let Some(client) = self.client(egress, uid) else { return Some(Err(NotRegistered::NotAClient)) };
        let ready: Vec<&Gateway> = self.ready(egress).collect();
        let takes = |it: &&Gateway| it.session.confirmed(client) && !self.holds.has_handed_over(egress, *it);
        if self.do_not_register(egress) || ready.iter().any(takes) {
            return Some(Ok(()));
        }
        let refusals: Vec<_> = ready.iter().map_while(|it| it.session.refusal(client)).collect();
        let refusal = refusals.first().filter(|_| refusals.len() == ready.len());
        refusal.map(|refusal| Err(NotRegistered::Refused((*refusal).clone())))
    }

    /// Reason why a client is not registered after some time.
    pub(super) fn not_registered(&self, egress: &EgressName, uid: &str) -> NotRegistered {
        if let Some(Err(error)) = self.registration(egress, uid) {
            return error;
        }
        if !self.has_endpoints {
            return NotRegistered::EndpointSlicesUnknown;
        }
        if self
            .ready(egress)
            .any(|it| self.client(egress, uid).is_some_and(|client| it.session.confirmed(client)))
        {
            return NotRegistered::NoSourceAddressHeld;
        }
        let failures: Vec<Option<&Ended>> = self.ready(egress).map(|it| it.session.failure()).collect();
        if failures.is_empty() {
            return NotRegistered::NoGateway;
        }
        let token = failures.iter().flatten().find_map(|failure| match failure {
            Ended::Token(message) => Some(message.clone()),
            _ => None,
        });
        match token {
            Some(message) => NotRegistered::TokenUnavailable(message),
            None => {
                let first = failures.into_iter().flatten().next().unwrap_or(&Ended::NoAnswer);
                NotRegistered::NoGatewayAnswers(first.to_string())
            }
        }
    }

    /// All gateways of Egresses with clients of this node, for metrics.
    pub(super) fn gateways_in_use(&self) -> impl Iterator<Item = (&Gateway, bool)> {
        let used = self.gateways.iter().filter(|(egress, _)| self.clients.contains_key(*egress));
        used.flat_map(|(_, gateways)| gateways.values()).map(|gateway| {
            let is_down = gateway.endpoint.addresses.iter().any(|address| self.health.is_down(address));
            (gateway, is_down)
        })
    }

    fn client(&self, egress: &EgressName, uid: &str) -> Option<&Client> {
        self.clients.get(egress)?.get(uid)
    }

    fn ready(&self, egress: &EgressName) -> impl Iterator<Item = &Gateway> {
        let gateways = self.gateways.get(egress).into_iter().flat_map(BTreeMap::values);
        gateways.filter(|gateway| gateway.endpoint.ready)
    }

    /// Whether the gateways are Coil's: all that are ready refuse connections, and none has ever answered. A gateway of ours that starts
    /// refuses them, too, but is not ready then. In an upgrade, ours are used as soon as there is one.
    fn do_not_register(&self, egress: &EgressName) -> bool {
        let gateways = || self.gateways.get(egress).into_iter().flat_map(BTreeMap::values);
        gateways().any(|it| it.session.does_not_register())
            && gateways().all(|it| !it.session.has_registered())
            && gateways().all(|it| it.session.does_not_register() || !it.endpoint.ready)
    }

    fn wake(&self, egress: &EgressName) {
        for gateway in self.gateways.get(egress).into_iter().flat_map(BTreeMap::values) {
            gateway.wake.notify_one();
        }
    }
}

fn find<'a>(
    gateways: &'a mut BTreeMap<EgressName, BTreeMap<GatewayUid, Gateway>>,
    id: &GatewayId,
) -> Option<&'a mut Gateway> {
    gateways.get_mut(&id.egress)?.get_mut(&id.uid).filter(|gateway| gateway.instance == id.instance)
}

#[cfg(test)]
mod tests;
