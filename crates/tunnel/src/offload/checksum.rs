//! The Internet checksum (RFC 1071), fast: it passes over every byte that goes through the TUN.

/// A sum of 16-bit words that is not yet folded. Words are added in this host's byte order: the one's-complement sum of swapped words
/// is the swapped sum (RFC 1071, section 2).
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Sum(u64);

impl Sum {
    /// The sum over `bytes`, which begin at an even offset of what the checksum covers. An odd last byte counts as if a zero followed.
    pub(crate) fn of(bytes: &[u8]) -> Self {
        let (words, rest) = bytes.as_chunks::<8>();
        // Two sums without carries, of the halves of each word. The compiler makes vector additions of them, also with those of the
        // oldest x86-64 (SSE2); with one array of sums per vector lane it does not.
        let (low, high) = words.iter().fold((0_u64, 0_u64), |(low, high), word| {
            let word = u64::from_ne_bytes(*word);
            (low.wrapping_add(word & u64::from(u32::MAX)), high.wrapping_add(word >> 32))
        });
        Self(low).plus(Self(high)).plus(Self::of_last(rest))
    }

    /// Sum of less than eight bytes.
    fn of_last(bytes: &[u8]) -> Self {
        let (words, rest) = bytes.as_chunks::<4>();
        let sum = words.iter().fold(0, |sum: u64, word| sum.wrapping_add(u32::from_ne_bytes(*word).into()));
        let last = match *rest {
            [a, b, c] => [a, b, c, 0],
            [a, b] => [a, b, 0, 0],
            [a] => [a, 0, 0, 0],
            _ => [0; 4],
        };
        Self(sum.wrapping_add(u32::from_ne_bytes(last).into()))
    }

    /// The sum over two pieces; the second one begins at an even offset.
    pub(crate) fn plus(self, other: Self) -> Self {
        // A carry can only be lost after 2^32 words, and no packet has so many.
        Self(self.0.wrapping_add(other.0))
    }

    /// Adds a field of 16 bits.
    pub(crate) fn plus_word(self, word: u16) -> Self {
        self.plus(Self(word.to_be().into()))
    }

    /// Takes a field of 16 bits out again that was added before: RFC 1624, equation 3, adds its complement.
    pub(crate) fn minus_word(self, word: u16) -> Self {
        self.plus_word(!word)
    }

    /// The sum as 16 bits, not complemented: what [`NEEDS_CHECKSUM`](super::header::NEEDS_CHECKSUM) asks for in the checksum field, and
    /// 0xFFFF over everything that has a valid checksum.
    pub(crate) fn folded(self) -> u16 {
        let mut sum = self.0;
        sum = (sum >> 32).wrapping_add(sum & u64::from(u32::MAX));
        for _ in 0..3 {
            sum = (sum >> 16).wrapping_add(sum & u64::from(u16::MAX));
        }
        u16::from_be(u16::try_from(sum).unwrap_or(u16::MAX))
    }

    /// The value of the checksum field, if the sum counted that field as zero.
    pub(crate) fn checksum(self) -> u16 {
        !self.folded()
    }

    /// Value of the checksum field for a protocol in which zero says that there is no checksum (UDP, RFC 768).
    pub(crate) fn checksum_not_zero(self) -> u16 {
        match self.checksum() {
            0 => u16::MAX,
            checksum => checksum,
        }
    }
}

/// The sum of the pseudo-header of IPv4 (RFC 9293, section 3.1) or IPv6 (RFC 8200, section 8.1). `addresses`: source and destination, as
/// they follow each other in the header. `length`: bytes of the transport header and the payload.
pub(crate) fn pseudo_header(addresses: &[u8], protocol: u8, length: u16) -> Sum {
    Sum::of(addresses).plus_word(protocol.into()).plus_word(length)
}
