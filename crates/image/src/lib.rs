//! OCI images made from files, without an engine, a registry or a network.
//!
//! It builds Fairlead's own image (`cargo xtask image`, the program beside this library) and the images of test clusters.
//! The input is a [`Tree`]: files of this machine with the shared libraries they need, bytes, symbolic links. The output is
//! one tar with an OCI image layout (<https://github.com/opencontainers/image-spec/blob/main/image-layout.md>) and, for
//! older Docker, a `manifest.json`: `ctr -n k8s.io images import`, `podman load`, `docker load` and
//! `skopeo copy oci-archive:` import it.
//!
//! Equal trees give equal bytes: entries are sorted, owned by root and have modification time 0.
//!
//! It does not support several layers or platforms, and nothing here runs in a cluster.

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
