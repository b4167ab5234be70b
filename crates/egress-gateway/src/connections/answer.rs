//! Answer of `/connections`. Pure.

use std::net::IpAddr;

use jiff::Timestamp;
use serde::Serialize;

use super::log::{Connection, Connections, Millis};
use fairlead_egress::lookup::Query;

/// Connections in an answer.
const MAX_ANSWERED: usize = 1_000;

/// Connections that match a query.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Answer {
    /// The last first.
    connections: Vec<Row>,
    /// Time since when all are known: those that ended before may be missing.
    complete_since: Option<String>,
}

#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Row {
    namespace: String,
    pod: String,
    protocol: u8,
    client: IpAddr,
    client_port: u16,
    destination: IpAddr,
    destination_port: u16,
    source: IpAddr,
    source_port: u16,
    begin: Option<String>,
    end: Option<String>,
    sent_bytes: Option<u64>,
    received_bytes: Option<u64>,
}

impl Answer {
    pub(crate) fn of(connections: &Connections, query: &Query) -> Self {
        let found = connections.find(query.outside, query.at);
        Self {
            connections: found.into_iter().take(MAX_ANSWERED).map(Row::of).collect(),
            complete_since: connections.complete_since().map(time),
        }
    }
}

impl Row {
    fn of(connection: &Connection) -> Self {
        let bytes = |of: fn([u64; 2]) -> u64| connection.bytes.map(of);
        Self {
            namespace: connection.pod.namespace.clone(),
            pod: connection.pod.name.clone(),
            protocol: connection.protocol,
            client: connection.client.0,
            client_port: connection.client.1,
            destination: connection.destination.0,
            destination_port: connection.destination.1,
            source: connection.outside.0,
            source_port: connection.outside.1,
            begin: connection.begin.map(time),
            end: connection.end.map(time),
            sent_bytes: bytes(|[sent, _]| sent),
            received_bytes: bytes(|[_, received]| received),
        }
    }
}

/// RFC 3339, with milliseconds.
pub(super) fn time(at: Millis) -> String {
    Timestamp::from_millisecond(at).map_or_else(|_| String::new(), |at| format!("{at:.3}"))
}
