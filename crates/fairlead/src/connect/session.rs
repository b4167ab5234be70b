//! One connection from its beginning to its end.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{IpAddr, SocketAddr, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use fairlead_api::resources::KiloPeer;
use fairlead_cli::api;
use fairlead_cli::peer::{self, Cluster};
use fairlead_cluster::subsystem::Supervisor;
use fairlead_dataplane::wireguard::{Preference, Settings};
use fairlead_keys::{PeerConfig, PublicKey};
use fairlead_members::configuration::{ConfiguredPeer, entry_nodes};
use kube::api::ListParams;
use kube::{Api, Client, Config, ResourceExt as _};
use tokio::time::timeout;

use super::caches::Caches;
use super::entries::Entries;
use super::host::{Desired, Host};
use super::{key, own_peer};
use crate::arguments::connect::ConnectArguments;
use crate::arguments::node::WireGuard;
use crate::programs::READ_SECONDS;

/// Interval at which the program looks at the device and at what the watches have shown.
const TICK: Duration = Duration::from_secs(1);
/// Interval at which the machine is compared with what it should be, although nothing changed in the cluster.
const COMPARE_INTERVAL: Duration = Duration::from_secs(5);
/// Attempts at choosing a free address.
const ATTEMPTS: usize = 5;
/// Interval at which names are resolved again.
const RESOLVE_INTERVAL: Duration = Duration::from_secs(30);
/// Time-out of resolving names.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(5);

/// A machine that is being connected, or is.
pub(super) struct Session {
    arguments: ConnectArguments,
    name: String,
    public_key: PublicKey,
    peers: Api<KiloPeer>,
    /// Host and port of the API server.
    server: (String, u16),
    caches: Caches,
    supervisor: Option<Supervisor>,
    host: Host,
    own: Option<KiloPeer>,
    cluster: Arc<Cluster>,
    progress: Progress,
}

/// Progress of a session: the last steps, with their times.
#[derive(Default)]
struct Progress {
    /// Generation of the watch caches when the cluster was last read.
    generation: Option<u64>,
    entries: Entries,
    resolved: Resolved,
    resolved_at: Option<Instant>,
    compared_at: Option<Instant>,
    is_set_up: bool,
    is_connected: bool,
    said: BTreeMap<Topic, BTreeSet<String>>,
}

/// Topic of a problem.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Topic {
    Cluster,
    Machine,
}

/// Peers and servers with all addresses to which their names resolve.
#[derive(Default, Clone)]
struct Resolved {
    peers: Vec<(ConfiguredPeer, Vec<SocketAddr>)>,
    servers: Vec<IpAddr>,
    problems: Vec<String>,
}

impl Session {
    /// Reads the cluster and opens the device, last.
    pub(super) async fn open(arguments: ConnectArguments, name: String) -> anyhow::Result<Self> {
        // The API server ends a watch after a minute.
        let config = arguments.api.config(Duration::from_secs(READ_SECONDS)).await?;
        let server = server(&config)?;
        let private_key = match &arguments.private_key {
            Some(path) => peer::private_key_of(path)?,
            None => key::load_or_create(&arguments.state_dir.join("peers"), &name, peer::new_private_key)?,
        };
        let private_key = peer::clamped(private_key);
        let public_key = private_key.public_key();
        let client = Client::try_from(config).context("cannot create a Kubernetes client")?;
        let mut supervisor = Supervisor::default();
        let caches = Caches::start(supervisor.subsystem("caches"), &client, &name);
        caches.wait().await?;
        let cluster = Arc::new(caches.cluster(None)?);
        let host = Host::open(settings(&arguments), &name, private_key, arguments.listen_port)?;
        Ok(Self {
            arguments,
            name,
            public_key,
            peers: Api::all(client),
            server,
            caches,
            supervisor: Some(supervisor),
            host,
            own: None,
            cluster,
            progress: Progress::default(),
        })
    }

    /// Makes the Peer, or takes over the one of an earlier process.
    pub(super) async fn join(&mut self) -> anyhow::Result<()> {
        for _ in 0..ATTEMPTS {
            let present = own_peer::get(&self.peers, &self.name).await?;
            let mut cluster = self.caches.cluster(present.as_ref())?;
            let is_new = present.is_none();
            // A free address is one that no Peer has.
            let others = if is_new { self.list_peers().await? } else { None };
            if let Some(others) = &others {
                let all = others.iter().map(|peer| serde_json::from_value(serde_json::json!(peer)));
                cluster.objects.external = all.collect::<Result<_, _>>()?;
            }
            let known = (&cluster, others.is_some());
            let networks = self.host.networks()?;
            let plan =
                own_peer::plan(&self.name, self.public_key, &self.arguments, present, known, &networks)?;
            let own = own_peer::carry_out(&self.peers, plan).await?;
            self.own = Some(own.clone());
            // Another machine may have chosen the same address meanwhile.
            let is_chosen = is_new && self.arguments.addresses.is_empty();
            let others = if is_chosen { self.list_peers().await? } else { None };
            if !others.is_some_and(|others| own_peer::is_contested(&own, &others)) {
                return Ok(());
            }
            own_peer::delete(&self.peers, &own).await?;
            self.own = None;
        }
        bail!("other machines keep choosing the same addresses: give one with --allowed-ip")
    }

    /// All Peers; `None` where the user may not list them.
    async fn list_peers(&self) -> anyhow::Result<Option<Vec<KiloPeer>>> {
        match api::list(&self.peers, "Peers", ListParams::default()).await {
            Ok(listed) => Ok(Some(listed)),
            Err(error) if api::is_forbidden(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Follows the cluster, the entry nodes and the machine.
    pub(super) async fn follow(&mut self) -> anyhow::Result<()> {
        let Some(supervisor) = self.supervisor.take() else { bail!("the session has ended") };
        let followed = supervisor.run_until(async {
            loop {
                self.step().await?;
                tokio::time::sleep(TICK).await;
            }
        });
        followed.await?
    }

    /// Undoes everything.
    pub(super) async fn close(self) -> anyhow::Result<()> {
        let deleted = match &self.own {
            Some(own) if own_peer::is_managed(own) && !self.arguments.keep => {
                own_peer::delete(&self.peers, own).await
            }
            _ => Ok(()),
        };
        deleted.and(self.host.remove())
    }

    async fn step(&mut self) -> anyhow::Result<()> {
        let mut is_stale = self.progress.resolved_at.is_none_or(|at| at.elapsed() >= RESOLVE_INTERVAL);
        let generation = self.caches.generation();
        if self.progress.generation != Some(generation) {
            // What could not be read or written is tried again.
            self.progress.generation = self.read_cluster().await?.then_some(generation);
            is_stale = true;
        }
        is_stale |= self.look_at_entry();
        if is_stale {
            self.progress.resolved_at = Some(Instant::now());
            self.resolve().await;
        }
        if is_stale || self.progress.compared_at.is_none_or(|at| at.elapsed() >= COMPARE_INTERVAL) {
            self.apply()?;
        }
        Ok(())
    }

    /// Takes note of what the watches have shown. Whether all could be read, and the Peer be changed as it has to be.
    ///
    /// # Errors
    /// The Peer was deleted, or is another machine's.
    async fn read_cluster(&mut self) -> anyhow::Result<bool> {
        let mut is_complete = true;
        let Some(known) = &self.own else { bail!("there is no Peer") };
        let shown = self.caches.own().filter(|shown| shown.uid() == known.uid());
        let own = match shown {
            Some(shown) => (*shown).clone(),
            // The watch may be late, or was interrupted: the API server itself says whether it is there.
            None => match own_peer::get(&self.peers, &self.name).await {
                Ok(Some(found)) if found.uid() == known.uid() => found,
                Ok(_) => {
                    self.own = None;
                    bail!("Peer '{}' was deleted: this machine is not in the network any more", self.name);
                }
                Err(error) => {
                    tracing::warn!(error = format!("{error:#}"), "the last known Peer remains in use");
                    is_complete = false;
                    known.clone()
                }
            },
        };
        if let Err(error) = own_peer::check_key(&own, self.public_key) {
            // It is not this machine's to delete.
            self.own = None;
            return Err(error);
        }
        let cluster = self.caches.cluster(Some(&own))?;
        self.own = Some(own.clone());
        self.progress.entries.set(cluster.objects.external.first().map(entry_nodes).unwrap_or_default());
        self.cluster = Arc::new(cluster);
        if let Some(changed) = own_peer::with_entry_nodes(&own, &self.arguments, &self.cluster) {
            tracing::warn!("no entry node of the Peer is in the mesh any more: choosing others");
            // What the watch shows next is read again.
            if let Err(error) = own_peer::carry_out(&self.peers, own_peer::Plan::Replace(changed)).await {
                tracing::warn!(error = format!("{error:#}"), "cannot change the entry nodes of the Peer");
                is_complete = false;
            }
        }
        Ok(is_complete)
    }

    /// Whether another entry node is to be used from now on.
    fn look_at_entry(&mut self) -> bool {
        let [(peer, addresses)] = &self.progress.resolved.peers[..] else { return false };
        let addresses = addresses.len();
        let Some(state) = self.host.state() else {
            self.progress.compared_at = None;
            return false;
        };
        let Some(state) = state.peers.get(&peer.public_key) else { return false };
        if state.last_handshake.is_some() && !std::mem::replace(&mut self.progress.is_connected, true) {
            let endpoint = state.config.endpoint.map(|endpoint| endpoint.to_string());
            tracing::info!(entry_node = peer.name, endpoint, "connected");
        }
        if self.progress.entries.name().is_none() || !self.progress.entries.observe(state, Instant::now()) {
            return false;
        }
        let silent = peer.name.clone();
        let error = self.host.send_error(&peer.public_key);
        self.progress.entries.next(addresses);
        self.host.forget_endpoints();
        self.progress.is_connected = false;
        tracing::warn!(
            entry_node = silent,
            next = self.progress.entries.name(),
            error,
            "the entry node does not answer: trying the next"
        );
        true
    }

    /// Makes the configuration anew; one that cannot be made leaves the last one in use.
    async fn resolve(&mut self) {
        let cluster = Arc::clone(&self.cluster);
        let name = self.name.clone();
        let through = self.progress.entries.name().map(str::to_owned);
        let more = self.arguments.allowed_ips.clone();
        let server = self.server.clone();
        let work = tokio::task::spawn_blocking(move || {
            let found = cluster.configuration(&name, through.as_deref(), &more)?;
            let servers: Vec<IpAddr> = addresses(server).map(|address| address.ip()).collect();
            let with_addresses = |peer: ConfiguredPeer| {
                let endpoints = peer.endpoint.iter().flat_map(addresses).collect();
                (peer, endpoints)
            };
            let peers = found.peers.into_iter().map(with_addresses).collect();
            Ok::<_, anyhow::Error>(Resolved { peers, servers, problems: found.problems })
        });
        let problem = match timeout(RESOLVE_TIMEOUT, work).await {
            Ok(Ok(Ok(found))) => return self.take(found),
            Ok(Ok(Err(error))) => format!("{error:#}"),
            Ok(Err(error)) => format!("cannot make the configuration: {error}"),
            Err(_) => format!("the resolver does not answer in {} s", RESOLVE_TIMEOUT.as_secs()),
        };
        self.say(Topic::Cluster, vec![problem]);
    }

    fn take(&mut self, found: Resolved) {
        let Resolved { mut peers, servers, problems } = found;
        self.say(Topic::Cluster, problems);
        for (peer, addresses) in peers.iter_mut().filter(|(_, addresses)| addresses.is_empty()) {
            // A name that cannot be resolved now is where it was.
            let known = &self.progress.resolved.peers;
            let known = known.iter().find(|(known, _)| known.endpoint == peer.endpoint);
            addresses.extend(known.iter().flat_map(|(_, addresses)| addresses));
        }
        if peers.iter().all(|(_, addresses)| addresses.is_empty()) {
            // A Peer that nodes leave out, an entry node that left the mesh or has no endpoint: what is there stays until another one is
            // tried.
            self.progress.entries.next(0);
            self.progress.resolved_at = None;
        } else {
            self.progress.resolved.peers = peers;
        }
        if !servers.is_empty() {
            self.progress.resolved.servers = servers;
        }
    }

    fn apply(&mut self) -> anyhow::Result<()> {
        self.progress.compared_at = Some(Instant::now());
        let desired = self.desired();
        match self.host.apply(&desired) {
            Ok(problems) => self.say(Topic::Machine, problems),
            // What does not work from the beginning ends the program.
            Err(error) if !self.progress.is_set_up => return Err(error.context("cannot set up this machine")),
            Err(error) => self.say(Topic::Machine, vec![format!("cannot set up this machine: {error:#}")]),
        }
        self.progress.is_set_up = true;
        Ok(())
    }

    fn desired(&self) -> Desired {
        let mut peers = BTreeMap::new();
        for (peer, addresses) in &self.progress.resolved.peers {
            let position =
                if self.progress.entries.name().is_some() { self.progress.entries.address() } else { 0 };
            let mut allowed_ips = peer.allowed_ips.clone();
            allowed_ips.sort_unstable();
            let config = PeerConfig {
                preshared_key: peer.preshared_key,
                endpoint: addresses.get(position).or(addresses.first()).copied(),
                persistent_keepalive: Some(peer.persistent_keepalive).filter(|seconds| *seconds > 0),
                allowed_ips,
            };
            peers.insert(peer.public_key, config);
        }
        let endpoints = self.progress.resolved.peers.iter().flat_map(|(_, addresses)| addresses);
        // The configuration leaves out of the prefixes what it could resolve; these are in use, perhaps since names were resolved before.
        let endpoints = endpoints.map(|endpoint| endpoint.ip());
        let servers = self.progress.resolved.servers.iter().copied().chain(endpoints).collect();
        Desired { peers, addresses: self.cluster.addresses(&self.name), servers }
    }

    /// Says what was not the case the last time.
    fn say(&mut self, topic: Topic, problems: Vec<String>) {
        let problems: BTreeSet<String> = problems.into_iter().collect();
        let said = self.progress.said.entry(topic).or_default();
        for problem in problems.difference(said) {
            tracing::warn!("{problem}");
        }
        *said = problems;
    }
}

fn settings(arguments: &ConnectArguments) -> Settings {
    let preference = match arguments.wireguard {
        WireGuard::Auto => Preference::Auto,
        WireGuard::Embedded => Preference::Embedded,
        WireGuard::Kernel => Preference::Kernel,
    };
    Settings { interface: arguments.interface.clone(), mtu: arguments.mtu, preference, handover_socket: None }
}

/// Host and port of the API server.
fn server(config: &Config) -> anyhow::Result<(String, u16)> {
    let host = config.cluster_url.host().context("the kubeconfig names no API server")?;
    let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
    Ok((host, config.cluster_url.port_u16().unwrap_or(443)))
}

/// Addresses of a name; none if it cannot be resolved.
fn addresses(endpoint: impl ToSocketAddrs) -> impl Iterator<Item = SocketAddr> {
    let found: Vec<SocketAddr> = endpoint.to_socket_addrs().into_iter().flatten().collect();
    found.into_iter()
}
