//! Errors: messages that were refused, or that could not be made.

/// A message that was refused, or that could not be made. Nothing of it changes the state of a peer, unless a function says so.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    /// An authentication tag does not fit: the message is forged, damaged, or made for other keys.
    #[error("the authentication tag of the message is wrong")]
    Authentication,
    /// The session has sent `REJECT_AFTER_MESSAGES` (2^64 - 2^13 - 1) messages (WireGuard paper 6.1).
    #[error("the session has used up its counter")]
    CounterExhausted,
    /// The session is older than `REJECT_AFTER_TIME` (180 s, WireGuard paper 6.1).
    #[error("the session has expired")]
    Expired,
    /// A Diffie-Hellman result is all zeros: a public key of low order (RFC 7748, 6.1).
    #[error("a public key of the handshake is of low order")]
    LowOrderKey,
    /// The bytes do not have the form of the message that was expected (WireGuard paper 5.4).
    #[error("the bytes are no such WireGuard message")]
    Malformed,
    /// A cookie reply arrived, but no message was sent that it could answer (WireGuard paper 5.4.7).
    #[error("no message was sent that the cookie reply could answer")]
    NoCookieAwaited,
    /// The Noise library refused a step of the handshake for a reason that no message can cause: a defect of this crate.
    #[error("the Noise library refused a step of the handshake")]
    Noise,
    /// A time stamp is not newer than the greatest seen of this peer (WireGuard paper 5.1).
    #[error("the time stamp of the initiation is not newer than an earlier one")]
    OldTimestamp,
    /// A data message with this counter was received before, or the counter is older than the window (WireGuard paper 5.4.6).
    #[error("the data message was received before, or is too old to tell")]
    Replayed,
    /// An initiation follows another one of this peer too closely (`INITIATIONS_PER_SECOND` of the kernel's `messages.h`).
    #[error("the peer sends initiations too often")]
    TooFrequent,
    /// No handshake or session has the receiver index of the message.
    #[error("the receiver index belongs to no handshake or session")]
    UnknownIndex,
}
