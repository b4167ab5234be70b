//! `Egress` of `coil.cybozu.com/v2`: a group of NAT gateway pods.

use std::collections::BTreeMap;

use k8s_openapi::api::apps::v1::DeploymentStrategy;
use k8s_openapi::api::core::v1::{PodSpec, SessionAffinityConfig};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, LabelSelector};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use kube::{CustomResource, KubeSchema};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::rules::{CIDR_LENGTH, cidrs, health_targets, source_addresses, undescribed};

/// Destinations that are reached through the gateways, and the settings of the gateways.
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
    /// Prefixes in CIDR notation inside of the destinations that client pods reach as if there were no Egress.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32), inner(length(max = CIDR_LENGTH)))]
    #[x_kube(validation = cidrs())]
    pub excluded_destinations: Vec<String>,
    /// Number of gateway pods.
    #[serde(default = "default_replicas")]
    #[schemars(range(min = 1))]
    pub replicas: i32,
    /// Strategy by which new gateway pods replace old ones, as in a Deployment.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "strategy_schema")]
    #[x_kube(validation = Rule::new("!has(self.type) || self.type in ['Recreate', 'RollingUpdate']")
        .message("strategy.type must be Recreate or RollingUpdate"))]
    pub strategy: Option<DeploymentStrategy>,
    /// Additions to the gateway pods. The container named egress is the gateway itself.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template: Option<EgressPodTemplate>,
    /// Whether all packets of a client pod go to one gateway, as in a Service. TCP needs it, unless the service
    /// proxy keeps flows together and fouSourcePortAuto is set.
    #[serde(default)]
    pub session_affinity: SessionAffinity,
    /// Time for which a client pod without traffic keeps its gateway, as in a Service.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "undescribed::<SessionAffinityConfig>")]
    pub session_affinity_config: Option<SessionAffinityConfig>,
    /// Whether the UDP source port of a tunnel is computed from the flow inside instead of being 5555, so that
    /// a service proxy that balances by flow spreads the flows of one client over all gateways.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub fou_source_port_auto: bool,
    /// Seconds for which flows may go on through a gateway that is to end, 300 by default. A change replaces the gateway pods.
    #[serde(default = "default_drain_seconds", skip_serializing_if = "is_default_drain")]
    #[schemars(with = "i32", range(min = 0, max = 3600))]
    pub drain_seconds: u32,
    /// Gateways that an eviction must keep.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pod_disruption_budget: Option<EgressDisruptionBudget>,
    /// Namespaces whose pods may use the gateways. Without this list those of all namespaces may, with an empty one none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 1000), inner(length(min = 1, max = 63)))]
    pub allowed_namespaces: Option<Vec<String>>,
    /// Pods that use the gateways without an annotation of theirs. Those of other namespaces only where the Namespace consents with
    /// the annotation egress.coil.cybozu.com/allow-selectors-of, a list of NAMESPACE/NAME of Egresses, or of NAMESPACE/* for all of a namespace.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 16))]
    pub selectors: Option<Vec<EgressSelector>>,
    /// Whether only connections that the client pods open go through the gateways: replies to those that were opened to them by eth0 leave
    /// by eth0. Where it is not given, --enable-originating-only of the node program says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub originating_only: Option<bool>,
    /// Addresses that connections have outside instead of those of the gateway pods. Each is held by one gateway at a time, and taken over by
    /// another when that one fails, with its connections. The n-th of each family is held by the same gateway. The controller must permit
    /// them (--egress-source-addresses).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 32), inner(length(min = 2, max = 45)))]
    #[x_kube(validation = source_addresses())]
    pub source_addresses: Option<Vec<String>>,
    /// Targets that a gateway probes to know that it reaches the outside. A gateway that reaches none gets no new connections, as long as
    /// another gateway does better.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub health_check: Option<EgressHealthCheck>,
    /// Maximum number of connections that a client pod may have at a time through a gateway. More are refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub max_connections_per_client: Option<u32>,
    /// Whether gateways write a log line for each connection that ends, with the address and port that it had outside.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub log_connections: bool,
}

/// Pods that use the gateways, as in a NetworkPolicy: where both selectors are given, pods must match both.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.namespaceSelector) || has(self.podSelector)")
    .message("namespaceSelector or podSelector must be given ({} selects all)"))]
pub struct EgressSelector {
    /// Labels of the pods' Namespace. Without it, the pods are in the namespace of the Egress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "label_selector_schema")]
    pub namespace_selector: Option<LabelSelector>,
    /// Labels of the pods. Without it, all pods of the namespaces are meant.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "label_selector_schema")]
    pub pod_selector: Option<LabelSelector>,
}

/// Targets and pace of a gateway's probes.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct EgressHealthCheck {
    /// Addresses, to which ICMP echo requests are sent, or ADDRESS:PORT (IPv6 addresses in brackets), to which TCP connections are opened. One that answers suffices.
    #[schemars(length(min = 1, max = 8), inner(length(min = 2, max = 53)))]
    #[x_kube(validation = health_targets())]
    pub targets: Vec<String>,
    /// Seconds between two probes, 2 if it is not given.
    #[serde(default = "default_interval_seconds")]
    #[schemars(range(min = 1, max = 300))]
    pub interval_seconds: u32,
    /// Probes in a row without an answer of any target after which a gateway is unhealthy, 3 if it is not given; as many with an answer make it
    /// healthy again.
    #[serde(default = "default_failure_threshold")]
    #[schemars(range(min = 1, max = 100))]
    pub failure_threshold: u32,
}

/// Most labels, or expressions, of a selector, and most values of an expression.
const MAX_REQUIREMENTS: u32 = 64;
const MAX_LABEL_VALUES: u32 = 1000;
/// Longest label value, and longest key: a DNS subdomain, `/`, and a name of 63 characters.
const LABEL_LENGTH: u32 = 63;
const LABEL_KEY_LENGTH: u32 = 317;
/// Longest word or percentage, such as `RollingUpdate` or `25%`.
const WORD_LENGTH: u32 = 64;
/// Longest annotation of gateway pods. Kubernetes takes 256 KiB of all annotations of an object.
const ANNOTATION_LENGTH: u32 = 16_384;

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
    #[schemars(extend("maxProperties" = 64, "additionalProperties" = { "type": "string", "maxLength": ANNOTATION_LENGTH }))]
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

/// Gateways that an eviction must keep. Only one of the two may be given.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("!has(self.minAvailable) || !has(self.maxUnavailable)")
    .message("minAvailable and maxUnavailable cannot both be set"))]
pub struct EgressDisruptionBudget {
    /// Gateways that stay, as a number or a percentage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new(NUMBER_OR_PERCENT).message(NUMBER_OR_PERCENT_MESSAGE))]
    #[schemars(schema_with = "number_or_percent_schema")]
    pub min_available: Option<IntOrString>,
    /// Gateways that may be missing, as a number or a percentage.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[x_kube(validation = Rule::new(NUMBER_OR_PERCENT).message(NUMBER_OR_PERCENT_MESSAGE))]
    #[schemars(schema_with = "number_or_percent_schema")]
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
    #[schemars(length(max = 2048))]
    pub selector: Option<String>,
    /// Source addresses that the controller permits, and which gateway holds them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 32))]
    pub source_addresses: Vec<EgressSourceAddress>,
    /// Ranges of the cluster outside of private networks, and those there that overlap a destination, joined: pools, ServiceCIDRs, addresses
    /// and podCIDRs of Nodes. Client pods reach them by eth0. Not given before they are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 4096), inner(length(max = 49)))]
    pub cluster_ranges: Option<Vec<String>>,
    /// `Ready` is False, with the reason, while the gateways cannot be deployed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// Source addresses that one gateway holds at a time.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct EgressSourceAddress {
    /// Addresses, at most one of each family.
    #[schemars(length(max = 2), inner(length(max = 45)))]
    pub addresses: Vec<String>,
    /// The pod that holds them, if one does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    pub gateway: Option<String>,
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

/// A label selector of a bounded size: node programs compare every pod of theirs with it. Keys and values are as long as those of labels can be.
fn label_selector_schema(generator: &mut SchemaGenerator) -> Schema {
    bounded::<LabelSelector>(
        generator,
        &[
            ("/properties/matchLabels", "maxProperties", MAX_REQUIREMENTS),
            ("/properties/matchLabels/additionalProperties", "maxLength", LABEL_LENGTH),
            ("/properties/matchExpressions", "maxItems", MAX_REQUIREMENTS),
            ("/properties/matchExpressions/items/properties/key", "maxLength", LABEL_KEY_LENGTH),
            ("/properties/matchExpressions/items/properties/operator", "maxLength", WORD_LENGTH),
            ("/properties/matchExpressions/items/properties/values", "maxItems", MAX_LABEL_VALUES),
            ("/properties/matchExpressions/items/properties/values/items", "maxLength", LABEL_LENGTH),
        ],
    )
}

fn strategy_schema(generator: &mut SchemaGenerator) -> Schema {
    bounded::<DeploymentStrategy>(
        generator,
        &[
            ("/properties/type", "maxLength", WORD_LENGTH),
            ("/properties/rollingUpdate/properties/maxSurge", "maxLength", WORD_LENGTH),
            ("/properties/rollingUpdate/properties/maxUnavailable", "maxLength", WORD_LENGTH),
        ],
    )
}

fn number_or_percent_schema(generator: &mut SchemaGenerator) -> Schema {
    bounded::<IntOrString>(generator, &[("", "maxLength", WORD_LENGTH)])
}

/// The schema of a type of Kubernetes with these bounds: JSON pointer, keyword and value of each. It must be derived in line.
fn bounded<T: JsonSchema>(generator: &mut SchemaGenerator, bounds: &[(&str, &str, u32)]) -> Schema {
    let mut schema = undescribed::<T>(generator).to_value();
    for (pointer, keyword, most) in bounds {
        if let Some(Value::Object(part)) = schema.pointer_mut(pointer) {
            part.insert((*keyword).to_owned(), Value::from(*most));
        }
    }
    Schema::try_from(schema).unwrap_or_default()
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

fn default_interval_seconds() -> u32 {
    2
}

fn default_failure_threshold() -> u32 {
    3
}

fn default_drain_seconds() -> u32 {
    DEFAULT_DRAIN_SECONDS
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_default_drain(seconds: &u32) -> bool {
    *seconds == DEFAULT_DRAIN_SECONDS
}
