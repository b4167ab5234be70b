//! What goes over Fairlead's own wires.
//!
//! Today that is the gRPC between the CNI plugin or the command line and the node program, over a UNIX socket
//! ([`cni`], [`network`], [`node`]), and the names of the files beside that socket ([`spool`]). The messages, clients and servers are generated from `proto/` at build time, without `protoc`;
//! written by hand is only how a CNI error travels inside a gRPC status, which must be byte for byte what Coil's Go
//! programs send, because old and new programs meet on one node during an upgrade.
//!
//! The sans-I/O codecs of path probes, relay frames and discovery messages will stand beside them. Nothing here opens a
//! socket or decides anything: bytes come from the caller and go back to the caller.

pub mod cni;
pub mod network;
pub mod node;
pub mod spool;
mod status;

/// The `.proto` files as an encoded `google.protobuf.FileDescriptorSet`, for gRPC server reflection.
pub const FILE_DESCRIPTORS: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/descriptors.bin"));
