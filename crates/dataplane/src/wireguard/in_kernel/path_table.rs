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

use std::collections::BTreeMap;

use fairlead_api::names::{MARK_FROM_WIREGUARD, MARK_MASK, NFT_TABLE_PATH_SOCKET};
use fairlead_netlink::nftables::{
    Chain, Comparison, Expression, Header, Hook, Meta, Rule, Table, TableState,
};
use fairlead_wire::{probe, stun};

/// Behind `srcnat` of what comes in, 100 (`NF_IP_PRI_NAT_SRC`), and before connections are confirmed.
const PRIORITY_RECEIVED: i32 = 250;
/// Before `raw`, -300 (`NF_IP_PRI_RAW`), and before connections are tracked, -200.
const PRIORITY_SENT: i32 = -301;
const RECEIVED: &str = "received_";
const SENT: &str = "sent_";

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
/// Where the magic cookie is in STUN messages.
const STUN_COOKIE: u32 = 4;

/// The ports that a table joins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Ports {
    /// WireGuard's.
    pub(super) wireguard: u16,
    /// The path socket's.
    pub(super) path_socket: u16,
}

/// The table that should be.
pub(super) fn table(ports: Ports) -> Table {
    let Ports { wireguard, path_socket } = ports;
    let mut to_path_socket = is_udp_port(DESTINATION_PORT, path_socket);
    to_path_socket.push(Expression::Drop);
    let mut received = vec![Rule(to_path_socket)];
    for message in [is_probe(), is_stun_response()] {
        for has_checksum in [false, true] {
            let mut rule = is_udp_port(DESTINATION_PORT, wireguard);
            rule.extend(message.iter().cloned());
            if !has_checksum {
                rule.extend(has_bytes(CHECKSUM, vec![0; 2]));
            }
            rule.extend(set_port(DESTINATION_PORT, path_socket, has_checksum.then_some(CHECKSUM)));
            received.push(Rule(rule));
        }
    }
    // Another program may get the port while this one does not run. Its datagrams have no such mark.
    let mut sent = vec![
        Expression::LoadMeta(Meta::Mark),
        Expression::replace_bits(MARK_MASK, 0),
        Expression::Compare(Comparison::Equal, MARK_FROM_WIREGUARD.to_ne_bytes().to_vec()),
    ];
    sent.extend(is_udp_port(SOURCE_PORT, path_socket));
    // This host computes the checksums of all it sends.
    sent.extend(set_port(SOURCE_PORT, wireguard, Some(CHECKSUM)));
    Table {
        name: NFT_TABLE_PATH_SOCKET.to_owned(),
        sets: BTreeMap::new(),
        chains: BTreeMap::from([
            (
                format!("{RECEIVED}{path_socket}"),
                Chain { hook: Hook::FilterInput, priority: PRIORITY_RECEIVED, rules: received },
            ),
            (
                format!("{SENT}{path_socket}"),
                Chain { hook: Hook::FilterOutput, priority: PRIORITY_SENT, rules: vec![Rule(sent)] },
            ),
        ]),
    }
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

fn is_udp_port(offset: u32, port: u16) -> Vec<Expression> {
    let mut expressions = vec![
        Expression::LoadMeta(Meta::TransportProtocol),
        Expression::Compare(Comparison::Equal, vec![PROTOCOL_UDP]),
    ];
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
    [
        Expression::LoadConstant(port.to_be_bytes().to_vec()),
        Expression::StorePayload { header: Header::Transport, offset, length: 2, checksum },
    ]
}

#[cfg(test)]
mod tests {
    use super::*;

    const PORTS: Ports = Ports { wireguard: 51820, path_socket: 40000 };

    #[test]
    fn the_port_of_an_earlier_process_is_found_in_its_table() {
        let state = TableState::from(table(PORTS));
        assert_eq!(path_socket_port(&state), Some(40000));
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
        let shown = testbed_netns::in_namespace(|| {
            crate::nft_table::apply(&table(PORTS)).unwrap();
            testbed_netns::sh("nft list table inet fairlead_path_socket")
        });
        let lines = |text: &str| -> Vec<String> {
            let lines = text.lines().map(|line| line.trim().to_owned());
            lines.filter(|line| line.contains("udp") || line.contains("hook")).collect()
        };
        let documented: Vec<String> = include_str!("path_table.rs")
            .lines()
            .filter_map(|line| line.strip_prefix("//!"))
            .flat_map(lines)
            .collect();
        assert_eq!(lines(&shown), documented[documented.len() - 8..], "{shown}");
    }

    #[test]
    fn the_same_ports_change_nothing_and_others_replace_the_table() {
        use crate::nft_table::{Applied, apply};
        testbed_netns::in_namespace(|| {
            let outcomes = [PORTS, PORTS, Ports { wireguard: 51821, ..PORTS }]
                .map(|ports| apply(&table(ports)).unwrap());
            assert_eq!(outcomes, [Applied::Rebuilt, Applied::Unchanged, Applied::Rebuilt]);
        });
    }
}
