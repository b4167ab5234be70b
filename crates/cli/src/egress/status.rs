//! `fairlead egress status`.

use std::collections::{BTreeMap, BTreeSet};
use std::process::ExitCode;

use anyhow::Context as _;
use fairlead_api::resources::{Egress, EgressSelector};
use fairlead_cluster::pods::SlimPod;
use fairlead_egress::EgressName;
use fairlead_egress::explain::{Known, Selection};
use fairlead_egress::status::READY;
use k8s_openapi::api::core::v1::Event;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::ResourceExt as _;
use serde::Serialize;
use serde_json::json;

use super::display::{Gateway, NOT_READ, PodEvent, Problem, UNHEALTHY, gateway_table, section};
use super::gateways::{GatewayUse, Use};
use super::read::{Reader, pod_info};
use crate::arguments::egress::{EgressStatusArguments, Qualified};
use crate::output::{bytes, or_dash, render, table};
use crate::query::PROBLEM_FOUND;

/// An Egress.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Row {
    namespace: String,
    name: String,
    destinations: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    excluded_destinations: Vec<String>,
    available: i32,
    wanted: i32,
    /// Number of pods that name it; `None` if they may not be read.
    client_count: Option<usize>,
    /// Whether the controller says that gateways can be used; `None` before it says anything.
    ready: Option<bool>,
    reason: Option<String>,
    message: Option<String>,
}

/// An Egress with everything around it.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Detail {
    #[serde(flatten)]
    row: Row,
    conditions: Vec<Condition>,
    allowed_namespaces: Option<Vec<String>>,
    selectors: Option<Vec<EgressSelector>>,
    #[serde(rename = "clusterIPs")]
    cluster_ips: Vec<String>,
    /// `None` if they may not be read.
    gateways: Option<Vec<Gateway>>,
    /// `None` if pods may not be read.
    clients: Option<Vec<ClientPod>>,
    not_read: Vec<String>,
}

/// A pod that names the Egress.
#[derive(Debug, Serialize)]
struct ClientPod {
    namespace: String,
    name: String,
    node: Option<String>,
    addresses: Vec<String>,
    /// Use of the gateways since they have it; `None` if they may not be asked.
    #[serde(rename = "use")]
    used: Option<Use>,
    problems: Vec<Problem>,
    events: Vec<PodEvent>,
}

pub(super) async fn run(query: &EgressStatusArguments) -> anyhow::Result<(String, ExitCode)> {
    let mut reader = Reader::new(query.api.client().await?);
    let (text, is_healthy) = match &query.egress {
        Some(egress) => one(&mut reader, egress, query).await?,
        None => all(&mut reader, query).await?,
    };
    Ok((text, if is_healthy { ExitCode::SUCCESS } else { ExitCode::from(PROBLEM_FOUND) }))
}

async fn all(reader: &mut Reader, query: &EgressStatusArguments) -> anyhow::Result<(String, bool)> {
    let egresses = reader.egresses().await?;
    let pods = if egresses.is_empty() { None } else { reader.pods().await? };
    let namespaces = reader.namespaces(&egresses).await?;
    let rows = rows(&egresses, &Selection::of(&egresses, &namespaces), pods.as_deref());
    let not_read = &reader.not_read;
    let data = || json!({ "egresses": rows, "notRead": not_read });
    let text = render(query.output, data, |wide| {
        let notes = section("Not read", not_read.clone());
        format!("{}\n{notes}", rows_table(&rows, wide))
    })?;
    Ok((text, rows.iter().all(Row::is_healthy)))
}

async fn one(
    reader: &mut Reader,
    egress: &Qualified,
    query: &EgressStatusArguments,
) -> anyhow::Result<(String, bool)> {
    let name = EgressName { namespace: egress.namespace.clone(), name: egress.name.clone() };
    let objects = reader.objects_around(&name).await?;
    let found = objects.egresses.iter().find(|egress| EgressName::of(&egress.metadata) == name);
    let found = found.with_context(|| format!("there is no Egress {name}"))?;
    let pods = reader.pods().await?;
    let events = if pods.is_some() { reader.not_registered().await? } else { Vec::new() };
    let known = Known::of(&objects);
    let uses = reader.gateway_uses(egress).await?;
    let mut detail = Detail::of(found, &known, pods.as_deref(), &events);
    detail.set_uses(uses.as_deref());
    detail.not_read.clone_from(&reader.not_read);
    let text = render(query.output, || json!(detail), |_| detail.text())?;
    Ok((text, detail.is_healthy()))
}

/// The Egresses that a running pod asks for; none if its annotation cannot be read.
fn named_by(selection: &Selection, pod: &SlimPod) -> BTreeSet<EgressName> {
    if pod.has_ended() { BTreeSet::new() } else { selection.asked_by(&pod_info(pod)).unwrap_or_default() }
}

pub(super) fn rows(egresses: &[Egress], selection: &Selection, pods: Option<&[SlimPod]>) -> Vec<Row> {
    let clients = pods.map(|pods| {
        let mut clients: BTreeMap<EgressName, usize> = BTreeMap::new();
        for egress in pods.iter().flat_map(|pod| named_by(selection, pod)) {
            *clients.entry(egress).or_default() += 1;
        }
        clients
    });
    let count = |egress: &Egress| {
        let clients = clients.as_ref()?;
        Some(clients.get(&EgressName::of(&egress.metadata)).copied().unwrap_or_default())
    };
    let mut rows: Vec<Row> = egresses.iter().map(|egress| Row::of(egress, count(egress))).collect();
    rows.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
    rows
}

pub(super) fn rows_table(rows: &[Row], wide: bool) -> String {
    let mut header = vec!["EGRESS", "DESTINATIONS", "GATEWAYS", "CLIENTS", "READY"];
    header.extend(wide.then_some("MESSAGE"));
    let mut table = table(&header);
    for row in rows {
        let destinations = match row.destinations.as_slice() {
            [first, more @ ..] if !wide && !more.is_empty() => format!("{first}, +{}", more.len()),
            _ => or_dash(&row.destinations()),
        };
        let mut cells = vec![
            format!("{}/{}", row.namespace, row.name),
            destinations,
            format!("{}/{}", row.available, row.wanted),
            row.client_count.map_or(NOT_READ.to_owned(), |count| count.to_string()),
            or_dash(row.reason.as_deref().unwrap_or_default()),
        ];
        cells.extend(wide.then(|| or_dash(row.message.as_deref().unwrap_or_default())));
        table.add_row(cells);
    }
    table.to_string()
}

impl Row {
    fn of(egress: &Egress, client_count: Option<usize>) -> Self {
        let status = egress.status.as_ref();
        let mut conditions = status.into_iter().flat_map(|status| &status.conditions);
        let ready = conditions.find(|condition| condition.type_ == READY);
        Self {
            namespace: egress.namespace().unwrap_or_default(),
            name: egress.name_any(),
            destinations: egress.spec.destinations.clone(),
            excluded_destinations: egress.spec.excluded_destinations.clone(),
            available: status.and_then(|status| status.replicas).unwrap_or_default(),
            wanted: egress.spec.replicas,
            client_count,
            ready: ready.map(|ready| ready.status == "True"),
            reason: ready.map(|ready| ready.reason.clone()),
            message: ready.map(|ready| ready.message.clone()),
        }
    }

    fn is_healthy(&self) -> bool {
        self.ready == Some(true)
    }

    fn destinations(&self) -> String {
        let (all, excluded) = (self.destinations.join(" "), self.excluded_destinations.join(" "));
        if excluded.is_empty() { all } else { format!("{all} except {excluded}") }
    }
}

impl Detail {
    pub(super) fn of(egress: &Egress, known: &Known, pods: Option<&[SlimPod]>, events: &[Event]) -> Self {
        let name = EgressName::of(&egress.metadata);
        let clients = pods.map(|pods| {
            let clients = pods.iter().filter(|pod| named_by(known.selection(), pod).contains(&name));
            let mut clients: Vec<_> = clients.map(|pod| ClientPod::of(pod, known, events)).collect();
            clients.sort_by(|a, b| (&a.namespace, &a.name).cmp(&(&b.namespace, &b.name)));
            clients
        });
        let gateways = known.gateways(&name);
        Self {
            row: Row::of(egress, clients.as_ref().map(Vec::len)),
            conditions: egress.status.as_ref().map(|status| status.conditions.clone()).unwrap_or_default(),
            allowed_namespaces: egress.spec.allowed_namespaces.clone(),
            selectors: egress.spec.selectors.clone(),
            cluster_ips: known.cluster_ips(&name).iter().map(ToString::to_string).collect(),
            gateways: gateways.map(|all| all.into_iter().map(Gateway::from).collect()),
            clients,
            not_read: Vec::new(),
        }
    }

    /// Takes what the gateways say of themselves and of their clients.
    pub(super) fn set_uses(&mut self, uses: Option<&[GatewayUse]>) {
        let Some(uses) = uses else { return };
        for gateway in self.gateways.iter_mut().flatten() {
            let said = uses.iter().find(|said| Some(&said.pod) == gateway.pod.as_ref());
            gateway.connections = said.and_then(|said| said.load.connections);
            if gateway.state == "ready" && said.is_some_and(|said| said.load.unhealthy) {
                gateway.state = UNHEALTHY;
            }
        }
        let by_client = GatewayUse::by_client(uses);
        for client in self.clients.iter_mut().flatten() {
            let used = by_client.get(&(client.namespace.as_str(), client.name.as_str()));
            client.used = Some(used.copied().unwrap_or_default());
        }
    }

    pub(super) fn is_healthy(&self) -> bool {
        self.row.is_healthy() && self.clients.iter().flatten().all(|client| client.problems.is_empty())
    }

    pub(super) fn text(&self) -> String {
        let Row { namespace, name, available, wanted, .. } = &self.row;
        let allowed = match self.allowed_namespaces.as_deref() {
            None => "all".to_owned(),
            Some([]) => "none".to_owned(),
            Some(names) => names.join(" "),
        };
        let selects = match self.selectors.as_deref().map(<[_]>::len) {
            None | Some(0) => "only by their annotation".to_owned(),
            Some(count) => format!("by their annotation and {count} selectors"),
        };
        let mut text = format!(
            "Egress:             {namespace}/{name}\nDestinations:       {}\nService addresses:  {}\nAllowed namespaces: {allowed}\n\
             Selects pods:       {selects}\nGateways available: {available} of {wanted}\n",
            self.row.destinations(),
            or_dash(&self.cluster_ips.join(" ")),
        );
        text.push_str(&section("Conditions", self.conditions.iter().map(condition)));
        match &self.gateways {
            Some(gateways) => text.push_str(&format!("\n{}\n", gateway_table(gateways))),
            None => text.push_str("\nGateways: ?\n"),
        }
        match &self.clients {
            Some(clients) => text.push_str(&format!("\n{}\n", client_table(clients))),
            None => text.push_str("\nClients: ?\n"),
        }
        let of_clients = self.clients.iter().flatten().flat_map(ClientPod::lines);
        text.push_str(&section("Problems", of_clients));
        text.push_str(&section("Not read", self.not_read.clone()));
        text
    }
}

fn condition(condition: &Condition) -> String {
    format!("{}={} {}: {}", condition.type_, condition.status, condition.reason, condition.message)
}

fn client_table(clients: &[ClientPod]) -> String {
    let mut table = table(&["CLIENT", "NODE", "ADDRESSES", "SENT", "RECEIVED", "CONNECTIONS", "PROBLEMS"]);
    for client in clients {
        let reasons: Vec<&str> = client.problems.iter().map(|problem| problem.reason).collect();
        table.add_row([
            format!("{}/{}", client.namespace, client.name),
            or_dash(client.node.as_deref().unwrap_or_default()),
            or_dash(&client.addresses.join(" ")),
            client.used.map_or_else(|| NOT_READ.to_owned(), |used| bytes(used.sent_bytes)),
            client.used.map_or_else(|| NOT_READ.to_owned(), |used| bytes(used.received_bytes)),
            client
                .used
                .and_then(|used| used.connections)
                .map_or_else(|| NOT_READ.to_owned(), |it| it.to_string()),
            or_dash(&reasons.join(" ")),
        ]);
    }
    table.to_string()
}

impl ClientPod {
    fn of(pod: &SlimPod, known: &Known, events: &[Event]) -> Self {
        let is_of = |event: &&Event| {
            let uid = event.involved_object.uid.as_ref();
            uid.is_some_and(|uid| pod.uids().contains(uid))
        };
        Self {
            namespace: pod.namespace().to_owned(),
            name: pod.name().to_owned(),
            node: pod.node().map(str::to_owned),
            addresses: pod.addresses().iter().map(ToString::to_string).collect(),
            used: None,
            problems: known.problems(&pod_info(pod)).into_iter().map(Problem::from).collect(),
            events: events.iter().filter(is_of).map(PodEvent::of).collect(),
        }
    }

    fn lines(&self) -> impl Iterator<Item = String> + '_ {
        let problem = |problem: &Problem| format!("{}: {}", problem.reason, problem.message);
        let lines = self.problems.iter().map(problem).chain(self.events.iter().map(PodEvent::line));
        lines.map(|line| format!("{}/{}: {line}", self.namespace, self.name))
    }
}
