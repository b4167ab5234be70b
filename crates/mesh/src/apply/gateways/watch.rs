//! Asks gateways and the nodes behind them, once each [`super::INTERVAL`].

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Instant;

use fairlead_dataplane::wireguard::Backend;
use fairlead_keys::PublicKey;
use fairlead_path::{PingOutcome, State};
use fairlead_topology::Down;
use fairlead_tunnel::EchoSockets;

use super::{GatewayHealth, PROBE_INTERVAL, Seen, Trials};
use crate::apply::paths::PathDriver;
use crate::apply::reconciler::Gateways;
use crate::model::problem::MeshProblem;
use crate::plan::desired::{Desired, DesiredGateway};

/// Health of gateways, and the sockets by which this node asks.
pub struct GatewayWatch {
    health: GatewayHealth,
    sockets: EchoSockets,
    /// Time of the last probes to gateways that are not in use.
    probed: Option<Instant>,
}

impl Default for GatewayWatch {
    fn default() -> Self {
        Self { health: GatewayHealth::default(), sockets: EchoSockets::new(rand::random()), probed: None }
    }
}

impl GatewayWatch {
    /// Gateways that are not to be used.
    pub fn down(&self) -> Down {
        self.health.down()
    }

    /// Problems: gateways that do not forward, and what this WireGuard cannot do with several gateways. `refusal` is the reason why the
    /// embedded one is not used.
    pub fn problems(
        &self,
        desired: &Desired,
        backend: Backend,
        refusal: Option<&str>,
    ) -> impl Iterator<Item = MeshProblem> + use<> {
        let known = self.health.known_down().into_iter();
        let down = known.map(|gateway| MeshProblem::GatewayDown { gateway });
        down.chain(needs_embedded(desired, backend, refusal))
    }

    /// Reads the answers and asks again. Returns whether other gateways are to be used now.
    pub fn observe(
        &mut self,
        desired: &Desired,
        paths: &PathDriver,
        backend: Option<Backend>,
        now: Instant,
    ) -> bool {
        let before = self.health.down();
        let asked: BTreeSet<IpAddr> =
            desired.gateways.used.values().flat_map(|it| &it.behind).copied().collect();
        let replies = self.sockets.exchange(&asked);
        let probes = self.probed.is_none_or(|at| now.saturating_duration_since(at) >= PROBE_INTERVAL);
        self.probed = if probes { Some(now) } else { self.probed };
        let see = |(key, gateway): (&PublicKey, &DesiredGateway)| {
            (gateway.name.clone(), self.see(key, gateway, paths, probes, now))
        };
        let seen: BTreeMap<String, Seen> = desired.gateways.used.iter().map(see).collect();
        let accepts_any = backend != Some(Backend::Kernel);
        let trials = if accepts_any { Trials::Lossless } else { Trials::Lossy };
        self.health.observe(now, &seen, &replies, trials);
        self.health.down() != before
    }

    fn see(
        &self,
        key: &PublicKey,
        gateway: &DesiredGateway,
        paths: &PathDriver,
        probes: bool,
        now: Instant,
    ) -> Seen {
        let has_session = paths.status(key, now).is_some_and(|(status, _)| status.state == State::Up);
        let has_answered = || {
            let candidates = paths.port().candidates(key, now);
            candidates.iter().any(|it| matches!(it.ping, Some(PingOutcome::Answered(_))))
        };
        // Where no probes can be sent, the session has to do.
        let answers = probes.then(|| {
            self.health.is_down(&gateway.name) && (has_answered() | !paths.port().ping(key) && has_session)
        });
        Seen { behind: gateway.behind.clone(), has_session, answers }
    }
}

/// The kernel's WireGuard binds a prefix to one peer, so what a second gateway of a location forwards is dropped. Gateways that are
/// not in use have a tunnel all the same, since other nodes may use them.
fn needs_embedded(desired: &Desired, backend: Backend, refusal: Option<&str>) -> Option<MeshProblem> {
    let needs = backend == Backend::Kernel && several(desired) == Gateways::Several;
    needs.then(|| {
        let gateways = desired.gateways.several.iter().cloned().collect();
        MeshProblem::GatewaysNeedEmbedded { gateways, refusal: refusal.map(str::to_owned) }
    })
}

/// Whether there are tunnels with several gateways of a location, or will be: the change to the embedded one is over before packets come that
/// need it.
pub fn several(desired: &Desired) -> Gateways {
    if desired.gateways.several.is_empty() { Gateways::Single } else { Gateways::Several }
}

#[cfg(test)]
mod tests {
    use fairlead_api::resources::Granularity;
    use fairlead_topology::{InternalAddress, Site};

    use super::*;
    use crate::plan::desired::tests::{host, inputs, member};
    use crate::plan::desired::{Held, OwnAddresses};

    /// The reasons at node 1, which is alone in its location, where others are in another one.
    fn reasons(others: u32, granularity: Granularity, backend: Backend) -> Vec<String> {
        let members = (1..=1 + others).map(|number| {
            let address = IpAddr::from([10, 0, 0, number as u8]);
            let internal = vec![InternalAddress { address, length: None }];
            let location = if number == 1 { "one" } else { "other" }.to_owned();
            fairlead_topology::Member {
                site: Some(Site { location, internal, ..Site::default() }),
                ..member(number)
            }
        });
        let mut inputs = inputs(members);
        inputs.settings.locations.granularity = granularity;
        let desired = Desired::new(&inputs, &host(), Held::default(), &OwnAddresses::default());
        let problems = GatewayWatch::default().problems(&desired, backend, None);
        problems.map(|problem| format!("{}: {problem}", problem.reason())).collect()
    }

    #[test]
    fn the_kernel_s_wireguard_with_several_gateways_of_a_location_is_a_problem() {
        let [problem] = &reasons(3, Granularity::Location, Backend::Kernel)[..] else { panic!() };
        assert!(problem.starts_with("GatewaysNeedEmbedded: ") && problem.contains("(node-000"), "{problem}");
        for (others, granularity, backend) in [
            (3, Granularity::Location, Backend::Embedded),
            (1, Granularity::Location, Backend::Kernel),
            (3, Granularity::Cross, Backend::Kernel),
            (3, Granularity::Full, Backend::Kernel),
        ] {
            assert_eq!(
                reasons(others, granularity, backend),
                Vec::<String>::new(),
                "{others} {granularity:?}"
            );
        }
    }
}
