//! Further interfaces of a pod, beside the one by which it reaches everything: Multus calls a plugin once for each.
//!
//! A pod has one default route. The interface that comes when another has it gets an address and none of these routes; what the pod
//! sends from that address leaves by that interface all the same, because the host drops an address that comes from another link
//! (`source_check`), and replies to what comes in by it must go back by it. So a rule leads packets from the address to a table of the
//! interface. It comes before the rules of egress: gateways do not know this address.
//!
//! Routes go with their link. The rules of a link that is gone lead to an empty table, and the next ADD removes them: DEL may come
//! without a namespace.

use std::collections::BTreeSet;
use std::net::IpAddr;

use fairlead_address::DualStackAddrs;
use fairlead_api::names::{
    POD_GATEWAY_IPV4, POD_GATEWAY_IPV6, RULE_PRIORITY_ADDITIONAL_INTERFACE, TABLE_ADDITIONAL_INTERFACE_BASE,
};
use fairlead_netlink::Message;
use fairlead_netlink::route::{
    IpFamily, Link, Route, RouteKind, RouteSocket, Rule, TABLE_MAIN, add_route, add_rule, delete_rule,
};
use ipnet::IpNet;

use super::plan::PROTOCOL_BOOT;

/// Table inside of a pod with the routes of an additional interface, by the index of the link.
pub(super) fn table(link: u32) -> u32 {
    TABLE_ADDITIONAL_INTERFACE_BASE.saturating_add(link)
}

/// Whether another interface of the pod than `ifname` has its default route, and rules of links that are gone. Called inside of the
/// pod's namespace, before the interface is made.
///
/// # Errors
/// The kernel shows no routes, rules or links.
pub(super) fn survey(pod: &mut RouteSocket, ifname: &str) -> fairlead_netlink::Result<(bool, Vec<Rule>)> {
    let routes = pod.routes(TABLE_MAIN)?;
    if !routes.iter().any(|route| is_default(route, None)) {
        return Ok((false, Vec::new()));
    }
    let links = pod.links()?;
    let own = links.iter().find(|link| link.name == ifname).map(|link| link.index);
    let is_additional = routes.iter().any(|route| is_default(route, own));
    Ok((is_additional, if is_additional { stale(&pod.rules()?, &links) } else { Vec::new() }))
}

/// Whether a route leads to everything by another link than `own`. The kernel's own refusals (IPv6) are none.
fn is_default(route: &Route, own: Option<u32>) -> bool {
    let leads_out = route.destination.prefix_len() == 0 && route.kind == RouteKind::UNICAST;
    leads_out && route.links().any(|link| Some(link) != own)
}

/// Rules of this program for links that do not exist any more.
fn stale(rules: &[Rule], links: &[Link]) -> Vec<Rule> {
    let tables: BTreeSet<u32> = links.iter().map(|link| table(link.index)).collect();
    let is_ours = |rule: &&Rule| {
        let has_table = rule.table > TABLE_ADDITIONAL_INTERFACE_BASE && rule.source.is_some();
        rule.priority == RULE_PRIORITY_ADDITIONAL_INTERFACE && has_table && !rule.has_more
    };
    rules.iter().filter(is_ours).filter(|rule| !tables.contains(&rule.table)).cloned().collect()
}

/// Messages that lead what the pod sends from `addresses` to its gateways on `link`, after addresses and neighbours are set.
pub(super) fn messages(addresses: DualStackAddrs, link: u32, stale: &[Rule]) -> Vec<Message> {
    let mut messages: Vec<Message> = stale.iter().map(delete_rule).collect();
    let table = table(link);
    let onto = |table, gateway: IpAddr| Route::onto(table, PROTOCOL_BOOT, IpNet::from(gateway), link);
    for ip in addresses.iter() {
        let family = IpFamily::of(ip);
        let gateway: IpAddr = match family {
            IpFamily::V4 => POD_GATEWAY_IPV4.into(),
            IpFamily::V6 => POD_GATEWAY_IPV6.into(),
        };
        if family == IpFamily::V4 {
            messages.push(add_route(&onto(table, gateway)));
            // For programs that add a route by this gateway and link, such as the plugin `sbr`. With a metric of its own beside that
            // of other interfaces, which have the same gateway.
            messages.push(add_route(&Route { metric: table, ..onto(TABLE_MAIN, gateway) }));
        }
        messages.push(add_route(&Route::via(table, PROTOCOL_BOOT, family.everything(), gateway, link)));
        let rule = Rule::lookup(family, RULE_PRIORITY_ADDITIONAL_INTERFACE, table, PROTOCOL_BOOT);
        messages.push(add_rule(&Rule { source: Some(IpNet::from(ip)), ..rule }));
    }
    messages
}

#[cfg(test)]
mod tests {
    use super::*;

    fn route(destination: &str, link: Option<u32>) -> Route {
        Route { link, ..Route::onto(TABLE_MAIN, 3, destination.parse().unwrap(), 0) }
    }

    #[test]
    fn a_default_route_of_another_link_makes_an_interface_additional() {
        assert!(is_default(&route("0.0.0.0/0", Some(2)), None));
        assert!(is_default(&route("::/0", Some(2)), Some(3)));
        assert!(!is_default(&route("0.0.0.0/0", Some(2)), Some(2)), "of the same interface, made anew");
        assert!(!is_default(&route("10.0.0.0/8", Some(2)), None));
        assert!(!is_default(&Route { kind: RouteKind::UNREACHABLE, ..route("::/0", Some(1)) }, None));
        assert!(!is_default(&route("0.0.0.0/0", None), None), "no link");
    }

    #[test]
    fn every_family_has_a_rule_and_a_default_route_in_the_table_of_the_link() {
        let both: DualStackAddrs =
            ["10.1.0.6", "fd00:1::6"].map(|text| text.parse().unwrap()).into_iter().collect();
        let said: Vec<String> = messages(both, 3, &[]).iter().map(|message| message.what.clone()).collect();
        let expected = [
            "add route 169.254.1.1/32 on link 3 in table 3003",
            "add route 169.254.1.1/32 on link 3 in table 254",
            "add route 0.0.0.0/0 via 169.254.1.1 on link 3 in table 3003",
            "add IPv4 rule 990 from 10.1.0.6/32 to table 3003",
            "add route ::/0 via fe80::1 on link 3 in table 3003",
            "add IPv6 rule 990 from fd00:1::6/128 to table 3003",
        ];
        assert_eq!(said, expected);
    }

    #[test]
    fn only_rules_of_links_that_are_gone_are_stale() {
        let ours = |table| Rule {
            source: Some("10.1.0.6/32".parse().unwrap()),
            ..Rule::lookup(IpFamily::V4, RULE_PRIORITY_ADDITIONAL_INTERFACE, table, PROTOCOL_BOOT)
        };
        let link = Link { index: 3, ..Link::default() };
        let others = [Rule { priority: 989, ..ours(3009) }, Rule { source: None, ..ours(3009) }, ours(100)];
        let all = [vec![ours(3003), ours(3004)], others.to_vec()].concat();
        assert_eq!(stale(&all, &[link]), [ours(3004)]);
    }
}
