//! The CNI operations on a whole network (`proto/network.proto`).

pub use generated::*;

mod generated {
    #![expect(
        missing_docs,
        clippy::allow_attributes_without_reason,
        reason = "generated from proto/network.proto, documented there"
    )]
    tonic::include_proto!("fairlead.cni.v1");
}
