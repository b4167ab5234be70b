//! The kernel's part of an egress gateway, in the network namespace of its pod: routes into the tunnels to clients, the rules that look
//! them up, and an nftables table. Links are made elsewhere.
//!
//! `ip rule` and `ip route show table 118` print, with the same for IPv6:
//!
//! ```text
//! 2000: from all iif eth0 lookup 118
//! 2001: from all ipproto icmp lookup 118
//! 10.20.30.40 dev fou4_0a141e28 proto 30
//! ```
//!
//! Rule 2000 is Coil's: packets that come back from outside go into tunnels, and the outer packets, which are the gateway's own, do not.
//! The gateway's ICMP errors to clients are its own packets as well, and rule 2001 leads them into the tunnels: in clear, a client would
//! get them from a host that it never sent to. Outer packets are UDP, so the rule is not for them.
//!
//! `nft list table inet fairlead_egress` prints, with the same for IPv6:
//!
//! ```text
//! chain forward     { iifname "eth0" ct state & new == new drop
//!                     oifname "eth0" meta nfproto ipv4 ct state & invalid == invalid counter drop
//!                     oifname "eth0" meta nfproto ipv4 ct state & new == new add @connections_ipv4 { ip saddr ct count over 1000 }
//!                         counter reject with icmpx admin-prohibited        (where connections are limited)
//!                     meta nfproto ipv4 tcp flags syn tcp option maxseg size > 1382 tcp option maxseg size set 1382
//!                     tcp flags syn tcp option maxseg size set rt mtu }
//! chain postrouting { oifname "eth0" ip saddr != @own_ipv4 counter masquerade fully-random }
//! ```
//!
//! With source addresses ([`Sources`]), packets are translated to the one that the gateway holds, and those to and from addresses that it does
//! not hold are dropped. The kernel takes addresses out of the sets `held_…` by itself, so that a program that is stuck holds nothing:
//!
//! ```text
//! set floating_ipv4   { elements = { 198.51.100.7, 198.51.100.8 } }
//! set held_ipv4       { flags timeout; elements = { 198.51.100.7 timeout 1s800ms expires 1s612ms } }
//! chain forward       { oifname "eth0" counter drop }                          only while the gateway holds nothing, before all others
//! chain postrouting   { oifname "eth0" ip saddr != @own_ipv4 counter snat ip to 198.51.100.7 fully-random }
//! chain source_in     { iifname "eth0" ip daddr @floating_ipv4 ip daddr != @held_ipv4 counter drop }           raw
//! chain source_out    { oifname "eth0" ip saddr @floating_ipv4 ip saddr != @held_ipv4 counter drop }           after srcnat
//! ```

mod sources;

use std::collections::BTreeMap;
use std::net::IpAddr;

use fairlead_address::{IntervalSet, IpFamily};
use fairlead_api::fou;
use fairlead_api::names::{
    NFT_TABLE_EGRESS, ROUTE_PROTOCOL, RULE_PRIORITY_EGRESS_GATEWAY, RULE_PRIORITY_EGRESS_GATEWAY_ICMP,
    TABLE_EGRESS_WIDE,
};
use fairlead_netlink::nftables::{
    self, AddressEnd, Chain, Comparison, Expression, Header, Hook, Meta, Rule, RuleTraffic, STATE_INVALID,
    STATE_NEW, TCP_MAXIMUM_SEGMENT, Table,
};
use fairlead_netlink::route::{Route, RouteSocket, Rule as RoutingRule, Scope, Transport, add_rule};
use fairlead_netlink::{Family, Result, Socket, conntrack};
use ipnet::IpNet;
use nix::libc;

use crate::egress_client::RULE_PROTOCOL;
use crate::nft_table::Applied;
use crate::routes::sync_table;

pub use sources::{Holding, SourceTable, Sources};

/// `srcnat` and `filter` (`NF_IP_PRI_NAT_SRC`, `NF_IP_PRI_FILTER`).
const PRIORITY_POSTROUTING: i32 = 100;
const PRIORITY_FORWARD: i32 = 0;
/// Offset of the flags in the TCP header, and two of them (RFC 9293, section 3.1).
const TCP_FLAGS: u32 = 13;
const TCP_SYN: u8 = 0x02;
const TCP_RST: u8 = 0x04;
const PROTOCOL_TCP: u8 = 6;

/// Desired state of the gateway's network namespace.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayRouting {
    /// Name of the link to the network.
    pub uplink: String,
    /// MTU of the uplink in bytes.
    pub uplink_mtu: u32,
    /// The gateway's own addresses, which stay as they are.
    pub own: Vec<IpAddr>,
    /// The index of the tunnel link of each client.
    pub clients: BTreeMap<IpAddr, u32>,
    /// Most connections that a source may have at a time. More are rejected; those of before the limit was set are not counted.
    pub max_connections: Option<u32>,
    /// Source addresses that float among gateways, if there are any.
    pub sources: Option<Sources>,
}

/// Counters of one family of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GatewayTraffic {
    /// First packets of connections whose source was translated.
    pub masqueraded: RuleTraffic,
    /// Packets that belong to no connection.
    pub invalid: RuleTraffic,
    /// Packets of connections that are more than a source may have.
    pub over_limit: RuleTraffic,
    /// Packets to floating source addresses that the gateway does not hold.
    pub not_held_in: RuleTraffic,
    /// Packets with such sources.
    pub not_held_out: RuleTraffic,
    /// Packets of clients that came while the gateway held nothing. They are counted for IPv4 and IPv6 together, with IPv4.
    pub standby: RuleTraffic,
}

/// Keeps rules, routes and table. Losing it loses nothing: what is there is adopted.
#[derive(Debug, Default)]
pub struct Applier {
    table: SourceTable,
    /// The table was made, and connections of clients may not be translated.
    has_untranslated: bool,
}

impl Applier {
    /// One whose table another task refreshes, too.
    pub fn new(table: SourceTable) -> Self {
        Self { table, has_untranslated: false }
    }

    /// Brings the namespace to what it should be, and returns the number of changes; sends nothing when nothing differs.
    ///
    /// # Errors
    /// The kernel refuses. The table comes first, then connections that were opened without it are forgotten, then come rules, then routes; what comes before the refusal is in place.
    pub fn apply(&mut self, wanted: &GatewayRouting) -> Result<usize> {
        let applied = self.table.apply(table(wanted))?;
        self.has_untranslated |= applied == Applied::Rebuilt;
        if self.has_untranslated {
            let forgotten = conntrack::forget_untranslated(&wanted.clients.keys().copied().collect())?;
            tracing::debug!(connections = forgotten, "forgot connections without translation");
            self.has_untranslated = false;
        }
        let rules = sync_rules(wanted)?;
        let routes: Vec<Route> = wanted.clients.iter().map(|(client, link)| route(*client, *link)).collect();
        let done = sync_table(TABLE_EGRESS_WIDE, ROUTE_PROTOCOL, &routes)?;
        let routes = [&done.add, &done.replace, &done.delete].map(Vec::len).iter().sum::<usize>();
        Ok(usize::from(applied != Applied::Unchanged).saturating_add(rules).saturating_add(routes))
    }

    /// Whether no other program has changed any nftables table since the last [`Self::apply`].
    ///
    /// # Errors
    /// The kernel cannot be asked.
    pub fn is_table_in_place(&mut self) -> Result<bool> {
        self.table.is_in_place()
    }
}

/// The clients to which table 118 has routes: those of an earlier process.
///
/// # Errors
/// The kernel cannot be asked.
pub fn routed_clients() -> Result<Vec<IpAddr>> {
    let routes = RouteSocket::open()?.routes(TABLE_EGRESS_WIDE)?;
    let hosts = routes
        .into_iter()
        .filter(|route| route.destination.prefix_len() == route.destination.max_prefix_len());
    Ok(hosts.map(|route| route.destination.addr()).collect())
}

/// Counters of the table of this desired state, by family; zero while the table is not there.
///
/// # Errors
/// The kernel cannot be asked.
pub fn traffic(wanted: &GatewayRouting) -> Result<BTreeMap<IpFamily, GatewayTraffic>> {
    let counted = nftables::counters(&mut Socket::open(Family::Netfilter)?, NFT_TABLE_EGRESS)?;
    let of = |rule: Rule| counted.get(&rule.fingerprint()).copied().unwrap_or_default();
    let traffic = |family| GatewayTraffic {
        masqueraded: of(translate(family, wanted)),
        invalid: of(drop_invalid(family, &wanted.uplink)),
        over_limit: limit(family, wanted).map(of).unwrap_or_default(),
        not_held_in: of(sources::drop_not_held_in(family, &wanted.uplink)),
        not_held_out: of(sources::drop_not_held_out(family, &wanted.uplink)),
        standby: match family {
            IpFamily::V4 => of(sources::drop_standby(&wanted.uplink)),
            IpFamily::V6 => RuleTraffic::default(),
        },
    };
    Ok(IpFamily::BOTH.into_iter().map(|family| (family, traffic(family))).collect())
}

fn route(client: IpAddr, link: u32) -> Route {
    // Of Coil's scope, so that it prints the same.
    Route { scope: Scope::UNIVERSE, ..Route::onto(TABLE_EGRESS_WIDE, ROUTE_PROTOCOL, client.into(), link) }
}

/// The rules that the families of the gateway's addresses have.
fn rules(wanted: &GatewayRouting) -> Vec<RoutingRule> {
    let has = |family: &IpFamily| wanted.own.iter().any(|own| IpFamily::of(*own) == *family);
    let rules = |family| {
        let icmp = match family {
            IpFamily::V4 => libc::IPPROTO_ICMP,
            IpFamily::V6 => libc::IPPROTO_ICMPV6,
        };
        let rule = |priority| RoutingRule::lookup(family, priority, TABLE_EGRESS_WIDE, RULE_PROTOCOL);
        [
            RoutingRule { iif: Some(wanted.uplink.clone()), ..rule(RULE_PRIORITY_EGRESS_GATEWAY) },
            RoutingRule {
                transport: u8::try_from(icmp).ok().map(Transport::protocol),
                ..rule(RULE_PRIORITY_EGRESS_GATEWAY_ICMP)
            },
        ]
    };
    IpFamily::BOTH.into_iter().filter(has).flat_map(rules).collect()
}

/// Adds the rules that are missing; returns their number.
fn sync_rules(wanted: &GatewayRouting) -> Result<usize> {
    let mut socket = RouteSocket::open()?;
    let present = socket.rules()?;
    let mut missing = rules(wanted);
    missing.retain(|rule| !present.iter().any(|present| present.same_effect(rule)));
    let messages: Vec<_> = missing.iter().map(add_rule).collect();
    for outcome in socket.apply_each(&messages)? {
        match outcome {
            Err(error) if !error.is_existing() => return Err(error),
            _ => {}
        }
    }
    Ok(missing.len())
}

/// The table that should be.
fn table(wanted: &GatewayRouting) -> Table {
    let uplink = &wanted.uplink;
    let mut forward = vec![Rule(
        [
            to_or_from(Meta::InputInterface, uplink),
            Expression::state_has(STATE_NEW).to_vec(),
            vec![Expression::Drop],
        ]
        .concat(),
    )];
    forward.extend(IpFamily::BOTH.map(|family| drop_invalid(family, uplink)));
    forward.extend(IpFamily::BOTH.into_iter().filter_map(|family| limit(family, wanted)));
    forward.extend(IpFamily::BOTH.map(|family| clamp_to_tunnel(family, wanted.uplink_mtu)));
    forward.push(clamp_to_path());
    let chain = |hook, priority, rules| Chain { hook, priority, rules };
    let postrouting = IpFamily::BOTH.map(|family| translate(family, wanted)).to_vec();
    let chains = [
        ("forward", chain(Hook::FilterForward, PRIORITY_FORWARD, forward)),
        ("postrouting", chain(Hook::NatPostrouting, PRIORITY_POSTROUTING, postrouting)),
    ];
    let own: Vec<IpNet> = wanted.own.iter().copied().map(IpNet::from).collect();
    let sets =
        IpFamily::BOTH.map(|family| (own_set(family).to_owned(), IntervalSet::from_prefixes(family, &own)));
    let mut table = Table {
        name: NFT_TABLE_EGRESS.to_owned(),
        sets: sets.into(),
        timed: BTreeMap::new(),
        maps: BTreeMap::new(),
        chains: chains.map(|(name, chain)| (name.to_owned(), chain)).into(),
    };
    if let Some(sources) = &wanted.sources {
        sources::add(&mut table, sources, uplink);
    }
    table
}

fn own_set(family: IpFamily) -> &'static str {
    match family {
        IpFamily::V4 => "own_ipv4",
        IpFamily::V6 => "own_ipv6",
    }
}

fn to_or_from(end: Meta, uplink: &str) -> Vec<Expression> {
    vec![Expression::LoadMeta(end), Expression::is_interface(uplink)]
}

fn of_family(family: IpFamily) -> Vec<Expression> {
    vec![Expression::LoadMeta(Meta::NetworkProtocol), Expression::is_protocol(family)]
}

/// Drops packets that belong to no connection: sources are translated by connection, so they would leave with the client's address.
fn drop_invalid(family: IpFamily, uplink: &str) -> Rule {
    let parts = [
        to_or_from(Meta::OutputInterface, uplink),
        of_family(family),
        Expression::state_has(STATE_INVALID).to_vec(),
        vec![Expression::Counter, Expression::Drop],
    ];
    Rule(parts.concat())
}

/// Connections beyond those that a source may have. ICMP tells it so, also of TCP: a reset would leave by the uplink.
fn limit(family: IpFamily, wanted: &GatewayRouting) -> Option<Rule> {
    let set = match family {
        IpFamily::V4 => "connections_ipv4",
        IpFamily::V6 => "connections_ipv6",
    };
    let over = Expression::ConnectionsOver { set: set.to_owned(), family, most: wanted.max_connections? };
    let source = Expression::load_address(family, AddressEnd::Source);
    let parts = [
        to_or_from(Meta::OutputInterface, &wanted.uplink),
        of_family(family),
        Expression::state_has(STATE_NEW).to_vec(),
        vec![source, over, Expression::Counter, Expression::Reject],
    ];
    Some(Rule(parts.concat()))
}

/// To the source address of the family that the gateway holds, or else to its own.
fn translate(family: IpFamily, wanted: &GatewayRouting) -> Rule {
    let translated = wanted.sources.as_ref().and_then(|sources| sources.translate.get(&family));
    let target = match translated {
        Some(address) => vec![sources::constant(*address), Expression::SourceNat(family)],
        None => vec![Expression::Masquerade],
    };
    let parts = [
        to_or_from(Meta::OutputInterface, &wanted.uplink),
        of_family(family),
        vec![
            Expression::load_address(family, AddressEnd::Source),
            Expression::LookupAbsent(own_set(family).to_owned()),
            Expression::Counter,
        ],
        target,
    ];
    Rule(parts.concat())
}

/// Packets with SYN and without RST.
fn opens_connection() -> Vec<Expression> {
    vec![
        Expression::LoadMeta(Meta::TransportProtocol),
        Expression::Compare(Comparison::Equal, vec![PROTOCOL_TCP]),
        Expression::LoadPayload { header: Header::Transport, offset: TCP_FLAGS, length: 1 },
        Expression::Bitwise { mask: vec![TCP_SYN | TCP_RST], xor: vec![0] },
        Expression::Compare(Comparison::Equal, vec![TCP_SYN]),
    ]
}

/// Both ends of a connection learn what fits the tunnel.
fn clamp_to_tunnel(family: IpFamily, uplink_mtu: u32) -> Rule {
    let headers = match family {
        IpFamily::V4 => 40,
        IpFamily::V6 => 60,
    };
    let most = uplink_mtu.saturating_sub(fou::overhead(family)).saturating_sub(headers);
    let most = u16::try_from(most).unwrap_or(u16::MAX).to_be_bytes().to_vec();
    let clamp = vec![
        Expression::LoadTcpOption(TCP_MAXIMUM_SEGMENT),
        Expression::Compare(Comparison::Greater, most.clone()),
        Expression::LoadConstant(most),
        Expression::StoreTcpOption(TCP_MAXIMUM_SEGMENT),
    ];
    Rule([of_family(family), opens_connection(), clamp].concat())
}

/// Lowers the option of the segment size to what path MTU discovery has learned. The kernel only ever lowers the option.
fn clamp_to_path() -> Rule {
    let clamp = vec![
        Expression::LoadRouteSegment,
        Expression::ToNetworkOrder,
        Expression::StoreTcpOption(TCP_MAXIMUM_SEGMENT),
    ];
    Rule([opens_connection(), clamp].concat())
}

#[cfg(test)]
mod tests {
    use testbed_netns::{Namespace, sh};

    use super::*;

    fn wanted(clients: &[(&str, u32)]) -> GatewayRouting {
        GatewayRouting {
            uplink: "eth0".to_owned(),
            uplink_mtu: 1450,
            own: ["10.20.50.1", "fd00:50::1"].map(|text| text.parse().unwrap()).to_vec(),
            clients: clients.iter().map(|(client, link)| (client.parse().unwrap(), *link)).collect(),
            max_connections: None,
            sources: None,
        }
    }

    #[test]
    fn rules_routes_and_table_are_set_once_and_mended() {
        let namespace = Namespace::new();
        namespace.veth("eth0", &namespace, "other");
        namespace.run(|| {
            sh("ip link add fou4_0a141e28 type ifb; ip link set fou4_0a141e28 up");
            let link = sh("ip -o link show fou4_0a141e28 | cut -d: -f1").trim().parse().unwrap();
            let wanted = wanted(&[("10.20.30.40", link), ("fd00:20::40", link)]);
            let mut applier = Applier::default();
            assert_eq!(applier.apply(&wanted).unwrap(), 7);
            assert!(applier.is_table_in_place().unwrap());
            let rules = sh("ip rule; ip -6 rule");
            assert_eq!(rules.matches("2000:\tfrom all iif eth0 lookup 118\n").count(), 2, "{rules}");
            assert_eq!(rules.matches("2001:\tfrom all ipproto").count(), 2, "{rules}");
            assert_eq!(sh("ip route show table 118"), "10.20.30.40 dev fou4_0a141e28 proto 30 \n");
            let clients: Vec<IpAddr> = wanted.clients.keys().copied().collect();
            assert_eq!(routed_clients().unwrap(), clients);
            let before = fairlead_netlink::changes_sent();
            assert_eq!(applier.apply(&wanted).unwrap(), 0);
            assert_eq!(Applier::default().apply(&wanted).unwrap(), 0, "a new process adopts everything");
            assert_eq!(fairlead_netlink::changes_sent(), before);

            sh("nft flush ruleset; ip rule del pref 2000; ip route flush table 118");
            assert!(!applier.is_table_in_place().unwrap());
            assert_eq!(applier.apply(&wanted).unwrap(), 3);
            let listed = sh("nft list table inet fairlead_egress");
            for part in [
                "maxseg size set rt mtu",
                "maxseg size set 1382",
                "maxseg size set 1342",
                "ct state & invalid == invalid",
                "ct state & new == new",
            ] {
                assert!(listed.contains(part), "{part}: {listed}");
            }
            assert_eq!(traffic(&wanted).unwrap()[&IpFamily::V4], GatewayTraffic::default());
            let limited = GatewayRouting { max_connections: Some(7), ..wanted };
            assert_eq!((applier.apply(&limited).unwrap(), applier.apply(&limited).unwrap()), (1, 0));
            let listed = sh("nft list table inet fairlead_egress");
            assert!(
                listed.contains("add @connections_ipv6 { ip6 saddr ct count over 7 } counter"),
                "{listed}"
            );
        });
    }
}
