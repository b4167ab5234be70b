//! The errors of a device.

use std::io;
use std::path::PathBuf;

use fairlead_keys::PublicKey;
use nix::libc;

/// Error of starting, changing or asking a device.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The interface name is not one Linux accepts.
    #[error(
        "{0:?} cannot name a network interface: use 1 to 15 printable characters without space, '/', ':' or '%'"
    )]
    InterfaceName(String),
    /// The MTU cannot be used.
    #[error("interface {name}: MTU {mtu} is outside 576 to 65535")]
    Mtu {
        /// The interface.
        name: String,
        /// The MTU asked for.
        mtu: u32,
    },
    /// The kernel has no TUN, or this process may not use it.
    #[error("cannot open /dev/net/tun: {0}{advice}", advice = advice_on_opening(.0))]
    OpenTun(#[source] io::Error),
    /// The name belongs to an interface that is not a free TUN, or this process may not make one.
    #[error("cannot use {name} as a TUN interface: {source}{advice}", advice = advice_on_attaching(.source))]
    AttachTun {
        /// The interface.
        name: String,
        /// The kernel's answer.
        source: io::Error,
    },
    /// An operation on the interface failed.
    #[error("interface {name}: {operation}: {source}")]
    Interface {
        /// The interface.
        name: String,
        /// The operation.
        operation: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The UDP port could not be opened.
    #[error("cannot open UDP port {port} for WireGuard ({family}): {source}; is another program using it?")]
    Listen {
        /// The port asked for; zero for any.
        port: u16,
        /// `IPv4` or `IPv6`.
        family: &'static str,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The sockets refused the mark.
    #[error("cannot set mark {mark:#x} on the WireGuard sockets: {source}; CAP_NET_ADMIN is needed")]
    Mark {
        /// The mark asked for.
        mark: u32,
        /// The kernel's answer.
        source: io::Error,
    },
    /// A peer would be this node itself.
    #[error(
        "peer {0} has this device's own public key: two nodes share one private key, or a node was told to peer with itself"
    )]
    OwnKey(PublicKey),
    /// Peers need a private key.
    #[error("no private key is set: set one before, or together with, peers")]
    NoPrivateKey,
    /// A thread could not be started.
    #[error("cannot start the threads of the WireGuard device: {0}")]
    Spawn(#[source] io::Error),
    /// The hand-over socket cannot be opened.
    #[error("cannot listen for the new process at {} to hand the WireGuard device over: {source}", path.display())]
    Handover {
        /// The socket.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// The packet loop has ended.
    #[error("the packet loop of WireGuard device {0} has ended; the log says why. Start the device again")]
    Stopped(String),
}

/// Advice on an error of `open`, from Documentation/networking/tuntap.rst.
fn advice_on_opening(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::ENOENT | libc::ENODEV | libc::ENXIO) => "; load the `tun` module",
        Some(libc::EPERM | libc::EACCES) => {
            "; run as root, and give the device to the container of this process"
        }
        _ => "",
    }
}

/// Advice on an error of `tun_set_iff` (drivers/net/tun.c).
fn advice_on_attaching(error: &io::Error) -> &'static str {
    match error.raw_os_error() {
        Some(libc::EPERM) => "; run with CAP_NET_ADMIN",
        Some(libc::EBUSY) => "; is it held by another process?",
        Some(libc::EINVAL) => "; is it an interface of another kind, a TAP or one with several queues?",
        _ => "",
    }
}
