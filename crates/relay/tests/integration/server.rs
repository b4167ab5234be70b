//! A relay and its clients over sockets of the loopback interface, with TLS. Nothing is fake but the network.

mod held;
mod replicas;
mod standby;
mod udp;

use std::net::SocketAddr;
use std::time::Duration;

use crate::bed;
use crate::bed::{Bed, Client, key, public};
use fairlead_relay::client::{ConnectError, Endpoint, connect, connect_at};
use fairlead_relay::core::DropReason;
use fairlead_relay::server::Rejection;
use fairlead_wire::relay::{ErrorReason, Frame, Notice};
use tokio::net::TcpListener;

#[tokio::test]
async fn datagrams_pass_over_every_transport() {
    let (secure, plain) = (Bed::start().await, Bed::start_plain().await);
    for (bed, transport) in [(&secure, "tcp"), (&secure, "wss"), (&plain, "ws")] {
        let (mut a, mut b) = (bed.client(transport, 1).await, bed.client(transport, 2).await);
        assert_eq!(a.replica, b.replica);
        for length in [0, 1, 148, 1420, 9000, 65_507] {
            let payload: Vec<u8> = (0..length).map(|n| u8::try_from(n % 251).unwrap()).collect();
            a.send(&Frame::Datagram { peer: public(2), payload: &payload }).await;
            assert_eq!(b.datagram().await, (public(1), payload.clone()), "{transport}, {length} bytes");
            b.send(&Frame::Probe { peer: public(1), payload: &payload }).await;
            assert_eq!(a.datagram().await, (public(2), payload), "{transport}, {length} bytes back");
        }
        a.send(&Frame::Ping([7; 8])).await;
        assert_eq!(a.next().await, "Pong([7, 7, 7, 7, 7, 7, 7, 7])");
        a.send(&Frame::Datagram { peer: public(9), payload: b"x" }).await;
        assert!(a.next().await.starts_with("PeerGone"));
    }
}

#[tokio::test]
async fn all_transports_of_a_relay_are_one_relay() {
    let bed = Bed::start().await;
    let (mut a, mut b) = (bed.client("tcp", 1).await, bed.client("wss", 2).await);
    a.send(&Frame::Datagram { peer: public(2), payload: b"across" }).await;
    assert_eq!(b.datagram().await, (public(1), b"across".to_vec()));
    // The newest link of a key receives.
    let mut newer = bed.client("tcp", 2).await;
    a.send(&Frame::Datagram { peer: public(2), payload: b"again" }).await;
    assert_eq!(newer.datagram().await, (public(1), b"again".to_vec()));
    let end = loop {
        match b.next().await {
            frame if frame.starts_with("Error") => break frame,
            _ => {}
        }
    };
    assert!(end.contains("Superseded"), "{end}");
}

#[tokio::test]
async fn who_is_not_allowed_gets_the_reason() {
    let bed = Bed::start().await;
    let refused = |error: ConnectError| match error {
        ConnectError::Refused { reason } => reason,
        other => panic!("{other}"),
    };
    let stranger = connect(&bed.settings("tcp", 99)).await.unwrap_err();
    assert_eq!(refused(stranger), ErrorReason::NotAllowed);
    let mut wrong_token = bed.settings("wss", 1);
    wrong_token.token = b"wrong".to_vec();
    assert_eq!(refused(connect(&wrong_token).await.unwrap_err()), ErrorReason::NotAllowed);
    let mut other_name = bed.settings("tcp", 1);
    other_name.endpoint.host = "127.0.0.1".to_owned();
    // The certificate has both names, the relay only one.
    assert_eq!(refused(connect(&other_name).await.unwrap_err()), ErrorReason::WrongName);
    assert_eq!(bed.rejections(Rejection::NotAllowed), 2);
    assert_eq!(bed.rejections(Rejection::WrongName), 1);
}

#[tokio::test]
async fn a_relay_with_a_wrong_certificate_learns_nothing() {
    let (bed, other) = (Bed::start().await, Bed::start().await);
    for transport in ["tcp", "wss"] {
        let mut settings = bed.settings(transport, 1);
        settings.roots = other.settings(transport, 1).roots;
        let error = connect(&settings).await.unwrap_err().to_string();
        assert!(error.starts_with("TLS with the relay failed: invalid peer certificate"), "{error}");
    }
    let mut no_relay = bed.settings("tcp", 1);
    no_relay.endpoint = Endpoint { port: bed::closed_port().await, ..no_relay.endpoint };
    let error = connect(&no_relay).await.unwrap_err().to_string();
    assert!(error.starts_with("cannot reach localhost:"), "{error}");
}

#[tokio::test]
async fn of_several_addresses_the_first_that_serves_is_used_and_the_reason_is_that_of_the_first_reached() {
    let (bed, other) = (Bed::start().await, Bed::start().await);
    let nothing = SocketAddr::from(([127, 0, 0, 1], bed::closed_port().await));
    // It accepts connections and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let silent_address = silent.local_addr().unwrap();
    for transport in ["tcp", "wss"] {
        let settings = bed.settings(transport, 1);
        for bad in [vec![other.address], vec![nothing, other.address]] {
            let addresses = bad.iter().copied().chain([bed.address]).collect();
            let mut client = Client::new(connect_at(&settings, addresses).await.unwrap()).await;
            client.send(&Frame::Ping([1; 8])).await;
            assert!(client.next().await.starts_with("Pong"));
            let error = connect_at(&settings, bad).await.unwrap_err().to_string();
            assert!(error.starts_with("TLS with the relay failed: invalid peer certificate"), "{error}");
        }
    }
    let settings = bed.settings("tcp", 1);
    connect_at(&settings, vec![silent_address, bed.address]).await.unwrap();
    // What a relay says of the client itself, its other addresses would say too.
    let refused = connect_at(&bed.settings("tcp", 99), vec![bed.address; 3]).await.unwrap_err();
    assert!(refused.to_string().contains("not allowed"), "{refused}");
    assert_eq!(bed.rejections(Rejection::NotAllowed), 1);
}

#[tokio::test]
async fn a_registration_counts_only_once_and_only_here() {
    let bed = Bed::start().await;
    let (mut first, mut second) = (bed.raw().await, bed.raw().await);
    let registration = first.registration(&key(1));
    // On another connection, with the challenge of that one still unanswered.
    second.write(&registration).await;
    assert_eq!(second.error().await, ErrorReason::WrongProof);
    // A client that proves the challenge of the first connection over a third one, as a relay in between would want it.
    let mut third = bed.raw().await;
    third.hello.clone_from(&first.hello);
    let relayed = third.registration(&key(1));
    first.write(&relayed).await;
    assert_eq!(first.error().await, ErrorReason::WrongProof);
    // A client without the private key.
    let mut thief = bed.raw().await;
    let forged = thief.registration_as(&key(99), public(1));
    thief.write(&forged).await;
    assert_eq!(thief.error().await, ErrorReason::WrongProof);
    assert_eq!(bed.rejections(Rejection::WrongProof), 3);
}

#[tokio::test]
async fn bytes_that_are_no_frame_end_a_link_and_no_other() {
    let bed = Bed::start().await;
    let (mut good, mut bad) = (bed.client("tcp", 1).await, bed.client("tcp", 2).await);
    bad.write(&[0x10, 0xff, 0xff, 0xff]).await;
    assert!(bad.next().await.contains("MalformedFrame"));
    bad.closed().await;
    good.send(&Frame::Datagram { peer: public(2), payload: b"x" }).await;
    assert!(good.next().await.starts_with("PeerGone"));
    let mut first = bed.raw().await;
    first.write(&[0x20, 0, 0, 8, 1, 2, 3, 4, 5, 6, 7, 8]).await;
    assert_eq!(first.error().await, ErrorReason::UnexpectedFrame);
    let mut long = bed.raw().await;
    long.write(&[0x02, 0, 0x20, 1]).await;
    long.closed().await;
}

#[tokio::test]
async fn a_removed_keys_links_close_and_others_stay() {
    let bed = Bed::start().await;
    let (mut a, mut b) = (bed.client("tcp", 1).await, bed.client("wss", 2).await);
    bed.allow(&[2, 3]);
    let end = tokio::time::timeout(Duration::from_secs(5), a.next()).await.expect("closed within 5 s");
    assert!(end.contains("Revoked"), "{end}");
    a.closed().await;
    b.send(&Frame::Ping([1; 8])).await;
    assert!(b.next().await.starts_with("Pong"));
    let refused = connect(&bed.settings("tcp", 1)).await.unwrap_err().to_string();
    assert!(refused.contains("not allowed"), "{refused}");
}

#[tokio::test]
async fn a_client_that_does_not_read_costs_little_and_disturbs_no_other() {
    let bed = Bed::start().await;
    let (mut a, slow) = (bed.client("tcp", 1).await, bed.client("tcp", 2).await);
    let payload = [0; 1400];
    let frame = bed::encoded(&Frame::Datagram { peer: public(2), payload: &payload });
    let batch = frame.repeat(100);
    for _ in 0..300 {
        a.write(&batch).await;
    }
    a.send(&Frame::Ping([1; 8])).await;
    assert!(a.next().await.starts_with("Pong"));
    let counters = bed.observer.snapshot().counters;
    let dropped = counters.dropped(DropReason::QueueTime) + counters.dropped(DropReason::QueueFull);
    // What is not dropped is in the buffers of sockets, and at most 1 MiB in the relay.
    assert!(counters.datagrams == 30_000 && dropped > 15_000, "{dropped} dropped of {}", counters.datagrams);
    // It is cut off when nothing could be written for 10 s.
    while bed.observer.snapshot().links == 2 {
        tokio::time::sleep(Duration::from_millis(100)).await;
        a.send(&Frame::Datagram { peer: public(2), payload: &payload }).await;
    }
    drop(slow);
}

#[tokio::test]
async fn ten_thousand_connections_without_a_registration_hold_few_places() {
    let bed = Bed::start().await;
    let mut member = bed.client("tcp", 1).await;
    let mut open = Vec::new();
    for number in 0..10_000_u32 {
        let source = std::net::Ipv4Addr::from_bits(0x7f00_0002 + number % 16);
        open.push(bed.connect_from(source).await);
        // The relay closes all but 1,024. Others would stay here forever, and this test with them.
        while number % 1000 == 999 && open.len() > 1024 {
            tokio::time::sleep(Duration::from_millis(20)).await;
            bed::keep_open(&mut open);
        }
    }
    member.send(&Frame::Ping([1; 8])).await;
    assert!(member.next().await.starts_with("Pong"));
    // One more registers meanwhile.
    bed.client("wss", 2).await;
    assert!(bed.rejections(Rejection::Displaced) > 8_000, "{}", bed.rejections(Rejection::Displaced));
}

#[tokio::test]
async fn a_connection_that_says_nothing_is_closed() {
    let bed = Bed::start().await;
    let mut silent = bed.connect_from([127, 0, 0, 1].into()).await;
    let mut unregistered = bed.raw().await;
    assert_eq!(bed::read_to_end(&mut silent).await, b"");
    unregistered.closed().await;
    assert_eq!(bed.rejections(Rejection::Timeout), 2);
}

#[tokio::test]
async fn a_relay_that_stops_tells_its_clients_and_waits_for_them() {
    let mut bed = Bed::start().await;
    let (mut a, mut b) = (bed.client("tcp", 1).await, bed.client("wss", 2).await);
    bed.stop();
    assert!(a.next().await.starts_with("Draining") && b.next().await.starts_with("Draining"));
    // Meanwhile it still serves them.
    a.send(&Frame::Datagram { peer: public(2), payload: b"last" }).await;
    assert_eq!(b.datagram().await.1, b"last");
    assert!(connect(&bed.settings("tcp", 3)).await.is_err(), "it accepts no others");
    drop((a, b));
    bed.stopped().await;
}

#[tokio::test]
async fn programs_with_the_same_key_are_told() {
    let bed = Bed::start().await;
    let mut links: Vec<Client> = Vec::new();
    for instance in 0..5 {
        let mut settings = bed.settings("tcp", 1);
        settings.instance = [instance; 8];
        links.push(Client::new(connect(&settings).await.unwrap()).await);
    }
    for link in links.iter_mut().skip(3) {
        assert_eq!(link.next().await, format!("Notice({:?})", Notice::DuplicateKey));
    }
}

#[tokio::test]
async fn a_client_gets_through_an_http_proxy_with_a_password() {
    let bed = Bed::start().await;
    let proxy = bed::HttpProxy::start().await;
    for transport in ["tcp", "wss"] {
        let mut settings = bed.settings(transport, 1);
        settings.proxy = Some(proxy.as_seen_by("user", "secret"));
        let mut client = Client::new(connect(&settings).await.unwrap()).await;
        client.send(&Frame::Ping([1; 8])).await;
        assert!(client.next().await.starts_with("Pong"));
        settings.proxy = Some(proxy.as_seen_by("user", "wrong"));
        let error = connect(&settings).await.unwrap_err().to_string();
        assert!(error.contains("status 407"), "{error}");
    }
}

#[tokio::test]
async fn other_http_requests_are_answered() {
    let bed = Bed::start_plain().await;
    let answer = bed.http("GET / HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 404 Not Found\r\n"), "{answer}");
    let answer = bed.http("GET /relay HTTP/1.1\r\nHost: x\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 426 Upgrade Required\r\n"), "{answer}");
}

#[tokio::test]
async fn pings_of_the_websocket_are_answered() {
    let bed = Bed::start_plain().await;
    let pong = bed.websocket_ping(b"are you there").await;
    assert_eq!(pong, b"are you there");
}
