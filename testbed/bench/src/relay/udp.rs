//! A pair of clients with a UDP port of `fairlead relay`: see `docs/relay-protocol.md`.

use std::sync::Arc;
use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use fairlead_keys::PublicKey;
use fairlead_relay::client::{LinkQueue, RelayPort, Settings};
use fairlead_wire::stun::server::AuthenticatedRequest;
use fairlead_wire::stun::{TransactionId, parse_response};
use tokio::net::UdpSocket;
use tokio::time::timeout;

use super::flow::{Arrivals, Pair};
use super::load::connect;

/// Longest wait for one answer of the relay, and number of times that it is asked.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(1);
const ATTEMPTS: u8 = 10;
/// More than any packet has.
const BUFFER: usize = 2048;

/// Connects both clients, and binds a socket of each to the port that the relay has for them.
pub(super) async fn connect_pair(sender: Settings, receiver: Settings) -> Result<Pair> {
    let key = |settings: &Settings| settings.private_key.public_key();
    let (source, destination) = (key(&sender), key(&receiver));
    // Both first: the relay allocates a port only to clients that it knows.
    let receiver = connect(receiver, Arc::new(|_, _: &[u8]| {})).await?;
    let sender = connect(sender, Arc::new(|_, _: &[u8]| {})).await?;
    let receiving = bind(&receiver, &source).await?;
    let sending = bind(&sender, &destination).await?;

    let arrivals = Arc::new(Arrivals::default());
    let taken = Arc::clone(&arrivals);
    tokio::spawn(async move {
        let mut buffer = [0; BUFFER];
        while let Ok(length) = receiving.recv(&mut buffer).await {
            taken.receive(buffer.get(..length).unwrap_or_default());
        }
    });
    // What the kernel has no room for is lost, and counted as such.
    let send = move |packet: &[u8]| drop(sending.try_send(packet));
    Ok(Pair { send: Box::new(send), arrivals })
}

/// A socket that the relay's port to a peer is bound to.
async fn bind(queue: &LinkQueue, peer: &PublicKey) -> Result<UdpSocket> {
    let port = allocated(queue, peer).await?;
    let socket = UdpSocket::bind("0.0.0.0:0").await?;
    socket.connect(port.address).await?;
    let mut nonce = None;
    let mut buffer = [0; BUFFER];
    for attempt in 0..ATTEMPTS {
        let transaction = TransactionId([attempt; 12]);
        let request = AuthenticatedRequest { transaction, change_port: false, user: None, nonce };
        socket.send(&request.encode(&port.token)).await?;
        let Ok(length) = timeout(ANSWER_TIMEOUT, socket.recv(&mut buffer)).await else { continue };
        let response = parse_response(buffer.get(..length?).unwrap_or_default());
        let response = response.with_context(|| format!("{} answers something else", port.address))?;
        if response.mapped.is_ok() {
            return Ok(socket);
        }
        nonce = response.nonce;
    }
    bail!("{} cannot be bound", port.address)
}

async fn allocated(queue: &LinkQueue, peer: &PublicKey) -> Result<RelayPort> {
    for _ in 0..ATTEMPTS {
        queue.ask_port(peer);
        if let Ok(port) = timeout(ANSWER_TIMEOUT, queue.allocated()).await {
            return Ok(port);
        }
    }
    bail!("the relay allocates no UDP port")
}
