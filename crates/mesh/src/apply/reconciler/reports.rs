//! Reports of the mesh about its own state.

use std::collections::BTreeSet;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use fairlead_dataplane::mesh::GuardProblem;
use fairlead_dataplane::wireguard::WireGuardDevice;
use fairlead_keys::PublicKey;
use fairlead_path::State;
use fairlead_topology::{Member, Sources};
use ipnet::IpNet;

use super::device::OpenDevice;
use super::{Mesh, Planned};
use crate::apply::gateways;
use crate::apply::kernel::Kernel;
use crate::apply::relay::RelayReport;
use crate::apply::report::{
    ConfiguredReport, DeviceReport, OwnReport, PeerReport, Report, TranslationReport,
};
use crate::model::problem::MeshProblem;
use crate::plan::desired::{Desired, DesiredPeer};
use crate::plan::external::ExternalReport;
use crate::plan::relay_reason::{RelayReason, Situation};

/// Peers of which the device is asked why this host cannot send to them, in each report. Each is a question to its packet loop.
const MAX_SEND_ERRORS: usize = 32;

impl<K: Kernel> Mesh<K> {
    pub(super) fn report(&self, now: Instant) -> Option<Report> {
        let planned = self.planning.last.as_deref()?;
        let open = self.device.device.as_ref()?;
        let Planned { inputs, host, own_addresses, desired, .. } = planned;
        let relay = inputs.settings.relay.as_ref().map(|relay| self.paths.relay().report(relay));
        let peers = self.report_peers(planned, &*open.device, now);
        let guarded = self.kernel.guarded();
        let problems = self.problems(planned, open, (&peers, relay.as_ref(), guarded.problem), now);
        Some(Report {
            device: DeviceReport {
                backend: open.device.backend(),
                backend_reason: self.device.reason(gateways::several(desired)),
                port_access: open.port_access,
                interface: open.device.interface().to_owned(),
                mtu: open.mtu,
                uplink_mtu: host.uplink_mtu(),
                port: host.port,
            },
            endpoints: desired.endpoints.clone(),
            translation: TranslationReport {
                nat: self.nat,
                measured_ports: self.paths.measured_ports(),
                stun: own_addresses.stun.clone(),
                port_mappings: inputs.network.port_mappings.clone(),
                nat64: desired.own_side.view.nat64.prefixes.clone(),
            },
            own: OwnReport {
                prefixes: desired.own_prefixes.clone(),
                claims: inputs.own.claims.clone(),
                mesh_addresses: desired.mesh_addresses.iter().map(IpNet::addr).collect(),
                interface_id: inputs.own.interface_id,
                is_gateway: desired.gateways.is_gateway,
            },
            configured: ConfiguredReport {
                published: inputs.filters().published,
                manual: inputs.own.manual.clone(),
                extra_endpoints: inputs.own.extra_endpoints.clone(),
                keepalive: inputs.own.keepalive,
            },
            prepared_granularity: self.granularity.prepared(),
            problems,
            released: inputs.departures.released().outside(&inputs.settings.routing.excluded),
            guarded: guarded.packets,
            saved_at: inputs.saved_at,
            peers,
            external: self.report_external(desired),
            paths: self.paths.port().counters(),
            relay,
        })
    }

    fn problems(
        &self,
        Planned { host, desired, .. }: &Planned,
        open: &OpenDevice,
        (peers, relay, guarded): (&[PeerReport], Option<&RelayReport>, Option<GuardProblem>),
        now: Instant,
    ) -> Vec<MeshProblem> {
        let relay_problems = relay.into_iter().flat_map(|relay| relay.problems(now));
        // Where there is a relay, the session is about to move there.
        let has_relay = relay.is_some_and(|relay| relay.status.is_up);
        let is_lasting = |peer: &&PeerReport| !has_relay || peer.path.route_mtu.is_some();
        let path_mtu = peers.iter().filter(is_lasting).filter_map(|peer| peer.path_mtu(open.mtu));
        let problems = desired.problems.iter().chain(&open.problems).cloned().chain(relay_problems);
        problems
            .chain(path_mtu)
            .chain(self.listen_port.problem(host.port))
            .chain(self.bypassed(desired))
            .chain(self.kernel.forwarding_problems().into_iter().map(MeshProblem::Forwarding))
            .chain(guarded.map(MeshProblem::Guarded))
            .chain(self.kernel.foreign().into_iter().map(MeshProblem::Foreign))
            .chain(self.gateways.problems(desired, open.device.backend(), self.device.refusal()))
            .chain(self.encapsulation.problems(&desired.tunnels, &self.paths, now))
            .collect()
    }

    /// States of the tunnels of control-plane nodes that have one of their own, and the addresses behind them.
    pub(super) fn control_plane_tunnels(
        &self,
        desired: &Desired,
        now: Instant,
    ) -> Vec<(IpAddr, PublicKey, State)> {
        let nodes = desired.traffic.control_plane.iter();
        nodes
            .filter_map(|(address, key)| Some((*address, *key, self.paths.status(key, now)?.0.state)))
            .collect()
    }

    fn bypassed(&self, desired: &Desired) -> impl Iterator<Item = MeshProblem> {
        let names = self.down_peers.bypassed().iter().filter_map(|key| Some(&desired.peers.get(key)?.name));
        names.map(|name| MeshProblem::PeerBypassed { peer: name.clone() })
    }

    fn report_external(&self, desired: &Desired) -> Vec<ExternalReport> {
        let mut external: Vec<ExternalReport> = desired
            .external
            .iter()
            .map(|(key, peer)| ExternalReport {
                name: peer.name.clone(),
                public_key: *key,
                device: self.paths.device_state(key),
                prefixes: peer.config.allowed_ips.clone(),
                entry: peer.entry,
            })
            .collect();
        external.sort_by(|a, b| a.name.cmp(&b.name));
        external
    }

    fn report_peers(&self, planned: &Planned, device: &dyn WireGuardDevice, now: Instant) -> Vec<PeerReport> {
        let encapsulated = self.encapsulation.routes(&planned.desired);
        let encapsulated: BTreeSet<IpNet> = encapsulated.into_iter().map(|it| it.destination).collect();
        let plain = &planned.desired.traffic.plain_prefixes() | &encapsulated;
        let used = planned.desired.peers.iter().filter(|(key, _)| !planned.desired.added.contains(*key));
        let peers = used.filter_map(|(key, peer)| {
            let (path, device) = self.paths.status(key, now)?;
            let endpoint = device.as_ref().and_then(|device| device.config.endpoint);
            let relay = endpoint.and_then(|endpoint| self.paths.relay_transport(endpoint));
            let original = endpoint.map(|endpoint| planned.desired.own_side.view.nat64.original(endpoint));
            let is_news =
                |endpoint: &SocketAddr| relay.is_none() && planned.desired.publishes(peer, *endpoint);
            Some(PeerReport {
                name: peer.name.clone(),
                public_key: *key,
                path,
                relay_reason: None,
                device,
                plain: those_of(peer, &plain),
                encapsulated: those_of(peer, &encapsulated),
                sources: sources(&planned.inputs.members, &peer.name),
                prefixes: peer.config.allowed_ips.clone(),
                published_endpoint: original.filter(is_news),
                relay,
            })
        });
        let mut peers: Vec<PeerReport> = peers.collect();
        peers.sort_by(|a, b| a.name.cmp(&b.name));
        let has_direct_peer = peers.iter().any(|peer| peer.path.state == State::Up && !peer.is_relayed());
        for peer in peers.iter_mut().filter(|peer| peer.is_relayed()) {
            peer.relay_reason = self.relay_reason(planned, &peer.public_key, has_direct_peer, now);
        }
        add_send_errors(&mut peers, device);
        peers
    }

    fn relay_reason(
        &self,
        Planned { inputs, desired, own_addresses, .. }: &Planned,
        key: &PublicKey,
        has_direct_peer: bool,
        now: Instant,
    ) -> Option<RelayReason> {
        let peer = desired.peers.get(key)?;
        Some(RelayReason::of(&Situation {
            is_relay_only: inputs.settings.relay.as_ref().is_some_and(|relay| relay.is_only),
            addresses: peer.paths.candidates.len(),
            candidates: &self.paths.port().candidates(key, now),
            nat: self.nat,
            peer_nat: peer.nat,
            birthday: peer.paths.birthday,
            attempts: self.paths.port().birthday_status(key, now),
            has_direct_peer,
            stun: &own_addresses.stun,
        }))
    }
}

/// Says of peers that are not up why this host cannot send to them, if that is so.
fn add_send_errors(peers: &mut [PeerReport], device: &dyn WireGuardDevice) {
    let down = peers.iter_mut().filter(|peer| peer.path.state != State::Up);
    for peer in down.take(MAX_SEND_ERRORS) {
        if let Some(error) = device.send_error(&peer.public_key) {
            peer.path.message = format!("{}; error: {error}", peer.path.message);
        }
    }
}

/// Sources of the member `name`; the members are sorted by name.
fn sources(members: &[Arc<Member>], name: &str) -> Sources {
    let found = members.binary_search_by(|member| (*member.name).cmp(name));
    found.ok().and_then(|index| members.get(index)).map_or_else(Sources::default, |member| member.sources)
}

/// The prefixes of a peer that are among these.
fn those_of(peer: &DesiredPeer, prefixes: &BTreeSet<IpNet>) -> Vec<IpNet> {
    peer.config.allowed_ips.iter().filter(|it| prefixes.contains(*it)).copied().collect()
}
