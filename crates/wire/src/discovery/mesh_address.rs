//! Addresses of nodes on the mesh, as KubeSpan derives them: every node computes the same without asking another.

use std::net::Ipv6Addr;

use ipnet::Ipv6Net;
use sha2::{Digest as _, Sha256};

/// The purpose of a subnet, in its last byte (Talos, `pkg/machinery/resources/network/ula.go`).
const KUBESPAN: u8 = 0x02;
/// Separates our use of SHA-256 from others.
const KEY_CONTEXT: &[u8] = b"fairlead mesh address\0";

/// The subnet of all addresses on the mesh of a cluster: of the SHA-256 of its identifier the last 16 bytes, of these the first 8,
/// as a unique local address (RFC 4193).
pub fn mesh_subnet(cluster_id: &str) -> Ipv6Net {
    let digest: [u8; 32] = Sha256::digest(cluster_id).into();
    let [.., b, c, d, e, f, g, _, _, _, _, _, _, _, _, _] = digest;
    let mut bytes = [0; 16];
    if let Some(network) = bytes.first_chunk_mut::<8>() {
        *network = [0xfd, b, c, d, e, f, g, KUBESPAN];
    }
    Ipv6Net::new_assert(Ipv6Addr::from(bytes), 64)
}

/// An interface identifier for a node whose own is taken or unknown, from its WireGuard public key. It says that it was not made of a
/// link-layer address that is unique worldwide (RFC 4291, section 2.5.1).
pub fn id_of_key(public_key: &[u8; 32]) -> [u8; 8] {
    let digest: [u8; 32] = Sha256::new().chain_update(KEY_CONTEXT).chain_update(public_key).finalize().into();
    let [a, b, c, d, e, f, g, h, ..] = digest;
    [a & !0x02, b, c, d, e, f, g, h]
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The vector of Talos's own tests.
    #[test]
    fn the_subnet_is_that_of_kubespan() {
        let subnet = mesh_subnet("8XuV9TZHW08DOk3bVxQjH9ih_TBKjnh-j44tsCLSBzo=");
        assert_eq!(subnet, "fd7f:175a:b97c:5602::/64".parse().unwrap());
    }

    #[test]
    fn a_key_makes_an_identifier_that_no_hardware_has() {
        let (one, other) = (id_of_key(&[1; 32]), id_of_key(&[2; 32]));
        assert_ne!(one, other);
        assert_eq!((one[0] & 2, other[0] & 2), (0, 0));
    }
}
