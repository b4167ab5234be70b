//! Copies of tracked connections among the gateways: the tasks and the kernel's part of [`fairlead_source_addresses::copies`].
//!
//! [`worker`] is the task: it reads notifications of the kernel, sends messages every [`INTERVAL`](worker::INTERVAL), and makes the changes
//! that messages of others ask for.

mod kernel;
mod metrics;
pub(crate) mod start;
pub mod worker;

pub use metrics::SyncMetrics;
pub use worker::Copier;
