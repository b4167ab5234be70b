//! NAT Port Mapping Protocol (RFC 6886), the client's half: the external address, and the mapping of one UDP port.

use std::net::Ipv4Addr;

/// Opcodes (RFC 6886, sections 3.2 and 3.3).
const EXTERNAL_ADDRESS: u8 = 0;
const MAP_UDP: u8 = 1;
const RESPONSE: u8 = 0x80;

/// Response of a gateway.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Response {
    /// Seconds since the gateway lost its state (RFC 6886, section 3.6).
    pub epoch: u32,
    /// Result of the request.
    pub outcome: Outcome,
}

/// Result of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The gateway's external address.
    ExternalAddress(Ipv4Addr),
    /// A mapping.
    Mapped {
        /// The client's port.
        port: u16,
        /// The port of the gateway's external address.
        external_port: u16,
        /// Lifetime in seconds.
        lifetime: u32,
    },
    /// A result code other than zero (RFC 6886, section 3.5).
    Refused {
        /// Whether a mapping was asked for, and not the external address.
        of_mapping: bool,
        /// Result code (RFC 6886, section 3.5).
        code: u16,
    },
}

/// Reason why a datagram is no response.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidResponse {
    /// Length in bytes, less than a response with its opcode has.
    #[error("NAT-PMP response of {0} bytes")]
    Length(usize),
    /// Opcode of a request, or of a response to another request.
    #[error("NAT-PMP opcode {0:#04x} is no response to what was asked")]
    Opcode(u8),
    /// Another version of the protocol; 2 is PCP.
    #[error("version {0} of the protocol instead of NAT-PMP")]
    Version(u8),
}

/// Asks for the external address.
pub fn external_address_request() -> [u8; 2] {
    [0, EXTERNAL_ADDRESS]
}

/// Asks for a mapping of a UDP port; a `lifetime` of zero seconds deletes it, and then `external_port` is to be zero
/// (RFC 6886, section 3.4).
pub fn map_request(port: u16, external_port: u16, lifetime: u32) -> [u8; 12] {
    let ([a, b], [c, d], [e, f, g, h]) =
        (port.to_be_bytes(), external_port.to_be_bytes(), lifetime.to_be_bytes());
    [0, MAP_UDP, 0, 0, a, b, c, d, e, f, g, h]
}

/// Parses a response. Whether it was asked for is for the caller to check.
///
/// # Errors
/// The datagram is something else.
pub fn parse_response(datagram: &[u8]) -> Result<Response, InvalidResponse> {
    let invalid = InvalidResponse::Length(datagram.len());
    let [version, opcode, ..] = *datagram else { return Err(invalid) };
    if version != 0 {
        return Err(InvalidResponse::Version(version));
    }
    let ([_, opcode_of, code_high, code_low, epoch @ ..], rest) =
        datagram.split_first_chunk::<8>().ok_or(invalid)?;
    let code = u16::from_be_bytes([*code_high, *code_low]);
    let of_mapping = match opcode {
        opcode if opcode == RESPONSE | EXTERNAL_ADDRESS => false,
        opcode if opcode == RESPONSE | MAP_UDP => true,
        _ => return Err(InvalidResponse::Opcode(*opcode_of)),
    };
    let outcome = if code != 0 {
        Outcome::Refused { of_mapping, code }
    } else if of_mapping {
        let [a, b, c, d, lifetime @ ..] = *rest.first_chunk::<8>().ok_or(invalid)?;
        let port = u16::from_be_bytes([a, b]);
        let external_port = u16::from_be_bytes([c, d]);
        Outcome::Mapped { port, external_port, lifetime: u32::from_be_bytes(lifetime) }
    } else {
        Outcome::ExternalAddress(Ipv4Addr::from(*rest.first_chunk::<4>().ok_or(invalid)?))
    };
    Ok(Response { epoch: u32::from_be_bytes(*epoch), outcome })
}

/// Result code of a gateway that has no external address (RFC 6886, section 3.5); miniupnpd gives it for a private one, too.
pub const NETWORK_FAILURE: u16 = 3;

/// The words of a result code (RFC 6886, section 3.5).
pub fn refusal(code: u16) -> &'static str {
    match code {
        1 => "it does not support this version",
        2 => "it is not allowed on this gateway",
        NETWORK_FAILURE => "the gateway has no connection",
        4 => "the gateway has no room for more mappings at the moment",
        5 => "the gateway does not support it",
        _ => "the gateway gives a reason that is not known",
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..24), opcode in 0_u8..3) {
            let _ = parse_response(&bytes);
            let bytes: Vec<u8> = [0, 0x80 | opcode].into_iter().chain(bytes).collect();
            let _ = parse_response(&bytes);
        }

        #[test]
        fn what_is_granted_is_read(port in any::<u16>(), external_port in any::<u16>(), lifetime in any::<u32>(), epoch in any::<u32>()) {
            let request = map_request(port, external_port, lifetime);
            let head = [0, 0x81, 0, 0].into_iter().chain(epoch.to_be_bytes());
            let message: Vec<u8> = head.chain(request[4..].iter().copied()).collect();
            let outcome = Outcome::Mapped { port, external_port, lifetime };
            prop_assert_eq!(parse_response(&message), Ok(Response { epoch, outcome }));
        }
    }

    #[test]
    fn refusals_and_other_protocols_are_told_apart() {
        let said = parse_response(&[0, 0x80, 0, 0, 0, 0, 0, 9, 192, 0, 2, 1]).unwrap();
        let address = Ipv4Addr::new(192, 0, 2, 1);
        assert_eq!(said, Response { epoch: 9, outcome: Outcome::ExternalAddress(address) });
        let refused = parse_response(&[0, 0x81, 0, 2, 0, 0, 0, 9]).unwrap().outcome;
        assert_eq!(refused, Outcome::Refused { of_mapping: true, code: 2 });
        assert_eq!(parse_response(&[2, 0x80, 0, 1]), Err(InvalidResponse::Version(2)));
        assert_eq!(parse_response(&external_address_request()), Err(InvalidResponse::Length(2)));
        assert_eq!(parse_response(&map_request(1, 2, 3)), Err(InvalidResponse::Opcode(1)));
    }
}
