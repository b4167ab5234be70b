//! The nftables table that joins the path socket, which has a port of its own, to the port of the kernel's WireGuard. With a path
//! socket at port 40000 and WireGuard at 51820, `nft list table inet fairlead_path_socket` prints:
//!
//! ```text
//! chain received_40000 {
//!     type filter hook input priority 250; policy accept;
//!     udp dport 40000 drop
//!     udp dport 51820 @th,64,32 0xf11ead50 udp checksum 0 udp dport set 40000
//!     udp dport 51820 @th,64,32 0xf11ead50 udp dport set 40000
//!     udp dport 51820 @th,64,16 & 0xffef == 0x101 @th,96,32 0x2112a442 udp checksum 0 udp dport set 40000
//!     udp dport 51820 @th,64,16 & 0xffef == 0x101 @th,96,32 0x2112a442 udp dport set 40000
//! }
//! chain sent_40000 {
//!     type filter hook output priority raw - 1; policy accept;
//!     meta mark & 0x00000060 == 0x00000020 udp sport 40000 udp sport set 51820
//! }
//! ```
//!
//! Connection tracking, NAT and the rules of firewalls see the WireGuard port only, in both directions: what comes in is
//! rewritten behind them, what goes out before them. So one entry of connection tracking, and one mapping of the NATs on the
//! way, is that of WireGuard and of probes. A datagram without a checksum keeps none (RFC 768).
//!
//! The names of the chains say the port of the path socket, so that the next process takes the same and leaves the table as it is.
//!
//! A peer that a birthday attempt has reached at another port, say 33333, is pinned: what WireGuard and the path socket send to its
//! endpoint leaves from that port, and what the peer sends there arrives at WireGuard's. Connection tracking, firewalls and NATs see
//! the pinned port. Each pin is an element of both maps; without pins there are neither maps nor their rules:
//!
//! ```text
//! map pinned_ports {
//!     elements = { 203.0.113.9 . 40001 : 33333 }
//! }
//! map pinned_to_wireguard {
//!     elements = { 203.0.113.9 . 33333 : 51820 }
//! }
//! chain received_40000 {
//!     udp checksum 0 udp dport set ip saddr . udp dport map @pinned_to_wireguard
//!     udp dport set ip saddr . udp dport map @pinned_to_wireguard
//! }
//! chain sent_40000 {
//!     meta mark & 0x00000060 == 0x00000020 udp sport 51820 udp sport set ip daddr . udp dport map @pinned_ports
//! }
//! ```

use std::collections::BTreeMap;
use std::net::SocketAddrV4;

use fairlead_address::IpFamily;
use fairlead_api::names::{MARK_FROM_WIREGUARD, MARK_MASK, NFT_TABLE_PATH_SOCKET};
use fairlead_netlink::nftables::{
    AddressEnd, Chain, Comparison, EndpointMap, Expression, Header, Hook, Meta, Rule, Table, TableState,
};
use fairlead_wire::{probe, stun};

/// Behind `srcnat` of what comes in, 100 (`NF_IP_PRI_NAT_SRC`), and before connections are confirmed.
const PRIORITY_RECEIVED: i32 = 250;
/// Before `raw`, -300 (`NF_IP_PRI_RAW`), and before connections are tracked, -200.
const PRIORITY_SENT: i32 = -301;
const RECEIVED: &str = "received_";
const SENT: &str = "sent_";
/// In the place of the port, where the path socket is not joined.
const PINS: &str = "pinned";
/// The port for each endpoint that is pinned, and WireGuard's for each address of a peer with that port.
const PINNED_PORTS: &str = "pinned_ports";
const PINNED_TO_WIREGUARD: &str = "pinned_to_wireguard";
/// `ifname` of what this host sends to itself.
const LOOPBACK: &str = "lo";

/// `IPPROTO_UDP`
const PROTOCOL_UDP: u8 = 17;
/// The UDP header (RFC 768), offsets in bytes.
const SOURCE_PORT: u32 = 0;
const DESTINATION_PORT: u32 = 2;
const CHECKSUM: u32 = 6;
const PAYLOAD: u32 = 8;
/// Binding responses (RFC 8489, section 5): 0x0101 success, 0x0111 error. The second byte of WireGuard's messages is zero.
pub(super) const STUN_RESPONSE: [u8; 2] = [0x01, 0x01];
pub(super) const STUN_RESPONSE_MASK: [u8; 2] = [0xff, 0xef];
/// Offset of the magic cookie in STUN messages.
const STUN_COOKIE: u32 = 4;

/// The ports that a table joins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ports {
    /// WireGuard's.
    pub(super) wireguard: u16,
    /// The path socket's.
    pub(super) path_socket: u16,
}

/// Datagrams that the table leads between both ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Joined {
    /// All datagrams of WireGuard's peers, and of STUN servers.
    All,
    /// Datagrams of this host to itself, to test whether they arrive.
    Loopback,
    /// None: raw sockets receive them.
    None,
}

/// The table that should be; one without chains if there is nothing to do.
pub(super) fn table(ports: Ports, joined: Joined, pins: &EndpointMap) -> Table {
    let mut received = Vec::new();
    let mut sent = Vec::new();
    if joined != Joined::None {
        received
            .push(Rule([is_udp_port(DESTINATION_PORT, ports.path_socket), vec![Expression::Drop]].concat()));
        sent.push(from_path_socket(ports));
    }
    if !pins.is_empty() {
        received.extend([false, true].map(to_pinned_port));
        sent.push(from_pinned_port(ports));
    }
    if joined != Joined::None {
        received.extend(to_path_socket(ports, joined));
    }
    let label = if joined == Joined::None { PINS.to_owned() } else { ports.path_socket.to_string() };
    let chains = [
        (RECEIVED, Chain { hook: Hook::FilterInput, priority: PRIORITY_RECEIVED, rules: received }),
        (SENT, Chain { hook: Hook::FilterOutput, priority: PRIORITY_SENT, rules: sent }),
    ];
    let chains = chains.into_iter().filter(|(_, chain)| !chain.rules.is_empty());
    let to_wireguard =
        pins.iter().map(|(remote, port)| (SocketAddrV4::new(*remote.ip(), *port), ports.wireguard));
    let maps = [(PINNED_PORTS, pins.clone()), (PINNED_TO_WIREGUARD, to_wireguard.collect())];
    let maps = maps.into_iter().filter(|(_, map)| !map.is_empty());
    Table {
        name: NFT_TABLE_PATH_SOCKET.to_owned(),
        sets: BTreeMap::new(),
        timed: BTreeMap::new(),
        maps: maps.map(|(name, map)| (name.to_owned(), map)).collect(),
        chains: chains.map(|(name, chain)| (format!("{name}{label}"), chain)).collect(),
    }
}

fn to_path_socket(Ports { wireguard, path_socket }: Ports, joined: Joined) -> Vec<Rule> {
    let mut rules = Vec::new();
    for message in [is_probe(), is_stun_response()] {
        for has_checksum in [false, true] {
            let mut rule = Vec::new();
            if joined == Joined::Loopback {
                rule.extend([Expression::LoadMeta(Meta::InputInterface), Expression::is_interface(LOOPBACK)]);
            }
            rule.extend(is_udp_port(DESTINATION_PORT, wireguard));
            rule.extend(message.iter().cloned());
            if !has_checksum {
                rule.extend(has_bytes(CHECKSUM, vec![0; 2]));
            }
            rule.extend(set_port(DESTINATION_PORT, path_socket, has_checksum.then_some(CHECKSUM)));
            rules.push(Rule(rule));
        }
    }
    rules
}

fn from_path_socket(Ports { wireguard, path_socket }: Ports) -> Rule {
    let mut sent = is_marked();
    sent.extend(is_udp_port(SOURCE_PORT, path_socket));
    // This host computes the checksums of all it sends.
    sent.extend(set_port(SOURCE_PORT, wireguard, Some(CHECKSUM)));
    Rule(sent)
}

/// Behind the rule for the path socket, whose datagrams to the peer leave from the pinned port too.
fn from_pinned_port(ports: Ports) -> Rule {
    let mut sent = is_marked();
    sent.extend(is_udp_port(SOURCE_PORT, ports.wireguard));
    sent.extend(port_by(AddressEnd::Destination, PINNED_PORTS));
    sent.push(store_port(SOURCE_PORT, Some(CHECKSUM)));
    Rule(sent)
}

/// Before the rules for the path socket, which receives the probes among it.
fn to_pinned_port(has_checksum: bool) -> Rule {
    let mut received = is_udp().to_vec();
    if !has_checksum {
        received.extend(has_bytes(CHECKSUM, vec![0; 2]));
    }
    received.extend(port_by(AddressEnd::Source, PINNED_TO_WIREGUARD));
    received.push(store_port(DESTINATION_PORT, has_checksum.then_some(CHECKSUM)));
    Rule(received)
}

/// Loads what a map has for an IPv4 address of the packet and its destination port.
fn port_by(end: AddressEnd, map: &str) -> [Expression; 5] {
    [
        Expression::LoadMeta(Meta::NetworkProtocol),
        Expression::is_protocol(IpFamily::V4),
        Expression::load_address(IpFamily::V4, end),
        Expression::LoadPortBehind { offset: DESTINATION_PORT },
        Expression::LookupMap(map.to_owned()),
    ]
}

/// Another program may get a port while this one does not run. Its datagrams have no such mark.
fn is_marked() -> Vec<Expression> {
    Expression::mark_is(MARK_FROM_WIREGUARD, MARK_MASK)
}

/// The ports that are pinned in a table that an earlier process made, by endpoint.
pub(super) fn pins(table: &TableState) -> EndpointMap {
    table.maps.get(PINNED_PORTS).cloned().unwrap_or_default()
}

/// The path socket's port in a table that an earlier process made.
pub(super) fn path_socket_port(table: &TableState) -> Option<u16> {
    table.shape.chains.keys().find_map(|name| name.strip_prefix(SENT)?.parse().ok())
}

fn is_probe() -> Vec<Expression> {
    has_bytes(PAYLOAD, probe::MAGIC.to_vec()).to_vec()
}

fn is_stun_response() -> Vec<Expression> {
    let mut expressions = vec![
        Expression::LoadPayload { header: Header::Transport, offset: PAYLOAD, length: 2 },
        Expression::Bitwise { mask: STUN_RESPONSE_MASK.to_vec(), xor: vec![0; 2] },
        Expression::Compare(Comparison::Equal, STUN_RESPONSE.to_vec()),
    ];
    expressions.extend(has_bytes(PAYLOAD + STUN_COOKIE, stun::MAGIC_COOKIE.to_vec()));
    expressions
}

fn is_udp() -> [Expression; 2] {
    [
        Expression::LoadMeta(Meta::TransportProtocol),
        Expression::Compare(Comparison::Equal, vec![PROTOCOL_UDP]),
    ]
}

fn is_udp_port(offset: u32, port: u16) -> Vec<Expression> {
    let mut expressions = is_udp().to_vec();
    expressions.extend(has_bytes(offset, port.to_be_bytes().to_vec()));
    expressions
}

/// Bytes of the UDP header and its payload.
fn has_bytes(offset: u32, bytes: Vec<u8>) -> [Expression; 2] {
    let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
    [
        Expression::LoadPayload { header: Header::Transport, offset, length },
        Expression::Compare(Comparison::Equal, bytes),
    ]
}

fn set_port(offset: u32, port: u16, checksum: Option<u32>) -> [Expression; 2] {
    [Expression::LoadConstant(port.to_be_bytes().to_vec()), store_port(offset, checksum)]
}

fn store_port(offset: u32, checksum: Option<u32>) -> Expression {
    Expression::StorePayload { header: Header::Transport, offset, length: 2, checksum }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORTS: Ports = Ports { wireguard: 51820, path_socket: 40000 };

    fn pinned() -> EndpointMap {
        [("203.0.113.9:40001".parse().unwrap(), 33333)].into()
    }

    #[test]
    fn the_port_of_an_earlier_process_is_found_in_its_table() {
        let state = TableState::from(table(PORTS, Joined::All, &pinned()));
        assert_eq!((path_socket_port(&state), pins(&state)), (Some(40000), pinned()));
        let raw = TableState::from(table(PORTS, Joined::None, &pinned()));
        assert_eq!((path_socket_port(&raw), pins(&raw)), (None, pinned()));
        let mut foreign = state;
        foreign.shape.chains.clear();
        assert_eq!(path_socket_port(&foreign), None);
    }

    #[test]
    fn no_wireguard_message_is_led_to_the_path_socket() {
        let first = |kind: u8| [kind, 0, 0, 0];
        for kind in 1..=4 {
            assert_ne!(first(kind), probe::MAGIC);
            let masked = [first(kind)[0] & STUN_RESPONSE_MASK[0], first(kind)[1] & STUN_RESPONSE_MASK[1]];
            assert_ne!(masked, STUN_RESPONSE, "type {kind}");
        }
        for response in [[1, 1], [1, 0x11]] {
            let masked = [response[0] & STUN_RESPONSE_MASK[0], response[1] & STUN_RESPONSE_MASK[1]];
            assert_eq!(masked, STUN_RESPONSE);
        }
    }

    /// The kernel shows what it made of the table.
    #[test]
    fn nft_shows_what_the_documentation_says() {
        let show = |pins: EndpointMap| {
            testbed_netns::in_namespace(|| {
                crate::nft_table::apply(&table(PORTS, Joined::All, &pins)).unwrap();
                testbed_netns::sh("nft list table inet fairlead_path_socket")
            })
        };
        let lines = |text: &str| -> Vec<String> {
            let lines = text.lines().map(|line| line.trim().to_owned());
            lines.filter(|line| ["udp", "hook", "elements"].iter().any(|word| line.contains(word))).collect()
        };
        let documentation: Vec<&str> =
            include_str!("path_table.rs").lines().filter_map(|line| line.strip_prefix("//!")).collect();
        let documented: Vec<Vec<String>> =
            documentation.join("\n").split("```").skip(1).step_by(2).map(lines).collect();
        let (without, with) = (lines(&show(EndpointMap::new())), lines(&show(pinned())));
        assert_eq!(without, documented[0]);
        let added: Vec<String> = with.into_iter().filter(|line| !without.contains(line)).collect();
        assert_eq!(added, documented[1]);
    }

    #[test]
    fn what_is_the_same_changes_nothing_and_other_pins_only_the_maps() {
        use crate::nft_table::{Applied, apply};
        let other = Ports { wireguard: 51821, ..PORTS };
        let more: EndpointMap = pinned().into_iter().chain([("203.0.113.9:7".parse().unwrap(), 7)]).collect();
        let (none, elements) = (EndpointMap::new(), Applied::Elements { deleted: 0, added: 0 });
        testbed_netns::in_namespace(|| {
            for (ports, pins, expected) in [
                (PORTS, &none, Applied::Rebuilt),
                (PORTS, &none, Applied::Unchanged),
                (other, &none, Applied::Rebuilt),
                (other, &pinned(), Applied::Rebuilt),
                (other, &pinned(), Applied::Unchanged),
                (other, &more, elements),
                (other, &pinned(), elements),
            ] {
                assert_eq!(apply(&table(ports, Joined::All, pins)).unwrap(), expected, "{pins:?}");
            }
        });
    }
}
