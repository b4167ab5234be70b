//! Clients as node programs send them, and why one is refused.

use std::net::IpAddr;

use fairlead_address::{DualStackAddrs, is_reachable};
use fairlead_api::names::{is_dns_label, is_object_name};
use fairlead_wire::egress as wire;

/// Longest UID; those of the API server have 36 characters.
const MAX_UID: usize = 128;

/// A pod that uses the gateway.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Client {
    /// UID of the pod.
    pub uid: String,
    /// Namespace of the pod.
    pub namespace: String,
    /// Name of the pod.
    pub name: String,
    /// Addresses of the pod: at most one of each family.
    pub addresses: DualStackAddrs,
}

/// Reason why a client is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Reason {
    /// Another pod has one of its addresses.
    AddressInUse,
    /// An address of the client is in no AddressBlock and no `spec.podCIDRs` of the Node.
    AddressNotOfNode,
    /// The client has no address, two of one family, or one that no pod can have.
    InvalidAddress,
    /// The UID, namespace or name is not a valid one.
    InvalidClient,
    /// The kernel refuses its tunnel.
    LinkRefused,
    /// `spec.allowedNamespaces` of the Egress does not have its namespace.
    NamespaceNotAllowed,
    /// The Node or the gateway has as many clients as it can have.
    TooManyClients,
}

impl Reason {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::AddressInUse,
        Self::AddressNotOfNode,
        Self::InvalidAddress,
        Self::InvalidClient,
        Self::LinkRefused,
        Self::NamespaceNotAllowed,
        Self::TooManyClients,
    ];

    /// Name of the reason on the wire.
    pub fn name(self) -> &'static str {
        match self {
            Self::AddressInUse => "AddressInUse",
            Self::AddressNotOfNode => "AddressNotOfNode",
            Self::InvalidAddress => "InvalidAddress",
            Self::InvalidClient => "InvalidClient",
            Self::LinkRefused => "LinkRefused",
            Self::NamespaceNotAllowed => "NamespaceNotAllowed",
            Self::TooManyClients => "TooManyClients",
        }
    }
}

/// A client that is refused.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Refusal {
    /// UID of the pod.
    pub uid: String,
    /// Reason of the refusal, for programs.
    pub reason: Reason,
    /// Explanation for the operator, with what can be done about it.
    pub message: String,
}

impl Refusal {
    pub(crate) fn new(uid: &str, reason: Reason, message: impl Into<String>) -> Self {
        Self { uid: uid.to_owned(), reason, message: message.into() }
    }

    /// The refusal as it is sent.
    pub fn to_wire(&self) -> wire::Refusal {
        let Self { uid, reason, message } = self.clone();
        wire::Refusal { uid, reason: reason.name().to_owned(), message }
    }
}

impl TryFrom<wire::Client> for Client {
    type Error = Refusal;

    fn try_from(client: wire::Client) -> Result<Self, Refusal> {
        let wire::Client { uid, namespace, name, addresses } = client;
        if uid.is_empty() || uid.len() > MAX_UID || !is_dns_label(&namespace) || !is_object_name(&name) {
            let shown: String = uid.chars().take(MAX_UID).collect();
            let message = "the node program sent no UID, namespace or name of a pod: this is an error of it";
            return Err(Refusal::new(&shown, Reason::InvalidClient, message));
        }
        match parse_addresses(&addresses) {
            Some(addresses) => Ok(Self { uid, namespace, name, addresses }),
            None => Err(Refusal::new(
                &uid,
                Reason::InvalidAddress,
                format!("pod {namespace}/{name} needs one unicast address of IPv4, IPv6 or each"),
            )),
        }
    }
}

fn parse_addresses(addresses: &[Vec<u8>]) -> Option<DualStackAddrs> {
    let mut found = DualStackAddrs { ipv4: None, ipv6: None };
    for bytes in addresses {
        let address = match (<[u8; 4]>::try_from(bytes.as_slice()), <[u8; 16]>::try_from(bytes.as_slice())) {
            (Ok(octets), _) => IpAddr::from(octets),
            (_, Ok(octets)) => IpAddr::from(octets),
            _ => return None,
        };
        // An IPv4 address in IPv6 form would be another key for the same client.
        if address.to_canonical() != address || !is_reachable(address) {
            return None;
        }
        let earlier = match address {
            IpAddr::V4(address) => found.ipv4.replace(address).map(IpAddr::V4),
            IpAddr::V6(address) => found.ipv6.replace(address).map(IpAddr::V6),
        };
        if earlier.is_some() {
            return None;
        }
    }
    (!found.is_empty()).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(uid: &str, addresses: &[&[u8]]) -> Result<Client, Reason> {
        let addresses = addresses.iter().map(|bytes| bytes.to_vec()).collect();
        let (namespace, name) = ("default".to_owned(), "a".to_owned());
        let client = wire::Client { uid: uid.to_owned(), namespace, name, addresses };
        Client::try_from(client).map_err(|refusal| refusal.reason)
    }

    #[test]
    fn a_client_has_at_most_one_address_of_each_family() {
        let v6 = "fd00::1".parse::<std::net::Ipv6Addr>().unwrap().octets();
        let both = parse("u", &[&[10, 0, 0, 1], &v6]).unwrap();
        assert_eq!(both.addresses.iter().count(), 2);
        let mapped = "::ffff:10.0.0.1".parse::<std::net::Ipv6Addr>().unwrap().octets();
        for bad in [
            &[&[10, 0, 0, 1][..], &[10, 0, 0, 2]][..],
            &[],
            &[&[10, 0, 0]],
            &[&mapped],
            &[&[127, 0, 0, 1]],
            &[&[224, 0, 0, 1]],
        ] {
            assert_eq!(parse("u", bad), Err(Reason::InvalidAddress), "{bad:?}");
        }
        assert_eq!(parse("", &[&[10, 0, 0, 1]]), Err(Reason::InvalidClient));
        assert_eq!(parse(&"u".repeat(129), &[&[10, 0, 0, 1]]), Err(Reason::InvalidClient));
    }
}
