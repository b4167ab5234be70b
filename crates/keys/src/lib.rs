//! WireGuard's keys, and its devices and peers as configured and as observed.
//!
//! * [`PublicKey`], [`PrivateKey`], [`PresharedKey`]: keys as `wg(8)` reads and writes them. Secret ones are never shown by `Debug`.
//! * [`DeviceConfig`], [`DeviceState`], [`DeviceChange`]: what a device should be, what it is, and the difference.
//!
//! A leaf: it uses no other crate of Fairlead, draws no keys and does no I/O. `fairlead-netlink` applies a change to the kernel's device,
//! `fairlead-tunnel` to the embedded one.

mod device;
mod key;

pub use device::{DeviceChange, DeviceConfig, DeviceState, KEEPALIVE, PeerConfig, PeerState};
pub use key::{InvalidKey, PresharedKey, PrivateKey, PublicKey};
