//! Announces the source addresses that gateways on this node hold.
//!
//! * [`fairlead_source_addresses::announcements`] decides which addresses are announced, and why others are not.
//! * [`facts`]: objects of the API server: which addresses an Egress may have, which gateways hold them, and where these run. Pure.
//! * [`schedule`]: when hosts beside this node are told. Pure.
//! * [`run`]: hears holds from the gateways on this node ([`super::registrar`]), and brings routes and entries to the kernel
//!   ([`fairlead_dataplane::source_addresses`]).
//!
//! [`SourceAddresses`] is what other subsystems see of it: the mesh claims what is announced, the network of the pods does not masquerade
//! it, and mesh and router learn which nodes may have such an address.

mod facts;
pub(crate) mod metrics;
mod outputs;
mod run;
mod schedule;
#[cfg(test)]
mod tests;

use fairlead_cluster::subsystem::Subsystem;

pub use self::outputs::{Report, Shown, SourceAddresses};
pub(crate) use self::run::AnnounceDeps;

/// Starts to announce.
pub(crate) fn start(deps: AnnounceDeps, subsystem: &mut Subsystem) {
    subsystem.spawn("source addresses", run::run(deps));
}
