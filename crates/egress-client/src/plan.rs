//! What a client pod should have, by what is known of the cluster. Pure.
//!
//! [`plan`] says what packets of the pod should find; [`desired`] adds where they go now. A part of what a pod asks for may not
//! work: an Egress is unknown, forbidden, or has no Service. Then the pod has no link to its gateways, and packets to its
//! destinations are refused; they never leave by `eth0` for it. An ADD fails instead.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use fairlead_address::{DualStack, DualStackAddrs, IpFamily, PrefixSet};
use fairlead_dataplane::egress_client::{ClientRoute, ClientRouting, Target};
use fairlead_egress::EgressName;
use fairlead_egress::client::{ClientPod, Gateways, SourcePort, Unusable, routing};
use fairlead_egress::destinations::Destinations;
use fairlead_egress::problem::EgressProblem;
use fairlead_fou::{Gateway, MAX_GATEWAYS, Service};
use ipnet::IpNet;

use super::registrar::Way;
use super::routing::client_routing;

/// Most gateways of a tunnel that may answer with their own addresses: the programs have room for 4096 hosts in all.
const MAX_ANSWERING: usize = 256;

/// What is known of the cluster.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Cluster {
    pub(crate) egresses: BTreeMap<EgressName, KnownEgress>,
    /// Of Egresses that do not say `spec.originatingOnly`: the flag of the node program.
    pub(crate) originating_only: bool,
}

/// An Egress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KnownEgress {
    /// Its destinations, or why they cannot be read.
    pub(crate) destinations: Result<Destinations, String>,
    pub(crate) source_port: SourcePort,
    /// Replies to connections that others open leave by `eth0`; `None` is as the node program has it.
    pub(crate) originating_only: Option<bool>,
    /// What a pod reaches by `eth0` although it may lie in a destination (`status.clusterRanges`); `None` before it is written. Only pods that
    /// use the Egress go by it, so that who can write one status cannot open a way for the packets of others.
    pub(crate) cluster_ranges: Option<Vec<IpNet>>,
    /// `None` is all.
    pub(crate) allowed_namespaces: Option<BTreeSet<String>>,
    pub(crate) service: Option<KnownService>,
}

/// The Service of an Egress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct KnownService {
    pub(crate) cluster_ips: DualStackAddrs,
    pub(crate) port: u16,
    /// `sessionAffinity: ClientIP`.
    pub(crate) by_client: bool,
    pub(crate) idle_timeout: Option<Duration>,
}

/// A pod with an annotation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Asking {
    pub(crate) namespace: String,
    /// The Egresses that its annotations name.
    pub(crate) chosen: BTreeSet<EgressName>,
    pub(crate) addresses: DualStackAddrs,
    /// MTU of its `eth0` in bytes.
    pub(crate) mtu: u32,
}

/// What a pod should have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Plan {
    /// Rules, and routes into links; those to destinations of gateways that cannot be used refuse packets.
    pub(crate) routing: DualStack<ClientRouting, ClientRouting>,
    pub(crate) tunnels: Vec<PlannedTunnel>,
    /// The Egresses that can be used: the pod is to be registered at their gateways.
    pub(crate) usable: BTreeSet<EgressName>,
    /// Destinations of an unknown Egress are not known any more: those in the kernel count.
    pub(crate) keeps_destinations: bool,
    /// What cannot be used, and why.
    pub(crate) problems: Vec<EgressProblem>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PlannedTunnel {
    pub(crate) egress: EgressName,
    pub(crate) cluster_ip: IpAddr,
    local: IpAddr,
    pub(crate) link: String,
    source_port: Option<u16>,
    pub(crate) port: u16,
    pub(crate) by_client: bool,
    idle_timeout: Option<Duration>,
}

impl Plan {
    /// Nothing of egress.
    pub(crate) fn nothing() -> Self {
        Self {
            routing: DualStack { ipv4: None, ipv6: None },
            tunnels: Vec::new(),
            usable: BTreeSet::new(),
            keeps_destinations: false,
            problems: Vec::new(),
        }
    }
}

/// What is wrong with an Egress for pods of a namespace, whatever their addresses are: what an ADD can find before anything is made.
pub(crate) fn usable<'a>(
    cluster: &'a Cluster,
    namespace: &str,
    egress: &EgressName,
) -> Result<(&'a Destinations, &'a KnownEgress, &'a KnownService), EgressProblem> {
    let known = cluster.egresses.get(egress).ok_or_else(|| EgressProblem::unknown(egress))?;
    let is_allowed = known.allowed_namespaces.as_ref().is_none_or(|allowed| allowed.contains(namespace));
    if !is_allowed {
        return Err(EgressProblem::not_allowed(egress, namespace));
    }
    let destinations = known.destinations.as_ref();
    let destinations = destinations.map_err(|error| EgressProblem::invalid_destination(egress, error))?;
    if known.cluster_ranges.is_none() {
        return Err(EgressProblem::ranges_unknown(egress));
    }
    let service = known.service.as_ref().filter(|service| !service.cluster_ips.is_empty());
    let service = service.ok_or_else(|| EgressProblem::service_missing(egress))?;
    Ok((destinations, known, service))
}

/// What a pod should have.
///
/// # Errors
/// What it asks for contradicts itself: with any part of it packets would go where they must not. What the pod has must then stay.
pub(crate) fn plan(cluster: &Cluster, pod: &Asking) -> Result<Plan, EgressProblem> {
    let mut gateways = BTreeMap::new();
    let (mut problems, mut keeps_destinations) = (Vec::new(), false);
    let mut refused = Vec::new();
    let originating_only = |known: &KnownEgress| known.originating_only.unwrap_or(cluster.originating_only);
    for egress in &pod.chosen {
        match usable(cluster, &pod.namespace, egress) {
            Ok((destinations, known, service)) => {
                let usable = Gateways {
                    cluster_ips: service.cluster_ips,
                    port: service.port,
                    destinations: destinations.clone(),
                    source_port: known.source_port,
                    originating_only: originating_only(known),
                };
                gateways.insert(egress.clone(), usable);
            }
            Err(problem) => {
                problems.push(problem);
                match cluster.egresses.get(egress) {
                    Some(known @ KnownEgress { destinations: Ok(destinations), .. }) => {
                        let (destinations, originating_only) =
                            (destinations.clone(), originating_only(known));
                        refused.push(Unusable { destinations, originating_only });
                    }
                    Some(_) | None => keeps_destinations = true,
                }
            }
        }
    }
    let client = ClientPod { addresses: pod.addresses, mtu: pod.mtu };
    let used = pod.chosen.iter().filter_map(|egress| cluster.egresses.get(egress)?.cluster_ranges.as_ref());
    let in_cluster: PrefixSet = used.flatten().collect();
    let planned = routing(&client, &gateways, &refused, &in_cluster)?;
    let mut tunnels = Vec::new();
    let links = [&planned.ipv4, &planned.ipv6].into_iter().flatten().flat_map(|family| &family.links);
    for link in links {
        let owner = gateways.iter().find(|(_, of)| of.cluster_ips.iter().any(|ip| ip == link.remote));
        let Some((egress, _)) = owner else { continue };
        let service = cluster.egresses.get(egress).and_then(|known| known.service.as_ref());
        tunnels.push(PlannedTunnel {
            egress: egress.clone(),
            cluster_ip: link.remote,
            local: link.local,
            link: link.name.clone(),
            source_port: Some(link.source_port).filter(|port| *port != 0),
            port: link.destination_port,
            by_client: service.is_some_and(|service| service.by_client),
            idle_timeout: service.and_then(|service| service.idle_timeout),
        });
    }
    let routing = client_routing(&planned);
    Ok(Plan { routing, tunnels, usable: gateways.into_keys().collect(), keeps_destinations, problems })
}

/// What the network namespace of a client pod should have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Desired {
    /// UDP port of the tunnels.
    pub(crate) port: u16,
    pub(crate) tunnels: BTreeMap<IpAddr, Tunnel>,
    pub(crate) routing: DualStack<ClientRouting, ClientRouting>,
    /// Routes that the kernel has to other destinations become unreachable instead of being deleted.
    pub(crate) keeps_destinations: bool,
}

/// A tunnel to the Service of an Egress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tunnel {
    /// Name of the link.
    pub(crate) link: String,
    /// The pod's address.
    pub(crate) local: IpAddr,
    /// UDP source port; `None` is one for each flow.
    pub(crate) source_port: Option<u16>,
    /// How a gateway is chosen; `None` leaves it to the Service.
    pub(crate) service: Option<Service>,
    /// Gateways that may answer with their own addresses, be they chosen or not.
    pub(crate) answering: Vec<IpAddr>,
}

impl Tunnel {
    /// Whether a gateway can be reached: only then a route leads into the link.
    pub(crate) fn is_open(&self) -> bool {
        self.service.as_ref().is_none_or(|service| !service.gateways.is_empty())
    }
}

impl Desired {
    /// Whether connections of others are answered by `eth0` although their addresses are destinations.
    pub(crate) fn answers_by_uplink(&self) -> bool {
        let families = [&self.routing.ipv4, &self.routing.ipv6].into_iter().flatten();
        families.flat_map(|family| &family.routes).any(|route| route.originating_only)
    }

    /// Takes packets of tunnels from these hosts, too: gateways that are not chosen any more, or not yet, and have an answer. Where the Service
    /// chooses and there is a source port for each flow, the ports of replies are not those of the request turned round, so the Service's
    /// translation does not give them the Service's address.
    pub(crate) fn answered_by(
        mut self,
        plan: &Plan,
        answering: impl Fn(&EgressName) -> BTreeSet<IpAddr>,
    ) -> Self {
        for planned in &plan.tunnels {
            if let Some(tunnel) = self.tunnels.get_mut(&planned.cluster_ip) {
                let of_family = |it: &IpAddr| IpFamily::of(*it) == IpFamily::of(planned.cluster_ip);
                tunnel.answering =
                    answering(&planned.egress).into_iter().filter(of_family).take(MAX_ANSWERING).collect();
            }
        }
        self
    }

    /// With routes that refuse packets to these destinations of the kernel, each in a table, where there is none. Of those that are excluded
    /// from one around them (`true`) it is not known for whom: only what is and was excluded stays so.
    pub(crate) fn refusing(mut self, destinations: &BTreeMap<(u32, IpNet), bool>) -> Self {
        for (of, routing) in [(IpFamily::V4, &mut self.routing.ipv4), (IpFamily::V6, &mut self.routing.ipv6)]
        {
            let Some(routing) = routing else { continue };
            for route in &mut routing.routes {
                let was_excluded = destinations.get(&(route.table, route.destination)) == Some(&true);
                if route.target == Target::Excluded && !was_excluded {
                    route.target = Target::Refused;
                }
            }
            let known: BTreeSet<(u32, IpNet)> =
                routing.routes.iter().map(|route| (route.table, route.destination)).collect();
            let others = destinations.keys().filter(|it| !known.contains(it));
            let others = others.filter(|(_, destination)| IpFamily::of(destination.addr()) == of);
            routing.routes.extend(others.map(|(table, destination)| ClientRoute {
                table: *table,
                destination: *destination,
                target: Target::Refused,
                originating_only: false,
            }));
        }
        self
    }
}

/// What the namespace should have, by the ways to the gateways of each Egress as they are now; `None` while one is not known after the
/// start of the program: what is there stays.
pub(crate) fn desired(plan: &Plan, way: impl Fn(&EgressName) -> Way) -> Option<Desired> {
    let mut tunnels = BTreeMap::new();
    for planned in &plan.tunnels {
        let service = match way(&planned.egress) {
            Way::Unknown => return None,
            Way::Service => None,
            Way::Gateways(gateways) => Some(Service {
                gateways: of_family(gateways, planned.cluster_ip),
                by_client: planned.by_client,
                idle_timeout: planned.idle_timeout.filter(|_| planned.by_client),
            }),
        };
        let PlannedTunnel { link, local, source_port, .. } = planned.clone();
        tunnels
            .insert(planned.cluster_ip, Tunnel { link, local, source_port, service, answering: Vec::new() });
    }
    let port = plan.tunnels.first().map_or(fairlead_api::names::FOU_PORT, |tunnel| tunnel.port);
    let (routing, keeps_destinations) = (plan.routing.clone(), plan.keeps_destinations);
    Some(Desired { port, tunnels, routing, keeps_destinations })
}

/// Those of the Service's family, those that take new flows first, at most as many as a Service can have.
fn of_family(mut gateways: Vec<Gateway>, cluster_ip: IpAddr) -> Vec<Gateway> {
    gateways.retain(|gateway| IpFamily::of(gateway.address) == IpFamily::of(cluster_ip));
    gateways.sort_by_key(|gateway| (gateway.is_draining, gateway.address));
    gateways.dedup_by_key(|gateway| gateway.address);
    gateways.truncate(MAX_GATEWAYS);
    gateways
}

#[cfg(test)]
mod tests;
