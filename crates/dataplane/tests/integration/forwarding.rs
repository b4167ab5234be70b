//! Packets that a node forwards while another program's firewall drops what it does not know, as Docker sets iptables up.

use std::time::{Duration, Instant};

use fairlead_dataplane::forwarding::{self, ForwardRules, Forwarding, ForwardingProblem};
use fairlead_dataplane::mesh::{Applier, Bypass, MeshState};
use fairlead_dataplane::nft_table::Applied;
use fairlead_netlink::netns::Netns;
use ipnet::IpNet;
use testbed_netns::{sh_in, try_sh_in};

use crate::mesh_guard_routes_bed::LASTING;
use crate::pods_common::{Host, ping, spec};

/// As Docker leaves them.
const DOCKER: &str = "for iptables in iptables-nft ip6tables-nft; do \
    $iptables -P FORWARD DROP; $iptables -N DOCKER-USER; $iptables -A FORWARD -j DOCKER-USER; \
    $iptables -A FORWARD -i docker0 ! -o docker0 -j ACCEPT; done";
const RULE: &str =
    "-A FORWARD -m mark --mark 0x10/0x10 -m comment --comment \"fairlead: pods and mesh\" -j ACCEPT";
const POD: [&str; 2] = ["10.1.0.5", "fd00:1::5"];
const OUTSIDE: [&str; 2] = ["192.0.2.20", "2001:db8::20"];
/// Behind the mesh's device.
const MEMBER: [&str; 2] = ["10.5.0.1", "fd05::1"];
/// Behind the uplink, a neighbour of the location, and a host that is no member.
const NEIGHBOUR: [&str; 2] = ["192.0.2.21", "2001:db8::21"];

/// Repeated work of a node program.
#[derive(Default)]
struct Program {
    rules: ForwardRules,
    mesh: Applier,
}

impl Program {
    /// What is found now, and has lasted.
    fn pass(&mut self, host: &Host) -> Forwarding {
        host.at(|| {
            let now = Instant::now();
            drop(self.rules.apply(now));
            let forwarding = self.rules.apply(now + LASTING);
            forwarding::mark_pods(forwarding.is_dropped).unwrap();
            forwarding
        })
    }

    fn mesh(&mut self, host: &Host) {
        host.at(|| self.mesh.apply(&mesh()).unwrap());
        // The chains of other programs have been changed meanwhile, and what lasts is told.
        host.at(|| self.mesh.apply_at(&mesh(), Instant::now() + LASTING).unwrap());
    }
}

fn prefixes(texts: &[&str]) -> Vec<IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

/// This node is a gateway for the neighbour.
fn mesh() -> MeshState {
    MeshState {
        interface: "mesh0".into(),
        mtu: 1420,
        addresses: Vec::new(),
        targets_v4: prefixes(&["10.5.0.0/16"]),
        targets_v6: prefixes(&["fd05::/64"]),
        bypass: Bypass { own: prefixes(&["192.0.2.21/32", "2001:db8::21/128"]), ..Bypass::default() },
        plain: Vec::new(),
        narrow: Vec::new(),
        masqueraded: Vec::new(),
        without_default: Vec::new(),
        listen_port: 51820,
        sources: Vec::new(),
        uplinks: Vec::new(),
    }
}

struct Bed {
    host: Host,
    pod: Netns,
    other: Netns,
    /// Behind the mesh's device.
    member: Netns,
}

fn bed() -> Bed {
    let bed = Bed {
        host: Host::new(),
        pod: Netns::create().unwrap(),
        other: Netns::create().unwrap(),
        member: Netns::create().unwrap(),
    };
    bed.host.add(&spec(&bed.pod, "a", Some(POD[0]), Some(POD[1]))).unwrap();
    bed.host.add(&spec(&bed.other, "b", Some("10.1.0.6"), Some("fd00:1::6"))).unwrap();
    sh_in(&bed.host.network, "ip link set far up");
    for address in OUTSIDE.iter().chain(&NEIGHBOUR) {
        let length = if address.contains(':') { 64 } else { 24 };
        sh_in(&bed.host.network, &format!("ip addr add {address}/{length} dev far nodad"));
    }
    sh_in(&bed.host.network, "ip route add default via 192.0.2.10; ip route add default via 2001:db8::10");
    bed.add_mesh_device();
    bed
}

impl Bed {
    fn add_mesh_device(&self) {
        use std::os::fd::{AsFd as _, AsRawFd as _};
        let path = format!("/proc/{}/fd/{}", std::process::id(), self.member.as_fd().as_raw_fd());
        self.host.sh(&format!(
            "ip link add mesh0 type veth peer name eth0 netns {path} && ip link set mesh0 up && \
             sysctl -qw net.ipv4.conf.all.rp_filter=0 net.ipv4.conf.mesh0.rp_filter=0"
        ));
        sh_in(
            &self.member,
            "ip link set eth0 up; ip addr add 10.5.0.1/32 dev eth0; ip addr add fd05::1/128 dev eth0 nodad; \
             ip route add default dev eth0; ip -6 route add default dev eth0; \
             echo 1 >/proc/sys/net/ipv4/conf/eth0/proxy_arp",
        );
    }

    /// A mesh device has no neighbours to ask; a veth has.
    fn neighbours(&self) {
        let mac = sh_in(&self.member, "ip -j link show eth0 | jq -r .[0].address");
        let own = self.host.sh("ip -j link show mesh0 | jq -r .[0].address");
        for address in MEMBER {
            self.host.sh(&format!("ip neigh replace {address} lladdr {} dev mesh0", mac.trim()));
        }
        for address in NEIGHBOUR.iter().chain(&POD).chain(&OUTSIDE) {
            sh_in(&self.member, &format!("ip neigh replace {address} lladdr {} dev eth0", own.trim()));
        }
    }

    /// Whether a host of the uplink's network reaches the member of the mesh with this address.
    fn reaches_member(&self, from: &str, member: &str) -> bool {
        try_sh_in(&self.host.network, &format!("ping -c 1 -W 1 -I {from} {member}")).is_ok()
    }

    fn rules(&self) -> [String; 2] {
        ["iptables-nft", "ip6tables-nft"].map(|program| self.host.sh(&format!("{program} -S FORWARD")))
    }
}

fn reaches(from: &Netns, to: &str) -> bool {
    try_sh_in(from, &format!("ping -c 1 -W 1 {to}")).is_ok()
}

#[test]
fn pods_reach_pods_and_the_outside_through_a_firewall_that_drops() {
    let bed = bed();
    let mut program = Program::default();
    ping(&bed.pod, OUTSIDE[0]);
    assert_eq!(program.pass(&bed.host), Forwarding::default());
    assert!(!bed.host.sh("nft list ruleset").contains("fairlead"), "there is nothing to let through");

    bed.host.sh(DOCKER);
    for to in OUTSIDE.iter().chain(&["10.1.0.6", "fd00:1::6"]) {
        assert!(!reaches(&bed.pod, to), "{to}");
    }
    assert_eq!(program.pass(&bed.host), Forwarding { is_dropped: true, problems: Vec::new() });
    for to in OUTSIDE.iter().chain(&["10.1.0.6", "fd00:1::6"]) {
        ping(&bed.pod, to);
    }
    for (own, far) in POD.iter().zip(OUTSIDE) {
        ping(&bed.host.network, own);
        assert!(!bed.reaches_member(far, MEMBER[0]), "what is of no pod and no member stays dropped");
    }
}

#[test]
fn a_gateway_forwards_between_members_and_for_no_other_host() {
    let bed = bed();
    let mut program = Program::default();
    program.mesh(&bed.host);
    bed.neighbours();
    for (near, member) in NEIGHBOUR.iter().zip(MEMBER) {
        assert!(bed.reaches_member(near, member), "{near} reaches {member} without a firewall");
    }
    bed.host.sh(DOCKER);
    for (near, member) in NEIGHBOUR.iter().zip(MEMBER) {
        assert!(!bed.reaches_member(near, member), "{near} reaches {member} with one");
    }
    program.mesh(&bed.host);
    assert!(program.mesh.forwarding().problems.is_empty());
    for ((near, member), outside) in NEIGHBOUR.iter().zip(MEMBER).zip(OUTSIDE) {
        assert!(bed.reaches_member(near, member), "{near} reaches {member}");
        ping(&bed.member, near);
        assert!(!bed.reaches_member(outside, member), "{outside} is no member");
    }
    let table = bed.host.sh("nft list chain inet talos_kubespan fairlead_forward");
    for line in [
        "type filter hook forward priority filter - 1; policy accept;",
        "ip saddr @kubespan_targets_ipv4 ip daddr @kubespan_targets_ipv4 meta mark set meta mark | 0x00000010",
        "ip6 saddr @fairlead_own_ipv6 ip6 daddr @kubespan_targets_ipv6 meta mark set meta mark | 0x00000010",
    ] {
        assert!(table.contains(line), "{line} is not in {table}");
    }
    assert_eq!(bed.host.at(|| program.mesh.apply(&mesh()).unwrap()), Applied::Unchanged);
    bed.host.sh("iptables-nft -P FORWARD ACCEPT; ip6tables-nft -P FORWARD ACCEPT");
    program.mesh(&bed.host);
    assert!(!bed.host.sh("nft list ruleset").contains("fairlead_forward"), "nothing is marked any more");
    assert!(bed.rules().iter().all(|rules| !rules.contains("fairlead")), "{:?}", bed.rules());
}

#[test]
fn iptables_shows_one_rule_which_comes_back_and_goes_again() {
    let bed = bed();
    let mut program = Program::default();
    bed.host.sh(DOCKER);
    program.pass(&bed.host);
    let check = |what: &str| {
        for rules in bed.rules() {
            assert_eq!(rules.matches(RULE).count(), 1, "{what}: {rules}");
            assert!(rules.trim_end().ends_with(RULE), "{what}: the last one: {rules}");
        }
    };
    check("at first");
    program.pass(&bed.host);
    let before = bed.host.sh("nft list ruleset");
    program.pass(&bed.host);
    assert_eq!(bed.host.sh("nft list ruleset"), before);

    // Another program of this kind starts with what it finds; so does one that knew nothing.
    Program::default().pass(&bed.host);
    check("another program");
    bed.host.sh("iptables-nft -F FORWARD; ip6tables-nft -F FORWARD");
    program.pass(&bed.host);
    check("flushed");
    // What a distribution saves at shutdown and restores at the start.
    for _ in 0..2 {
        bed.host.sh("iptables-nft-save >/tmp/saved.$$; iptables-nft-restore </tmp/saved.$$; \
             ip6tables-nft-save >/tmp/saved.$$; ip6tables-nft-restore </tmp/saved.$$; rm /tmp/saved.$$");
        program.pass(&bed.host);
        check("saved and restored");
    }
    bed.host.sh(&format!("iptables-nft {RULE}; ip6tables-nft {RULE}"));
    program.pass(&bed.host);
    check("twice");

    bed.host.sh("iptables-nft -P FORWARD ACCEPT; ip6tables-nft -P FORWARD ACCEPT");
    program.pass(&bed.host);
    let left = bed.rules();
    assert!(left.iter().all(|rules| !rules.contains("fairlead") && rules.contains("ACCEPT")), "{left:?}");
    bed.host.sh("iptables-nft -P FORWARD DROP");
    program.pass(&bed.host);
    bed.host.at(|| forwarding::remove().unwrap());
    bed.host.at(|| forwarding::remove().unwrap());
    let ruleset = bed.host.sh("nft list ruleset");
    assert!(!ruleset.contains("fairlead") && !ruleset.contains("0x00000010"), "{ruleset}");
}

#[test]
fn a_rule_of_an_administrator_does_as_well_and_stays() {
    let bed = bed();
    let mut program = Program::default();
    let theirs = "-A FORWARD -m mark --mark 0x10/0x10 -j ACCEPT";
    bed.host.sh(DOCKER);
    bed.host.sh(&format!("iptables-nft {theirs}; ip6tables-nft {theirs}"));
    let has_only_theirs =
        || bed.rules().iter().all(|rules| rules.matches(theirs).count() == 1 && !rules.contains("fairlead"));
    assert_eq!(program.pass(&bed.host), Forwarding { is_dropped: true, problems: Vec::new() });
    assert!(has_only_theirs(), "{:?}", bed.rules());
    OUTSIDE.iter().for_each(|to| ping(&bed.pod, to));
    bed.host.sh("iptables-nft -P FORWARD ACCEPT; ip6tables-nft -P FORWARD ACCEPT");
    assert_eq!(program.pass(&bed.host), Forwarding::default());
    bed.host.at(|| forwarding::remove().unwrap());
    assert!(has_only_theirs(), "{:?}", bed.rules());
}

#[test]
fn what_an_explicit_rule_drops_stays_dropped() {
    let bed = bed();
    bed.host.sh(DOCKER);
    bed.host.sh("iptables-nft -A DOCKER-USER -d 192.0.2.20 -j DROP");
    Program::default().pass(&bed.host);
    assert!(!reaches(&bed.pod, OUTSIDE[0]));
    ping(&bed.pod, NEIGHBOUR[0]);
}

/// As ufw does when it is enabled on a host on which Docker has set the policy before.
#[test]
fn what_another_program_appends_later_to_drop_is_dropped() {
    let bed = bed();
    let mut program = Program::default();
    bed.host.sh(DOCKER);
    program.pass(&bed.host);
    bed.host.sh("iptables-nft -A FORWARD -d 192.0.2.20 -j DROP");
    assert!(reaches(&bed.pod, OUTSIDE[0]), "it comes after the rule that lets pods through");
    program.pass(&bed.host);
    assert!(!reaches(&bed.pod, OUTSIDE[0]));
    ping(&bed.pod, NEIGHBOUR[0]);
    assert!(bed.rules()[0].trim_end().ends_with(RULE), "{:?}", bed.rules());
    let before = bed.host.sh("nft -a list ruleset");
    program.pass(&bed.host);
    assert_eq!(bed.host.sh("nft -a list ruleset"), before);
}

#[test]
fn another_program_that_wants_the_last_rule_as_well_gets_it_for_a_time_and_is_told() {
    let bed = bed();
    bed.host.sh(DOCKER);
    let (mut rules, start) = (ForwardRules::default(), Instant::now());
    let theirs = "FORWARD -d 203.0.113.9 -j DROP";
    let mut look = |seconds| {
        bed.host.sh(&format!("iptables-nft -D {theirs} || true; iptables-nft -A {theirs}"));
        let found = bed.host.at(|| rules.apply(start + Duration::from_secs(seconds)));
        (bed.rules()[0].trim_end().ends_with(RULE), found.problems)
    };
    for number in 0..6 {
        assert_eq!(look(5 * number), (true, vec![]), "{number}");
    }
    let (is_last, problems) = look(30);
    let [problem @ ForwardingProblem::Contested { chain }] = &problems[..] else { panic!("{problems:?}") };
    assert_eq!((problem.reason(), chain.as_str()), ("ForwardingContested", "ip filter FORWARD"));
    assert!(!is_last && !look(629).0, "it stays where it is");
    assert_eq!(look(630), (true, problems), "and is moved again after ten minutes");
}

/// The command of the only problem.
fn command(forwarding: &Forwarding) -> String {
    let [problem] = &forwarding.problems[..] else { panic!("not one problem: {forwarding:?}") };
    let ForwardingProblem::Dropped { command, refusal: None, .. } = problem else { panic!("{problem:?}") };
    assert_eq!(problem.reason(), "ForwardingDropped");
    assert!(problem.to_string().ends_with(command), "{problem}");
    command.clone()
}

#[test]
fn a_firewall_of_an_administrator_is_named_with_the_rule_that_it_needs() {
    let bed = bed();
    let mut program = Program::default();
    bed.host.sh("nft add table inet mine");
    bed.host.sh("nft 'add chain inet mine through { type filter hook forward priority 5; policy drop; }'");
    let before = bed.host.sh("nft list table inet mine");
    let forwarding = program.pass(&bed.host);
    assert!(forwarding.is_dropped && !reaches(&bed.pod, OUTSIDE[0]));
    assert_eq!(bed.host.sh("nft list table inet mine"), before, "it is not ours");
    bed.host.sh(&command(&forwarding));
    assert_eq!(program.pass(&bed.host), Forwarding { is_dropped: true, problems: Vec::new() });
    for to in OUTSIDE {
        ping(&bed.pod, to);
    }
    // A table that is dormant drops nothing.
    bed.host.sh("nft add table inet mine '{ flags dormant; }'");
    assert_eq!(program.pass(&bed.host), Forwarding::default());
}

/// As the one with which firewalld drops everything while it replaces its own.
#[test]
fn a_table_that_drops_everything_for_a_moment_is_not_told_and_one_that_stays_is() {
    let bed = bed();
    let (mut rules, start) = (ForwardRules::default(), Instant::now());
    let mut look = |seconds| bed.host.at(|| rules.apply(start + Duration::from_secs(seconds)));
    let dropped = Forwarding { is_dropped: true, problems: Vec::new() };
    let reload = "nft add table inet firewalld_policy_drop; \
         nft 'add chain inet firewalld_policy_drop forward { type filter hook forward priority -10; policy drop; }'";
    bed.host.sh(reload);
    assert_eq!(look(0), dropped, "what is to pass is marked at once");
    assert_eq!(look(2), dropped);
    bed.host.sh("nft delete table inet firewalld_policy_drop");
    assert_eq!(look(4), Forwarding::default());
    bed.host.sh(reload);
    assert_eq!(look(5), dropped, "loaded once more");
    assert_eq!(look(7), dropped);
    let lasts = look(8);
    assert!(lasts.is_dropped && command(&lasts).contains("inet firewalld_policy_drop forward"), "{lasts:?}");
}

#[test]
fn iptables_legacy_is_named_with_the_rule_that_it_needs() {
    let bed = bed();
    let mut program = Program::default();
    for (iptables, own) in [("iptables-legacy", 0), ("ip6tables-legacy", 1)] {
        bed.host.sh(&format!(
            "{iptables} -P FORWARD DROP; {iptables} -N CHAIN; {iptables} -A FORWARD -i docker0 -j CHAIN; \
             {iptables} -A FORWARD -i docker0 -m mark --mark 0x10/0x10 -j ACCEPT; \
             {iptables} -A FORWARD -m mark --mark 0x10/0x10 -j DROP; {iptables} -D FORWARD 3"
        ));
        let forwarding = program.pass(&bed.host);
        assert!(forwarding.is_dropped && !reaches(&bed.pod, OUTSIDE[own]), "{iptables}");
        bed.host.sh(&command(&forwarding));
        assert_eq!(program.pass(&bed.host), Forwarding { is_dropped: true, problems: Vec::new() });
        ping(&bed.pod, OUTSIDE[own]);
        bed.host.sh(&format!("{iptables} -P FORWARD ACCEPT"));
        assert_eq!(program.pass(&bed.host), Forwarding::default());
    }
}

/// Chains of firewalld 1.3.3 (Debian 12) that see forwarded packets, without those that are empty: `ZONES` and `POLICIES` are what its zones and
/// policies add.
const FIREWALLD: &str = "table inet firewalld; delete table inet firewalld; table inet firewalld {
    chain filter_FORWARD {
        type filter hook forward priority filter + 10; policy accept;
        ct state { established, related } accept
        ct status dnat accept
        iifname lo accept
        ct state invalid drop
        ip6 daddr { ::/96, ::ffff:0.0.0.0/96, 2002::/24 } reject with icmpv6 addr-unreachable
        jump filter_FORWARD_ZONES
        reject with icmpx admin-prohibited
    }
    chain filter_FORWARD_ZONES { ZONES iifname uplink goto filter_FWD_public; goto filter_FWD_public; }
    chain filter_FWD_public {
        jump filter_FORWARD_POLICIES_pre
        jump filter_FWD_public_allow
        reject with icmpx admin-prohibited
    }
    chain filter_FORWARD_POLICIES_pre { POLICIES }
    chain filter_FWD_public_allow { oifname uplink accept; }
    chain filter_FWD_trusted { jump filter_FORWARD_POLICIES_pre; jump filter_FWD_trusted_allow; accept; }
    chain filter_FWD_trusted_allow { oifname \"veth*\" accept; oifname mesh0 accept; }
    chain filter_FWD_policy_fairlead { accept; }
}";

/// Rules that the commands of the problem add, also after each reload.
const ZONES: &str = "iifname mesh0 goto filter_FWD_trusted; iifname \"veth*\" goto filter_FWD_trusted;";
const POLICIES: &str =
    "oifname \"veth*\" jump filter_FWD_policy_fairlead; oifname mesh0 jump filter_FWD_policy_fairlead;";

fn firewalld(bed: &Bed, zones: &str, policies: &str) {
    let rules = FIREWALLD
        .replace("ZONES iif", &format!("{zones} iif"))
        .replace("{ POLICIES }", &format!("{{ {policies} }}"));
    bed.host.sh(&format!("nft '{rules}'"));
}

#[test]
fn the_last_reject_of_firewalld_is_named_with_commands_that_last_over_its_reload() {
    let bed = bed();
    let mut program = Program::default();
    ping(&bed.pod, OUTSIDE[0]);
    firewalld(&bed, "", "");
    assert!(!reaches(&bed.pod, "10.1.0.6"), "pods are cut off from each other");
    let forwarding = program.pass(&bed.host);
    let [problem] = &forwarding.problems[..] else { panic!("not one problem: {forwarding:?}") };
    let ForwardingProblem::Rejected { chain, command } = problem else { panic!("{problem:?}") };
    assert_eq!((problem.reason(), chain.as_str()), ("ForwardingDropped", "inet firewalld filter_FORWARD"));
    assert_eq!(
        command,
        "firewall-cmd --permanent --zone=trusted --add-interface=veth+; firewall-cmd --permanent --new-policy=fairlead; \
         firewall-cmd --permanent --policy=fairlead --set-target=ACCEPT; \
         firewall-cmd --permanent --policy=fairlead --add-ingress-zone=ANY; \
         firewall-cmd --permanent --policy=fairlead --add-egress-zone=trusted; firewall-cmd --reload"
    );
    program.mesh(&bed.host);
    let problems = &program.mesh.forwarding().problems;
    assert!(
        matches!(&problems[..], [one] if one.to_string().contains("--add-interface=veth+ --add-interface=mesh0;")),
        "{problems:?}"
    );
    // With the links of the pods in a zone and the mesh's device in none, the mesh is still cut off.
    firewalld(&bed, "iifname \"veth*\" goto filter_FWD_trusted;", "");
    assert_eq!(program.pass(&bed.host), Forwarding::default());
    program.mesh(&bed.host);
    assert_eq!(program.mesh.forwarding().problems.len(), 1);
    for _ in 0..2 {
        firewalld(&bed, ZONES, POLICIES);
        assert_eq!(program.pass(&bed.host), Forwarding::default());
        program.mesh(&bed.host);
        assert_eq!(program.mesh.forwarding().problems, []);
        for to in OUTSIDE.iter().chain(&["10.1.0.6", "fd00:1::6"]) {
            ping(&bed.pod, to);
        }
    }
}

#[test]
fn a_chain_that_rejects_at_its_end_is_named_with_the_rule_that_it_needs_first() {
    let bed = bed();
    let mut program = Program::default();
    bed.host.sh("nft 'table inet mine { chain through { type filter hook forward priority 5; iifname lo accept; counter reject; }; }'");
    let forwarding = program.pass(&bed.host);
    let [ForwardingProblem::Rejected { command, .. }] = &forwarding.problems[..] else {
        panic!("{forwarding:?}")
    };
    assert!(forwarding.is_dropped && !reaches(&bed.pod, OUTSIDE[0]));
    bed.host.sh(command);
    assert_eq!(program.pass(&bed.host), Forwarding { is_dropped: true, problems: Vec::new() });
    OUTSIDE.iter().for_each(|to| ping(&bed.pod, to));
}
