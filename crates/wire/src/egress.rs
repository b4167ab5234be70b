//! The registration of client pods at a gateway of an Egress (`proto/egress.proto`).

use std::net::IpAddr;

pub use generated::*;

/// An address in messages: 4 or 16 bytes, in network order.
pub fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

mod generated {
    #![expect(
        missing_docs,
        clippy::allow_attributes_without_reason,
        reason = "generated from proto/egress.proto, documented there"
    )]
    tonic::include_proto!("fairlead.egress.v1");
}
