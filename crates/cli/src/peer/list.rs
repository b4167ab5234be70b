//! `fairlead peer list`.

use std::process::ExitCode;

use fairlead_members::configuration::{Subject, entry_nodes};
use kube::ResourceExt;
use kube::api::DynamicObject;
use serde::Serialize;
use serde_json::json;

use super::cluster::{configuration_of, objects};
use crate::arguments::peers::PeerList;
use crate::output::{self, or_dash, render, table};

/// One Peer.
#[derive(Debug, Serialize, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
struct Row {
    name: String,
    public_key: String,
    #[serde(rename = "allowedIPs")]
    allowed_ips: Vec<String>,
    entry_nodes: Vec<String>,
    /// Parts of it that are left out, and the reasons.
    problems: Vec<String>,
}

pub(super) async fn run(arguments: &PeerList) -> anyhow::Result<ExitCode> {
    let objects = objects(&arguments.api.client().await?).await?;
    let mut rows = Vec::new();
    for peer in &objects.external {
        let name = peer.name_any();
        let problems = configuration_of(&objects, Subject::Peer(&name), &[])?.problems;
        rows.push(row(peer, problems));
    }
    rows.sort_by(|a, b| a.name.cmp(&b.name));
    let text = render(arguments.output, || json!({ "peers": rows }), |_| print(&rows))?;
    output::print(&text);
    Ok(ExitCode::SUCCESS)
}

fn row(peer: &DynamicObject, problems: Vec<String>) -> Row {
    let spec = peer.data.get("spec");
    let text = |value: &serde_json::Value| value.as_str().map(str::to_owned);
    let claims = spec.and_then(|spec| spec.get("allowedIPs")?.as_array());
    Row {
        name: peer.name_any(),
        public_key: spec.and_then(|spec| text(spec.get("publicKey")?)).unwrap_or_default(),
        allowed_ips: claims.into_iter().flatten().filter_map(text).collect(),
        entry_nodes: entry_nodes(peer),
        problems,
    }
}

fn print(rows: &[Row]) -> String {
    let mut table = table(&["PEER", "PUBLIC KEY", "ALLOWED IPS", "ENTRY NODES", "PROBLEMS"]);
    for row in rows {
        let entries = if row.entry_nodes.is_empty() { "(all)".to_owned() } else { row.entry_nodes.join(" ") };
        let problems = or_dash(&row.problems.join("; "));
        table.add_row([
            row.name.clone(),
            row.public_key.clone(),
            row.allowed_ips.join(" "),
            entries,
            problems,
        ]);
    }
    format!("{table}\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_that_cannot_be_read_is_listed_with_its_reason() {
        let object = json!({
            "apiVersion": "kilo.squat.ai/v1alpha1", "kind": "Peer", "metadata": { "name": "laptop" },
            "spec": { "publicKey": 7, "allowedIPs": ["10.9.0.1/32"], "entryNodes": ["gate"] },
        });
        let row = row(&serde_json::from_value(object).unwrap(), vec!["Peer laptop is left out".to_owned()]);
        assert_eq!((row.public_key.as_str(), &row.allowed_ips[..]), ("", &["10.9.0.1/32".to_owned()][..]));
        assert!(print(&[row]).contains("Peer laptop is left out"));
    }
}
