//! Compiles the `.proto` files without `protoc`.

use prost::Message as _;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(
        [
            "proto/affiliate.proto",
            "proto/cni.proto",
            "proto/discovery.proto",
            "proto/egress.proto",
            "proto/egress_peers.proto",
            "proto/network.proto",
            "proto/node.proto",
            "proto/status.proto",
        ],
        ["proto"],
    )?;
    // What a server tells clients that know no `.proto` file (gRPC server reflection).
    let descriptors = std::path::Path::new(&std::env::var("OUT_DIR")?).join("descriptors.bin");
    std::fs::write(descriptors, files.encode_to_vec())?;
    // `google.protobuf.Empty` becomes `()`, so no crate of well-known types is needed.
    // What a discovery server stores is shared by all watches of its cluster, so it is counted, not copied.
    tonic_prost_build::configure().bytes(".sidero.discovery.server").compile_fds(files)?;
    // Not a service of ours: without a server, and not among the descriptors.
    let etcd = protox::compile(["proto/etcd.proto"], ["proto"])?;
    tonic_prost_build::configure().build_server(false).bytes(".etcdserverpb").compile_fds(etcd)?;
    Ok(())
}
