use super::*;
use crate::table::{Allocated, Key};

fn key(id: &str) -> Key {
    Key { container_id: id.to_owned(), ifname: "eth0".to_owned() }
}

fn block(name: &str, node: &str, net: &str) -> KnownBlock {
    KnownBlock {
        name: name.to_owned(),
        pool: "default".to_owned(),
        node: node.to_owned(),
        nets: vec![net.parse().unwrap()],
    }
}

fn pool() -> KnownPool {
    KnownPool { name: "default".to_owned(), nets: vec!["10.0.0.0/16".parse().unwrap()] }
}

fn pod(name: &str, node: &str, address: &str) -> KnownPod {
    KnownPod {
        namespace: "shop".to_owned(),
        name: name.to_owned(),
        uids: vec![format!("uid-{name}")],
        node: node.to_owned(),
        addresses: vec![address.parse().unwrap()],
        has_network: true,
    }
}

fn reservation(id: &str, pod: &str, address: &str) -> Reservation {
    let owner = Owner { namespace: "shop".into(), name: pod.into(), uid: Some(format!("uid-{pod}")) };
    Reservation {
        key: key(id),
        allocated: Allocated { pool: "default".into(), ipv4: address.parse().ok(), ipv6: None },
        owner: Some(owner),
        busy: false,
    }
}

fn link(id: &str, address: &str) -> PodLink {
    PodLink { key: key(id), name: format!("veth-{id}"), addresses: vec![address.parse().unwrap()] }
}

/// Two pods, one block, all in order.
fn healthy() -> NodeView {
    NodeView {
        node: "n1".to_owned(),
        reservations: vec![reservation("a", "web", "10.0.0.1"), reservation("b", "db", "10.0.0.2")],
        links: vec![link("a", "10.0.0.1"), link("b", "10.0.0.2")],
        stray: Vec::new(),
        exported: vec!["10.0.0.0/27".parse().unwrap()],
        blocks: Some(vec![block("default-0", "n1", "10.0.0.0/27"), block("default-1", "n2", "10.0.0.32/27")]),
        pools: Some(vec![pool()]),
        pods: Some(vec![pod("web", "n1", "10.0.0.1"), pod("db", "n1", "10.0.0.2")]),
    }
}

fn reasons(view: &NodeView) -> Vec<&'static str> {
    node(view).iter().map(|finding| finding.reason).collect()
}

#[test]
fn nothing_is_found_where_all_agree() {
    assert_eq!(node(&healthy()), []);
}

#[test]
fn what_the_api_server_has_not_said_is_no_disagreement() {
    let view = NodeView { blocks: None, pools: None, pods: None, ..healthy() };
    assert_eq!(node(&view), []);
}

#[test]
fn a_pod_that_has_not_reported_its_addresses_yet_is_in_order() {
    let mut view = healthy();
    for pod in view.pods.as_mut().unwrap() {
        pod.addresses.clear();
    }
    assert_eq!(node(&view), []);
}

#[test]
fn every_disagreement_of_a_node_has_its_reason() {
    type Break = fn(&mut NodeView);
    let cases: &[(Break, &[&str])] = &[
        (|view| view.links.truncate(1), &["LeakedAddress"]),
        (|view| view.links[1].addresses.clear(), &["RouteMissing"]),
        (|view| view.links.push(link("c", "10.0.0.9")), &["LinkWithoutAddress"]),
        (|view| view.links[1].addresses.push("10.0.0.1".parse().unwrap()), &["DuplicateAddress"]),
        (|view| view.stray.push("10.0.0.7".parse().unwrap()), &["StrayRoute"]),
        (|view| view.exported.clear(), &["ExportMissing"]),
        (|view| view.exported.push("10.0.0.32/27".parse().unwrap()), &["ExportStray"]),
        (
            |view| view.blocks.as_mut().unwrap()[0].node = "n2".into(),
            &["AddressOutsideBlocks", "AddressOutsideBlocks", "ExportStray"],
        ),
        (
            |view| drop(view.blocks.as_mut().unwrap().remove(0)),
            &["AddressOutsideBlocks", "AddressOutsideBlocks", "ExportStray"],
        ),
        (|view| view.pools.as_mut().unwrap().clear(), &["UnknownPool"]),
        (
            |view| view.pools.as_mut().unwrap()[0].nets = vec!["10.1.0.0/16".parse().unwrap()],
            &["BlockOutsidePool"],
        ),
        (
            |view| view.blocks.as_mut().unwrap().push(block("other-0", "n3", "10.0.0.16/28")),
            &["BlocksOverlap"],
        ),
        (|view| view.pods.as_mut().unwrap().truncate(1), &["PodGone"]),
        (|view| view.pods.as_mut().unwrap()[1].uids = vec!["another".into()], &["PodGone"]),
        (
            |view| view.pods.as_mut().unwrap()[1].addresses = vec!["10.0.0.5".parse().unwrap()],
            &["PodIPsDiffer"],
        ),
        (|view| view.pods.as_mut().unwrap().push(pod("old", "n1", "10.0.0.8")), &["PodWithoutAddress"]),
        (|view| view.pods.as_mut().unwrap().push(pod("twin", "n1", "10.0.0.2")), &["DuplicateAddress"]),
    ];
    for (number, (spoil, expected)) in cases.iter().enumerate() {
        let mut view = healthy();
        spoil(&mut view);
        assert_eq!(reasons(&view), *expected, "case {number}: {:#?}", node(&view));
        for finding in node(&view) {
            assert!(!finding.subject.is_empty() && !finding.why.is_empty() && !finding.advice.is_empty());
            assert!(finding.what.contains(&finding.subject) || finding.subject.contains('/'), "{finding:?}");
        }
    }
}

#[test]
fn what_a_verb_works_on_is_not_judged() {
    let mut view = healthy();
    view.links.truncate(1);
    view.reservations[1].busy = true;
    assert_eq!(node(&view), []);
}

#[test]
fn pods_on_the_hosts_network_and_pods_that_ended_have_no_address_of_ours() {
    let mut view = healthy();
    let agent = KnownPod { has_network: false, ..pod("agent", "n1", "192.0.2.1") };
    view.pods.as_mut().unwrap().push(agent);
    assert_eq!(node(&view), []);
}

#[test]
fn errors_come_before_warnings() {
    let mut view = healthy();
    view.links.truncate(1);
    view.exported.clear();
    let severities: Vec<Severity> = node(&view).iter().map(|finding| finding.severity).collect();
    assert_eq!(severities, [Severity::Error, Severity::Warning]);
}

fn cluster_view() -> ClusterView {
    ClusterView {
        nodes: vec!["n1".to_owned(), "n2".to_owned()],
        blocks: vec![block("default-0", "n1", "10.0.0.0/27"), block("default-1", "n2", "10.0.0.32/27")],
        pools: vec![pool()],
        pods: vec![pod("web", "n1", "10.0.0.1"), pod("db", "n2", "10.0.0.33")],
    }
}

#[test]
fn every_disagreement_of_a_cluster_has_its_reason() {
    type Break = fn(&mut ClusterView);
    let cases: &[(Break, &[&str])] = &[
        (|_| {}, &[]),
        (|view| view.nodes.truncate(1), &["OrphanBlock"]),
        (|view| view.pools.clear(), &["UnknownPool", "UnknownPool"]),
        (|view| view.pods.push(pod("twin", "n1", "10.0.0.1")), &["DuplicateAddress"]),
        (|view| view.pods[1].node = "n1".into(), &["PodInForeignBlock"]),
        (|view| view.pods[1].addresses = vec!["10.0.9.1".parse().unwrap()], &["PodOutsideBlocks"]),
        (|view| view.blocks.push(block("x-0", "n1", "10.0.0.0/26")), &["BlocksOverlap", "BlocksOverlap"]),
    ];
    for (number, (spoil, expected)) in cases.iter().enumerate() {
        let mut view = cluster_view();
        spoil(&mut view);
        let found = cluster(&view);
        let reasons: Vec<&str> = found.iter().map(|finding| finding.reason).collect();
        assert_eq!(reasons, *expected, "case {number}: {found:#?}");
    }
}

proptest::proptest! {
    /// Property of all views: the check does not panic, and never calls an address of an own block `without_block`.
    #[test]
    fn own_addresses_are_at_home(last in 0u8..32, prefix in 20u8..=32) {
        let mut view = healthy();
        view.reservations = vec![reservation("a", "web", &format!("10.0.0.{last}"))];
        view.blocks.as_mut().unwrap().push(block("big-0", "n2", &format!("10.0.64.0/{prefix}")));
        proptest::prop_assert!(!reasons(&view).contains(&"AddressOutsideBlocks"));
    }
}
