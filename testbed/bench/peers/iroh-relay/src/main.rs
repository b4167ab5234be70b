//! `iroh-relay-bench serve ADDRESS CERTIFICATE KEY` is iroh's relay. `iroh-relay-bench load ADDRESS PAIRS` is load for it by iroh's own
//! client, as `flow` says.

#[path = "../../../src/relay/flow.rs"]
mod flow;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use flow::{Arrivals, Pair};
use futures::{SinkExt, StreamExt, TryStreamExt, stream};
use iroh_base::{EndpointId, RelayUrl, SecretKey};
use iroh_dns::dns::DnsResolver;
use iroh_relay::client::ClientBuilder;
use iroh_relay::protos::relay::{ClientToRelayMsg, Datagrams, RelayToClientMsg};
use iroh_relay::server::{CertConfig, RelayConfig, Server, ServerConfig, TlsConfig};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::sync::mpsc;

/// Clients that connect at once.
const CONNECTING: usize = 32;
/// Packets that are written at once, if there are as many.
const BATCH: usize = 32;

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match *arguments.as_slice() {
        ["load", address, pairs] => load(address, pairs.parse()?).await,
        ["serve", address, certificate, key] => {
            serve(address.parse()?, certificate.as_ref(), key.as_ref()).await
        }
        _ => bail!("usage: iroh-relay-bench serve ADDRESS CERTIFICATE KEY | load ADDRESS PAIRS"),
    }
}

async fn serve(address: SocketAddr, certificate: &Path, key: &Path) -> Result<()> {
    let chain = CertificateDer::pem_file_iter(certificate)?.collect::<Result<Vec<_>, _>>()?;
    let tls = rustls::ServerConfig::builder_with_provider(iroh_relay::tls::default_provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(chain, PrivateKeyDer::from_pem_file(key)?)?;
    let mut relay = RelayConfig::new(SocketAddr::new(address.ip(), 0));
    relay.tls = Some(TlsConfig::new(address, CertConfig::Manual { server_config: tls }));
    let mut config = ServerConfig::default();
    config.relay = Some(relay);
    let _server = Server::spawn(config).await?;
    println!("serving");
    std::future::pending().await
}

async fn load(address: &str, pairs: usize) -> Result<()> {
    let url: RelayUrl = format!("https://{address}").parse()?;
    let trusted = std::env::var("SSL_CERT_FILE").context("SSL_CERT_FILE is not set")?;
    let mut roots = rustls::RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(trusted)? {
        roots.add(certificate?)?;
    }
    let tls = rustls::ClientConfig::builder_with_provider(iroh_relay::tls::default_provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_root_certificates(roots)
        .with_no_client_auth();
    let resolver = DnsResolver::new();
    let connect = |_| connect_pair(&url, &tls, &resolver);
    let pairs: Vec<Pair> =
        stream::iter(0..pairs).map(connect).buffer_unordered(CONNECTING).try_collect().await?;
    let mut lines = std::io::stdin().lines();
    flow::follow(pairs, || lines.next()?.ok()).await
}

async fn connect_pair(url: &RelayUrl, tls: &rustls::ClientConfig, resolver: &DnsResolver) -> Result<Pair> {
    let arrivals = Arc::new(Arrivals::default());
    let (sender, receiver) = (SecretKey::generate(), SecretKey::generate());
    let destination = receiver.public();
    let builder = |key| ClientBuilder::new(url.clone(), key, resolver.clone()).tls_client_config(tls.clone());
    let client = builder(receiver).connect().await?;
    let (_unused, nothing) = mpsc::unbounded_channel();
    let taken = Arc::clone(&arrivals);
    tokio::spawn(async move {
        let _unused = _unused;
        run(client, destination, nothing, |packet| taken.receive(packet)).await;
    });
    let client = builder(sender).connect().await?;
    let (queue, queued) = mpsc::unbounded_channel();
    tokio::spawn(run(client, destination, queued, |_| {}));
    let send = move |packet: &[u8]| drop(queue.send(bytes::Bytes::copy_from_slice(packet)));
    Ok(Pair { send: Box::new(send), arrivals })
}

/// Writes what is queued, as many packets at once as there are, and takes what comes, until the program ends.
async fn run(
    client: iroh_relay::client::Client,
    destination: EndpointId,
    mut queued: mpsc::UnboundedReceiver<bytes::Bytes>,
    receive: impl Fn(&[u8]),
) {
    let (mut incoming, mut outgoing) = client.split();
    let mut batch = Vec::new();
    loop {
        tokio::select! {
            count = queued.recv_many(&mut batch, BATCH) => {
                if count == 0 {
                    return;
                }
                let message = |contents| {
                    let datagrams = Datagrams { ecn: None, segment_size: None, contents };
                    Ok(ClientToRelayMsg::Datagrams { dst_endpoint_id: destination, datagrams })
                };
                let mut messages = stream::iter(batch.drain(..).map(message));
                if let Err(error) = outgoing.send_all(&mut messages).await {
                    panic!("cannot send: {error}");
                }
            }
            message = incoming.next() => match message {
                Some(Ok(RelayToClientMsg::Datagrams { datagrams, .. })) => receive(&datagrams.contents),
                Some(Ok(RelayToClientMsg::Ping(data))) => {
                    if let Err(error) = outgoing.send(ClientToRelayMsg::Pong(data)).await {
                        panic!("cannot send: {error}");
                    }
                }
                Some(Ok(_)) => {}
                Some(Err(error)) => panic!("cannot receive: {error}"),
                None => panic!("the relay closed a connection"),
            },
        }
    }
}
