//! Requests for a port mapping, and their results.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fairlead_address::is_reachable;

use crate::codec::pcp::Nonce;

/// Shortest mapping that is of use: a shorter one would have to be renewed all the time.
const MIN_LIFETIME: Duration = Duration::from_secs(10);
/// Longest time for which a gateway is believed.
const MAX_LIFETIME: Duration = Duration::from_secs(24 * 3600);

/// Gateway that is asked for a mapping, and the port that is to be mapped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// The default gateway. In IPv6 only PCP is spoken, and what it opens is the gateway's firewall.
    pub gateway: IpAddr,
    /// Name of the link to it.
    pub link: String,
    /// Index of the link.
    pub link_index: u32,
    /// The address of this host that packets are to be led to; the kernel's choice when `None`.
    pub source: Option<IpAddr>,
    /// The UDP port.
    pub port: u16,
    /// Makes the mapping this node's own, also after a restart (RFC 6887, section 11.2).
    pub nonce: Nonce,
    /// `SO_MARK` of everything that is sent; zero for none.
    pub mark: u32,
}

/// Protocol for port mappings.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Protocol {
    /// RFC 6886.
    NatPmp,
    /// RFC 6887.
    Pcp,
    /// WANIPConnection or WANPPPConnection.
    Upnp,
}

/// A port of a gateway that leads to this host.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping {
    /// Protocol by which it was granted.
    pub protocol: Protocol,
    /// External address and port.
    pub external: SocketAddr,
    /// Lifetime, unless it is renewed.
    pub lifetime: Duration,
}

/// Reason why there is no mapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The gateway speaks none of the protocols.
    NoAnswer,
    /// The gateway says that it has no address outside. Some say so of a private one, too.
    NoOuterAddress {
        /// Protocol of the refused request.
        protocol: Protocol,
    },
    /// The gateway refuses, and its address outside is private: it is behind another NAT.
    PrivateOuterAddress {
        /// Protocol of the refused request.
        protocol: Protocol,
        /// Address of the gateway outside.
        address: IpAddr,
    },
    /// The gateway refuses, or what it offers is of no use.
    Refused {
        /// Protocol of the refused request.
        protocol: Protocol,
        /// Reason of the refusal, for users.
        reason: String,
    },
}

impl Mapping {
    /// # Errors
    /// No packet can arrive there, or not for long.
    pub(crate) fn new(protocol: Protocol, external: SocketAddr, lifetime: u32) -> Result<Self, Failure> {
        let lifetime = Duration::from_secs(lifetime.into());
        if lifetime < MIN_LIFETIME {
            return Err(Failure::refused(protocol, format!("it grants the port for {lifetime:?} only")));
        }
        if !is_reachable(external.ip()) || external.port() == 0 {
            return Err(Failure::refused(
                protocol,
                format!("it maps to {external}, where no packet can arrive"),
            ));
        }
        Ok(Self { protocol, external, lifetime: lifetime.min(MAX_LIFETIME) })
    }
}

impl Failure {
    pub(crate) fn refused(protocol: Protocol, reason: impl Into<String>) -> Self {
        Self::Refused { protocol, reason: reason.into() }
    }

    /// The failure that is told of those of all protocols, in their order: what hinders all of them comes before a refusal of one.
    pub(crate) fn told(failures: [Self; 3]) -> Self {
        let rank = |failure: &Self| match failure {
            Self::PrivateOuterAddress { .. } => 0,
            Self::NoOuterAddress { .. } => 1,
            Self::Refused { .. } => 2,
            Self::NoAnswer => 3,
        };
        failures.into_iter().min_by_key(rank).unwrap_or(Self::NoAnswer)
    }

    /// Advice to the administrator, in the imperative.
    pub fn advice(&self) -> &'static str {
        match self {
            Self::NoAnswer | Self::Refused { .. } => "allow it on the router",
            Self::NoOuterAddress { .. } => {
                "connect the router; if it is behind another NAT, put one of the two into bridge mode or forward the port on both"
            }
            Self::PrivateOuterAddress { .. } => {
                "put one of the two routers into bridge mode, forward the port on both, or ask the provider for a public address"
            }
        }
    }
}

impl fmt::Display for Protocol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NatPmp => "NAT-PMP",
            Self::Pcp => "PCP",
            Self::Upnp => "UPnP",
        })
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoAnswer => f.write_str("the gateway speaks neither PCP nor NAT-PMP nor UPnP"),
            Self::NoOuterAddress { protocol } => {
                write!(f, "{protocol}: the gateway has no outer address, or a private one behind another NAT")
            }
            Self::PrivateOuterAddress { protocol, address } => write!(
                f,
                "{protocol}: the gateway's outer address {address} is private: it is behind another NAT"
            ),
            Self::Refused { protocol, reason } => write!(f, "{protocol}: {reason}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_of_no_use_is_refused() {
        let new = |external: &str, lifetime| Mapping::new(Protocol::Pcp, external.parse().unwrap(), lifetime);
        assert_eq!(new("198.51.100.1:4000", 7200).unwrap().lifetime, Duration::from_secs(7200));
        assert_eq!(new("100.64.0.1:4000", u32::MAX).unwrap().lifetime, MAX_LIFETIME);
        for (external, lifetime) in [
            ("198.51.100.1:4000", 0),
            ("198.51.100.1:0", 7200),
            ("0.0.0.0:4000", 7200),
            ("127.0.0.1:4000", 7200),
            ("224.0.0.1:4000", 7200),
            ("[fe80::1]:4000", 7200),
        ] {
            let refused = new(external, lifetime).unwrap_err();
            assert!(matches!(refused, Failure::Refused { .. }), "{external}: {refused}");
        }
    }

    #[test]
    fn a_second_nat_is_told_rather_than_what_one_protocol_makes_of_it() {
        let full = Failure::refused(Protocol::Pcp, "the gateway has no room for more mappings at the moment");
        let none = Failure::NoOuterAddress { protocol: Protocol::NatPmp };
        let address = "10.9.8.7".parse().unwrap();
        let private = Failure::PrivateOuterAddress { protocol: Protocol::Upnp, address };
        let told = |failures: [&Failure; 3]| Failure::told(failures.map(Clone::clone));
        assert_eq!(told([&full, &none, &private]), private);
        assert_eq!(told([&full, &none, &Failure::NoAnswer]), none);
        let other = Failure::refused(Protocol::Upnp, "the gateway has no room for more mappings");
        assert_eq!(told([&Failure::NoAnswer, &Failure::NoAnswer, &other]), other);
        assert_eq!(told([&full, &Failure::NoAnswer, &other]), full, "PCP comes first");
        assert_eq!(
            private.to_string(),
            "UPnP: the gateway's outer address 10.9.8.7 is private: it is behind another NAT"
        );
    }
}
