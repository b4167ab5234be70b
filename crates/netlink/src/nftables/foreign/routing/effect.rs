//! Effect of a rule on packets.

/// Mark of a packet behind a rule, as far as it follows from the mark before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MarkChange {
    /// Bits that stay as they were; all others are cleared.
    pub kept: u32,
    /// Bits that are inverted then.
    pub set: u32,
    /// Bits of which nothing is known, such as those of the connection's mark.
    pub unknown: u32,
}

impl MarkChange {
    pub(super) const NONE: Self = Self { kept: u32::MAX, set: 0, unknown: 0 };
    pub(super) const UNKNOWN: Self = Self { kept: 0, set: 0, unknown: u32::MAX };

    /// Mark behind the rule of a packet with this one; bits of which nothing is known are zero.
    pub const fn of(self, mark: u32) -> u32 {
        ((mark & self.kept) ^ self.set) & !self.unknown
    }

    pub(super) const fn constant(set: u32) -> Self {
        Self { kept: 0, set, unknown: 0 }
    }

    /// Followed by an expression that keeps the bits of a mask, and then inverts some.
    pub(super) const fn masked(self, mask: u32, inverted: u32) -> Self {
        Self { kept: self.kept & mask, set: (self.set & mask) ^ inverted, unknown: self.unknown & mask }
    }
}

/// Effect of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Changes the mark.
    Mark(MarkChange),
    /// Drops packets that came in by another device than the one by which their source is reached (RFC 3704), looked up without their mark.
    SourceCheck,
    /// Translates the destination of packets to a UDP port of this host, so that another program gets them.
    Translation,
}
