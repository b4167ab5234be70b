//! The data path in the kernel: tunnels, routes, rules and the nftables table, brought to a desired state.
//!
//! A new process cannot open the BPF programs of the one before, which takes `CAP_SYS_ADMIN`. It reads from links and routes who the
//! clients are, fills the maps of new programs with them, and replaces each filter in one step; so no packet is lost.
//!
//! Tunnels of the kernel, which Coil's gateways have, give way to ours: a link of ours with another name carries packets while those links
//! are deleted and made anew. The kernel cannot rename a link that is up (before 6.2), and a route is replaced in one step.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::Duration;

use fairlead_address::IpFamily;
use fairlead_api::fou::is_link_name;
use fairlead_dataplane::egress_gateway::{
    self, Applier, GatewayRouting, GatewayTraffic, SourceTable, Sources,
};
use fairlead_dataplane::uplink::{forward_in_gateway, forwards, is_reverse_path_strict};
use fairlead_fou::{ClientTraffic, Counters, Peer, Settings, TunnelLink, Tunnels, link_mtu, link_name};
use fairlead_netlink::route::{KIND_IFB, KIND_IP6TNL, KIND_IPIP, Link, RouteSocket, delete_link};
use ipnet::IpNet;

/// Longest wait for a processor of packets that a tunnel of the kernel has received (`gro_cells`): deleting the link drops them.
const UNDER_WAY: Duration = Duration::from_millis(100);

/// Settings of the data path: its link, its addresses, and its UDP ports.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlaneSettings {
    /// Name of the link to the network.
    pub uplink: String,
    /// The gateway's own addresses.
    pub own: Vec<IpAddr>,
    /// UDP port of FoU.
    pub port: u16,
    /// Whether the outer source port is computed from each inner flow, instead of being `port`.
    pub source_port_auto: bool,
}

/// Desired state of the data path.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Desired {
    /// The addresses of clients.
    pub clients: BTreeSet<IpAddr>,
    /// Prefixes that clients may (`true`) and may not (`false`) send to.
    pub destinations: BTreeMap<IpNet, bool>,
    /// Most connections that a client may have at a time; `None` sets no limit.
    pub max_connections: Option<u32>,
    /// Source addresses that float among the gateways, if the Egress has some.
    pub sources: Option<Sources>,
}

/// Result of applying a desired state.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Applied {
    /// Number of changes.
    pub changes: usize,
    /// Clients whose tunnel the kernel refuses, with the reason.
    pub refused: BTreeMap<IpAddr, String>,
}

/// Reason why the kernel does not have the desired data path.
#[derive(Debug, thiserror::Error)]
pub enum PlaneError {
    /// See [`fairlead_fou::Error`].
    #[error(transparent)]
    Fou(#[from] fairlead_fou::Error),
    /// See [`fairlead_netlink::Error`].
    #[error(transparent)]
    Netlink(#[from] fairlead_netlink::Error),
    /// The pod has no such link.
    #[error("there is no link {0}: a gateway needs the one that the CNI plugin makes")]
    NoUplink(String),
}

type Result<T> = std::result::Result<T, PlaneError>;

/// The data path of the network namespace of the calling thread.
#[derive(Debug)]
pub struct Plane {
    settings: PlaneSettings,
    tunnels: Tunnels,
    routing: Applier,
    /// Routing that was applied last.
    done: Option<GatewayRouting>,
    peers: BTreeMap<IpAddr, Peer>,
}

/// The clients of an earlier process.
///
/// # Errors
/// The kernel cannot be asked.
pub fn earlier_clients() -> Result<Vec<IpAddr>> {
    Ok(egress_gateway::routed_clients()?)
}

impl Plane {
    /// Loads the programs; packets see them when [`Self::apply`] has filled their maps.
    ///
    /// # Errors
    /// There is no uplink, the kernel lacks a feature, or the process a capability; the text says which.
    pub fn open(settings: PlaneSettings, table: SourceTable) -> Result<Self> {
        let uplink = uplink(&settings.uplink)?;
        let tunnels = load(&settings, &uplink)?;
        Ok(Self { settings, tunnels, routing: Applier::new(table), done: None, peers: BTreeMap::new() })
    }

    /// Brings the kernel to what is desired; sends nothing when nothing differs. A client loses its way in first, and gets it last.
    ///
    /// # Errors
    /// The kernel refuses; what is in place stays, and what is missing is tried again by the next call.
    pub fn apply(&mut self, desired: &Desired) -> Result<Applied> {
        let uplink = uplink(&self.settings.uplink)?;
        if uplink.index != self.tunnels.uplink() {
            // It was made anew, and its filters are gone.
            self.tunnels = load(&self.settings, &uplink)?;
            self.peers.clear();
        }
        let mut applied = Applied::default();
        let mut present = TunnelLinks::read()?;
        if !present.kernel.is_empty() {
            applied.changes = self.take_over(desired, &uplink, &present)?;
            present = TunnelLinks::read()?;
        }
        let clients = self.links(desired, &uplink, &present.ours, &mut applied);
        let mut changes = self.set(desired, &uplink, &present.ours, clients)?;
        let wanted: BTreeSet<String> = self.peers.keys().map(|client| link_name(*client)).collect();
        changes = changes.saturating_add(delete_all_but(&present.ours, &wanted)?);
        applied.changes = applied.changes.saturating_add(changes);
        Ok(applied)
    }

    /// Leads packets of all clients by one link of ours for each family, and deletes the kernel's. No client has the name of that link.
    fn take_over(&mut self, desired: &Desired, uplink: &Link, present: &TunnelLinks) -> Result<usize> {
        tracing::info!(links = present.kernel.len(), "tunnels of the kernel, as of Coil, become ours");
        let mut passing = BTreeMap::new();
        for own in &self.settings.own {
            let unused = match own {
                IpAddr::V4(_) => IpAddr::from(Ipv4Addr::UNSPECIFIED),
                IpAddr::V6(_) => IpAddr::from(Ipv6Addr::UNSPECIFIED),
            };
            passing.insert(IpFamily::of(*own), self.tunnels.add_link(unused)?);
        }
        let link = |client: &IpAddr| {
            let ours = present.ours.get(&link_name(*client)).map(|link| link.index);
            Some((*client, ours.or_else(|| passing.get(&IpFamily::of(*client)).copied())?))
        };
        let clients = desired.clients.iter().filter_map(link).collect();
        let changes = self.set(desired, uplink, &present.ours, clients)?;
        std::thread::sleep(UNDER_WAY);
        Ok(changes.saturating_add(delete_all_but(&present.kernel, &BTreeSet::new())?))
    }

    /// Brings everything but links to what is desired. `present` has the links of ours that there were before.
    fn set(
        &mut self,
        desired: &Desired,
        uplink: &Link,
        present: &BTreeMap<String, Link>,
        clients: BTreeMap<IpAddr, u32>,
    ) -> Result<usize> {
        let peers: BTreeMap<IpAddr, Peer> =
            clients.iter().map(|(client, link)| (*client, Peer::Client { link: Some(*link) })).collect();
        let staying = self.peers.iter().filter(|(client, _)| peers.contains_key(client));
        let staying: BTreeMap<_, _> = staying.map(|(client, peer)| (*client, *peer)).collect();
        let mut changes = 0usize;
        if staying.len() < self.peers.len() {
            changes = changes.saturating_add(self.tunnels.set_peers(&staying)?);
            self.peers = staying;
        }
        let links = self.tunnel_settings(&clients);
        // Until routes are replaced, packets leave by the links of before.
        let mut all = self.left_links(present);
        all.extend(links.clone());
        changes = changes.saturating_add(self.tunnels.set_links(&all)?);
        changes = changes.saturating_add(self.tunnels.set_allowed(&desired.destinations)?);
        let floating = desired.sources.as_ref().map(|sources| sources.floating.clone()).unwrap_or_default();
        // Whether it may be used now is for nftables, which keeps the time.
        changes = changes.saturating_add(self.tunnels.set_sources(&floating)?);
        let routing = GatewayRouting {
            uplink: uplink.name.clone(),
            uplink_mtu: uplink.mtu,
            own: self.settings.own.clone(),
            clients,
            max_connections: desired.max_connections,
            sources: desired.sources.clone(),
        };
        changes = changes.saturating_add(self.routing.apply(&routing)?);
        changes = changes.saturating_add(self.tunnels.set_peers(&peers)?);
        self.peers = peers;
        changes = changes.saturating_add(self.tunnels.attach()?);
        if all.len() > links.len() {
            changes = changes.saturating_add(self.tunnels.set_links(&links)?);
        }
        self.done = Some(routing);
        Ok(changes)
    }

    /// Settings of the links that clients had before and that are still there.
    fn left_links(&self, present: &BTreeMap<String, Link>) -> BTreeMap<u32, TunnelLink> {
        let Some(done) = &self.done else { return BTreeMap::new() };
        let mut left = self.tunnel_settings(&done.clients);
        left.retain(|index, _| present.values().any(|link| link.index == *index));
        left
    }

    /// Whether nothing has changed of what the kernel does not report: filters and nftables.
    ///
    /// # Errors
    /// The kernel cannot be asked.
    pub fn is_in_place(&mut self) -> Result<bool> {
        Ok(self.routing.is_table_in_place()? && self.tunnels.is_attached()?)
    }

    /// Counters of the BPF programs.
    ///
    /// # Errors
    /// The kernel cannot be asked.
    pub fn counters(&self) -> Result<Counters> {
        Ok(self.tunnels.counters()?)
    }

    /// Packets and bytes exchanged with each client.
    ///
    /// # Errors
    /// The kernel cannot be asked.
    pub fn client_traffic(&self) -> Result<BTreeMap<IpAddr, ClientTraffic>> {
        Ok(self.tunnels.traffic()?)
    }

    /// Counters of the nftables table, by family.
    ///
    /// # Errors
    /// The kernel cannot be asked.
    pub fn traffic(&self) -> Result<BTreeMap<IpFamily, GatewayTraffic>> {
        Ok(self.done.as_ref().map(egress_gateway::traffic).transpose()?.unwrap_or_default())
    }

    /// The tunnel link of each client, made where it is missing or differs. Clients of a family that the gateway lacks have none.
    fn links(
        &mut self,
        desired: &Desired,
        uplink: &Link,
        present: &BTreeMap<String, Link>,
        applied: &mut Applied,
    ) -> BTreeMap<IpAddr, u32> {
        let mut found = BTreeMap::new();
        // IPv6 clients may share a name, and so a link: where a packet goes is in the packet.
        let mut by_name = BTreeMap::<String, u32>::new();
        let has = |client: &&IpAddr| {
            self.settings.own.iter().any(|own| IpFamily::of(*own) == IpFamily::of(**client))
        };
        let clients: Vec<IpAddr> = desired.clients.iter().filter(has).copied().collect();
        for client in &clients {
            let name = link_name(*client);
            let mtu = link_mtu(IpFamily::of(*client), uplink.mtu);
            let is_right = |link: &&Link| link.up && link.mtu == mtu && link.mac == uplink.mac;
            let known = by_name.get(&name).copied();
            let index = match known.or_else(|| present.get(&name).filter(is_right).map(|link| link.index)) {
                Some(index) => Ok(index),
                None => {
                    applied.changes = applied.changes.saturating_add(1);
                    self.tunnels.add_link(*client)
                }
            };
            match index {
                Ok(index) => {
                    by_name.insert(name, index);
                    found.insert(*client, index);
                }
                Err(error) => drop(applied.refused.insert(*client, error.to_string())),
            }
        }
        found
    }

    fn tunnel_settings(&self, clients: &BTreeMap<IpAddr, u32>) -> BTreeMap<u32, TunnelLink> {
        let source_port = (!self.settings.source_port_auto).then_some(self.settings.port);
        let of = |(client, link): (&IpAddr, &u32)| {
            let is_same = |own: &&IpAddr| IpFamily::of(**own) == IpFamily::of(*client);
            let local = *self.settings.own.iter().find(is_same)?;
            Some((*link, TunnelLink { local, remote: None, source_port }))
        };
        clients.iter().filter_map(of).collect()
    }
}

fn load(settings: &PlaneSettings, uplink: &Link) -> Result<Tunnels> {
    let own = settings.own.iter().copied().collect();
    let fou = Settings { port: settings.port, drop_unknown: true, own: Some(own) };
    Ok(Tunnels::load(uplink.index, fou)?)
}

fn uplink(name: &str) -> Result<Link> {
    RouteSocket::open()?.link_by_name(name)?.ok_or_else(|| PlaneError::NoUplink(name.to_owned()))
}

/// Links that have the name and the type of tunnel links, by name.
struct TunnelLinks {
    ours: BTreeMap<String, Link>,
    /// Links of the kernel's fou, as Coil makes them.
    kernel: BTreeMap<String, Link>,
}

impl TunnelLinks {
    fn read() -> Result<Self> {
        let mut ours = BTreeMap::new();
        let mut kernel = BTreeMap::new();
        for link in RouteSocket::open()?.links()?.into_iter().filter(|link| is_link_name(&link.name)) {
            match link.kind.as_deref() {
                Some(KIND_IFB) => drop(ours.insert(link.name.clone(), link)),
                Some(KIND_IPIP | KIND_IP6TNL) => drop(kernel.insert(link.name.clone(), link)),
                _ => {}
            }
        }
        Ok(Self { ours, kernel })
    }
}

/// Deletes links without one of these names; returns their number.
fn delete_all_but(present: &BTreeMap<String, Link>, wanted: &BTreeSet<String>) -> Result<usize> {
    let others = present.iter().filter(|(name, _)| !wanted.contains(*name));
    let messages: Vec<_> = others.map(|(_, link)| delete_link(link.index)).collect();
    for outcome in RouteSocket::open()?.apply_each(&messages)? {
        match outcome {
            Err(error) if !error.is_missing() => return Err(error.into()),
            _ => {}
        }
    }
    Ok(messages.len())
}

/// Fault of the network namespace, which the gateway may not be able to correct.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HostFault {
    /// `net.ipv4.ip_forward` is 0.
    ForwardingIpv4Disabled,
    /// `net.ipv6.conf.all.forwarding` is 0.
    ForwardingIpv6Disabled,
    /// `net.ipv4.conf.{all,default}.rp_filter` is 1.
    ReversePathFilterStrict,
}

impl std::fmt::Display for HostFault {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let advice = "the node program of Fairlead sets it for gateway pods";
        match self {
            Self::ForwardingIpv4Disabled => {
                write!(out, "ForwardingIpv4Disabled: net.ipv4.ip_forward of the pod is 0; {advice}")
            }
            Self::ForwardingIpv6Disabled => {
                write!(out, "ForwardingIpv6Disabled: net.ipv6.conf.all.forwarding of the pod is 0; {advice}")
            }
            Self::ReversePathFilterStrict => write!(
                out,
                "ReversePathFilterStrict: net.ipv4.conf.all.rp_filter or that of default is 1 in the pod; {advice}"
            ),
        }
    }
}

/// Sets the forwarding settings where the file system permits it, and says which of them are wrong.
pub fn prepare_host(settings: &PlaneSettings) -> Vec<HostFault> {
    if let Err(error) = forward_in_gateway(&settings.uplink) {
        tracing::debug!(%error, "cannot change a setting of the pod");
    }
    let own = &settings.own;
    let has = |family| own.iter().any(|own| IpFamily::of(*own) == family);
    let is_off = |family| has(family) && !forwards(family).unwrap_or(false);
    let faults = [
        (is_off(IpFamily::V4), HostFault::ForwardingIpv4Disabled),
        (is_off(IpFamily::V6), HostFault::ForwardingIpv6Disabled),
        (has(IpFamily::V4) && is_reverse_path_strict().unwrap_or(true), HostFault::ReversePathFilterStrict),
    ];
    faults.into_iter().filter_map(|(is_wrong, fault)| is_wrong.then_some(fault)).collect()
}
