//! Status of an Egress.

use fairlead_api::conditions;
use fairlead_api::names::{EGRESS_COMPONENT, FOU_PORT};
use fairlead_api::resources::{Egress, EgressSourceAddress, EgressStatus};
use k8s_openapi::api::apps::v1::{Deployment, DeploymentStatus};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use serde_json::Value;

use crate::objects::{arguments, pod_labels};
use crate::selectors::PodSelectors;

/// Type of the condition that says whether gateways are there.
pub const READY: &str = "Ready";

/// Type of the condition that says whether `spec.selectors` make sense; an Egress without them has none.
pub const SELECTORS_VALID: &str = "SelectorsValid";
/// Reason of that condition, and of Events, for a selector that selects nothing.
pub const SELECTOR_INVALID: &str = "SelectorInvalid";

/// Type of the condition that says whether the namespaces of client pods are limited.
pub const RESTRICTED: &str = "NamespacesRestricted";

/// Reason and message for invalid `spec.selectors`; `None` if all are valid.
pub fn invalid_selectors(egress: &Egress) -> Option<(&'static str, String)> {
    let (_, invalid) = PodSelectors::of(&egress.spec);
    let messages: Vec<String> = invalid.iter().map(ToString::to_string).collect();
    (!messages.is_empty()).then(|| (SELECTOR_INVALID, messages.join("; ")))
}

/// Readiness of an Egress, and the reason for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Finding {
    /// Whether gateways can be used.
    pub ready: bool,
    /// Reason as one CamelCase word.
    pub reason: &'static str,
    /// Reason as a sentence.
    pub message: String,
}

impl Finding {
    /// Problem that keeps the gateways from being deployed as the Egress says.
    pub fn problem(reason: &'static str, message: String) -> Self {
        Self { ready: false, reason, message }
    }

    /// Readiness by the Deployment's status; without a Deployment no gateway is available.
    pub fn of(egress: &Egress, deployment: Option<&Deployment>) -> Self {
        let status = deployment.and_then(|deployment| deployment.status.as_ref());
        let (available, wanted) = (available(status), egress.spec.replicas);
        let (ready, reason) = match available {
            0 => (false, "NoneAvailable"),
            _ if available < wanted => (true, "SomeAvailable"),
            _ => (true, "AllAvailable"),
        };
        let mut message = format!("{available} of {wanted} gateways are available");
        if let Some(failure) = status.and_then(failure).filter(|_| available < wanted) {
            message.push_str(": ");
            message.push_str(&failure);
        }
        for warning in [short_grace(egress), replaced_arguments(egress)].into_iter().flatten() {
            message.push_str("; ");
            message.push_str(&warning);
        }
        Self { ready, reason, message }
    }

    /// Adds why some gateways are not available, also where enough are: those of a rollout that does not get on.
    pub fn because(mut self, reason: &str, cause: &str) -> Self {
        self.message = format!("{}; {reason}: {cause}", self.message);
        self
    }
}

/// Warning that gateways are killed before the time for their flows is over.
fn short_grace(egress: &Egress) -> Option<String> {
    let template = egress.spec.template.as_ref()?.spec.as_ref()?;
    let grace = template.get("terminationGracePeriodSeconds")?.as_i64()?;
    let drain = egress.spec.drain_seconds;
    (grace < i64::from(drain)).then(|| {
        format!(
            "spec.template.spec.terminationGracePeriodSeconds ({grace}) ends gateways before spec.drainSeconds ({drain}): make it longer, or leave it out"
        )
    })
}

/// Warning that arguments of the template, which replace all, leave out what the Egress says.
fn replaced_arguments(egress: &Egress) -> Option<String> {
    let template = egress.spec.template.as_ref()?.spec.as_ref()?;
    let containers = template.get("containers")?.as_array()?;
    let own =
        containers.iter().find(|it| it.get("name").and_then(Value::as_str) == Some(EGRESS_COMPONENT))?;
    let given: Vec<&str> = own.get("args")?.as_array()?.iter().filter_map(Value::as_str).collect();
    let flag = |argument: &str| argument.split('=').next().unwrap_or_default().to_owned();
    let flags: Vec<String> = given.iter().map(|argument| flag(argument)).collect();
    let missing = arguments(egress, FOU_PORT).into_iter().filter(|wanted| !flags.contains(&flag(wanted)));
    let missing: Vec<String> = missing.collect();
    (!given.is_empty() && !missing.is_empty()).then(|| {
        format!(
            "the arguments in spec.template replace all others: add {} to have what the spec says",
            missing.join(" ")
        )
    })
}

/// Message of the Deployment about pods that it cannot make or that do not become available.
fn failure(status: &DeploymentStatus) -> Option<String> {
    let failed = |type_: &str, value: &str| {
        let mut all = status.conditions.iter().flatten();
        all.find(|condition| condition.type_ == type_ && condition.status == value)?.message.clone()
    };
    failed("ReplicaFailure", "True").or_else(|| failed("Progressing", "False"))
}

fn available(status: Option<&DeploymentStatus>) -> i32 {
    status.and_then(|status| status.available_replicas).unwrap_or_default()
}

/// The status to apply; `None` if the Egress has it. While the ranges of the cluster are not known, those in the status stay.
pub fn due(
    egress: &Egress,
    deployment: Option<&Deployment>,
    finding: &Finding,
    ranges: Option<&[String]>,
    source_addresses: Vec<EgressSourceAddress>,
    now: Time,
) -> Option<EgressStatus> {
    let present = egress.status.clone().unwrap_or_default();
    let name = egress.metadata.name.as_deref().unwrap_or_default();
    let condition = |type_, Finding { ready: holds, reason, message }: Finding| {
        let finding = conditions::Finding { type_, holds, reason, message };
        conditions::condition(&present.conditions, finding, egress.metadata.generation, now.clone())
    };
    let mut conditions = vec![condition(READY, finding.clone())];
    conditions.push(condition(RESTRICTED, restriction(egress)));
    conditions.extend(selectors(egress).map(|finding| condition(SELECTORS_VALID, finding)));
    let wanted = EgressStatus {
        cluster_ranges: ranges.map(<[String]>::to_vec).or_else(|| present.cluster_ranges.clone()),
        source_addresses,
        replicas: Some(available(deployment.and_then(|deployment| deployment.status.as_ref()))),
        selector: Some(selector(name)),
        conditions,
    };
    let has = |status: &EgressStatus| status.conditions.iter().any(|it| it.type_ == SELECTORS_VALID);
    let is_there = has(&present) == has(&wanted)
        && present.cluster_ranges == wanted.cluster_ranges
        && (present.replicas, &present.selector) == (wanted.replicas, &wanted.selector)
        && present.source_addresses == wanted.source_addresses
        && wanted.conditions.iter().all(|condition| present.conditions.contains(condition));
    (!is_there).then_some(wanted)
}

/// Finding about the namespaces whose pods may be clients. Coil's Egresses are for all of them, and so are those that do not say more.
fn restriction(egress: &Egress) -> Finding {
    match &egress.spec.allowed_namespaces {
        None => Finding::problem(
            "EveryNamespaceMayUse",
            "pods of every namespace may use the gateways: spec.allowedNamespaces says which ones may"
                .to_owned(),
        ),
        Some(allowed) if allowed.is_empty() => Finding {
            ready: true,
            reason: "NoNamespaceMayUse",
            message: "spec.allowedNamespaces is empty: no pod may use the gateways".to_owned(),
        },
        Some(_) => Finding {
            ready: true,
            reason: "ListedNamespacesMayUse",
            message: "pods of the namespaces in spec.allowedNamespaces may use the gateways".to_owned(),
        },
    }
}

/// Finding for the condition about selectors; `None` without selectors.
fn selectors(egress: &Egress) -> Option<Finding> {
    egress.spec.selectors.as_ref()?;
    let valid = || Finding {
        ready: true,
        reason: "AllValid",
        message: "pods that match a selector use the gateways".to_owned(),
    };
    Some(invalid_selectors(egress).map_or_else(valid, |(reason, message)| Finding::problem(reason, message)))
}

/// The selector of the gateway pods, as a HorizontalPodAutoscaler takes it.
pub fn selector(egress: &str) -> String {
    let labels = pod_labels(egress);
    labels.iter().map(|(label, value)| format!("{label}={value}")).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use k8s_openapi::jiff::Timestamp;
    use serde_json::{Value, json};

    use super::*;

    fn egress(status: &Value) -> Egress {
        let object = json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "Egress",
            "metadata": { "name": "nat", "namespace": "internet-egress", "generation": 3 },
            "spec": { "destinations": ["0.0.0.0/0"], "replicas": 2 }, "status": status,
        });
        serde_json::from_value(object).unwrap()
    }

    fn deployment(status: &Value) -> Deployment {
        serde_json::from_value(
            json!({ "apiVersion": "apps/v1", "kind": "Deployment", "metadata": {}, "status": status }),
        )
        .unwrap()
    }

    fn at(seconds: i64) -> Time {
        Time(Timestamp::from_second(seconds).unwrap())
    }

    #[test]
    fn a_grace_period_shorter_than_the_time_for_flows_is_named() {
        let message = |drain: u32, grace: i64| {
            let mut egress = egress(&json!({}));
            egress.spec.drain_seconds = drain;
            let template = json!({ "spec": { "terminationGracePeriodSeconds": grace } });
            egress.spec.template = Some(serde_json::from_value(template).unwrap());
            Finding::of(&egress, Some(&deployment(&json!({ "availableReplicas": 2 })))).message
        };
        let expected = "2 of 2 gateways are available; spec.template.spec.terminationGracePeriodSeconds (60) ends gateways before \
            spec.drainSeconds (300): make it longer, or leave it out";
        assert_eq!(message(300, 60), expected);
        assert_eq!(message(60, 60), "2 of 2 gateways are available");
    }

    #[test]
    fn arguments_of_the_template_that_leave_out_what_the_spec_says_are_named() {
        let message = |args: Value| {
            let mut egress = egress(&json!({}));
            (egress.spec.drain_seconds, egress.spec.fou_source_port_auto) = (60, true);
            let template = json!({ "spec": { "containers": [{ "name": "egress", "args": args }] } });
            egress.spec.template = Some(serde_json::from_value(template).unwrap());
            Finding::of(&egress, Some(&deployment(&json!({ "availableReplicas": 2 })))).message
        };
        let expected = "2 of 2 gateways are available; the arguments in spec.template replace all others: \
            add --enable-sport-auto=true --drain-seconds=60 to have what the spec says";
        assert_eq!(message(json!(["--log-level=debug"])), expected);
        for complete in [json!(["--enable-sport-auto", "--drain-seconds=90"]), json!([])] {
            assert_eq!(message(complete), "2 of 2 gateways are available");
        }
    }

    #[test]
    fn an_egress_is_ready_with_the_first_gateway() {
        let egress = egress(&json!({}));
        let finding = |status: Value| {
            let Finding { ready, reason, message } = Finding::of(&egress, Some(&deployment(&status)));
            (ready, reason, message)
        };
        let none = "0 of 2 gateways are available".to_owned();
        assert_eq!(finding(json!({})), (false, "NoneAvailable", none.clone()));
        let one = finding(json!({ "availableReplicas": 1 }));
        assert_eq!(one, (true, "SomeAvailable", "1 of 2 gateways are available".to_owned()));
        let all = finding(json!({ "availableReplicas": 2 }));
        assert_eq!(all, (true, "AllAvailable", "2 of 2 gateways are available".to_owned()));
        assert_eq!(
            Finding::of(&egress, None),
            Finding { ready: false, reason: "NoneAvailable", message: none }
        );
        let conditions = json!([
            { "type": "Progressing", "status": "False", "message": "too slow" },
            { "type": "ReplicaFailure", "status": "True", "message": "forbidden: quota" },
        ]);
        let failed = finding(json!({ "conditions": conditions }));
        assert_eq!(failed.2, "0 of 2 gateways are available: forbidden: quota");
    }

    #[test]
    fn a_status_is_written_once_and_its_time_changes_with_it() {
        let gateways = deployment(&json!({ "availableReplicas": 1, "replicas": 2 }));
        let finding = Finding::of(&egress(&json!({})), Some(&gateways));
        let status = due(&egress(&json!({})), Some(&gateways), &finding, None, Vec::new(), at(1)).unwrap();
        assert_eq!(status.replicas, Some(1));
        let selector =
            "app.kubernetes.io/component=egress,app.kubernetes.io/instance=nat,app.kubernetes.io/name=coil";
        assert_eq!(status.selector.as_deref(), Some(selector));
        assert_eq!(
            (status.conditions[0].status.as_str(), status.conditions[0].observed_generation),
            ("True", Some(3))
        );
        let written = egress(&json!(status));
        assert_eq!(due(&written, Some(&gateways), &finding, None, Vec::new(), at(2)), None);
        let taken = Finding::problem("NameTaken", "why".to_owned());
        let status = due(&written, Some(&gateways), &taken, None, Vec::new(), at(3)).unwrap();
        assert_eq!(
            (status.conditions[0].reason.as_str(), &status.conditions[0].last_transition_time),
            ("NameTaken", &at(3))
        );
    }

    #[test]
    fn selectors_have_a_condition_of_their_own_that_leaves_the_other_as_it_is() {
        let mut of = egress(&json!({}));
        let select = |of: &mut Egress, operator: &str| {
            let expression = json!([{ "key": "app", "operator": operator }]);
            let all = json!([{ "podSelector": { "matchExpressions": expression } }]);
            of.spec.selectors = Some(serde_json::from_value(all).unwrap());
        };
        select(&mut of, "exists");
        let finding = Finding::of(&of, None);
        let status = due(&of, None, &finding, None, Vec::new(), at(1)).unwrap();
        let said: Vec<_> =
            status.conditions.iter().map(|it| (it.type_.as_str(), it.reason.as_str())).collect();
        let expected = [
            ("Ready", "NoneAvailable"),
            ("NamespacesRestricted", "EveryNamespaceMayUse"),
            ("SelectorsValid", "SelectorInvalid"),
        ];
        assert_eq!(said, expected);
        assert!(status.conditions[2].message.contains("\"exists\""), "{status:?}");
        of.status = Some(status);
        assert_eq!(due(&of, None, &finding, None, Vec::new(), at(2)), None);
        select(&mut of, "Exists");
        let status = due(&of, None, &finding, None, Vec::new(), at(2)).unwrap();
        assert_eq!(
            (status.conditions[2].status.as_str(), status.conditions[2].reason.as_str()),
            ("True", "AllValid")
        );
        of.status = Some(status);
        of.spec.selectors = None;
        assert_eq!(due(&of, None, &finding, None, Vec::new(), at(3)).unwrap().conditions.len(), 2);
    }

    #[test]
    fn an_egress_that_is_for_all_namespaces_says_so_until_it_names_some() {
        let said = |allowed: Option<Vec<String>>| {
            let mut of = egress(&json!({}));
            of.spec.allowed_namespaces = allowed;
            let status = due(&of, None, &Finding::of(&of, None), None, Vec::new(), at(1)).unwrap();
            let condition = status.conditions.into_iter().find(|it| it.type_ == RESTRICTED).unwrap();
            (condition.status, condition.reason, condition.message)
        };
        let (status, reason, message) = said(None);
        assert_eq!((status.as_str(), reason.as_str()), ("False", "EveryNamespaceMayUse"));
        assert!(message.starts_with("pods of every namespace may use the gateways"), "{message}");
        assert_eq!(said(Some(vec!["shop".to_owned()])).0, "True");
        assert_eq!(said(Some(Vec::new())).1, "NoNamespaceMayUse");
    }

    #[test]
    fn the_ranges_of_the_cluster_are_written_once_they_are_known_and_stay() {
        let mut of = egress(&json!({}));
        let finding = Finding::of(&of, None);
        let ranges = ["100.64.0.0/10".to_owned()];
        of.status = due(&of, None, &finding, None, Vec::new(), at(1));
        assert_eq!(of.status.as_ref().unwrap().cluster_ranges, None);
        let status = due(&of, None, &finding, Some(&ranges), Vec::new(), at(2)).unwrap();
        assert_eq!(status.cluster_ranges.as_deref(), Some(&ranges[..]));
        of.status = Some(status);
        assert_eq!(due(&of, None, &finding, None, Vec::new(), at(3)), None);
        assert_eq!(
            due(&of, None, &finding, Some(&[]), Vec::new(), at(3)).unwrap().cluster_ranges,
            Some(Vec::new())
        );
    }

    #[test]
    fn what_another_writer_said_is_replaced() {
        let condition = json!({
            "type": "Ready", "status": "False", "reason": "NoController", "message": "no",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        });
        let egress = egress(&json!({ "conditions": [condition] }));
        let status = due(&egress, None, &Finding::of(&egress, None), None, Vec::new(), at(1)).unwrap();
        assert_eq!((status.replicas, status.conditions[0].reason.as_str()), (Some(0), "NoneAvailable"));
    }
}
