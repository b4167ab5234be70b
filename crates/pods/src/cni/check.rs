//! CHECK: compares what ADD made, and what later plugins changed, with what the kernel shows.
//!
//! `prevResult` is the result of the whole chain, so what a later plugin changed and reported is expected as it
//! reported it. Beyond that CHECK demands only what a pod cannot work without: its allocated addresses, a default route,
//! and a route to it on the host.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use fairlead_api::names::{POD_GATEWAY_IPV4, POD_GATEWAY_IPV6};
use fairlead_dataplane::pods::{End, Inspection};
use fairlead_netlink::route::TABLE_MAIN;
use ipnet::IpNet;
use serde::{Deserialize, Deserializer};

/// The part of `prevResult` that is compared.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
pub(super) struct Previous {
    #[serde(deserialize_with = "null_is_default")]
    interfaces: Vec<Interface>,
    #[serde(deserialize_with = "null_is_default")]
    ips: Vec<Ip>,
    #[serde(deserialize_with = "null_is_default")]
    routes: Vec<Route>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(default)]
struct Interface {
    name: String,
    mac: String,
    sandbox: String,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Ip {
    address: IpNet,
    #[serde(default)]
    interface: Option<usize>,
}

#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
struct Route {
    dst: IpNet,
    #[serde(default)]
    gw: Option<IpAddr>,
    #[serde(default)]
    table: Option<u32>,
}

fn null_is_default<'de, D: Deserializer<'de>, T: Default + Deserialize<'de>>(from: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(from)?.unwrap_or_default())
}

impl Previous {
    /// The one in a network configuration; `None` if there is none.
    ///
    /// # Errors
    /// The configuration, or what of it is compared, does not parse.
    pub(super) fn of_configuration(stdin: &[u8]) -> Result<Option<Self>, serde_json::Error> {
        #[derive(Deserialize)]
        struct Configuration {
            #[serde(default, rename = "prevResult")]
            previous: Option<Previous>,
        }
        if stdin.trim_ascii().is_empty() {
            return Ok(None);
        }
        Ok(serde_json::from_slice::<Configuration>(stdin)?.previous)
    }

    /// Addresses of an interface of the container.
    pub(super) fn addresses(&self, ifname: &str) -> Vec<IpAddr> {
        let is_there = |at: usize| {
            let interface = self.interfaces.get(at);
            interface.is_some_and(|interface| interface.name == ifname && !interface.sandbox.is_empty())
        };
        let ours = self.ips.iter().filter(|ip| ip.interface.is_none_or(is_there));
        ours.map(|ip| ip.address.addr()).collect()
    }

    /// The same without the default routes of the ADD itself. [`link`] demands that there are some; a later plugin may have changed
    /// their gateway without a word.
    pub(super) fn without_own_default_routes(&self) -> Self {
        let own: [IpAddr; 2] = [POD_GATEWAY_IPV4.into(), POD_GATEWAY_IPV6.into()];
        let is_own =
            |route: &Route| route.dst.prefix_len() == 0 && route.gw.is_some_and(|gw| own.contains(&gw));
        let mut previous = self.clone();
        previous.routes.retain(|route| !is_own(route));
        previous
    }

    /// The routing tables inside the pod that are compared.
    pub(super) fn tables(previous: Option<&Self>) -> Vec<u32> {
        let reported = previous.into_iter().flat_map(|previous| &previous.routes);
        let tables: BTreeSet<u32> = reported.map(Route::table).chain([TABLE_MAIN]).collect();
        tables.into_iter().collect()
    }
}

impl Route {
    fn table(&self) -> u32 {
        self.table.filter(|table| *table != 0).unwrap_or(TABLE_MAIN)
    }
}

/// Differences of this program's own link, one sentence each.
pub(super) fn link(ifname: &str, allocated: &[IpAddr], seen: &Inspection) -> Vec<String> {
    let mut found = Vec::new();
    match &seen.pod {
        None => found.push(format!("the pod has no interface {ifname}")),
        Some(end) => in_pod(end, allocated, seen, &mut found),
    }
    match &seen.host {
        None => found.push("the host's end of the pod's link is gone".to_owned()),
        Some(end) => on_host(end, allocated, seen, &mut found),
    }
    if seen.pod.is_some() && seen.host.is_some() && !seen.connected {
        found.push(format!("interface {ifname} of the pod is not the other end of the host's link"));
    }
    found
}

/// Differences of an interface that another plugin made, one sentence each.
pub(super) fn chained((ifname, netns): (&str, &Path), previous: &Previous, seen: &Inspection) -> Vec<String> {
    let mut found = Vec::new();
    match &seen.pod {
        None => found.push(format!("the pod has no interface {ifname}")),
        Some(end) if !end.up => found.push(format!("interface {} of the pod is down", end.name)),
        Some(_) => {}
    }
    found.extend(as_reported((ifname, netns), previous, seen));
    found
}

fn in_pod(end: &End, allocated: &[IpAddr], seen: &Inspection, found: &mut Vec<String>) {
    if !end.up {
        found.push(format!("interface {} of the pod is down", end.name));
    }
    for ip in allocated {
        if !end.addresses.iter().any(|address| address.addr() == *ip) {
            found.push(format!("interface {} of the pod lacks its allocated address {ip}", end.name));
        }
        // A later plugin may change its gateway; only having none is wrong.
        let has_default = seen.pod_routes.iter().any(|route| {
            route.destination.prefix_len() == 0 && route.destination.addr().is_ipv4() == ip.is_ipv4()
        });
        if !has_default {
            found.push(format!("the pod has no default route for {ip}"));
        }
    }
}

fn on_host(end: &End, allocated: &[IpAddr], seen: &Inspection, found: &mut Vec<String>) {
    if !end.up {
        found.push(format!("link {} on the host is down", end.name));
    }
    for ip in allocated.iter().filter(|ip| !seen.led_to_pod.contains(&IpNet::from(**ip))) {
        found.push(format!("no route on the host leads {ip} to link {}", end.name));
    }
}

/// Differences from the result that the plugins before reported, one sentence each.
pub(super) fn as_reported(
    (ifname, netns): (&str, &Path),
    previous: &Previous,
    seen: &Inspection,
) -> Vec<String> {
    let mut found = Vec::new();
    let in_container = |interface: &&Interface| interface.name == ifname && !interface.sandbox.is_empty();
    match previous.interfaces.iter().find(in_container) {
        None => found.push(format!("prevResult lists no interface {ifname} in a sandbox")),
        Some(reported) => {
            if !same_file(Path::new(&reported.sandbox), netns) {
                let reported = &reported.sandbox;
                let netns = netns.display();
                found.push(format!("interface {ifname} was made in {reported}, and CNI_NETNS is {netns}"));
            }
            same_mac(reported, seen.pod.as_ref(), &mut found);
        }
    }
    let host = seen.host.as_ref();
    let outside = previous.interfaces.iter().filter(|interface| interface.sandbox.is_empty());
    for reported in outside.filter(|interface| host.is_some_and(|end| end.name == interface.name)) {
        same_mac(reported, host, &mut found);
    }
    for ip in &previous.ips {
        let at = ip.interface.and_then(|at| previous.interfaces.get(at));
        let ours = ip.interface.is_none() || at.as_ref().is_some_and(in_container);
        if ours && seen.pod.as_ref().is_some_and(|end| !end.addresses.contains(&ip.address)) {
            found.push(format!("interface {ifname} of the pod lacks {} of prevResult", ip.address));
        }
    }
    for route in &previous.routes {
        let there = seen.pod_routes.iter().any(|seen| {
            seen.table == route.table()
                && seen.destination == route.dst.trunc()
                && (route.gw.is_none() || seen.gateway == route.gw)
        });
        if !there {
            let gateway = route.gw.map(|gateway| format!(" via {gateway}")).unwrap_or_default();
            found.push(format!("the pod lacks the route {}{gateway} of prevResult", route.dst));
        }
    }
    found
}

fn same_mac(reported: &Interface, end: Option<&End>, found: &mut Vec<String>) {
    let Some(end) = end else { return };
    let mac = end.mac.map(|mac| mac.to_string()).unwrap_or_default();
    if !reported.mac.is_empty() && !reported.mac.eq_ignore_ascii_case(&mac) {
        found.push(format!(
            "interface {} has the MAC address {mac}, not {} of prevResult",
            end.name, reported.mac
        ));
    }
}

/// The same path, or the same file: `/var/run` often is a link to `/run`.
fn same_file(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| path.metadata().map(|file| (file.dev(), file.ino())).ok();
    one == other || identity(one).is_some_and(|one| Some(one) == identity(other))
}

#[cfg(test)]
mod tests;
