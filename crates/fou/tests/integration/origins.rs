//! Sources of what a gateway may send to its clients: the destinations that they reach by its tunnel.

use std::collections::BTreeMap;
use std::net::IpAddr;

use crate::bed::{Bed, families};
use fairlead_fou::{Counter, TunnelLink, link_name};
use ipnet::IpNet;

/// Further destinations that clients reach by the tunnel, of each family.
const FURTHER: [&str; 2] = ["203.0.113.99", "2001:db8:113::99"];
/// Addresses of the cluster, which clients reach by `eth0`.
const INSIDE: [&str; 2] = ["10.96.0.10", "fd00:96::10"];
/// Addresses that are not the client's.
const OTHERS: [&str; 2] = ["10.20.30.99", "fd00:20::99"];

/// The server, `FURTHER` and these addresses are reached by the tunnels, and all others by `eth0`.
fn origins(more: &[&str]) -> BTreeMap<IpNet, Option<IpAddr>> {
    let mut origins: BTreeMap<IpNet, Option<IpAddr>> =
        ["0.0.0.0/0", "::/0"].into_iter().map(|prefix| (prefix.parse().unwrap(), None)).collect();
    for family in families() {
        let all =
            FURTHER.into_iter().chain(more.iter().copied()).map(|address| address.parse::<IpAddr>().unwrap());
        let all = all.filter(|address| address.is_ipv4() == family.server.is_ipv4()).chain([family.server]);
        origins.extend(all.map(|address| (address.into(), Some(family.service))));
    }
    origins
}

/// Packets that the client's programs have let in, and those that they have dropped for their source and their destination.
fn counted(bed: &Bed) -> [u64; 3] {
    let counters = bed.client_tunnels.counters().unwrap();
    [Counter::Decapsulated, Counter::InnerSource, Counter::InnerDestination]
        .map(|counter| counters.of(counter))
}

/// Makes gateway 0 send whatever it wants into the tunnel to the client, if it has one of the forged sources.
fn take_over(bed: &mut Bed) {
    let (pod, tunnels) = &mut bed.gateways[0];
    let links = families().map(|family| {
        let remote = Some(family.client);
        let link = TunnelLink { local: family.gateways[0], remote, source_port: Some(5555) };
        (tunnels.add_link(family.client).unwrap(), link)
    });
    tunnels.set_links(&links.into_iter().collect()).unwrap();
    let commands = [("ip -4", 1), ("ip -6", 58)];
    for ((family, other), (ip, icmp)) in families().into_iter().zip(OTHERS).zip(commands) {
        pod.sh(&format!("{ip} route add {other} dev {} table 118", link_name(family.client)));
        // As the gateway program does it; not for outer packets, which have the same source.
        let own = family.gateways[0];
        pod.sh(&format!("{ip} rule add from {own} ipproto {icmp} lookup 118 pref 1000"));
    }
    for (source, ip) in [FURTHER, INSIDE].into_iter().flat_map(|of| of.into_iter().zip(["ip -4", "ip -6"])) {
        pod.sh(&format!("{ip} addr add {source} dev lo; {ip} rule add from {source} lookup 118 pref 1000"));
    }
}

#[test]
fn a_gateway_reaches_its_clients_only_from_their_destinations() {
    let mut bed = Bed::new();
    take_over(&mut bed);
    let sent = |bed: &Bed, source: &str, to: &str| {
        let before = counted(bed);
        bed.gateways[0].0.sh(&format!("ping -c 1 -W 1 -I {source} {to} >/dev/null || true"));
        let after = counted(bed);
        [0, 1, 2].map(|at| after[at] - before[at])
    };
    for (family, inside) in families().iter().zip(INSIDE) {
        assert_eq!(sent(&bed, inside, &family.client.to_string()), [1, 0, 0], "nothing is checked yet");
    }
    assert_eq!(bed.client_tunnels.set_origins(&origins(&[])).unwrap(), 6);
    assert_eq!(bed.client_tunnels.set_origins(&origins(&[])).unwrap(), 0);
    for (at, family) in families().into_iter().enumerate() {
        let client = family.client.to_string();
        assert_eq!(sent(&bed, INSIDE[at], &client), [0, 1, 0]);
        assert_eq!(sent(&bed, FURTHER[at], &client), [1, 0, 0]);
        assert_eq!(sent(&bed, &family.gateways[0].to_string(), &client), [1, 0, 0]);
        assert_eq!(sent(&bed, FURTHER[at], OTHERS[at]), [0, 0, 1]);
        assert!(bed.ping("", family.server) && bed.tcp_echo(family.server, 1 << 16), "{family:?}");
    }
    // A destination of the tunnel to another service.
    let mut others = origins(&[]);
    let other: IpAddr = "10.68.12.50".parse().unwrap();
    others.insert(FURTHER[0].parse::<IpAddr>().unwrap().into(), Some(other));
    assert_eq!(bed.client_tunnels.set_origins(&others).unwrap(), 1);
    assert_eq!(sent(&bed, FURTHER[0], &families()[0].client.to_string()), [0, 1, 0]);
}

/// Path MTU discovery and traceroute: routers on the way are no destinations. The errors are real, from the router behind the gateway.
#[test]
fn errors_of_any_router_arrive_if_they_are_about_packets_of_the_tunnel() {
    let mut bed = Bed::new();
    bed.client_tunnels.set_origins(&origins(&[])).unwrap();
    for (family, inside) in families().into_iter().zip(INSIDE) {
        let printed = |bed: &Bed, options: &str, address: &str| {
            let before = counted(bed);
            let printed = bed.client.sh(&format!("ping -c 1 -W 1 {options} {address} 2>&1 || true"));
            (printed, counted(bed)[1] - before[1])
        };
        let (exceeded, dropped) = printed(&bed, "-t 2", &family.server.to_string());
        assert!(exceeded.contains("xceeded") && dropped == 0, "{exceeded}");

        // The router has no route to it.
        bed.client.sh(&format!("ip route add {inside} dev {}", link_name(family.service)));
        let (silent, dropped) = printed(&bed, "", inside);
        assert!(!silent.contains("nreachable") && dropped == 1, "{silent}");
        bed.client_tunnels.set_origins(&origins(&[inside])).unwrap();
        let (unreachable, dropped) = printed(&bed, "", inside);
        assert!(unreachable.contains("nreachable") && dropped == 0, "{unreachable}");
        bed.client_tunnels.set_origins(&origins(&[])).unwrap();
    }
}
