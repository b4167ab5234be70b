//! Port on which a node listens, and the port that it publishes.

use fairlead_keys::DeviceChange;

use super::*;

/// Three nodes, of which this one is to listen on `port`.
fn on(port: Option<u16>) -> Arc<Inputs> {
    let mut inputs = inputs([member(1), member(2), member(3)]);
    inputs.own.port = port;
    Arc::new(inputs)
}

fn reasons(report: &Report) -> Vec<&'static str> {
    report.problems.iter().map(|problem| problem.reason()).collect()
}

fn port_of(kernel: &Shared) -> u16 {
    kernel.lock().unwrap().state.as_ref().unwrap().listen_port
}

#[test]
fn a_node_listens_on_its_own_port_and_publishes_it() {
    let kernel = Shared::default();
    let (mut mesh, now) = (mesh(&kernel), Instant::now());
    let port = mesh.listen_port();
    assert_eq!(*port.borrow(), None);
    let report = mesh.reconcile(&on(Some(51821)), now).unwrap();
    assert_eq!((report.device.port, port_of(&kernel), *port.borrow()), (51821, 51821, Some(51821)));
    assert_eq!(report.endpoints.host, ["10.0.0.1:51821".parse().unwrap()]);
    assert_eq!(reasons(&report), [""; 0]);
    assert!(mesh.is_outdated(), "nothing could be asked before the device had the port");

    // The peers stay as they are, whatever the port.
    kernel.lock().unwrap().forget();
    let report = mesh.reconcile(&on(Some(51822)), now).unwrap();
    assert_eq!((report.device.port, *port.borrow()), (51822, Some(51822)));
    let only = DeviceChange { listen_port: Some(51822), ..DeviceChange::default() };
    assert_eq!(kernel.lock().unwrap().changes, [only]);
    let report = mesh.reconcile(&on(None), now).unwrap();
    assert_eq!((report.device.port, port_of(&kernel)), (51820, 51820));
    assert_eq!(report.endpoints.host, ["10.0.0.1:51820".parse().unwrap()]);
    mesh.disable().unwrap();
    assert_eq!(*port.borrow(), None);
}

#[test]
fn a_port_that_is_taken_costs_nothing_but_itself_and_is_tried_again() {
    let kernel = Shared::default();
    let (mut mesh, now) = (mesh(&kernel), Instant::now());
    mesh.reconcile(&on(Some(51821)), now).unwrap();
    kernel.lock().unwrap().ports_taken = vec![51822, 51820];
    for (wanted, named) in [(Some(51822), "kilo.squat.ai/force-endpoint"), (None, "spec.listenPort")] {
        let report = mesh.reconcile(&on(wanted), now).unwrap();
        assert_eq!((report.device.port, port_of(&kernel), report.peers.len()), (51821, 51821, 2));
        assert_eq!(report.endpoints.host, ["10.0.0.1:51821".parse().unwrap()]);
        let [problem] = &report.problems[..] else { panic!("{:?}", report.problems) };
        assert_eq!(problem.reason(), "ListenPortUnavailable");
        let sentence = problem.to_string();
        assert!(sentence.contains(named) && sentence.contains("listens on port 51821"), "{sentence}");
    }
    assert_eq!(kernel.lock().unwrap().opened.len(), 1, "the device stays open");

    // Free again. It is not tried with every change of the mesh.
    kernel.lock().unwrap().ports_taken.clear();
    assert_eq!(mesh.reconcile(&on(None), now).unwrap().device.port, 51821);
    let report = mesh.reconcile(&on(None), now + Duration::from_secs(6)).unwrap();
    assert_eq!((report.device.port, reasons(&report).len()), (51820, 0));
}

#[test]
fn a_new_device_waits_a_moment_for_its_port_and_then_takes_that_of_the_mesh() {
    let kernel = Shared::default();
    kernel.lock().unwrap().ports_taken = vec![51821];
    let (mut mesh, now) = (mesh(&kernel), Instant::now());
    // A predecessor that is ending may have it.
    assert_eq!(mesh.reconcile(&on(Some(51821)), now).unwrap_err().reason(), "DeviceFailed");
    assert_eq!(*mesh.listen_port().borrow(), None);
    assert_eq!(targets_of(&kernel), of_two_and_three(), "they are dropped meanwhile");
    let report = mesh.reconcile(&on(Some(51821)), now + Duration::from_secs(3)).unwrap();
    assert_eq!((report.device.port, port_of(&kernel)), (51820, 51820));
    assert_eq!(reasons(&report), ["ListenPortUnavailable"]);

    // A device with a port that nothing was configured with is as good as one without.
    let kernel = Shared::default();
    let state = DeviceState { private_key: None, listen_port: 40_000, fwmark: 0, peers: BTreeMap::new() };
    kernel.lock().unwrap().state = Some(state);
    kernel.lock().unwrap().ports_taken = vec![51821];
    let mut mesh = super::mesh(&kernel);
    mesh.reconcile(&on(Some(51821)), now).unwrap_err();
    assert_eq!(mesh.reconcile(&on(Some(51821)), now + Duration::from_secs(3)).unwrap().device.port, 51820);
}

#[test]
fn an_adopted_device_keeps_the_port_that_it_has() {
    let kernel = Shared::default();
    let now = Instant::now();
    mesh(&kernel).reconcile(&on(Some(51821)), now).unwrap();
    kernel.lock().unwrap().forget();
    // The next program.
    let report = mesh(&kernel).reconcile(&on(Some(51821)), now).unwrap();
    assert_eq!(report.device.port, 51821);
    let kernel = kernel.lock().unwrap();
    assert!(kernel.changes.iter().all(|change| change.listen_port.is_none()), "{:?}", kernel.changes);
}
