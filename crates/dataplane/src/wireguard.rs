//! One WireGuard device, in the kernel or embedded.
//!
//! [`open`] uses the kernel's WireGuard where there is one and the embedded one elsewhere, and adopts an existing device
//! with its sessions. Callers compare [`WireGuardDevice::state`] with the desired configuration
//! (`DeviceState::change_of`) and pass the difference to [`WireGuardDevice::change`].

use std::fmt;

use fairlead_api::names::NFT_TABLE_PATH_SOCKET;
use fairlead_netlink::route::{self, Link, RouteSocket};
use fairlead_netlink::wireguard as kernel;
pub use fairlead_tunnel::{PathDatagram, PathSocketStats, PendingHandover};

use crate::nft_table;
use crate::uplink::loosen_reverse_path_filter;

mod device;
mod embedded;
mod in_kernel;
mod marked;
mod path_socket;

pub use device::{Backend, Error, Preference, Settings, WireGuardDevice};
pub use marked::MarkedDevice;
pub use path_socket::{PathSocket, PathSocketFailure, PathSocketHealth, PortAccess};

/// Opens the device in the network namespace of the calling thread: adopts or creates it, sets its MTU, sets it
/// up and makes its reverse path filter loose.
///
/// # Errors
/// The requested implementation is missing, or the name belongs to a link of another kind.
pub fn open(settings: &Settings) -> Result<Box<dyn WireGuardDevice>, Error> {
    let mut links = RouteSocket::open()?;
    let present = links.link_by_name(&settings.interface)?;
    let kind = present.as_ref().map(LinkKind::from);
    let device: Box<dyn WireGuardDevice> = match candidate(settings, kind)? {
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
    bring_up(&mut links, settings, None)?;
    // Packets of other nodes arrive here although the main table routes to them by another link.
    if let Err(error) = loosen_reverse_path_filter(&settings.interface) {
        tracing::warn!(interface = settings.interface, %error, "cannot loosen the reverse path filter");
    }
    Ok(device)
}

/// Whether an embedded device could be made in the network namespace of the calling thread, whatever devices there are.
///
/// # Errors
/// This kernel has no TUN, or this process may not make one.
pub fn check_embedded() -> Result<(), Error> {
    Ok(fairlead_tunnel::Device::check()?)
}

/// Kind of a link: hardware has no name of one.
#[derive(Debug, Clone, Copy)]
enum LinkKind<'a> {
    Hardware,
    Of(&'a str),
}

impl<'a> From<&'a Link> for LinkKind<'a> {
    fn from(link: &'a Link) -> Self {
        link.kind.as_deref().map_or(Self::Hardware, Self::Of)
    }
}

impl fmt::Display for LinkKind<'_> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Hardware => formatter.write_str("hardware"),
            Self::Of(kind) => write!(formatter, "of kind {kind}"),
        }
    }
}

/// Chooses the implementation to try, given the kind of the existing link of this name.
fn candidate(settings: &Settings, present: Option<LinkKind<'_>>) -> Result<Backend, Error> {
    match (settings.preference, present) {
        (Preference::Auto | Preference::Kernel, None | Some(LinkKind::Of(kernel::KIND))) => {
            Ok(Backend::Kernel)
        }
        (Preference::Auto | Preference::Embedded, Some(LinkKind::Of(embedded::KIND)))
        | (Preference::Embedded, None) => Ok(Backend::Embedded),
        (preference, Some(kind)) => Err(Error::Foreign {
            interface: settings.interface.clone(),
            kind: kind.to_string(),
            wanted: if preference == Preference::Embedded { Backend::Embedded } else { Backend::Kernel },
        }),
    }
}

/// Sets alias, MTU and the link up where they differ, in this order: a link is marked before it is used. Returns its index.
fn bring_up(links: &mut RouteSocket, settings: &Settings, alias: Option<&str>) -> Result<u32, Error> {
    let link = links
        .link_by_name(&settings.interface)?
        .ok_or_else(|| Error::Vanished(settings.interface.clone()))?;
    let mut messages = Vec::new();
    if let Some(alias) = alias.filter(|alias| link.alias.as_deref() != Some(*alias)) {
        messages.push(route::set_alias(link.index, alias));
    }
    if link.mtu != settings.mtu {
        messages.push(route::set_mtu(link.index, settings.mtu));
    }
    if !link.up {
        messages.push(route::set_up(link.index, true));
    }
    links.apply(&messages)?;
    Ok(link.index)
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
        let [wireguard, tun, bridge] = ["wireguard", "tun", "bridge"].map(LinkKind::Of);
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
            (Preference::Auto, Some(LinkKind::Hardware), None),
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
