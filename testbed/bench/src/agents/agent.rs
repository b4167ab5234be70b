//! One agent: the node program's path machines and its client of the relay, both real, and a model of the WireGuard device: counters,
//! and handshakes that always succeed when both messages arrive.

use std::collections::{BTreeMap, BTreeSet};
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use fairlead_keys::{PrivateKey, PublicKey};
use fairlead_path::{Config, Event, Identity, Observation, PathAgent, PeerPaths, RelayPath, Status};
use fairlead_relay::client::{LinkQueue, LinkStatus, Settings, keep_connected};
use fairlead_wire::probe::is_probe;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval_at, sleep_until};

/// Between two messages to each active peer.
pub(super) const INTERVAL: Duration = Duration::from_secs(2);
/// WireGuard's `REKEY_AFTER_TIME`.
const REKEY: Duration = Duration::from_secs(120);
/// Lengths of WireGuard's messages: initiation, response, and data of 100 bytes.
const LENGTHS: [usize; 3] = [148, 92, 132];
const INITIATION: u8 = 1;
const RESPONSE: u8 = 2;
const DATA: u8 = 4;
/// Datagrams of the relay that may wait for an agent; more are dropped, as a socket drops them.
const INBOX: usize = 4096;

/// Counters that all agents share.
#[derive(Debug, Default)]
pub(super) struct Counters {
    pub(super) sent: AtomicU64,
    pub(super) received: AtomicU64,
    /// Datagrams of any kind to peers that have no traffic.
    pub(super) to_idle: AtomicU64,
}

/// State of an agent, as it tells it to the publisher that writes for it.
#[derive(Debug, Clone, Default)]
pub(super) struct News {
    pub(super) link: LinkStatus,
    /// The number of each peer, its state, and whether it has a session.
    pub(super) peers: Vec<(usize, Status, bool)>,
}

/// Settings and state that all agents have in common.
pub(super) struct Common {
    /// Keys of all agents, sorted: the number of an agent is the place of its key.
    pub(super) keys: Vec<PublicKey>,
    /// Number of neighbours on each side in the ring with which there is traffic.
    pub(super) reach: usize,
    pub(super) counters: Counters,
    /// Whether active peers have traffic.
    pub(super) traffic: watch::Receiver<bool>,
    /// Time from which on arrivals are timed.
    pub(super) mark: watch::Receiver<Instant>,
}

#[derive(Debug, Default)]
struct Device {
    endpoint: Option<SocketAddr>,
    handshake: Option<Instant>,
    rx_bytes: u64,
    tx_bytes: u64,
    arrived: Option<Instant>,
}

/// An agent and the tasks it needs.
pub(super) struct Agent {
    number: usize,
    common: Arc<Common>,
    agent: PathAgent,
    begin: Instant,
    devices: BTreeMap<PublicKey, Device>,
    active: BTreeSet<PublicKey>,
    queue: LinkQueue,
    link: watch::Receiver<LinkStatus>,
    inbox: mpsc::Receiver<(PublicKey, Vec<u8>)>,
    news: watch::Sender<News>,
    /// Seconds from the mark to the first message of each active peer after it.
    returns: watch::Sender<Vec<f64>>,
    mark: Instant,
    is_news: bool,
    _link: JoinSet<()>,
}

/// Channels in which a running agent is observed.
pub(super) struct View {
    pub(super) link: watch::Receiver<LinkStatus>,
    pub(super) news: watch::Receiver<News>,
    pub(super) returns: watch::Receiver<Vec<f64>>,
}

/// The keys of so many agents, sorted by the public one.
pub(super) fn keys(agents: usize) -> Result<BTreeMap<PublicKey, PrivateKey>> {
    let key = |number: usize| {
        let mut private = [0x40; 32];
        // The lowest bits of the first byte do not count.
        private.iter_mut().skip(1).zip(number.to_le_bytes()).for_each(|(byte, part)| *byte = part);
        let private = PrivateKey(private);
        Ok((private.public_key(), private))
    };
    (0..agents).map(key).collect()
}

/// Address that stands for a peer by way of the relay, as the loopback port of the node program has it.
fn endpoint(number: usize) -> Result<SocketAddr> {
    let first = Ipv4Addr::new(127, 64, 0, 1).to_bits();
    let address = first.checked_add(u32::try_from(number)?).context("too many agents")?;
    Ok(SocketAddr::from((Ipv4Addr::from_bits(address), 1)))
}

fn number_at(endpoint: SocketAddr) -> Option<usize> {
    let SocketAddr::V4(endpoint) = endpoint else { return None };
    let first = Ipv4Addr::new(127, 64, 0, 1).to_bits();
    usize::try_from(endpoint.ip().to_bits().checked_sub(first)?).ok()
}

fn message(kind: u8) -> Vec<u8> {
    let length = match kind {
        INITIATION => LENGTHS[0],
        RESPONSE => LENGTHS[1],
        _ => LENGTHS[2],
    };
    let mut message = vec![0; length];
    if let Some(first) = message.first_mut() {
        *first = kind;
    }
    message
}

impl Agent {
    /// With all other agents as peers, whose only way is the relay, and a link to it.
    pub(super) fn start(number: usize, common: Arc<Common>, settings: Settings) -> Result<(Self, View)> {
        let key = *common.keys.get(number).context("no such agent")?;
        let begin = Instant::now();
        let mut agent = PathAgent::new(Config::default(), u64::try_from(number)?);
        let mut epoch = [1; 16];
        epoch.iter_mut().zip(number.to_le_bytes()).for_each(|(byte, part)| *byte = part);
        agent.enable_probes(Identity { private_key: settings.private_key.clone(), public_key: key, epoch });
        let (mut devices, mut active) = (BTreeMap::new(), BTreeSet::new());
        for (peer, key) in common.keys.iter().enumerate().filter(|(peer, _)| *peer != number) {
            let relay = RelayPath {
                endpoint: endpoint(peer)?,
                is_only: false,
                handshake_timeout: Duration::from_secs(30),
                direct_retry: Duration::from_secs(120),
            };
            agent.upsert_peer(Duration::ZERO, *key, PeerPaths { relay: Some(relay), ..PeerPaths::default() });
            devices.insert(*key, Device::default());
            let distance = peer.abs_diff(number);
            if distance.min(common.keys.len().saturating_sub(distance)) <= common.reach {
                active.insert(*key);
            }
        }
        let (queue, (status, link)) = (LinkQueue::default(), watch::channel(LinkStatus::default()));
        let (sender, inbox) = mpsc::channel(INBOX);
        let receive = move |from: PublicKey, bytes: &[u8]| drop(sender.try_send((from, bytes.to_vec())));
        let mut tasks = JoinSet::new();
        tasks.spawn(keep_connected(settings, queue.clone(), Arc::new(receive), status));
        let ((news, seen), (returns, returned)) =
            (watch::channel(News::default()), watch::channel(Vec::new()));
        let view = View { link: link.clone(), news: seen, returns: returned };
        let mark = *common.mark.borrow();
        let agent = Self {
            number,
            common,
            agent,
            begin,
            devices,
            active,
            queue,
            link,
            inbox,
            news,
            returns,
            mark,
            is_news: true,
            _link: tasks,
        };
        Ok((agent, view))
    }

    /// Runs the agent until it is dropped.
    pub(super) async fn run(mut self) -> Result<()> {
        // Not all at one moment.
        let first = INTERVAL.saturating_mul(u32::try_from(self.number % 1000)?) / 1000;
        let mut ticks = interval_at(tokio::time::Instant::now() + first, INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut was_up = false;
        loop {
            let due = self.agent.poll_timeout().map(|at| (self.begin + at).into());
            tokio::select! {
                Some((from, bytes)) = self.inbox.recv() => self.receive(from, &bytes),
                _ = ticks.tick() => {
                    self.send_data();
                    self.tell();
                }
                Ok(()) = self.link.changed() => {
                    let is_up = self.link.borrow_and_update().is_up;
                    // As the node program: most changes are round-trip times.
                    if std::mem::replace(&mut was_up, is_up) != is_up {
                        self.agent.relay_changed(self.begin.elapsed(), is_up);
                    }
                    self.is_news = true;
                }
                () = async { match due {
                    Some(due) => sleep_until(due).await,
                    None => std::future::pending().await,
                } } => self.agent.handle_timeout(self.begin.elapsed()),
            }
            self.drain();
        }
    }

    fn send(&self, key: &PublicKey, is_probe: bool, bytes: &[u8]) {
        if !self.active.contains(key) || !*self.common.traffic.borrow() {
            self.common.counters.to_idle.fetch_add(1, Ordering::Relaxed);
        }
        self.queue.send(key, is_probe, bytes);
    }

    fn send_data(&mut self) {
        if !*self.common.traffic.borrow() {
            return;
        }
        let now = Instant::now();
        for key in self.active.clone() {
            let Some(device) = self.devices.get_mut(&key) else { continue };
            let age = device.handshake.map(|at| now.saturating_duration_since(at));
            device.tx_bytes = device.tx_bytes.saturating_add(100);
            // One side is enough for the next handshake.
            let is_first = self.common.keys.get(self.number).is_some_and(|own| *own < key);
            if age.is_none_or(|age| age > REKEY && is_first) {
                self.send(&key, false, &message(INITIATION));
            }
            if age.is_some() {
                self.common.counters.sent.fetch_add(1, Ordering::Relaxed);
                self.send(&key, false, &message(DATA));
            }
        }
    }

    fn receive(&mut self, from: PublicKey, bytes: &[u8]) {
        let Some(device) = self.devices.get_mut(&from) else { return };
        let number = self.common.keys.binary_search(&from).ok();
        let Some(remote) = number.and_then(|number| endpoint(number).ok()) else { return };
        if is_probe(bytes) {
            return self.agent.handle_datagram(self.begin.elapsed(), None, remote, bytes);
        }
        let now = Instant::now();
        device.endpoint = Some(remote);
        match bytes.first() {
            Some(&INITIATION) => {
                device.handshake = Some(now);
                self.send(&from, false, &message(RESPONSE));
            }
            Some(&RESPONSE) => device.handshake = Some(now),
            _ => {
                device.rx_bytes = device.rx_bytes.saturating_add(100);
                let before = device.arrived.replace(now);
                self.common.counters.received.fetch_add(1, Ordering::Relaxed);
                let mark = *self.common.mark.borrow();
                if std::mem::replace(&mut self.mark, mark) != mark {
                    self.returns.send_replace(Vec::new());
                }
                if before.is_none_or(|before| before < mark) {
                    let took = now.saturating_duration_since(mark).as_secs_f64();
                    self.returns.send_modify(|returns| returns.push(took));
                }
            }
        }
    }

    fn drain(&mut self) {
        while let Some(transmit) = self.agent.poll_transmit() {
            let key = number_at(transmit.remote).and_then(|number| self.common.keys.get(number)).copied();
            if let Some(key) = key {
                self.send(&key, true, &transmit.payload);
            }
        }
        while let Some(event) = self.agent.poll_event() {
            match event {
                Event::ObservationDue { peer } => self.observe(&peer),
                Event::SetEndpoint { peer, endpoint, .. } => {
                    if let Some(device) = self.devices.get_mut(&peer) {
                        device.endpoint = Some(endpoint);
                        if device.handshake.is_none() {
                            self.send(&peer, false, &message(INITIATION));
                        }
                    }
                }
                Event::HandshakeDue { peer } => self.send(&peer, false, &message(INITIATION)),
                Event::StateChanged { .. } => self.is_news = true,
                _ => {}
            }
        }
    }

    fn observe(&mut self, peer: &PublicKey) {
        let Some(device) = self.devices.get(peer) else { return };
        let observation = Observation {
            endpoint: device.endpoint,
            handshake_age: device.handshake.map(|at| at.elapsed()),
            rx_bytes: device.rx_bytes,
            tx_bytes: device.tx_bytes,
        };
        self.agent.observe(self.begin.elapsed(), peer, observation);
    }

    /// Reports changes of the status, at most once in [`INTERVAL`].
    fn tell(&mut self) {
        if !*self.common.traffic.borrow() || !std::mem::take(&mut self.is_news) {
            return;
        }
        let now = self.begin.elapsed();
        let of_peer = |(number, key): (usize, &PublicKey)| {
            let has_session = self.devices.get(key)?.handshake.is_some();
            Some((number, self.agent.status(now, key)?, has_session))
        };
        let peers = self.common.keys.iter().enumerate().filter_map(of_peer).collect();
        let link = self.link.borrow().clone();
        self.news.send_replace(News { link, peers });
    }
}
