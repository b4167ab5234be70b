use proptest::prelude::*;

use super::*;

/// RFC 5769, sections 2.2 and 2.3: responses with SOFTWARE, MESSAGE-INTEGRITY and FINGERPRINT, of which only the addresses
/// concern a client without credentials.
const TRANSACTION: [u8; 12] = [0xb7, 0xe7, 0xa7, 0x01, 0xbc, 0x34, 0xd6, 0x86, 0xfa, 0x87, 0xdf, 0xae];
const SOFTWARE: [u8; 16] = *b"\x80\x22\x00\x0btest vector ";
const XOR_V4: [u8; 12] = [0x00, 0x20, 0x00, 0x08, 0x00, 0x01, 0xa1, 0x47, 0xe1, 0x12, 0xa6, 0x43];
const XOR_V6: [u8; 24] = [
    0x00, 0x20, 0x00, 0x14, 0x00, 0x02, 0xa1, 0x47, 0x01, 0x13, 0xa9, 0xfa, 0xa5, 0xd3, 0xf1, 0x79, 0xbc,
    0x25, 0xf4, 0xb5, 0xbe, 0xd2, 0xb9, 0xd9,
];
const FINGERPRINT: [u8; 8] = [0x80, 0x28, 0x00, 0x04, 0xc0, 0x7d, 0x4c, 0x96];

fn message(kind: u16, attributes: &[&[u8]]) -> Vec<u8> {
    let attributes = attributes.concat();
    let length = u16::try_from(attributes.len()).unwrap();
    [&kind.to_be_bytes()[..], &length.to_be_bytes(), &MAGIC_COOKIE, &TRANSACTION, &attributes].concat()
}

fn success(attributes: &[&[u8]]) -> Result<BindingResponse, InvalidResponse> {
    parse_response(&message(BINDING_SUCCESS, attributes))
}

fn mapped(address: &str) -> Result<BindingResponse, InvalidResponse> {
    let transaction = TransactionId(TRANSACTION);
    Ok(BindingResponse { transaction, mapped: Ok(address.parse().unwrap()), nonce: None })
}

#[test]
fn the_addresses_of_rfc_5769_are_read() {
    assert_eq!(success(&[&SOFTWARE, &XOR_V4, &FINGERPRINT]), mapped("192.0.2.1:32853"));
    let ipv6 = "[2001:db8:1234:5678:11:2233:4455:6677]:32853";
    assert_eq!(success(&[&SOFTWARE, &XOR_V6, &FINGERPRINT]), mapped(ipv6));
}

#[test]
fn servers_of_rfc_3489_are_understood_and_the_masked_address_is_preferred() {
    let plain = [0, 1, 0, 8, 0, 1, 0x12, 0x34, 198, 51, 100, 7];
    let other = [0, 4, 0, 8, 0, 1, 0x0d, 0x96, 203, 0, 113, 1];
    assert_eq!(success(&[&plain, &other]), mapped("198.51.100.7:4660"));
    assert_eq!(success(&[&plain, &XOR_V4]), mapped("192.0.2.1:32853"));
    assert_eq!(success(&[&XOR_V4, &XOR_V6]), mapped("192.0.2.1:32853"), "the first of a kind counts");
}

#[test]
fn a_refusal_says_its_code() {
    let error = [0, 9, 0, 4, 0, 0, 4, 20];
    let refused = parse_response(&message(BINDING_ERROR, &[&error])).unwrap();
    assert_eq!(refused.mapped, Err(ErrorCode(420)));
    assert_eq!(ErrorCode(420).to_string(), "error 420");
    let no_class = [0, 9, 0, 4, 0, 0, 7, 20];
    let malformed = parse_response(&message(BINDING_ERROR, &[&no_class]));
    assert_eq!(malformed, Err(InvalidResponse::Attribute(ERROR_CODE)));
}

#[test]
fn what_is_no_response_is_refused_with_the_reason() {
    let request = binding_request(TransactionId(TRANSACTION));
    assert!(is_stun(&request));
    assert_eq!(parse_response(&request), Err(InvalidResponse::MessageType(BINDING_REQUEST)));
    assert_eq!(success(&[]), Err(InvalidResponse::MissingAttribute(XOR_MAPPED_ADDRESS)));
    let unknown = [0x7f, 0xff, 0, 0];
    assert_eq!(success(&[&unknown, &XOR_V4]), Err(InvalidResponse::UnknownAttribute(0x7fff)));
    let beyond = [0, 0x20, 0, 20, 0, 1, 0, 0];
    assert_eq!(success(&[&beyond]), Err(InvalidResponse::Attribute(XOR_MAPPED_ADDRESS)));
    let short = [0, 0x20, 0, 4, 0, 2, 0, 0];
    assert_eq!(success(&[&short]), Err(InvalidResponse::Attribute(XOR_MAPPED_ADDRESS)));
    let mut cookie = message(BINDING_SUCCESS, &[&XOR_V4]);
    cookie[4] ^= 1;
    assert_eq!(parse_response(&cookie), Err(InvalidResponse::NotStun));
    let truncated = message(BINDING_SUCCESS, &[&XOR_V4]);
    assert_eq!(parse_response(&truncated[..28]), Err(InvalidResponse::NotStun));
    assert!(!is_stun(&[]) && !is_stun(&[0x40; 20]));
}

proptest! {
    #[test]
    fn any_address_survives_the_mask(address: (IpAddr, u16), transaction: [u8; 12]) {
        let (address, transaction) = (SocketAddr::from(address), TransactionId(transaction));
        let masked = unmask(address, transaction);
        prop_assert_ne!(masked, address);
        prop_assert_eq!(unmask(masked, transaction), address);
    }

    #[test]
    fn hostile_bytes_do_not_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        let _ = parse_response(&bytes);
        // The same with a header that lets the attributes be read.
        bytes.truncate(bytes.len() / 4 * 4);
        let _ = success(&[&bytes]);
    }
}
