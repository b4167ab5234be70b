//! Explanation of the way that the packets of a pod take, as far as the API server's objects show it: for the command line. Pure.
//!
//! It is planned by the same functions as in the node program. What only that program knows is not here: which gateways have registered
//! the pod and answer, whether gateways are Coil's, and the MTU of the pod.

#[cfg(test)]
mod tests;
mod walk;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fairlead_address::{DualStackAddrs, IpFamily, PrefixSet};
use fairlead_api::names::ANNOTATION_EGRESS_PREFIX;
use fairlead_api::resources::{AddressPool, Egress};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::discovery::v1::EndpointSlice;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::EgressName;
use crate::annotation::chosen;
use crate::client::cluster_ranges;
use crate::client::known::EgressInfo;
use crate::client::plan::{Asking, Cluster, KnownService, Plan, plan, usable};
use crate::endpoints::{
    Endpoints, GatewayEndpoint, GatewayPlace, GatewaySlice, GatewayUid, Preferred, joined, limit,
};
use crate::problem::EgressProblem;
use crate::selection::Selectors;
use crate::selectors::Labels;

/// The MTU of a pod in bytes where it is not known: any that is large enough for a tunnel gives the same way.
const ANY_MTU: u32 = 1500;

/// Objects of the API server, as lists.
#[derive(Debug, Clone, Default)]
pub struct Objects {
    /// Egresses; those that a pod names and that are not here count as unknown.
    pub egresses: Vec<Egress>,
    /// Services of Egresses.
    pub services: Vec<Service>,
    /// EndpointSlices of these; `None` if they may not be read.
    pub slices: Option<Vec<EndpointSlice>>,
    /// Metadata of all Namespaces, where Egresses select pods by them; those that may not be read are left out.
    pub namespaces: Vec<ObjectMeta>,
    /// Selection of Egresses by pods, where `egresses` are not all; `None` is by `egresses` and `namespaces`.
    pub selection: Option<Selection>,
    /// Addresses of all Nodes, and the networks of their pods.
    pub node_ranges: Vec<IpNet>,
    /// All pools.
    pub pools: Vec<AddressPool>,
    /// All ServiceCIDRs.
    pub service_ranges: Vec<ServiceCIDR>,
}

/// A pod, as the API server shows it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct PodInfo {
    /// Namespace of the pod.
    pub namespace: String,
    /// Labels of the pod.
    pub labels: Labels,
    /// Annotations of the pod; those that name no gateways do not matter.
    pub annotations: BTreeMap<String, String>,
    /// The Node that it is bound to, if any.
    pub node: Option<String>,
    /// Addresses of the pod.
    pub addresses: Vec<IpAddr>,
    /// Name of the Egress of which the pod is a gateway; `None` for other pods.
    pub gateway_of: Option<String>,
    /// Whether it uses its node's network and has no address of its own.
    pub uses_host_network: bool,
    /// Whether it has ended (Succeeded or Failed).
    pub has_ended: bool,
}

/// Selection of Egresses by pods: by the annotations of the pods, and by the selectors of the Egresses.
#[derive(Debug, Clone, Default)]
pub struct Selection {
    selectors: Selectors,
    namespaces: BTreeMap<String, ObjectMeta>,
    /// Kinds of objects that could not be read, so that more Egresses may select pods.
    unread: Vec<&'static str>,
}

impl Selection {
    /// Selection by these Egresses and Namespaces.
    pub fn of(egresses: &[Egress], namespaces: &[ObjectMeta]) -> Self {
        let named = |namespace: &ObjectMeta| (namespace.name.clone().unwrap_or_default(), namespace.clone());
        Self {
            selectors: Selectors::of(egresses.iter().map(EgressInfo::of).map(|it| (it.name, it.selectors))),
            namespaces: namespaces.iter().map(named).collect(),
            unread: Vec::new(),
        }
    }

    /// Adds objects that could not be read: more Egresses than known may select a pod.
    #[must_use]
    pub fn without(mut self, what: &'static str) -> Self {
        self.unread.push(what);
        self
    }

    /// Whether Namespaces decide.
    pub fn needs_namespaces(&self) -> bool {
        self.selectors.need_namespaces()
    }

    /// The Egresses that select a pod; none select gateways and pods in their node's network.
    fn selected(&self, pod: &PodInfo) -> BTreeSet<EgressName> {
        if pod.gateway_of.is_some() || pod.uses_host_network {
            return BTreeSet::new();
        }
        let metadata = self.namespaces.get(&pod.namespace);
        self.selectors.select(&pod.namespace, metadata, Some(&pod.labels))
    }

    /// Reason why it is not known whether another Egress selects a pod.
    fn unknown(&self) -> Option<Why> {
        let message = || {
            format!(
                "whether an Egress selects the pod (spec.selectors) is not known, as {} cannot be read: ask with the right to read that",
                self.unread.join(" and ")
            )
        };
        (!self.unread.is_empty()).then(|| Why::new("SelectionNotKnown", message()))
    }

    /// The Egresses that a pod asks for.
    ///
    /// # Errors
    /// An annotation is invalid.
    pub fn asked_by(&self, pod: &PodInfo) -> Result<BTreeSet<EgressName>, EgressProblem> {
        let mut asked = chosen(&pod.annotations)?;
        asked.extend(self.selected(pod));
        Ok(asked)
    }

    /// Whether a pod asks for any, also in vain.
    fn is_asked_by(&self, pod: &PodInfo) -> bool {
        self.asked_by(pod).map_or(true, |asked| !asked.is_empty())
    }
}

/// Egresses of a cluster and what their plans need, as far as objects show it.
#[derive(Debug)]
pub struct Known {
    cluster: Cluster,
    /// All ranges of the cluster, also those in private networks: gateways forward nothing to them.
    in_cluster: PrefixSet,
    selection: Selection,
    endpoints: Option<Endpoints>,
    /// Pod and node of each gateway, where the slices name them.
    places: BTreeMap<GatewayUid, (Option<String>, Option<String>)>,
    /// Names of the gateway pods that hold source addresses.
    holders: BTreeMap<EgressName, BTreeSet<String>>,
}

/// A gateway of an Egress, as EndpointSlices show it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayPod {
    /// Name of its pod, if the EndpointSlice names one.
    pub pod: Option<String>,
    /// The Node that the pod runs on.
    pub node: Option<String>,
    /// Addresses of the gateway, at most one of each family.
    pub addresses: DualStackAddrs,
    /// Whether it takes flows.
    pub state: GatewayState,
}

/// Whether a gateway takes flows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum GatewayState {
    /// It takes new ones.
    Ready,
    /// It is being deleted: it keeps its flows and gets no new ones.
    Draining,
    /// It does not pass its readiness probe: it keeps its flows, as it may only be starting again, and gets no new ones.
    NotReady,
    /// It forwards nothing any more.
    Ended,
}

impl GatewayState {
    fn of(endpoint: &GatewayEndpoint) -> Self {
        match endpoint {
            _ if !endpoint.is_alive() => Self::Ended,
            _ if !endpoint.is_draining() => Self::Ready,
            endpoint if endpoint.terminating => Self::Draining,
            _ => Self::NotReady,
        }
    }

    /// As one word.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Draining => "draining",
            Self::NotReady => "notReady",
            Self::Ended => "ended",
        }
    }
}

/// Way of a packet, and the reasons for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    /// The pod's address that the packet has as its source.
    pub source: Option<IpAddr>,
    /// Steps of the decision, one sentence each, in order.
    pub steps: Vec<String>,
    /// Way that the packet takes.
    pub way: PacketWay,
    /// Problems with the egress of the pod, also those that do not concern this packet.
    pub problems: Vec<EgressProblem>,
}

/// Way of a packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum PacketWay {
    /// By `eth0`, with the pod's address, as without egress gateways.
    Uplink,
    /// To one of the gateways of an Egress.
    Gateways(Box<ToGateways>),
    /// By the network of the node, which is also the pod's.
    HostNetwork,
    /// It does not leave the pod.
    Local,
    /// The API server does not say it.
    NotKnown(Why),
    /// Nowhere.
    Refused(Why),
}

/// Reason why a packet is refused, or why its way is not known.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Why {
    /// Reason as one CamelCase word.
    pub reason: &'static str,
    /// Sentence for the user: the error, its object, and what to do about it.
    pub message: String,
}

/// A tunnel to the gateways of an Egress.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToGateways {
    /// The Egress.
    pub egress: EgressName,
    /// Routing table of the route.
    pub table: u32,
    /// The destination of the Egress that has the address.
    pub prefix: IpNet,
    /// Name of the tunnel's link.
    pub link: String,
    /// Address of the Service.
    pub cluster_ip: IpAddr,
    /// UDP port of the Service.
    pub port: u16,
    /// All flows of the pod go to the same gateway (`sessionAffinity: ClientIP`).
    pub by_client: bool,
    /// Gateways of the packet's family that the pod's node uses and that have not ended; `None` if the gateways are not known.
    pub gateways: Option<Vec<GatewayPod>>,
}

impl From<&EgressProblem> for Why {
    fn from(problem: &EgressProblem) -> Self {
        Self { reason: problem.reason.as_str(), message: problem.message.clone() }
    }
}

impl Why {
    fn new(reason: &'static str, message: impl Into<String>) -> Self {
        Self { reason, message: message.into() }
    }
}

impl Known {
    /// From what was read.
    pub fn of(objects: &Objects) -> Self {
        let cidrs = objects.service_ranges.iter().filter_map(|range| range.spec.as_ref()?.cidrs.as_ref());
        let services = cidrs.flatten().filter_map(|text| text.parse::<IpNet>().ok());
        let pools = objects.pools.iter().flat_map(subnets);
        let ranges: Vec<IpNet> = pools.chain(services).chain(objects.node_ranges.iter().copied()).collect();
        let egresses: Vec<EgressInfo> = objects.egresses.iter().map(EgressInfo::of).collect();
        let mut cluster = Cluster::of(
            egresses.iter().map(|egress| (egress.name.clone(), egress.known.clone())),
            objects.services.iter().map(KnownService::named),
        );
        let in_cluster: PrefixSet = ranges.iter().collect();
        for known in cluster.egresses.values_mut() {
            // What the controller is about to write.
            if known.ranges_are_stale || known.cluster_ranges.is_none() {
                let destinations = known.destinations.clone().unwrap_or_default();
                known.cluster_ranges = Some(cluster_ranges(&in_cluster, &destinations));
                known.ranges_are_stale = false;
            }
        }
        let holders = egresses.iter().map(|egress| {
            let pods = egress.source_addresses.values().flatten().cloned().collect();
            (egress.name.clone(), pods)
        });
        let mut places = BTreeMap::new();
        for endpoint in objects.slices.iter().flatten().flat_map(|slice| &slice.endpoints) {
            let target = endpoint.target_ref.as_ref().filter(|target| target.kind.as_deref() == Some("Pod"));
            let uid =
                target.and_then(|target| target.uid.clone()).or_else(|| endpoint.addresses.first().cloned());
            if let Some(uid) = uid {
                let pod = target.and_then(|target| target.name.clone());
                places.insert(uid, (pod, endpoint.node_name.clone()));
            }
        }
        let slices = objects.slices.as_ref().map(|all| all.iter().map(GatewaySlice::new).collect::<Vec<_>>());
        Self {
            cluster,
            in_cluster,
            selection: objects
                .selection
                .clone()
                .unwrap_or_else(|| Selection::of(&objects.egresses, &objects.namespaces)),
            endpoints: slices.map(|slices| joined(&slices)),
            places,
            holders: holders.collect(),
        }
    }

    /// Selection of Egresses by pods.
    pub fn selection(&self) -> &Selection {
        &self.selection
    }

    /// The gateways of an Egress; `None` if EndpointSlices may not be read. Those that take new flows come first.
    pub fn gateways(&self, egress: &EgressName) -> Option<Vec<GatewayPod>> {
        let of_egress = self.endpoints.as_ref()?.get(egress).cloned().unwrap_or_default();
        Some(self.gateway_pods(&of_egress))
    }

    /// Gateways of an Egress that a node uses; `None` if EndpointSlices may not be read.
    fn used_by(&self, node: Option<&str>, egress: &EgressName) -> Option<Vec<GatewayPod>> {
        let mut of_egress = self.endpoints.as_ref()?.get(egress).cloned().unwrap_or_default();
        let node = node.unwrap_or_default();
        limit(&mut of_egress, node, &self.preferred(node, egress));
        Some(self.gateway_pods(&of_egress))
    }

    fn preferred(&self, node: &str, egress: &EgressName) -> Preferred {
        let place = |(uid, (pod, node)): (&GatewayUid, &(Option<String>, Option<String>))| {
            Some(GatewayPlace { gateway: uid.clone(), pod: pod.clone()?, node: node.clone()? })
        };
        let places: Vec<GatewayPlace> = self.places.iter().filter_map(place).collect();
        let holders = self.holders.get(egress).into_iter().flatten().map(String::as_str).collect();
        Preferred::of(&places, node, &holders)
    }

    fn gateway_pods(&self, all: &BTreeMap<GatewayUid, GatewayEndpoint>) -> Vec<GatewayPod> {
        let pod = |(uid, endpoint): (&GatewayUid, &GatewayEndpoint)| {
            let (pod, node) = self.places.get(uid).cloned().unwrap_or_default();
            let state = GatewayState::of(endpoint);
            GatewayPod { pod, node, addresses: endpoint.addresses, state }
        };
        let mut pods: Vec<GatewayPod> = all.iter().map(pod).collect();
        pods.sort_by(|a, b| (a.state, &a.pod, a.addresses).cmp(&(b.state, &b.pod, b.addresses)));
        pods
    }

    /// Addresses of the Service of an Egress.
    pub fn cluster_ips(&self, egress: &EgressName) -> Vec<IpAddr> {
        let service = self.cluster.egresses.get(egress).and_then(|known| known.service.as_ref());
        service.into_iter().flat_map(|service| service.cluster_ips.iter()).collect()
    }

    /// Problems with the egress of a pod, whatever it sends.
    pub fn problems(&self, pod: &PodInfo) -> Vec<EgressProblem> {
        if pod.has_ended || !self.selection.is_asked_by(pod) {
            return Vec::new();
        }
        if pod.uses_host_network {
            return vec![EgressProblem::host_network()];
        }
        if let Some(of) = &pod.gateway_of {
            let egress = EgressName { namespace: pod.namespace.clone(), name: of.clone() };
            return vec![EgressProblem::gateway(&egress)];
        }
        match self.plan(pod) {
            Ok(plan) => plan.problems,
            Err(problem) => vec![problem],
        }
    }

    /// Without addresses there is nothing to route, so that only what concerns every pod of the namespace is found.
    fn plan(&self, pod: &PodInfo) -> Result<Plan, EgressProblem> {
        let chosen = self.selection.asked_by(pod)?;
        let addresses: DualStackAddrs = pod.addresses.iter().copied().collect();
        if addresses.is_empty() {
            let refused =
                chosen.iter().find_map(|egress| usable(&self.cluster, &pod.namespace, egress).err());
            return refused.map_or_else(|| Ok(Plan::nothing()), Err);
        }
        plan(&self.cluster, &Asking { namespace: pod.namespace.clone(), chosen, addresses, mtu: ANY_MTU })
    }

    /// Way of a packet of the pod to this address, with the reasons for it.
    pub fn explain(&self, pod: &PodInfo, destination: IpAddr) -> Explanation {
        let destination = destination.to_canonical();
        let family = IpFamily::of(destination);
        let source = pod.addresses.iter().copied().find(|address| IpFamily::of(*address) == family);
        let mut steps = Vec::new();
        let way = self.without_plan(pod, destination, source, &mut steps).unwrap_or_else(|| {
            steps.extend(self.by_selectors(pod));
            match self.plan(pod) {
                Ok(plan) => match self.walk(pod, &plan, destination, &mut steps) {
                    PacketWay::Uplink => self.by_uplink(),
                    way => way,
                },
                Err(problem) => {
                    steps.push(
                        "what the pod asks for cannot be set: a pod that starts is not started, a running one keeps what it has"
                            .to_owned(),
                    );
                    PacketWay::NotKnown(Why::from(&problem))
                }
            }
        });
        Explanation { source, steps, way, problems: self.problems(pod) }
    }

    /// The way of a packet for which no known Egress of the pod has a destination.
    fn by_uplink(&self) -> PacketWay {
        self.selection.unknown().map_or(PacketWay::Uplink, PacketWay::NotKnown)
    }

    /// That selectors make the pod a client, which nothing of the pod shows.
    fn by_selectors(&self, pod: &PodInfo) -> Option<String> {
        let selected: Vec<String> = self.selection.selected(pod).iter().map(EgressName::to_string).collect();
        (!selected.is_empty())
            .then(|| format!("the pod is selected by spec.selectors of Egress {}", selected.join(", ")))
    }

    /// Way that is clear without a plan; `None` if the routes of the pod decide.
    fn without_plan(
        &self,
        pod: &PodInfo,
        destination: IpAddr,
        source: Option<IpAddr>,
        steps: &mut Vec<String>,
    ) -> Option<PacketWay> {
        if pod.uses_host_network {
            steps
                .push("the pod uses its node's network (spec.hostNetwork): nothing is set for it".to_owned());
            return Some(PacketWay::HostNetwork);
        }
        if pod.has_ended {
            let message =
                "the pod has ended (Succeeded or Failed): it sends nothing, and no gateway takes its packets";
            return Some(PacketWay::Refused(Why::new("PodHasEnded", message)));
        }
        if destination.is_loopback() || pod.addresses.contains(&destination) {
            steps.push("the address is the pod's own: the kernel delivers the packet in the pod".to_owned());
            return Some(PacketWay::Local);
        }
        if source.is_none() {
            return Some(PacketWay::Refused(self.without_source(pod, destination)));
        }
        if pod.gateway_of.is_some() {
            steps.push(
                "the pod is a gateway by its labels, and a gateway uses no egress gateways itself".to_owned(),
            );
            return Some(PacketWay::Uplink);
        }
        if !self.selection.is_asked_by(pod) {
            let known = if self.selection.unread.is_empty() { "" } else { " that could be read" };
            let step = format!(
                "the pod asks for no egress gateways: it has no annotation {ANNOTATION_EGRESS_PREFIX}…, and no Egress{known} selects it"
            );
            steps.push(step);
            return Some(self.by_uplink());
        }
        None
    }

    /// Reason why the pod has no address of the destination's family.
    fn without_source(&self, pod: &PodInfo, destination: IpAddr) -> Why {
        if !pod.addresses.is_empty() {
            let family = IpFamily::of(destination);
            let message = format!("the pod has no {family} address, so it has no way to {destination}");
            return Why::new("PodHasNoAddress", message);
        }
        let why = Why::new("PodHasNoAddress", "the pod has no address yet: see its Events");
        self.problems(pod).first().map_or(why, Why::from)
    }
}

/// The subnets of a pool. Blocks lie in pools: a pool is not deleted before its blocks.
fn subnets(pool: &AddressPool) -> Vec<IpNet> {
    pool.spec.parse_subnets().unwrap_or_default().iter().flat_map(|nets| nets.iter()).collect()
}
