//! A server over real connections, with the generated client.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use fairlead_discovery::core::Limits;
use fairlead_discovery::server::Settings;
use fairlead_wire::discovery::parse_address;
use fairlead_wire::discovery::server::cluster_client::ClusterClient;
use fairlead_wire::discovery::server::{
    self as wire, AffiliateDeleteRequest, AffiliateUpdateRequest, HelloRequest, ListRequest, WatchRequest,
};
use rustls::pki_types::ServerName;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::Endpoint;
use tonic::{Code, Request};

use crate::bed::{Running, certificate, settings};

fn update(id: &str, data: &[u8], seconds: i64) -> AffiliateUpdateRequest {
    AffiliateUpdateRequest {
        cluster_id: "c".to_owned(),
        affiliate_id: id.to_owned(),
        affiliate_data: Some(data.to_vec().into()),
        affiliate_endpoints: vec![vec![7; 16].into()],
        ttl: Some(wire::Duration { seconds, nanos: 0 }),
    }
}

fn watch() -> WatchRequest {
    WatchRequest { cluster_id: "c".to_owned() }
}

fn list() -> ListRequest {
    ListRequest { cluster_id: "c".to_owned() }
}

fn hello() -> HelloRequest {
    HelloRequest { cluster_id: "c".to_owned(), client_version: "test".to_owned() }
}

#[tokio::test]
async fn a_watch_sees_what_is_published_deleted_and_expired() {
    let server = Running::start(settings());
    let mut client = server.client().await;
    client.affiliate_update(update("a", b"1", 60)).await.unwrap();
    let mut stream = client.watch(watch()).await.unwrap().into_inner();
    let first = stream.message().await.unwrap().unwrap();
    assert_eq!((first.affiliates.len(), first.deleted, first.snapshot_continues), (1, false, false));
    client.affiliate_update(update("b", b"2", 1)).await.unwrap();
    let second = stream.message().await.unwrap().unwrap();
    assert_eq!((second.affiliates[0].id.as_str(), &second.affiliates[0].data[..]), ("b", &b"2"[..]));
    let expired = stream.message().await.unwrap().unwrap();
    assert_eq!((expired.affiliates[0].id.as_str(), expired.deleted, expired.expired), ("b", true, true));
    let delete = AffiliateDeleteRequest { cluster_id: "c".to_owned(), affiliate_id: "a".to_owned() };
    client.affiliate_delete(delete).await.unwrap();
    let deleted = stream.message().await.unwrap().unwrap();
    assert_eq!((deleted.affiliates[0].id.as_str(), deleted.deleted, deleted.expired), ("a", true, false));
    assert_eq!(server.observer.snapshot().totals.watches, 1);
    // The server ends although a watch is open.
    server.end().await;
    assert_eq!(stream.message().await.unwrap_err().code(), Code::Unavailable);
}

#[tokio::test]
async fn a_caller_is_told_the_address_of_its_connection_unless_a_trusted_proxy_knows_better() {
    let through = |headers: &[(&'static str, &str)]| {
        let mut request = Request::new(hello());
        for (name, value) in headers {
            request.metadata_mut().append(*name, value.parse().unwrap());
        }
        request
    };
    let ip = |text: &str| text.parse::<IpAddr>().ok();
    let headers = [("x-real-ip", "192.0.2.9"), ("x-forwarded-for", "192.0.2.8")];
    let direct = Running::start(settings());
    let answer = direct.client().await.hello(through(&headers)).await.unwrap().into_inner();
    assert_eq!(parse_address(&answer.client_ip), ip("127.0.0.1"), "headers of other callers");
    direct.end().await;
    let trusted_proxies = vec!["127.0.0.0/8".parse().unwrap(), "203.0.113.0/24".parse().unwrap()];
    let behind = Running::start(Settings { trusted_proxies, ..settings() });
    let mut client = behind.client().await;
    for (headers, address) in [
        (&headers[..], "192.0.2.9"),
        (&[("x-forwarded-for", "198.51.100.1, 192.0.2.8, 203.0.113.5")], "192.0.2.8"),
        (&[("x-forwarded-for", "192.0.2.8, rubbish")], "127.0.0.1"),
        (&[], "127.0.0.1"),
    ] {
        let answer = client.hello(through(headers)).await.unwrap().into_inner();
        assert_eq!(parse_address(&answer.client_ip), ip(address), "{headers:?}");
    }
    behind.end().await;
    let silent = Settings {
        reports_client_address: false,
        redirect: Some("other.example:443".to_owned()),
        ..settings()
    };
    let silent = Running::start(silent);
    let answer = silent.client().await.hello(hello()).await.unwrap().into_inner();
    assert!(answer.client_ip.is_empty());
    assert_eq!(answer.redirect.unwrap().endpoint, "other.example:443");
    silent.end().await;
}

#[tokio::test]
async fn refusals_have_the_codes_of_the_protocol_and_are_counted() {
    let limits = Limits { affiliates: 1, rate: 1, burst: 8, ..Limits::default() };
    let server = Running::start(Settings { limits, ..settings() });
    let mut client = server.client().await;
    client.affiliate_update(update("a", b"1", 60)).await.unwrap();
    let mut code = async |request| client.affiliate_update(request).await.unwrap_err().code();
    assert_eq!(code(update("b", b"1", 60)).await, Code::ResourceExhausted);
    assert_eq!(code(update("a", b"1", 1801)).await, Code::InvalidArgument);
    assert_eq!(code(update("a", &[0; 2049], 60)).await, Code::InvalidArgument);
    assert_eq!(code(update("", b"1", 60)).await, Code::InvalidArgument);
    // A time that cannot be has ended, as a negative one.
    client.affiliate_update(update("a", b"1", i64::MIN)).await.unwrap();
    let refused = server.observer.snapshot().refusals.iter().map(|(_, count)| count).sum::<u64>();
    assert_eq!(refused, 4);
    let mut floods = tokio::task::JoinSet::new();
    for _ in 0..20 {
        let mut client = client.clone();
        floods.spawn(async move { client.list(list()).await.map_err(|status| status.code()) });
    }
    // Some get their turn, others would wait too long.
    let (mut served, mut refused) = (false, false);
    while !(served && refused) {
        match floods.join_next().await.unwrap().unwrap() {
            Ok(_) => served = true,
            Err(code) => refused = code == Code::ResourceExhausted,
        }
    }
    server.end().await;
}

#[tokio::test]
async fn what_is_published_survives_a_restart() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("state");
    let settings = || Settings { snapshot: Some((path.clone(), Duration::from_secs(600))), ..settings() };
    let server = Running::start(settings());
    server.client().await.affiliate_update(update("a", b"1", 60)).await.unwrap();
    server.end().await;
    let server = Running::start(settings());
    let found = server.client().await.list(list()).await.unwrap().into_inner().affiliates;
    assert_eq!((found.len(), &found[0].data[..], found[0].endpoints.len()), (1, &b"1"[..], 1));
    server.end().await;
}

#[tokio::test]
async fn connections_beyond_the_limit_are_closed() {
    let server = Running::start(Settings { connections: (100, 1), ..settings() });
    let mut first = server.client().await;
    first.hello(hello()).await.unwrap();
    let second = ClusterClient::connect(format!("http://{}", server.address)).await;
    let refused = match second {
        Ok(mut second) => second.hello(hello()).await.is_err(),
        Err(_) => true,
    };
    assert!(refused && server.observer.snapshot().rejected_connections > 0);
    first.hello(hello()).await.unwrap();
    server.end().await;
}

#[tokio::test]
async fn a_server_with_a_certificate_speaks_tls() {
    let directory = tempfile::tempdir().unwrap();
    let (files, roots) = certificate(directory.path());
    let server = Running::start(Settings { certificate: Some(files), ..settings() });
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions();
    let mut config = config.unwrap().with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let (connector, address) = (TlsConnector::from(Arc::new(config)), server.address);
    let connect = tower::service_fn(move |_| {
        let connector = connector.clone();
        async move {
            let stream = TcpStream::connect(address).await?;
            let name = ServerName::try_from("localhost").unwrap();
            connector.connect(name, stream).await.map(hyper_util::rt::TokioIo::new)
        }
    });
    let channel = Endpoint::from_static("http://localhost").connect_with_connector(connect).await.unwrap();
    let answer = ClusterClient::new(channel).hello(hello()).await.unwrap().into_inner();
    assert_eq!(parse_address(&answer.client_ip), "127.0.0.1".parse().ok());
    server.end().await;
}
