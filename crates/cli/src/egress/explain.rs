//! `fairlead egress explain`.

use std::fmt::Write as _;
use std::process::ExitCode;

use fairlead_egress::explain::{Explanation, Known, Objects, PacketWay, ToGateways};
use serde::Serialize;
use serde_json::json;

use super::display::{Gateway, PodEvent, Problem, gateway_table, section};
use super::read::{Reader, pod_info};
use crate::arguments::egress::EgressExplain;
use crate::output::render;

/// Way that a packet takes.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Answer {
    pub(super) pod: String,
    node: Option<String>,
    source: Option<String>,
    pub(super) destination: String,
    pub(super) way: &'static str,
    /// Reason why there is no way, or none is known.
    reason: Option<&'static str>,
    message: Option<String>,
    tunnel: Option<Tunnel>,
    steps: Vec<String>,
    problems: Vec<Problem>,
    events: Vec<PodEvent>,
    not_read: Vec<String>,
}

/// A tunnel to the gateways of an Egress.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Tunnel {
    egress: String,
    destination: String,
    table: u32,
    link: String,
    #[serde(rename = "clusterIP")]
    cluster_ip: String,
    port: u16,
    session_affinity: &'static str,
    /// `None` if it is not known which there are.
    gateways: Option<Vec<Gateway>>,
}

pub(super) async fn run(query: &EgressExplain) -> anyhow::Result<(String, ExitCode)> {
    let mut reader = Reader::new(query.api.client().await?);
    let pod = reader.pod(&query.pod.namespace, &query.pod.name).await?;
    // An annotation that cannot be read names none; the explanation says what is wrong with it.
    let selection = reader.selection(&pod).await?;
    let info = pod_info(&pod);
    let egresses = selection.asked_by(&info).unwrap_or_default();
    let objects = Objects { selection: Some(selection), ..reader.objects_of(&egresses).await? };
    let events = reader.events_of(&pod).await?;
    let explanation = Known::of(&objects).explain(&info, query.destination);
    let answer = Answer {
        pod: format!("{}/{}", query.pod.namespace, query.pod.name),
        node: pod.node().map(str::to_owned),
        destination: query.destination.to_string(),
        events: events.iter().map(PodEvent::of).collect(),
        not_read: reader.not_read,
        ..Answer::of(explanation)
    };
    let text = render(query.output, || json!(answer), |_| answer.text())?;
    Ok((text, if answer.has_way() { ExitCode::SUCCESS } else { ExitCode::FAILURE }))
}

impl Answer {
    pub(super) fn of(explanation: Explanation) -> Self {
        let Explanation { source, steps, way, problems } = explanation;
        let (way, why, tunnel) = match way {
            PacketWay::Uplink => ("eth0", None, None),
            PacketWay::Gateways(tunnel) => ("gateways", None, Some(Tunnel::of(*tunnel))),
            PacketWay::HostNetwork => ("hostNetwork", None, None),
            PacketWay::Local => ("local", None, None),
            PacketWay::NotKnown(why) => ("notKnown", Some(why), None),
            PacketWay::Refused(why) => ("refused", Some(why), None),
        };
        let (reason, message) = why.map(|why| (why.reason, why.message)).unzip();
        Self {
            pod: String::new(),
            node: None,
            source: source.map(|source| source.to_string()),
            destination: String::new(),
            way,
            reason,
            message,
            tunnel,
            steps,
            problems: problems.into_iter().map(Problem::from).collect(),
            events: Vec::new(),
            not_read: Vec::new(),
        }
    }

    pub(super) fn has_way(&self) -> bool {
        self.reason.is_none()
    }

    pub(super) fn text(&self) -> String {
        let node = self.node.as_deref().map_or_else(String::new, |node| format!(" on node {node}"));
        let source = self.source.as_deref().map_or_else(String::new, |source| format!(" from {source}"));
        let mut text = format!("Packets of pod {}{node}{source} to {}:\n", self.pod, self.destination);
        for (number, step) in (1..).zip(&self.steps) {
            let _ = writeln!(text, "  {number}. {step}");
        }
        let _ = writeln!(text, "\n{}", self.conclusion());
        if let Some(gateways) = self.tunnel.as_ref().and_then(|tunnel| tunnel.gateways.as_ref()) {
            let _ = writeln!(text, "\n{}", gateway_table(gateways));
        }
        let is_new = |problem: &&Problem| self.message.as_ref() != Some(&problem.message);
        let problems = self.problems.iter().filter(is_new);
        let problem = |problem: &Problem| format!("{}: {}", problem.reason, problem.message);
        text.push_str(&section("Problems of the pod", problems.map(problem)));
        text.push_str(&section("Events of the pod", self.events.iter().map(PodEvent::line)));
        text.push_str(&section("Not read, so that the answer may be incomplete", self.not_read.clone()));
        text
    }

    fn conclusion(&self) -> String {
        let why = || {
            let (reason, message) = (self.reason.unwrap_or_default(), self.message.as_deref());
            format!("{reason}: {}", message.unwrap_or_default())
        };
        match (self.way, &self.tunnel) {
            (_, Some(tunnel)) => tunnel.sentence(),
            ("hostNetwork", _) => "They leave by the network of the node, with its address.".to_owned(),
            ("local", _) => "They do not leave the pod.".to_owned(),
            ("refused", _) => format!("They are refused.\n{}", why()),
            ("notKnown", _) => format!("The API server does not say which way they take.\n{}", why()),
            _ => "They leave by eth0, not through an egress gateway.".to_owned(),
        }
    }
}

impl Tunnel {
    fn of(tunnel: ToGateways) -> Self {
        Self {
            egress: tunnel.egress.to_string(),
            destination: tunnel.prefix.to_string(),
            table: tunnel.table,
            link: tunnel.link,
            cluster_ip: tunnel.cluster_ip.to_string(),
            port: tunnel.port,
            session_affinity: if tunnel.by_client { "ClientIP" } else { "None" },
            gateways: tunnel.gateways.map(|all| all.into_iter().map(Gateway::from).collect()),
        }
    }

    fn sentence(&self) -> String {
        let Self { egress, link, cluster_ip, port, .. } = self;
        let one = match self.session_affinity {
            "ClientIP" => {
                "one gateway takes all connections of the pod while it can be used (sessionAffinity: ClientIP)"
            }
            _ => "each connection has a gateway of its own (sessionAffinity: None)",
        };
        let unknown = if self.gateways.is_none() { "; which there are is not known" } else { "" };
        format!(
            "They go to a gateway of Egress {egress}, by link {link} (UDP port {port} of Service {cluster_ip}): {one}, of those that \
             have registered the pod{unknown}."
        )
    }
}
