//! Numbers of errors and notices in frames, and the words for them.

use std::fmt;

/// Reason why a connection to a relay is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ErrorReason {
    /// The relay has no room for a further client.
    Full,
    /// No frame came for too long.
    IdleTimeout,
    /// Bytes that are not a frame.
    MalformedFrame,
    /// The key or the token is not allowed.
    NotAllowed,
    /// The key or the token was allowed and is not any more.
    Revoked,
    /// A newer registration of the same key has replaced this one.
    Superseded,
    /// A frame that does not belong here.
    UnexpectedFrame,
    /// No version that both understand.
    UnsupportedVersion,
    /// The registration names another relay.
    WrongName,
    /// The registration does not prove that the client has the private key.
    WrongProof,
    /// A number that this version does not know.
    Other(u8),
}

/// Notice of a relay to a client that it keeps serving.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Notice {
    /// Several programs register the client's key in turn.
    DuplicateKey,
    /// The client sends more than it may; what is beyond that is dropped.
    RateLimited,
    /// A number that this version does not know.
    Other(u8),
}

const ERRORS: [(ErrorReason, u8, &str); 10] = [
    (ErrorReason::MalformedFrame, 1, "malformed frame"),
    (ErrorReason::UnsupportedVersion, 2, "unsupported version"),
    (ErrorReason::WrongProof, 3, "wrong proof of the key"),
    (ErrorReason::NotAllowed, 4, "key or token not allowed"),
    (ErrorReason::WrongName, 5, "another relay's name"),
    (ErrorReason::Superseded, 6, "superseded by a newer registration of the key"),
    (ErrorReason::Revoked, 7, "key or token no longer allowed"),
    (ErrorReason::Full, 8, "relay is full"),
    (ErrorReason::IdleTimeout, 9, "idle for too long"),
    (ErrorReason::UnexpectedFrame, 10, "unexpected frame"),
];

const NOTICES: [(Notice, u8, &str); 2] =
    [(Notice::DuplicateKey, 1, "duplicate key"), (Notice::RateLimited, 2, "rate limited")];

impl From<u8> for ErrorReason {
    fn from(code: u8) -> Self {
        ERRORS.iter().find(|(_, number, _)| *number == code).map_or(Self::Other(code), |(reason, ..)| *reason)
    }
}

impl From<ErrorReason> for u8 {
    fn from(reason: ErrorReason) -> Self {
        match reason {
            ErrorReason::Other(code) => code,
            known => ERRORS.iter().find(|(reason, ..)| *reason == known).map_or(0, |(_, code, _)| *code),
        }
    }
}

impl fmt::Display for ErrorReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match ERRORS.iter().find(|(reason, ..)| reason == self) {
            Some((_, _, words)) => f.write_str(words),
            None => write!(f, "error {}", u8::from(*self)),
        }
    }
}

impl From<u8> for Notice {
    fn from(code: u8) -> Self {
        NOTICES
            .iter()
            .find(|(_, number, _)| *number == code)
            .map_or(Self::Other(code), |(notice, ..)| *notice)
    }
}

impl From<Notice> for u8 {
    fn from(notice: Notice) -> Self {
        match notice {
            Notice::Other(code) => code,
            known => NOTICES.iter().find(|(notice, ..)| *notice == known).map_or(0, |(_, code, _)| *code),
        }
    }
}

impl fmt::Display for Notice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match NOTICES.iter().find(|(notice, ..)| notice == self) {
            Some((_, _, words)) => f.write_str(words),
            None => write!(f, "notice {}", u8::from(*self)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_number_is_read_as_it_was_written() {
        for code in 0..=u8::MAX {
            assert_eq!(u8::from(ErrorReason::from(code)), code);
            assert_eq!(u8::from(Notice::from(code)), code);
        }
        assert_eq!(ErrorReason::from(99).to_string(), "error 99");
        assert_eq!(Notice::from(99).to_string(), "notice 99");
    }
}
