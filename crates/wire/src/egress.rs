//! The registration of client pods at a gateway of an Egress (`proto/egress.proto`).

use std::net::IpAddr;

generated!("fairlead.egress.v1");

/// An address in messages: 4 or 16 bytes, in network order.
pub fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}
