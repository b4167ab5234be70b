//! Egress gateways on real nodes: two nodes on one network, where the gateways run, and one behind a NAT router, joined by the mesh;
//! IPv4 and IPv6. The Egresses are those of the article on Coil's egress NAT: one for the Internet, one for 192.168.10.0/24.
//!
//! Outside of the cluster is a machine that tells each client which address it comes from. The Internet of the lab has routes to the
//! addresses of the gateways, as a BGP router would have, and counts packets with the address of any other pod: there must be none.

use crate::bed;

mod changes;
mod failures;
mod health;
mod host_network;
mod limits;
mod outside;
mod programs;
mod replies;
mod setup;
mod source_addresses;
mod use_of_gateways;

static BED: bed::Bed = bed::Bed::new(setup::build);
