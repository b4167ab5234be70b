use fairlead_wire::probe::{Epoch, Message, ProbeKeys, TransactionId};

use super::*;

fn identity(private: u8) -> Identity {
    let private_key = PrivateKey([private; 32]);
    let public_key = private_key.public_key();
    Identity { private_key, public_key, epoch: [private; 16] }
}

/// A request of node 2 to node 1.
fn request(counter: u64, wants_keepalives: bool) -> Vec<u8> {
    let keys = ProbeKeys::derive(&[2; 32], &identity(1).public_key.0, None).unwrap();
    let message = Message::Request {
        transaction: TransactionId([1; 12]),
        starts_round: false,
        wants_handshake: false,
        is_birthday: false,
        wants_keepalives,
        ports: None,
        candidates: Vec::new(),
    };
    keys.seal(Epoch([2; 16]), counter, &message, 0)
}

#[test]
fn keepalives_come_as_often_as_the_path_needs_and_where_there_are_none_stay_off() {
    let port = PathPort::new(
        agent(Capabilities { backend: Backend::Embedded, has_path_socket: true }, 7, &identity(1), 0),
        Histogram::new([1.0]),
        RelayView::open().0.queue(),
        Instant::now(),
    );
    let peer = identity(2).public_key;
    let remote = "192.0.2.2:51820".parse().unwrap();
    port.with_agent(|agent| agent.upsert_peer(Duration::ZERO, peer, PeerPaths::default()));
    let intervals = || {
        [None, Some(5), Some(25)].map(|persistent_keepalive| {
            let config = PeerConfig { persistent_keepalive, ..PeerConfig::default() };
            port.read_agent(|agent| kept_alive(agent, &peer, &config)).persistent_keepalive
        })
    };
    assert_eq!(intervals(), [None, Some(5), Some(25)]);
    port.with_agent(|agent| agent.handle_datagram(Duration::ZERO, None, remote, &request(1, true)));
    assert_eq!((intervals(), port.take_due(false).keepalive_changed), ([None, Some(5), Some(10)], true));
    port.with_agent(|agent| agent.handle_datagram(Duration::ZERO, None, remote, &request(2, false)));
    assert_eq!((intervals(), port.take_due(false).keepalive_changed), ([None, Some(5), Some(25)], true));
}
