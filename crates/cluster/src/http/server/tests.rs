//! Clients of the loopback interface, each with an address of its own in 127.0.0.0/8.

use std::sync::Mutex;

use axum::body::Bytes;
use axum::routing::{get, post};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpSocket;

use super::*;

/// Only bounds a test that would hang.
const TIMEOUT: Duration = Duration::from_secs(60);

const LIMITS: Limits = Limits {
    connections: 16,
    per_source: 4,
    idle: Duration::from_secs(30),
    request: Duration::from_secs(30),
    body: 100,
};

/// A running server.
struct Server {
    address: SocketAddr,
    _task: JoinSet<Infallible>,
}

impl Server {
    async fn start(limits: Limits) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let routes = Router::new()
            .route("/healthz", get(|| async { "ok" }))
            .route("/length", post(|body: Bytes| async move { body.len().to_string() }));
        let mut task = JoinSet::new();
        task.spawn(async move { accept_all("test", &listener, limits, Plain, routes).await });
        Self { address, _task: task }
    }

    async fn connect(&self, last: u8) -> TcpStream {
        let socket = TcpSocket::new_v4().unwrap();
        socket.bind(SocketAddr::from(([127, 0, 0, last], 0))).unwrap();
        socket.connect(self.address).await.unwrap()
    }

    /// A connection that never finishes its headers.
    async fn slowloris(&self, last: u8) -> TcpStream {
        let mut stream = self.connect(last).await;
        // A connection that was closed at once is as good.
        let _ = stream.write_all(b"GET /healthz HTTP/1.1\r\nX-Slow: ").await;
        stream
    }

    /// Sends a request and reads until the server closes.
    async fn ask(&self, last: u8, request: &str) -> String {
        let mut stream = self.connect(last).await;
        stream.write_all(request.as_bytes()).await.unwrap();
        read_to_end(&mut stream).await
    }
}

async fn read_to_end(stream: &mut TcpStream) -> String {
    let mut answer = Vec::new();
    let _ = timeout(TIMEOUT, stream.read_to_end(&mut answer)).await.expect("the server closes");
    String::from_utf8(answer).unwrap()
}

const HEALTH: &str = "GET /healthz HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";

/// Descriptors of this process: both ends of every connection.
fn descriptors() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[tokio::test]
async fn clients_that_never_finish_a_request_do_not_block_others_and_descriptors_stay_bounded() {
    let server = Server::start(LIMITS).await;
    let before = descriptors();
    let mut held = Vec::new();
    for round in 0..600u16 {
        held.push(server.slowloris(u8::try_from(round % 40).unwrap() + 10).await);
    }
    assert!(server.ask(2, HEALTH).await.starts_with("HTTP/1.1 200 OK\r\n"));
    let of_server = descriptors() - before - held.len();
    // One that has to make room is closed a moment later.
    assert!(of_server <= 2 * LIMITS.connections, "{of_server} descriptors for {} connections", held.len());
    assert!(server.ask(10, HEALTH).await.starts_with("HTTP/1.1 200 OK\r\n"), "also for one of them");
}

#[tokio::test]
async fn a_restricted_route_answers_this_host_and_those_who_may_read_it() {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = listener.local_addr().unwrap();
    // On the loopback interface every client is on this host, so the check is asked without the server.
    let secret = super::super::restrict(
        Router::new().route("/clients", get(|| async { "names" })),
        "pods may not read this",
        |source| source == IpAddr::from([192, 0, 2, 1]),
    );
    let ask = |source: Option<&str>| {
        let routes = secret.clone();
        let mut request = Request::get("/clients").body(axum::body::Body::empty()).unwrap();
        if let Some(source) = source {
            request.extensions_mut().insert(Source(source.parse().unwrap()));
        }
        async move { routes.oneshot(request).await.unwrap().status() }
    };
    assert_eq!(ask(Some("192.0.2.1")).await, StatusCode::OK);
    assert_eq!(ask(Some("127.0.0.1")).await, StatusCode::OK);
    assert_eq!(ask(Some("10.1.0.5")).await, StatusCode::FORBIDDEN);
    assert_eq!(ask(None).await, StatusCode::FORBIDDEN);
    let routes = secret.clone();
    let mut task = JoinSet::new();
    task.spawn(async move { accept_all("test", &listener, LIMITS, Plain, routes).await });
    let server = Server { address, _task: task };
    let request = "GET /clients HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n";
    assert!(server.ask(2, request).await.ends_with("names"), "the server says whose connection it is");
}

#[test]
fn clients_of_one_network_of_ipv6_displace_only_each_other() {
    let connections = Connections::new(Limits::PROBES.connections, Limits::PROBES.per_source);
    let open = |network, host| count(&connections, IpAddr::from([0x2001, 0xdb8, 0, network, 0, 0, 0, host]));
    let (_counted, other) = open(2, 1);
    let flood: Vec<_> = (0..129).map(|host| open(1, host)).collect();
    let last = 129 - Limits::PROBES.per_source;
    assert!(flood.iter().map(|(_, closed)| closed.is_cancelled()).eq((0..129).map(|number| number < last)));
    assert!(!other.is_cancelled());
}

#[test]
fn an_ipv4_client_of_a_dual_stack_socket_is_one_client() {
    let connections = Connections::new(8, 1);
    let [(_first, closed), (_second, open)] =
        ["::ffff:10.0.0.1", "10.0.0.1"].map(|address| count(&connections, address.parse().unwrap()));
    assert_eq!((closed.is_cancelled(), open.is_cancelled()), (true, false));
}

#[tokio::test]
async fn a_connection_without_a_request_is_closed_after_the_idle_time() {
    let server = Server::start(Limits { idle: Duration::from_millis(50), ..LIMITS }).await;
    let mut silent = server.connect(2).await;
    read_to_end(&mut silent).await;
    let mut slow = server.slowloris(2).await;
    read_to_end(&mut slow).await;
}

#[tokio::test]
async fn a_body_that_does_not_arrive_or_is_too_long_is_refused() {
    let server = Server::start(Limits { request: Duration::from_millis(50), ..LIMITS }).await;
    let post = |length: usize, body: &str| {
        format!(
            "POST /length HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{body}"
        )
    };
    assert!(server.ask(2, &post(3, "abc")).await.ends_with("\r\n\r\n3"));
    assert!(server.ask(2, &post(3, "ab")).await.starts_with("HTTP/1.1 408 "));
    assert!(server.ask(2, &post(101, &"a".repeat(101))).await.starts_with("HTTP/1.1 413 "));
}

#[tokio::test]
async fn headers_that_are_too_long_are_refused() {
    let server = Server::start(LIMITS).await;
    let request =
        format!("GET /healthz HTTP/1.1\r\nHost: x\r\nX-Long: {}\r\n\r\n", "a".repeat(2 * MAX_HEADERS));
    let answer = server.ask(2, &request).await;
    assert!(!answer.starts_with("HTTP/1.1 200"), "{answer}");
}

#[tokio::test]
async fn without_ipv6_every_address_is_every_ipv4_address() {
    for (errno, asked, expected) in [
        (97, "[::]:9384", &["[::]:9384", "0.0.0.0:9384"][..]),
        (99, "[::]:9384", &["[::]:9384", "0.0.0.0:9384"]),
        // An address in use is no reason, and an address that was asked for is never replaced.
        (98, "[::]:9384", &["[::]:9384"]),
        (97, "[2001:db8::1]:9384", &["[2001:db8::1]:9384"]),
        (99, "10.0.0.1:9384", &["10.0.0.1:9384"]),
    ] {
        let tried = Mutex::new(Vec::new());
        let bound = bind(asked.parse().unwrap(), |address: SocketAddr| {
            tried.lock().unwrap().push(address.to_string());
            let refused = matches!(address.ip(), IpAddr::V6(_)) || errno == 99 && asked.starts_with("10.");
            async move { if refused { Err(io::Error::from_raw_os_error(errno)) } else { Ok(()) } }
        })
        .await;
        assert_eq!(tried.into_inner().unwrap(), expected, "{errno} {asked}");
        assert_eq!(bound.is_ok(), expected.len() == 2);
    }
}

/// The kubelet finds the pod unhealthy meanwhile; all else of the program goes on.
#[tokio::test]
async fn a_port_that_another_program_has_is_served_once_it_is_free() {
    let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let address = other.local_addr().unwrap();
    let mut waiting = JoinSet::new();
    waiting.spawn(listen("test", address));
    assert!(timeout(RETRY_INTERVAL * 2, waiting.join_next()).await.is_err(), "it waits for its port");
    drop(other);
    let listener = timeout(TIMEOUT, waiting.join_next()).await.unwrap().unwrap().unwrap();
    assert_eq!(listener.local_addr().unwrap(), address);
}
