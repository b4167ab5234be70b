//! Sessions with a server, one after the other.

use std::net::IpAddr;
use std::time::{Duration, Instant};

use fairlead_limits::{Backoff, part};
use fairlead_wire::discovery::parse_address;
use fairlead_wire::discovery::server::cluster_client::ClusterClient;
use fairlead_wire::discovery::server::{
    self as wire, AffiliateDeleteRequest, AffiliateUpdateRequest, HelloRequest, HelloResponse, ListRequest,
    WatchRequest,
};
use tokio::sync::watch;
use tokio::time::{sleep, sleep_until, timeout};
use tonic::transport::Channel;

use super::connect::channel;
use super::publication::{Local, Publication};
use super::{InvalidServerEndpoint, ServerEndpoint, Settings, View};

/// Longest connection with its greeting.
const HELLO: Duration = Duration::from_secs(10);
/// Longest update.
const UPDATE: Duration = Duration::from_secs(30);
/// Longest wait for the first message of a watch.
const FIRST_MESSAGE: Duration = Duration::from_secs(30);
/// Shortest time between two updates: what changes in it is published together.
const MIN_INTERVAL: Duration = Duration::from_secs(1);
/// Shortest time between an update and one because the server does not have this node any more: a client that deletes it again and
/// again costs little. Up to half of it more is random.
const RESTORE: Duration = Duration::from_secs(5);
/// Number of times that a server may redirect to another one.
const REDIRECTS: usize = 3;
/// Longest message: a server of another make sends a whole cluster at once.
const MAX_MESSAGE: usize = 16 << 20;

/// This node could not be deleted.
#[derive(Debug, thiserror::Error)]
#[error("cannot delete this node from the discovery server: {0}")]
pub struct LeaveError(#[from] SessionError);

#[derive(Debug, thiserror::Error)]
pub(super) enum SessionError {
    #[error("{0}")]
    Connect(String),
    #[error("the server ended the watch")]
    Ended,
    #[error("the system gives no random bytes")]
    Random,
    #[error("the server redirects to {0}")]
    Redirect(#[from] InvalidServerEndpoint),
    #[error("the server redirects more than {REDIRECTS} times")]
    Redirects,
    #[error("the server answers {}: {}", .0.code(), .0.message())]
    Status(#[from] tonic::Status),
    #[error("the server does not answer")]
    Timeout(#[from] tokio::time::error::Elapsed),
    #[error(transparent)]
    TooLong(#[from] super::TooLong),
}

/// Never ends.
pub(super) async fn run(
    settings: Settings,
    mut local: watch::Receiver<Option<Local>>,
    view: watch::Sender<View>,
) {
    let mut backoff = Backoff::default();
    loop {
        let error = session(&settings, &mut local, &view).await;
        let lasted = view.borrow().connected.map_or(Duration::ZERO, |at| at.elapsed());
        let pause = backoff.refused(lasted, random().unwrap_or_default());
        tracing::info!(server = %settings.server, %error, ?pause, "not connected to the discovery server");
        view.send_modify(|view| {
            view.connected = None;
            view.connection_error = Some(error.to_string());
        });
        sleep(pause).await;
    }
}

/// Returns why it ended.
async fn session(
    settings: &Settings,
    local: &mut watch::Receiver<Option<Local>>,
    view: &watch::Sender<View>,
) -> SessionError {
    let (client, Greeting { client_ip, tells_expiry }) = match greet(settings, HELLO).await {
        Ok(greeted) => greeted,
        Err(error) => return error,
    };
    view.send_modify(|view| view.client_ip = client_ip);
    tokio::select! {
        error = follow(settings, client.clone(), tells_expiry, view) => error,
        error = decide_claims(settings, client.clone(), view) => error,
        error = keep_published(settings, client, client_ip, local, view) => error,
    }
}

/// Facts that a server tells in its greeting.
struct Greeting {
    /// Address of this node as the server sees it.
    client_ip: Option<IpAddr>,
    /// The server says whether what is gone has expired.
    tells_expiry: bool,
}

/// Connects to the server, or to the one that it says to use; each has so much time to answer.
async fn greet(
    settings: &Settings,
    longest: Duration,
) -> Result<(ClusterClient<Channel>, Greeting), SessionError> {
    let mut server = settings.server.clone();
    for _ in 0..=REDIRECTS {
        let (client, answer) = timeout(longest, greet_one(settings, &server)).await??;
        match answer.redirect {
            Some(redirect) => server = server.redirected(&redirect.endpoint)?,
            None => {
                let client_ip = parse_address(&answer.client_ip);
                return Ok((client, Greeting { client_ip, tells_expiry: answer.tells_expiry }));
            }
        }
    }
    Err(SessionError::Redirects)
}

async fn greet_one(
    settings: &Settings,
    server: &ServerEndpoint,
) -> Result<(ClusterClient<Channel>, HelloResponse), SessionError> {
    let connected = channel(settings, server).await.map_err(|error| SessionError::Connect(chain(&*error)))?;
    let mut client = ClusterClient::new(connected).max_decoding_message_size(MAX_MESSAGE);
    let hello = HelloRequest {
        cluster_id: settings.cluster_id.clone(),
        client_version: concat!("fairlead v", env!("CARGO_PKG_VERSION")).to_owned(),
    };
    let answer = client.hello(hello).await?.into_inner();
    Ok((client, answer))
}

async fn follow(
    settings: &Settings,
    mut client: ClusterClient<Channel>,
    tells_expiry: bool,
    view: &watch::Sender<View>,
) -> SessionError {
    let request = WatchRequest { cluster_id: settings.cluster_id.clone() };
    let watched = async {
        let mut stream = timeout(FIRST_MESSAGE, client.watch(request)).await??.into_inner();
        view.send_modify(|view| view.members.begin(tells_expiry));
        let mut next = timeout(FIRST_MESSAGE, stream.message()).await??;
        while let Some(message) = next {
            let is_whole = !message.snapshot_continues;
            let now = Instant::now();
            view.send_modify(|view| {
                view.members.apply(message, &settings.node_id, &settings.secret, now);
                if is_whole && view.connected.is_none() {
                    view.connected = Some(now);
                    view.connection_error = None;
                }
            });
            next = stream.message().await?;
        }
        Err(SessionError::Ended)
    };
    let outcome: Result<(), SessionError> = watched.await;
    outcome.err().unwrap_or(SessionError::Ended)
}

/// Asks the server for all affiliates when it calls members deleted that it may still have, one question at a time. All nodes are told of
/// that at once, so each waits for a random time; the member stays meanwhile. A question without an answer ends the session: the next one
/// begins with all affiliates.
async fn decide_claims(
    settings: &Settings,
    mut client: ClusterClient<Channel>,
    view: &watch::Sender<View>,
) -> SessionError {
    let mut claims = view.subscribe();
    loop {
        if claims.wait_for(|view| view.members.open_claim().is_some()).await.is_err() {
            return SessionError::Ended;
        }
        sleep(part(settings.ask_within, random().unwrap_or_default())).await;
        let Some(claim) = view.borrow().members.open_claim() else { continue };
        let request = ListRequest { cluster_id: settings.cluster_id.clone() };
        let answer = match timeout(UPDATE, client.list(request)).await {
            Ok(Ok(answer)) => answer.into_inner(),
            Ok(Err(error)) => return error.into(),
            Err(error) => return error.into(),
        };
        view.send_modify(|view| {
            view.members.decide(claim, answer.affiliates, &settings.secret, Instant::now());
        });
        sleep(settings.ask_within).await;
    }
}

/// Publishes at once, when something changes, before it expires, and when the server has it no more, as when another
/// client deleted it. A failed update is tried again without harm to the watch.
async fn keep_published(
    settings: &Settings,
    client: ClusterClient<Channel>,
    client_ip: Option<IpAddr>,
    local: &mut watch::Receiver<Option<Local>>,
    view: &watch::Sender<View>,
) -> SessionError {
    let mut backoff = Backoff::default();
    loop {
        let current = local.borrow_and_update().clone();
        let mut restore_at = None;
        let pause = match &current {
            None => Duration::MAX,
            Some(current) => match update(settings, client.clone(), client_ip, current).await {
                Ok(publication) => {
                    backoff = Backoff::default();
                    let pause = RESTORE.saturating_add(part(RESTORE / 2, random().unwrap_or_default()));
                    restore_at = tokio::time::Instant::now().checked_add(pause);
                    view.send_modify(|view| {
                        view.published = Some(Instant::now());
                        view.omissions = publication.omissions;
                        view.publication_error = None;
                    });
                    refresh_after(settings.ttl, random().unwrap_or_default())
                }
                Err(error) => {
                    tracing::warn!(server = %settings.server, %error, "cannot publish this node");
                    view.send_modify(|view| view.publication_error = Some(error.to_string()));
                    backoff.next(random().unwrap_or_default())
                }
            },
        };
        sleep(MIN_INTERVAL).await;
        tokio::select! {
            () = sleep(pause.saturating_sub(MIN_INTERVAL)) => {}
            () = missing(view.subscribe(), restore_at) => {
                tracing::info!(server = %settings.server, "the discovery server does not have this node; it is published again");
            }
            changed = local.changed() => if changed.is_err() {
                return SessionError::Ended;
            }
        }
    }
}

/// Returns when the server does not have this node, and still not at this time. `None`: never.
async fn missing(mut view: watch::Receiver<View>, not_before: Option<tokio::time::Instant>) {
    let Some(not_before) = not_before else { return std::future::pending().await };
    loop {
        if view.wait_for(|view| view.members.is_own_missing()).await.is_err() {
            return std::future::pending().await;
        }
        sleep_until(not_before).await;
        if view.borrow().members.is_own_missing() {
            return;
        }
    }
}

/// Time until the next update: three eighths to half of the time to live, so that the nodes of a cluster do not all
/// publish at once.
fn refresh_after(ttl: Duration, random: u32) -> Duration {
    let half = ttl / 2;
    half.saturating_sub((half / 4).mul_f64(f64::from(random) / f64::from(u32::MAX)))
}

async fn update(
    settings: &Settings,
    mut client: ClusterClient<Channel>,
    client_ip: Option<IpAddr>,
    local: &Local,
) -> Result<Publication, SessionError> {
    let mut nonce = [0; 12];
    aws_lc_rs::rand::fill(&mut nonce).map_err(|_| SessionError::Random)?;
    let publication = Publication::new(local, client_ip, &settings.secret, nonce)?;
    let request = AffiliateUpdateRequest {
        cluster_id: settings.cluster_id.clone(),
        affiliate_id: settings.node_id.clone(),
        affiliate_data: Some(publication.data.clone().into()),
        affiliate_endpoints: publication.endpoints.iter().cloned().map(Into::into).collect(),
        ttl: Some(wire::Duration {
            seconds: i64::try_from(settings.ttl.as_secs()).unwrap_or(i64::MAX),
            nanos: i32::try_from(settings.ttl.subsec_nanos()).unwrap_or_default(),
        }),
    };
    timeout(UPDATE, client.affiliate_update(request)).await??;
    Ok(publication)
}

pub(super) async fn leave(settings: &Settings) -> Result<(), LeaveError> {
    let delete = async {
        let (mut client, _) = greet(settings, HELLO).await?;
        let cluster_id = settings.cluster_id.clone();
        let affiliate_id = settings.node_id.clone();
        client.affiliate_delete(AffiliateDeleteRequest { cluster_id, affiliate_id }).await?;
        Ok::<_, SessionError>(())
    };
    Ok(timeout(UPDATE, delete).await.map_err(SessionError::from)??)
}

fn random() -> Option<u32> {
    let mut bytes = [0; 4];
    aws_lc_rs::rand::fill(&mut bytes).ok()?;
    Some(u32::from_be_bytes(bytes))
}

/// The transport's own error says little; its causes say what failed.
fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    let last = causes.last().map(ToString::to_string);
    last.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_server_that_accepts_and_stays_silent_is_left() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let accept = async {
            let mut silent = Vec::new();
            loop {
                silent.push(listener.accept().await.unwrap());
            }
        };
        // Without TLS it is the greeting that is not answered.
        let try_both = async {
            for scheme in ["http", "https"] {
                let server = format!("{scheme}://localhost:{port}").parse().unwrap();
                let secret = fairlead_wire::discovery::ClusterSecret::new([7; 32]);
                let roots = std::sync::Arc::new(rustls::RootCertStore::empty());
                let mut settings = Settings::new(server, "c".to_owned(), secret, "own".to_owned(), roots);
                settings.environment = std::sync::Arc::new(|_| None);
                let outcome = greet(&settings, Duration::from_millis(300)).await;
                assert!(matches!(outcome, Err(SessionError::Timeout(_))), "{scheme}: {:?}", outcome.err());
            }
        };
        tokio::select! {
            () = try_both => {}
            () = accept => {}
        }
        assert_eq!(HELLO, Duration::from_secs(10));
    }

    #[tokio::test]
    async fn a_node_is_restored_when_it_is_missing_and_not_before_its_time() {
        let of = |is_missing: bool| {
            let mut view = View::default();
            if is_missing {
                view.members.begin(true);
                let secret = fairlead_wire::discovery::ClusterSecret::new([7; 32]);
                view.members.apply(Default::default(), "own", &secret, Instant::now());
            }
            view
        };
        let (view, watched) = watch::channel(of(true));
        let soon = tokio::time::Instant::now() + Duration::from_millis(50);
        missing(watched.clone(), Some(soon)).await;
        assert!(tokio::time::Instant::now() >= soon);
        let brief = Duration::from_millis(100);
        assert!(timeout(brief, missing(watched.clone(), None)).await.is_err(), "nothing is published");
        let later = tokio::time::Instant::now() + Duration::from_millis(50);
        let back = async {
            sleep(Duration::from_millis(10)).await;
            view.send_replace(of(false));
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = missing(watched, Some(later)) => panic!("it was there again"),
            () = back => {}
            () = sleep(brief) => {}
        }
    }

    #[test]
    fn what_is_published_is_refreshed_well_before_it_expires() {
        let ttl = Duration::from_secs(1800);
        assert_eq!(refresh_after(ttl, 0), Duration::from_secs(900));
        assert_eq!(refresh_after(ttl, u32::MAX), Duration::from_secs(675));
    }
}
