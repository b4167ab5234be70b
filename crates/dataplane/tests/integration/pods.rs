//! Pod links against the kernel. Each test has a host and pods of its own, all network namespaces.

use std::net::UdpSocket;
use std::os::fd::AsFd;

use fairlead_address::DualStackAddrs;
use fairlead_dataplane::pods::{self, Error, PodSpec, Removal};
use fairlead_dataplane::routing_ids::RoutingIds;
use fairlead_netlink::netns::Netns;
use fairlead_netlink::route::{RouteSocket, TABLE_MAIN, VethEnd, add_veth, delete_link, set_alias};
use ipnet::IpNet;
use testbed_netns::{sh_in, try_sh_in};

use crate::pods_common::{Host, NODE, NODE_V6, links, ping, spec};

#[test]
fn an_ipv6_pod_pings_the_moment_it_is_added() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    let made = host.add(&spec(&pod, "six", None, Some("fd00:1::5"))).unwrap();
    ping(&pod, NODE_V6);
    for (netns, link) in [(&pod, "eth0"), (&host.netns, made.host_name.as_str())] {
        let shown = sh_in(netns, &format!("ip -6 addr show dev {link}"));
        assert!(!shown.contains("tentative"), "{shown}");
        assert_eq!(shown.matches("inet6 fe80:").count(), 1, "{shown}");
    }
    let routes = sh_in(&pod, "ip -6 route");
    assert!(routes.contains("default via fe80::1 dev eth0"), "{routes}");
    assert!(routes.contains("fd00:1::5 dev eth0"), "{routes}");
    assert_eq!(sh_in(&pod, "ip -4 addr show dev eth0"), "", "an IPv6 pod has no IPv4");
    let table = host.table("-6");
    assert!(table.starts_with(&format!("fd00:1::5 dev {} proto 30", made.host_name)), "{table}");
    assert_eq!(host.at(|| pods::list(RoutingIds::default()).unwrap())[0].addresses.ipv4, None);
    let accept = format!("cat /proc/sys/net/ipv6/conf/{}/accept_ra", made.host_name);
    assert_eq!(host.sh(&accept).trim(), "0", "a pod must not tell the host its routes");
}

#[test]
fn an_ipv4_pod_looks_as_coil_prints_it() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    let made = host.add(&spec(&pod, "four", Some("10.1.0.5"), None)).unwrap();
    ping(&pod, NODE);
    let name = &made.host_name;
    assert!(name.len() == 12 && name.starts_with("veth"), "{name}");
    assert_eq!(host.table("-4").trim(), format!("10.1.0.5 dev {name} proto 30 scope link"));
    let shown = host.sh(&format!("ip addr show dev {name}"));
    assert!(shown.contains("inet 169.254.1.1/32 scope host"), "{shown}");
    assert!(host.sh(&format!("ip link show dev {name}")).contains("alias COIL:default:four:eth0"));
    assert!(shown.contains("mtu 1400") && shown.contains(&made.host_mac.to_string()), "{shown}");
    let routes = sh_in(&pod, "ip route");
    assert_eq!(routes.trim(), "default via 169.254.1.1 dev eth0 \n169.254.1.1 dev eth0 scope link");
    let shown = sh_in(&pod, "ip addr show dev eth0");
    assert!(shown.contains("inet 10.1.0.5/32 scope global eth0"), "{shown}");
    assert!(shown.contains("mtu 1400") && shown.contains(&made.container_mac.to_string()), "{shown}");
    assert_eq!((made.mtu, made.container_mac == made.host_mac), (1400, false));
}

/// On hosts that take their routes from a router although they forward, as a node does.
#[test]
fn a_pod_of_any_family_cannot_tell_the_host_its_routes() {
    let host = Host::new();
    host.sh("sysctl -qw net.ipv6.conf.default.accept_ra=2 net.ipv6.conf.all.accept_ra=2");
    for (id, ipv4, ipv6) in [("four", Some("10.1.0.5"), None), ("six", None, Some("fd00:1::5"))] {
        let pod = Netns::create().unwrap();
        let name = host.add(&spec(&pod, id, ipv4, ipv6)).unwrap().host_name;
        assert_eq!(host.sh(&format!("cat /proc/sys/net/ipv6/conf/{name}/accept_ra")).trim(), "0", "{id}");
    }
}

#[test]
fn the_host_talks_to_pods_from_the_nodes_address() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    host.add(&spec(&pod, "dual", Some("10.1.0.5"), Some("fd00:1::5"))).unwrap();
    // A port of the kernel's choice: a program that another test starts holds the first socket until it runs.
    for (to, any, node) in [("10.1.0.5", "0.0.0.0:0", NODE), ("fd00:1::5", "[::]:0", NODE_V6)] {
        let server = pod.run(|| UdpSocket::bind(any).unwrap()).unwrap();
        server.set_read_timeout(Some(std::time::Duration::from_secs(10))).unwrap();
        let port = server.local_addr().unwrap().port();
        host.at(|| {
            UdpSocket::bind(any).unwrap().send_to(b"x", (to, port)).unwrap();
        });
        let (_, from) = server.recv_from(&mut [0; 8]).unwrap();
        assert_eq!(from.ip().to_string(), node);
    }
}

#[test]
fn pods_reach_each_other_and_the_host_in_both_families() {
    let host = Host::new();
    let pair = [Netns::create().unwrap(), Netns::create().unwrap()];
    host.add(&spec(&pair[0], "a", Some("10.1.0.5"), Some("fd00:1::5"))).unwrap();
    host.add(&spec(&pair[1], "b", Some("10.1.0.6"), Some("fd00:1::6"))).unwrap();
    for (pod, other) in [(&pair[0], 6), (&pair[1], 5)] {
        for to in [format!("fd00:1::{other}"), format!("10.1.0.{other}"), NODE.into(), NODE_V6.into()] {
            ping(pod, &to);
        }
    }
    for to in ["10.1.0.5", "10.1.0.6", "fd00:1::5", "fd00:1::6"] {
        ping(&host.netns, to);
    }
}

#[test]
fn pods_are_listed_from_the_kernel_alone_and_removed_once() {
    let host = Host::new();
    let three: Vec<_> = (0..3).map(|_| Netns::create().unwrap()).collect();
    let specs = [
        spec(&three[0], "four", Some("10.1.0.5"), None),
        spec(&three[1], "six", None, Some("fd00:1::5")),
        PodSpec { pool: "internet".into(), ..spec(&three[2], "dual", Some("10.1.0.7"), Some("fd00:1::7")) },
    ];
    let made: Vec<_> = specs.iter().map(|spec| host.add(spec).unwrap()).collect();
    let listed = host.at(|| pods::list(RoutingIds::default()).unwrap());
    assert_eq!(listed.len(), 3);
    for (spec, made) in specs.iter().zip(&made) {
        let pod = listed.iter().find(|pod| pod.container_id == spec.container_id).unwrap();
        assert_eq!((&pod.pool, &pod.ifname, pod.addresses), (&spec.pool, &spec.ifname, spec.addresses));
        assert_eq!((&pod.host_name, pod.host_index), (&made.host_name, made.host_index));
    }
    assert!(host.at(|| pods::remove("four", "eth0").unwrap()));
    assert!(!host.at(|| pods::remove("four", "eth0").unwrap()), "the second time there is nothing");
    assert!(!host.at(|| pods::remove("six", "eth1").unwrap()), "another interface is another link");
    assert!(host.at(|| pods::remove("dual", "eth0").unwrap()));
    assert_eq!(links(&three[0]), 0);
    assert_eq!(host.table("-4"), "");
    let rest = host.at(|| pods::list(RoutingIds::default()).unwrap());
    assert_eq!(rest.iter().map(|pod| pod.container_id.as_str()).collect::<Vec<_>>(), ["six"]);
}

/// A program that asks for a removal need not wait for the kernel's acknowledgement.
#[test]
fn a_removal_is_over_as_soon_as_nothing_of_the_pod_is_left() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    let spec = spec(&pod, "a", Some("10.1.0.5"), Some("fd00:1::5"));
    for _ in 0..20 {
        host.add(&spec).unwrap();
        let removal = host.at(|| Removal::find("a", "eth0").unwrap());
        assert!(removal.is_needed() && !host.at(|| removal.is_over()));
        std::thread::scope(|scope| {
            let acknowledged = scope.spawn(|| host.at(|| removal.apply().unwrap()));
            host.at(|| {
                while !removal.is_over() {
                    assert!(!acknowledged.is_finished() || removal.is_over(), "acknowledged and still there");
                }
            });
            assert_eq!((host.table("-4"), host.table("-6")), (String::new(), String::new()));
            assert!(try_sh_in(&host.netns, "ping -c 1 -W 1 10.1.0.5").is_err());
            // The same container may come back at once, whether the kernel has acknowledged or not.
            host.add(&spec).unwrap();
            ping(&host.netns, "10.1.0.5");
            acknowledged.join().unwrap();
        });
        assert!(host.at(|| pods::remove("a", "eth0").unwrap()), "the second one is there");
    }
    assert_eq!(links(&host.netns), 1, "only the uplink is left");
}

#[test]
fn links_of_others_are_neither_listed_nor_removed() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    let mut socket = RouteSocket::open_in(&host.netns).unwrap();
    for (index, alias) in
        ["COIL::abc:eth0", "COIL:default:abc", "COIL:default:abc:eth0:x", "something"].iter().enumerate()
    {
        let (name, peer) = (format!("other{index}"), format!("eth{}", index + 1));
        let end = |name| VethEnd { name, mac: None, mtu: None, group: 0 };
        socket.apply(&[add_veth(&end(&name), &end(&peer), pod.as_fd())]).unwrap();
        let made = socket.link_by_name(&name).unwrap().unwrap();
        socket.apply(&[set_alias(made.index, alias)]).unwrap();
    }
    assert_eq!(host.at(|| pods::list(RoutingIds::default()).unwrap()), []);
    assert!(!host.at(|| pods::remove("abc", "eth0").unwrap()));
    assert_eq!(links(&pod), 4);
}

#[test]
fn a_repeated_add_replaces_what_was_there() {
    let (host, old, new) = (Host::new(), Netns::create().unwrap(), Netns::create().unwrap());
    let first = host.add(&spec(&old, "a", Some("10.1.0.5"), Some("fd00:1::5"))).unwrap();
    let again = host.add(&spec(&old, "a", Some("10.1.0.5"), Some("fd00:1::5"))).unwrap();
    assert_eq!((&first.host_name, first.container_mac), (&again.host_name, again.container_mac));
    assert_ne!(first.host_index, again.host_index);
    // The runtime may have made a new sandbox under the same name, with another address.
    host.add(&spec(&new, "a", Some("10.1.0.6"), None)).unwrap();
    assert_eq!((links(&old), links(&new)), (0, 1));
    ping(&new, NODE);
    let listed = host.at(|| pods::list(RoutingIds::default()).unwrap());
    let addresses: Vec<_> = listed.iter().map(|pod| pod.addresses.to_string()).collect();
    assert_eq!(addresses, ["10.1.0.6"]);
}

#[test]
fn a_link_with_a_name_drawn_by_coil_is_found_by_its_alias() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    let made = host.add(&spec(&pod, "a", Some("10.1.0.5"), None)).unwrap();
    host.sh(&format!("ip link set {} down", made.host_name));
    host.sh(&format!("ip link set {} name veth0a1b2c3d", made.host_name));
    host.add(&spec(&pod, "a", Some("10.1.0.5"), None)).unwrap();
    assert_eq!(host.at(|| pods::list(RoutingIds::default()).unwrap()).len(), 1);
    ping(&pod, NODE);
}

#[test]
fn a_name_that_another_link_has_is_left_to_it() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    let wanted = spec(&pod, "a", Some("10.1.0.5"), None);
    let name = host.add(&wanted).unwrap().host_name;
    assert!(host.at(|| pods::remove("a", "eth0").unwrap()));
    let elsewhere = Netns::create().unwrap();
    let mut socket = RouteSocket::open_in(&host.netns).unwrap();
    let end = |name| VethEnd { name, mac: None, mtu: None, group: 0 };
    socket.apply(&[add_veth(&end(&name), &end("x"), elsewhere.as_fd())]).unwrap();
    let made = host.add(&wanted).unwrap();
    assert_ne!(made.host_name, name);
    ping(&pod, NODE);
    // The other link goes, and the pod's is still found although its first name is free now.
    let other = socket.link_by_name(&name).unwrap().unwrap();
    socket.apply(&[delete_link(other.index)]).unwrap();
    assert_eq!(host.add(&wanted).unwrap().host_name, name);
    assert_eq!((host.at(|| pods::list(RoutingIds::default()).unwrap()).len(), links(&pod)), (1, 1));
}

#[test]
fn an_interface_of_another_plugin_is_not_touched() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    sh_in(&pod, "ip link add eth0 type veth peer name foreign");
    let error = host.add(&spec(&pod, "a", Some("10.1.0.5"), None)).unwrap_err();
    assert!(matches!(error, Error::InterfaceExists { .. }), "{error:?}");
    assert!(
        error.to_string().starts_with("interface eth0 already exists in network namespace /proc/"),
        "{error}"
    );
    assert_eq!((links(&pod), links(&host.netns)), (2, 1), "only the uplink is on the host");
}

#[test]
fn a_missing_a_wrong_and_the_hosts_own_namespace_are_told_apart() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    let with = |netns: &str| PodSpec { netns: netns.into(), ..spec(&pod, "abc", Some("10.1.0.5"), None) };
    for (path, words) in [
        ("/run/netns/gone", "No such file"),
        ("/proc/version", "Invalid argument"),
        ("/proc/thread-self/ns/net", "the host's own"),
    ] {
        let error = host.add(&with(path)).unwrap_err();
        assert!(matches!(error, Error::Netns { .. }), "{error:?}");
        let text = error.to_string();
        assert!(text.contains(path) && text.contains("abc") && text.contains(words), "{text}");
    }
    assert_eq!(links(&host.netns), 1, "only the uplink");
}

#[test]
fn what_cannot_be_is_refused_before_anything_is_made() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    let good = spec(&pod, "abc", Some("10.1.0.5"), Some("fd00:1::5"));
    let bad = [
        PodSpec { container_id: "a:b".into(), ..good.clone() },
        PodSpec { container_id: String::new(), ..good.clone() },
        PodSpec { pool: String::new(), ..good.clone() },
        PodSpec { ifname: "../../x".into(), ..good.clone() },
        PodSpec { ifname: "sixteen-bytes-it".into(), ..good.clone() },
        PodSpec { addresses: DualStackAddrs::default(), ..good.clone() },
        PodSpec { mtu: Some(1279), ..good.clone() },
        PodSpec { container_id: "x".repeat(250), ..good.clone() },
    ];
    for spec in bad {
        let error = host.add(&spec).unwrap_err();
        assert!(matches!(error, Error::Invalid { .. }), "{spec:?}: {error:?}");
    }
    assert_eq!((links(&host.netns), links(&pod)), (1, 0));
}

#[test]
fn a_failure_leaves_nothing_behind_and_says_what_the_kernel_said() {
    let host = Host::new();
    let pair = [Netns::create().unwrap(), Netns::create().unwrap()];
    host.add(&spec(&pair[0], "a", Some("10.1.0.5"), None)).unwrap();
    // The same address again: the last step on the host fails.
    let error = host.add(&spec(&pair[1], "b", Some("10.1.0.5"), None)).unwrap_err();
    let text = error.to_string();
    assert!(matches!(error, Error::Kernel { .. }), "{error:?}");
    assert!(
        text.contains("container b") && text.contains("10.1.0.5/32") && text.contains("table 116"),
        "{text}"
    );
    assert_eq!((links(&host.netns), links(&pair[1])), (2, 0));
    ping(&pair[0], NODE);
    let error = host.add(&PodSpec { mtu: Some(70_000), ..spec(&pair[1], "b", Some("10.1.0.6"), None) });
    let text = error.unwrap_err().to_string();
    assert!(text.contains("add veth pair") && text.contains('('), "the kernel's words are missing: {text}");
    assert_eq!((links(&host.netns), links(&pair[1])), (2, 0));
}

#[test]
fn a_namespace_where_ipv6_is_disabled_by_default_gets_it() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    sh_in(&pod, "sysctl -qw net.ipv6.conf.default.disable_ipv6=1");
    host.add(&spec(&pod, "a", None, Some("fd00:1::5"))).unwrap();
    ping(&pod, NODE_V6);
}

#[test]
fn a_pod_whose_namespace_vanished_is_gone_by_itself() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    host.add(&spec(&pod, "a", Some("10.1.0.5"), None)).unwrap();
    drop(pod);
    // The kernel takes namespaces down in the background.
    for _ in 0..1000 {
        if host.at(|| pods::list(RoutingIds::default()).unwrap()).is_empty() {
            assert!(!host.at(|| pods::remove("a", "eth0").unwrap()));
            return;
        }
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    panic!("the pod outlived its namespace");
}

#[test]
fn many_pods_start_side_by_side_on_a_full_node() {
    let host = Host::new();
    let pods: Vec<_> = (0..120u8).map(|_| Netns::create().unwrap()).collect();
    let started = std::time::Instant::now();
    std::thread::scope(|scope| {
        for chunk in 0..4 {
            let (host, pods) = (&host, &pods);
            scope.spawn(move || {
                for n in (chunk..120).step_by(4) {
                    let (v4, v6) = (format!("10.1.0.{n}"), format!("fd00:1::{n}"));
                    host.add(&spec(&pods[n], &format!("pod{n}"), Some(&v4), Some(&v6))).unwrap();
                }
            });
        }
    });
    println!("120 dual-stack pods in {:?}", started.elapsed());
    let listed = host.at(|| pods::list(RoutingIds::default()).unwrap());
    assert_eq!(listed.len(), 120);
    assert!(listed.iter().all(|pod| pod.addresses.ipv4.is_some() && pod.addresses.ipv6.is_some()));
    ping(&pods[0], "fd00:1::119");
    ping(&pods[119], "10.1.0.0");
    let one = Netns::create().unwrap();
    let started = std::time::Instant::now();
    host.add(&spec(&one, "one-more", Some("10.1.0.200"), Some("fd00:1::200"))).unwrap();
    println!("one more beside them in {:?}", started.elapsed());
}

#[test]
fn inspection_shows_both_ends() {
    let (host, pod) = (Host::new(), Netns::create().unwrap());
    let spec = spec(&pod, "seen", Some("10.1.0.9"), Some("fd00:1::9"));
    let made = host.add(&spec).unwrap();
    let inspect = || {
        host.at(|| {
            pods::inspect(RoutingIds::default(), ("seen", "eth0"), &spec.netns, &[TABLE_MAIN]).unwrap()
        })
    };
    let seen = inspect();
    assert_eq!(inspect(), seen);
    let addresses: [IpNet; 2] = ["10.1.0.9/32".parse().unwrap(), "fd00:1::9/128".parse().unwrap()];
    let (host_end, pod_end) = (seen.host.unwrap(), seen.pod.unwrap());
    assert_eq!(
        (host_end.name, host_end.mac, host_end.up),
        (made.host_name.clone(), Some(made.host_mac), true)
    );
    assert_eq!((pod_end.name.as_str(), pod_end.mac, pod_end.up), ("eth0", Some(made.container_mac), true));
    for address in addresses {
        assert!(seen.led_to_pod.contains(&address) && pod_end.addresses.contains(&address), "{address}");
    }
    assert_eq!(seen.pod_routes.iter().filter(|route| route.destination.prefix_len() == 0).count(), 2);
    assert!(seen.connected);
    host.sh(&format!("ip link del {}", made.host_name));
    let gone = inspect();
    assert_eq!((gone.host, gone.pod, gone.connected), (None, None, false));
    let error = host.at(|| {
        pods::inspect(RoutingIds::default(), ("seen", "eth0"), "/nonexistent".as_ref(), &[]).unwrap_err()
    });
    assert!(matches!(error, Error::Netns { .. }), "{error}");
}

#[test]
fn a_name_that_is_the_pods_passes_to_its_next_container() {
    let (host, first, second) = (Host::new(), Netns::create().unwrap(), Netns::create().unwrap());
    let named = |netns, container, address| PodSpec {
        link_name: Some("veth0123456789a".to_owned()),
        ..spec(netns, container, Some(address), None)
    };
    assert_eq!(host.add(&named(&first, "old", "10.1.0.5")).unwrap().host_name, "veth0123456789a");
    assert_eq!(host.add(&named(&second, "new", "10.1.0.6")).unwrap().host_name, "veth0123456789a");
    ping(&second, NODE);
    assert_eq!(links(&first), 0, "the link of the container before is gone");
    assert!(!host.at(|| pods::remove("old", "eth0").unwrap()), "its late DEL hits nothing");
    ping(&second, NODE);
    assert!(host.at(|| pods::remove("new", "eth0").unwrap()));
    // A stranger's link is left alone.
    host.sh("ip link add veth0123456789a type veth peer name strangers");
    let error = host.add(&named(&second, "new", "10.1.0.6")).unwrap_err().to_string();
    assert!(error.contains("veth0123456789a") && error.contains("another program"), "{error}");
    assert_eq!((links(&second), links(&host.netns)), (0, 3));
}
