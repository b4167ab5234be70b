//! One WireGuard device, in the kernel or embedded.
//!
//! [`open`] uses the kernel's WireGuard where there is one and the embedded one elsewhere, and adopts an existing device
//! with its sessions. Callers compare [`WireGuardDevice::state`] with the desired configuration
//! (`DeviceState::change_of`) and pass the difference to [`WireGuardDevice::change`].

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsFd;
use std::path::PathBuf;

use fairlead_address::IpFamily;
use fairlead_api::names::NFT_TABLE_PATH_SOCKET;
use fairlead_keys::{DeviceChange, DeviceState, PublicKey};
use fairlead_netlink::route::{self, RouteSocket};
use fairlead_netlink::wireguard as kernel;
pub use fairlead_tunnel::{PathDatagram, PathSocketStats, PendingHandover};
use ipnet::IpNet;

use crate::nft_table;
use crate::uplink::loosen_reverse_path_filter;

mod embedded;
mod in_kernel;
mod marked;

pub use marked::MarkedDevice;

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

/// Which implementation to use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Preference {
    /// The one the device already has; for a new device the kernel's if there is one.
    #[default]
    Auto,
    /// The kernel's or none.
    Kernel,
    /// The embedded one.
    Embedded,
}

/// The settings of a device's link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Name of the link.
    pub interface: String,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Which implementation to use.
    pub preference: Preference,
    /// Where an old process may be listening to hand its embedded device over ([`WireGuardDevice::hand_over`]).
    pub handover_socket: Option<PathBuf>,
}

/// Why a device could not be opened, read or changed.
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
        /// Its kind: "of kind bridge", "hardware".
        kind: String,
        /// Which implementation was to use it.
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
        /// What its alias would be.
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

    /// Its configuration and the state of its peers.
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

    /// Why this host did not send the last packet for a peer: a firewall of its own, a missing route. `None` if it did, and where the
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

/// Sends and receives datagrams that are no WireGuard messages on the WireGuard port: probes, STUN. Its descriptor is
/// readable while datagrams wait. The queue is bounded; what it drops is counted.
pub trait PathSocket: AsFd + Send + Sync {
    /// Sends from the WireGuard port with the device's mark, without waiting. The kernel chooses the source address if
    /// `local` is `None`.
    ///
    /// # Errors
    /// `NotConnected` as long as the device has no port, `WouldBlock` while the socket is full; the kernel's error
    /// otherwise.
    fn send(&self, local: Option<IpAddr>, remote: SocketAddr, payload: &[u8]) -> io::Result<()>;

    /// The next datagram, if one waits.
    fn try_receive(&self) -> Option<PathDatagram>;

    /// The peers that were sent packets, and from which nothing has come for half a second, since the last call; none where the
    /// implementation does not know (the kernel's). They make the descriptor readable as well.
    fn take_unanswered(&self) -> BTreeSet<PublicKey> {
        BTreeSet::new()
    }

    /// From now on sends WireGuard's packets for a peer to this endpoint as well, or no more. Without effect where the
    /// implementation cannot do it (the kernel's).
    fn send_both_ways(&self, _peer: &PublicKey, _also: Option<SocketAddr>) {}

    /// Opens sockets beside the port for a birthday attempt, numbered from zero, in place of those of the last attempt. What they
    /// receive has their number.
    ///
    /// # Errors
    /// `Unsupported` where none could be kept; the process has no descriptors or ports left.
    fn open_sockets(&self, _count: u16) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Sends from such a socket.
    ///
    /// # Errors
    /// It is not open, or the kernel refuses.
    fn send_from_socket(&self, _socket: u16, _remote: SocketAddr, _payload: &[u8]) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// Keeps such a socket for an endpoint: whatever goes there goes from it, WireGuard's packets too.
    ///
    /// # Errors
    /// It is not open, or too many are kept.
    fn keep_socket(&self, _socket: u16, _remote: SocketAddr) -> io::Result<()> {
        Err(io::ErrorKind::Unsupported.into())
    }

    /// The endpoints for which a socket is kept, also by an earlier process.
    fn kept_endpoints(&self) -> Vec<SocketAddr> {
        Vec::new()
    }

    /// Closes the socket that is kept for an endpoint.
    fn leave_socket(&self, _remote: SocketAddr) {}

    /// Closes the sockets of the attempt but those that are kept.
    fn close_sockets(&self) {}

    /// The device's counters of such datagrams.
    fn stats(&self) -> PathSocketStats;

    /// Mends what other programs changed of the way between the port and the socket, and says where it works. To be called now
    /// and then; it sends nothing if nothing changed.
    fn maintain(&self) -> PathSocketHealth {
        let access = PortAccess::Shared;
        PathSocketHealth { access, families: IpFamily::BOTH.to_vec(), failures: Vec::new() }
    }
}

/// How a [`PathSocket`] shares the port of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum PortAccess {
    /// A port of its own, which rules of nftables join to that of the kernel's WireGuard.
    Nftables,
    /// Raw sockets, which the kernel copies each UDP datagram for.
    RawSocket,
    /// The embedded device's own sockets.
    Shared,
}

impl PortAccess {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Nftables, Self::RawSocket, Self::Shared];

    /// As status and metrics show it.
    pub fn name(self) -> &'static str {
        match self {
            Self::Nftables => "nftables",
            Self::RawSocket => "raw-socket",
            Self::Shared => "shared",
        }
    }
}

/// In which address families a [`PathSocket`] works.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathSocketHealth {
    /// How it shares WireGuard's port.
    pub access: PortAccess,
    /// The families in which it does.
    pub families: Vec<IpFamily>,
    /// Those in which it should.
    pub failures: Vec<PathSocketFailure>,
}

/// Why a [`PathSocket`] does not work in an address family that this host has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PathSocketFailure {
    /// The family.
    pub family: IpFamily,
    /// Why.
    pub reason: String,
}

/// Opens the device in the network namespace of the calling thread: adopts or creates it, sets its MTU, sets it
/// up and makes its reverse path filter loose.
///
/// # Errors
/// The requested implementation is missing, or the name belongs to a link of another kind.
pub fn open(settings: &Settings) -> Result<Box<dyn WireGuardDevice>, Error> {
    let mut links = RouteSocket::open()?;
    let present = links.link_by_name(&settings.interface)?;
    let device: Box<dyn WireGuardDevice> = match candidate(
        settings,
        present.as_ref().map(|link| link.kind.as_deref()),
    )? {
        Backend::Kernel => match kernel::WireGuard::open() {
            Ok(family) => Box::new(in_kernel::Device::open(settings, family, &mut links, present.is_some())?),
            Err(error) if error.is_unsupported() && settings.preference == Preference::Auto => {
                tracing::info!(interface = settings.interface, reason = %error, "using the embedded WireGuard");
                Box::new(embedded::Device::open(settings)?)
            }
            Err(error) if error.is_unsupported() => return Err(Error::NoKernel(error)),
            Err(error) => return Err(error.into()),
        },
        Backend::Embedded => Box::new(embedded::Device::open(settings)?),
    };
    if device.backend() == Backend::Embedded {
        // The kernel's needs it: it would lead probes away from this one.
        nft_table::remove(NFT_TABLE_PATH_SOCKET)?;
    }
    bring_up(&mut links, settings)?;
    Ok(device)
}

/// Whether an embedded device could be made in the network namespace of the calling thread, whatever devices there are.
///
/// # Errors
/// This kernel has no TUN, or this process may not make one.
pub fn check_embedded() -> Result<(), Error> {
    Ok(fairlead_tunnel::Device::check()?)
}

/// Which implementation to try, given the kind of the existing link of this name; hardware has no kind.
fn candidate(settings: &Settings, present: Option<Option<&str>>) -> Result<Backend, Error> {
    match (settings.preference, present) {
        (Preference::Auto | Preference::Kernel, None | Some(Some(kernel::KIND))) => Ok(Backend::Kernel),
        (Preference::Auto | Preference::Embedded, Some(Some(embedded::KIND)))
        | (Preference::Embedded, None) => Ok(Backend::Embedded),
        (preference, Some(kind)) => Err(Error::Foreign {
            interface: settings.interface.clone(),
            kind: kind.map_or_else(|| "hardware".to_owned(), |kind| format!("of kind {kind}")),
            wanted: if preference == Preference::Embedded { Backend::Embedded } else { Backend::Kernel },
        }),
    }
}

/// Sets the MTU and the link up where they differ, and makes its reverse path filter loose.
fn bring_up(links: &mut RouteSocket, settings: &Settings) -> Result<(), Error> {
    let link = links
        .link_by_name(&settings.interface)?
        .ok_or_else(|| Error::Vanished(settings.interface.clone()))?;
    let mut messages = Vec::new();
    if link.mtu != settings.mtu {
        messages.push(route::set_mtu(link.index, settings.mtu));
    }
    if !link.up {
        messages.push(route::set_up(link.index, true));
    }
    links.apply(&messages)?;
    // Packets of other nodes arrive here although the main table routes to them by another link.
    if let Err(error) = loosen_reverse_path_filter(&settings.interface) {
        tracing::warn!(interface = settings.interface, %error, "cannot loosen the reverse path filter");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kind_of_an_existing_link_decides() {
        use Backend::{Embedded, Kernel};
        let settings = |preference| Settings {
            interface: "wire_kube".into(),
            mtu: 1420,
            preference,
            handover_socket: None,
        };
        let (wireguard, tun, bridge) = (Some("wireguard"), Some("tun"), Some("bridge"));
        for (preference, present, expected) in [
            (Preference::Auto, None, Some(Kernel)),
            (Preference::Auto, Some(wireguard), Some(Kernel)),
            (Preference::Auto, Some(tun), Some(Embedded)),
            (Preference::Kernel, None, Some(Kernel)),
            (Preference::Kernel, Some(wireguard), Some(Kernel)),
            (Preference::Kernel, Some(tun), None),
            (Preference::Embedded, None, Some(Embedded)),
            (Preference::Embedded, Some(tun), Some(Embedded)),
            (Preference::Embedded, Some(wireguard), None),
            (Preference::Auto, Some(bridge), None),
            (Preference::Auto, Some(None), None),
        ] {
            let chosen = candidate(&settings(preference), present);
            assert_eq!(chosen.as_ref().ok().copied(), expected, "{preference:?} {present:?}");
            if let Err(error) = chosen {
                let text = error.to_string();
                assert!(text.contains("wire_kube") && text.contains("ip link delete"), "{text}");
            }
        }
    }
}
