//! The embedded WireGuard behind the trait.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::{Mutex, MutexGuard, PoisonError};

use fairlead_keys::{DeviceChange, DeviceState, PublicKey};
use fairlead_netlink::route::{self, RouteSocket};
use ipnet::IpNet;

use super::{
    Backend, Error, PathDatagram, PathSocket, PathSocketStats, PendingHandover, Settings, WireGuardDevice,
};

/// Kind of its links (`IFLA_INFO_KIND`).
pub(super) const KIND: &str = "tun";

pub(super) struct Device {
    tunnel: fairlead_tunnel::Device,
    /// Index of its link.
    link: u32,
    /// Belongs to the namespace in which the device was opened, whichever thread uses it.
    links: Mutex<RouteSocket>,
}

impl Device {
    /// Adopts the TUN of this name, or creates one.
    pub(super) fn open(settings: &Settings) -> Result<Self, Error> {
        let handover_socket = settings.handover_socket.clone();
        let settings = fairlead_tunnel::Settings::new(&settings.interface, settings.mtu);
        let settings = fairlead_tunnel::Settings { handover_socket, ..settings };
        let tunnel = fairlead_tunnel::Device::start(settings)?;
        let mut links = RouteSocket::open()?;
        let link = links.link_by_name(tunnel.interface())?.ok_or_else(|| vanished(&tunnel))?.index;
        Ok(Self { tunnel, link, links: Mutex::new(links) })
    }

    /// Whether the link is where it was. One that is renamed, or moved to another namespace, stays attached, and nothing leads packets
    /// there. A kernel that cannot be asked is no reason to give up the sessions.
    fn check_link(&self) -> Result<(), Error> {
        match self.links().link(self.link) {
            Ok(Some(link)) if link.name == self.tunnel.interface() => Ok(()),
            Ok(_) => Err(vanished(&self.tunnel)),
            Err(error) => {
                tracing::debug!(%error, interface = self.tunnel.interface(), "cannot look up the link");
                Ok(())
            }
        }
    }

    /// A panic leaves the socket usable: requests are independent of each other.
    fn links(&self) -> MutexGuard<'_, RouteSocket> {
        self.links.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn vanished(tunnel: &fairlead_tunnel::Device) -> Error {
    Error::Vanished(tunnel.interface().to_owned())
}

/// Removes a device and its link of this index, which another program may have removed.
pub(super) fn delete(
    tunnel: fairlead_tunnel::Device,
    links: &mut RouteSocket,
    link: u32,
) -> Result<(), Error> {
    match tunnel.delete() {
        // The packet loop has ended, as it does without its link.
        Err(fairlead_tunnel::Error::Stopped(_)) => {}
        outcome => return Ok(outcome?),
    }
    match links.link(link)? {
        Some(link) => Ok(links.apply(&[route::delete_link(link.index)])?),
        None => Ok(()),
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
        let state = self.tunnel.state()?;
        self.check_link()?;
        Ok(state)
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

    fn send_error(&self, peer: &PublicKey) -> Option<String> {
        self.tunnel.send_error(peer)
    }

    fn open_path_socket(&self) -> io::Result<Option<Box<dyn PathSocket>>> {
        let socket = self.tunnel.open_path_socket()?;
        let dropped = self.tunnel.path_socket_stats().dropped_without_reader;
        tracing::info!(dropped, "opened the path socket: datagrams of paths are read from now on");
        Ok(socket.map(|socket| Box::new(socket) as Box<dyn PathSocket>))
    }

    fn hand_over(self: Box<Self>, path: PathBuf) -> Result<Option<PendingHandover>, Error> {
        Ok(Some(self.tunnel.hand_over(path)?))
    }

    fn delete(self: Box<Self>) -> Result<(), Error> {
        let Self { tunnel, link, links } = *self;
        delete(tunnel, &mut links.into_inner().unwrap_or_else(PoisonError::into_inner), link)
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

    fn kept_endpoints(&self) -> Vec<SocketAddr> {
        self.kept_endpoints()
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
