//! STUN binding requests and responses (RFC 8489): how a node learns the address that a NAT gives its WireGuard port.
//!
//! Here is the client's side of the Binding method without authentication, which public servers offer; [`server`] has the rest.
//! Responses of servers that follow the older RFC 5389 or RFC 3489 are understood too.

pub mod server;

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};

/// The magic cookie, bytes 4 to 7 of each message (RFC 8489, section 5).
pub const MAGIC_COOKIE: [u8; 4] = 0x2112_a442_u32.to_be_bytes();
/// Length of a message's header.
const HEADER_LENGTH: usize = 20;
/// Message types of the Binding method (RFC 8489, section 18.1).
const BINDING_REQUEST: u16 = 0x0001;
const BINDING_SUCCESS: u16 = 0x0101;
const BINDING_ERROR: u16 = 0x0111;
/// Attributes (RFC 8489, section 18.3).
const MAPPED_ADDRESS: u16 = 0x0001;
const ERROR_CODE: u16 = 0x0009;
const NONCE: u16 = 0x0015;
const XOR_MAPPED_ADDRESS: u16 = 0x0020;
const SOFTWARE: u16 = 0x8022;
/// The software that asks. It makes a request as long as the longest success response, so that a relay may answer it.
const SOFTWARE_NAME: &[u8; 20] = b"fairlead path agent\0";
/// Length of a binding request without credentials.
const REQUEST_LENGTH: usize = HEADER_LENGTH + 4 + SOFTWARE_NAME.len();
/// Length of the nonces of relays; others are ignored.
const NONCE_LENGTH: usize = 16;
/// Attributes of RFC 3489 that its servers send: SOURCE-ADDRESS and CHANGED-ADDRESS.
const IGNORED: [u16; 2] = [0x0004, 0x0005];
/// From here on attributes may be ignored by those who do not know them (RFC 8489, section 14).
const COMPREHENSION_OPTIONAL: u16 = 0x8000;
/// Address families (RFC 8489, section 14.1).
const FAMILY_IPV4: u8 = 1;
const FAMILY_IPV6: u8 = 2;

/// Identifier that matches a response to its request: 96 random bits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransactionId(pub [u8; 12]);

/// Nonce that a relay gives a client, so that it can prove its source.
pub type Nonce = [u8; NONCE_LENGTH];

/// The answer to a binding request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BindingResponse {
    /// The transaction of the request.
    pub transaction: TransactionId,
    /// The source of the request as the server saw it, or why the server refuses to say.
    pub mapped: Result<SocketAddr, ErrorCode>,
    /// Nonce with which to repeat the request.
    pub nonce: Option<Nonce>,
}

/// Code of the reason why a server refuses a request (RFC 8489, section 14.8): 300 to 699.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ErrorCode(pub u16);

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "error {}", self.0)
    }
}

/// Reason why a datagram is not a response to a binding request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidResponse {
    /// See [`is_stun`].
    #[error("not a STUN message")]
    NotStun,
    /// A request, an indication, or another method.
    #[error("STUN message of type {0:#06x} instead of a binding response")]
    MessageType(u16),
    /// An attribute ends behind the message, or has another length than its type has.
    #[error("STUN attribute {0:#06x} is malformed")]
    Attribute(u16),
    /// An attribute that a client has to understand (RFC 8489, section 14).
    #[error("STUN attribute {0:#06x} is not known, but has to be understood")]
    UnknownAttribute(u16),
    /// A success without an address, or an error without a code.
    #[error("STUN response without the attribute {0:#06x}")]
    MissingAttribute(u16),
}

/// Whether a datagram has the form of a STUN message (RFC 8489, section 5): two zero bits, the magic cookie, and a length in
/// multiples of four that is the datagram's. No WireGuard message has it.
pub fn is_stun(datagram: &[u8]) -> bool {
    let Some((header, attributes)) = datagram.split_first_chunk::<HEADER_LENGTH>() else { return false };
    let length = usize::from(u16::from_be_bytes([header[2], header[3]]));
    header[0] & 0xc0 == 0
        && length == attributes.len()
        && length.is_multiple_of(4)
        && header[4..8] == MAGIC_COOKIE
}

/// A binding request without credentials (RFC 8489, section 2).
pub fn binding_request(transaction: TransactionId) -> [u8; REQUEST_LENGTH] {
    let mut message = [0; REQUEST_LENGTH];
    message[..2].copy_from_slice(&BINDING_REQUEST.to_be_bytes());
    message[3] = (REQUEST_LENGTH - HEADER_LENGTH) as u8;
    message[4..8].copy_from_slice(&MAGIC_COOKIE);
    message[8..HEADER_LENGTH].copy_from_slice(&transaction.0);
    message[20..22].copy_from_slice(&SOFTWARE.to_be_bytes());
    // The name ends with a byte of padding.
    message[23] = (SOFTWARE_NAME.len() - 1) as u8;
    message[24..].copy_from_slice(SOFTWARE_NAME);
    message
}

/// Parses the response to a binding request. Whether it was asked for, and by whom it was sent, is for the caller to check.
///
/// # Errors
/// The datagram is something else, or malformed.
pub fn parse_response(datagram: &[u8]) -> Result<BindingResponse, InvalidResponse> {
    if !is_stun(datagram) {
        return Err(InvalidResponse::NotStun);
    }
    let Some((header, attributes)) = datagram.split_first_chunk::<HEADER_LENGTH>() else {
        return Err(InvalidResponse::NotStun);
    };
    let [high, low, _, _, _, _, _, _, transaction @ ..] = *header;
    let transaction = TransactionId(transaction);
    let found = Attributes::parse(attributes, transaction)?;
    let mapped = match u16::from_be_bytes([high, low]) {
        BINDING_SUCCESS => {
            let address = found.xor_mapped.or(found.mapped);
            Ok(address.ok_or(InvalidResponse::MissingAttribute(XOR_MAPPED_ADDRESS))?)
        }
        BINDING_ERROR => Err(found.error.ok_or(InvalidResponse::MissingAttribute(ERROR_CODE))?),
        other => return Err(InvalidResponse::MessageType(other)),
    };
    Ok(BindingResponse { transaction, mapped, nonce: found.nonce })
}

/// The attributes a client reads; of each the first (RFC 8489, section 14).
#[derive(Default)]
struct Attributes {
    xor_mapped: Option<SocketAddr>,
    mapped: Option<SocketAddr>,
    error: Option<ErrorCode>,
    nonce: Option<Nonce>,
}

impl Attributes {
    fn parse(mut bytes: &[u8], transaction: TransactionId) -> Result<Self, InvalidResponse> {
        let mut found = Self::default();
        while let Some(([a, b, c, d], rest)) = bytes.split_first_chunk() {
            let kind = u16::from_be_bytes([*a, *b]);
            let length = usize::from(u16::from_be_bytes([*c, *d]));
            let value = rest.get(..length).ok_or(InvalidResponse::Attribute(kind))?;
            found.read(kind, value, transaction)?;
            bytes = rest.get(length.next_multiple_of(4)..).ok_or(InvalidResponse::Attribute(kind))?;
        }
        Ok(found)
    }

    fn read(&mut self, kind: u16, value: &[u8], transaction: TransactionId) -> Result<(), InvalidResponse> {
        let malformed = InvalidResponse::Attribute(kind);
        match kind {
            XOR_MAPPED_ADDRESS => {
                let address = parse_address(value).ok_or(malformed)?;
                self.xor_mapped.get_or_insert(unmask(address, transaction));
            }
            MAPPED_ADDRESS => {
                self.mapped.get_or_insert(parse_address(value).ok_or(malformed)?);
            }
            ERROR_CODE => {
                self.error.get_or_insert(parse_error(value).ok_or(malformed)?);
            }
            NONCE => self.nonce = self.nonce.or(value.try_into().ok()),
            _ if kind >= COMPREHENSION_OPTIONAL || IGNORED.contains(&kind) => {}
            _ => return Err(InvalidResponse::UnknownAttribute(kind)),
        }
        Ok(())
    }
}

/// MAPPED-ADDRESS (RFC 8489, section 14.1).
fn parse_address(value: &[u8]) -> Option<SocketAddr> {
    let ([_, family, high, low], address) = value.split_first_chunk()?;
    let ip = match *family {
        FAMILY_IPV4 => IpAddr::V4(Ipv4Addr::from(<[u8; 4]>::try_from(address).ok()?)),
        FAMILY_IPV6 => IpAddr::V6(Ipv6Addr::from(<[u8; 16]>::try_from(address).ok()?)),
        _ => return None,
    };
    Some(SocketAddr::new(ip, u16::from_be_bytes([*high, *low])))
}

/// XOR-MAPPED-ADDRESS (RFC 8489, section 14.2): some NATs rewrite addresses that they find in the payload.
fn unmask(address: SocketAddr, transaction: TransactionId) -> SocketAddr {
    let [a, b, c, d] = MAGIC_COOKIE;
    let ip = match address.ip() {
        IpAddr::V4(ip) => IpAddr::V4(Ipv4Addr::from_bits(ip.to_bits() ^ u32::from_be_bytes(MAGIC_COOKIE))),
        IpAddr::V6(ip) => {
            let mut mask = [0; 16];
            mask[..4].copy_from_slice(&[a, b, c, d]);
            mask[4..].copy_from_slice(&transaction.0);
            IpAddr::V6(Ipv6Addr::from_bits(ip.to_bits() ^ u128::from_be_bytes(mask)))
        }
    };
    SocketAddr::new(ip, address.port() ^ u16::from_be_bytes([a, b]))
}

/// ERROR-CODE (RFC 8489, section 14.8): hundreds and the rest in bytes of their own, then a text.
fn parse_error(value: &[u8]) -> Option<ErrorCode> {
    let [_, _, hundreds @ 3..=6, rest @ 0..=99, ..] = value else { return None };
    Some(ErrorCode(u16::from(*hundreds).checked_mul(100)?.checked_add(u16::from(*rest))?))
}

#[cfg(test)]
mod tests;
