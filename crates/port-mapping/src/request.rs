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
}
