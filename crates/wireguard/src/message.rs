//! Layout of the four messages (WireGuard paper 5.4.2 to 5.4.7; `drivers/net/wireguard/messages.h`).

/// Bytes of a handshake initiation.
pub const INITIATION_LENGTH: usize = 148;
/// Bytes of a handshake response.
pub const RESPONSE_LENGTH: usize = 92;
/// Bytes of a cookie reply.
pub const COOKIE_REPLY_LENGTH: usize = 64;
/// Bytes before the encrypted packet of a data message: type, receiver index, counter.
pub const DATA_HEADER_LENGTH: usize = 16;
/// Bytes of a Poly1305 authentication tag, with which every data message ends.
pub const TAG_LENGTH: usize = 16;
/// Bytes of `mac1`, and of `mac2`, with which initiations and responses end.
pub(crate) const MAC_LENGTH: usize = 16;

/// A handshake initiation (WireGuard paper 5.4.2).
pub type Initiation = [u8; INITIATION_LENGTH];
/// A handshake response (WireGuard paper 5.4.3).
pub type Response = [u8; RESPONSE_LENGTH];
/// A cookie reply (WireGuard paper 5.4.7).
pub type CookieReply = [u8; COOKIE_REPLY_LENGTH];

/// The type of a message, with the number that it begins with (WireGuard paper 5.4).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// First message of a handshake.
    Initiation = 1,
    /// Second and last message of a handshake.
    Response = 2,
    /// Answer to either of them by a loaded peer.
    CookieReply = 3,
    /// An encrypted packet, or a keepalive.
    Data = 4,
}

/// The kind of a datagram that has the form of a WireGuard message: a little-endian type of 1 to 4 in four bytes, of which the
/// last three are reserved, and the length of that type (WireGuard paper 5.4.2 to 5.4.7; `prepare_skb_header` and
/// `validate_header_len` of `drivers/net/wireguard/receive.c`). It costs no cryptography.
pub fn kind_of(datagram: &[u8]) -> Option<Kind> {
    let (kind, fits) = match datagram {
        [1, 0, 0, 0, ..] => (Kind::Initiation, datagram.len() == INITIATION_LENGTH),
        [2, 0, 0, 0, ..] => (Kind::Response, datagram.len() == RESPONSE_LENGTH),
        [3, 0, 0, 0, ..] => (Kind::CookieReply, datagram.len() == COOKIE_REPLY_LENGTH),
        [4, 0, 0, 0, ..] => (Kind::Data, datagram.len() >= DATA_HEADER_LENGTH + TAG_LENGTH),
        _ => return None,
    };
    fits.then_some(kind)
}

/// The index by which the receiver of a response, a cookie reply or a data message finds the handshake or session. `None` for
/// an initiation, which has none, and for what is no WireGuard message.
pub fn receiver_index(datagram: &[u8]) -> Option<u32> {
    let at = match kind_of(datagram)? {
        Kind::Initiation => return None,
        Kind::Response => 8,
        Kind::CookieReply | Kind::Data => 4,
    };
    field(datagram, at).map(u32::from_le_bytes)
}

/// The index that the sender of an initiation or a response wants to be called by. `None` for everything else.
pub(crate) fn sender_index(datagram: &[u8]) -> Option<u32> {
    match kind_of(datagram)? {
        Kind::Initiation | Kind::Response => field(datagram, 4).map(u32::from_le_bytes),
        Kind::CookieReply | Kind::Data => None,
    }
}

/// The `N` bytes from offset `at`, if there are so many.
pub(crate) fn field<const N: usize>(message: &[u8], at: usize) -> Option<[u8; N]> {
    message.get(at..)?.first_chunk().copied()
}

/// A message of `N` bytes: the type, the parts one after the other, and zeros for what they leave.
pub(crate) fn assemble<const N: usize>(kind: Kind, parts: &[&[u8]]) -> [u8; N] {
    let mut message = [0; N];
    let header = [kind as u8, 0, 0, 0];
    message
        .iter_mut()
        .zip(header.iter().chain(parts.iter().copied().flatten()))
        .for_each(|(to, from)| *to = *from);
    message
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn message(header: [u8; 4], length: usize) -> Vec<u8> {
        let mut bytes = vec![0x5a; length];
        bytes.iter_mut().zip(header).for_each(|(byte, value)| *byte = value);
        bytes
    }

    #[test]
    fn type_reserved_bytes_and_length_decide() {
        let messages = [
            (Kind::Initiation, 148),
            (Kind::Response, 92),
            (Kind::CookieReply, 64),
            (Kind::Data, 32),
            (Kind::Data, 33),
            (Kind::Data, 1452),
            (Kind::Data, 65_507),
        ];
        for (kind, length) in messages {
            assert_eq!(kind_of(&message([kind as u8, 0, 0, 0], length)), Some(kind), "{length} bytes");
            for reserved in 1..4 {
                let mut header = [kind as u8, 0, 0, 0];
                header[reserved] = 1;
                assert_eq!(kind_of(&message(header, length)), None, "{header:?}");
            }
        }
        let others = [(1, 147), (1, 149), (2, 91), (2, 148), (3, 63), (3, 92), (4, 31), (0, 32), (5, 148)];
        for (kind, length) in others {
            assert_eq!(kind_of(&message([kind, 0, 0, 0], length)), None, "type {kind}, {length} bytes");
        }
        assert_eq!((kind_of(&[]), kind_of(&[4, 0, 0])), (None, None));
    }

    /// RFC 8489: a request begins with 0x0001, a success response with 0x0101.
    #[test]
    fn stun_is_no_wireguard_message() {
        for kind in [[0, 1], [1, 1], [1, 0x11]] {
            for length in [20_u8, 64, 92, 148] {
                assert_eq!(kind_of(&message([kind[0], kind[1], 0, length - 20], length.into())), None);
            }
        }
    }

    #[test]
    fn indexes_stand_where_the_paper_has_them() {
        let (first, second) = (0x0403_0201_u32.to_le_bytes(), 0x0807_0605_u32.to_le_bytes());
        let of = |kind: Kind, length: usize| {
            let mut bytes = vec![0; length];
            bytes[..12].copy_from_slice(&assemble::<12>(kind, &[&first, &second]));
            (sender_index(&bytes), receiver_index(&bytes))
        };
        assert_eq!(of(Kind::Initiation, 148), (Some(0x0403_0201), None));
        assert_eq!(of(Kind::Response, 92), (Some(0x0403_0201), Some(0x0807_0605)));
        assert_eq!(of(Kind::CookieReply, 64), (None, Some(0x0403_0201)));
        assert_eq!(of(Kind::Data, 80), (None, Some(0x0403_0201)));
        assert_eq!(of(Kind::Response, 93), (None, None));
    }

    proptest! {
        #[test]
        fn any_bytes_have_a_kind_or_none(datagram in prop::collection::vec(any::<u8>(), 0..200)) {
            let kind = kind_of(&datagram);
            prop_assert_eq!(receiver_index(&datagram).is_some(), kind.is_some_and(|kind| kind != Kind::Initiation));
        }

        #[test]
        fn what_was_assembled_is_read_back(kind in 1..=4_u8, index: u32, rest: [u8; 28]) {
            let (kind, length) = match kind {
                1 => (Kind::Initiation, 148),
                2 => (Kind::Response, 92),
                3 => (Kind::CookieReply, 64),
                _ => (Kind::Data, 36),
            };
            let mut bytes = assemble::<148>(kind, &[&index.to_le_bytes(), &rest]).to_vec();
            bytes.truncate(length);
            prop_assert_eq!(kind_of(&bytes), Some(kind));
            prop_assert_eq!(field(&bytes, 4), Some(index.to_le_bytes()));
            prop_assert_eq!(field(&bytes, 8), Some(rest));
            prop_assert_eq!(field::<1>(&bytes, length), None);
        }
    }
}
