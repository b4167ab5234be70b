//! The control socket of userspace WireGuard devices, as `wg(8)` speaks it.
//!
//! <https://www.wireguard.com/xplatform/#configuration-protocol>

mod request;
mod response;
mod server;

pub(crate) use server::Server;
