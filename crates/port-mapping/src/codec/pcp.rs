//! Port Control Protocol (RFC 6887), the client's half: MAP for one UDP port, and ANNOUNCE, which asks whether the gateway
//! still has its state.

use std::net::{IpAddr, Ipv6Addr, SocketAddr};

use fairlead_address::is_private;
use hkdf::Hkdf;
use sha2::Sha256;

/// The version.
const VERSION: u8 = 2;
/// Opcodes, and the bit of a response (RFC 6887, sections 7 and 19.1).
const ANNOUNCE: u8 = 0;
const MAP: u8 = 1;
const RESPONSE: u8 = 0x80;
/// UDP as an IP protocol number.
const UDP: u8 = 17;
/// Length of the header of either direction, and with the data of MAP (RFC 6887, sections 7.1, 7.2 and 11.1).
const HEADER_LENGTH: usize = 24;
const MAP_LENGTH: usize = 60;
/// Result code of a gateway of another version (RFC 6887, section 7.4); NAT-PMP has the same.
const UNSUPPORTED_VERSION: u8 = 1;
/// Result codes of a gateway that has no connection, no room, or not the external address (RFC 6887, section 7.4).
const NETWORK_FAILURE: u8 = 7;
const NO_RESOURCES: u8 = 8;
const CANNOT_PROVIDE_EXTERNAL: u8 = 11;

/// Nonce of a mapping: a client that knows it can renew and delete the mapping (RFC 6887, section 11.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Nonce(pub [u8; 12]);

impl Nonce {
    /// Nonce derived from a private key, the same after a restart. It says nothing of the key.
    pub fn of(private_key: &[u8; 32]) -> Self {
        let mut nonce = [0; 12];
        // It fails only where more than 8160 bytes are asked for (RFC 5869, section 2.3).
        let _ = Hkdf::<Sha256>::new(None, private_key).expand(b"fairlead port mapping nonce", &mut nonce);
        Self(nonce)
    }
}

/// Asks for a mapping of a UDP port.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MapRequest {
    /// The source address of the request, to which packets are led.
    pub client: IpAddr,
    /// Nonce; a renewal and a deletion have that of the first request.
    pub nonce: Nonce,
    /// The client's port.
    pub port: u16,
    /// The external address and port that are wanted; unspecified and zero for any.
    pub suggested: SocketAddr,
    /// Lifetime in seconds; zero deletes the mapping.
    pub lifetime: u32,
}

/// Response of a gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Response {
    /// Seconds since the gateway lost its state (RFC 6887, section 8.5).
    pub epoch: u32,
    /// The answer to MAP, or a plain acknowledgement of ANNOUNCE.
    pub outcome: Outcome,
}

/// Result of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The state is there.
    Announced,
    /// The mapping.
    Mapped(Mapped),
    /// A result code other than zero (RFC 6887, section 7.4), and for how many seconds it will be the same. The nonce is that of
    /// the request if the gateway repeats it. So is the address by the RFC; miniupnpd fills in its own.
    Refused {
        /// Result code (RFC 6887, section 7.4).
        code: u8,
        /// Seconds for which the result stays the same.
        lifetime: u32,
        /// Nonce of the refused request.
        nonce: Option<Nonce>,
        /// External address in the answer, if it has the data of MAP.
        external: Option<IpAddr>,
    },
}

/// A mapping.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapped {
    /// Nonce of the request.
    pub nonce: Nonce,
    /// The client's port.
    pub port: u16,
    /// External address and port.
    pub external: SocketAddr,
    /// Lifetime in seconds.
    pub lifetime: u32,
}

/// Reason why a datagram is no response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidResponse {
    /// Length in bytes, less than a response with its opcode has.
    #[error("PCP response of {0} bytes")]
    Length(usize),
    /// Opcode of a request, or of a response to another request.
    #[error("PCP opcode {0:#04x} is no response to MAP or ANNOUNCE")]
    Opcode(u8),
    /// IP protocol other than UDP.
    #[error("PCP response for the IP protocol {0}")]
    Protocol(u8),
    /// Another version of the protocol; zero is NAT-PMP.
    #[error("version {0} of the protocol instead of PCP")]
    Version(u8),
}

/// A request for a mapping.
pub fn map_request(request: &MapRequest) -> [u8; MAP_LENGTH] {
    let mut message = [0; MAP_LENGTH];
    message[..HEADER_LENGTH].copy_from_slice(&header(MAP, request.lifetime, request.client));
    message[24..36].copy_from_slice(&request.nonce.0);
    message[36] = UDP;
    message[40..42].copy_from_slice(&request.port.to_be_bytes());
    message[42..44].copy_from_slice(&request.suggested.port().to_be_bytes());
    message[44..].copy_from_slice(&octets(request.suggested.ip()));
    message
}

/// A request for the epoch (RFC 6887, section 14.1).
pub fn announce_request(client: IpAddr) -> [u8; HEADER_LENGTH] {
    header(ANNOUNCE, 0, client)
}

fn header(opcode: u8, lifetime: u32, client: IpAddr) -> [u8; HEADER_LENGTH] {
    let mut header = [0; HEADER_LENGTH];
    header[..2].copy_from_slice(&[VERSION, opcode]);
    header[4..8].copy_from_slice(&lifetime.to_be_bytes());
    header[8..].copy_from_slice(&octets(client));
    header
}

/// Addresses are IPv6 ones; those of IPv4 are mapped (RFC 6887, section 5).
fn octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V4(address) => address.to_ipv6_mapped().octets(),
        IpAddr::V6(address) => address.octets(),
    }
}

/// Parses a response. Whether it was asked for is for the caller to check.
///
/// # Errors
/// The datagram is something else.
pub fn parse_response(datagram: &[u8]) -> Result<Response, InvalidResponse> {
    let invalid = InvalidResponse::Length(datagram.len());
    let [version, opcode, ..] = *datagram else { return Err(invalid) };
    if version != VERSION {
        return Err(InvalidResponse::Version(version));
    }
    let (header, rest) = datagram.split_first_chunk::<HEADER_LENGTH>().ok_or(invalid)?;
    let [_, _, _, code, a, b, c, d, e, f, g, h, ..] = *header;
    let lifetime = u32::from_be_bytes([a, b, c, d]);
    let epoch = u32::from_be_bytes([e, f, g, h]);
    let data = rest.first_chunk::<{ MAP_LENGTH - HEADER_LENGTH }>();
    let nonce = |data: &[u8; MAP_LENGTH - HEADER_LENGTH]| {
        let [a, b, c, d, e, f, g, h, i, j, k, l, ..] = *data;
        Nonce([a, b, c, d, e, f, g, h, i, j, k, l])
    };
    let address = |data: &[u8; MAP_LENGTH - HEADER_LENGTH]| {
        let mut address = [0; 16];
        address.copy_from_slice(&data[20..]);
        IpAddr::V6(Ipv6Addr::from(address)).to_canonical()
    };
    let outcome = match (opcode, code) {
        (opcode, _) if opcode != RESPONSE | MAP && opcode != RESPONSE | ANNOUNCE => {
            return Err(InvalidResponse::Opcode(opcode));
        }
        (_, 1..) => Outcome::Refused { code, lifetime, nonce: data.map(nonce), external: data.map(address) },
        (opcode, 0) if opcode == RESPONSE | ANNOUNCE => Outcome::Announced,
        _ => {
            let data = data.ok_or(invalid)?;
            if data[12] != UDP {
                return Err(InvalidResponse::Protocol(data[12]));
            }
            Outcome::Mapped(Mapped {
                nonce: nonce(data),
                port: u16::from_be_bytes([data[16], data[17]]),
                external: SocketAddr::new(address(data), u16::from_be_bytes([data[18], data[19]])),
                lifetime,
            })
        }
    };
    Ok(Response { epoch, outcome })
}

/// Outer address of a gateway whose refusal has this code, if the address is the reason: private IPv4, and not the one that the request
/// suggested, which the gateway repeats (RFC 6887, section 11.4).
pub fn private_outer_address(code: u8, external: Option<IpAddr>, suggested: IpAddr) -> Option<IpAddr> {
    let may_be_the_reason = matches!(code, NETWORK_FAILURE | NO_RESOURCES | CANNOT_PROVIDE_EXTERNAL);
    external.filter(|it| may_be_the_reason && *it != suggested && it.is_ipv4() && is_private(*it))
}

/// The words of a result code (RFC 6887, section 7.4).
pub fn refusal(code: u8) -> &'static str {
    match code {
        UNSUPPORTED_VERSION => "it does not support this version",
        2 => "it is not allowed on this gateway",
        3 | 6 => "the gateway does not understand the request",
        4 | 5 => "the gateway does not support it",
        NETWORK_FAILURE => "the gateway has no connection",
        NO_RESOURCES => "the gateway has no room for more mappings at the moment",
        9 => "the gateway does not map UDP",
        10 => "this host has as many mappings as the gateway allows",
        CANNOT_PROVIDE_EXTERNAL => "the gateway cannot provide the external address",
        12 => "the gateway sees another address than this host has: is there a NAT between them?",
        _ => "the gateway gives a reason that is not known",
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn response(request: &[u8], epoch: u32) -> Vec<u8> {
        let mut message = request.to_vec();
        message[1] |= RESPONSE;
        message[8..24].fill(0);
        message[8..12].copy_from_slice(&epoch.to_be_bytes());
        message
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..80), head in 0_u8..3) {
            let _ = parse_response(&bytes);
            let bytes: Vec<u8> = [2, 0x80 | head].into_iter().chain(bytes).collect();
            let _ = parse_response(&bytes);
        }

        #[test]
        fn what_is_granted_is_read(
            nonce in any::<[u8; 12]>(), port in any::<u16>(), external in any::<std::net::Ipv4Addr>(),
            external_port in any::<u16>(), lifetime in any::<u32>(), epoch in any::<u32>(),
        ) {
            let suggested = SocketAddr::from((external, external_port));
            let (client, nonce) = ("192.0.2.1".parse().unwrap(), Nonce(nonce));
            let request = map_request(&MapRequest { client, nonce, port, suggested, lifetime });
            let mapped = Mapped { nonce, port, external: suggested, lifetime };
            let expected = Response { epoch, outcome: Outcome::Mapped(mapped) };
            prop_assert_eq!(parse_response(&response(&request, epoch)), Ok(expected));
        }
    }

    #[test]
    fn refusals_and_other_protocols_are_told_apart() {
        let client = "2001:db8::1".parse().unwrap();
        let announced = response(&announce_request(client), 7);
        assert_eq!(parse_response(&announced), Ok(Response { epoch: 7, outcome: Outcome::Announced }));
        let mut refused = response(&announce_request(client), 7);
        refused[1] = RESPONSE | MAP;
        refused[3] = 2;
        let expected = Outcome::Refused { code: 2, lifetime: 0, nonce: None, external: None };
        assert_eq!(parse_response(&refused).unwrap().outcome, expected);
        // NAT-PMP's answer to a request of PCP (RFC 6886, section 3.5).
        assert_eq!(parse_response(&[0, 0x80, 0, 1, 0, 0, 0, 0]), Err(InvalidResponse::Version(0)));
        assert_eq!(parse_response(&announce_request(client)), Err(InvalidResponse::Opcode(0)));
    }

    #[test]
    fn a_private_outer_address_in_a_refusal_is_read_unless_it_repeats_the_request() {
        // miniupnpd 2.3.1 with 10.9.8.7 outside answered this to a request for 0.0.0.0 (result 8, lifetime 30).
        let mut message = vec![2, RESPONSE | MAP, 0, NO_RESOURCES, 0, 0, 0, 30, 0, 0, 0, 6];
        message.extend([0; 12]);
        message.extend([b'n'; 12]);
        message.extend([UDP, 0, 0, 0, 0xca, 0x6c, 0xca, 0x6c]);
        let outer: IpAddr = "10.9.8.7".parse().unwrap();
        message.extend(octets(outer));
        let nonce = Some(Nonce([b'n'; 12]));
        let expected = Outcome::Refused { code: NO_RESOURCES, lifetime: 30, nonce, external: Some(outer) };
        assert_eq!(parse_response(&message), Ok(Response { epoch: 6, outcome: expected }));

        let any: IpAddr = "0.0.0.0".parse().unwrap();
        assert_eq!(private_outer_address(NO_RESOURCES, Some(outer), any), Some(outer));
        assert_eq!(private_outer_address(NO_RESOURCES, Some(outer), outer), None, "the request is repeated");
        assert_eq!(private_outer_address(2, Some(outer), any), None, "forbidden for another reason");
        for other in ["0.0.0.0", "11.0.0.1", "fd00::1"] {
            assert_eq!(private_outer_address(NO_RESOURCES, other.parse().ok(), any), None, "{other}");
        }
    }
}
