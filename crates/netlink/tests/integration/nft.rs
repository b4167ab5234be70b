//! Transactions against the real kernel, each test in a network namespace of its own.

use std::collections::BTreeMap;

use fairlead_address::{IntervalSet, IpFamily};
use fairlead_netlink::nftables::{
    AddressEnd, Chain, Comparison, Elements, EndpointMap, Expression, Header, Hook, Meta, Rule, STATE_NEW,
    Table, change_elements, change_map, commit, counters, create, delete, read,
};
use fairlead_netlink::{Family, Socket};
use ipnet::IpNet;

fn in_namespace(test: impl FnOnce(&mut Socket) + Send) {
    testbed_netns::in_namespace(|| test(&mut Socket::open(Family::Netfilter).unwrap()));
}

fn intervals(family: IpFamily, nets: &[&str]) -> IntervalSet {
    let nets: Vec<IpNet> = nets.iter().map(|net| net.parse().unwrap()).collect();
    IntervalSet::from_prefixes(family, &nets)
}

fn table(expressions: Vec<Expression>) -> Table {
    let chain = Chain { hook: Hook::RouteOutput, priority: -150, rules: vec![Rule(expressions)] };
    Table {
        name: "probe".into(),
        sets: BTreeMap::from([("four".into(), intervals(IpFamily::V4, &["10.0.0.0/8"]))]),
        timed: BTreeMap::new(),
        maps: BTreeMap::new(),
        chains: BTreeMap::from([("out".into(), chain)]),
    }
}

fn lookup(set: &str) -> Vec<Expression> {
    vec![
        Expression::LoadPayload { header: Header::Network, offset: 16, length: 4 },
        Expression::Lookup(set.into()),
        Expression::Accept,
    ]
}

#[test]
fn a_table_is_read_as_it_was_made() {
    in_namespace(|socket| {
        let wanted = table(lookup("four"));
        assert_eq!(read(socket, "probe").unwrap(), None);
        for _ in 0..2 {
            commit(socket, &create(&wanted).unwrap()).unwrap();
            let present = read(socket, "probe").unwrap().unwrap();
            assert_eq!(present, wanted.clone().into());
        }
        for _ in 0..2 {
            commit(socket, &delete("probe").unwrap()).unwrap();
            assert_eq!(read(socket, "probe").unwrap(), None);
        }
    });
}

#[test]
fn connections_of_an_address_are_counted_and_more_are_rejected() {
    let over = Expression::ConnectionsOver { set: "clients".into(), family: IpFamily::V4, most: 2 };
    let source = Expression::load_address(IpFamily::V4, AddressEnd::Source);
    let state = STATE_NEW.to_ne_bytes().to_vec();
    let mut rule = vec![Expression::LoadConnectionState];
    rule.push(Expression::Compare(Comparison::Equal, state));
    rule.extend([source, over, Expression::Counter, Expression::Reject]);
    let mut wanted = table(rule.clone());
    wanted.chains.get_mut("out").unwrap().hook = Hook::FilterInput;
    in_namespace(|socket| {
        commit(socket, &create(&wanted).unwrap()).unwrap();
        assert_eq!(read(socket, "probe").unwrap().unwrap(), wanted.clone().into());
        let listed = testbed_netns::sh("nft list table inet probe");
        assert!(listed.contains("ct count over 2 } counter"), "{listed}");
        let server = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
        let to = server.local_addr().unwrap();
        let mut sent = (0..4).map(|_| {
            let client = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            client.connect(to).unwrap();
            client.send(b"x").unwrap();
            let refused = client.send(b"x").is_err();
            (client, refused)
        });
        let refused: Vec<bool> = sent.by_ref().map(|(_client, refused)| refused).collect();
        assert_eq!(refused, [false, false, true, true]);
        let counted = counters(socket, "probe").unwrap();
        assert!(counted[&Rule(rule).fingerprint()].packets >= 2);
        testbed_netns::sh("conntrack -F 2>/dev/null");
        // The kernel looks for those that have ended now and then, at the next connection.
        let is_accepted = |_| {
            std::thread::sleep(std::time::Duration::from_millis(20));
            let client = std::net::UdpSocket::bind("127.0.0.1:0").unwrap();
            client.connect(to).unwrap();
            client.send(b"x").is_ok() && client.send(b"x").is_ok()
        };
        assert!((0..100).any(is_accepted), "the others have ended");
    });
}

#[test]
fn a_map_is_read_as_it_was_made_and_changed() {
    let map = |ports: &[(u16, u16)]| -> EndpointMap {
        ports.iter().map(|(key, port)| (format!("192.0.2.1:{key}").parse().unwrap(), *port)).collect()
    };
    in_namespace(|socket| {
        let mut wanted = table(vec![
            Expression::load_address(IpFamily::V4, AddressEnd::Destination),
            Expression::LoadPortBehind { offset: 2 },
            Expression::LookupMap("ports".into()),
            Expression::Accept,
        ]);
        let mut present = EndpointMap::new();
        wanted.maps.insert("ports".into(), present.clone());
        commit(socket, &create(&wanted).unwrap()).unwrap();
        let many: Vec<(u16, u16)> = (1..3000).map(|port| (port, port + 1)).collect();
        for next in [map(&[(1, 2), (3, 4)]), map(&[(1, 7), (5, 6)]), map(&many), map(&[])] {
            commit(socket, &change_map("probe", "ports", &present, &next).unwrap()).unwrap();
            let read = read(socket, "probe").unwrap().unwrap();
            assert_eq!((&read.shape, &read.maps["ports"]), (&wanted.shape(), &next));
            present = next;
        }
        wanted.maps.insert("ports".into(), map(&many));
        commit(socket, &create(&wanted).unwrap()).unwrap();
        assert_eq!(read(socket, "probe").unwrap().unwrap().maps, wanted.maps);
    });
}

#[test]
fn a_refused_message_is_named_and_nothing_is_changed() {
    in_namespace(|socket| {
        commit(socket, &create(&table(lookup("four"))).unwrap()).unwrap();
        let before = read(socket, "probe").unwrap();
        let error = commit(socket, &create(&table(lookup("absent"))).unwrap()).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("cannot add rule 1 of chain inet probe out: No such file"), "{text}");
        assert_eq!(error.errno(), Some(nix::libc::ENOENT));
        assert_eq!(read(socket, "probe").unwrap(), before, "the transaction left a trace");

        let none = IntervalSet::empty(IpFamily::V4);
        let absent = intervals(IpFamily::V4, &["192.0.2.0/24"]);
        let change = |set: &str, present: &IntervalSet, wanted: &IntervalSet| {
            change_elements("probe", set, &Elements::from(present.clone()).difference(wanted)).unwrap()
        };
        let error = commit(socket, &change("four", &absent, &none)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("cannot delete 192.0.2.0/24 from set inet probe four: No such file"), "{text}");

        let error = commit(socket, &change("five", &none, &absent)).unwrap_err();
        assert!(error.to_string().contains("cannot add 192.0.2.0/24 to set inet probe five"), "{error}");

        let overlapping = intervals(IpFamily::V4, &["10.1.0.0/16"]);
        let error = commit(socket, &change("four", &none, &overlapping)).unwrap_err();
        assert!(error.is_existing() && error.to_string().contains("10.1.0.0/16"), "{error}");
        assert_eq!(read(socket, "probe").unwrap(), before);
    });
}

#[test]
fn both_families_at_full_chunks() {
    in_namespace(|socket| {
        let v4: Vec<IpNet> = (0..3001u32)
            .map(|n| IpNet::new(std::net::Ipv4Addr::from_bits(n * 2).into(), 32).unwrap())
            .collect();
        let v6: Vec<IpNet> = (0..3001u128)
            .map(|n| IpNet::new(std::net::Ipv6Addr::from_bits(n * 2).into(), 128).unwrap())
            .collect();
        let mut wanted = table(vec![Expression::LoadMeta(Meta::Mark), Expression::Accept]);
        wanted.sets.insert("four".into(), IntervalSet::from_prefixes(IpFamily::V4, &v4));
        wanted.sets.insert("six".into(), IntervalSet::from_prefixes(IpFamily::V6, &v6));
        commit(socket, &create(&wanted).unwrap()).unwrap();
        let present = read(socket, "probe").unwrap().unwrap();
        assert_eq!(present, wanted.into());
        assert_eq!(present.sets["six"].covered().prefixes(), v6);
    });
}

#[test]
fn every_change_arrives() {
    use proptest::prelude::*;
    use proptest::test_runner::{Config, TestRunner};
    // Crowded, so that intervals grow, shrink, split, join and touch both ends of the address space.
    let net = (prop_oneof![0u32..48, (0u32..48).prop_map(|n| u32::MAX - n)], 26u8..=32)
        .prop_map(|(bits, length)| IpNet::new(std::net::Ipv4Addr::from_bits(bits).into(), length).unwrap());
    let steps = proptest::collection::vec(proptest::collection::vec(net, 0..12), 1..6);
    in_namespace(|socket| {
        let mut runner =
            TestRunner::new(Config { cases: 64, failure_persistence: None, ..Config::default() });
        let socket = std::cell::RefCell::new(socket);
        runner
            .run(&steps, |steps| {
                let mut socket = socket.borrow_mut();
                let mut wanted = table(lookup("four"));
                wanted.sets.insert("four".into(), IntervalSet::empty(IpFamily::V4));
                commit(&mut socket, &create(&wanted).unwrap()).unwrap();
                let mut present = Elements::empty(IpFamily::V4);
                for nets in steps {
                    let goal = IntervalSet::from_prefixes(IpFamily::V4, &nets);
                    let difference = present.difference(&goal);
                    let messages = change_elements("probe", "four", &difference).unwrap();
                    commit(&mut socket, &messages)
                        .map_err(|e| TestCaseError::fail(format!("{e} from {present:?}")))?;
                    let expected = present.after(&difference);
                    present = read(&mut socket, "probe").unwrap().unwrap().sets.remove("four").unwrap();
                    prop_assert_eq!(&present, &expected);
                    prop_assert_eq!(present.covered(), goal);
                }
                Ok(())
            })
            .unwrap();
    });
}
