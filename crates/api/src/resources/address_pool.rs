//! `AddressPool` of `coil.cybozu.com/v2`: the subnets pods get addresses from.

use fairlead_address::{DualStack, DualStackNets, IpFamily};
use ipnet::{Ipv4Net, Ipv6Net};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::core::Rule;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use super::rules::{CIDR_LENGTH, NAME_LENGTH, cidr_of_family, explained};

/// A set of subnets. The controller carves them into blocks of equal size, nodes ask for blocks, and pods get
/// single addresses of their node's blocks. Namespaces choose a pool by the annotation `coil.cybozu.com/pool`;
/// all others use the pool named `default`.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, PartialEq, Eq)]
#[kube(
    group = "coil.cybozu.com",
    version = "v2",
    kind = "AddressPool",
    plural = "addresspools",
    status = "AddressPoolStatus",
    derive = "PartialEq",
    doc = "A set of subnets that pods get addresses from. Namespaces choose a pool by the annotation coil.cybozu.com/pool; all others use the pool named default.",
    validation = Rule::new("self.metadata.name.size() <= 63")
        .message("metadata.name must be at most 63 characters: every block of the pool carries it as a label"),
    printcolumn(name = "BlockSize Bits", type_ = "integer", json_path = ".spec.blockSizeBits",
        description = "Each block has two to the power of this many addresses"),
    printcolumn(name = "Blocks", type_ = "integer", json_path = ".status.blocks",
        description = "Blocks that nodes hold"),
    printcolumn(name = "Capacity", type_ = "integer", json_path = ".status.capacity",
        description = "Addresses in all subnets"),
    printcolumn(name = "Free", type_ = "integer", json_path = ".status.free",
        description = "Addresses that are in no block"),
    printcolumn(name = "Nodes", type_ = "integer", json_path = ".status.nodeCount",
        description = "Nodes that hold blocks"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status",
        description = "Whether blocks can be granted from the pool"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        description = "Reason of the condition Ready"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = explained(
    "self.subnets.all(s, !has(s.ipv4) || !isCIDR(s.ipv4) || cidr(s.ipv4).ip().family() != 4 \
     || 32 - cidr(s.ipv4).prefixLength() >= self.blockSizeBits)",
    "self.subnets.map(s, has(s.ipv4) && isCIDR(s.ipv4) && cidr(s.ipv4).ip().family() == 4 \
     && 32 - cidr(s.ipv4).prefixLength() < self.blockSizeBits, \
     'too narrow subnet: ' + s.ipv4 + ' holds less than one block of 2 to the power of spec.blockSizeBits addresses')[0]",
))]
#[x_kube(validation = explained(
    "self.subnets.all(s, !has(s.ipv6) || !isCIDR(s.ipv6) || cidr(s.ipv6).ip().family() != 6 \
     || 128 - cidr(s.ipv6).prefixLength() >= self.blockSizeBits)",
    "self.subnets.map(s, has(s.ipv6) && isCIDR(s.ipv6) && cidr(s.ipv6).ip().family() == 6 \
     && 128 - cidr(s.ipv6).prefixLength() < self.blockSizeBits, \
     'too narrow subnet: ' + s.ipv6 + ' holds less than one block of 2 to the power of spec.blockSizeBits addresses')[0]",
))]
pub struct AddressPoolSpec {
    /// Whether allocation is stopped: the controller grants no block, and nodes allocate no address, not even from blocks
    /// they hold. Pods keep their addresses; a node releases a block when its last pod is gone. Disable a pool to drain
    /// it before it is deleted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub disabled: bool,
    /// Whether connections of the pool's pods to destinations outside of the cluster get the address of their node. If
    /// omitted, `spec.masquerade` of the WireKubeMesh decides; without a mesh they keep the pod's address, for networks
    /// whose routers know the pods. Connections to pods, nodes and Services are never changed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub masquerade: Option<bool>,
    /// Size of a block: it has 2 to the power of this many addresses, so 5 makes 32. It cannot be changed.
    #[serde(default = "default_block_size_bits")]
    #[schemars(with = "i32", range(min = 0, max = 20))]
    #[x_kube(validation = Rule::new("self == oldSelf")
        .message("spec.blockSizeBits cannot be changed: nodes hold blocks of the present size; make another pool"))]
    pub block_size_bits: u8,
    /// Subnets, used in this order. More may be added at the end; none may be changed, moved or removed.
    /// All of them have the same address families, and none may overlap another.
    #[schemars(length(min = 1, max = 64))]
    #[x_kube(validation = Rule::new("oldSelf.all(s, self.indexOf(s) == oldSelf.indexOf(s))")
        .message("spec.subnets may only grow at its end: no subnet can be changed, moved or removed while pods may use it"))]
    #[x_kube(validation = Rule::new(
        "self.all(s, has(s.ipv4) == has(self[0].ipv4) && has(s.ipv6) == has(self[0].ipv6))")
        .message("all subnets of a pool must have the same address families"))]
    #[x_kube(validation = no_overlap("ipv4"))]
    #[x_kube(validation = no_overlap("ipv6"))]
    pub subnets: Vec<SubnetSet>,
}

/// One subnet of a pool: IPv4, IPv6, or both side by side.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
#[x_kube(validation = Rule::new("has(self.ipv4) || has(self.ipv6)")
    .message("a subnet needs ipv4, ipv6 or both"))]
#[x_kube(validation = explained(
    "!has(self.ipv4) || !has(self.ipv6) || !isCIDR(self.ipv4) || !isCIDR(self.ipv6) \
     || cidr(self.ipv4).ip().family() != 4 || cidr(self.ipv6).ip().family() != 6 \
     || 32 - cidr(self.ipv4).prefixLength() == 128 - cidr(self.ipv6).prefixLength()",
    "'a dual-stack subnet gives each pod one address of both families, so both must have the same size: ' \
     + self.ipv4 + ' and ' + self.ipv6 + ' have not (the IPv6 prefix is to be longer by 96)'",
))]
pub struct SubnetSet {
    /// IPv4 prefix in CIDR notation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = CIDR_LENGTH))]
    #[x_kube(validation = cidr_of_family(4))]
    pub ipv4: Option<String>,
    /// IPv6 prefix in CIDR notation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = CIDR_LENGTH))]
    #[x_kube(validation = cidr_of_family(6))]
    pub ipv6: Option<String>,
}

/// Observed state of a pool, written by the controller. Address counts are per family and saturate at 2^63 - 1.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct AddressPoolStatus {
    /// Generation of the spec from which this status was computed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// Blocks that nodes hold.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub blocks: Option<i64>,
    /// Addresses in all subnets.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub capacity: Option<i64>,
    /// Addresses in blocks that nodes hold, allocated to pods or not. How many pods have is a metric of each node
    /// (`fairlead_ipam_addresses_used`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub used: Option<i64>,
    /// Addresses that are in no block.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub free: Option<i64>,
    /// Number of nodes that hold blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub node_count: Option<i64>,
    /// Blocks by node, by name of the node; the first 500 only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_LISTED_NODES))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub nodes: Vec<NodeBlocks>,
    /// `Ready` is False, with the reason, while no block can be granted from the pool. `Disabled`, `Exhausted` and
    /// `Overlapping` are True while that is the case.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// Largest number of nodes in [`AddressPoolStatus::nodes`]: the status is written whenever a block changes.
pub const MAX_LISTED_NODES: usize = 500;

/// Blocks of a pool that one node holds.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct NodeBlocks {
    /// Name of the node.
    #[schemars(length(max = NAME_LENGTH))]
    pub name: String,
    /// Number of blocks that the node holds.
    #[schemars(range(min = 1))]
    pub blocks: i64,
}

/// A prefix of a pool or block did not parse.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{text}' is not an {family} prefix in CIDR notation")]
pub struct InvalidSubnet {
    /// Value of the field.
    pub text: String,
    /// The family of the field.
    pub family: IpFamily,
}

impl SubnetSet {
    /// The prefixes, without host bits.
    ///
    /// # Errors
    /// The first prefix that is not CIDR of its family.
    pub fn parse(&self) -> Result<DualStackNets, InvalidSubnet> {
        parse_prefixes(self.ipv4.as_deref(), self.ipv6.as_deref())
    }
}

pub(super) fn parse_prefixes(ipv4: Option<&str>, ipv6: Option<&str>) -> Result<DualStackNets, InvalidSubnet> {
    let invalid = |text: &str, family| InvalidSubnet { text: text.to_owned(), family };
    let nets = DualStack { ipv4, ipv6 }.try_map(
        |text| text.parse::<Ipv4Net>().map_err(|_| invalid(text, IpFamily::V4)),
        |text| text.parse::<Ipv6Net>().map_err(|_| invalid(text, IpFamily::V6)),
    )?;
    Ok(nets.trunc())
}

impl AddressPool {
    /// Time at which the API server created the pool, in seconds since 1970; `i64::MAX` for an object it has not stored. Of
    /// pools that overlap, the oldest has the addresses.
    pub fn created_at(&self) -> i64 {
        self.metadata.creation_timestamp.as_ref().map_or(i64::MAX, |time| time.0.as_second())
    }
}

impl AddressPoolSpec {
    /// All subnets, in order, without host bits.
    ///
    /// # Errors
    /// The first prefix that is not CIDR of its family.
    pub fn parse_subnets(&self) -> Result<Vec<DualStackNets>, InvalidSubnet> {
        self.subnets.iter().map(SubnetSet::parse).collect()
    }
}

/// No two subnets share an address of the family whose field is named: each overlaps exactly one, itself.
fn no_overlap(field: &str) -> Rule {
    let usable = |subnet: &str| format!("has({subnet}.{field}) && isCIDR({subnet}.{field})");
    let contains = |outer: &str, inner: &str| {
        format!("cidr({outer}.{field}).containsIP(cidr({inner}.{field}).masked().ip())")
    };
    let overlaps_itself_only =
        format!("self.exists_one(b, {} && ({} || {}))", usable("b"), contains("a", "b"), contains("b", "a"));
    explained(
        &format!("self.all(a, !({}) || {overlaps_itself_only})", usable("a")),
        &format!(
            "self.map(a, {} && !{overlaps_itself_only}, 'subnet ' + a.{field} + ' overlaps another subnet of the pool')[0]",
            usable("a")
        ),
    )
}

fn default_block_size_bits() -> u8 {
    5
}
