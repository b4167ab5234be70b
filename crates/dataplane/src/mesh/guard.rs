//! The nftables table that drops and counts what is for a target of the mesh and leaves by another device: it holds while the mesh's own
//! table, rules or routes are gone, and where rules of other programs lead packets elsewhere. It looks at destinations and devices, so
//! it works without any of them. `nft list table inet fairlead_guard` prints, with the same for IPv6:
//!
//! ```text
//! chain forwarded {
//!     type filter hook forward priority 300; policy accept;
//!     oifname "wire_kube" accept
//!     oifgroup 116 accept
//!     iifname "br0" oifname "br0" accept
//!     iifname "wire_kube" oifname "eth0" ip daddr @fairlead_own_ipv4 drop
//!     oif "eth1" ip daddr @plain_3_ipv4 accept
//!     ip daddr @kubespan_targets_ipv4 counter drop
//! }
//! chain leaving {
//!     type filter hook postrouting priority 90; policy accept;
//!     oifname "wire_kube" accept
//!     oifname "lo" accept
//!     oifgroup 116 accept
//!     meta mark 0x00000020 accept
//!     meta mark & 0x00000020 == 0x00000020 udp sport 51820 accept
//!     icmpv6 type 133-137 accept
//!     ip daddr @tunnels_ipv4 meta l4proto ipip accept
//!     oif "eth1" ip daddr @plain_3_ipv4 accept
//!     ip daddr @kubespan_targets_ipv4 ip saddr @fairlead_own_ipv4 counter drop
//!     ip daddr @kubespan_targets_ipv4 fib saddr type local counter drop
//! }
//! ```
//!
//! Targets that have a plain route or take an IP tunnel may leave by the link of that route as well, and by no other: there is a set for each such link. A
//! link is known by its index, as it is to the routes: one that gets another name is still it, and one that takes the name of another is not. The end of
//! an IP tunnel is a target without a plain route; the outer packets to it leave as they would without a mesh. What [`super::table`] lets out at the
//! API server, control-plane nodes, relays and addresses outside of the mesh is let out here by the same rules, before those that drop.
//!
//! Packets that come by the tunnel for a pod that is not there leave by no uplink. Routes refuse them, once the node program knows the blocks of its node; after
//! a reboot others send to pods of before at once. Hosts beside this node are among its prefixes, too, and are behind an uplink: where there are any, the rule
//! has `ip daddr != @fairlead_site_ipv4` as well.
//!
//! Forwarded packets are never of this host's WireGuard, whatever their mark says: the first chain drops them. So the second one, where the device is
//! known for packets of this host as well, believes the mark. It comes before source NAT: exceptions are about sources as they were. With
//! `br_netfilter` both see frames between ports of a bridge, which the kernel shows as coming from the bridge and leaving by it in the first
//! chain; in the second one they are told by their sources, which are of other hosts.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use fairlead_address::{IntervalSet, IpFamily};
use fairlead_api::names::{LINK_GROUP_PODS, NFT_TABLE_GUARD};
use fairlead_netlink::nftables::{self, AddressEnd, Chain, Comparison, Expression, Hook, Meta, Rule, Table};
use fairlead_netlink::route::RouteSocket;
use fairlead_netlink::{Family, Result, Socket};
use ipnet::IpNet;
use nix::libc;

use super::control_plane;
use super::foreign_rules::{magnitude, time};
use super::state::{MeshState, PlainRoute};
use super::table::{
    HALVES, Half, accept_neighbor_discovery, accept_own, exceptions, foreign_answers, has_site, past_mesh,
    relay_answers, site_sets,
};
use crate::nft_table::{Applied, Keeper};

/// Behind all firewalls: what these drop is not counted.
const PRIORITY_FORWARDED: i32 = 300;
/// Before `srcnat` (`NF_IP_PRI_NAT_SRC`, 100), and the mesh's own before that.
pub(super) const PRIORITY_LEAVING: i32 = 90;
/// There while frames between ports of bridges pass the hooks of IP.
const BRIDGE_NETFILTER: &str = "/proc/sys/net/bridge";
/// Time without a dropped packet after which there is no problem any more.
const QUIET: Duration = Duration::from_secs(60);

/// Keeps the table, and adds up what it has dropped.
#[derive(Debug, Default)]
pub(super) struct Guard {
    keeper: Keeper,
    /// State that the table was last made from.
    done: Option<(MeshState, Vec<String>)>,
    /// The table as it was last made.
    made: Option<Table>,
    guarded: Guarded,
}

impl Guard {
    /// Lets go of what is no target any more, and lets what gets a plain route leave by it, before the route is there. All else stays as it is.
    pub(super) fn release(&mut self, state: &MeshState) -> Result<()> {
        self.count()?;
        let changed = self.done.take_if(|(done, _)| *done != *state);
        let Some((mut passing, bridges)) = changed else { return Ok(()) };
        let Some(mut table) = self.made.take() else { return Ok(()) };
        for half in &HALVES {
            if let Some(guarded) = table.sets.get_mut(half.set) {
                let gone = guarded.subtract(&targets(half, state));
                *guarded = guarded.subtract(&gone);
            }
        }
        if passing.plain != state.plain {
            // Until the routes have changed, packets take the former ones.
            passing.plain.extend_from_slice(&state.plain);
            table.sets.extend(plain_sets(&passing.plain));
            table.chains = chains(&passing, &bridges);
        }
        self.make(table)
    }

    /// Makes the table what it should be; sends nothing when everything is in place.
    pub(super) fn apply(&mut self, state: &MeshState) -> Result<()> {
        let bridges = bridges()?;
        let done = self.done.take();
        let is_same = done.as_ref().is_some_and(|(done, with)| (done, with) == (state, &bridges));
        if is_same && self.keeper.is_in_place()? {
            self.done = done;
            return Ok(());
        }
        self.make(table(state, &bridges))?;
        self.done = Some((state.clone(), bridges));
        Ok(())
    }

    fn make(&mut self, table: Table) -> Result<()> {
        if self.keeper.apply(&table)? == Applied::Rebuilt {
            self.guarded.counted = Some(0);
        }
        self.made = Some(table);
        Ok(())
    }

    pub(super) fn keeper(&self) -> &Keeper {
        &self.keeper
    }

    /// See [`Keeper::follow`].
    pub(super) fn follow(&mut self, other: &Keeper) {
        self.keeper.follow(other);
    }

    pub(super) fn guarded(&self) -> &Guarded {
        &self.guarded
    }

    /// Takes over what the kernel has counted. The counters begin anew with each table.
    fn count(&mut self) -> Result<()> {
        let counters = nftables::counters(&mut Socket::open(Family::Netfilter)?, NFT_TABLE_GUARD)?;
        let packets = counters.values().map(|traffic| traffic.packets).sum();
        self.guarded.observe(packets, SystemTime::now());
        Ok(())
    }
}

/// Packets for targets of the mesh that were about to leave outside of it, and were dropped.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Guarded {
    /// Number of them since this program started, with those that the table had counted before.
    pub packets: u64,
    /// The problem, unless none was dropped for a minute.
    pub problem: Option<GuardProblem>,
    /// Count of the kernel, as it was last; `None` before it was read.
    counted: Option<u64>,
    /// Time of the last new packet, and packets before the first one of the problem.
    last: Option<(SystemTime, u64)>,
}

impl Guarded {
    /// The table has counted so many packets. Those of before this program started are no news.
    fn observe(&mut self, counted: u64, now: SystemTime) {
        let before = self.packets;
        let new = match self.counted.replace(counted) {
            Some(last) => counted.checked_sub(last).unwrap_or(counted),
            None => {
                self.packets = counted;
                return;
            }
        };
        self.packets = before.saturating_add(new);
        if new > 0 {
            let begun = self.last.map_or(before, |(_, begun)| begun);
            let since = self.problem.as_ref().map_or(now, |problem| problem.since);
            let at_least = magnitude(self.packets.saturating_sub(begun));
            self.last = Some((now, begun));
            self.problem = Some(GuardProblem { since, at_least });
        } else if self.last.is_some_and(|(at, _)| now.duration_since(at).is_ok_and(|quiet| quiet >= QUIET)) {
            (self.last, self.problem) = (None, None);
        }
    }
}

/// Packets for the mesh are led past it. `Display` is a sentence for status and Events.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GuardProblem {
    /// Time at which that was first seen.
    pub since: SystemTime,
    /// Number of packets since then, rounded down to a power of ten.
    pub at_least: u64,
}

impl GuardProblem {
    /// One word for conditions, Events and metrics.
    pub const fn reason(&self) -> &'static str {
        "PacketsOutsideMesh"
    }
}

impl fmt::Display for GuardProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { since, at_least } = self;
        let since = time(*since);
        write!(
            f,
            "packets to other nodes or their pods were about to leave this host outside of the tunnel and were dropped: at least {at_least} since \
             {since}; another program has changed nftables, or its rules come before those of the mesh (ip rule; nft list ruleset)"
        )
    }
}

/// Names of the bridges whose frames pass the hooks.
fn bridges() -> Result<Vec<String>> {
    if !Path::new(BRIDGE_NETFILTER).exists() {
        return Ok(Vec::new());
    }
    let mut names: Vec<String> =
        RouteSocket::open()?.links_of_kind("bridge")?.into_iter().map(|link| link.name).collect();
    names.sort_unstable();
    Ok(names)
}

/// Targets of a family.
fn targets(half: &Half, state: &MeshState) -> IntervalSet {
    IntervalSet::from_prefixes(half.addresses, state.targets_v4.iter().chain(&state.targets_v6))
}

/// The table that should be.
fn table(state: &MeshState, bridges: &[String]) -> Table {
    let mut sets = exceptions(&state.bypass);
    sets.extend(site_sets(state));
    sets.extend(control_plane::sets(&state.bypass.control_plane));
    sets.extend(HALVES.map(|half| (half.set.to_owned(), targets(&half, state))));
    sets.extend(plain_sets(&state.plain));
    Table {
        name: NFT_TABLE_GUARD.to_owned(),
        sets,
        timed: BTreeMap::new(),
        maps: BTreeMap::new(),
        chains: chains(state, bridges),
    }
}

fn chains(state: &MeshState, bridges: &[String]) -> BTreeMap<String, Chain> {
    let chains = [
        ("forwarded", Hook::FilterForward, PRIORITY_FORWARDED, forwarded(state, bridges)),
        ("leaving", Hook::FilterPostrouting, PRIORITY_LEAVING, leaving(state)),
    ];
    let chain = |(name, hook, priority, rules): (&str, Hook, i32, Vec<Rule>)| {
        (name.to_owned(), Chain { hook, priority, rules })
    };
    chains.map(chain).into()
}

/// Sets of the prefixes that have plain routes by each link, and of the ends of IP tunnels.
fn plain_sets(plain: &[PlainRoute]) -> BTreeMap<String, IntervalSet> {
    let ends: Vec<IpNet> = plain.iter().filter_map(tunnel_end).collect();
    let tunnels = |half: Half| (half.tunnels().to_owned(), IntervalSet::from_prefixes(half.addresses, &ends));
    let mut sets = BTreeMap::from(HALVES.map(tunnels));
    let mut links: BTreeMap<u32, Vec<IpNet>> = BTreeMap::new();
    for route in plain {
        links.entry(route.link).or_default().push(route.destination);
    }
    for (link, prefixes) in &links {
        let by_link = |half: Half| (half.plain(*link), IntervalSet::from_prefixes(half.addresses, prefixes));
        sets.extend(HALVES.map(by_link));
    }
    sets
}

/// Rules that let pass what leaves by the link of its plain route.
fn plain_routes(plain: &[PlainRoute]) -> impl Iterator<Item = Rule> {
    let links: BTreeSet<u32> = plain.iter().map(|route| route.link).collect();
    links.into_iter().flat_map(|link| HALVES.map(|half| half.accept_plain(link)))
}

/// Address to which the outer packets of a route by an IP tunnel go.
fn tunnel_end(route: &PlainRoute) -> Option<IpNet> {
    route.is_tunnel.then(|| IpNet::from(route.gateway))
}

/// Rules for what this host forwards.
fn forwarded(state: &MeshState, bridges: &[String]) -> Vec<Rule> {
    let within = |bridge: &String| {
        accept(vec![
            Expression::LoadMeta(Meta::InputInterface),
            Expression::is_interface(bridge),
            Expression::LoadMeta(Meta::OutputInterface),
            Expression::is_interface(bridge),
        ])
    };
    [leaves_by(&state.interface), leads_to_pods()]
        .into_iter()
        .chain(bridges.iter().map(within))
        .chain(goes_on(state))
        .chain(relay_answers(&state.bypass))
        .chain(plain_routes(&state.plain))
        .chain(HALVES.iter().map(|half| half.drop_if(Vec::new())))
        .collect()
}

/// Drops what came by the tunnel for this node's own prefixes, without those of hosts beside it, and leaves by an uplink. It is not counted: nothing of this
/// node was about to leave.
fn goes_on(state: &MeshState) -> impl Iterator<Item = Rule> {
    let uplinks = state.uplinks.iter().filter(|_| !state.bypass.own.is_empty());
    uplinks.flat_map(move |uplink| {
        HALVES.map(|half| {
            let mut expressions = vec![
                Expression::LoadMeta(Meta::InputInterface),
                Expression::is_interface(&state.interface),
                Expression::LoadMeta(Meta::OutputInterface),
                Expression::is_interface(uplink),
            ];
            expressions.extend(Expression::address_in(half.addresses, AddressEnd::Destination, half.own));
            // In the register is the destination still.
            expressions.extend(has_site(state).then(|| Expression::LookupAbsent(half.site.to_owned())));
            expressions.push(Expression::Drop);
            Rule(expressions)
        })
    })
}

/// Rules for what leaves this host.
fn leaving(state: &MeshState) -> Vec<Rule> {
    let bypass = &state.bypass;
    let by_source = |half: &Half| {
        let own = (!bypass.own.is_empty()).then(|| half.drop_if(half.is_own_source()));
        own.into_iter().chain([half.drop_if(Expression::source_is_local().to_vec())])
    };
    [leaves_by(&state.interface), leaves_by("lo"), leads_to_pods()]
        .into_iter()
        .chain(accept_own(state, &[]))
        .chain([accept_neighbor_discovery()])
        .chain(HALVES.iter().map(Half::accept_outer))
        .chain(past_mesh(bypass, &[]))
        .chain(control_plane::outgoing(&bypass.control_plane, &[]))
        .chain(relay_answers(bypass))
        .chain(foreign_answers(bypass, &[]))
        .chain(plain_routes(&state.plain))
        .chain(HALVES.iter().flat_map(by_source))
        .collect()
}

fn accept(mut expressions: Vec<Expression>) -> Rule {
    expressions.push(Expression::Accept);
    Rule(expressions)
}

fn leaves_by(interface: &str) -> Rule {
    accept(vec![Expression::LoadMeta(Meta::OutputInterface), Expression::is_interface(interface)])
}

fn leads_to_pods() -> Rule {
    let group = LINK_GROUP_PODS.to_ne_bytes().to_vec();
    accept(vec![
        Expression::LoadMeta(Meta::OutputInterfaceGroup),
        Expression::Compare(Comparison::Equal, group),
    ])
}

fn protocol(number: i32) -> u8 {
    u8::try_from(number).unwrap_or(u8::MAX)
}

impl Half {
    /// Name of the set of the ends of IP tunnels.
    const fn tunnels(&self) -> &'static str {
        match self.addresses {
            IpFamily::V4 => "tunnels_ipv4",
            IpFamily::V6 => "tunnels_ipv6",
        }
    }

    /// Name of the set of what has plain routes by a link.
    fn plain(&self, link: u32) -> String {
        match self.addresses {
            IpFamily::V4 => format!("plain_{link}_ipv4"),
            IpFamily::V6 => format!("plain_{link}_ipv6"),
        }
    }

    fn is_own_source(&self) -> Vec<Expression> {
        vec![
            Expression::load_address(self.addresses, AddressEnd::Source),
            Expression::Lookup(self.own.to_owned()),
        ]
    }

    /// Drops what is for a target, if this holds as well.
    fn drop_if(&self, condition: Vec<Expression>) -> Rule {
        let mut expressions = Expression::address_in(self.addresses, AddressEnd::Destination, self.set);
        expressions.extend(condition);
        expressions.extend([Expression::Counter, Expression::Drop]);
        Rule(expressions)
    }

    /// Rule that lets pass what has a plain route by this link, and leaves by it.
    fn accept_plain(&self, link: u32) -> Rule {
        let mut expressions = vec![
            Expression::LoadMeta(Meta::OutputInterfaceIndex),
            Expression::Compare(Comparison::Equal, link.to_ne_bytes().to_vec()),
        ];
        let set = self.plain(link);
        expressions.extend(Expression::address_in(self.addresses, AddressEnd::Destination, &set));
        accept(expressions)
    }

    /// Outer packets of IP tunnels inside of the location.
    fn accept_outer(&self) -> Rule {
        let inner = match self.addresses {
            IpFamily::V4 => libc::IPPROTO_IPIP,
            IpFamily::V6 => libc::IPPROTO_IPV6,
        };
        let mut expressions = Expression::address_in(self.addresses, AddressEnd::Destination, self.tunnels());
        expressions.extend([
            Expression::LoadMeta(Meta::TransportProtocol),
            Expression::Compare(Comparison::Equal, vec![protocol(inner)]),
        ]);
        accept(expressions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropped_packets_are_a_problem_until_a_minute_has_passed_without_one() {
        let at = |seconds: u64| SystemTime::UNIX_EPOCH + Duration::from_secs(1_000_000_000 + seconds);
        let mut guarded = Guarded::default();
        guarded.observe(7, at(0));
        assert_eq!(
            (guarded.packets, &guarded.problem),
            (7, &None),
            "those of an earlier program are no news"
        );
        guarded.observe(8, at(1));
        guarded.observe(27, at(2));
        let problem = guarded.problem.clone().unwrap();
        assert_eq!(problem, GuardProblem { since: at(1), at_least: 10 });
        assert!(problem.to_string().contains("at least 10 since 2001-09-09T01:46:41Z;"), "{problem}");
        guarded.observe(28, at(30));
        assert_eq!(guarded.problem, Some(problem), "the same problem");
        guarded.observe(28, at(89));
        assert!(guarded.problem.is_some());
        guarded.observe(28, at(90));
        assert_eq!((guarded.packets, guarded.problem.clone()), (28, None));
        // Another table begins at zero.
        guarded.observe(3, at(100));
        assert_eq!(guarded.packets, 31);
        assert_eq!(guarded.problem, Some(GuardProblem { since: at(100), at_least: 1 }));
    }
}
