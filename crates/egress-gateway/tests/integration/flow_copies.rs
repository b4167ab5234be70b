//! Connections go on at another gateway that takes over the source address: see `flows/mod.rs`.

use std::net::UdpSocket;
use std::thread;
use std::time::{Duration, Instant};

use crate::flows;
use crate::flows::{Bed, ECHO, LIMIT, SERVERS, SOURCES, say};

/// The source that the server sees.
fn ask(socket: &UdpSocket) -> String {
    let mut buffer = [0; 128];
    socket.send(b"x").unwrap();
    let length = socket.recv(&mut buffer).unwrap();
    String::from_utf8_lossy(&buffer[..length]).into_owned()
}

#[test]
fn connections_go_on_when_the_address_moves_and_both_gateways_print_the_same() {
    let bed = Bed::new();
    let mut streams: Vec<_> = (0..20).map(|number| bed.connect(SERVERS[number % 2])).collect();
    let sockets: Vec<UdpSocket> = SERVERS
        .iter()
        .cycle()
        .take(10)
        .map(|server| {
            let any = if server.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
            let socket = bed.client.run(|| UdpSocket::bind(any)).unwrap();
            socket.connect((*server, ECHO)).unwrap();
            socket.set_read_timeout(Some(LIMIT)).unwrap();
            socket
        })
        .collect();
    let before: Vec<String> = sockets.iter().map(ask).collect();
    assert!(before.iter().all(|source| SOURCES.iter().any(|it| source.contains(it))), "{before:?}");
    streams.iter_mut().for_each(|stream| say(stream, "before").unwrap());
    let bed = &bed;
    thread::scope(|scope| {
        let pings = SERVERS
            .map(|server| scope.spawn(move || bed.client.sh(&format!("ping -c 30 -i 0.1 -W 1 {server}"))));
        // One that ends is copied no more.
        drop(bed.connect(SERVERS[0]));
        thread::sleep(Duration::from_millis(1000));
        let same = bed.wait_for_same();
        let of = |protocol: &str| same.iter().filter(|line| line.contains(protocol)).count();
        assert_eq!(bed.b.metrics.counts()[2], 0, "refused");
        assert_eq!((of(" 6 ESTABLISHED"), of("udp"), of("icmp")), (20, 10, 2), "{same:#?}");
        bed.move_to("b", 2);
        streams.iter_mut().for_each(|stream| say(stream, "after").unwrap());
        let after: Vec<String> = sockets.iter().map(ask).collect();
        assert_eq!(before, after);
        for ping in pings {
            let answers = ping.join().unwrap();
            let received = answers.lines().filter(|line| line.contains("icmp_seq=")).count();
            assert!(received >= 28, "the route of one end changes before that of the other: {answers}");
        }
    });
    // And in the other direction, with connections that have ended and new ones.
    streams.drain(..10);
    streams.extend((0..10).map(|number| bed.connect(SERVERS[number % 2])));
    let alive = |line: &&String| line.contains("ESTABLISHED");
    let began = Instant::now();
    loop {
        let [a, b] = [&bed.a, &bed.b].map(|gateway| gateway.listed());
        let [a, b]: [Vec<_>; 2] = [a.iter().filter(alive).collect(), b.iter().filter(alive).collect()];
        if a == b && a.len() == 20 {
            break;
        }
        assert!(began.elapsed() < LIMIT, "{a:#?} {b:#?}");
        thread::sleep(Duration::from_millis(50));
    }
    bed.move_to("a", 3);
    streams.iter_mut().for_each(|stream| say(stream, "again").unwrap());
    for gateway in [&bed.a, &bed.b] {
        let [_, injected, _, missed] = gateway.metrics.counts();
        assert!(injected > 0 && missed == 0, "{}: {injected} {missed}", gateway.name);
    }
}

#[test]
fn a_gateway_that_starts_gets_all_connections_and_loses_those_that_have_ended() {
    let bed = Bed::new();
    let mut stream = bed.connect(SERVERS[0]);
    say(&mut stream, "x").unwrap();
    bed.wait_for_same();
    assert_eq!(bed.b.listed().len(), 1);
    // The addresses leave the Egress.
    bed.b.slots.send_replace(Default::default());
    let began = Instant::now();
    while !bed.b.listed().is_empty() {
        assert!(began.elapsed() < LIMIT, "{:?}", bed.b.listed());
        thread::sleep(Duration::from_millis(20));
    }
    // What a former holder, or a program that has ended, has left.
    bed.b.namespace.sh("conntrack -I -p udp -s 10.0.0.2 -d 198.51.100.1 --sport 7 --dport 7 --src-nat 192.0.2.9 -t 600 -u SEEN_REPLY");
    assert_eq!(bed.b.listed().len(), 1);
    let mut other = bed.connect(SERVERS[1]);
    say(&mut other, "x").unwrap();
    // It has dropped what the holder said meanwhile, and now gets a full copy.
    bed.b.set_holder("a", 1);
    let same = bed.wait_for_same();
    assert_eq!(same.len(), 2, "{same:#?}");
    let mut complete = bed.b.complete.clone();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let wait =
        async { tokio::time::timeout(LIMIT, complete.wait_for(|slots| slots.contains(&0))).await.is_ok() };
    assert!(runtime.block_on(wait));
}

/// New connections in a second, each of which lasts a second.
const PER_SECOND: u32 = 1000;
const SECONDS: u32 = 20;

/// Opens connections; returns how many in a second.
fn load(bed: &Bed) -> f64 {
    let began = Instant::now();
    let mut open = std::collections::VecDeque::new();
    let mut connected = 0u32;
    bed.client.run(|| {
        for number in 0..PER_SECOND * SECONDS {
            let due = began + Duration::from_secs(1) * number / PER_SECOND;
            thread::sleep(due.saturating_duration_since(Instant::now()));
            if let Ok(stream) = std::net::TcpStream::connect((SERVERS[0], ECHO)) {
                // Ended with a reset: otherwise the client runs out of ports.
                socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO)).unwrap();
                connected += 1;
                open.push_back((Instant::now(), stream));
            }
            while open.front().is_some_and(|(since, _)| since.elapsed() >= Duration::from_secs(1)) {
                open.pop_front();
            }
        }
    });
    f64::from(connected) / began.elapsed().as_secs_f64()
}

/// Seconds of processor time of the threads of a process that have this name.
fn processor_time(process: u32, name: &str) -> f64 {
    let read = |path: std::path::PathBuf| std::fs::read_to_string(path).unwrap_or_default();
    let tasks = std::fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let of = |path: std::path::PathBuf| {
        let is_one = read(path.join("comm")).trim() == name;
        let nanoseconds = read(path.join("schedstat")).split_whitespace().next()?.parse::<f64>().ok()?;
        is_one.then_some(nanoseconds / 1e9)
    };
    tasks.filter_map(|task| of(task.unwrap().path())).sum()
}

#[test]
#[ignore = "prints figures: cargo test -p fairlead-egress-gateway --test integration figures_of_the_cost -- --ignored --nocapture"]
fn figures_of_the_cost() {
    let bed = Bed::new();
    bed.wait_for_same();
    let times = || ["copies-a", "copies-b"].map(|name| processor_time(std::process::id(), name));
    let idle = times();
    thread::sleep(Duration::from_secs(5));
    let (began, before) = (Instant::now(), times());
    let rate = load(&bed);
    let (seconds, after) = (began.elapsed().as_secs_f64(), times());
    for (index, gateway) in [&bed.a, &bed.b].into_iter().enumerate() {
        let [sent, injected, refused, missed] = gateway.metrics.counts();
        println!(
            "{}: {:.2} % of a core at {rate:.0} new connections/s ({:.2} % idle), sent {sent}, injected {injected}, refused {refused}, missed {missed}",
            gateway.name,
            (after[index] - before[index]) * 100.0 / seconds,
            (before[index] - idle[index]) * 100.0 / 5.0,
        );
    }
}

/// Debian's conntrackd in place of the gateways' programs: at once into the kernel of the other, without a cache for it there.
fn conntrackd(
    gateway: &flows::Gateway,
    [own, other]: [&str; 2],
    directory: &std::path::Path,
) -> std::process::Child {
    let file = |name: &str| directory.join(format!("{}.{name}", gateway.name)).display().to_string();
    let configuration = format!(
        "Sync {{ Mode FTFW {{ DisableExternalCache On }}
            UDP {{ IPv4_address {own} IPv4_Destination_Address {other} Port 3780 Interface peer
                SndSocketBuffer 8388608 RcvSocketBuffer 8388608 Checksum on }} }}
        General {{ HashSize 32768 HashLimit 131072 LogFile off Syslog off LockFile {lock} UNIX {{ Path {control} }}
            NetlinkBufferSize 8388608 NetlinkBufferSizeMaxGrowth 16777216
            Filter From Userspace {{ Protocol Accept {{ TCP UDP ICMP }} Address Ignore {{ IPv4_address {own} }} }} }}",
        lock = file("lock"),
        control = file("control"),
    );
    std::fs::write(file("conf"), configuration.replace("}", "\n}\n").replace("{", "{\n")).unwrap();
    let program = std::env::var("FAIRLEAD_CONNTRACKD").unwrap_or_else(|_| "conntrackd".to_owned());
    let child =
        gateway.namespace.run(|| std::process::Command::new(program).arg("-C").arg(file("conf")).spawn());
    child.expect("Debian's package conntrackd, or FAIRLEAD_CONNTRACKD with the path of the program")
}

#[test]
#[ignore = "prints figures, needs conntrackd: cargo test -p fairlead-egress-gateway --test integration figures_of_conntrackd -- --ignored --nocapture"]
fn figures_of_conntrackd() {
    let bed = Bed::new();
    for gateway in [&bed.a, &bed.b] {
        gateway.slots.send_replace(Default::default());
    }
    let directory = std::env::temp_dir().join(format!("fairlead-conntrackd-{}", std::process::id()));
    std::fs::create_dir_all(&directory).unwrap();
    let addresses = ["10.9.0.1", "10.9.0.2"];
    let mut programs = [
        conntrackd(&bed.a, addresses, &directory),
        conntrackd(&bed.b, [addresses[1], addresses[0]], &directory),
    ];
    thread::sleep(Duration::from_secs(2));
    let times = |programs: &[std::process::Child; 2]| {
        [0, 1].map(|index| processor_time(programs[index].id(), "conntrackd"))
    };
    let (began, before) = (Instant::now(), times(&programs));
    let rate = load(&bed);
    let (seconds, after) = (began.elapsed().as_secs_f64(), times(&programs));
    let copies = bed.b.listed().len();
    for (index, name) in ["a", "b"].into_iter().enumerate() {
        let percent = (after[index] - before[index]) * 100.0 / seconds;
        println!(
            "conntrackd at {name}: {percent:.2} % of a core at {rate:.0} new connections/s, {copies} copies at the end"
        );
    }
    for program in &mut programs {
        program.kill().unwrap();
        program.wait().unwrap();
    }
    std::fs::remove_dir_all(&directory).unwrap();
}
