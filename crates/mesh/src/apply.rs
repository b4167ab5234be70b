//! Brings the kernel, the WireGuard device and the paths to where the plan wants them.

pub mod encapsulation;
pub mod gateways;
pub mod kernel;
pub mod path_port;
pub(crate) mod paths;
pub mod reconciler;
pub mod relay;
pub mod report;
