//! The routing of a client pod: how its packets reach the gateways that it asks for, and nothing else does.
//!
//! A client pod has, for each Egress, a Foo-over-UDP link to the ClusterIP of its Service, and rules as Coil v2 has them:
//!
//! | priority | destinations | table |
//! |---|---|---|
//! | 1000 | all, of packets with the mark of replies ([`replies_by_uplink`]) | the routes of `main` by `eth0` |
//! | 1800 | link-local | `main` |
//! | 1900 | all | 117: destinations of Egresses in private networks |
//! | 2000–2002 | private networks | `main` |
//! | 2003–2099 | other ranges of the cluster, which Coil does not know | `main` |
//! | 2100 | all | 118: all other destinations of Egresses |
//!
//! An address has the longest destination with it whose Egress does not exclude it (`spec.excludedDestinations`). Where no Egress
//! has an excluded prefix, a `throw` route leaves its packets to the rules after the table. So it does with ranges of the cluster inside of
//! destinations in private networks.
//!
//! [`plan`] computes them; where it fails, the pod must not start, as its packets would leave by `eth0`.

pub mod intent;
pub mod known;
mod link;
mod origins;
pub mod plan;
mod problem;
mod replies;
mod routes;
mod rules;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::net::IpAddr;

use fairlead_address::{DualStack, DualStackAddrs, IpFamily, PrefixSet};
use fairlead_api::client_routing::{ClientRouting, ClientRule, Target};
use fairlead_api::names::FOU_PORT;
use ipnet::IpNet;

use crate::EgressName;
use crate::destinations::Destinations;
use routes::{Claim, Claims};

use link::Link;
pub use link::SourcePort;
pub use problem::Problem;
pub(crate) use problem::Problems;
pub use replies::replies_by_uplink;
pub use rules::{TABLE_MAIN, cluster_ranges};

/// A pod that asks for egress gateways.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct ClientPod {
    addresses: DualStackAddrs,
    /// MTU of its `eth0` in bytes.
    mtu: u32,
}

/// The gateways of one Egress, as a client pod reaches them.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Gateways {
    /// ClusterIPs of the Service.
    cluster_ips: DualStackAddrs,
    /// UDP port of the Service.
    port: u16,
    /// Destinations that are reached through the gateways.
    destinations: Destinations,
    /// UDP source port of what the pod sends.
    source_port: SourcePort,
    /// Only connections that the pod opens go through them: replies to others leave by `eth0`.
    originating_only: bool,
}

/// Destinations of an Egress whose gateways cannot be used: packets to them are refused.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Unusable {
    /// Destinations to which packets are refused.
    destinations: Destinations,
    /// Only connections that the pod opens are refused.
    originating_only: bool,
}

/// Links and routing of a client pod for one address family.
#[derive(Debug, Clone, PartialEq, Eq)]
struct FamilyPlan {
    /// Links by name.
    links: Vec<Link>,
    routing: ClientRouting,
}

/// Links and routing of a pod, for each address family that it has an address of. A prefix that is a destination of an Egress of `egresses`
/// and of one of `unusable` goes to the former. `in_cluster` are the ranges that the pod reaches by `eth0` although they may lie in a
/// destination: Service CIDRs, nodes, pod CIDRs and pools.
///
/// # Errors
/// All problems. With any of them packets would go where they must not, or nowhere.
fn routing(
    pod: &ClientPod,
    egresses: &BTreeMap<EgressName, Gateways>,
    unusable: &[Unusable],
    in_cluster: &PrefixSet,
) -> Result<DualStack<FamilyPlan, FamilyPlan>, Problems> {
    let mut problems = without_destination(pod, egresses);
    let plan = |address: IpAddr| {
        let mut planner = Planner { family: IpFamily::of(address), problems: Vec::new() };
        let routing = planner.routing(address, pod.mtu, egresses, unusable, in_cluster);
        (routing, planner.problems)
    };
    let planned = pod.addresses.map(|address| plan(address.into()), |address| plan(address.into()));
    let ((ipv4, of_ipv4), (ipv6, of_ipv6)) = (planned.ipv4.unzip(), planned.ipv6.unzip());
    problems.extend([of_ipv4, of_ipv6].into_iter().flatten().flatten());
    Problems::none_of(problems)?;
    Ok(DualStack { ipv4, ipv6 })
}

/// Problem that keeps all pods with addresses of a family from using an Egress, whichever others they use: a destination contains the
/// address of its own Service, or the cluster has more ranges than there are rules for them.
pub fn problem_of_all_pods(
    egress: &EgressName,
    destinations: &Destinations,
    cluster_ips: DualStackAddrs,
    in_cluster: &PrefixSet,
) -> Option<Problem> {
    let gateways = Gateways {
        cluster_ips,
        port: FOU_PORT,
        destinations: destinations.clone(),
        source_port: SourcePort::Fixed,
        originating_only: false,
    };
    let has_family = |family: IpFamily| {
        cluster_ips.iter().any(|address| IpFamily::of(address) == family)
            && destinations.used().any(|prefix| IpFamily::of(prefix.addr()) == family)
    };
    let families = IpFamily::BOTH.into_iter().filter(|family| has_family(*family));
    // Which addresses the pod has does not matter, nor which MTU, as long as a tunnel fits.
    let addresses = families.map(|family| family.address(1)).collect();
    let pod = ClientPod { addresses, mtu: u32::from(u16::MAX) };
    let egresses = BTreeMap::from([(egress.clone(), gateways)]);
    let problems = routing(&pod, &egresses, &[], in_cluster).err()?;
    let is_of_all =
        |it: &&Problem| matches!(it, Problem::SwallowsTunnel { .. } | Problem::TooManyRanges { .. });
    problems.iter().find(is_of_all).cloned()
}

/// Egresses that a pod asks for in vain.
fn without_destination(pod: &ClientPod, egresses: &BTreeMap<EgressName, Gateways>) -> Vec<Problem> {
    let has_family = |prefix: IpNet| {
        let mut families = pod.addresses.iter().map(IpFamily::of);
        families.any(|family| family == IpFamily::of(prefix.addr()))
    };
    let in_vain = egresses.iter().filter(|(_, gateways)| !gateways.destinations.used().any(has_family));
    in_vain.map(|(egress, _)| Problem::NoDestination { egress: egress.clone() }).collect()
}

/// Computes what a pod has of one family.
struct Planner {
    family: IpFamily,
    problems: Vec<Problem>,
}

impl Planner {
    fn routing(
        &mut self,
        local: IpAddr,
        mtu: u32,
        egresses: &BTreeMap<EgressName, Gateways>,
        unusable: &[Unusable],
        in_cluster: &PrefixSet,
    ) -> FamilyPlan {
        let family = self.family;
        let mut links: BTreeMap<String, (&EgressName, Link)> = BTreeMap::new();
        let mut claims = Claims::default();
        for (egress, gateways) in egresses {
            let Some(link) = self.link(egress, gateways, local, mtu) else { continue };
            let claim = Claim {
                egress: Some(egress),
                target: Target::Link(link.name.clone()),
                destinations: &gateways.destinations,
                originating_only: gateways.originating_only,
            };
            claims.add(family, claim);
            let name = link.name.clone();
            if let Some((other, _)) = links.insert(name.clone(), (egress, link)) {
                self.problems.push(Problem::SameLink { name, egresses: [other.clone(), egress.clone()] });
            }
        }
        self.problems.extend(claims.same_prefix());
        let rules = match rules::rules(family, in_cluster) {
            Ok(rules) => {
                self.check_tunnels(&rules, &links, &claims, in_cluster);
                rules
            }
            Err(ranges) => {
                self.problems.push(Problem::TooManyRanges { family, ranges });
                Vec::new()
            }
        };
        for Unusable { destinations, originating_only } in unusable {
            let originating_only = *originating_only;
            claims
                .add(family, Claim { egress: None, target: Target::Refused, destinations, originating_only });
        }
        let ranges = in_cluster.family(family).prefixes().into_iter().collect();
        let routing = ClientRouting { rules, routes: claims.routes(&ranges) };
        FamilyPlan { links: links.into_values().map(|(_, link)| link).collect(), routing }
    }

    /// The link to the gateways; `None` if they have no destination of this family, or a problem.
    fn link(&mut self, egress: &EgressName, gateways: &Gateways, local: IpAddr, mtu: u32) -> Option<Link> {
        let family = self.family;
        gateways.destinations.used().find(|prefix| IpFamily::of(prefix.addr()) == family)?;
        let remote = gateways.cluster_ips.iter().find(|address| IpFamily::of(*address) == family);
        let Some(remote) = remote else {
            self.problems.push(Problem::NoServiceAddress { egress: egress.clone(), family });
            return None;
        };
        match link::inner_mtu(family, mtu) {
            Ok(mtu) => Some(Link::new(local, remote, gateways.port, gateways.source_port, mtu)),
            Err(minimum) => {
                let problem = Problem::MtuTooSmall { family, mtu, minimum };
                if !self.problems.contains(&problem) {
                    self.problems.push(problem);
                }
                None
            }
        }
    }

    /// The outer packets of every tunnel must leave by `eth0`.
    fn check_tunnels(
        &mut self,
        rules: &[ClientRule],
        links: &BTreeMap<String, (&EgressName, Link)>,
        claims: &Claims<'_>,
        in_cluster: &PrefixSet,
    ) {
        for (of, link) in links.values().filter(|(_, link)| !in_cluster.contains(link.remote)) {
            for (table, prefix, egress) in claims.with(link.remote) {
                if !rules::is_kept(rules, link.remote, table) {
                    self.problems.push(Problem::SwallowsTunnel {
                        prefix,
                        egress: egress.clone(),
                        cluster_ip: link.remote,
                        of: (*of).clone(),
                    });
                }
            }
        }
    }
}
