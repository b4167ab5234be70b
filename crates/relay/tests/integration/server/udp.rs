//! The UDP ports of a relay.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use fairlead_wire::relay::{AllocatedPort, Frame, StunServer};
use fairlead_wire::stun::server::AuthenticatedRequest;
use fairlead_wire::stun::{TransactionId, binding_request, parse_response};
use tokio::net::UdpSocket;
use tokio::time::timeout;

use crate::bed::{Bed, public};

const TRANSACTION: TransactionId = TransactionId([5; 12]);

async fn socket() -> UdpSocket {
    UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap()
}

fn at(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// Sends a request to the first port; from where it is answered, and what the answer says.
async fn ask(socket: &UdpSocket, server: &StunServer, request: &[u8]) -> Option<(SocketAddr, SocketAddr)> {
    socket.send_to(request, at(server.port)).await.unwrap();
    let mut buffer = [0; 2048];
    let received = timeout(Duration::from_millis(200), socket.recv_from(&mut buffer)).await.ok()?;
    let (length, from) = received.unwrap();
    assert!(length <= request.len(), "{length} bytes for {}", request.len());
    let response = parse_response(&buffer[..length]).unwrap();
    assert_eq!(response.transaction, TRANSACTION);
    Some((from, response.mapped.unwrap()))
}

#[tokio::test]
async fn a_relay_answers_all_from_one_port_and_clients_from_another() {
    let bed = Bed::start().await;
    let client = bed.client("tcp", 1).await;
    let (server, socket) = (client.stun, socket().await);
    assert_ne!(server.port, server.other_port);
    let own = socket.local_addr().unwrap();
    let answer = ask(&socket, &server, &binding_request(TRANSACTION)).await;
    assert_eq!(answer, Some((at(server.port), own)));
    let test = AuthenticatedRequest {
        transaction: TRANSACTION,
        change_port: true,
        user: Some(server.user),
        nonce: None,
    };
    let answer = ask(&socket, &server, &test.encode(&server.key)).await;
    assert_eq!(answer, Some((at(server.other_port), own)));
    // A stranger, and one who asks the second port.
    assert_eq!(ask(&socket, &server, &test.encode(&[9; 32])).await, None);
    let other = StunServer { port: server.other_port, ..server };
    assert_eq!(ask(&socket, &other, &binding_request(TRANSACTION)).await, None);
    let stun = bed.observer.snapshot().stun;
    let dropped: Vec<(&str, u64)> = stun.drops().map(|(reason, count)| (reason.label(), count)).collect();
    let expected = [("malformed", 0), ("rate_limited", 0), ("short", 0), ("unauthenticated", 1)];
    assert_eq!((stun.answers, dropped.as_slice()), (2, &expected[..]));
}

/// Binds the address of a socket to a port, and returns how many answers that took.
async fn bind(socket: &UdpSocket, port: &AllocatedPort) -> usize {
    let mut nonce = None;
    for answers in 1..4 {
        let request =
            AuthenticatedRequest { transaction: TRANSACTION, change_port: false, user: None, nonce };
        let request = request.encode(&port.token);
        socket.send_to(&request, at(port.port)).await.unwrap();
        let mut buffer = [0; 2048];
        let (length, from) = socket.recv_from(&mut buffer).await.unwrap();
        assert!(from == at(port.port) && length <= request.len());
        let response = parse_response(&buffer[..length]).unwrap();
        nonce = response.nonce;
        if response.mapped == Ok(socket.local_addr().unwrap()) {
            return answers;
        }
    }
    panic!("not bound");
}

async fn received(socket: &UdpSocket) -> Option<(SocketAddr, Vec<u8>)> {
    let mut buffer = vec![0; 65_535];
    let received = timeout(Duration::from_millis(200), socket.recv_from(&mut buffer)).await.ok()?;
    let (length, from) = received.unwrap();
    Some((from, buffer[..length].to_vec()))
}

#[tokio::test]
async fn two_peers_use_a_udp_port_of_the_relay_also_after_their_links_ended() {
    let bed = Bed::start().await;
    let (mut a, mut b) = (bed.client("tcp", 1).await, bed.client("wss", 2).await);
    let (of_a, of_b) = (a.port(2).await, b.port(1).await);
    assert_eq!((of_a.port, of_a.peer, of_b.peer), (of_b.port, public(2), public(1)));
    assert_ne!(of_a.token, of_b.token);
    let (one, two, stranger) = (socket().await, socket().await, socket().await);
    assert_eq!((bind(&one, &of_a).await, bind(&two, &of_b).await), (2, 2));
    let relay = at(of_a.port);
    for length in [0, 1, 148, 1420, 9000, 65_507] {
        let payload = vec![4; length];
        one.send_to(&payload, relay).await.unwrap();
        assert_eq!(received(&two).await, Some((relay, payload.clone())), "{length} bytes");
        two.send_to(&payload, relay).await.unwrap();
        assert_eq!(received(&one).await, Some((relay, payload)), "{length} bytes back");
    }
    stranger.send_to(b"junk", relay).await.unwrap();
    assert_eq!(received(&two).await, None);
    drop((a, b));
    let gone = async {
        while bed.observer.snapshot().links > 0 {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(Duration::from_secs(5), gone).await.unwrap();
    one.send_to(b"still", relay).await.unwrap();
    assert_eq!(received(&two).await, Some((relay, b"still".to_vec())));
    // The NAT of a client gives it another address.
    assert_eq!(bind(&stranger, &of_a).await, 2);
    two.send_to(b"moved", relay).await.unwrap();
    assert_eq!(received(&stranger).await, Some((relay, b"moved".to_vec())));
    let snapshot = bed.observer.snapshot();
    assert_eq!((snapshot.relay_ports, snapshot.allocations.datagrams), (1, 14));
    let dropped: u64 = snapshot.allocations.drops().map(|(_, count)| count).sum();
    assert_eq!((dropped, snapshot.allocations.bindings), (1, 3));
}

#[tokio::test]
async fn ports_are_for_registered_peers_and_close_with_their_registration() {
    let bed = Bed::start().await;
    let mut a = bed.client("tcp", 1).await;
    a.send(&Frame::Allocate(public(2))).await;
    a.send(&Frame::Ping([1; 8])).await;
    assert!(a.next().await.starts_with("Pong"), "no port to a peer without a link");
    let mut b = bed.client("tcp", 2).await;
    let (of_a, of_b) = (a.port(2).await, b.port(1).await);
    let (one, two) = (socket().await, socket().await);
    assert_eq!((bind(&one, &of_a).await, bind(&two, &of_b).await), (2, 2));
    bed.allow(&[1, 3]);
    let gone = async {
        while bed.observer.snapshot().relay_ports > 0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(Duration::from_secs(5), gone).await.expect("closed within 5 s");
    assert!(UdpSocket::bind(at(of_a.port)).await.is_ok(), "the port is free");
    let refusals: u64 = bed.observer.snapshot().allocations.refusals().map(|(_, count)| count).sum();
    assert_eq!(refusals, 1);
}
