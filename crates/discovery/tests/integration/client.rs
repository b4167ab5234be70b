//! Clients and servers over real connections.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fairlead_discovery::client::{Client, Local, Rejection, Settings, View, node_id};
use fairlead_discovery::core::Limits;
use fairlead_discovery::server;
use fairlead_wire::discovery::server::{self as wire, AffiliateDeleteRequest, AffiliateUpdateRequest};
use fairlead_wire::discovery::{Affiliate, ClusterSecret, KubeSpan};
use rustls::RootCertStore;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use crate::bed::{Running, certificate, settings};

const KEY: &str = "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=";
/// Bounds a test that hangs.
const LIMIT: Duration = Duration::from_secs(30);

fn client_settings(server: &str, node: &str) -> Settings {
    let (server, secret) = (server.parse().unwrap(), ClusterSecret::new([7; 32]));
    let mut settings =
        Settings::new(server, "c".to_owned(), secret, node.to_owned(), Arc::new(RootCertStore::empty()));
    settings.environment = Arc::new(|_| None);
    settings
}

fn started(address: SocketAddr, node: &str) -> Client {
    Client::start(client_settings(&format!("http://{address}"), node))
}

fn local(port: u16) -> Local {
    let kubespan = KubeSpan { public_key: KEY.to_owned(), ..Default::default() };
    Local {
        affiliate: Affiliate { kubespan: Some(kubespan), ..Default::default() },
        endpoints: vec!["192.0.2.1:51820".parse().unwrap()],
        extra_endpoints: vec!["192.0.2.9:1".parse().unwrap()],
        port: Some(port),
        ..Local::default()
    }
}

async fn until(client: &Client, what: &str, is: impl Fn(&View) -> bool) -> View {
    let mut view = client.view();
    let found = timeout(LIMIT, view.wait_for(|view| is(view))).await.map(|view| view.unwrap().clone());
    found.unwrap_or_else(|_| panic!("not {what}: {:?}", client.view().borrow()))
}

fn ids(view: &View) -> Vec<String> {
    view.members.iter().map(|(id, _)| id.to_owned()).collect()
}

#[tokio::test]
async fn members_find_each_other_and_one_that_leaves_is_deleted() {
    let server = Running::start(settings());
    let (a, b) = (started(server.address, "a"), started(server.address, "b"));
    a.publish(local(1));
    b.publish(local(2));
    let view = until(&a, "b", |view| ids(view) == ["b"]).await;
    let member = view.members.member("b").unwrap();
    assert_eq!(member.public_key, KEY.parse().ok());
    assert_eq!(member.endpoints, ["192.0.2.1:51820".parse().unwrap(), "192.0.2.9:1".parse().unwrap()]);
    // Where the server sees it is a loopback address here, which is none of a peer.
    assert!(member.rejections.contains(&Rejection::EndpointAddress));
    assert_eq!(view.client_ip, "127.0.0.1".parse().ok());
    until(&b, "a", |view| ids(view) == ["a"]).await;
    let mut changed = local(2);
    changed.affiliate.hostname = "renamed".to_owned();
    b.publish(changed);
    let is_renamed =
        |view: &View| view.members.member("b").is_some_and(|b| b.affiliate.hostname == "renamed");
    until(&a, "renamed", is_renamed).await;
    b.leave().await.unwrap();
    let view = until(&a, "alone", |view| ids(view).is_empty()).await;
    assert_eq!(view.members.deleted().map(|(id, _)| id).collect::<Vec<_>>(), ["b"]);
    server.end().await;
}

#[tokio::test]
async fn a_node_that_another_client_deletes_is_published_again() {
    let server = Running::start(settings());
    let (a, b) = (started(server.address, "a"), started(server.address, "b"));
    a.publish(local(1));
    b.publish(local(2));
    until(&a, "b", |view| ids(view) == ["b"]).await;
    let mut other = server.client().await;
    let (cluster_id, affiliate_id) = ("c".to_owned(), "b".to_owned());
    let request = AffiliateDeleteRequest { cluster_id, affiliate_id };
    other.affiliate_delete(request).await.unwrap();
    until(&a, "alone", |view| ids(view).is_empty()).await;
    // The next refresh would be after eleven minutes at the earliest.
    until(&a, "told of b again", |view| ids(view) == ["b"]).await;
    server.end().await;
}

#[tokio::test]
async fn a_member_that_is_not_renewed_expires_and_is_not_deleted() {
    let server = Running::start(settings());
    let a = started(server.address, "a");
    let ttl = Duration::from_secs(2);
    let b = Client::start(Settings { ttl, ..client_settings(&format!("http://{}", server.address), "b") });
    b.publish(local(2));
    until(&a, "b", |view| ids(view) == ["b"]).await;
    let first = b.view().borrow().published;
    until(&b, "published again", |view| view.published != first).await;
    drop(b);
    let view = until(&a, "alone", |view| ids(view).is_empty()).await;
    assert_eq!(view.members.deleted().count(), 0);
    server.end().await;
}

#[tokio::test]
async fn a_failed_update_keeps_the_watch_and_is_tried_again() {
    let limits = Limits { affiliates: 1, ..Limits::default() };
    let server = Running::start(server::Settings { limits, ..settings() });
    let mut other = server.client().await;
    let update = |ttl| AffiliateUpdateRequest {
        cluster_id: "c".to_owned(),
        affiliate_id: "other".to_owned(),
        affiliate_data: Some(vec![1; 40].into()),
        affiliate_endpoints: Vec::new(),
        ttl: Some(wire::Duration { seconds: ttl, nanos: 0 }),
    };
    other.affiliate_update(update(60)).await.unwrap();
    let client = started(server.address, "a");
    client.publish(local(1));
    let refused = until(&client, "refused", |view| view.publication_error.is_some()).await;
    assert!(refused.publication_error.unwrap().contains("too many affiliates"));
    let connected = until(&client, "connected", |view| view.connected.is_some()).await.connected;
    let rejected = until(&client, "told", |view| view.members.rejected().count() == 1).await;
    assert_eq!(rejected.members.rejected().next().unwrap().0, "other");
    other.affiliate_update(update(0)).await.unwrap();
    let view = until(&client, "published", |view| view.published.is_some()).await;
    assert_eq!((view.publication_error, view.connected), (None, connected), "the same watch");
    server.end().await;
}

#[tokio::test]
async fn a_listed_node_is_admitted_and_another_one_refused() {
    let directory = tempfile::tempdir().unwrap();
    let list = directory.path().join("admission");
    let [listed, other] = ["edge-1", "edge-2"].map(|name| node_id(&[7; 32], name));
    std::fs::write(&list, format!("# edge-1\nc {listed}\n")).unwrap();
    let server = Running::start(server::Settings { admission: Some(list.clone()), ..settings() });
    let (a, b) = (started(server.address, &listed), started(server.address, &other));
    a.publish(local(1));
    b.publish(local(2));
    until(&b, "told of the listed node", |view| ids(view) == [listed.as_str()]).await;
    let refused = until(&b, "refused", |view| view.publication_error.is_some()).await;
    let error = refused.publication_error.unwrap();
    assert!(refused.published.is_none() && error.contains("permission"), "{error}");
    // Replaced as a whole.
    let new = directory.path().join("new");
    std::fs::write(&new, format!("c {listed}\nc {other}\n")).unwrap();
    std::fs::rename(new, list).unwrap();
    until(&a, "told of the node that is listed now", |view| ids(view) == [other.as_str()]).await;
    server.end().await;
}

#[tokio::test]
async fn members_stay_through_an_outage_and_the_node_is_published_again() {
    let first = Running::start(settings());
    let address = first.address;
    let (a, b) = (started(address, "a"), started(address, "b"));
    a.publish(local(1));
    b.publish(local(2));
    until(&a, "b", |view| ids(view) == ["b"]).await;
    until(&b, "a", |view| ids(view) == ["a"]).await;
    first.end().await;
    let view = until(&a, "disconnected", |view| view.connected.is_none()).await;
    assert_eq!(ids(&view), ["b"]);
    until(&a, "told why", |view| view.connection_error.is_some()).await;
    let before = [&a, &b].map(|client| client.view().borrow().published);
    // It has forgotten everything.
    let second = Running::start(server::Settings { listen: address, ..settings() });
    let both = async |client: &Client| {
        until(client, "connected", |view| view.connected.is_some() && ids(view).len() == 1).await;
    };
    both(&a).await;
    both(&b).await;
    for (client, before) in [(&a, before[0]), (&b, before[1])] {
        let view = until(client, "published again", |view| view.published > before).await;
        let pause = view.published.unwrap().saturating_duration_since(view.connected.unwrap());
        assert!(pause <= Duration::from_secs(5), "{pause:?}");
    }
    assert_eq!(second.observer.snapshot().totals.affiliates, 2);
    second.end().await;
}

#[tokio::test]
async fn a_redirection_is_followed_and_a_loop_is_an_error() {
    let server = Running::start(settings());
    let redirect = Some(server.address.to_string());
    let other = Running::start(server::Settings { redirect, ..settings() });
    let client = started(other.address, "a");
    client.publish(local(1));
    until(&client, "published", |view| view.published.is_some()).await;
    assert_eq!(server.observer.snapshot().totals.affiliates, 1);
    let listen = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let endless = server::Settings { redirect: Some(listen.to_string()), listen, ..settings() };
    let endless = Running::start(endless);
    let client = started(endless.address, "a");
    let view = until(&client, "an error", |view| view.connection_error.is_some()).await;
    assert!(view.connection_error.unwrap().contains("more than 3 times"));
    for server in [server, other, endless] {
        server.end().await;
    }
}

/// An HTTP proxy for one connection, which notes what it was asked.
async fn proxy(asked: Arc<Mutex<String>>, to: SocketAddr) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.unwrap());
        }
        *asked.lock().unwrap() = String::from_utf8(head).unwrap();
        stream.write_all(b"HTTP/1.1 200 OK\r\n\r\n").await.unwrap();
        let mut target = TcpStream::connect(to).await.unwrap();
        let _ = tokio::io::copy_bidirectional(&mut stream, &mut target).await;
    });
    address
}

#[tokio::test]
async fn a_server_is_reached_over_tls_through_a_proxy() {
    let directory = tempfile::tempdir().unwrap();
    let (files, roots) = certificate(directory.path());
    let server = Running::start(server::Settings { certificate: Some(files), ..settings() });
    let asked = Arc::new(Mutex::new(String::new()));
    let proxy = proxy(Arc::clone(&asked), server.address).await;
    let mut settings = client_settings("https://localhost:3000", "a");
    settings.roots = Arc::new(roots);
    settings.environment =
        Arc::new(move |name| (name == "HTTPS_PROXY").then(|| format!("http://user:secret@{proxy}")));
    let client = Client::start(settings);
    client.publish(local(1));
    until(&client, "published", |view| view.published.is_some()).await;
    assert!(asked.lock().unwrap().starts_with("CONNECT localhost:3000 HTTP/1.1\r\n"));
    let mut untrusting = client_settings(&format!("https://localhost:{}", server.address.port()), "b");
    untrusting.roots = Arc::new(certificate(directory.path()).1);
    let client = Client::start(untrusting);
    let view = until(&client, "refused", |view| view.connection_error.is_some()).await;
    let error = view.connection_error.unwrap();
    assert!(error.contains("TLS with localhost") && error.contains("certificate"), "{error}");
    server.end().await;
}
