//! Our client at the published server, which calls a living affiliate deleted when one of its endpoints expires.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use fairlead_discovery::client::{self, Client, Local, View};
use fairlead_wire::discovery::server::cluster_client::ClusterClient;
use fairlead_wire::discovery::server::{
    AffiliateDeleteRequest, AffiliateUpdateRequest, Duration as Ttl, ListRequest, WatchRequest, WatchResponse,
};
use fairlead_wire::discovery::{Affiliate, ClusterSecret, KubeSpan};
use rustls::RootCertStore;
use testbed_discovery::OtherServer;
use tokio::time::timeout;
use tonic::Streaming;
use tonic::transport::Channel;

const SECRET: [u8; 32] = [7; 32];
const KEY: &str = "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=";
/// Longest time before our client asks.
const ASK_WITHIN: Duration = Duration::from_millis(200);
/// Bounds a test that hangs.
const LIMIT: Duration = Duration::from_secs(30);

fn ours(server: SocketAddr, id: &str) -> Client {
    let server = format!("http://{server}").parse().unwrap();
    let (secret, roots) = (ClusterSecret::new(SECRET), Arc::new(RootCertStore::empty()));
    let mut settings = client::Settings::new(server, "c".to_owned(), secret, id.to_owned(), roots);
    settings.environment = Arc::new(|_| None);
    settings.ask_within = ASK_WITHIN;
    Client::start(settings)
}

fn endpoint(number: u8) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, number], 51820))
}

async fn until(client: &Client, what: &str, is: impl Fn(&View) -> bool) -> View {
    let mut view = client.view();
    let found = timeout(LIMIT, view.wait_for(|view| is(view))).await.map(|view| view.unwrap().clone());
    found.unwrap_or_else(|_| panic!("not {what}: {:?}", client.view().borrow()))
}

/// A server with the living member `b`, our client `a` that knows it, and a bare watch.
struct Bed {
    _server: OtherServer,
    a: Client,
    b: Option<Client>,
    bare: ClusterClient<Channel>,
    told: Streaming<WatchResponse>,
}

impl Bed {
    async fn new() -> Self {
        let server = OtherServer::start().await.unwrap();
        let (a, b) = (ours(server.address, "a"), ours(server.address, "b"));
        let kubespan = KubeSpan { public_key: KEY.to_owned(), ..KubeSpan::default() };
        b.publish(Local {
            affiliate: Affiliate { kubespan: Some(kubespan), ..Affiliate::default() },
            endpoints: vec![endpoint(1)],
            ..Local::default()
        });
        until(&a, "b", |view| view.members.member("b").is_some()).await;
        let mut bare = ClusterClient::connect(format!("http://{}", server.address)).await.unwrap();
        let told = bare.watch(WatchRequest { cluster_id: "c".to_owned() }).await.unwrap().into_inner();
        Self { _server: server, a, b: Some(b), bare, told }
    }

    /// Waits until the server calls `b` deleted.
    async fn calls_deleted(&mut self) {
        let heard = async {
            while !self
                .told
                .message()
                .await
                .unwrap()
                .is_some_and(|it| it.deleted && it.affiliates[0].id == "b")
            {}
        };
        timeout(LIMIT, heard).await.expect("the server calls it deleted");
    }

    async fn listed(&mut self) -> Vec<String> {
        let listed = self.bare.list(ListRequest { cluster_id: "c".to_owned() }).await.unwrap();
        listed.into_inner().affiliates.into_iter().map(|affiliate| affiliate.id).collect()
    }
}

#[tokio::test]
async fn a_living_member_that_loses_an_endpoint_stays_although_it_is_called_deleted() {
    let mut bed = Bed::new().await;
    // An endpoint that another member has seen, and that is not renewed.
    let sealed = ClusterSecret::new(SECRET).seal_endpoint(endpoint(2));
    let update = AffiliateUpdateRequest {
        cluster_id: "c".to_owned(),
        affiliate_id: "b".to_owned(),
        affiliate_data: None,
        affiliate_endpoints: vec![sealed.into()],
        ttl: Some(Ttl { seconds: 2, nanos: 0 }),
    };
    bed.bare.affiliate_update(update).await.unwrap();
    let has = |view: &View, endpoints: &[SocketAddr]| {
        view.members.member("b").is_some_and(|b| b.endpoints == endpoints)
    };
    until(&bed.a, "both endpoints", |view| has(view, &[endpoint(1), endpoint(2)])).await;
    let mut view = bed.a.view();
    view.mark_unchanged();
    bed.calls_deleted().await;
    assert_eq!(bed.listed().await, ["b"], "it lives");
    let settled = async {
        while !has(&view.borrow_and_update(), &[endpoint(1)]) {
            assert!(view.borrow().members.member("b").is_some(), "it is never away");
            view.changed().await.unwrap();
        }
    };
    timeout(LIMIT, settled).await.expect("the list is asked for");
    assert_eq!(bed.a.view().borrow().members.deleted().count(), 0);
}

#[tokio::test]
async fn who_is_not_listed_any_more_is_missing_and_not_deleted() {
    let mut bed = Bed::new().await;
    let (cluster_id, affiliate_id) = ("c".to_owned(), "b".to_owned());
    // Its own program is not there to publish it again.
    drop(bed.b.take());
    bed.bare.affiliate_delete(AffiliateDeleteRequest { cluster_id, affiliate_id }).await.unwrap();
    bed.calls_deleted().await;
    let view = until(&bed.a, "alone", |view| view.members.iter().next().is_none()).await;
    assert_eq!(view.members.deleted().count(), 0, "this server may mean that it has expired");
}
