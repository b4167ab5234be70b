//! The UDP ports of a relay.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use fairlead_wire::relay::StunServer;
use fairlead_wire::stun::server::AuthenticatedRequest;
use fairlead_wire::stun::{TransactionId, binding_request, parse_response};
use tokio::net::UdpSocket;
use tokio::time::timeout;

use crate::bed::Bed;

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
