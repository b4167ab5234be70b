//! `google.rpc.Status` (`proto/status.proto`), what gRPC calls the "richer error model".

pub(crate) use generated::{Any, Status};

mod generated {
    #![expect(unreachable_pub, reason = "generated; used in this crate only")]
    tonic::include_proto!("google.rpc");
}
