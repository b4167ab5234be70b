//! Who is a WireGuard peer of this node, which prefixes go to which peer, and which plain routes lead to the others.
//!
//! Sources (custom resources, later annotations, discovery, static files) give [`MemberRecord`]s; [`merge`] makes one
//! [`Member`] of all records of an identity; [`plan`] decides. The data plane makes WireGuard peers, nftables sets and
//! routes of the [`Plan`]. Endpoints are not decided here: that is `fairlead-path`, peer by peer.
//!
//! The one promise: **no member can take what belongs to another, and a bad one harms only itself.** What the
//! controller grants (blocks) beats what a node says of itself (claims). Of two that claim one address, the one keeps it
//! that has it in this node's WireGuard device now, else the one that joined first. A public key that is published twice
//! stays one peer, with the prefixes of both: only the holder of the private key can read what is sent to it, so a copy
//! takes nothing from it. Whatever belongs to another member and has no usable peer is still a target, so that it is
//! dropped and never sent in clear text.
//!
//! External members (Peers of Kilo) take nothing from a node: their prefixes never include what is reserved (the API server), a block
//! and an older address go before them, and a key that a node has is the node's.
//!
//! Pure: no I/O, no clock, no randomness. Not here: kernel routes, nftables, WireGuard.
//!
//! Locations and gateways are to come between the two steps of [`plan`]: after the conflict check has said
//! which prefixes each member really owns, and before they are laid on peers, a stage can move the prefixes of
//! a location's members onto the peer that carries them. Neither the conflict check nor the targets need to
//! know.

mod conflicts;
mod external;
mod member;
mod merge;
mod plan;
mod prefixes;
mod problem;
mod routes;

pub use member::{Endpoints, External, Member, MemberRecord, Since, Source};
pub use merge::merge;
pub use plan::{PeerPlan, Plan, Policy, plan};
pub use prefixes::Unusable;
pub use problem::{Problem, Refusal};
pub use routes::{BlockRoute, OwnAddress};
