//! The status contract (`proto/node.proto`).

pub use generated::*;

mod generated {
    #![expect(
        missing_docs,
        clippy::allow_attributes_without_reason,
        reason = "generated from proto/node.proto, documented there"
    )]
    tonic::include_proto!("fairlead.node.v1");
}
