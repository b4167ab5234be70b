//! Connections to other replicas of the relay: where they are, and what is said over each. What goes to which one is decided in
//! [`crate::core`].

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::convert::Infallible;
use std::io;
use std::net::SocketAddr;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use fairlead_transport::Stream;
use fairlead_wire::relay::replica::{
    MIN_REPLICA_VERSION, REPLICA_ALPN, REPLICA_VERSION, ReplicaFrame, ReplicaHello, parse_replica_frame,
};
use tokio::net::{TcpStream, lookup_host};
use tokio::sync::Notify;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_rustls::TlsConnector;

use super::connections::{configure, report};
use super::handshakes::Handshake;
use super::replica_port::Replicas;
use super::state::Shared;
use crate::core::{ReplicaLinkId, Transmit};
use crate::stream::{self, FrameReader, FrameWriter, StreamError};

/// Interval at which names are resolved, and replicas without a connection are dialed.
const DIAL_INTERVAL: Duration = Duration::from_secs(2);
/// Time for TCP, TLS and both hellos.
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before another address of a replica is dialed that is connected already.
const REDUNDANT_INTERVAL: Duration = Duration::from_secs(30);
/// A replica says something at least this often, and is gone when it has said nothing for longer.
const PING_INTERVAL: Duration = Duration::from_secs(1);
const SILENCE_LIMIT: Duration = Duration::from_secs(5);
/// Time limit of one write.
const WRITE_TIMEOUT: Duration = Duration::from_secs(5);
/// Bytes written at once.
const BUDGET: usize = 32 << 10;
/// Addresses of replicas; five replicas with two families have ten.
const MAX_ADDRESSES: usize = 32;

/// A replica is counted as dialed until this is dropped.
struct Dialed<'a>(&'a Replicas, [u8; 16]);

impl Drop for Dialed<'_> {
    fn drop(&mut self) {
        self.0.dialed.lock().unwrap_or_else(PoisonError::into_inner).remove(&self.1);
    }
}

/// End of a dialed connection.
enum Ended {
    /// The connection ended with this error, after it was used.
    Connected(String),
    /// The connection led to this replica.
    Itself,
    /// There is another connection to the same replica.
    Redundant,
}

/// Keeps connections to all other replicas; never returns.
pub(super) async fn serve(shared: &Arc<Shared>) {
    let Some(replicas) = &shared.replicas else { return std::future::pending().await };
    tokio::join!(accept_all(shared, replicas), dial_all(shared, replicas));
}

async fn accept_all(shared: &Arc<Shared>, replicas: &Replicas) -> Infallible {
    let serve = |stream, source: SocketAddr| {
        let handshake = Handshake::begin(&replicas.handshakes, source.ip());
        Some(accept(Arc::clone(shared), stream, source, handshake))
    };
    // Handshakes and replicas have limits of their own.
    fairlead_transport::accept_all(&replicas.listener, &mut JoinSet::new(), || usize::MAX, serve).await
}

/// Resolves the names again and again, and dials every address without a connection.
async fn dial_all(shared: &Arc<Shared>, replicas: &Replicas) {
    let mut tick = interval(DIAL_INTERVAL);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut found: BTreeMap<&String, Vec<SocketAddr>> = BTreeMap::new();
    let mut dials = JoinSet::new();
    let mut running: HashMap<SocketAddr, AbortHandle> = HashMap::new();
    // Addresses of this replica itself, and the last failure of others.
    let mut own = BTreeSet::new();
    let mut failures: BTreeMap<SocketAddr, String> = BTreeMap::new();
    loop {
        tokio::select! {
            _ = tick.tick() => {
                resolve(&replicas.peers, &mut found).await;
                let wanted: BTreeSet<SocketAddr> = found.values().flatten().copied().collect();
                running.retain(|_, dial| !dial.is_finished());
                failures.retain(|address, _| wanted.contains(address));
                own.retain(|address| wanted.contains(address));
                for address in wanted.into_iter().take(MAX_ADDRESSES) {
                    if !own.contains(&address) && !running.contains_key(&address) {
                        running.insert(address, dials.spawn(dial(Arc::clone(shared), address)));
                    }
                }
            }
            Some(ended) = dials.join_next() => match ended {
                Ok((address, Ok(Ended::Itself))) => {
                    own.insert(address);
                }
                Ok((address, Ok(Ended::Connected(_) | Ended::Redundant))) => {
                    failures.remove(&address);
                }
                Ok((address, Err(error))) => {
                    if failures.insert(address, error.clone()).is_none_or(|before| before != error) {
                        tracing::warn!(%address, error, "cannot connect to a replica; retrying");
                    }
                }
                Err(error) => report(Err(error)),
            },
        }
    }
}

/// Resolves the names of replicas. The addresses of a name stay as they were while it cannot be resolved.
async fn resolve<'a>(peers: &'a [String], found: &mut BTreeMap<&'a String, Vec<SocketAddr>>) {
    for peer in peers {
        match timeout(HANDSHAKE_TIMEOUT, lookup_host(peer)).await {
            Ok(Ok(addresses)) => drop(found.insert(peer, addresses.collect())),
            Ok(Err(error)) => tracing::debug!(peer, %error, "cannot resolve the name of replicas"),
            Err(_) => tracing::debug!(peer, "the name of replicas is not resolved in time"),
        }
    }
}

async fn dial(shared: Arc<Shared>, address: SocketAddr) -> (SocketAddr, Result<Ended, String>) {
    let ended = connect(&shared, address).await;
    match &ended {
        Ok(Ended::Connected(error)) => tracing::info!(%address, error, "disconnected from a replica"),
        // Its other address may lose its connection.
        Ok(Ended::Redundant) => tokio::time::sleep(REDUNDANT_INTERVAL).await,
        Ok(Ended::Itself) | Err(_) => {}
    }
    (address, ended)
}

async fn connect(shared: &Shared, address: SocketAddr) -> Result<Ended, String> {
    let Some(replicas) = &shared.replicas else { return Ok(Ended::Itself) };
    let established = async {
        let stream = TcpStream::connect(address).await.map_err(|error| error.to_string())?;
        configure(&stream).map_err(|error| error.to_string())?;
        let config = replicas.trust.client_config(&replicas.certificate);
        let connector = TlsConnector::from(Arc::new(config.map_err(|error| error.to_string())?));
        let stream = connector.connect(replicas.trust.name(), stream).await;
        let stream = stream.map_err(|error| format!("TLS failed: {error}"))?;
        let is_replica = stream.get_ref().1.alpn_protocol() == Some(REPLICA_ALPN);
        greet(shared, Box::new(stream), is_replica).await
    };
    let established = timeout(HANDSHAKE_TIMEOUT, established).await;
    let established = established.map_err(|_| "it did not answer within 5 s".to_owned())??;
    if established.replica == shared.replica {
        return Ok(Ended::Itself);
    }
    if !replicas.dialed.lock().unwrap_or_else(PoisonError::into_inner).insert(established.replica) {
        return Ok(Ended::Redundant);
    }
    let _dialed = Dialed(replicas, established.replica);
    tracing::info!(%address, "connected to a replica");
    run(shared, established).await.map(Ended::Connected)
}

async fn accept(shared: Arc<Shared>, stream: TcpStream, source: SocketAddr, handshake: Handshake) {
    let Some(replicas) = &shared.replicas else { return };
    let established = async {
        configure(&stream).map_err(|error| error.to_string())?;
        let stream = replicas.acceptor.accept(stream).await;
        let stream = stream.map_err(|error| format!("TLS failed: {error}"))?;
        let is_replica = stream.get_ref().1.alpn_protocol() == Some(REPLICA_ALPN);
        greet(&shared, Box::new(stream), is_replica).await
    };
    let established = tokio::select! {
        established = timeout(HANDSHAKE_TIMEOUT, established) => {
            established.unwrap_or_else(|_| Err("it did not say who it is within 5 s".to_owned()))
        }
        () = handshake.displaced.cancelled() => Err("a newer connection needed its place".to_owned()),
    };
    drop(handshake);
    let ended = match established {
        Ok(established) if established.replica == shared.replica => return,
        Ok(established) => run(&shared, established).await,
        Err(error) => Err(error),
    };
    match ended {
        Ok(error) => tracing::debug!(%source, error, "a replica has disconnected"),
        Err(error) => tracing::debug!(%source, error, "refused a connection as a replica"),
    }
}

/// A connection whose other end has said who it is.
struct Established {
    replica: [u8; 16],
    standby_links: bool,
    reader: FrameReader<Box<dyn Stream>>,
    writer: FrameWriter<Box<dyn Stream>>,
}

/// Both ends say who they are.
async fn greet(shared: &Shared, stream: Box<dyn Stream>, is_replica: bool) -> Result<Established, String> {
    if !is_replica {
        return Err("it does not speak the protocol of replicas".to_owned());
    }
    let (mut reader, mut writer) = stream::direct(stream);
    let hello = ReplicaHello {
        min_version: MIN_REPLICA_VERSION,
        max_version: REPLICA_VERSION,
        replica: shared.replica,
        standby_links: true,
    };
    let mut bytes = Vec::new();
    ReplicaFrame::Hello(hello).encode(&mut bytes).map_err(|error| error.to_string())?;
    writer.write(&bytes).await.map_err(|error| error.to_string())?;
    let hello = loop {
        reader.fill().await.map_err(|error| error.to_string())?;
        let first = reader.take_first(|bytes| {
            let parsed = parse_replica_frame(bytes)?;
            Ok(parsed.map(|(frame, length)| match frame {
                ReplicaFrame::Hello(hello) => (Some(hello), length),
                _ => (None, length),
            }))
        });
        if let Some(first) = first.map_err(|error: StreamError| error.to_string())? {
            break first.ok_or("its first frame is no hello")?;
        }
    };
    if hello.max_version < MIN_REPLICA_VERSION || hello.min_version > REPLICA_VERSION {
        return Err(format!(
            "it speaks versions {} to {}, this replica {MIN_REPLICA_VERSION} to {REPLICA_VERSION}",
            hello.min_version, hello.max_version
        ));
    }
    let ReplicaHello { replica, standby_links, .. } = hello;
    Ok(Established { replica, standby_links, reader, writer })
}

/// A connection that is forgotten when it is dropped.
struct Registered<'a> {
    shared: &'a Shared,
    id: ReplicaLinkId,
}

impl Drop for Registered<'_> {
    fn drop(&mut self) {
        let mut links = self.shared.links();
        links.relay.remove_replica(self.id);
        links.replica_wakers.remove(&self.id);
        links.wake();
    }
}

/// Uses a connection until it ends, and says why it did.
async fn run(shared: &Shared, established: Established) -> Result<String, String> {
    let Established { replica, standby_links, mut reader, writer } = established;
    let waker = Arc::new(Notify::new());
    let id = {
        let mut links = shared.links();
        let id = links.relay.add_replica(replica, standby_links).map_err(|error| error.to_string())?;
        links.replica_wakers.insert(id, Arc::clone(&waker));
        links.wake();
        id
    };
    // Also when the task is aborted.
    let _registered = Registered { shared, id };
    // What came with the hello.
    handle(shared, id, &mut reader)?;
    Ok(tokio::select! {
        error = read(shared, id, reader) => error,
        written = write(shared, id, writer, &waker) => written.err().map_or_else(String::new, |error| error.to_string()),
    })
}

/// Hands frames to the core until the connection ends.
async fn read(shared: &Shared, id: ReplicaLinkId, mut reader: FrameReader<Box<dyn Stream>>) -> String {
    loop {
        match timeout(SILENCE_LIMIT, reader.fill()).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return error.to_string(),
            Err(_) => return "it has said nothing for 5 s".to_owned(),
        }
        if let Err(error) = handle(shared, id, &mut reader) {
            return error;
        }
    }
}

fn handle(
    shared: &Shared,
    id: ReplicaLinkId,
    reader: &mut FrameReader<Box<dyn Stream>>,
) -> Result<(), String> {
    let mut links = shared.links();
    let now = Instant::now();
    let mut result = Ok(());
    let drained = reader.drain_with(|bytes| {
        let Some((frame, length)) = parse_replica_frame(bytes)? else { return Ok(None) };
        if result.is_ok() {
            result = links.relay.handle_replica_frame(now, id, &frame);
        }
        Ok(Some(length))
    });
    links.wake();
    drop(links);
    drained.map_err(|error| error.to_string())?;
    result.map_err(|error| error.to_string())
}

/// Writes what the core has for the replica, and pings where there is nothing.
async fn write(
    shared: &Shared,
    id: ReplicaLinkId,
    mut writer: FrameWriter<Box<dyn Stream>>,
    waker: &Notify,
) -> io::Result<()> {
    let mut out = Vec::new();
    loop {
        out.clear();
        let transmit = shared.links().relay.poll_replica(Instant::now(), id, BUDGET, &mut out);
        match transmit {
            Transmit::Close => return Ok(()),
            Transmit::Frames => {}
            Transmit::Nothing => {
                out.shrink_to(BUDGET);
                if timeout(PING_INTERVAL, waker.notified()).await.is_ok() {
                    continue;
                }
                // It has no parts that could be too long.
                let _ = ReplicaFrame::Ping.encode(&mut out);
            }
        }
        timeout(WRITE_TIMEOUT, writer.write(&out)).await??;
    }
}
