//! The registrar against servers on loopback addresses, which speak the protocol over TLS.

mod figures;
pub(crate) mod gateway;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Mutex;
use std::time::Duration;

use fairlead_cluster::subsystem::Supervisor;
use fairlead_egress::endpoints::{Endpoints, GatewayEndpoint};
use fairlead_wire::egress::{Hold, State};
use futures::FutureExt as _;
use prometheus_client::registry::Registry as Metrics;

use self::gateway::{Behaviour, Fake};
use super::token::{Issued, TokenError};
use super::*;

const LIMIT: Duration = Duration::from_secs(20);

fn nat() -> EgressName {
    EgressName { namespace: "internet-egress".to_owned(), name: "nat".to_owned() }
}

fn client(number: u16) -> Client {
    let [high, low] = number.to_be_bytes();
    Client {
        uid: format!("u{number}"),
        namespace: "shop".to_owned(),
        name: format!("web-{number}"),
        addresses: [IpAddr::from([10, 1, high, low]), IpAddr::from([0xfd00, 0, 0, 0, 0, 0, 0, number])]
            .into_iter()
            .collect(),
    }
}

/// Tokens that name their audience, as a TokenReview would.
fn tokens(lifetime: Duration) -> RequestToken {
    Arc::new(move |audience| async move { Ok(Issued { token: audience, lifetime }) }.boxed())
}

struct Node {
    registrar: Registrar,
    gateways: BTreeMap<String, GatewayEndpoint>,
    supervisor: Supervisor,
}

impl Node {
    fn new(port: u16, request: RequestToken) -> Self {
        let metrics = RegistrarMetrics::register(&mut Metrics::default());
        let registrar = Registrar::new(request, port, metrics);
        let mut supervisor = Supervisor::default();
        let subsystem = supervisor.subsystem("egress");
        subsystem.spawn("egress registrations", run(Arc::clone(&registrar.shared)));
        subsystem.spawn("egress gauges", gauges(Arc::clone(&registrar.shared)));
        Self { registrar, gateways: BTreeMap::new(), supervisor }
    }

    fn of(gateways: &[&Fake]) -> Self {
        Self::with_tokens(gateways, tokens(Duration::from_secs(3600)))
    }

    fn with_tokens(gateways: &[&Fake], request: RequestToken) -> Self {
        let mut node = Self::new(gateways[0].address.port(), request);
        for gateway in gateways {
            node.show(
                gateway.address.ip(),
                GatewayEndpoint { ready: true, serving: true, ..GatewayEndpoint::default() },
            );
        }
        node
    }

    fn show(&mut self, address: IpAddr, endpoint: GatewayEndpoint) {
        let addresses = [address].into_iter().collect();
        self.gateways.insert(address.to_string(), GatewayEndpoint { addresses, ..endpoint });
        let endpoints = Endpoints::from([(nat(), self.gateways.clone())]);
        let changed = self.registrar.shared.registry().set_endpoints(endpoints, Instant::now());
        self.registrar.shared.clients_changed(changed);
    }

    fn set(&self, numbers: impl IntoIterator<Item = u16>) {
        self.registrar.set_clients([(nat(), numbers.into_iter().map(client).collect())].into());
    }

    async fn registered(&self, number: u16) -> Result<(), NotRegistered> {
        self.registrar.registered(&nat(), &client(number).uid).await
    }

    fn next_hop(&self, number: u16) -> NextHop {
        self.registrar.next_hop(&nat(), &client(number).uid)
    }

    /// The addresses, and whether they are draining.
    fn gateways(&self, number: u16) -> Vec<(IpAddr, bool)> {
        match self.next_hop(number) {
            NextHop::Gateways(all) => all.into_iter().map(|it| (it.address, it.is_draining)).collect(),
            _ => Vec::new(),
        }
    }
}

/// A registrar that knows one gateway, where it listens.
pub(crate) fn of_gateway(
    egress: EgressName,
    uid: &str,
    gateway: &Fake,
    supervisor: &mut Supervisor,
) -> Registrar {
    let metrics = RegistrarMetrics::register(&mut Metrics::default());
    let registrar = Registrar::new(tokens(Duration::from_secs(3600)), gateway.address.port(), metrics);
    let subsystem = supervisor.subsystem("egress");
    subsystem.spawn("egress registrations", run(Arc::clone(&registrar.shared)));
    let addresses = [gateway.address.ip()].into_iter().collect();
    let endpoint = GatewayEndpoint { addresses, ready: true, serving: true, terminating: false };
    let endpoints = Endpoints::from([(egress, [(uid.to_owned(), endpoint)].into())]);
    let changed = registrar.shared.registry().set_endpoints(endpoints, Instant::now());
    registrar.shared.clients_changed(changed);
    registrar
}

async fn until(what: &str, is_true: impl Fn() -> bool) {
    let polled = async {
        while !is_true() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(LIMIT, polled).await.unwrap_or_else(|_| panic!("{what}"));
}

fn names(numbers: impl IntoIterator<Item = u16>) -> Vec<String> {
    let mut names: Vec<String> = numbers.into_iter().map(|number| client(number).uid).collect();
    names.sort();
    names
}

#[tokio::test]
async fn clients_are_registered_and_changes_follow() {
    let gateway = Fake::start("127.0.0.1:0").await;
    let node = Node::of(&[&gateway]);
    node.registrar.add_client(&nat(), client(1));
    node.registered(1).await.unwrap();
    assert_eq!(node.gateways(1), [(gateway.address.ip(), false)]);
    {
        let seen = gateway.state();
        assert_eq!(seen.hellos, [gateway.audience(&nat())], "the token is for the key of the certificate");
        let sent = &seen.clients[&client(1).uid];
        assert_eq!((sent.namespace.as_str(), sent.name.as_str()), ("shop", "web-1"));
        assert_eq!(sent.addresses.iter().map(Vec::len).collect::<Vec<_>>(), [4, 16]);
    }
    let started = Instant::now();
    node.registrar.add_client(&nat(), client(2));
    node.registered(2).await.unwrap();
    println!("a second client was registered within {:?}", started.elapsed());
    node.registrar.remove_client(&nat(), &client(1).uid);
    until("removed", || gateway.clients() == names([2])).await;
    assert_eq!((gateway.state().all, node.gateways(1)), (1, vec![]));
}

#[tokio::test]
async fn after_a_restart_of_the_gateway_all_clients_are_sent_again_and_it_stays_in_use() {
    let mut gateway = Fake::start("127.0.0.1:0").await;
    let node = Node::of(&[&gateway]);
    node.set([1, 2]);
    until("registered", || node.gateways(1).len() == 1).await;
    let first = gateway.audience(&nat());
    gateway.stop().await;
    assert_eq!(node.gateways(1).len(), 1);
    node.set([2, 3]);
    sleep(Duration::from_millis(500)).await;
    assert_eq!(node.gateways(2).len(), 1, "registered before");
    assert_eq!(node.gateways(3).len(), 0, "never registered");
    gateway.restart().await;
    until("registered again", || gateway.clients() == names([2, 3]) && node.gateways(3).len() == 1).await;
    assert_ne!(gateway.audience(&nat()), first, "it has another key");
    assert_eq!(gateway.state().hellos, [gateway.audience(&nat())]);
}

#[tokio::test]
async fn refusals_of_all_gateways_are_returned_at_once_and_those_of_one_are_not() {
    let one = Fake::start("127.0.0.2:0").await;
    let two = Fake::start(&format!("127.0.0.3:{}", one.address.port())).await;
    for gateway in [&one, &two] {
        gateway.state().refuses = names([1]);
    }
    two.state().refuses.clear();
    let node = Node::of(&[&one, &two]);
    node.registrar.add_client(&nat(), client(1));
    node.registered(1).await.unwrap();
    two.state().refuses = names([2]);
    one.state().refuses = names([2]);
    let started = Instant::now();
    node.registrar.add_client(&nat(), client(2));
    let error = node.registered(2).await.unwrap_err();
    assert_eq!((error.reason(), started.elapsed() < REGISTERED), ("NotAllowed", true));
    assert!(error.to_string().contains("see allowedNamespaces"), "{error}");
    // As where an AddressBlock is news to the gateway.
    one.state().refuses.clear();
    node.registered(2).await.ok();
    until("taken later", || node.gateways(2).iter().any(|it| it.0 == one.address.ip())).await;
}

#[tokio::test]
async fn tokens_are_renewed_while_the_stream_lasts() {
    let gateway = Fake::start("127.0.0.1:0").await;
    let node = Node::with_tokens(&[&gateway], tokens(Duration::from_millis(500)));
    node.registrar.add_client(&nat(), client(1));
    node.registered(1).await.unwrap();
    until("three tokens", || gateway.state().hellos.len() >= 3).await;
    let seen = gateway.state();
    assert_eq!((seen.all, seen.connections), (1, 1));
}

#[tokio::test]
async fn without_a_token_the_reason_is_the_api_server_s() {
    let gateway = Fake::start("127.0.0.1:0").await;
    let node = Node::with_tokens(&[&gateway], Arc::new(|_| async { Err(TokenError::NotBound) }.boxed()));
    node.registrar.add_client(&nat(), client(1));
    let error = node.registered(1).await.unwrap_err();
    assert_eq!(error.reason(), "TokenUnavailable");
    assert!(error.to_string().contains("--bound-object-kind=Node"), "{error}");
}

#[tokio::test]
async fn a_gateway_that_rejects_the_token_is_asked_with_another_one() {
    let gateway = Fake::start("127.0.0.1:0").await;
    gateway.state().behaviour = Behaviour::Rejects;
    let node = Node::of(&[&gateway]);
    node.registrar.add_client(&nat(), client(1));
    let error = node.registered(1).await.unwrap_err();
    assert!(error.to_string().contains("does not accept this node"), "{error}");
    gateway.state().behaviour = Behaviour::Answers;
    until("registered", || node.gateways(1).len() == 1).await;
}

#[tokio::test]
async fn a_gateway_that_drains_says_so_and_so_does_the_api_server() {
    let gateway = Fake::start("127.0.0.1:0").await;
    let mut node = Node::of(&[&gateway]);
    node.registrar.add_client(&nat(), client(1));
    node.registered(1).await.unwrap();
    let address = gateway.address.ip();
    gateway.push(State::Draining);
    until("draining", || node.gateways(1) == [(address, true)]).await;
    gateway.push(State::Ready);
    until("ready", || node.gateways(1) == [(address, false)]).await;
    node.show(address, GatewayEndpoint { serving: true, terminating: true, ..GatewayEndpoint::default() });
    assert_eq!(node.gateways(1), [(address, true)]);
    node.show(address, GatewayEndpoint { terminating: true, ..GatewayEndpoint::default() });
    assert_eq!(node.gateways(1), []);
}

/// Nothing listens, as at Coil's gateways.
#[tokio::test]
async fn gateways_that_refuse_connections_are_left_to_the_service() {
    let mut gateway = Fake::start("127.0.0.1:0").await;
    gateway.stop().await;
    let mut node = Node::new(gateway.address.port(), tokens(LIMIT));
    node.registrar.add_client(&nat(), client(1));
    node.show(gateway.address.ip(), GatewayEndpoint::default());
    assert_eq!(node.registered(1).await.unwrap_err(), NotRegistered::NoGateway);
    assert_eq!(node.next_hop(1), NextHop::Gateways(Vec::new()), "it is starting");
    node.show(
        gateway.address.ip(),
        GatewayEndpoint { ready: true, serving: true, ..GatewayEndpoint::default() },
    );
    node.registered(1).await.unwrap();
    assert_eq!(node.next_hop(1), NextHop::Service);
    gateway.restart().await;
    until("replaced by ours", || node.gateways(1).len() == 1).await;
}

/// Hostile servers cost only their own connections, and the other gateway is used.
#[tokio::test]
async fn hostile_gateways_are_left_alone() {
    let good = Fake::start("127.0.0.20:0").await;
    let port = good.address.port();
    let mut gateways = vec![];
    for (number, behaviour) in Behaviour::HOSTILE.into_iter().enumerate() {
        let gateway = Fake::start(&format!("127.0.0.{}:{port}", 21 + number)).await;
        gateway.state().behaviour = behaviour;
        gateways.push(gateway);
    }
    let garbage = gateway::garbage(&format!("127.0.0.40:{port}")).await;
    let silent = gateway::silent(&format!("127.0.0.41:{port}")).await;
    let mut node = Node::of(&gateways.iter().chain([&good]).collect::<Vec<_>>());
    for address in [&garbage, &silent] {
        node.show(
            address.address.ip(),
            GatewayEndpoint { ready: true, serving: true, ..GatewayEndpoint::default() },
        );
    }
    let started = (Instant::now(), gateway::cpu_time());
    node.set((0..100).filter(|number| number % 2 == 0));
    node.registrar.add_client(&nat(), client(1));
    node.registered(1).await.unwrap();
    println!("registered beside hostile gateways within {:?}", started.0.elapsed());
    sleep(Duration::from_secs(8)).await;
    for number in [3, 5, 7] {
        node.registrar.add_client(&nat(), client(number));
        node.registered(number).await.unwrap();
        assert!(node.gateways(number).iter().any(|it| it.0 == good.address.ip()));
    }
    let cpu = gateway::cpu_time() - started.1;
    println!("{:?} of processor time in {:?}, servers included", cpu, started.0.elapsed());
    for gateway in &gateways {
        let seen = gateway.state();
        let (behaviour, connections) = (seen.behaviour, seen.connections);
        drop(seen);
        println!("{behaviour:?}: {connections} connections");
        assert!(connections < 12, "{behaviour:?}: {connections}");
    }
    let failed = |behaviour| {
        let gateway = gateways.iter().find(|it| it.state().behaviour == behaviour).unwrap();
        node.registrar.shared.registry().gateways_in_use().any(|(it, _)| {
            it.endpoint.addresses.iter().any(|address| address == gateway.address.ip())
                && it.session.failure().is_some()
        })
    };
    for behaviour in [Behaviour::Silent, Behaviour::Future, Behaviour::Huge] {
        assert!(failed(behaviour), "{behaviour:?}");
    }
    assert!(node.supervisor.health().liveness().is_ok());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hundred_gateways_with_many_clients_cost_little() {
    const CLIENTS: u16 = 250;
    let first = Fake::start("127.0.1.0:0").await;
    let mut gateways = vec![first];
    for number in 1..100 {
        gateways.push(Fake::start(&format!("127.0.1.{number}:{}", gateways[0].address.port())).await);
    }
    let node = Node::of(&gateways.iter().collect::<Vec<_>>());
    let started = (Instant::now(), gateway::cpu_time());
    node.set(0..CLIENTS);
    until("all registered", || gateways.iter().all(|it| it.state().clients.len() == usize::from(CLIENTS)))
        .await;
    println!(
        "100 × {CLIENTS}: {:?}, {:?} of processor time",
        started.0.elapsed(),
        gateway::cpu_time() - started.1
    );
    let messages: usize = gateways.iter().map(|it| it.state().messages).sum();
    assert_eq!(messages, 200, "a Hello and all clients each");
    let started = (Instant::now(), gateway::cpu_time());
    for number in CLIENTS..CLIENTS + 100 {
        node.registrar.add_client(&nat(), client(number));
        node.registered(number).await.unwrap();
    }
    until("all added", || gateways.iter().all(|it| it.state().clients.len() == usize::from(CLIENTS) + 100))
        .await;
    println!(
        "100 more, one by one: {:?}, {:?} of processor time",
        started.0.elapsed(),
        gateway::cpu_time() - started.1
    );
    assert_eq!(node.gateways(CLIENTS).len(), fairlead_api::fou::MAX_GATEWAYS);
    let idle = gateway::cpu_time();
    sleep(Duration::from_secs(2)).await;
    println!("idle for 2 s: {:?} of processor time", gateway::cpu_time() - idle);
}

/// Each request is answered at once, or never.
#[tokio::test]
async fn a_gateway_that_answers_no_echo_requests_is_not_used() {
    let one = Fake::start("127.0.0.2:0").await;
    let two = Fake::start(&format!("127.0.0.3:{}", one.address.port())).await;
    let mut node = Node::of(&[&one, &two]);
    let silent: Arc<Mutex<Option<IpAddr>>> = Arc::default();
    let (silenced, mut asked) = (Arc::clone(&silent), BTreeSet::new());
    let exchange = move |asking: Option<&BTreeSet<IpAddr>>| {
        let silent = *silenced.lock().unwrap();
        let asked = std::mem::replace(&mut asked, asking.cloned().unwrap_or_default());
        asked.into_iter().filter(|address| Some(*address) != silent).collect()
    };
    let probes = probes::run_with(Arc::clone(&node.registrar.shared), exchange);
    node.supervisor.subsystem("egress").spawn("egress probes", probes);
    node.registrar.add_client(&nat(), client(1));
    until("both", || node.gateways(1).len() == 2).await;
    sleep(Duration::from_millis(1500)).await;
    let mut changes = node.registrar.changes();
    changes.mark_unchanged();
    *silent.lock().unwrap() = Some(two.address.ip());
    let started = Instant::now();
    let doubted = [(one.address.ip(), false), (two.address.ip(), true)];
    until("without new flows", || node.gateways(1) == doubted).await;
    let took = started.elapsed();
    println!("without new flows after {took:?}");
    until("left", || node.gateways(1) == [(one.address.ip(), false)]).await;
    assert!(took > Duration::from_millis(900) && took < Duration::from_millis(2500), "{took:?}");
    assert!(changes.has_changed().unwrap());
    silent.lock().unwrap().take();
    until("back", || node.gateways(1).len() == 2).await;
}

fn hold(address: [u8; 4], term: u64, valid_milliseconds: u32) -> Hold {
    Hold { address: address.to_vec(), term, valid_milliseconds, settling: false }
}

/// A gateway on this node is heard without clients, before it is ready, and again after its program has ended.
#[tokio::test]
async fn a_gateway_on_this_node_says_what_it_holds() {
    let mut gateway = Fake::start("127.0.0.1:0").await;
    let mut node = Node::new(gateway.address.port(), tokens(Duration::from_secs(3600)));
    node.show(gateway.address.ip(), GatewayEndpoint::default());
    let uid = gateway.address.ip().to_string();
    node.registrar.set_clients(BTreeMap::new());
    sleep(Duration::from_millis(100)).await;
    assert_eq!(gateway.state().connections, 0, "nothing asks for it");
    node.registrar.set_local_gateways([(nat(), uid.clone())].into());
    until("connected", || gateway.state().all == 1).await;
    let held = |node: &Node| -> Vec<(IpAddr, u64)> {
        node.registrar.local_holds(Instant::now()).iter().map(|it| (it.address, it.term)).collect()
    };
    gateway.hold(vec![hold([192, 0, 2, 40], 3, 60_000), hold([192, 0, 2, 41], 1, 300)]);
    until("both", || held(&node).len() == 2).await;
    assert_eq!(held(&node)[0], (IpAddr::from([192, 0, 2, 40]), 3));
    until("the shorter one ends", || held(&node).len() == 1).await;
    gateway.push(State::Standby);
    until("standby", || held(&node).is_empty()).await;
    gateway.stop().await;
    sleep(Duration::from_millis(700)).await;
    gateway.restart().await;
    let started = Instant::now();
    until("connected again", || gateway.state().all == 1).await;
    println!("connected {:?} after the restart", started.elapsed());
    assert!(started.elapsed() < Duration::from_secs(2));
    gateway.hold(vec![hold([192, 0, 2, 40], 4, 60_000)]);
    until("held again", || held(&node) == [(IpAddr::from([192, 0, 2, 40]), 4)]).await;
    gateway.hold(vec![hold([192, 0, 2, 40], 4, 0)]);
    sleep(Duration::from_millis(100)).await;
    node.registrar.set_local_gateways(BTreeSet::new());
    assert!(held(&node).is_empty(), "it is not on this node any more");
}

/// The power of the holder is cut: it is silent, and another one says a greater term.
#[tokio::test]
async fn packets_leave_a_gateway_whose_addresses_another_one_holds() {
    let one = Fake::start("127.0.0.2:0").await;
    let two = Fake::start(&format!("127.0.0.3:{}", one.address.port())).await;
    let node = Node::of(&[&one, &two]);
    node.set([1]);
    until("registered", || node.gateways(1).len() == 2).await;
    two.push(State::Standby);
    let [first, second] = [&one, &two].map(|gateway| vec![(gateway.address.ip(), false)]);
    until("only the holder", || node.gateways(1) == first).await;
    one.hold(vec![hold([192, 0, 2, 40], 1, 60_000)]);
    two.hold_as(State::Standby, vec![hold([192, 0, 2, 40], 2, 60_000)]);
    sleep(Duration::from_millis(200)).await;
    assert_eq!(node.gateways(1), first, "the new holder is not ready for clients yet");
    two.hold(vec![hold([192, 0, 2, 40], 2, 60_000)]);
    until("only the new holder", || node.gateways(1) == second).await;
    // It drains, and the other one has not taken the address yet.
    one.push(State::Standby);
    two.push(State::Draining);
    sleep(Duration::from_millis(200)).await;
    assert_eq!(node.gateways(1), second, "new flows stay at a holder that drains");
    // Both hold an address now.
    two.hold(vec![hold([192, 0, 2, 40], 2, 60_000)]);
    one.hold(vec![hold([192, 0, 2, 41], 1, 60_000)]);
    until("both", || node.gateways(1).len() == 2).await;
    // During a hand-over no gateway holds an address: packets still go somewhere.
    one.push(State::Standby);
    two.push(State::Standby);
    sleep(Duration::from_millis(200)).await;
    assert!(!node.gateways(1).is_empty());
    node.registrar.add_client(&nat(), client(2));
    let error = node.registered(2).await.unwrap_err();
    assert_eq!(error.reason(), "NoSourceAddressHeld", "a pod does not start before it can send");
}

#[tokio::test]
async fn holds_that_cannot_be_are_against_the_protocol() {
    let gateway = Fake::start("127.0.0.1:0").await;
    let node = Node::of(&[&gateway]);
    node.set([1]);
    until("registered", || node.gateways(1).len() == 1).await;
    for held in [vec![Hold { address: vec![1; 5], ..Hold::default() }], vec![hold([192, 0, 2, 1], 1, 1); 300]]
    {
        let before = gateway.state().connections;
        gateway.hold(held);
        until("closed, and connected again", || gateway.state().connections > before).await;
        gateway.push(State::Ready);
        until("registered again", || gateway.state().all > 1 && node.gateways(1).len() == 1).await;
    }
}
