//! Device, addresses and routes of this machine.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, UdpSocket};

use anyhow::{Context as _, bail};
use fairlead_api::names::LINK_ALIAS_CONNECT;
use fairlead_dataplane::routes::Difference;
use fairlead_dataplane::uplink::has_ipv6;
use fairlead_dataplane::wireguard::{MarkedDevice, Settings};
use fairlead_keys::{DeviceConfig, DeviceState, PeerConfig, PrivateKey, PublicKey};
use fairlead_netlink::Message;
use fairlead_netlink::route::{
    Address, AddressFlags, Route, RouteSocket, Scope, add_address, add_route, delete_address, delete_route,
    replace_route, set_up,
};
use ipnet::IpNet;

use super::routes::{self, Surroundings};

/// resolv.conf(5)
const RESOLV_CONF: &str = "/etc/resolv.conf";
/// The first port that is chosen: above those that Linux gives to other sockets (`ip_local_port_range`).
const FIRST_PORT: u16 = 61_000;
/// Number of ports that are tried.
const PORTS: u16 = 32;

/// Desired configuration of the machine.
#[derive(Debug, Clone, Default)]
pub(super) struct Desired {
    /// By identity, with the endpoint to begin with.
    pub(super) peers: BTreeMap<PublicKey, PeerConfig>,
    /// Addresses of the machine inside of the mesh.
    pub(super) addresses: Vec<IpNet>,
    /// Addresses that are reached beside the tunnel: those of the API server and of endpoints.
    pub(super) servers: Vec<IpAddr>,
}

/// Device, routes and names of the connection on this machine.
pub(super) struct Host {
    settings: Settings,
    alias: String,
    private_key: PrivateKey,
    given_port: Option<u16>,
    port: Option<u16>,
    socket: RouteSocket,
    device: Option<MarkedDevice>,
    /// The endpoints that were set last: where a peer was heard since then stays.
    endpoints: BTreeMap<PublicKey, SocketAddr>,
}

impl Host {
    /// Opens the device: creates it, or takes over what an earlier process of this Peer has left.
    ///
    /// # Errors
    /// The name of the device is taken, or the kernel refuses.
    pub(super) fn open(
        settings: Settings,
        peer: &str,
        private_key: PrivateKey,
        given_port: Option<u16>,
    ) -> anyhow::Result<Self> {
        let socket = RouteSocket::open()?;
        let alias = format!("{LINK_ALIAS_CONNECT}{peer}");
        let endpoints = BTreeMap::new();
        let mut host =
            Self { settings, alias, private_key, given_port, port: None, socket, device: None, endpoints };
        host.reopen().context("cannot make a WireGuard device, which root can")?;
        Ok(host)
    }

    /// State of the device; `None` while there is none.
    pub(super) fn state(&mut self) -> Option<DeviceState> {
        let state = self.device.as_mut()?.state();
        state.inspect_err(|error| tracing::warn!(%error, "cannot read the WireGuard device")).ok()
    }

    /// Error because of which this machine does not send to a peer, if there is one.
    pub(super) fn send_error(&self, peer: &PublicKey) -> Option<String> {
        self.device.as_ref()?.send_error(peer)
    }

    /// The networks that this machine is on.
    ///
    /// # Errors
    /// The kernel cannot be read.
    pub(super) fn networks(&mut self) -> anyhow::Result<Vec<IpNet>> {
        let own_link = self.device.as_ref().map(MarkedDevice::link).unwrap_or_default();
        Ok(Surroundings::of(&routes::present(&mut self.socket)?, own_link, "").networks)
    }

    /// Lets the device begin with the endpoint that it is told next, also if it is the same.
    pub(super) fn forget_endpoints(&mut self) {
        self.endpoints.clear();
    }

    /// Brings the machine to what it is to be, and sends nothing where it is. Returns what cannot be, one sentence each.
    ///
    /// # Errors
    /// The kernel refuses what everything else depends on.
    pub(super) fn apply(&mut self, desired: &Desired) -> anyhow::Result<Vec<String>> {
        let link = self.ensure_device()?;
        let has_ipv6 = has_ipv6();
        let addresses = desired.addresses.iter().filter(|address| has_ipv6 || address.addr().is_ipv4());
        let addresses: Vec<IpNet> = addresses.copied().collect();
        self.set_addresses(link, &addresses)?;
        let present = routes::present(&mut self.socket)?;
        let resolv_conf = std::fs::read_to_string(RESOLV_CONF).unwrap_or_default();
        let around = Surroundings::of(&present, link, &resolv_conf);
        let prefixes = desired.peers.values().flat_map(|peer| peer.allowed_ips.iter().copied());
        let prefixes: Vec<IpNet> = prefixes.collect();
        let destinations = routes::destinations(&prefixes, &around, &desired.servers, &addresses);
        let difference = routes::difference(&destinations, link, &present);
        let problems = self.set_routes(&difference)?;
        // Last: no route into the tunnel leads to a new endpoint any more.
        self.configure(&desired.peers)?;
        Ok(problems)
    }

    /// Removes the device, and with it addresses and routes.
    ///
    /// # Errors
    /// The kernel refuses.
    pub(super) fn remove(self) -> anyhow::Result<()> {
        let Some(device) = self.device else { return Ok(()) };
        let interface = self.settings.interface;
        device.delete().with_context(|| format!("cannot remove the WireGuard device {interface}"))
    }

    /// Other programs remove links and set them down.
    fn ensure_device(&mut self) -> anyhow::Result<u32> {
        let present = self.socket.link_by_name(&self.settings.interface)?;
        let present = present.filter(|link| link.alias.as_deref() == Some(self.alias.as_str()));
        if let (Some(device), Some(link)) = (&mut self.device, present)
            && device.link() == link.index
            && device.state().is_ok()
        {
            if !link.up {
                self.socket.apply(&[set_up(link.index, true)])?;
            }
            return Ok(link.index);
        }
        self.device = None;
        self.endpoints.clear();
        self.reopen()
    }

    fn reopen(&mut self) -> anyhow::Result<u32> {
        let device = MarkedDevice::open(&self.settings, &self.alias)?;
        let link = device.link();
        tracing::info!(interface = self.settings.interface, wireguard = %device.backend(), "opened the WireGuard device");
        self.device = Some(device);
        Ok(link)
    }

    fn set_addresses(&mut self, link: u32, wanted: &[IpNet]) -> anyhow::Result<()> {
        let present = self.socket.addresses_on(link)?;
        let is_there = |wanted: &&IpNet| present.iter().any(|address| address.prefix == **wanted);
        // Those of the link itself (`fe80::`) are the kernel's.
        let is_extra =
            |address: &&Address| address.scope == Scope::UNIVERSE && !wanted.contains(&address.prefix);
        let address = |prefix: &IpNet| Address {
            link,
            prefix: *prefix,
            scope: Scope::UNIVERSE,
            flags: if prefix.addr().is_ipv6() { AddressFlags::NODAD } else { AddressFlags::default() },
        };
        let add =
            wanted.iter().filter(|wanted| !is_there(wanted)).map(|prefix| add_address(&address(prefix)));
        let delete = present.iter().filter(is_extra).map(delete_address);
        let messages: Vec<Message> = add.chain(delete).collect();
        Ok(self.socket.apply(&messages)?)
    }

    /// New routes first, so that packets for the tunnel always find one.
    fn set_routes(&mut self, difference: &Difference<Route>) -> anyhow::Result<Vec<String>> {
        let set = difference.replace.iter().map(replace_route).chain(difference.add.iter().map(add_route));
        let messages: Vec<Message> = set.chain(difference.delete.iter().map(delete_route)).collect();
        let outcomes = self.socket.apply_each(&messages)?;
        let refused = outcomes.into_iter().filter_map(Result::err).filter(|error| !error.is_missing());
        let blocked = difference
            .blocked
            .iter()
            .map(|route| format!("{} is not reached: another program has a route to it", route.destination));
        Ok(blocked.chain(refused.map(|error| error.to_string())).collect())
    }

    fn configure(&mut self, peers: &BTreeMap<PublicKey, PeerConfig>) -> anyhow::Result<()> {
        let Some(device) = &mut self.device else { bail!("there is no device") };
        let state = device.state()?;
        let port = match self.given_port.or(self.port) {
            Some(port) => port,
            None => choose_port(&state, &self.private_key)?,
        };
        let private_key = self.private_key.clone();
        let config = DeviceConfig { private_key, listen_port: port, fwmark: 0, peers: peers.clone() };
        let change = state.change_of((&config.private_key, port, 0), peers, |key, peer| {
            let is_new = peer.endpoint != self.endpoints.get(key).copied() || !state.peers.contains_key(key);
            (peer, peer.endpoint.filter(|_| is_new))
        });
        // Another program may have taken the port: then another one is chosen.
        self.port = None;
        device.change(&change)?;
        self.port = Some(port);
        self.endpoints = peers.iter().filter_map(|(key, peer)| Some((*key, peer.endpoint?))).collect();
        Ok(())
    }
}

/// The port of a device that was configured before, or one that is free and the same after each start: it is in the mappings of NATs.
fn choose_port(state: &DeviceState, private_key: &PrivateKey) -> io::Result<u16> {
    if state.private_key.as_ref() == Some(private_key) && state.listen_port != 0 {
        return Ok(state.listen_port);
    }
    let [first, second, ..] = private_key.public_key().0;
    let start = u16::from_be_bytes([first, second]) % (u16::MAX - FIRST_PORT - PORTS);
    let mut ports = (0..PORTS).map(|number| FIRST_PORT + start + number);
    ports
        .find(|port| is_free(*port))
        .ok_or_else(|| io::Error::other("no UDP port is free: use --listen-port"))
}

fn is_free(port: u16) -> bool {
    let is_in_use = |error: io::Error| error.kind() == io::ErrorKind::AddrInUse;
    // A kernel without IPv6 refuses the second for another reason.
    !UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).is_err_and(is_in_use)
        && !UdpSocket::bind((Ipv6Addr::UNSPECIFIED, port)).is_err_and(is_in_use)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_is_the_same_after_each_start_unless_it_is_taken() {
        let key = PrivateKey([64; 32]);
        let new = DeviceState { private_key: None, listen_port: 0, fwmark: 0, peers: BTreeMap::new() };
        let port = choose_port(&new, &key).unwrap();
        assert!(port >= FIRST_PORT);
        assert_eq!(choose_port(&new, &key).unwrap(), port);
        let holder = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, port)).unwrap();
        assert_ne!(choose_port(&new, &key).unwrap(), port);
        drop(holder);
        let left = DeviceState { private_key: Some(key.clone()), listen_port: 7, ..new };
        assert_eq!(choose_port(&left, &key).unwrap(), 7);
        assert_ne!(choose_port(&left, &PrivateKey([72; 32])).unwrap(), 7);
    }
}
