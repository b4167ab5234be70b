//! The embedded WireGuard behind the trait.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;

use fairlead_api::wireguard::{DeviceChange, DeviceState, PublicKey};
use ipnet::IpNet;

use super::{
    Backend, Error, PathDatagram, PathSocket, PathSocketStats, PendingHandover, Settings, WireGuardDevice,
};

/// Kind of its links (`IFLA_INFO_KIND`).
pub(super) const KIND: &str = "tun";

pub(super) struct Device {
    tunnel: fairlead_tunnel::Device,
}

impl Device {
    /// Adopts the TUN of this name, or creates one.
    pub(super) fn open(settings: &Settings) -> Result<Self, Error> {
        let handover_socket = settings.handover_socket.clone();
        let settings = fairlead_tunnel::Settings::new(&settings.interface, settings.mtu);
        let settings = fairlead_tunnel::Settings { handover_socket, ..settings };
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

    fn accept(&self, prefixes: &BTreeMap<PublicKey, Vec<IpNet>>) -> Result<(), Error> {
        Ok(self.tunnel.accept(prefixes)?)
    }

    fn open_path_socket(&self) -> io::Result<Option<Box<dyn PathSocket>>> {
        let socket = self.tunnel.open_path_socket()?;
        Ok(socket.map(|socket| Box::new(socket) as Box<dyn PathSocket>))
    }

    fn hand_over(self: Box<Self>, path: PathBuf) -> Result<Option<PendingHandover>, Error> {
        Ok(Some(self.tunnel.hand_over(path)?))
    }

    fn delete(self: Box<Self>) -> Result<(), Error> {
        Ok(self.tunnel.delete()?)
    }
}

impl PathSocket for fairlead_tunnel::PathSocket {
    fn send(&self, local: Option<IpAddr>, remote: SocketAddr, payload: &[u8]) -> io::Result<()> {
        self.send(local, remote, payload)
    }

    fn try_receive(&self) -> Option<PathDatagram> {
        self.try_receive()
    }

    fn take_unanswered(&self) -> BTreeSet<PublicKey> {
        self.take_unanswered()
    }

    fn send_both_ways(&self, peer: &PublicKey, also: Option<SocketAddr>) {
        self.send_both_ways(peer, also);
    }

    fn open_sockets(&self, count: u16) -> io::Result<()> {
        self.open_sockets(count)
    }

    fn send_from_socket(&self, socket: u16, remote: SocketAddr, payload: &[u8]) -> io::Result<()> {
        self.send_from_socket(socket, remote, payload)
    }

    fn keep_socket(&self, socket: u16, remote: SocketAddr) -> io::Result<()> {
        self.keep_socket(socket, remote)
    }

    fn leave_socket(&self, remote: SocketAddr) {
        self.leave_socket(remote);
    }

    fn close_sockets(&self) {
        self.close_sockets();
    }

    fn stats(&self) -> PathSocketStats {
        self.stats()
    }
}
