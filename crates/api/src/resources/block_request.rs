//! `BlockRequest` of `coil.cybozu.com/v2`: a node asks the controller for a block.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::{CustomResource, KubeSchema};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What a node asks for.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[kube(
    group = "coil.cybozu.com",
    version = "v2",
    kind = "BlockRequest",
    plural = "blockrequests",
    status = "BlockRequestStatus",
    derive = "PartialEq",
    doc = "A node's request for another AddressBlock. Made and deleted by the node, answered by the controller in the status.",
    selectable = ".spec.nodeName",
    printcolumn(
        name = "Node",
        type_ = "string",
        json_path = ".spec.nodeName",
        description = "Node that asks"
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
        description = "Block that was given"
    ),
    printcolumn(
        name = "Complete",
        type_ = "string",
        json_path = ".status.conditions[?(@.type==\"Complete\")].status",
        description = "Whether the request was answered"
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
    /// Name of the node that asks. At most 63 characters, because the block carries it as a label.
    #[schemars(length(min = 1, max = 63))]
    pub node_name: String,
    /// Name of the pool that the block is to come from.
    #[schemars(length(min = 1, max = 63))]
    pub pool_name: String,
}

/// The controller's answer.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct BlockRequestStatus {
    /// Name of the AddressBlock that was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub address_block_name: Option<String>,
    /// `Complete` is True once the request was answered; `Failed` is True as well if there is no block.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<BlockRequestCondition>,
}

/// One side of the answer.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Debug, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct BlockRequestCondition {
    /// Complete or Failed.
    #[serde(rename = "type")]
    pub type_: BlockRequestConditionType,
    /// True, False or Unknown.
    pub status: ConditionStatus,
    /// When the controller last looked at the request.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_probe_time: Option<Time>,
    /// When the status last changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_transition_time: Option<Time>,
    /// The reason in a word or two, for programs.
    #[serde(default)]
    pub reason: String,
    /// The reason in a sentence, for people.
    #[serde(default)]
    pub message: String,
}

/// Kinds of conditions of a BlockRequest.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BlockRequestConditionType {
    /// The request was answered.
    Complete,
    /// The answer is that there is no block.
    Failed,
}

/// Whether a condition holds, as everywhere in Kubernetes.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ConditionStatus {
    /// It holds.
    True,
    /// It does not hold.
    False,
    /// It cannot be said.
    Unknown,
}

/// The answer to a request in one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockRequestOutcome<'a> {
    /// There is no answer yet.
    Pending,
    /// The named AddressBlock was given.
    Granted(&'a str),
    /// There will be no block.
    Refused {
        /// The reason in a word or two.
        reason: &'a str,
        /// The reason in a sentence.
        message: &'a str,
    },
}

impl BlockRequest {
    /// Name of a node's request for a pool: `req-<pool>-<node>`. It may have a few more under other names.
    pub fn name_for(pool: &str, node: &str) -> String {
        format!("req-{pool}-{node}")
    }

    /// What the conditions say. `Failed` wins over `Complete`, because a refusal carries both.
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
