//! WireGuard inside this process, for nodes whose kernel has none.
//!
//! What it is: a TUN interface, two UDP sockets and the WireGuard protocol between them, configured with the same
//! words ([`fairlead_api::wireguard`]) as the kernel's device, and shown by the same tool: `wg show NAME` reads it
//! through a UNIX socket. The protocol itself (handshakes, sessions, replay windows, cookies) is `gotatun`'s `noise`.
//!
//! What it is not: it gives the interface no addresses and no routes, does not set it up or down, and decides
//! nothing about endpoints beyond WireGuard's own roaming. That is the work of whoever configures it.
//!
//! Where data comes from and goes: configuration arrives by [`Device::change`]; IP packets are read from the TUN,
//! encrypted and sent by UDP; datagrams are decrypted, checked against the sender's allowed addresses and written
//! to the TUN. `engine` decides all of this without doing I/O; `pump` is the one loop that moves bytes, on one
//! thread in the network namespace of the thread that called [`Device::start`].
//!
//! The interface outlives the process: a successor that starts with the same name adopts it with its addresses
//! and routes. Only [`Device::delete`] removes it. One that starts while the old process retires ([`Device::retire`])
//! takes over without losing a packet.

mod allowed;
mod device;
mod engine;
mod error;
mod handover;
mod inner;
mod peer;
mod pump;
mod settings;
mod tun;
mod uapi;
mod udp;
mod unix;

pub use device::{Device, Retiring};
pub use error::Error;
pub use settings::Settings;

/// Understands the text of one request to the control socket, without its empty last line, and shows what it asks for.
/// For fuzz targets and recorded requests; the socket's own server does the same with what clients send.
///
/// # Errors
/// What is not understood.
pub fn understand_control_request(text: &str) -> Result<String, String> {
    uapi::understand(text)
}

/// Understands a message of a hand-over between two processes, and shows what it says; `None` if it is none. For fuzz targets
/// and recorded messages; both processes do the same with what the other one sends.
pub fn understand_handover_message(bytes: &[u8]) -> Option<String> {
    handover::understand(bytes)
}

/// The public key of a private one (RFC 7748, section 6.1).
pub fn public_key(private: &fairlead_api::wireguard::PrivateKey) -> fairlead_api::wireguard::PublicKey {
    let secret = gotatun::x25519::StaticSecret::from(private.0);
    fairlead_api::wireguard::PublicKey(gotatun::x25519::PublicKey::from(&secret).to_bytes())
}
