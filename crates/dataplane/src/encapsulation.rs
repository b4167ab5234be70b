//! IP tunnels to nodes of this node's location: one link for each family, which carries packets to the next hop of their route, and an
//! nftables table that says who may send there.
//!
//! `nft list table inet fairlead_encapsulation` prints, with the same for IPv6 and protocol 41 (RFC 2473):
//!
//! ```text
//! chain input    { meta l4proto ipip ip daddr @local_ipv4 ip saddr @senders_ipv4 accept
//!                  meta l4proto ipip ip daddr @local_ipv4 drop }
//! chain outgoing { meta l4proto ipip ip saddr @local_ipv4 meta mark set meta mark & 0xffffffbf | 0x00000020 }
//! ```
//!
//! The second chain sees outer packets. They have the mark of what is in them, and go to an address that is itself reached through the
//! mesh: they must not be led into it again. They are routed by then. What is in them keeps its mark until it is in the tunnel: by that
//! the kernel finds the route whose path MTU the tunnel tells it (`ip_rt_update_pmtu`), and with the other mark that would be the outer
//! packet's.
//!
//! The kernel gives packets to the tunnel that names both ends before one that names its own only, so tunnels of other programs with a
//! remote address keep what is theirs; their remote addresses are among the senders.

use std::collections::BTreeMap;
use std::net::IpAddr;

use fairlead_address::{IntervalSet, IpFamily};
use fairlead_api::names::{
    IP6TNL_OVERHEAD, IPIP_OVERHEAD, IPV6_MIN_MTU, LINK_IP6TNL, LINK_IPIP, MARK_FROM_WIREGUARD, MARK_MASK,
    NFT_TABLE_ENCAPSULATION, POD_GATEWAY_IPV4, TABLE_MESH,
};
use fairlead_netlink::nftables::{AddressEnd, Chain, Comparison, Expression, Hook, Meta, Rule, Table};
use fairlead_netlink::route::{
    Address, AddressFlags, KIND_IP6TNL, KIND_IPIP, Link, Route, RouteSocket, Scope, TunnelEnds, add_address,
    add_ip_tunnel, delete_link, set_mtu, set_up,
};
use fairlead_netlink::{Error, Result};
use ipnet::IpNet;
use nix::libc;

use crate::nft_table::{self, Keeper};
use crate::uplink::{accept_ipv6, loosen_reverse_path_filter};

/// Priority of the input chain: `filter`. The other one comes before that of the mesh, which leaves alone what has WireGuard's mark.
const PRIORITY_INPUT: i32 = 0;
const PRIORITY_OUTGOING: i32 = -1;

/// The tunnels that should be.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Encapsulation {
    /// Addresses at which tunnels begin: at most one of each family.
    pub local: Vec<IpAddr>,
    /// Addresses from which packets are accepted, in any order.
    pub senders: Vec<IpAddr>,
    /// MTU of links to other nodes, in bytes.
    pub uplink_mtu: u32,
}

/// Index of the tunnel of each family, or why there is none.
pub type Tunnels = BTreeMap<IpFamily, std::result::Result<u32, String>>;

/// MTU of a tunnel of this family.
pub fn mtu(family: IpFamily, uplink: u32) -> u32 {
    match family {
        IpFamily::V4 => uplink.saturating_sub(IPIP_OVERHEAD),
        IpFamily::V6 => uplink.saturating_sub(IP6TNL_OVERHEAD),
    }
}

/// One address family.
struct Half {
    family: IpFamily,
    link: &'static str,
    kind: &'static str,
    /// IP protocol number in the outer header.
    protocol: i32,
    local: &'static str,
    senders: &'static str,
}

const HALVES: [Half; 2] = [
    Half {
        family: IpFamily::V4,
        link: LINK_IPIP,
        kind: KIND_IPIP,
        protocol: libc::IPPROTO_IPIP,
        local: "local_ipv4",
        senders: "senders_ipv4",
    },
    Half {
        family: IpFamily::V6,
        link: LINK_IP6TNL,
        kind: KIND_IP6TNL,
        protocol: libc::IPPROTO_IPV6,
        local: "local_ipv6",
        senders: "senders_ipv6",
    },
];

/// Keeps the tunnels. Losing it loses nothing: what is there is adopted.
#[derive(Debug, Default)]
pub struct Applier {
    table: Keeper,
}

impl Applier {
    /// Makes the tunnels what they should be; sends nothing when everything is in place. A tunnel of a family that is not wanted is
    /// removed. Why one cannot be had is in the result, and is no error.
    ///
    /// # Errors
    /// Links cannot be read, a link that is not wanted cannot be removed, or the kernel refuses the table; then there is no tunnel that
    /// others than `senders` could send to.
    pub fn apply(&mut self, wanted: &Encapsulation) -> Result<Tunnels> {
        let mut socket = RouteSocket::open()?;
        let Present { ours, foreign_remotes } = Present::read(&mut socket)?;
        for half in &HALVES {
            let is_wanted = |link: &&Link| wanted.local.iter().any(|local| half.is_usable(link, *local));
            let excess = ours.get(&half.family).filter(|link| !is_wanted(link));
            remove(&mut socket, excess)?;
        }
        if wanted.local.is_empty() {
            self.table = Keeper::default();
            nft_table::remove(NFT_TABLE_ENCAPSULATION)?;
            return Ok(Tunnels::new());
        }
        // First who may send, then where to.
        if let Err(error) = self.table.apply(&table(wanted, &foreign_remotes)) {
            ours.values().try_for_each(|link| remove(&mut socket, Some(link)))?;
            return Err(error);
        }
        let tunnel = |local: &IpAddr| {
            let half = HALVES.iter().find(|half| half.family == IpFamily::of(*local))?;
            Some((half.family, half.ready(&mut socket, *local, wanted.uplink_mtu)))
        };
        Ok(wanted.local.iter().filter_map(tunnel).collect())
    }

    /// Number of times that the nftables table was read.
    pub fn table_reads(&self) -> usize {
        self.table.reads()
    }
}

/// Removes the tunnels and the table.
///
/// # Errors
/// The kernel refuses.
pub fn remove_all() -> Result<()> {
    Applier::default().apply(&Encapsulation::default()).map(drop)
}

/// The ends of tunnels that routes of the mesh lead to, also those of an earlier program.
///
/// # Errors
/// The kernel cannot be read.
pub fn remotes_in_use() -> Result<Vec<IpAddr>> {
    let mut socket = RouteSocket::open()?;
    let ours: Vec<u32> = Present::read(&mut socket)?.ours.into_values().map(|link| link.index).collect();
    if ours.is_empty() {
        return Ok(Vec::new());
    }
    let is_through = |route: &&Route| route.link.is_some_and(|link| ours.contains(&link));
    let routes = socket.routes(TABLE_MESH)?;
    let remote = |route: &Route| route.gateway.unwrap_or(route.destination.addr());
    Ok(routes.iter().filter(is_through).map(remote).collect())
}

/// Tunnels of this host.
struct Present {
    /// Links with our names and types.
    ours: BTreeMap<IpFamily, Link>,
    /// The other ends of other programs' tunnels.
    foreign_remotes: Vec<IpAddr>,
}

impl Present {
    fn read(socket: &mut RouteSocket) -> Result<Self> {
        let mut ours = BTreeMap::new();
        let mut foreign_remotes = Vec::new();
        for half in &HALVES {
            for link in socket.links_of_kind(half.kind)? {
                if link.name == half.link {
                    ours.insert(half.family, link);
                } else {
                    foreign_remotes.extend(link.tunnel.and_then(|ends| ends.remote));
                }
            }
        }
        Ok(Self { ours, foreign_remotes })
    }
}

fn remove(socket: &mut RouteSocket, link: Option<&Link>) -> Result<()> {
    let Some(link) = link else { return Ok(()) };
    match socket.apply(&[delete_link(link.index)]) {
        Err(error) if error.is_missing() => Ok(()),
        done => done,
    }
}

impl Half {
    fn is_usable(&self, link: &Link, local: IpAddr) -> bool {
        let ends = TunnelEnds { local: Some(local), remote: None };
        self.family == IpFamily::of(local) && link.tunnel == Some(ends)
    }

    /// The tunnel, up; else why there is none.
    fn ready(
        &self,
        socket: &mut RouteSocket,
        local: IpAddr,
        uplink: u32,
    ) -> std::result::Result<u32, String> {
        let mtu = mtu(self.family, uplink);
        if self.family == IpFamily::V6 && mtu < IPV6_MIN_MTU {
            return Err(format!("the uplink's MTU of {uplink} bytes leaves less than IPv6 needs"));
        }
        let link = self.adopted_or_new(socket, local, mtu).map_err(|error| self.explain(&error))?;
        self.configure(socket, &link, mtu).map_err(|error| error.to_string())?;
        Ok(link.index)
    }

    fn adopted_or_new(&self, socket: &mut RouteSocket, local: IpAddr, mtu: u32) -> Result<Link> {
        let missing = |reason: &str| Error::Invalid {
            what: format!("use tunnel {}", self.link),
            reason: reason.to_owned(),
        };
        match socket.link_by_name(self.link)? {
            Some(link) if self.is_usable(&link, local) => return Ok(link),
            Some(_) => return Err(missing("another program has a link of this name")),
            None => {}
        }
        match socket.apply(&[add_ip_tunnel(self.link, local, mtu)]) {
            Err(error) if error.is_existing() => {
                return Err(missing(&format!(
                    "another program has a tunnel at {local} without a remote address"
                )));
            }
            done => done?,
        }
        socket.link_by_name(self.link)?.ok_or_else(|| missing("another program has removed it"))
    }

    /// A kernel without the module says that it does not support the operation, or the address family.
    fn explain(&self, error: &Error) -> String {
        match error.is_unsupported() {
            true => format!("the kernel has no {} (module {})", self.kind, self.module()),
            false => error.to_string(),
        }
    }

    const fn module(&self) -> &'static str {
        match self.family {
            IpFamily::V4 => "ipip",
            IpFamily::V6 => "ip6_tunnel",
        }
    }

    fn configure(&self, socket: &mut RouteSocket, link: &Link, mtu: u32) -> Result<()> {
        let mut messages = Vec::new();
        if link.mtu != mtu {
            messages.push(set_mtu(link.index, mtu));
        }
        if self.family == IpFamily::V4 && !socket.addresses_on(link.index)?.iter().any(is_marker) {
            messages.push(add_address(&marker(link.index)));
        }
        // The sources of what comes out are those of pods and nodes, whose routes lead elsewhere while tunnels are tried.
        let switched = match self.family {
            IpFamily::V4 => loosen_reverse_path_filter(&link.name),
            IpFamily::V6 => accept_ipv6(&link.name),
        };
        switched.map_err(|error| Error::Invalid {
            what: format!("let packets out of tunnel {}", link.name),
            reason: error.to_string(),
        })?;
        if !link.up {
            messages.push(set_up(link.index, true));
        }
        if messages.is_empty() { Ok(()) } else { socket.apply(&messages) }
    }

    fn rules(&self) -> [Rule; 2] {
        let mut accept = self.is_outer(AddressEnd::Destination);
        accept.extend(Expression::address_in(self.family, AddressEnd::Source, self.senders));
        accept.push(Expression::Accept);
        let mut drop = self.is_outer(AddressEnd::Destination);
        drop.push(Expression::Drop);
        [Rule(accept), Rule(drop)]
    }

    fn mark(&self) -> Rule {
        let mut expressions = self.is_outer(AddressEnd::Source);
        expressions.extend(Expression::replace_mark(!MARK_MASK, MARK_FROM_WIREGUARD));
        Rule(expressions)
    }

    /// Continues with packets of the tunnel's protocol that have the tunnel's address.
    fn is_outer(&self, end: AddressEnd) -> Vec<Expression> {
        let protocol = u8::try_from(self.protocol).unwrap_or_default();
        let mut expressions = vec![
            Expression::LoadMeta(Meta::TransportProtocol),
            Expression::Compare(Comparison::Equal, vec![protocol]),
        ];
        expressions.extend(Expression::address_in(self.family, end, self.local));
        expressions
    }
}

/// With reverse path filtering on, the kernel drops all IPv4 that arrives on a link without an address. It is one with scope host, which
/// is never chosen as the source of a packet.
fn marker(link: u32) -> Address {
    let prefix = IpNet::from(IpAddr::from(POD_GATEWAY_IPV4));
    Address { link, prefix, scope: Scope::HOST, flags: AddressFlags::default() }
}

fn is_marker(address: &Address) -> bool {
    address.prefix.addr() == IpAddr::from(POD_GATEWAY_IPV4) && address.scope == Scope::HOST
}

/// The table that should be.
fn table(wanted: &Encapsulation, foreign_remotes: &[IpAddr]) -> Table {
    let prefixes = |addresses: &mut dyn Iterator<Item = &IpAddr>| -> Vec<IpNet> {
        addresses.copied().map(IpNet::from).collect()
    };
    let local = prefixes(&mut wanted.local.iter());
    let senders = prefixes(&mut wanted.senders.iter().chain(foreign_remotes));
    let mut sets = BTreeMap::new();
    for half in &HALVES {
        sets.insert(half.local.to_owned(), IntervalSet::from_prefixes(half.family, &local));
        sets.insert(half.senders.to_owned(), IntervalSet::from_prefixes(half.family, &senders));
    }
    let input: Vec<Rule> = HALVES.iter().flat_map(Half::rules).collect();
    let input = Chain { hook: Hook::FilterInput, priority: PRIORITY_INPUT, rules: input };
    let outgoing = HALVES.iter().map(Half::mark).collect();
    let outgoing = Chain { hook: Hook::FilterOutput, priority: PRIORITY_OUTGOING, rules: outgoing };
    Table {
        name: NFT_TABLE_ENCAPSULATION.to_owned(),
        sets,
        timed: BTreeMap::new(),
        maps: BTreeMap::new(),
        chains: BTreeMap::from([("input".to_owned(), input), ("outgoing".to_owned(), outgoing)]),
    }
}
