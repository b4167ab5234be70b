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
    inputs.settings.granularity = granularity;
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
    assert_eq!((report.backend, report.backend_reason), (Backend::Kernel, None));
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
    assert_eq!(report.backend, Backend::Embedded);
    assert!(report.backend_reason.is_some_and(|reason| reason.contains("several gateways")));
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
    let last = node.reconcile(&locations(Granularity::Full), now).unwrap();
    assert_eq!((last.backend, last.backend_reason), (Backend::Embedded, None));
    for granularity in [Granularity::Location, Granularity::Full] {
        let report = mesh(&kernel).reconcile(&locations(granularity), now).unwrap();
        assert_eq!(report.backend, Backend::Embedded);
    }
    assert!(kernel.lock().unwrap().deleted.is_empty());
}

#[test]
fn the_kernel_s_stays_where_it_was_chosen_and_the_problem_says_what_to_do() {
    let kernel = with_wireguard();
    let device = DeviceSlot::new(Preference::Kernel, PathBuf::from("/nonexistent"));
    let mut node = Mesh::new(FakeKernel(Arc::clone(&kernel)), device, paths());
    let report = node.reconcile(&locations(Granularity::Location), Instant::now()).unwrap();
    assert_eq!((report.backend, reasons(&report)), (Backend::Kernel, vec!["GatewaysNeedEmbedded"]));
    assert!(report.problems[0].to_string().contains("without --wireguard=kernel"), "{}", report.problems[0]);
}

#[test]
fn where_the_embedded_one_cannot_be_started_the_kernel_s_is_used_again_and_stays() {
    let kernel = with_wireguard();
    kernel.lock().unwrap().refuse_embedded = true;
    let (mut node, inputs, now) = (mesh(&kernel), locations(Granularity::Location), Instant::now());
    node.reconcile(&inputs, now).unwrap_err();
    for _ in 0..2 {
        let report = node.reconcile(&inputs, now).unwrap();
        assert_eq!((report.backend, reasons(&report)), (Backend::Kernel, vec!["GatewaysNeedEmbedded"]));
        let problem = report.problems[0].to_string();
        assert!(
            problem.contains("could not be started (") && problem.contains("the test says so"),
            "{problem}"
        );
    }
    assert_eq!(kernel.lock().unwrap().deleted.len(), 1);
}
