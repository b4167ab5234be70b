//! `Peer` of `kilo.squat.ai/v1alpha1`: a WireGuard peer outside the cluster.

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use super::rules::{CIDR_LENGTH, cidrs, explained, wireguard_key};
use crate::wireguard::{InvalidKey, PublicKey};

/// A WireGuard peer that is not a node.
#[derive(CustomResource, KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[kube(
    group = "kilo.squat.ai",
    version = "v1alpha1",
    kind = "Peer",
    root = "KiloPeer",
    plural = "peers",
    derive = "PartialEq",
    doc = "A WireGuard peer outside the cluster: a laptop, a router, a gateway of another cluster.",
    printcolumn(name = "Public Key", type_ = "string", json_path = ".spec.publicKey"),
    printcolumn(name = "AllowedIP", type_ = "string", json_path = ".spec.allowedIPs[0]"),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp")
)]
#[serde(rename_all = "camelCase")]
pub struct KiloPeerSpec {
    /// Prefixes in CIDR notation: allowed sources of packets from the peer, and destinations routed to it.
    #[serde(rename = "allowedIPs")]
    #[schemars(length(max = 1000), inner(length(max = CIDR_LENGTH)))]
    #[x_kube(validation = cidrs())]
    pub allowed_ips: Vec<String>,
    /// Where the peer listens. Omit it for a peer that always initiates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<PeerEndpoint>,
    /// Seconds between keepalives to the peer. 0 sends none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<i32>", range(min = 0, max = 65535))]
    pub persistent_keepalive: Option<u16>,
    /// Extra symmetric key mixed into handshakes, as `wg genpsk` prints it.
    #[serde(default, rename = "presharedKey", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 44))]
    #[x_kube(validation = wireguard_key())]
    pub preshared_key: Option<String>,
    /// WireGuard public key of the peer, as `wg pubkey` prints it.
    #[schemars(length(max = 44))]
    #[x_kube(validation = wireguard_key())]
    pub public_key: String,
}

/// Where a peer listens.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerEndpoint {
    /// Its host.
    #[serde(rename = "dnsOrIP")]
    pub dns_or_ip: DnsOrIp,
    /// Its UDP port.
    #[schemars(with = "i32", range(min = 1, max = 65535))]
    pub port: u16,
}

/// A host by name or by address.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[x_kube(validation = Rule::new("has(self.dns) != has(self.ip)")
    .message("give either dns or ip, not both and not neither"))]
pub struct DnsOrIp {
    /// Name of the host; it is resolved again when the address stops responding.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 253))]
    #[x_kube(validation = explained(
        "!isIP(self) && self.matches('^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?([.][a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?)*$')",
        "\"'\" + self + \"' is not a DNS name (an address belongs in ip)\"",
    ))]
    pub dns: Option<String>,
    /// IPv4 or IPv6 address of the host.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 45))]
    #[x_kube(validation = explained("isIP(self)", "\"'\" + self + \"' is not an IP address (a name belongs in dns)\""))]
    pub ip: Option<String>,
}

impl KiloPeerSpec {
    /// The identity of the peer.
    ///
    /// # Errors
    /// The text is not a WireGuard key.
    pub fn parse_public_key(&self) -> Result<PublicKey, InvalidKey> {
        self.public_key.parse()
    }
}
