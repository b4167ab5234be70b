//! The table's text as expressions. `nft list table inet talos_kubespan` prints, for both chains:
//!
//! ```text
//! icmpv6 type 133-137 accept
//! ip daddr @kubespan_targets_ipv4 tcp flags syn / syn,rst tcp option maxseg size > M tcp option maxseg size set M
//! ip daddr @kubespan_targets_ipv4 meta mark set meta mark & 0xffffffdf | 0x00000040 accept
//! ```
//!
//! and the last two for IPv6. The outgoing chain begins with what the node program and WireGuard send themselves, the third rule where there are
//! IP tunnels (IPv6: `ipv6`). In the other chain the mark is another program's:
//!
//! ```text
//! meta mark 0x00000020 accept
//! meta mark & 0x00000020 == 0x00000020 udp sport 51820 meta mark set meta mark | 0x60 accept
//! meta mark & 0x00000060 == 0x00000020 meta l4proto ipip accept
//! ```
//!
//! In the outgoing chain `oifname "lo" fib daddr type local accept` follows the rule for ICMPv6, and then, for each endpoint of the API server:
//!
//! ```text
//! ip daddr A tcp dport P meta mark set meta mark | 0x60 accept
//! ip saddr A tcp sport P ip daddr @fairlead_nodes_ipv4 accept
//! ```
//!
//! The mark is for packets that are routed again, since a proxy of Services has given them the address of the endpoint, or another program a
//! mark: the rules of [`super::guard_routes`] with ports do not match then.
//!
//! and, where this node has prefixes in the mesh, for both families
//!
//! ```text
//! ct direction reply ip saddr != @fairlead_own_ipv4 ct original ip daddr != @fairlead_own_ipv4 ct original ip daddr != @kubespan_targets_ipv4
//!     meta mark set meta mark | 0x60 accept
//! ```
//!
//! Between control-plane nodes see [`control_plane`]. In the prerouting chain the last rule for the API server follows the first, for each pod of the managed relay.
//!
//! If a firewall of this host drops what it forwards (see [`crate::forwarding`]), a chain of the hook forward marks what passes between
//! members, for both families:
//!
//! ```text
//! ip saddr @kubespan_targets_ipv4 ip daddr @kubespan_targets_ipv4 meta mark set meta mark | 0x10
//! ip saddr @kubespan_targets_ipv4 ip daddr @fairlead_own_ipv4 meta mark set meta mark | 0x10
//! ip saddr @fairlead_own_ipv4 ip daddr @kubespan_targets_ipv4 meta mark set meta mark | 0x10
//! ```
//!
//! If there are hosts beside this node, a chain of the hook postrouting masquerades what comes from the mesh, and leaves alone
//! what they send each other:
//!
//! ```text
//! oifname "wire_kube" accept
//! ip saddr @fairlead_site_ipv4 accept
//! ip saddr @kubespan_targets_ipv4 ip daddr @fairlead_site_ipv4 masquerade fully-random
//! ```
//!
//! Another one gives packets into the device a source that peers accept: see [`sources`]. The first of all is in [`arriving`].

use std::collections::BTreeMap;
use std::net::SocketAddr;

use fairlead_address::{IntervalSet, IpFamily};
use fairlead_api::names;
use fairlead_netlink::nftables::{
    AddressEnd, CONNECTION_REPLY, Chain, Comparison, Expression, Header, Hook, Meta, Rule,
    TCP_MAXIMUM_SEGMENT, Table,
};
use ipnet::IpNet;

use super::state::{Bypass, MeshState};
use super::{arriving, control_plane, sources};
use crate::forwarding;

/// `IPPROTO_TCP`
const PROTOCOL_TCP: u8 = 6;
/// `IPPROTO_UDP`, and its source port (RFC 768).
const PROTOCOL_UDP: u8 = 17;
const UDP_SOURCE_PORT: u32 = 0;
/// `IPPROTO_IPIP` and `IPPROTO_IPV6`: outer packets of IP tunnels.
const PROTOCOL_IPIP: u8 = 4;
const PROTOCOL_IPV6: u8 = 41;
/// Offset of the flags in the TCP header, and two of them (RFC 9293, section 3.1).
const TCP_FLAGS: u32 = 13;
const TCP_SYN: u8 = 0x02;
const TCP_RST: u8 = 0x04;
/// Ports in the TCP header (RFC 9293, section 3.1), two bytes each.
pub(super) const TCP_SOURCE_PORT: u32 = 0;
pub(super) const TCP_DESTINATION_PORT: u32 = 2;
/// `IPPROTO_ICMPV6`, where its type is (RFC 4443, section 2.1), and the first and last type of RFC 4861, section 4.
const PROTOCOL_ICMPV6: u8 = 58;
const ICMPV6_TYPE: u32 = 0;
const ICMPV6_ROUTER_SOLICITATION: u8 = 133;
const ICMPV6_REDIRECT: u8 = 137;
/// Priority of both chains (KubeSpan): `filter`.
pub(super) const PRIORITY: i32 = 0;

/// Priority of the chain that masquerades: before `srcnat` (`NF_IP_PRI_NAT_SRC`, 100), where masquerading of pods is.
const PRIORITY_MASQUERADE: i32 = 99;

/// One address family's half of the table.
pub(super) struct Half {
    pub(super) addresses: IpFamily,
    pub(super) set: &'static str,
    /// The other nodes' own addresses.
    pub(super) nodes: &'static str,
    /// Hosts beside this node.
    pub(super) site: &'static str,
    /// This node's prefixes in the mesh.
    pub(super) own: &'static str,
    /// IP and TCP header in bytes: what a segment is smaller than the packet.
    headers: u32,
}

pub(super) const HALVES: [Half; 2] = [
    Half {
        addresses: IpFamily::V4,
        set: names::NFT_SET_IPV4,
        nodes: names::NFT_SET_NODES_IPV4,
        site: names::NFT_SET_SITE_IPV4,
        own: names::NFT_SET_OWN_IPV4,
        headers: 40,
    },
    Half {
        addresses: IpFamily::V6,
        set: names::NFT_SET_IPV6,
        nodes: names::NFT_SET_NODES_IPV6,
        site: names::NFT_SET_SITE_IPV6,
        own: names::NFT_SET_OWN_IPV6,
        headers: 60,
    },
];

/// The table that should be; `marks_forwarded` is whether a firewall of this host drops what is not marked.
pub(super) fn table(state: &MeshState, marks_forwarded: bool) -> Table {
    let targets = || state.targets_v4.iter().chain(&state.targets_v6);
    let mut sets = BTreeMap::from(
        HALVES.map(|half| (half.set.to_owned(), IntervalSet::from_prefixes(half.addresses, targets()))),
    );
    sets.extend(exceptions(&state.bypass));
    sets.extend(arriving::sets(state));
    sets.extend(site_sets(state));
    let own = &state.bypass.own;
    sets.extend(control_plane::sets(&state.bypass.control_plane));
    let chain = |hook, rules| Chain { hook, priority: PRIORITY, rules };
    let prerouting = std::iter::once(accept_neighbor_discovery())
        .chain(control_plane::incoming(&state.bypass.control_plane, &state.interface))
        .chain(relay_answers(&state.bypass))
        .chain(into_mesh(state.mtu))
        .collect();
    let outgoing = accept_own(state, &mark_past_mesh())
        .chain([accept_neighbor_discovery(), accept_loopback()])
        .chain(past_mesh(&state.bypass, &mark_past_mesh()))
        .chain(control_plane::outgoing(&state.bypass.control_plane, &mark_past_mesh()))
        .chain(foreign_answers(&state.bypass, &mark_past_mesh()))
        .chain(into_mesh(state.mtu))
        .collect();
    Table {
        name: names::NFT_TABLE.to_owned(),
        sets,
        timed: BTreeMap::new(),
        maps: BTreeMap::new(),
        chains: [
            (names::NFT_CHAIN_PREROUTING.to_owned(), chain(Hook::FilterPrerouting, prerouting)),
            (names::NFT_CHAIN_OUTGOING.to_owned(), chain(Hook::RouteOutput, outgoing)),
        ]
        .into_iter()
        .chain(arriving::chain(state).map(|chain| (names::NFT_CHAIN_ARRIVING.to_owned(), chain)))
        .chain(sources::chain(state).map(|chain| (names::NFT_CHAIN_SOURCES.to_owned(), chain)))
        .chain(has_site(state).then(|| (names::NFT_CHAIN_SITE.to_owned(), masquerading(&state.interface))))
        .chain(marks_forwarded.then(|| (names::NFT_CHAIN_FORWARD.to_owned(), marking(!own.is_empty()))))
        .collect(),
    }
}

/// Whether there are hosts beside this node.
pub(super) fn has_site(state: &MeshState) -> bool {
    !state.masqueraded.is_empty()
}

/// The sets of hosts beside this node, if there are any.
pub(super) fn site_sets(state: &MeshState) -> impl Iterator<Item = (String, IntervalSet)> {
    let halves = HALVES.iter().filter(move |_| has_site(state));
    halves.map(move |half| {
        (half.site.to_owned(), IntervalSet::from_prefixes(half.addresses, &state.masqueraded))
    })
}

/// The sets by which packets are told that go past the mesh.
pub(super) fn exceptions(bypass: &Bypass) -> BTreeMap<String, IntervalSet> {
    let nodes: Vec<IpNet> = bypass.nodes.iter().copied().map(IpNet::from).collect();
    let answering = HALVES.iter().filter(|half| half.answers(bypass));
    let nodes = answering.map(|half| (half.nodes, IntervalSet::from_prefixes(half.addresses, &nodes)));
    let with_own = HALVES.iter().filter(|_| !bypass.own.is_empty());
    let own = with_own.map(|half| (half.own, IntervalSet::from_prefixes(half.addresses, &bypass.own)));
    nodes.chain(own).map(|(name, set)| (name.to_owned(), set)).collect()
}

/// Answers of the relay's pods to nodes.
pub(super) fn relay_answers(bypass: &Bypass) -> impl Iterator<Item = Rule> {
    bypass.relays.iter().filter_map(|relay| Some(half(*relay)?.answer(*relay)))
}

/// Answers from addresses of this host that are not in the mesh.
pub(super) fn foreign_answers(bypass: &Bypass, mark: &[Expression]) -> impl Iterator<Item = Rule> {
    HALVES.iter().filter(|_| !bypass.own.is_empty()).map(move |half| half.foreign_answer(mark))
}

/// Hosts beside this node see this node as the source of what comes from the mesh.
fn masquerading(interface: &str) -> Chain {
    let into_mesh = Rule(vec![
        Expression::LoadMeta(Meta::OutputInterface),
        Expression::is_interface(interface),
        Expression::Accept,
    ]);
    let rules = [into_mesh].into_iter().chain(HALVES.iter().flat_map(Half::masquerade)).collect();
    Chain { hook: Hook::NatPostrouting, priority: PRIORITY_MASQUERADE, rules }
}

/// Marks packets that this host forwards between members of the mesh, whichever links they come and go by: neighbours of the location have no
/// tunnel.
fn marking(has_own: bool) -> Chain {
    let rules = HALVES.iter().flat_map(|half| half.mark_forwarded(has_own)).collect();
    Chain { hook: Hook::FilterForward, priority: forwarding::PRIORITY, rules }
}

/// Lets packets pass that WireGuard and the node program sent themselves: they must not enter the mesh again. WireGuard's keep their port, and
/// may have bits of other programs in their mark, after which they were routed again: `mark` is what is done to them before they are accepted. Those
/// of the node program's sockets have this mark alone.
pub(super) fn accept_own(state: &MeshState, mark: &[Expression]) -> impl Iterator<Item = Rule> {
    let has_port = is_port(PROTOCOL_UDP, UDP_SOURCE_PORT, state.listen_port);
    let has_port = [&has_port[..], mark].concat();
    let wireguard = (state.listen_port != 0).then(|| from_wireguard(names::MARK_FROM_WIREGUARD, &has_port));
    let protocols = [(IpFamily::V4, PROTOCOL_IPIP), (IpFamily::V6, PROTOCOL_IPV6)];
    let outer =
        protocols.into_iter().filter(|(family, _)| state.has_tunnels(*family)).map(|(_, protocol)| {
            let is_outer = [
                Expression::LoadMeta(Meta::TransportProtocol),
                Expression::Compare(Comparison::Equal, vec![protocol]),
            ];
            from_wireguard(names::MARK_MASK, &is_outer)
        });
    let outer: Vec<Rule> = outer.collect();
    [from_wireguard(u32::MAX, &[])].into_iter().chain(wireguard).chain(outer)
}

/// `meta mark & MASK == 0x20 … accept`
fn from_wireguard(mask: u32, and: &[Expression]) -> Rule {
    let mut expressions = Expression::mark_is(names::MARK_FROM_WIREGUARD, mask);
    expressions.extend(and.iter().cloned());
    expressions.push(Expression::Accept);
    Rule(expressions)
}

/// `meta mark set meta mark | 0x60`: the packet of this host finds the route that it would have without a mesh.
pub(super) fn mark_past_mesh() -> [Expression; 3] {
    Expression::replace_mark(!names::MARK_PAST_MESH, names::MARK_PAST_MESH)
}

/// Neighbor Discovery (RFC 4861) belongs to its link: a node on it has an address that is reached through the mesh, and
/// WireGuard itself does not reach a neighbor whose answers to solicitations take the tunnel.
pub(super) fn accept_neighbor_discovery() -> Rule {
    Rule(vec![
        Expression::LoadMeta(Meta::TransportProtocol),
        Expression::Compare(Comparison::Equal, vec![PROTOCOL_ICMPV6]),
        Expression::LoadPayload { header: Header::Transport, offset: ICMPV6_TYPE, length: 1 },
        Expression::Compare(Comparison::AtLeast, vec![ICMPV6_ROUTER_SOLICITATION]),
        Expression::Compare(Comparison::AtMost, vec![ICMPV6_REDIRECT]),
        Expression::Accept,
    ])
}

/// Local addresses never enter the mesh, even if a peer claims them. The output interface alone is not enough: it is still
/// the loopback one when a Service's DNAT has just redirected a local connection to another node.
fn accept_loopback() -> Rule {
    let mut expressions = vec![Expression::LoadMeta(Meta::OutputInterface), Expression::is_interface("lo")];
    expressions.extend(Expression::destination_is_local());
    expressions.push(Expression::Accept);
    Rule(expressions)
}

/// This host's connections to the API server, and its answers to other nodes if it is here. `mark` is what is done to the former before they
/// are accepted.
pub(super) fn past_mesh(bypass: &Bypass, mark: &[Expression]) -> impl Iterator<Item = Rule> {
    bypass.servers.iter().flat_map(move |server| {
        half(*server).into_iter().flat_map(move |half| [request(*server, mark), half.answer(*server)])
    })
}

/// The half of the address's family.
fn half(address: SocketAddr) -> Option<&'static Half> {
    HALVES.iter().find(|half| half.addresses == IpFamily::of(address.ip()))
}

fn into_mesh(mtu: u32) -> impl Iterator<Item = Rule> {
    let clamps = HALVES.iter().map(move |half| half.clamp(mtu));
    clamps.chain(HALVES.iter().map(Half::mark))
}

/// `ip daddr A tcp dport P meta mark set meta mark | 0x60 accept`
fn request(server: SocketAddr, mark: &[Expression]) -> Rule {
    let mut expressions = Expression::address_is(AddressEnd::Destination, server.ip());
    expressions.extend(is_tcp_port(TCP_DESTINATION_PORT, server.port()));
    expressions.extend_from_slice(mark);
    expressions.push(Expression::Accept);
    Rule(expressions)
}

impl Half {
    /// Whether other nodes have addresses of the family.
    pub(super) fn has_nodes(&self, bypass: &Bypass) -> bool {
        bypass.nodes.iter().any(|it| IpFamily::of(*it) == self.addresses)
    }

    /// Whether a rule of [`Self::answer`] looks addresses of nodes up.
    fn answers(&self, bypass: &Bypass) -> bool {
        bypass.servers.iter().chain(&bypass.relays).any(|it| IpFamily::of(it.ip()) == self.addresses)
    }

    /// `ip saddr A tcp sport P ip daddr @nodes accept`
    fn answer(&self, server: SocketAddr) -> Rule {
        let mut expressions = Expression::address_is(AddressEnd::Source, server.ip());
        expressions.extend(is_tcp_port(TCP_SOURCE_PORT, server.port()));
        expressions.extend([
            Expression::load_address(self.addresses, AddressEnd::Destination),
            Expression::Lookup(self.nodes.to_owned()),
            Expression::Accept,
        ]);
        Rule(expressions)
    }

    /// `ct direction reply ip saddr != @own ct original ip daddr != @own ct original ip daddr != @targets meta mark set meta mark | 0x60 accept`
    ///
    /// A connection to an address of this host that is not in the mesh, such as a virtual one, came past the mesh, and no peer accepts
    /// the answer from the tunnel. What this host sends on its own behalf is not let out this way. By the mark the packet finds the route that
    /// it would have without a mesh.
    ///
    /// The address to which the connection was opened says where it came from: that of a connection by the tunnel is this node's in the mesh, or
    /// that of a member for which it forwards. Its answers can have another source here, as those of a Service of this host before the
    /// translation is undone, and so can ICMP errors about it, which hold a part of the packet from the tunnel.
    fn foreign_answer(&self, mark: &[Expression]) -> Rule {
        let mut expressions = vec![
            Expression::LoadConnectionDirection,
            Expression::Compare(Comparison::Equal, vec![CONNECTION_REPLY]),
            Expression::LoadMeta(Meta::NetworkProtocol),
            Expression::is_protocol(self.addresses),
            Expression::load_address(self.addresses, AddressEnd::Source),
            Expression::LookupAbsent(self.own.to_owned()),
            Expression::LoadConnectionDestination(self.addresses),
            Expression::LookupAbsent(self.own.to_owned()),
            Expression::LookupAbsent(self.set.to_owned()),
        ];
        expressions.extend_from_slice(mark);
        expressions.push(Expression::Accept);
        Rule(expressions)
    }

    /// Both ends of a connection learn what fits the mesh, whether a host or a pod opens it: path MTU discovery
    /// is often filtered.
    fn clamp(&self, mtu: u32) -> Rule {
        let most = u16::try_from(mtu.saturating_sub(self.headers)).unwrap_or(u16::MAX).to_be_bytes().to_vec();
        let mut expressions = Expression::address_in(self.addresses, AddressEnd::Destination, self.set);
        expressions.extend([
            Expression::LoadMeta(Meta::TransportProtocol),
            Expression::Compare(Comparison::Equal, vec![PROTOCOL_TCP]),
            Expression::LoadPayload { header: Header::Transport, offset: TCP_FLAGS, length: 1 },
            Expression::Bitwise { mask: vec![TCP_SYN | TCP_RST], xor: vec![0] },
            Expression::Compare(Comparison::Equal, vec![TCP_SYN]),
            Expression::LoadTcpOption(TCP_MAXIMUM_SEGMENT),
            Expression::Compare(Comparison::Greater, most.clone()),
            Expression::LoadConstant(most),
            Expression::StoreTcpOption(TCP_MAXIMUM_SEGMENT),
        ]);
        Rule(expressions)
    }

    fn masquerade(&self) -> [Rule; 2] {
        let mut among_them = Expression::address_in(self.addresses, AddressEnd::Source, self.site);
        among_them.push(Expression::Accept);
        let mut hide = Expression::address_in(self.addresses, AddressEnd::Source, self.set);
        hide.extend(Expression::address_in(self.addresses, AddressEnd::Destination, self.site));
        hide.push(Expression::Masquerade);
        [Rule(among_them), Rule(hide)]
    }

    /// `ip saddr @targets ip daddr @targets meta mark set meta mark | 0x10`, and the same with prefixes of this node at one end
    fn mark_forwarded(&self, has_own: bool) -> Vec<Rule> {
        let among = [(self.set, self.set)];
        let own = [(self.set, self.own), (self.own, self.set)];
        let ends = among.into_iter().chain(own.into_iter().filter(|_| has_own));
        let rule = |(source, destination): (&str, &str)| {
            let mut expressions = Expression::address_in(self.addresses, AddressEnd::Source, source);
            expressions.extend([
                Expression::load_address(self.addresses, AddressEnd::Destination),
                Expression::Lookup(destination.to_owned()),
            ]);
            expressions.extend(forwarding::mark());
            Rule(expressions)
        };
        ends.map(rule).collect()
    }

    fn mark(&self) -> Rule {
        let mut expressions = Expression::address_in(self.addresses, AddressEnd::Destination, self.set);
        expressions.extend(Expression::replace_mark(!names::MARK_FROM_WIREGUARD, names::MARK_TO_WIREGUARD));
        expressions.push(Expression::Accept);
        Rule(expressions)
    }
}

pub(super) fn is_tcp_port(offset: u32, port: u16) -> [Expression; 4] {
    is_port(PROTOCOL_TCP, offset, port)
}

pub(super) fn is_port(protocol: u8, offset: u32, port: u16) -> [Expression; 4] {
    [
        Expression::LoadMeta(Meta::TransportProtocol),
        Expression::Compare(Comparison::Equal, vec![protocol]),
        Expression::LoadPayload { header: Header::Transport, offset, length: 2 },
        Expression::Compare(Comparison::Equal, port.to_be_bytes().to_vec()),
    ]
}
