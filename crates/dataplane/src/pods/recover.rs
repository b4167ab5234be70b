//! Addresses of running pods to which no route leads, from the pods' own interfaces.
//!
//! A link that was set down and up again, or a routing table that another program flushed, has lost the record of the
//! addresses. Without it they would be allocated again while the pod still uses them.

use std::collections::HashMap;
use std::fs;
use std::net::IpAddr;
use std::path::Path;

use fairlead_address::DualStackAddrs;
use fairlead_api::names::{POD_GATEWAY_IPV4, POD_GATEWAY_IPV6};
use fairlead_netlink::netns::Netns;
use fairlead_netlink::route::{Address, Link, RouteSocket, Scope};

use super::{Error, PodOnNode, Result};

/// Reason why the addresses of a running pod are not known.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unclear {
    /// No file names the namespace of its interface.
    #[error("its network namespace is not among the files of the container runtime")]
    NamespaceNotFound,
    /// The interface has several addresses of one family, which are listed: it cannot be told which were allocated.
    #[error("its interface has several addresses of one family: {0}")]
    SeveralAddresses(String),
    /// The namespace cannot be entered or read.
    #[error("its network namespace cannot be read: {0}")]
    Unreadable(String),
}

/// Completes the addresses of those of `pods` whose routes are missing, from the namespaces in `directories`, and returns
/// the pods whose addresses are not known with the reason. A pod whose interface has no address keeps none.
///
/// Namespaces are searched only if there is such a pod.
///
/// # Errors
/// The host's links and addresses cannot be read.
pub fn recover(pods: &mut [PodOnNode], directories: &[&Path]) -> Result<Vec<(PodOnNode, Unclear)>> {
    let read = |pods: &mut [PodOnNode]| -> fairlead_netlink::Result<Vec<(PodOnNode, Unclear)>> {
        let mut host = RouteSocket::open()?;
        let gateways = host.addresses()?;
        let incomplete: Vec<_> = pods.iter_mut().filter(|pod| is_incomplete(pod, &gateways)).collect();
        if incomplete.is_empty() {
            return Ok(Vec::new());
        }
        let namespaces = namespaces(&mut host, directories);
        let mut unclear = Vec::new();
        for pod in incomplete {
            // A link that is gone by now is no pod.
            let Some(link) = host.link(pod.host_index)? else { continue };
            match addresses_in_pod(&link, &pod.ifname, &namespaces) {
                // The kernel's routes are the record; the pod only fills in what they lack.
                Ok(found) => {
                    let ipv4 = pod.addresses.ipv4.or(found.ipv4);
                    pod.addresses = DualStackAddrs { ipv4, ipv6: pod.addresses.ipv6.or(found.ipv6) };
                }
                Err(reason) => unclear.push((pod.clone(), reason)),
            }
        }
        Ok(unclear)
    };
    read(pods).map_err(Error::List)
}

/// Whether no route leads to the pod, or its link has the gateway of a family without a route.
fn is_incomplete(pod: &PodOnNode, addresses: &[Address]) -> bool {
    let has =
        |gateway: IpAddr| addresses.iter().any(|it| it.link == pod.host_index && it.prefix.addr() == gateway);
    pod.addresses.is_empty()
        || (pod.addresses.ipv4.is_none() && has(POD_GATEWAY_IPV4.into()))
        || (pod.addresses.ipv6.is_none() && has(POD_GATEWAY_IPV6.into()))
}

/// The namespaces that the host's links know by a number. Files that are none, or vanish meanwhile, are skipped.
fn namespaces(host: &mut RouteSocket, directories: &[&Path]) -> HashMap<i32, Netns> {
    let entries = directories.iter().filter_map(|directory| fs::read_dir(directory).ok()).flatten().flatten();
    let numbered = entries.filter_map(|entry| {
        let netns = Netns::open(entry.path()).ok()?;
        Some((host.netns_number(&netns).ok()??, netns))
    });
    numbered.collect()
}

fn addresses_in_pod(
    link: &Link,
    ifname: &str,
    namespaces: &HashMap<i32, Netns>,
) -> std::result::Result<DualStackAddrs, Unclear> {
    let netns = link.peer_netns.and_then(|number| namespaces.get(&number));
    let netns = netns.ok_or(Unclear::NamespaceNotFound)?;
    let read = || {
        let mut pod = RouteSocket::open_in(netns)?;
        match pod.link_by_name(ifname)?.filter(|end| link.peer_index == Some(end.index)) {
            Some(end) => pod.addresses_on(end.index),
            None => Ok(Vec::new()),
        }
    };
    let found = read().map_err(|error| Unclear::Unreadable(error.to_string()))?;
    let allocated =
        |it: &&Address| it.scope == Scope::UNIVERSE && it.prefix.prefix_len() == it.prefix.max_prefix_len();
    let found: Vec<_> = found.iter().filter(allocated).map(|it| it.prefix.addr()).collect();
    let first: DualStackAddrs = found.iter().copied().collect();
    match first.iter().count() == found.len() {
        true => Ok(first),
        false => {
            let all: Vec<String> = found.iter().map(ToString::to_string).collect();
            Err(Unclear::SeveralAddresses(all.join(", ")))
        }
    }
}
