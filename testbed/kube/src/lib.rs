//! A real Kubernetes control plane for tests, started in seconds.
//!
//! For: tests and demonstrations that must see what the real API server accepts, refuses and prints:
//! etcd and kube-apiserver, and kube-controller-manager and kube-scheduler when asked. One test program
//! may run several at once; each has its own directory, port and keys, and ends when its
//! [`ControlPlane`] is dropped or the test program ends, also by a signal.
//!
//! Not for: production (etcd never syncs, keys lie in a temporary directory), and not a cluster: there
//! are no nodes unless a test creates Node objects or runs kubelets of its own.
//!
//! Sources: the programs are compiled from Kubernetes's own Go modules (`kubebed/` beside
//! this crate; needs Go, minutes the first time, then cached outside the checkout, see [`binary`]). If
//! `KUBEBUILDER_ASSETS` names a directory with etcd, kube-apiserver and kubectl, as for other projects'
//! tests, those serve instead wherever they can do what the [`Options`] ask. Data goes to a temporary
//! directory; nothing is left behind.
//!
//! The programs can also run on machines of a test that each have an etcd and an API server of their own, which the test starts
//! ([`ControlPlane::of_members`]).
//!
//! For clusters with real nodes there are also the [`images`] they run and upstream's [`conformance`] suite, built and kept
//! in the same way.

mod assets;
mod build;
pub mod conformance;
mod control_plane;
mod go;
pub mod images;
mod kubebed;
mod kubeconfig;
mod kubectl;
mod multus;
mod options;
mod programs;
mod proxy;
mod published;
mod supervised;
mod template;

pub use build::binary;
pub use control_plane::{ControlPlane, Member};
pub use multus::multus;
pub use options::{Launcher, Options};
pub use published::{CNI_PLUGINS, Published};
