//! Remains of Fairlead in a namespace after the clean-up: none, judged by `ip` and `nft`.

use crate::mesh_common::{apply, in_namespace, run};
use fairlead_dataplane::cleanup::remove_all;
use fairlead_dataplane::masquerade::{self, Masquerade};
use fairlead_dataplane::mesh::{Bypass, MeshState};
use fairlead_dataplane::pods::check_sources;
use fairlead_dataplane::routes::{ensure_rules, pod_rules, sync_blocks, sync_export};
use fairlead_dataplane::routing_ids::RoutingIds;

/// Rules, routes of every table, links and nftables.
fn state() -> String {
    run(
        "ip rule; ip -6 rule; ip route show table all; ip -6 route show table all type unicast; ip -o link | cut -d: -f2; \
         nft list ruleset",
    )
}

/// Everything that a node program makes, in the kernel's own words where that is shorter.
fn make_everything() {
    let ids = RoutingIds::default();
    run("ip tuntap add wire_kube mode tun && ip link set wire_kube up");
    let state = MeshState {
        interface: "wire_kube".into(),
        mtu: 1420,
        addresses: Vec::new(),
        targets_v4: vec!["10.1.0.0/16".parse().unwrap()],
        targets_v6: vec!["fd00:1::/64".parse().unwrap()],
        bypass: Bypass::default(),
        plain: Vec::new(),
        narrow: Vec::new(),
        masqueraded: Vec::new(),
        without_default: Vec::new(),
        listen_port: 51820,
        sources: Vec::new(),
        uplinks: Vec::new(),
    };
    apply(&state).unwrap();
    ensure_rules(&pod_rules(ids)).unwrap();
    sync_export(ids, &["10.1.2.0/27".parse().unwrap()]).unwrap();
    sync_blocks(ids, &["10.1.2.0/27".parse().unwrap(), "fd00:2::/123".parse().unwrap()]).unwrap();
    masquerade::apply(&Masquerade { pods: vec!["10.1.0.0/16".parse().unwrap()], ..Masquerade::default() })
        .unwrap();
    check_sources().unwrap();
    run(
        "ip link add veth0 type veth peer name pod0 && ip link set veth0 alias COIL:default:abc:eth0 && ip link set veth0 up",
    );
    run("ip route add 10.1.2.1 dev veth0 table 116 proto 30");
    run("ip route add 10.1.3.0/27 via 198.51.100.2 proto 31");
}

#[test]
fn nothing_is_left_and_what_belongs_to_others_stays() {
    in_namespace(|| {
        run(
            "ip link add lan type veth peer name lan-peer && ip link set lan up && ip link set lan-peer up && ip link set lo up",
        );
        run("ip link add veth9 type veth peer name far9 && ip rule add priority 1000 lookup 99");
        run("ip addr add 198.51.100.1/24 dev lan && ip route add 192.0.2.0/24 dev lan proto static");
        run("nft add table inet other");
        let before = state();
        make_everything();
        assert_ne!(state(), before);
        for _ in 0..2 {
            remove_all(RoutingIds::default(), &["wire_kube".to_owned(), "lan".to_owned()]).unwrap();
            assert_eq!(state(), before);
        }
    });
}
