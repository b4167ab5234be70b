//! Separates WireGuard messages from the other datagrams on the WireGuard port.

/// Whether a datagram has the form of a WireGuard message: a little-endian type of 1 to 4 in four bytes, of which the last
/// three are reserved, and the length of that type (WireGuard paper 5.4.2 to 5.4.7; `prepare_skb_header` and
/// `validate_header_len` of `drivers/net/wireguard/receive.c`). It costs no cryptography.
pub(crate) fn is_wireguard(datagram: &[u8]) -> bool {
    match datagram {
        [1, 0, 0, 0, ..] => datagram.len() == 148,
        [2, 0, 0, 0, ..] => datagram.len() == 92,
        [3, 0, 0, 0, ..] => datagram.len() == 64,
        // Header and authentication tag of an empty packet.
        [4, 0, 0, 0, ..] => datagram.len() >= 32,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(header: [u8; 4], length: usize) -> Vec<u8> {
        let mut bytes = vec![0x5a; length];
        bytes.iter_mut().zip(header).for_each(|(byte, value)| *byte = value);
        bytes
    }

    #[test]
    fn type_reserved_bytes_and_length_decide() {
        for (kind, length) in [(1, 148), (2, 92), (3, 64), (4, 32), (4, 33), (4, 1452), (4, 65_507)] {
            assert!(is_wireguard(&message([kind, 0, 0, 0], length)), "type {kind}, {length} bytes");
            for reserved in 1..4 {
                let mut header = [kind, 0, 0, 0];
                header[reserved] = 1;
                assert!(!is_wireguard(&message(header, length)), "{header:?}");
            }
        }
        for (kind, length) in
            [(1, 147), (1, 149), (2, 91), (2, 148), (3, 63), (3, 92), (4, 31), (0, 32), (5, 148)]
        {
            assert!(!is_wireguard(&message([kind, 0, 0, 0], length)), "type {kind}, {length} bytes");
        }
        assert!(!is_wireguard(&[]) && !is_wireguard(&[4, 0, 0]));
    }

    /// RFC 8489: a request begins with 0x0001, a success response with 0x0101.
    #[test]
    fn stun_is_no_wireguard_message() {
        for kind in [[0, 1], [1, 1], [1, 0x11]] {
            for length in [20_u8, 64, 92, 148] {
                assert!(!is_wireguard(&message([kind[0], kind[1], 0, length - 20], length.into())));
            }
        }
    }
}
