//! Costs of peers for an agent while nothing is sent to them: memory, and no packets. Real: the agents, their probes and every byte that
//! they allocate. Modelled: sessions of WireGuard, of which agents only see counters.

use std::alloc::{GlobalAlloc, Layout, System};
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use fairlead_keys::{PrivateKey, PublicKey};
use fairlead_path::{
    Candidate, Config, Event, Identity, Observation, PathAgent, PeerPaths, Source, Transmit,
};
use x25519_dalek::StaticSecret;

const PEERS: u16 = 200;
const STEP: Duration = Duration::from_millis(200);
const SECOND: Duration = Duration::from_secs(1);
/// Time until which there is traffic.
const BUSY: Duration = Duration::from_secs(10);
/// When nothing more may be sent because of it: a minute later, and the rest of a round.
const IDLE: Duration = Duration::from_secs(100);

/// Number of bytes that are allocated.
static LIVE: AtomicUsize = AtomicUsize::new(0);

struct Counting;

#[expect(unsafe_code, reason = "an allocator that counts")]
// SAFETY: every call is passed on to the system's allocator as it is.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LIVE.fetch_add(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promises are those that the system's allocator asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Ordering::Relaxed);
        // SAFETY: as above; `memory` came from `alloc`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// One agent, the keys of its peers by address, and where WireGuard sends.
struct Node {
    address: SocketAddr,
    key: PublicKey,
    agent: PathAgent,
    endpoints: BTreeMap<PublicKey, SocketAddr>,
    observations: u64,
}

impl Node {
    fn new(number: u16) -> Self {
        let [high, low] = number.to_be_bytes();
        let mut private = [7; 32];
        // X25519 ignores some bits of the first and of the last byte.
        private[1..3].copy_from_slice(&number.to_be_bytes());
        let key = PublicKey(x25519_dalek::PublicKey::from(&StaticSecret::from(private)).to_bytes());
        let mut agent = PathAgent::new(Config::default(), number.into());
        let mut epoch = [1; 16];
        epoch[..2].copy_from_slice(&number.to_be_bytes());
        agent.enable_probes(Identity { private_key: PrivateKey(private), public_key: key, epoch });
        let address = SocketAddr::from((Ipv4Addr::new(10, 1, high, low), 51820));
        Self { address, key, agent, endpoints: BTreeMap::new(), observations: 0 }
    }

    /// With two candidates, of which one answers.
    fn add_peer(&mut self, key: PublicKey, address: SocketAddr) {
        let away = SocketAddr::from((Ipv4Addr::new(192, 0, 2, 1), 51820));
        let candidates = [(address, Source::Host), (away, Source::Observed)];
        let candidates = candidates.map(|(address, source)| Candidate { address, source }).to_vec();
        let paths = PeerPaths { candidates, silence: Some(60 * SECOND), ..PeerPaths::default() };
        self.agent.upsert_peer(SECOND, key, paths);
    }

    /// Datagrams that the agent sends, after it was shown a session that is alive: with data at first, and then with keepalives only.
    fn run(&mut self, now: Duration) -> Vec<Transmit> {
        if self.agent.poll_timeout().is_some_and(|at| at <= now) {
            self.agent.handle_timeout(now);
        }
        while let Some(event) = self.agent.poll_event() {
            match event {
                Event::ObservationDue { peer } => {
                    self.observations += 1;
                    let bytes = now.min(BUSY).as_millis() * 10 + u128::from(now.as_secs() / 25) * 32;
                    let bytes = u64::try_from(bytes).unwrap();
                    let observation = Observation {
                        endpoint: self.endpoints.get(&peer).copied(),
                        handshake_age: Some(Duration::from_secs(now.as_secs() % 120)),
                        rx_bytes: bytes,
                        tx_bytes: bytes,
                    };
                    self.agent.observe(now, &peer, observation);
                }
                Event::SetEndpoint { peer, endpoint, .. } => drop(self.endpoints.insert(peer, endpoint)),
                _ => {}
            }
        }
        std::iter::from_fn(|| self.agent.poll_transmit()).collect()
    }
}

/// A hub and its peers until `end`; how many datagrams they sent after [`IDLE`].
fn run(hub: &mut Node, peers: &mut BTreeMap<SocketAddr, Node>, end: Duration) -> usize {
    let (mut now, mut late) = (SECOND, 0);
    while now < end {
        let sent = hub.run(now);
        late += if now > IDLE { sent.len() } else { 0 };
        for Transmit { remote, payload, .. } in sent {
            if let Some(peer) = peers.get_mut(&remote) {
                peer.agent.handle_datagram(now, None, hub.address, &payload);
            }
        }
        for peer in peers.values_mut() {
            let sent = peer.run(now);
            late += if now > IDLE { sent.len() } else { 0 };
            for Transmit { remote, payload, .. } in sent {
                if remote == hub.address {
                    hub.agent.handle_datagram(now, None, peer.address, &payload);
                }
            }
        }
        now += STEP;
    }
    late
}

#[test]
fn idle_peers_send_nothing_and_take_little_memory() {
    let mut hub = Node::new(0);
    let mut peers = BTreeMap::new();
    for number in 1..=PEERS {
        let mut peer = Node::new(number);
        peer.add_peer(hub.key, hub.address);
        hub.add_peer(peer.key, peer.address);
        peers.insert(peer.address, peer);
    }
    let late = run(&mut hub, &mut peers, 240 * SECOND);
    assert_eq!(late, 0, "datagrams of idle peers");
    let direct = peers.values().filter(|peer| hub.endpoints.get(&peer.key) == Some(&peer.address)).count();
    assert_eq!(direct, usize::from(PEERS), "peers with a path that has answered");
    let (observations, before) = (hub.observations, LIVE.load(Ordering::Relaxed));
    drop(hub);
    let each = (before - LIVE.load(Ordering::Relaxed)) / usize::from(PEERS);
    println!(
        "{each} bytes for each idle peer, {} observations of each in 4 minutes",
        observations / u64::from(PEERS)
    );
    // The goal is a kibibyte.
    assert!(each <= 4096, "{each} bytes for each idle peer");
}
