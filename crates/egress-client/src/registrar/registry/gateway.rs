//! A gateway as the registry knows it, and which of several are used.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use fairlead_api::fou::{Gateway as Target, MAX_GATEWAYS};
use fairlead_egress::endpoints::GatewayEndpoint;
use fairlead_source_addresses::announcements::holds::{Hold, Holder};
use fairlead_wire::egress::State;
use tokio::sync::Notify;

use super::super::Client;
use super::super::session::Session;

#[derive(Debug, Default)]
pub(in crate::registrar) struct Gateway {
    pub(super) instance: u64,
    pub(in crate::registrar) endpoint: GatewayEndpoint,
    pub(in crate::registrar) session: Session,
    pub(super) has_task: bool,
    pub(super) wake: Arc<Notify>,
}

impl Gateway {
    /// Notification that the gateway's task waits for.
    pub(in crate::registrar) fn wake(&self) -> Arc<Notify> {
        Arc::clone(&self.wake)
    }

    /// Whether it keeps its flows and takes no new ones.
    pub(in crate::registrar) fn is_draining(&self) -> bool {
        self.endpoint.is_draining() || self.session.state() == State::Draining
    }

    /// Whether it says of itself that it forwards.
    pub(in crate::registrar) fn is_healthy(&self) -> bool {
        self.session.state() != State::Unhealthy
    }

    pub(super) fn show(&mut self, endpoint: GatewayEndpoint) -> bool {
        if self.endpoint == endpoint {
            return false;
        }
        if endpoint.answers() && !self.endpoint.answers() || endpoint.ready && !self.endpoint.ready {
            self.session.retry_now();
        }
        self.endpoint = endpoint;
        self.wake.notify_one();
        true
    }

    /// Whether its answer about the client is awaited. A connection that failed is none: the gateway may have flows of the client, its kernel
    /// forwards, and it is asked again.
    pub(super) fn is_asked(&self, client: &Client) -> bool {
        self.endpoint.answers() && !self.session.confirmed(client) && self.session.refusal(client).is_none()
    }

    pub(super) fn target(&self, address: IpAddr) -> Target {
        Target { address, is_draining: self.is_draining() }
    }
}

impl Holder for Gateway {
    fn holds(&self) -> &BTreeMap<IpAddr, Hold> {
        self.session.holds()
    }

    fn has_answered(&self) -> bool {
        self.session.has_registered()
    }

    fn is_standby(&self) -> bool {
        self.session.state() == State::Standby
    }
}

/// Whether a gateway works.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Condition {
    Works,
    /// It keeps its flows for a while.
    Doubtful,
    Lost,
}

/// Gateways to use, at most [`MAX_GATEWAYS`]: those that work, and doubtful ones for the flows that they have. If none that takes new flows
/// works, it may be this node that does not hear them: all stay.
pub(super) fn usable(gateways: Vec<(Target, Condition)>) -> Vec<Target> {
    let takes_flows =
        |(target, condition): &(Target, Condition)| *condition == Condition::Works && !target.is_draining;
    let any = gateways.iter().any(takes_flows);
    let keep = |(target, condition): (Target, Condition)| match condition {
        Condition::Doubtful if any => Some(Target { is_draining: true, ..target }),
        Condition::Lost if any => None,
        _ => Some(target),
    };
    let mut kept: Vec<Target> = gateways.into_iter().filter_map(keep).collect();
    kept.sort_by_key(|target| (target.is_draining, target.address));
    kept.truncate(MAX_GATEWAYS);
    kept
}
