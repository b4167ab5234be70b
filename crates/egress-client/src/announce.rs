//! Announces the source addresses that gateways on this node hold.
//!
//! * [`facts`]: objects of the API server: which addresses an Egress may have, which gateways hold them, and where these run. Pure.
//! * [`pace`]: how often an Egress may change who holds its addresses. Pure.
//! * [`plan`]: which addresses are announced, and why others are not. Pure.
//! * [`schedule`]: when hosts beside this node are told. Pure.
//! * [`run`]: hears holds from the gateways on this node ([`super::registrar`]), and brings routes and entries to the kernel
//!   ([`fairlead_dataplane::source_addresses`]).
//!
//! [`SourceAddresses`] is what other subsystems see of it: the mesh claims what is announced, the network of the pods does not masquerade
//! it, and mesh and router learn which nodes may have such an address.

mod facts;
mod gateway;
pub(crate) mod metrics;
mod pace;
mod plan;
mod run;
mod schedule;
mod source_addresses;
#[cfg(test)]
mod tests;

use fairlead_cluster::subsystem::Subsystem;

pub(crate) use self::run::AnnounceDeps;
pub use self::source_addresses::{Report, Shown, SourceAddresses};

/// Starts to announce.
pub(crate) fn start(deps: AnnounceDeps, subsystem: &mut Subsystem) {
    subsystem.spawn("source addresses", run::run(deps));
}
