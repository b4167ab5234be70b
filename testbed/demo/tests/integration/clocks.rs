//! Handshakes while the wall clocks of nodes differ: WireGuard's initiations have a time stamp (TAI64N), and a peer refuses one that is not
//! later than all before (WireGuard paper, 5.1).

use std::time::{Duration, Instant};

use crate::outage::{gaps_are_within, loses_nothing, mesh, node, peer, resumes, tcp, udp};
use anyhow::{Context as _, Result, ensure};
use fairlead_demo::World;
use fairlead_demo::judge::counters;
use testbed_lab::traffic::Flow;

const START: Duration = Duration::from_secs(60);
/// Longer than the time after which either side renews a session with traffic: 120 s who started it, 165 s the other one.
const RENEWED: Duration = Duration::from_secs(190);
/// Time for the answer to a handshake, also on a busy machine.
const ANSWERED: Duration = Duration::from_secs(10);
/// Longest pause of packets.
const PAUSE: Duration = Duration::from_secs(1);
/// As in `failures_node.rs`: its peers refuse its handshakes, until they are asked to start one.
const RESTARTED_IN_THE_PAST: Duration = Duration::from_secs(30);

/// Handshake messages of home-1: initiations sent, answers got, initiations got, answers sent.
fn handshakes(world: &World) -> [u64; 4] {
    let of = |chain: &str| -> [u64; 2] {
        let command = format!("nft -j list chain inet judge {chain}");
        counters(&node(world, "home-1").host.shell(&command).unwrap()).unwrap().try_into().unwrap()
    };
    let ([sent, answers], [answered, got]) = (of("out"), of("in"));
    [sent, answered, got, answers]
}

/// Handshake messages are known by their length, and the type in their first four bytes (WireGuard paper, 5.4).
fn count_handshakes(world: &World) {
    let rule = |chain: &str, length: u16, kind: u8| {
        format!("nft add rule inet judge {chain} udp length {length} @th,64,32 0x{kind:02x}000000 counter\n")
    };
    let script = [
        "nft add table inet judge\n".to_owned(),
        "nft 'add chain inet judge out { type filter hook output priority 300; }'\n".to_owned(),
        "nft 'add chain inet judge in { type filter hook input priority 300; }'\n".to_owned(),
        rule("out", 156, 1),
        rule("out", 100, 2),
        rule("in", 100, 2),
        rule("in", 156, 1),
    ];
    node(world, "home-1").host.shell(&script.concat()).unwrap();
}

/// Differences of the counters between two readings; 0 where one has become smaller.
fn since(before: [u64; 4], now: [u64; 4]) -> [u64; 4] {
    let mut difference = now;
    difference.iter_mut().zip(before).for_each(|(now, before)| *now = now.saturating_sub(before));
    difference
}

/// Waits until all initiations of home-1 since `before` are answered, and perhaps one from just before: those of sessions that only keepalives go through are sent when the
/// next one is due, also while this looks.
fn all_answered(world: &World, before: [u64; 4]) -> [u64; 2] {
    let deadline = Instant::now() + ANSWERED;
    loop {
        let [sent, answered, ..] = since(before, handshakes(world));
        if answered > 0 && answered >= sent {
            return [sent, answered];
        }
        assert!(Instant::now() < deadline, "{sent} sent, {answered} answered");
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// Waits until home-1 has a session with cloud-1 that is younger than `from`, and returns its age.
fn renewed(world: &World, from: Instant) -> Duration {
    let is_younger = |world: &World| -> Result<Duration> {
        let seen = peer(node(world, "cloud-1"), "home-1").context("no such peer")?;
        let age = seen["handshakeAgeSeconds"].as_f64().context("no handshake")?;
        let elapsed = from.elapsed();
        ensure!(age + 0.5 < elapsed.as_secs_f64(), "{age} s old, and {elapsed:?} have passed");
        Ok(elapsed)
    };
    let deadline = Instant::now() + RENEWED;
    loop {
        match is_younger(world) {
            Ok(elapsed) => return elapsed,
            Err(error) => assert!(Instant::now() < deadline, "not renewed: {error:#}"),
        }
        std::thread::sleep(Duration::from_millis(500));
    }
}

/// The clock of home-1 goes back an hour while its program runs: its handshakes are accepted as before, because time stamps go on by the
/// clock that only runs forward. A program that starts with the clock behind has its handshakes refused; its peers are asked to start one,
/// and go on doing so, because who started a session renews it.
#[test]
fn sessions_are_renewed_while_clocks_differ_by_an_hour() {
    let mut world = mesh();
    count_handshakes(&world);
    for name in ["cloud-1", "home-1"] {
        let node = world.node(name).unwrap();
        node.set_clock("+0").unwrap();
        node.has_own_clock = true;
        // Its successor starts the sessions.
        node.upgrade(START).unwrap();
    }
    let flows = [
        udp(&world, "home-1", "cloud-1"),
        udp(&world, "cloud-1", "home-1"),
        tcp(&world, "home-1", "cloud-1"),
        udp(&world, "home-1", "office-2"),
    ];
    std::thread::sleep(Duration::from_secs(2));
    let from = Instant::now();
    let before = handshakes(&world);
    node(&world, "home-1").set_clock("-1h").unwrap();
    let what = "the clock of home-1 went back an hour while its program runs";
    let after = renewed(&world, from);
    let [sent, answered] = all_answered(&world, before);
    println!("{what}: renewed after {after:.1?}; {sent} initiations of home-1, {answered} of them answered");
    loses_nothing(what, &flows, from);
    gaps_are_within(what, &flows, from, PAUSE);

    upgraded(&mut world, &flows);
    restarted(&mut world, &flows);
}

/// The successor starts an hour behind the time stamps of its predecessor, which carries packets until it has sessions.
fn upgraded(world: &mut World, flows: &[Flow]) {
    let what = "an upgrade of home-1, its clock an hour behind";
    let mark = Instant::now();
    let before = handshakes(world);
    world.node("home-1").unwrap().upgrade(START).unwrap();
    std::thread::sleep(Duration::from_secs(2));
    loses_nothing(what, flows, mark);
    gaps_are_within(what, flows, mark, PAUSE);
    let [sent, answered, got, answers] = since(before, handshakes(world));
    println!("{what}: {answered} of {sent} initiations answered; {answers} of {got} answered by it");
    // Its predecessor, whose time stamps are accepted, renews sessions that have come of age meanwhile.
    assert!(answered < sent && answers > 0, "its handshakes are not those that are refused");
}

fn restarted(world: &mut World, flows: &[Flow]) {
    let what = "a restart of home-1, its clock an hour behind";
    let mark = Instant::now();
    let before = handshakes(world);
    let home = world.node("home-1").unwrap();
    home.kill().unwrap();
    home.start().unwrap();
    resumes(what, flows, mark, mark, RESTARTED_IN_THE_PAST);
    let [sent, answered, got, answers] = since(before, handshakes(world));
    println!("{what}: {answered} of {sent} initiations answered; {answers} of {got} answered by it");

    let what = "sessions of a program that started an hour behind are renewed";
    let from = Instant::now();
    let before = handshakes(world);
    let after = renewed(world, from);
    std::thread::sleep(Duration::from_secs(2));
    let [sent, answered, got, answers] = since(before, handshakes(world));
    assert!(answers > 0, "home-1 renewed them itself");
    println!(
        "{what}: after {after:.1?}; {answered} of {sent} initiations answered; {answers} of {got} answered by it"
    );
    loses_nothing(what, flows, from);
    gaps_are_within(what, flows, from, PAUSE);
}
