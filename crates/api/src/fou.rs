//! Foo-over-UDP links as Coil v2 makes them, and the gateways behind them: their names, what their headers take, and how a gateway is chosen.

use std::net::IpAddr;
use std::time::Duration;

use fairlead_address::IpFamily;
use sha1::{Digest as _, Sha1};

use crate::names::{IP6TNL_OVERHEAD, IPIP_OVERHEAD, LINK_PREFIX_FOU_IPV4, LINK_PREFIX_FOU_IPV6};

/// Most gateways of a service address: `MAX_GATEWAYS` of the BPF programs.
pub const MAX_GATEWAYS: usize = 32;
/// Bytes of a UDP header (RFC 768).
const UDP_OVERHEAD: u32 = 8;

/// A gateway of a service address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Gateway {
    /// Address of the gateway, of the family of the service address.
    pub address: IpAddr,
    /// Whether the gateway is draining: flows that it has stay, new ones go to others.
    pub is_draining: bool,
}

/// The gateways of a service address. Packets to a service address without any are dropped.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Service {
    /// Gateways, at most [`MAX_GATEWAYS`], in any order.
    pub gateways: Vec<Gateway>,
    /// All flows of one client go to the same gateway.
    pub by_client: bool,
    /// A flow without a packet for this long gets a new choice; `None` is never.
    pub idle_timeout: Option<Duration>,
}

/// The name of a link to this address. Those of two IPv6 addresses may be the same.
pub fn link_name(remote: IpAddr) -> String {
    match remote {
        IpAddr::V4(remote) => format!("{LINK_PREFIX_FOU_IPV4}{:08x}", remote.to_bits()),
        IpAddr::V6(remote) => {
            let [a, b, c, d, ..] = <[u8; 20]>::from(Sha1::digest(remote.octets()));
            format!("{LINK_PREFIX_FOU_IPV6}{:08x}", u32::from_be_bytes([a, b, c, d]))
        }
    }
}

/// Whether a link has a name as [`link_name`] makes them.
pub fn is_link_name(name: &str) -> bool {
    [LINK_PREFIX_FOU_IPV4, LINK_PREFIX_FOU_IPV6].iter().any(|prefix| name.starts_with(prefix))
}

/// Bytes that the outer headers take from the MTU of the uplink.
pub fn overhead(family: IpFamily) -> u32 {
    let outer = match family {
        IpFamily::V4 => IPIP_OVERHEAD,
        IpFamily::V6 => IP6TNL_OVERHEAD,
    };
    outer.saturating_add(UDP_OVERHEAD)
}
