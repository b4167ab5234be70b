//! Ranges of addresses that something else uses than the pools: Services, Nodes, the mesh, other network plugins. Pools are compared with
//! them (`pool_status`), and `spec.meshCIDR` and `spec.grants` of the WireKubeMesh are here.
//!
//! The API server refuses most of it at apply (`deploy/policy/ranges-of-services.yaml`). This names what was there before, and what
//! was added later on the other side: a Node, a ServiceCIDR.

use std::sync::Arc;
use std::time::Duration;

use fairlead_api::conditions::{Finding, RANGE_IN_USE, RANGE_OF_POD_CIDRS, condition};
use fairlead_api::resources::{AddressPool, WireKubeMesh};
use fairlead_cluster::caches::Cache;
use fairlead_cluster::events::{EventPublisher, PendingEvent};
use fairlead_cluster::naming::some_of;
use fairlead_cluster::writes::apply_status;
use fairlead_ipam::used::{RangeUser, SharedRange, UsedRange, shared};
use ipnet::IpNet;
use k8s_openapi::api::core::v1::Node;
use k8s_openapi::api::networking::v1::ServiceCIDR;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use kube::{Api, Client, Resource as _, ResourceExt};
use serde_json::{Value, json};
use tokio::sync::watch;

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
}

impl Sources {
    /// An API server may have none of the kinds but Nodes.
    fn read(&self) -> Used {
        let has_answers = self.pools.has_answer() && self.meshes.has_answer() && self.services.has_answer();
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
        all.extend(WireKubeMesh::selected(&self.meshes.store.state()).and_then(|mesh| of_mesh(mesh)));
        // The caches have no order.
        all.sort_unstable();
        all
    }
}

fn of(user: &RangeUser, net: IpNet) -> UsedRange {
    UsedRange { user: user.clone(), net }
}

/// Addresses of a Node, and the networks of its pods.
fn of_node(node: &Node) -> Vec<UsedRange> {
    let name = || node.name_any();
    let addresses = node.status.iter().flat_map(|status| status.addresses.iter().flatten());
    let addresses = addresses.filter_map(|it| it.address.parse::<std::net::IpAddr>().ok());
    let own = addresses.map(|address| UsedRange { user: RangeUser::Node(name()), net: address.into() });
    let networks = node.spec.iter().flat_map(|spec| spec.pod_cidrs.iter().flatten());
    let networks = networks.filter_map(|text| text.parse::<IpNet>().ok());
    own.chain(networks.map(|net| UsedRange { user: RangeUser::PodNetwork(name()), net })).collect()
}

fn of_mesh(mesh: &WireKubeMesh) -> Option<UsedRange> {
    let net = mesh.spec.mesh_cidr.as_ref()?.parse().ok()?;
    Some(UsedRange { user: RangeUser::Mesh(mesh.name_any()), net })
}

/// Ranges of a pool that something else uses than other pools: a sentence, and whether packets go wrong for certain; `None` if there
/// are none. Pure.
pub(crate) fn conflict(nets: impl IntoIterator<Item = IpNet>, used: &[UsedRange]) -> Option<(String, bool)> {
    let mut found = shared(nets, used);
    found.retain(|shared| !matches!(shared.used.user, RangeUser::Pool(_)));
    told(&found)
}

/// Ranges of the mesh that something else uses, as for a pool. `spec.meshCIDR` shares no address with anything. A granted range may lie
/// around others, which go before it, but none that lies in a range of Services or in a pool has an effect. Pure.
fn conflict_of_mesh(mesh: &WireKubeMesh, used: &[UsedRange]) -> Option<(String, bool)> {
    let own = RangeUser::Mesh(mesh.name_any());
    let mut found = shared(of_mesh(mesh).map(|used| used.net), used);
    found.retain(|shared| shared.used.user != own);
    let granted = mesh.spec.grants.iter().flat_map(|grant| &grant.cidrs);
    let granted = granted.filter_map(|text| text.parse::<IpNet>().ok());
    found.extend(shared(granted, used).into_iter().filter(|shared| {
        let belongs = matches!(shared.used.user, RangeUser::Services(_) | RangeUser::Pool(_));
        belongs && shared.used.net.contains(&shared.net)
    }));
    told(&found)
}

fn told(found: &[SharedRange<'_>]) -> Option<(String, bool)> {
    let worst = &found.first()?.used.user;
    let texts: Vec<String> = found.iter().map(ToString::to_string).collect();
    let text = format!("{}: {}", some_of(&texts, MAX_NAMED), worst.consequence());
    Some((text, worst.is_certain()))
}

/// The condition of a mesh. Pure.
fn condition_of_mesh(mesh: &WireKubeMesh, used: &[UsedRange], now: jiff::Timestamp) -> Condition {
    let present = mesh.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let (holds, reason, message) = match conflict_of_mesh(mesh, used) {
        Some((message, is_certain)) => {
            let advice = "choose other addresses for spec.meshCIDR or spec.grants";
            (true, if is_certain { RANGE_IN_USE } else { RANGE_OF_POD_CIDRS }, format!("{message}; {advice}"))
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
    let Sources { nodes, pools, meshes, services } = &sources;
    let watches = [nodes.subscribe(), pools.subscribe(), meshes.subscribe(), services.subscribe()];
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

/// Writes the condition of the mesh, with an Event when it becomes true.
async fn tell(api: &Api<WireKubeMesh>, mesh: &WireKubeMesh, used: &[UsedRange], events: &EventPublisher) {
    let condition = condition_of_mesh(mesh, used, jiff::Timestamp::now());
    let present = mesh.status.iter().flat_map(|status| &status.conditions);
    let present = present.into_iter().find(|present| present.type_ == RANGE_IN_USE);
    if present == Some(&condition) {
        return;
    }
    let name = mesh.name_any();
    if let Err(error) = apply_status(api, &name, MANAGER, &patch(&name, &condition)).await {
        tracing::warn!(mesh = name, %error, "cannot write the condition {RANGE_IN_USE}; retrying");
        return;
    }
    if condition.status == "True" && present.is_none_or(|present| present.status != "True") {
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
    fn of_a_node_addresses_and_networks_of_pods_are_read() {
        let node = json!({
            "metadata": { "name": "n1" }, "spec": { "podCIDRs": ["10.244.1.0/24"] },
            "status": { "addresses": [
                { "type": "InternalIP", "address": "192.0.2.1" }, { "type": "Hostname", "address": "n1" },
            ] },
        });
        let found = of_node(&serde_json::from_value(node).unwrap());
        let own = used(RangeUser::Node("n1".to_owned()), "192.0.2.1/32");
        assert_eq!(found, [own, used(RangeUser::PodNetwork("n1".to_owned()), "10.244.1.0/24")]);
    }

    #[test]
    fn a_pool_among_services_is_told_with_both_names_and_other_pools_have_a_condition_of_their_own() {
        let nets = || ["10.96.8.0/24".parse().unwrap()];
        let ranges = [used(RangeUser::Pool("other".to_owned()), "10.96.8.0/24"), services("10.96.0.0/12")];
        let (message, is_certain) = conflict(nets(), &ranges).unwrap();
        assert!(is_certain);
        assert!(
            message
                .contains("10.96.8.0/24 shares addresses with 10.96.0.0/12 of ServiceCIDR kubernetes: every"),
            "{message}"
        );
        assert_eq!(conflict(nets(), &ranges[..1]), None);
        let plugin = [used(RangeUser::PodNetwork("n1".to_owned()), "10.96.8.0/26")];
        assert!(!conflict(nets(), &plugin).unwrap().1, "it depends on another plugin");
    }

    #[test]
    fn mesh_addresses_share_none_and_a_grant_may_lie_around_others_but_not_within() {
        let of = |spec: Value, ranges: &[UsedRange]| conflict_of_mesh(&mesh(&spec), ranges);
        let own = used(RangeUser::Mesh("default".to_owned()), "100.64.0.0/16");
        let addresses = json!({ "meshCIDR": "100.64.0.0/16" });
        assert_eq!(of(addresses.clone(), std::slice::from_ref(&own)), None);
        let pool = used(RangeUser::Pool("p".to_owned()), "100.64.7.0/24");
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
