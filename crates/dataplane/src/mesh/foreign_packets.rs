//! Rules of other programs in nftables that work against the mesh although all of its own is in place. They are only named.
//!
//! A mark of another program is not enough for that. What enters the mesh needs none, since the rules of [`super::guard_routes`] look at destinations,
//! and forwarded packets are never taken for WireGuard's. So marks count only where they mean something to the mesh ([`Harm`]), and for packets to which it
//! means that ([`host`]). Rules that give what comes to WireGuard's port of this host to another program are found by following such a packet
//! ([`translations`]).

mod host;
mod translations;

use std::collections::BTreeMap;
use std::fmt;
use std::time::SystemTime;

use fairlead_address::IpFamily;
use fairlead_api::names::{MARK_FROM_WIREGUARD, MARK_MASK, MARK_PAST_MESH, MARK_TO_WIREGUARD, NFT_TABLE};
use fairlead_netlink::nftables::foreign::routing::{
    Effect, MarkChange, RoutingChain, RoutingHook, RoutingRule, routing_rules,
};
use fairlead_netlink::nftables::generation;
use fairlead_netlink::{Family, Result, Socket};

use super::foreign_rules::{magnitude, time};
use super::guard::PRIORITY_LEAVING;
use super::state::MeshState;
use super::table::PRIORITY;
use host::Host;
use translations::PortTranslations;

/// Begin of the names of all tables of Fairlead but [`NFT_TABLE`].
const OWN_TABLES: &str = "fairlead_";
/// Most rules that are named.
const MAX_NAMED: usize = 8;

/// A rule of another program, and what it does. `Display` is a sentence for status and Events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignPacketRule {
    /// The rule, without its count of packets.
    pub rule: RoutingRule,
    /// Harm that it does.
    pub harm: Harm,
    /// Time at which it was first seen.
    pub since: SystemTime,
    /// Number of packets that it has counted since then, rounded down to a power of ten; 0 if it does not count.
    pub at_least: u64,
}

/// Harm that a rule of another program does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Harm {
    /// Packets that the host sends get the mark of the node program's own ones, and leave in clear text.
    ClearText,
    /// Packets that are not for the mesh get the mark of those that are, and are lost in it.
    IntoMesh,
    /// Packets that the host sends into the mesh get the mark of those that go past it, and are dropped by the guard.
    PastMesh,
    /// Packets of WireGuard that come from other nodes' own addresses are dropped.
    SourceCheck,
    /// Packets of WireGuard that come from other nodes reach another program.
    Translation,
    /// Packets of WireGuard lose its mark, and enter their own tunnel or are dropped by the guard.
    WireGuard,
}

impl ForeignPacketRule {
    pub(super) const MARK: &'static str = "ForeignPacketMark";
    pub(super) const PORT_TRANSLATION: &'static str = "ForeignPortTranslation";
    pub(super) const SOURCE_CHECK: &'static str = "ForeignSourceCheck";

    /// One word for conditions, Events and metrics.
    pub const fn reason(&self) -> &'static str {
        match self.harm {
            Harm::ClearText | Harm::IntoMesh | Harm::PastMesh | Harm::WireGuard => Self::MARK,
            Harm::SourceCheck => Self::SOURCE_CHECK,
            Harm::Translation => Self::PORT_TRANSLATION,
        }
    }
}

impl fmt::Display for ForeignPacketRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rule, harm, since, at_least } = self;
        write!(f, "another program's {rule} in nftables {}, since {}", harm.deed(), time(*since))?;
        if *at_least > 0 {
            write!(f, ", and has counted at least {at_least} packets")?;
        }
        write!(f, ": {}", harm.remedy())
    }
}

impl Harm {
    const fn deed(self) -> &'static str {
        match self {
            Self::ClearText => {
                "gives packets of this host the mark 0x20, by which those to other nodes and their pods leave IN CLEAR TEXT"
            }
            Self::IntoMesh => {
                "gives packets a mark with the bit 0x40 and without 0x20, by which they enter the mesh, which drops those that are not for it"
            }
            Self::PastMesh => {
                "gives packets of this host to other nodes and their pods a mark with the bits 0x60, by which they are led past the mesh and dropped"
            }
            Self::SourceCheck => {
                "checks the sources of packets without looking at their mark, and drops what comes from other nodes' own addresses, WireGuard's packets among it"
            }
            Self::Translation => {
                "gives what comes to WireGuard's UDP port of this host to another program, so that other nodes do not reach this one, but for flows that it began"
            }
            Self::WireGuard => {
                "takes the bit 0x20 from the mark of packets of this host, WireGuard's among them, which then do not reach nodes whose own address is their endpoint"
            }
        }
    }

    const fn remedy(self) -> &'static str {
        match self {
            Self::ClearText | Self::IntoMesh | Self::PastMesh => {
                "give it another mark, without the bits 0x60 (32 and 64)"
            }
            Self::SourceCheck => {
                "have it look at the mark (nft: fib saddr . mark . iif; iptables: -m rpfilter --validmark)"
            }
            Self::Translation => {
                "give the program, or the pod's hostPort, another port, or this node one of its own (annotation kilo.squat.ai/force-endpoint)"
            }
            Self::WireGuard => {
                "have it leave the bits 0x60 as they are (nft: meta mark set meta mark & 0x60 | VALUE; iptables: --set-xmark VALUE/0xffffff9f, \
                 --restore-mark --mask 0xffffff9f)"
            }
        }
    }
}

/// The rules that were found, as of the last look.
#[derive(Debug, Default)]
pub(super) struct ForeignPacketRules {
    found: Vec<ForeignPacketRule>,
    /// Time at which each was first seen, and packets that it had counted by then.
    first: BTreeMap<String, (SystemTime, u64)>,
    /// Generation of nftables, and packets of WireGuard, at the last look.
    looked: Option<(u32, Outer)>,
    /// Whether rules were there then that do harm, or would on a host with other links and addresses.
    has_any: bool,
    translations: PortTranslations,
    /// Kept open: closing it waits for the kernel to free what the last transaction deleted.
    socket: Option<Socket>,
}

impl ForeignPacketRules {
    /// Looks for them, if nftables has changed or there were any. A failure changes nothing else of the mesh, and is logged.
    pub(super) fn observe(&mut self, state: &MeshState, now: SystemTime) {
        if let Err(error) = self.look(state, now) {
            tracing::warn!(%error, "cannot read which rules of other programs work against the mesh");
        }
    }

    pub(super) fn found(&self) -> &[ForeignPacketRule] {
        &self.found
    }

    fn look(&mut self, state: &MeshState, now: SystemTime) -> Result<()> {
        let mut socket = self.socket.take().map_or_else(|| Socket::open(Family::Netfilter), Ok)?;
        let outer = Outer::of(state);
        let generation = generation(&mut socket)?;
        let has_looked = self.translations.observe(&mut socket, generation, state, now);
        let looked = Some((generation, outer.clone()));
        // What they count is in no generation, and neither are links and addresses of this host.
        if self.looked != looked || self.has_any || has_looked {
            self.looked = looked;
            let mut rules = routing_rules(&mut socket, is_own)?;
            rules.retain(|rule| harm(rule, &outer).is_some());
            rules.extend_from_slice(self.translations.found());
            self.has_any = !rules.is_empty();
            let host = if self.has_any { Host::read(state)? } else { Host::default() };
            self.take_over(rules, &outer, &host, now);
        }
        self.socket = Some(socket);
        Ok(())
    }

    fn take_over(&mut self, rules: Vec<RoutingRule>, outer: &Outer, host: &Host, now: SystemTime) {
        let mut harmful = BTreeMap::new();
        for rule in rules {
            if let Some(harm) = host.judge(&rule, outer) {
                harmful.entry(rule.to_string()).or_insert((rule, harm));
            }
        }
        self.first.retain(|text, _| harmful.contains_key(text));
        let first = &mut self.first;
        let known = |(text, (rule, harm)): (String, (RoutingRule, Harm))| {
            let counted = rule.packets.unwrap_or_default();
            let (since, before) = *first.entry(text).or_insert((now, counted));
            let packets = counted.saturating_sub(before);
            let at_least = if packets == 0 { 0 } else { magnitude(packets) };
            ForeignPacketRule { rule: RoutingRule { packets: None, ..rule }, harm, since, at_least }
        };
        self.found = harmful.into_iter().take(MAX_NAMED).map(known).collect();
    }
}

fn is_own(table: &str) -> bool {
    table == NFT_TABLE || table.starts_with(OWN_TABLES)
}

/// Packets of WireGuard from and to other nodes' own addresses in the mesh: no others need its mark.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Outer {
    /// Links by which they come and leave.
    uplinks: Vec<String>,
    /// Families of these addresses.
    families: Vec<IpFamily>,
}

impl Outer {
    fn of(state: &MeshState) -> Self {
        let nodes = &state.bypass.nodes;
        let has_nodes = |family: &IpFamily| nodes.iter().any(|node| IpFamily::of(*node) == *family);
        let families = IpFamily::BOTH.into_iter().filter(has_nodes).collect();
        Self { uplinks: state.uplinks.clone(), families }
    }

    /// Whether all of them that come or leave by one of the links certainly come to the rule, and meet its conditions.
    fn certainly_meet(&self, rule: &RoutingRule) -> bool {
        let sees = |family: &IpFamily| rule.base.family.only().is_none_or(|only| only == *family);
        let meet = |uplink: &String| match rule.base.hook {
            RoutingHook::Output | RoutingHook::Postrouting => rule.conditions.are_met("", uplink),
            RoutingHook::Prerouting => rule.conditions.are_met(uplink, ""),
        };
        !rule.may_be_skipped && self.families.iter().any(sees) && self.uplinks.iter().any(meet)
    }
}

fn harm(rule: &RoutingRule, outer: &Outer) -> Option<Harm> {
    match rule.effect {
        Effect::Mark(change) => of_mark(rule, change, outer),
        Effect::SourceCheck => {
            let is_before = rule.base.hook == RoutingHook::Prerouting;
            (is_before && outer.certainly_meet(rule)).then_some(Harm::SourceCheck)
        }
        Effect::Translation => Some(Harm::Translation),
    }
}

/// Harm of a mark to the packets that meet the rule's conditions, whichever they are; of WireGuard's own, only where they certainly meet them.
fn of_mark(rule: &RoutingRule, change: MarkChange, outer: &Outer) -> Option<Harm> {
    let RoutingChain { hook, priority, reroutes, .. } = rule.base;
    let is_rerouted = hook == RoutingHook::Output && reroutes;
    let is_routed = hook == RoutingHook::Prerouting || is_rerouted;
    let is_known = change.unknown & MARK_MASK == 0;
    let bits = |mark| change.of(mark) & MARK_MASK;
    if is_rerouted && change.unknown == 0 && change.of(0) == MARK_FROM_WIREGUARD {
        Some(Harm::ClearText)
    } else if is_routed && is_known && bits(0) == MARK_TO_WIREGUARD {
        Some(Harm::IntoMesh)
    } else if is_rerouted && is_known && priority >= PRIORITY && bits(MARK_TO_WIREGUARD) == MARK_PAST_MESH {
        Some(Harm::PastMesh)
    } else if bits(MARK_FROM_WIREGUARD) & MARK_FROM_WIREGUARD == 0 && takes_wireguards(rule, outer) {
        Some(Harm::WireGuard)
    } else {
        None
    }
}

/// Whether packets that WireGuard sends certainly come to the rule, before the guard.
fn takes_wireguards(rule: &RoutingRule, outer: &Outer) -> bool {
    let is_before = match rule.base.hook {
        RoutingHook::Output => true,
        RoutingHook::Postrouting => rule.base.priority < PRIORITY_LEAVING,
        RoutingHook::Prerouting => false,
    };
    is_before && outer.certainly_meet(rule)
}

#[cfg(test)]
mod tests {
    use fairlead_netlink::nftables::foreign::TableFamily;
    use fairlead_netlink::nftables::foreign::routing::Conditions;
    use fairlead_netlink::route::{Link, Route, TABLE_MAIN};

    use super::*;

    fn rule(hook: RoutingHook, priority: i32, reroutes: bool, effect: Effect) -> RoutingRule {
        let (table, name) = ("other".to_owned(), "chain".to_owned());
        RoutingRule {
            base: RoutingChain { family: TableFamily::Inet, table, name, hook, priority, reroutes },
            chain: "chain".to_owned(),
            handle: 7,
            effect,
            conditions: Conditions::default(),
            may_be_skipped: false,
            packets: None,
        }
    }

    /// `meta mark set meta mark & KEPT | SET`
    fn set(kept: u32, set: u32) -> Effect {
        Effect::Mark(MarkChange { kept, set, unknown: 0 })
    }

    fn outer(families: &[IpFamily]) -> Outer {
        Outer { uplinks: vec!["eth0".to_owned()], families: families.to_vec() }
    }

    fn found(rule: &RoutingRule) -> Option<Harm> {
        harm(rule, &outer(&IpFamily::BOTH))
    }

    fn output(effect: Effect) -> RoutingRule {
        rule(RoutingHook::Output, -150, true, effect)
    }

    fn prerouting(effect: Effect) -> RoutingRule {
        rule(RoutingHook::Prerouting, -150, false, effect)
    }

    #[test]
    fn marks_that_mean_something_to_the_mesh_are_harmful() {
        for (rule, harm) in [
            (output(set(0, 1)), Harm::WireGuard),
            (output(Effect::Mark(MarkChange { kept: 0, set: 0, unknown: u32::MAX })), Harm::WireGuard),
            (rule(RoutingHook::Output, 200, false, set(0, 1)), Harm::WireGuard),
            (rule(RoutingHook::Postrouting, -150, false, set(0, 6)), Harm::WireGuard),
            // Decimal 200, as in guides of providers.
            (prerouting(set(0, 200)), Harm::IntoMesh),
            (rule(RoutingHook::Prerouting, 10, false, set(!0x40, 0x40)), Harm::IntoMesh),
            (output(set(0, 0x40)), Harm::IntoMesh),
            (output(set(0, 0x20)), Harm::ClearText),
            (output(set(!0x20, 0x20)), Harm::ClearText),
            (rule(RoutingHook::Output, 10, true, set(0, 100)), Harm::PastMesh),
        ] {
            assert_eq!(found(&rule), Some(harm), "{rule}, {:?}", rule.effect);
        }
    }

    #[test]
    fn all_other_marks_are_not() {
        for rule in [
            // NetBird, Tailscale, kube-proxy, and a mark that is decimal 100.
            prerouting(set(0, 0x1_bd20)),
            prerouting(set(0xff00_ffff, 0x4_0000)),
            output(set(!0x4000, 0x4000)),
            output(set(0, 100)),
            // Forwarded packets are none of WireGuard's: they lose no mark of ours.
            prerouting(set(0, 1)),
            rule(RoutingHook::Prerouting, 10, false, set(0, 1)),
            prerouting(Effect::Mark(MarkChange { kept: 0, set: 0, unknown: u32::MAX })),
            output(set(u32::MAX, 0x100_0000)),
            output(set(MARK_MASK, 1)),
            // It leads nowhere any more.
            rule(RoutingHook::Postrouting, -150, false, set(0x20, 0x40)),
            rule(RoutingHook::Postrouting, 100, false, set(0, 1)),
            rule(RoutingHook::Output, -150, false, set(0, 0x20)),
        ] {
            assert_eq!(found(&rule), None, "{rule}, {:?}", rule.effect);
        }
    }

    #[test]
    fn a_rule_that_may_be_for_other_packets_does_no_harm_to_wireguards() {
        let sometimes = Conditions { has_more: true, ..Conditions::default() };
        let conditional = RoutingRule { conditions: sometimes.clone(), ..output(set(0, 1)) };
        assert_eq!(found(&conditional), None);
        assert_eq!(found(&RoutingRule { may_be_skipped: true, ..output(set(0, 1)) }), None);
        let nowhere = Outer { uplinks: Vec::new(), ..outer(&IpFamily::BOTH) };
        assert_eq!(harm(&output(set(0, 1)), &nowhere), None, "no node is reached by a link");
        let conditional = RoutingRule { conditions: sometimes.clone(), ..prerouting(set(0, 200)) };
        assert_eq!(found(&conditional), Some(Harm::IntoMesh), "whatever it is for is lost");
        let check = prerouting(Effect::SourceCheck);
        assert_eq!(found(&check), Some(Harm::SourceCheck));
        // An administrator's `udp dport 51820 accept` before it.
        assert_eq!(found(&RoutingRule { may_be_skipped: true, ..check.clone() }), None);
        assert_eq!(found(&RoutingRule { conditions: sometimes, ..check }), None);
    }

    #[test]
    fn without_addresses_of_nodes_in_the_mesh_wireguard_needs_no_mark() {
        for rule in [output(set(0, 1)), prerouting(Effect::SourceCheck)] {
            let of = |family| {
                let base = RoutingChain { family, ..rule.base.clone() };
                RoutingRule { base, ..rule.clone() }
            };
            let harmful = |family, nodes: &[IpFamily]| harm(&of(family), &outer(nodes)).is_some();
            assert!(!harmful(TableFamily::Inet, &[]));
            assert!(harmful(TableFamily::Inet, &[IpFamily::V6]));
            assert!(
                harmful(TableFamily::Ipv4, &[IpFamily::V4]) && !harmful(TableFamily::Ipv4, &[IpFamily::V6])
            );
            assert!(
                harmful(TableFamily::Ipv6, &[IpFamily::V6]) && !harmful(TableFamily::Ipv6, &[IpFamily::V4])
            );
        }
        let lost = harm(&prerouting(set(0, 200)), &outer(&[]));
        assert_eq!(lost, Some(Harm::IntoMesh), "whatever it is for is lost");
    }

    #[test]
    fn a_problem_lasts_while_its_rule_does_and_says_how_many_packets() {
        let at = |seconds| SystemTime::UNIX_EPOCH + std::time::Duration::from_secs(seconds);
        let counting = |packets| vec![RoutingRule { packets: Some(packets), ..output(set(0, 1)) }];
        let mut rules = ForeignPacketRules::default();
        let outer = outer(&IpFamily::BOTH);
        let eth0 = Link { index: 2, name: "eth0".to_owned(), ..Link::default() };
        let default = Route::onto(TABLE_MAIN, 4, "0.0.0.0/0".parse().unwrap(), 2);
        let host = Host::of(("wire_kube", &[]), &[eth0], &[default]);
        rules.take_over(counting(5), &outer, &host, at(0));
        let first = rules.found().to_vec();
        assert_eq!((first[0].since, first[0].at_least, first[0].reason()), (at(0), 0, "ForeignPacketMark"));
        rules.take_over([counting(130), counting(130)].concat(), &outer, &host, at(5));
        let [problem] = rules.found() else { panic!("{:?}", rules.found()) };
        assert_eq!((problem.since, problem.at_least), (at(0), 100));
        let text = problem.to_string();
        for part in [
            "rule 7 of chain inet other chain (hook output, priority -150)",
            "since 1970-01-01T00:00:00Z, and has counted at least 100 packets: have it leave the bits 0x60",
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
        rules.take_over(Vec::new(), &outer, &host, at(10));
        assert_eq!(rules.found(), []);
        rules.take_over(counting(131), &outer, &host, at(15));
        assert_eq!((rules.found()[0].since, rules.found()[0].at_least), (at(15), 0));
    }

    #[test]
    fn a_rule_that_gives_wireguards_port_to_another_program_is_named_with_its_place() {
        let mut rules = ForeignPacketRules::default();
        let chain = "CNI-DN-1".to_owned();
        let host_port = RoutingRule {
            chain,
            packets: Some(3),
            ..rule(RoutingHook::Prerouting, -100, false, Effect::Translation)
        };
        rules.take_over(vec![host_port], &outer(&[]), &Host::default(), SystemTime::UNIX_EPOCH);
        let [problem] = rules.found() else { panic!("{:?}", rules.found()) };
        assert_eq!((problem.harm, problem.reason()), (Harm::Translation, "ForeignPortTranslation"));
        let text = problem.to_string();
        let place =
            "rule 7 of chain inet other CNI-DN-1 (reached from chain, hook prerouting, priority -100)";
        assert!(text.contains(place) && text.contains("hostPort"), "{text}");
    }

    #[test]
    fn tables_of_fairlead_are_known_by_their_names() {
        use fairlead_api::names;
        for own in [
            names::NFT_TABLE,
            names::NFT_TABLE_EGRESS,
            names::NFT_TABLE_EGRESS_CLIENT,
            names::NFT_TABLE_ENCAPSULATION,
            names::NFT_TABLE_FORWARD,
            names::NFT_TABLE_GUARD,
            names::NFT_TABLE_MASQUERADE,
            names::NFT_TABLE_PATH_SOCKET,
            names::NFT_TABLE_SOURCE_CHECK,
        ] {
            assert!(is_own(own), "{own}");
        }
        assert!(!is_own("mangle"));
    }
}
