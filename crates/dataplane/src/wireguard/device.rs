//! A device, whatever implements it.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::{fmt, io};

use fairlead_keys::{DeviceChange, DeviceState, PublicKey};
use fairlead_tunnel::PendingHandover;
use ipnet::IpNet;

use super::path_socket::PathSocket;

/// An implementation of WireGuard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Backend {
    /// The kernel's module.
    Kernel,
    /// `fairlead-tunnel`, in this process.
    Embedded,
}

impl fmt::Display for Backend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Kernel => "kernel",
            Self::Embedded => "embedded",
        })
    }
}

/// Choice between the implementations of WireGuard.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Preference {
    /// Implementation that the device already has; for a new device the kernel's if there is one.
    #[default]
    Auto,
    /// The kernel's WireGuard or none.
    Kernel,
    /// The embedded implementation.
    Embedded,
}

/// The settings of a device's link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Name of the link.
    pub interface: String,
    /// MTU of the link in bytes.
    pub mtu: u32,
    /// Implementation to use.
    pub preference: Preference,
    /// Path of the socket on which an old process may be listening to hand its embedded device over ([`WireGuardDevice::hand_over`]).
    pub handover_socket: Option<PathBuf>,
}

/// Reason why a device could not be opened, read or changed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel refused, or cannot be asked.
    #[error(transparent)]
    Netlink(#[from] fairlead_netlink::Error),
    /// The embedded implementation failed.
    #[error(transparent)]
    Embedded(#[from] fairlead_tunnel::Error),
    /// The kernel's WireGuard was requested and is missing.
    #[error(
        "this kernel has no WireGuard ({0}): load its module `wireguard`, or let Fairlead use the embedded one"
    )]
    NoKernel(#[source] fairlead_netlink::Error),
    /// The name is taken by a link of another kind.
    #[error(
        "link {interface} exists and is {kind}, so it cannot become a WireGuard device of the {wanted}: \
         remove it (`ip link delete {interface}`) or choose another name"
    )]
    Foreign {
        /// The link.
        interface: String,
        /// Kind of the link, for the text: "of kind bridge", "hardware".
        kind: String,
        /// Implementation that was to use it.
        wanted: Backend,
    },
    /// The name is taken by a link without the alias.
    #[error(
        "link {interface} exists and is not ours, as its alias is not \"{alias}\": choose another name, or remove it \
         (`ip link delete {interface}`)"
    )]
    NotOurs {
        /// The link.
        interface: String,
        /// Alias that a link of ours with this name has.
        alias: String,
    },
    /// The link was removed, renamed, or moved to another network namespace.
    #[error("link {0} was removed or renamed: open the device again")]
    Vanished(String),
}

impl Error {
    /// Whether the reason is that this kernel has no WireGuard.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Self::NoKernel(_))
    }
}

/// A WireGuard device.
pub trait WireGuardDevice: Send + Sync {
    /// The implementation.
    fn backend(&self) -> Backend;

    /// Name of the link.
    fn interface(&self) -> &str;

    /// Configuration of the device, and the state of its peers.
    ///
    /// # Errors
    /// The device was removed, or cannot be read.
    fn state(&self) -> Result<DeviceState, Error>;

    /// Applies a change; an empty one sends nothing. Peers that stay keep their sessions, and an allowed address that stays
    /// is never missing for a moment.
    ///
    /// # Errors
    /// The device was removed, or refuses a value.
    fn change(&self, change: &DeviceChange) -> Result<(), Error>;

    /// Replaces what peers may send from although other peers are sent for it, by peer: gateways of one location stand
    /// for each other. Without effect in the kernel's, where a prefix has one peer (WireGuard paper 2).
    ///
    /// # Errors
    /// The device was removed.
    fn accept(&self, _prefixes: &BTreeMap<PublicKey, Vec<IpNet>>) -> Result<(), Error> {
        Ok(())
    }

    /// Reason why this host did not send the last packet for a peer: a firewall of its own, a missing route. `None` if it did, and where the
    /// implementation does not tell (the kernel's).
    fn send_error(&self, _peer: &PublicKey) -> Option<String> {
        None
    }

    /// Opens the socket for non-WireGuard datagrams on the WireGuard port; one at a time, `None` while one is open.
    ///
    /// # Errors
    /// The process has no descriptor left, or the kernel, whose WireGuard shares no port, has no nftables.
    fn open_path_socket(&self) -> io::Result<Option<Box<dyn PathSocket>>>;

    /// Listens for another process that opens the device with this path as [`Settings::handover_socket`]. `None` when that
    /// one needs nothing from this process: the kernel keeps its devices.
    ///
    /// # Errors
    /// The socket cannot be opened, or the device was removed.
    fn hand_over(self: Box<Self>, path: PathBuf) -> Result<Option<PendingHandover>, Error>;

    /// Removes the device and its link. Dropping it leaves the link for the next process.
    ///
    /// # Errors
    /// The kernel refuses.
    fn delete(self: Box<Self>) -> Result<(), Error>;
}
