//! The tunnels of this node's location: what the kernel is to have, who answers, and what follows for routes.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use fairlead_address::IpFamily;
use fairlead_api::names::MARK_FROM_WIREGUARD;
use fairlead_dataplane::encapsulation::{self, Encapsulation, Tunnels};
use fairlead_dataplane::mesh::PlainRoute;
use fairlead_path::State;
use fairlead_tunnel::EchoSockets;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, SockaddrStorage, sendto, setsockopt, socket,
    sockopt,
};

use super::{TunnelHealth, packet};
use crate::apply::kernel::Kernel;
use crate::apply::paths::PathDriver;
use crate::model::problem::MeshProblem;
use crate::plan::desired::{Desired, DesiredTunnels};

/// Time for which packets are accepted from nodes that may not know yet that this one wants none.
const LINGER: Duration = Duration::from_secs(60);

/// Tunnels of this node, their health, and the sockets by which it asks.
pub struct EncapsulationWatch {
    health: TunnelHealth,
    sockets: EchoSockets,
    asked: BTreeSet<IpAddr>,
    lingering: Lingering,
    tunnels: Tunnels,
    uplink_mtu: u32,
    /// Whether the tunnels that an earlier program used were taken over.
    has_adopted: bool,
}

impl Default for EncapsulationWatch {
    fn default() -> Self {
        Self {
            health: TunnelHealth::default(),
            sockets: EchoSockets::new(rand::random()),
            asked: BTreeSet::new(),
            lingering: Lingering::default(),
            tunnels: Tunnels::new(),
            uplink_mtu: 0,
            has_adopted: false,
        }
    }
}

impl EncapsulationWatch {
    /// Brings the tunnels to what is desired. Where there can be none, packets take the encrypted tunnel.
    pub fn apply(&mut self, kernel: &mut impl Kernel, desired: &Desired, uplink_mtu: u32, now: Instant) {
        if !self.has_adopted && !desired.tunnels.local.is_empty() {
            self.has_adopted = true;
            // What cannot be read is asked for anew.
            self.health.adopt(kernel.tunnel_remotes().unwrap_or_default());
        }
        self.uplink_mtu = uplink_mtu;
        let Some((local, senders)) = self.lingering.wanted(&desired.tunnels, now) else { return };
        let wanted = Encapsulation { local, senders, uplink_mtu };
        self.tunnels = kernel.encapsulate(&wanted).unwrap_or_else(|error| {
            let failed = |local: &IpAddr| (IpFamily::of(*local), Err(error.to_string()));
            wanted.local.iter().map(failed).collect()
        });
    }

    /// Routes through tunnels whose other end answers.
    pub fn routes(&self, desired: &Desired) -> Vec<PlainRoute> {
        let route = |(destination, remote): &(_, IpAddr)| {
            let link = self.link(*remote).filter(|_| self.health.is_up(*remote))?;
            Some(PlainRoute { destination: *destination, gateway: *remote, link, is_tunnel: true })
        };
        desired.tunnels.routes.iter().filter_map(route).collect()
    }

    fn link(&self, remote: IpAddr) -> Option<u32> {
        self.tunnels.get(&IpFamily::of(remote))?.as_ref().ok().copied()
    }

    /// Reads the answers and asks again. Returns whether packets take other ways now.
    pub fn observe(&mut self, desired: &DesiredTunnels, now: Instant) -> bool {
        let remotes = desired.ends.keys().copied().filter(|remote| self.link(*remote).is_some()).collect();
        let to_ask = self.health.next(&remotes);
        let local =
            |remote: IpAddr| desired.local.iter().copied().find(|it| it.is_ipv4() == remote.is_ipv4());
        let replies = self.sockets.exchange_by(&to_ask, |_, remote, request| {
            let length = if self.health.is_up(remote) { 0 } else { longest(remote, self.uplink_mtu) };
            let packet = local(remote).and_then(|local| packet::in_tunnel(local, remote, request, length));
            packet.map_or(Err(nix::errno::Errno::EMSGSIZE), |packet| send_raw(remote, &packet))
        });
        let asked = std::mem::replace(&mut self.asked, to_ask);
        let asked = asked.intersection(&remotes).copied().collect();
        self.health.observe(now, &asked, &replies)
    }

    /// Problems that keep packets from taking tunnels. A node without a session says nothing of the network between.
    pub fn problems(&self, desired: &DesiredTunnels, paths: &PathDriver, now: Instant) -> Vec<MeshProblem> {
        let missing = self.tunnels.iter().filter_map(|(family, tunnel)| {
            let is_needed = desired.ends.keys().any(|remote| IpFamily::of(*remote) == *family);
            let reason = tunnel.as_ref().err().filter(|_| is_needed)?.clone();
            Some(MeshProblem::EncapsulationMissing { family: *family, reason })
        });
        let blocked = desired.ends.iter().filter_map(|(remote, (node, key))| {
            let has_session = || paths.status(key, now).is_some_and(|(status, _)| status.state == State::Up);
            let is_blocked = self.link(*remote).is_some() && self.health.has_failed(*remote) && has_session();
            is_blocked.then(|| MeshProblem::EncapsulationBlocked { node: node.clone(), remote: *remote })
        });
        missing.chain(blocked).collect()
    }
}

/// The longest packet that the tunnel lets through.
fn longest(remote: IpAddr, uplink_mtu: u32) -> usize {
    usize::try_from(encapsulation::mtu(IpFamily::of(remote), uplink_mtu)).unwrap_or_default()
}

/// Sends a packet with its IP header, past the mesh.
fn send_raw(remote: IpAddr, packet: &[u8]) -> nix::Result<()> {
    let family = if remote.is_ipv4() { AddressFamily::Inet } else { AddressFamily::Inet6 };
    let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
    let socket = socket(family, SockType::Raw, flags, SockProtocol::Raw)?;
    setsockopt(&socket, sockopt::Mark, &MARK_FROM_WIREGUARD)?;
    let remote = SockaddrStorage::from(SocketAddr::new(remote, 0));
    sendto(socket.as_raw_fd(), packet, &remote, MsgFlags::MSG_DONTWAIT).map(drop)
}

/// Local addresses and senders that were wanted a short while ago.
#[derive(Debug, Default)]
struct Lingering {
    started: Option<Instant>,
    /// Last addresses at which tunnels began, and the last time when they were wanted.
    local: Option<(Vec<IpAddr>, Instant)>,
    senders: BTreeMap<IpAddr, Instant>,
}

impl Lingering {
    /// Addresses at which tunnels begin, and addresses that may send: those that are desired, and those that were not long ago. Members
    /// that are gone may send no more. `None` while it is not known what an earlier program had, and nothing is desired.
    fn wanted(&mut self, desired: &DesiredTunnels, now: Instant) -> Option<(Vec<IpAddr>, Vec<IpAddr>)> {
        let is_recent = |at: Instant| now.saturating_duration_since(at) <= LINGER;
        self.senders.extend(desired.senders.iter().map(|sender| (*sender, now)));
        self.senders.retain(|sender, at| {
            desired.senders.contains(sender) || (is_recent(*at) && desired.internal.contains(sender))
        });
        if !desired.local.is_empty() {
            self.local = Some((desired.local.clone(), now));
        }
        let started = *self.started.get_or_insert(now);
        match self.local.take_if(|(_, at)| !is_recent(*at)) {
            Some(_) => self.senders.clear(),
            None if self.local.is_none() && is_recent(started) && self.senders.is_empty() => return None,
            None => {}
        }
        let local = self.local.as_ref().map(|(local, _)| local.clone()).unwrap_or_default();
        Some((local, self.senders.keys().copied().collect()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn desired(local: &[&str], senders: &[&str], internal: &[&str]) -> DesiredTunnels {
        let addresses = |texts: &[&str]| texts.iter().map(|text| ip(text)).collect::<BTreeSet<_>>();
        DesiredTunnels {
            local: local.iter().map(|text| ip(text)).collect(),
            senders: addresses(senders),
            internal: addresses(internal),
            ..DesiredTunnels::default()
        }
    }

    #[test]
    fn who_does_not_know_of_a_change_yet_may_still_send_and_who_is_gone_may_not() {
        let (mut lingering, start) = (Lingering::default(), Instant::now());
        let all = ["10.0.0.1", "10.0.0.2", "10.0.0.3"];
        let local = vec![ip("10.0.0.1")];
        let mut at = |seconds, desired| lingering.wanted(&desired, start + Duration::from_secs(seconds));
        let two = vec![ip("10.0.0.2"), ip("10.0.0.3")];
        let on = || desired(&["10.0.0.1"], &["10.0.0.2", "10.0.0.3"], &all);
        assert_eq!(at(0, on()), Some((local.clone(), two.clone())));
        // One moves to another location.
        let moved = || desired(&["10.0.0.1"], &["10.0.0.2"], &all);
        assert_eq!(at(10, moved()), Some((local.clone(), two.clone())));
        assert_eq!(at(71, moved()), Some((local.clone(), vec![ip("10.0.0.2")])));
        // Tunnels are wanted no more, and one member leaves the cluster.
        assert_eq!(at(80, desired(&[], &[], &all)), Some((local.clone(), vec![ip("10.0.0.2")])));
        assert_eq!(at(81, desired(&[], &[], &["10.0.0.1"])), Some((local, vec![])));
        assert_eq!(at(132, desired(&[], &[], &all)), Some((vec![], vec![])));
    }

    #[test]
    fn what_an_earlier_program_had_is_left_for_a_while() {
        let (mut lingering, start) = (Lingering::default(), Instant::now());
        let mut at =
            |seconds| lingering.wanted(&DesiredTunnels::default(), start + Duration::from_secs(seconds));
        assert_eq!((at(0), at(60)), (None, None));
        assert_eq!(at(61), Some((vec![], vec![])));
    }
}
