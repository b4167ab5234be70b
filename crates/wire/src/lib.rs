//! What goes over Fairlead's own wires.
//!
//! Today that is the gRPC between the CNI plugin or the command line and the node program, over a UNIX socket
//! ([`cni`], [`node`]), generated from `proto/`. The sans-I/O codecs of path probes, relay frames and discovery
//! messages will stand beside them. Nothing here opens a socket or decides anything.

/// The CNI contract (`proto/cni.proto`), wire-compatible with Coil v2.
pub mod cni {
    #![expect(missing_docs, unreachable_pub, clippy::all, reason = "generated from proto/cni.proto, documented there")]
    tonic::include_proto!("pkg.cnirpc");
}

/// The status contract (`proto/node.proto`).
pub mod node {
    #![expect(missing_docs, unreachable_pub, clippy::all, reason = "generated from proto/node.proto, documented there")]
    tonic::include_proto!("fairlead.node.v1");
}
