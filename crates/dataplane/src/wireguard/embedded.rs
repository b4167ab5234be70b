//! The embedded WireGuard behind the trait.

use std::path::PathBuf;

use fairlead_api::wireguard::{DeviceChange, DeviceState};

use super::{Backend, Error, Retiring, Settings, WireGuardDevice};

/// Kind of its links (`IFLA_INFO_KIND`).
pub(super) const KIND: &str = "tun";

pub(super) struct Device {
    tunnel: fairlead_tunnel::Device,
}

impl Device {
    /// Adopts the TUN of this name, or makes one.
    pub(super) fn open(settings: &Settings) -> Result<Self, Error> {
        let predecessor = settings.predecessor.clone();
        let settings = fairlead_tunnel::Settings::new(&settings.interface, settings.mtu);
        let settings = fairlead_tunnel::Settings { predecessor, ..settings };
        Ok(Self { tunnel: fairlead_tunnel::Device::start(settings)? })
    }
}

impl WireGuardDevice for Device {
    fn backend(&self) -> Backend {
        Backend::Embedded
    }

    fn interface(&self) -> &str {
        self.tunnel.interface()
    }

    fn state(&self) -> Result<DeviceState, Error> {
        Ok(self.tunnel.state()?)
    }

    fn change(&self, change: &DeviceChange) -> Result<(), Error> {
        if change.is_empty() {
            return Ok(());
        }
        Ok(self.tunnel.change(change)?)
    }

    fn retire(self: Box<Self>, path: PathBuf) -> Result<Option<Retiring>, Error> {
        Ok(Some(self.tunnel.retire(path)?))
    }

    fn delete(self: Box<Self>) -> Result<(), Error> {
        Ok(self.tunnel.delete()?)
    }
}
