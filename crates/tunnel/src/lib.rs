//! WireGuard inside this process, for nodes whose kernel has none.
//!
//! A device is a TUN interface, two UDP sockets and the WireGuard protocol between them. It is configured with the same types
//! ([`fairlead_keys`]) as the kernel's device, and shown by the same tool: `wg show NAME` reads it through a UNIX socket. The protocol
//! itself (handshakes, sessions, replay windows, cookies) is [`fairlead_wireguard`].
//!
//! A device gives the interface no addresses and no routes, does not set it up or down, and chooses no endpoints beyond WireGuard's own
//! [`roaming`]. That is the work of its caller.
//!
//! Configuration arrives by [`Device::change`]. IP packets are read from the TUN, encrypted and sent by UDP; datagrams are decrypted,
//! checked against the sender's allowed addresses and written to the TUN. Datagrams that are no WireGuard messages go to the [`PathSocket`]
//! instead. `engine` decides all of this without doing I/O; `pump` is the one loop that moves bytes, on one thread in the network namespace
//! of the thread that called [`Device::start`]. What the kernel has joined stays together from the read to the write: `offload` cuts the
//! packets of a read into segments and joins those of a write, `outbox` has the datagrams that one system call sends, and `received` those
//! that one has received. On machines with several processors `workers` encrypts and decrypts beside the loop.
//!
//! The interface outlives the process: a device that starts with the same name adopts it with its addresses and routes.
//! Only [`Device::delete`] removes it. With [`Device::hand_over`] another process takes the device over without losing a
//! packet.

mod allowed;
mod clock;
mod device;
mod echo;
mod ecn;
mod engine;
mod error;
mod extra_sockets;
mod handover;
mod icmp_errors;
mod inner;
mod offload;
mod outbox;
mod path_socket;
mod peer;
mod pump;
mod raw_port;
mod received;
mod reserved_ports;
pub mod roaming;
mod settings;
mod tun;
mod uapi;
mod udp;
mod udp_port;
mod unix;
mod workers;

pub use device::{Device, PendingHandover};
pub use echo::{EchoSockets, checksum};
pub use error::Error;
pub use icmp_errors::IcmpErrors;
pub use path_socket::{PathDatagram, PathSocket, PathSocketStats};
pub use raw_port::{RawPort, Word};
pub use reserved_ports::ReservedPorts;
pub use settings::Settings;
pub use udp_port::UdpPort;

/// Parses the text of one request to the control socket, without its empty last line, and shows it. For fuzz targets and
/// recorded requests; the control socket's server parses requests of clients in the same way.
///
/// # Errors
/// The part that is invalid.
pub fn parse_control_request(text: &str) -> Result<String, String> {
    uapi::parse(text)
}

/// Parses a message of a hand-over between two processes, and shows it; `None` if it is invalid. For fuzz targets and
/// recorded messages; both processes parse the messages of the other one in the same way.
pub fn parse_handover_message(bytes: &[u8]) -> Option<String> {
    handover::parse(bytes)
}

/// Cuts what one read of a TUN gave, a `struct virtio_net_hdr` and a packet, into the packets that are to be encrypted; `None` if header
/// and packet do not fit together. Each packet is in a buffer that was made for the longest of them. For fuzz targets and recorded
/// reads; the packet loop cuts reads in the same way.
pub fn split_read(read: &[u8]) -> Option<Vec<Vec<u8>>> {
    offload::split_read(read)
}

/// Joins a batch of decrypted packets for a TUN, which takes UDP segments if `udp` (Linux 6.2). Each result is for one write: a
/// `struct virtio_net_hdr` and a packet. For fuzz targets and recorded packets; the packet loop joins packets in the same way.
pub fn join_packets(packets: &[Vec<u8>], udp: bool) -> Vec<Vec<u8>> {
    offload::join_packets(packets, udp)
}
