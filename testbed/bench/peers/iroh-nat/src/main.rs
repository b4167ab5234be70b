//! `iroh-nat-bench serve ADDRESS CERTIFICATE KEY` is iroh's relay, with QUIC address discovery at its own port.
//! `iroh-nat-bench listen ADDRESS` is an endpoint that answers datagrams; it prints its ID when it has a connection to the relay and had
//! time to learn its addresses. `iroh-nat-bench connect ADDRESS` is another one: it prints `ready` then, reads an ID, connects, and prints the
//! milliseconds until the first datagram was answered and until datagrams take a direct path (`-`: not within 10 s).

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, bail};
use iroh::endpoint::{Connection, presets};
use iroh::{Endpoint, EndpointAddr, EndpointId, RelayConfig, RelayMap, RelayMode, RelayUrl};
use iroh_relay::RelayQuicConfig;
use iroh_relay::server::{self, CertConfig, QuicConfig, Server, ServerConfig, TlsConfig};
use iroh_relay::tls::CaTlsConfig;
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::time::{interval, sleep, timeout};

const ALPN: &[u8] = b"fairlead/bench/nat";
/// UDP port where the relay answers QUIC address discovery.
const DISCOVERY: u16 = 7842;
/// Time after the first connection to the relay, in which an endpoint learns its addresses.
const SETTLE: Duration = Duration::from_secs(3);
/// Longest time in which a direct path must be found.
const LIMIT: Duration = Duration::from_secs(10);

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match *arguments.as_slice() {
        ["serve", address, certificate, key] => {
            serve(address.parse()?, certificate.as_ref(), key.as_ref()).await
        }
        ["listen", relay] => listen(relay).await,
        ["connect", relay] => connect(relay).await,
        _ => bail!("usage: iroh-nat-bench serve ADDRESS CERTIFICATE KEY | listen ADDRESS | connect ADDRESS"),
    }
}

async fn serve(address: SocketAddr, certificate: &Path, key: &Path) -> Result<()> {
    let chain = CertificateDer::pem_file_iter(certificate)?.collect::<Result<Vec<_>, _>>()?;
    let tls = rustls::ServerConfig::builder_with_provider(iroh_relay::tls::default_provider())
        .with_protocol_versions(&[&rustls::version::TLS13])?
        .with_no_client_auth()
        .with_single_cert(chain, PrivateKeyDer::from_pem_file(key)?)?;
    let mut relay = server::RelayConfig::new(SocketAddr::new(address.ip(), 0));
    relay.tls = Some(TlsConfig::new(address, CertConfig::Manual { server_config: tls }));
    let mut config = ServerConfig::default();
    config.relay = Some(relay);
    config.quic = Some(QuicConfig::new(SocketAddr::new(address.ip(), DISCOVERY)));
    let _server = Server::spawn(config).await?;
    println!("serving");
    std::future::pending().await
}

async fn endpoint(relay: &str) -> Result<(Endpoint, RelayUrl)> {
    let url: RelayUrl = format!("https://{relay}").parse()?;
    let relays = RelayMap::from(RelayConfig::new(url.clone(), Some(RelayQuicConfig::new(DISCOVERY))));
    let trusted = std::env::var("SSL_CERT_FILE").context("SSL_CERT_FILE is not set")?;
    let roots = CertificateDer::pem_file_iter(trusted)?.collect::<Result<Vec<_>, _>>()?;
    let endpoint = Endpoint::builder(presets::Minimal)
        .alpns(vec![ALPN.to_vec()])
        .relay_mode(RelayMode::Custom(relays))
        .ca_tls_config(CaTlsConfig::custom_roots(roots))
        .bind()
        .await
        .map_err(|error| anyhow!("{error:?}"))?;
    endpoint.online().await;
    sleep(SETTLE).await;
    Ok((endpoint, url))
}

async fn listen(relay: &str) -> Result<()> {
    let (endpoint, _) = endpoint(relay).await?;
    println!("{}", endpoint.id());
    while let Some(incoming) = endpoint.accept().await {
        let connection = incoming.await.map_err(|error| anyhow!("{error:?}"))?;
        tokio::spawn(async move {
            while let Ok(datagram) = connection.read_datagram().await {
                let _ = connection.send_datagram(datagram);
            }
        });
    }
    Ok(())
}

async fn connect(relay: &str) -> Result<()> {
    let (endpoint, url) = endpoint(relay).await?;
    println!("ready");
    let mut line = String::new();
    BufReader::new(tokio::io::stdin()).read_line(&mut line).await?;
    let id: EndpointId = line.trim().parse().map_err(|error| anyhow!("{error:?}"))?;
    let began = Instant::now();
    let connecting = endpoint.connect(EndpointAddr::new(id).with_relay_url(url), ALPN);
    let connection = timeout(LIMIT, connecting).await?.map_err(|error| anyhow!("{error:?}"))?;
    let (answered, direct) = tokio::join!(first_answer(&connection, began), direct_path(&connection, began));
    let text = |time: Option<Duration>| {
        time.map_or("-".to_owned(), |time| format!("{:.1}", time.as_secs_f64() * 1000.0))
    };
    println!("{} {}", text(answered), text(direct));
    endpoint.close().await;
    Ok(())
}

/// Time until one of the datagrams that are sent every 10 ms comes back.
async fn first_answer(connection: &Connection, began: Instant) -> Option<Duration> {
    let mut tick = interval(Duration::from_millis(10));
    let asking = async {
        loop {
            tokio::select! {
                _ = tick.tick() => drop(connection.send_datagram(b"ping".as_slice().into())),
                answer = connection.read_datagram() => return answer.ok().map(|_| began.elapsed()),
            }
        }
    };
    timeout(LIMIT, asking).await.ok().flatten()
}

async fn direct_path(connection: &Connection, began: Instant) -> Option<Duration> {
    let mut tick = interval(Duration::from_millis(5));
    while began.elapsed() < LIMIT {
        tick.tick().await;
        if connection.paths().iter().any(|path| path.is_selected() && path.is_ip()) {
            return Some(began.elapsed());
        }
    }
    None
}
