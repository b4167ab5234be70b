//! A live session changes its path, between nodes that have two: IPv4 and IPv6.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::time::{Duration, Instant};

use crate::outage::{TIMEOUT, loses_nothing, node, peer, pod, resumes, tcp, udp};
use anyhow::{Context, Result, ensure};
use fairlead_demo::{World, probe, topology};
use testbed_lab::Progress;
use testbed_lab::traffic::Flow;

/// Longest time until traffic is back on the other path: it takes 2 to 3 s. Without probes, the silence of the peer is only noticed after 12 s.
const OTHER_PATH: Duration = Duration::from_secs(10);

/// Endpoint to which `from` sends packets for `to`.
fn endpoint(world: &World, from: &str, to: &str) -> SocketAddr {
    let seen = peer(node(world, from), to).unwrap();
    seen["endpoint"].as_str().unwrap_or_else(|| panic!("{seen}")).parse().unwrap()
}

/// Drops WireGuard's port on a host in one family and these directions.
fn drop_wireguard(world: &World, name: &str, family: &str, hooks: &[&str]) {
    let chains: String = hooks
        .iter()
        .map(|hook| {
            format!(
                "chain {hook} {{ type filter hook {hook} priority 0; meta nfproto {family} udp dport 51820 drop; }}\n"
            )
        })
        .collect();
    node(world, name)
        .host
        .shell(&format!("nft -f - <<'END'\ntable inet testdrop {{\n{chains}}}\nEND"))
        .unwrap();
}

fn black_hole(world: &World, what: &str, hooks: &[&str], flows: &[Flow], elsewhere: &[Flow]) {
    // Longer than a session is idle after the last test's traffic, and until what flows is observed.
    std::thread::sleep(Duration::from_secs(6));
    let before = endpoint(world, "rack-1", "rack-2");
    let family = if before.is_ipv4() { "ipv4" } else { "ipv6" };
    println!("{what}: {before} and {}", endpoint(world, "rack-2", "rack-1"));
    let mark = Instant::now();
    drop_wireguard(world, "rack-1", family, hooks);
    resumes(what, flows, mark, mark, OTHER_PATH);
    loses_nothing(what, elsewhere, mark);
    let moved = || {
        let now = endpoint(world, "rack-1", "rack-2");
        ensure!(now.is_ipv4() != before.is_ipv4(), "still {now}");
        Ok(now)
    };
    let now = testbed_lab::eventually(TIMEOUT, moved).unwrap();
    println!("{what}: from {before} to {now}");
    let mark = Instant::now();
    node(world, "rack-1").host.shell("nft delete table inet testdrop").unwrap();
    std::thread::sleep(Duration::from_secs(3));
    loses_nothing(what, flows, mark);
}

/// A packet of the tunnel's MTU, which must not be fragmented.
fn long_ping(world: &World) -> Result<()> {
    let (from, to) = (pod(world, "rack-1"), pod(world, "rack-2").addresses[0]);
    from.namespace.shell(&format!("ping -n -c 1 -W 1 -M do -s 1392 {to}")).map(drop)
}

fn drop_long_datagrams(world: &World, families: &[&str]) {
    let rules: String = families
        .iter()
        .map(|family| format!("meta nfproto {family} udp dport 51820 udp length > 1400 drop\n"))
        .collect();
    let table = format!(
        "table inet testdrop\ndelete table inet testdrop\n\
         table inet testdrop {{\nchain input {{\ntype filter hook input priority 0\n{rules}}}\n}}"
    );
    node(world, "rack-1").host.shell(&format!("nft -f - <<'END'\n{table}\nEND")).unwrap();
    // The rule compares the length of what a cable carries, which is that of a whole batch unless it is cut before.
    let cut = "for link in $(ip -o link show type veth | cut -d: -f2 | cut -d@ -f1); do ip link set $link gso_max_segs 1; done";
    for name in ["rack-1", "rack-2"] {
        node(world, name).host.shell(cut).unwrap();
    }
}

/// The problem `PathMTU` of a node, if it has it.
fn path_mtu(world: &World, name: &str) -> Result<Option<String>> {
    let status = node(world, name).status()?;
    let problems = status["problems"].as_array().context("no problems")?;
    let words = problems.iter().filter_map(serde_json::Value::as_str);
    Ok(words.filter(|words| words.contains("lower spec.mtu")).map(str::to_owned).next())
}

/// The MTU of a node's routes to the pods of another one, if these have one of their own.
fn route_mtu(world: &World, from: &str, to: &str) -> Result<Option<String>> {
    let routes = node(world, from).host.shell("ip route show table 180")?;
    let prefixes = peer(node(world, from), to).context("no such peer")?["prefixes"].clone();
    let is_to = |line: &str| {
        let destination = line.split_whitespace().next().unwrap_or_default();
        prefixes.as_array().is_some_and(|prefixes| prefixes.iter().any(|prefix| prefix == destination))
    };
    let mtu = |line: &str| line.split(" mtu ").nth(1)?.split_whitespace().next().map(str::to_owned);
    Ok(routes.lines().filter(|line| is_to(line)).find_map(mtu))
}

/// Sends this many bytes from one pod to another and waits until they have arrived.
fn transfer(world: &World, from: &str, to: &str, bytes: usize) -> Result<()> {
    let (from, to) = (pod(world, from), pod(world, to));
    for address in to.addresses.iter().copied() {
        let listener = to.namespace.run(|| TcpListener::bind((address, 0)))??;
        let at = listener.local_addr()?;
        let mut sender = from.namespace.run(|| TcpStream::connect_timeout(&at, TIMEOUT))??;
        let (mut receiver, _) = listener.accept()?;
        receiver.set_read_timeout(Some(TIMEOUT))?;
        let arrived = std::thread::scope(|scope| {
            let sent = scope.spawn(move || sender.write_all(&vec![7; bytes]));
            let mut arrived = Vec::new();
            receiver.read_to_end(&mut arrived)?;
            sent.join().map_err(|_| anyhow::anyhow!("the sender panicked"))??;
            anyhow::Ok(arrived.len())
        })?;
        ensure!(arrived == bytes, "{arrived} of {bytes} bytes from {} arrived at {at}", from.node);
    }
    Ok(())
}

/// Both families lose them: routes get the MTU that passes, and the kernel tells senders.
fn narrow_routes(world: &World, mark: Instant) {
    let pairs = [("rack-1", "rack-2"), ("rack-2", "rack-1")];
    let found = || {
        pairs.iter().try_for_each(|(from, to)| {
            let mtu = route_mtu(world, from, to)?.with_context(|| format!("{from} has no narrow route"))?;
            // A UDP datagram of 1400 bytes carries a packet of 1360.
            ensure!(mtu == "1360", "{from}: {mtu}");
            Ok(())
        })
    };
    testbed_lab::eventually(TIMEOUT, found).unwrap();
    println!("long packets are lost over both families: routes are narrow after {:?}", mark.elapsed());
    println!("{}", path_mtu(world, "rack-1").unwrap().expect("no problem is told"));
    for (from, to) in pairs {
        transfer(world, from, to, 1 << 20).unwrap();
        let (from, to) = (pod(world, from), pod(world, to).addresses[0]);
        let ping = |length: u32| {
            let size = length - 28;
            from.namespace.shell(&format!("ping -n -c 1 -W 2 -M do -s {size} {to} 2>&1 || true")).unwrap()
        };
        let passes = ping(1360);
        assert!(passes.contains(" 0% packet loss"), "{passes}");
        let told = ping(1420);
        assert!(told.contains("1360"), "{told}");
    }
}

/// No router says so, and short packets pass.
fn long_packets_lost(world: &World, flows: &[Flow]) {
    testbed_lab::eventually(TIMEOUT, || long_ping(world)).unwrap();
    let before = endpoint(world, "rack-1", "rack-2");
    let lost = if before.is_ipv4() { "ipv4" } else { "ipv6" };
    let mark = Instant::now();
    drop_long_datagrams(world, &[lost]);
    let passes = || {
        long_ping(world)?;
        let now = endpoint(world, "rack-1", "rack-2");
        ensure!(now.is_ipv4() != before.is_ipv4(), "still {now}");
        Ok(())
    };
    testbed_lab::eventually(TIMEOUT, passes).unwrap();
    println!("long packets are lost over {lost}: they pass again after {:?}", mark.elapsed());
    drop_long_datagrams(world, &["ipv4", "ipv6"]);
    narrow_routes(world, mark);
    loses_nothing("long packets are lost", flows, mark);
    node(world, "rack-1").host.shell("nft delete table inet testdrop").unwrap();
    let gone = || {
        let problem = path_mtu(world, "rack-1")?;
        ensure!(problem.is_none(), "{problem:?}");
        // Pods were told the lower MTU, which lasts for ten minutes.
        [("rack-1", "rack-2"), ("rack-2", "rack-1")].iter().try_for_each(|(name, other)| {
            ensure!(route_mtu(world, name, other)?.is_none(), "{name} still has a narrow route");
            pod(world, name).namespace.shell("ip route flush cache; ip -6 route flush cache").map(drop)
        })?;
        long_ping(world)
    };
    testbed_lab::eventually(TIMEOUT, gone).unwrap();
}

#[test]
fn a_path_that_becomes_a_black_hole_is_left_for_the_other_family() {
    let mut world = World::start(&topology::one_network(&[]), &Progress::default()).unwrap();
    world.apply_mesh_and_pool().unwrap();
    world.start_pods().unwrap();
    let deadline = Instant::now() + TIMEOUT;
    let (pairs, _) = probe::all_pairs(&world.pods, deadline, |_, _| String::new()).unwrap();
    assert!(pairs.iter().all(|pair| pair.tcp && pair.icmp), "{pairs:?}");
    let flows =
        [udp(&world, "rack-1", "rack-2"), udp(&world, "rack-2", "rack-1"), tcp(&world, "rack-2", "rack-1")];
    let elsewhere = [udp(&world, "rack-2", "rack-3"), tcp(&world, "rack-3", "rack-2")];
    long_packets_lost(&world, &flows);
    black_hole(&world, "a black hole in both directions", &["input", "output"], &flows, &elsewhere);
    black_hole(&world, "a black hole towards one node", &["input"], &flows, &elsewhere);
}
