//! A stranger who sees all packets on the Internet, and sends any, also with the addresses of others. WireGuard's own protection from
//! replays is not modelled but for data, so handshakes and keepalives are not sent again.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::time::Duration;

use fairlead_wire::probe::is_probe;
use fairlead_wire::stun::is_stun;
use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::network::Datagram;
use super::node::DATA;
use super::relay::relay_endpoint;
use super::router::Nat;
use super::{RELAY, SECOND, World, router};

const ATTACKER: SocketAddr = SocketAddr::new(IpAddr::V4(Ipv4Addr::new(198, 51, 100, 66)), 51820);
const STEP: Duration = Duration::from_millis(10);

/// Attacker with the datagrams that it has recorded, and the number of bytes that it has sent.
struct Attacker {
    tape: Vec<Datagram>,
    random: SmallRng,
    /// Bytes that it has sent from its own address.
    own_bytes: usize,
}

impl Attacker {
    /// Two nodes behind NATs that let in everything, with a relay; it has listened for a while.
    fn listening(passes_udp: bool, nats: [Nat; 2]) -> (World, Self) {
        let routers = vec![router(nats[0], 1), router(nats[1], 2)];
        let mut world = World::new(["192.168.1.2", "192.168.2.2"], routers);
        world.start_relay(passes_udp);
        world.exchange_with_relay();
        world.run(10 * SECOND);
        world.network.tape = Some(Vec::new());
        world.run(5 * SECOND);
        let mut tape = world.network.tape.take().unwrap();
        tape.retain(|seen| is_probe(&seen.payload) || is_stun(&seen.payload) || seen.payload[0] == DATA);
        assert!(tape.len() > 100, "{}", tape.len());
        (world, Self { tape, random: SmallRng::seed_from_u64(1), own_bytes: 0 })
    }

    /// Sends recorded packets again, as they were, from its own address, and altered; and some of its own.
    fn attack(&mut self, world: &mut World, time: Duration) {
        let end = world.now + time;
        while world.now < end {
            for _ in 0..5 {
                let datagram = self.draw();
                if datagram.from == ATTACKER {
                    self.own_bytes += datagram.payload.len();
                }
                world.network.inject(world.now, datagram);
            }
            world.run(STEP);
        }
    }

    fn draw(&mut self) -> Datagram {
        let mut datagram = self.tape[self.random.random_range(0..self.tape.len())].clone();
        if self.random.random() {
            datagram.from = ATTACKER;
        }
        if datagram.payload[0] == DATA {
            // WireGuard drops what was altered, and its model does not know.
            return datagram;
        }
        let length = datagram.payload.len();
        match self.random.random_range(0..4) {
            0 => datagram.payload[self.random.random_range(0..length)] ^= 1 << self.random.random_range(0..8),
            // Keeps the beginning, by which its kind is known.
            1 => datagram.payload[8..].fill_with(|| self.random.random()),
            2 => datagram.payload.truncate(self.random.random_range(4..=length)),
            _ => {}
        }
        datagram
    }
}

fn is_relayed(world: &World) -> bool {
    world.endpoints().iter().all(|endpoint| endpoint.ip().is_loopback() || endpoint.ip() == RELAY)
}

#[test]
fn replayed_spoofed_and_altered_packets_move_no_endpoint_and_are_not_amplified() {
    let paths = [
        (true, [Nat::FullCone; 2]),
        (false, [Nat::FullCone; 2]),
        (true, [Nat::Symmetric; 2]),
        (true, [Nat::AddressRestricted, Nat::FullCone]),
    ];
    for (passes_udp, nats) in paths {
        let (mut world, mut attacker) = Attacker::listening(passes_udp, nats);
        let (before, moves) = (world.endpoints(), world.nodes.each_ref().map(|node| node.endpoints.len()));
        attacker.attack(&mut world, 20 * SECOND);
        let what = format!("{passes_udp}, {nats:?}");
        assert_eq!(world.endpoints(), before, "{what}");
        assert_eq!(world.nodes.each_ref().map(|node| node.endpoints.len()), moves, "{what}");
        assert_eq!(world.nodes.each_ref().map(|node| node.handshakes_asked), [0, 0], "{what}");
        assert_eq!(world.lost(), 0, "{what}");
        let returned = world.network.returned(ATTACKER.ip());
        assert!(returned <= attacker.own_bytes, "{what}: {returned} for {}", attacker.own_bytes);
    }
}

#[test]
fn replayed_spoofed_and_altered_packets_do_not_keep_a_dead_path_alive() {
    for nats in [[Nat::FullCone; 2], [Nat::PortRestricted; 2]] {
        let (mut world, mut attacker) = Attacker::listening(false, nats);
        assert!(!is_relayed(&world), "{nats:?}");
        let [second, first] = world.endpoints().map(|endpoint| endpoint.ip());
        world.black_hole(first, second);
        let broken = world.now;
        attacker.attack(&mut world, 10 * SECOND);
        let gap = world.longest_gap(broken);
        assert!(gap <= Duration::from_millis(1500), "{nats:?}: {gap:?}");
        assert_eq!(world.endpoints(), [relay_endpoint(1), relay_endpoint(0)], "{nats:?}");
    }
}
