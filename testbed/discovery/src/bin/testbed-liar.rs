//! A discovery server that lies: `testbed-liar ADDRESS:PORT CERTIFICATE KEY FILE`. It takes what nodes publish, as any server does, and
//! tells watches of it what the word in the file says, several times a second:
//!
//! * `deleted`: every member, also the watching one, was deleted.
//! * `endpoints`: made-up endpoints, and those of other members, for every member.
//! * `expired`: half of the members have expired, the others have lost their endpoints.
//! * `garbage`: bytes that nothing can decrypt.
//! * `honest`: what is so.
//! * `replayed`: the first that each member ever published.
//! * `swapped`: each member has what another one published.
//!
//! It does not know the secret of the cluster. Not here: limits, times to live.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use anyhow::{Context, bail};
use fairlead_transport::{Certificate, CertificateFiles};
use fairlead_wire::discovery::server::cluster_server::{Cluster, ClusterServer};
use fairlead_wire::discovery::server::{
    Affiliate, AffiliateDeleteRequest, AffiliateDeleteResponse, AffiliateUpdateRequest,
    AffiliateUpdateResponse, HelloRequest, HelloResponse, ListRequest, ListResponse, WatchRequest,
    WatchResponse,
};
use futures::{Stream, stream};
use tokio::io::DuplexStream;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio_rustls::TlsAcceptor;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};

/// Interval at which watches are told something.
const INTERVAL: Duration = Duration::from_millis(200);
/// Bytes between TLS and gRPC.
const BUFFER: usize = 64 << 10;

/// Affiliates that one member has published: the first and the latest.
#[derive(Debug, Clone)]
struct Published {
    first: Affiliate,
    latest: Affiliate,
}

#[derive(Debug, Clone)]
struct Liar {
    published: Arc<Mutex<BTreeMap<String, Published>>>,
    word: PathBuf,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [address, chain, key, word] = arguments.as_slice() else {
        bail!("want ADDRESS:PORT CERTIFICATE KEY FILE, not {arguments:?}");
    };
    let address: SocketAddr = address.parse().context("not an address")?;
    let files = CertificateFiles { chain: chain.into(), key: key.into() };
    let versions = [&rustls::version::TLS13];
    let tls = Certificate::read(files)?.server_config(&versions, &[b"h2"])?;
    let listener = TcpListener::bind(address).await.context("cannot listen")?;
    let (ready, incoming) = mpsc::channel(64);
    let liar = Liar { published: Arc::default(), word: Path::new(word).to_owned() };
    let serve = tonic::transport::Server::builder()
        .add_service(ClusterServer::new(liar))
        .serve_with_incoming(ReceiverStream::new(incoming));
    announce();
    tokio::select! {
        ended = serve => Ok(ended?),
        () = accept(listener, TlsAcceptor::from(Arc::new(tls)), ready) => Ok(()),
    }
}

#[expect(clippy::print_stderr, reason = "who starts it waits for this word")]
fn announce() {
    eprintln!("serving");
}

async fn accept(listener: TcpListener, tls: TlsAcceptor, ready: mpsc::Sender<std::io::Result<DuplexStream>>) {
    let serve = |stream, _| {
        let tls = tls.clone();
        let ready = ready.clone();
        Some(async move {
            let Ok(mut outside) = tls.accept(stream).await else { return };
            let (mut inside, served) = tokio::io::duplex(BUFFER);
            if ready.send(Ok(served)).await.is_ok() {
                let _ = tokio::io::copy_bidirectional(&mut outside, &mut inside).await;
            }
        })
    };
    match fairlead_transport::accept_all(&listener, &mut JoinSet::new(), || usize::MAX, serve).await {}
}

#[tonic::async_trait]
impl Cluster for Liar {
    type WatchStream = Pin<Box<dyn Stream<Item = Result<WatchResponse, Status>> + Send>>;

    async fn hello(&self, _: Request<HelloRequest>) -> Result<Response<HelloResponse>, Status> {
        // So what it calls deleted is believed.
        Ok(Response::new(HelloResponse { tells_expiry: true, ..HelloResponse::default() }))
    }

    async fn affiliate_update(
        &self,
        request: Request<AffiliateUpdateRequest>,
    ) -> Result<Response<AffiliateUpdateResponse>, Status> {
        let request = request.into_inner();
        let latest = Affiliate {
            id: request.affiliate_id,
            data: request.affiliate_data.unwrap_or_default(),
            endpoints: request.affiliate_endpoints,
        };
        let mut published = self.published.lock().unwrap_or_else(PoisonError::into_inner);
        let first = published.get(&latest.id).map_or_else(|| latest.clone(), |before| before.first.clone());
        published.insert(latest.id.clone(), Published { first, latest });
        Ok(Response::new(AffiliateUpdateResponse {}))
    }

    async fn affiliate_delete(
        &self,
        _: Request<AffiliateDeleteRequest>,
    ) -> Result<Response<AffiliateDeleteResponse>, Status> {
        Ok(Response::new(AffiliateDeleteResponse {}))
    }

    async fn list(&self, _: Request<ListRequest>) -> Result<Response<ListResponse>, Status> {
        Err(Status::unimplemented("nodes watch"))
    }

    async fn watch(&self, _: Request<WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let told = stream::unfold((self.clone(), 0_u64, Vec::new()), |(liar, turn, mut left)| async move {
            while left.is_empty() {
                if turn > 0 {
                    tokio::time::sleep(INTERVAL).await;
                }
                left = liar.say(turn);
            }
            let message: WatchResponse = left.remove(0);
            Some((Ok(message), (liar, turn.wrapping_add(1), left)))
        });
        Ok(Response::new(Box::pin(told)))
    }
}

impl Liar {
    /// The next messages; the first of a watch has members that are there, or none.
    fn say(&self, turn: u64) -> Vec<WatchResponse> {
        let word = std::fs::read_to_string(&self.word).unwrap_or_default();
        let published: Vec<Published> = {
            let published = self.published.lock().unwrap_or_else(PoisonError::into_inner);
            published.values().cloned().collect()
        };
        let told = |affiliates| WatchResponse { affiliates, ..WatchResponse::default() };
        let latest: Vec<Affiliate> = published.iter().map(|one| one.latest.clone()).collect();
        // As the protocol wants it, so that all that follows is believed to be about them.
        if turn == 0 {
            return vec![told(latest)];
        }
        let gone =
            |affiliates, expired| WatchResponse { affiliates, deleted: true, expired, ..told(Vec::new()) };
        match word.trim() {
            "deleted" => vec![gone(latest, false)],
            "endpoints" => vec![told(changed(&latest, |one, other| {
                one.endpoints = (0..8).map(|n| noise(turn.wrapping_add(n), 32).into()).collect();
                one.endpoints.extend(other.endpoints.iter().cloned());
            }))],
            "expired" => {
                let (half, rest) = latest.split_at(latest.len() / 2);
                vec![gone(half.to_vec(), true), told(changed(rest, |one, _| one.endpoints.clear()))]
            }
            "garbage" => vec![told(changed(&latest, |one, _| {
                one.data = noise(turn, 300).into();
                one.endpoints = (0..64).map(|n| noise(turn.wrapping_add(n), 7 + n).into()).collect();
            }))],
            "replayed" => vec![told(published.into_iter().map(|one| one.first).collect())],
            "swapped" => vec![told(changed(&latest, |one, other| {
                (one.data, one.endpoints) = (other.data.clone(), other.endpoints.clone());
            }))],
            _ => vec![told(latest)],
        }
    }
}

/// Each member after a change, which gets another member, too.
fn changed(members: &[Affiliate], change: impl Fn(&mut Affiliate, &Affiliate)) -> Vec<Affiliate> {
    let others = members.iter().cycle().skip(1);
    let pairs = members.iter().cloned().zip(others);
    pairs
        .map(|(mut one, other)| {
            change(&mut one, other);
            one
        })
        .collect()
}

/// Bytes that look random, the same for the same seed (SplitMix64).
fn noise(seed: u64, length: u64) -> Vec<u8> {
    let byte = |n: u64| {
        let mixed = seed.wrapping_add(n.wrapping_mul(0x9e37_79b9_7f4a_7c15));
        let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed.to_be_bytes()[0]
    };
    (0..length).map(byte).collect()
}
