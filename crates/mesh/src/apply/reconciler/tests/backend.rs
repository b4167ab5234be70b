//! The embedded WireGuard takes the place of the kernel's on a gateway.

use super::*;

/// A node that is alone in its location, and three in another one: one of them is behind two gateways.
fn locations(granularity: Granularity) -> Arc<Inputs> {
    let members = (1..=4_u8).map(|number| {
        let address = std::net::IpAddr::from([10, 0, 0, number]);
        let internal = vec![InternalAddress { address, length: None }];
        let location = if number == 1 { "one" } else { "other" }.to_owned();
        Member { site: Some(Site { location, internal, ..Site::default() }), ..member(number.into()) }
    });
    let mut inputs = inputs(members);
    inputs.settings.locations.granularity = granularity;
    inputs.settings.locations.topology.granularity = granularity;
    Arc::new(inputs)
}

fn with_wireguard() -> Shared {
    let kernel = Shared::default();
    kernel.lock().unwrap().has_wireguard = true;
    kernel
}

fn reasons(report: &Report) -> Vec<&str> {
    report.problems.iter().map(|problem| problem.reason()).collect()
}

#[test]
fn a_node_that_becomes_a_gateway_changes_to_the_embedded_one_once_and_for_all() {
    let kernel = with_wireguard();
    let (mut node, now) = (mesh(&kernel), Instant::now());
    let report = node.reconcile(&locations(Granularity::Full), now).unwrap();
    assert_eq!((report.device.backend, report.device.backend_reason), (Backend::Kernel, None));
    let roamed: SocketAddr = "203.0.113.9:40000".parse().unwrap();
    let before = {
        let mut kernel = kernel.lock().unwrap();
        let peer = kernel.state.as_mut().unwrap().peers.get_mut(&key(2)).unwrap();
        peer.config.endpoint = Some(roamed);
        let state = kernel.state.clone().unwrap();
        kernel.forget();
        state
    };

    let report = node.reconcile(&locations(Granularity::Location), now).unwrap();
    assert_eq!(report.device.backend, Backend::Embedded);
    assert!(report.device.backend_reason.is_some_and(|reason| reason.contains("several gateways")));
    assert_eq!(reasons(&report), [""; 0]);
    {
        let mut kernel = kernel.lock().unwrap();
        assert_eq!(
            (&kernel.deleted[..], &kernel.opened[..]),
            (&["wire_kube".into()][..], &["wire_kube".into()][..])
        );
        let state = kernel.state.as_ref().unwrap();
        assert_eq!(
            (&state.private_key, state.listen_port, state.fwmark),
            (&before.private_key, before.listen_port, before.fwmark)
        );
        assert_eq!(kernel.changes[0].set_peers[&key(2)].endpoint, Some(roamed), "its last endpoint");
        kernel.forget();
    }

    // Neither other gateways nor another program change it back.
    node.reconcile(&locations(Granularity::Full), now).unwrap();
    let last = node.reconcile(&locations(Granularity::Full), now + Duration::from_secs(10)).unwrap();
    assert_eq!((last.device.backend, last.device.backend_reason), (Backend::Embedded, None));
    for granularity in [Granularity::Location, Granularity::Full] {
        let report = mesh(&kernel).reconcile(&locations(granularity), now).unwrap();
        assert_eq!(report.device.backend, Backend::Embedded);
    }
    assert!(kernel.lock().unwrap().deleted.is_empty());
}

#[test]
fn the_kernel_s_stays_where_it_was_chosen_and_the_problem_says_what_to_do() {
    let kernel = with_wireguard();
    let device = DeviceSlot::new(Preference::Kernel, PathBuf::from("/nonexistent"));
    let mut node = Mesh::new(FakeKernel(Arc::clone(&kernel)), device, paths());
    let report = node.reconcile(&locations(Granularity::Location), Instant::now()).unwrap();
    assert_eq!((report.device.backend, reasons(&report)), (Backend::Kernel, vec!["GatewaysNeedEmbedded"]));
    assert!(report.problems[0].to_string().contains("without --wireguard=kernel"), "{}", report.problems[0]);
}

#[test]
fn where_the_embedded_one_cannot_be_started_the_kernel_s_stays_until_it_can_be() {
    let kernel = with_wireguard();
    kernel.lock().unwrap().refuse_embedded = true;
    let (mut node, inputs, start) = (mesh(&kernel), locations(Granularity::Location), Instant::now());
    for second in [0, 1, 59, 60, 61, 119] {
        let report = node.reconcile(&inputs, start + Duration::from_secs(second)).unwrap();
        assert_eq!(
            (report.device.backend, reasons(&report)),
            (Backend::Kernel, vec!["GatewaysNeedEmbedded"])
        );
        let problem = report.problems[0].to_string();
        assert!(problem.contains("cannot be started (") && problem.contains("the test says so"), "{problem}");
    }
    {
        let mut kernel = kernel.lock().unwrap();
        assert_eq!((kernel.deleted.len(), kernel.opened.len(), kernel.checks), (0, 1, 2), "once a minute");
        kernel.refuse_embedded = false;
    }
    let report = node.reconcile(&inputs, start + Duration::from_secs(120)).unwrap();
    assert_eq!((report.device.backend, reasons(&report)), (Backend::Embedded, vec![]));
}

#[test]
fn where_it_cannot_be_made_although_it_seemed_so_the_kernel_s_is_made_again_and_left_alone_for_an_hour() {
    let kernel = with_wireguard();
    let (mut node, start) = (mesh(&kernel), Instant::now());
    node.reconcile(&locations(Granularity::Full), start).unwrap();
    let inputs = locations(Granularity::Location);
    kernel.lock().unwrap().refuse_open = true;
    node.reconcile(&inputs, start).unwrap_err();
    kernel.lock().unwrap().refuse_open = false;
    for minute in [0, 1, 59] {
        let report = node.reconcile(&inputs, start + Duration::from_secs(minute * 60)).unwrap();
        assert_eq!(
            (report.device.backend, reasons(&report)),
            (Backend::Kernel, vec!["GatewaysNeedEmbedded"])
        );
    }
    assert_eq!(kernel.lock().unwrap().deleted.len(), 1);
    assert_eq!(
        node.reconcile(&inputs, start + Duration::from_secs(3600)).unwrap().device.backend,
        Backend::Embedded
    );
}

/// Packets through another gateway come as soon as the first node uses the new granularity.
#[test]
fn a_node_that_prepares_for_several_gateways_changes_before_they_are_used() {
    let kernel = with_wireguard();
    let mut inputs = Inputs::clone(&locations(Granularity::Full));
    inputs.settings.locations.topology.granularity = Granularity::Location;
    let (mut node, now) = (mesh(&kernel), Instant::now());
    assert_eq!(node.reconcile(&Arc::new(inputs), now).unwrap().device.backend, Backend::Embedded);
}

/// While the granularity changes each node accepts packets by more than one way. That is over soon.
#[test]
fn a_change_of_the_granularity_needs_no_embedded_one_where_no_node_is_behind_gateways() {
    let kernel = with_wireguard();
    let mut inputs = Inputs::clone(&locations(Granularity::Full));
    inputs.members.truncate(3);
    let (mut node, now) = (mesh(&kernel), Instant::now());
    for (used, wanted) in [(0, 1), (1, 1), (1, 0), (0, 0)] {
        let granularity = |it| [Granularity::Full, Granularity::Location][it];
        inputs.settings.locations.granularity = granularity(used);
        inputs.settings.locations.topology.granularity = granularity(wanted);
        let report = node.reconcile(&Arc::new(inputs.clone()), now).unwrap();
        assert_eq!((report.device.backend, reasons(&report)), (Backend::Kernel, vec![]));
    }
}
