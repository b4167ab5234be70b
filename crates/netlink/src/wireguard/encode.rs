//! `WG_CMD_SET_DEVICE`: an update as one message, or several when it is large.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};

use fairlead_keys::PublicKey;
use ipnet::IpNet;
use nix::libc;

use super::{DeviceUpdate, PeerUpdate, SET_DEVICE, VERSION, allowed_ip, device, peer};
use crate::nftables::attributes::AttributeWriter;
use crate::{Message, Result};

/// Prefixes of one peer in one message: 1,000 of IPv6 take 40,000 bytes.
const ALLOWED_IPS_AT_ONCE: usize = 1000;
/// Bytes of peers in one message, below the 65,535 of an attribute; leaves room for one more with its list header.
const PEERS_AT_ONCE: usize = 60_000;

/// A peer, or a part of its prefixes, ready to be put into a message.
struct Piece {
    bytes: Vec<u8>,
    key: PublicKey,
    removal: bool,
}

/// The messages of an update; none for an empty one.
///
/// A removal takes the kernel some milliseconds (`wg_peer_remove` waits for all that use the peer), in which no peer has its prefixes.
/// So peers that get them come first, and the kernel moves them by itself. Only what is made anew is removed before.
pub(super) fn device(family: u16, interface: &str, update: &DeviceUpdate) -> Result<Vec<Message>> {
    let set: BTreeSet<PublicKey> = update.set.iter().map(|change| change.public_key).collect();
    let (anew, gone): (Vec<_>, Vec<_>) = update.remove.iter().copied().partition(|key| set.contains(key));
    let mut pieces = Vec::new();
    for key in anew {
        pieces.push(removal(key)?);
    }
    for change in &update.set {
        pieces.extend(change_pieces(change)?);
    }
    for key in gone {
        pieces.push(removal(key)?);
    }
    let mut settings = DeviceUpdate { remove: Vec::new(), set: Vec::new(), ..update.clone() };
    let mut messages = Vec::new();
    let mut rest = pieces.as_slice();
    while !rest.is_empty() || !settings.is_empty() {
        let (now, later) = rest.split_at(fitting(rest));
        // The device's own settings travel with the first peers: what fits one message is one step.
        messages.push(message(family, interface, &std::mem::take(&mut settings), now)?);
        rest = later;
    }
    Ok(messages)
}

/// Number of pieces that the next message takes: at least one if there is one.
fn fitting(pieces: &[Piece]) -> usize {
    let mut total = 0usize;
    let fits = |piece: &&Piece| {
        total = total.saturating_add(piece.bytes.len()).saturating_add(4);
        total <= PEERS_AT_ONCE
    };
    pieces.iter().take_while(fits).count().max(1).min(pieces.len())
}

fn message(family: u16, interface: &str, settings: &DeviceUpdate, pieces: &[Piece]) -> Result<Message> {
    let what = describe(interface, settings, pieces);
    let mut writer = AttributeWriter::new(&[SET_DEVICE, VERSION, 0, 0]);
    writer.text(device::NAME, interface);
    if let Some(key) = &settings.private_key {
        writer.bytes(device::PRIVATE_KEY, &key.0);
    }
    if let Some(port) = settings.listen_port {
        writer.bytes(device::LISTEN_PORT, &port.to_ne_bytes());
    }
    if let Some(mark) = settings.fwmark {
        writer.bytes(device::FWMARK, &mark.to_ne_bytes());
    }
    if !pieces.is_empty() {
        writer.nested(device::PEERS, |list| {
            for piece in pieces {
                list.nested(0, |entry| entry.raw(&piece.bytes));
            }
        });
    }
    Ok(Message { kind: family, flags: 0, payload: writer.finish(&what)?, what })
}

/// "configure WireGuard device wg0: listen port 51820, 3 peers (first aaaa=)".
fn describe(interface: &str, settings: &DeviceUpdate, pieces: &[Piece]) -> String {
    let mut parts = Vec::new();
    parts.extend(settings.private_key.as_ref().map(|_| "private key".to_owned()));
    parts.extend(settings.listen_port.map(|port| format!("listen port {port}")));
    parts.extend(settings.fwmark.map(|mark| format!("mark {mark:#x}")));
    match pieces {
        [] => {}
        [Piece { key, removal: true, .. }] => parts.push(format!("remove peer {key}")),
        [Piece { key, .. }] => parts.push(format!("peer {key}")),
        [first, ..] => parts.push(format!("{} peers (first {})", pieces.len(), first.key)),
    }
    format!("configure WireGuard device {interface}: {}", parts.join(", "))
}

fn removal(key: PublicKey) -> Result<Piece> {
    let mut entry = AttributeWriter::new(&[]);
    entry.bytes(peer::PUBLIC_KEY, &key.0);
    entry.bytes(peer::FLAGS, &(peer::FLAG_REMOVE | peer::FLAG_UPDATE_ONLY).to_ne_bytes());
    Ok(Piece { bytes: entry.finish("remove a peer")?, key, removal: true })
}

fn change_pieces(change: &PeerUpdate) -> Result<Vec<Piece>> {
    let mut chunks = change.allowed_ips.chunks(ALLOWED_IPS_AT_ONCE);
    let mut pieces = vec![first_piece(change, chunks.next().unwrap_or_default())?];
    for more in chunks {
        let mut entry = AttributeWriter::new(&[]);
        entry.bytes(peer::PUBLIC_KEY, &change.public_key.0);
        entry.bytes(peer::FLAGS, &peer::FLAG_UPDATE_ONLY.to_ne_bytes());
        write_allowed_ips(&mut entry, more);
        pieces.push(finish(entry, change)?);
    }
    Ok(pieces)
}

fn first_piece(change: &PeerUpdate, allowed_ips: &[IpNet]) -> Result<Piece> {
    let flag = |on: bool, flag: u32| if on { flag } else { 0 };
    let flags = flag(change.replace_allowed_ips, peer::FLAG_REPLACE_ALLOWED_IPS)
        | flag(change.only_existing, peer::FLAG_UPDATE_ONLY);
    let mut entry = AttributeWriter::new(&[]);
    entry.bytes(peer::PUBLIC_KEY, &change.public_key.0);
    if flags != 0 {
        entry.bytes(peer::FLAGS, &flags.to_ne_bytes());
    }
    if let Some(key) = &change.preshared_key {
        entry.bytes(peer::PRESHARED_KEY, key);
    }
    if let Some(endpoint) = change.endpoint {
        entry.bytes(peer::ENDPOINT, &socket_address(endpoint));
    }
    if let Some(seconds) = change.persistent_keepalive {
        entry.bytes(peer::KEEPALIVE, &seconds.to_ne_bytes());
    }
    write_allowed_ips(&mut entry, allowed_ips);
    finish(entry, change)
}

fn finish(entry: AttributeWriter, change: &PeerUpdate) -> Result<Piece> {
    Ok(Piece { bytes: entry.finish("change a peer")?, key: change.public_key, removal: false })
}

fn write_allowed_ips(entry: &mut AttributeWriter, allowed_ips: &[IpNet]) {
    if allowed_ips.is_empty() {
        return;
    }
    entry.nested(peer::ALLOWED_IPS, |list| {
        for net in allowed_ips {
            list.nested(0, |item| write_allowed_ip(item, *net));
        }
    });
}

fn write_allowed_ip(item: &mut AttributeWriter, net: IpNet) {
    match net.addr() {
        IpAddr::V4(address) => {
            item.bytes(allowed_ip::FAMILY, &(libc::AF_INET as u16).to_ne_bytes());
            item.bytes(allowed_ip::ADDRESS, &address.octets());
        }
        IpAddr::V6(address) => {
            item.bytes(allowed_ip::FAMILY, &(libc::AF_INET6 as u16).to_ne_bytes());
            item.bytes(allowed_ip::ADDRESS, &address.octets());
        }
    }
    item.bytes(allowed_ip::PREFIX_LENGTH, &[net.prefix_len()]);
}

/// `struct sockaddr_in` or `struct sockaddr_in6`.
fn socket_address(address: SocketAddr) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(28);
    match address {
        SocketAddr::V4(v4) => {
            bytes.extend_from_slice(&(libc::AF_INET as u16).to_ne_bytes());
            bytes.extend_from_slice(&v4.port().to_be_bytes());
            bytes.extend_from_slice(&v4.ip().octets());
            bytes.extend_from_slice(&[0; 8]);
        }
        SocketAddr::V6(v6) => {
            bytes.extend_from_slice(&(libc::AF_INET6 as u16).to_ne_bytes());
            bytes.extend_from_slice(&v6.port().to_be_bytes());
            bytes.extend_from_slice(&0u32.to_be_bytes());
            bytes.extend_from_slice(&v6.ip().octets());
            bytes.extend_from_slice(&v6.scope_id().to_ne_bytes());
        }
    }
    bytes
}
