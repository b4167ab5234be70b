//! Asks gateways and the nodes behind them, once each [`super::INTERVAL`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Instant;

use fairlead_api::wireguard::PublicKey;
use fairlead_path::{PingOutcome, State};
use fairlead_topology::Down;

use super::{EchoSockets, GatewayHealth, Seen};
use crate::mesh::desired::{Desired, DesiredGateway};
use crate::mesh::paths::PathDriver;
use crate::mesh::problem::MeshProblem;

/// What this node knows of gateways, and how it asks.
pub struct GatewayWatch {
    health: GatewayHealth,
    sockets: EchoSockets,
}

impl Default for GatewayWatch {
    fn default() -> Self {
        Self { health: GatewayHealth::default(), sockets: EchoSockets::new(rand::random()) }
    }
}

impl GatewayWatch {
    /// Gateways that are not to be used.
    pub fn down(&self) -> Down {
        self.health.down()
    }

    /// One for each of them.
    pub fn problems(&self) -> impl Iterator<Item = MeshProblem> + use<> {
        self.down().into_iter().map(|gateway| MeshProblem::GatewayDown { gateway })
    }

    /// Reads the answers and asks again. Returns whether other gateways are to be used now.
    pub fn observe(&mut self, desired: &Desired, paths: &PathDriver, now: Instant) -> bool {
        let before = self.health.down();
        let asked: BTreeSet<IpAddr> = desired.gateways.values().flat_map(|it| &it.behind).copied().collect();
        let replies = self.sockets.exchange(&asked);
        let seen = desired.gateways.iter();
        let seen: BTreeMap<String, Seen> =
            seen.map(|(key, gateway)| (gateway.name.clone(), self.see(key, gateway, paths, now))).collect();
        self.health.observe(now, &seen, &replies);
        self.health.down() != before
    }

    fn see(&self, key: &PublicKey, gateway: &DesiredGateway, paths: &PathDriver, now: Instant) -> Seen {
        let has_session = paths.status(key, now).is_some_and(|(status, _)| status.state == State::Up);
        let has_answered = || {
            let candidates = paths.port().candidates(key, now);
            candidates.iter().any(|it| matches!(it.ping, Some(PingOutcome::Answered(_))))
        };
        // Where no probes can be sent, the session has to do.
        let answers =
            self.health.is_down(&gateway.name) && (has_answered() | !paths.port().ping(key) && has_session);
        Seen { behind: gateway.behind.clone(), has_session, answers }
    }
}
