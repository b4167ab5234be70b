//! The kernel's WireGuard behind the trait.

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime};

use fairlead_api::names::MARK_FROM_WIREGUARD;
use fairlead_keys::{DeviceChange, DeviceState, PeerConfig, PeerState, PublicKey};
use fairlead_netlink::route::{self, RouteSocket};
use fairlead_netlink::wireguard::{DeviceUpdate, PeerUpdate, WireGuard, add_link};
use ipnet::IpNet;

use self::path_socket::PathPort;
use super::{Backend, Error, PathSocket, PendingHandover, Settings, WireGuardDevice};

/// Least time between handshakes (WireGuard paper 6.1).
const REKEY_TIMEOUT: Duration = Duration::from_secs(5);

mod path_socket;
mod path_table;
mod retests;
mod self_test;

pub(super) struct Device {
    interface: String,
    sockets: Mutex<Sockets>,
    /// Without nftables there is none.
    path_port: Result<Arc<PathPort>, fairlead_netlink::Error>,
}

/// Both belong to the namespace in which the device was opened, whichever thread uses them.
#[derive(Debug)]
struct Sockets {
    family: WireGuard,
    links: RouteSocket,
}

impl Device {
    /// Adopts the link, or creates it.
    pub(super) fn open(
        settings: &Settings,
        family: WireGuard,
        links: &mut RouteSocket,
        exists: bool,
    ) -> Result<Self, Error> {
        if !exists {
            links.apply(&[add_link(&settings.interface, settings.mtu)?])?;
        }
        let sockets = Mutex::new(Sockets { family, links: RouteSocket::open()? });
        let path_port = PathPort::new().map(Arc::new);
        Ok(Self { interface: settings.interface.clone(), sockets, path_port })
    }

    /// A panic leaves the sockets usable: requests are independent of each other.
    fn sockets(&self) -> MutexGuard<'_, Sockets> {
        self.sockets.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl WireGuardDevice for Device {
    fn backend(&self) -> Backend {
        Backend::Kernel
    }

    fn interface(&self) -> &str {
        &self.interface
    }

    fn state(&self) -> Result<DeviceState, Error> {
        Ok(self.sockets().family.state(&self.interface)?)
    }

    fn change(&self, change: &DeviceChange) -> Result<(), Error> {
        if change.is_empty() {
            return Ok(());
        }
        let mut sockets = self.sockets();
        let present = sockets.family.state(&self.interface)?;
        sockets.family.update(&self.interface, &narrow(change, &present, SystemTime::now()))?;
        let mark = change.fwmark.unwrap_or(present.fwmark);
        if let Ok(path_port) = &self.path_port {
            path_port
                .set_wireguard_port(configured_port(mark, change.listen_port.unwrap_or(present.listen_port)));
        }
        Ok(())
    }

    fn open_path_socket(&self) -> io::Result<Option<Box<dyn PathSocket>>> {
        let path_port = self.path_port.as_ref().map_err(|error| io::Error::other(error.to_string()))?;
        let state = self.state().map_err(io::Error::other)?;
        let port = configured_port(state.fwmark, state.listen_port);
        Ok(path_port.open(port).map(|socket| Box::new(socket) as Box<dyn PathSocket>))
    }

    fn hand_over(self: Box<Self>, _: PathBuf) -> Result<Option<PendingHandover>, Error> {
        Ok(None)
    }

    fn delete(self: Box<Self>) -> Result<(), Error> {
        if let Ok(path_port) = &self.path_port {
            path_port.remove()?;
        }
        let mut sockets = self.sockets();
        match sockets.links.link_by_name(&self.interface)? {
            Some(link) => Ok(sockets.links.apply(&[route::delete_link(link.index)])?),
            None => Ok(()),
        }
    }
}

/// The port of a device that was configured; zero before. The kernel gives a new device that is up a random one, from which
/// nothing may be sent: peers would take it for this node's.
fn configured_port(mark: u32, port: u16) -> u16 {
    if mark == MARK_FROM_WIREGUARD { port } else { 0 }
}

/// Removes from a change what is unchanged.
///
/// Replacing a peer's allowed addresses removes them for a moment, in which packets are lost: neither a change of endpoint alone
/// nor a prefix that another peer takes over must do that.
pub(super) fn narrow(change: &DeviceChange, present: &DeviceState, now: SystemTime) -> DeviceUpdate {
    let mut remove = change.remove_peers.clone();
    let mut set = Vec::new();
    let prefixes = |(key, peer)| trunc(peer).into_iter().map(move |prefix| (prefix, key));
    let owners: BTreeMap<IpNet, &PublicKey> = change.set_peers.iter().flat_map(prefixes).collect();
    for (key, wanted) in &change.set_peers {
        match present.peers.get(key).filter(|_| !change.remove_peers.contains(key)) {
            None => set.push(whole_peer(*key, wanted)),
            Some(state) if waits_in_vain(wanted, state) => {
                remove.push(*key);
                set.push(whole_peer(*key, wanted));
            }
            Some(state) => {
                let is_taken = |prefix: &IpNet| owners.get(prefix).is_some_and(|owner| *owner != key);
                set.extend(changed_peer(*key, wanted, state, is_taken));
            }
        }
    }
    for key in &change.handshakes {
        let stays = !remove.contains(key);
        if let Some(state) = present.peers.get(key).filter(|state| stays && !has_new_session(state, now)) {
            let present = &state.config;
            let wanted = change.set_peers.get(key).unwrap_or(present);
            let endpoint = wanted.endpoint.or(present.endpoint);
            set.retain(|update| update.public_key != *key);
            remove.push(*key);
            set.push(whole_peer(*key, &PeerConfig { endpoint, ..wanted.clone() }));
        }
    }
    if change.private_key.is_some() && present.private_key.is_some() {
        let stays = |key: &PublicKey| !remove.contains(key);
        let called = present.peers.iter().filter(|(key, _)| stays(key)).flat_map(|(key, state)| {
            let wanted = change.set_peers.get(key).unwrap_or(&state.config);
            call(*key, wanted.persistent_keepalive)
        });
        set.extend(called.collect::<Vec<_>>());
    }
    // A peer that loses prefixes comes after those that gain them, so that the kernel moves what goes from one to the other.
    set.sort_by_key(|update| update.only_existing && update.replace_allowed_ips);
    DeviceUpdate {
        private_key: change.private_key.clone(),
        listen_port: change.listen_port,
        fwmark: change.fwmark,
        remove,
        set,
    }
}

/// Makes the kernel call a peer that keepalives are sent to: one is sent when they are switched on (`set_peer`), and the device, which has
/// just taken another private key, has no session for it. Else the peer would learn of the new key with the next packet.
fn call(public_key: PublicKey, keepalive: Option<u16>) -> Vec<PeerUpdate> {
    let Some(seconds) = keepalive.filter(|seconds| *seconds > 0) else { return Vec::new() };
    let switch = |seconds| PeerUpdate {
        public_key,
        only_existing: true,
        preshared_key: None,
        endpoint: None,
        persistent_keepalive: Some(seconds),
        replace_allowed_ips: false,
        allowed_ips: Vec::new(),
    };
    vec![switch(0), switch(seconds)]
}

/// Whether a handshake was sent to another endpoint, and the peer was never heard. The kernel repeats a handshake after 5 s
/// (`REKEY_TIMEOUT`), wherever the peer is by then; one that is made anew is sent a handshake at once. It has no session that
/// it could lose, and not even a handshake of the peer under way: that would count as received.
fn waits_in_vain(wanted: &PeerConfig, state: &PeerState) -> bool {
    let is_moved = wanted.endpoint.is_some() && wanted.endpoint != state.config.endpoint;
    let is_unheard = state.last_handshake.is_none() && state.rx_bytes == 0;
    is_moved && is_unheard && state.config.endpoint.is_some() && state.tx_bytes > 0
}

/// Whether the peer has a session that it may not have known of when it said that it has none. Nothing makes the kernel start a
/// handshake while it takes a session for alive, but to make the peer anew; this session must outlive that.
fn has_new_session(state: &PeerState, now: SystemTime) -> bool {
    let age = state.last_handshake.map(|at| now.duration_since(at));
    age.is_some_and(|age| age.is_ok_and(|age| age < REKEY_TIMEOUT))
}

fn whole_peer(public_key: PublicKey, wanted: &PeerConfig) -> PeerUpdate {
    PeerUpdate {
        public_key,
        only_existing: false,
        preshared_key: wanted.preshared_key.map(|key| key.0),
        endpoint: wanted.endpoint,
        persistent_keepalive: wanted.persistent_keepalive,
        replace_allowed_ips: true,
        allowed_ips: wanted.allowed_ips.clone(),
    }
}

fn trunc(config: &PeerConfig) -> BTreeSet<IpNet> {
    config.allowed_ips.iter().map(IpNet::trunc).collect()
}

/// `None` when the peer is unchanged. The kernel itself takes away a prefix that another peer of the change gets.
fn changed_peer(
    public_key: PublicKey,
    wanted: &PeerConfig,
    state: &PeerState,
    is_taken: impl Fn(&IpNet) -> bool,
) -> Option<PeerUpdate> {
    let present = &state.config;
    let preshared = |config: &PeerConfig| config.preshared_key.map(|key| key.0).unwrap_or_default();
    let keepalive = |config: &PeerConfig| config.persistent_keepalive.unwrap_or_default();
    let desired = trunc(wanted);
    let present_prefixes = trunc(present);
    let replace_allowed_ips =
        present_prefixes.iter().any(|prefix| !desired.contains(prefix) && !is_taken(prefix));
    let allowed_ips = if replace_allowed_ips { desired } else { &desired - &present_prefixes };
    let update = PeerUpdate {
        public_key,
        only_existing: true,
        preshared_key: (preshared(wanted) != preshared(present)).then(|| preshared(wanted)),
        endpoint: wanted.endpoint.filter(|endpoint| present.endpoint != Some(*endpoint)),
        persistent_keepalive: (keepalive(wanted) != keepalive(present)).then(|| keepalive(wanted)),
        replace_allowed_ips,
        allowed_ips: allowed_ips.into_iter().collect(),
    };
    let nothing = PeerUpdate {
        public_key,
        only_existing: true,
        preshared_key: None,
        endpoint: None,
        persistent_keepalive: None,
        replace_allowed_ips: false,
        allowed_ips: Vec::new(),
    };
    (update != nothing).then_some(update)
}

#[cfg(test)]
mod tests;
