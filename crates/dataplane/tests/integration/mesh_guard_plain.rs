//! Packets to neighbours of the location leave by the link of their plain route and by no other: with a rule of another program before all of ours, and
//! without ours. The node has a link to the LAN of its location, and an uplink that leads elsewhere.

use std::net::UdpSocket;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crate::mesh_common::{Namespace, in_namespace, mesh, run};
use crate::mesh_guard::{Bed, CLEAR, ROUTER, TARGETS, TIMEOUT, WITHOUT_FIRST_RULES, counted};
use fairlead_dataplane::mesh::{Applier, PlainRoute};

/// Addresses of the node on the LAN, with the lengths of the subnets, and of a neighbour there.
const OWN: [&str; 2] = ["100.67.0.1/24", "fd67::1/64"];
const NEIGHBOUR: [&str; 2] = ["100.67.0.2", "fd67::2"];

/// Targets have plain routes by the LAN, others by the uplink.
fn with_lan() -> (Bed, Namespace) {
    let mut bed = Bed::new();
    let lan = Namespace::new();
    bed.node.veth("lan0", &lan, "eth0");
    let [own4, own6] = OWN;
    let [neighbour4, neighbour6] = NEIGHBOUR;
    bed.node.sh(&format!("ip addr add {own4} dev lan0; ip addr add {own6} dev lan0 nodad"));
    lan.sh(&format!(
        "ip addr add {neighbour4}/24 dev eth0; ip addr add {neighbour6}/64 dev eth0 nodad
         nft 'table inet judge {{ chain in {{ type filter hook prerouting priority -300; udp dport {CLEAR} counter; }}; }}'"
    ));
    let plain = |destination: &str, gateway: &str, link| PlainRoute {
        destination: destination.parse().unwrap(),
        gateway: gateway.parse().unwrap(),
        link,
        is_tunnel: false,
    };
    let (lan0, up0) = (bed.link("lan0"), bed.link("up0"));
    bed.state.plain = vec![
        plain("10.5.0.1/32", neighbour4, lan0),
        plain("fd05::1/128", neighbour6, lan0),
        plain("10.5.9.0/24", ROUTER[0], up0),
        plain("fd05:0:0:0:9::/80", ROUTER[1], up0),
    ];
    (bed, lan)
}

/// Applies the state; the rules that come before those of others stay.
fn apply(bed: &mut Bed) {
    bed.node.run(|| bed.applier.apply(&bed.state).unwrap());
}

#[test]
fn what_has_a_plain_route_leaves_by_its_link_and_by_no_other() {
    let first_rule = "for ip in 'ip -4' 'ip -6'; do $ip rule add pref 50 lookup 52; done; \
        ip route add default via 100.65.0.2 table 52; ip -6 route add default via fd65::2 table 52";
    let without_rules =
        format!("{WITHOUT_FIRST_RULES}; for ip in 'ip -4' 'ip -6'; do $ip rule del pref 32500; done");
    let without_marks = format!("nft delete table inet talos_kubespan; {without_rules}");
    let without_routes = "for table in 180 181 182 183; do for ip in 'ip -4' 'ip -6'; do \
        $ip route flush table $table 2>/dev/null || true; done; done";
    for (what, damage) in [
        ("a rule of another program before all of ours", first_rule),
        ("without our rules", without_rules.as_str()),
        ("without our rules and marks", without_marks.as_str()),
        ("without our routes", without_routes),
    ] {
        let (mut bed, lan) = with_lan();
        apply(&mut bed);
        assert_eq!(bed.leaves(), (0, 2), "all is there");
        let deadline = Instant::now() + TIMEOUT;
        while counted(&lan, "judge") < 4 {
            assert!(Instant::now() < deadline, "by the LAN: {} of 4", counted(&lan, "judge"));
            thread::sleep(Duration::from_millis(10));
        }
        assert_eq!(counted(&bed.node, "fairlead_guard"), 0, "nothing is dropped");
        bed.node.sh(damage);
        assert_eq!(bed.leaves(), (0, 2), "{what}");
        assert_eq!(counted(&bed.node, "fairlead_guard"), 4, "{what}");
        // The control: the same without the guard.
        bed.node.sh("nft delete table inet fairlead_guard");
        assert_eq!(bed.leaves(), (4, 2), "{what}, without the guard");
    }
}

/// The guard lets it leave by the link before the route leads there.
#[test]
fn nothing_is_dropped_while_a_target_gets_a_plain_route() {
    let (mut bed, _lan) = with_lan();
    let all = bed.state.plain.clone();
    // The link has another plain route already: so the table is not made anew, and its counters stay.
    let others: Vec<PlainRoute> = all.iter().skip(1).cloned().collect();
    for _ in 0..20 {
        bed.state.plain.clone_from(&others);
        apply(&mut bed);
        bed.state.plain.clone_from(&all);
        let Bed { node, applier, state, .. } = &mut bed;
        let (is_sending, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
        let applied = node.run(|| {
            thread::scope(|scope| {
                scope.spawn(|| {
                    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
                    while !is_over.load(Ordering::Relaxed) {
                        // A full queue is no failure: what the guard drops is counted there.
                        drop(socket.send_to(b"x", (TARGETS[0], CLEAR)));
                        is_sending.store(true, Ordering::Relaxed);
                    }
                });
                let deadline = Instant::now() + TIMEOUT;
                while !is_sending.load(Ordering::Relaxed) && Instant::now() < deadline {
                    thread::yield_now();
                }
                let applied = applier.apply(state);
                is_over.store(true, Ordering::Relaxed);
                applied
            })
        });
        applied.unwrap();
        assert_eq!(counted(&bed.node, "fairlead_guard"), 0);
    }
}

#[test]
fn a_neighbour_more_is_one_element() {
    in_namespace(|| {
        run(
            "ip tuntap add mesh0 mode tun; ip link set mesh0 up; ip link add lan0 type veth peer name far0; \
             ip link set lan0 up; ip link set far0 up; ip addr add 100.67.0.1/24 dev lan0",
        );
        let link: u32 = run("ip -o link show lan0 | cut -d: -f1").trim().parse().unwrap();
        let plain = |destination: &str| PlainRoute {
            destination: destination.parse().unwrap(),
            gateway: NEIGHBOUR[0].parse().unwrap(),
            link,
            is_tunnel: false,
        };
        let mut applier = Applier::default();
        let mut state = mesh(1420, &["10.1.0.0/16"], &[]);
        state.plain = vec![plain("10.1.1.0/24")];
        applier.apply(&state).unwrap();
        let handles = || run("nft -a list table inet fairlead_guard | grep -o 'handle [0-9]*$'");
        let table = || run("nft list table inet fairlead_guard");
        let before = handles();
        state.plain.push(plain("10.1.3.0/24"));
        applier.apply(&state).unwrap();
        assert_eq!(handles(), before, "rules and sets are the same objects");
        let both = table();
        let lookup = format!("@plain_{link}_ipv4 accept");
        let is_rule = |line: &&str| line.contains("oif \"lan0\"") && line.contains(&lookup);
        assert_eq!(both.lines().filter(is_rule).count(), 2, "{both}");
        assert!(both.contains("10.1.1.0/24, 10.1.3.0/24"), "{both}");
        state.plain.pop();
        applier.apply(&state).unwrap();
        assert_eq!(handles(), before);
        assert!(!table().contains("10.1.3.0/24"), "{}", table());
        state.plain.clear();
        applier.apply(&state).unwrap();
        assert!(!table().contains("plain_"), "{}", table());
    });
}
