//! An unchanged mesh sends nothing: `ip monitor` and `nft monitor` report nothing, and our own counter agrees. The counter
//! is the whole process's, so this binary has one test only.

use crate::mesh_common::{Namespace, apply, run, targets};
use fairlead_dataplane::mesh::{Bypass, MeshState, NarrowRoute, PlainRoute, device, remove};
use fairlead_dataplane::nft_table::Applied;
use fairlead_netlink::changes_sent;
use testbed_netns::Monitor;

#[test]
fn only_what_differs_is_sent() {
    let namespace = Namespace::new();
    namespace.run(|| {
        // Without addresses of the kernel's making, whose duplicate address detection `ip monitor` would report later.
        run("ip link add mesh0 type veth peer name far0; \
             for link in mesh0 far0; do ip link set $link addrgenmode none; ip link set $link up; done");
        let (targets_v4, targets_v6) = targets(1000);
        let mut state = MeshState {
            interface: "mesh0".into(),
            mtu: 1420,
            addresses: Vec::new(),
            targets_v4,
            targets_v6,
            bypass: Bypass {
                servers: vec!["10.0.0.3:6443".parse().unwrap()],
                nodes: vec!["10.0.4.1".parse().unwrap(), "fd00:0:0:4::1".parse().unwrap()],
                ..Bypass::default()
            },
            plain: Vec::new(),
            narrow: Vec::new(),
            masqueraded: Vec::new(),
            without_default: Vec::new(),
            listen_port: 51820,
            sources: Vec::new(),
            uplinks: Vec::new(),
        };
        assert_eq!(apply(&state).unwrap(), Applied::Rebuilt);
        let sent = || {
            let before = changes_sent();
            move || changes_sent() - before
        };

        let (mut ip, mut nft) = (Monitor::ip(&namespace), Monitor::nft(&namespace));
        ip.wait_idle();
        nft.wait_idle();
        let counted = sent();
        assert_eq!(apply(&state).unwrap(), Applied::Unchanged);
        assert_eq!(counted(), 0);
        assert_eq!((ip.reported(), nft.reported()), (vec![], vec![]));

        // One of a thousand peers goes: one element of the mesh's table and one of the guard's, and its two routes, one message each.
        let handles = || run("nft -a list table inet talos_kubespan | grep -o 'handle [0-9]*$'");
        let before = handles();
        state.targets_v4.remove(500);
        let counted = sent();
        assert_eq!(apply(&state).unwrap(), Applied::Elements { deleted: 1, added: 0 });
        assert_eq!(counted(), 4);
        let reported = nft.reported();
        let changes: Vec<&String> = reported.iter().filter(|line| !line.starts_with('#')).collect();
        let is_deletion = |line: &&String| line.starts_with("delete element inet");
        assert!(matches!(&changes[..], [one, two] if is_deletion(one) && is_deletion(two)), "{reported:?}");
        assert_eq!(handles(), before, "rules and sets are the same objects");

        // The path to a node becomes narrow, narrower, and wide again: one message for each table.
        for mtu in [Some(1360), Some(1296), None] {
            let narrow = |mtu| {
                ["10.0.2.0/24", "0.0.0.0/0"].map(|it| NarrowRoute { destination: it.parse().unwrap(), mtu })
            };
            state.narrow = mtu.map(narrow).into_iter().flatten().collect();
            let counted = sent();
            assert_eq!(apply(&state).unwrap(), Applied::Unchanged, "nftables does not know of it");
            assert_eq!(counted(), 2);
            assert_eq!(apply(&state).unwrap(), Applied::Unchanged);
            assert_eq!(counted(), 2);
        }
        ip.reported();

        // The order and the spelling of prefixes mean nothing.
        state.targets_v6.reverse();
        state.targets_v4.push("10.0.0.7/32".parse().unwrap());
        let counted = sent();
        assert_eq!(apply(&state).unwrap(), Applied::Unchanged);
        assert_eq!(counted(), 0);
        assert_eq!((ip.reported(), nft.reported()), (vec![], vec![]));

        neighbours_are_reached_without_the_device(&mut state, &sent);
    });
}

fn neighbours_are_reached_without_the_device<C: Fn() -> u64>(state: &mut MeshState, sent: &impl Fn() -> C) {
    run("ip link add up0 type veth peer name far1; \
         for link in up0 far1; do ip link set $link addrgenmode none; ip link set $link up; done; \
         ip addr add 192.0.2.1/24 dev up0; ip addr add fd00:2::1/64 dev up0 nodad");
    let link = run("ip -o link show up0 | cut -d: -f1").trim().parse().unwrap();
    let plain = |(destination, gateway): &(&str, &str)| PlainRoute {
        destination: destination.parse().unwrap(),
        gateway: gateway.parse().unwrap(),
        link,
        is_tunnel: false,
    };
    let neighbours = [
        ("10.0.0.0/24", "192.0.2.2"),
        ("192.0.2.2/32", "192.0.2.2"),
        ("fd00:9::/64", "fd00:2::2"),
        ("fd00:2::2/128", "fd00:2::2"),
        // An administrator says that the subnet is longer than the host's own.
        ("10.7.0.0/24", "198.51.100.9"),
    ];
    state.plain = neighbours.iter().map(plain).collect();
    // Five routes, two of them in place of those into the device in another table, too; and the guard's table, which has rules for the link.
    for messages in [44, 0] {
        let counted = sent();
        assert_eq!(apply(state).unwrap(), Applied::Unchanged);
        assert_eq!(counted(), messages);
    }
    let way = |to: &str| run(&format!("ip route get {to} mark 0x40"));
    assert!(way("10.0.0.9").contains("via 192.0.2.2 dev up0"), "{}", way("10.0.0.9"));
    assert!(way("192.0.2.2").contains("192.0.2.2 dev up0"), "{}", way("192.0.2.2"));
    assert!(way("fd00:9::9").contains("via fd00:2::2 dev up0"), "{}", way("fd00:9::9"));
    assert!(way("10.0.2.9").contains("dev mesh0"), "{}", way("10.0.2.9"));
    assert_eq!(device().unwrap().as_deref(), Some("mesh0"), "the uplink is not taken for it");

    // The other end of an IP tunnel is on a subnet of this host, as with `encapsulation: always`.
    run("ip link add tunnel0 type veth peer name far2; ip link set tunnel0 up; ip link set far2 up");
    let link = run("ip -o link show tunnel0 | cut -d: -f1").trim().parse().unwrap();
    state.plain = neighbours
        .iter()
        .map(plain)
        .chain([("10.8.0.0/24", "192.0.2.3"), ("fd00:8::/64", "fd00:2::3")].iter().map(|it| PlainRoute {
            link,
            is_tunnel: true,
            ..plain(it)
        }))
        .collect();
    // Two routes, one of them with a way to its gateway; two rules; and both tables of nftables, which have rules for outer packets.
    for messages in [83, 0] {
        let counted = sent();
        apply(state).unwrap();
        assert_eq!(counted(), messages);
    }
    assert!(way("10.8.0.9").contains("via 192.0.2.3 dev tunnel0"), "{}", way("10.8.0.9"));
    assert!(way("fd00:8::9").contains("via fd00:2::3 dev tunnel0"), "{}", way("fd00:8::9"));
    assert!(way("fd00:2::3").contains("dev mesh0"), "{}", way("fd00:2::3"));

    // The kernel drops the routes of a link that is down, and what is behind them takes the tunnel.
    run("ip link set up0 down");
    assert!(way("10.0.0.9").contains("dev mesh0"), "{}", way("10.0.0.9"));
    state.plain.clear();
    apply(state).unwrap();
    remove().unwrap();
    assert!(run("ip link show up0").contains("up0"), "only the device is removed");
}
