use fairlead_wire::egress::register_request::Kind;
use fairlead_wire::egress::{self as wire};
use proptest::prelude::*;

use super::*;

const MAX: u32 = u32::MAX;

fn client(number: u8) -> Client {
    Client {
        uid: format!("u{number}"),
        namespace: "shop".to_owned(),
        name: format!("web-{number}"),
        addresses: DualStackAddrs { ipv4: Some([10, 0, 0, number].into()), ipv6: None },
    }
}

fn clients(numbers: impl IntoIterator<Item = u8>) -> Clients {
    numbers.into_iter().map(client).map(|client| (client.uid.clone(), client)).collect()
}

fn token(now: Instant) -> Token {
    Token { text: "t".to_owned(), key: [1; 32], renew_at: now + Duration::from_secs(2880) }
}

fn answer(revision: u64) -> RegisterResponse {
    RegisterResponse { revision, refused: Vec::new(), state: State::Ready.into(), held: Vec::new() }
}

fn refusing(revision: u64, uid: &str) -> RegisterResponse {
    let refusal =
        wire::Refusal { uid: uid.to_owned(), reason: "NotAllowed".to_owned(), message: "m".to_owned() };
    RegisterResponse { refused: vec![refusal], ..answer(revision) }
}

#[track_caller]
fn sent(step: Step) -> (u64, Kind) {
    match step {
        Step::Send(RegisterRequest { revision, kind: Some(kind) }) => (revision, kind),
        other => panic!("{other:?}"),
    }
}

struct World {
    session: Session,
    now: Instant,
    clients: Clients,
}

impl World {
    fn new(numbers: impl IntoIterator<Item = u8>) -> Self {
        Self { session: Session::default(), now: Instant::now(), clients: clients(numbers) }
    }

    fn poll(&mut self) -> Step {
        self.session.poll(&self.clients, true, false, self.now)
    }

    fn hear(&mut self, response: RegisterResponse) -> Result<Heard, Ended> {
        self.session.received(&self.clients, response, self.now, MAX)
    }

    /// Up to the point where the gateway has all clients.
    fn synced(numbers: impl IntoIterator<Item = u8>) -> Self {
        let mut world = Self::new(numbers);
        world.open();
        world
    }

    fn open(&mut self) {
        assert_eq!(self.poll(), Step::Connect);
        self.session.opened(token(self.now), self.now);
        assert!(matches!(sent(self.poll()), (1, Kind::Hello(_))));
        self.hear(answer(1)).unwrap();
        assert!(matches!(sent(self.poll()), (2, Kind::All(_))));
        self.hear(answer(2)).unwrap();
        assert!(self.session.is_synced());
    }
}

#[test]
fn after_hello_come_all_clients_and_then_changes() {
    let mut world = World::synced([1, 2]);
    assert!(world.session.confirmed(&client(1)) && world.session.confirmed(&client(2)));
    assert!(matches!(world.poll(), Step::Wait(Some(_))));
    world.clients = clients([2, 3]);
    let (3, Kind::Change(change)) = sent(world.poll()) else { panic!() };
    assert_eq!((change.set[0].uid.as_str(), change.removed), ("u3", vec!["u1".to_owned()]));
    assert_eq!(change.set[0].addresses, [vec![10, 0, 0, 3]]);
    assert!(!world.session.confirmed(&client(3)), "not before the answer");
    // What changes meanwhile waits for the answer, and costs one message.
    world.clients = clients([2, 3, 4, 5, 6]);
    assert!(matches!(world.poll(), Step::Wait(Some(_))));
    assert_eq!(
        world.hear(answer(3)).unwrap(),
        Heard { changed: true, confirmed: 1, refused: 0, held: false }
    );
    let (4, Kind::Change(change)) = sent(world.poll()) else { panic!() };
    assert_eq!(change.set.len(), 3);
}

#[test]
fn without_clients_nothing_is_connected_and_a_connection_ends_after_a_while() {
    let mut world = World::new([]);
    assert_eq!(world.poll(), Step::Wait(None));
    world.clients = clients([1]);
    assert_eq!(world.session.poll(&world.clients, false, false, world.now), Step::Wait(None), "not ready");
    world.open();
    world.clients = clients([]);
    let (3, Kind::Change(change)) = sent(world.poll()) else { panic!() };
    assert_eq!(change.removed, ["u1"]);
    world.hear(answer(3)).unwrap();
    assert!(!world.session.has_clients());
    let Step::Wait(Some(until)) = world.poll() else { panic!() };
    world.now = until;
    assert_eq!(world.poll(), Step::Close(Ended::NoClients));
    world.session.closed(Ended::NoClients, true, false, world.now, MAX);
    world.now += LAST_PAUSE;
    assert_eq!((world.poll(), world.session.failure()), (Step::Wait(None), None));
}

#[test]
fn what_was_confirmed_stays_when_the_stream_ends_until_all_clients_are_sent_again() {
    let mut world = World::synced([1, 2]);
    world.session.closed(Ended::ByGateway, true, false, world.now, MAX);
    assert!(world.session.confirmed(&client(1)));
    assert_eq!(world.poll(), Step::Wait(Some(world.now + FIRST_PAUSE)));
    world.now += FIRST_PAUSE;
    world.clients = clients([2, 3]);
    world.open();
    assert!(world.session.confirmed(&client(3)) && !world.session.confirmed(&client(1)));
}

#[test]
fn a_client_that_is_gone_while_there_is_no_stream_is_removed_at_the_gateway() {
    let mut world = World::synced([1]);
    world.session.closed(Ended::ByGateway, true, false, world.now, MAX);
    world.clients = clients([]);
    world.now += FIRST_PAUSE;
    world.open();
    assert!(!world.session.has_clients());
}

/// The gateway may have answered, and the answer may have been lost.
#[test]
fn a_client_that_may_have_been_registered_is_removed_at_the_gateway() {
    let mut world = World::new([1]);
    world.poll();
    world.session.opened(token(world.now), world.now);
    world.poll();
    world.hear(answer(1)).unwrap();
    assert!(matches!(sent(world.poll()), (2, Kind::All(_))));
    world.session.closed(Ended::ByGateway, true, false, world.now, MAX);
    world.clients = clients([]);
    assert!(world.session.has_clients());
    world.now += FIRST_PAUSE;
    world.open();
    assert!(!world.session.has_clients());
}

#[test]
fn pauses_grow_to_ten_seconds_with_jitter_and_a_good_stream_starts_anew() {
    let mut failures = 0;
    let most: Vec<u128> = (0..8).map(|_| pause(&mut failures, MAX).as_millis()).collect();
    assert_eq!(most, [200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
    assert_eq!(pause(&mut failures, 0), LAST_PAUSE / 2);
    let mut world = World::new([1]);
    for _ in 0..10 {
        assert_eq!(world.poll(), Step::Connect);
        world.session.closed(Ended::NoAnswer, true, false, world.now, MAX);
        world.now += LAST_PAUSE;
    }
    world.open();
    world.now += GOOD;
    world.session.closed(Ended::ByGateway, true, false, world.now, MAX);
    assert_eq!(world.poll(), Step::Wait(Some(world.now + FIRST_PAUSE)));
    world.session.failures = 10;
    world.session.retry_now();
    assert_eq!(world.poll(), Step::Connect);
}

#[test]
fn refusals_are_kept_and_the_gateway_is_asked_again() {
    let mut world = World::new([1, 2]);
    world.poll();
    world.session.opened(token(world.now), world.now);
    world.poll();
    world.hear(answer(1)).unwrap();
    world.poll();
    assert_eq!(
        world.hear(refusing(2, "u1")).unwrap(),
        Heard { changed: true, confirmed: 1, refused: 1, held: false }
    );
    assert_eq!(world.session.refusal(&client(1)).unwrap().reason, "NotAllowed");
    assert!(!world.session.confirmed(&client(1)) && world.session.confirmed(&client(2)));
    assert_eq!(world.poll(), Step::Wait(Some(world.now + FIRST_PAUSE)));
    world.now += FIRST_PAUSE;
    let (3, Kind::Change(change)) = sent(world.poll()) else { panic!() };
    assert_eq!((change.set[0].uid.as_str(), change.set.len()), ("u1", 1));
    // The same once more is no news, and the pause grows.
    assert_eq!(
        world.hear(refusing(3, "u1")).unwrap(),
        Heard { changed: false, confirmed: 0, refused: 1, held: false }
    );
    assert_eq!(world.poll(), Step::Wait(Some(world.now + 2 * FIRST_PAUSE)));
    world.now += 2 * FIRST_PAUSE;
    sent(world.poll());
    world.hear(answer(4)).unwrap();
    assert!(world.session.confirmed(&client(1)) && world.session.refusal(&client(1)).is_none());
    // It may also change its mind later.
    assert!(world.hear(refusing(4, "u2")).unwrap().changed);
    assert!(!world.session.confirmed(&client(2)));
    // Whom it was not told of is ignored.
    assert_eq!(world.hear(refusing(4, "u9")).unwrap(), Heard::default());
    world.clients = clients([1]);
    let (5, Kind::Change(change)) = sent(world.poll()) else { panic!() };
    assert_eq!((change.set.len(), change.removed), (0, vec!["u2".to_owned()]));
}

#[test]
fn a_token_is_renewed_in_time_and_kept_for_the_next_connection() {
    let mut world = World::synced([1]);
    let renew_at = token(world.now).renew_at;
    assert_eq!(world.poll(), Step::Wait(Some(renew_at)));
    assert!(world.session.token(&[1; 32], world.now).is_some());
    assert!(world.session.token(&[2; 32], world.now).is_none(), "of another key");
    world.now = renew_at;
    assert!(world.session.token(&[1; 32], world.now).is_none());
    assert_eq!(world.poll(), Step::RenewToken);
    assert_eq!(world.poll(), Step::Wait(None), "it is being requested");
    world.session.renewed(None, world.now, 0);
    let Step::Wait(Some(again)) = world.poll() else { panic!() };
    assert_eq!(again - world.now, Duration::from_secs(10));
    world.now = again;
    assert_eq!(world.poll(), Step::RenewToken);
    world.session.renewed(Some(token(world.now)), world.now, 0);
    assert!(matches!(sent(world.poll()), (3, Kind::Hello(_))));
    world.hear(answer(3)).unwrap();
    assert!(world.session.is_synced() && world.session.confirmed(&client(1)));
    world.session.closed(Ended::Rejected("no".to_owned()), true, false, world.now, 0);
    assert!(world.session.token(&[1; 32], world.now).is_none(), "it may be bad");
}

#[test]
fn a_gateway_that_does_not_answer_or_answers_too_much_is_left() {
    let mut world = World::synced([1]);
    world.clients = clients([2]);
    sent(world.poll());
    let Step::Wait(Some(deadline)) = world.poll() else { panic!() };
    world.now = deadline;
    assert_eq!(world.poll(), Step::Close(Ended::NoAnswer));
    let error = world.hear(answer(u64::MAX)).unwrap_err();
    assert!(matches!(error, Ended::Protocol(_)), "{error}");
    // An old answer is not one to the last message.
    assert_eq!(world.hear(answer(2)).unwrap(), Heard::default());
    assert!(!world.session.confirmed(&client(2)));
}

#[test]
fn only_a_ready_gateway_that_never_answered_and_refuses_connections_does_not_register() {
    let mut world = World::new([1]);
    world.session.closed(Ended::Refused(5556), false, false, world.now, 0);
    assert!(!world.session.does_not_register(), "it is starting");
    world.session.closed(Ended::NoAnswer, true, false, world.now, 0);
    assert!(!world.session.does_not_register());
    world.session.closed(Ended::Refused(5556), true, false, world.now, 0);
    assert!(world.session.does_not_register());
    world.session.retry_now();
    world.open();
    world.session.closed(Ended::Refused(5556), true, false, world.now, 0);
    assert!(!world.session.does_not_register(), "it is ours");
}

#[test]
fn changes_are_of_bounded_size() {
    let mut world = World::synced([1]);
    let many = (0..2000_u32).map(|number| {
        let addresses = DualStackAddrs { ipv4: Some((0x0a00_0000 + number).into()), ipv6: None };
        let uid = format!("u{number}");
        (uid.clone(), Client { uid, addresses, ..client(1) })
    });
    world.clients = many.collect();
    let mut sizes = Vec::new();
    while let Step::Send(message) = world.poll() {
        let Some(Kind::Change(change)) = message.kind else { panic!() };
        sizes.push(change.set.len());
        world.hear(answer(message.revision)).unwrap();
    }
    assert_eq!(sizes, [512, 512, 512, 463], "all but the one that it has");
}

/// Model of a gateway that answers messages as the contract says.
#[derive(Debug, Default)]
struct Gateway {
    clients: BTreeMap<String, Vec<Vec<u8>>>,
    revision: u64,
}

impl Gateway {
    fn take(&mut self, message: RegisterRequest, refuses: &[String]) -> RegisterResponse {
        self.revision = message.revision;
        let set = match message.kind.unwrap() {
            Kind::Hello(_) => Vec::new(),
            Kind::All(all) => {
                self.clients.clear();
                all.clients
            }
            Kind::Change(change) => {
                for uid in change.removed {
                    self.clients.remove(&uid);
                }
                change.set
            }
        };
        let mut refused = Vec::new();
        for client in set {
            if refuses.contains(&client.uid) {
                self.clients.remove(&client.uid);
                refused.push(wire::Refusal {
                    uid: client.uid,
                    reason: "No".to_owned(),
                    message: String::new(),
                });
            } else {
                self.clients.insert(client.uid, client.addresses);
            }
        }
        RegisterResponse { revision: self.revision, refused, state: 0, held: Vec::new() }
    }
}

#[derive(Debug, Clone)]
enum Event {
    Clients(Vec<u8>),
    Break,
    Refuse(Vec<u8>),
    Time(u64),
    State(i32),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        prop::collection::vec(1_u8..6, 0..5).prop_map(Event::Clients),
        Just(Event::Break),
        prop::collection::vec(1_u8..6, 0..3).prop_map(Event::Refuse),
        (0_u64..4000).prop_map(Event::Time),
        (0..5).prop_map(Event::State),
    ]
}

proptest! {
    /// The gateway has all clients that are confirmed, whatever happens in between, and in the end exactly the node's clients.
    #[test]
    fn the_gateway_has_what_is_confirmed_and_in_the_end_all_clients(events in prop::collection::vec(event(), 0..60)) {
        let mut world = World::new([]);
        let (mut gateway, mut refuses) = (Gateway::default(), Vec::new());
        let mut last = 0;
        for event in events.into_iter().chain([Event::Refuse(Vec::new()), Event::Time(60_000), Event::Time(60_000), Event::Time(1)]) {
            match event {
                Event::Clients(numbers) => world.clients = clients(numbers),
                Event::Break if !world.session.is_idle() => world.session.closed(Ended::ByGateway, true, false, world.now, MAX),
                Event::Break => {}
                Event::Refuse(numbers) => refuses = numbers.iter().map(|it| format!("u{it}")).collect(),
                Event::Time(milliseconds) => world.now += Duration::from_millis(milliseconds),
                Event::State(state) => {
                    let response = RegisterResponse { revision: gateway.revision.min(1), refused: Vec::new(), state, held: Vec::new() };
                    let _ = world.hear(response);
                }
            }
            for _ in 0..20 {
                match world.poll() {
                    Step::Connect => {
                        world.session.opened(token(world.now), world.now);
                        last = 0;
                    }
                    Step::Send(message) => {
                        prop_assert_eq!(message.revision, last + 1);
                        last = message.revision;
                        let response = gateway.take(message, &refuses);
                        world.hear(response).unwrap();
                    }
                    Step::Close(ended) => world.session.closed(ended, true, false, world.now, MAX),
                    Step::RenewToken => world.session.renewed(Some(token(world.now)), world.now, 0),
                    Step::Wait(_) => break,
                }
            }
            for client in world.clients.values().filter(|client| world.session.confirmed(client)) {
                prop_assert!(gateway.clients.contains_key(&client.uid));
            }
        }
        prop_assert!(gateway.clients.keys().eq(world.clients.keys()), "{:?}", gateway.clients);
        prop_assert!(world.clients.values().all(|client| world.session.confirmed(client)));
    }

    /// Answers of any content neither panic nor confirm a client that was not sent.
    #[test]
    fn any_answer_is_taken_or_ends_the_stream(
        answers in prop::collection::vec((0_u64..5, prop::collection::vec("u[0-9]|.{0,3}", 0..4), any::<i32>()), 0..50)
    ) {
        let mut world = World::new([1, 2]);
        world.poll();
        world.session.opened(token(world.now), world.now);
        let mut revision = 0;
        for (answered, uids, state) in answers {
            if let Step::Send(message) = world.poll() {
                revision = message.revision;
            }
            let refused = uids.into_iter().map(|uid| wire::Refusal { uid, ..wire::Refusal::default() }).collect();
            let taken = world.hear(RegisterResponse { revision: answered, refused, state, held: Vec::new() });
            prop_assert_eq!(taken.is_err(), answered > revision);
        }
        prop_assert!(world.session.refused.keys().all(|uid| world.clients.contains_key(uid)));
    }
}
