//! Failures of the network between the sites, as users see them.

use std::time::{Duration, Instant};

use crate::outage::{loses_nothing, mesh, node, peer, resumes, tcp, udp};
use fairlead_demo::World;
use testbed_lab::Router;
use testbed_lab::traffic::Flow;

/// Longest time until tunnels work again after a router or its cable is back: UDP works at once, TCP after 2 to 3 s.
const ROUTER_BACK: Duration = Duration::from_secs(30);
/// Longest time until tunnels work again after a node is back: it takes 6 to 8 s.
const NODE_BACK: Duration = Duration::from_secs(80);
/// Longest time until a node behind a router with new mappings reaches a node with a public address: it takes 0.1 s.
const OUTWARDS: Duration = Duration::from_secs(1);
/// Longest time until a peer of such a node, and a peer behind another NAT, reaches it while they exchange packets: it takes 1.6 s, and 2
/// to 3 s (TCP up to 4.4 s). An idle session would wait for a keepalive (25 s), as one would without probes.
const INWARDS: Duration = Duration::from_secs(15);

/// Traffic by the sites it needs.
struct Flows {
    /// Flow from home to the cloud over UDP: the node at home sends first.
    outwards: [Flow; 1],
    /// The rest of what goes through the router of home.
    home: Vec<Flow>,
    /// Inside home.
    inside_home: Vec<Flow>,
    /// Between and inside the others.
    elsewhere: Vec<Flow>,
}

impl Flows {
    fn start(world: &World) -> Self {
        Self {
            outwards: [udp(world, "home-1", "cloud-1")],
            home: vec![
                udp(world, "cloud-2", "home-2"),
                udp(world, "home-1", "office-2"),
                udp(world, "office-1", "home-2"),
                tcp(world, "home-1", "cloud-2"),
            ],
            inside_home: vec![udp(world, "home-1", "home-2"), tcp(world, "home-2", "home-1")],
            elsewhere: vec![
                udp(world, "cloud-1", "office-1"),
                udp(world, "cloud-1", "cloud-2"),
                udp(world, "office-1", "office-2"),
                tcp(world, "office-2", "cloud-1"),
            ],
        }
    }
}

fn router(world: &World, site: &str) -> Router {
    world.sites.iter().find(|one| one.name() == site).unwrap().router().clone()
}

/// The router of home forgets its mappings and uses other ports.
///
/// Stops: what comes to home from outside, and traffic between home and a site behind another NAT, until the silence is noticed and
/// the place is tried where others see the node now. Goes on: what home sends to the cloud, traffic inside home and everywhere else.
/// Everything resumes by itself, and established connections live on.
#[test]
fn a_router_that_forgets_its_mappings_is_found_again() {
    at_home("NAT rebind at home", |router| router.rebind().unwrap());
}

/// Home's public address becomes another, as after a night's reconnection. The nodes' connections to the API server
/// break as well.
///
/// The same stops and goes on as when the router forgets its mappings.
#[test]
fn a_router_that_gets_another_address_is_found_again() {
    at_home("another public address for home", |router| {
        router.change_address().unwrap();
    });
}

fn at_home(what: &str, change: impl FnOnce(&Router)) {
    let world = mesh();
    let flows = Flows::start(&world);
    // TCP waits twice as long before each repetition, so this one may be late.
    let patient = [tcp(&world, "office-2", "home-2")];
    std::thread::sleep(Duration::from_secs(1));
    let mark = Instant::now();
    change(&router(&world, "home"));
    resumes(what, &flows.outwards, mark, mark, OUTWARDS);
    resumes(what, &flows.home, mark, mark, INWARDS);
    resumes(what, &patient, mark, mark, INWARDS);
    loses_nothing(what, &flows.inside_home, mark);
    loses_nothing(what, &flows.elsewhere, mark);
}

/// Cables are pulled and plugged in again: home's router, one node, the cloud's router.
///
/// Stops: traffic over that cable. Goes on: all other traffic, also that of a site with itself while it is cut off, and
/// that of home with the office while the API server is cut off. Everything resumes by itself, established connections
/// too, and `fairlead status` says why a peer is not up.
#[test]
fn a_cable_pulled_and_plugged_in_again_leaves_nothing_broken() {
    let world = mesh();
    let flows = Flows::start(&world);
    std::thread::sleep(Duration::from_secs(1));
    the_router_is_dead_for_a_while(&world, &flows);
    one_node_is_cut_off(&world, &flows);
    the_cloud_is_cut_off(&world, &flows);
}

/// Home is off the Internet, not long enough for its peers to look for it elsewhere.
fn the_router_is_dead_for_a_while(world: &World, flows: &Flows) {
    let what = "home's router dead for 8 s";
    let mark = Instant::now();
    router(world, "home").partition().unwrap();
    std::thread::sleep(Duration::from_secs(8));
    router(world, "home").heal().unwrap();
    let healed = Instant::now();
    resumes(what, &flows.outwards, mark, healed, ROUTER_BACK);
    resumes(what, &flows.home, mark, healed, ROUTER_BACK);
    loses_nothing(what, &flows.inside_home, mark);
    loses_nothing(what, &flows.elsewhere, mark);
}

/// The cable of office-2 is pulled. No other node is disturbed, and its peers say why it does not answer.
fn one_node_is_cut_off(world: &World, flows: &Flows) {
    let what = "office-2 cut off";
    let mark = Instant::now();
    let cut = node(world, "office-2");
    cut.host.partition().unwrap();
    let reason = world
        .wait_for(Duration::from_secs(100), |world| {
            let seen = peer(node(world, "home-1"), "office-2").unwrap_or_default();
            anyhow::ensure!(seen["state"] != "up", "still up: {seen}");
            Ok(seen["reason"].to_string())
        })
        .unwrap();
    println!("{what}: home-1 says after {:.1} s: {reason}", mark.elapsed().as_secs_f64());
    cut.host.heal().unwrap();
    let healed = Instant::now();
    resumes(what, &flows.outwards, mark, healed, NODE_BACK);
    resumes(what, &flows.home, mark, healed, NODE_BACK);
    resumes(what, &flows.elsewhere, mark, healed, NODE_BACK);
    loses_nothing(what, &flows.inside_home, mark);
    loses_nothing(what, &flows.elsewhere[..2], mark);
}

/// The site with the API server is cut off: home and office go on without both.
fn the_cloud_is_cut_off(world: &World, flows: &Flows) {
    let what = "the cloud cut off for 5 s";
    let between = [udp(world, "home-2", "office-1"), tcp(world, "office-1", "home-1")];
    std::thread::sleep(Duration::from_millis(500));
    let mark = Instant::now();
    router(world, "cloud").partition().unwrap();
    std::thread::sleep(Duration::from_secs(5));
    router(world, "cloud").heal().unwrap();
    let healed = Instant::now();
    resumes(what, &flows.outwards, mark, healed, ROUTER_BACK);
    resumes(what, &flows.home, mark, healed, ROUTER_BACK);
    resumes(what, &flows.elsewhere, mark, healed, ROUTER_BACK);
    loses_nothing(what, &between, mark);
    loses_nothing(what, &flows.inside_home, mark);
}
