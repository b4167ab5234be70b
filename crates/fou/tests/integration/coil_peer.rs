//! Tunnels of this crate with pods as Coil v2 sets them up by the kernel's fou, ipip and ip6tnl, through a Service address.
//! `FAIRLEAD_KERNEL_FOU=1` says that this kernel must have them.

use std::collections::BTreeMap;
use std::net::IpAddr;

use fairlead_api::fou::{Gateway, Service};
use fairlead_fou::{Counter, Peer, Settings, TunnelLink, Tunnels, link_name};
use testbed_netns::Namespace;
use testbed_netns::coil::{self, Addresses, Network, SourcePort, families};

/// Counts IPv4 packets of tunnels at an end of Coil's, where nftables sees what the kernel's links send and get. Comments tell the
/// counters apart: the VM's kernel has no module for named ones.
const OUTER_HEADERS: &str = "
    table inet headers {
        chain leaving { type filter hook output priority filter;
            meta nfproto ipv4 udp dport 5555 counter comment sent
            udp dport 5555 ip ttl 225 ip frag-off & 0x4000 != 0 counter comment sent_with_df
        }
        chain arriving { type filter hook prerouting priority raw;
            meta nfproto ipv4 udp dport 5555 counter comment received
            udp dport 5555 ip ttl 224 ip frag-off & 0x4000 == 0 counter comment received_without_df
        }
    }";

/// Ends of the tunnels that are Fairlead's; any other is Coil's.
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
        peers.extend([service, gateways[0]].map(|peer| (peer, Peer::Gateway { link, service })));
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

/// An end that Coil has set up.
struct CoilEnd<'a> {
    pod: &'a Namespace,
    /// The links as Coil's article names them, of both families, with the ends of the tunnels.
    links: [(&'static str, IpAddr, IpAddr); 2],
}

impl<'a> CoilEnd<'a> {
    fn client(network: &'a Network, port: SourcePort) -> Self {
        coil::set_up_client(&network.client, link_name, port);
        let [v4, v6] = families();
        let links = [("fou4_0a440c31", v4.client, v4.service), ("fou6_0d34716a", v6.client, v6.service)];
        Self::new(&network.client, links)
    }

    fn gateway(network: &'a Network, port: SourcePort) -> Self {
        let [v4, v6] = families();
        let own = [v4.gateways[0], v6.gateways[0]];
        coil::set_up_gateway(&network.gateways[0], own, link_name, port);
        let links = [("fou4_0a141e28", own[0], v4.client), ("fou6_c2f95f48", own[1], v6.client)];
        Self::new(&network.gateways[0], links)
    }

    fn new(pod: &'a Namespace, links: [(&'static str, IpAddr, IpAddr); 2]) -> Self {
        pod.sh(&format!("nft '{OUTER_HEADERS}'"));
        Self { pod, links }
    }

    /// `ip` shows what the commands of Coil's article make: `ip link add … ttl 225 encap fou …` and `ip fou add port 5555 …`.
    fn is_as_in_the_article(&self, port: SourcePort) {
        let port = if port == SourcePort::Fixed { "5555" } else { "auto" };
        for (name, local, remote) in self.links {
            let shown = self.pod.sh(&format!("ip -o -d link show {name}"));
            println!("{shown}");
            let (kind, ttl) = if local.is_ipv4() { ("ipip", "ttl 225") } else { ("ip6tnl", "hoplimit 225") };
            for wanted in [
                format!(" {name}@"),
                format!(" {kind} any remote {remote} local {local} {ttl} "),
                format!(" encap fou encap-sport {port} encap-dport 5555 "),
            ] {
                assert!(shown.contains(&wanted), "{wanted:?} is not in {shown}");
            }
        }
        let shown = self.pod.sh("ip fou show");
        let mut receivers: Vec<&str> = shown.lines().map(str::trim).collect();
        receivers.sort_unstable();
        assert_eq!(receivers, ["port 5555 ipproto 4", "port 5555 ipproto 41 -6"]);
    }

    /// Outer headers of our programs have no DF bit. The kernel sets it on every link with a TTL, whatever `IFLA_IPTUN_PMTUDISC` says
    /// (`ip_tunnel_netlink_parms`, `net/ipv4/ip_tunnel_core.c`), so also on those that Coil makes.
    fn has_seen_outer_headers(&self) {
        let listed = self.pod.sh("nft list table inet headers");
        let packets = |counter: &str| -> u64 {
            let is_it = |line: &&str| line.contains(&format!("comment \"{counter}\""));
            let line = listed.lines().find(is_it).unwrap();
            line.split_whitespace().skip_while(|word| *word != "packets").nth(1).unwrap().parse().unwrap()
        };
        let [sent, sent_with_df] = ["sent", "sent_with_df"].map(packets);
        let [received, received_without_df] = ["received", "received_without_df"].map(packets);
        println!("sent {sent}, with DF {sent_with_df}; received {received}, without {received_without_df}");
        assert!(sent > 10 && sent_with_df == sent, "{listed}");
        assert!(received > 10 && received_without_df == received, "{listed}");
    }
}

/// The other ends are Coil's, which ours must understand. Checks what our programs have counted at each end of ours.
fn exchanged(ours: Ours, port: SourcePort) {
    let Some(network) = Network::new() else { return };
    // Ours are there first: links of the kernel solicit routers as soon as they are up, and would not be known yet.
    let (mut tunnels, mut coils) = (Vec::new(), Vec::new());
    if ours != Ours::Gateway {
        tunnels.push(our_client(&network, port));
    }
    if ours != Ours::Client {
        tunnels.push(our_gateway(&network, port));
    }
    match ours {
        Ours::Gateway => coils.push(CoilEnd::client(&network, port)),
        Ours::Client => coils.push(CoilEnd::gateway(&network, port)),
        Ours::Both => {}
    }
    coils.iter().for_each(|end| end.is_as_in_the_article(port));
    network.check();
    coils.iter().for_each(CoilEnd::has_seen_outer_headers);
    let own: [IpAddr; 2] = families().map(|family| family.gateways[0]);
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
