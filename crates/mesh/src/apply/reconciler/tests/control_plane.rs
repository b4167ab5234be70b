//! Control-plane nodes whose tunnels come and go.

use fairlead_topology::MemberAddresses;

use super::*;

/// Whether packets to the control-plane node 2 go past the mesh.
fn goes_past(kernel: &Shared) -> bool {
    let kernel = kernel.lock().unwrap();
    let bypass = &kernel.mesh.as_ref().unwrap().bypass.control_plane;
    assert_eq!(bypass.nodes, ["10.0.0.2".parse::<std::net::IpAddr>().unwrap()]);
    !bypass.down.is_empty()
}

fn handshake(kernel: &Shared, number: u32) {
    let mut kernel = kernel.lock().unwrap();
    let peer = kernel.state.as_mut().unwrap().peers.get_mut(&key(number)).unwrap();
    peer.last_handshake = Some(SystemTime::now());
    peer.rx_bytes += 100;
}

/// Whether the paths ask for a reconciliation in so many seconds.
fn is_outdated_within(mesh: &mut Mesh<FakeKernel>, now: &mut Instant, seconds: u32) -> bool {
    (0..seconds).any(|_| {
        *now += Duration::from_secs(1);
        wake(mesh, true, *now).unwrap();
        mesh.is_outdated()
    })
}

#[test]
fn a_control_plane_node_is_reached_past_the_mesh_until_its_tunnel_is_up_and_again_when_it_is_lost() {
    let node = |number| {
        let mut node = member(number);
        let address = node.claims.iter().map(IpNet::addr).collect();
        node.addresses = MemberAddresses { is_control_plane: true, ..MemberAddresses::of_node(address) };
        node
    };
    let inputs = Arc::new(inputs([node(1), node(2), member(3)]));
    let kernel = Shared::default();
    let (mut mesh, mut now) = (mesh(&kernel), Instant::now());
    mesh.reconcile(&inputs, now).unwrap();
    assert!(goes_past(&kernel), "at the start");
    handshake(&kernel, 3);
    mesh.reconcile(&inputs, now).unwrap();
    assert!(goes_past(&kernel), "another tunnel says nothing");
    handshake(&kernel, 2);
    assert!(is_outdated_within(&mut mesh, &mut now, 30), "the tunnel is used once it is seen");
    mesh.reconcile(&inputs, now).unwrap();
    assert!(!goes_past(&kernel));
    wake(&mut mesh, true, now).unwrap();
    assert!(!mesh.is_outdated());
    // Nothing comes by it any more.
    let long_ago = SystemTime::now() - Duration::from_secs(600);
    kernel.lock().unwrap().state.as_mut().unwrap().peers.get_mut(&key(2)).unwrap().last_handshake =
        Some(long_ago);
    assert!(is_outdated_within(&mut mesh, &mut now, 600));
    mesh.reconcile(&inputs, now).unwrap();
    assert!(goes_past(&kernel));
}
