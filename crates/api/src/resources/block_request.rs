//! `BlockRequest` of `coil.cybozu.com/v2`: a node asks the controller for a block.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::address_block::AddressBlockFields;
use super::rules::{NAME_LENGTH, OBJECT_NAME_PATTERN};
use crate::names::is_object_name;

/// Node that requests a block, and the pool that the block is to come from.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[kube(
    group = "coil.cybozu.com",
    version = "v2",
    kind = "BlockRequest",
    plural = "blockrequests",
    status = "BlockRequestStatus",
    derive = "PartialEq",
    doc = "A node's request for another AddressBlock. The node creates and deletes it; the controller answers in the status.",
    selectable = ".spec.nodeName",
    printcolumn(
        name = "Node",
        type_ = "string",
        json_path = ".spec.nodeName",
        description = "Requesting node"
    ),
    printcolumn(
        name = "Pool",
        type_ = "string",
        json_path = ".spec.poolName",
        description = "Pool the block is to come from"
    ),
    printcolumn(
        name = "Block",
        type_ = "string",
        json_path = ".status.addressBlockName",
        description = "Block that was granted"
    ),
    printcolumn(
        name = "Complete",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Complete\")].status",
        description = "Whether the request is complete"
    ),
    printcolumn(
        name = "Reason",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Complete\")].reason"
    ),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("self == oldSelf")
    .message("the spec of a BlockRequest cannot be changed; delete it and make another"))]
pub struct BlockRequestSpec {
    /// Name of the requesting node. At most 63 characters, because the block carries it as a label.
    #[schemars(length(min = 1, max = 63), regex(pattern = OBJECT_NAME_PATTERN))]
    pub node_name: String,
    /// Name of the pool that the block is to come from.
    #[schemars(length(min = 1, max = 63), regex(pattern = OBJECT_NAME_PATTERN))]
    pub pool_name: String,
    /// The block that pods of the node use although the API server has lost it, as after etcd was restored from a backup.
    /// The controller grants exactly this block, or none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub in_use: Option<AddressBlockFields>,
}

/// Observed state of the request, written by the controller.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct BlockRequestStatus {
    /// Name of the AddressBlock that was granted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = NAME_LENGTH))]
    pub address_block_name: Option<String>,
    /// `Complete` is True once the controller has processed the request; `Failed` is True as well if it granted no block.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<BlockRequestCondition>,
}

/// A condition of a BlockRequest.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct BlockRequestCondition {
    /// Complete or Failed.
    #[serde(rename = "type")]
    pub type_: BlockRequestConditionType,
    /// True, False or Unknown.
    pub status: ConditionStatus,
    /// Time at which the controller last processed the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_probe_time: Option<Time>,
    /// Time at which the status last changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<Time>,
    /// Reason in one or two words, for programs.
    #[serde(default)]
    pub reason: String,
    /// Reason in one sentence, for people.
    #[serde(default)]
    pub message: String,
}

/// Kinds of conditions of a BlockRequest.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BlockRequestConditionType {
    /// The controller has processed the request.
    Complete,
    /// The controller granted no block.
    Failed,
}

/// Status of a condition, as in every Kubernetes API.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConditionStatus {
    /// The condition holds.
    True,
    /// The condition does not hold.
    False,
    /// The controller cannot tell.
    Unknown,
}

/// The outcome of a request in one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockRequestOutcome<'a> {
    /// The controller has not processed the request.
    Pending,
    /// The controller granted the named AddressBlock.
    Granted(&'a str),
    /// The controller refused the request.
    Refused {
        /// Reason in one or two words.
        reason: &'a str,
        /// Reason in one sentence.
        message: &'a str,
    },
}

/// A field of a BlockRequest that is not the name of an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidName {
    /// Name of the field in the manifest.
    pub field: &'static str,
    /// Value of the field.
    pub text: String,
}

impl BlockRequest {
    /// Prefix of the names of a node's requests for a pool; the API server completes them (`metadata.generateName`). No
    /// name means anything: a request is known by its UID and its spec.
    pub fn name_prefix(pool: &str, node: &str) -> String {
        format!("req-{pool}-{node}-")
    }

    /// Whether the names in the spec can be those of objects. An older schema took any text, which must not get into a URL.
    ///
    /// # Errors
    /// The first field that is not.
    pub fn check_names(&self) -> Result<(), InvalidName> {
        let spec = &self.spec;
        for (field, text) in [("nodeName", &spec.node_name), ("poolName", &spec.pool_name)] {
            if !is_object_name(text) {
                return Err(InvalidName { field, text: text.clone() });
            }
        }
        Ok(())
    }

    /// Outcome by the conditions. `Failed` wins over `Complete`, because a refusal carries both.
    pub fn outcome(&self) -> BlockRequestOutcome<'_> {
        let Some(status) = &self.status else { return BlockRequestOutcome::Pending };
        let holding = |type_| {
            let holds = |c: &&BlockRequestCondition| c.type_ == type_ && c.status == ConditionStatus::True;
            status.conditions.iter().find(holds)
        };
        if let Some(failed) = holding(BlockRequestConditionType::Failed) {
            return BlockRequestOutcome::Refused { reason: &failed.reason, message: &failed.message };
        }
        match (holding(BlockRequestConditionType::Complete), &status.address_block_name) {
            (Some(_), Some(block)) => BlockRequestOutcome::Granted(block),
            _ => BlockRequestOutcome::Pending,
        }
    }
}
