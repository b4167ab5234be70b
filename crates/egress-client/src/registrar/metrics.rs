//! Metrics of the registrar.

use std::collections::BTreeMap;

use fairlead_cluster::metrics::register;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use fairlead_wire::egress::State;

use super::registry::Gateway;

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct InState {
    state: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct WithResult {
    result: &'static str,
}

const OK: &str = "ok";
const FAILED: &str = "failed";
const REFUSED: &str = "refused";

/// States of gateways, the first that applies.
const STATES: [&str; 8] =
    ["not_ready", "not_registering", "not_connected", "down", "standby", "unhealthy", "draining", "ready"];

/// See [`Self::register`] for what each means.
#[derive(Debug, Clone)]
pub(crate) struct RegistrarMetrics {
    gateways: Family<InState, Gauge>,
    connections: Family<WithResult, Counter>,
    registrations: Family<WithResult, Counter>,
    tokens: Family<WithResult, Counter>,
    failovers: Counter,
}

impl RegistrarMetrics {
    /// Declares them in `all`.
    pub(crate) fn register(all: &mut Registry) -> Self {
        let ours = all.sub_registry_with_prefix("fairlead_egress");
        let gateways = "Gateways of Egresses with clients on this node, by state";
        let connections = "Connections to egress gateways that registered this node's clients, or failed";
        let registrations = "Clients of this node that egress gateways confirmed or refused";
        let tokens = "Tokens for egress gateways that were requested, by result";
        let failovers = "Times that an egress gateway answered no echo requests any more";
        let metrics = Self {
            gateways: register(ours, "gateways", gateways, Family::default()),
            connections: register(ours, "connections", connections, Family::default()),
            registrations: register(ours, "registrations", registrations, Family::default()),
            tokens: register(ours, "token_requests", tokens, Family::default()),
            failovers: register(ours, "failovers", failovers, Counter::default()),
        };
        // Series that begin with zero: the first event would be no increase of one that is not there yet.
        metrics.gateways(std::iter::empty());
        metrics.registered(0, 0);
        for result in [OK, FAILED] {
            drop(metrics.connections.get_or_create(&WithResult { result }));
            drop(metrics.tokens.get_or_create(&WithResult { result }));
        }
        metrics
    }

    /// The gateways, and whether they answer no echo requests.
    pub(super) fn gateways<'a>(&self, gateways: impl Iterator<Item = (&'a Gateway, bool)>) {
        let mut counts: BTreeMap<&str, i64> = STATES.iter().map(|state| (*state, 0)).collect();
        for (gateway, is_down) in gateways {
            let count = counts.entry(state(gateway, is_down)).or_default();
            *count = count.saturating_add(1);
        }
        for state in STATES {
            let count = counts.get(state).copied().unwrap_or_default();
            self.gateways.get_or_create(&InState { state }).set(count);
        }
    }

    /// A connection took all clients, or none could be made.
    pub(super) fn connected(&self, ok: bool) {
        self.connections.get_or_create(&WithResult { result: if ok { OK } else { FAILED } }).inc();
    }

    /// A gateway answered.
    pub(super) fn registered(&self, confirmed: u64, refused: u64) {
        self.registrations.get_or_create(&WithResult { result: OK }).inc_by(confirmed);
        self.registrations.get_or_create(&WithResult { result: REFUSED }).inc_by(refused);
    }

    /// The API server answered.
    pub(super) fn requested_token(&self, ok: bool) {
        self.tokens.get_or_create(&WithResult { result: if ok { OK } else { FAILED } }).inc();
    }

    /// A gateway stopped answering.
    pub(super) fn failed_over(&self) {
        self.failovers.inc();
    }
}

fn state(gateway: &Gateway, is_down: bool) -> &'static str {
    if !gateway.endpoint.answers() {
        return "not_ready";
    }
    if gateway.session.does_not_register() {
        return "not_registering";
    }
    if !gateway.session.is_synced() {
        return "not_connected";
    }
    match (is_down, gateway.is_healthy(), gateway.is_draining()) {
        (true, ..) => "down",
        _ if gateway.session.state() == State::Standby => "standby",
        (_, false, _) => "unhealthy",
        (_, _, true) => "draining",
        _ => "ready",
    }
}
