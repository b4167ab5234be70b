use fairlead_cluster::metrics::{Exposition, text};

use super::*;

fn web() -> ClientUse {
    ClientUse {
        namespace: "shop".to_owned(),
        name: "web".to_owned(),
        node: "n1".to_owned(),
        addresses: vec![[10, 1, 0, 5].into()],
        sent_packets: 1,
        sent_bytes: 100,
        received_packets: 2,
        received_bytes: 200,
        connections: Some(4),
    }
}

#[test]
fn the_load_is_without_copies_of_other_gateways_connections() {
    let metrics = Metrics::default();
    assert_eq!(metrics.load().connections, None);
    metrics.set(Snapshot { connections: Some((50, 100)), ..Snapshot::default() });
    metrics.copies.set_copies(30);
    assert_eq!(metrics.load().connections, Some(20));
    metrics.copies.set_copies(60);
    assert_eq!(metrics.load().connections, Some(0), "they are counted at different times");
}

/// Metrics of a gateway that has counted something of everything.
fn scrape() -> String {
    let mut registry = Registry::default();
    let pod = Pod { namespace: "n".to_owned(), pod: "p".to_owned(), egress: "e".to_owned() };
    let metrics = Metrics::register(&mut registry, pod);
    metrics.hello(None);
    metrics.hello(Some(&Rejected::NoNode));
    metrics.applied(Some(3));
    let held = fairlead_source_addresses::hold::Held { term: 7, until: std::time::Duration::ZERO };
    metrics.holds.set(&[(1, held)].into(), None);
    metrics.holds.taken(fairlead_source_addresses::hold::Cause::Failure);
    metrics.set(Snapshot {
        traffic: IpFamily::BOTH.map(|family| (family, GatewayTraffic::default())).into(),
        connections: Some((5, 100)),
        statistics: Some(Statistics::default()),
        registered: Arc::new(Registered {
            uses: vec![web()],
            nodes: [("n1".to_owned(), 2)].into(),
            adopted: 1,
        }),
        ..Snapshot::default()
    });
    metrics.refused(&[Refusal::new("u", crate::registry::Reason::InvalidAddress, "")]);
    text(&registry, Exposition::Text)
}

#[test]
fn the_reference_of_metrics_is_current() {
    testbed_metrics::reference::check("egress-gateway", &testbed_metrics::Exposed::parse(&scrape())).unwrap();
}

#[test]
fn a_scrape_has_coils_names_and_satisfies_promtool() {
    let text = scrape();
    // Prometheus would not have these two of Coil's names.
    let is_usual =
        |line: &&str| !["client_pod_count", "entries_count"].iter().any(|name| line.contains(name));
    let usual: String = text.lines().filter(is_usual).map(|line| format!("{line}\n")).collect();
    testbed_metrics::promtool::check_metrics(&usual).unwrap();
    let unknown = testbed_metrics::Program::Gateway.unknown(&testbed_metrics::Exposed::parse(&text));
    assert_eq!(unknown.unwrap(), [""; 0], "the dashboard and the alerts query what is there");
    for line in [
        "coil_egress_client_pod_count{namespace=\"n\",egress=\"e\"} 3",
        "coil_egress_nf_conntrack_entries_count{namespace=\"n\",pod=\"p\",egress=\"e\"} 5",
        "coil_egress_nf_conntrack_entries_limit{namespace=\"n\",pod=\"p\",egress=\"e\"} 100",
        "coil_egress_nftables_invalid_packets_total{namespace=\"n\",pod=\"p\",egress=\"e\",protocol=\"ipv6\"} 0",
        "coil_egress_dropped_packets_total{reason=\"inner_source\"} 0",
        "coil_egress_registrations_total{result=\"NodeUnknown\"} 1",
        "coil_egress_data_path_changes_total 3",
        "coil_egress_forwarded_bytes_total{direction=\"sent\"} 0",
        "coil_egress_client_bytes_total{client_namespace=\"shop\",client_pod=\"web\",direction=\"received\"} 200",
        "coil_egress_client_pod_info{namespace=\"shop\",pod=\"web\",pod_ip=\"10.1.0.5\",interface=\"fou4_0a010005\",egress=\"e\",egress_namespace=\"n\"} 1",
        "coil_egress_client_connections{client_namespace=\"shop\",client_pod=\"web\"} 4",
        "coil_egress_conntrack_failures_total{reason=\"insert_failed\"} 0",
        "coil_egress_rejected_connections_total{namespace=\"n\",pod=\"p\",egress=\"e\",protocol=\"ipv4\"} 0",
        "coil_egress_unhealthy{reason=\"NoTargetAnswers\"} 0",
        "coil_egress_node_client_pods{node=\"n1\"} 2",
        "coil_egress_held_source_slots 1",
        "coil_egress_source_slot_term{slot=\"1\"} 7",
        "coil_egress_source_slots_taken_total{cause=\"failure\"} 1",
    ] {
        assert!(text.lines().any(|it| it == line), "{line}: {text}");
    }
}
