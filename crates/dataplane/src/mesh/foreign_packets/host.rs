//! Facts of this host by which a rule of another program turns out to be for packets that it does not harm: for links that lead to no other node, such as the
//! bridge of a container engine, and for packets that stay on this host.
//!
//! A rule is spared only where that is certain. What is marked with the bit 0x40 on such a bridge, and is not for the mesh, is lost in it: that rule stays named.

use std::net::IpAddr;

use fairlead_api::names::{LINK_IP6TNL, LINK_IPIP};
use fairlead_netlink::Result;
use fairlead_netlink::nftables::foreign::routing::{Conditions, RoutingRule};
use fairlead_netlink::route::{Link, Route, RouteKind, RouteSocket, TABLE_LOCAL};
use ipnet::IpNet;
use nix::libc::RTPROT_KERNEL;

use super::{Harm, Outer, harm};
use crate::mesh::state::MeshState;

/// Priority at which the kernel translates destinations: `NF_IP_PRI_NAT_DST` (`linux/netfilter_ipv4.h`), the same in IPv6.
const PRIORITY_TRANSLATION: i32 = -100;
/// Name of the loopback device, by which packets to addresses of this host leave; they may get the address of a pod of another node yet.
const LOOPBACK: &str = "lo";

/// Facts of this host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Host {
    /// Links by which packets to other nodes and their pods leave, or may.
    ways: Vec<String>,
    /// Prefixes whose packets are delivered here.
    local: Vec<IpNet>,
}

impl Host {
    /// Reads links and routes.
    ///
    /// # Errors
    /// The kernel refuses, or its answer cannot be decoded.
    pub(super) fn read(state: &MeshState) -> Result<Self> {
        let mut socket = RouteSocket::open()?;
        let links = socket.links()?;
        Ok(Self::of((&state.interface, &state.bypass.nodes), &links, &socket.all_routes()?))
    }

    /// The host with these links and routes, whose mesh has this device and these addresses of other nodes.
    pub(super) fn of((device, nodes): (&str, &[IpAddr]), links: &[Link], routes: &[Route]) -> Self {
        let (here, onward): (Vec<&Route>, Vec<&Route>) =
            routes.iter().partition(|route| route.table == TABLE_LOCAL);
        let has_node = |route: &Route| nodes.iter().any(|node| route.destination.contains(node));
        // The kernel itself makes routes to the networks of a link's addresses, and no others.
        let leads_on = |route: &&&Route| route.protocol != RTPROT_KERNEL || has_node(route);
        let used: Vec<u32> = onward.iter().filter(leads_on).flat_map(|route| route.links()).collect();
        let used = links.iter().filter(|link| used.contains(&link.index)).map(|link| link.name.clone());
        let known = [LINK_IP6TNL, LINK_IPIP, LOOPBACK, device].map(str::to_owned);
        let local = here.iter().filter(|route| route.kind == RouteKind::LOCAL);
        Self { ways: used.chain(known).collect(), local: local.map(|route| route.destination).collect() }
    }

    /// Whether packets to other nodes and their pods leave by a link of this name, or may.
    pub(super) fn is_way(&self, link: &str) -> bool {
        self.ways.iter().any(|way| way == link)
    }

    /// Harm that the rule does; `None` also where it may only seem to do one.
    pub(super) fn judge(&self, rule: &RoutingRule, outer: &Outer) -> Option<Harm> {
        let uplinks = outer.uplinks.iter().filter(|uplink| self.is_way(uplink)).cloned().collect();
        let outer = Outer { uplinks, families: outer.families.clone() };
        harm(rule, &outer).filter(|harm| !self.spares(rule, *harm))
    }

    /// Whether the rule certainly does not do this harm.
    fn spares(&self, rule: &RoutingRule, harm: Harm) -> bool {
        let RoutingRule { base, conditions, .. } = rule;
        let stays = conditions.destinations.iter().any(|destination| self.is_local(*destination));
        match harm {
            // What another program translates is mostly for a pod, to which the mesh, or the table of pods before it, is the right way.
            Harm::IntoMesh => stays || conditions.are_of_loopback(),
            // It would leave in clear text, or be dropped, if it got the address of a pod of another node after the mark.
            Harm::ClearText | Harm::PastMesh => {
                (stays && base.priority > PRIORITY_TRANSLATION) || self.is_aside(conditions)
            }
            Harm::SourceCheck | Harm::Translation | Harm::WireGuard => false,
        }
    }

    fn is_local(&self, address: IpAddr) -> bool {
        self.local.iter().any(|prefix| prefix.contains(&address))
    }

    /// Whether they are for packets alone that leave by a link which leads to no other node.
    fn is_aside(&self, conditions: &Conditions) -> bool {
        let mut outputs = conditions.devices.iter().filter(|device| !device.is_input && device.is_equal);
        outputs.any(|output| !self.ways.iter().any(|way| output.is_met(way)))
    }
}

#[cfg(test)]
mod tests {
    use fairlead_address::IpFamily;
    use fairlead_netlink::nftables::foreign::TableFamily;
    use fairlead_netlink::nftables::foreign::routing::{
        DeviceName, Effect, MarkChange, RoutingChain, RoutingHook,
    };
    use fairlead_netlink::route::TABLE_MAIN;
    use nix::libc::RTPROT_STATIC;

    use super::*;

    const NODE: &str = "192.0.2.2";

    fn link(index: u32, name: &str) -> Link {
        Link { index, name: name.to_owned(), ..Link::default() }
    }

    /// A host with an uplink, the bridge of a container engine, and more routes.
    fn host(more: &[Route]) -> Host {
        let links = [link(1, "lo"), link(2, "eth0"), link(3, "docker0"), link(7, "wire_kube")];
        let connected = |to: &str, link| Route::onto(TABLE_MAIN, RTPROT_KERNEL, to.parse().unwrap(), link);
        let local = |address: &str, link| Route {
            kind: RouteKind::LOCAL,
            ..Route::onto(TABLE_LOCAL, RTPROT_KERNEL, address.parse().unwrap(), link)
        };
        let routes = [
            connected("192.0.2.0/24", 2),
            connected("172.17.0.0/16", 3),
            local("127.0.0.0/8", 1),
            local("192.0.2.1/32", 2),
            local("192.0.2.100/32", 2),
            local("2001:db8::1/128", 2),
        ];
        let routes: Vec<Route> = routes.iter().chain(more).cloned().collect();
        Host::of(("wire_kube", &[NODE.parse().unwrap()]), &links, &routes)
    }

    fn rule((hook, priority): (RoutingHook, i32), mark: u32, conditions: Conditions) -> RoutingRule {
        let (table, name) = ("other".to_owned(), "chain".to_owned());
        let reroutes = hook == RoutingHook::Output;
        RoutingRule {
            base: RoutingChain { family: TableFamily::Inet, table, name, hook, priority, reroutes },
            chain: "chain".to_owned(),
            handle: 7,
            effect: Effect::Mark(MarkChange { kept: 0, set: mark, unknown: 0 }),
            conditions,
            may_be_skipped: false,
            packets: None,
        }
    }

    /// Both links have addresses of the host, by which others may reach it.
    fn judged(host: &Host, rule: &RoutingRule) -> Option<Harm> {
        let uplinks = ["eth0", "docker0"].map(str::to_owned).to_vec();
        host.judge(rule, &Outer { uplinks, families: vec![IpFamily::V4] })
    }

    fn device(is_input: bool, name: &str) -> Conditions {
        let bytes = [name.as_bytes(), &[0]].concat();
        Conditions { devices: vec![DeviceName { is_input, is_equal: true, bytes }], ..Conditions::default() }
    }

    fn to(address: &str) -> Conditions {
        Conditions { destinations: vec![address.parse().unwrap()], has_more: true, ..Conditions::default() }
    }

    const OUTPUT: (RoutingHook, i32) = (RoutingHook::Output, -150);
    const LATE_OUTPUT: (RoutingHook, i32) = (RoutingHook::Output, 10);
    const PREROUTING: (RoutingHook, i32) = (RoutingHook::Prerouting, -150);

    #[test]
    fn a_rule_for_a_bridge_that_leads_to_no_other_node_harms_nothing_of_the_mesh() {
        let host = host(&[]);
        for (at, mark, harm) in [
            (OUTPUT, 1, Harm::WireGuard),
            ((RoutingHook::Postrouting, -150), 6, Harm::WireGuard),
            (OUTPUT, 0x20, Harm::ClearText),
            (LATE_OUTPUT, 0x60, Harm::PastMesh),
        ] {
            let by = |name: &str| judged(&host, &rule(at, mark, device(false, name)));
            assert_eq!((by("eth0"), by("docker0")), (Some(harm), None), "{mark:#x}");
            assert_eq!(judged(&host, &rule(at, mark, Conditions::default())), Some(harm), "{mark:#x}");
        }
        for own in ["wire_kube", LINK_IPIP, LOOPBACK] {
            let clear = rule(OUTPUT, 0x20, device(false, own));
            assert_eq!(judged(&host, &clear), Some(Harm::ClearText), "{own}");
        }
        let mut all_but = device(false, "docker0");
        all_but.devices[0].is_equal = false;
        assert_eq!(judged(&host, &rule(OUTPUT, 0x20, all_but)), Some(Harm::ClearText));
        let mut all = device(false, "eth0");
        all.devices[0].bytes = Vec::new();
        assert_eq!(judged(&host, &rule(OUTPUT, 0x20, all)), Some(Harm::ClearText), "oifname *");
    }

    #[test]
    fn a_check_of_sources_on_such_a_bridge_drops_nothing_of_wireguard() {
        let check = |name: &str| RoutingRule {
            effect: Effect::SourceCheck,
            ..rule(PREROUTING, 0, device(true, name))
        };
        let host = host(&[]);
        assert_eq!(judged(&host, &check("eth0")), Some(Harm::SourceCheck));
        assert_eq!(judged(&host, &check("docker0")), None);
    }

    #[test]
    fn a_bridge_by_which_packets_may_leave_for_other_nodes_is_a_way_of_theirs() {
        let default = |link| {
            let to = "0.0.0.0/0".parse().unwrap();
            Route::via(TABLE_MAIN, RTPROT_STATIC, to, "172.17.0.254".parse().unwrap(), link)
        };
        let node = Route::onto(77, RTPROT_KERNEL, format!("{NODE}/32").parse().unwrap(), 3);
        for (more, is_named) in [(default(2), false), (default(3), true), (node, true)] {
            let host = host(&[more]);
            for mark in [1, 0x20] {
                let judged = judged(&host, &rule(OUTPUT, mark, device(false, "docker0")));
                assert_eq!(judged.is_some(), is_named, "{host:?}");
            }
        }
    }

    #[test]
    fn what_is_marked_for_the_mesh_on_a_bridge_and_is_not_for_it_is_lost() {
        let host = host(&[]);
        for rule in
            [rule(PREROUTING, 0x40, device(true, "docker0")), rule(OUTPUT, 0x40, device(false, "docker0"))]
        {
            assert_eq!(judged(&host, &rule), Some(Harm::IntoMesh));
        }
        assert_eq!(judged(&host, &rule(PREROUTING, 0x40, device(true, "lo"))), None, "it has arrived");
    }

    #[test]
    fn a_mark_of_packets_to_addresses_of_this_host_leads_them_nowhere() {
        let host = host(&[]);
        // keepalived's `virtual_server fwmark 64`.
        for own in ["192.0.2.100", "127.0.0.53", "2001:db8::1"] {
            assert_eq!(judged(&host, &rule(PREROUTING, 0x40, to(own))), None, "{own}");
            assert_eq!(judged(&host, &rule(OUTPUT, 0x40, to(own))), None, "{own}");
            assert_eq!(judged(&host, &rule(LATE_OUTPUT, 0x20, to(own))), None, "{own}");
            assert_eq!(judged(&host, &rule(LATE_OUTPUT, 0x60, to(own))), None, "{own}");
            // A proxy of Services may yet give them the address of a pod of another node.
            assert_eq!(judged(&host, &rule(OUTPUT, 0x20, to(own))), Some(Harm::ClearText), "{own}");
        }
        // The address is another host's now.
        for other in ["192.0.2.101", NODE, "2001:db8::2"] {
            assert_eq!(judged(&host, &rule(PREROUTING, 0x40, to(other))), Some(Harm::IntoMesh), "{other}");
        }
        let some = Conditions { has_more: true, ..Conditions::default() };
        assert_eq!(judged(&host, &rule(PREROUTING, 0x40, some)), Some(Harm::IntoMesh));
    }
}
