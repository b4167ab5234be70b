//! Tunnels of this crate with pods as Coil v2 sets them up by the kernel's fou, ipip and ip6tnl, through a Service address.
//! `FAIRLEAD_KERNEL_FOU=1` says that this kernel must have them.
#![cfg(test)]

use std::collections::BTreeMap;
use std::net::IpAddr;

use fairlead_fou::{Counter, Gateway, Peer, Service, Settings, TunnelLink, Tunnels, link_name};
use testbed_netns::Namespace;
use testbed_netns::coil::{self, Addresses, Network, SourcePort, families};

/// Whose end of the tunnels is ours.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Ours {
    Client,
    Gateway,
    Both,
}

fn uplink(namespace: &Namespace) -> u32 {
    namespace.sh("ip -o link show eth0 | cut -d: -f1").trim().parse().unwrap()
}

/// Tunnels of ours to the Service, whose gateway is the first one.
fn our_client(network: &Network, port: SourcePort) -> Tunnels {
    let pod = &network.client;
    let settings = Settings { port: 5555, drop_unknown: false, own: None };
    let mut tunnels = pod.run(|| Tunnels::open(uplink(pod), settings)).unwrap();
    let (mut links, mut peers, mut services) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
    for Addresses { client, service, gateways, server } in families() {
        let link = tunnels.add_link(service).unwrap();
        let source_port = port.number();
        links.insert(link, TunnelLink { local: client, remote: Some(service), source_port });
        peers.extend([service, gateways[0]].map(|peer| (peer, Peer::Gateway { link })));
        let gateway = Gateway { address: gateways[0], is_draining: false };
        services.insert(service, Service { gateways: vec![gateway], ..Service::default() });
        pod.sh(&format!("ip route add {server} dev {} proto 30", link_name(service)));
    }
    tunnels.set_peers(&peers).unwrap();
    tunnels.set_services(&services).unwrap();
    tunnels.set_links(&links).unwrap();
    tunnels
}

/// The tunnel of ours to the client, at the first gateway.
fn our_gateway(network: &Network, port: SourcePort) -> Tunnels {
    let pod = &network.gateways[0];
    let own = families().map(|family| family.gateways[0]);
    pod.sh("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
         ip rule add iif eth0 lookup 118 pref 2000; ip -6 rule add iif eth0 lookup 118 pref 2000
         nft 'table inet egress {
             chain leaving { type nat hook postrouting priority srcnat;
                 oifname eth0 ip saddr 10.20.30.40 masquerade
                 oifname eth0 ip6 saddr fd00:20::40 masquerade
             }
         }'");
    let settings = Settings { port: 5555, drop_unknown: true, own: Some(own.into_iter().collect()) };
    let mut tunnels = pod.run(|| Tunnels::open(uplink(pod), settings)).unwrap();
    let (mut links, mut peers) = (BTreeMap::new(), BTreeMap::new());
    for (Addresses { client, .. }, local) in families().into_iter().zip(own) {
        let link = tunnels.add_link(client).unwrap();
        links.insert(link, TunnelLink { local, remote: None, source_port: port.number() });
        peers.insert(client, Peer::Client { link: Some(link) });
        pod.sh(&format!("ip route add {client} dev {} proto 30 table 118", link_name(client)));
    }
    tunnels.set_links(&links).unwrap();
    tunnels.set_peers(&peers).unwrap();
    let everything = ["0.0.0.0/0", "::/0"].map(|prefix| (prefix.parse().unwrap(), true));
    tunnels.set_allowed(&everything.into()).unwrap();
    tunnels
}

/// The other ends are Coil's. Returns what our programs have counted at each end of ours.
fn exchanged(ours: Ours, port: SourcePort) {
    let Some(network) = Network::new() else { return };
    let mut tunnels = Vec::new();
    if ours == Ours::Gateway {
        coil::set_up_client(&network.client, link_name, port);
    } else {
        tunnels.push(our_client(&network, port));
    }
    let own: [IpAddr; 2] = families().map(|family| family.gateways[0]);
    if ours == Ours::Client {
        coil::set_up_gateway(&network.gateways[0], own, link_name, port);
    } else {
        tunnels.push(our_gateway(&network, port));
    }
    network.check();
    for (family, own) in families().into_iter().zip(own) {
        assert_eq!(network.seen_as(family.server), Some(own), "{ours:?} {port:?}");
    }
    for counter in ["in_clear", "untranslated"] {
        assert_eq!(network.counted(counter), 0, "{ours:?} {port:?}: {counter}");
    }
    let (wanted, other) = if port == SourcePort::Fixed { ("fixed", "auto") } else { ("auto", "fixed") };
    assert!(network.counted(wanted) > 100, "{ours:?} {port:?}");
    assert_eq!(network.counted(other), 0, "{ours:?} {port:?}");
    for tunnels in tunnels {
        let counters = tunnels.counters().unwrap();
        assert!(
            counters.of(Counter::Encapsulated) > 50 && counters.of(Counter::Decapsulated) > 50,
            "{counters:?}"
        );
        let failures = [Counter::Failed, Counter::Fragment, Counter::UnknownSender, Counter::ForeignSource];
        assert_eq!(failures.map(|counter| counters.of(counter)), [0; 4], "{ours:?} {port:?}: {counters:?}");
        // The kernel's tunnel links solicit routers now and then, with link-local sources.
        assert!(counters.of(Counter::InnerSource) < 10, "{ours:?} {port:?}: {counters:?}");
    }
}

#[test]
fn clients_of_coil_reach_our_gateway() {
    SourcePort::BOTH.into_iter().for_each(|port| exchanged(Ours::Gateway, port));
}

#[test]
fn our_clients_reach_a_gateway_of_coil() {
    SourcePort::BOTH.into_iter().for_each(|port| exchanged(Ours::Client, port));
}

#[test]
fn both_ends_are_ours_on_this_kernel_too() {
    SourcePort::BOTH.into_iter().for_each(|port| exchanged(Ours::Both, port));
}
