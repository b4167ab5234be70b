//! The WireGuard protocol without I/O: messages, handshakes, cookies, sessions and timers of the embedded WireGuard device.
//!
//! It follows the WireGuard paper (<https://www.wireguard.com/papers/wireguard.pdf>) and, where the paper leaves a choice,
//! `drivers/net/wireguard` of the Linux kernel. Bytes, time and randomness come from the caller and go back to it: the crate owns
//! no socket, no task and no clock. It is not the device either: endpoints and their roaming, allowed addresses, packets that wait
//! for a session and persistent keepalives are the caller's.
//!
//! A datagram goes through [`kind_of`] and, if it is a handshake message, [`HandshakeLimiter::check`]. An initiation goes to
//! [`read_initiation`], which says whose it is; every other message belongs to the peer with its [`receiver_index`].
//!
//! Keys are erased when their last holder is dropped, except for copies inside of the Noise library, which does not erase its
//! memory.

mod error;
mod handshake;
mod identity;
mod keys;
mod limiter;
mod mac;
mod message;
mod now;
mod random;
mod session;
mod timers;
mod tunnel;

pub use error::Error;
pub use handshake::{Initiator, ReceivedInitiation, SessionKeys, Tai64n, initiate, read_initiation};
pub use identity::Identity;
pub use keys::{Decrypted, ReceiveKey, SendKey};
pub use limiter::{HandshakeLimiter, Verdict};
pub use mac::MacSender;
pub use message::{
    COOKIE_REPLY_LENGTH, CookieReply, DATA_HEADER_LENGTH, INITIATION_LENGTH, Initiation, Kind,
    RESPONSE_LENGTH, Response, TAG_LENGTH, kind_of, receiver_index,
};
pub use now::Now;
pub use random::{Random, SystemRandom};
pub use timers::Due;
pub use tunnel::{Sealer, Tunnel};
