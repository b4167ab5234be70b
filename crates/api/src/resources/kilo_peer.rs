//! `Peer` of `kilo.squat.ai/v1alpha1`: a WireGuard peer outside the cluster.

use std::net::{IpAddr, SocketAddr};

use fairlead_address::{Endpoint, InvalidEndpoint};
use ipnet::IpNet;
use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use super::rules::{CIDR_LENGTH, cidrs, explained, parse_prefixes, wireguard_key};
use fairlead_keys::{InvalidKey, PresharedKey, PublicKey};

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
#[x_kube(validation = Rule::new("!(has(self.presharedKey) && has(self.presharedKeyRef))")
    .message("give presharedKey or presharedKeyRef, not both"))]
pub struct KiloPeerSpec {
    /// Prefixes in CIDR notation: allowed sources of packets from the peer, and destinations routed to it. Left out is what belongs to
    /// pods, nodes, Services or the API server, and, without a grant of the WireKubeMesh, what is wider than /8.
    #[serde(rename = "allowedIPs")]
    #[schemars(length(max = 1000), inner(length(max = CIDR_LENGTH)))]
    #[x_kube(validation = cidrs())]
    pub allowed_ips: Vec<String>,
    /// Endpoint at which the peer listens. Omit it for a peer that always initiates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub endpoint: Option<PeerEndpoint>,
    /// Extension of Fairlead: names of the nodes that have a tunnel with the peer, at most 16. All others reach it through the one with which
    /// it completed a handshake last, at first the first. Without it every node has a tunnel with the peer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 16), inner(length(min = 1, max = 253)))]
    pub entry_nodes: Option<Vec<String>>,
    /// Seconds between keepalives to the peer. 0 sends none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<i32>", range(min = 0, max = 65535))]
    pub persistent_keepalive: Option<u16>,
    /// Extra symmetric key mixed into handshakes, as `wg genpsk` prints it.
    #[serde(default, rename = "presharedKey", skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 44))]
    #[x_kube(validation = wireguard_key())]
    pub preshared_key: Option<String>,
    /// Extension of Fairlead: where the preshared key is, in place of presharedKey, which everyone sees who may read Peers. While no key is there,
    /// the peer has no tunnel.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub preshared_key_ref: Option<PresharedKeyRef>,
    /// WireGuard public key of the peer, as `wg pubkey` prints it.
    #[schemars(length(max = 44))]
    #[x_kube(validation = wireguard_key())]
    pub public_key: String,
}

/// A preshared key in the Secret kube-system/fairlead-peer-preshared-keys, the only one that nodes may read for this.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct PresharedKeyRef {
    /// Key in the data of the Secret, under which the preshared key is as `wg genpsk` prints it.
    #[schemars(length(min = 1, max = 253))]
    #[x_kube(validation = explained(
        "self.matches('^[-._a-zA-Z0-9]+$')",
        "\"'\" + self + \"' is no key of a Secret\"",
    ))]
    pub key: String,
}

/// Endpoint at which a peer listens.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerEndpoint {
    /// Host, by name or by address.
    #[serde(rename = "dnsOrIP")]
    pub dns_or_ip: DnsOrIp,
    /// UDP port.
    #[schemars(with = "i32", range(min = 1, max = 65535))]
    pub port: u16,
}

/// A host by name or by address.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq, Eq)]
#[x_kube(validation = Rule::new("has(self.dns) || has(self.ip)")
    .message("give ip or dns; of both ip counts"))]
pub struct DnsOrIp {
    /// Name of the host; it is resolved again every 30 s.
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

    /// The preshared key in the Peer itself; `None` if there is none.
    ///
    /// # Errors
    /// The text is not a WireGuard key.
    pub fn parse_preshared_key(&self) -> Result<Option<PresharedKey>, InvalidKey> {
        let text = self.preshared_key.as_deref().filter(|text| !text.is_empty());
        text.map(str::parse).transpose()
    }

    /// The allowed IPs that are prefixes, with host bits cleared, and the texts that are not.
    pub fn parse_allowed_ips(&self) -> (Vec<IpNet>, Vec<&str>) {
        parse_prefixes(&self.allowed_ips)
    }

    /// Endpoint at which the peer listens; `None` if it always initiates. Objects that Kilo has left may have both an
    /// address and a name: then the address counts, as Kilo documents it.
    ///
    /// # Errors
    /// There is no host, or it is neither an address nor a name, or the port is zero.
    pub fn parse_endpoint(&self) -> Result<Option<Endpoint>, InvalidEndpoint> {
        let Some(PeerEndpoint { dns_or_ip: DnsOrIp { dns, ip }, port }) = &self.endpoint else {
            return Ok(None);
        };
        let given = |text: &Option<String>| text.clone().filter(|text| !text.is_empty());
        let ip = given(ip);
        let dns = given(dns);
        let text = |host: &str| format!("{host}:{port}");
        match (ip, dns) {
            (Some(ip), _) => {
                let address: IpAddr = ip.parse().map_err(|_| InvalidEndpoint(text(&ip)))?;
                SocketAddr::new(address, *port).to_string().parse().map(Some)
            }
            (None, dns) => text(&dns.unwrap_or_default()).parse().map(Some),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn endpoint(dns: Option<&str>, ip: Option<&str>, port: u16) -> Result<Option<String>, InvalidEndpoint> {
        let text = |text: &str| text.to_owned();
        let dns_or_ip = DnsOrIp { dns: dns.map(text), ip: ip.map(text) };
        let spec =
            KiloPeerSpec { endpoint: Some(PeerEndpoint { dns_or_ip, port }), ..KiloPeerSpec::default() };
        Ok(spec.parse_endpoint()?.map(|endpoint| endpoint.to_string()))
    }

    #[test]
    fn an_endpoint_is_an_address_or_a_name() {
        assert_eq!(endpoint(None, Some("192.0.2.1"), 7), Ok(Some("192.0.2.1:7".to_owned())));
        assert_eq!(endpoint(None, Some("2001:db8::1"), 7), Ok(Some("[2001:db8::1]:7".to_owned())));
        assert_eq!(endpoint(Some("a.example"), None, 7), Ok(Some("a.example:7".to_owned())));
        assert_eq!(endpoint(Some("a.example"), Some("192.0.2.1"), 7), Ok(Some("192.0.2.1:7".to_owned())));
        assert_eq!(KiloPeerSpec::default().parse_endpoint(), Ok(None));
        for (dns, ip, port) in [
            (None, None, 7),
            (None, Some("a.example"), 7),
            (Some("a.example"), None, 0),
            (None, Some("192.0.2.1"), 0),
            (Some("a b"), None, 7),
        ] {
            endpoint(dns, ip, port).unwrap_err();
        }
    }

    #[test]
    fn an_unreadable_preshared_key_is_an_error_and_never_none() {
        let parse = |text: Option<&str>| {
            let preshared_key = text.map(str::to_owned);
            KiloPeerSpec { preshared_key, ..KiloPeerSpec::default() }.parse_preshared_key()
        };
        assert_eq!(parse(None), Ok(None));
        assert_eq!(parse(Some("nonsense")), Err(InvalidKey));
        assert_eq!(parse(Some(&PresharedKey([5; 32]).to_base64())), Ok(Some(PresharedKey([5; 32]))));
    }
}
