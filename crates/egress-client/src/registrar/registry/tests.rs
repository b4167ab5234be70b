use std::net::IpAddr;

use fairlead_address::DualStackAddrs;
use fairlead_egress::endpoints::GatewayEndpoint;
use fairlead_wire::egress as wire;
use fairlead_wire::egress::State;

use super::*;
use crate::registrar::refusal::Refusal;

fn nat() -> EgressName {
    EgressName { namespace: "internet-egress".to_owned(), name: "nat".to_owned() }
}

fn client(number: u8) -> Client {
    Client {
        uid: format!("u{number}"),
        namespace: "shop".to_owned(),
        name: format!("web-{number}"),
        addresses: DualStackAddrs { ipv4: Some([10, 1, 0, number].into()), ipv6: None },
    }
}

fn address(number: u8) -> IpAddr {
    IpAddr::from([10, 0, 0, number])
}

fn ready(number: u8) -> GatewayEndpoint {
    let addresses = [address(number)].into_iter().collect();
    GatewayEndpoint { addresses, ready: true, serving: true, terminating: false }
}

struct World {
    registry: Registry,
    now: Instant,
    shown: BTreeMap<GatewayUid, GatewayEndpoint>,
}

impl World {
    /// Gateways of these numbers, and a client 1 that was just added.
    fn new(gateways: impl IntoIterator<Item = u8>) -> Self {
        let mut world = Self { registry: Registry::default(), now: Instant::now(), shown: BTreeMap::new() };
        world.shown = gateways.into_iter().map(|number| (format!("g{number}"), ready(number))).collect();
        world.registry.add_client(&nat(), client(1));
        world.show();
        world
    }

    fn show(&mut self) -> bool {
        let endpoints = Endpoints::from([(nat(), self.shown.clone())]);
        self.registry.set_endpoints(endpoints, self.now)
    }

    fn id(&self, number: u8) -> GatewayId {
        let uid = format!("g{number}");
        let instance = self.registry.gateways[&nat()][&uid].instance;
        GatewayId { egress: nat(), uid, instance }
    }

    /// The gateway answers all messages so far. Returns the UIDs of each that says which clients there are.
    fn answer(&mut self, number: u8, refused: &[&str], state: State) -> Vec<Vec<String>> {
        let id = self.id(number);
        let refusal = |uid: &&str| wire::Refusal {
            uid: (*uid).to_owned(),
            reason: "No".to_owned(),
            message: "m".to_owned(),
        };
        let refused: Vec<_> = refused.iter().map(refusal).collect();
        let mut all = Vec::new();
        loop {
            match self.registry.poll(&id, self.now) {
                Poll::Step(Step::Connect) => {
                    let renew_at = self.now + Duration::from_secs(2880);
                    self.registry.opened(
                        &id,
                        Token { text: String::new(), key: [0; 32], renew_at },
                        self.now,
                    );
                }
                Poll::Step(Step::Send(message)) => {
                    if let Some(wire::register_request::Kind::All(clients)) = &message.kind {
                        all.push(clients.clients.iter().map(|client| client.uid.clone()).collect());
                    }
                    let response = RegisterResponse {
                        revision: message.revision,
                        refused: refused.clone(),
                        state: state.into(),
                        held: Vec::new(),
                    };
                    self.registry.received(&id, response, self.now, 0).unwrap();
                }
                _ => return all,
            }
        }
    }

    fn register(&mut self, number: u8) {
        self.answer(number, &[], State::Ready);
    }

    /// The gateway says another state of itself.
    fn say(&mut self, number: u8, state: State) {
        let id = self.id(number);
        let response =
            RegisterResponse { revision: 1, refused: Vec::new(), state: state.into(), held: Vec::new() };
        assert!(self.registry.received(&id, response, self.now, 0).unwrap().changed);
    }

    fn fail(&mut self, number: u8, ended: Ended) {
        let id = self.id(number);
        self.registry.poll(&id, self.now);
        self.registry.closed(&id, ended, self.now, 0);
    }

    fn next_hop(&self) -> NextHop {
        self.registry.next_hop(&nat(), "u1")
    }

    fn gateways(&self) -> Vec<(IpAddr, bool)> {
        match self.next_hop() {
            NextHop::Gateways(all) => all.into_iter().map(|it| (it.address, it.is_draining)).collect(),
            other => panic!("{other:?}"),
        }
    }

    fn echo(&mut self, answering: &[u8]) {
        self.now += Duration::from_millis(500);
        let replies = answering.iter().map(|number| address(*number)).collect();
        let asking = self.registry.in_use();
        self.registry.observe(self.now, &replies, &asking);
    }

    fn registration(&self) -> Option<Result<(), NotRegistered>> {
        self.registry.registration(&nat(), "u1")
    }
}

#[test]
fn packets_go_to_gateways_that_have_confirmed_the_client() {
    let mut world = World::new([1, 2]);
    assert_eq!((world.gateways(), world.registration()), (vec![], None));
    world.register(2);
    assert_eq!((world.gateways(), world.registration()), (vec![(address(2), false)], Some(Ok(()))));
    world.register(1);
    assert_eq!(world.gateways(), [(address(1), false), (address(2), false)]);
    // The stream ends, and they stay.
    world.fail(1, Ended::ByGateway);
    assert_eq!(world.gateways().len(), 2);
    world.registry.remove_client(&nat(), "u1");
    assert_eq!((world.gateways(), world.registration()), (vec![], Some(Err(NotRegistered::NotAClient))));
}

#[test]
fn a_gateway_leaves_when_it_drains_and_is_gone() {
    let mut world = World::new([1, 2]);
    world.register(1);
    world.answer(2, &[], State::Draining);
    assert_eq!(world.gateways(), [(address(1), false), (address(2), true)], "as it says");
    let ending = GatewayEndpoint { ready: false, terminating: true, ..ready(1) };
    world.shown.insert("g1".to_owned(), ending);
    assert!(world.show());
    assert_eq!(world.gateways(), [(address(1), true), (address(2), true)], "as the API server says");
    world.shown.insert("g1".to_owned(), GatewayEndpoint { serving: false, ..ending });
    world.show();
    assert_eq!(world.gateways(), [(address(2), true)]);
    world.shown.remove("g2");
    assert!(world.show() && !world.show());
    assert_eq!(world.gateways(), []);
}

#[test]
fn gateways_that_do_not_answer_leave_unless_all_would() {
    let mut world = World::new([1, 2]);
    world.register(1);
    world.register(2);
    world.echo(&[1, 2]);
    for _ in 0..4 {
        world.echo(&[1]);
    }
    assert_eq!(world.gateways(), [(address(1), false), (address(2), true)]);
    for _ in 0..3 {
        world.echo(&[1]);
    }
    assert_eq!(world.gateways(), [(address(1), false)]);
    for _ in 0..4 {
        world.echo(&[]);
    }
    assert_eq!(world.gateways().len(), 2);
    for _ in 0..3 {
        world.echo(&[2]);
    }
    assert_eq!(world.gateways(), [(address(2), false)]);
}

/// The kernel of such a gateway forwards: flows that it has may go on, and would end elsewhere.
#[test]
fn a_gateway_that_is_unhealthy_gets_no_new_flows_unless_all_would() {
    let mut world = World::new([1, 2]);
    world.register(1);
    world.answer(2, &[], State::Unhealthy);
    assert_eq!(world.gateways(), [(address(1), false), (address(2), true)]);
    world.say(1, State::Unhealthy);
    assert_eq!(world.gateways(), [(address(1), false), (address(2), false)], "none is better");
    world.say(2, State::Ready);
    assert_eq!(world.gateways(), [(address(2), false), (address(1), true)]);
    world.say(2, State::Draining);
    assert_eq!(world.gateways(), [(address(1), false), (address(2), true)], "one that drains takes none");
}

#[test]
fn gateways_that_refuse_connections_are_coils_only_if_none_ever_registered() {
    let mut world = World::new([1, 2]);
    let refused = || Ended::Refused(5556);
    world.fail(1, refused());
    assert_eq!((world.gateways(), world.registration()), (vec![], None));
    world.fail(2, refused());
    assert_eq!((world.next_hop(), world.registration()), (NextHop::Service, Some(Ok(()))));
    // A third one that is starting changes nothing; one that registers does.
    world.shown.insert("g3".to_owned(), GatewayEndpoint { ready: false, serving: false, ..ready(3) });
    world.show();
    world.fail(3, refused());
    assert_eq!(world.next_hop(), NextHop::Service);
    world.shown.insert("g3".to_owned(), ready(3));
    world.show();
    assert_eq!(world.gateways(), []);
    world.register(3);
    assert_eq!(world.gateways(), [(address(3), false)]);
    world.fail(3, refused());
    assert_eq!(world.gateways(), [(address(3), false)]);
    // Back to Coil's.
    world.shown.remove("g3");
    world.show();
    assert_eq!(world.next_hop(), NextHop::Service);
}

#[test]
fn a_gateway_that_is_not_ready_and_refuses_is_not_taken_for_one_of_coils() {
    let mut world = World::new([]);
    world.shown.insert("g1".to_owned(), GatewayEndpoint { ready: false, ..ready(1) });
    world.show();
    world.fail(1, Ended::Refused(5556));
    assert_eq!(world.gateways(), []);
    assert_eq!(world.registry.not_registered(&nat(), "u1"), NotRegistered::NoGateway);
}

#[test]
fn why_a_client_is_not_registered_is_said() {
    let reason = |world: &World| world.registry.not_registered(&nat(), "u1").reason().to_owned();
    let mut registry = Registry::default();
    registry.add_client(&nat(), client(1));
    assert_eq!(registry.not_registered(&nat(), "u1").reason(), "EndpointSlicesUnknown");
    assert_eq!(reason(&World::new([])), "NoGateway");
    let mut world = World::new([1, 2]);
    assert_eq!(reason(&world), "NoGatewayAnswers");
    world.fail(1, Ended::Token("403".to_owned()));
    assert_eq!(reason(&world), "TokenUnavailable");
    world.now += Duration::from_secs(1);
    world.answer(1, &["u1"], State::Ready);
    assert_eq!(
        (world.registration(), reason(&world)),
        (None, "NoGatewayAnswers".to_owned()),
        "one may take it"
    );
    world.answer(2, &["u1"], State::Ready);
    let refusal = Refusal::new("No", "m");
    assert_eq!(world.registration(), Some(Err(NotRegistered::Refused(refusal))));
    assert_eq!(
        Refusal::new("é\n", "a\nb"),
        Refusal { reason: "Refused".to_owned(), message: "ab".to_owned() }
    );
}

/// A restart of the node program changes nothing for running pods before it knows better.
#[test]
fn the_way_of_clients_from_before_is_unknown_until_all_gateways_have_answered() {
    let start = |gateways: &[u8]| {
        let mut world = World::new([]);
        world.registry = Registry::default();
        assert!(world.registry.set_clients([(nat(), vec![client(1)])].into(), world.now));
        assert!(!world.registry.set_clients([(nat(), vec![client(1)])].into(), world.now));
        world.now += Duration::from_secs(3600);
        world.registry.settle(world.now);
        assert_eq!(world.next_hop(), NextHop::Unknown, "without an API server");
        world.shown = gateways.iter().map(|number| (format!("g{number}"), ready(*number))).collect();
        world.show();
        world
    };
    assert_eq!(start(&[]).gateways(), []);
    let mut world = start(&[1, 2]);
    assert_eq!(world.next_hop(), NextHop::Unknown);
    world.register(1);
    assert_eq!(world.next_hop(), NextHop::Unknown, "flows through the other one would be lost");
    world.register(2);
    assert_eq!(world.gateways().len(), 2);
    let mut world = start(&[1, 2]);
    world.register(1);
    world.fail(2, Ended::NoAnswer);
    assert_eq!(world.next_hop(), NextHop::Unknown, "an attempt that failed says nothing of its flows");
    world.now += Duration::from_secs(1);
    world.register(2);
    assert_eq!(world.gateways().len(), 2);
    let mut world = start(&[1, 2]);
    world.fail(1, Ended::Unreachable("no route".to_owned()));
    world.fail(2, Ended::Token("timeout".to_owned()));
    assert_eq!(world.next_hop(), NextHop::Unknown, "without gateways, its routes would refuse packets");
    let mut world = start(&[1, 2]);
    world.register(1);
    world.fail(2, Ended::NoAnswer);
    world.now += SETTLE;
    assert!(world.registry.settle(world.now));
    assert_eq!(world.gateways(), [(address(1), false)]);
    let mut world = start(&[1]);
    assert!(!world.registry.settle(world.now + SETTLE / 2));
    assert!(world.registry.settle(world.now + SETTLE));
    assert_eq!(world.gateways(), []);
    let mut world = start(&[1]);
    world.fail(1, Ended::Refused(5556));
    assert_eq!(world.next_hop(), NextHop::Service);
}

#[test]
fn a_client_that_was_added_stays_until_the_desired_state_has_had_it() {
    let mut world = World::new([1]);
    let empty = BTreeMap::new;
    assert!(!world.registry.set_clients(empty(), world.now));
    assert!(!world.registry.set_clients([(nat(), vec![client(1)])].into(), world.now));
    assert!(world.registry.set_clients(empty(), world.now));
    assert_eq!(world.registration(), Some(Err(NotRegistered::NotAClient)));
    assert_eq!(world.registry.in_use(), BTreeSet::new());
}

#[test]
fn each_gateway_with_clients_has_one_task() {
    let mut world = World::new([1, 2]);
    let tasks = world.registry.start_tasks();
    assert_eq!((tasks.len(), world.registry.start_tasks().len()), (2, 0));
    let old = world.id(1);
    let gone = world.shown.remove("g1").unwrap();
    world.show();
    assert_eq!(world.registry.poll(&old, world.now), Poll::Gone);
    world.shown.insert("g1".to_owned(), gone);
    world.show();
    assert_eq!(world.registry.poll(&old, world.now), Poll::Gone, "the task of another one");
    assert_eq!(world.registry.start_tasks(), [world.id(1)]);
    world.register(2);
    world.registry.remove_client(&nat(), "u1");
    assert_eq!(world.registry.poll(&world.id(1), world.now), Poll::Gone);
    // It still has to be told that the client is gone.
    assert!(matches!(world.registry.poll(&world.id(2), world.now), Poll::Step(Step::Send(_))));
}

#[test]
fn a_client_uses_as_many_gateways_as_fit() {
    let gateway =
        |number: u8, is_draining| (Target { address: address(number), is_draining }, Condition::Works);
    let many: Vec<_> = (0..40).map(|number| gateway(number, number < 20)).collect();
    let kept = usable(many);
    assert_eq!(kept.len(), fairlead_api::fou::MAX_GATEWAYS);
    assert_eq!(kept.iter().filter(|it| !it.is_draining).count(), 20);
}

#[test]
fn one_in_doubt_keeps_its_flows_and_a_lost_one_does_not_unless_no_other_works() {
    let target = |number: u8, is_draining| Target { address: address(number), is_draining };
    let of = |conditions: [Condition; 3]| {
        let gateways = (1..).zip(conditions).map(|(number, condition)| (target(number, false), condition));
        usable(gateways.collect())
    };
    let (works, doubtful, lost) = (Condition::Works, Condition::Doubtful, Condition::Lost);
    assert_eq!(of([works, doubtful, lost]), [target(1, false), target(2, true)]);
    assert_eq!(of([doubtful, doubtful, lost]), [1, 2, 3].map(|number| target(number, false)));
}

#[test]
fn a_gateway_is_told_nothing_before_it_is_known_which_clients_there_are_from_before_the_start() {
    let mut world = World { registry: Registry::default(), now: Instant::now(), shown: BTreeMap::new() };
    world.registry.expect_clients(BTreeSet::from([nat()]));
    world.shown.insert("g1".to_owned(), ready(1));
    world.show();
    // A pod starts, before the running ones are known.
    world.registry.add_client(&nat(), client(2));
    assert_eq!(world.registry.start_tasks(), [world.id(1)]);
    assert_eq!(world.answer(1, &[], State::Ready), Vec::<Vec<String>>::new());
    world.registry.set_clients(BTreeMap::from([(nat(), vec![client(1)])]), world.now);
    assert_eq!(world.answer(1, &[], State::Ready), [["u1", "u2"]]);
}

#[test]
fn a_gateway_learns_that_the_last_client_went_while_no_program_ran() {
    let mut world = World { registry: Registry::default(), now: Instant::now(), shown: BTreeMap::new() };
    world.registry.expect_clients(BTreeSet::from([nat()]));
    world.shown.insert("g1".to_owned(), ready(1));
    world.show();
    assert_eq!(world.registry.start_tasks(), [world.id(1)]);
    assert!(!world.registry.set_clients(BTreeMap::new(), world.now), "none, as before");
    assert_eq!(world.answer(1, &[], State::Ready), [Vec::<String>::new()]);
    // One that comes later never had clients.
    world.shown.insert("g2".to_owned(), ready(2));
    world.show();
    assert_eq!(world.registry.start_tasks(), []);
}
