//! Decisions on source addresses that float among the gateways of an Egress (`spec.sourceAddresses`).
//!
//! * [`leases`]: the addresses that the controller permits, in slots, and the Leases by which gateways hold them.
//! * [`members`]: the gateways of an Egress, in annotations of a Lease.
//! * [`hold`]: which gateway holds a slot: a state machine, with its messages between gateways.
//! * [`copies`]: copies of tracked connections, by which these go on at the gateway that takes a slot.
//! * [`announcements`]: addresses that the node of a gateway announces.
//!
//! Everything is pure: time is an argument, and connections are values of [`fairlead_netlink::conntrack`]. The tasks, with their I/O, are
//! the modules `source_addresses` of other crates: `fairlead-controller` makes Leases and reads who holds them, `fairlead-egress-gateway` holds
//! addresses and copies connections, `fairlead-egress-client` announces what gateways of its node hold, `fairlead-dataplane` has routes and
//! neighbour entries.

pub mod announcements;
pub mod copies;
pub mod hold;
pub mod leases;
pub mod members;
