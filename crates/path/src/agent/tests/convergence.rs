//! Several agents over a simulated network, where no peer answers probes: handshakes alone connect them.

use std::collections::BTreeMap;

use super::*;

/// Time for which a NAT keeps a mapping without traffic (RFC 4787, REQ-5, asks for 2 minutes; many keep 30 s).
const NAT_TIMEOUT: Duration = Duration::from_secs(30);
/// `REKEY_TIMEOUT`: WireGuard repeats an unanswered handshake.
const REPEAT: Duration = Duration::from_secs(5);
const TICK: Duration = Duration::from_millis(100);

/// State of one peer in a WireGuard device.
#[derive(Default, Clone, Copy)]
struct Link {
    endpoint: Option<SocketAddr>,
    session: Option<Duration>,
    initiated: Duration,
}

struct Node {
    agent: PathAgent,
    /// Address at which others see it.
    address: SocketAddr,
    /// Behind a NAT with address- and port-dependent filtering (RFC 4787, 5).
    nat: bool,
    starts: Duration,
    links: BTreeMap<PublicKey, Link>,
    /// When it last sent to an address.
    opened: BTreeMap<SocketAddr, Duration>,
}

struct World {
    nodes: Vec<Node>,
    now: Duration,
    /// Endpoints set while a session was alive.
    disturbed: usize,
}

impl World {
    /// Per node: whether it is behind a NAT, when it starts in seconds, how many of its candidates lead nowhere.
    fn new(nodes: &[(bool, u8, u8)], seed: u64) -> Self {
        let node = |index: usize, (nat, starts, wrong): (bool, u8, u8)| {
            let mut agent = PathAgent::new(Config::default(), seed ^ index as u64);
            let starts = Duration::from_secs(starts.into());
            let mut links = BTreeMap::new();
            for other in (0..nodes.len()).filter(|other| *other != index) {
                let mut numbers: Vec<u8> = (1..=wrong).collect();
                numbers.insert(usize::from(wrong) * other / nodes.len(), 100 + other as u8);
                agent.upsert_peer(starts, key(other as u16), paths(&numbers));
                links.insert(key(other as u16), Link::default());
            }
            let address = address(100 + index as u8);
            Node { agent, address, nat, starts, links, opened: BTreeMap::new() }
        };
        let nodes = nodes.iter().enumerate().map(|(index, kind)| node(index, *kind)).collect();
        Self { nodes, now: Duration::ZERO, disturbed: 0 }
    }

    fn tick(&mut self) {
        self.now += TICK;
        for index in 0..self.nodes.len() {
            self.wake(index);
            self.repeat_handshakes(index);
        }
    }

    fn all_up(&self) -> bool {
        let is_up = |node: &Node, peer| {
            node.agent.status(self.now, peer).is_some_and(|status| status.state == State::Up)
        };
        self.nodes.iter().all(|node| node.links.keys().all(|peer| is_up(node, peer)))
    }

    fn wake(&mut self, index: usize) {
        let now = self.now;
        let node = &mut self.nodes[index];
        if now < node.starts || node.agent.poll_timeout().is_none_or(|at| at > now) {
            return;
        }
        node.agent.handle_timeout(now);
        while let Some(event) = self.nodes[index].agent.poll_event() {
            let node = &mut self.nodes[index];
            match event {
                Event::ObservationDue { peer } => {
                    let observation = node.links[&peer].observation(now);
                    node.agent.observe(now, &peer, observation);
                }
                Event::SetEndpoint { peer, endpoint, .. } => {
                    let link = node.links.get_mut(&peer).unwrap();
                    self.disturbed += usize::from(link.session.is_some());
                    link.endpoint = Some(endpoint);
                    self.initiate(index, peer);
                }
                Event::HandshakeDue { .. }
                | Event::ReflexiveAddressesChanged
                | Event::RouteMtuChanged { .. }
                | Event::RelayPortDue { .. }
                | Event::SendBothWays { .. }
                | Event::Sockets(_)
                | Event::StateChanged { .. }
                | Event::KeepaliveChanged { .. }
                | Event::StunAnswersChanged => {}
            }
        }
    }

    fn repeat_handshakes(&mut self, index: usize) {
        let now = self.now;
        let is_due =
            |link: &Link| link.session.is_none() && link.endpoint.is_some() && now >= link.initiated + REPEAT;
        let due: Vec<PublicKey> =
            self.nodes[index].links.iter().filter(|(_, link)| is_due(link)).map(|(key, _)| *key).collect();
        for peer in due {
            self.initiate(index, peer);
        }
    }

    /// Sends a handshake. It completes if it reaches its node; a NAT lets it in only if that node has sent to the sender
    /// before.
    fn initiate(&mut self, index: usize, peer: PublicKey) {
        let (now, from, sender) = (self.now, self.nodes[index].address, key(index as u16));
        let other = usize::from(peer.0[1]);
        let link = self.nodes[index].links.get_mut(&peer).unwrap();
        link.initiated = now;
        let to = link.endpoint.unwrap();
        self.nodes[index].opened.insert(to, now);
        let target = &self.nodes[other];
        let open = !target.nat || target.opened.get(&from).is_some_and(|at| now - *at <= NAT_TIMEOUT);
        if to == target.address && now >= target.starts && open {
            for (node, peer, endpoint) in [(index, peer, to), (other, sender, from)] {
                let link = self.nodes[node].links.get_mut(&peer).unwrap();
                *link = Link { endpoint: Some(endpoint), session: Some(now), ..*link };
            }
        }
    }
}

impl Link {
    /// A session is renewed every 2 minutes and carries a keepalive every 25 s.
    fn observation(&self, now: Duration) -> Observation {
        let age = self.session.map(|since| now - since);
        Observation {
            endpoint: self.endpoint,
            handshake_age: age.map(|age| Duration::from_secs(age.as_secs() % 120)),
            rx_bytes: age.map_or(0, |age| 92 + age.as_secs() / 25 * 32),
            tx_bytes: 0,
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn agents_whose_peers_answer_no_probe_connect_and_stay_connected(
        nodes in prop::collection::vec((any::<bool>(), 0_u8..20, 0_u8..4), 2..6),
        seed in any::<u64>(),
    ) {
        let mut world = World::new(&nodes, seed);
        while !world.all_up() {
            prop_assert!(world.now < 300 * SECOND, "not connected after 300 s");
            world.tick();
        }
        let connected = world.now;
        while world.now < connected + 300 * SECOND {
            (0..10).for_each(|_| world.tick());
            prop_assert!(world.all_up(), "lost at {:?}", world.now);
        }
        prop_assert_eq!(world.disturbed, 0);
    }
}
