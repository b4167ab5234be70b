//! `WG_CMD_GET_DEVICE`: one device out of as many messages as the kernel needed.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV4, SocketAddrV6};
use std::time::{Duration, SystemTime};

use fairlead_keys::{DeviceState, PeerState, PresharedKey, PrivateKey, PublicKey};
use ipnet::IpNet;
use nix::libc;

use super::{GENERIC_HEADER, allowed_ip, device, peer};
use crate::nftables::attributes::{Parsed, array, attributes, require};

/// Joins the messages of one dump.
///
/// A peer whose prefixes did not fit goes on at the head of the next message, with its key and further prefixes only.
pub(super) fn device<'a>(messages: impl Iterator<Item = &'a [u8]>) -> Parsed<DeviceState> {
    let mut state = DeviceState { private_key: None, listen_port: 0, fwmark: 0, peers: Default::default() };
    for message in messages {
        let body = message.get(GENERIC_HEADER..).ok_or("a truncated message")?;
        for attribute in attributes(body) {
            let (kind, value) = attribute?;
            match kind {
                device::PRIVATE_KEY => state.private_key = private_key(value)?,
                device::LISTEN_PORT => state.listen_port = u16::from_ne_bytes(array(value)?),
                device::FWMARK => state.fwmark = u32::from_ne_bytes(array(value)?),
                device::PEERS => add_peers(&mut state, value)?,
                _ => {}
            }
        }
    }
    for known in state.peers.values_mut() {
        known.config.allowed_ips.sort_unstable();
        known.config.allowed_ips.dedup();
    }
    Ok(state)
}

/// WireGuard encodes "none" as all zeros.
fn nonzero<const N: usize>(value: &[u8]) -> Parsed<Option<[u8; N]>> {
    array(value).map(|bytes: [u8; N]| (bytes != [0; N]).then_some(bytes))
}

fn private_key(value: &[u8]) -> Parsed<Option<PrivateKey>> {
    Ok(nonzero(value)?.map(PrivateKey))
}

fn add_peers(state: &mut DeviceState, list: &[u8]) -> Parsed<()> {
    for entry in attributes(list) {
        let (_, entry) = entry?;
        let key = PublicKey(array(require(entry, peer::PUBLIC_KEY)?)?);
        let known = state.peers.entry(key).or_default();
        for attribute in attributes(entry) {
            let (kind, value) = attribute?;
            read_peer(known, kind, value)?;
        }
    }
    Ok(())
}

fn read_peer(known: &mut PeerState, kind: u16, value: &[u8]) -> Parsed<()> {
    match kind {
        peer::PRESHARED_KEY => {
            known.config.preshared_key = nonzero(value)?.map(PresharedKey);
        }
        peer::ENDPOINT => known.config.endpoint = Some(socket_address(value)?),
        peer::KEEPALIVE => {
            let seconds = u16::from_ne_bytes(array(value)?);
            known.config.persistent_keepalive = (seconds != 0).then_some(seconds);
        }
        peer::LAST_HANDSHAKE => known.last_handshake = time(value)?,
        peer::RX_BYTES => known.rx_bytes = u64::from_ne_bytes(array(value)?),
        peer::TX_BYTES => known.tx_bytes = u64::from_ne_bytes(array(value)?),
        peer::ALLOWED_IPS => {
            for entry in attributes(value) {
                known.config.allowed_ips.push(prefix(entry?.1)?);
            }
        }
        _ => {}
    }
    Ok(())
}

fn prefix(entry: &[u8]) -> Parsed<IpNet> {
    let family = u16::from_ne_bytes(array(require(entry, allowed_ip::FAMILY)?)?);
    let address = require(entry, allowed_ip::ADDRESS)?;
    let address: IpAddr = match i32::from(family) {
        libc::AF_INET => array::<4>(address)?.into(),
        libc::AF_INET6 => array::<16>(address)?.into(),
        _ => return Err("a prefix is neither IPv4 nor IPv6"),
    };
    let [length] = array(require(entry, allowed_ip::PREFIX_LENGTH)?)?;
    IpNet::new(address, length).map_err(|_| "a prefix is longer than its address")
}

/// `struct sockaddr_in` or `struct sockaddr_in6`.
fn socket_address(value: &[u8]) -> Parsed<SocketAddr> {
    const WRONG: &str = "an endpoint has the wrong length";
    let (family, rest) = value.split_first_chunk().ok_or(WRONG)?;
    let (port, rest) = rest.split_first_chunk().ok_or(WRONG)?;
    let port = u16::from_be_bytes(*port);
    match i32::from(u16::from_ne_bytes(*family)) {
        libc::AF_INET => {
            let (address, _) = rest.split_first_chunk::<4>().ok_or(WRONG)?;
            Ok(SocketAddrV4::new(Ipv4Addr::from(*address), port).into())
        }
        libc::AF_INET6 => {
            let (_flow, rest) = rest.split_first_chunk::<4>().ok_or(WRONG)?;
            let (address, rest) = rest.split_first_chunk::<16>().ok_or(WRONG)?;
            let scope = u32::from_ne_bytes(array(rest)?);
            Ok(SocketAddrV6::new(Ipv6Addr::from(*address), port, 0, scope).into())
        }
        _ => Err("an endpoint is neither IPv4 nor IPv6"),
    }
}

/// `struct __kernel_timespec`: seconds and nanoseconds since 1970; zero for never.
fn time(value: &[u8]) -> Parsed<Option<SystemTime>> {
    const WRONG: &str = "a time has the wrong length";
    let (seconds, nanoseconds) = value.split_first_chunk().ok_or(WRONG)?;
    let seconds = u64::try_from(i64::from_ne_bytes(*seconds)).map_err(|_| "a time before 1970")?;
    let nanoseconds =
        u64::try_from(i64::from_ne_bytes(array(nanoseconds)?)).map_err(|_| "a time before 1970")?;
    let since = Duration::from_secs(seconds).checked_add(Duration::from_nanos(nanoseconds));
    let moment = since
        .and_then(|since| SystemTime::UNIX_EPOCH.checked_add(since))
        .ok_or("a time beyond all reason")?;
    Ok((seconds != 0 || nanoseconds != 0).then_some(moment))
}
