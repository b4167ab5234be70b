//! `fairlead egress who`: which pod used an address and port outside.

use std::process::ExitCode;

use fairlead_address::IpFamily;
use fairlead_api::names::LABEL_APP_INSTANCE;
use futures::{StreamExt as _, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::ResourceExt as _;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::display::section;
use super::gateways;
use super::read::Reader;
use crate::arguments::egress::EgressWho;
use crate::output::{or_dash, render, table};
use crate::query::PROBLEM_FOUND;

/// Gateways that are asked at the same time: one on a node that is off answers after a long time.
const AT_ONCE: usize = 16;

/// Answer of a gateway.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Answer {
    connections: Vec<Connection>,
    complete_since: Option<String>,
}

/// A connection, as a gateway knows it.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
struct Connection {
    namespace: String,
    pod: String,
    protocol: u8,
    client: String,
    client_port: u16,
    destination: String,
    destination_port: u16,
    source: String,
    source_port: u16,
    begin: Option<String>,
    end: Option<String>,
    sent_bytes: Option<u64>,
    received_bytes: Option<u64>,
}

/// A connection, and where it was found.
#[derive(Debug, Serialize)]
struct Found {
    egress: String,
    gateway: String,
    #[serde(flatten)]
    connection: Connection,
}

/// From when on a gateway knows all connections.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Memory {
    gateway: String,
    complete_since: Option<String>,
}

/// Answers of all gateways.
#[derive(Debug, Default, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Report {
    connections: Vec<Found>,
    gateways: Vec<Memory>,
    not_read: Vec<String>,
}

pub(super) async fn run(query: &EgressWho) -> anyhow::Result<(String, ExitCode)> {
    let reader = Reader::new(query.api.client().await?);
    let pods = reader.gateway_pods(query.egress.as_ref()).await?;
    let path = path(query);
    let mut report = Report::default();
    let ask = async |pod| (pod, gateways::ask(reader.client(), pod, &path).await);
    let mut answers = stream::iter(&pods).map(ask).buffered(AT_ONCE);
    while let Some((pod, answer)) = answers.next().await {
        match answer {
            Ok(answer) => report.add(pod, answer),
            // One that cannot be asked hides nothing of others.
            Err(error) => report.not_read.push(format!("{error:#}")),
        }
    }
    anyhow::ensure!(
        !report.gateways.is_empty() || report.not_read.is_empty(),
        "no gateway could be asked: {}",
        report.not_read.join("; ")
    );
    report.sort();
    let text = render(query.output, || json!(report), |_| report.text(query))?;
    let is_found = !report.connections.is_empty();
    Ok((text, if is_found { ExitCode::SUCCESS } else { ExitCode::from(PROBLEM_FOUND) }))
}

pub(super) fn path(query: &EgressWho) -> String {
    let at = query.at.map_or_else(String::new, |at| format!("&at={at}"));
    format!("/connections?address={}&port={}{at}", query.address.to_canonical(), query.port)
}

impl Report {
    pub(super) fn add(&mut self, pod: &Pod, answer: Answer) {
        let gateway = format!("{}/{}", pod.namespace().unwrap_or_default(), pod.name_any());
        let name = pod.labels().get(LABEL_APP_INSTANCE).map_or("", String::as_str);
        let egress = format!("{}/{name}", pod.namespace().unwrap_or_default());
        let Answer { connections, complete_since } = answer;
        let found = connections.into_iter().map(|connection| Found {
            egress: egress.clone(),
            gateway: gateway.clone(),
            connection,
        });
        self.connections.extend(found);
        self.gateways.push(Memory { gateway, complete_since });
    }

    /// Sorts connections: open ones first, then by their end, the latest first.
    fn sort(&mut self) {
        let key = |found: &Found| (found.connection.end.clone(), found.connection.begin.clone());
        self.connections.sort_by(|a, b| match (&a.connection.end, &b.connection.end) {
            (None, Some(_)) => std::cmp::Ordering::Less,
            (Some(_), None) => std::cmp::Ordering::Greater,
            _ => key(b).cmp(&key(a)),
        });
    }

    pub(super) fn text(&self, query: &EgressWho) -> String {
        let not_read = section("Not asked", self.not_read.clone());
        if self.connections.is_empty() {
            let address = match IpFamily::of(query.address) {
                IpFamily::V4 => format!("{}:{}", query.address, query.port),
                IpFamily::V6 => format!("[{}]:{}", query.address, query.port),
            };
            let at = query.at.map_or_else(String::new, |at| format!(" at {at}"));
            let known = self.gateways.iter().map(|memory| {
                let since = printable(memory.complete_since.as_deref().unwrap_or("-"));
                format!("{}: all connections since {since}", memory.gateway)
            });
            return format!(
                "No gateway knows a connection with the source {address}{at}.\n{}{not_read}",
                section("Gateways know", known)
            );
        }
        let mut table = table(&["POD", "PROTOCOL", "FROM", "TO", "BEGIN", "END", "GATEWAY"]);
        for Found { gateway, connection, .. } in &self.connections {
            let Connection { namespace, pod, protocol, begin, end, .. } = connection;
            let pod = if pod.is_empty() { String::new() } else { printable(&format!("{namespace}/{pod}")) };
            table.add_row([
                or_dash(&pod),
                protocol_name(*protocol),
                endpoint(&connection.client, connection.client_port),
                endpoint(&connection.destination, connection.destination_port),
                or_dash(&printable(begin.as_deref().unwrap_or_default())),
                printable(end.as_deref().unwrap_or("open")),
                gateway.clone(),
            ]);
        }
        format!("{table}\n{not_read}")
    }
}

/// A gateway may be any program of its author: a terminal must not do what it says.
fn printable(text: &str) -> String {
    text.chars().filter(|it| !it.is_control()).collect()
}

fn endpoint(address: &str, port: u16) -> String {
    let address = printable(address);
    if address.contains(':') { format!("[{address}]:{port}") } else { format!("{address}:{port}") }
}

fn protocol_name(number: u8) -> String {
    match number {
        1 => "ICMP".to_owned(),
        6 => "TCP".to_owned(),
        17 => "UDP".to_owned(),
        58 => "ICMPv6".to_owned(),
        132 => "SCTP".to_owned(),
        other => other.to_string(),
    }
}
