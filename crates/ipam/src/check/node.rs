//! One node: its allocation table, its kernel, and what the API server has of it.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;

use super::finding::{Finding, Severity, finding};
use super::shared::{Blocks, duplicates, overlap, pool_of_block};
use super::view::{KnownBlock, KnownPod, KnownPool, NodeView, PodLink, Reservation};
use crate::table::{Allocated, Key};

/// Compares everything that is known. What the API server has not said is not compared. The worst come first.
pub fn node(view: &NodeView) -> Vec<Finding> {
    let index = Index::new(view);
    let mut found: Vec<Finding> = Vec::new();
    for reservation in view.reservations.iter().filter(|reservation| !reservation.busy) {
        found.extend(index.reservation(reservation));
    }
    found.extend(view.links.iter().filter_map(|link| index.link(link)));
    found.extend(view.stray.iter().map(|address| stray(*address)));
    found.extend(index.blocks());
    found.extend(index.pods());
    found.sort();
    found.dedup();
    found
}

/// The view, by what it is asked for.
struct Index<'a> {
    view: &'a NodeView,
    links: BTreeMap<&'a Key, &'a PodLink>,
    allocated: BTreeMap<&'a Key, &'a Reservation>,
    holders: BTreeMap<IpAddr, &'a Reservation>,
    /// Blocks of all nodes.
    blocks: Option<Blocks<'a>>,
}

fn addresses(allocated: &Allocated) -> Vec<IpAddr> {
    allocated.ipv4.map(IpAddr::from).into_iter().chain(allocated.ipv6.map(IpAddr::from)).collect()
}

/// Description by which people find the attachment.
fn name(reservation: &Reservation) -> String {
    match &reservation.owner {
        Some(owner) => {
            format!("pod {}/{} (container {})", owner.namespace, owner.name, reservation.key.container_id)
        }
        None => format!("container {}", reservation.key.container_id),
    }
}

impl<'a> Index<'a> {
    fn new(view: &'a NodeView) -> Self {
        let of_address = |reservation: &'a Reservation| {
            addresses(&reservation.allocated).into_iter().map(move |address| (address, reservation))
        };
        Self {
            view,
            links: view.links.iter().map(|link| (&link.key, link)).collect(),
            allocated: view.reservations.iter().map(|reservation| (&reservation.key, reservation)).collect(),
            holders: view.reservations.iter().flat_map(of_address).collect(),
            blocks: view.blocks.as_deref().map(Blocks::new),
        }
    }

    fn reservation(&self, reservation: &Reservation) -> Vec<Finding> {
        let mut found = Vec::new();
        match self.links.get(&reservation.key) {
            None => found.push(leaked(reservation)),
            Some(link) => {
                let missing = addresses(&reservation.allocated);
                let missing = missing.into_iter().filter(|address| !link.addresses.contains(address));
                found.extend(missing.map(|address| route_missing(reservation, link, address)));
            }
        }
        for address in addresses(&reservation.allocated) {
            let Some(blocks) = &self.blocks else { continue };
            let block = blocks.having(address);
            if block.is_none_or(|block| block.node != self.view.node) {
                found.push(without_block(reservation, address, block));
            }
        }
        found.extend(self.pod_of(reservation));
        found
    }

    /// Compares the pod of the attachment with its Pod object.
    fn pod_of(&self, reservation: &Reservation) -> Option<Finding> {
        let owner = reservation.owner.as_ref()?;
        let pods = self.view.pods.as_ref()?;
        let own = addresses(&reservation.allocated);
        let Some(pod) = pods.iter().find(|pod| pod.is(owner)) else {
            return Some(finding(
                Severity::Warning,
                "PodGone",
                &reservation.key.container_id,
                [
                    format!(
                        "{} still has {}, and there is no such pod on this node",
                        name(reservation),
                        list(&own)
                    ),
                    "the runtime has not called DEL yet, or never will".to_owned(),
                    format!(
                        "if this lasts: see whether the runtime still has the sandbox (`crictl pods`); if not, \
                         `fairlead ipam release {} --force`",
                        reservation.key.container_id
                    ),
                ],
            ));
        };
        let differs = pod.has_network
            && !pod.addresses.is_empty()
            // A second network's interface is unknown to kubelet.
            && reservation.key.ifname == "eth0"
            && pod.addresses.iter().any(|address| !own.contains(address));
        differs.then(|| {
            finding(
                Severity::Error,
                "PodIPsDiffer",
                pod.full_name(),
                [
                    format!(
                        "{} has {}, and its status.podIPs say {}",
                        name(reservation),
                        list(&own),
                        list(&pod.addresses)
                    ),
                    "Services send its packets elsewhere; an older sandbox of the pod may still be there"
                        .to_owned(),
                    format!("if this lasts, delete pod {}", pod.full_name()),
                ],
            )
        })
    }

    fn link(&self, link: &PodLink) -> Option<Finding> {
        let subject = &link.name;
        let Some(holder) = self.allocated.get(&link.key) else {
            if link.addresses.is_empty() {
                return Some(unclear(link));
            }
            return Some(finding(
                Severity::Error,
                "LinkWithoutAddress",
                subject,
                [
                    format!(
                        "link {} of container {} carries {}, and nothing is reserved for it",
                        link.name,
                        link.key.container_id,
                        list(&link.addresses)
                    ),
                    "its addresses can be given to another pod".to_owned(),
                    format!(
                        "delete the pod of container {} (`crictl inspectp {}`)",
                        link.key.container_id, link.key.container_id
                    ),
                ],
            ));
        };
        let own = addresses(&holder.allocated);
        let foreign = link.addresses.iter().find(|address| !own.contains(address))?;
        let whose = match self.holders.get(foreign) {
            Some(other) => format!("is reserved for {}", name(other)),
            None => "is not reserved".to_owned(),
        };
        Some(finding(
            Severity::Error,
            "DuplicateAddress",
            foreign.to_string(),
            [
                format!(
                    "the table of pods leads {foreign} to {} of {}, but it {whose}",
                    link.name,
                    name(holder)
                ),
                "packets for one pod reach another".to_owned(),
                format!("delete the pod of container {}", link.key.container_id),
            ],
        ))
    }

    fn blocks(&self) -> Vec<Finding> {
        let Some(all) = &self.view.blocks else { return Vec::new() };
        let own: Vec<&KnownBlock> = all.iter().filter(|block| block.node == self.view.node).collect();
        let mut found = Vec::new();
        let wanted: BTreeMap<IpNet, &str> =
            own.iter().flat_map(|block| block.nets.iter().map(|net| (*net, block.name.as_str()))).collect();
        let exported: BTreeSet<IpNet> = self.view.exported.iter().copied().collect();
        for (net, block) in wanted.iter().filter(|(net, _)| !exported.contains(*net)) {
            found.push(not_exported(*net, block));
        }
        for net in exported.iter().filter(|net| !wanted.contains_key(*net)) {
            found.push(wrongly_exported(*net));
        }
        if let Some(pools) = &self.view.pools {
            let pools: BTreeMap<&str, &KnownPool> =
                pools.iter().map(|pool| (pool.name.as_str(), pool)).collect();
            found.extend(own.iter().filter_map(|block| pool_of_block(block, &pools)));
        }
        let overlaps = self.blocks.iter().flat_map(Blocks::overlaps);
        let ours = |(first, second, _): &(&KnownBlock, &KnownBlock, IpNet)| {
            first.node == self.view.node || second.node == self.view.node
        };
        found.extend(overlaps.filter(ours).map(|pair| overlap(&pair)));
        found
    }

    fn pods(&self) -> Vec<Finding> {
        let Some(pods) = &self.view.pods else { return Vec::new() };
        let mut found = duplicates(pods.iter());
        for pod in pods.iter().filter(|pod| pod.has_network) {
            let unknown = pod.addresses.iter().find(|address| !self.holders.contains_key(*address));
            let made_for_it =
                |reservation: &Reservation| reservation.owner.as_ref().is_some_and(|owner| pod.is(owner));
            // With an attachment of its own the difference is reported there.
            if let Some(address) = unknown.filter(|_| !self.view.reservations.iter().any(made_for_it)) {
                found.push(pod_without_reservation(pod, *address));
            }
        }
        found
    }
}

fn unclear(link: &PodLink) -> Finding {
    let container = &link.key.container_id;
    finding(
        Severity::Error,
        "AddressUnclear",
        &link.name,
        [
            format!("no route leads to link {} of container {container}, and its addresses are not known", link.name),
            "another program deleted the routes before the node program started; what the pod may use is given to no other"
                .to_owned(),
            format!("delete the pod of container {container} (`crictl inspectp {container}`)"),
        ],
    )
}

fn list(addresses: &[IpAddr]) -> String {
    let texts: Vec<String> = addresses.iter().map(ToString::to_string).collect();
    if texts.is_empty() { "no address".to_owned() } else { texts.join(" and ") }
}

fn leaked(reservation: &Reservation) -> Finding {
    let own = addresses(&reservation.allocated);
    finding(
        Severity::Warning,
        "LeakedAddress",
        list(&own),
        [
            format!("{} holds {} and has no link", name(reservation), list(&own)),
            "the pod's network namespace is gone and no DEL came".to_owned(),
            format!(
                "it is freed by itself within two minutes; at once by `fairlead ipam release {}`",
                reservation.key.container_id
            ),
        ],
    )
}

fn route_missing(reservation: &Reservation, link: &PodLink, address: IpAddr) -> Finding {
    finding(
        Severity::Error,
        "RouteMissing",
        address.to_string(),
        [
            format!(
                "the table of pods does not lead {address} to link {} of {}",
                link.name,
                name(reservation)
            ),
            "no packet reaches the pod; some program deleted the route, or the link went down".to_owned(),
            "delete the pod, so that it is connected anew".to_owned(),
        ],
    )
}

fn without_block(reservation: &Reservation, address: IpAddr, block: Option<&KnownBlock>) -> Finding {
    let place = match block {
        Some(block) => format!("is in block {} of node {}", block.name, block.node),
        None => "is in no AddressBlock".to_owned(),
    };
    finding(
        Severity::Error,
        "AddressOutsideBlocks",
        address.to_string(),
        [
            format!("{address} of {} {place}", name(reservation)),
            "no other node leads packets here, and another pod may be given the address".to_owned(),
            "delete the pod, so that it gets an address of this node".to_owned(),
        ],
    )
}

fn stray(address: IpAddr) -> Finding {
    finding(
        Severity::Warning,
        "StrayRoute",
        address.to_string(),
        [
            format!("the table of pods has a route for {address} that leads to no pod's link"),
            "another program put it there".to_owned(),
            format!("`ip route show table all to {address}` shows it: delete it, and find out who made it"),
        ],
    )
}

fn not_exported(net: IpNet, block: &str) -> Finding {
    finding(
        Severity::Error,
        "ExportMissing",
        net.to_string(),
        [
            format!("table 119 lacks {net} of block {block}"),
            "routing daemons do not tell others of it; the block is new, or another program deleted the route"
                .to_owned(),
            "it is put back within half a minute; if not, the log of the node program says why".to_owned(),
        ],
    )
}

fn wrongly_exported(net: IpNet) -> Finding {
    finding(
        Severity::Error,
        "ExportStray",
        net.to_string(),
        [
            format!("table 119 has {net}, which is no block of this node"),
            "routing daemons attract packets that belong to others".to_owned(),
            "it is removed within half a minute; if not, the log of the node program says why".to_owned(),
        ],
    )
}

fn pod_without_reservation(pod: &KnownPod, address: IpAddr) -> Finding {
    finding(
        Severity::Error,
        "PodWithoutAddress",
        pod.full_name(),
        [
            format!(
                "pod {} has {address} by its status, and nothing is reserved for it here",
                pod.full_name()
            ),
            "another network plugin made its interface, or its link is gone".to_owned(),
            format!("delete pod {}, so that it is connected anew", pod.full_name()),
        ],
    )
}
