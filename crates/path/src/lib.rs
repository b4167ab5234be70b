//! Which endpoint WireGuard should use for a peer now.
//!
//! First version, driven by handshakes alone, as it must always be for peers that speak nothing but WireGuard:
//!
//! * [`candidates`]: where a peer may be reached, best first.
//! * [`nat`]: what kind of NAT this node is behind, from where others see it.
//! * [`rotation`]: per peer, a state machine that tries candidates in turn, remembers what worked, leaves live sessions
//!   alone and can say why a peer is not up.
//!
//! Sans-I/O: time is a [`std::time::Duration`] since any epoch of the caller's that never goes back (a process start
//! will do), the device's state comes in as observations, decisions go out as return values. Nothing here opens a
//! socket, sleeps or draws random numbers.
//!
//! To come, beside these modules: STUN and mapping prediction feed [`nat`] and [`candidates`]; authenticated probes get
//! a module of their own whose proven paths enter [`rotation`] as candidates above all but manual ones; the relay
//! becomes one more [`candidates::Source`], used while nothing else is proven. None of them changes what a caller
//! does: observe, poll, apply, sleep until the next wake-up.

mod addresses;
pub mod candidates;
pub mod nat;
pub mod rotation;

pub use addresses::is_private;
pub use candidates::{Candidate, MAX_CANDIDATES, OwnView, PeerView, Source, order};
pub use nat::{NatType, Seen, classify};
pub use rotation::{Config, Observation, Rotation, State, Status, Worked};
