//! Contents of the maps as bytes: the structures of `bpf/layout.h`, which have no padding. Addresses and ports are in
//! network order, numbers in the host's.

use std::net::IpAddr;

use fairlead_address::{DualStackAddrs, IpFamily};
use fairlead_api::fou::{Gateway, MAX_GATEWAYS, Service};
use ipnet::IpNet;

use crate::{Error, Result};

/// Clients of a gateway, and their tunnel links: `max_entries` of the maps.
pub const MAX_CLIENTS: usize = 4096;
/// Prefixes that clients may or may not send to: `max_entries` of the map.
pub const MAX_ALLOWED: usize = 16_384;
/// Prefixes of sources of gateways, those before and after a change together: `max_entries` of the map.
pub const MAX_ORIGINS: usize = 65_536;
/// `struct addr`: IPv4 as `::ffff:a.b.c.d`.
pub(crate) type AddressBytes = [u8; 16];
pub(crate) type SettingsBytes = [u8; 48];
pub(crate) type LinkBytes = [u8; 36];
pub(crate) type PeerBytes = [u8; 24];
pub(crate) type ServiceBytes = [u8; 656];
pub(crate) type FlowBytes = [u8; 56];
pub(crate) type ChoiceBytes = [u8; 24];
/// `struct traffic`.
pub(crate) type TrafficNumbers = [u64; 4];

/// Settings of all tunnels of a network namespace.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Settings {
    /// UDP port of FoU, of both ends.
    pub port: u16,
    /// FoU packets of hosts that are not peers are dropped, instead of being left to the kernel. A gateway needs it.
    pub drop_unknown: bool,
    /// The only source addresses with which packets may leave the uplink, besides unspecified and IPv6 link-local ones; others are
    /// dropped. Packets of a family without an address are all dropped. `None` lets every source out, as a client needs it. With
    /// its own addresses here, a gateway sends no packet of a client whose source nothing has translated. See also
    /// [`Tunnels::set_sources`](crate::Tunnels::set_sources).
    pub own: Option<DualStackAddrs>,
}

/// Encapsulation of the packets of a tunnel link.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TunnelLink {
    /// Outer source; its family is that of the tunnel.
    pub local: IpAddr,
    /// Outer destination; `None` is the inner destination of each packet, as a gateway needs it for its clients.
    pub remote: Option<IpAddr>,
    /// Outer source port; `None` is one of the ports 49152 to 65535 for each inner flow.
    pub source_port: Option<u16>,
}

/// A host whose FoU packets are accepted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Peer {
    /// A client: its packets must have its own address as inner source and an allowed inner destination. They arrive on the
    /// tunnel link of this index; without one, the kernel's fou decapsulates them.
    Client {
        /// Index of the tunnel link.
        link: Option<u32>,
    },
    /// A gateway, or the service address of gateways. Its packets arrive on the tunnel link of this index, as far as
    /// [`Tunnels::set_origins`](crate::Tunnels::set_origins) lets them.
    Gateway {
        /// Index of the tunnel link.
        link: u32,
        /// The service address.
        service: IpAddr,
    },
    /// A gateway whose packets the kernel's fou decapsulates. They are checked likewise, and their outer source is rewritten to the service
    /// address, which the kernel's tunnel link has as its remote address.
    KernelGateway {
        /// The service address.
        service: IpAddr,
    },
}

/// `enum role`.
const ROLE_GATEWAY: u32 = 1;
const ROLE_CLIENT: u32 = 2;
/// `enum gateway_state`.
const GATEWAY_LIVE: u32 = 1;
const GATEWAY_DRAINING: u32 = 2;

pub(crate) fn address(address: IpAddr) -> AddressBytes {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// Prefix length and address of an LPM trie.
pub(crate) fn prefix(prefix: &IpNet) -> (u32, AddressBytes) {
    let mapped = if matches!(prefix, IpNet::V4(_)) { 96 } else { 0 };
    (u32::from(prefix.prefix_len()).saturating_add(mapped), address(prefix.network()))
}

impl Settings {
    /// `struct settings`.
    pub(crate) fn bytes(self, version: u64, uplink: u32) -> SettingsBytes {
        let mut bytes = [0; 48];
        let own = self.own.unwrap_or_default();
        let [own_ipv4, own_ipv6] =
            [own.ipv4.map(IpAddr::V4), own.ipv6.map(IpAddr::V6)].map(|own| own.map_or([0; 16], address));
        write(
            &mut bytes,
            &[
                &version.to_ne_bytes(),
                &uplink.to_ne_bytes(),
                &self.port.to_be_bytes(),
                &[u8::from(self.drop_unknown), u8::from(self.own.is_some())],
                &own_ipv4,
                &own_ipv6,
            ],
        );
        bytes
    }
}

/// The version in `struct settings`.
pub(crate) fn version(settings: &SettingsBytes) -> u64 {
    settings.first_chunk().map_or(0, |bytes| u64::from_ne_bytes(*bytes))
}

impl TunnelLink {
    /// `struct link`.
    pub(crate) fn bytes(&self, index: u32) -> Result<LinkBytes> {
        let what = || format!("encapsulate packets of link {index}");
        if self.local.is_unspecified() {
            return Err(Error::invalid(what(), "its local address is unspecified"));
        }
        if self.remote.is_some_and(|remote| IpFamily::of(remote) != IpFamily::of(self.local)) {
            return Err(Error::invalid(what(), "its local and remote addresses are of different families"));
        }
        let mut bytes = [0; 36];
        let remote = self.remote.map_or([0; 16], address);
        let port = self.source_port.unwrap_or(0).to_be_bytes();
        let v6 = u16::from(self.local.is_ipv6()).to_ne_bytes();
        write(&mut bytes, &[&address(self.local), &remote, &port, &v6]);
        Ok(bytes)
    }
}

impl Peer {
    /// `struct peer`.
    pub(crate) fn bytes(&self) -> PeerBytes {
        let (link, role, service) = match *self {
            Self::Client { link } => (link.unwrap_or(0), ROLE_CLIENT, None),
            Self::Gateway { link, service } => (link, ROLE_GATEWAY, Some(service)),
            Self::KernelGateway { service } => (0, ROLE_GATEWAY, Some(service)),
        };
        let mut bytes = [0; 24];
        write(&mut bytes, &[&link.to_ne_bytes(), &role.to_ne_bytes(), &service.map_or([0; 16], address)]);
        bytes
    }
}

/// `struct service`, the same for the same gateways in any order.
pub(crate) fn service_bytes(service: &Service, address_of: IpAddr) -> Result<ServiceBytes> {
    let what = || format!("set the gateways of {address_of}");
    let mut gateways = service.gateways.clone();
    gateways.sort_unstable();
    gateways.dedup();
    if gateways.len() > MAX_GATEWAYS {
        let reason = format!("it has {} of them, and {MAX_GATEWAYS} are possible", gateways.len());
        return Err(Error::invalid(what(), reason));
    }
    let is_other = |gateway: &&Gateway| IpFamily::of(gateway.address) != IpFamily::of(address_of);
    if let Some(other) = gateways.iter().find(is_other) {
        return Err(Error::invalid(what(), format!("gateway {} is of another family", other.address)));
    }
    let idle =
        service.idle_timeout.map_or(0, |idle| u64::try_from(idle.as_nanos()).unwrap_or(u64::MAX).max(1));
    let count = u32::try_from(gateways.len()).unwrap_or_default();
    let mut bytes = [0; 656];
    let rest = write(
        &mut bytes,
        &[&idle.to_ne_bytes(), &count.to_ne_bytes(), &u32::from(service.by_client).to_ne_bytes()],
    );
    for (gateway, slot) in gateways.iter().zip(rest.chunks_exact_mut(20)) {
        let state = if gateway.is_draining { GATEWAY_DRAINING } else { GATEWAY_LIVE };
        write(slot, &[&address(gateway.address), &state.to_ne_bytes()]);
    }
    Ok(bytes)
}

/// Writes fields one after the other and returns what is behind them.
fn write<'a>(mut bytes: &'a mut [u8], fields: &[&[u8]]) -> &'a mut [u8] {
    for field in fields {
        let Some((place, rest)) = bytes.split_at_mut_checked(field.len()) else { return &mut [] };
        place.copy_from_slice(field);
        bytes = rest;
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn gateway(text: &str) -> Gateway {
        Gateway { address: ip(text), is_draining: false }
    }

    #[test]
    fn addresses_of_both_families_have_one_form() {
        assert_eq!(address(ip("10.1.2.3")), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff, 10, 1, 2, 3]);
        assert_eq!(prefix(&"10.1.0.9/16".parse().unwrap()), (112, address(ip("10.1.0.0"))));
        assert_eq!(prefix(&"fd00::9/64".parse().unwrap()), (64, address(ip("fd00::"))));
        assert_eq!(prefix(&"0.0.0.0/0".parse().unwrap()).0, 96);
    }

    #[test]
    fn settings_begin_with_their_version() {
        let own = DualStackAddrs { ipv4: Some([10, 0, 0, 1].into()), ipv6: None };
        let settings = Settings { port: 5555, drop_unknown: true, own: Some(own) };
        let bytes = settings.bytes(0x0102_0304_0506_0708, 7);
        assert_eq!(version(&bytes), 0x0102_0304_0506_0708);
        assert_eq!(bytes[8..12], 7u32.to_ne_bytes());
        assert_eq!(bytes[12..14], [0x15, 0xb3]);
        assert_eq!(bytes[14..16], [1, 1]);
        assert_eq!((&bytes[16..32], &bytes[32..]), (&address(ip("10.0.0.1"))[..], &[0; 16][..]));
        let client = Settings { port: 5555, drop_unknown: false, own: None }.bytes(0, 7);
        assert_eq!(client[14..], [0; 34]);
    }

    #[test]
    fn the_order_of_gateways_and_duplicates_make_no_difference() {
        let of = |gateways: &[&str]| Service {
            gateways: gateways.iter().map(|text| gateway(text)).collect(),
            ..Service::default()
        };
        let service = ip("10.0.0.1");
        let bytes = service_bytes(&of(&["10.1.0.2", "10.1.0.1"]), service).unwrap();
        assert_eq!(service_bytes(&of(&["10.1.0.1", "10.1.0.2", "10.1.0.1"]), service).unwrap(), bytes);
        assert_eq!(bytes[8..12], 2u32.to_ne_bytes());
        assert_eq!(bytes[16..32], address(ip("10.1.0.1")));
        assert_eq!(bytes[32..36], GATEWAY_LIVE.to_ne_bytes());
    }

    #[test]
    fn what_the_programs_cannot_do_is_an_error() {
        let service = |gateways| Service { gateways, ..Service::default() };
        let many: Vec<_> = (0..33).map(|last| gateway(&format!("10.1.0.{last}"))).collect();
        let error = service_bytes(&service(many), ip("10.0.0.1")).unwrap_err().to_string();
        assert_eq!(error, "cannot set the gateways of 10.0.0.1: it has 33 of them, and 32 are possible");
        assert!(service_bytes(&service(vec![gateway("fd00::1")]), ip("10.0.0.1")).is_err());
        let link =
            |local, remote| TunnelLink { local: ip(local), remote: Some(ip(remote)), source_port: None };
        assert!(link("10.0.0.1", "fd00::1").bytes(3).is_err());
        assert!(link("0.0.0.0", "10.0.0.1").bytes(3).is_err());
        assert!(link("10.0.0.1", "10.0.0.2").bytes(3).is_ok());
    }

    #[test]
    fn the_shortest_idle_timeout_is_not_none() {
        let service = Service { idle_timeout: Some(Duration::ZERO), ..Service::default() };
        assert_eq!(service_bytes(&service, ip("10.0.0.1")).unwrap()[..8], 1u64.to_ne_bytes());
    }
}
