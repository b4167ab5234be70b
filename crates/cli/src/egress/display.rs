//! Display of gateways, problems and Events.

use fairlead_address::DualStackAddrs;
use fairlead_egress::explain::GatewayPod;
use fairlead_egress::problem::EgressProblem;
use k8s_openapi::api::core::v1::Event;
use serde::Serialize;

use crate::output::{self, now, or_dash, table};

/// Placeholder for a value that may not be read.
pub(super) const NOT_READ: &str = "?";
/// State of a gateway that is ready, and whose targets do not answer.
pub(super) const UNHEALTHY: &str = "unhealthy";

/// A gateway pod.
#[derive(Debug, Serialize)]
pub(super) struct Gateway {
    pub(super) pod: Option<String>,
    pub(super) node: Option<String>,
    pub(super) addresses: Vec<String>,
    pub(super) state: &'static str,
    /// Connections that it tracks, as it says; left out by commands that do not ask it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) connections: Option<u64>,
}

impl From<GatewayPod> for Gateway {
    fn from(gateway: GatewayPod) -> Self {
        let GatewayPod { pod, node, addresses, state } = gateway;
        Self { pod, node, addresses: words(addresses), state: state.as_str(), connections: None }
    }
}

/// Problem of a pod.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct Problem {
    pub(super) reason: &'static str,
    pub(super) message: String,
}

impl From<EgressProblem> for Problem {
    fn from(problem: EgressProblem) -> Self {
        Self { reason: problem.reason.as_str(), message: problem.message }
    }
}

/// Event of a pod that warns of a problem.
#[derive(Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct PodEvent {
    pub(super) reason: String,
    pub(super) message: String,
    /// Unix time in seconds at which it was last seen.
    pub(super) last_seen_unix_seconds: Option<i64>,
}

impl PodEvent {
    pub(super) fn of(event: &Event) -> Self {
        let series = event.series.as_ref().and_then(|series| series.last_observed_time.as_ref());
        let micro = series.or(event.event_time.as_ref()).map(|time| time.0.as_second());
        Self {
            reason: event.reason.clone().unwrap_or_default(),
            message: event.message.clone().unwrap_or_default(),
            last_seen_unix_seconds: event.last_timestamp.as_ref().map(|time| time.0.as_second()).max(micro),
        }
    }

    pub(super) fn line(&self) -> String {
        let age = self.last_seen_unix_seconds.map(|at| output::age(now().saturating_sub(at)));
        let age = age.map_or_else(String::new, |age| format!(" ({age} ago)"));
        format!("{}{age}: {}", self.reason, self.message)
    }
}

fn words(addresses: DualStackAddrs) -> Vec<String> {
    addresses.iter().map(|address| address.to_string()).collect()
}

pub(super) fn gateway_table(gateways: &[Gateway]) -> String {
    let is_asked = gateways.iter().any(|gateway| gateway.connections.is_some());
    let mut header = vec!["GATEWAY", "NODE", "ADDRESSES", "STATE"];
    header.extend(is_asked.then_some("CONNECTIONS"));
    let mut table = table(&header);
    for gateway in gateways {
        let name = |name: &Option<String>| or_dash(name.as_deref().unwrap_or_default());
        let mut cells = vec![
            name(&gateway.pod),
            name(&gateway.node),
            or_dash(&gateway.addresses.join(" ")),
            gateway.state.to_owned(),
        ];
        let connections = gateway.connections.map_or_else(|| NOT_READ.to_owned(), |count| count.to_string());
        cells.extend(is_asked.then_some(connections));
        table.add_row(cells);
    }
    table.to_string()
}

/// Lines under a heading; nothing without lines.
pub(super) fn section(heading: &str, lines: impl IntoIterator<Item = String>) -> String {
    let lines: Vec<String> = lines.into_iter().map(|line| format!("  {line}\n")).collect();
    if lines.is_empty() { String::new() } else { format!("\n{heading}:\n{}", lines.concat()) }
}
