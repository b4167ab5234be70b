//! A datagram every millisecond to an echo behind the tunnel and back, while something happens: which were lost, and how long the others took.

use std::net::{Ipv4Addr, UdpSocket};
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow};
use testbed_lab::Namespace;

use super::super::latency::{LENGTH, PORT, echo, socket};
use crate::report::milliseconds;
use crate::statistics::percentile;

/// Time from one datagram to the next, whether or not it has come back.
const INTERVAL: Duration = Duration::from_millis(1);
/// Longest wait for the last datagrams: those that come later are lost.
const LATE: Duration = Duration::from_secs(1);

/// One datagram.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Datagram {
    pub(super) sent: Instant,
    /// There and back; `None` if it was lost.
    pub(super) delay: Option<Duration>,
}

/// Delays of the datagrams of a time, in milliseconds there and back.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Delays {
    pub(super) sent: usize,
    pub(super) lost: usize,
    pub(super) p50: f64,
    pub(super) p99: f64,
    pub(super) longest: f64,
}

impl Delays {
    /// Delays of the datagrams that were sent within a window.
    ///
    /// # Errors
    /// None came back.
    pub(super) fn of(datagrams: &[Datagram], window: &Range<Instant>) -> Result<Self> {
        let within: Vec<_> = datagrams.iter().filter(|datagram| window.contains(&datagram.sent)).collect();
        let delays: Vec<f64> =
            within.iter().filter_map(|datagram| datagram.delay.map(milliseconds)).collect();
        let share = |share| {
            let none = || format!("none of {} datagrams came back", within.len());
            percentile(&delays, share).with_context(none)
        };
        let lost = within.len().saturating_sub(delays.len());
        Ok(Self { sent: within.len(), lost, p50: share(0.5)?, p99: share(0.99)?, longest: share(1.0)? })
    }
}

/// Sends from one namespace to an address of the other for as long as `work` takes.
///
/// # Errors
/// The sockets cannot be opened, or `work` fails.
pub(super) fn during<T>(
    from: &Namespace,
    to: &Namespace,
    address: Ipv4Addr,
    work: impl FnOnce() -> Result<T>,
) -> Result<(T, Vec<Datagram>)> {
    let server = socket(to, address, PORT)?;
    let client = socket(from, Ipv4Addr::UNSPECIFIED, 0)?;
    client.connect((address, PORT)).with_context(|| format!("no route to {address}"))?;
    exchange(&server, &client, work)
}

fn exchange<T>(
    server: &UdpSocket,
    client: &UdpSocket,
    work: impl FnOnce() -> Result<T>,
) -> Result<(T, Vec<Datagram>)> {
    let (is_enough, is_over) = (AtomicBool::new(false), AtomicBool::new(false));
    let (done, sent, received) = thread::scope(|scope| {
        scope.spawn(|| echo(server, &is_over));
        let receiver = scope.spawn(|| receive(client, &is_over));
        let sender = scope.spawn(|| send(client, &is_enough));
        let done = work();
        is_enough.store(true, Ordering::Relaxed);
        let sent = sender.join();
        thread::sleep(LATE);
        is_over.store(true, Ordering::Relaxed);
        (done, sent, receiver.join())
    });
    let sent = sent.map_err(|_| anyhow!("the sender panicked"))?;
    let received = received.map_err(|_| anyhow!("the receiver panicked"))?;
    Ok((done?, matched(&sent, &received)))
}

/// When each was sent; its number is its position.
fn send(client: &UdpSocket, is_enough: &AtomicBool) -> Vec<Instant> {
    let (mut sent, mut due) = (Vec::new(), Instant::now());
    while !is_enough.load(Ordering::Relaxed) {
        thread::sleep(due.saturating_duration_since(Instant::now()));
        due += INTERVAL;
        let number = u64::try_from(sent.len()).unwrap_or(u64::MAX);
        sent.push(Instant::now());
        // What the kernel does not take does not come back.
        let _ = client.send(&number.to_le_bytes());
    }
    sent
}

/// Numbers, and when they came back.
fn receive(client: &UdpSocket, is_over: &AtomicBool) -> Vec<(u64, Instant)> {
    let (mut received, mut datagram) = (Vec::new(), [0; LENGTH]);
    while !is_over.load(Ordering::Relaxed) {
        if let Ok(LENGTH) = client.recv(&mut datagram) {
            received.push((u64::from_le_bytes(datagram), Instant::now()));
        }
    }
    received
}

/// Datagrams with their delays. Where one came back twice, the first time counts.
fn matched(sent: &[Instant], received: &[(u64, Instant)]) -> Vec<Datagram> {
    let mut datagrams: Vec<_> = sent.iter().map(|sent| Datagram { sent: *sent, delay: None }).collect();
    for (number, at) in received {
        let found = usize::try_from(*number).ok().and_then(|number| datagrams.get_mut(number));
        if let Some(datagram) = found.filter(|datagram| datagram.delay.is_none()) {
            datagram.delay = Some(at.saturating_duration_since(datagram.sent));
        }
    }
    datagrams
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(start: Instant, number: u64) -> Instant {
        start + Duration::from_millis(number)
    }

    #[test]
    fn datagrams_are_sent_for_as_long_as_the_work_takes() {
        let bound = || {
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            socket.set_read_timeout(Some(Duration::from_millis(100))).unwrap();
            socket
        };
        let (server, client) = (bound(), bound());
        client.connect(server.local_addr().unwrap()).unwrap();
        let work = || {
            let start = Instant::now();
            thread::sleep(Duration::from_millis(50));
            Ok(start..Instant::now())
        };
        let (window, datagrams) = exchange(&server, &client, work).unwrap();
        let delays = Delays::of(&datagrams, &window).unwrap();
        assert!(delays.sent > 0 && delays.lost == 0 && 0.0 < delays.p50, "{delays:?}");
        assert!(delays.p50 <= delays.p99 && delays.p99 <= delays.longest, "{delays:?}");
        let failed = exchange(&server, &client, || -> Result<()> { Err(anyhow!("it ended")) });
        assert_eq!(failed.unwrap_err().to_string(), "it ended");
    }

    #[test]
    fn a_datagram_that_did_not_come_back_is_lost() {
        let start = Instant::now();
        let sent: Vec<_> = (0..3).map(|number| after(start, number)).collect();
        // The last one twice, and a number that was never sent.
        let received =
            [(2, after(start, 9)), (0, after(start, 1)), (2, after(start, 20)), (7, after(start, 8))];
        let delays: Vec<_> = matched(&sent, &received).iter().map(|datagram| datagram.delay).collect();
        assert_eq!(delays, [Some(Duration::from_millis(1)), None, Some(Duration::from_millis(7))]);
    }

    #[test]
    fn only_what_was_sent_within_the_window_counts() {
        let start = Instant::now();
        let datagram = |number, delay: Option<u64>| Datagram {
            sent: after(start, number),
            delay: delay.map(Duration::from_millis),
        };
        let all: Vec<_> = (0..200)
            .map(|number| datagram(number, if number == 150 { None } else { Some(number) }))
            .chain([datagram(200, Some(5_000))])
            .collect();
        let delays = Delays::of(&all, &(after(start, 100)..after(start, 200))).unwrap();
        assert_eq!(delays, Delays { sent: 100, lost: 1, p50: 149.0, p99: 199.0, longest: 199.0 });
        let nothing = Delays::of(&all, &(after(start, 150)..after(start, 151))).unwrap_err();
        assert_eq!(nothing.to_string(), "none of 1 datagrams came back");
    }
}
