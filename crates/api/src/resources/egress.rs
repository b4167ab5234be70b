//! `Egress` of `coil.cybozu.com/v2`: a group of NAT gateway pods.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::DeploymentStrategy;
use k8s_openapi::api::core::v1::{PodSpec, SessionAffinityConfig};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::{CustomResource, KubeSchema};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::rules::{CIDR_LENGTH, cidrs, undescribed};

/// Which destinations go through the gateways, and how the gateways run.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[kube(
    group = "coil.cybozu.com",
    version = "v2",
    kind = "Egress",
    plural = "egresses",
    namespaced,
    status = "EgressStatus",
    derive = "PartialEq",
    doc = "A group of NAT gateway pods. Pods that name it in the annotation egress.coil.cybozu.com/NAMESPACE reach its destinations through them.",
    scale(
        spec_replicas_path = ".spec.replicas",
        status_replicas_path = ".status.replicas",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Destination", type_ = "string", json_path = ".spec.destinations[0]"),
    printcolumn(
        name = "Desired",
        type_ = "integer",
        json_path = ".spec.replicas",
        description = "Desired gateway pods"
    ),
    printcolumn(
        name = "Available",
        type_ = "integer",
        json_path = ".status.replicas",
        description = "Available gateway pods"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct EgressSpec {
    /// Prefixes in CIDR notation that client pods reach through the gateways.
    #[schemars(length(min = 1, max = 1000), inner(length(max = CIDR_LENGTH)))]
    #[x_kube(validation = cidrs())]
    pub destinations: Vec<String>,
    /// How many gateway pods run.
    #[serde(default = "default_replicas")]
    #[schemars(range(min = 1))]
    pub replicas: i32,
    /// How old gateway pods are replaced by new ones, as in a Deployment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "undescribed::<DeploymentStrategy>")]
    #[x_kube(validation = Rule::new("!has(self.type) || self.type in ['Recreate', 'RollingUpdate']")
        .message("strategy.type must be Recreate or RollingUpdate"))]
    pub strategy: Option<DeploymentStrategy>,
    /// What to add to the gateway pods. The container named egress is the gateway itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<EgressPodTemplate>,
    /// Whether all packets of a client pod go to one gateway, as in a Service. TCP needs it, unless the service
    /// proxy keeps flows together and fouSourcePortAuto is set.
    #[serde(default)]
    pub session_affinity: SessionAffinity,
    /// How long a client pod without traffic keeps its gateway, as in a Service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "undescribed::<SessionAffinityConfig>")]
    pub session_affinity_config: Option<SessionAffinityConfig>,
    /// Whether the UDP source port of a tunnel is computed from the flow inside instead of being 5555, so that
    /// a service proxy that balances by flow spreads the flows of one client over all gateways.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fou_source_port_auto: bool,
    /// For how many seconds flows may go on through a gateway that is to end, 300 if it is not given. A change replaces
    /// the gateway pods.
    #[serde(default = "default_drain_seconds", skip_serializing_if = "is_default_drain")]
    #[schemars(with = "i32", range(min = 0, max = 3600))]
    pub drain_seconds: u32,
    /// How many gateways an eviction must keep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_disruption_budget: Option<EgressDisruptionBudget>,
    /// Namespaces whose pods may use the gateways. Without this list those of all namespaces may, with an empty one none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1000), inner(length(min = 1, max = 63)))]
    pub allowed_namespaces: Option<Vec<String>>,
}

/// `spec.drainSeconds` of an Egress that does not say it, and `--drain-seconds` of gateways that are not told.
pub const DEFAULT_DRAIN_SECONDS: u32 = 300;

impl EgressSpec {
    /// Whether pods of this namespace may use the gateways.
    pub fn allows(&self, namespace: &str) -> bool {
        self.allowed_namespaces.as_ref().is_none_or(|allowed| allowed.iter().any(|name| name == namespace))
    }
}

/// Additions to the gateway pods.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct EgressPodTemplate {
    /// Labels and annotations of the pods.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub metadata: Option<EgressPodMetadata>,
    /// A pod spec as in a Deployment; containers may be left out.
    // Kept as it was written: a typed pod spec would drop the fields of a newer Kubernetes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "pod_spec_schema")]
    pub spec: Option<Map<String, Value>>,
}

/// Labels and annotations of the gateway pods.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct EgressPodMetadata {
    /// Annotations to add.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = 64))]
    pub annotations: BTreeMap<String, String>,
    /// Labels to add.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(schema_with = "labels_schema")]
    pub labels: BTreeMap<String, String>,
}

/// Values of `sessionAffinity`, as in a Service, but with another default.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SessionAffinity {
    /// A client keeps its gateway.
    #[default]
    #[serde(rename = "ClientIP")]
    ClientIp,
    /// Each flow may go to another gateway.
    None,
}

/// How many gateways an eviction must keep. Only one of the two may be given.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.minAvailable) || !has(self.maxUnavailable)")
    .message("minAvailable and maxUnavailable cannot both be set"))]
pub struct EgressDisruptionBudget {
    /// Gateways that stay, as a number or a percentage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new(NUMBER_OR_PERCENT).message(NUMBER_OR_PERCENT_MESSAGE))]
    #[schemars(schema_with = "undescribed::<IntOrString>")]
    pub min_available: Option<IntOrString>,
    /// Gateways that may be missing, as a number or a percentage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new(NUMBER_OR_PERCENT).message(NUMBER_OR_PERCENT_MESSAGE))]
    #[schemars(schema_with = "undescribed::<IntOrString>")]
    pub max_unavailable: Option<IntOrString>,
}

const NUMBER_OR_PERCENT: &str =
    "type(self) == int ? int(self) >= 0 : string(self).matches('^(100|[0-9]{1,2})%$')";
const NUMBER_OR_PERCENT_MESSAGE: &str =
    "must be a number that is not negative, or a percentage from 0% to 100%";

/// Observed state of an Egress, written by the controller.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct EgressStatus {
    /// Gateway pods that are available.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<i32>,
    /// Label selector of the gateway pods, for a HorizontalPodAutoscaler.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub selector: Option<String>,
    /// `Ready` is False, with the reason, while the gateways cannot be deployed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

impl EgressPodTemplate {
    /// The pod spec as far as this build knows its fields.
    ///
    /// # Errors
    /// A field has a value of the wrong type; the message names it.
    pub fn pod_spec(&self) -> Result<PodSpec, serde_json::Error> {
        serde_json::from_value(Value::Object(self.spec.clone().unwrap_or_default()))
    }
}

/// The fields of a pod spec without their descriptions, with no container required, and with fields of newer
/// versions of Kubernetes kept.
fn pod_spec_schema(generator: &mut SchemaGenerator) -> Schema {
    let mut schema = undescribed::<PodSpec>(generator);
    schema.remove("required");
    schema.insert("x-kubernetes-preserve-unknown-fields".to_owned(), Value::Bool(true));
    schema.insert(
        "description".to_owned(),
        Value::String("A pod spec as in a Deployment; containers may be left out.".to_owned()),
    );
    schema
}

/// Values as Kubernetes accepts them in labels, so that the API server rejects a wrong one here and not in the Deployment.
fn labels_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "type": "object",
        "maxProperties": 64,
        "additionalProperties": {
            "type": "string",
            "maxLength": 63,
            "pattern": "^(([A-Za-z0-9][-A-Za-z0-9_.]*)?[A-Za-z0-9])?$",
        },
    })
}

fn default_replicas() -> i32 {
    1
}

fn default_drain_seconds() -> u32 {
    DEFAULT_DRAIN_SECONDS
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_default_drain(seconds: &u32) -> bool {
    *seconds == DEFAULT_DRAIN_SECONDS
}
