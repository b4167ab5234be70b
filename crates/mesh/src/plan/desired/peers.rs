//! Peers of the plan that are nodes, as the device and the path agent are to have them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use fairlead_address::{AddressFilter, Endpoint, PrefixSet};
use fairlead_keys::KEEPALIVE;
use fairlead_keys::{PeerConfig, PublicKey};
use fairlead_path::{
    BirthdayPolicy, Candidate, MAX_CANDIDATES, NatType, PeerPaths, PeerView, birthday_side, order,
};
use fairlead_topology::{Endpoints, Member, PeerPlan, Plan};
use ipnet::IpNet;

use super::own_endpoints::Location;
use super::peer::DesiredPeer;
use super::reuse::Reuse;
use super::sightings::Sightings;
use crate::model::inputs::Inputs;

/// Most candidates of a peer that only discovery services name.
pub(super) const MAX_DISCOVERED: usize = 8;
/// Least time without a packet after which a peer that sends keepalives is taken for lost.
const MIN_SILENCE: Duration = Duration::from_secs(60);
/// Least time without a packet for a peer with the kernel's WireGuard: it puts its keepalive off with each packet it receives
/// (`wg_timers_any_authenticated_packet_traversal`, `drivers/net/wireguard/timers.c`), so of an idle pair one node may send all keepalives.
/// The other one sends at the latest in the handshake that replaces a session after 165 s of its age.
const MIN_SILENCE_OF_KERNEL: Duration = Duration::from_secs(200);

/// The nodes among the peers of a plan. Those of which `reuse` says that nothing changed stay the same allocations.
pub(super) fn peers(
    inputs: &Inputs,
    plan: &Plan,
    sightings: &Sightings<'_>,
    location: &Location,
    cluster_addresses: &PrefixSet,
    tried: &AddressFilter,
    reuse: Option<&Reuse<'_>>,
) -> BTreeMap<PublicKey, Arc<DesiredPeer>> {
    let view = View { inputs, sightings, location, cluster_addresses, tried };
    let of_node = |(key, planned): (&PublicKey, &Arc<PeerPlan>)| {
        let known = reuse.and_then(|reuse| reuse.peer(key, planned));
        Some((*key, known.or_else(|| view.peer(key, planned).map(Arc::new))?))
    };
    plan.peers.iter().filter_map(of_node).collect()
}

/// Inputs from which peers follow, beside the plan.
struct View<'a> {
    inputs: &'a Inputs,
    sightings: &'a Sightings<'a>,
    location: &'a Location,
    cluster_addresses: &'a PrefixSet,
    tried: &'a AddressFilter,
}

impl View<'_> {
    /// The peer; `None` if it is no node.
    fn peer(&self, key: &PublicKey, planned: &Arc<PeerPlan>) -> Option<DesiredPeer> {
        let members: Vec<&Member> =
            planned.members.iter().filter_map(|name| named(self.inputs, name)).collect();
        let is_node = members.iter().all(|member| {
            // Without the secret a node of KubeSpan would lose the session that it has.
            member.external.is_none()
                && (!member.discovery.needs_preshared_key || self.inputs.cluster.is_some())
        });
        if !is_node {
            return None;
        }
        let nat = published_nat(&members);
        Some(DesiredPeer {
            name: planned.members.first().cloned().unwrap_or_default(),
            config: self.config(planned, &members),
            paths: PeerPaths {
                candidates: interleaved(members.iter().map(|member| self.candidates(member, key)).collect()),
                silence: silence(self.inputs, &members),
                relay: None,
                birthday: birthday_side(policy(self.inputs, &members), self.location.nat, nat),
            },
            uses_relay: !is_kubespan(&members),
            nat,
            manual: members.iter().filter_map(|member| member.endpoints.manual.clone()).collect(),
            host: members.iter().flat_map(|member| &member.endpoints.host).copied().collect(),
            published: members.iter().find_map(|member| member.endpoints.filter.clone()),
            planned: Arc::clone(planned),
        })
    }

    /// Endpoints at which a member may be reached, best first.
    fn candidates(&self, member: &Member, key: &PublicKey) -> Vec<Candidate> {
        let own = &self.location.view;
        let observed = self.sightings.endpoints(&member.name, key);
        let mut candidates = order(own, &peer_view(&self.inputs.resolved, &member.endpoints, observed));
        // What discovery services say displaces none of them.
        let discovered = order(own, &discovered_view(member)).into_iter();
        let is_known = |found: &Candidate| candidates.iter().any(|known| known.address == found.address);
        let discovered: Vec<Candidate> =
            discovered.filter(|found| !is_known(found)).take(MAX_DISCOVERED).collect();
        candidates.extend(discovered);
        // Packets to a pod would go through the mesh that they carry.
        let is_inside = |endpoint: SocketAddr| {
            let both = [endpoint, own.nat64.original(endpoint)];
            both.iter().any(|it| self.cluster_addresses.contains(it.ip()))
        };
        let is_tried = |endpoint| self.tried.allows(own.nat64.original(endpoint).ip());
        candidates.retain(|candidate| !is_inside(candidate.address) && is_tried(candidate.address));
        candidates
    }

    fn config(&self, planned: &PeerPlan, members: &[&Member]) -> PeerConfig {
        let cluster = self.inputs.cluster.as_ref().filter(|_| is_kubespan(members));
        PeerConfig {
            // Devices say zero as "none".
            persistent_keepalive: Some(self.inputs.own.keepalive.unwrap_or(planned.keepalive))
                .filter(|seconds| *seconds > 0),
            allowed_ips: planned.allowed_ips.clone(),
            preshared_key: cluster.map(|it| it.preshared_key(members)),
            endpoint: None,
        }
    }
}

fn named<'a>(inputs: &'a Inputs, name: &str) -> Option<&'a Member> {
    let found = inputs.members.binary_search_by(|member| member.name.as_str().cmp(name)).ok()?;
    inputs.members.get(found).map(|member| &**member)
}

/// Whether the tunnel to members with one key is one of KubeSpan. One that copied the key of a node of Fairlead changes nothing for it.
fn is_kubespan(members: &[&Member]) -> bool {
    !members.is_empty() && members.iter().all(|member| member.discovery.needs_preshared_key)
}

/// NAT that members with one key publish. A member that copied the key must not make others try ports.
fn published_nat(members: &[&Member]) -> NatType {
    if members.iter().any(|member| member.endpoints.is_nat_symmetric) {
        NatType::Symmetric
    } else if !members.is_empty() && members.iter().all(|member| member.endpoints.is_nat_port_restricted) {
        NatType::PortRestrictedCone
    } else {
        NatType::Unknown
    }
}

/// Whether ports are tried: the annotations of both nodes come before the mesh, and `disabled` of either before the other.
fn policy(inputs: &Inputs, members: &[&Member]) -> BirthdayPolicy {
    let own = named(inputs, &inputs.node).into_iter();
    let annotations =
        own.chain(members.iter().copied()).filter_map(|member| member.endpoints.birthday_attack);
    match annotations.min() {
        Some(false) => BirthdayPolicy::Disabled,
        Some(true) => BirthdayPolicy::Symmetric,
        None => inputs.settings.traversal.birthday,
    }
}

/// Endpoints of all members that publish one key. The best of each is tried before the second best of any, so that a member
/// that copied the key displaces none of its owner's.
fn interleaved(lists: Vec<Vec<Candidate>>) -> Vec<Candidate> {
    let longest = lists.iter().map(Vec::len).max().unwrap_or_default();
    let mut seen = BTreeSet::new();
    let by_rank = (0..longest).flat_map(|rank| lists.iter().filter_map(move |list| list.get(rank).copied()));
    by_rank.filter(|candidate| seen.insert(candidate.address)).take(MAX_CANDIDATES).collect()
}

/// Longest time in which a living peer sends nothing; `None` if it need not send keepalives. It sends them at the interval that this node
/// publishes, or at its own, which it then publishes; zero is none.
fn silence(inputs: &Inputs, members: &[&Member]) -> Option<Duration> {
    let own = inputs.own.keepalive.map_or(KEEPALIVE.as_secs(), u64::from);
    let theirs = members.iter().filter_map(|member| member.keepalive.interval).map(u64::from);
    let intervals: Vec<u64> = theirs.chain([own]).collect();
    let slowest = intervals.iter().max().filter(|_| !intervals.contains(&0))?;
    let sends_always = members.iter().all(|member| member.keepalive.always_sends);
    let least = if sends_always { MIN_SILENCE } else { MIN_SILENCE_OF_KERNEL };
    // Two keepalives and a margin.
    Some(Duration::from_secs(slowest.saturating_mul(2).saturating_add(10)).max(least))
}

fn peer_view(
    resolved: &BTreeMap<Endpoint, Vec<SocketAddr>>,
    endpoints: &Endpoints,
    mut observed: Vec<SocketAddr>,
) -> PeerView {
    let first = |endpoint: &Endpoint| resolved.get(endpoint).and_then(|addresses| addresses.first()).copied();
    let resolve = |endpoint: &Endpoint| endpoint.address().or_else(|| first(endpoint));
    observed.retain(|endpoint| !endpoints.host.contains(endpoint));
    for endpoint in endpoints.preferred.iter().chain(&endpoints.reflexive) {
        if !(endpoints.host.contains(endpoint) || observed.contains(endpoint)) {
            observed.push(*endpoint);
        }
    }
    PeerView { manual: endpoints.manual.as_ref().and_then(resolve), host: endpoints.host.clone(), observed }
}

/// Endpoints of a member from discovery services, which do not say who reported them.
fn discovered_view(member: &Member) -> PeerView {
    let discovered = member.endpoints.discovered.iter().copied();
    let is_own = |endpoint: &SocketAddr| member.claims.contains(&IpNet::from(endpoint.ip()));
    let (host, observed) = discovered.partition(is_own);
    PeerView { manual: None, host, observed }
}
