//! First endpoint of a new peer in a mesh that has a relay.

use fairlead_members::settings::{RelayServer, RelaySettings};
use fairlead_relay::client::{LoopbackPort, is_relayed};

use super::*;
use crate::model::inputs::OwnKeys;

fn relay() -> RelaySettings {
    let endpoint = "tcp://relay.example:3478".parse().unwrap();
    RelaySettings {
        server: RelayServer { endpoint, ca_bundle: None, server_name: None, secret: None },
        is_only: false,
        handshake_timeout: Duration::from_secs(10),
        direct_retry: Duration::from_secs(120),
    }
}

/// The endpoint of a peer with one candidate when it is set for the first time, and after the peer has answered probes elsewhere.
fn endpoints(has_wireguard: bool) -> (SocketAddr, SocketAddr) {
    let (kernel, socket) = (Shared::default(), FakePathSocket::default());
    {
        let mut kernel = kernel.lock().unwrap();
        (kernel.path_socket, kernel.has_wireguard) = (Some(socket.clone()), has_wireguard);
    }
    let (private_key, peers_private_key) = (PrivateKey([8; 32]), PrivateKey([9; 32]));
    let (public, peers) = (public_key(&private_key), public_key(&peers_private_key));
    let mut peer = PathAgent::new(fairlead_path::Config::default(), 1);
    peer.enable_probes(Identity { private_key: peers_private_key, public_key: peers, epoch: [2; 16] });
    let candidate = Candidate { address: "10.0.0.1:51820".parse().unwrap(), source: Source::Host };
    let candidates = vec![candidate];
    peer.upsert_peer(Duration::ZERO, public, PeerPaths { candidates, ..PeerPaths::default() });

    let identity = Identity { private_key: private_key.clone(), public_key: public, epoch: [1; 16] };
    let (view, _status) = RelayView::new(Some(LoopbackPort::open().unwrap()));
    let paths = PathDriver::new(identity, 7, view, time_to_direct(), Instant::now());
    let device = DeviceSlot::new(Preference::Auto, PathBuf::from("/nonexistent"));
    let mut mesh = Mesh::new(FakeKernel(Arc::clone(&kernel)), device, paths);
    let mut other = member(2);
    other.public_key = Some(peers);
    let mut inputs = inputs([member(1), other]);
    inputs.keys = OwnKeys { private: private_key, public, previous: None };
    inputs.settings.relay = Some(relay());
    let inputs = Arc::new(inputs);
    // The second knows the socket of the device that the first opens.
    for _ in 0..2 {
        mesh.reconcile(&inputs, Instant::now()).unwrap();
    }
    let first = kernel.lock().unwrap().changes[0].set_peers[&peers].endpoint.unwrap();

    let elsewhere: SocketAddr = "203.0.113.9:40000".parse().unwrap();
    exchange_probes(&mut mesh, &socket, (&mut peer, elsewhere), candidate.address);
    wake(&mut mesh, false, Instant::now()).unwrap();
    let set = kernel.lock().unwrap().changes.last().unwrap().set_peers[&peers].endpoint;
    (first, set.unwrap())
}

#[test]
fn the_kernel_s_wireguard_begins_at_the_relay_and_the_embedded_one_at_a_candidate() {
    let elsewhere: SocketAddr = "203.0.113.9:40000".parse().unwrap();
    let (first, then) = endpoints(true);
    assert!(is_relayed(first) && then == elsewhere, "{first} {then}");
    let (first, then) = endpoints(false);
    assert!(!is_relayed(first) && then == elsewhere, "{first} {then}");
}
