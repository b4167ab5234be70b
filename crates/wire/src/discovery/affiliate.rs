//! Affiliates: descriptions that nodes publish of themselves.

use std::net::{IpAddr, Ipv6Addr};

use ipnet::IpNet;
use prost::Message as _;

use super::{address_bytes, parse_address, plaintext};

/// Description of a node, which it publishes itself through discovery.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Affiliate {
    /// The node's identity in discovery.
    pub node_id: String,
    /// Addresses of the node.
    pub addresses: Vec<IpAddr>,
    /// Host name of the node.
    pub hostname: String,
    /// Name of the node in Kubernetes.
    pub nodename: String,
    /// Kind of the machine, as `controlplane` or `worker`.
    pub machine_type: String,
    /// Name and version of its operating system.
    pub operating_system: String,
    /// The node's part of the mesh; `None` if it takes no part.
    pub kubespan: Option<KubeSpan>,
    /// Port of its API server, if it runs one.
    pub api_server_port: Option<u16>,
}

/// A node's part of the mesh.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KubeSpan {
    /// WireGuard public key of the node in base64, as it was written.
    pub public_key: String,
    /// Address of the node on the mesh.
    pub address: Option<IpAddr>,
    /// Prefixes that it routes.
    pub additional_addresses: Vec<IpNet>,
    /// Prefixes that are not to be sent to it.
    pub exclude_advertised_addresses: Vec<IpNet>,
    /// Whether its WireGuard has no preshared key with peers that say so, too. KubeSpan's is the secret of the
    /// cluster.
    pub without_preshared_key: bool,
    /// The public key that it is about to use instead, in base64, as it was written; empty for none.
    pub next_public_key: String,
}

/// Part of an affiliate that cannot be read, and is left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, thiserror::Error)]
pub enum Leftover {
    /// An address is neither 4 nor 16 bytes.
    #[error("an address is neither 4 nor 16 bytes long")]
    Address,
    /// The port of the API server is none.
    #[error("the port of the API server is not one of 1 to 65535")]
    ApiServerPort,
    /// A prefix that is not to be sent to the node cannot be read.
    #[error("an excluded network is no prefix")]
    ExcludedNetwork,
    /// The address on the mesh is neither 4 nor 16 bytes.
    #[error("the address on the mesh is neither 4 nor 16 bytes long")]
    MeshAddress,
    /// A prefix that the node routes cannot be read.
    #[error("an advertised network is no prefix")]
    Network,
}

/// A plaintext is no affiliate.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the decrypted data is no affiliate: {0}")]
pub struct AffiliateError(#[from] prost::DecodeError);

impl Affiliate {
    /// Reads a plaintext. What cannot be read alone is left out and named.
    ///
    /// # Errors
    /// It is no protobuf message of this type.
    pub fn parse(plaintext: &[u8]) -> Result<(Self, Vec<Leftover>), AffiliateError> {
        let message = plaintext::Affiliate::decode(plaintext)?;
        let mut left = Vec::new();
        let addresses = readable(&message.addresses, parse_address, Leftover::Address, &mut left);
        let api_server_port = message.control_plane.and_then(|control_plane| {
            let port = u16::try_from(control_plane.api_server_port).ok().filter(|port| *port != 0);
            left.extend(port.is_none().then_some(Leftover::ApiServerPort));
            port
        });
        let affiliate = Self {
            node_id: message.node_id,
            addresses,
            hostname: message.hostname,
            nodename: message.nodename,
            machine_type: message.machine_type,
            operating_system: message.operating_system,
            kubespan: message.kubespan.map(|kubespan| KubeSpan::parse(kubespan, &mut left)),
            api_server_port,
        };
        left.sort_unstable();
        left.dedup();
        Ok((affiliate, left))
    }

    /// The plaintext.
    pub fn encode(&self) -> Vec<u8> {
        let message = plaintext::Affiliate {
            node_id: self.node_id.clone(),
            addresses: self.addresses.iter().copied().map(address_bytes).collect(),
            hostname: self.hostname.clone(),
            nodename: self.nodename.clone(),
            machine_type: self.machine_type.clone(),
            operating_system: self.operating_system.clone(),
            kubespan: self.kubespan.as_ref().map(KubeSpan::message),
            control_plane: self
                .api_server_port
                .map(|port| plaintext::ControlPlane { api_server_port: port.into() }),
        };
        message.encode_to_vec()
    }
}

impl KubeSpan {
    fn parse(message: plaintext::KubeSpan, left: &mut Vec<Leftover>) -> Self {
        let address = parse_address(&message.address);
        left.extend((address.is_none() && !message.address.is_empty()).then_some(Leftover::MeshAddress));
        Self {
            public_key: message.public_key,
            address,
            additional_addresses: readable(
                &message.additional_addresses,
                parse_prefix,
                Leftover::Network,
                left,
            ),
            exclude_advertised_addresses: readable(
                &message.exclude_advertised_addresses,
                parse_prefix,
                Leftover::ExcludedNetwork,
                left,
            ),
            without_preshared_key: message.without_preshared_key,
            next_public_key: message.next_public_key,
        }
    }

    fn message(&self) -> plaintext::KubeSpan {
        plaintext::KubeSpan {
            public_key: self.public_key.clone(),
            address: self.address.map(address_bytes).unwrap_or_default(),
            additional_addresses: self.additional_addresses.iter().map(encode_prefix).collect(),
            exclude_advertised_addresses: self
                .exclude_advertised_addresses
                .iter()
                .map(encode_prefix)
                .collect(),
            without_preshared_key: self.without_preshared_key,
            next_public_key: self.next_public_key.clone(),
        }
    }
}

fn readable<T>(
    items: &[Vec<u8>],
    parse: impl Fn(&[u8]) -> Option<T>,
    leftover: Leftover,
    left: &mut Vec<Leftover>,
) -> Vec<T> {
    let parsed: Vec<T> = items.iter().filter_map(|item| parse(item)).collect();
    left.extend((parsed.len() < items.len()).then_some(leftover));
    parsed
}

/// Bits after the prefix length do not count.
fn parse_prefix(message: &[u8]) -> Option<IpNet> {
    let message = plaintext::IpPrefix::decode(message).ok()?;
    let bits = u8::try_from(message.bits).ok()?;
    let prefix = match <[u8; 16]>::try_from(message.ip.as_slice()).map(Ipv6Addr::from) {
        // An IPv4 prefix in its IPv6 form counts the 96 bits before the address, too.
        Ok(ip) => match (ip.to_ipv4_mapped(), bits.checked_sub(96)) {
            (Some(ip), Some(bits)) => IpNet::new(ip.into(), bits),
            _ => IpNet::new(ip.into(), bits),
        },
        Err(_) => IpNet::new(parse_address(&message.ip)?, bits),
    };
    prefix.ok().map(|prefix| prefix.trunc())
}

fn encode_prefix(prefix: &IpNet) -> Vec<u8> {
    let ip = match prefix.addr() {
        IpAddr::V4(ip) => ip.octets().to_vec(),
        IpAddr::V6(ip) => ip.octets().to_vec(),
    };
    plaintext::IpPrefix { ip, bits: prefix.prefix_len().into() }.encode_to_vec()
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn prefixes() -> impl Strategy<Value = Vec<IpNet>> {
        let bits = any::<IpAddr>().prop_map(|ip| ip.to_canonical());
        let one = (bits, any::<u8>()).prop_map(|(ip, bits)| {
            IpNet::new(ip, bits % (if ip.is_ipv4() { 33 } else { 129 })).unwrap().trunc()
        });
        // A prefix of the mapped addresses themselves is written as IPv6 and means IPv6.
        vec(one.prop_filter("mapped", |net| net.addr().to_canonical() == net.addr()), 0..8)
    }

    fn addresses() -> impl Strategy<Value = Vec<IpAddr>> {
        vec(any::<IpAddr>().prop_map(|ip| ip.to_canonical()), 0..8)
    }

    prop_compose! {
        fn affiliates()(
            names in vec(".{0,12}", 5),
            addresses in addresses(),
            kubespan in proptest::option::of((
                "[a-zA-Z0-9+/=]{0,44}", addresses(), prefixes(), prefixes(), any::<bool>(), "[a-zA-Z0-9+/=]{0,44}",
            )),
            api_server_port in proptest::option::of(1_u16..),
        ) -> Affiliate {
            let kubespan = kubespan.map(|(public_key, mesh, routed, excluded, without_preshared_key, next)| KubeSpan {
                public_key,
                address: mesh.first().copied(),
                additional_addresses: routed,
                exclude_advertised_addresses: excluded,
                without_preshared_key,
                next_public_key: next,
            });
            let [node_id, hostname, nodename, machine_type, operating_system] = names.try_into().unwrap();
            Affiliate {
                node_id, addresses, hostname, nodename, machine_type, operating_system, kubespan, api_server_port,
            }
        }
    }

    proptest! {
        #[test]
        fn what_is_written_is_read_back(affiliate in affiliates()) {
            prop_assert_eq!(Affiliate::parse(&affiliate.encode()), Ok((affiliate, Vec::new())));
        }

        #[test]
        fn hostile_bytes_never_panic(bytes in vec(any::<u8>(), 0..300), affiliate in affiliates(), at: prop::sample::Index) {
            let _ = Affiliate::parse(&bytes);
            let mut changed = affiliate.encode();
            if !changed.is_empty() {
                let at = at.index(changed.len());
                changed[at] ^= 0x55;
                let _ = Affiliate::parse(&changed);
            }
        }
    }

    #[test]
    fn the_bytes_are_those_of_the_published_protocol() {
        let affiliate = Affiliate {
            node_id: "n1".to_owned(),
            addresses: vec!["10.0.0.1".parse().unwrap(), "2001:db8::1".parse().unwrap()],
            hostname: "host".to_owned(),
            nodename: "node".to_owned(),
            machine_type: "worker".to_owned(),
            operating_system: "os".to_owned(),
            kubespan: Some(KubeSpan {
                public_key: "key".to_owned(),
                address: Some("fd00::2".parse().unwrap()),
                additional_addresses: vec!["10.244.1.0/24".parse().unwrap()],
                exclude_advertised_addresses: vec!["192.168.0.0/16".parse().unwrap()],
                without_preshared_key: false,
                ..KubeSpan::default()
            }),
            api_server_port: Some(6443),
        };
        assert_eq!(hex(&affiliate.encode()), PUBLISHED);
    }

    /// `MarshalVT` of the published Go module `discovery-api` v0.1.8 on the same affiliate.
    const PUBLISHED: &str = "\
        0a026e3112040a000001121020010db80000000000000000000000011a04686f737422046e6f64652a06776f726b6572\
        32026f733a2b0a036b65791210fd0000000000000000000000000000021a080a040af40100101822080a04c0a8000010\
        10420308ab32";

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    #[test]
    fn both_forms_of_an_ipv4_address_are_read_and_one_is_written() {
        let mapped = [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 192, 0, 2, 1];
        let ip: IpAddr = "192.0.2.1".parse().unwrap();
        assert_eq!((parse_address(&mapped), parse_address(&[192, 0, 2, 1])), (Some(ip), Some(ip)));
        assert_eq!(address_bytes(Ipv6Addr::from(mapped).into()), [192, 0, 2, 1]);
        let prefix =
            |ip: &[u8], bits| parse_prefix(&plaintext::IpPrefix { ip: ip.to_vec(), bits }.encode_to_vec());
        let net = "192.0.2.0/24".parse().ok();
        assert_eq!((prefix(&mapped, 120), prefix(&[192, 0, 2, 1], 24)), (net, net));
        assert_eq!(
            (prefix(&[192, 0, 2, 1], 33), prefix(&[1; 5], 3), prefix(&mapped, 129)),
            (None, None, None)
        );
    }

    #[test]
    fn one_part_that_cannot_be_read_hides_no_other() {
        let good = encode_prefix(&"10.0.0.0/8".parse().unwrap());
        let kubespan = plaintext::KubeSpan {
            additional_addresses: vec![vec![0xff], good.clone()],
            // As version 0.1.7 wrote it.
            exclude_advertised_addresses: vec![b"192.168.0.0/16".to_vec(), good],
            address: vec![1, 2, 3],
            ..Default::default()
        };
        let message = plaintext::Affiliate {
            addresses: vec![vec![10, 0, 0, 1], vec![], vec![7; 17]],
            kubespan: Some(kubespan),
            control_plane: Some(plaintext::ControlPlane { api_server_port: 70_000 }),
            ..Default::default()
        };
        let (affiliate, left) = Affiliate::parse(&message.encode_to_vec()).unwrap();
        let all = [
            Leftover::Address,
            Leftover::ApiServerPort,
            Leftover::ExcludedNetwork,
            Leftover::MeshAddress,
            Leftover::Network,
        ];
        assert_eq!(left, all);
        let kubespan = affiliate.kubespan.unwrap();
        assert_eq!(affiliate.addresses.len(), 1);
        assert_eq!(kubespan.additional_addresses, ["10.0.0.0/8".parse().unwrap()]);
        assert_eq!(kubespan.exclude_advertised_addresses, ["10.0.0.0/8".parse().unwrap()]);
    }
}
