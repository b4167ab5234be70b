//! Compiles the `.proto` files without `protoc`.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto");
    let files = protox::compile(
        ["proto/cni.proto", "proto/network.proto", "proto/node.proto", "proto/status.proto"],
        ["proto"],
    )?;
    // `google.protobuf.Empty` becomes `()`, so no crate of well-known types is needed.
    tonic_prost_build::configure().compile_fds(files)?;
    Ok(())
}
