//! Asks a default gateway to lead a UDP port to this host: PCP (RFC 6887), NAT-PMP (RFC 6886) and UPnP IGD, all tried at once.
//!
//! For nodes behind home routers: with a mapping they are reached by peers that hole punching does not help. [`codec`] has the messages;
//! around it are sockets, time, and which answers are believed. A [`PortMapper`] keeps one mapping; what it finds goes to its caller.
//! For which port, and what becomes of the address is decided elsewhere.
//!
//! [`task`] chooses the gateways and keeps a mapping at each. [`ec2`] asks the metadata service of that cloud, where no gateway is asked, for the public address of this host.
//!
//! All packets to a gateway leave by the gateway's link and carry the mark of the [`Request`]. Only the gateway itself is believed, and
//! what it says is bounded in time and in bytes. A gateway that answers nothing costs a few packets per attempt.

pub mod codec;
pub mod ec2;
mod mapper;
mod request;
mod socket;
pub mod task;
mod udp;
mod upnp;

pub use codec::pcp::Nonce;
pub use mapper::PortMapper;
pub use request::{Failure, Mapping, Protocol, Request};
