//! Messages between the gateways of one Egress (`proto/egress_peers.proto`).

pub use generated::*;

mod generated {
    #![expect(missing_docs, reason = "generated from proto/egress_peers.proto, documented there")]
    tonic::include_proto!("fairlead.egress.peers.v1");
}
