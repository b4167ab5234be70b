//! Source addresses of the Egress that this gateway may hold. `fairlead-source-addresses` decides; here are the tasks with their I/O.
//!
//! * `holds`: source addresses that this gateway holds, agreed with the others of the Egress.
//! * [`peers`]: the other gateways of the Egress, and connections to them.
//! * [`sync`]: copies of tracked connections among them.

pub(crate) mod holds;
pub mod peers;
pub mod sync;
