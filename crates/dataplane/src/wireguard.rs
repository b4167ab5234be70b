//! One WireGuard device, whichever implementation carries it.
//!
//! [`open`] takes the kernel's WireGuard where there is one and the embedded one elsewhere, and adopts a device that
//! is already there, with its sessions. Callers compare [`WireGuardDevice::state`] with what should be
//! (`DeviceState::change_to`) and hand the difference to [`WireGuardDevice::change`].

use std::fmt;
use std::path::PathBuf;

use fairlead_api::wireguard::{DeviceChange, DeviceState};
use fairlead_netlink::route::{self, RouteSocket};
use fairlead_netlink::wireguard as kernel;
pub use fairlead_tunnel::Retiring;

use crate::uplink::loosen_reverse_path_filter;

mod embedded;
mod in_kernel;

/// Who encrypts.
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

/// Which implementation to take.
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

/// What a device is to be like as a link.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Name of the link.
    pub interface: String,
    /// Its MTU in bytes.
    pub mtu: u32,
    /// Which implementation to take.
    pub preference: Preference,
    /// Where an embedded device of another process may be waiting for this one ([`WireGuardDevice::retire`]).
    pub predecessor: Option<PathBuf>,
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
    /// The kernel's WireGuard was asked for and is not there.
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
        /// What it is: "of kind bridge", "hardware".
        kind: String,
        /// Which implementation was to use it.
        wanted: Backend,
    },
    /// A link that was there is gone.
    #[error("link {0} has vanished: somebody removed it; open the device again")]
    Vanished(String),
}

impl Error {
    /// Whether it says no more than that this kernel has no WireGuard.
    pub fn is_unsupported(&self) -> bool {
        matches!(self, Self::NoKernel(_))
    }
}

/// A WireGuard device.
pub trait WireGuardDevice: Send + Sync {
    /// Who encrypts.
    fn backend(&self) -> Backend;

    /// Name of the link.
    fn interface(&self) -> &str;

    /// How it is configured and what it knows of its peers.
    ///
    /// # Errors
    /// The device is gone, or cannot be asked.
    fn state(&self) -> Result<DeviceState, Error>;

    /// Carries out a difference; nothing at all if it is empty. Sessions of peers that stay are kept, and an
    /// allowed address that stays is never missing for a moment.
    ///
    /// # Errors
    /// The device is gone, or refuses a value.
    fn change(&self, change: &DeviceChange) -> Result<(), Error>;

    /// Gets ready to hand the device to another process that opens it with this path as [`Settings::predecessor`]. `None`
    /// when that one needs nothing from this process: the kernel keeps its devices.
    ///
    /// # Errors
    /// Nothing can listen at `path`, or the device is gone.
    fn retire(self: Box<Self>, path: PathBuf) -> Result<Option<Retiring>, Error>;

    /// Removes the device and its link. Dropping it leaves the link in place for a successor.
    ///
    /// # Errors
    /// The kernel refuses.
    fn delete(self: Box<Self>) -> Result<(), Error>;
}

/// Opens the device in the network namespace of the calling thread: adopts or creates it, gives it its MTU, sets it
/// up and loosens its reverse path filter.
///
/// # Errors
/// The implementation asked for is missing, or the name belongs to something else.
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
    bring_up(&mut links, settings)?;
    Ok(device)
}

/// Which implementation to try, given the kind of the link that has the name already; hardware has no kind.
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

/// MTU, up and open to answers, if the link is not so already.
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
    // Answers of other nodes come in here though the main table would send to them elsewhere.
    if let Err(error) = loosen_reverse_path_filter(&settings.interface) {
        tracing::warn!(interface = settings.interface, %error, "cannot loosen the reverse path filter");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_is_there_decides() {
        use Backend::{Embedded, Kernel};
        let settings =
            |preference| Settings { interface: "wire_kube".into(), mtu: 1420, preference, predecessor: None };
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
