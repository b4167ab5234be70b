use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use fairlead_api::resources::{Encapsulation, Granularity};
use fairlead_dataplane::mesh::MeshState;
use fairlead_dataplane::uplink::HostNetwork;
use fairlead_dataplane::wireguard::{Backend, PathDatagram, Preference};
use fairlead_keys::{DeviceChange, DeviceState, PeerConfig, PrivateKey};
use fairlead_netlink::route::{Address, AddressFlags, Scope};
use fairlead_path::{Candidate, Identity, PathAgent, PeerPaths, Source, State};
use fairlead_topology::{InternalAddress, Member, Site};
use fairlead_wire::stun;
use ipnet::IpNet;
use x25519_dalek::StaticSecret;

use super::*;
use crate::apply::relay::RelayView;
use crate::plan::desired::tests::{inputs, key, link, member};
use crate::tell::metrics::time_to_direct;
use crate::tests::{FakeKernel, FakePathSocket, Shared, paths};

mod accepted;
mod backend;
mod control_plane;
mod encapsulation;
mod first_endpoint;
mod foreign;
mod key_changes;
mod listen_port;
mod released;
mod send_errors;

fn mesh(kernel: &Shared) -> Mesh<FakeKernel> {
    let device = DeviceSlot::new(Preference::Auto, PathBuf::from("/nonexistent"));
    Mesh::new(FakeKernel(Arc::clone(kernel)), device, paths())
}

fn public_key(private: &PrivateKey) -> PublicKey {
    PublicKey(x25519_dalek::PublicKey::from(&StaticSecret::from(private.0)).to_bytes())
}

/// Runs the thread of the port, then the part that it leaves to the mesh.
fn wake(mesh: &mut Mesh<FakeKernel>, may_observe: bool, now: Instant) -> Result<Option<Report>, MeshFailure> {
    mesh.path_port().run_due(now);
    mesh.wake_paths(may_observe, now)
}

fn three() -> Arc<Inputs> {
    Arc::new(inputs([member(1), member(2), member(3)]))
}

#[test]
fn a_change_is_one_batch_and_the_same_again_is_none() {
    let kernel = Shared::default();
    let (mut mesh, now) = (mesh(&kernel), Instant::now());
    let report = mesh.reconcile(&three(), now).unwrap();
    assert_eq!((report.device.backend, report.device.mtu, report.peers.len()), (Backend::Embedded, 1420, 2));
    {
        let mut kernel = kernel.lock().unwrap();
        assert_eq!(kernel.opened, ["wire_kube"]);
        let [change] = &kernel.changes[..] else { panic!("{:?}", kernel.changes) };
        assert_eq!(change.private_key, Some(PrivateKey([8; 32])));
        assert_eq!((change.listen_port, change.fwmark), (Some(51820), Some(MARK_FROM_WIREGUARD)));
        let peers: Vec<_> = change.set_peers.iter().map(|(key, peer)| (*key, peer.endpoint)).collect();
        let endpoint = |text: &str| text.parse().ok();
        assert_eq!(peers, [(key(2), endpoint("10.0.0.2:51820")), (key(3), endpoint("10.0.0.3:51820"))]);
        assert_eq!(kernel.applied.len(), 1);
        kernel.forget();
    }
    mesh.reconcile(&three(), now).unwrap();
    let kernel = kernel.lock().unwrap();
    assert_eq!((kernel.changes.len(), kernel.applied.len(), kernel.opened.len()), (0, 0, 0));
    assert_eq!(mesh.plans(), 1, "nothing changed that the plan follows from");
}

#[test]
fn a_peer_that_leaves_is_removed_and_no_other_is_touched() {
    let kernel = Shared::default();
    let (mut mesh, now) = (mesh(&kernel), Instant::now());
    mesh.reconcile(&three(), now).unwrap();
    kernel.lock().unwrap().forget();
    let two = Arc::new(inputs([member(1), member(2)]));
    mesh.reconcile(&two, now).unwrap();
    let kernel = kernel.lock().unwrap();
    assert_eq!(kernel.changes, [DeviceChange { remove_peers: vec![key(3)], ..DeviceChange::default() }]);
    let targets: Vec<Vec<_>> =
        kernel.applied.iter().map(|state: &MeshState| state.targets_v4.clone()).collect();
    assert_eq!(targets, [vec!["10.0.0.2/32".parse().unwrap()]]);
}

#[test]
fn a_new_mtu_opens_the_device_again() {
    let kernel = Shared::default();
    let (mut mesh, now) = (mesh(&kernel), Instant::now());
    mesh.reconcile(&three(), now).unwrap();
    let mut narrower = inputs([member(1), member(2), member(3)]);
    narrower.settings.device.mtu = 1300;
    let report = mesh.reconcile(&Arc::new(narrower), now).unwrap();
    assert_eq!(kernel.lock().unwrap().opened, ["wire_kube", "wire_kube"]);
    assert_eq!((report.device.mtu, report.problems), (1300, vec![]));
}

/// As the embedded one is. A plan takes time, in which packets would be lost, and the endpoints in use may be no candidates.
#[test]
fn a_device_that_begins_anew_with_another_mtu_has_its_peers_and_endpoints_before_anything_is_planned() {
    let kernel = Shared::default();
    let mut slot = DeviceSlot::new(Preference::Auto, PathBuf::from("/nonexistent"));
    let paths = paths();
    let open = |slot: &mut DeviceSlot, mtu| {
        slot.open(&mut FakeKernel(Arc::clone(&kernel)), paths.port(), "wire_kube", mtu).unwrap();
    };
    open(&mut slot, 1420);
    let behind: IpNet = "10.244.3.0/24".parse().unwrap();
    let endpoint = "192.0.2.7:4000".parse().ok();
    let peer = PeerConfig { endpoint, allowed_ips: vec![behind], ..PeerConfig::default() };
    let change = DeviceChange {
        private_key: Some(PrivateKey([8; 32])),
        listen_port: Some(51820),
        fwmark: Some(MARK_FROM_WIREGUARD),
        set_peers: [(key(2), peer)].into(),
        ..DeviceChange::default()
    };
    let accepted = [(key(3), vec![behind])].into();
    slot.change(&change, &accepted).unwrap();
    let before = kernel.lock().unwrap().state.clone();
    kernel.lock().unwrap().accepted.clear();
    kernel.lock().unwrap().opens_anew = true;
    open(&mut slot, 1300);
    let kernel = kernel.lock().unwrap();
    assert_eq!(kernel.opened.len(), 2);
    assert_eq!((&kernel.state, &kernel.accepted), (&before, &accepted));
}

fn renamed() -> Arc<Inputs> {
    let mut inputs = inputs([member(1), member(2), member(3)]);
    inputs.settings.device.interface = "other".to_owned();
    Arc::new(inputs)
}

#[test]
fn a_new_name_replaces_the_device_while_packets_stay_marked() {
    let kernel = Shared::default();
    let (mut mesh, now) = (mesh(&kernel), Instant::now());
    mesh.reconcile(&three(), now).unwrap();
    let report = mesh.reconcile(&renamed(), now).unwrap();
    assert_eq!(report.device.interface, "other");
    let kernel = kernel.lock().unwrap();
    assert_eq!(kernel.opened, ["wire_kube", "other"]);
    assert_eq!((kernel.deleted.as_slice(), kernel.removals), (&["wire_kube".to_owned()][..], 0));
    assert_eq!(kernel.state.as_ref().map(|state| state.peers.len()), Some(2));
    assert_eq!(kernel.mesh.as_ref().map(|mesh| mesh.interface.as_str()), Some("other"));
}

#[test]
fn a_device_that_an_earlier_program_left_under_another_name_is_removed() {
    let kernel = Shared::default();
    kernel.lock().unwrap().device = Some("wire_kube".to_owned());
    mesh(&kernel).reconcile(&renamed(), Instant::now()).unwrap();
    let kernel = kernel.lock().unwrap();
    assert_eq!(
        (kernel.opened.as_slice(), kernel.deleted.as_slice()),
        (&["other".to_owned()][..], &["wire_kube".to_owned()][..])
    );
}

#[test]
fn a_mesh_that_was_deleted_leaves_nothing_and_can_be_made_again() {
    let kernel = Shared::default();
    let (mut mesh, now) = (mesh(&kernel), Instant::now());
    mesh.reconcile(&three(), now).unwrap();
    mesh.disable().unwrap();
    {
        let kernel = kernel.lock().unwrap();
        assert_eq!((&kernel.state, &kernel.mesh, &kernel.device), (&None, &None, &None));
    }
    assert_eq!(mesh.path_port().poll_timeout(), None);
    mesh.reconcile(&three(), now).unwrap();
    let kernel = kernel.lock().unwrap();
    assert_eq!(kernel.state.as_ref().map(|state| state.peers.len()), Some(2));
    assert!(kernel.mesh.is_some());
}

#[test]
fn a_device_that_vanished_is_opened_again() {
    let kernel = Shared::default();
    let (mut mesh, now) = (mesh(&kernel), Instant::now());
    mesh.reconcile(&three(), now).unwrap();
    kernel.lock().unwrap().remove_device();
    let failure = mesh.reconcile(&three(), now).unwrap_err();
    assert_eq!(failure.reason(), "DeviceFailed");
    assert!(wake(&mut mesh, true, now).unwrap().is_none(), "no paths without a device");
    mesh.reconcile(&three(), now).unwrap();
    let kernel = kernel.lock().unwrap();
    assert_eq!(kernel.opened.len(), 2);
    assert_eq!(kernel.state.as_ref().map(|state: &DeviceState| state.peers.len()), Some(2));
}

#[test]
fn after_a_failure_the_next_step_goes_on_from_there() {
    let kernel = Shared::default();
    let (mut mesh, now) = (mesh(&kernel), Instant::now());
    kernel.lock().unwrap().refuse_open = true;
    assert_eq!(mesh.reconcile(&three(), now).unwrap_err().reason(), "DeviceFailed");
    {
        let mut kernel = kernel.lock().unwrap();
        let targets: Vec<usize> = kernel.applied.iter().map(|state| state.targets_v4.len()).collect();
        assert_eq!(targets, [1], "what would enter the device is dropped");
        kernel.refuse_open = false;
        kernel.mesh = None;
    }
    kernel.lock().unwrap().refuse_apply = true;
    assert_eq!(mesh.reconcile(&three(), now).unwrap_err().reason(), "KernelRefused");
    kernel.lock().unwrap().refuse_apply = false;
    mesh.reconcile(&three(), now).unwrap();
    let kernel = kernel.lock().unwrap();
    assert_eq!((kernel.opened.len(), kernel.changes.len(), kernel.applied.len()), (1, 1, 2));
    assert_eq!(mesh.plans(), 1);
}

fn targets_of(kernel: &Shared) -> Option<Vec<IpNet>> {
    kernel.lock().unwrap().mesh.as_ref().map(|state| state.targets_v4.clone())
}

fn of_two_and_three() -> Option<Vec<IpNet>> {
    Some(vec!["10.0.0.2/31".parse().unwrap()])
}

/// As after a reboot. With its peers, packets come by the tunnel.
#[test]
fn packets_are_led_before_a_new_device_has_peers() {
    let kernel = Shared::default();
    mesh(&kernel).reconcile(&three(), Instant::now()).unwrap();
    assert_eq!(targets_of(&kernel), of_two_and_three());
    assert_eq!(kernel.lock().unwrap().led, [true]);
}

#[test]
fn where_the_device_takes_no_change_packets_to_other_nodes_are_dropped() {
    let kernel = Shared::default();
    let (mut mesh, now) = (mesh(&kernel), Instant::now());
    kernel.lock().unwrap().ports_taken = vec![51820];
    assert_eq!(mesh.reconcile(&three(), now).unwrap_err().reason(), "DeviceFailed");
    assert_eq!(targets_of(&kernel), of_two_and_three(), "another program has the port");
    kernel.lock().unwrap().ports_taken.clear();
    mesh.reconcile(&Arc::new(inputs([member(1), member(2)])), now).unwrap();
    assert_ne!(targets_of(&kernel), of_two_and_three());
    kernel.lock().unwrap().refuse_change = true;
    assert_eq!(mesh.reconcile(&three(), now).unwrap_err().reason(), "DeviceFailed");
    assert_eq!(targets_of(&kernel), of_two_and_three(), "one more node");
}

#[test]
fn what_another_program_changed_is_put_right_by_the_next_sweep() {
    let kernel = Shared::default();
    let (mut mesh, now) = (mesh(&kernel), Instant::now());
    mesh.reconcile(&three(), now).unwrap();
    {
        let mut kernel = kernel.lock().unwrap();
        kernel.forget();
        kernel.state.as_mut().unwrap().peers.remove(&key(2));
        kernel.mesh = None;
    }
    mesh.reconcile(&three(), now).unwrap();
    let kernel = kernel.lock().unwrap();
    let set: Vec<_> = kernel.changes.iter().flat_map(|change| change.set_peers.keys().copied()).collect();
    assert_eq!((set, kernel.applied.len()), (vec![key(2)], 1));
}

#[test]
fn a_path_timer_reads_the_device_once_and_nothing_else() {
    let kernel = Shared::default();
    let (mut mesh, start) = (mesh(&kernel), Instant::now());
    let peers = 100;
    let all = Arc::new(inputs((1..=peers).map(|number| {
        let mut member = member(number);
        let other = format!("10.1.0.{number}:51820").parse().unwrap();
        member.endpoints.host.push(other);
        member
    })));
    mesh.reconcile(&all, start).unwrap();
    kernel.lock().unwrap().forget();
    let (mut wakes, mut observed) = (0, 0);
    let mut set = std::collections::BTreeSet::new();
    // Two attempts of every peer.
    while let Some(at) =
        mesh.path_port().poll_timeout().filter(|at| *at < start + std::time::Duration::from_secs(6))
    {
        observed += usize::from(wake(&mut mesh, true, at).unwrap().is_some());
        wakes += 1;
        let mut kernel = kernel.lock().unwrap();
        for change in kernel.changes.drain(..) {
            assert!(change.remove_peers.is_empty() && change.private_key.is_none());
            set.extend(change.set_peers.into_iter().map(|(key, peer)| (key, peer.endpoint)));
        }
    }
    let kernel = kernel.lock().unwrap();
    assert_eq!(mesh.plans(), 1, "no plan");
    assert_eq!(
        (kernel.networks_read, kernel.applied.len(), kernel.mesh_reads),
        (0, 0, 0),
        "no links, no nftables"
    );
    assert_eq!((kernel.states_read, wakes > 5), (observed, true), "{wakes} wakes");
    assert_eq!(set.len(), 2 * (peers as usize - 1), "each peer's two endpoints were tried");
}

#[test]
fn an_endpoint_is_set_with_the_prefixes_of_the_latest_plan() {
    let kernel = Shared::default();
    let (mut mesh, start) = (mesh(&kernel), Instant::now());
    let with = |blocks: &[&str]| {
        let mut peer = member(2);
        peer.endpoints.host.push("10.1.0.2:51820".parse().unwrap());
        peer.blocks = blocks.iter().map(|block| block.parse().unwrap()).collect();
        Arc::new(inputs([member(1), peer]))
    };
    mesh.reconcile(&with(&[]), start).unwrap();
    mesh.reconcile(&with(&["10.9.0.0/24"]), start).unwrap();
    kernel.lock().unwrap().forget();
    while kernel.lock().unwrap().changes.is_empty() {
        let at = mesh.path_port().poll_timeout().unwrap();
        wake(&mut mesh, true, at).unwrap();
    }
    let kernel = kernel.lock().unwrap();
    let [change] = &kernel.changes[..] else { panic!("{:?}", kernel.changes) };
    let peer = &change.set_peers[&key(2)];
    assert_eq!(peer.endpoint, "10.1.0.2:51820".parse().ok(), "the second endpoint, after the first");
    assert_eq!(peer.allowed_ips.len(), 2, "{peer:?}");
}

/// A STUN response (RFC 8489) that maps the sender of `request` to 203.0.113.1:4000.
fn stun_response(request: &[u8]) -> Vec<u8> {
    let mapped = [0, 1, 0, 8, 0, 1, 0x0f, 0xa0, 203, 0, 113, 1];
    [&[1, 1, 0, 12][..], &request[4..20], &mapped].concat()
}

#[test]
fn what_stun_servers_answer_is_reported_after_one_more_plan() {
    let (kernel, socket) = (Shared::default(), FakePathSocket::default());
    kernel.lock().unwrap().path_socket = Some(socket.clone());
    let (mut mesh, now) = (mesh(&kernel), Instant::now());
    let mut inputs = inputs([member(1), member(2)]);
    let servers = ["198.51.100.1:3478", "198.51.100.2:3478"];
    inputs.settings.traversal.stun_servers = servers.map(|server| server.parse().unwrap()).to_vec();
    let inputs = Arc::new(inputs);
    // The first opens the device, the second knows its socket.
    mesh.reconcile(&inputs, now).unwrap();
    let report = mesh.reconcile(&inputs, now).unwrap();
    assert_eq!((report.translation.nat, report.endpoints.reflexive.len()), (NatType::Unknown, 0));
    wake(&mut mesh, true, now).unwrap();
    let mut requests = socket.sent.lock().unwrap().clone();
    requests.retain(|(_, datagram)| stun::is_stun(datagram));
    assert_eq!(requests.iter().map(|(to, _)| to.to_string()).collect::<Vec<_>>(), servers);
    let plans = mesh.plans();
    for (server, request) in &requests {
        let datagram =
            PathDatagram { local: None, socket: None, remote: *server, payload: stun_response(request) };
        socket.received.lock().unwrap().push_back(datagram);
    }
    assert!(!mesh.is_outdated());
    wake(&mut mesh, true, now).unwrap();
    assert!(mesh.is_outdated());
    let report = mesh.reconcile(&inputs, now).unwrap();
    assert!(!mesh.is_outdated());
    assert_eq!((report.translation.nat, mesh.plans() - plans), (NatType::Cone, 1));
    assert_eq!(report.endpoints.reflexive, ["203.0.113.1:4000".parse().unwrap()]);
    mesh.reconcile(&inputs, now).unwrap();
    assert_eq!(mesh.plans() - plans, 1, "the same answers change nothing");
}

/// A peer that is another agent asks whether this node is there, from an address, and is asked and answers. What it was sent.
fn exchange_probes(
    mesh: &mut Mesh<FakeKernel>,
    socket: &FakePathSocket,
    (peer, remote): (&mut PathAgent, SocketAddr),
    own: SocketAddr,
) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    peer.handle_timeout(Duration::ZERO);
    for _ in 0..2 {
        while let Some(datagram) = peer.poll_transmit() {
            let datagram = PathDatagram { local: None, socket: None, remote, payload: datagram.payload };
            socket.received.lock().unwrap().push_back(datagram);
        }
        wake(mesh, false, Instant::now()).unwrap();
        // The answer, and a request to the address that the request came from.
        let sent = std::mem::take(&mut *socket.sent.lock().unwrap());
        for (_, payload) in sent.into_iter().filter(|(to, _)| *to == remote) {
            peer.handle_datagram(Duration::ZERO, None, own, &payload);
            all.push(payload);
        }
    }
    all
}

/// The peer is another agent, at an address that no resource names.
#[test]
fn the_endpoint_of_a_peer_that_answers_probes_is_set_without_reading_the_device() {
    let (kernel, socket) = (Shared::default(), FakePathSocket::default());
    kernel.lock().unwrap().path_socket = Some(socket.clone());
    let now = Instant::now();
    let own = public_key(&PrivateKey([8; 32]));
    let mut peer = PathAgent::new(fairlead_path::Config::default(), 1);
    let private_key = PrivateKey([9; 32]);
    let key = public_key(&private_key);
    peer.enable_probes(Identity { private_key, public_key: key, epoch: [2; 16] });
    let candidate = Candidate { address: "10.0.0.1:51820".parse().unwrap(), source: Source::Host };
    peer.upsert_peer(
        Duration::ZERO,
        own,
        PeerPaths { candidates: vec![candidate], silence: None, ..PeerPaths::default() },
    );

    let mut other = member(2);
    other.public_key = Some(key);
    let identity = Identity { private_key: PrivateKey([8; 32]), public_key: own, epoch: [1; 16] };
    let device = DeviceSlot::new(Preference::Auto, PathBuf::from("/nonexistent"));
    let paths = PathDriver::new(identity, 7, RelayView::new(None).0, time_to_direct(), now);
    let mut mesh = Mesh::new(FakeKernel(Arc::clone(&kernel)), device, paths);
    let mut inputs = inputs([member(1), other]);
    inputs.keys.public = own;
    mesh.reconcile(&Arc::new(inputs), now).unwrap();
    kernel.lock().unwrap().forget();

    let elsewhere: SocketAddr = "203.0.113.9:40000".parse().unwrap();
    exchange_probes(&mut mesh, &socket, (&mut peer, elsewhere), candidate.address);
    wake(&mut mesh, false, now).unwrap();
    let kernel = kernel.lock().unwrap();
    assert_eq!(kernel.states_read, 0);
    let set: Vec<_> = kernel.changes.iter().flat_map(|change| &change.set_peers).collect();
    let [(set_key, config)] = set[..] else { panic!("{set:?}") };
    assert_eq!((*set_key, config.endpoint), (key, Some(elsewhere)));
}

/// No node answers.
#[test]
fn a_node_that_is_down_is_bypassed_where_the_mesh_says_so_and_packets_to_it_are_dropped_where_not() {
    let kernel = Shared::default();
    let (mut mesh, mut now) = (mesh(&kernel), Instant::now());
    let with = |bypasses| {
        let mut inputs = inputs([member(1), member(2), member(3)]);
        inputs.settings.routing.bypasses_down_peers = bypasses;
        Arc::new(inputs)
    };
    let all: Vec<IpNet> = vec!["10.0.0.2/31".parse().unwrap()];
    let targets = |kernel: &Shared| kernel.lock().unwrap().mesh.as_ref().unwrap().targets_v4.clone();
    let mut run = |mesh: &mut Mesh<FakeKernel>, inputs: &Arc<Inputs>, seconds: u64| {
        for _ in 0..seconds {
            now += Duration::from_secs(1);
            wake(mesh, true, now).unwrap();
            mesh.reconcile(inputs, now).unwrap();
        }
        mesh.reconcile(inputs, now).unwrap()
    };
    let report = run(&mut mesh, &with(false), 120);
    assert!(report.peers.iter().all(|peer| peer.path.state == State::Down), "{:?}", report.peers);
    assert_eq!(targets(&kernel), all, "what belongs to nodes that are down is dropped");
    let report = run(&mut mesh, &with(true), 5);
    assert_eq!((targets(&kernel), report.problems.len()), (all.clone(), 0), "not at once");
    let report = run(&mut mesh, &with(true), 10);
    let reasons: Vec<_> = report.problems.iter().map(|problem| (problem.reason(), problem.nodes())).collect();
    assert_eq!(reasons, [("PeerBypassed", vec!["node-0002"]), ("PeerBypassed", vec!["node-0003"])]);
    assert_eq!(targets(&kernel), []);
    let report = run(&mut mesh, &with(false), 1);
    assert_eq!((targets(&kernel), report.problems.len()), (all, 0));
}

#[test]
fn numbers_of_another_program_are_left_alone_and_taken_again_once_they_are_free() {
    let kernel = Shared::default();
    let (mut mesh, now) = (mesh(&kernel), Instant::now());
    kernel.lock().unwrap().numbers_taken = Some("KubeSpan runs here".to_owned());
    let failure = mesh.reconcile(&three(), now).unwrap_err();
    assert_eq!(failure.reason(), "NumbersTaken");
    assert!(failure.to_string().starts_with("KubeSpan runs here"), "{failure}");
    {
        let kernel = kernel.lock().unwrap();
        assert_eq!((kernel.opened.len(), kernel.applied.len(), kernel.changes.len()), (0, 0, 0));
    }
    kernel.lock().unwrap().numbers_taken = None;
    mesh.reconcile(&three(), now).unwrap();
    kernel.lock().unwrap().forget();
    // Started later, it is left alone, too.
    kernel.lock().unwrap().numbers_taken = Some("KubeSpan runs here".to_owned());
    let two = Arc::new(inputs([member(1), member(2)]));
    assert_eq!(mesh.reconcile(&two, now).unwrap_err().reason(), "NumbersTaken");
    let kernel = kernel.lock().unwrap();
    assert_eq!((kernel.applied.len(), kernel.changes.len(), kernel.removals), (0, 0, 0));
}
