//! A WireGuard device beside that of a node, known by the alias of its link.
//!
//! It touches nothing else of the machine, which may be a node too: it has no path socket and no nftables table, and the reverse path
//! filter stays as it is.

use std::time::SystemTime;

use fairlead_keys::{DeviceChange, DeviceState, PublicKey};
use fairlead_netlink::route::{self, RouteSocket};
use fairlead_netlink::wireguard::{WireGuard, add_link};

use super::in_kernel::narrow;
use super::{Backend, Error, LinkKind, Preference, Settings, bring_up, candidate, embedded};

/// A device that is ours by the alias of its link.
pub struct MarkedDevice {
    interface: String,
    link: u32,
    links: RouteSocket,
    implementation: Implementation,
}

enum Implementation {
    Embedded(fairlead_tunnel::Device),
    Kernel(WireGuard),
}

impl MarkedDevice {
    /// Opens the device in the network namespace of the calling thread, and sets it up: creates it, or adopts the link of this name that
    /// has the alias. [`Settings::handover_socket`] has no effect.
    ///
    /// # Errors
    /// The link of this name has another alias, another process has it open, or the requested implementation is missing.
    pub fn open(settings: &Settings, alias: &str) -> Result<Self, Error> {
        let mut links = RouteSocket::open()?;
        let present = links.link_by_name(&settings.interface)?;
        if present.as_ref().is_some_and(|link| link.alias.as_deref() != Some(alias)) {
            return Err(Error::NotOurs { interface: settings.interface.clone(), alias: alias.to_owned() });
        }
        let kind = present.as_ref().map(LinkKind::from);
        let implementation = match candidate(settings, kind)? {
            Backend::Embedded => embedded(settings)?,
            Backend::Kernel => match WireGuard::open() {
                Ok(family) => {
                    if present.is_none() {
                        links.apply(&[add_link(&settings.interface, settings.mtu)?])?;
                    }
                    Implementation::Kernel(family)
                }
                Err(error) if error.is_unsupported() && settings.preference == Preference::Auto => {
                    embedded(settings)?
                }
                Err(error) if error.is_unsupported() => return Err(Error::NoKernel(error)),
                Err(error) => return Err(error.into()),
            },
        };
        let link = bring_up(&mut links, settings, Some(alias))?;
        Ok(Self { interface: settings.interface.clone(), link, links, implementation })
    }

    /// The implementation.
    pub fn backend(&self) -> Backend {
        match self.implementation {
            Implementation::Embedded(_) => Backend::Embedded,
            Implementation::Kernel(_) => Backend::Kernel,
        }
    }

    /// Index of the link.
    pub fn link(&self) -> u32 {
        self.link
    }

    /// Configuration of the device, and the state of its peers.
    ///
    /// # Errors
    /// The device was removed, or cannot be read.
    pub fn state(&mut self) -> Result<DeviceState, Error> {
        match &mut self.implementation {
            Implementation::Embedded(tunnel) => Ok(tunnel.state()?),
            Implementation::Kernel(family) => Ok(family.state(&self.interface)?),
        }
    }

    /// Reason why this host did not send the last packet for a peer; see [`WireGuardDevice::send_error`](super::WireGuardDevice::send_error).
    pub fn send_error(&self, peer: &PublicKey) -> Option<String> {
        match &self.implementation {
            Implementation::Embedded(tunnel) => tunnel.send_error(peer),
            Implementation::Kernel(_) => None,
        }
    }

    /// Applies a change; an empty one sends nothing. Peers that stay keep their sessions.
    ///
    /// # Errors
    /// The device was removed, or refuses a value.
    pub fn change(&mut self, change: &DeviceChange) -> Result<(), Error> {
        if change.is_empty() {
            return Ok(());
        }
        match &mut self.implementation {
            Implementation::Embedded(tunnel) => Ok(tunnel.change(change)?),
            Implementation::Kernel(family) => {
                let present = family.state(&self.interface)?;
                Ok(family.update(&self.interface, &narrow(change, &present, SystemTime::now()))?)
            }
        }
    }

    /// Removes the device, and with it its addresses and routes. Dropping it leaves the link for the next process.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn delete(mut self) -> Result<(), Error> {
        match self.implementation {
            Implementation::Embedded(tunnel) => embedded::delete(tunnel, &mut self.links, self.link),
            Implementation::Kernel(_) => match self.links.link(self.link)? {
                Some(link) => Ok(self.links.apply(&[route::delete_link(link.index)])?),
                None => Ok(()),
            },
        }
    }
}

fn embedded(settings: &Settings) -> Result<Implementation, Error> {
    let settings = fairlead_tunnel::Settings::new(&settings.interface, settings.mtu);
    Ok(Implementation::Embedded(fairlead_tunnel::Device::start(settings)?))
}
