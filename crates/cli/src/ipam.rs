//! `fairlead ipam`: shows the address allocation, finds inconsistencies, and releases leaked addresses.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::ExitCode;

use fairlead_api::resources::{AddressBlock, AddressPool};
use fairlead_cluster::pods::{SlimPod, trimmed};
use fairlead_ipam::check::{self, ClusterView};
use fairlead_members::ipam_check::{known_pod, to_wire};
use fairlead_wire::node::{
    Block, Finding, HeldAddresses, IpamCheckRequest, IpamCheckResponse, IpamReleaseRequest,
    IpamReleaseResponse, IpamShowRequest, IpamShowResponse,
};
use k8s_openapi::api::core::v1::Node;
use kube::api::{ListParams, PartialObjectMeta};
use kube::{Api, ResourceExt};
use serde_json::{Value, json};

use crate::api;
use crate::api::ApiArguments;
use crate::arguments::queries::{IpamCheck, IpamCommand, IpamRelease, IpamShow};
use crate::output::{self, now, or_dash, render, table};
use crate::query::{PROBLEM_FOUND, connect, current_thread};

/// Runs a subcommand. The exit code says whether a problem was found.
///
/// # Errors
/// The node program or the API server refuses, or does not answer.
pub fn run(command: &IpamCommand) -> anyhow::Result<ExitCode> {
    let (text, consistent) = current_thread(async {
        match command {
            IpamCommand::Check(query) => check(query).await,
            IpamCommand::Release(query) => Ok((release(query).await?, true)),
            IpamCommand::Show(query) => Ok((show(query).await?, true)),
        }
    })?;
    output::print(&text);
    Ok(if consistent { ExitCode::SUCCESS } else { ExitCode::from(PROBLEM_FOUND) })
}

async fn show(query: &IpamShow) -> anyhow::Result<String> {
    let answer = connect(&query.socket).await?.ipam_show(IpamShowRequest {}).await.map_err(message_of)?;
    let answer = answer.into_inner();
    render(query.output, || show_json(&answer), |wide| show_table(&answer, wide, now()))
}

async fn check(query: &IpamCheck) -> anyhow::Result<(String, bool)> {
    let answer = match query.cluster || query.api.is_given() {
        true => check_cluster(&query.api).await?,
        false => check_node(&query.socket).await?,
    };
    let text = render(query.output, || check_json(&answer), |wide| check_table(&answer, wide))?;
    Ok((text, answer.findings.is_empty() && answer.unknown.is_empty()))
}

async fn release(query: &IpamRelease) -> anyhow::Result<String> {
    let request = IpamReleaseRequest { subject: query.subject.clone(), force: query.force };
    let answer = connect(&query.socket).await?.ipam_release(request).await.map_err(message_of)?.into_inner();
    render(query.output, || release_json(&answer), |_| release_text(&answer))
}

/// The node program's message, without gRPC's status code.
fn message_of(status: tonic::Status) -> anyhow::Error {
    anyhow::anyhow!("{}", status.message())
}

async fn check_node(socket: &Path) -> anyhow::Result<IpamCheckResponse> {
    Ok(connect(socket).await?.ipam_check(IpamCheckRequest {}).await.map_err(message_of)?.into_inner())
}

async fn check_cluster(cluster: &ApiArguments) -> anyhow::Result<IpamCheckResponse> {
    let client = cluster.client().await?;
    // Pods first: the block of a pod created meanwhile is then in the later lists.
    let scheduled = ListParams::default().fields("spec.nodeName!=");
    let pods = api::list(&Api::<SlimPod>::all(client.clone()), "Pods", scheduled).await?;
    let pods = pods.into_iter().map(|mut pod| {
        trimmed(&mut pod);
        known_pod(&pod)
    });
    let nodes = Api::<PartialObjectMeta<Node>>::all(client.clone());
    let nodes = api::list(&nodes, "Nodes", ListParams::default()).await?;
    let blocks = Api::<AddressBlock>::all(client.clone());
    let blocks = api::list(&blocks, "AddressBlocks", ListParams::default()).await?;
    let pools = api::list(&Api::<AddressPool>::all(client), "AddressPools", ListParams::default()).await?;
    let view = ClusterView {
        nodes: nodes.iter().map(ResourceExt::name_any).collect(),
        blocks: blocks.iter().map(Into::into).collect(),
        pools: pools.iter().map(Into::into).collect(),
        pods: pods.collect(),
    };
    let findings = check::cluster(&view).into_iter().map(to_wire).collect();
    Ok(IpamCheckResponse { node: String::new(), findings, unknown: Vec::new() })
}

fn free(block: &Block) -> u64 {
    if block.state == "open" { block.capacity.saturating_sub(block.used) } else { 0 }
}

fn pod_name(attachment: &HeldAddresses) -> String {
    if attachment.pod_name.is_empty() {
        "-".to_owned()
    } else {
        format!("{}/{}", attachment.pod_namespace, attachment.pod_name)
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
    for attachment in &answer.attachments {
        let mut row = vec![
            pod_name(attachment),
            or_dash(&attachment.ipv4),
            or_dash(&attachment.ipv6),
            attachment.pool.clone(),
            attachment.ifname.clone(),
            or_dash(&attachment.link),
            attachment.attached_unix_seconds.map_or("-".to_owned(), |at| output::age(now.saturating_sub(at))),
        ];
        if wide {
            row.extend([
                or_dash(&attachment.block),
                or_dash(&attachment.network),
                attachment.container_id.clone(),
            ]);
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
        "attachments": answer.attachments.iter().map(attachment_json).collect::<Vec<_>>(),
    })
}

fn attachment_json(attachment: &HeldAddresses) -> Value {
    json!({
        "containerID": attachment.container_id, "interface": attachment.ifname,
        "pool": attachment.pool, "block": attachment.block, "ipv4": attachment.ipv4, "ipv6": attachment.ipv6,
        "pod": { "namespace": attachment.pod_namespace, "name": attachment.pod_name, "uid": attachment.pod_uid },
        "link": attachment.link, "network": attachment.network, "attachedUnixSeconds": attachment.attached_unix_seconds,
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
    json!({ "released": answer.released.iter().map(attachment_json).collect::<Vec<_>>() })
}

fn release_text(answer: &IpamReleaseResponse) -> String {
    let line = |attachment: &HeldAddresses| {
        let addresses: Vec<&str> = [&attachment.ipv4, &attachment.ipv6]
            .into_iter()
            .map(String::as_str)
            .filter(|ip| !ip.is_empty())
            .collect();
        format!("released {} of container {}\n", addresses.join(" and "), attachment.container_id)
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
    fn a_wide_table_has_more_columns_and_both_name_the_pod() {
        let (narrow, wide) = (show_table(&shown(), false, 1_060), show_table(&shown(), true, 1_060));
        for word in ["default-0", "29", "shop/web", "10.0.0.1", "60s", "reserved"] {
            assert!(narrow.contains(word) && wide.contains(word), "{word} is missing in\n{narrow}\n{wide}");
        }
        assert!(wide.contains("c0ffee") && !narrow.contains("c0ffee"));
    }

    #[test]
    fn a_reserved_block_has_no_free_addresses() {
        let value = show_json(&shown());
        assert_eq!((&value["blocks"][0]["free"], &value["blocks"][1]["free"]), (&json!(29), &json!(0)));
        assert_eq!(value["attachments"][0]["pod"]["name"], "web");
    }

    #[test]
    fn findings_have_a_cause_and_an_advice() {
        let finding = Finding {
            severity: "error".into(),
            reason: "RouteMissing".into(),
            subject: "10.0.0.1".into(),
            what: "no route".into(),
            why: "it was deleted".into(),
            advice: "delete the pod".into(),
        };
        let answer =
            IpamCheckResponse { node: "n1".into(), findings: vec![finding], unknown: vec!["pods".into()] };
        for text in [check_table(&answer, false), check_table(&answer, true)] {
            for word in [
                "error",
                "RouteMissing",
                "no route",
                "it was deleted",
                "delete the pod",
                "not compared: pods",
            ] {
                assert!(text.contains(word), "{word} is missing in\n{text}");
            }
        }
        let consistent = IpamCheckResponse { node: "n1".into(), ..IpamCheckResponse::default() };
        assert!(check_table(&consistent, false).contains("n1 agree"));
    }
}
