use fairlead_wire::stun::server::{AuthenticatedRequest, STALE_NONCE};
use fairlead_wire::stun::{Nonce, TransactionId, parse_response};
use proptest::prelude::*;

use super::*;

const PORT: u16 = 20_000;
const LIMITS: AllocationLimits = AllocationLimits { per_client: 2, client_rate: None };

fn key(number: u8) -> PublicKey {
    PublicKey([number; 32])
}

fn admission(number: u8) -> Admission {
    Admission { key: key(number), instance: [1; 8], token: None }
}

fn source(number: u16) -> SocketAddr {
    SocketAddr::from(([192, 0, 2, 1], number))
}

fn token(client: u8) -> Token {
    [client; 32]
}

struct Bed {
    allocations: Allocations,
    now: Instant,
}

impl Bed {
    fn new(limits: AllocationLimits) -> Self {
        let now = Instant::now();
        Self { allocations: Allocations::new(limits, [9; 32], now), now }
    }

    /// Clients 1 and 2 have asked for a port to each other.
    fn asked() -> Self {
        let mut bed = Self::new(LIMITS);
        assert_eq!(bed.ask(1, 2, PORT), Ok(PORT));
        assert_eq!(bed.ask(2, 1, PORT + 1), Ok(PORT));
        bed
    }

    /// Asks for a port as the shell does: opens `port` if one is needed.
    fn ask(&mut self, client: u8, peer: u8, port: u16) -> Result<u16, AllocationRefusal> {
        let (now, admission, token) = (self.now, admission(client), token(client));
        let known = self.allocations.join(now, &admission, key(peer), token)?;
        Ok(known.unwrap_or_else(|| {
            self.allocations.open(now, port, &admission, key(peer), token);
            port
        }))
    }

    fn request(
        &mut self,
        from: u16,
        token: Token,
        nonce: Option<Nonce>,
    ) -> Result<Result<SocketAddr, Nonce>, UdpDrop> {
        let transaction = TransactionId([4; 12]);
        let request =
            AuthenticatedRequest { transaction, change_port: false, user: None, nonce }.encode(&token);
        let output = self.allocations.handle_datagram(self.now, PORT, source(from), &request)?;
        let Output::Answer(answer) = output else { panic!("{output:?}") };
        assert!(answer.len() <= request.len());
        let response = parse_response(&answer).unwrap();
        Ok(response.mapped.map_err(|code| {
            assert_eq!(code, STALE_NONCE);
            response.nonce.unwrap()
        }))
    }

    fn bind(&mut self, client: u8, from: u16) {
        let nonce = self.request(from, token(client), None).unwrap().unwrap_err();
        assert_eq!(self.request(from, token(client), Some(nonce)), Ok(Ok(source(from))));
    }

    fn send(&mut self, from: u16) -> Result<u16, UdpDrop> {
        match self.allocations.handle_datagram(self.now, PORT, source(from), b"\x04\0\0\0 datagram")? {
            Output::Forward(to) => Ok(to.port()),
            Output::Answer(answer) => panic!("{answer:?}"),
        }
    }
}

#[test]
fn datagrams_pass_between_two_bound_addresses_and_no_others() {
    let mut bed = Bed::asked();
    assert_eq!(bed.send(1), Err(UdpDrop::UnknownSource));
    bed.bind(1, 1);
    assert_eq!(bed.send(1), Err(UdpDrop::PeerNotBound));
    bed.bind(2, 2);
    assert_eq!((bed.send(1), bed.send(2), bed.send(3)), (Ok(2), Ok(1), Err(UdpDrop::UnknownSource)));
    let counters = bed.allocations.counters();
    assert_eq!((counters.datagrams, counters.bytes, counters.bindings), (2, 26, 2));
    let drops: Vec<u64> = counters.drops().map(|(_, count)| count).collect();
    assert_eq!(drops, [1, 0, 0, 2]);
}

#[test]
fn a_client_whose_nat_rebinds_binds_its_new_address_and_the_old_one_is_a_strangers() {
    let mut bed = Bed::asked();
    bed.bind(1, 1);
    bed.bind(2, 2);
    assert_eq!(bed.send(11), Err(UdpDrop::UnknownSource));
    bed.bind(1, 11);
    assert_eq!((bed.send(11), bed.send(2), bed.send(1)), (Ok(2), Ok(11), Err(UdpDrop::UnknownSource)));
    // A bound address is confirmed without a nonce.
    assert_eq!(bed.request(11, token(1), None), Ok(Ok(source(11))));
}

#[test]
fn a_stranger_binds_nothing_and_is_told_nothing() {
    let mut bed = Bed::asked();
    assert_eq!(bed.request(5, token(3), None), Err(UdpDrop::Unauthenticated));
    // The codes over a request cost something.
    let refused = (0..1000).filter(|_| bed.request(5, token(3), None) == Err(UdpDrop::RateLimited)).count();
    assert_eq!(refused, 601);
    bed.now += Duration::from_secs(1);
    bed.bind(1, 1);
}

#[test]
fn no_request_aims_datagrams_at_an_address_where_its_sender_receives_nothing() {
    let mut bed = Bed::asked();
    bed.bind(2, 2);
    let mine = bed.request(1, token(1), None).unwrap().unwrap_err();
    // A forged source: the nonce went to the victim.
    let victims = bed.request(99, token(1), Some(mine)).unwrap().unwrap_err();
    assert_ne!(victims, mine);
    assert_eq!(bed.send(2), Err(UdpDrop::PeerNotBound));
    bed.now += 2 * NONCE_PERIOD;
    assert!(bed.request(1, token(1), Some(mine)).unwrap().is_err(), "a nonce of long ago");
}

#[test]
fn a_new_token_replaces_the_old_one_and_what_is_bound_stays() {
    let mut bed = Bed::asked();
    bed.bind(1, 1);
    bed.bind(2, 2);
    let now = bed.now;
    assert_eq!(bed.allocations.join(now, &admission(1), key(2), [7; 32]), Ok(Some(PORT)));
    assert_eq!(bed.send(2), Ok(1));
    assert_eq!(bed.request(1, token(1), None), Err(UdpDrop::Unauthenticated));
    assert_eq!(bed.request(1, [7; 32], None), Ok(Ok(source(1))));
}

#[test]
fn an_idle_port_is_forgotten_and_one_in_use_stays_without_its_clients_links() {
    let mut bed = Bed::asked();
    bed.bind(1, 1);
    bed.bind(2, 2);
    for _ in 0..10 {
        bed.now += IDLE / 2;
        assert_eq!((bed.send(1), bed.allocations.handle_timeout(bed.now)), (Ok(2), vec![]));
    }
    bed.now += IDLE;
    assert_eq!(bed.allocations.handle_timeout(bed.now), [PORT]);
    assert_eq!(bed.send(1), Err(UdpDrop::UnknownSource));
    let Allocations { pairs, ports, clients, .. } = &bed.allocations;
    assert!(pairs.is_empty() && ports.is_empty() && clients.is_empty());
}

#[test]
fn a_removed_client_loses_its_ports() {
    let mut bed = Bed::asked();
    assert_eq!(bed.allocations.retain(|_| true), [0_u16; 0]);
    assert_eq!(bed.allocations.retain(|admission| admission.key != key(2)), [PORT]);
}

#[test]
fn a_client_has_few_ports_and_may_ask_for_each_again() {
    let mut bed = Bed::new(LIMITS);
    assert_eq!(bed.ask(1, 2, 1), Ok(1));
    assert_eq!(bed.ask(1, 3, 2), Ok(2));
    assert_eq!(bed.ask(1, 4, 3), Err(AllocationRefusal::ClientLimit));
    assert_eq!(bed.ask(1, 2, 3), Ok(1));
    assert_eq!(bed.ask(4, 1, 3), Ok(3), "what others ask for is theirs");
    assert_eq!(bed.ask(1, 4, 4), Err(AllocationRefusal::ClientLimit));
}

#[test]
fn the_rate_of_a_client_is_one_for_all_its_ports() {
    let mut bed = Bed::new(AllocationLimits { client_rate: Some(1000), ..LIMITS });
    assert_eq!((bed.ask(1, 2, PORT), bed.ask(2, 1, PORT)), (Ok(PORT), Ok(PORT)));
    bed.bind(1, 1);
    bed.bind(2, 2);
    let sent = (0..20_000).filter(|_| bed.send(1).is_ok()).count();
    assert_eq!(sent, 128 * 1024 / 13);
    assert_eq!((bed.send(1), bed.send(2)), (Err(UdpDrop::RateLimited), Ok(1)));
}

proptest! {
    /// Datagrams go only to addresses that an asker has proved, and counts agree, whatever clients and strangers do.
    #[test]
    fn no_order_of_events_breaks_the_rules(
        events in proptest::collection::vec((0_u8..7, 0_u8..3, 0_u8..3, 0_u16..4), 0..120),
    ) {
        let mut bed = Bed::new(LIMITS);
        let mut nonces: HashMap<u16, Nonce> = HashMap::new();
        let mut proved: Vec<(u8, u16)> = Vec::new();
        let mut next = PORT;
        for (event, client, peer, from) in events {
            match event {
                0 | 1 if client != peer => next += u16::from(bed.ask(client, peer, next).is_ok()),
                2 => {
                    if let Ok(Err(nonce)) = bed.request(from, token(client), None) {
                        nonces.insert(from, nonce);
                    }
                }
                3 => {
                    let nonce = nonces.get(&from).copied();
                    if let Ok(Ok(bound)) = bed.request(from, token(client), nonce) {
                        prop_assert_eq!(bound, source(from));
                        proved.push((client, from));
                    }
                }
                4 => if let Ok(to) = bed.send(from) {
                    prop_assert!(proved.iter().any(|(_, address)| *address == to));
                    prop_assert!(proved.iter().any(|(_, address)| *address == from));
                },
                5 => {
                    bed.now += Duration::from_secs(u64::from(from) * 20);
                    bed.allocations.handle_timeout(bed.now);
                }
                6 => drop(bed.allocations.retain(|admission| admission.key != key(client))),
                _ => {}
            }
            let Allocations { pairs, ports, clients, .. } = &bed.allocations;
            prop_assert_eq!(pairs.len(), ports.len());
            prop_assert!(clients.values().all(|client| (1..=LIMITS.per_client).contains(&client.ports)));
            let asked = ports.values().flat_map(|port| &port.sides).filter(|side| side.asked.is_some()).count();
            prop_assert_eq!(clients.values().map(|client| client.ports).sum::<usize>(), asked);
        }
    }
}
