//! Decides what the kernel is to have, and what follows from what it has. Pure.

pub mod desired;
pub mod down_peers;
pub mod entries;
pub mod external;
pub(crate) mod granted;
pub(crate) mod granularity;
pub(crate) mod key_changes;
pub mod relay_reason;
