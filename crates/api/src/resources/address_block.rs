//! `AddressBlock` of `coil.cybozu.com/v2`: a part of a pool, held by one node.

use fairlead_address::DualStackNets;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use super::address_pool::{InvalidSubnet, parse_prefixes};
use super::rules::{CIDR_LENGTH, cidr_of_family};
use crate::names::{LABEL_NODE, LABEL_POOL, LABEL_RESERVED};

/// Fields of an AddressBlock. They sit at the top level of the object: there is no `spec`.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[kube(
    group = "coil.cybozu.com",
    version = "v2",
    kind = "AddressBlock",
    plural = "addressblocks",
    no_spec,
    derive = "PartialEq",
    doc = "A block of addresses carved out of an AddressPool for one node. The controller creates it; the node named by the label coil.cybozu.com/node releases it.",
    validation = Rule::new("has(self.ipv4) || has(self.ipv6)").message("a block needs ipv4, ipv6 or both"),
    validation = Rule::new("self.index == oldSelf.index && has(self.ipv4) == has(oldSelf.ipv4) && has(self.ipv6) == has(oldSelf.ipv6) && (!has(self.ipv4) || self.ipv4 == oldSelf.ipv4) && (!has(self.ipv6) || self.ipv6 == oldSelf.ipv6)")
        .message("index, ipv4 and ipv6 of a block cannot be changed: pods use its addresses"),
    printcolumn(name = "Node", type_ = "string", json_path = r".metadata.labels['coil\.cybozu\.com/node']",
        description = "Node that holds the block"),
    printcolumn(name = "Pool", type_ = "string", json_path = r".metadata.labels['coil\.cybozu\.com/pool']",
        description = "Pool the block is from"),
    printcolumn(name = "IPv4", type_ = "string", json_path = ".ipv4"),
    printcolumn(name = "IPv6", type_ = "string", json_path = ".ipv6"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct AddressBlockFields {
    /// Number of the block in its pool, counted from 0 through all subnets.
    #[schemars(with = "i32", range(min = 0))]
    pub index: u32,
    /// IPv4 prefix of the block in CIDR notation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = CIDR_LENGTH))]
    #[x_kube(validation = cidr_of_family(4))]
    pub ipv4: Option<String>,
    /// IPv6 prefix of the block in CIDR notation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = CIDR_LENGTH))]
    #[x_kube(validation = cidr_of_family(6))]
    pub ipv6: Option<String>,
}

impl AddressBlockFields {
    /// The prefixes, without host bits.
    ///
    /// # Errors
    /// The first prefix that is not CIDR of its family.
    pub fn parse(&self) -> Result<DualStackNets, InvalidSubnet> {
        parse_prefixes(self.ipv4.as_deref(), self.ipv6.as_deref())
    }
}

impl AddressBlock {
    /// The prefixes, without host bits.
    ///
    /// # Errors
    /// The first prefix that is not CIDR of its family.
    pub fn parse(&self) -> Result<DualStackNets, InvalidSubnet> {
        self.spec.parse()
    }

    /// The node that holds the block, by its label.
    pub fn node(&self) -> Option<&str> {
        self.label(LABEL_NODE)
    }

    /// The pool the block is from, by its label.
    pub fn pool(&self) -> Option<&str> {
        self.label(LABEL_POOL)
    }

    /// Whether its addresses must never be allocated to pods.
    pub fn is_reserved(&self) -> bool {
        self.label(LABEL_RESERVED) == Some("true")
    }

    fn label(&self, key: &str) -> Option<&str> {
        self.metadata.labels.as_ref()?.get(key).map(String::as_str)
    }
}
