//! Connections between gateways: one that this gateway dials to each member, and one that each member dials.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fairlead_egress::registration::PublicKeyHash;
use fairlead_limits::{Backoff, ConnectionTable, Rate, TokenBucket};
use fairlead_source_addresses::copies::outgoing::BATCH;
use fairlead_source_addresses::members::{MAX_MEMBERS, Member};
use fairlead_wire::egress_peers::{FromMember, Missed, ToMember, from_member, to_member};
use tokio::io::{ReadHalf, WriteHalf, split};
use tokio::net::{TcpListener, TcpStream};
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsStream;

use super::frames::{self, encode};
use super::outbox::Outbox;
use super::{Hold, Identity, News, Peers};

/// Longest TLS handshake.
const HANDSHAKE: Duration = Duration::from_secs(3);
/// Connections from addresses of members that are accepted: each dials one, and another when that has failed.
const MAX_CONNECTIONS: usize = 4 * MAX_MEMBERS;
/// Connections from other addresses: of strangers, of a member that the Lease does not show yet, or of one whose packets have the address of
/// a NAT.
const MAX_OTHERS: usize = 2 * MAX_MEMBERS;
/// Connections from one address.
const MAX_PER_SOURCE: usize = 8;
/// Longest time in which the other host acknowledges nothing of what was sent.
const USER_TIMEOUT: Duration = Duration::from_secs(2);
/// Longest pause before a member is dialed again.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// Messages of a member in a second. A holder sends 4 heartbeats, and up to 50 about flows.
const MESSAGES: u32 = 500;
/// Flows of a member in a second. Each takes the kernel about 10 µs.
pub(crate) const FLOWS: u32 = 20_000;
/// Flows in a message; more end the connection.
const FLOWS_IN_MESSAGE: u32 = 2 * BATCH as u32;

static NUMBERS: AtomicU64 = AtomicU64::new(1);

/// Accepts connections.
pub(super) async fn accept_all(
    peers: Arc<Peers>,
    listener: TcpListener,
    identity: Identity,
    hold: Arc<dyn Hold>,
) -> Infallible {
    let [of_members, of_others] =
        [MAX_CONNECTIONS, MAX_OTHERS].map(|most| ConnectionTable::new(most, MAX_PER_SOURCE));
    // The newest connection of each member; it replaces the one before.
    let newest = Arc::new(std::sync::Mutex::new(BTreeMap::<String, AbortHandle>::new()));
    let task = |stream, source: SocketAddr| {
        let address = source.ip().to_canonical();
        let limits = if peers.has_address(address) { &of_members } else { &of_others };
        let counted = limits.admit(address, ())?;
        let (peers, identity, hold) = (Arc::clone(&peers), identity.clone(), Arc::clone(&hold));
        let newest = Arc::clone(&newest);
        Some(async move {
            let _counted = counted;
            let Some((stream, from, key)) = greet(&peers, stream, source, &identity).await else { return };
            // Dropped with this task.
            let mut served = JoinSet::new();
            let handle = served.spawn(serve(peers, stream, (from.clone(), key), hold));
            let former = {
                let mut newest = newest.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
                newest.retain(|_, it| !it.is_finished());
                newest.insert(from.clone(), handle)
            };
            if let Some(former) = former {
                former.abort();
            }
            if let Some(Ok(Err(error))) = served.join_next().await {
                tracing::debug!(gateway = from, %error, "a connection of another gateway has ended");
            }
        })
    };
    // What is not admitted is closed.
    fairlead_transport::accept_all(&listener, &mut JoinSet::new(), || usize::MAX, task).await
}

/// The handshake, whose key it is, and the key.
async fn greet(
    peers: &Peers,
    stream: TcpStream,
    source: SocketAddr,
    identity: &Identity,
) -> Option<(TlsStream<TcpStream>, String, PublicKeyHash)> {
    if let Err(error) = configure(&stream) {
        tracing::debug!(%source, %error, "cannot configure a connection");
        return None;
    }
    let (stream, key) = match fairlead_transport::handshake(HANDSHAKE, identity.accept(stream)).await {
        Ok(greeted) => greeted,
        Err(error) => {
            tracing::debug!(%source, %error, "a TLS handshake with a gateway failed");
            return None;
        }
    };
    let from = peers.member_of(&key);
    if from.is_none() {
        // It is dialed again: the Lease may show the key later.
        tracing::debug!(%source, "the key is of no gateway of this Egress");
    }
    Some((stream, from?, key))
}

/// Reads what a member sends, and answers, as long as the Lease shows that member with that key.
async fn serve(
    peers: Arc<Peers>,
    stream: TlsStream<TcpStream>,
    (from, key): (String, PublicKeyHash),
    hold: Arc<dyn Hold>,
) -> io::Result<Infallible> {
    let (mut reader, mut writer) = split(stream);
    let [mut messages, mut flows] = [MESSAGES, FLOWS].map(pace);
    let mut buffer = Vec::new();
    loop {
        let message: ToMember = frames::read(&mut reader, &mut buffer).await?;
        if !peers.is_member(&from, &key) {
            let reason = "the Lease does not show its key any more";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, reason));
        }
        let answer = match message.kind {
            Some(to_member::Kind::Heartbeat(heartbeat)) => {
                Some(from_member::Kind::Answer(hold.heartbeat(&from, heartbeat)))
            }
            Some(kind) => {
                let (slot, count) = size(&kind);
                if count > FLOWS_IN_MESSAGE {
                    return Err(io::Error::new(io::ErrorKind::InvalidData, "a message of too many flows"));
                }
                let is_taken = peers.hear(&from, News::Flows(kind));
                sleep(flows.charge(Instant::now(), count.into())).await;
                (!is_taken).then_some(from_member::Kind::Missed(Missed { slot }))
            }
            // Of a later version.
            None => None,
        };
        let wanted = peers.take_wanted(&from).map(|slot| from_member::Kind::Missed(Missed { slot }));
        for kind in answer.into_iter().chain(wanted) {
            frames::write(&mut writer, &encode(&FromMember { kind: Some(kind) })).await?;
        }
        sleep(messages.charge(Instant::now(), 1)).await;
    }
}

/// Bucket for the units that are read of one member: a faulty or compromised one gets no more of this gateway's time than that.
fn pace(per_second: u32) -> TokenBucket {
    TokenBucket::full(Rate::per_second(per_second.into(), per_second.into()), Instant::now())
}

/// The slot of a message, and how many flows are in it.
fn size(kind: &to_member::Kind) -> (u32, u32) {
    match kind {
        to_member::Kind::Flows(flows) => {
            let count = flows.set.len().saturating_add(flows.removed.len());
            (flows.slot, u32::try_from(count).unwrap_or(u32::MAX))
        }
        to_member::Kind::CopyBegins(begins) => (begins.slot, 0),
        to_member::Kind::CopyEnds(ends) => (ends.slot, 0),
        to_member::Kind::Heartbeat(_) => (0, 0),
    }
}

/// Keeps a connection to each member.
pub(super) async fn dial_all(
    peers: Arc<Peers>,
    identity: Identity,
    port: u16,
    hold: Arc<dyn Hold>,
) -> Infallible {
    let mut members = peers.members();
    let mut tasks: BTreeMap<String, (Member, JoinSet<Infallible>)> = BTreeMap::new();
    loop {
        let wanted = members.borrow_and_update().clone().unwrap_or_default();
        let gone: Vec<String> = tasks
            .iter()
            .filter(|(pod, (of, _))| wanted.get(*pod) != Some(of))
            .map(|(pod, _)| pod.clone())
            .collect();
        for pod in gone {
            tasks.remove(&pod);
            peers.forget(&pod);
        }
        for (pod, member) in wanted.iter().filter(|(pod, _)| !tasks.contains_key(*pod)).collect::<Vec<_>>() {
            let outbox = Arc::new(Outbox::default());
            peers.outboxes().insert(pod.clone(), Arc::clone(&outbox));
            let dialer = Dialer {
                peers: Arc::clone(&peers),
                pod: pod.clone(),
                member: member.clone(),
                identity: identity.clone(),
                port,
                hold: Arc::clone(&hold),
                outbox,
            };
            let mut task = JoinSet::new();
            task.spawn(dialer.run());
            tasks.insert(pod.clone(), (member.clone(), task));
        }
        if members.changed().await.is_err() {
            // The Lease is watched no more: the program is ending.
            std::future::pending::<()>().await;
        }
    }
}

impl Peers {
    /// Messages to a member that is gone wait no more.
    fn forget(&self, pod: &str) {
        self.outboxes().remove(pod);
        self.dropped.lock().unwrap_or_else(std::sync::PoisonError::into_inner).remove(pod);
        self.wanted.lock().unwrap_or_else(std::sync::PoisonError::into_inner).remove(pod);
        self.connections.send_if_modified(|connections| connections.remove(pod).is_some());
    }
}

/// Keeps a connection to one member.
struct Dialer {
    peers: Arc<Peers>,
    pod: String,
    member: Member,
    identity: Identity,
    port: u16,
    hold: Arc<dyn Hold>,
    outbox: Arc<Outbox>,
}

impl Dialer {
    async fn run(self) -> Infallible {
        let mut backoff = Backoff::up_to(LONGEST_PAUSE);
        let mut is_reported = false;
        loop {
            let began = Instant::now();
            let result = match self.connect().await {
                Ok(stream) => {
                    tracing::info!(gateway = self.pod, "connected to another gateway");
                    is_reported = false;
                    self.converse(stream).await
                }
                Err(error) => Err(error),
            };
            let Err(error) = result;
            if !is_reported {
                tracing::info!(gateway = self.pod, %error, "no connection to another gateway; trying again");
                is_reported = true;
            }
            sleep(backoff.lost(began.elapsed(), rand::random())).await;
        }
    }

    async fn connect(&self) -> io::Result<TlsStream<TcpStream>> {
        let of = |address: &IpAddr| SocketAddr::new(*address, self.port);
        let addresses: Vec<SocketAddr> = self.member.addresses.iter().map(of).collect();
        let stream = fairlead_transport::dial(addresses, 0, |_| Ok(())).await?;
        configure(&stream)?;
        let address = stream.peer_addr()?.ip();
        let connected = timeout(HANDSHAKE, self.identity.connect(stream, address)).await;
        let (stream, key) = connected.map_err(|_| io::Error::from(io::ErrorKind::TimedOut))??;
        if key != self.member.key {
            return Err(io::Error::other("the other end has not the key that the Lease shows"));
        }
        Ok(stream)
    }

    async fn converse(&self, stream: TlsStream<TcpStream>) -> io::Result<Infallible> {
        let (reader, writer) = split(stream);
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        let _open = Open::new(self, number);
        tokio::select! {
            ended = self.send(writer) => ended,
            ended = self.receive(reader) => ended,
        }
    }

    async fn send(&self, mut writer: WriteHalf<TlsStream<TcpStream>>) -> io::Result<Infallible> {
        loop {
            let frame = self.outbox.next().await;
            frames::write(&mut writer, &frame).await?;
        }
    }

    async fn receive(&self, mut reader: ReadHalf<TlsStream<TcpStream>>) -> io::Result<Infallible> {
        let mut messages = pace(MESSAGES);
        let mut buffer = Vec::new();
        loop {
            let message: FromMember = frames::read(&mut reader, &mut buffer).await?;
            match message.kind {
                Some(from_member::Kind::Answer(answer)) => self.hold.answer(&self.pod, answer),
                Some(from_member::Kind::Missed(missed)) => {
                    // Dropped, it comes again with the next message that is dropped there, or with the next minute's full copy.
                    self.peers.hear(&self.pod, News::Missed(missed.slot));
                }
                None => {}
            }
            sleep(messages.charge(Instant::now(), 1)).await;
        }
    }
}

/// The connection counts until this is dropped.
struct Open<'a>(&'a Dialer, u64);

impl<'a> Open<'a> {
    fn new(dialer: &'a Dialer, number: u64) -> Self {
        dialer.outbox.open(Some(number));
        dialer.peers.connections.send_modify(|all| {
            all.insert(dialer.pod.clone(), number);
        });
        Self(dialer, number)
    }
}

impl Drop for Open<'_> {
    fn drop(&mut self) {
        self.0.outbox.open(None);
        self.0.peers.connections.send_if_modified(|all| {
            let is_ours = all.get(&self.0.pod) == Some(&self.1);
            is_ours && all.remove(&self.0.pod).is_some()
        });
    }
}

/// Dead hosts are found within seconds.
fn configure(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    socket2::SockRef::from(stream).set_tcp_user_timeout(Some(USER_TIMEOUT))
}
