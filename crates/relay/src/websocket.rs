//! WebSocket (RFC 6455) without I/O: as much as relays and their clients need. Binary messages carry a stream of bytes, whose
//! parts are not told apart; text is refused.

mod frames;
mod handshake;

pub use frames::{Decoder, Role, Signals, WebSocketError, close_frame, encode, pong_frame};
pub use handshake::{HandshakeError, Refusal, Upgrade, read_request, read_response, request};
