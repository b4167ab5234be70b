//! The node's link to the relay, and the loopback port through which WireGuard uses it.

use std::net::{IpAddr, SocketAddr};
use std::pin::Pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result};
use fairlead_address::Nat64;
use fairlead_api::names::MARK_FROM_WIREGUARD;
use fairlead_keys::{PrivateKey, PublicKey};
use fairlead_members::settings::{RelayServer, RelaySettings};
use fairlead_members::state_file::StateFile;
use fairlead_path::{PathAgent, RelayPath, RelayPort, RelayStun};
use fairlead_relay::client::{
    self, LinkCounters, LinkQueue, LinkStatus, LoopbackPort, Proxy, Transport, is_relayed, keep_connected,
};
use fairlead_wire::relay::StunServer;
use k8s_openapi::api::core::v1::Secret;
use kube::{Api, Client};
use tokio::sync::watch;
use tokio::time::{sleep, sleep_until, timeout};

use super::path_port::PathPort;
use crate::model::problem::MeshProblem;

/// Interval at which the Secret with the token is read again, and the pause after a failure.
const SECRET_INTERVAL: Duration = Duration::from_secs(60);
const SECRET_RETRY: Duration = Duration::from_secs(5);
/// Longest time for a request to read the Secret.
const SECRET_TIMEOUT: Duration = Duration::from_secs(5);
/// Time for which the relay may be away before that is a problem: each problem is written to the API server by every node.
const OUTAGE: Duration = Duration::from_secs(30);
/// Longest time for which the previous relay is used until the new one is up, and the time for which it is used after that: packets on their
/// way still arrive.
const HANDOVER: Duration = Duration::from_secs(10);
const REPLACED: Duration = Duration::from_secs(2);
/// The key of the Secret.
const TOKEN: &str = "token";

/// View of the relay for the mesh and its status. Clones are views of one link.
#[derive(Clone)]
pub struct RelayView {
    /// `None` if the port could not be opened.
    port: Option<Arc<LoopbackPort>>,
    queue: LinkQueue,
    status: watch::Receiver<LinkStatus>,
    nat64: Arc<watch::Sender<Nat64>>,
}

/// Transport of packets to a peer by way of the relay.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RelayTransport {
    /// Over this node's link.
    Tcp,
    /// Over a UDP port that the relay has for the pair.
    Udp,
}

impl RelayTransport {
    /// Transport by which an endpoint leads to the relay; `None` if it does not.
    pub(crate) fn of(agent: &PathAgent, endpoint: SocketAddr) -> Option<Self> {
        if is_relayed(endpoint) {
            return Some(Self::Tcp);
        }
        agent.is_relay_port(endpoint).then_some(Self::Udp)
    }
}

/// The relay as of one report.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RelayReport {
    /// Endpoint of the relay.
    pub endpoint: client::Endpoint,
    /// Whether the link is up, and why not.
    pub status: LinkStatus,
    /// Bytes and datagrams that this node sent, received and dropped.
    pub counters: LinkCounters,
}

/// Keeps a link to the relay of the mesh resource.
pub(crate) struct RelayLink {
    pub(crate) client: Client,
    /// The relay. How it is used is no reason to connect again.
    pub(crate) server: watch::Receiver<Option<RelayServer>>,
    /// Keeps the token, for starts without the API server.
    pub(crate) file: StateFile,
    /// Key with which this node registers.
    pub(crate) key: watch::Receiver<PrivateKey>,
    /// Key with which this node is registered; `None` without a link.
    pub(crate) registered: watch::Sender<Option<PublicKey>>,
    /// The run of this program, the same for all its links.
    pub(crate) instance: [u8; 8],
    pub(crate) paths: Arc<PathPort>,
    pub(crate) view: RelayView,
    pub(crate) status: watch::Sender<LinkStatus>,
}

impl RelayView {
    /// Opens the loopback port; the sender is for [`RelayLink`].
    pub(crate) fn open() -> (Self, watch::Sender<LinkStatus>) {
        let port = LoopbackPort::open();
        if let Err(error) = &port {
            tracing::warn!(%error, "cannot open a port on the loopback interface: no relay can be used");
        }
        Self::new(port.ok())
    }

    /// Creates a view with this port; without one, no relay can be used.
    pub(crate) fn new(port: Option<LoopbackPort>) -> (Self, watch::Sender<LinkStatus>) {
        let (sender, status) = watch::channel(LinkStatus::default());
        let nat64 = Arc::new(watch::Sender::default());
        (Self { port: port.map(Arc::new), queue: LinkQueue::default(), status, nat64 }, sender)
    }

    /// Says where WireGuard is, and which peers there are.
    pub(crate) fn set_users(&self, wireguard_port: u16, is_peer: impl Fn(&PublicKey) -> bool) {
        if let Some(port) = &self.port {
            port.set_wireguard_port(wireguard_port);
            port.retain(is_peer);
        }
    }

    /// Says how IPv4 addresses are reached, for connections from now on.
    pub(crate) fn set_nat64(&self, nat64: &Nat64) {
        if *self.nat64.borrow() != *nat64 {
            self.nat64.send_replace(nat64.clone());
        }
    }

    /// The way to a peer by the relay of these settings.
    pub(crate) fn path(&self, settings: &RelaySettings, peer: &PublicKey) -> Option<RelayPath> {
        Some(RelayPath {
            endpoint: self.port.as_ref()?.endpoint(peer)?,
            is_only: settings.is_only,
            handshake_timeout: settings.handshake_timeout,
            direct_retry: settings.direct_retry,
        })
    }

    /// Keeps data of a peer that is on its way over the relay from WireGuard for a moment: the kernel's would go back there.
    pub(crate) fn hold(&self, peer: &PublicKey, now: Instant) {
        if let Some(port) = &self.port {
            port.hold(peer, now);
        }
    }

    /// Queue of datagrams for the relay.
    pub(crate) fn queue(&self) -> LinkQueue {
        self.queue.clone()
    }

    /// STUN service of the relay, if it has one.
    pub(crate) fn stun(&self) -> Option<RelayStun> {
        self.status.borrow().stun.map(relay_stun)
    }

    /// The state of the link.
    pub(crate) fn report(&self, settings: &RelaySettings) -> RelayReport {
        let status = self.status.borrow().clone();
        RelayReport { endpoint: settings.server.endpoint.clone(), status, counters: self.queue.counters() }
    }
}

impl RelayReport {
    /// Problems of the relay for users. A relay that is restarted is no problem.
    pub(crate) fn problems(&self, now: Instant) -> Vec<MeshProblem> {
        let endpoint = self.endpoint.to_string();
        let LinkStatus { error, down_since, duplicate_until, .. } = &self.status;
        let is_long = down_since.is_some_and(|at| now.saturating_duration_since(at) >= OUTAGE);
        let unreachable = error.clone().filter(|_| is_long);
        let unreachable =
            unreachable.map(|error| MeshProblem::RelayUnavailable { endpoint: endpoint.clone(), error });
        let is_duplicate = duplicate_until.is_some_and(|until| now < until);
        let duplicate = is_duplicate.then_some(MeshProblem::DuplicateKey { endpoint });
        unreachable.into_iter().chain(duplicate).collect()
    }
}

impl RelayLink {
    /// Runs until it is dropped.
    pub(crate) async fn run(self) {
        let Some(port) = self.view.port.clone() else { return std::future::pending().await };
        let tell_paths = async {
            let mut status = self.view.status.clone();
            let mut was_up = false;
            while status.changed().await.is_ok() {
                let (is_up, stun) = {
                    let status = status.borrow_and_update();
                    (status.is_up, status.stun.map(relay_stun))
                };
                let now = self.paths.since(Instant::now());
                let has_changed = std::mem::replace(&mut was_up, is_up) != is_up;
                self.paths.with_agent(|agent| {
                    agent.set_relay_stun(now, stun);
                    if has_changed {
                        agent.relay_changed(now, is_up);
                    }
                });
            }
        };
        tokio::select! {
            () = self.follow_server(&port) => {}
            () = tell_paths => {}
            () = self.take_ports() => {}
            ended = port.forward(&self.view.queue) => {
                if let Err(error) = ended {
                    tracing::error!(%error, "cannot read from the loopback port of the relay");
                }
            }
        }
    }

    /// Hands UDP ports that the relay has allocated to the paths.
    async fn take_ports(&self) {
        loop {
            let port = self.view.queue.allocated().await;
            let now = self.paths.since(Instant::now());
            let allocated = RelayPort { address: port.address, token: port.token };
            self.paths.with_agent(|agent| agent.relay_port_allocated(now, port.peer, allocated));
        }
    }

    /// Keeps links to the relay of the mesh. Where another one is to be used, the one before is used until the other is up: nothing is
    /// lost where both are replicas of one relay.
    async fn follow_server(&self, port: &Arc<LoopbackPort>) {
        let mut changed = Wanted { server: self.server.clone(), key: self.key.clone() };
        let mut before = None;
        loop {
            let (server, key) = changed.current();
            if server.is_none() || before.is_none() {
                self.status.send_replace(LinkStatus::default());
            }
            before = match server {
                Some(server) => self.follow(self.start(server, key, port), before, &mut changed).await,
                None => {
                    drop(before.take());
                    self.registered.send_replace(None);
                    changed.changed().await;
                    None
                }
            };
        }
    }

    fn start<'a>(&'a self, server: RelayServer, key: PrivateKey, port: &'a Arc<LoopbackPort>) -> Running<'a> {
        let (sender, status) = watch::channel(LinkStatus::default());
        let public_key = key.public_key();
        let links = Box::pin(async move { self.connect(&server, &key, port, &sender).await });
        Running { links, status, public_key }
    }

    /// Returns the links if another relay is to be used, and nothing if they are to be made anew.
    async fn follow<'a>(
        &'a self,
        mut now: Running<'a>,
        mut before: Option<Running<'a>>,
        changed: &mut Wanted,
    ) -> Option<Running<'a>> {
        let mut end = Instant::now() + HANDOVER;
        let mut is_up = false;
        loop {
            let is_over = async {
                match &mut before {
                    // It must not connect again any more; the links that it has go on without it.
                    Some(_) if is_up => sleep_until(end.into()).await,
                    Some(Running { links, status, .. }) => tokio::select! {
                        () = links => {}
                        _ = status.wait_for(|status| !status.is_up) => {}
                        () = sleep_until(end.into()) => {}
                    },
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = &mut now.links => return None,
                () = changed.changed() => return Some(now),
                () = is_over => {
                    before = None;
                    self.status.send_replace(now.status.borrow().clone());
                }
                Ok(()) = now.status.changed() => {
                    let status = now.status.borrow_and_update().clone();
                    if status.is_up && !is_up {
                        is_up = true;
                        end = end.min(Instant::now() + REPLACED);
                    }
                    if status.is_up {
                        self.registered.send_replace(Some(now.public_key));
                    } else if before.is_none() {
                        self.registered.send_replace(None);
                    }
                    if status.is_up || before.is_none() {
                        self.status.send_replace(status);
                    }
                }
            }
        }
    }

    /// Stays connected until the token is another one.
    async fn connect(
        &self,
        server: &RelayServer,
        key: &PrivateKey,
        port: &Arc<LoopbackPort>,
        status: &watch::Sender<LinkStatus>,
    ) {
        let prepared = async {
            let token = self.token(server).await?;
            let settings = client_settings(server, key, self.instance, token.clone())?;
            let nat64 = Some(self.view.nat64.subscribe());
            Ok::<_, anyhow::Error>((client::Settings { nat64, ..settings }, token))
        };
        let (connection, token) = match prepared.await {
            Ok(prepared) => prepared,
            Err(error) => {
                status.send_modify(|status| {
                    status.error = Some(format!("{error:#}"));
                    status.down_since.get_or_insert_with(Instant::now);
                });
                sleep(SECRET_RETRY).await;
                return;
            }
        };
        let to = Arc::clone(port);
        let receive = Arc::new(move |peer: PublicKey, payload: &[u8]| to.deliver(&peer, payload));
        let renewed = async {
            loop {
                sleep(SECRET_INTERVAL).await;
                // While it cannot be read, the last one stays in force.
                if self.token(server).await.is_ok_and(|now| now != token) {
                    return;
                }
            }
        };
        tokio::select! {
            () = keep_connected(connection, self.view.queue.clone(), receive, status.clone()) => {}
            () = renewed => {}
        }
    }

    async fn token(&self, server: &RelayServer) -> Result<Vec<u8>> {
        let Some((namespace, name)) = &server.secret else { return Ok(Vec::new()) };
        let secrets = Api::<Secret>::namespaced(self.client.clone(), namespace);
        let id = format!("{namespace}/{name}");
        let what = || format!("Secret {id} with the token of the relay");
        let secret = match timeout(SECRET_TIMEOUT, secrets.get(name)).await {
            Ok(Err(error @ kube::Error::Api(_))) => {
                Err(error).with_context(|| format!("cannot read {}", what()))?
            }
            Ok(Ok(secret)) => secret,
            // The API server may be behind the relay.
            Ok(Err(_)) | Err(_) => {
                let saved = self.file.read_token(&id);
                return saved
                    .with_context(|| format!("cannot read {}: the API server does not answer", what()));
            }
        };
        let token = secret.data.and_then(|mut data| data.remove(TOKEN));
        let token = token.with_context(|| format!("{} has no key {TOKEN}", what()))?.0;
        // Files and editors end with a line feed.
        let token = token.trim_ascii().to_vec();
        if self.file.read_token(&id).as_ref() != Some(&token)
            && let Err(error) = self.file.write_token(&id, &token)
        {
            tracing::warn!(error = %format!("{error:#}"), "cannot save the token of the relay");
        }
        Ok(token)
    }
}

/// The links to one relay.
struct Running<'a> {
    /// Returns when they are to be made anew.
    links: Pin<Box<dyn Future<Output = ()> + Send + 'a>>,
    status: watch::Receiver<LinkStatus>,
    public_key: PublicKey,
}

/// Relay that is to be used, and the key with which this node registers there.
struct Wanted {
    server: watch::Receiver<Option<RelayServer>>,
    key: watch::Receiver<PrivateKey>,
}

impl Wanted {
    fn current(&mut self) -> (Option<RelayServer>, PrivateKey) {
        (self.server.borrow_and_update().clone(), self.key.borrow_and_update().clone())
    }

    /// Resolves when one of both is another.
    async fn changed(&mut self) {
        tokio::select! {
            Ok(()) = self.server.changed() => {}
            Ok(()) = self.key.changed() => {}
            else => std::future::pending().await,
        }
    }
}

fn relay_stun((address, server): (IpAddr, StunServer)) -> RelayStun {
    RelayStun {
        server: SocketAddr::new(address, server.port),
        other: SocketAddr::new(address, server.other_port),
        user: server.user,
        key: server.key,
        relay_ports: server.relay_ports,
    }
}

fn client_settings(
    server: &RelayServer,
    private_key: &PrivateKey,
    instance: [u8; 8],
    token: Vec<u8>,
) -> Result<client::Settings> {
    let roots = match &server.ca_bundle {
        _ if server.endpoint.transport == Transport::Ws => client::no_roots(),
        Some(bundle) => client::trust(bundle)?,
        None => client::system_roots().context("this host trusts no certificates; set caBundle")?,
    };
    Ok(client::Settings {
        endpoint: server.endpoint.clone(),
        server_name: server.server_name.clone(),
        proxy: Proxy::from_environment(&server.endpoint.host, |name| std::env::var(name).ok())?,
        roots: Arc::new(roots),
        private_key: private_key.clone(),
        instance,
        token,
        mark: MARK_FROM_WIREGUARD,
        nat64: None,
    })
}
