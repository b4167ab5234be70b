use std::thread::sleep;

use testbed_netns::pods::HOST_SETUP;
use testbed_netns::{Namespace, sh};

use super::super::{Applier, GatewayRouting, GatewayTraffic, traffic};
use super::*;

const ADDRESSES: [&str; 2] = ["203.0.113.7", "2001:db8::7"];

/// A client, a gateway and a server outside, which reaches the source addresses by the gateway.
struct Bed {
    client: Namespace,
    gateway: Namespace,
    server: Namespace,
}

impl Bed {
    fn new() -> Self {
        let bed = Self { client: Namespace::new(), gateway: Namespace::new(), server: Namespace::new() };
        for namespace in [&bed.client, &bed.gateway, &bed.server] {
            namespace.sh(HOST_SETUP);
        }
        bed.gateway.veth("eth0", &bed.server, "s0");
        bed.gateway.veth("in0", &bed.client, "c0");
        bed.gateway.sh("sysctl -qw net.ipv4.ip_forward=1 net.ipv6.conf.all.forwarding=1
            ip addr add 10.0.0.1/24 dev eth0; ip addr add fd00::1/64 dev eth0 nodad
            ip addr add 10.9.0.1/24 dev in0; ip addr add fd00:9::1/64 dev in0 nodad
            ip link set eth0 up; ip link set in0 up");
        bed.server.sh("ip addr add 10.0.0.2/24 dev s0; ip addr add fd00::2/64 dev s0 nodad; ip link set s0 up
            ip route add 203.0.113.7 via 10.0.0.1; ip route add 2001:db8::7 via fd00::1
            nft add table inet t; nft add chain inet t c '{ type filter hook input priority 0; }'
            nft add rule inet t c ip saddr 203.0.113.7 counter; nft add rule inet t c ip6 saddr 2001:db8::7 counter");
        bed.client
            .sh("ip addr add 10.9.0.2/24 dev c0; ip addr add fd00:9::2/64 dev c0 nodad; ip link set c0 up
            ip route add default via 10.9.0.1; ip route add default via fd00:9::1");
        // Neighbours of IPv6 are found only after a moment.
        bed.client.sh("until ping -c1 -W1 fd00:9::1 > /dev/null; do sleep 0.1; done");
        bed.gateway.sh("until ping -c1 -W1 fd00::2 > /dev/null; do sleep 0.1; done");
        bed
    }

    /// Whether a new connection of the client is answered, in each family.
    fn passes(&self) -> [bool; 2] {
        ["10.0.0.2", "fd00::2"].map(|server| {
            let script = format!("ping -c1 -W1 {server} > /dev/null && echo yes || echo no");
            self.client.sh(&script).trim() == "yes"
        })
    }

    /// Packets that the server has got from the source addresses.
    fn seen(&self) -> Vec<String> {
        let listed = self.server.sh("nft list chain inet t c");
        let words: Vec<&str> = listed.split_whitespace().collect();
        words.windows(2).filter(|pair| pair[0] == "packets").map(|pair| pair[1].to_owned()).collect()
    }
}

fn wanted(standby: bool) -> GatewayRouting {
    let addresses = ADDRESSES.map(|text| text.parse::<IpAddr>().unwrap());
    let translate = if standby { BTreeMap::new() } else { addresses.map(|it| (IpFamily::of(it), it)).into() };
    GatewayRouting {
        max_connections: None,
        uplink: "eth0".to_owned(),
        uplink_mtu: 1500,
        own: ["10.0.0.1", "fd00::1"].map(|text| text.parse().unwrap()).to_vec(),
        clients: BTreeMap::new(),
        sources: Some(Sources { floating: addresses.into(), translate, standby }),
    }
}

fn until(milliseconds: u64) -> BTreeMap<IpAddr, Instant> {
    let at = Instant::now() + Duration::from_millis(milliseconds);
    ADDRESSES.map(|text| (text.parse().unwrap(), at)).into()
}

fn counted(wanted: &GatewayRouting) -> [GatewayTraffic; 2] {
    let counted = traffic(wanted).unwrap();
    IpFamily::BOTH.map(|family| counted[&family])
}

#[test]
fn the_kernel_ends_the_use_of_an_address_that_is_not_confirmed() {
    let bed = Bed::new();
    let (table, wanted) = (SourceTable::default(), wanted(false));
    let (mut applier, holding) = (Applier::new(table.clone()), table.open());
    assert!(!bed.gateway.run(|| holding.hold(until(60_000)).unwrap()), "there is no table yet");
    bed.gateway.run(|| applier.apply(&wanted).unwrap());
    assert_eq!(bed.passes(), [true; 2]);
    assert_eq!(bed.seen(), ["1", "1"]);
    assert!(bed.gateway.run(|| holding.hold(until(500)).unwrap()));
    bed.gateway.run(|| {
        assert!(applier.is_table_in_place().unwrap(), "a refresh is no change by others");
        assert_eq!(SourceTable::adopt().unwrap().held().len(), 2, "a new process knows it");
        let listed = sh("nft list table inet fairlead_egress");
        assert!(listed.contains("snat ip to 203.0.113.7 fully-random"), "{listed}");
        assert!(listed.contains("snat ip6 to 2001:db8::7 fully-random"), "{listed}");
    });

    // Nothing confirms it, as if the program had been stopped.
    sleep(Duration::from_millis(600));
    assert_eq!(bed.passes(), [false; 2]);
    assert_eq!(bed.seen(), ["1", "1"]);
    bed.server
        .sh("ping -c1 -W1 203.0.113.7 > /dev/null || true; ping -c1 -W1 2001:db8::7 > /dev/null || true");
    for traffic in bed.gateway.run(|| counted(&wanted)) {
        let packets = [traffic.not_held_out.packets, traffic.not_held_in.packets, traffic.standby.packets];
        assert_eq!(packets, [1, 1, 0]);
    }
    bed.gateway.run(|| assert!(SourceTable::adopt().unwrap().held().is_empty()));

    assert!(bed.gateway.run(|| holding.hold(until(60_000)).unwrap()));
    assert_eq!(bed.passes(), [true; 2]);
    let late = holding.clone();
    bed.gateway.run(|| holding.close().unwrap());
    assert_eq!(bed.passes(), [false; 2], "given up at once");
    assert!(!bed.gateway.run(|| late.hold(until(60_000)).unwrap()));
    assert_eq!(bed.passes(), [false; 2], "what comes late sets nothing");
    let next = table.open();
    assert!(!bed.gateway.run(|| late.hold(until(60_000)).unwrap()));
    assert!(bed.gateway.run(|| next.hold(until(60_000)).unwrap()));
    assert_eq!(bed.passes(), [true; 2]);
}

#[test]
fn a_flush_is_mended_and_lets_nothing_out_with_the_address() {
    let bed = Bed::new();
    let (table, wanted) = (SourceTable::default(), wanted(false));
    let (mut applier, holding) = (Applier::new(table.clone()), table.open());
    table.locked().held = until(60_000);
    bed.gateway.run(|| applier.apply(&wanted).unwrap());
    assert_eq!(bed.passes(), [true; 2]);
    bed.gateway.sh("nft flush ruleset");
    assert_eq!(bed.passes(), [false; 2]);
    assert_eq!(bed.seen(), ["1", "1"]);
    bed.gateway.run(|| {
        assert!(!applier.is_table_in_place().unwrap());
        assert!(!holding.hold(until(60_000)).unwrap());
        applier.apply(&wanted).unwrap();
    });
    assert_eq!(bed.passes(), [true; 2]);
    assert_eq!(bed.seen(), ["2", "2"]);
    // What another program removes from the set comes back with the next confirmation.
    bed.gateway.sh("nft flush set inet fairlead_egress held_ipv4");
    assert_eq!(bed.passes(), [false, true]);
    assert!(bed.gateway.run(|| holding.hold(until(60_000)).unwrap()));
    assert_eq!(bed.passes(), [true; 2]);
}

#[test]
fn a_gateway_that_holds_nothing_forwards_nothing_to_the_outside() {
    let bed = Bed::new();
    let wanted = wanted(true);
    bed.gateway.run(|| Applier::default().apply(&wanted).unwrap());
    assert_eq!(bed.passes(), [false; 2]);
    assert_eq!(bed.gateway.run(|| counted(&wanted))[0].standby.packets, 2);
    // As the controller says no more that there are any.
    let without = GatewayRouting { sources: None, ..wanted };
    bed.gateway.run(|| Applier::default().apply(&without).unwrap());
    assert_eq!(bed.passes(), [true; 2]);
}
