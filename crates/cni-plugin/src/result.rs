//! The result of ADD, in every supported version of the specification.
//!
//! One model serves all versions: 1.0.0 removed only `ips[].version`, and 1.1.0 added keys that are left out for older
//! versions, as libcni's conversion does. Unknown keys are dropped.

use std::net::IpAddr;

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::failure::{Failure, code};
use crate::version::{SpecVersion, to_json};

/// A CNI result, without its version.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct CniResult {
    /// The interfaces made, inside and outside the container.
    #[serde(deserialize_with = "null_is_default")]
    pub interfaces: Vec<Interface>,
    /// The addresses assigned.
    #[serde(deserialize_with = "null_is_default")]
    pub ips: Vec<IpConfig>,
    /// The routes made inside the container.
    #[serde(deserialize_with = "null_is_default")]
    pub routes: Vec<Route>,
    /// Name service settings, for the runtime to apply.
    #[serde(deserialize_with = "null_is_default")]
    pub dns: Dns,
}

/// A link.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Interface {
    /// Name of the link.
    pub name: String,
    /// Hardware address; empty when it has none.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub mac: String,
    /// Path of the network namespace it is in; empty on the host.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub sandbox: String,
    /// Keys since 1.1.0.
    #[serde(flatten)]
    pub more: InterfaceMore,
}

/// Keys of an interface since 1.1.0.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, rename_all = "camelCase")]
pub struct InterfaceMore {
    /// MTU in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<i64>,
    /// Path of the socket of the interface (vhost-user).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub socket_path: Option<String>,
    /// PCI address of the device behind it.
    #[serde(rename = "pciID", skip_serializing_if = "Option::is_none")]
    pub pci_id: Option<String>,
}

/// An address.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct IpConfig {
    /// Address with its prefix length; host bits are kept.
    pub address: IpNet,
    /// Position in [`CniResult::interfaces`] of the link that has it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub interface: Option<usize>,
    /// Default gateway of that subnet.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gateway: Option<IpAddr>,
}

/// A route.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Route {
    /// Destination.
    pub dst: IpNet,
    /// Next hop; the gateway of the address by default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub gw: Option<IpAddr>,
    /// Keys since 1.1.0.
    #[serde(flatten)]
    pub more: RouteMore,
}

/// Keys of a route since 1.1.0.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RouteMore {
    /// Path MTU, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mtu: Option<i64>,
    /// TCP maximum segment size to advertise, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub advmss: Option<i64>,
    /// Metric of the route: the lowest is preferred.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub priority: Option<i64>,
    /// Routing table; the main table by default.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub table: Option<i64>,
    /// Scope of the route (`rtm_scope`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub scope: Option<i64>,
}

/// Name service settings.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Dns {
    /// Servers in order of preference.
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    pub nameservers: Vec<String>,
    /// Local domain.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub domain: String,
    /// Search list.
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    pub search: Vec<String>,
    /// Options of resolv.conf(5).
    #[serde(deserialize_with = "null_is_default", skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
}

/// Go writes an empty list as `null`.
fn null_is_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: serde::Deserializer<'de>,
    T: Default + Deserialize<'de>,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

impl CniResult {
    /// Parses the node program's answer. `null` and no bytes are an empty result: Coil's node program sends that when
    /// another plugin made the interface.
    ///
    /// # Errors
    /// Code 6 if it is not a result, or an address names an interface that is not in it.
    pub fn of_answer(bytes: &[u8]) -> Result<Self, Failure> {
        let bytes = bytes.trim_ascii();
        if bytes.is_empty() || bytes == b"null" {
            return Ok(Self::default());
        }
        // Through a map: a derived struct would also accept a JSON array.
        let result: Self = serde_json::from_slice::<serde_json::Map<_, _>>(bytes)
            .and_then(|object| serde_json::from_value(object.into()))
            .map_err(|error| unusable(error.to_string()))?;
        match result.stray_address() {
            Some(problem) => Err(unusable(problem)),
            None => Ok(result),
        }
    }

    /// The error if an address names an interface that the result does not list.
    pub fn stray_address(&self) -> Option<String> {
        let stray = self.ips.iter().find(|ip| ip.interface.is_some_and(|at| at >= self.interfaces.len()))?;
        Some(format!("{} is on an interface that is not listed", stray.address))
    }

    /// Whether it has neither interfaces nor addresses.
    pub fn is_empty(&self) -> bool {
        self.interfaces.is_empty() && self.ips.is_empty()
    }

    /// The result as `version` writes it.
    pub fn to_json(&self, version: SpecVersion) -> String {
        let ips = self.ips.iter().map(|ip| VersionedIp { version: family(version, ip), ip }).collect();
        let (mut interfaces, mut routes) = (self.interfaces.clone(), self.routes.clone());
        if version < SpecVersion::V1_1_0 {
            interfaces.iter_mut().for_each(|interface| interface.more = InterfaceMore::default());
            routes.iter_mut().for_each(|route| route.more = RouteMore::default());
        }
        to_json(&Versioned { cni_version: version.as_str(), interfaces, ips, routes, dns: &self.dns })
    }
}

/// The result of ADD: the node program's, or, when that is empty because another plugin made the interface, that
/// plugin's, unchanged.
pub fn of_add(previous: Option<&CniResult>, answer: CniResult) -> CniResult {
    match previous {
        Some(previous) if answer.is_empty() => previous.clone(),
        _ => answer,
    }
}

fn unusable(why: String) -> Failure {
    Failure::new(
        code::DECODING,
        format!("the node program's answer is not a CNI result: {why}"),
        "the plugin and the node program may be of different releases; install both from one",
    )
}

/// `ips[].version` was required until 1.0.0 removed it.
fn family(version: SpecVersion, ip: &IpConfig) -> Option<&'static str> {
    match (version, ip.address) {
        (SpecVersion::V1_0_0 | SpecVersion::V1_1_0, _) => None,
        (SpecVersion::V0_3_1 | SpecVersion::V0_4_0, IpNet::V4(_)) => Some("4"),
        (SpecVersion::V0_3_1 | SpecVersion::V0_4_0, IpNet::V6(_)) => Some("6"),
    }
}

#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Versioned<'a> {
    cni_version: &'static str,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    interfaces: Vec<Interface>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    ips: Vec<VersionedIp<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    routes: Vec<Route>,
    dns: &'a Dns,
}

struct VersionedIp<'a> {
    version: Option<&'static str>,
    ip: &'a IpConfig,
}

impl Serialize for VersionedIp<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        #[derive(Serialize)]
        struct Fields<'a> {
            #[serde(skip_serializing_if = "Option::is_none")]
            version: Option<&'static str>,
            address: &'a IpNet,
            #[serde(skip_serializing_if = "Option::is_none")]
            interface: Option<usize>,
            #[serde(skip_serializing_if = "Option::is_none")]
            gateway: Option<IpAddr>,
        }
        let IpConfig { address, interface, gateway } = self.ip;
        Fields { version: self.version, address, interface: *interface, gateway: *gateway }
            .serialize(serializer)
    }
}

#[cfg(test)]
mod tests;
