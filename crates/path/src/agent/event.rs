//! Events of the agent: actions that it asks for, and reports.

use std::net::SocketAddr;
use std::time::Duration;

use fairlead_keys::PublicKey;

use crate::candidates::Source;
use crate::rotation::{EndpointReason, Reason, State};

/// Something for the shell to do or to report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// Start a handshake with a peer, although the device may have a session: the peer has none, and says that its own
    /// handshakes are not answered.
    HandshakeDue {
        /// The peer.
        peer: PublicKey,
    },
    /// [`super::PathAgent::keepalive`] has something new.
    KeepaliveChanged {
        /// The peer.
        peer: PublicKey,
        /// The longest time between keepalives that keeps the path open; `None` for the usual one.
        interval: Option<Duration>,
    },
    /// Call [`super::PathAgent::observe`] with the device's state of this peer. The event is repeated until that happens.
    ObservationDue {
        /// The peer.
        peer: PublicKey,
    },
    /// Ask the relay for a UDP port to a peer, to be answered by [`super::PathAgent::relay_port_allocated`].
    RelayPortDue {
        /// The peer.
        peer: PublicKey,
    },
    /// [`super::PathAgent::route_mtu`] has something new: the path in use loses longer packets than these, and no other path passes them; or the
    /// tunnel's MTU holds again.
    RouteMtuChanged {
        /// The peer.
        peer: PublicKey,
        /// In bytes; `None` for the tunnel's.
        mtu: Option<u32>,
    },
    /// Send the packets to a peer over the relay as well: the path in use is in doubt, and the peer takes what arrives first.
    SendBothWays {
        /// The peer.
        peer: PublicKey,
        /// Address that stands for the peer by way of the relay; `None` to stop.
        also: Option<SocketAddr>,
    },
    /// Set this endpoint on the device, with a forced handshake if the device can do that.
    SetEndpoint {
        /// The peer.
        peer: PublicKey,
        /// New endpoint of the peer.
        endpoint: SocketAddr,
        /// Source of the endpoint.
        source: Source,
        /// Reason why it is set.
        reason: EndpointReason,
    },
    /// The path to this peer has another state.
    StateChanged {
        /// The peer.
        peer: PublicKey,
        /// The state before.
        from: State,
        /// The state now.
        to: State,
        /// Reason for the new state.
        reason: Reason,
    },
    /// Open, keep or close sockets beside the WireGuard port.
    Sockets(SocketChange),
    /// [`super::PathAgent::stun_answers`] has something new.
    StunAnswersChanged,
    /// [`super::PathAgent::reflexive_addresses`] has something new.
    ReflexiveAddressesChanged,
}

impl Event {
    /// The peer this is about; `None` for the node itself.
    pub fn peer(&self) -> Option<&PublicKey> {
        match self {
            Self::HandshakeDue { peer }
            | Self::KeepaliveChanged { peer, .. }
            | Self::ObservationDue { peer }
            | Self::RelayPortDue { peer }
            | Self::RouteMtuChanged { peer, .. }
            | Self::SendBothWays { peer, .. }
            | Self::SetEndpoint { peer, .. }
            | Self::StateChanged { peer, .. } => Some(peer),
            Self::ReflexiveAddressesChanged | Self::Sockets(_) | Self::StunAnswersChanged => None,
        }
    }
}

/// Change of the sockets beside the WireGuard port that a birthday attempt asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SocketChange {
    /// Close those of the attempt, but not what is kept.
    Close,
    /// Keep one of the attempt: whatever goes to this endpoint goes from it, and what comes in by it from there is received as if
    /// by the WireGuard port.
    Keep {
        /// The peer.
        peer: PublicKey,
        /// The endpoint.
        remote: SocketAddr,
        /// The number of the socket.
        socket: u16,
    },
    /// Close what is kept for this endpoint.
    Leave {
        /// The endpoint.
        remote: SocketAddr,
    },
    /// Open sockets, numbered from zero, for [`Transmit::socket`](crate::Transmit::socket) and [`handle_socket_datagram`](super::PathAgent::handle_socket_datagram);
    /// [`sockets_refused`](super::PathAgent::sockets_refused) if that fails.
    Open {
        /// Number of sockets, at most [`crate::BIRTHDAY_SOCKETS`].
        count: u16,
    },
}
