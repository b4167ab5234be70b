use fairlead_api::client_routing::ClientRule;
use proptest::prelude::*;

use super::*;
use crate::problem::EgressReason;

fn name(name: &str) -> EgressName {
    EgressName { namespace: "n".to_owned(), name: name.to_owned() }
}

fn prefixes(texts: &[&str]) -> BTreeSet<IpNet> {
    texts.iter().map(|text| text.parse().unwrap()).collect()
}

fn known(cluster_ips: &[&str], destinations: &[&str]) -> KnownEgress {
    KnownEgress {
        destinations: Ok(Destinations { prefixes: prefixes(destinations), excluded: BTreeSet::new() }),
        source_port: SourcePort::Fixed,
        originating_only: None,
        cluster_ranges: Some(Vec::new()),
        ranges_are_stale: false,
        allowed_namespaces: None,
        service: Some(KnownService {
            cluster_ips: cluster_ips.iter().map(|text| text.parse::<IpAddr>().unwrap()).collect(),
            port: 5555,
            by_client: true,
            idle_timeout: Some(Duration::from_secs(300)),
        }),
    }
}

fn cluster<const N: usize>(all: [(&str, KnownEgress); N]) -> Cluster {
    let egresses = all.into_iter().map(|(egress, known)| (name(egress), known)).collect();
    Cluster { egresses, ..Cluster::default() }
}

fn asking(chosen: &[&str]) -> Asking {
    Asking {
        namespace: "shop".to_owned(),
        chosen: chosen.iter().map(|egress| name(egress)).collect(),
        addresses: ["10.20.30.40", "fd02::1"]
            .map(|text| text.parse::<IpAddr>().unwrap())
            .into_iter()
            .collect(),
        mtu: 1500,
    }
}

fn gateway(address: &str, is_draining: bool) -> Gateway {
    Gateway { address: address.parse().unwrap(), is_draining }
}

fn links(routing: &DualStack<ClientRouting, ClientRouting>) -> Vec<(String, String)> {
    let families = [&routing.ipv4, &routing.ipv6].into_iter().flatten();
    let shown = |target: &Target| match target {
        Target::Link(name) => name.clone(),
        Target::Refused => "refused".to_owned(),
        Target::Excluded => "excluded".to_owned(),
        Target::InCluster => "in cluster".to_owned(),
    };
    families.flat_map(|it| &it.routes).map(|it| (it.destination.to_string(), shown(&it.target))).collect()
}

#[test]
fn a_tunnel_leads_to_the_gateways_of_its_family() {
    let cluster = cluster([("a", known(&["10.68.0.1", "fd04::1"], &["0.0.0.0/0", "::/0"]))]);
    let plan = plan(&cluster, &asking(&["a"])).unwrap();
    let all = [gateway("10.1.0.2", true), gateway("fd02::9", false), gateway("10.1.0.3", false)];
    let desired = desired(&plan, |_| NextHop::Gateways(all.to_vec())).unwrap();
    let [ipv4, ipv6] = ["10.68.0.1", "fd04::1"].map(|ip| &desired.tunnels[&ip.parse::<IpAddr>().unwrap()]);
    let expected = Service {
        gateways: vec![gateway("10.1.0.3", false), gateway("10.1.0.2", true)],
        by_client: true,
        idle_timeout: Some(Duration::from_secs(300)),
    };
    assert_eq!(
        (&ipv4.service, ipv4.link.as_str(), ipv4.source_port),
        (&Some(expected), "fou4_0a440001", Some(5555))
    );
    assert_eq!(ipv4.local, "10.20.30.40".parse::<IpAddr>().unwrap());
    assert_eq!(ipv6.service.as_ref().unwrap().gateways, [gateway("fd02::9", false)]);
    assert!(ipv4.is_open() && ipv6.is_open());
    let coil = super::desired(&plan, |_| NextHop::Service).unwrap();
    assert!(coil.tunnels.values().all(|tunnel| tunnel.service.is_none() && tunnel.is_open()));
    let none = super::desired(&plan, |_| NextHop::Gateways(Vec::new())).unwrap();
    assert!(!none.tunnels.values().any(Tunnel::is_open));
    assert_eq!(super::desired(&plan, |_| NextHop::Unknown), None);
}

#[test]
fn all_gateways_may_answer_be_they_chosen_or_not() {
    let cluster = cluster([("a", known(&["10.68.0.1", "fd04::1"], &["0.0.0.0/0", "::/0"]))]);
    let plan = plan(&cluster, &asking(&["a"])).unwrap();
    let own = |_: &EgressName| ["10.1.0.2", "fd02::9"].map(|address| address.parse().unwrap()).into();
    let answering = |way: NextHop| {
        let desired = desired(&plan, |_| way.clone()).unwrap().answered_by(&plan, own);
        let tunnels = desired.tunnels.into_values();
        tunnels
            .map(|tunnel| tunnel.answering.iter().map(ToString::to_string).collect())
            .collect::<Vec<String>>()
    };
    assert_eq!(answering(NextHop::Service), ["10.1.0.2", "fd02::9"]);
    assert_eq!(answering(NextHop::Gateways(vec![gateway("10.1.0.3", false)])), ["10.1.0.2", "fd02::9"]);
}

#[test]
fn what_cannot_be_used_is_refused_and_the_rest_works() {
    let mut forbidden = known(&["10.68.0.2"], &["9.9.9.0/24", "10.9.0.0/16"]);
    forbidden.allowed_namespaces = Some(BTreeSet::from(["bank".to_owned()]));
    let mut down = known(&[], &["8.8.8.0/24", "2001:db8::/32"]);
    down.service = None;
    let ok = known(&["10.68.0.1"], &["192.0.2.0/24"]);
    let cluster = cluster([("ok", ok), ("forbidden", forbidden), ("down", down)]);
    let plan = plan(&cluster, &asking(&["ok", "forbidden", "down", "gone"])).unwrap();
    let reasons: Vec<EgressReason> = plan.problems.iter().map(|problem| problem.reason).collect();
    assert_eq!(reasons, [EgressReason::ServiceMissing, EgressReason::NotAllowed, EgressReason::Unknown]);
    assert_eq!(plan.usable, BTreeSet::from([name("ok")]));
    let desired = desired(&plan, |_| NextHop::Gateways(vec![gateway("10.1.0.2", false)])).unwrap();
    assert!(desired.keeps_destinations);
    let refused = |prefix: &str| (prefix.to_owned(), "refused".to_owned());
    let mut found = links(&desired.routing);
    found.sort();
    let mut expected = vec![
        refused("8.8.8.0/24"),
        refused("9.9.9.0/24"),
        refused("10.9.0.0/16"),
        refused("2001:db8::/32"),
        ("192.0.2.0/24".to_owned(), "fou4_0a440001".to_owned()),
    ];
    expected.sort();
    assert_eq!(found, expected);
    // What the kernel still has of the one that is gone.
    let kernel =
        ["7.7.7.0/24", "9.9.9.0/24"].map(|prefix| ((118, prefix.parse().unwrap()), Held::Destination));
    let kept = desired.refusing(&kernel.into());
    assert_eq!(links(&kept.routing).len(), 6);
}

#[test]
fn what_is_excluded_leaves_by_eth0_unless_an_egress_that_is_gone_may_have_it() {
    let excluding = |ip: &str, destinations: &[&str], excluded: &[&str]| {
        let mut known = known(&[ip], destinations);
        known.destinations.as_mut().unwrap().excluded = prefixes(excluded);
        known
    };
    let mut down = excluding("10.68.0.2", &["10.0.0.0/8"], &["10.2.0.0/16"]);
    down.service = None;
    let ok = excluding("10.68.0.1", &["0.0.0.0/0"], &["8.8.8.0/24", "9.9.9.0/24"]);
    let cluster = cluster([("ok", ok), ("down", down)]);
    let way = |_: &EgressName| NextHop::Gateways(vec![gateway("10.1.0.2", false)]);
    let of = |asked: &[&str]| desired(&plan(&cluster, &asking(asked)).unwrap(), way).unwrap();
    let shown = |desired: &Desired| -> Vec<String> {
        links(&desired.routing).into_iter().map(|(prefix, target)| format!("{prefix} {target}")).collect()
    };
    let rest = ["10.0.0.0/8 refused", "10.2.0.0/16 excluded", "0.0.0.0/0 fou4_0a440001"];
    let expected =
        [&rest[..], &["8.8.8.0/24 excluded", "9.9.9.0/24 excluded", "10.2.0.0/16 fou4_0a440001"]].concat();
    assert_eq!(shown(&of(&["ok", "down"])), expected);
    // The kernel has what was excluded for both, or what may have been a destination of the one that is gone.
    let (excluded, destination) = (Held::Excluded, Held::Destination);
    let kernel = [("8.8.8.0/24", excluded), ("9.9.9.0/24", destination), ("7.7.7.0/24", excluded)]
        .map(|(prefix, held)| ((118, prefix.parse().unwrap()), held));
    let kept = of(&["ok", "gone"]).refusing(&kernel.into());
    let expected =
        ["0.0.0.0/0 fou4_0a440001", "8.8.8.0/24 excluded", "9.9.9.0/24 refused", "7.7.7.0/24 refused"];
    assert_eq!(shown(&kept), expected);
}

#[test]
fn a_contradiction_is_an_error_with_the_reason() {
    let same = known(&["10.68.0.2"], &["0.0.0.0/0"]);
    let cluster = cluster([("a", known(&["10.68.0.1"], &["0.0.0.0/0"])), ("b", same)]);
    let problem = plan(&cluster, &asking(&["a", "b"])).unwrap_err();
    assert_eq!(problem.reason, EgressReason::SamePrefix);
    assert!(problem.message.contains("n/a") && problem.message.contains("n/b"), "{problem}");
}

#[test]
fn the_ranges_of_the_cluster_have_rules() {
    let of = |ranges: Option<&str>, ip: &str, destination: &str| KnownEgress {
        cluster_ranges: ranges.map(|text| vec![text.parse().unwrap()]),
        ..known(&[ip], &[destination])
    };
    let cluster = cluster([
        ("a", of(Some("100.64.0.0/16"), "10.68.0.1", "0.0.0.0/0")),
        ("b", of(Some("0.0.0.0/1"), "10.68.0.2", "9.9.9.0/24")),
        ("c", of(None, "10.68.0.3", "8.8.8.0/24")),
    ]);
    let problem = usable(&cluster, "shop", &name("c")).unwrap_err();
    assert_eq!(problem.reason, EgressReason::RangesUnknown);
    let plan = plan(&cluster, &asking(&["a"])).unwrap();
    let rules = &plan.routing.ipv4.as_ref().unwrap().rules;
    let own: Vec<&ClientRule> =
        rules.iter().filter(|rule| rule.priority >= 2003 && rule.table == 254).collect();
    assert_eq!(own.len(), 1);
    assert_eq!(own[0].destination.to_string(), "100.64.0.0/16");
}

#[test]
fn a_pod_keeps_what_it_has_until_ranges_inside_of_private_destinations_are_known() {
    let stale = KnownEgress { ranges_are_stale: true, ..known(&["10.68.0.1"], &["192.168.0.0/16"]) };
    let unknown = KnownEgress { cluster_ranges: None, ..known(&["10.68.0.2"], &["172.16.0.0/12"]) };
    let wide = KnownEgress { ranges_are_stale: true, ..known(&["10.68.0.3"], &["0.0.0.0/0"]) };
    let cluster = cluster([("stale", stale), ("unknown", unknown), ("wide", wide)]);
    for waits in ["stale", "unknown"] {
        let problem = plan(&cluster, &asking(&[waits, "wide"])).unwrap_err();
        assert_eq!(problem.reason, EgressReason::RangesUnknown);
    }
    assert!(plan(&cluster, &asking(&["wide"])).is_ok());
}

#[test]
fn ranges_of_the_cluster_stay_reachable_when_their_egress_is_gone() {
    let wide = cluster([("a", known(&["10.68.0.1"], &["0.0.0.0/0"]))]);
    let plan = plan(&wide, &asking(&["a", "gone"])).unwrap();
    let desired = desired(&plan, |_| NextHop::Gateways(Vec::new())).unwrap();
    let held = [
        ("10.0.0.0/8", Held::Destination),
        ("10.64.0.0/16", Held::InCluster),
        ("10.9.0.0/16", Held::Excluded),
    ];
    let mut held: BTreeMap<(u32, IpNet), Held> =
        held.map(|(prefix, held)| ((117, prefix.parse().unwrap()), held)).into();
    held.insert((254, "198.51.100.7/32".parse().unwrap()), Held::InCluster);
    let kept = desired.refusing(&held).routing;
    let rules = &kept.ipv4.as_ref().unwrap().rules;
    let own: Vec<String> =
        rules.iter().filter(|it| is_of_cluster(it)).map(|it| it.destination.to_string()).collect();
    assert_eq!((own, rules.len()), (vec!["198.51.100.7/32".to_owned()], 7));
    let shown: Vec<String> =
        links(&kept).iter().map(|(prefix, target)| format!("{prefix} {target}")).collect();
    let expected =
        ["0.0.0.0/0 fou4_0a440001", "10.0.0.0/8 refused", "10.9.0.0/16 refused", "10.64.0.0/16 in cluster"];
    assert_eq!(shown, expected);
}

#[test]
fn which_connections_are_answered_by_eth0_is_said_of_each_egress() {
    let of = |originating_only, destinations: &[&str], ip: &str| KnownEgress {
        originating_only,
        ..known(&[ip], destinations)
    };
    let mut forbidden = of(Some(true), &["8.8.8.0/24"], "10.68.0.4");
    forbidden.allowed_namespaces = Some(BTreeSet::new());
    let mut cluster = cluster([
        ("yes", of(Some(true), &["0.0.0.0/0"], "10.68.0.1")),
        ("no", of(Some(false), &["9.9.0.0/16"], "10.68.0.2")),
        ("unsaid", of(None, &["9.9.9.0/24"], "10.68.0.3")),
        ("forbidden", forbidden),
    ]);
    let answered = |cluster: &Cluster| -> Vec<String> {
        let plan = plan(cluster, &asking(&["yes", "no", "unsaid", "forbidden"])).unwrap();
        let routes = plan.routing.ipv4.unwrap().routes;
        routes.iter().filter(|it| it.originating_only).map(|it| it.destination.to_string()).collect()
    };
    assert_eq!(answered(&cluster), ["0.0.0.0/0", "8.8.8.0/24"]);
    cluster.originating_only = true;
    assert_eq!(answered(&cluster), ["0.0.0.0/0", "8.8.8.0/24", "9.9.9.0/24"]);
}

/// Egress of any kind, one that can be used or not; `None` is unknown.
fn any_egress() -> impl Strategy<Value = Option<KnownEgress>> {
    let destinations = prop::collection::btree_set(0..6_u8, 0..4);
    (0..5_u8, destinations, 1..5_u8).prop_map(|(kind, destinations, ip)| {
        let destinations: Vec<String> = destinations.iter().map(|it| format!("203.0.{it}.0/24")).collect();
        let destinations: Vec<&str> = destinations.iter().map(String::as_str).collect();
        let mut egress = known(&[&format!("10.68.0.{ip}")], &destinations);
        match kind {
            0 => return None,
            1 => egress.service = None,
            2 => egress.allowed_namespaces = Some(BTreeSet::new()),
            3 => egress.destinations = Err("spec.destinations[0]".to_owned()),
            _ => {}
        }
        Some(egress)
    })
}

proptest! {
    #[test]
    fn every_known_destination_has_a_route_and_only_open_tunnels_are_used(
        egresses in prop::collection::vec(any_egress(), 1..4), open: bool,
    ) {
        let names: Vec<String> = (0..egresses.len()).map(|index| format!("e{index}")).collect();
        let there = names.iter().zip(&egresses).filter_map(|(of, known)| Some((name(of), known.clone()?)));
        let cluster = Cluster { egresses: there.collect(), ..Cluster::default() };
        let chosen: Vec<&str> = names.iter().map(String::as_str).collect();
        let Ok(plan) = plan(&cluster, &asking(&chosen)) else { return Ok(()) };
        prop_assert_eq!(plan.problems.len() + plan.usable.len(), egresses.len());
        let way = if open { vec![gateway("10.1.0.2", false)] } else { Vec::new() };
        let desired = desired(&plan, |_| NextHop::Gateways(way.clone())).unwrap();
        let routes = &desired.routing.ipv4.as_ref().unwrap().routes;
        for known in cluster.egresses.values() {
            for destination in known.destinations.iter().flat_map(|it| &it.prefixes) {
                let of: Vec<&ClientRoute> = routes.iter().filter(|it| it.destination == *destination).collect();
                prop_assert_eq!(of.len(), 1);
                let tunnel = |link: &String| desired.tunnels.values().find(|tunnel| tunnel.link == *link);
                let is_right = match &of[0].target {
                    Target::Link(link) => tunnel(link).is_some_and(|tunnel| tunnel.is_open() == open),
                    target => *target == Target::Refused,
                };
                prop_assert!(is_right, "{:?}", of);
            }
        }
        let unknown = egresses.iter().any(|it| it.as_ref().is_none_or(|it| it.destinations.is_err()));
        prop_assert_eq!(desired.keeps_destinations, unknown);
    }
}
