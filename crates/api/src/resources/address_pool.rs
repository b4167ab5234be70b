//! `AddressPool` of `coil.cybozu.com/v2`: the subnets pods get addresses from.

use ipnet::{Ipv4Net, Ipv6Net};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::core::Rule;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use super::rules::{CIDR_LENGTH, cidr_of_family, explained};

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
        description = "Addresses in no block yet"),
    printcolumn(name = "Nodes", type_ = "integer", json_path = ".status.nodeCount",
        description = "Nodes that hold blocks"),
    printcolumn(name = "Ready", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].status",
        description = "Whether blocks can be taken from the pool"),
    printcolumn(name = "Reason", type_ = "string", json_path = ".status.conditions[?(@.type==\"Ready\")].reason",
        description = "Why, in one word"),
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
    /// Gives no more blocks and no more addresses, also not from blocks that nodes hold. Pods keep what they have;
    /// nodes give each block back when its last pod is gone. So a pool is emptied before it is deleted.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub disabled: bool,
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

/// What the controller says of a pool. Counts of addresses are per family, and stop at 2^63 - 1.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct AddressPoolStatus {
    /// Generation of the spec that the rest of the status speaks of.
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
    /// Addresses in the blocks that nodes hold, given to pods or not: which of them pods have is known only to the
    /// nodes, whose metrics say it (`fairlead_ipam_addresses_used`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub used: Option<i64>,
    /// Addresses in no block yet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub free: Option<i64>,
    /// How many nodes hold blocks.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0))]
    pub node_count: Option<i64>,
    /// Blocks by node, by name of the node; the first 500 only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = MAX_LISTED_NODES))]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["name".into()]))]
    pub nodes: Vec<NodeBlocks>,
    /// `Ready` is False with the reason when no block can be taken from the pool. `Disabled`, `Exhausted` and
    /// `Overlapping` are True when that is so.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[x_kube(merge_strategy = ListMerge::Map(vec!["type".into()]))]
    pub conditions: Vec<Condition>,
}

/// How many nodes [`AddressPoolStatus::nodes`] lists at most: the status is written whenever a block changes.
pub const MAX_LISTED_NODES: usize = 500;

/// Blocks of a pool that one node holds.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct NodeBlocks {
    /// Name of the node.
    pub name: String,
    /// How many blocks it holds.
    #[schemars(range(min = 1))]
    pub blocks: i64,
}

/// A subnet whose prefixes did parse; host bits are cleared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Subnet {
    /// IPv4 side.
    pub ipv4: Option<Ipv4Net>,
    /// IPv6 side.
    pub ipv6: Option<Ipv6Net>,
}

/// A prefix of a pool did not parse.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("'{0}' is not an {1} prefix in CIDR notation")]
pub struct InvalidSubnet(pub String, pub &'static str);

impl SubnetSet {
    /// The prefixes as numbers.
    ///
    /// # Errors
    /// The first prefix that is not CIDR of its family.
    pub fn parse(&self) -> Result<Subnet, InvalidSubnet> {
        let ipv4 = parse_prefix::<Ipv4Net>(self.ipv4.as_deref(), "IPv4")?;
        let ipv6 = parse_prefix::<Ipv6Net>(self.ipv6.as_deref(), "IPv6")?;
        Ok(Subnet { ipv4: ipv4.map(|net| net.trunc()), ipv6: ipv6.map(|net| net.trunc()) })
    }
}

pub(super) fn parse_prefix<N: std::str::FromStr>(
    text: Option<&str>,
    family: &'static str,
) -> Result<Option<N>, InvalidSubnet> {
    text.map(|text| text.parse().map_err(|_| InvalidSubnet(text.to_owned(), family))).transpose()
}

impl AddressPool {
    /// When the pool was made, in seconds since 1970; the end of time while nobody knows. Of pools that overlap, the
    /// oldest has the addresses.
    pub fn created_at(&self) -> i64 {
        self.metadata.creation_timestamp.as_ref().map_or(i64::MAX, |time| time.0.as_second())
    }
}

impl AddressPoolSpec {
    /// All subnets as numbers, in order.
    ///
    /// # Errors
    /// The first prefix that is not CIDR of its family.
    pub fn parse_subnets(&self) -> Result<Vec<Subnet>, InvalidSubnet> {
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
