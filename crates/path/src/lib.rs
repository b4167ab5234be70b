//! Choice of the endpoint that WireGuard uses for each peer.
//!
//! * [`PathAgent`]: one per node, with a state machine per peer. The interface of this crate for a shell.
//! * [`candidates`]: the endpoints at which a peer may be reached, best first.
//! * [`nat`]: the kind of NAT in front of this node, from where peers see it.
//! * `rotation`: the strategy for peers that do not answer probes. It tries candidates in order, starts with the one of
//!   the last live session, and leaves live sessions alone.
//! * `prober`: the strategy for peers that answer probes: what works now, and which of it to use; `probing` has what all probers
//!   of a node share (keys, replays, limits). Format and rules: `docs/path-protocol.md`.
//! * `reflexive`: where peers see this node, as their answers to probes say.
//! * `filtering`: asks the relay the same, and tests how the NAT filters.
//! * `binding`: binds UDP ports of the relay, through which a peer is reached that has no direct path.
//! * `birthday`: finds the mapping of a symmetric NAT by trying many of its ports.
//! * [`history`]: how the path to each peer changed, for operators.
//! * `stun`: asks STUN servers where they see the WireGuard port, which feeds [`nat`] and [`candidates`].
//!
//! Sans-I/O: time is a [`std::time::Duration`] since an epoch of the caller's that never goes back (the start of the
//! process will do), the device's state and datagrams come in as arguments, decisions go out as events. Randomness
//! comes from a seed. Nothing here opens a socket or sleeps. A relay is an endpoint like the others ([`RelayPath`]): what is sent
//! there reaches the peer, or does not.

mod agent;
mod binding;
mod birthday;
pub mod candidates;
mod datagram;
mod filtering;
pub mod history;
pub mod nat;
mod prober;
mod probing;
mod reflexive;
mod relay_path;
mod rotation;
mod stun;
mod timers;

pub use agent::{Event, OwnSide, PathAgent, PeerPaths, SocketChange};
pub use binding::RelayPort;
pub use birthday::{
    BirthdayOutcome, BirthdayPolicy, BirthdaySide, BirthdayStatus, SOCKETS as BIRTHDAY_SOCKETS, birthday_side,
};
pub use candidates::{Candidate, MAX_CANDIDATES, OwnView, PeerView, Source, order};
pub use datagram::Transmit;
pub use fairlead_address::{Nat64, is_private};
pub use filtering::{Filtering, RelayStun};
pub use nat::{NatType, Seen, classify};
pub use prober::{CandidateStatus, PingOutcome};
pub use probing::{Identity, ProbeCounts, ProbeDrops};
pub use relay_path::{RelayPath, RelayPortRange};
pub use rotation::{Config, EndpointReason, Observation, Reason, State, Status};
pub use stun::{MAX_SERVERS as MAX_STUN_SERVERS, StunAnswer};
