//! Plan of a client pod's routing and tunnels, by what is known of the cluster. Pure.
//!
//! [`plan`] says what packets of the pod should find; [`desired`] adds where they go now. A part of what a pod asks for may not
//! work: an Egress is unknown, forbidden, or has no Service. Then the pod has no link to its gateways, and packets to its
//! destinations are refused; they never leave by `eth0` for it. An ADD fails instead.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::time::Duration;

use fairlead_address::{DualStack, DualStackAddrs, IpFamily, PrefixSet};
use fairlead_api::client_routing::{ClientRoute, ClientRouting, ClientRule, Held, Target};
use fairlead_api::fou::{Gateway, MAX_GATEWAYS, Service};
use fairlead_api::names::{FOU_PORT, RULE_PRIORITIES_EGRESS_IN_CLUSTER};
use ipnet::IpNet;

use super::origins::origins;
use super::{ClientPod, Gateways, SourcePort, Unusable, routing, rules};
use crate::EgressName;
use crate::destinations::Destinations;
use crate::problem::EgressProblem;

/// Most gateways of a tunnel that may answer with their own addresses: the programs have room for 4096 hosts in all.
const MAX_ANSWERING: usize = 256;

/// Egresses of the cluster, with their Services.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Cluster {
    /// Egresses by name.
    pub egresses: BTreeMap<EgressName, KnownEgress>,
    /// Default of `spec.originatingOnly` for Egresses that do not set it: the flag of the node program.
    pub originating_only: bool,
}

impl Cluster {
    /// Egresses with their Services. A Service without an Egress of its name does not count.
    pub fn of(
        egresses: impl IntoIterator<Item = (EgressName, KnownEgress)>,
        services: impl IntoIterator<Item = (EgressName, KnownService)>,
    ) -> Self {
        let mut egresses: BTreeMap<EgressName, KnownEgress> = egresses.into_iter().collect();
        for (name, service) in services {
            if let Some(egress) = egresses.get_mut(&name) {
                egress.service = Some(service);
            }
        }
        Self { egresses, originating_only: false }
    }
}

/// An Egress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownEgress {
    /// Destinations, or the reason why they cannot be read.
    pub destinations: Result<Destinations, String>,
    /// UDP source port of the tunnels of its clients.
    pub source_port: SourcePort,
    /// Replies to connections that others open leave by `eth0`; `None` is as the node program has it.
    pub originating_only: Option<bool>,
    /// Ranges that a pod reaches by `eth0` although they may lie in a destination (`status.clusterRanges`); `None` before they are written.
    /// Only pods that use the Egress go by it, so that who can write one status cannot open a way for the packets of others.
    pub cluster_ranges: Option<Vec<IpNet>>,
    /// The controller has not seen this specification yet, so that ranges may be missing which its destinations overlap.
    pub ranges_are_stale: bool,
    /// Namespaces of the pods that may use it; `None` is all.
    pub allowed_namespaces: Option<BTreeSet<String>>,
    /// Service of the gateways; `None` while there is none.
    pub service: Option<KnownService>,
}

impl KnownEgress {
    /// Whether ranges of the cluster that its destinations in private networks contain may not be known.
    fn awaits_ranges(&self) -> bool {
        let destinations = self.destinations.as_ref().ok();
        let has_narrow = destinations.is_some_and(|it| it.used().any(rules::is_narrow));
        has_narrow && (self.ranges_are_stale || self.cluster_ranges.is_none())
    }
}

/// The Service of an Egress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KnownService {
    /// ClusterIPs.
    pub cluster_ips: DualStackAddrs,
    /// UDP port of tunnels.
    pub port: u16,
    /// All flows of a client go to the same gateway (`sessionAffinity: ClientIP`).
    pub by_client: bool,
    /// Time without a packet after which a flow gets a new gateway; `None` is never.
    pub idle_timeout: Option<Duration>,
}

/// A pod that asks for gateways.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Asking {
    /// Namespace of the pod.
    pub namespace: String,
    /// The Egresses that its annotations name, and that select it.
    pub chosen: BTreeSet<EgressName>,
    /// Addresses of the pod, at most one of each family.
    pub addresses: DualStackAddrs,
    /// MTU of its `eth0` in bytes.
    pub mtu: u32,
}

/// Routing and tunnels of a pod, as it should have them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Plan {
    /// Rules, and routes into links; those to destinations of gateways that cannot be used refuse packets.
    pub routing: DualStack<ClientRouting, ClientRouting>,
    /// Tunnels to the Services of Egresses that can be used.
    pub tunnels: Vec<PlannedTunnel>,
    /// The Egresses that can be used: the pod is to be registered at their gateways.
    pub usable: BTreeSet<EgressName>,
    /// Destinations of an unknown Egress are not known any more: those in the kernel count.
    pub keeps_destinations: bool,
    /// Problems with the Egresses that cannot be used.
    pub problems: Vec<EgressProblem>,
}

/// A tunnel to the Service of an Egress, before its gateways are known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedTunnel {
    /// The Egress.
    pub egress: EgressName,
    /// Address of the Service.
    pub cluster_ip: IpAddr,
    local: IpAddr,
    /// Name of the link.
    pub link: String,
    source_port: Option<u16>,
    /// UDP port of the Service.
    pub port: u16,
    /// All flows of the pod go to the same gateway.
    pub by_client: bool,
    idle_timeout: Option<Duration>,
}

impl Plan {
    /// Nothing of egress.
    pub fn nothing() -> Self {
        Self {
            routing: DualStack { ipv4: None, ipv6: None },
            tunnels: Vec::new(),
            usable: BTreeSet::new(),
            keeps_destinations: false,
            problems: Vec::new(),
        }
    }
}

/// Destinations and Service of an Egress, if pods of a namespace can use it whatever their addresses are: as far as an ADD can see before
/// anything is made.
///
/// # Errors
/// The reason why they cannot.
pub fn usable<'a>(
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

/// Plans what a pod should have.
///
/// # Errors
/// Contradiction in what it asks for: with any part of it packets would go where they must not. What the pod has must then stay. So it
/// must while ranges of the cluster inside of destinations are not known: without them, the pod would not reach its own cluster.
pub fn plan(cluster: &Cluster, pod: &Asking) -> Result<Plan, EgressProblem> {
    let mut gateways = BTreeMap::new();
    let (mut problems, mut keeps_destinations) = (Vec::new(), false);
    let mut refused = Vec::new();
    let originating_only = |known: &KnownEgress| known.originating_only.unwrap_or(cluster.originating_only);
    for egress in &pod.chosen {
        if cluster.egresses.get(egress).is_some_and(KnownEgress::awaits_ranges) {
            return Err(EgressProblem::ranges_unknown(egress));
        }
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
    let routing = planned.map(|family| family.routing, |family| family.routing);
    Ok(Plan { routing, tunnels, usable: gateways.into_keys().collect(), keeps_destinations, problems })
}

/// Next hop of the packets of a client to an Egress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NextHop {
    /// To these gateways, at which the client is registered (may be empty: then nothing leaves; an unreachable route answers). Of both
    /// families; at most [`MAX_GATEWAYS`] of each.
    Gateways(Vec<Gateway>),
    /// To the Service's address: the gateways are Coil's, which register clients themselves (they watch pods) and refuse connections to
    /// [`EGRESS_REGISTRATION_PORT`](fairlead_api::names::EGRESS_REGISTRATION_PORT).
    Service,
    /// Not known yet since the program started: gateways are being asked, or the API server does not answer. What the kernel has from
    /// before stays.
    Unknown,
}

/// Desired state of the network namespace of a client pod.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Desired {
    /// UDP port of the tunnels.
    pub port: u16,
    /// Tunnels by the address of the Service.
    pub tunnels: BTreeMap<IpAddr, Tunnel>,
    /// Rules, and routes into links.
    pub routing: DualStack<ClientRouting, ClientRouting>,
    /// Routes that the kernel has to other destinations become unreachable instead of being deleted.
    pub keeps_destinations: bool,
}

/// A tunnel to the Service of an Egress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tunnel {
    /// Name of the link.
    pub link: String,
    /// The pod's address.
    pub local: IpAddr,
    /// UDP source port; `None` is one for each flow.
    pub source_port: Option<u16>,
    /// Gateways, and how one is chosen for a flow; `None` leaves that to the Service.
    pub service: Option<Service>,
    /// Gateways that may answer with their own addresses, be they chosen or not.
    pub answering: Vec<IpAddr>,
}

impl Tunnel {
    /// Whether a gateway can be reached: only then a route leads into the link.
    pub fn is_open(&self) -> bool {
        self.service.as_ref().is_none_or(|service| !service.gateways.is_empty())
    }
}

impl Desired {
    /// Whether connections of others are answered by `eth0` although their addresses are destinations.
    pub fn answers_by_uplink(&self) -> bool {
        let families = [&self.routing.ipv4, &self.routing.ipv6].into_iter().flatten();
        families.flat_map(|family| &family.routes).any(|route| route.originating_only)
    }

    /// Services whose gateways may send to the pod, by the sources of what they send: the addresses that the pod reaches by the tunnel with this
    /// routing, which is that of [`Self::refusing`]. `None` is no gateway: the pod reaches the cluster, and what is excluded, by `eth0`.
    pub fn origins(
        &self,
        routing: &DualStack<ClientRouting, ClientRouting>,
    ) -> BTreeMap<IpNet, Option<IpAddr>> {
        let services: BTreeMap<&str, IpAddr> =
            self.tunnels.iter().map(|(cluster_ip, tunnel)| (tunnel.link.as_str(), *cluster_ip)).collect();
        let service = |link: Option<&str>| services.get(link?).copied();
        let families = [&routing.ipv4, &routing.ipv6].into_iter().flatten();
        families.flat_map(origins).map(|(prefix, link)| (prefix, service(link))).collect()
    }

    /// Takes packets of tunnels from these hosts, too: gateways that are not chosen any more, or not yet, and have an answer. Where the Service
    /// chooses and there is a source port for each flow, the ports of replies are not those of the request turned round, so the Service's
    /// translation does not give them the Service's address.
    pub fn answered_by(mut self, plan: &Plan, answering: impl Fn(&EgressName) -> BTreeSet<IpAddr>) -> Self {
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
    /// from one around them it is not known for whom: only what is and was excluded stays so. Ranges of the cluster stay reachable, those in the
    /// table `main` by rules.
    pub fn refusing(mut self, destinations: &BTreeMap<(u32, IpNet), Held>) -> Self {
        for (of, routing) in [(IpFamily::V4, &mut self.routing.ipv4), (IpFamily::V6, &mut self.routing.ipv6)]
        {
            let Some(routing) = routing else { continue };
            for route in &mut routing.routes {
                let held = destinations.get(&(route.table, route.destination));
                let was_excluded = held.is_some_and(|held| *held != Held::Destination);
                if route.target == Target::Excluded && !was_excluded {
                    route.target = Target::Refused;
                }
            }
            let known: BTreeSet<(u32, IpNet)> =
                routing.routes.iter().map(|route| (route.table, route.destination)).collect();
            let others = destinations.iter().filter(|(it, _)| !known.contains(it));
            let others = others.filter(|((_, destination), _)| IpFamily::of(destination.addr()) == of);
            let (ranges, others): (Vec<_>, Vec<_>) =
                others.partition(|((table, _), _)| *table == rules::TABLE_MAIN);
            let ranges = ranges.into_iter().map(|((_, range), _)| range);
            let planned = routing.rules.iter().filter(|rule| is_of_cluster(rule));
            let all = planned.map(|rule| &rule.destination).chain(ranges).collect();
            // Beyond the number of rules, those that are planned have to do.
            if let Ok(rules) = rules::rules(of, &all) {
                routing.rules = rules;
            }
            routing.routes.extend(others.into_iter().map(|((table, destination), held)| ClientRoute {
                table: *table,
                destination: *destination,
                target: if *held == Held::InCluster { Target::InCluster } else { Target::Refused },
                originating_only: false,
            }));
        }
        self
    }
}

/// Whether a rule is for a range of the cluster.
fn is_of_cluster(rule: &ClientRule) -> bool {
    RULE_PRIORITIES_EGRESS_IN_CLUSTER.contains(&rule.priority)
}

/// Desired state of the namespace, by the ways to the gateways of each Egress as they are now; `None` while one is not known after the
/// start of the program: what is there stays.
pub fn desired(plan: &Plan, next_hop: impl Fn(&EgressName) -> NextHop) -> Option<Desired> {
    let mut tunnels = BTreeMap::new();
    for planned in &plan.tunnels {
        let service = match next_hop(&planned.egress) {
            NextHop::Unknown => return None,
            NextHop::Service => None,
            NextHop::Gateways(gateways) => Some(Service {
                gateways: of_family(gateways, planned.cluster_ip),
                by_client: planned.by_client,
                idle_timeout: planned.idle_timeout.filter(|_| planned.by_client),
            }),
        };
        let PlannedTunnel { link, local, source_port, .. } = planned.clone();
        tunnels
            .insert(planned.cluster_ip, Tunnel { link, local, source_port, service, answering: Vec::new() });
    }
    let port = plan.tunnels.first().map_or(FOU_PORT, |tunnel| tunnel.port);
    let (routing, keeps_destinations) = (plan.routing.clone(), plan.keeps_destinations);
    Some(Desired { port, tunnels, routing, keeps_destinations })
}

/// Gateways of the Service's family, those that take new flows first, at most as many as a Service can have.
fn of_family(mut gateways: Vec<Gateway>, cluster_ip: IpAddr) -> Vec<Gateway> {
    gateways.retain(|gateway| IpFamily::of(gateway.address) == IpFamily::of(cluster_ip));
    gateways.sort_by_key(|gateway| (gateway.is_draining, gateway.address));
    gateways.dedup_by_key(|gateway| gateway.address);
    gateways.truncate(MAX_GATEWAYS);
    gateways
}

#[cfg(test)]
mod tests;
