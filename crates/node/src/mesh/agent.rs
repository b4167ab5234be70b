//! One step of the mesh: from what the cluster says to what the kernel does. Blocking, without any I/O of its own but
//! the data plane's; it is called again whenever something changed or a timer of a path runs out.

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use fairlead_api::names::MARK_FROM_WIREGUARD;
use fairlead_api::wireguard::{DeviceConfig, DeviceState, PeerConfig, PeerState, PrivateKey, PublicKey};
use fairlead_dataplane::mesh::{self as kernel, Bypass, MeshState};
use fairlead_dataplane::uplink::{self, HostNetwork, Ignored};
use fairlead_dataplane::wireguard::{self, Backend, PendingHandover, Preference, WireGuardDevice};
use fairlead_path::{
    Config, NatType, Observation, OwnView, PeerView, Rotation, Seen, State, Status, classify, is_private,
    order,
};
use fairlead_topology::{Plan, Policy, plan};
use ipnet::IpNet;

use super::view::{self, MeshSettings, PublishedPeer};

/// What an uplink carries when the kernel does not say (IEEE 802.3).
const ETHERNET_MTU: u32 = 1500;
/// How long one endpoint is tried where setting it forces handshakes: they are sent within the first two seconds.
const FORCED_ATTEMPT: Duration = Duration::from_millis(2500);
/// How soon the agent looks again while some peer is not up.
const LOOK_SOON: Duration = Duration::from_millis(500);
/// How soon it looks again when all is well.
const LOOK_LATER: Duration = Duration::from_secs(5);

/// Everything a step decides from.
#[derive(Debug, Clone)]
pub struct Inputs {
    /// This node's name.
    pub node: String,
    /// The mesh resource.
    pub settings: MeshSettings,
    /// All published peers, our own included.
    pub peers: Vec<PublishedPeer>,
    /// Prefixes of blocks by node.
    pub blocks: BTreeMap<String, Vec<IpNet>>,
    /// This node's own addresses, as its Node object has them: where others may reach it.
    pub node_addresses: Vec<IpAddr>,
    /// Those of them that it wants to be reached at through the mesh.
    pub claims: Vec<IpAddr>,
    /// TCP endpoints of the API server; nodes reach them past the mesh, or a broken tunnel could not be mended.
    pub api_server: Vec<SocketAddr>,
    /// Seconds between keepalives to every peer; the default when `None`.
    pub keepalive: Option<u16>,
    /// Endpoints given as host names, resolved.
    pub resolved: BTreeMap<String, SocketAddr>,
    /// Problems found while reading the cluster's objects.
    pub problems: Vec<String>,
}

/// How one peer is doing.
#[derive(Debug, Clone)]
pub struct PeerReport {
    /// Its name.
    pub name: String,
    /// Its identity.
    pub public_key: PublicKey,
    /// Up, connecting or down, and why.
    pub path: Status,
    /// What the device says; `None` only before it was configured.
    pub device: Option<PeerState>,
    /// What is sent to it.
    pub prefixes: Vec<IpNet>,
    /// Whether the endpoint in use tells anybody anything: the peer did not publish it itself, or it is a public
    /// address of its own, which shows that no NAT is in front of it.
    pub endpoint_is_news: bool,
}

/// What a step found and did.
#[derive(Debug, Clone)]
pub struct Report {
    /// Which WireGuard is in use.
    pub backend: Backend,
    /// The device.
    pub interface: String,
    /// Its MTU.
    pub mtu: u32,
    /// Our port.
    pub port: u16,
    /// Our address translation, as others see it.
    pub nat: NatType,
    /// Our own endpoints: addresses of this host with our port.
    pub host: Vec<SocketAddr>,
    /// Where others see us.
    pub observed: Vec<SocketAddr>,
    /// Peers by name.
    pub peers: Vec<PeerReport>,
    /// Our own prefixes.
    pub own_prefixes: Vec<IpNet>,
    /// Our own addresses among them, which we publish.
    pub claims: Vec<IpAddr>,
    /// What a user should know, one sentence each.
    pub problems: Vec<String>,
}

/// What the agent keeps between steps. Losing it (a restart) loses no traffic: the device is adopted as it is.
pub struct Agent {
    key: PrivateKey,
    public_key: PublicKey,
    preference: Preference,
    /// Where devices inside processes are handed from one program to the next.
    handover: PathBuf,
    device: Option<Open>,
    paths: BTreeMap<PublicKey, Rotation>,
    nat: NatType,
    started: Instant,
    /// When an endpoint was tried last.
    tried: Instant,
}

/// The device, and the MTU it was opened with.
struct Open {
    device: Box<dyn WireGuardDevice>,
    mtu: u32,
}

/// A step that could not be carried out.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The WireGuard device.
    #[error(transparent)]
    Device(#[from] wireguard::Error),
    /// nftables, rules, routes, links or addresses.
    #[error(transparent)]
    Netlink(#[from] fairlead_netlink::Error),
    /// A switch of the kernel.
    #[error(transparent)]
    Sysctl(#[from] uplink::SysctlError),
}

impl Agent {
    /// An agent for the identity `key`; nothing is touched before the first step.
    pub fn new(
        (key, public_key): (PrivateKey, PublicKey),
        preference: Preference,
        handover: PathBuf,
        now: Instant,
    ) -> Self {
        Self {
            key,
            public_key,
            preference,
            handover,
            device: None,
            paths: BTreeMap::new(),
            nat: NatType::Unknown,
            started: now,
            tried: now,
        }
    }

    /// Brings the kernel to what `inputs` ask for and says how the peers are.
    ///
    /// # Errors
    /// The kernel refused something; what was done before stays, and the next step goes on from there.
    pub fn step(&mut self, inputs: &Inputs, now: Instant) -> Result<Report, Error> {
        let outcome = self.try_step(inputs, now);
        if let Err(Error::Device(_)) = outcome {
            // Somebody may have removed it; the next step opens it again.
            self.device = None;
        }
        outcome
    }

    fn try_step(&mut self, inputs: &Inputs, now: Instant) -> Result<Report, Error> {
        let ignored = ignored(inputs);
        let network = HostNetwork::read()?;
        let mtu = uplink::mesh_mtu(inputs.settings.mtu, network.uplink_mtu(&ignored).unwrap_or(ETHERNET_MTU));
        let host = host_endpoints(inputs, &network.node_addresses(&ignored));
        let plan = plan(&view::members(&inputs.peers, inputs.blocks.clone()), &policy(inputs));
        let observed = view::observed_endpoints(&inputs.peers, &inputs.node, &self.public_key);
        self.nat = self.nat.updated(classify(&host, &self.seen(inputs)));
        let own = OwnView {
            addresses: host.iter().map(SocketAddr::ip).collect(),
            // A public address on an interface of ours says nothing about who else is near.
            public_ips: observed.iter().filter(|seen| !host.contains(seen)).map(SocketAddr::ip).collect(),
            prefixes: network.connected_prefixes(&ignored),
        };
        let device = self.open(inputs, mtu)?;
        let (interface, backend) = (device.interface().to_owned(), device.backend());
        let before = device.state()?;
        // Answers to what came out of the tunnel may leave by another link as far as the main table knows.
        uplink::loosen_reverse_path_filter(&interface)?;
        let endpoints = self.choose_endpoints(inputs, &plan, &own, &before, now);
        self.configure(inputs, &plan, &before, &endpoints)?;
        kernel::apply(&MeshState {
            interface: interface.clone(),
            mtu,
            targets_v4: plan.targets_ipv4.iter().copied().map(IpNet::from).collect(),
            targets_v6: plan.targets_ipv6.iter().copied().map(IpNet::from).collect(),
            bypass: Bypass { servers: inputs.api_server.clone(), nodes: other_nodes(inputs) },
        })?;
        let mut problems = inputs.problems.clone();
        let open = plan.problems.iter().filter(|problem| !problem.is_solved_by(&inputs.settings.excluded));
        problems.extend(open.map(ToString::to_string));
        problems.extend(inputs.settings.interface.ne(&interface).then(|| {
            format!(
                "WireKubeMesh names interface {} and this node runs on {interface}: restart `fairlead node` to change it",
                inputs.settings.interface
            )
        }));
        Ok(Report {
            backend,
            interface,
            mtu,
            port: inputs.settings.port,
            nat: self.nat,
            observed,
            peers: self.report_peers(inputs, &plan, &before, now),
            own_prefixes: own_prefixes(inputs),
            claims: inputs.claims.clone(),
            host,
            problems,
        })
    }

    /// Gets ready to hand the device to the next program. `None` when there is nothing to hand over.
    ///
    /// # Errors
    /// The device cannot be handed over: the next program starts it anew.
    pub fn retire(self) -> Result<Option<PendingHandover>, wireguard::Error> {
        self.device.map_or(Ok(None), |open| open.device.hand_over(self.handover))
    }

    /// When to step again if nothing changes before: often after an endpoint was tried, ever more rarely while a peer
    /// stays away, so that one that is gone for good costs next to nothing.
    pub fn pause(&self, report: &Report, now: Instant) -> Duration {
        let all_up = report.peers.iter().all(|peer| peer.path.state == State::Up);
        let tried = now.saturating_duration_since(self.tried);
        let look = if all_up { LOOK_LATER } else { (tried / 4).clamp(LOOK_SOON, LOOK_LATER) };
        let since = self.since(now);
        let next = self.paths.values().filter_map(|path| path.next_wakeup(since)).min();
        next.map_or(look, |at| at.saturating_sub(since).min(look)).max(Duration::from_millis(50))
    }

    /// Path machines count time from the agent's start.
    fn since(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.started)
    }

    /// The device, opened again when it is to have another MTU; its name is kept until the program is started anew.
    fn open(&mut self, inputs: &Inputs, mtu: u32) -> Result<&dyn WireGuardDevice, Error> {
        let (present, interface) = match self.device.take() {
            Some(open) if open.mtu == mtu => (Some(open), String::new()),
            Some(open) => (None, open.device.interface().to_owned()),
            None => (None, inputs.settings.interface.clone()),
        };
        let open = match present {
            Some(open) => open,
            None => {
                let (preference, handover_socket) = (self.preference, Some(self.handover.clone()));
                let settings = wireguard::Settings { interface, mtu, preference, handover_socket };
                Open { device: wireguard::open(&settings)?, mtu }
            }
        };
        Ok(&*self.device.insert(open).device)
    }

    /// Where each observer sees this node, with the observer's own address.
    fn seen(&self, inputs: &Inputs) -> Vec<Seen> {
        let address_of = |observer: &str| {
            let peer = inputs.peers.iter().find(|peer| peer.name == observer)?;
            peer.host.first().map(SocketAddr::ip)
        };
        view::seen_by_others(&inputs.peers, &inputs.node, &self.public_key)
            .into_iter()
            .filter_map(|(observer, address)| Some(Seen { observer: address_of(&observer)?, address }))
            .collect()
    }

    /// Feeds every path machine and collects the endpoints they want set now.
    fn choose_endpoints(
        &mut self,
        inputs: &Inputs,
        plan: &Plan,
        own: &OwnView,
        device: &DeviceState,
        now: Instant,
    ) -> BTreeMap<PublicKey, SocketAddr> {
        let since = self.since(now);
        let backend = self.device.as_ref().map_or(Backend::Embedded, |open| open.device.backend());
        self.paths.retain(|key, _| plan.peers.contains_key(key));
        let mut chosen = BTreeMap::new();
        for peer in inputs.peers.iter().filter(|peer| plan.peers.contains_key(&peer.public_key)) {
            let path = self
                .paths
                .entry(peer.public_key)
                .or_insert_with(|| Rotation::new(config(inputs, peer, backend), None));
            path.set_candidates(since, order(own, &peer_view(inputs, peer)));
            path.observe(since, observation(device.peers.get(&peer.public_key)));
            if let Some(endpoint) = path.poll(since) {
                tracing::debug!(peer = peer.name, %endpoint, "trying endpoint");
                chosen.insert(peer.public_key, endpoint);
                self.tried = now;
            }
        }
        chosen
    }

    fn configure(
        &self,
        inputs: &Inputs,
        plan: &Plan,
        before: &DeviceState,
        endpoints: &BTreeMap<PublicKey, SocketAddr>,
    ) -> Result<(), Error> {
        let peers = plan.peers.iter().map(|(key, peer)| {
            let config = PeerConfig {
                preshared_key: peer.preshared_key,
                endpoint: endpoints.get(key).copied(),
                // Devices say zero as "none".
                persistent_keepalive: Some(inputs.keepalive.unwrap_or(peer.keepalive))
                    .filter(|seconds| *seconds > 0),
                allowed_ips: peer.allowed_ips.clone(),
            };
            (*key, config)
        });
        let desired = DeviceConfig {
            private_key: self.key.clone(),
            listen_port: inputs.settings.port,
            fwmark: MARK_FROM_WIREGUARD,
            peers: peers.collect(),
        };
        let change = before.change_to(&desired);
        match &self.device {
            Some(open) if !change.is_empty() => Ok(open.device.change(&change)?),
            _ => Ok(()),
        }
    }

    fn report_peers(
        &self,
        inputs: &Inputs,
        plan: &Plan,
        device: &DeviceState,
        now: Instant,
    ) -> Vec<PeerReport> {
        let since = self.since(now);
        let report = |peer: &PublishedPeer| {
            let planned = plan.peers.get(&peer.public_key)?;
            let path = self.paths.get(&peer.public_key)?.status(since);
            let state = device.peers.get(&peer.public_key).cloned();
            let endpoint = state.as_ref().and_then(|state| state.config.endpoint);
            Some(PeerReport {
                name: peer.name.clone(),
                public_key: peer.public_key,
                endpoint_is_news: endpoint.is_some_and(|endpoint| is_news(peer, endpoint)),
                path,
                device: state,
                prefixes: planned.allowed_ips.clone(),
            })
        };
        inputs.peers.iter().filter_map(report).collect()
    }
}

fn is_news(peer: &PublishedPeer, endpoint: SocketAddr) -> bool {
    let published = peer.host.contains(&endpoint);
    let open = published && !is_private(endpoint.ip());
    open || !(published || peer.manual.as_deref() == Some(&endpoint.to_string()))
}

fn policy(inputs: &Inputs) -> Policy {
    Policy { excluded: inputs.settings.excluded.clone(), ..Policy::new(&inputs.node) }
}

/// The other nodes' own addresses. A wider claim is a network, not a node.
fn other_nodes(inputs: &Inputs) -> Vec<IpAddr> {
    let others = inputs.peers.iter().filter(|peer| peer.name != inputs.node);
    let claims = others.flat_map(|peer| &peer.claims);
    claims.filter(|claim| claim.prefix_len() == claim.max_prefix_len()).map(IpNet::addr).collect()
}

fn own_prefixes(inputs: &Inputs) -> Vec<IpNet> {
    let mut prefixes: Vec<IpNet> = inputs.claims.iter().copied().map(IpNet::from).collect();
    prefixes.extend(inputs.blocks.get(&inputs.node).into_iter().flatten());
    prefixes
}

/// What on this host is no address of the node itself: the mesh device and everything in pod networks.
fn ignored(inputs: &Inputs) -> Ignored {
    Ignored {
        links: vec![inputs.settings.interface.clone()],
        link_prefixes: Vec::new(),
        networks: inputs.blocks.values().flatten().copied().collect(),
    }
}

/// Addresses of the Node object first, because somebody chose them; then what else this host has.
fn host_endpoints(inputs: &Inputs, local: &[IpAddr]) -> Vec<SocketAddr> {
    let mut endpoints: Vec<SocketAddr> = Vec::new();
    for address in inputs.node_addresses.iter().chain(local) {
        let endpoint = SocketAddr::new(*address, inputs.settings.port);
        if !endpoints.contains(&endpoint) {
            endpoints.push(endpoint);
        }
    }
    endpoints
}

/// The two ends of a pair must not rotate in step for ever: each stretches its attempts by another amount.
fn config(inputs: &Inputs, peer: &PublishedPeer, backend: Backend) -> Config {
    let mut hasher = DefaultHasher::new();
    (&inputs.node, &peer.name).hash(&mut hasher);
    let config = Config { seed: hasher.finish(), ..Config::default() };
    match backend {
        // A new endpoint makes it send handshakes at once, so that each attempt can be short.
        Backend::Embedded => Config { attempt: FORCED_ATTEMPT, ..config },
        Backend::Kernel => config,
    }
}

fn peer_view(inputs: &Inputs, peer: &PublishedPeer) -> PeerView {
    let resolve = |text: &String| text.parse().ok().or_else(|| inputs.resolved.get(text).copied());
    let mut observed = view::observed_endpoints(&inputs.peers, &peer.name, &peer.public_key);
    observed.retain(|endpoint| !peer.host.contains(endpoint));
    observed.extend(
        peer.endpoint.filter(|endpoint| !peer.host.contains(endpoint) && !observed.contains(endpoint)),
    );
    PeerView { manual: peer.manual.as_ref().and_then(resolve), host: peer.host.clone(), observed }
}

fn observation(peer: Option<&PeerState>) -> Observation {
    Observation {
        endpoint: peer.and_then(|peer| peer.config.endpoint),
        handshake_age: peer
            .and_then(|peer| peer.last_handshake)
            .map(|at| SystemTime::now().duration_since(at).unwrap_or_default()),
        rx_bytes: peer.map_or(0, |peer| peer.rx_bytes),
        tx_bytes: peer.map_or(0, |peer| peer.tx_bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_peer_did_not_publish_and_its_public_addresses_are_news() {
        let peer = PublishedPeer {
            name: "a".to_owned(),
            public_key: PublicKey([1; 32]),
            manual: Some("203.0.113.1:7".to_owned()),
            endpoint: None,
            host: ["192.168.1.10:51820", "198.51.100.1:51820"].map(|text| text.parse().unwrap()).to_vec(),
            sees: BTreeMap::new(),
            claims: Vec::new(),
            keepalive: None,
        };
        let cases = [
            ("203.0.113.9:4000", true),
            ("198.51.100.1:51820", true),
            ("192.168.1.10:51820", false),
            ("203.0.113.1:7", false),
        ];
        for (endpoint, news) in cases {
            assert_eq!(is_news(&peer, endpoint.parse().unwrap()), news, "{endpoint}");
        }
    }
}
