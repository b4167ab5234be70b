//! `fairlead ipam`: whose every address is, what does not fit together, and freeing what leaked.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;
use std::time::{SystemTime, UNIX_EPOCH};

use anyhow::Context as _;
use fairlead_api::resources::{AddressBlock, AddressPool};
use fairlead_cluster::pods::{SlimPod, trimmed};
use fairlead_ipam::check::{self, ClusterView};
use fairlead_node::ipam::inventory::{known_pod, to_wire};
use fairlead_wire::node::{
    Block, Finding, HeldAddresses, IpamCheckRequest, IpamCheckResponse, IpamReleaseRequest,
    IpamReleaseResponse, IpamShowRequest, IpamShowResponse,
};
use k8s_openapi::api::core::v1::Node;
use kube::api::ListParams;
use kube::{Api, Client, ResourceExt};
use serde_json::{Value, json};

use crate::arguments::{IpamCheck, IpamCommand, IpamOutput, IpamRelease, IpamShow};
use crate::output::{or_dash, table};
use crate::programs;
use crate::status::{NOT_WELL, connect, current_thread};

/// Objects that one list request brings at most.
const PAGE: u32 = 500;

/// Runs one of the sub-commands; the exit code says whether something was found.
pub(crate) fn run(command: &IpamCommand) -> anyhow::Result<ExitCode> {
    let (text, well) = current_thread(async {
        match command {
            IpamCommand::Check(query) => check(query).await,
            IpamCommand::Release(query) => Ok((release(query).await?, true)),
            IpamCommand::Show(query) => Ok((show(query).await?, true)),
        }
    })?;
    // A reader that went away (`| head`) is no failure.
    let _ = std::io::stdout().write_all(text.as_bytes());
    Ok(if well { ExitCode::SUCCESS } else { ExitCode::from(NOT_WELL) })
}

async fn show(query: &IpamShow) -> anyhow::Result<String> {
    let answer = connect(&query.socket).await?.ipam_show(IpamShowRequest {}).await.map_err(answered)?;
    let answer = answer.into_inner();
    Ok(match query.output {
        IpamOutput::Json => format!("{:#}\n", show_json(&answer)),
        IpamOutput::Table => show_table(&answer, false, now()),
        IpamOutput::Wide => show_table(&answer, true, now()),
    })
}

async fn check(query: &IpamCheck) -> anyhow::Result<(String, bool)> {
    let answer = if query.cluster { check_cluster().await? } else { check_node(&query.socket).await? };
    let text = match query.output {
        IpamOutput::Json => format!("{:#}\n", check_json(&answer)),
        IpamOutput::Table => check_table(&answer, false),
        IpamOutput::Wide => check_table(&answer, true),
    };
    Ok((text, answer.findings.is_empty() && answer.unknown.is_empty()))
}

async fn release(query: &IpamRelease) -> anyhow::Result<String> {
    let request = IpamReleaseRequest { subject: query.subject.clone(), force: query.force };
    let answer = connect(&query.socket).await?.ipam_release(request).await.map_err(answered)?.into_inner();
    Ok(match query.output {
        IpamOutput::Json => format!("{:#}\n", release_json(&answer)),
        IpamOutput::Table | IpamOutput::Wide => release_text(&answer),
    })
}

/// The node program's own words, without gRPC's.
fn answered(status: tonic::Status) -> anyhow::Error {
    anyhow::anyhow!("{}", status.message())
}

async fn check_node(socket: &Path) -> anyhow::Result<IpamCheckResponse> {
    Ok(connect(socket).await?.ipam_check(IpamCheckRequest {}).await.map_err(answered)?.into_inner())
}

async fn check_cluster() -> anyhow::Result<IpamCheckResponse> {
    let client = Client::try_from(programs::cluster().await?)?;
    // Pods first: what is made meanwhile then has its block in the later lists.
    let pods = pods(&client).await?;
    let nodes = Api::<Node>::all(client.clone());
    let nodes = nodes.list_metadata(&ListParams::default()).await.context("cannot list Nodes")?;
    let blocks = Api::<AddressBlock>::all(client.clone());
    let blocks = blocks.list(&ListParams::default()).await.context("cannot list AddressBlocks")?;
    let pools = Api::<AddressPool>::all(client);
    let pools = pools.list(&ListParams::default()).await.context("cannot list AddressPools")?;
    let view = ClusterView {
        nodes: nodes.items.iter().map(ResourceExt::name_any).collect(),
        blocks: blocks.items.iter().map(Into::into).collect(),
        pools: pools.items.iter().map(Into::into).collect(),
        pods,
    };
    let findings = check::cluster(&view).into_iter().map(to_wire).collect();
    Ok(IpamCheckResponse { node: String::new(), findings, unknown: Vec::new() })
}

/// All pods that are bound to a node, page by page.
async fn pods(client: &Client) -> anyhow::Result<Vec<check::KnownPod>> {
    let pods = Api::<SlimPod>::all(client.clone());
    let mut parameters = ListParams::default().limit(PAGE).fields("spec.nodeName!=");
    let mut known = Vec::new();
    loop {
        let page = pods.list(&parameters).await.context("cannot list Pods")?;
        known.extend(page.items.into_iter().map(|mut pod| {
            trimmed(&mut pod);
            known_pod(&pod)
        }));
        match page.metadata.continue_.filter(|token| !token.is_empty()) {
            Some(token) => parameters = parameters.continue_token(&token),
            None => return Ok(known),
        }
    }
}

fn now() -> i64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    i64::try_from(since.as_secs()).unwrap_or(i64::MAX)
}

/// Ages as kubectl prints them: the largest unit that says enough.
fn age(attached: Option<i64>, now: i64) -> String {
    let Some(seconds) = attached.map(|at| now.saturating_sub(at).max(0)) else { return "-".to_owned() };
    match seconds {
        0..120 => format!("{seconds}s"),
        120..7_200 => format!("{}m", seconds / 60),
        7_200..172_800 => format!("{}h", seconds / 3_600),
        _ => format!("{}d", seconds / 86_400),
    }
}

fn free(block: &Block) -> u64 {
    if block.state == "open" { block.capacity.saturating_sub(block.used) } else { 0 }
}

fn pod_name(held: &HeldAddresses) -> String {
    if held.pod_name.is_empty() {
        "-".to_owned()
    } else {
        format!("{}/{}", held.pod_namespace, held.pod_name)
    }
}

fn show_table(answer: &IpamShowResponse, wide: bool, now: i64) -> String {
    let mut blocks = table(&["BLOCK", "POOL", "IPV4", "IPV6", "USED", "FREE", "CAPACITY", "STATE"]);
    for block in &answer.blocks {
        let numbers = [block.used, free(block), block.capacity].map(|number| number.to_string());
        let [used, free, capacity] = numbers;
        let (ipv4, ipv6) = (or_dash(&block.ipv4), or_dash(&block.ipv6));
        blocks.add_row([&block.name, &block.pool, &ipv4, &ipv6, &used, &free, &capacity, &block.state]);
    }
    let mut header = vec!["POD", "IPV4", "IPV6", "POOL", "INTERFACE", "LINK", "AGE"];
    if wide {
        header.extend(["BLOCK", "NETWORK", "CONTAINER"]);
    }
    let mut addresses = table(&header);
    for held in &answer.attachments {
        let mut row = vec![
            pod_name(held),
            or_dash(&held.ipv4),
            or_dash(&held.ipv6),
            held.pool.clone(),
            held.ifname.clone(),
            or_dash(&held.link),
            age(held.attached_unix_seconds, now),
        ];
        if wide {
            row.extend([or_dash(&held.block), or_dash(&held.network), held.container_id.clone()]);
        }
        addresses.add_row(row);
    }
    format!("{blocks}\n\n{addresses}\n")
}

fn show_json(answer: &IpamShowResponse) -> Value {
    let block = |block: &Block| {
        json!({
            "name": block.name, "pool": block.pool, "ipv4": block.ipv4, "ipv6": block.ipv6,
            "used": block.used, "free": free(block), "capacity": block.capacity, "state": block.state,
        })
    };
    json!({
        "node": answer.node,
        "blocks": answer.blocks.iter().map(block).collect::<Vec<_>>(),
        "attachments": answer.attachments.iter().map(held_json).collect::<Vec<_>>(),
    })
}

fn held_json(held: &HeldAddresses) -> Value {
    json!({
        "containerID": held.container_id, "interface": held.ifname,
        "pool": held.pool, "block": held.block, "ipv4": held.ipv4, "ipv6": held.ipv6,
        "pod": { "namespace": held.pod_namespace, "name": held.pod_name, "uid": held.pod_uid },
        "link": held.link, "network": held.network, "attachedUnixSeconds": held.attached_unix_seconds,
    })
}

fn check_json(answer: &IpamCheckResponse) -> Value {
    let finding = |finding: &Finding| {
        json!({
            "severity": finding.severity, "reason": finding.reason, "subject": finding.subject,
            "what": finding.what, "why": finding.why, "advice": finding.advice,
        })
    };
    json!({
        "node": answer.node,
        "findings": answer.findings.iter().map(finding).collect::<Vec<_>>(),
        "unknown": answer.unknown,
    })
}

fn check_table(answer: &IpamCheckResponse, wide: bool) -> String {
    let mut text = String::new();
    if answer.findings.is_empty() && answer.unknown.is_empty() {
        let compared = match answer.node.as_str() {
            "" => "pods, blocks, pools and Nodes of the cluster agree".to_owned(),
            node => format!("kernel, blocks and pods of node {node} agree"),
        };
        return format!("{compared}\n");
    }
    if wide {
        let mut findings = table(&["SEVERITY", "REASON", "SUBJECT", "WHAT", "WHY", "ADVICE"]);
        for it in &answer.findings {
            findings.add_row([&it.severity, &it.reason, &it.subject, &it.what, &it.why, &it.advice]);
        }
        text.push_str(&format!("{findings}\n"));
    } else {
        for it in &answer.findings {
            text.push_str(&format!(
                "{} {}: {}\n  why: {}\n  do:  {}\n",
                it.severity, it.reason, it.what, it.why, it.advice
            ));
        }
        let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
        for it in &answer.findings {
            *counts.entry(&it.severity).or_default() += 1;
        }
        let counts: Vec<String> =
            counts.iter().map(|(severity, count)| format!("{count} {severity}")).collect();
        if !counts.is_empty() {
            text.push_str(&format!("\nfound: {}\n", counts.join(", ")));
        }
    }
    for unknown in &answer.unknown {
        text.push_str(&format!("not compared: {unknown}\n"));
    }
    text
}

fn release_json(answer: &IpamReleaseResponse) -> Value {
    json!({ "released": answer.released.iter().map(held_json).collect::<Vec<_>>() })
}

fn release_text(answer: &IpamReleaseResponse) -> String {
    let line = |held: &HeldAddresses| {
        let addresses: Vec<&str> =
            [&held.ipv4, &held.ipv6].into_iter().map(String::as_str).filter(|ip| !ip.is_empty()).collect();
        format!("released {} of container {}\n", addresses.join(" and "), held.container_id)
    };
    answer.released.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown() -> IpamShowResponse {
        IpamShowResponse {
            node: "n1".into(),
            blocks: vec![
                Block {
                    name: "default-0".into(),
                    used: 3,
                    capacity: 32,
                    state: "open".into(),
                    ..Block::default()
                },
                Block {
                    name: "default-1".into(),
                    capacity: 32,
                    state: "reserved".into(),
                    ..Block::default()
                },
            ],
            attachments: vec![HeldAddresses {
                container_id: "c0ffee".into(),
                ipv4: "10.0.0.1".into(),
                pod_namespace: "shop".into(),
                pod_name: "web".into(),
                block: "default-0".into(),
                attached_unix_seconds: Some(1_000),
                ..HeldAddresses::default()
            }],
        }
    }

    #[test]
    fn ages_are_those_of_kubectl() {
        let cases = [(0, "0s"), (119, "119s"), (120, "2m"), (7_199, "119m"), (7_200, "2h"), (172_800, "2d")];
        for (seconds, text) in cases {
            assert_eq!(age(Some(1_000), 1_000 + seconds), text);
        }
        assert_eq!((age(None, 5), age(Some(10), 5)), ("-".to_owned(), "0s".to_owned()));
    }

    #[test]
    fn a_wide_table_says_more_and_both_name_the_pod() {
        let (narrow, wide) = (show_table(&shown(), false, 1_060), show_table(&shown(), true, 1_060));
        for word in ["default-0", "29", "shop/web", "10.0.0.1", "60s", "reserved"] {
            assert!(narrow.contains(word) && wide.contains(word), "{word} is missing in\n{narrow}\n{wide}");
        }
        assert!(wide.contains("c0ffee") && !narrow.contains("c0ffee"));
    }

    #[test]
    fn a_block_that_gives_nothing_has_nothing_free() {
        let value = show_json(&shown());
        assert_eq!((&value["blocks"][0]["free"], &value["blocks"][1]["free"]), (&json!(29), &json!(0)));
        assert_eq!(value["attachments"][0]["pod"]["name"], "web");
    }

    #[test]
    fn findings_say_what_why_and_what_to_do() {
        let finding = Finding {
            severity: "error".into(),
            reason: "RouteMissing".into(),
            subject: "10.0.0.1".into(),
            what: "no way".into(),
            why: "it was deleted".into(),
            advice: "delete the pod".into(),
        };
        let answer =
            IpamCheckResponse { node: "n1".into(), findings: vec![finding], unknown: vec!["pods".into()] };
        for text in [check_table(&answer, false), check_table(&answer, true)] {
            for word in
                ["error", "RouteMissing", "no way", "it was deleted", "delete the pod", "not compared: pods"]
            {
                assert!(text.contains(word), "{word} is missing in\n{text}");
            }
        }
        let well = IpamCheckResponse { node: "n1".into(), ..IpamCheckResponse::default() };
        assert!(check_table(&well, false).contains("n1 agree"));
    }
}
