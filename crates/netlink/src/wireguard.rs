//! The kernel's WireGuard over generic netlink (`linux/wireguard.h`).
//!
//! [`WireGuard::state`] reads a device and [`WireGuard::update`] changes one; what is not mentioned stays as it is, so
//! sessions survive. [`add_link`] makes the device; everything else about links is in [`crate::route`].

use fairlead_keys::{DeviceState, PrivateKey, PublicKey};
use ipnet::IpNet;
use nix::libc;

use crate::nftables::attributes::{AttributeWriter, Parsed, array, explain, require};
use crate::{Error, Family, Message, Result, Socket};

mod decode;
mod encode;
#[cfg(test)]
mod tests;

/// `WG_GENL_NAME`: the generic netlink family, and the kind of the links.
pub const KIND: &str = "wireguard";

/// `struct genlmsghdr` in bytes.
const GENERIC_HEADER: usize = 4;
/// `WG_CMD_GET_DEVICE`
const GET_DEVICE: u8 = 0;
/// `WG_CMD_SET_DEVICE`
const SET_DEVICE: u8 = 1;
/// `WG_GENL_VERSION`
const VERSION: u8 = 1;

/// Number of peers in one message of a device dump.
pub(crate) fn count_peers(message: &[u8]) -> Parsed<usize> {
    decode::device(std::iter::once(message)).map(|device| device.peers.len())
}

/// `WGDEVICE_A_*`
mod device {
    pub(super) const NAME: u16 = 2;
    pub(super) const PRIVATE_KEY: u16 = 3;
    pub(super) const LISTEN_PORT: u16 = 6;
    pub(super) const FWMARK: u16 = 7;
    pub(super) const PEERS: u16 = 8;
}

/// `WGPEER_A_*` and `WGPEER_F_*`
mod peer {
    pub(super) const PUBLIC_KEY: u16 = 1;
    pub(super) const PRESHARED_KEY: u16 = 2;
    pub(super) const FLAGS: u16 = 3;
    pub(super) const ENDPOINT: u16 = 4;
    pub(super) const KEEPALIVE: u16 = 5;
    pub(super) const LAST_HANDSHAKE: u16 = 6;
    pub(super) const RX_BYTES: u16 = 7;
    pub(super) const TX_BYTES: u16 = 8;
    pub(super) const ALLOWED_IPS: u16 = 9;
    pub(super) const FLAG_REMOVE: u32 = 1;
    pub(super) const FLAG_REPLACE_ALLOWED_IPS: u32 = 2;
    pub(super) const FLAG_UPDATE_ONLY: u32 = 4;
}

/// `WGALLOWEDIP_A_*`
mod allowed_ip {
    pub(super) const FAMILY: u16 = 1;
    pub(super) const ADDRESS: u16 = 2;
    pub(super) const PREFIX_LENGTH: u16 = 3;
}

/// Changes to a device; what is `None` or not listed stays.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct DeviceUpdate {
    /// New identity.
    pub private_key: Option<PrivateKey>,
    /// New UDP port.
    pub listen_port: Option<u16>,
    /// New mark of sent packets; zero for none.
    pub fwmark: Option<u32>,
    /// Peers to remove; those that are not there are passed over.
    pub remove: Vec<PublicKey>,
    /// Peers to add or change.
    pub set: Vec<PeerUpdate>,
}

impl DeviceUpdate {
    /// Whether there is nothing to send.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Changes to a peer; what is `None` stays.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerUpdate {
    /// Public key of the peer.
    pub public_key: PublicKey,
    /// Whether the peer is changed only if it is there (`WGPEER_F_UPDATE_ONLY`); otherwise it is added.
    pub only_existing: bool,
    /// New symmetric key; all zero for none.
    pub preshared_key: Option<[u8; 32]>,
    /// Endpoint to send to from now on.
    pub endpoint: Option<std::net::SocketAddr>,
    /// Seconds between keepalives; zero for none.
    pub persistent_keepalive: Option<u16>,
    /// Whether `allowed_ips` are all there will be, or more of them.
    pub replace_allowed_ips: bool,
    /// Prefixes to be given to this peer; another that has one loses it.
    pub allowed_ips: Vec<IpNet>,
}

/// A connection to the kernel's WireGuard in the namespace of the thread that opened it.
#[derive(Debug)]
pub struct WireGuard {
    socket: Socket,
    family: u16,
}

impl WireGuard {
    /// Looks up the family; the kernel loads its module if it has one.
    ///
    /// # Errors
    /// [`Error::is_unsupported`] when the kernel has no WireGuard.
    pub fn open() -> Result<Self> {
        let mut socket = Socket::open(Family::Generic)?;
        let family = resolve(&mut socket)?;
        Ok(Self { socket, family })
    }

    /// Reads the configuration of a device, and the state of its peers.
    ///
    /// # Errors
    /// There is no such device or it is none of WireGuard's; the right (`CAP_NET_ADMIN`) is missing.
    pub fn state(&mut self, interface: &str) -> Result<DeviceState> {
        let what = format!("read WireGuard device {interface}");
        let mut writer = AttributeWriter::new(&[GET_DEVICE, VERSION, 0, 0]);
        writer.text(device::NAME, interface);
        let request =
            Message { kind: self.family, flags: 0, payload: writer.finish(&what)?, what: what.clone() };
        let replies = self.socket.dump(&request)?;
        explain(&what, decode::device(replies.iter().map(|reply| reply.payload.as_slice())))
    }

    /// Changes the device; an empty update sends nothing.
    ///
    /// # Errors
    /// There is no such device, or the kernel refuses a value. With very many peers there are several messages, and
    /// those before the refused one stay in force.
    pub fn update(&mut self, interface: &str, update: &DeviceUpdate) -> Result<()> {
        let messages = encode::device(self.family, interface, update)?;
        self.socket.change(&messages)
    }
}

/// Adds a link of kind `wireguard` with this MTU in bytes, for a socket of [`Family::Route`].
///
/// # Errors
/// None in practice: the name would have to be longer than an attribute can be.
pub fn add_link(name: &str, mtu: u32) -> Result<Message> {
    /// `struct ifinfomsg` in bytes.
    const LINK_HEADER: usize = 16;
    /// `IFLA_INFO_KIND`
    const INFO_KIND: u16 = 1;
    let what = format!("add link {name} of kind {KIND}");
    let mut writer = AttributeWriter::new(&[0; LINK_HEADER]);
    writer.text(libc::IFLA_IFNAME, name);
    writer.bytes(libc::IFLA_MTU, &mtu.to_ne_bytes());
    writer.nested(libc::IFLA_LINKINFO, |info| info.text(INFO_KIND, KIND));
    let flags = (libc::NLM_F_CREATE | libc::NLM_F_EXCL) as u16;
    Ok(Message { kind: libc::RTM_NEWLINK, flags, payload: writer.finish(&what)?, what })
}

/// `CTRL_CMD_GETFAMILY` (`linux/genetlink.h`)
fn resolve(socket: &mut Socket) -> Result<u16> {
    const CONTROLLER_VERSION: u8 = 2;
    let what = format!("find generic netlink family {KIND}");
    let mut writer = AttributeWriter::new(&[libc::CTRL_CMD_GETFAMILY as u8, CONTROLLER_VERSION, 0, 0]);
    writer.text(libc::CTRL_ATTR_FAMILY_NAME as u16, KIND);
    let request = Message {
        kind: libc::GENL_ID_CTRL as u16,
        flags: 0,
        payload: writer.finish(&what)?,
        what: what.clone(),
    };
    let replies = socket.ask(&request)?;
    let reply = replies.first().ok_or_else(|| Error::Malformed {
        what: what.clone(),
        reason: "an acknowledgement without an answer".to_owned(),
    })?;
    explain(&what, family_id(&reply.payload))
}

fn family_id(payload: &[u8]) -> Parsed<u16> {
    let body = payload.get(GENERIC_HEADER..).ok_or("a truncated message")?;
    array(require(body, libc::CTRL_ATTR_FAMILY_ID as u16)?).map(u16::from_ne_bytes)
}
