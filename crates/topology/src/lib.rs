//! WireGuard peers of this node, the prefixes of each, and the plain routes to the other nodes.
//!
//! Sources (custom resources, later annotations, discovery, static files) give [`MemberRecord`]s; [`merge`] makes one
//! [`Member`] of all records of an identity; [`plan`] decides. The data plane makes WireGuard peers, nftables sets and
//! routes of the [`Plan`]. Endpoints are not decided here: that is `fairlead-path`, peer by peer.
//!
//! The one promise: **no member can take what belongs to another, and a bad one harms only itself.** What the
//! controller grants (blocks), or copies from Nodes where only the cluster may set it (networks of pods), beats what a node says of itself (claims). Of claims to one address that counts first which an
//! administrator granted, then that of the node whose Node object has the address, which no other node may claim without a grant; then the
//! one keeps it that has it in this node's WireGuard device now, else the one that joined first. A public key that is published twice
//! stays one peer, with the prefixes of both: only the holder of the private key can read what is sent to it, so a copy
//! takes nothing from it. Whatever belongs to another member and has no usable peer is still a target, so that it is
//! dropped and never sent in clear text.
//!
//! External members (Peers of Kilo) take nothing from a node: their prefixes never include what is reserved (the API server), a block
//! and an older address go before them, and a key that a node has is the node's.
//!
//! An external member may name entry nodes: then one of them has the tunnel that counts, and all other nodes give the member's
//! prefixes to that node's peer.
//!
//! Pure: no I/O, no clock, no randomness. Not here: kernel routes, nftables, WireGuard.
//!
//! Locations come last in [`plan`]: with gateways, a peer has the prefixes of the members behind it, and for the
//! prefixes of some peers there are plain routes to the members themselves. Conflict check and targets do not know of
//! them.

mod claims;
mod conflicts;
mod control_plane;
mod entry;
mod external;
mod gateways;
mod locations;
mod member;
mod merge;
mod peer;
mod plan;
mod planner;
mod pod_networks;
mod policy;
mod prefixes;
mod problem;
mod rotation;
mod routes;
mod site;
mod site_networks;
mod transition;

pub use control_plane::control_plane;
pub use entry::EntryRole;
pub use gateways::{gateways, location};
pub use locations::{TunnelRoute, Tunnels};
pub use member::{
    ByDiscovery, Endpoints, External, Keepalive, Member, MemberAddresses, MemberRecord, Since, Source,
    Sources,
};
pub use merge::merge;
pub use peer::PeerPlan;
pub use plan::{Plan, plan};
pub use planner::{Change, Planner, changes};
pub use policy::{Policy, Reserved, SourceNodes};
pub use prefixes::Unusable;
pub use problem::{Problem, Refusal};
pub use rotation::NextKey;
pub use routes::BlockRoute;
pub use site::{Down, Encapsulation, Granularity, InternalAddress, OwnAddress, Site};
pub use transition::{United, added, united};
