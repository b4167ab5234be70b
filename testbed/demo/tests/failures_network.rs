//! What users suffer when the network between the sites fails.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::indexing_slicing,
    clippy::print_stdout,
    reason = "helpers of tests may panic as tests do"
)]

mod outage;

use std::time::{Duration, Instant};

use fairlead_demo::World;
use fairlead_demo::traffic::Flow;
use outage::{loses_nothing, mesh, node, peer, report, resumes, tcp, udp};
use testbed_lab::Router;

/// Traffic by the sites it needs.
struct Flows {
    /// Through the router of home.
    home: Vec<Flow>,
    /// Inside home.
    inside_home: Vec<Flow>,
    /// Between and inside the others.
    elsewhere: Vec<Flow>,
}

impl Flows {
    fn start(world: &World) -> Self {
        Self {
            home: vec![
                udp(world, "home-1", "cloud-1"),
                udp(world, "cloud-2", "home-2"),
                udp(world, "home-1", "office-2"),
                udp(world, "office-1", "home-2"),
                tcp(world, "home-1", "cloud-2"),
                tcp(world, "office-2", "home-2"),
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

/// One thing after the other goes wrong at the edge of a site, and heals or not.
///
/// Stops: traffic through the router that fails. Goes on: traffic inside that site and everywhere else. Everything
/// resumes by itself, and established connections live on.
#[test]
fn routers_die_forget_and_move_and_traffic_resumes_by_itself() {
    let world = mesh();
    let flows = Flows::start(&world);
    std::thread::sleep(Duration::from_secs(1));
    the_router_forgets_and_uses_other_ports(&world, &flows);
    the_router_gets_another_address(&world, &flows);
    the_router_is_dead_for_a_while(&world, &flows);
    one_node_is_cut_off(&world, &flows);
    the_cloud_is_cut_off(&world, &flows);
}

/// Peers see home at other ports. The cloud learns that from the first packet; a peer behind another NAT is cut off
/// until it notices the silence and tries where the cloud sees home now.
fn the_router_forgets_and_uses_other_ports(world: &World, flows: &Flows) {
    let what = "NAT rebind at home";
    let mark = Instant::now();
    router(world, "home").rebind().unwrap();
    resumes(what, &flows.home, mark, mark);
    loses_nothing(what, &flows.inside_home, mark);
    loses_nothing(what, &flows.elsewhere, mark);
}

/// As after a night's reconnection: home's public address is another. The nodes' connections to the API server break
/// as well.
fn the_router_gets_another_address(world: &World, flows: &Flows) {
    let what = "another public address for home";
    let mark = Instant::now();
    router(world, "home").change_address().unwrap();
    resumes(what, &flows.home, mark, mark);
    loses_nothing(what, &flows.inside_home, mark);
    loses_nothing(what, &flows.elsewhere, mark);
}

/// Home is off the Internet for long enough that peers look for it elsewhere.
fn the_router_is_dead_for_a_while(world: &World, flows: &Flows) {
    let what = "home's router dead for 8 s";
    let mark = Instant::now();
    router(world, "home").partition().unwrap();
    std::thread::sleep(Duration::from_secs(8));
    router(world, "home").heal().unwrap();
    let healed = Instant::now();
    resumes(what, &flows.home, mark, healed);
    loses_nothing(what, &flows.inside_home, mark);
    loses_nothing(what, &flows.elsewhere, mark);
}

/// The cable of office-2 is pulled. Nobody else is disturbed, and its peers say why it does not answer.
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
    resumes(what, &flows.home, mark, healed);
    resumes(what, &flows.elsewhere, mark, healed);
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
    resumes(what, &flows.home, mark, healed);
    resumes(what, &flows.elsewhere, mark, healed);
    loses_nothing(what, &between, mark);
    report(what, &flows.inside_home, mark);
}
