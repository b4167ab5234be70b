//! Tunnels between a client and gateways, in namespaces of this machine's kernel.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::process::Command;
use std::time::{Duration, Instant};

use crate::bed;
use crate::bed::{Bed, MTU, everything, families, services, uplink};
use fairlead_fou::{Counter, Error, Peer, Settings, Tunnels, link_name};
use testbed_netns::Namespace;

#[test]
fn packets_reach_the_server_through_the_service_address() {
    let bed = Bed::new();
    for family in families() {
        assert!(bed.ping("", family.server), "{}", family.server);
        assert!(bed.tcp_echo(family.server, 1 << 20), "{}", family.server);
        assert_eq!(bed.flow(family.server).seen_as(), Some(family.gateways[0]));
    }
    assert_eq!(bed.routed("in_clear"), 0);
    // The kernel's TCP sets the DF bit of inner packets, in both directions.
    let [outer, without_df] = ["outer", "outer_without_df"].map(|counter| bed.routed(counter));
    println!("{without_df} of {outer} outer IPv4 packets have no DF bit");
    assert!(outer > 20 && without_df == outer, "{without_df} of {outer}");
    assert!(bed.counted(Counter::Decapsulated) > 20 && bed.counted(Counter::Encapsulated) > 20);
    let refusals = [Counter::UnknownSender, Counter::InnerSource, Counter::InnerDestination, Counter::Failed];
    assert_eq!(refusals.map(|counter| bed.counted(counter)), [0; 4]);
}

/// The environment of another process: uplink, and the gateways by number; without any it only opens the tunnels.
const UPLINK: &str = "FAIRLEAD_FOU_UPLINK";
const GATEWAYS: &str = "FAIRLEAD_FOU_GATEWAYS";

#[test]
#[ignore = "runs in another process that tests start: cargo xtask test lab -- tunnels"]
fn other_process() {
    let uplink = std::env::var(UPLINK).unwrap().parse().unwrap();
    let mut tunnels = Tunnels::open(uplink, Settings { port: 5555, drop_unknown: false, own: None }).unwrap();
    let Ok(gateways) = std::env::var(GATEWAYS) else { return };
    let gateways: Vec<usize> = gateways.split(',').map(|index| index.parse().unwrap()).collect();
    // IPv4 and IPv6: nothing else differs from what the first process has set.
    assert_eq!(tunnels.set_services(&services(&gateways)).unwrap(), 2);
}

/// Runs [`other_process`] with the given words before its command line; what it printed.
fn run_other(namespace: &Namespace, before: &[&str], gateways: Option<&str>) -> Result<(), String> {
    let own = std::env::current_exe().unwrap();
    let mut words = before.iter().copied().chain([own.to_str().unwrap()]);
    let mut command = Command::new(words.next().unwrap());
    command.args(words).args(["--ignored", "--exact", "tunnels::other_process", "--nocapture"]);
    command.env(UPLINK, uplink(namespace).to_string());
    if let Some(gateways) = gateways {
        command.env(GATEWAYS, gateways);
    }
    let output = namespace.run(|| command.output()).unwrap();
    let text =
        String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr);
    if output.status.success() && text.contains("1 passed") { Ok(()) } else { Err(text) }
}

#[test]
fn a_flow_keeps_its_gateway_while_another_process_adds_one() {
    let mut bed = Bed::new();
    bed.client_tunnels.set_services(&services(&[0])).unwrap();
    let flows = families().map(|family| (bed.flow(family.server), family));
    let sent_while = |work: &mut dyn FnMut()| {
        std::thread::scope(|scope| {
            let flows = &flows;
            let sender = scope.spawn(move || {
                let (start, mut seen) = (Instant::now(), Vec::new());
                while start.elapsed() < Duration::from_secs(1) {
                    seen.extend(flows.iter().map(|(flow, family)| (flow.seen_as(), family)));
                    std::thread::sleep(Duration::from_millis(2));
                }
                seen
            });
            std::thread::sleep(Duration::from_millis(200));
            work();
            sender.join().unwrap()
        })
    };
    let seen = sent_while(&mut || run_other(&bed.client, &[], Some("0,1")).unwrap());
    assert!(seen.len() > 50, "{}", seen.len());
    for (gateway, family) in &seen {
        assert_eq!(*gateway, Some(family.gateways[0]), "of {} packets", seen.len());
    }
    for family in families() {
        let new: Vec<_> = (0..24).map(|_| bed.flow(family.server).seen_as()).collect();
        let on = |index: usize| new.iter().filter(|seen| **seen == Some(family.gateways[index])).count();
        assert!(on(0) > 2 && on(1) > 2 && on(0) + on(1) == 24, "{new:?}");
    }
    let known = bed.client_tunnels.flows().unwrap();
    assert!(
        known.iter().any(|flow| flow.gateway == families()[0].gateways[0] && flow.protocol == 17),
        "{known:?}"
    );
    // A gateway that is gone keeps no flow.
    bed.client_tunnels.set_services(&services(&[1])).unwrap();
    for (flow, family) in &flows {
        assert_eq!(flow.seen_as(), Some(family.gateways[1]));
    }
}

/// `sessionAffinityConfig.clientIP.timeoutSeconds`: 300 s were shown with `AFFINITY_SECONDS=300` (docs/egress-tunnels.md).
fn affinity() -> Duration {
    let seconds = std::env::var("AFFINITY_SECONDS").ok().and_then(|text| text.parse().ok());
    Duration::from_secs(seconds.unwrap_or(6))
}

/// The gateway of a client from now on is the second one; who has the first one keeps it, unless it was idle for too long.
#[test]
fn a_flow_keeps_its_gateway_while_it_is_busy_or_idle_for_less_than_the_timeout() {
    let mut bed = Bed::new();
    let with_timeout = |draining: bool| {
        let mut services = services(&[0, 1]);
        for service in services.values_mut() {
            (service.by_client, service.idle_timeout) = (true, Some(affinity()));
            if draining {
                service.gateways[0].is_draining = true;
            } else {
                service.gateways.truncate(1);
            }
        }
        services
    };
    bed.client_tunnels.set_services(&with_timeout(false)).unwrap();
    let flows = families().map(|family| (bed.flow(family.server), family));
    let seen = |index: usize| flows.iter().all(|(flow, it)| flow.seen_as() == Some(it.gateways[index]));
    assert!(seen(0));
    bed.client_tunnels.set_services(&with_timeout(true)).unwrap();
    let busy = Instant::now();
    while busy.elapsed() < affinity() * 31 / 30 {
        assert!(seen(0), "after {:?}", busy.elapsed());
        std::thread::sleep(affinity() / 300);
    }
    let last = Instant::now();
    std::thread::sleep(affinity() * 2 / 3);
    assert!(seen(0), "left after {:?} of {:?}", last.elapsed(), affinity());
    std::thread::sleep(affinity() * 11 / 10);
    assert!(seen(1), "idle for longer than the timeout");
}

#[test]
fn what_a_client_may_not_send_is_dropped_and_counted() {
    let mut bed = Bed::new();
    bed.client.sh("ip addr add 10.20.30.99/32 dev lo; ip addr add fd00:20::99/128 dev lo nodad");
    for (family, forged) in families().into_iter().zip(["10.20.30.99", "fd00:20::99"]) {
        let server = family.server;
        // Without the option the kernel may choose the forged address.
        let own = format!("-I {}", family.client);
        assert!(bed.ping(&own, server));
        let refused = |bed: &Bed, options: &str, counter| {
            let before = bed.counted(counter);
            assert!(!bed.ping(options, server), "{counter:?}");
            assert_eq!(bed.counted(counter) - before, 1, "{counter:?}");
        };
        refused(&bed, &format!("-I {forged}"), Counter::InnerSource);

        let mut allowed = everything();
        allowed.insert(server.into(), false);
        assert_eq!(bed.gateways[0].1.set_allowed(&allowed).unwrap(), 1);
        refused(&bed, &own, Counter::InnerDestination);
        assert_eq!(bed.gateways[0].1.set_allowed(&everything()).unwrap(), 1);
        assert!(bed.ping(&own, server));

        bed.gateways[0].1.set_peers(&BTreeMap::new()).unwrap();
        refused(&bed, &own, Counter::UnknownSender);
        register(&mut bed);
        assert!(bed.ping(&own, server));
    }
}

/// Makes the client a peer of gateway 0 again.
fn register(bed: &mut Bed) {
    let tunnels = &mut bed.gateways[0].1;
    let peers = families().map(|family| {
        let link = tunnels.add_link(family.client).unwrap();
        (family.client, Peer::Client { link: Some(link) })
    });
    tunnels.set_peers(&peers.into_iter().collect()).unwrap();
}

#[test]
fn a_gateway_sends_no_packet_with_a_source_that_is_not_its_own() {
    let mut bed = Bed::new();
    let flows = families().map(|family| (bed.flow(family.server), family));
    assert!(flows.iter().all(|(flow, family)| flow.seen_as() == Some(family.gateways[0])));
    assert_eq!(bed.counted(Counter::ForeignSource), 0);
    bed.gateways[0].0.sh("nft flush ruleset");
    for (flow, family) in &flows {
        let refused = |count: u64, send: &mut dyn FnMut() -> bool| {
            let before = bed.counted(Counter::ForeignSource);
            assert!(!send(), "{family:?}");
            assert_eq!(bed.counted(Counter::ForeignSource) - before, count, "{family:?}");
        };
        refused(1, &mut || flow.seen_as().is_some());
        refused(1, &mut || bed.ping("", family.server));
        // Two fragments, of which the second has no header of ICMP.
        refused(2, &mut || bed.ping("-s 2000", family.server));
    }
    assert_eq!(bed.routed("untranslated"), 0);

    // What the gateway itself sends, and what finds neighbours.
    let pod = &bed.gateways[0].0;
    pod.sh("ip neigh flush dev eth0; ip -6 neigh flush dev eth0; ping -c 1 -W 2 fe80::1%eth0");
    let before = bed.counted(Counter::ForeignSource);
    for family in families() {
        // The first IPv6 reply only tells the server of the smaller MTU.
        pod.sh(&format!("ping -c 3 -i 0.2 -W 2 -s 2000 {}", family.server));
    }
    assert_eq!(bed.counted(Counter::ForeignSource), before);
    pod.sh("sysctl -qw net.ipv6.conf.eth0.accept_dad=1 net.ipv6.conf.all.accept_dad=1
            ip addr add fd00:50::77/128 dev eth0");
    let start = Instant::now();
    while bed.routed("unspecified") == 0 {
        assert!(start.elapsed() < Duration::from_secs(5), "no duplicate address detection");
        std::thread::sleep(Duration::from_millis(20));
    }
    // Another address of the pod's links is not among its own.
    pod.sh("! ping -c 1 -W 1 -I fd00:50::77 2001:db8:113::10");

    pod.sh(&format!("nft '{}'", bed::MASQUERADE));
    assert!(flows.iter().all(|(flow, family)| flow.seen_as() == Some(family.gateways[0])));
    // Without the setting, the same gateway would have sent them.
    let Bed { gateways, .. } = &mut bed;
    let (pod, tunnels) = &mut gateways[0];
    let settings = Settings { port: 5555, drop_unknown: true, own: None };
    pod.sh("nft flush ruleset");
    drop(pod.run(|| Tunnels::open(tunnels.uplink(), settings)).unwrap());
    assert!(!bed.ping("", families()[0].server));
    assert_eq!(bed.routed("untranslated"), 1);
}

#[test]
fn without_gateways_nothing_leaves_the_client() {
    let mut bed = Bed::new();
    bed.client_tunnels.set_services(&services(&[])).unwrap();
    for family in families() {
        assert!(!bed.ping("", family.server));
    }
    assert_eq!([bed.routed("in_clear"), bed.routed("encapsulated")], [0, 0]);
    assert!(bed.client_tunnels.counters().unwrap().of(Counter::NoGateway) >= 2);
    bed.client_tunnels.set_services(&services(&[1])).unwrap();
    for family in families() {
        assert_eq!(bed.flow(family.server).seen_as(), Some(family.gateways[1]));
    }
    // Nor without the programs.
    let Bed { client, client_tunnels, .. } = &mut bed;
    let settings = Settings { port: 5555, drop_unknown: false, own: None };
    let same = client.run(|| Tunnels::open(client_tunnels.uplink(), settings)).unwrap();
    same.remove().unwrap();
    assert!(!bed.ping("", families()[0].server));
    assert_eq!(bed.routed("in_clear"), 0);
}

#[test]
fn links_have_the_uplinks_address_and_room_for_outer_headers() {
    let bed = Bed::new();
    let mac = bed.client.sh("ip -o link show eth0 | grep -o 'ether [0-9a-f:]*'");
    for (family, overhead) in families().into_iter().zip([28, 48]) {
        let name = link_name(family.service);
        let link = bed.client.sh(&format!("ip -o -d link show {name}"));
        assert!(link.contains(mac.trim()), "{link}");
        assert!(link.contains(&format!("mtu {} ", MTU - overhead)) && link.contains(" ifb "), "{link}");
        assert!(link.contains("UP") && link.contains("addrgenmode none"), "{link}");
    }
}

#[test]
fn a_link_that_differs_is_corrected_or_made_anew() {
    let mut bed = Bed::new();
    let [v4, _] = families();
    let name = link_name(v4.service);
    let before = bed.client_tunnels.add_link(v4.service).unwrap();
    bed.client.sh(&format!("ip link set {name} mtu 1000 down"));
    assert_eq!(bed.client_tunnels.add_link(v4.service).unwrap(), before);
    assert!(bed.client.sh(&format!("ip -o link show {name}")).contains("mtu 1422"));
    bed.client.sh("ip link set eth0 down address 02:00:00:00:00:99 up");
    let after = bed.client_tunnels.add_link(v4.service).unwrap();
    assert!(bed.client.sh(&format!("ip -o link show {name}")).contains("02:00:00:00:00:99"));
    assert_ne!(after, before);
}

#[test]
fn missing_capabilities_are_named() {
    let namespace = Namespace::new();
    namespace.veth("eth0", &namespace, "other");
    let with = |capabilities: &str| {
        let list = format!("-all,{capabilities}");
        let words = ["setpriv", "--bounding-set", &list, "--inh-caps", &list, "--ambient-caps", &list];
        run_other(&namespace, &words, None)
    };
    let error = with("+net_admin").unwrap_err();
    assert!(error.contains("CAP_BPF"), "{error}");
    // In particular, the verifier needs no CAP_PERFMON.
    with("+net_admin,+bpf").unwrap();
    let error = with("+net_admin,+bpf").unwrap_err();
    assert!(error.contains("CAP_SYS_ADMIN"), "{error}");
    with("+net_admin,+bpf,+sys_admin").unwrap();
}

#[test]
fn a_missing_uplink_is_named() {
    let namespace = Namespace::new();
    let error = namespace
        .run(|| Tunnels::open(77, Settings { port: 5555, drop_unknown: true, own: None }))
        .unwrap_err();
    assert!(matches!(error, Error::Invalid { .. }));
    assert_eq!(error.to_string(), "cannot use link 77 as the uplink of FoU: there is no such link");
}

#[test]
fn many_peers_are_set_by_difference() {
    let namespace = Namespace::new();
    namespace.veth("eth0", &namespace, "other");
    let settings = Settings { port: 5555, drop_unknown: true, own: None };
    let mut tunnels = namespace.run(|| Tunnels::open(uplink(&namespace), settings)).unwrap();
    let peer =
        |number: u32| (IpAddr::from((0x0a00_0000 + number).to_be_bytes()), Peer::Client { link: None });
    let peers = |numbers: std::ops::Range<u32>| numbers.map(peer).collect::<BTreeMap<_, _>>();
    assert_eq!(tunnels.set_peers(&peers(0..2000)).unwrap(), 2000);
    assert_eq!(tunnels.set_peers(&peers(10..2010)).unwrap(), 20);
    assert_eq!(tunnels.set_peers(&peers(10..2010)).unwrap(), 0);
}

/// Prints what tunnels cost: TCP through the tunnel and on the plain path of the same namespaces, and links of many clients.
#[test]
#[ignore = "prints figures, for a minute: cargo test -p fairlead-fou --test integration figures -- --ignored --nocapture"]
fn figures() {
    let mut bed = Bed::new();
    bed.open_plain_path();
    let mut server = bed.iperf_server();
    for family in families() {
        let name = link_name(family.service);
        let route =
            |verb: &str| bed.client.sh(&format!("ip route {verb} {} dev {name} proto 30", family.server));
        for direction in ["", "-R"] {
            let (mut tunnel, mut plain) = ([0; 3], [0; 3]);
            for (tunnel, plain) in tunnel.iter_mut().zip(&mut plain) {
                *tunnel = bed.mbit_per_second(family.server, direction);
                route("del");
                *plain = bed.mbit_per_second(family.server, direction);
                route("add");
            }
            tunnel.sort_unstable();
            plain.sort_unstable();
            let percent = 100 * tunnel[1] / plain[1];
            println!(
                "{} {direction:2} Mbit/s, median of 3: tunnel {} plain {}, {percent} %",
                family.server, tunnel[1], plain[1]
            );
        }
    }
    server.kill().unwrap();
    server.wait().unwrap();
    let start = Instant::now();
    for client in 0..500u32 {
        bed.client_tunnels.add_link(IpAddr::from((0x0a63_0000 + client).to_be_bytes())).unwrap();
    }
    println!("500 tunnel links: {} ms", start.elapsed().as_millis());
}

/// RFC 6040: congestion on the way of outer packets reaches the receiver of inner ones, or they are dropped if it would not understand.
#[test]
fn congestion_marks_of_outer_packets_reach_inner_ones() {
    let bed = Bed::new();
    bed.router.sh("nft 'table inet marks {
             counter copied { }
             counter marked { }
             chain tunnel { type filter hook prerouting priority raw - 1;
                 iifname client udp dport 5555 ip ecn ect0 counter name copied ip ecn set ce
                 iifname client udp dport 5555 ip ecn not-ect ip ecn set ce
                 iifname client udp dport 5555 ip6 ecn ect0 counter name copied ip6 ecn set ce
                 iifname client udp dport 5555 ip6 ecn not-ect ip6 ecn set ce
             }
             chain server { type filter hook postrouting priority mangle;
                 oifname server ip ecn ce counter name marked
                 oifname server ip6 ecn ce counter name marked
             }
         }'");
    let counted = |counter: &str| {
        let listed = bed.router.sh(&format!("nft list counter inet marks {counter}"));
        listed
            .split_whitespace()
            .skip_while(|word| *word != "packets")
            .nth(1)
            .unwrap()
            .parse::<u64>()
            .unwrap()
    };
    for (family, number) in families().into_iter().zip(1..) {
        assert!(bed.ping("-Q 2", family.server), "{}", family.server);
        assert_eq!((counted("copied"), counted("marked")), (number, number), "{}", family.server);
        let before = bed.counted(Counter::Malformed);
        assert!(!bed.ping("-Q 0", family.server), "{}", family.server);
        assert_eq!(bed.counted(Counter::Malformed) - before, 1, "{}", family.server);
    }
}

/// A path with a smaller MTU than the uplink's: the link's MTU does not help, and no packet is let through unchecked.
#[test]
fn outer_fragments_are_dropped_and_counted() {
    let bed = Bed::new();
    let server = families()[0].server;
    bed.router.sh("ip link set gateway0 mtu 1200");
    assert!(bed.ping("-s 1000", server));
    let before = bed.counted(Counter::Fragment);
    assert!(!bed.ping("-M dont -s 1300", server));
    assert_eq!(bed.counted(Counter::Fragment) - before, 1);
}

/// All fragments of a packet take the same gateway, which puts them together to translate them.
#[test]
fn inner_fragments_arrive() {
    let mut bed = Bed::new();
    bed.client_tunnels.set_services(&services(&[0, 1])).unwrap();
    for family in families() {
        // The first IPv6 replies tell the server the path MTU.
        let replies = (0..6).filter(|_| bed.ping("-M dont -s 4000", family.server)).count();
        assert!(replies >= 3, "{}: {replies} of 6", family.server);
    }
    assert_eq!(bed.routed("in_clear"), 0);
    assert_eq!(bed.counted(Counter::Failed), 0);
}
