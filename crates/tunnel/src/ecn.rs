//! Explicit congestion notification through the tunnel: RFC 6040, normal mode. The DSCP of inner packets does not show outside.

use crate::offload::sum_changed;

/// The ECN field of an IP header (RFC 3168, section 5).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Ecn(u8);

impl Ecn {
    /// Not ECN-capable.
    pub(crate) const NOT_CAPABLE: Self = Self(0b00);
    const CAPABLE_1: Self = Self(0b01);
    const CONGESTED: Self = Self(0b11);

    /// Reads the field of a TOS byte, or a traffic class.
    pub(crate) fn of(traffic_class: u8) -> Self {
        Self(traffic_class & 0b11)
    }

    /// Reads the field of an IPv4 or IPv6 packet.
    pub(crate) fn of_packet(packet: &[u8]) -> Self {
        match packet {
            [first, second, ..] if first >> 4 == 6 => Self(second >> 4 & 0b11),
            [_, second, ..] => Self::of(*second),
            _ => Self::NOT_CAPABLE,
        }
    }

    /// The traffic class of the outer packet.
    pub(crate) fn traffic_class(self) -> u8 {
        self.0
    }

    /// Field of the inner packet behind the tunnel, with this as the field of the outer one (figure 4 of the RFC); `None` if the packet has
    /// to be dropped: it met congestion, and cannot say so.
    fn decapsulated(self, inner: Self) -> Option<Self> {
        match (inner, self) {
            (Self::NOT_CAPABLE, Self::CONGESTED) => None,
            (Self::NOT_CAPABLE | Self::CONGESTED, _) => Some(inner),
            (_, Self::CONGESTED) => Some(Self::CONGESTED),
            (_, Self::CAPABLE_1) => Some(Self::CAPABLE_1),
            _ => Some(inner),
        }
    }

    /// Brings what the network did to the outer packet into the inner one; returns false if that has to be dropped.
    pub(crate) fn apply_to(self, packet: &mut [u8]) -> bool {
        let inner = Self::of_packet(packet);
        match self.decapsulated(inner) {
            None => false,
            Some(new) if new == inner => true,
            Some(new) => {
                new.write(packet);
                true
            }
        }
    }

    fn write(self, packet: &mut [u8]) {
        match packet {
            [first, second, ..] if *first >> 4 == 6 => *second = *second & !0x30 | self.0 << 4,
            [first, second, _, _, _, _, _, _, _, _, high, low, ..] => {
                let before = u16::from_be_bytes([*first, *second]);
                *second = *second & !0b11 | self.0;
                let after = u16::from_be_bytes([*first, *second]);
                [*high, *low] = sum_changed(u16::from_be_bytes([*high, *low]), before, after).to_be_bytes();
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FIELDS: [Ecn; 4] = [Ecn(0), Ecn(1), Ecn(2), Ecn(3)];

    /// Figure 4 of RFC 6040; a row for each inner field, a column for each outer one.
    const BEHIND: [[Option<u8>; 4]; 4] = [
        [Some(0), Some(0), Some(0), None],
        [Some(1), Some(1), Some(1), Some(3)],
        [Some(2), Some(1), Some(2), Some(3)],
        [Some(3), Some(3), Some(3), Some(3)],
    ];

    #[test]
    fn the_inner_packet_learns_what_the_outer_one_met() {
        for (inner, row) in FIELDS.into_iter().zip(BEHIND) {
            for (outer, behind) in FIELDS.into_iter().zip(row) {
                assert_eq!(outer.decapsulated(inner), behind.map(Ecn), "{inner:?} {outer:?}");
            }
        }
    }

    #[test]
    fn packets_keep_all_else_and_a_valid_checksum() {
        let v4 = [0x45, 0xb8, 0, 28, 1, 2, 0x40, 0, 64, 17, 0, 0, 10, 1, 2, 3, 10, 4, 5, 6];
        let v6 = [0x6b, 0x81, 2, 3, 0, 0, 59, 64];
        for inner in FIELDS {
            let mut packet = v4;
            packet[1] |= inner.0;
            let sum = crate::echo::checksum(&packet).to_be_bytes();
            packet[10..12].copy_from_slice(&sum);
            let dropped = !Ecn::CONGESTED.apply_to(&mut packet);
            assert_eq!(dropped, inner == Ecn::NOT_CAPABLE);
            assert_eq!(crate::echo::checksum(&packet), 0);
            let expected = if dropped { 0xb8 } else { 0xbb };
            assert_eq!((packet[1], &packet[..1], &packet[2..10]), (expected, &v4[..1], &v4[2..10]));

            let mut packet = v6;
            packet[1] |= inner.0 << 4;
            assert_eq!((Ecn::of_packet(&packet), Ecn(2).apply_to(&mut packet)), (inner, true));
            assert_eq!((packet[0], packet[1]), (0x6b, 0x81 | inner.0 << 4), "nothing was met");
            if Ecn::CONGESTED.apply_to(&mut packet) {
                assert_eq!((Ecn::of_packet(&packet), packet[1] & 0xcf), (Ecn::CONGESTED, 0x81));
            }
        }
    }

    #[test]
    fn packets_without_a_header_are_left_alone() {
        for mut packet in [vec![], vec![0x45], vec![0x45, 3], vec![0x60]] {
            let before = packet.clone();
            Ecn(1).apply_to(&mut packet);
            assert_eq!(packet, before);
        }
    }
}
