//! Flows that go on while something is changed below them, and what became of their packets.

use std::collections::BTreeSet;
use std::io::{Read, Write};
use std::net::{IpAddr, Ipv6Addr, UdpSocket};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::Namespace;
use crate::coil::{UDP_ECHO, connect};

/// Between two packets of a flow.
const INTERVAL: Duration = Duration::from_millis(10);
/// Longest wait for the last replies.
const LATE: Duration = Duration::from_secs(2);

/// Result of a flow.
#[derive(Debug, Clone)]
pub struct Report {
    /// Protocol and server.
    pub flow: String,
    /// Packets, or messages of a connection.
    pub sent: usize,
    /// Packets or messages whose replies have not come.
    pub lost: usize,
    /// The longest time from a packet to its reply, and when that was, since the start.
    pub longest: (Duration, Duration),
}

impl Report {
    /// Whether nothing of the flow is lost but what is sent in the millisecond in which the queueing discipline `clsact` is added: the
    /// kernel stops a link for that (`dev_deactivate` in `qdisc_graft`, `net/sched/sch_api.c`). A VM that gets little time may send several
    /// packets in it. Of TCP nothing is lost.
    pub fn has_gone_on(&self) -> bool {
        let most = if self.flow.starts_with("UDP") { 3 } else { 0 };
        self.sent > 20 && self.lost <= most
    }
}

/// One flow of UDP, with a packet every 10 ms, and one connection of TCP to each server.
#[derive(Debug)]
pub struct Traffic {
    stop: Arc<AtomicBool>,
    flows: Vec<JoinHandle<Report>>,
}

impl Traffic {
    /// From a namespace to servers of [`crate::coil::Network`].
    ///
    /// # Panics
    /// A server is not reached.
    pub fn start(from: &Namespace, servers: impl IntoIterator<Item = IpAddr>) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let mut flows = Vec::new();
        for server in servers {
            let socket = datagrams(from, server);
            let stopped = Arc::clone(&stop);
            flows.push(thread::spawn(move || send_datagrams(&socket, server, &stopped)));
            let stream = connect(from, server);
            let stopped = Arc::clone(&stop);
            flows.push(thread::spawn(move || send_messages(stream, server, &stopped)));
        }
        Self { stop, flows }
    }

    /// Ends the flows.
    ///
    /// # Panics
    /// A thread did.
    pub fn stop(self) -> Vec<Report> {
        self.stop.store(true, Ordering::Relaxed);
        self.flows.into_iter().map(|flow| flow.join().expect("the flow was not interrupted")).collect()
    }
}

fn datagrams(from: &Namespace, server: IpAddr) -> UdpSocket {
    let any: IpAddr = if server.is_ipv4() { [0; 4].into() } else { Ipv6Addr::UNSPECIFIED.into() };
    let socket = from.run(|| UdpSocket::bind((any, 0))).expect("a socket can be bound");
    from.run(|| socket.connect((server, UDP_ECHO))).expect("there is a route");
    socket
}

fn send_datagrams(socket: &UdpSocket, server: IpAddr, stop: &AtomicBool) -> Report {
    let mut sent: Vec<Instant> = Vec::new();
    let (started, mut open) = (Instant::now(), BTreeSet::new());
    let mut longest = (Duration::ZERO, Duration::ZERO);
    let mut receive = |sent: &[Instant], open: &mut BTreeSet<usize>, until: Instant| {
        let mut reply = [0; 8];
        while let Some(left) = until.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
            socket.set_read_timeout(Some(left)).expect("the timeout is not zero");
            if let Ok(8) = socket.recv(&mut reply) {
                let number = usize::try_from(u64::from_be_bytes(reply)).unwrap_or(usize::MAX);
                if open.remove(&number) {
                    let taken = sent.get(number).map_or(Duration::ZERO, Instant::elapsed);
                    longest = longest.max((taken, started.elapsed()));
                }
            }
        }
    };
    while !stop.load(Ordering::Relaxed) {
        let number = sent.len();
        open.insert(number);
        sent.push(Instant::now());
        let _ = socket.send(&(number as u64).to_be_bytes());
        receive(&sent, &mut open, Instant::now() + INTERVAL);
    }
    receive(&sent, &mut open, Instant::now() + LATE);
    Report { flow: format!("UDP {server}"), sent: sent.len(), lost: open.len(), longest }
}

fn send_messages(mut stream: impl Read + Write, server: IpAddr, stop: &AtomicBool) -> Report {
    let (start, mut sent, mut lost) = (Instant::now(), 0usize, 0);
    let mut longest = (Duration::ZERO, Duration::ZERO);
    while !stop.load(Ordering::Relaxed) && lost == 0 {
        let started = Instant::now();
        let message = (sent as u64).to_be_bytes();
        let mut reply = [0; 8];
        let answered = stream.write_all(&message).and_then(|()| stream.read_exact(&mut reply));
        sent += 1;
        lost += usize::from(answered.is_err() || reply != message);
        longest = longest.max((started.elapsed(), start.elapsed()));
        thread::sleep(INTERVAL);
    }
    Report { flow: format!("TCP {server}"), sent, lost, longest }
}
