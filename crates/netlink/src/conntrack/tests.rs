use proptest::prelude::*;

use super::*;
use crate::nftables::attributes::AttributeWriter;

fn connection(tcp_state: Option<u8>, source: (u16, &[u8])) -> Vec<u8> {
    let mut writer = AttributeWriter::new(&[]);
    writer.nested(TUPLE_ORIGINAL, |tuple| {
        tuple.nested(TUPLE_ADDRESSES, |addresses| addresses.bytes(source.0, source.1));
    });
    if let Some(state) = tcp_state {
        writer.nested(PROTOCOL_STATE, |info| {
            info.nested(PROTOCOL_STATE_TCP, |tcp| tcp.bytes(TCP_STATE, &[state]));
        });
    }
    writer.finish("test").unwrap()
}

#[test]
fn connections_that_ended_are_left_out() {
    let ipv4 = (SOURCE_IPV4, &[10, 0, 0, 1][..]);
    let found = |state| live_source(&connection(state, ipv4)).unwrap();
    let source: IpAddr = "10.0.0.1".parse().unwrap();
    assert_eq!((found(None), found(Some(3))), (Some(source), Some(source)));
    assert_eq!((found(Some(7)), found(Some(8))), (None, None));
    let ipv6 = connection(None, (SOURCE_IPV6, &[0xfd; 16]));
    assert_eq!(live_source(&ipv6).unwrap(), Some(IpAddr::from([0xfd; 16])));
    assert!(live_source(&connection(None, (SOURCE_IPV4, &[1]))).is_err());
}

#[test]
fn connections_of_a_namespace_are_listed() {
    testbed_netns::in_namespace(|| {
        // Loopback is tracked as soon as a rule asks for it.
        testbed_netns::sh(
            "nft 'table inet t { chain c { type filter hook input priority 0; ct state new accept; }; }'",
        );
        assert_eq!(connections_by_source(&BTreeSet::new()).unwrap(), BTreeMap::new());
        let server = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let client = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        client.send_to(b"x", server.local_addr().unwrap()).unwrap();
        let found = connections_by_source(&BTreeSet::new()).unwrap();
        assert_eq!(found.into_iter().collect::<Vec<_>>(), [([127, 0, 0, 1].into(), 1)]);
    });
}

#[test]
fn only_connections_of_these_hosts_without_translation_are_forgotten() {
    let router = testbed_netns::Namespace::new();
    let [host, other] = ["host", "other"].map(|name| {
        let namespace = testbed_netns::Namespace::new();
        namespace.veth("eth0", &router, name);
        namespace
    });
    router.sh("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
        ip addr add 10.0.0.1/24 dev host; ip addr add 10.0.1.1/24 dev other
        ip addr add fd00::1/64 dev host nodad; ip addr add fd00:1::1/64 dev other nodad
        nft 'table inet t { chain c { type filter hook forward priority 0; ct state new accept; }; chain n { type nat hook postrouting priority 100; udp dport 7 masquerade; }; }'");
    host.sh("ip addr add 10.0.0.2/24 dev eth0; ip addr add 10.0.0.3/24 dev eth0; ip addr add fd00::2/64 dev eth0 nodad
        ip route add default via 10.0.0.1; ip -6 route add default via fd00::1");
    other.sh("ip addr add 10.0.1.2/24 dev eth0; ip addr add fd00:1::2/64 dev eth0 nodad
        ip route add default via 10.0.1.1; ip -6 route add default via fd00:1::1");
    for (from, to) in [("10.0.0.2", "10.0.1.2:7"), ("10.0.0.2", "10.0.1.2:8"), ("10.0.0.3", "10.0.1.2:8")] {
        let socket = host.run(|| std::net::UdpSocket::bind((from, 0))).unwrap();
        host.run(|| socket.send_to(b"x", to)).unwrap();
    }
    let socket = host.run(|| std::net::UdpSocket::bind("[fd00::2]:0")).unwrap();
    host.run(|| socket.send_to(b"x", "[fd00:1::2]:8")).unwrap();
    // The kernel has forwarded them when the last one has found its neighbour.
    std::thread::sleep(std::time::Duration::from_millis(300));
    let sources = ["10.0.0.2", "fd00::2"].map(|text| text.parse().unwrap()).into();
    assert_eq!(router.run(|| forget_untranslated(&sources)).unwrap(), 2);
    assert_eq!(router.run(|| forget_untranslated(&sources)).unwrap(), 0);
    let left = router.run(|| connections_by_source(&BTreeSet::new())).unwrap();
    assert_eq!((left.get(&[10, 0, 0, 2].into()), left.get(&[10, 0, 0, 3].into())), (Some(&1), Some(&1)));
}

proptest! {
    #[test]
    fn garbage_is_an_error_or_nothing(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = (live_source(&bytes), untranslated_source(&bytes));
    }
}

mod flows {
    use std::net::UdpSocket;
    use std::time::Duration;

    use nix::sys::socket::{setsockopt, sockopt};
    use testbed_netns::Namespace;

    use super::*;

    fn addresses() -> impl Strategy<Value = [IpAddr; 4]> {
        let ipv4 = any::<[[u8; 4]; 4]>().prop_map(|all| all.map(IpAddr::from));
        let ipv6 = any::<[[u8; 16]; 4]>().prop_map(|all| all.map(IpAddr::from));
        prop_oneof![ipv4, ipv6]
    }

    fn ports() -> impl Strategy<Value = Ports> {
        prop_oneof![
            any::<(u16, u8, u8)>().prop_map(|(id, kind, code)| Ports::Icmp { id, kind, code }),
            Just(Ports::None),
            any::<(u16, u16)>().prop_map(|(source, destination)| Ports::Ports { source, destination }),
        ]
    }

    fn flow() -> impl Strategy<Value = Flow> {
        let tcp = proptest::option::of(any::<(u8, [u8; 2], [u8; 2])>());
        let tcp = tcp.prop_map(|tcp| tcp.map(|(state, scales, flags)| Tcp { state, scales, flags }));
        let counters = proptest::option::of(any::<[(u64, u64); 2]>());
        let state = (any::<(u16, u32, u32, Option<u32>, Option<u32>)>(), tcp, counters);
        (addresses(), ports(), ports(), any::<u8>(), state).prop_map(
            |([a, b, c, d], ports, replies, protocol, (numbers, tcp, counters))| {
                let (zone, status, mark, timeout, id) = numbers;
                let original = Tuple { protocol, source: a, destination: b, ports };
                let reply = Tuple { protocol, source: c, destination: d, ports: replies };
                let counters =
                    counters.map(|both| both.map(|(packets, bytes)| FlowCounters { packets, bytes }));
                Flow { original, reply, zone, status, tcp, timeout, mark, id, counters }
            },
        )
    }

    proptest! {
        #[test]
        fn a_connection_that_is_written_is_read(flow in flow()) {
            prop_assert_eq!(Flow::decode(&flow.encode().unwrap()), Ok(flow));
        }

        #[test]
        fn the_inverse_of_an_inverse_is_the_tuple(flow in flow()) {
            if let Some(inverse) = flow.original.inverted() {
                prop_assert_eq!(inverse.inverted(), Some(flow.original));
            }
        }

        #[test]
        fn hostile_connections_are_refused_or_read(
            bytes in proptest::collection::vec(any::<u8>(), 0..200), flow in flow(), at: prop::sample::Index, byte: u8,
        ) {
            let _ = (Flow::decode(&bytes), count_events(&bytes));
            let mut near = flow.encode().unwrap();
            let at = at.index(near.len());
            near[at] = byte;
            let _ = Flow::decode(&near);
            let _ = Flow::decode(&near[..at]);
        }
    }

    /// A client, a router that translates it to 192.0.2.9 and 2001:db8::9, and a server.
    struct Bed {
        client: Namespace,
        router: Namespace,
        server: Namespace,
    }

    impl Bed {
        fn new() -> Self {
            let [client, router, server] = std::array::from_fn(|_| Namespace::new());
            client.veth("eth0", &router, "client");
            server.veth("eth0", &router, "server");
            router.sh("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
                ip addr add 10.0.0.1/24 dev client; ip addr add 192.0.2.1/24 dev server
                ip addr add fd00::1/64 dev client nodad; ip addr add 2001:db8::1/64 dev server nodad
                ip addr add 192.0.2.9/32 dev server; ip addr add 2001:db8::9/128 dev server nodad
                nft 'table inet t { chain n { type nat hook postrouting priority 100; oifname server meta nfproto ipv4 snat ip to 192.0.2.9; oifname server meta nfproto ipv6 snat ip6 to 2001:db8::9; }; }'");
            client.sh("ip addr add 10.0.0.2/24 dev eth0; ip addr add fd00::2/64 dev eth0 nodad
                ip route add default via 10.0.0.1; ip -6 route add default via fd00::1");
            server.sh("ip addr add 192.0.2.2/24 dev eth0; ip addr add 2001:db8::2/64 dev eth0 nodad");
            Self { client, router, server }
        }

        /// A connection of each kind.
        fn connect(&self) -> (std::net::TcpStream, std::net::TcpStream) {
            let listener = self.server.run(|| std::net::TcpListener::bind("192.0.2.2:80")).unwrap();
            let client = self.client.run(|| std::net::TcpStream::connect("192.0.2.2:80")).unwrap();
            let (server, _) = listener.accept().unwrap();
            let receiver = self.server.run(|| UdpSocket::bind("[2001:db8::2]:53")).unwrap();
            let sender = self.client.run(|| UdpSocket::bind("[fd00::2]:4000")).unwrap();
            sender.send_to(b"x", "[2001:db8::2]:53").unwrap();
            receiver.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
            let mut byte = [0; 1];
            let (_, from) = receiver.recv_from(&mut byte).unwrap();
            assert_eq!(from.ip().to_string(), "2001:db8::9");
            receiver.send_to(b"y", from).unwrap();
            self.client.sh("ping -c 1 -W 5 192.0.2.2; ping -c 1 -W 5 2001:db8::2");
            (client, server)
        }
    }

    /// Lines of `conntrack -L`, one for each connection, without counters of time.
    fn listed(namespace: &Namespace) -> BTreeSet<String> {
        let lines =
            ["ipv4", "ipv6"].map(|family| namespace.sh(&format!("conntrack -L -f {family} 2>/dev/null")));
        let words = |line: &str| {
            let mut words: Vec<&str> = line.split_whitespace().collect();
            words.remove(2);
            words.retain(|word| !word.starts_with("use="));
            words.join(" ")
        };
        lines.iter().flat_map(|lines| lines.lines()).map(words).collect()
    }

    const TRANSLATED: [&str; 2] = ["192.0.2.9", "2001:db8::9"];

    fn copied(bed: &Bed) -> Vec<Flow> {
        let read = || {
            let addresses = TRANSLATED.map(|address| address.parse().unwrap()).into();
            ConnectionTable::open().unwrap().translated_to(&addresses).unwrap()
        };
        bed.router.run(read)
    }

    #[test]
    fn what_is_listed_can_be_added_elsewhere_and_conntrack_prints_the_same() {
        let bed = Bed::new();
        let _connection = bed.connect();
        let flows = copied(&bed);
        assert_eq!(flows.len(), 4, "{flows:?}");
        assert!(flows.iter().all(|flow| flow.status & STATUS_SOURCE_TRANSLATED != 0));
        let by_source = |except: &[&str]| {
            bed.router.run(|| {
                connections_by_source(&except.iter().map(|it| it.parse().unwrap()).collect()).unwrap()
            })
        };
        let client: IpAddr = "10.0.0.2".parse().unwrap();
        assert_eq!((by_source(&[]).get(&client), by_source(&TRANSLATED[..1]).get(&client)), (Some(&2), None));
        assert_eq!(by_source(&TRANSLATED).get(&"fd00::2".parse().unwrap()), None);
        let other = Namespace::new();
        let apply = |changes: Vec<TableChange>| -> Vec<Option<i32>> {
            other.run(|| {
                let outcomes = ConnectionTable::open().unwrap().apply(&changes).unwrap();
                outcomes.into_iter().map(|it| it.err().and_then(|error| error.errno())).collect()
            })
        };
        assert_eq!(apply(flows.iter().copied().map(TableChange::Add).collect()), vec![None; 4]);
        // The other kernel has no rule that translates; what it prints comes from what was added.
        assert_eq!(listed(&other), listed(&bed.router));
        assert_eq!(apply(flows.iter().copied().map(TableChange::Add).collect()), vec![Some(libc::EEXIST); 4]);
        let mut tcp = *flows.iter().find(|flow| flow.tcp.is_some()).unwrap();
        assert_eq!(tcp.tcp.unwrap().state, 3, "established");
        tcp.tcp.as_mut().unwrap().state = 4;
        assert_eq!(apply(vec![TableChange::Update(tcp)]), [None]);
        assert!(listed(&other).iter().any(|line| line.contains("FIN_WAIT")), "{:?}", listed(&other));
        let found = other.run(|| ConnectionTable::open().unwrap().get(&tcp.original)).unwrap().unwrap();
        assert_eq!((found.reply, found.tcp.unwrap().state), (tcp.reply, 4));
        let mut deletions: Vec<_> =
            flows[1..].iter().map(|flow| TableChange::Delete(flow.original)).collect();
        deletions.push(TableChange::DeleteReply(flows[0].reply));
        assert_eq!(apply(deletions), vec![None; 4]);
        assert_eq!(listed(&other), BTreeSet::new());
        assert_eq!(apply(vec![TableChange::Update(tcp)]), [Some(libc::ENOENT)]);
        assert_eq!(other.run(|| ConnectionTable::open().unwrap().get(&tcp.original)).unwrap(), None);
    }

    #[test]
    fn what_happens_to_connections_is_reported_in_order() {
        let bed = Bed::new();
        let mut subscription = bed.router.run(|| ConnectionEvents::open().unwrap());
        let mut of_ends = bed.router.run(|| ConnectionEvents::open_new_destroyed().unwrap());
        let (client, server) = bed.connect();
        drop((client, server));
        bed.router.sh("sleep 0.3; conntrack -F 2>/dev/null");
        let mut events = Vec::new();
        assert!(subscription.read(1000, &mut events).unwrap());
        let mut begins_and_ends = Vec::new();
        assert!(of_ends.read(1000, &mut begins_and_ends).unwrap());
        let without = events.iter().filter(|event| !matches!(event, ConnectionEvent::Updated(_)));
        let without: Vec<_> = without.copied().collect();
        assert!(begins_and_ends.starts_with(&without), "{begins_and_ends:?} {without:?}");
        assert!(!begins_and_ends.iter().any(|event| matches!(event, ConnectionEvent::Updated(_))));
        let of_tcp = |event: &ConnectionEvent| match event {
            ConnectionEvent::Destroyed(flow) if flow.original.protocol == 6 => Some("destroyed".to_owned()),
            ConnectionEvent::New(flow) if flow.original.protocol == 6 => Some("new".to_owned()),
            ConnectionEvent::Updated(flow) => flow.tcp.map(|tcp| format!("state {}", tcp.state)),
            _ => None,
        };
        let seen: Vec<String> = events.iter().filter_map(of_tcp).collect();
        assert_eq!(
            (seen.first().unwrap(), seen.last().unwrap()),
            (&"new".to_owned(), &"destroyed".to_owned())
        );
        assert!(seen.contains(&"state 3".to_owned()), "{seen:?}");
        for protocol in [1, 17, 58] {
            let is_new = |event: &&ConnectionEvent| matches!(event, ConnectionEvent::New(flow) if flow.original.protocol == protocol);
            assert!(events.iter().any(|event| is_new(&event)), "protocol {protocol}: {events:?}");
        }
    }

    #[test]
    fn notifications_that_are_lost_are_reported() {
        let bed = Bed::new();
        let mut subscription = bed.router.run(|| ConnectionEvents::open().unwrap());
        setsockopt(&subscription, sockopt::RcvBuf, &4096).unwrap();
        for _ in 0..8 {
            let _connection = bed.connect();
            bed.router.sh("conntrack -F 2>/dev/null");
        }
        let mut events = Vec::new();
        assert!(subscription.read(1000, &mut events).unwrap());
        assert!(events.contains(&ConnectionEvent::Missed), "{events:?}");
    }
}
