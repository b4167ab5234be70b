//! Rules of other programs that come before the mesh's and lead its packets elsewhere: the exit node of a VPN, or a provider's `from ADDRESS lookup N`.
//! They are only named; what they lead past the mesh, the guard drops.

use std::collections::BTreeMap;
use std::fmt;
use std::time::SystemTime;

use fairlead_address::{PrefixSet, overlap};
use fairlead_api::names::{MARK_TO_WIREGUARD, ROUTE_PROTOCOL, RULE_PRIORITY_MESH_FIRST};
use fairlead_netlink::Result;
use fairlead_netlink::route::{IpFamily, Route, RouteKind, RouteSocket, Rule, TABLE_LOCAL};

/// A rule that comes before that of the mesh, and where it leads. `Display` is a sentence for status and Events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ForeignRule {
    /// The rule.
    pub rule: Rule,
    /// A route of its table for packets to other nodes or their pods.
    pub route: Route,
    /// Time at which it was first seen.
    pub since: SystemTime,
    /// Number of packets that the guard has dropped since then, rounded down to a power of ten.
    pub at_least: u64,
}

impl ForeignRule {
    /// One word for conditions, Events and metrics.
    pub(super) const REASON: &'static str = "ForeignRoutingRule";
}

impl fmt::Display for ForeignRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rule, route, since, at_least } = self;
        let ours = RULE_PRIORITY_MESH_FIRST;
        write!(
            f,
            "another program's {rule} comes before that of the mesh ({ours}) since {}, and leads packets to other nodes or their pods elsewhere ({route})",
            time(*since)
        )?;
        match at_least {
            0 => f.write_str(", which would be dropped")?,
            packets => write!(f, "; at least {packets} were dropped")?,
        }
        write!(f, ": give it a number above {ours}, or have it leave out these destinations")
    }
}

/// The rules that were found, as of the last look.
#[derive(Debug, Default)]
pub(super) struct ForeignRules {
    found: Vec<ForeignRule>,
    /// Time at which each was first seen, and number of packets that the guard had dropped by then.
    first: BTreeMap<String, (SystemTime, u64)>,
}

impl ForeignRules {
    /// Looks for them; the guard has dropped `guarded` packets until now.
    pub(super) fn observe(
        &mut self,
        interface: &str,
        own: &PrefixSet,
        targets: &PrefixSet,
        (guarded, now): (u64, SystemTime),
    ) -> Result<()> {
        let mut socket = RouteSocket::open()?;
        let device = socket.link_by_name(interface)?.map(|link| link.index);
        let mut found = Vec::new();
        for rule in socket.rules()? {
            if !comes_before(&rule, own) {
                continue;
            }
            let routes = socket.routes(rule.table)?;
            found.extend(taken(&rule, &routes, targets, device).map(|route| (rule.clone(), route.clone())));
        }
        self.first.retain(|text, _| found.iter().any(|(rule, _)| rule.to_string() == *text));
        let first = &mut self.first;
        let known = |(rule, route): (Rule, Route)| {
            let (since, before) = *first.entry(rule.to_string()).or_insert((now, guarded));
            let packets = guarded.saturating_sub(before);
            let at_least = if packets == 0 { 0 } else { magnitude(packets) };
            ForeignRule { rule, route, since, at_least }
        };
        self.found = found.into_iter().map(known).collect();
        Ok(())
    }

    pub(super) fn found(&self) -> &[ForeignRule] {
        &self.found
    }
}

/// The greatest power of ten that is not greater. A problem with the number itself would be another one with each packet.
pub(super) fn magnitude(packets: u64) -> u64 {
    10_u64.saturating_pow(packets.checked_ilog10().unwrap_or_default())
}

/// Time in a sentence.
pub(super) fn time(at: SystemTime) -> String {
    format!("{:.0}", jiff::Timestamp::try_from(at).unwrap_or_default())
}

/// Whether a rule comes before ours and may be for a packet that has the mesh's mark and no other. Rules with conditions that are not known may
/// be for other packets only.
fn comes_before(rule: &Rule, own: &PrefixSet) -> bool {
    let is_ours = rule.protocol == ROUTE_PROTOCOL || rule.table == TABLE_LOCAL;
    let is_for_mark = rule.mark.is_none_or(|mark| mark.value & mark.mask == MARK_TO_WIREGUARD & mark.mask);
    let is_for_source = |source| own.is_empty() || own.overlapping(source).is_some();
    // An inverted rule is for all packets to which one of its conditions does not apply.
    let may_be_for_mesh = if rule.is_inverted {
        !is_for_mark
    } else {
        is_for_mark && rule.oif.is_none() && rule.source.is_none_or(is_for_source)
    };
    !is_ours && !rule.has_more && rule.priority < RULE_PRIORITY_MESH_FIRST && may_be_for_mesh
}

/// The first route that such a rule finds for a target, other than into the mesh's device.
fn taken<'a>(
    rule: &Rule,
    routes: &'a [Route],
    targets: &PrefixSet,
    device: Option<u32>,
) -> Option<&'a Route> {
    let destination = rule.destination.filter(|_| !rule.is_inverted);
    routes.iter().find(|route| {
        let counts =
            rule.suppressed_length.is_none_or(|length| u32::from(route.destination.prefix_len()) > length);
        let is_within = destination.is_none_or(|destination| overlap(&destination, &route.destination));
        IpFamily::of(route.destination.addr()) == rule.family
            && route.kind != RouteKind::THROW
            && (device.is_none() || route.link != device)
            && counts
            && is_within
            && targets.overlapping(route.destination).is_some()
            && destination.is_none_or(|destination| targets.overlapping(destination).is_some())
    })
}

#[cfg(test)]
mod tests {
    use fairlead_netlink::route::Mark;
    use ipnet::IpNet;

    use super::*;

    fn rule(priority: u32) -> Rule {
        Rule::lookup(IpFamily::V4, priority, 52, 0)
    }

    fn prefixes(texts: &[&str]) -> PrefixSet {
        texts.iter().map(|text| text.parse::<IpNet>().unwrap()).collect::<Vec<_>>().iter().collect()
    }

    #[test]
    fn rules_before_ours_that_a_packet_for_the_mesh_may_meet_are_found() {
        let own = prefixes(&["192.0.2.1/32"]);
        let marked = |value, mask| Rule { mark: Some(Mark { value, mask }), ..rule(51) };
        let from = |source: &str| Rule { source: Some(source.parse().unwrap()), ..rule(100) };
        assert!(comes_before(&rule(52), &own));
        assert!(comes_before(&from("192.0.2.1/32"), &own));
        assert!(comes_before(&marked(0, 0x60000), &own));
        // Calico's WireGuard (`felix/wireguard/wireguard.go`): all packets but those of its own device, at 99.
        let all_but = |value, mask| Rule { is_inverted: true, priority: 99, ..marked(value, mask) };
        assert!(comes_before(&all_but(0x10_0000, 0x10_0000), &own));
        for other in [
            all_but(0x40, 0x60),
            Rule { mark: None, source: Some("198.51.100.0/24".parse().unwrap()), ..all_but(0, 0) },
            // Cilium (`pkg/datapath/linux/linux_defaults/linux_defaults.go`): what WireGuard is to encrypt, and what a proxy is to get.
            Rule { priority: 1, ..marked(0xe00, 0xf00) },
            Rule { priority: 9, ..marked(0x200, 0xf00) },
            rule(RULE_PRIORITY_MESH_FIRST),
            // The exit node of Tailscale: the mesh's rules come first.
            rule(5270),
            Rule { table: TABLE_LOCAL, ..rule(0) },
            Rule { protocol: ROUTE_PROTOCOL, ..rule(20) },
            // Tailscale's own packets.
            marked(0x80000, 0xff0000),
            from("198.51.100.1/32"),
            Rule { has_more: true, ..rule(50) },
            Rule { oif: Some("eth0".to_owned()), ..rule(100) },
        ] {
            assert!(!comes_before(&other, &own), "{other}");
        }
    }

    #[test]
    fn a_table_takes_packets_only_with_a_route_for_them() {
        let targets = prefixes(&["10.5.0.0/16"]);
        let route = |to: &str| Route::onto(52, 0, to.parse().unwrap(), 7);
        let tailnet = [route("100.64.0.9/32"), route("10.6.0.0/16")];
        assert_eq!(taken(&rule(52), &tailnet, &targets, None), None);
        for to in ["0.0.0.0/0", "10.5.3.0/24", "10.0.0.0/8"] {
            assert!(taken(&rule(52), &[route(to)], &targets, None).is_some(), "{to}");
            assert_eq!(taken(&rule(52), &[route(to)], &targets, Some(7)), None, "into the mesh's device");
        }
        let without_default = Rule { suppressed_length: Some(0), ..rule(100) };
        assert_eq!(taken(&without_default, &[route("0.0.0.0/0")], &targets, None), None);
        let elsewhere = Rule { destination: Some("10.6.0.0/16".parse().unwrap()), ..rule(100) };
        assert_eq!(taken(&elsewhere, &[route("0.0.0.0/0")], &targets, None), None);
        let all_but = Rule { is_inverted: true, ..elsewhere };
        assert!(taken(&all_but, &[route("10.5.3.0/24")], &targets, None).is_some());
        let throw = Route { kind: RouteKind::THROW, ..route("0.0.0.0/0") };
        assert_eq!(taken(&rule(52), &[throw], &targets, None), None);
    }

    #[test]
    fn the_sentence_says_which_rule_since_when_and_how_many_packets() {
        let since = SystemTime::UNIX_EPOCH;
        let route = Route::onto(52, 0, "0.0.0.0/0".parse().unwrap(), 7);
        let found = ForeignRule { rule: rule(52), route, since, at_least: 100 };
        let text = found.to_string();
        for part in [
            "IPv4 rule 52 to table 52",
            "since 1970-01-01T00:00:00Z",
            "at least 100 were dropped",
            "above 101",
        ] {
            assert!(text.contains(part), "{part} is not in {text}");
        }
    }
}
