use super::*;

#[test]
fn any_port_is_the_same_for_both_families_and_answers_leave_from_where_questions_arrived() {
    let sockets = Sockets::open(0, 0).unwrap();
    assert_ne!(sockets.port(), 0);
    let asker = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
    asker.send_to(b"question", ("127.0.0.7", sockets.port())).unwrap();

    let mut receiver = Receiver::new(1500);
    let fd = sockets.descriptors().next().unwrap();
    nix::poll::poll(&mut [nix::poll::PollFd::new(fd, nix::poll::PollFlags::POLLIN)], 10_000_u16).unwrap();
    let Received { path, bytes, length, .. } = receiver.receive(fd).unwrap().unwrap();
    assert_eq!((&*bytes, length), (&b"question"[..], 8));
    assert_eq!(path.local, Some("127.0.0.7".parse().unwrap()));
    sockets.send(&path, b"answer").unwrap();

    let mut answer = [0; 16];
    let (length, from) = asker.recv_from(&mut answer).unwrap();
    assert_eq!(&answer[..length], b"answer");
    assert_eq!(from.ip(), path.local.unwrap());
}

#[test]
fn a_batch_is_sent_and_received_at_once_or_one_by_one() {
    for joins in [true, false] {
        let (mut sender, receiver) = (Sockets::open(0, 0).unwrap(), Sockets::open(0, 0).unwrap());
        if joins {
            receiver.join_received();
        }
        let bytes: Vec<u8> = (0..100_u8).flat_map(|number| [number; 10]).take(995).collect();
        for (number, address) in ["127.0.0.1", "::1"].into_iter().enumerate() {
            let path = Path::to(SocketAddr::new(address.parse().unwrap(), receiver.port()));
            sender.send_batch(&path, &bytes[..640], 10, Ecn::of(2)).unwrap();
            sender.sends_batches = false;
            sender.send_batch(&path, &bytes[640..], 10, Ecn::of(2)).unwrap();
            let fd = receiver.descriptors().nth(number).unwrap();
            let (mut all, mut datagrams, mut calls) = (Vec::new(), 0, 0);
            let mut buffers = Receiver::new(MAX_DATAGRAM);
            while all.len() < bytes.len() {
                nix::poll::poll(&mut [nix::poll::PollFd::new(fd, nix::poll::PollFlags::POLLIN)], 10_000_u16)
                    .unwrap();
                let Received { bytes, length, ecn, .. } = buffers.receive(fd).unwrap().unwrap();
                assert_eq!(ecn, if joins { Ecn::of(2) } else { Ecn::NOT_CAPABLE });
                datagrams += bytes.chunks(length).count();
                all.extend_from_slice(bytes);
                calls += 1;
            }
            assert_eq!((&all, datagrams), (&bytes, 100), "{address}");
            assert!(calls <= 100 && (joins || calls == 100), "{calls} system calls");
        }
    }
}

/// The kernel cuts no fragments of a batch.
#[test]
fn datagrams_longer_than_the_mtu_are_sent_one_by_one() {
    testbed_netns::in_namespace(|| {
        testbed_netns::sh("ip link set lo mtu 1280");
        let (sender, receiver) = (Sockets::open(0, 0).unwrap(), Sockets::open(0, 0).unwrap());
        for (number, address) in ["127.0.0.1", "::1"].into_iter().enumerate() {
            let path = Path::to(SocketAddr::new(address.parse().unwrap(), receiver.port()));
            sender.send_batch(&path, &[7; 5000], 2000, Ecn::NOT_CAPABLE).unwrap();
            let fd = receiver.descriptors().nth(number).unwrap();
            let mut buffers = Receiver::new(MAX_DATAGRAM);
            let lengths = [(); 3].map(|()| {
                nix::poll::poll(&mut [nix::poll::PollFd::new(fd, nix::poll::PollFlags::POLLIN)], 10_000_u16)
                    .unwrap();
                buffers.receive(fd).unwrap().unwrap().bytes.len()
            });
            assert_eq!(lengths, [2000, 2000, 1000]);
        }
    });
}

#[test]
fn a_port_in_use_is_named() {
    let holder = std::net::UdpSocket::bind("0.0.0.0:0").unwrap();
    let port = holder.local_addr().unwrap().port();
    let error = Sockets::open(port, 0).err().unwrap();
    assert!(error.to_string().contains(&port.to_string()), "{error}");
}

#[test]
fn mapped_endpoints_use_the_ipv4_socket() {
    assert_eq!(Path::to("[::ffff:192.0.2.1]:5".parse().unwrap()).remote, "192.0.2.1:5".parse().unwrap());
}
