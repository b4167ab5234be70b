//! OCI images made from files, without an engine, a registry or a network.
//!
//! For: Fairlead's own image (`cargo xtask image`, the program beside this library) and the images that test clusters
//! run. What goes in is a [`Tree`]: files of this machine with the shared libraries they need, bytes, symbolic links.
//! What comes out is one tar with an OCI image layout
//! (<https://github.com/opencontainers/image-spec/blob/main/image-layout.md>) and, for older Docker, a `manifest.json`
//! beside it: `ctr -n k8s.io images import`, `podman load`, `docker load` and `skopeo copy oci-archive:` take it.
//!
//! Equal trees give equal bytes: entries are sorted, belong to root and have no time.
//!
//! Not for: images with several layers or platforms, and nothing here runs in a cluster.

mod host;
mod layer;
mod layout;
mod reference;
mod tree;

pub use host::{inside, libraries};
pub use layer::Compression;
pub use layout::{Image, write};
pub use reference::Reference;
pub use tree::Tree;
