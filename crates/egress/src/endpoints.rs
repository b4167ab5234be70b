//! The gateways of Egresses, from the EndpointSlices of their Services.
//!
//! The EndpointSlice controller copies the labels of a Service to its slices (`endpointslice/utils.go`), so that the selector of the
//! Services selects the slices. A Service of two families has slices of each; `targetRef` says which endpoints are one pod.

use std::borrow::Borrow;
use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use fairlead_address::{DualStackAddrs, is_reachable};
use fairlead_api::fou::MAX_GATEWAYS;
use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::api::discovery::v1::{Endpoint, EndpointSlice};
use sha2::{Digest as _, Sha256};

use crate::EgressName;

/// Message for a client of an Egress that has no gateway that takes flows.
pub const NO_GATEWAY: &str = "no gateway of the Egress is ready: see its pods";
/// Label: the Service of a slice (Kubernetes).
const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// UID of a gateway's pod, or the gateway's address where the slice names no pod.
pub type GatewayUid = String;

/// Gateways of each Egress.
pub type Endpoints = BTreeMap<EgressName, BTreeMap<GatewayUid, GatewayEndpoint>>;

/// A gateway as EndpointSlices show it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct GatewayEndpoint {
    /// Addresses of the gateway, at most one of each family.
    pub addresses: DualStackAddrs,
    /// Whether it passes its readiness probe and is not being deleted.
    pub ready: bool,
    /// Whether it passes its readiness probe.
    pub serving: bool,
    /// Whether it is being deleted.
    pub terminating: bool,
}

impl GatewayEndpoint {
    /// Whether its program is there, as far as Kubernetes knows.
    pub fn answers(&self) -> bool {
        self.ready || self.serving
    }

    /// Whether it forwards packets, as far as is known. One that is not ready may only be starting its program again: the kernel
    /// forwards meanwhile, and flows that moved to another gateway would end there. Echo requests find the dead ones.
    pub fn is_alive(&self) -> bool {
        self.ready || self.serving || !self.terminating
    }

    /// Whether it keeps its flows and takes no new ones.
    pub fn is_draining(&self) -> bool {
        self.terminating || !self.ready
    }
}

/// Gateways of an Egress that are in one EndpointSlice.
#[derive(Debug, Clone)]
pub struct GatewaySlice {
    egress: EgressName,
    endpoints: Vec<(GatewayUid, GatewayEndpoint)>,
    places: Vec<GatewayPlace>,
}

/// Pod and node of a gateway, as an EndpointSlice shows them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayPlace {
    /// UID of the gateway.
    pub gateway: GatewayUid,
    /// Name of its pod.
    pub pod: String,
    /// Name of its node.
    pub node: String,
}

impl GatewaySlice {
    /// Gateways of an EndpointSlice. Endpoints without a usable address are left out.
    pub fn new(slice: &EndpointSlice) -> Self {
        let namespace = slice.metadata.namespace.clone().unwrap_or_default();
        let labels = slice.metadata.labels.as_ref();
        let name = labels.and_then(|labels| labels.get(SERVICE_NAME)).cloned().unwrap_or_default();
        Self {
            egress: EgressName { namespace, name },
            endpoints: slice.endpoints.iter().filter_map(gateway).collect(),
            places: slice.endpoints.iter().filter_map(place).collect(),
        }
    }

    /// Egress of the slice, and the places of those of its gateways that are in it.
    pub fn places(&self) -> (&EgressName, &[GatewayPlace]) {
        (&self.egress, &self.places)
    }
}

/// Consumers use the first address of an endpoint (Kubernetes, `Endpoint.addresses`). Unset conditions are ready and serving, and not
/// terminating.
fn gateway(endpoint: &Endpoint) -> Option<(GatewayUid, GatewayEndpoint)> {
    let address = address(endpoint)?;
    let conditions = endpoint.conditions.as_ref();
    let ready = conditions.and_then(|it| it.ready).unwrap_or(true);
    let serving = conditions.and_then(|it| it.serving).unwrap_or(ready);
    let terminating = conditions.and_then(|it| it.terminating).unwrap_or(false);
    let addresses = [address].into_iter().collect();
    Some((uid(endpoint, address), GatewayEndpoint { addresses, ready, serving, terminating }))
}

fn address(endpoint: &Endpoint) -> Option<IpAddr> {
    endpoint.addresses.first()?.parse().ok().filter(|address| is_reachable(*address))
}

fn uid(endpoint: &Endpoint, address: IpAddr) -> GatewayUid {
    let uid = pod(endpoint).and_then(|pod| pod.uid.clone());
    uid.unwrap_or_else(|| address.to_string())
}

fn pod(endpoint: &Endpoint) -> Option<&ObjectReference> {
    endpoint.target_ref.as_ref().filter(|target| target.kind.as_deref() == Some("Pod"))
}

fn place(endpoint: &Endpoint) -> Option<GatewayPlace> {
    let gateway = uid(endpoint, address(endpoint)?);
    Some(GatewayPlace { gateway, pod: pod(endpoint)?.name.clone()?, node: endpoint.node_name.clone()? })
}

/// Gateways that a node uses before all others.
#[derive(Debug, Clone, Default)]
pub struct Preferred {
    /// Gateways on the node, which has to hear their holds.
    local: BTreeSet<GatewayUid>,
    /// Gateways that hold source addresses: others may forward nothing.
    holders: BTreeSet<GatewayUid>,
}

impl Preferred {
    /// Preferred gateways of an Egress whose gateways run at these places; `holders` are the names of the pods that hold source addresses.
    pub fn of<'a>(
        places: impl IntoIterator<Item = &'a GatewayPlace>,
        node: &str,
        holders: &BTreeSet<&str>,
    ) -> Self {
        let mut preferred = Self::default();
        for place in places {
            if place.node == node {
                preferred.local.insert(place.gateway.clone());
            }
            if holders.contains(place.pod.as_str()) {
                preferred.holders.insert(place.gateway.clone());
            }
        }
        preferred
    }
}

/// The gateways that a node uses. An Egress has at most [`MAX_GATEWAYS`] here, since a client can use no more. Which ones depends on
/// the node, so that all gateways get clients. `holders` are the pods that hold source addresses of each Egress.
pub fn gateways(
    slices: &[impl Borrow<GatewaySlice>],
    node: &str,
    holders: impl Fn(&EgressName) -> BTreeSet<String>,
) -> Endpoints {
    let mut all = joined(slices.iter().map(Borrow::borrow));
    for (egress, of_egress) in all.iter_mut().filter(|(_, gateways)| gateways.len() > MAX_GATEWAYS) {
        let holders = holders(egress);
        let holders = holders.iter().map(String::as_str).collect();
        let of_slices = slices.iter().map(Borrow::borrow).filter(|slice| slice.egress == *egress);
        let preferred = Preferred::of(of_slices.flat_map(|slice| &slice.places), node, &holders);
        limit(of_egress, node, &preferred);
    }
    all
}

/// The endpoints of all slices, those of a pod together. While both slices of a Service are being written, one may be older.
pub fn joined<'a>(slices: impl IntoIterator<Item = &'a GatewaySlice>) -> Endpoints {
    let mut all = Endpoints::new();
    for slice in slices.into_iter().filter(|slice| !slice.egress.name.is_empty()) {
        let of_egress = all.entry(slice.egress.clone()).or_default();
        for (uid, part) in &slice.endpoints {
            let whole = of_egress.entry(uid.clone()).or_default();
            whole.addresses = whole.addresses.iter().chain(part.addresses.iter()).collect();
            whole.ready |= part.ready;
            whole.serving |= part.serving;
            whole.terminating |= part.terminating;
        }
    }
    all
}

/// Keeps those that run on the node, then those that hold source addresses, then those that take new flows before the others, by rendezvous
/// hashing (Thaler and Ravishankar, 1998): a gateway that comes or goes changes the choice of few nodes.
pub fn limit(gateways: &mut BTreeMap<GatewayUid, GatewayEndpoint>, node: &str, preferred: &Preferred) {
    if gateways.len() <= MAX_GATEWAYS {
        return;
    }
    let rank = |(uid, gateway): (&GatewayUid, &GatewayEndpoint)| {
        let hash: [u8; 32] =
            Sha256::new().chain_update(node).chain_update([0]).chain_update(uid).finalize().into();
        let is_other = (!preferred.local.contains(uid), !preferred.holders.contains(uid));
        (!gateway.is_alive(), is_other, gateway.is_draining(), hash, uid.clone())
    };
    let mut ranked: Vec<_> = gateways.iter().map(rank).collect();
    ranked.sort_unstable();
    for (.., uid) in ranked.into_iter().skip(MAX_GATEWAYS) {
        gateways.remove(&uid);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn slice(name: &str, family: &str, endpoints: Value) -> GatewaySlice {
        let slice = json!({
            "metadata": {"name": name, "namespace": "internet-egress", "labels": {SERVICE_NAME: "nat"}},
            "addressType": family, "endpoints": endpoints, "ports": [{"port": 5555, "protocol": "UDP"}],
        });
        GatewaySlice::new(&serde_json::from_value(slice).unwrap())
    }

    fn endpoint(address: &str, pod: &str, conditions: Value) -> Value {
        json!({"addresses": [address], "conditions": conditions, "targetRef": {"kind": "Pod", "uid": pod}})
    }

    #[test]
    fn slices_of_both_families_are_joined_by_pod() {
        let ready = json!({"ready": true, "serving": true, "terminating": false});
        let ending = json!({"ready": false, "serving": true, "terminating": true});
        let slices = [
            slice(
                "a",
                "IPv4",
                json!([
                    endpoint("10.0.0.1", "p1", ready.clone()),
                    endpoint("10.0.0.2", "p2", ending.clone())
                ]),
            ),
            slice("b", "IPv6", json!([endpoint("fd00::2", "p2", ending), endpoint("fd00::1", "p1", ready)])),
            slice(
                "c",
                "IPv4",
                json!([{"addresses": ["10.0.0.9"]}, {"addresses": ["127.0.0.1"]}, {"addresses": ["?"]}]),
            ),
        ];
        let all = gateways(&slices, "n1", |_| BTreeSet::new());
        let (egress, found) = all.first_key_value().unwrap();
        assert_eq!((egress.to_string(), all.len()), ("internet-egress/nat".to_owned(), 1));
        let shown: Vec<String> = found
            .iter()
            .map(|(uid, it)| {
                format!("{uid}: {} alive {} draining {}", it.addresses, it.is_alive(), it.is_draining())
            })
            .collect();
        assert_eq!(
            shown,
            [
                "10.0.0.9: 10.0.0.9 alive true draining false",
                "p1: 10.0.0.1 and fd00::1 alive true draining false",
                "p2: 10.0.0.2 and fd00::2 alive true draining true",
            ]
        );
    }

    #[test]
    fn a_gateway_keeps_its_flows_while_its_program_starts_again_and_none_when_it_has_ended() {
        let of = |ready, serving, terminating| GatewayEndpoint {
            ready,
            serving,
            terminating,
            ..Default::default()
        };
        for (gateway, alive, draining) in [
            (of(true, true, false), true, false),
            (of(false, false, false), true, true),
            (of(false, true, true), true, true),
            (of(false, false, true), false, true),
        ] {
            assert_eq!((gateway.is_alive(), gateway.is_draining()), (alive, draining), "{gateway:?}");
        }
    }

    #[test]
    fn of_many_gateways_each_node_has_as_many_as_a_client_can_use_and_prefers_those_that_take_flows() {
        let conditions =
            |number: usize| json!({"ready": number < 60, "serving": true, "terminating": number >= 60});
        let many = |range: std::ops::Range<usize>| {
            let endpoints: Vec<_> = range
                .map(|number| {
                    endpoint(&format!("10.0.0.{number}"), &format!("p{number}"), conditions(number))
                })
                .collect();
            [slice("a", "IPv4", endpoints.into())]
        };
        let chosen = |range, node: &str| {
            gateways(&many(range), node, |_| BTreeSet::new()).into_values().next().unwrap()
        };
        let (n1, n2) = (chosen(1..90, "n1"), chosen(1..90, "n2"));
        assert_eq!((n1.len(), n2.len()), (MAX_GATEWAYS, MAX_GATEWAYS));
        assert_ne!(n1, n2);
        assert!(n1.values().all(|gateway| gateway.ready));
        let fewer = chosen(1..89, "n1");
        assert_eq!(n1, fewer, "a draining one more");
    }

    #[test]
    fn of_many_gateways_those_on_the_node_and_those_that_hold_source_addresses_are_kept() {
        let of = |number: usize, state: Value| {
            let mut endpoint = endpoint(&format!("10.0.0.{number}"), &format!("p{number}"), state);
            endpoint["nodeName"] = json!(format!("n{number}"));
            endpoint["targetRef"]["name"] = json!(format!("nat-{number}"));
            endpoint
        };
        let ready = json!({"ready": true, "serving": true});
        let draining = json!({"ready": false, "serving": true, "terminating": true});
        let ended = json!({"ready": false, "serving": false, "terminating": true});
        let mut endpoints: Vec<_> = (1..80).map(|number| of(number, ready.clone())).collect();
        endpoints.extend((80..83).map(|number| of(number, draining.clone())));
        endpoints.push(of(83, ended));
        let slices = [slice("a", "IPv4", endpoints.into())];
        let holders = |_: &EgressName| ["nat-7", "nat-81", "nat-83", "gone"].map(str::to_owned).into();
        for local in [5, 80] {
            let node = format!("n{local}");
            let chosen = gateways(&slices, &node, holders).into_values().next().unwrap();
            assert_eq!(chosen.len(), MAX_GATEWAYS);
            for kept in [local, 7, 81] {
                assert!(chosen.contains_key(&format!("p{kept}")), "p{kept} on {node}");
            }
            assert!(!chosen.contains_key("p83"), "it forwards nothing");
            let draining = chosen.values().filter(|gateway| gateway.is_draining()).count();
            assert_eq!(draining, if local == 80 { 2 } else { 1 }, "no other one");
        }
    }
}
