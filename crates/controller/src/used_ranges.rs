//! Ranges of addresses that something else uses than the pools: Services, Nodes and hosts beside them, Peers, Egresses, the mesh, other
//! network plugins. Pools are compared with them (`pool_status`), and `spec.meshCIDR` and `spec.grants` of the WireKubeMesh are here.
//!
//! The API server refuses some of it at apply (`deploy/policy/ranges-of-services.yaml`). This names what was there before, and what
//! was added later on the other side: a Node, a ServiceCIDR, a Peer.

mod peers;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use fairlead_api::conditions::{
    Finding, RANGE_IN_USE, RANGE_OF_POD_CIDRS, RANGE_WITHIN_WIDER, condition, is_news,
};
use fairlead_api::resources::{AddressPool, Egress, NodeLocation, Topology, WireKubeMesh};
use fairlead_cluster::caches::Cache;
use fairlead_cluster::events::{EventPublisher, PendingEvent};
use fairlead_cluster::naming::some_of;
use fairlead_cluster::writes::apply_status;
use fairlead_ipam::used::{Harm, RangeUser, SharedRange, UsedRange, shared};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{Api, Client, Resource as _, ResourceExt};
use serde_json::{Value, json};
use tokio::sync::watch;

pub(crate) use self::peers::PeerPrefixes;
use crate::changes::Changes;

/// Reason of the condition [`RANGE_IN_USE`] where nothing else uses the addresses.
pub(crate) const FREE: &str = "RangeFree";
/// Field manager of the condition of the mesh.
const MANAGER: &str = "fairlead-controller-ranges";
/// Changes are collected this long: kubelets write the status of each Node every few minutes.
const DEBOUNCE: Duration = Duration::from_millis(500);
/// Interval without a change, for writes that failed.
const RESYNC_INTERVAL: Duration = Duration::from_secs(30);
/// Interval before the first lists are there.
const FIRST_INTERVAL: Duration = Duration::from_millis(500);
/// Most ranges that a message names.
const MAX_NAMED: usize = 3;

/// All ranges with their users, pools included, in order; `None` before they are known.
pub(crate) type Used = Option<Arc<Vec<UsedRange>>>;

/// Caches from which the ranges are read.
pub(crate) struct Sources {
    pub(crate) nodes: Cache<Node>,
    pub(crate) pools: Cache<AddressPool>,
    pub(crate) meshes: Cache<WireKubeMesh>,
    pub(crate) services: Cache<ServiceCIDR>,
    pub(crate) egresses: Cache<Egress>,
    /// Peers outside of the cluster.
    pub(crate) external: Cache<PeerPrefixes>,
}

impl Sources {
    /// An API server may have none of the kinds but Nodes.
    fn read(&self) -> Used {
        let has_answers = self.pools.has_answer()
            && self.meshes.has_answer()
            && self.services.has_answer()
            && self.egresses.has_answer()
            && self.external.has_answer();
        (self.nodes.is_ready() && has_answers).then(|| Arc::new(self.ranges()))
    }

    fn ranges(&self) -> Vec<UsedRange> {
        let mut all: Vec<UsedRange> =
            self.nodes.store.state().iter().flat_map(|node| of_node(node)).collect();
        for pool in self.pools.store.state() {
            let subnets = pool.spec.parse_subnets().unwrap_or_default();
            let user = RangeUser::Pool(pool.name_any());
            all.extend(subnets.iter().flat_map(|nets| nets.iter()).map(|net| of(&user, net)));
        }
        for service in self.services.store.state() {
            let cidrs = service.spec.iter().flat_map(|spec| spec.cidrs.iter().flatten());
            let user = RangeUser::Services(service.name_any());
            all.extend(cidrs.filter_map(|text| text.parse().ok()).map(|net| of(&user, net)));
        }
        all.extend(self.egresses.store.state().iter().flat_map(|egress| of_egress(egress)));
        all.extend(self.external.store.state().iter().flat_map(|peer| peer.ranges()));
        all.extend(WireKubeMesh::selected(&self.meshes.store.state()).into_iter().flat_map(|it| of_mesh(it)));
        // The caches have no order, and a prefix can be granted to several members.
        all.sort_unstable();
        all.dedup();
        all
    }
}

fn of(user: &RangeUser, net: IpNet) -> UsedRange {
    UsedRange { user: user.clone(), net }
}

/// Addresses of a Node, the networks of its pods, and those of hosts beside it.
fn of_node(node: &Node) -> Vec<UsedRange> {
    let name = || node.name_any();
    let addresses = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let addresses = addresses.filter_map(|it| it.address.parse::<IpAddr>().ok());
    let own = addresses.map(|address| UsedRange { user: RangeUser::Node(name()), net: address.into() });
    let networks = node.spec.iter().flat_map(|spec| spec.pod_cidrs.iter().flatten());
    let networks = networks.filter_map(|text| text.parse::<IpNet>().ok());
    let networks = networks.map(|net| UsedRange { user: RangeUser::PodNetwork(name()), net });
    // The topology of the mesh has no part in the networks.
    let (location, _) = NodeLocation::of(node, &Topology::default());
    let (beside, _) = location.parse_networks();
    let beside = beside.into_iter().map(|net| UsedRange { user: RangeUser::Site(name()), net });
    own.chain(networks).chain(beside).collect()
}

/// Source addresses that the controller of egress gateways permits. What an Egress only asks for has no effect, and is told there.
fn of_egress(egress: &Egress) -> Vec<UsedRange> {
    let name = format!("{}/{}", egress.namespace().unwrap_or_default(), egress.name_any());
    let user = RangeUser::SourceAddress(name);
    let slots = egress.status.iter().flat_map(|status| &status.source_addresses);
    let addresses = slots.flat_map(|slot| &slot.addresses).filter_map(|text| text.parse::<IpAddr>().ok());
    addresses.map(|address| of(&user, address.into())).collect()
}

fn of_mesh(mesh: &WireKubeMesh) -> Vec<UsedRange> {
    let own = mesh_range(mesh).map(|net| of(&RangeUser::Mesh(mesh.name_any()), net));
    let grants = granted(mesh).map(|net| of(&RangeUser::Grant(mesh.name_any()), net));
    own.into_iter().chain(grants).collect()
}

fn mesh_range(mesh: &WireKubeMesh) -> Option<IpNet> {
    mesh.spec.mesh_cidr.as_ref()?.parse().ok()
}

fn granted(mesh: &WireKubeMesh) -> impl Iterator<Item = IpNet> {
    let texts = mesh.spec.grants.iter().flat_map(|grant| &grant.cidrs);
    texts.filter_map(|text| text.parse().ok())
}

/// Ranges of a pool that something else uses than other pools: a sentence, and the worst harm; `None` if there are none. Pure.
pub(crate) fn conflict(nets: impl IntoIterator<Item = IpNet>, used: &[UsedRange]) -> Option<(String, Harm)> {
    let mut found = shared(nets, used);
    found.retain(|shared| !matches!(shared.used.user, RangeUser::Pool(_)));
    told(found)
}

/// Ranges of the mesh that something else uses, as for a pool. A granted range may lie around others, which go before it, but none that
/// lies in a range of Services or in a pool has an effect. Pure.
fn conflict_of_mesh(mesh: &WireKubeMesh, used: &[UsedRange]) -> Option<(String, Harm)> {
    let own = RangeUser::Mesh(mesh.name_any());
    let mut found = shared(mesh_range(mesh), used);
    found.retain(|shared| shared.used.user != own);
    found.extend(shared(granted(mesh), used).into_iter().filter(|shared| {
        let belongs = matches!(shared.used.user, RangeUser::Services(_) | RangeUser::Pool(_));
        belongs && shared.used.net.contains(&shared.net)
    }));
    told(found)
}

fn told(mut found: Vec<SharedRange<'_>>) -> Option<(String, Harm)> {
    found.sort_unstable();
    let worst = found.first()?;
    let texts: Vec<String> = found.iter().map(ToString::to_string).collect();
    let text = format!("{}: {}", some_of(&texts, MAX_NAMED), worst.consequence());
    Some((text, worst.harm))
}

/// Reason of the condition [`RANGE_IN_USE`] for the worst harm.
pub(crate) fn reason(harm: Harm) -> &'static str {
    match harm {
        Harm::Certain => RANGE_IN_USE,
        Harm::OtherPlugin => RANGE_OF_POD_CIDRS,
        Harm::WithinWider => RANGE_WITHIN_WIDER,
    }
}

/// The condition of a mesh. Pure.
fn condition_of_mesh(mesh: &WireKubeMesh, used: &[UsedRange], now: jiff::Timestamp) -> Condition {
    let present = mesh.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let (holds, reason, message) = match conflict_of_mesh(mesh, used) {
        Some((message, harm)) => {
            let advice = "choose other addresses for spec.meshCIDR or spec.grants";
            (true, reason(harm), format!("{message}; {advice}"))
        }
        None => (false, FREE, "nothing else uses addresses of spec.meshCIDR".to_owned()),
    };
    let finding = Finding { type_: RANGE_IN_USE, holds, reason, message };
    condition(present, finding, mesh.metadata.generation, Time(now))
}

/// Keeps the ranges and the condition of the mesh current forever. `generation` grows with each change of the ranges.
pub(crate) async fn run(
    client: Client,
    sources: Sources,
    used: watch::Sender<Used>,
    generation: watch::Sender<u64>,
    events: EventPublisher,
) {
    let Sources { nodes, pools, meshes, services, egresses, external } = &sources;
    let watches = [
        nodes.subscribe(),
        pools.subscribe(),
        meshes.subscribe(),
        services.subscribe(),
        egresses.subscribe(),
        external.subscribe(),
    ];
    let mut changes = Changes { watches, resync: FIRST_INTERVAL, debounce: DEBOUNCE };
    let api: Api<WireKubeMesh> = Api::all(client);
    loop {
        if let Some(now) = sources.read() {
            changes.resync = RESYNC_INTERVAL;
            let replace = |known: &mut Used| {
                let differs = known.as_ref() != Some(&now);
                *known = Some(Arc::clone(&now));
                differs
            };
            if used.send_if_modified(replace) {
                generation.send_modify(|count| *count = count.wrapping_add(1));
            }
            if let Some(mesh) = WireKubeMesh::selected(&sources.meshes.store.state()) {
                tell(&api, mesh, &now, &events).await;
            }
        }
        changes.next().await;
    }
}

/// Writes the condition of the mesh, with an Event when it becomes true, or worse.
async fn tell(api: &Api<WireKubeMesh>, mesh: &WireKubeMesh, used: &[UsedRange], events: &EventPublisher) {
    let condition = condition_of_mesh(mesh, used, jiff::Timestamp::now());
    let present = mesh.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    if present.contains(&condition) {
        return;
    }
    let name = mesh.name_any();
    if let Err(error) = apply_status(api, &name, MANAGER, &patch(&name, &condition)).await {
        tracing::warn!(mesh = name, %error, "cannot write the condition {RANGE_IN_USE}; retrying");
        return;
    }
    if is_news(present, &condition, RANGE_IN_USE) {
        let regarding = mesh.object_ref(&());
        events.warn(PendingEvent {
            regarding,
            reason: RANGE_IN_USE,
            action: "Compare",
            note: condition.message,
        });
    }
}

fn patch(name: &str, condition: &Condition) -> Value {
    json!({
        "apiVersion": "wirekube.io/v1alpha1", "kind": "WireKubeMesh", "metadata": { "name": name },
        "status": { "conditions": [condition] },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn used(user: RangeUser, net: &str) -> UsedRange {
        UsedRange { user, net: net.parse().unwrap() }
    }

    fn services(net: &str) -> UsedRange {
        used(RangeUser::Services("kubernetes".to_owned()), net)
    }

    fn mesh(spec: &Value) -> WireKubeMesh {
        WireKubeMesh::new("default", serde_json::from_value(spec.clone()).unwrap())
    }

    #[test]
    fn of_a_node_addresses_and_networks_of_pods_and_of_hosts_beside_it_are_read() {
        let beside = json!({ "kilo.squat.ai/allowed-location-ips": "192.168.7.0/24, printer" });
        let node = json!({
            "metadata": { "name": "n1", "annotations": beside }, "spec": { "podCIDRs": ["10.244.1.0/24"] },
            "status": { "addresses": [
                { "type": "InternalIP", "address": "192.0.2.1" }, { "type": "Hostname", "address": "n1" },
            ] },
        });
        let found = of_node(&serde_json::from_value(node).unwrap());
        let own = used(RangeUser::Node("n1".to_owned()), "192.0.2.1/32");
        let pods = used(RangeUser::PodNetwork("n1".to_owned()), "10.244.1.0/24");
        assert_eq!(found, [own, pods, used(RangeUser::Site("n1".to_owned()), "192.168.7.0/24")]);
    }

    #[test]
    fn of_an_egress_the_source_addresses_are_read_that_its_controller_permits() {
        let egress = json!({
            "apiVersion": "coil.cybozu.com/v2", "kind": "Egress", "metadata": { "name": "nat", "namespace": "shop" },
            "spec": { "destinations": ["0.0.0.0/0"], "sourceAddresses": ["198.51.100.7", "10.64.0.9"] },
            "status": { "sourceAddresses": [{ "addresses": ["198.51.100.7", "2001:db8::7"], "gateway": "nat-0" }] },
        });
        let found = of_egress(&serde_json::from_value(egress).unwrap());
        let of_nat = |net| used(RangeUser::SourceAddress("shop/nat".to_owned()), net);
        assert_eq!(found, [of_nat("198.51.100.7/32"), of_nat("2001:db8::7/128")]);
    }

    #[test]
    fn of_a_mesh_its_addresses_and_what_is_granted_are_read() {
        let mesh = mesh(&json!({
            "meshCIDR": "100.64.0.0/16", "grants": [{ "node": "a", "cidrs": ["192.0.2.1/32"] }],
        }));
        let own = used(RangeUser::Mesh("default".to_owned()), "100.64.0.0/16");
        assert_eq!(of_mesh(&mesh), [own, used(RangeUser::Grant("default".to_owned()), "192.0.2.1/32")]);
    }

    #[test]
    fn a_pool_whose_addresses_are_led_to_others_is_told_with_both_names() {
        let conflict = |user, net| conflict(["10.64.0.0/16".parse().unwrap()], &[used(user, net)]).unwrap();
        for (user, net, words) in [
            (
                RangeUser::Peer("laptop".to_owned()),
                "10.64.1.1/32",
                "of spec.allowedIPs of Peer laptop: packets",
            ),
            (
                RangeUser::Site("home-3".to_owned()),
                "10.64.2.0/24",
                "of kilo.squat.ai/allowed-location-ips of Node home-3: packets",
            ),
            (
                RangeUser::SourceAddress("shop/nat".to_owned()),
                "10.64.3.7/32",
                "of status.sourceAddresses of Egress shop/nat: replies",
            ),
            (
                RangeUser::Grant("default".to_owned()),
                "10.64.4.7/32",
                "of spec.grants of WireKubeMesh default: a pod or a node can get",
            ),
        ] {
            let (message, harm) = conflict(user, net);
            assert_eq!(reason(harm), RANGE_IN_USE, "{message}");
            assert!(
                message.contains(&format!("10.64.0.0/16 shares addresses with {net} {words}")),
                "{message}"
            );
        }
        let (message, harm) = conflict(RangeUser::Peer("office".to_owned()), "10.0.0.0/8");
        assert_eq!(reason(harm), RANGE_WITHIN_WIDER, "{message}");
    }

    #[test]
    fn a_pool_among_services_is_told_with_both_names_and_other_pools_have_a_condition_of_their_own() {
        let nets = || ["10.96.8.0/24".parse().unwrap()];
        let ranges = [used(RangeUser::Pool("other".to_owned()), "10.96.8.0/24"), services("10.96.0.0/12")];
        let (message, harm) = conflict(nets(), &ranges).unwrap();
        assert_eq!(harm, Harm::Certain);
        assert!(
            message
                .contains("10.96.8.0/24 shares addresses with 10.96.0.0/12 of ServiceCIDR kubernetes: every"),
            "{message}"
        );
        assert_eq!(conflict(nets(), &ranges[..1]), None);
        let plugin = [used(RangeUser::PodNetwork("n1".to_owned()), "10.96.8.0/26")];
        assert_eq!(conflict(nets(), &plugin).unwrap().1, Harm::OtherPlugin);
    }

    #[test]
    fn mesh_addresses_share_none_and_a_grant_may_lie_around_others_but_not_within() {
        let of = |spec: Value, ranges: &[UsedRange]| conflict_of_mesh(&mesh(&spec), ranges);
        let own = used(RangeUser::Mesh("default".to_owned()), "100.64.0.0/16");
        let addresses = json!({ "meshCIDR": "100.64.0.0/16" });
        assert_eq!(of(addresses.clone(), std::slice::from_ref(&own)), None);
        let pool = used(RangeUser::Pool("p".to_owned()), "100.64.7.0/24");
        let peer = used(RangeUser::Peer("laptop".to_owned()), "100.64.0.9/32");
        assert!(of(addresses.clone(), &[own.clone(), peer]).unwrap().0.contains("of Peer laptop: packets"));
        assert!(of(addresses, &[own, pool]).unwrap().0.contains("of AddressPool p: a pod and a node"));
        let granted = |net: &str| json!({ "grants": [{ "node": "a", "cidrs": [net] }] });
        assert_eq!(of(granted("0.0.0.0/0"), &[services("10.96.0.0/12")]), None);
        assert!(of(granted("10.96.1.0/24"), &[services("10.96.0.0/12")]).unwrap().0.contains("ServiceCIDR"));
    }

    #[test]
    fn the_condition_of_a_mesh_keeps_its_time_and_goes() {
        let at = |second| jiff::Timestamp::from_second(second).unwrap();
        let mut mesh = mesh(&json!({ "meshCIDR": "10.96.0.0/24" }));
        let found = condition_of_mesh(&mesh, &[services("10.96.0.0/12")], at(1));
        assert_eq!((found.status.as_str(), found.reason.as_str()), ("True", RANGE_IN_USE));
        mesh.status = serde_json::from_value(json!({ "conditions": [found] })).unwrap();
        assert_eq!(condition_of_mesh(&mesh, &[services("10.96.0.0/12")], at(2)), found);
        assert_eq!(condition_of_mesh(&mesh, &[], at(3)).reason, FREE);
    }
}
