//! Round trips of encoded messages, and hostile input to the decoder.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::IpNet;
use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;

use super::*;
use crate::Message;

fn ipv4() -> impl Strategy<Value = IpAddr> {
    any::<u32>().prop_map(|bits| Ipv4Addr::from_bits(bits).into())
}

fn ipv6() -> impl Strategy<Value = IpAddr> {
    any::<u128>().prop_map(|bits| Ipv6Addr::from_bits(bits).into())
}

/// A prefix, a gateway of any family the kernel takes for it, and a source of the same family.
fn destination() -> impl Strategy<Value = (IpNet, Option<IpAddr>, Option<IpAddr>)> {
    let network = |address, length| IpNet::new(address, length).unwrap().trunc();
    prop_oneof![
        (ipv4(), 0..=32u8, option::of(prop_oneof![ipv4(), ipv6()]), option::of(ipv4()))
            .prop_map(move |(ip, length, gateway, source)| (network(ip, length), gateway, source)),
        (ipv6(), 0..=128u8, option::of(ipv6()), option::of(ipv6()))
            .prop_map(move |(ip, length, gateway, source)| (network(ip, length), gateway, source)),
    ]
}

fn routes() -> impl Strategy<Value = Route> {
    let numbers =
        (1..=u32::MAX, option::of(1..=u32::MAX), any::<u8>(), any::<u32>(), option::of(any::<u32>()));
    (destination(), numbers, any::<u8>(), any::<u8>(), any::<bool>()).prop_map(
        |((destination, gateway, prefsrc), (table, link, protocol, metric, mtu), kind, scope, onlink)| {
            Route {
                table,
                destination,
                kind: RouteKind(kind),
                gateway,
                link,
                protocol,
                scope: Scope(scope),
                prefsrc,
                metric,
                mtu,
                onlink,
                next_hops: Vec::new(),
            }
        },
    )
}

fn rules() -> impl Strategy<Value = Rule> {
    let mark = (any::<u32>(), 1..=u32::MAX).prop_map(|(value, mask)| Mark { value, mask });
    let name = || option::of("[a-z]{1,15}");
    let limits = (any::<u8>(), any::<bool>(), option::of(0..=128u32));
    let transport = option::of((any::<u8>(), option::of(1..=u16::MAX), option::of(1..=u16::MAX)));
    let action = (transport, any::<bool>(), option::of(1..=u32::MAX));
    (destination(), 1..=u32::MAX, 1..=u32::MAX, option::of(mark), name(), name(), limits, action).prop_map(
        |(
            (prefix, ..),
            priority,
            table,
            mark,
            iif,
            oif,
            (protocol, from, suppressed_length),
            (transport, is_inverted, goto),
        )| Rule {
            family: IpFamily::of(prefix.addr()),
            priority,
            table,
            mark,
            iif,
            oif,
            source: from.then_some(prefix),
            destination: (!from).then_some(prefix),
            suppressed_length,
            protocol,
            transport: transport.map(|(protocol, source_port, destination_port)| Transport {
                protocol,
                source_port,
                destination_port,
            }),
            is_inverted,
            goto,
            has_more: false,
        },
    )
}

fn every_decoder(bytes: &[u8]) {
    let _ = decode::link(bytes);
    let _ = decode::address(bytes);
    let _ = decode::route(bytes);
    let _ = decode::rule(bytes);
}

fn samples() -> Vec<Message> {
    let mut route = Route::via(116, 30, "10.0.0.0/24".parse().unwrap(), "fe80::1".parse().unwrap(), 3);
    route.mtu = Some(1420);
    let rule = Rule {
        mark: Some(Mark { value: 0x40, mask: 0x60 }),
        iif: Some("eth0".to_owned()),
        source: Some("10.0.0.0/8".parse().unwrap()),
        ..Rule::lookup(IpFamily::V4, 32500, 180, 30)
    };
    let prefix = "fd00::1/64".parse().unwrap();
    let address = Address { link: 3, prefix, scope: Scope::UNIVERSE, flags: AddressFlags(0x200) };
    vec![
        add_route(&route),
        add_rule(&rule),
        add_address(&address),
        set_alias(3, "COIL:default:abc:eth0"),
        set_mtu(3, 1400),
        add_ip_tunnel("fairlead_ipip", "192.0.2.1".parse().unwrap(), 1480),
        add_ip_tunnel("fairlead_ip6tnl", "2001:db8::1".parse().unwrap(), 1460),
        add_ifb("fou4_0a000001", Some(MacAddress([2, 0, 0, 0, 0, 7])), 1422),
    ]
}

proptest! {
    #[test]
    fn routes_come_back_as_written(route in routes()) {
        prop_assert_eq!(decode::route(&add_route(&route).payload).unwrap(), Some(route));
    }

    #[test]
    fn proxies_come_back_as_written(address in prop_oneof![ipv4(), ipv6()], link in 1..u32::MAX, protocol: u8) {
        let proxy = Proxy { address, link, protocol };
        prop_assert_eq!(proxies::decode(&add_proxy(&proxy).payload).unwrap(), Some(proxy));
    }

    #[test]
    fn bytes_are_no_proxy_or_one(bytes in vec(any::<u8>(), 0..64)) {
        let _ = proxies::decode(&bytes);
    }

    #[test]
    fn rules_come_back_as_written(rule in rules()) {
        prop_assert_eq!(decode::rule(&add_rule(&rule).payload).unwrap(), Some(rule));
    }

    #[test]
    fn addresses_come_back_as_written(
        (prefix, ..) in destination(), link: u32, scope: u8, flags: u32
    ) {
        let address = Address { link, prefix, scope: Scope(scope), flags: AddressFlags(flags) };
        prop_assert_eq!(decode::address(&add_address(&address).payload).unwrap(), Some(address));
    }

    #[test]
    fn tunnels_come_back_as_written(local in prop_oneof![ipv4(), ipv6()], mtu: u32, name in "[a-z]{1,15}") {
        prop_assume!(!local.is_unspecified());
        let link = decode::link(&add_ip_tunnel(&name, local, mtu).payload).unwrap();
        let kind = if local.is_ipv4() { KIND_IPIP } else { KIND_IP6TNL };
        prop_assert_eq!((link.name, link.mtu, link.kind.as_deref()), (name, mtu, Some(kind)));
        prop_assert_eq!(link.tunnel, Some(TunnelEnds { local: Some(local), remote: None }));
    }

    #[test]
    fn random_bytes_are_refused_or_read_but_never_panic(bytes in vec(any::<u8>(), 0..512)) {
        every_decoder(&bytes);
    }

    /// Random bytes seldom get past the first attribute's length; damaged real messages do.
    #[test]
    fn damaged_messages_are_refused_or_read_but_never_panic(
        which in 0..7usize, cut in 0..400usize, flips in vec((any::<usize>(), any::<u8>()), 0..6)
    ) {
        let mut bytes = samples()[which].payload.clone();
        bytes.truncate(cut);
        for (at, value) in flips {
            if let Some(length) = std::num::NonZeroUsize::new(bytes.len()) {
                bytes[at % length] = value;
            }
        }
        every_decoder(&bytes);
    }

    /// The list of next hops has a format of its own.
    #[test]
    fn multipath_never_panics_nor_hangs(hops in vec(any::<u8>(), 0..128)) {
        let route = Route::onto(254, 3, IpFamily::V4.everything(), 1);
        let mut bytes = add_route(&route).payload;
        bytes.extend_from_slice(&(hops.len() as u16 + 4).to_ne_bytes());
        bytes.extend_from_slice(&nix::libc::RTA_MULTIPATH.to_ne_bytes());
        bytes.extend_from_slice(&hops);
        every_decoder(&bytes);
    }
}

#[test]
fn an_ifb_link_comes_back_as_written() {
    let mac = MacAddress([2, 0, 0, 0, 0, 7]);
    let link = decode::link(&add_ifb("fou4_0a000001", Some(mac), 1422).payload).unwrap();
    assert_eq!((link.name.as_str(), link.kind.as_deref()), ("fou4_0a000001", Some(KIND_IFB)));
    assert_eq!((link.mac, link.mtu), (Some(mac), 1422));
}

#[test]
fn the_canonical_form_is_what_the_kernel_shows() {
    let v4 = Route::onto(116, 30, "10.0.0.9/24".parse().unwrap(), 3).canonical();
    assert_eq!((v4.destination.to_string().as_str(), v4.metric, v4.scope), ("10.0.0.0/24", 0, Scope::LINK));
    let mut v6 = Route::onto(116, 30, "fd00::9/64".parse().unwrap(), 3);
    v6.scope = Scope::LINK;
    let v6 = v6.canonical();
    assert_eq!(
        (v6.destination.to_string().as_str(), v6.metric, v6.scope),
        ("fd00::/64", 1024, Scope::UNIVERSE)
    );
}

#[test]
fn a_link_local_address_follows_rfc_4291_appendix_a() {
    let mac = MacAddress([0x34, 0x56, 0x78, 0x9a, 0xbc, 0xde]);
    assert_eq!(mac.link_local(), "fe80::3656:78ff:fe9a:bcde".parse::<Ipv6Addr>().unwrap());
    assert_eq!(mac.to_string(), "34:56:78:9a:bc:de");
}

#[test]
fn errors_will_name_the_object() {
    let texts: Vec<_> = samples().into_iter().map(|message| message.what).collect();
    assert_eq!(
        texts,
        [
            "add route 10.0.0.0/24 via fe80::1 on link 3 in table 116",
            "add IPv4 rule 32500 for mark 0x40/0x60 from link eth0 from 10.0.0.0/8 to table 180",
            "add address fd00::1/64 on link 3",
            "set the alias of link 3 to \"COIL:default:abc:eth0\"",
            "set the MTU of link 3 to 1400",
            "add tunnel fairlead_ipip at 192.0.2.1",
            "add tunnel fairlead_ip6tnl at 2001:db8::1",
            "add the ifb link fou4_0a000001",
        ]
    );
}
