//! The published client as a member of the same cluster as ours, through our server. Both ends of every message are independent.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use fairlead_discovery::client::{self, Client, Local, View};
use fairlead_discovery::server::{Server, Settings};
use fairlead_wire::discovery::{Affiliate, ClusterSecret, KubeSpan};
use rustls::RootCertStore;
use serde_json::{Value, json};
use testbed_discovery::Judge;
use tokio::time::timeout;
use tokio_util::sync::{CancellationToken, DropGuard};

const SECRET: [u8; 32] = [7; 32];
const KEY: &str = "xTIBA5rboUvnH4htodjb6e697QjLERt1NAB4mZqp8Dg=";
/// It is published again after half of it.
const TTL: Duration = Duration::from_secs(4);
/// Bounds a test that hangs.
const LIMIT: Duration = Duration::from_secs(30);

fn serve() -> (SocketAddr, DropGuard) {
    let settings = Settings::new("127.0.0.1:0".parse().unwrap(), (100, 100));
    let server = Server::bind(settings).unwrap();
    let (address, stop) = (server.local_address().unwrap(), CancellationToken::new());
    tokio::spawn(server.run(stop.clone().cancelled_owned()));
    (address, stop.drop_guard())
}

fn judge(server: SocketAddr, id: &str) -> Judge {
    Judge::start(&server.to_string(), "c", SECRET, id, TTL).unwrap()
}

fn ours(server: SocketAddr, id: &str) -> Client {
    let server = format!("http://{server}").parse().unwrap();
    let secret = ClusterSecret::new(SECRET);
    let roots = Arc::new(RootCertStore::empty());
    let settings = client::Settings::new(server, "c".to_owned(), secret, id.to_owned(), roots);
    Client::start(client::Settings { ttl: TTL, ..settings })
}

fn local() -> Local {
    let kubespan = KubeSpan {
        public_key: KEY.to_owned(),
        address: Some("fd7f:175a:b97c:5602::1".parse().unwrap()),
        additional_addresses: vec!["10.244.1.0/24".parse().unwrap(), "2001:db8:1::/64".parse().unwrap()],
        exclude_advertised_addresses: vec!["192.168.0.0/16".parse().unwrap()],
        without_preshared_key: true,
        ..KubeSpan::default()
    };
    let affiliate = Affiliate {
        hostname: "ours".to_owned(),
        addresses: vec!["192.0.2.1".parse().unwrap(), "2001:db8::1".parse().unwrap()],
        kubespan: Some(kubespan),
        ..Default::default()
    };
    let endpoints = vec!["[::ffff:192.0.2.1]:51820".parse().unwrap(), "[2001:db8::1]:51820".parse().unwrap()];
    Local { affiliate, endpoints, port: Some(51820), ..Local::default() }
}

fn published(id: &str, hostname: &str, endpoints: &[&str]) -> Value {
    json!({
        "node_id": id,
        "hostname": hostname,
        "addresses": ["192.0.2.2", "2001:db8::2"],
        "public_key": KEY,
        "address": "fd7f:175a:b97c:5602::2",
        "routed": ["10.244.2.0/24"],
        "excluded": ["192.168.1.0/24"],
        "endpoints": endpoints,
    })
}

fn ids(found: &Value) -> Vec<&str> {
    let members = found["members"].as_array();
    members.into_iter().flatten().filter_map(|member| member["node_id"].as_str()).collect()
}

async fn until(client: &Client, what: &str, is: impl Fn(&View) -> bool) -> View {
    let mut view = client.view();
    let found = timeout(LIMIT, view.wait_for(|view| is(view))).await.map(|view| view.unwrap().clone());
    found.unwrap_or_else(|_| panic!("not {what}: {:?}", client.view().borrow()))
}

fn known(view: &View) -> Vec<&str> {
    view.members.iter().map(|(id, _)| id).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_published_client_finds_ours_and_is_found() {
    let (server, _stop) = serve();
    let (mut theirs, ours) = (judge(server, "theirs"), ours(server, "ours"));
    ours.publish(local());
    theirs.publish(&published("theirs", "first", &["192.0.2.2:51820", "[2001:db8::2]:51820"])).await.unwrap();

    let found =
        theirs.until("ours", |found| ids(found) == ["ours"] && found["client_ip"] != "").await.unwrap();
    let expected = json!({
        "node_id": "ours",
        "hostname": "ours",
        "addresses": ["192.0.2.1", "2001:db8::1"],
        "public_key": KEY,
        "address": "fd7f:175a:b97c:5602::1",
        "routed": ["10.244.1.0/24", "2001:db8:1::/64"],
        "excluded": ["192.168.0.0/16"],
        "endpoints": ["192.0.2.1:51820", "[2001:db8::1]:51820", "127.0.0.1:51820"],
    });
    assert_eq!(found, json!({ "client_ip": "127.0.0.1", "members": [expected] }));

    let view = until(&ours, "theirs", |view| known(view) == ["theirs"]).await;
    let member = view.members.member("theirs").unwrap();
    let kubespan = member.affiliate.kubespan.as_ref().unwrap();
    assert!(member.rejections.is_empty(), "{member:?}");
    assert_eq!(member.public_key, KEY.parse().ok());
    assert_eq!(member.affiliate.addresses, local_addresses(["192.0.2.2", "2001:db8::2"]));
    assert_eq!(kubespan.additional_addresses, ["10.244.2.0/24".parse().unwrap()]);
    assert_eq!(kubespan.exclude_advertised_addresses, ["192.168.1.0/24".parse().unwrap()]);
    let endpoints: Vec<SocketAddr> =
        ["192.0.2.2:51820", "[2001:db8::2]:51820"].map(|text| text.parse().unwrap()).into();
    assert_eq!(member.endpoints, endpoints);

    // What either changes reaches the other. Endpoints are added.
    theirs.publish(&published("theirs", "second", &["192.0.2.3:51820"])).await.unwrap();
    let view = until(&ours, "the change", |view| {
        view.members.member("theirs").is_some_and(|member| member.affiliate.hostname == "second")
    });
    assert_eq!(view.await.members.member("theirs").unwrap().endpoints.len(), 3);
    let mut renamed = local();
    renamed.affiliate.hostname = "renamed".to_owned();
    ours.publish(renamed);
    theirs.until("the change", |found| found["members"][0]["hostname"] == "renamed").await.unwrap();

    // Deletions are told apart from expiries.
    ours.leave().await.unwrap();
    theirs.until("the deletion", |found| ids(found).is_empty()).await.unwrap();
}

fn local_addresses<const N: usize>(texts: [&str; N]) -> [std::net::IpAddr; N] {
    texts.map(|text| text.parse().unwrap())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_of_both_are_deleted_and_expire() {
    let (server, _stop) = serve();
    let (mut first, mut second) = (judge(server, "first"), judge(server, "second"));
    let (watching, leaving) = (ours(server, "watching"), ours(server, "leaving"));
    first.publish(&published("first", "", &[])).await.unwrap();
    second.publish(&published("second", "", &[])).await.unwrap();
    leaving.publish(local());
    first.until("the others", |found| ids(found) == ["leaving", "second"]).await.unwrap();
    until(&watching, "all", |view| known(view) == ["first", "leaving", "second"]).await;
    // All are published again before they expire.
    tokio::time::sleep(TTL + Duration::from_secs(2)).await;
    assert_eq!(known(&watching.view().borrow()), ["first", "leaving", "second"]);

    drop(leaving);
    first.until("the expiry", |found| ids(found) == ["second"]).await.unwrap();
    second.publish(&Value::Null).await.unwrap();
    first.until("the deletion", |found| ids(found).is_empty()).await.unwrap();
    let view = until(&watching, "the deletion", |view| known(view) == ["first"]).await;
    assert_eq!(view.members.deleted().map(|(id, _)| id).collect::<Vec<_>>(), ["second"]);
    drop(first);
    let view = until(&watching, "the expiry", |view| known(view).is_empty()).await;
    assert_eq!(view.members.deleted().count(), 1, "expired, not deleted");
}
