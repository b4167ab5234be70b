//! Routes that lead into the tunnel: all that the machine may do without.

use std::net::IpAddr;

use fairlead_address::{PrefixSet, is_host};
use fairlead_api::names::ROUTE_PROTOCOL_CONNECT;
use fairlead_dataplane::routes::{Difference, table_difference};
use fairlead_dataplane::uplink::name_servers;
use fairlead_netlink::Result;
use fairlead_netlink::route::{IpFamily, Route, RouteSocket, TABLE_MAIN};
use ipnet::IpNet;

/// Origin of the routes that the kernel makes of addresses (`RTPROT_KERNEL`, `linux/rtnetlink.h`).
const PROTOCOL_KERNEL: u8 = 2;

/// Surroundings of the machine: networks and servers that it reaches without the tunnel.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Surroundings {
    /// Single addresses: routers, name servers.
    hosts: Vec<IpAddr>,
    /// Networks that it is on. A node that has an address of one of them is reached through the tunnel all the same: the same private
    /// ranges are in use everywhere.
    pub(super) networks: Vec<IpNet>,
}

impl Surroundings {
    /// Surroundings by the routes of the table `main` and the text of `resolv.conf`.
    pub(super) fn of(routes: &[Route], own_link: u32, resolv_conf: &str) -> Self {
        let others = || routes.iter().filter(|route| route.links().all(|link| link != own_link));
        let gateways = others().flat_map(|route| {
            let hops = route.next_hops.iter().filter_map(|hop| hop.gateway);
            route.gateway.into_iter().chain(hops)
        });
        let is_connected = |route: &&Route| route.protocol == PROTOCOL_KERNEL && route.gateway.is_none();
        let networks: Vec<IpNet> = others()
            .filter(is_connected)
            .map(|route| route.destination)
            .filter(|network| !is_host(network) && network.prefix_len() > 0)
            .collect();
        // Others, such as the cluster's, may be on the other side of the tunnel.
        let is_near = |address: &IpAddr| networks.iter().any(|network| network.contains(address));
        let name_servers = name_servers(resolv_conf).filter(is_near);
        let mut hosts: Vec<IpAddr> = gateways.chain(name_servers).collect();
        hosts.sort_unstable();
        hosts.dedup();
        Self { hosts, networks }
    }
}

/// The prefixes that are routed into the tunnel, of those that the peers have: without what is reached beside it, and of the families in
/// which this machine has an address there.
pub(super) fn destinations(
    prefixes: &[IpNet],
    around: &Surroundings,
    servers: &[IpAddr],
    addresses: &[IpNet],
) -> Vec<IpNet> {
    let has_family =
        |prefix: &&IpNet| addresses.iter().any(|own| IpFamily::of(own.addr()) == IpFamily::of(prefix.addr()));
    let hosts: Vec<IpNet> = around.hosts.iter().chain(servers).copied().map(IpNet::from).collect();
    let hosts: PrefixSet = hosts.iter().collect();
    let networks: PrefixSet = around.networks.iter().collect();
    let wide: PrefixSet = prefixes.iter().filter(has_family).filter(|prefix| !is_host(prefix)).collect();
    let single: PrefixSet = prefixes.iter().filter(has_family).filter(|prefix| is_host(prefix)).collect();
    let wide = wide.subtract(&networks);
    let all: PrefixSet = wide.prefixes().chain(single.prefixes()).collect();
    all.subtract(&hosts).prefixes().collect()
}

/// The routes of the table `main`.
pub(super) fn present(socket: &mut RouteSocket) -> Result<Vec<Route>> {
    socket.routes(TABLE_MAIN)
}

/// Difference between desired and present routes. Those of another connection of this machine have the same protocol, and stay.
pub(super) fn difference(destinations: &[IpNet], link: u32, present: &[Route]) -> Difference<Route> {
    let onto = |prefix: &IpNet| Route::onto(TABLE_MAIN, ROUTE_PROTOCOL_CONNECT, *prefix, link);
    let desired: Vec<Route> = destinations.iter().map(onto).collect();
    let is_another_s =
        |route: &&Route| route.protocol == ROUTE_PROTOCOL_CONNECT && route.links().any(|other| other != link);
    let present: Vec<Route> = present.iter().filter(|route| !is_another_s(route)).cloned().collect();
    table_difference(TABLE_MAIN, ROUTE_PROTOCOL_CONNECT, &desired, &present)
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: u32 = 7;

    fn nets(texts: &[&str]) -> Vec<IpNet> {
        texts.iter().map(|text| text.parse().unwrap()).collect()
    }

    fn host_routes() -> Vec<Route> {
        let net = |text: &str| text.parse().unwrap();
        let gateway = "192.168.1.1".parse().unwrap();
        vec![
            Route::via(TABLE_MAIN, 16, net("0.0.0.0/0"), gateway, 2),
            Route::onto(TABLE_MAIN, PROTOCOL_KERNEL, net("192.168.1.0/24"), 2),
            Route::onto(TABLE_MAIN, PROTOCOL_KERNEL, net("10.64.8.0/24"), 3),
            Route::onto(TABLE_MAIN, 4, net("10.64.9.0/24"), 3),
            Route::onto(TABLE_MAIN, ROUTE_PROTOCOL_CONNECT, net("10.64.0.0/16"), OWN),
        ]
    }

    #[test]
    fn routers_name_servers_and_the_own_networks_stay_reachable() {
        let resolv_conf =
            "# none\nnameserver 192.168.1.2\nnameserver 10.96.0.10\noptions edns0\nnameserver x\n";
        let around = Surroundings::of(&host_routes(), OWN, resolv_conf);
        assert_eq!(around.hosts, ["192.168.1.1", "192.168.1.2"].map(|text| text.parse::<IpAddr>().unwrap()));
        let prefixes = nets(&[
            "10.64.0.0/16",
            "10.96.0.0/12",
            "192.168.1.1/32",
            "192.168.1.2/32",
            "192.168.1.11/32",
            "fd00::/64",
        ]);
        let found =
            destinations(&prefixes, &around, &["10.96.0.1".parse().unwrap()], &nets(&["10.10.10.1/32"]));
        let leads = |text: &str| {
            let address: IpAddr = text.parse().unwrap();
            found.iter().any(|prefix| prefix.contains(&address))
        };
        for inside in ["10.64.7.1", "10.64.9.1", "10.96.0.10", "192.168.1.11"] {
            assert!(leads(inside), "{inside}");
        }
        for beside in ["192.168.1.1", "192.168.1.2", "10.64.8.1", "10.96.0.1", "fd00::1", "192.168.1.12"] {
            assert!(!leads(beside), "{beside}");
        }
    }

    #[test]
    fn routes_of_others_and_of_another_connection_stay() {
        let mut present = host_routes();
        let other = Route::onto(TABLE_MAIN, ROUTE_PROTOCOL_CONNECT, "10.32.0.0/16".parse().unwrap(), 9);
        present.push(other);
        let taken = nets(&["10.64.9.0/24", "10.65.0.0/16"]);
        let found = difference(&taken, OWN, &present);
        let names = |routes: &[Route]| routes.iter().map(|route| route.destination).collect::<Vec<_>>();
        assert_eq!(names(&found.add), nets(&["10.65.0.0/16"]));
        assert_eq!(names(&found.delete), nets(&["10.64.0.0/16"]));
        assert_eq!(names(&found.blocked), nets(&["10.64.9.0/24"]));
    }
}
