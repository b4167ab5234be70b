//! The mesh's nftables table in a namespace of its own, judged by `nft`.

use crate::mesh_common::{apply, in_namespace, mesh, run, targets};
use fairlead_dataplane::mesh::{Applier, Bypass, MeshState, NarrowRoute, device, remove};
use fairlead_dataplane::nft_table::Applied;
use fairlead_netlink::route::IpFamily;
use ipnet::IpNet;

/// Lines without indentation and without empty ones; `nft` breaks lists of elements as it likes.
fn lines(text: &str) -> Vec<String> {
    let text = text.replace(",\n\t\t\t     ", ", ");
    text.lines().map(|line| line.trim().to_owned()).filter(|line| !line.is_empty()).collect()
}

/// Stands in for the WireGuard device.
fn add_mesh_device() {
    run("ip link add mesh0 type veth peer name far0 && ip link set mesh0 up && ip link set far0 up");
}

fn table_lines() -> Vec<String> {
    lines(&run("nft list table inet talos_kubespan"))
}

#[test]
fn nft_prints_the_documented_rules() {
    in_namespace(|| {
        add_mesh_device();
        let state = mesh(
            1420,
            &["10.1.0.0/16", "192.0.2.7/32", "255.255.255.255/32"],
            &["fd00:1::/64", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe/127"],
        );
        assert_eq!(apply(&state).unwrap(), Applied::Rebuilt);
        let expected = r#"
table inet talos_kubespan {
    set kubespan_targets_ipv4 {
        type ipv4_addr
        flags interval
        elements = { 10.1.0.0/16, 192.0.2.7, 255.255.255.255 }
    }
    set kubespan_targets_ipv6 {
        type ipv6_addr
        flags interval
        elements = { fd00:1::/64, ffff:ffff:ffff:ffff:ffff:ffff:ffff:fffe/127 }
    }
    chain kubespan_outgoing {
        type route hook output priority filter; policy accept;
        meta mark 0x00000020 accept
        meta mark & 0x00000020 == 0x00000020 udp sport 51820 meta mark set meta mark | 0x00000060 accept
        icmpv6 type 133-137 accept
        oifname "lo" fib daddr type local accept
        ip daddr @kubespan_targets_ipv4 tcp flags syn / syn,rst tcp option maxseg size > 1380 tcp option maxseg size set 1380
        ip6 daddr @kubespan_targets_ipv6 tcp flags syn / syn,rst tcp option maxseg size > 1360 tcp option maxseg size set 1360
        ip daddr @kubespan_targets_ipv4 meta mark set meta mark & 0xffffffdf | 0x00000040 accept
        ip6 daddr @kubespan_targets_ipv6 meta mark set meta mark & 0xffffffdf | 0x00000040 accept
    }
    chain kubespan_prerouting {
        type filter hook prerouting priority filter; policy accept;
        icmpv6 type 133-137 accept
        ip daddr @kubespan_targets_ipv4 tcp flags syn / syn,rst tcp option maxseg size > 1380 tcp option maxseg size set 1380
        ip6 daddr @kubespan_targets_ipv6 tcp flags syn / syn,rst tcp option maxseg size > 1360 tcp option maxseg size set 1360
        ip daddr @kubespan_targets_ipv4 meta mark set meta mark & 0xffffffdf | 0x00000040 accept
        ip6 daddr @kubespan_targets_ipv6 meta mark set meta mark & 0xffffffdf | 0x00000040 accept
    }
}"#;
        assert_eq!(table_lines(), lines(expected));
    });
}

#[test]
fn both_ends_of_the_address_space() {
    in_namespace(|| {
        add_mesh_device();
        let all = mesh(1420, &["0.0.0.0/0"], &["::/0"]);
        apply(&all).unwrap();
        assert_eq!(apply(&all).unwrap(), Applied::Unchanged);
        let text = run("nft list set inet talos_kubespan kubespan_targets_ipv4");
        assert!(text.contains("0.0.0.0/0"), "{text}");
        let text = run("nft list set inet talos_kubespan kubespan_targets_ipv6");
        assert!(text.contains("::/0"), "{text}");
        let edges = mesh(1420, &["0.0.0.0/32", "255.255.255.254/31"], &["::/128", "ffff::/16"]);
        assert_eq!(apply(&edges).unwrap(), Applied::Elements { deleted: 2, added: 4 });
        assert_eq!(apply(&edges).unwrap(), Applied::Unchanged);
        let none = mesh(1420, &[], &[]);
        assert_eq!(apply(&none).unwrap(), Applied::Elements { deleted: 4, added: 0 });
        assert!(!run("nft list table inet talos_kubespan").contains("elements"));
    });
}

#[test]
fn elements_nft_wrote_are_understood() {
    in_namespace(|| {
        add_mesh_device();
        let state = mesh(1420, &["10.1.0.0/16"], &[]);
        apply(&state).unwrap();
        run(
            "nft add element inet talos_kubespan kubespan_targets_ipv4 { 172.16.0.1-172.16.0.9, 255.255.255.255 }",
        );
        assert_eq!(apply(&state).unwrap(), Applied::Elements { deleted: 2, added: 0 });
        assert_eq!(apply(&state).unwrap(), Applied::Unchanged);
    });
}

#[test]
fn the_table_is_read_only_after_other_programs_changed_nftables() {
    in_namespace(|| {
        add_mesh_device();
        let mut applier = Applier::default();
        let state = mesh(1420, &["10.1.0.0/16", "10.5.0.0/16"], &[]);
        assert_eq!(applier.apply(&state).unwrap(), Applied::Rebuilt);
        assert_eq!(applier.apply(&state).unwrap(), Applied::Unchanged);
        let reads = applier.table_reads();

        for (targets, applied) in [
            (vec!["10.1.0.0/16", "10.3.0.0/16"], Applied::Elements { deleted: 1, added: 1 }),
            (vec!["10.1.0.0/16", "10.3.0.0/16"], Applied::Unchanged),
            (vec!["10.1.0.0/16", "10.3.0.0/16", "10.7.0.0/16"], Applied::Elements { deleted: 0, added: 1 }),
        ] {
            assert_eq!(applier.apply(&mesh(1420, &targets, &[])).unwrap(), applied);
        }
        assert_eq!(applier.table_reads(), reads, "nothing but our own changes");
        let state = mesh(1420, &["10.1.0.0/16", "10.3.0.0/16", "10.7.0.0/16"], &[]);
        assert_eq!(apply(&state).unwrap(), Applied::Unchanged, "the kernel has it all");

        run("nft delete element inet talos_kubespan kubespan_targets_ipv4 { 10.1.0.0/16 }");
        let state = mesh(1420, &["10.1.0.0/16", "10.7.0.0/16"], &[]);
        assert_eq!(applier.apply(&state).unwrap(), Applied::Elements { deleted: 1, added: 1 });
        assert_eq!(applier.table_reads(), reads + 1);
        assert_eq!(apply(&state).unwrap(), Applied::Unchanged);
    });
}

#[test]
fn neighbours_and_overlaps_change_only_themselves() {
    in_namespace(|| {
        add_mesh_device();
        apply(&mesh(1420, &["10.0.0.0/24", "10.0.1.0/24", "10.9.0.0/16", "10.9.1.0/24"], &[])).unwrap();
        // The overlap ends, the address stays covered; the neighbour splits off.
        let less = mesh(1420, &["10.0.0.0/24", "10.9.0.0/16"], &[]);
        assert_eq!(apply(&less).unwrap(), Applied::Elements { deleted: 1, added: 1 });
        assert_eq!(apply(&less).unwrap(), Applied::Unchanged);
        let text = run("nft list set inet talos_kubespan kubespan_targets_ipv4");
        assert!(text.contains("10.0.0.0/24, 10.9.0.0/16"), "{text}");
    });
}

/// The addresses of the node touch those of other nodes, in both families, and the API server has an IPv4 address.
#[test]
fn a_node_that_comes_or_goes_is_one_message_for_each_set() {
    in_namespace(|| {
        add_mesh_device();
        let nodes = |count: u8| {
            let (v4, v6) = (format!("192.0.2.{count}/32"), format!("fd00:1::{count:x}/128"));
            let mut state = mesh(1420, &["192.0.2.1/32", &v4], &["fd00:1::1/128", &v6]);
            state
                .targets_v4
                .extend((1..count).map(|it| format!("192.0.2.{it}/32").parse::<IpNet>().unwrap()));
            state
                .targets_v6
                .extend((1..count).map(|it| format!("fd00:1::{it:x}/128").parse::<IpNet>().unwrap()));
            let all = state.targets_v4.iter().chain(&state.targets_v6).map(IpNet::addr).collect();
            let servers = vec!["192.0.2.1:6443".parse().unwrap()];
            state.bypass = Bypass { servers, nodes: all, ..Bypass::default() };
            state
        };
        let mut applier = Applier::default();
        applier.apply(&nodes(9)).unwrap();
        // One element of `kubespan_targets_ipv4`, of `kubespan_targets_ipv6` and of `fairlead_nodes_ipv4`.
        for count in [10, 11, 12] {
            let applied = applier.apply(&nodes(count)).unwrap();
            assert_eq!(applied, Applied::Elements { deleted: 0, added: 3 });
        }
        for count in [11, 10, 9] {
            let applied = applier.apply(&nodes(count)).unwrap();
            assert_eq!(applied, Applied::Elements { deleted: 3, added: 0 });
        }
        assert_eq!(apply(&nodes(9)).unwrap(), Applied::Unchanged, "the kernel has it all");
    });
}

#[test]
fn damage_is_repaired_in_one_step() {
    in_namespace(|| {
        add_mesh_device();
        let state = mesh(1420, &["10.1.0.0/16"], &["fd00:1::/64"]);
        apply(&state).unwrap();
        let whole = table_lines();
        let handle =
            "nft -a list chain inet talos_kubespan kubespan_outgoing | grep -o 'handle [0-9]*$' | tail -1";
        for damage in [
            "nft flush table inet talos_kubespan".to_owned(),
            "nft flush chain inet talos_kubespan kubespan_prerouting".to_owned(),
            "nft delete table inet talos_kubespan".to_owned(),
            "nft flush ruleset".to_owned(),
            "nft insert rule inet talos_kubespan kubespan_prerouting drop".to_owned(),
            format!("nft delete rule inet talos_kubespan kubespan_outgoing $({handle})"),
            format!("nft replace rule inet talos_kubespan kubespan_outgoing $({handle}) accept"),
            "nft add table inet talos_kubespan '{ flags dormant; }'".to_owned(),
            "nft add chain inet talos_kubespan other".to_owned(),
            "nft 'chain inet talos_kubespan kubespan_prerouting { policy drop; }'".to_owned(),
        ] {
            run(&damage);
            assert_ne!(table_lines_or_none(), whole, "`{damage}` did nothing");
            assert_eq!(apply(&state).unwrap(), Applied::Rebuilt, "after {damage}");
            assert_eq!(table_lines(), whole, "after {damage}");
            assert_eq!(apply(&state).unwrap(), Applied::Unchanged, "after {damage}");
        }
        // Flushing a set leaves the rules whole: only elements come back.
        run("nft flush set inet talos_kubespan kubespan_targets_ipv6");
        assert_eq!(apply(&state).unwrap(), Applied::Elements { deleted: 0, added: 1 });
        assert_eq!(table_lines(), whole);
    });
}

fn table_lines_or_none() -> Vec<String> {
    lines(&run("nft list table inet talos_kubespan || true"))
}

#[test]
fn a_table_of_another_program_with_our_name_is_replaced_and_other_tables_stay() {
    in_namespace(|| {
        add_mesh_device();
        run("nft add table inet talos_kubespan '{ set kubespan_targets_ipv4 { type inet_service; }; }'");
        run("nft add table inet other '{ set s { type ipv4_addr; flags interval; }; chain c { accept; }; }'");
        run("nft add table ip talos_kubespan '{ chain kubespan_prerouting { drop; }; }'");
        let others = || run("nft list table inet other; nft list table ip talos_kubespan");
        let before = others();
        assert_eq!(apply(&mesh(1420, &["10.1.0.0/16"], &[])).unwrap(), Applied::Rebuilt);
        assert_eq!(apply(&mesh(1420, &["10.1.0.0/16"], &[])).unwrap(), Applied::Unchanged);
        assert_eq!(others(), before);
    });
}

#[test]
fn another_mtu_rewrites_the_rules() {
    in_namespace(|| {
        add_mesh_device();
        apply(&mesh(1420, &["10.1.0.0/16"], &[])).unwrap();
        assert_eq!(apply(&mesh(1340, &["10.1.0.0/16"], &[])).unwrap(), Applied::Rebuilt);
        let text = run("nft list table inet talos_kubespan");
        assert!(text.contains("maxseg size set 1300") && text.contains("maxseg size set 1280"), "{text}");
        assert_eq!(apply(&mesh(1340, &["10.1.0.0/16"], &[])).unwrap(), Applied::Unchanged);
    });
}

#[test]
fn the_api_server_is_reached_past_the_mesh() {
    in_namespace(|| {
        add_mesh_device();
        let mut state = mesh(1420, &["192.0.2.0/24"], &["fd00:1::/64"]);
        state.bypass = Bypass {
            servers: vec!["192.0.2.1:6443".parse().unwrap(), "[fd00:1::1]:6443".parse().unwrap()],
            nodes: vec!["192.0.2.2".parse().unwrap(), "fd00:1::2".parse().unwrap()],
            ..Bypass::default()
        };
        assert_eq!(apply(&state).unwrap(), Applied::Rebuilt);
        assert_eq!(apply(&state).unwrap(), Applied::Unchanged);
        let outgoing = lines(&run("nft list chain inet talos_kubespan kubespan_outgoing"));
        for rule in [
            "ip daddr 192.0.2.1 tcp dport 6443 meta mark set meta mark | 0x00000060 accept",
            "ip saddr 192.0.2.1 tcp sport 6443 ip daddr @fairlead_nodes_ipv4 accept",
            "ip6 daddr fd00:1::1 tcp dport 6443 meta mark set meta mark | 0x00000060 accept",
            "ip6 saddr fd00:1::1 tcp sport 6443 ip6 daddr @fairlead_nodes_ipv6 accept",
        ] {
            let at = outgoing.iter().position(|line| line == rule);
            let marks = outgoing.iter().position(|line| line.contains("@kubespan_targets_ipv4"));
            assert!(at.is_some() && at < marks, "{rule} not before the marks in {outgoing:#?}");
        }
        let prerouting = run("nft list chain inet talos_kubespan kubespan_prerouting");
        assert!(!prerouting.contains("6443"), "pods have no other way than the mesh: {prerouting}");
        // One more node is one more element, not another table.
        state.bypass.nodes.push("192.0.2.9".parse().unwrap());
        assert_eq!(apply(&state).unwrap(), Applied::Elements { deleted: 0, added: 1 });
        state.bypass = Bypass::default();
        assert_eq!(apply(&state).unwrap(), Applied::Rebuilt);
    });
}

#[test]
fn connections_to_addresses_outside_of_the_mesh_are_answered_past_the_mesh() {
    in_namespace(|| {
        add_mesh_device();
        let mut state = mesh(1420, &["192.0.2.0/24"], &["fd00:1::/64"]);
        state.bypass.own = vec!["198.51.100.1/32".parse().unwrap(), "fd00:2::/64".parse().unwrap()];
        assert_eq!(apply(&state).unwrap(), Applied::Rebuilt);
        assert_eq!(apply(&state).unwrap(), Applied::Unchanged);
        let outgoing = lines(&run("nft list chain inet talos_kubespan kubespan_outgoing"));
        for rule in [
            "ct direction reply ip saddr != @fairlead_own_ipv4 ct original ip daddr != @fairlead_own_ipv4 ct original ip daddr != @kubespan_targets_ipv4 meta mark set meta mark | 0x00000060 accept",
            "ct direction reply ip6 saddr != @fairlead_own_ipv6 ct original ip6 daddr != @fairlead_own_ipv6 ct original ip6 daddr != @kubespan_targets_ipv6 meta mark set meta mark | 0x00000060 accept",
        ] {
            let at = outgoing.iter().position(|line| line == rule);
            let marks = outgoing.iter().position(|line| line.starts_with("ip daddr @kubespan_targets_ipv4"));
            assert!(at.is_some() && at < marks, "{rule} not before the marks in {outgoing:#?}");
        }
        let prerouting = run("nft list chain inet talos_kubespan kubespan_prerouting");
        assert!(!prerouting.contains("ct direction"), "pods have no other addresses: {prerouting}");
        // One more block of this node is one more element, not another table.
        state.bypass.own.push("10.64.0.0/27".parse().unwrap());
        assert_eq!(apply(&state).unwrap(), Applied::Elements { deleted: 0, added: 1 });
    });
}

#[test]
fn what_a_relay_s_pod_answers_nodes_goes_the_way_it_came() {
    in_namespace(|| {
        add_mesh_device();
        let mut state = mesh(1420, &["192.0.2.0/24"], &["fd00:1::/64"]);
        state.bypass.nodes = vec!["192.0.2.2".parse().unwrap(), "fd00:1::2".parse().unwrap()];
        state.bypass.relays = vec!["10.64.0.9:3478".parse().unwrap(), "[fd02::9]:3478".parse().unwrap()];
        assert_eq!(apply(&state).unwrap(), Applied::Rebuilt);
        assert_eq!(apply(&state).unwrap(), Applied::Unchanged);
        let prerouting = lines(&run("nft list chain inet talos_kubespan kubespan_prerouting"));
        for rule in [
            "ip saddr 10.64.0.9 tcp sport 3478 ip daddr @fairlead_nodes_ipv4 accept",
            "ip6 saddr fd02::9 tcp sport 3478 ip6 daddr @fairlead_nodes_ipv6 accept",
        ] {
            let at = prerouting.iter().position(|line| line == rule);
            let marks = prerouting.iter().position(|line| line.contains("@kubespan_targets_ipv4"));
            assert!(at.is_some() && at < marks, "{rule} not before the marks in {prerouting:#?}");
        }
        let outgoing = run("nft list chain inet talos_kubespan kubespan_outgoing");
        assert!(!outgoing.contains("3478"), "programs of the host are no relay: {outgoing}");
        state.bypass = Bypass::default();
        assert_eq!(apply(&state).unwrap(), Applied::Rebuilt);
    });
}

#[test]
fn a_hundred_thousand_prefixes() {
    in_namespace(|| {
        add_mesh_device();
        let (v4, v6) = targets(50_000);
        let mut state = MeshState {
            interface: "mesh0".into(),
            mtu: 1420,
            addresses: Vec::new(),
            targets_v4: v4,
            targets_v6: v6,
            bypass: Bypass::default(),
            plain: Vec::new(),
            narrow: Vec::new(),
            masqueraded: Vec::new(),
            without_default: Vec::new(),
            listen_port: 51820,
            sources: Vec::new(),
            uplinks: Vec::new(),
        };
        assert_eq!(apply(&state).unwrap(), Applied::Rebuilt);
        assert_eq!(apply(&state).unwrap(), Applied::Unchanged);
        state.targets_v4.remove(17_000);
        state.targets_v6.remove(23_000);
        assert_eq!(apply(&state).unwrap(), Applied::Elements { deleted: 2, added: 0 });
        assert_eq!(apply(&state).unwrap(), Applied::Unchanged);
        let count = run(
            "nft -j list set inet talos_kubespan kubespan_targets_ipv4 | jq '.nftables[1].set.elem | length'",
        );
        assert_eq!(count.trim(), "49999");
    });
}

#[test]
fn policy_routing_is_as_documented_and_goes_again() {
    in_namespace(|| {
        add_mesh_device();
        let rules = || run("ip rule; ip -6 rule");
        let rules_before = rules();
        run(
            "ip rule add pref 32400 fwmark 0x40/0x60 lookup 181; ip -6 rule add pref 32400 fwmark 0x40/0x60 lookup 181",
        );
        run("nft add table inet other");
        let (rules_with_foreign, tables_before) = (rules(), run("nft list tables"));
        apply(&mesh(1420, &["10.1.0.0/16"], &[])).unwrap();
        for family in ["-4", "-6"] {
            let rules = run(&format!("ip {family} rule"));
            assert!(rules.contains("32500:\tfrom all fwmark 0x40/0x60 lookup 180"), "{rules}");
            let last = "32800:\tfrom all fwmark 0/0x60 lookup 180 suppress_prefixlength 0";
            assert!(rules.trim_end().lines().last().is_some_and(|line| line.starts_with(last)), "{rules}");
            let routes = run(&format!("ip {family} route show table 180"));
            assert!(routes.starts_with("default dev mesh0 "), "{routes}");
            let last = routes.lines().nth(1).unwrap_or_default();
            assert!(
                last.starts_with("unreachable default ") && last.contains("metric 4278198272"),
                "{routes}"
            );
            assert_eq!(routes.lines().count(), 2, "{routes}");
        }
        // Another process removes it; it is restored.
        run(
            "ip rule del pref 32500; ip -6 rule del pref 32800; ip route flush table 180; ip link set mesh0 down; ip link set mesh0 up",
        );
        apply(&mesh(1420, &["10.1.0.0/16"], &[])).unwrap();
        assert!(run("ip rule").contains("32500:") && run("ip -6 rule").contains("32800:"));
        assert!(
            run("ip route show table 180").contains("mesh0")
                && run("ip -6 route show table 180").contains("mesh0")
        );

        assert_eq!(device().unwrap().as_deref(), Some("mesh0"));
        for _ in 0..2 {
            remove().unwrap();
            assert_eq!(device().unwrap(), None);
            assert_eq!(run("ip link show mesh0 2>/dev/null || true"), "", "the device goes too");
            assert_eq!(
                (rules(), run("nft list tables")),
                (rules_with_foreign.clone(), tables_before.clone())
            );
            assert_eq!(run("ip route show table 180 2>/dev/null || true").trim(), "");
            assert_eq!(run("ip -6 route show table 180 2>/dev/null || true").trim(), "");
        }
        run("ip rule del pref 32400; ip -6 rule del pref 32400");
        assert_eq!(rules(), rules_before);
    });
}

#[test]
fn the_table_has_routes_to_targets_where_the_host_has_no_default_route() {
    in_namespace(|| {
        add_mesh_device();
        let all = |family: &str| {
            let routes = run(&format!("ip {family} route show table 180"));
            let prefix = |line: &str| line.split(" dev mesh0").next().unwrap().to_owned();
            let mut found: Vec<String> =
                routes.lines().filter(|line| line.contains(" dev mesh0")).map(prefix).collect();
            found.sort();
            found
        };
        let narrow = NarrowRoute { destination: "10.1.0.0/24".parse().unwrap(), mtu: 1300 };
        let state = MeshState {
            narrow: vec![narrow],
            without_default: vec![IpFamily::V4],
            listen_port: 51820,
            sources: Vec::new(),
            uplinks: Vec::new(),
            ..mesh(1420, &["10.1.0.0/24", "10.1.1.0/24", "10.9.0.1/32"], &["fd00:1::/64"])
        };
        apply(&state).unwrap();
        assert_eq!(all("-4"), ["10.1.0.0/23", "10.1.0.0/24", "10.9.0.1", "default"]);
        assert_eq!(all("-6"), ["default"]);
        let other = MeshState { without_default: vec![IpFamily::V6], ..state.clone() };
        apply(&other).unwrap();
        assert_eq!(all("-4"), ["10.1.0.0/24", "default"]);
        assert_eq!(all("-6"), ["default", "fd00:1::/64"]);
        // A peer that has everything: the rule passes over default routes.
        let both = IpFamily::BOTH.to_vec();
        apply(&MeshState { without_default: both, ..mesh(1420, &["0.0.0.0/0"], &["::/0"]) }).unwrap();
        assert_eq!(all("-4"), ["0.0.0.0/1", "128.0.0.0/1", "default"]);
        assert_eq!(all("-6"), ["8000::/1", "::/1", "default"]);
        assert_eq!(device().unwrap().as_deref(), Some("mesh0"));
        remove().unwrap();
        assert_eq!(
            run("ip route show table 180 2>/dev/null; ip -6 route show table 180 2>/dev/null || true").trim(),
            ""
        );
    });
}

#[test]
fn a_missing_device_is_named() {
    in_namespace(|| {
        let error = apply(&mesh(1420, &[], &[])).unwrap_err().to_string();
        assert!(error.contains("mesh0") && error.contains("no such link"), "{error}");
        assert!(run("ip route show table 180").starts_with("unreachable default"), "packets are dropped");
        assert!(run("ip rule").contains("32500:"));
    });
}

/// KubeSpan's own, for example: the same names, but not our route protocol.
#[test]
fn what_another_program_made_under_the_same_names_stays() {
    in_namespace(|| {
        add_mesh_device();
        run("nft add table inet talos_kubespan; ip route add default dev mesh0 table 180; \
             ip rule add pref 32500 fwmark 0x40/0x60 lookup 180");
        let state = || [run("ip rule"), run("nft list ruleset"), run("ip route show table 180")];
        let before = state();
        remove().unwrap();
        assert_eq!((state(), device().unwrap()), (before, None));
    });
}

/// An administrator sets it down, or another program changes it.
#[test]
fn the_device_is_brought_up_again() {
    in_namespace(|| {
        add_mesh_device();
        let state = mesh(1420, &["10.1.0.0/16"], &["fd01::/64"]);
        apply(&state).unwrap();
        run("ip link set mesh0 down; ip link set mesh0 mtu 1300; ip addr flush dev mesh0");
        apply(&state).unwrap();
        let link = run("ip -o link show mesh0");
        assert!(link.contains("mtu 1420") && link.contains(",UP"), "{link}");
        assert!(run("ip -4 -o addr show mesh0").contains("169.254.1.1/32"));
        for family in ["-4", "-6"] {
            assert!(run(&format!("ip {family} route show table 180")).starts_with("default dev mesh0 "));
        }
    });
}
