//! Asks the default gateways to lead the WireGuard port to this node, for peers that hole punching does not help.
//!
//! One request per address family, kept by [`PortMapper`]: in IPv4 a port of the gateway, in IPv6 a pinhole in its firewall.
//! Gateways are those of the kernel's main table; another gateway, address or port is another request. The end of the program
//! leaves mappings to its successor; leaving the mesh releases them.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use fairlead_address::is_private;
use fairlead_api::names::MARK_FROM_WIREGUARD;
use fairlead_dataplane::kernel_watch::KernelChanges;
use fairlead_dataplane::uplink::{HostNetwork, Ignored};
use fairlead_netlink::route::{Change, Link, Route, RouteKind, TABLE_MAIN};
use tokio::sync::watch;

use crate::{Failure, Mapping, Nonce, PortMapper, Request};

/// Grant of each gateway, or why it refuses; gateways that answer nothing are left out.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PortMappings(pub BTreeMap<IpAddr, Result<Mapping, Failure>>);

/// Whether a port is to be mapped.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// No port is to be mapped.
    No,
    /// The port is not known yet: present mappings stay.
    Unknown,
    /// A port is to be mapped.
    Yes {
        /// Name of the device whose port it is: it leads to no gateway.
        interface: String,
    },
}

/// Keeps the mappings as settings and routes say.
pub struct PortMappingTask {
    /// Says whether a port is to be mapped now.
    pub wanted: Box<dyn Fn() -> Wanted + Send + Sync>,
    /// Changes of that.
    pub wanted_changed: watch::Receiver<u64>,
    /// Changes of links, addresses and routes of this host; see [`concerns`].
    pub kernel: KernelChanges,
    /// The port on which this node listens; `None` while there is none.
    pub port: watch::Receiver<Option<u16>>,
    /// The nonce of the mappings.
    pub nonce: Nonce,
    /// Takes what gateways granted.
    pub found: watch::Sender<PortMappings>,
}

/// Work in one address family.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Work {
    /// There is no gateway now.
    Nothing,
    /// There is no mesh, or it is not to be done.
    Release,
    Keep(Request),
}

impl PortMappings {
    /// External addresses and ports that gateways have mapped to this node.
    pub fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.0.values().flatten().map(|mapping| mapping.external)
    }

    /// Gateways that refuse where no other maps: a user can do something about that.
    pub fn refusals(&self) -> impl Iterator<Item = (IpAddr, &Failure)> {
        let has_mapping = self.0.values().any(Result::is_ok);
        let outcomes = self.0.iter().filter(move |_| !has_mapping);
        outcomes.filter_map(|(gateway, outcome)| Some((*gateway, outcome.as_ref().err()?)))
    }

    fn update(&mut self, gateway: IpAddr, outcome: Result<Mapping, Failure>) -> bool {
        let found = match outcome {
            Err(Failure::NoAnswer) => None,
            Err(failure) => Some(Err(failure)),
            Ok(mapping) => Some(Ok(mapping)),
        };
        let lasting = |found: &Result<Mapping, Failure>| {
            found.clone().map(|mapping| Mapping { lifetime: Duration::ZERO, ..mapping })
        };
        if self.0.get(&gateway).map(lasting) == found.as_ref().map(lasting) {
            return false;
        }
        match found {
            None => drop(self.0.remove(&gateway)),
            Some(found) => {
                match &found {
                    Err(failure) => {
                        tracing::info!(%gateway, %failure, "the gateway maps no port to this node")
                    }
                    Ok(Mapping { protocol, external, .. }) => {
                        let is_private = is_private(external.ip());
                        tracing::info!(%gateway, %protocol, %external, is_private, "the gateway maps a port to this node");
                    }
                }
                self.0.insert(gateway, found);
            }
        }
        true
    }
}

/// Whether a change of the kernel may be one of gateways, or of this host's addresses on their links.
pub fn concerns(change: &Change) -> bool {
    match change {
        Change::Address { address, .. } => match address.prefix.addr() {
            IpAddr::V4(_) => false,
            IpAddr::V6(address) => !address.is_unicast_link_local(),
        },
        // The kernel does not report the IPv4 routes that go with a link.
        Change::Link { link, .. } => link.kind.as_deref() != Some("veth"),
        Change::Missed => true,
        Change::Route { route, .. } => route.table == TABLE_MAIN && route.destination.prefix_len() == 0,
        Change::Netconf(_) | Change::Rule { .. } | Change::Table(_) => false,
    }
}

impl PortMappingTask {
    /// Runs until it is dropped.
    pub async fn run(mut self) {
        let (mut ipv4, mut ipv6) = (PortMapper::default(), PortMapper::default());
        loop {
            let work = self.work().await;
            let [for_ipv4, for_ipv6] = &work;
            let gateways: Vec<IpAddr> = work.iter().filter_map(Work::gateway).collect();
            self.found.send_if_modified(|found| {
                let before = found.0.len();
                found.0.retain(|gateway, _| gateways.contains(gateway));
                found.0.len() != before
            });
            let found = self.found.clone();
            let keep =
                async { tokio::join!(keep(&mut ipv4, for_ipv4, &found), keep(&mut ipv6, for_ipv6, &found)) };
            let differs = async {
                loop {
                    tokio::select! {
                        Ok(()) = self.wanted_changed.changed() => {}
                        () = self.kernel.changed() => {}
                        Ok(()) = self.port.changed() => {}
                    }
                    let port = *self.port.borrow_and_update();
                    if work_of((self.wanted)(), port, self.nonce).await != work {
                        return;
                    }
                }
            };
            tokio::select! {
                _ = keep => {}
                () = differs => {}
            }
        }
    }

    async fn work(&self) -> [Work; 2] {
        let port = *self.port.borrow();
        work_of((self.wanted)(), port, self.nonce).await
    }
}

async fn work_of(wanted: Wanted, port: Option<u16>, nonce: Nonce) -> [Work; 2] {
    let interface = match wanted {
        Wanted::No => return [Work::Release, Work::Release],
        Wanted::Unknown => return [Work::Nothing, Work::Nothing],
        Wanted::Yes { interface } => interface,
    };
    let Some(port) = port else { return [Work::Nothing, Work::Nothing] };
    let network = tokio::task::spawn_blocking(HostNetwork::read).await;
    match network {
        Ok(Ok(network)) => [true, false]
            .map(|ipv4| request(&network, ipv4, &interface, port, nonce).map_or(Work::Nothing, Work::Keep)),
        Ok(Err(error)) => {
            tracing::warn!(%error, "cannot read the default gateways");
            [Work::Nothing, Work::Nothing]
        }
        // The end of this task ends the program.
        Err(panic) => std::panic::resume_unwind(panic.into_panic()),
    }
}

impl Work {
    fn gateway(&self) -> Option<IpAddr> {
        match self {
            Self::Keep(request) => Some(request.gateway),
            Self::Nothing | Self::Release => None,
        }
    }
}

async fn keep(mapper: &mut PortMapper, work: &Work, found: &watch::Sender<PortMappings>) {
    match work {
        Work::Nothing => {}
        Work::Release => mapper.release().await,
        Work::Keep(request) => {
            let report = |outcome| {
                found.send_if_modified(|found| found.update(request.gateway, outcome));
            };
            return mapper.run(request, report).await;
        }
    }
    std::future::pending().await
}

/// Request to the preferred default gateway of a family; `None` without one. Pure.
fn request(network: &HostNetwork, ipv4: bool, interface: &str, port: u16, nonce: Nonce) -> Option<Request> {
    let is_default = |route: &&Route| {
        let destination = route.destination;
        destination.prefix_len() == 0
            && destination.addr().is_ipv4() == ipv4
            && route.kind == RouteKind::UNICAST
    };
    let preferred = network.routes.iter().filter(is_default).min_by_key(|route| route.metric)?;
    let next_hop = preferred.next_hops.first();
    let gateway = preferred.gateway.or_else(|| next_hop?.gateway).filter(|it| it.is_ipv4() == ipv4)?;
    let index = preferred.link.or_else(|| Some(next_hop?.link))?;
    let is_usable = |link: &&Link| link.index == index && link.up && link.name != interface;
    let link = network.links.iter().find(is_usable)?;
    let ignored = Ignored::default();
    // In IPv4 the kernel chooses. In IPv6 it would choose an address of the link, to which nothing can be led.
    let source =
        if ipv4 {
            None
        } else {
            let mut own = network.own_addresses(&ignored).filter(|address| address.link == index);
            Some(own.find_map(|address| {
                Some(address.prefix.addr()).filter(|ip| ip.is_ipv6() && !is_private(*ip))
            })?)
        };
    Some(Request {
        gateway,
        link: link.name.clone(),
        link_index: index,
        source,
        port,
        nonce,
        mark: MARK_FROM_WIREGUARD,
    })
}

#[cfg(test)]
mod tests;
