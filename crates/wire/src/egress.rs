//! The registration of client pods at a gateway of an Egress (`proto/egress.proto`).

pub use generated::*;

mod generated {
    #![expect(
        missing_docs,
        clippy::allow_attributes_without_reason,
        reason = "generated from proto/egress.proto, documented there"
    )]
    tonic::include_proto!("fairlead.egress.v1");
}
