//! The Sidero discovery protocol: nodes find each other through a server that cannot read what they say.
//!
//! [`server`] is the gRPC service. [`Affiliate`] is what a node says of itself; a [`ClusterSecret`] encrypts it, and the
//! endpoints of its WireGuard. The secret shows that the writer belongs to the cluster, not which node it is: a blob is bound
//! neither to an affiliate nor to a time. Every byte is hostile until it is parsed.

mod affiliate;
mod mesh_address;
mod secret;

pub use affiliate::{Affiliate, AffiliateError, KubeSpan, Leftover};
pub use mesh_address::{id_of_key, mesh_subnet};
pub use secret::{ClusterSecret, OpenError};

/// Longest identifier of a cluster or an affiliate, in bytes.
pub const MAX_ID: usize = 256;
/// Longest encrypted affiliate, in bytes.
pub const MAX_DATA: usize = 2048;
/// Longest encrypted endpoint, in bytes.
pub const MAX_ENDPOINT: usize = 32;
/// Most endpoints of an affiliate.
pub const MAX_ENDPOINTS: usize = 64;
/// Bytes that encryption adds to an affiliate: nonce and tag.
pub const DATA_OVERHEAD: usize = 12 + 16;

/// The gRPC service (`proto/discovery.proto`).
pub mod server {
    generated!("sidero.discovery.server");
}

/// Messages of the plaintext (`proto/affiliate.proto`).
mod plaintext {
    pub(super) use generated::*;

    mod generated {
        #![expect(unreachable_pub, reason = "generated; used in this crate only")]
        tonic::include_proto!("sidero.discovery.client");
    }
}

/// 4 or 16 bytes; an IPv4 address in its IPv6 form is an IPv4 address.
pub fn parse_address(bytes: &[u8]) -> Option<std::net::IpAddr> {
    use std::net::IpAddr;
    let ip = match *bytes {
        [a, b, c, d] => IpAddr::from([a, b, c, d]),
        _ => IpAddr::from(<[u8; 16]>::try_from(bytes).ok()?),
    };
    Some(ip.to_canonical())
}

/// 4 bytes for IPv4, 16 for IPv6.
pub fn address_bytes(ip: std::net::IpAddr) -> Vec<u8> {
    match ip.to_canonical() {
        std::net::IpAddr::V4(ip) => ip.octets().to_vec(),
        std::net::IpAddr::V6(ip) => ip.octets().to_vec(),
    }
}
