//! The mesh beside the real programs of Debian 12 that write rules, routes, addresses and firewalls on a host, with the configuration that they
//! have once installed: systemd-networkd, firewalld, ufw, keepalived and docker. `docs/beside.md` has a row for each.

use fairlead_dataplane::forwarding::ForwardingProblem;

use crate::beside_host::DebianHost;
use crate::mesh_guard_routes::{assert_kept, everything, own_rules};
use crate::mesh_guard_routes_bed::{Bed, DATAGRAMS, Side};

/// Datagrams that arrive from the second side's pod and node at these addresses of the first one.
fn arrive(bed: &Bed, addresses: &[&str]) -> usize {
    let from = [&bed.b.pod, &bed.b.node];
    from.iter().map(|from| addresses.iter().map(|to| bed.send(from, to)).sum::<usize>()).sum()
}

fn assert_answered(bed: &Bed, what: &str) {
    let all = 2 * Side::ADDRESSES_OF_A.len() * DATAGRAMS;
    assert_eq!(arrive(bed, &Side::ADDRESSES_OF_A), all, "{what}: from the other side");
}

/// The uplink of the bed as a host's administrator writes it, and udev's record that the links are there.
const NETWORKD: &str = "mkdir -p /run/udev/data /etc/systemd/network; touch /run/udev/control
for link in /sys/class/net/*; do echo I:1 >/run/udev/data/n$(cat $link/ifindex); done
mkdir -p /run/systemd/netif/links /run/systemd/netif/leases /run/systemd/netif/lldp
chown -R systemd-network: /run/systemd/netif
rm -f /etc/systemd/network/*
cat >/etc/systemd/network/10-uplink.network <<END
[Match]
Name=eth0
[Network]
Gateway=192.0.2.2
Gateway=fd02::2
[Address]
Address=192.0.2.1/24
[Address]
Address=fd02::1/64
DuplicateAddressDetection=none
END";

/// A file that matches the device of the mesh, too, as those of administrators that match all links.
const NETWORKD_ALL: &str =
    "printf '[Match]\nName=guard*\n[Network]\nLinkLocalAddressing=no\n' >/etc/systemd/network/20-all.network";

/// systemd 252: `link_drop_foreign_config`, for each link that it configures, deletes rules and routes of others on that link or on none.
#[test]
fn what_systemd_networkd_deletes_lets_nothing_out_and_comes_back() {
    let mut bed = Bed::new();
    let mut host = DebianHost::new(&bed.a.node, &[]);
    let before = own_rules(&bed);
    host.sh(NETWORKD);
    for what in ["started", "restarted", "with all links"] {
        if what == "with all links" {
            host.sh(NETWORKD_ALL);
        }
        host.start("SYSTEMD_LOG_LEVEL=debug /lib/systemd/systemd-networkd");
        host.wait_for_log("eth0: Routes set");
        if what == "with all links" {
            host.wait("! ip route show table 180 | grep -q guard");
        }
        let left = own_rules(&bed);
        // Those that go on at another rule it does not know.
        assert!(!left.iter().any(|rule| rule.contains(" lookup ")), "{what}: it deletes rules: {left:?}");
        assert_eq!(bed.leaks(), 0, "{what}");
        bed.a.node.sh("nft delete table inet fairlead_guard");
        assert!(bed.leaks() > 0, "{what}, without the guard");
        bed.apply();
        assert_eq!(own_rules(&bed), before, "{what}");
        assert_kept(everything(&bed), what);
        assert_answered(&bed, what);
        host.stop();
    }
}

const FIREWALLD: &str = "firewalld --nofork --nopid";

/// Waits for the rules of its configuration, of which this text is one. While it loads them, another table drops everything.
fn wait_for_firewalld(host: &mut DebianHost, rule: &str) {
    host.wait(&format!(
        "nft list chain inet firewalld filter_FORWARD_ZONES 2>/dev/null | grep -q '{rule}' && \
         ! nft list table inet firewalld_policy_drop >/dev/null 2>&1"
    ));
}

/// The commands of the problem, with the program that needs no running daemon, and for the link of the bed's pod, whose name is not that of pods' links.
fn allow_in_firewalld(bed: &Bed, host: &mut DebianHost) {
    let problems = &bed.a.forwarding().problems;
    let [problem @ ForwardingProblem::Rejected { command, .. }] = &problems[..] else {
        panic!("{problems:?}")
    };
    assert_eq!(problem.reason(), "ForwardingDropped");
    let commands = command
        .replace("firewall-cmd --permanent", "firewall-offline-cmd")
        .replace("=veth+", "=veth+ --add-interface=pod0")
        .replace("firewall-cmd --reload", "true");
    host.sh(&commands);
}

/// firewalld 1.3.3, whose default zone is `public`. Its `IPv6_rpfilter` drops packets that come by another link than answers would take.
#[test]
fn firewalld_is_named_and_with_its_commands_everything_passes() {
    for (mut bed, is_over_ipv6) in [(Bed::new(), false), (Bed::over_ipv6(), true)] {
        let mut host = DebianHost::new(&bed.a.node, &["firewalld"]);
        host.sh("mkdir -p /run/dbus; dbus-daemon --system --fork");
        host.start(FIREWALLD);
        wait_for_firewalld(&mut host, "goto filter_FWD_public");
        bed.apply_lasting();
        assert_eq!(bed.leaks(), 0, "cut off");
        assert_eq!(bed.send(&bed.a.node, "fd02::2"), DATAGRAMS, "what the host sends passes");
        allow_in_firewalld(&bed, &mut host);
        for what in ["reloaded", "restarted"] {
            if what == "reloaded" {
                host.sh("kill -HUP $(cat /tmp/pid)");
            } else {
                host.stop();
                host.start(FIREWALLD);
            }
            wait_for_firewalld(&mut host, "pod0");
            bed.apply_lasting();
            assert_eq!(bed.a.forwarding().problems, [], "{what}");
            // Neighbours that did not answer while it dropped everything are asked again.
            bed.wait();
            assert_kept(everything(&bed), what);
            assert_answered(&bed, what);
        }
        if is_over_ipv6 {
            bed.a.node.sh("nft flush chain inet talos_kubespan fairlead_arriving");
            assert_eq!(
                bed.send(&bed.b.node, "192.0.2.1"),
                0,
                "the check of sources drops WireGuard's packets"
            );
            bed.apply();
            assert_answered(&bed, "marked");
        }
    }
}

/// As hardening guides have it, and firewalld with `FirewallBackend=iptables`: in `raw`, before all others, also for Neighbor Discovery.
#[test]
fn checks_of_sources_by_iptables_let_other_nodes_through() {
    for (mut bed, iptables) in [(Bed::new(), "iptables-nft"), (Bed::over_ipv6(), "ip6tables-nft")] {
        let check = "-t raw -A PREROUTING -i eth0 -m rpfilter --validmark --invert -j DROP";
        bed.a.node.sh(&format!("{iptables} {check}"));
        assert_kept(everything(&bed), iptables);
        assert_answered(&bed, iptables);
        bed.a.node.sh("nft flush chain inet talos_kubespan fairlead_arriving");
        assert_eq!(bed.send(&bed.b.node, "10.77.1.2"), 0, "{iptables}: the check drops WireGuard's packets");
        bed.apply();
        assert_answered(&bed, iptables);
    }
}

/// ufw 0.36.2: policy DROP for what comes in and what is forwarded.
#[test]
fn ufw_lets_the_mesh_through_over_its_reload() {
    let mut bed = Bed::new();
    let mut host = DebianHost::new(&bed.a.node, &["ufw"]);
    // As its `postinst` does.
    host.sh("cp /usr/share/ufw/*.rules /usr/share/ufw/*.init /usr/share/ufw/ufw.conf /etc/ufw");
    for what in ["ufw --force enable", "ufw reload", "ufw disable; ufw --force enable"] {
        host.sh(what);
        assert_eq!(bed.leaks(), 0, "{what}");
        bed.apply_lasting();
        assert_eq!(bed.a.forwarding().problems, [], "{what}");
        assert!(bed.a.forwarding().is_dropped, "{what}");
        assert_kept(everything(&bed), what);
        assert_eq!(
            arrive(&bed, &Side::ADDRESSES_OF_A[..2]),
            4 * DATAGRAMS,
            "{what}: from the other side to the pod"
        );
    }
    assert_eq!(
        bed.send(&bed.b.node, "192.0.2.1"),
        0,
        "what comes for the host needs a rule of the administrator"
    );
    host.sh(&format!("ufw allow in on {}", bed.a.interface));
    assert_answered(&bed, "with that rule");
}

/// keepalived 2.2.7.
#[test]
fn addresses_of_keepalived_are_no_sources_of_the_mesh() {
    let bed = Bed::new();
    let mut host = DebianHost::new(&bed.a.node, &[]);
    host.sh("cat >/tmp/keepalived.conf <<END
vrrp_instance one {
    interface eth0
    state MASTER
    virtual_router_id 51
    priority 150
    virtual_ipaddress {
        192.0.2.100/24
    }
}
vrrp_instance two {
    interface eth0
    state MASTER
    virtual_router_id 52
    priority 150
    virtual_ipaddress {
        fe80::100/64
        fd02::100/64
    }
}
END");
    for what in ["started", "restarted"] {
        host.sh("rm -rf /run/keepalived; mkdir /run/keepalived");
        host.start("keepalived --dont-fork --log-console --use-file /tmp/keepalived.conf");
        host.wait_for_log("one) Entering MASTER STATE");
        host.wait("ip address show dev eth0 | grep -q 'fd02::100'");
        assert_kept(everything(&bed), what);
        assert_answered(&bed, what);
        host.stop();
        assert!(!bed.a.node.sh("ip address show dev eth0").contains(".100"), "the address is gone");
        assert_kept(everything(&bed), &format!("{what} and stopped"));
    }
}

/// docker.io 20.10.24 of Debian 12.
#[test]
fn docker_drops_what_is_forwarded_but_not_the_mesh() {
    let mut bed = Bed::new();
    let mut host = DebianHost::new(&bed.a.node, &["docker.io"]);
    // It sets the policy DROP where it is the one that switches forwarding on.
    host.sh("mount -t cgroup2 cgroup2 /sys/fs/cgroup; sysctl -qw net.ipv4.ip_forward=0");
    for what in ["started", "restarted"] {
        host.start("dockerd --storage-driver=vfs --data-root=/tmp/docker");
        host.wait_for_log("API listen on");
        assert_eq!(bed.leaks(), 0, "{what}");
        if what == "started" {
            assert_eq!(bed.send(&bed.a.pod, "10.77.2.2"), 0, "it drops what is forwarded");
        }
        bed.apply_lasting();
        assert_eq!(bed.a.forwarding().problems, []);
        host.sh(&format!("docker network create {what}"));
        assert_kept(everything(&bed), what);
        assert_answered(&bed, what);
        host.stop();
    }
}
