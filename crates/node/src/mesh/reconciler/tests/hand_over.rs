//! The kernel's WireGuard begins at the relay, and what it has sent there goes on to the path that answers first.

use fairlead_relay::client::{LoopbackPort, is_relayed};

use super::*;
use crate::mesh::settings::{RelayServer, RelaySettings};

fn relay() -> RelaySettings {
    let endpoint = "tcp://relay.example:3478".parse().unwrap();
    RelaySettings {
        server: RelayServer { endpoint, ca_bundle: None, server_name: None, secret: None },
        is_only: false,
        handshake_timeout: Duration::from_secs(10),
        direct_retry: Duration::from_secs(120),
    }
}

/// A node with such a key, and a peer with the other one; the peer's endpoint at first, and what the node has sent to the address at which
/// the peer has answered probes.
fn first_endpoint_and_sent(
    has_wireguard: bool,
    own: u8,
    other: u8,
    initiation: &[u8],
) -> (SocketAddr, Vec<Vec<u8>>) {
    let (kernel, socket) = (Shared::default(), FakePathSocket::default());
    {
        let mut kernel = kernel.lock().unwrap();
        (kernel.path_socket, kernel.has_wireguard) = (Some(socket.clone()), has_wireguard);
    }
    let (private_key, peers_private_key) = (PrivateKey([own; 32]), PrivateKey([other; 32]));
    let (public, peers) = (public_key(&private_key), public_key(&peers_private_key));
    let mut peer = PathAgent::new(fairlead_path::Config::default(), 1);
    peer.enable_probes(Identity { private_key: peers_private_key, public_key: peers, epoch: [2; 16] });
    let candidate = Candidate { address: "10.0.0.1:51820".parse().unwrap(), source: Source::Host };
    let candidates = vec![candidate];
    peer.upsert_peer(Duration::ZERO, public, PeerPaths { candidates, ..PeerPaths::default() });

    let identity = Identity { private_key: private_key.clone(), public_key: public, epoch: [1; 16] };
    let (view, _status) = RelayView::new(Some(LoopbackPort::open().unwrap()));
    let queue = view.queue();
    let paths = PathDriver::new(identity, 7, view, time_to_direct(), Instant::now());
    let device = DeviceSlot::new(Preference::Auto, PathBuf::from("/nonexistent"));
    let mut mesh = Mesh::new(FakeKernel(Arc::clone(&kernel)), device, paths);
    let mut other = member(2);
    other.public_key = Some(peers);
    let mut inputs = Inputs { private_key, public_key: public, ..inputs([member(1), other]) };
    inputs.settings.relay = Some(relay());
    let inputs = Arc::new(inputs);
    // The second knows the socket of the device that the first opens.
    for _ in 0..2 {
        mesh.reconcile(&inputs, Instant::now()).unwrap();
    }
    let first = kernel.lock().unwrap().changes[0].set_peers[&peers].endpoint.unwrap();
    queue.send(&peers, false, initiation);

    let elsewhere: SocketAddr = "203.0.113.9:40000".parse().unwrap();
    let mut sent = exchange_probes(&mut mesh, &socket, (&mut peer, elsewhere), candidate.address);
    wake(&mut mesh, false, Instant::now()).unwrap();
    let rest = std::mem::take(&mut *socket.sent.lock().unwrap());
    sent.extend(rest.into_iter().filter(|(to, _)| *to == elsewhere).map(|(_, payload)| payload));
    let set = kernel.lock().unwrap().changes.last().unwrap().set_peers[&peers].endpoint;
    assert_eq!(set, Some(elsewhere));
    sent.retain(|payload| payload == initiation);
    (first, sent)
}

#[test]
fn the_initiation_that_the_relay_could_not_pass_on_goes_to_the_path_that_answers_first() {
    let initiation = [&[1, 0, 0, 0][..], &[7; 144]].concat();
    let is_lower = public_key(&PrivateKey([8; 32])) < public_key(&PrivateKey([9; 32]));
    let (lower, higher) = if is_lower { (8, 9) } else { (9, 8) };
    let (first, sent) = first_endpoint_and_sent(true, lower, higher, &initiation);
    assert!(is_relayed(first), "{first}");
    assert_eq!(sent, std::slice::from_ref(&initiation));
    let (first, sent) = first_endpoint_and_sent(true, higher, lower, &initiation);
    assert!(is_relayed(first), "{first}");
    assert!(sent.is_empty(), "its own would cross that of the peer");
    let (first, sent) = first_endpoint_and_sent(false, lower, higher, &initiation);
    assert!(!is_relayed(first), "the embedded WireGuard starts a handshake with each endpoint: {first}");
    assert!(sent.is_empty());
}
