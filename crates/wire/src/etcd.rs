//! The part of etcd's gRPC API that replicas of the discovery server call (`proto/etcd.proto`). Clients only.

pub use generated::*;

mod generated {
    #![expect(
        missing_docs,
        clippy::allow_attributes_without_reason,
        reason = "generated from proto/etcd.proto, documented there"
    )]
    tonic::include_proto!("etcdserverpb");
}
