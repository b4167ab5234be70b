//! Fairlead's own protocols.
//!
//! Today these are the gRPC services between the CNI plugin or the command line and the node program, over a UNIX socket
//! ([`cni`], [`network`], [`node`]), and the names of the files beside that socket ([`spool`]). Messages, clients and servers
//! are generated from `proto/` at build time, without `protoc`. Only the encoding of a CNI error in a gRPC status is written
//! by hand: it must be byte for byte that of Coil's Go programs, because programs of both run on one node during an upgrade.
//!
//! [`probe`], [`relay`] and [`stun`], and [`http`] for heads of messages and answers of servers of others, are sans-I/O codecs.
//! [`discovery`] is the Sidero discovery protocol: its gRPC service, and what its clients encrypt.
//! [`etcd`] is what our discovery server calls of etcd.
//! [`egress`] is how node programs register clients at the gateways of an Egress, [`egress_peers`] is what these gateways tell each other.
//! Nothing here opens a socket or decides anything: bytes come from the caller and go back to the caller.

/// Includes what was generated from a package of `proto/`.
macro_rules! generated {
    ($package:literal) => {
        pub use generated::*;

        mod generated {
            #![expect(
                missing_docs,
                clippy::allow_attributes_without_reason,
                reason = "generated from proto/, documented there"
            )]
            tonic::include_proto!($package);
        }
    };
}

pub mod cni;
pub mod discovery;
pub mod egress;
pub mod egress_peers;
pub mod etcd;
pub mod http;
pub mod network;
pub mod node;
pub mod probe;
pub mod relay;
pub mod spool;
mod status;
pub mod stun;

/// The `.proto` files as an encoded `google.protobuf.FileDescriptorSet`, for gRPC server reflection.
pub const FILE_DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));

#[cfg(test)]
mod tests;
