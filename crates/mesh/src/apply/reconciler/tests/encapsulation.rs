//! IP tunnels to neighbours on other subnets.

use super::*;

/// Node 1 and one on another subnet of its location.
fn on_two_subnets(encapsulation: Encapsulation) -> Arc<Inputs> {
    let in_location = |number| {
        let member = member(number);
        let address = member.claims[0].addr();
        let internal = vec![InternalAddress { address, length: None }];
        let blocks = vec![format!("10.64.{}.0/24", number % 256).parse().unwrap()];
        fairlead_topology::Member { blocks, site: Some(Site { internal, ..Site::default() }), ..member }
    };
    let mut inputs = inputs([in_location(1), in_location(300), member(2)]);
    (inputs.settings.locations.granularity, inputs.settings.locations.encapsulation) =
        (Granularity::Cross, encapsulation);
    Arc::new(inputs)
}

fn with_own_address(kernel: &Shared) {
    let (prefix, flags) = ("10.0.0.1/24".parse().unwrap(), AddressFlags::PERMANENT);
    let address = Address { link: 7, prefix, scope: Scope::UNIVERSE, flags };
    kernel.lock().unwrap().network =
        HostNetwork { links: vec![link(7, "eth0")], addresses: vec![address], ..HostNetwork::default() };
}

fn applied_routes(kernel: &Shared) -> Vec<String> {
    let kernel = kernel.lock().unwrap();
    let routes = kernel.mesh.iter().flat_map(|state| &state.plain);
    routes.map(|it| format!("{} via {} on {}", it.destination, it.gateway, it.link)).collect()
}

#[test]
fn an_ip_tunnel_that_an_earlier_program_used_is_adopted_and_others_are_tried_first() {
    for (in_use, routes) in [(vec!["10.0.1.44"], vec!["10.64.44.0/24 via 10.0.1.44 on 99"]), (vec![], vec![])]
    {
        let kernel = Shared::default();
        with_own_address(&kernel);
        kernel.lock().unwrap().tunnel_remotes = in_use.iter().map(|text| text.parse().unwrap()).collect();
        let (mut mesh, now) = (mesh(&kernel), Instant::now());
        let report = mesh.reconcile(&on_two_subnets(Encapsulation::CrossSubnet), now).unwrap();
        assert_eq!(applied_routes(&kernel), routes);
        assert!(mesh.has_gateways(), "they are asked");
        let encapsulated: Vec<_> = report.peers.iter().flat_map(|peer| &peer.encapsulated).collect();
        assert_eq!(encapsulated.len(), routes.len());
        assert_eq!(report.problems, []);
        {
            let kernel = kernel.lock().unwrap();
            let [wanted] = &kernel.encapsulations[..] else { panic!("{:?}", kernel.encapsulations) };
            let expected = ("10.0.0.1".parse().unwrap(), "10.0.1.44".parse().unwrap(), 1500);
            assert_eq!((wanted.local[0], wanted.senders[0], wanted.uplink_mtu), expected);
            assert_eq!(kernel.applied.len(), 1, "its routes are there from the start");
        }
        mesh.disable().unwrap();
        assert_eq!(kernel.lock().unwrap().encapsulation, Default::default());
    }
}

#[test]
fn without_ip_tunnels_packets_take_the_encrypted_one_and_the_node_says_why() {
    let kernel = Shared::default();
    with_own_address(&kernel);
    {
        let mut kernel = kernel.lock().unwrap();
        kernel.tunnel_remotes = vec!["10.0.1.44".parse().unwrap()];
        kernel.without_tunnels = Some("the kernel has no ipip (module ipip)".to_owned());
    }
    let (mut mesh, now) = (mesh(&kernel), Instant::now());
    let report = mesh.reconcile(&on_two_subnets(Encapsulation::Always), now).unwrap();
    assert_eq!(applied_routes(&kernel), Vec::<String>::new());
    assert_eq!(report.peers.len(), 2, "the peers are there all the same");
    let problems: Vec<_> = report.problems.iter().map(|it| (it.reason(), it.nodes().len())).collect();
    assert_eq!(problems, [("EncapsulationUnavailable", 0)]);
    assert!(report.problems[0].to_string().contains("module ipip"), "{}", report.problems[0]);
    // It recovers when the module is there.
    kernel.lock().unwrap().without_tunnels = None;
    let report = mesh.reconcile(&on_two_subnets(Encapsulation::Always), now).unwrap();
    assert_eq!((applied_routes(&kernel).len(), report.problems), (1, vec![]));
}

#[test]
fn tunnels_stay_open_for_a_while_after_they_are_switched_off() {
    let kernel = Shared::default();
    with_own_address(&kernel);
    kernel.lock().unwrap().tunnel_remotes = vec!["10.0.1.44".parse().unwrap()];
    let (mut mesh, now) = (mesh(&kernel), Instant::now());
    mesh.reconcile(&on_two_subnets(Encapsulation::Always), now).unwrap();
    mesh.reconcile(&on_two_subnets(Encapsulation::Never), now).unwrap();
    assert_eq!(applied_routes(&kernel), Vec::<String>::new(), "this node sends nothing there");
    assert_eq!(kernel.lock().unwrap().encapsulation.senders.len(), 1, "others may not know it yet");
    mesh.reconcile(&on_two_subnets(Encapsulation::Never), now + Duration::from_secs(61)).unwrap();
    assert_eq!(kernel.lock().unwrap().encapsulation.local, Vec::<std::net::IpAddr>::new());
}
