//! One peer: its machines, and what events have said of it.

use std::collections::VecDeque;
use std::net::SocketAddr;
use std::time::Duration;

use fairlead_keys::PublicKey;
use fairlead_wire::probe::Epoch;

use super::Event;
use crate::prober::Prober;
use crate::rotation::{Rotation, State};

#[derive(Debug)]
pub(super) struct Peer {
    pub(super) rotation: Rotation,
    pub(super) prober: Prober,
    /// Second address for packets, as the last [`Event::SendBothWays`] said.
    pub(super) also: Option<SocketAddr>,
    /// MTU of routes to the peer, as the last [`Event::RouteMtuChanged`] said.
    pub(super) route_mtu: Option<u32>,
    /// Whether keepalives have to come more often, as the last [`Event::KeepaliveChanged`] said.
    pub(super) needs_keepalives: bool,
    /// The request that last named candidates of the peer: its epoch and counter.
    pub(super) named: Option<(Epoch, u64)>,
    /// Time at which the prober is to run next.
    pub(super) probe_due: Option<Duration>,
    /// The state of the last [`Event::StateChanged`].
    pub(super) state: State,
    /// Time at which an endpoint was last set, or the peer added.
    pub(super) changed: Duration,
    /// Time at which this machine is to run next.
    pub(super) due: Option<Duration>,
    /// An [`Event::ObservationDue`] waits in the queue.
    pub(super) observation_queued: bool,
}

impl Peer {
    /// A peer of which nothing was said, and with which nothing is due.
    pub(super) fn new(now: Duration, rotation: Rotation, prober: Prober) -> Self {
        Self {
            rotation,
            prober,
            also: None,
            route_mtu: None,
            needs_keepalives: false,
            named: None,
            probe_due: None,
            state: State::Connecting,
            changed: now,
            due: None,
            observation_queued: false,
        }
    }

    /// Reports the state of the path, if it is another one.
    pub(super) fn report_state(&mut self, now: Duration, key: &PublicKey, events: &mut VecDeque<Event>) {
        let (state, reason) = self.rotation.state(now);
        let from = std::mem::replace(&mut self.state, state);
        if from != state {
            events.push_back(Event::StateChanged { peer: *key, from, to: state, reason });
        }
    }
}
