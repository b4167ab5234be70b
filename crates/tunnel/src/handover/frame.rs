//! The messages between the two processes of a hand-over.

use std::net::{IpAddr, SocketAddr, SocketAddrV4, SocketAddrV6};

use fairlead_keys::PublicKey;

use crate::udp::Path;

/// Changes whenever the layout does: an offer of a later version is refused, and nothing is handed over.
const VERSION: u8 = 2;
/// Version of offers with neither queues nor flags. Their programs have a TUN with plain packets only, and would not understand one whose
/// packets have headers.
const PLAIN_VERSION: u8 = 1;
/// A flag of an offer: each packet of the TUN has a header before it (`IFF_VNET_HDR`).
const HAS_HEADER: u8 = 1;
/// A flag of an offer: the old process takes [`Frame::Datagrams`].
const TAKES_DATAGRAMS: u8 = 2;
/// A flag of an offer: sockets that are kept for peers follow.
const HAS_KEPT: u8 = 4;
/// Descriptors of the TUN in an offer, each of which is a queue of its own.
const QUEUES: u8 = 1;

const OFFER: u8 = 1;
const TAKE_NETWORK: u8 = 2;
const TAKE_TUNNEL: u8 = 3;
const DATAGRAM: u8 = 4;
const DATAGRAMS: u8 = 5;

/// One message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Frame<'a> {
    /// From the old process, with the descriptors of the TUN and the sockets.
    Offer(Offer),
    /// From the new one: it reads the sockets from now on.
    TakeNetwork,
    /// From the new one: it reads the TUN from now on.
    TakeTunnel,
    /// From the new one: a datagram of a session that it does not have.
    Datagram(Path, &'a [u8]),
    /// From the new one: several datagrams of such a session on one path, of which each but the last is so many bytes long.
    Datagrams(Path, u16, &'a [u8]),
}

/// The old process's interface, port and peers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Offer {
    /// The port of the sockets.
    pub(crate) port: u16,
    /// Whether each packet of the TUN has a header before it.
    pub(crate) has_header: bool,
    /// Whether several datagrams may be forwarded in one message.
    pub(crate) takes_datagrams: bool,
    /// The endpoints for which a socket beside the port is kept; as many as a byte counts. Their descriptors are the last.
    pub(crate) kept: Vec<SocketAddrV4>,
    /// Peers with a session.
    pub(crate) peers: Vec<PeerSnapshot>,
}

/// A peer of the old process and its path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PeerSnapshot {
    pub(crate) key: PublicKey,
    pub(crate) path: Path,
}

impl Frame<'_> {
    /// Appends the frame to `bytes`.
    pub(crate) fn write(&self, bytes: &mut Vec<u8>) {
        match self {
            Self::Offer(offer) => {
                bytes.extend([OFFER, VERSION]);
                bytes.extend(offer.port.to_be_bytes());
                let flags = [
                    (offer.has_header, HAS_HEADER),
                    (offer.takes_datagrams, TAKES_DATAGRAMS),
                    (!offer.kept.is_empty(), HAS_KEPT),
                ];
                let flags =
                    flags.into_iter().filter(|(is_set, _)| *is_set).fold(0, |all, (_, flag)| all | flag);
                bytes.extend([QUEUES, flags]);
                write_kept(&offer.kept, bytes);
                for peer in &offer.peers {
                    bytes.extend(peer.key.0);
                    write_path(&peer.path, bytes);
                }
            }
            Self::TakeNetwork => bytes.push(TAKE_NETWORK),
            Self::TakeTunnel => bytes.push(TAKE_TUNNEL),
            Self::Datagram(path, datagram) => {
                bytes.push(DATAGRAM);
                write_path(path, bytes);
                bytes.extend_from_slice(datagram);
            }
            Self::Datagrams(path, length, datagrams) => {
                bytes.push(DATAGRAMS);
                write_path(path, bytes);
                bytes.extend(length.to_be_bytes());
                bytes.extend_from_slice(datagrams);
            }
        }
    }
}

/// Parses a frame; `None` if it is invalid.
pub(crate) fn read(bytes: &[u8]) -> Option<Frame<'_>> {
    let (kind, mut rest) = bytes.split_first()?;
    match *kind {
        OFFER => read_offer(rest).map(Frame::Offer),
        TAKE_NETWORK => rest.is_empty().then_some(Frame::TakeNetwork),
        TAKE_TUNNEL => rest.is_empty().then_some(Frame::TakeTunnel),
        DATAGRAM => {
            let path = read_path(&mut rest)?;
            Some(Frame::Datagram(path, rest))
        }
        DATAGRAMS => {
            let path = read_path(&mut rest)?;
            let length = u16::from_be_bytes(take(&mut rest)?);
            Some(Frame::Datagrams(path, length, rest))
        }
        _ => None,
    }
}

fn read_offer(mut bytes: &[u8]) -> Option<Offer> {
    let [version] = take(&mut bytes)?;
    let port = u16::from_be_bytes(take(&mut bytes)?);
    let flags = match version {
        PLAIN_VERSION => 0,
        VERSION => {
            let [queues, flags] = take(&mut bytes)?;
            if queues != QUEUES || flags & !(HAS_HEADER | TAKES_DATAGRAMS | HAS_KEPT) != 0 {
                return None;
            }
            flags
        }
        _ => return None,
    };
    let kept = if flags & HAS_KEPT == 0 { Vec::new() } else { read_kept(&mut bytes)? };
    let mut peers = Vec::new();
    while !bytes.is_empty() {
        let key = PublicKey(take(&mut bytes)?);
        peers.push(PeerSnapshot { key, path: read_path(&mut bytes)? });
    }
    let has_header = flags & HAS_HEADER != 0;
    let takes_datagrams = flags & TAKES_DATAGRAMS != 0;
    Some(Offer { port, has_header, takes_datagrams, kept, peers })
}

/// Writes the number of the kept sockets' endpoints, and then each of them; nothing if there are none.
fn write_kept(kept: &[SocketAddrV4], bytes: &mut Vec<u8>) {
    let count = u8::try_from(kept.len()).unwrap_or(u8::MAX);
    if count > 0 {
        bytes.push(count);
    }
    for remote in kept.iter().take(count.into()) {
        bytes.extend(remote.ip().octets());
        bytes.extend(remote.port().to_be_bytes());
    }
}

fn read_kept(bytes: &mut &[u8]) -> Option<Vec<SocketAddrV4>> {
    let [count] = take(bytes)?;
    let mut endpoint = || {
        let ip = take::<4>(bytes)?;
        Some(SocketAddrV4::new(ip.into(), u16::from_be_bytes(take(bytes)?)))
    };
    // None at all is said without the flag.
    (0..count).map(|_| endpoint()).collect::<Option<Vec<_>>>().filter(|kept| !kept.is_empty())
}

fn write_path(path: &Path, bytes: &mut Vec<u8>) {
    write_ip(Some(path.remote.ip()), bytes);
    bytes.extend(path.remote.port().to_be_bytes());
    if let SocketAddr::V6(remote) = path.remote {
        bytes.extend(remote.scope_id().to_be_bytes());
    }
    write_ip(path.local, bytes);
}

fn read_path(bytes: &mut &[u8]) -> Option<Path> {
    let [family] = take(bytes)?;
    let ip = read_ip(family, bytes)?;
    let port = u16::from_be_bytes(take(bytes)?);
    let remote = match ip {
        IpAddr::V4(_) => SocketAddr::new(ip, port),
        IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, u32::from_be_bytes(take(bytes)?)).into(),
    };
    let local = match take(bytes)? {
        [0] => None,
        [family] => Some(read_ip(family, bytes)?),
    };
    Some(Path { remote, local })
}

/// The family (0 for none) and the octets.
fn write_ip(ip: Option<IpAddr>, bytes: &mut Vec<u8>) {
    match ip {
        None => bytes.push(0),
        Some(IpAddr::V4(ip)) => {
            bytes.push(4);
            bytes.extend(ip.octets());
        }
        Some(IpAddr::V6(ip)) => {
            bytes.push(6);
            bytes.extend(ip.octets());
        }
    }
}

fn read_ip(family: u8, bytes: &mut &[u8]) -> Option<IpAddr> {
    match family {
        4 => Some(IpAddr::from(take::<4>(bytes)?)),
        6 => Some(IpAddr::from(take::<16>(bytes)?)),
        _ => None,
    }
}

fn take<const N: usize>(bytes: &mut &[u8]) -> Option<[u8; N]> {
    let (first, rest) = bytes.split_first_chunk()?;
    *bytes = rest;
    Some(*first)
}

#[cfg(test)]
mod tests {
    use std::net::Ipv4Addr;

    use proptest::prelude::*;

    use super::*;

    fn path() -> impl Strategy<Value = Path> {
        let remote = (any::<IpAddr>(), any::<u16>(), any::<u32>()).prop_map(|(ip, port, scope)| match ip {
            IpAddr::V4(_) => SocketAddr::new(ip, port),
            IpAddr::V6(ip) => SocketAddrV6::new(ip, port, 0, scope).into(),
        });
        (remote, any::<Option<IpAddr>>()).prop_map(|(remote, local)| Path { remote, local })
    }

    fn peer_snapshot() -> impl Strategy<Value = PeerSnapshot> {
        (any::<[u8; 32]>(), path()).prop_map(|(key, path)| PeerSnapshot { key: PublicKey(key), path })
    }

    fn assert_read_back(frame: &Frame<'_>) {
        let mut bytes = Vec::new();
        frame.write(&mut bytes);
        assert_eq!(read(&bytes).as_ref(), Some(frame));
    }

    proptest! {
        #[test]
        fn written_frames_are_read_back(
            port: u16,
            has_header: bool,
            takes_datagrams: bool,
            length: u16,
            kept in prop::collection::vec(any::<(Ipv4Addr, u16)>(), 0..4),
            peers in prop::collection::vec(peer_snapshot(), 0..4),
            path in path(),
            datagram: Vec<u8>,
        ) {
            let kept = kept.into_iter().map(|(ip, port)| SocketAddrV4::new(ip, port)).collect();
            assert_read_back(&Frame::Offer(Offer { port, has_header, takes_datagrams, kept, peers }));
            assert_read_back(&Frame::Datagram(path, &datagram));
            assert_read_back(&Frame::Datagrams(path, length, &datagram));
            assert_read_back(&Frame::TakeNetwork);
            assert_read_back(&Frame::TakeTunnel);
        }

        #[test]
        fn any_bytes_are_parsed_or_refused(kind in 0_u8..7, rest: Vec<u8>) {
            let bytes: Vec<u8> = std::iter::once(kind).chain(rest).collect();
            if let Some(frame) = read(&bytes) {
                assert_read_back(&frame);
            }
        }
    }

    /// Messages that the programs of commit 5a83802c send: lines of a name and bytes in hexadecimal.
    const KEPT: &str = include_str!("../../fixtures/5a83802c/handover.txt");

    #[test]
    fn messages_are_as_they_were() {
        let path = |remote: &str, local: Option<&str>| Path {
            remote: remote.parse().unwrap(),
            local: local.map(|local| local.parse().unwrap()),
        };
        let (ipv4, ipv6) = (
            path("192.0.2.1:51820", Some("10.0.0.1")),
            Path {
                remote: SocketAddrV6::new("fe80::1".parse().unwrap(), 7, 0, 3).into(),
                local: "fe80::2".parse().ok(),
            },
        );
        let peer = |key, path| PeerSnapshot { key: PublicKey([key; 32]), path };
        let offer = Offer {
            port: 51820,
            has_header: true,
            takes_datagrams: true,
            kept: vec!["198.51.100.1:9".parse().unwrap(), "198.51.100.2:10".parse().unwrap()],
            peers: vec![peer(1, ipv4), peer(2, ipv6), peer(3, path("[2001:db8::1]:8", None))],
        };
        let frames = [
            ("offer", Frame::Offer(offer)),
            ("offer-minimal", Frame::Offer(Offer { port: 51820, ..Offer::default() })),
            ("take-network", Frame::TakeNetwork),
            ("take-tunnel", Frame::TakeTunnel),
            ("datagram", Frame::Datagram(ipv4, b"datagram")),
            ("datagrams", Frame::Datagrams(ipv6, 4, b"onetwothr")),
        ];
        let mut written = String::new();
        for (name, frame) in frames {
            let mut bytes = Vec::new();
            frame.write(&mut bytes);
            assert_eq!(read(&bytes), Some(frame));
            let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
            written.push_str(&format!("{name} {hex}\n"));
        }
        assert_eq!(written, KEPT);
    }

    #[test]
    fn a_later_version_and_unknown_flags_are_refused() {
        assert!(read(&[OFFER, VERSION, 0, 7, 1, 1]).is_some());
        for bytes in
            [[OFFER, VERSION + 1, 0, 7, 1, 1], [OFFER, VERSION, 0, 7, 2, 1], [OFFER, VERSION, 0, 7, 1, 8]]
        {
            assert_eq!(read(&bytes), None, "{bytes:?}");
        }
    }

    #[test]
    fn the_offer_of_a_program_without_offloads_is_understood() {
        let offer = Offer { port: 7, ..Offer::default() };
        assert_eq!(read(&[OFFER, PLAIN_VERSION, 0, 7]), Some(Frame::Offer(offer)));
    }
}
