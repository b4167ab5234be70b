use fairlead_keys::PresharedKey;
use fairlead_topology::{External, plan};

use super::*;
use crate::plan::desired::tests::{inputs, key, member};

const LAPTOP: u32 = 9;

fn address(text: &str) -> SocketAddr {
    text.parse().unwrap()
}

fn laptop(endpoint: Option<&str>) -> Member {
    let mut laptop = Member::of_peer("laptop");
    laptop.public_key = Some(key(LAPTOP));
    laptop.claims = vec!["10.9.0.1/32".parse().unwrap()];
    laptop.keepalive.interval = Some(0);
    laptop.endpoints.manual = endpoint.map(|text| text.parse().unwrap());
    laptop.external = Some(External { preshared_key: Some(PresharedKey([3; 32])), ..External::default() });
    laptop
}

fn wanted(inputs: &Inputs) -> BTreeMap<PublicKey, DesiredExternal> {
    let policy = fairlead_topology::Policy::new(&inputs.node);
    external_peers(inputs, &plan(&inputs.members, &policy), &Nat64::default())
}

/// A device after the change, with a handshake of this age.
fn device(change: &DeviceChange, handshake: Option<Duration>) -> DeviceState {
    let state = |(key, config): (&PublicKey, &PeerConfig)| {
        let last_handshake = handshake.map(|age| SystemTime::now() - age);
        (*key, PeerState { config: config.clone(), last_handshake, ..PeerState::default() })
    };
    DeviceState {
        private_key: None,
        listen_port: 1,
        fwmark: 0,
        peers: change.set_peers.iter().map(state).collect(),
    }
}

/// A bed for decisions about one peer.
struct Bed {
    endpoints: ExternalEndpoints,
    inputs: Inputs,
    device: DeviceState,
    now: Instant,
}

impl Bed {
    /// The peer is configured at the address, which the name has first.
    fn new(resolved: &[&str]) -> Self {
        let mut inputs = inputs([member(1), member(2), laptop(Some("gate.example:7"))]);
        let name = "gate.example:7".parse().unwrap();
        inputs.resolved.insert(name, resolved.iter().copied().map(address).collect());
        let empty = device(&DeviceChange::default(), None);
        let mut bed =
            Self { endpoints: ExternalEndpoints::default(), inputs, device: empty, now: Instant::now() };
        let change = bed.change();
        bed.device = device(&change, None);
        bed
    }

    fn change(&mut self) -> DeviceChange {
        let mut change = DeviceChange::default();
        let now = (self.now, SystemTime::now());
        self.endpoints.complete(&mut change, &wanted(&self.inputs), &self.device, now);
        change
    }

    /// The endpoint that is set now.
    fn sets(&mut self) -> Option<String> {
        Some(self.change().set_peers.get(&key(LAPTOP))?.endpoint?.to_string())
    }

    fn peer(&mut self) -> &mut PeerState {
        self.device.peers.get_mut(&key(LAPTOP)).unwrap()
    }

    fn resolve(&mut self, addresses: &[&str]) {
        self.inputs
            .resolved
            .values_mut()
            .for_each(|known| *known = addresses.iter().copied().map(address).collect());
    }
}

#[test]
fn a_peer_is_configured_once_and_no_node_is_touched() {
    let mut bed = Bed::new(&["192.0.2.1:7"]);
    let config = bed.peer().config.clone();
    assert_eq!(config.preshared_key, Some(PresharedKey([3; 32])));
    assert_eq!(config.allowed_ips, ["10.9.0.1/32".parse().unwrap()]);
    assert_eq!((config.endpoint, config.persistent_keepalive), (Some(address("192.0.2.1:7")), None));
    assert_eq!(bed.device.peers.len(), 1, "nodes have paths");
    assert!(bed.change().is_empty());
    let mut change = DeviceChange { remove_peers: vec![key(LAPTOP), key(5)], ..DeviceChange::default() };
    let now = (bed.now, SystemTime::now());
    bed.endpoints.complete(&mut change, &wanted(&bed.inputs), &bed.device, now);
    assert_eq!(change.remove_peers, [key(5)]);
}

#[test]
fn a_peer_that_initiates_keeps_the_endpoint_it_was_heard_at() {
    let inputs = inputs([member(1), laptop(None)]);
    let (mut endpoints, now) = (ExternalEndpoints::default(), (Instant::now(), SystemTime::now()));
    let mut change = DeviceChange::default();
    endpoints.complete(&mut change, &wanted(&inputs), &device(&DeviceChange::default(), None), now);
    assert_eq!(change.set_peers[&key(LAPTOP)].endpoint, None);
    for handshake in [None, Some(Duration::from_secs(1)), Some(Duration::from_secs(999))] {
        let mut device = device(&change, handshake);
        device.peers.get_mut(&key(LAPTOP)).unwrap().config.endpoint = Some(address("198.51.100.1:9"));
        let mut change = DeviceChange::default();
        endpoints.complete(&mut change, &wanted(&inputs), &device, now);
        assert!(change.is_empty(), "{change:?}");
    }
}

#[test]
fn a_peer_that_roamed_is_followed_while_it_is_heard() {
    let mut bed = Bed::new(&["192.0.2.1:7"]);
    bed.peer().config.endpoint = Some(address("198.51.100.1:9"));
    bed.peer().last_handshake = Some(SystemTime::now());
    assert_eq!(bed.sets(), None);
    bed.peer().last_handshake = Some(SystemTime::now() - SESSION);
    assert_eq!(bed.sets().as_deref(), Some("192.0.2.1:7"));
}

#[test]
fn another_address_of_the_name_is_taken_at_once() {
    let mut bed = Bed::new(&["192.0.2.1:7"]);
    bed.peer().last_handshake = Some(SystemTime::now());
    bed.resolve(&["192.0.2.2:7"]);
    assert_eq!(bed.sets().as_deref(), Some("192.0.2.2:7"));
}

#[test]
fn addresses_of_a_name_are_tried_in_turn_while_packets_are_not_answered() {
    let mut bed = Bed::new(&["192.0.2.1:7", "[2001:db8::1]:7"]);
    bed.now += ATTEMPT;
    assert_eq!(bed.sets(), None, "nothing was sent");
    bed.peer().tx_bytes = 148;
    assert_eq!(bed.sets().as_deref(), Some("[2001:db8::1]:7"));
    bed.peer().config.endpoint = Some(address("[2001:db8::1]:7"));
    bed.peer().tx_bytes = 296;
    assert_eq!(bed.sets(), None, "it is being tried");
    bed.now += ATTEMPT;
    assert_eq!(bed.sets().as_deref(), Some("192.0.2.1:7"));
}

#[test]
fn a_peer_that_went_to_another_entry_node_loses_its_session_here_and_is_not_called() {
    let mut bed = Bed::new(&["192.0.2.1:7"]);
    bed.peer().last_handshake = Some(SystemTime::now());
    for member in bed.inputs.members.iter_mut().map(Arc::make_mut) {
        match member.external.as_mut() {
            Some(external) => external.entry_nodes = vec!["node-0001".to_owned(), "node-0002".to_owned()],
            None if member.name == "node-0002" => {
                member.entry_terms.insert("laptop".to_owned(), (key(LAPTOP), 1));
            }
            None => {}
        }
    }
    let change = bed.change();
    assert_eq!(change.remove_peers, [key(LAPTOP)]);
    let standby = &change.set_peers[&key(LAPTOP)];
    assert_eq!(
        (&*standby.allowed_ips, standby.endpoint, standby.persistent_keepalive),
        (&[][..], None, None)
    );
    assert_eq!(standby.preshared_key, Some(PresharedKey([3; 32])));
    bed.device = device(&change, None);
    assert!(bed.change().is_empty(), "it stays so");
    // It calls, and this node takes the next term.
    bed.device = device(&change, Some(Duration::from_secs(1)));
    bed.peer().config.endpoint = Some(address("198.51.100.1:9"));
    assert!(bed.change().is_empty(), "nothing is removed a second time");
    for member in bed.inputs.members.iter_mut().filter(|member| member.name == "node-0001") {
        Arc::make_mut(member).entry_terms.insert("laptop".to_owned(), (key(LAPTOP), 2));
    }
    let change = bed.change();
    assert!(change.remove_peers.is_empty());
    assert_eq!(change.set_peers[&key(LAPTOP)].allowed_ips, ["10.9.0.1/32".parse().unwrap()]);
    assert_eq!(change.set_peers[&key(LAPTOP)].endpoint, None, "it is answered where it called from");
}
