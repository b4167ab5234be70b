//! Errors of frames that are read or written.

/// Reason why bytes are not a frame. The connection cannot be used any more.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum InvalidFrame {
    /// A hello of something else.
    #[error("this is no relay: its first frame does not begin with \"fl-relay\"")]
    Magic,
    /// A text is not UTF-8.
    #[error("the text in a frame of type {0:#04x} is not UTF-8")]
    Text(u8),
    /// The body ends too early.
    #[error("a frame of type {0:#04x} is too short")]
    TooShort(u8),
    /// The body is longer than the receiver accepts.
    #[error("a frame of type {kind:#04x} has {length} bytes; the limit is {limit}")]
    TooLong {
        /// Type of the frame.
        kind: u8,
        /// Length of its body.
        length: usize,
        /// The longest body the receiver accepts.
        limit: usize,
    },
}

/// A frame cannot be written: one of its parts is longer than the protocol allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{what} has {length} bytes; a relay accepts {limit}")]
pub struct Oversized {
    /// Name of the part that is too long.
    pub what: &'static str,
    /// Length of the part in bytes.
    pub length: usize,
    /// Limit of the length in bytes.
    pub limit: usize,
}
