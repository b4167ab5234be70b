//! A Debian kernel in QEMU, for tests of what the machine's own kernel may lack.
//!
//! For: kernel WireGuard, FoU, ipip, ip6tnl and netem, with real programs (`ip`, `wg`, `nft`, `ping`,
//! `tcpdump`, `iperf3`) and with test binaries compiled outside. [`Vm::start`] boots one in seconds and
//! [`Vm::run`] runs commands in it, one after another; it may be joined to a network outside by a TAP
//! interface. [`run`] boots, runs one command, and shuts down. A VM ends when its handle is dropped or the test
//! program ends, also by a signal.
//!
//! Not for: measuring (everything is emulated, so speeds mean nothing, unless [`Options::may_use_kvm`] is set and KVM boots
//! the kernel: a /dev/kvm that exists need not be able to), and not a container: there is no disk, no service, nothing but
//! an initramfs of ours.
//!
//! Sources: Debian's newest cloud kernel, downloaded with `apt-get download` and unpacked,
//! never installed; the tools are the host's own, copied with their libraries. The image is made once and
//! kept in `$XDG_CACHE_HOME` (or `~/.cache`) `/fairlead/vm-HASH/` (see [`prepare`]); delete that directory
//! to get a newer kernel. Data goes in and out through virtio serial ports.

mod cpio;
mod files;
mod image;
mod machine;
mod modules;
mod script;
mod vm;

pub use image::prepare;
pub use vm::{Launcher, Options, Vm, run};
