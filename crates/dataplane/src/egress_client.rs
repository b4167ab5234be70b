//! The rules and routes by which the packets of a client pod reach egress gateways, in the pod's network namespace.
//!
//! `fairlead-egress` decides what a pod has. Numbers are Coil's, so a pod that Coil has prepared is adopted: rules at 1800, 1900 and
//! 2000–2100 that look up the tables `main`, 117 or 118, and routes of protocol 30 in the latter two. Coil's rules have no protocol,
//! and neither have ours. Everything else in the namespace belongs to other programs.
//!
//! A `throw` route leaves packets to a prefix inside of a destination to the rules after its table: an excluded one, or one of the cluster.
//!
//! Behind each route into a tunnel stands an `unreachable` route to the same destination: where the link is gone or down, the
//! kernel refuses packets at once (`EHOSTUNREACH`), and none leaves by `eth0` with the pod's address.
//!
//! Links are made elsewhere; [`sync`] is given their indexes.

mod replies;
mod steps;

use std::collections::BTreeMap;
use std::path::PathBuf;

use fairlead_address::{DualStack, IpFamily};
use fairlead_api::client_routing::{ClientRouting, Held};
use fairlead_api::names::{ROUTE_PROTOCOL, TABLE_EGRESS_NARROW, TABLE_EGRESS_WIDE};
use fairlead_netlink::netns::Netns;
use fairlead_netlink::route::{Route, RouteKind, RouteSocket, TABLE_MAIN};
use ipnet::IpNet;
use nix::libc;

use crate::uplink::{SysctlError, has_ipv6};

pub use replies::{Replies, reply_differences, sync_replies};
pub use steps::{Occupied, Present, Step, Steps, steps};

/// Protocol of Coil's rules of egress, and of ours (`RTPROT_UNSPEC`, `linux/rtnetlink.h`).
pub(crate) const RULE_PROTOCOL: u8 = 0;

/// Metric of routes for ranges of the cluster, by which they are told from those of excluded prefixes: they stay when it is not known any more
/// what an Egress had.
pub(crate) const IN_CLUSTER_METRIC: u32 = 2048;

/// Reason why a pod does not have the rules and routes that it should have.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A rule or route has another family or other numbers than those of egress.
    #[error("network namespace {}: {what} is none of egress; this is an error of the caller", .netns.display())]
    Foreign {
        /// File of the namespace.
        netns: PathBuf,
        /// The rule or route.
        what: String,
    },
    /// Another program's route has the place of one of ours.
    #[error(
        "network namespace {}: cannot add {}, since another program's {} (protocol {}) is in its place; delete that one",
        .netns.display(), .occupied.wanted, .occupied.by, .occupied.by.protocol
    )]
    Occupied {
        /// File of the namespace.
        netns: PathBuf,
        /// Both routes.
        occupied: Box<Occupied>,
    },
    /// The state for replies to connections of others could not be read or set.
    #[error("network namespace {}: replies by {uplink} to connections that others open: {source}", .netns.display())]
    Replies {
        /// File of the namespace.
        netns: PathBuf,
        /// Name of the uplink.
        uplink: String,
        /// The kernel's error.
        source: fairlead_netlink::Error,
    },
    /// A setting that replies need could not be written.
    #[error("network namespace {}: {source}", .netns.display())]
    Sysctl {
        /// File of the namespace.
        netns: PathBuf,
        /// Error of the setting, with its file.
        source: SysctlError,
    },
    /// Rules or routes could not be read.
    #[error(
        "cannot read rules and routes of egress in network namespace {}: {source}; check that the pod still exists",
        .netns.display()
    )]
    Read {
        /// File of the namespace.
        netns: PathBuf,
        /// The kernel's error.
        source: fairlead_netlink::Error,
    },
    /// The kernel refused a rule or route.
    #[error("network namespace {}: {source}; {advice}", .netns.display())]
    Refused {
        /// File of the namespace.
        netns: PathBuf,
        /// The kernel's error, with the request.
        source: fairlead_netlink::Error,
        /// Advice for users; follows the error in the text.
        advice: String,
    },
}

/// Brings the network namespace of a client pod to `desired`, and returns what was done; nothing is sent when nothing
/// differs. Of a family without a value everything of egress is removed.
///
/// `links` has the indexes, inside the namespace, of the links that exist and are up. A route whose link is not among them is
/// only the unreachable one.
///
/// # Errors
/// The first failure, after everything has been tried that can be done without it. If an unreachable route or a rule was
/// refused, nothing of that family is deleted or excluded: what is still there may keep packets from leaving by `eth0`.
pub fn sync(
    netns: &Netns,
    desired: &DualStack<ClientRouting, ClientRouting>,
    links: &BTreeMap<String, u32>,
) -> Result<Vec<Step>, Error> {
    let DualStack { ipv4, ipv6 } = desired.as_ref();
    let mut families = vec![(IpFamily::V4, ipv4)];
    if has_ipv6() {
        families.push((IpFamily::V6, ipv6));
    }
    for (family, desired) in &families {
        let foreign = desired.and_then(|desired| steps::foreign(*family, desired));
        if let Some(what) = foreign {
            return Err(Error::Foreign { netns: netns.path().to_owned(), what });
        }
    }
    let mut done = Vec::new();
    let mut failure = None;
    for (family, desired) in families {
        match sync_family(netns, family, desired, links) {
            Ok(steps) => done.extend(steps),
            Err(error) => failure = failure.or(Some(error)),
        }
    }
    failure.map_or(Ok(done), Err)
}

/// Reports what [`sync`] would do, without doing it.
///
/// # Errors
/// Rules or routes cannot be read.
pub fn differences(
    netns: &Netns,
    desired: &DualStack<ClientRouting, ClientRouting>,
    links: &BTreeMap<String, u32>,
) -> Result<Vec<Step>, Error> {
    let unreadable = |source| Error::Read { netns: netns.path().to_owned(), source };
    let mut socket = RouteSocket::open_in(netns).map_err(unreadable)?;
    let DualStack { ipv4, ipv6 } = desired.as_ref();
    let families = [(IpFamily::V4, ipv4), (IpFamily::V6, ipv6)];
    let mut found = Vec::new();
    for (family, desired) in families.into_iter().filter(|(family, _)| *family == IpFamily::V4 || has_ipv6())
    {
        let present = read(&mut socket, family).map_err(unreadable)?;
        let Steps { set, delete, .. } = steps(desired, links, &present);
        found.extend(set.into_iter().chain(delete));
    }
    Ok(found)
}

/// The prefixes of the routes of egress in a network namespace, each with its table and what it is, and of the rules for ranges of the cluster,
/// with the table `main`.
///
/// # Errors
/// Routes or rules cannot be read.
pub fn destinations(netns: &Netns) -> Result<BTreeMap<(u32, IpNet), Held>, Error> {
    let unreadable = |source| Error::Read { netns: netns.path().to_owned(), source };
    let mut socket = RouteSocket::open_in(netns).map_err(unreadable)?;
    let mut found = BTreeMap::new();
    let rules = socket.rules().map_err(unreadable)?;
    let ranges = rules.iter().filter_map(steps::cluster_range);
    found.extend(ranges.map(|range| ((TABLE_MAIN, range), Held::InCluster)));
    for family in IpFamily::BOTH.into_iter().filter(|family| *family == IpFamily::V4 || has_ipv6()) {
        for table in [TABLE_EGRESS_NARROW, TABLE_EGRESS_WIDE] {
            let routes = socket.routes_of(family, table).map_err(unreadable)?;
            let own = routes.iter().filter(|route| route.protocol == ROUTE_PROTOCOL);
            for route in own {
                let held = match route.metric {
                    _ if route.kind != RouteKind::THROW => Held::Destination,
                    IN_CLUSTER_METRIC => Held::InCluster,
                    _ => Held::Excluded,
                };
                let known = found.entry((table, route.destination)).or_insert(held);
                *known = held.min(*known);
            }
        }
    }
    Ok(found)
}

fn sync_family(
    netns: &Netns,
    family: IpFamily,
    desired: Option<&ClientRouting>,
    links: &BTreeMap<String, u32>,
) -> Result<Vec<Step>, Error> {
    let unreadable = |source| Error::Read { netns: netns.path().to_owned(), source };
    let mut socket = RouteSocket::open_in(netns).map_err(unreadable)?;
    let present = read(&mut socket, family).map_err(unreadable)?;
    let Steps { set, delete, occupied } = steps(desired, links, &present);
    let (excluding, mut set): (Vec<Step>, Vec<Step>) = set.into_iter().partition(Step::lets_pass);
    let refused = |(step, source): (&Step, fairlead_netlink::Error)| {
        let advice = advice(step, &source, links);
        Error::Refused { netns: netns.path().to_owned(), source, advice }
    };
    let failures = send(&mut socket, &set).map_err(unreadable)?;
    let is_protected = failures.iter().all(|(step, _)| step.leads_into_link());
    let mut failure = failures.into_iter().map(refused).next();
    if is_protected {
        // What is excluded may have destinations inside of it, and what is deleted one around it.
        for steps in [excluding, delete] {
            let failures = send(&mut socket, &steps).map_err(unreadable)?;
            failure = failure.or(failures.into_iter().map(refused).next());
            set.extend(steps);
        }
    }
    let occupied = occupied.into_iter().next();
    let occupied = occupied
        .map(|occupied| Error::Occupied { netns: netns.path().to_owned(), occupied: occupied.into() });
    failure.or(occupied).map_or(Ok(set), Err)
}

fn read(socket: &mut RouteSocket, family: IpFamily) -> fairlead_netlink::Result<Present> {
    let mut rules = socket.rules()?;
    rules.retain(|rule| rule.family == family);
    let mut routes = socket.routes_of(family, TABLE_EGRESS_NARROW)?;
    routes.extend(socket.routes_of(family, TABLE_EGRESS_WIDE)?);
    Ok(Present { rules, routes })
}

/// Carries out steps in one batch and returns the failures that matter.
fn send<'a>(
    socket: &mut RouteSocket,
    steps: &'a [Step],
) -> fairlead_netlink::Result<Vec<(&'a Step, fairlead_netlink::Error)>> {
    if steps.is_empty() {
        return Ok(Vec::new());
    }
    let messages: Vec<_> = steps.iter().map(Step::message).collect();
    let outcomes = socket.apply_each(&messages)?;
    let failures = steps.iter().zip(outcomes).filter_map(|(step, outcome)| Some((step, outcome.err()?)));
    let matters = |(step, error): &(&Step, fairlead_netlink::Error)| match step {
        // Another process added the same meanwhile.
        Step::AddRule(_) => !error.is_existing(),
        Step::AddRoute(_) | Step::ReplaceRoute(_) => true,
        Step::DeleteRoute(_) | Step::DeleteRule(_) => !error.is_missing(),
    };
    Ok(failures.filter(matters).collect())
}

fn advice(step: &Step, error: &fairlead_netlink::Error, links: &BTreeMap<String, u32>) -> String {
    let link_of = |route: &Route| {
        let index = route.link.filter(|_| route.kind == RouteKind::UNICAST)?;
        links.iter().find(|(_, of)| **of == index).map(|(name, _)| name)
    };
    match (step, error.errno()) {
        (Step::AddRoute(route) | Step::ReplaceRoute(route), Some(libc::ENETDOWN | libc::ENODEV)) => {
            let link = link_of(route).map_or_else(|| "its link".to_owned(), |name| format!("link {name:?}"));
            format!(
                "set {link} up, or make it again; until then the kernel refuses packets to this destination"
            )
        }
        (_, Some(libc::EPERM)) => {
            "run this program with CAP_NET_ADMIN in the pod's network namespace".to_owned()
        }
        (Step::AddRule(_), Some(libc::EAFNOSUPPORT | libc::EOPNOTSUPP)) => {
            "use a kernel with CONFIG_IP_MULTIPLE_TABLES and CONFIG_IPV6_MULTIPLE_TABLES".to_owned()
        }
        _ => "compare with \"ip rule\" and \"ip route show table all\" in this namespace, and try again"
            .to_owned(),
    }
}
