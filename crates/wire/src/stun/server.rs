//! The server's side of STUN, and what a relay asks of its clients beyond the Binding method: requests that prove who sent them
//! (MESSAGE-INTEGRITY-SHA256), that want the answer from another port (CHANGE-REQUEST of RFC 5780), and that prove their source
//! (NONCE). Each of these is longer than the longest answer, so that a server need never send more than it has received.

use std::net::{IpAddr, SocketAddr};

use hkdf::hmac::{Hmac, Mac};
use sha2::Sha256;

use super::{
    BINDING_ERROR, BINDING_REQUEST, BINDING_SUCCESS, COMPREHENSION_OPTIONAL, ERROR_CODE, ErrorCode,
    FAMILY_IPV4, FAMILY_IPV6, HEADER_LENGTH, MAGIC_COOKIE, NONCE, NONCE_LENGTH, Nonce, TransactionId,
    XOR_MAPPED_ADDRESS, is_stun, unmask,
};

/// Attributes (RFC 8489, section 18.3; RFC 5780, section 7).
const CHANGE_REQUEST: u16 = 0x0003;
const USERNAME: u16 = 0x0006;
const MESSAGE_INTEGRITY_SHA256: u16 = 0x001c;
/// "Change port" in CHANGE-REQUEST.
const CHANGE_PORT: u8 = 0x02;
const ATTRIBUTE_HEADER: usize = 4;
const CODE_LENGTH: usize = 32;
/// Length of a user name.
pub const USER_LENGTH: usize = 8;
/// "Stale Nonce" (RFC 8489, section 14.8): the request is to be repeated with the nonce of the answer.
pub const STALE_NONCE: ErrorCode = ErrorCode(438);

/// A binding request with a code that proves who sent it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuthenticatedRequest {
    /// Repeated by the response.
    pub transaction: TransactionId,
    /// Whether the response is to come from another port.
    pub change_port: bool,
    /// Name of the user whose key makes the code; `None` where the receiver knows the key.
    pub user: Option<[u8; USER_LENGTH]>,
    /// Nonce that the server gave for this source.
    pub nonce: Option<Nonce>,
}

impl AuthenticatedRequest {
    /// The message, with a code made with `key`.
    pub fn encode(&self, key: &[u8; 32]) -> Vec<u8> {
        let mut message = header(BINDING_REQUEST, self.transaction);
        if self.change_port {
            attribute(&mut message, CHANGE_REQUEST, &[0, 0, 0, CHANGE_PORT]);
        }
        if let Some(user) = &self.user {
            attribute(&mut message, USERNAME, user);
        }
        if let Some(nonce) = &self.nonce {
            attribute(&mut message, NONCE, nonce);
        }
        // The code covers the length that the message has with it (RFC 8489, section 14.6).
        set_length(&mut message, ATTRIBUTE_HEADER + CODE_LENGTH);
        let code: [u8; CODE_LENGTH] = code(key, &[&message]).finalize().into_bytes().into();
        attribute(&mut message, MESSAGE_INTEGRITY_SHA256, &code);
        message
    }
}

/// A binding request as a server reads it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BindingRequest<'a> {
    /// Contents of the request. Nothing of it is known to be true before [`Self::is_authentic`].
    pub request: AuthenticatedRequest,
    datagram: &'a [u8],
    /// Bytes that the code covers, and the code.
    integrity: Option<(&'a [u8], &'a [u8])>,
}

/// Parses a binding request. `None` for what is something else or malformed: servers that relays are do not explain.
pub fn parse_request(datagram: &[u8]) -> Option<BindingRequest<'_>> {
    let (header, mut rest) = datagram.split_first_chunk::<HEADER_LENGTH>().filter(|_| is_stun(datagram))?;
    let [high, low, _, _, _, _, _, _, transaction @ ..] = *header;
    if u16::from_be_bytes([high, low]) != BINDING_REQUEST {
        return None;
    }
    let transaction = TransactionId(transaction);
    let mut request = AuthenticatedRequest { transaction, change_port: false, user: None, nonce: None };
    let mut integrity = None;
    while let Some(([a, b, c, d], after)) = rest.split_first_chunk() {
        let covered = datagram.get(..datagram.len().saturating_sub(rest.len()))?;
        let kind = u16::from_be_bytes([*a, *b]);
        let length = usize::from(u16::from_be_bytes([*c, *d]));
        let value = after.get(..length)?;
        rest = after.get(length.next_multiple_of(4)..)?;
        match kind {
            CHANGE_REQUEST => request.change_port = *value.get(3)? & CHANGE_PORT != 0,
            MESSAGE_INTEGRITY_SHA256 => {
                integrity = Some((covered, value));
                // What follows is not covered.
                break;
            }
            NONCE => request.nonce = value.try_into().ok(),
            USERNAME => request.user = value.try_into().ok(),
            _ if kind >= COMPREHENSION_OPTIONAL => {}
            _ => return None,
        }
    }
    Some(BindingRequest { request, datagram, integrity })
}

impl BindingRequest<'_> {
    /// Whether its sender has the key.
    pub fn is_authentic(&self, key: &[u8; 32]) -> bool {
        let Some(([high, low, _, _, rest @ ..], received)) = self.integrity else { return false };
        let length = rest.len().saturating_add(4 + ATTRIBUTE_HEADER + CODE_LENGTH);
        let length = u16::try_from(length.saturating_sub(HEADER_LENGTH)).unwrap_or(u16::MAX).to_be_bytes();
        code(key, &[&[*high, *low], &length, rest]).verify_slice(received).is_ok()
    }

    /// Whether an answer would be longer than this request.
    pub fn is_shorter_than(&self, answer: &[u8]) -> bool {
        self.datagram.len() < answer.len()
    }
}

/// The answer that says from where a request came.
pub fn success(transaction: TransactionId, source: SocketAddr) -> Vec<u8> {
    let mut message = header(BINDING_SUCCESS, transaction);
    let masked = unmask(source, transaction);
    let family = if masked.is_ipv4() { FAMILY_IPV4 } else { FAMILY_IPV6 };
    let mut value = vec![0, family];
    value.extend(masked.port().to_be_bytes());
    match masked.ip() {
        IpAddr::V4(ip) => value.extend(ip.octets()),
        IpAddr::V6(ip) => value.extend(ip.octets()),
    }
    attribute(&mut message, XOR_MAPPED_ADDRESS, &value);
    message
}

/// The answer that asks for a repetition with this nonce: [`STALE_NONCE`].
pub fn stale_nonce(transaction: TransactionId, nonce: &Nonce) -> Vec<u8> {
    let mut message = header(BINDING_ERROR, transaction);
    attribute(&mut message, ERROR_CODE, &[0, 0, 4, 38]);
    attribute(&mut message, NONCE, nonce);
    message
}

/// The nonce for a source: only who receives there can know it. It is valid as long as `period` is the same.
pub fn nonce(secret: &[u8; 32], source: SocketAddr, period: u64) -> Nonce {
    let ip = match source.ip() {
        IpAddr::V4(ip) => ip.to_ipv6_mapped(),
        IpAddr::V6(ip) => ip,
    };
    let parts: [&[u8]; 3] = [&ip.octets(), &source.port().to_be_bytes(), &period.to_be_bytes()];
    let code: [u8; CODE_LENGTH] = code(secret, &parts).finalize().into_bytes().into();
    let mut nonce = [0; NONCE_LENGTH];
    nonce.copy_from_slice(&code[..NONCE_LENGTH]);
    nonce
}

/// The key of a user: a server that derives it has to remember none.
pub fn user_key(secret: &[u8; 32], user: [u8; USER_LENGTH]) -> [u8; 32] {
    code(secret, &[b"fairlead relay stun user", &user]).finalize().into_bytes().into()
}

fn code(key: &[u8; 32], parts: &[&[u8]]) -> Hmac<Sha256> {
    // A key is filled up with zeros to the length of a block (RFC 2104, section 2).
    let mut block = [0; 2 * CODE_LENGTH];
    let (start, _) = block.split_at_mut(CODE_LENGTH);
    start.copy_from_slice(key);
    let mut code = <Hmac<Sha256> as Mac>::new(&block.into());
    parts.iter().for_each(|part| code.update(part));
    code
}

fn header(kind: u16, transaction: TransactionId) -> Vec<u8> {
    let mut message = Vec::with_capacity(112);
    message.extend(kind.to_be_bytes());
    message.extend([0, 0]);
    message.extend(MAGIC_COOKIE);
    message.extend(transaction.0);
    message
}

/// Appends an attribute whose length is a multiple of four.
fn attribute(message: &mut Vec<u8>, kind: u16, value: &[u8]) {
    message.extend(kind.to_be_bytes());
    message.extend(u16::try_from(value.len()).unwrap_or(u16::MAX).to_be_bytes());
    message.extend(value);
    set_length(message, 0);
}

fn set_length(message: &mut [u8], more: usize) {
    let length = message.len().saturating_sub(HEADER_LENGTH).saturating_add(more);
    if let Some(field) = message.get_mut(2..4) {
        field.copy_from_slice(&u16::try_from(length).unwrap_or(u16::MAX).to_be_bytes());
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{BindingResponse, binding_request, parse_response};
    use super::*;

    const KEY: [u8; 32] = [7; 32];
    const TRANSACTION: TransactionId = TransactionId([9; 12]);

    fn request(change_port: bool, user: bool, nonce: bool) -> AuthenticatedRequest {
        let (user, nonce) = (user.then_some([5; USER_LENGTH]), nonce.then_some([6; NONCE_LENGTH]));
        AuthenticatedRequest { transaction: TRANSACTION, change_port, user, nonce }
    }

    #[test]
    fn only_the_key_authenticates_a_request_and_no_byte_can_be_altered() {
        for [change_port, user, nonce] in [[false, false, false], [true, true, false], [false, true, true]] {
            let request = request(change_port, user, nonce);
            let encoded = request.encode(&KEY);
            let parsed = parse_request(&encoded).unwrap();
            assert_eq!(parsed.request, request);
            assert!(parsed.is_authentic(&KEY) && !parsed.is_authentic(&[8; 32]));
            for at in 0..encoded.len() {
                let mut altered = encoded.clone();
                altered[at] ^= 1;
                let accepted = parse_request(&altered).is_some_and(|altered| altered.is_authentic(&KEY));
                assert!(!accepted, "byte {at}");
            }
        }
        assert!(!parse_request(&binding_request(TRANSACTION)).unwrap().is_authentic(&KEY));
    }

    /// `hmac.new(b"\x07"*32, bytes.fromhex("000100242112a442" + "09"*12), "sha256")` of Python: the header with the length that
    /// RFC 8489, section 14.6, demands.
    #[test]
    fn the_code_is_that_of_another_implementation() {
        let encoded = request(false, false, false).encode(&KEY);
        assert_eq!(encoded[20..24], [0, 0x1c, 0, 32]);
        assert_eq!(encoded[24..28], [0xaf, 0x7b, 0xad, 0x23]);
    }

    #[test]
    fn answers_are_read_by_clients_and_never_longer_than_requests() {
        for source in ["192.0.2.7:4660", "[2001:db8::7]:65535"] {
            let answer = success(TRANSACTION, source.parse().unwrap());
            let mapped = Ok(source.parse().unwrap());
            let expected = BindingResponse { transaction: TRANSACTION, mapped, nonce: None };
            assert_eq!(parse_response(&answer), Ok(expected));
            assert!(!parse_request(&binding_request(TRANSACTION)).unwrap().is_shorter_than(&answer));
        }
        let answer = stale_nonce(TRANSACTION, &[6; NONCE_LENGTH]);
        let expected =
            BindingResponse { transaction: TRANSACTION, mapped: Err(STALE_NONCE), nonce: Some([6; 16]) };
        assert_eq!(parse_response(&answer), Ok(expected));
        let shortest = request(false, false, false).encode(&KEY);
        assert!(!parse_request(&shortest).unwrap().is_shorter_than(&answer));
    }

    #[test]
    fn a_nonce_is_for_one_source_and_one_period() {
        let source = |text: &str| text.parse::<SocketAddr>().unwrap();
        let one = nonce(&KEY, source("192.0.2.7:1"), 1);
        assert_eq!(one, nonce(&KEY, source("[::ffff:192.0.2.7]:1"), 1));
        for (address, period) in [("192.0.2.7:2", 1), ("192.0.2.8:1", 1), ("192.0.2.7:1", 2)] {
            assert_ne!(one, nonce(&KEY, source(address), period));
        }
    }

    proptest! {
        #[test]
        fn hostile_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let length = u16::try_from(bytes.len()).unwrap().to_be_bytes();
            let message = [&[0, 1][..], &length, &MAGIC_COOKIE, &TRANSACTION.0, &bytes].concat();
            for datagram in [&bytes, &message] {
                if let Some(parsed) = parse_request(datagram) {
                    prop_assert!(!parsed.is_authentic(&KEY));
                }
            }
        }
    }
}
