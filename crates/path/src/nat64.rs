//! How a node without an IPv4 route reaches IPv4 endpoints: through the NAT64 of its network (RFC 6146).

use std::net::{IpAddr, SocketAddr};

use fairlead_address::{Nat64Prefix, without_nat64};
use ipnet::Ipv4Net;

/// The NAT64 of this node's network.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Nat64 {
    /// Its prefixes; empty where there is none.
    pub prefixes: Vec<Nat64Prefix>,
    /// Destinations that this node reaches without it.
    pub ipv4_routes: Vec<Ipv4Net>,
}

impl Nat64 {
    /// The endpoints that are translated to an IPv4 endpoint, one for each prefix. None for what this node has a route to.
    pub fn endpoints(&self, endpoint: SocketAddr) -> Vec<SocketAddr> {
        let IpAddr::V4(address) = endpoint.ip().to_canonical() else { return Vec::new() };
        if self.ipv4_routes.iter().any(|route| route.contains(&address)) {
            return Vec::new();
        }
        let embedded = self.prefixes.iter().filter_map(|prefix| prefix.embed(address));
        embedded.map(|embedded| SocketAddr::new(embedded.into(), endpoint.port())).collect()
    }

    /// The endpoint as other nodes know it ([`without_nat64`]).
    pub fn original(&self, endpoint: SocketAddr) -> SocketAddr {
        without_nat64(&self.prefixes, endpoint)
    }
}
