//! Several replicas of one relay.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use fairlead_relay::client::trust;
use fairlead_relay::core::DropReason;
use fairlead_wire::relay::Frame;
use fairlead_wire::relay::replica::REPLICA_ALPN;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use crate::bed::{Bed, Client, public};

fn address(bed: &Bed) -> SocketAddr {
    bed.replica_address.unwrap()
}

async fn is_connected_to(bed: &Bed, count: usize) {
    while bed.observer.snapshot().replicas != count {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

/// Sends until it arrives: the other replica has to hear of the client first.
async fn reaches(from: &mut Client, to: (u8, &mut Client), sender: u8, payload: &[u8]) {
    let (number, client) = to;
    let frame = Frame::Datagram { peer: public(number), payload };
    loop {
        from.send(&frame).await;
        let received = tokio::time::timeout(Duration::from_millis(100), client.datagram()).await;
        if let Ok(received) = received {
            assert_eq!(received, (public(sender), payload.to_vec()));
            return;
        }
    }
}

#[tokio::test]
async fn clients_of_two_replicas_exchange_datagrams_until_one_is_killed() {
    let first = Bed::start_replica(&[]).await;
    let second = first.another(&[address(&first)]).await;
    is_connected_to(&first, 1).await;
    let (mut a, mut b) = (first.client("tcp", 1).await, second.client("wss", 2).await);
    assert_ne!(a.replica, b.replica);
    let long = vec![7; 65_507];
    reaches(&mut a, (2, &mut b), 1, &long).await;
    b.send(&Frame::Probe { peer: public(1), payload: b"back" }).await;
    assert_eq!(a.datagram().await, (public(2), b"back".to_vec()));
    let forwarded = second.observer.snapshot().forwarding;
    assert_eq!((forwarded.datagrams, forwarded.bytes), (1, 4));

    // The client of the one that is killed comes to the other.
    let mark = std::time::Instant::now();
    second.kill().await;
    b.closed().await;
    let mut again = first.client("tcp", 2).await;
    is_connected_to(&first, 0).await;
    a.send(&Frame::Datagram { peer: public(2), payload: b"here" }).await;
    assert_eq!(again.datagram().await, (public(1), b"here".to_vec()));
    println!("reached again {:?} after the kill", mark.elapsed());
    a.send(&Frame::Datagram { peer: public(3), payload: b"x" }).await;
    assert!(a.next().await.starts_with("PeerGone"));
}

#[tokio::test]
async fn a_client_that_moves_to_another_replica_is_served_there() {
    let first = Bed::start_replica(&[]).await;
    let second = first.another(&[address(&first)]).await;
    let third = first.another(&[address(&first), address(&second)]).await;
    for bed in [&first, &second, &third] {
        is_connected_to(bed, 2).await;
    }
    let (mut a, mut old) = (third.client("tcp", 1).await, first.client("tcp", 2).await);
    reaches(&mut a, (2, &mut old), 1, b"at the first").await;
    let mut new = second.client("tcp", 2).await;
    reaches(&mut a, (2, &mut new), 1, b"at the second").await;
    // The older link drains.
    let end = loop {
        let frame = old.next().await;
        if frame.starts_with("Error") {
            break frame;
        }
    };
    assert!(end.contains("Superseded"), "{end}");
    assert_eq!(third.observer.snapshot().forwarding.dropped(DropReason::QueueFull), 0);
}

#[tokio::test]
async fn a_replica_that_stops_passes_datagrams_on_while_it_drains() {
    let mut first = Bed::start_replica(&[]).await;
    let second = first.another(&[address(&first)]).await;
    is_connected_to(&first, 1).await;
    let (mut a, mut b) = (first.client("tcp", 1).await, first.client("tcp", 2).await);
    first.stop();
    assert!(a.next().await.starts_with("Draining") && b.next().await.starts_with("Draining"));
    let mut moved = second.client("tcp", 1).await;
    reaches(&mut moved, (2, &mut b), 1, b"to the old one").await;
    reaches(&mut b, (1, &mut moved), 2, b"to the new one").await;
    drop((a, b));
    first.stopped().await;
}

#[tokio::test]
async fn who_has_not_the_relays_certificate_is_no_replica() {
    let first = Bed::start_replica(&[]).await;
    // Another relay of the same name, with a certificate of another authority.
    let stranger = Bed::start_replica(&[address(&first)]).await;
    let mut client = first.client("tcp", 1).await;
    let _other = stranger.client("tcp", 2).await;
    // Programs that know the authority, without a certificate and with the stranger's. Both authorities have the same name, so it is
    // the signature that is wrong.
    let theirs = stranger.certificate();
    for (certificate, refusal) in [(None, "CertificateRequired"), (Some(theirs), "DecryptError")] {
        let error = refused(&first, certificate).await;
        assert!(error.contains(refusal), "{error}");
    }

    tokio::time::sleep(Duration::from_millis(500)).await;
    for bed in [&first, &stranger] {
        assert_eq!(bed.observer.snapshot().replicas, 0);
    }
    client.send(&Frame::Datagram { peer: public(2), payload: b"x" }).await;
    assert!(client.next().await.starts_with("PeerGone"));
}

/// Connects as a replica with this certificate, and says how that ends.
async fn refused(
    bed: &Bed,
    certificate: Option<(Vec<CertificateDer<'static>>, PrivateKeyDer<'static>)>,
) -> String {
    let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
    let config = rustls::ClientConfig::builder_with_provider(provider)
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_root_certificates(trust(&bed.authority()).unwrap());
    let mut config = match certificate {
        None => config.with_no_client_auth(),
        Some((chain, key)) => config.with_client_auth_cert(chain, key).unwrap(),
    };
    config.alpn_protocols = vec![REPLICA_ALPN.to_vec()];
    let stream = TcpStream::connect(address(bed)).await.unwrap();
    let name = ServerName::try_from("localhost").unwrap();
    // With TLS 1.3 a client hears of the refusal when it reads.
    let mut stream = TlsConnector::from(Arc::new(config)).connect(name, stream).await.unwrap();
    let error = stream.read(&mut [0; 64]).await.expect_err("it is accepted");
    error.to_string()
}
