//! Small datagrams to an echo at the other end and back. The programs are threads of this one, with sockets of the two network namespaces.

use std::fmt;
use std::net::{Ipv4Addr, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use testbed_lab::Namespace;

use crate::statistics::percentile;

pub(super) const PORT: u16 = 7007;
/// Time from one datagram to the next, whether or not it has come back.
const INTERVAL: Duration = Duration::from_millis(2);
const COUNT: u32 = 1000;
/// Longest wait for the last answers.
const LATE: Duration = Duration::from_millis(300);
/// Between two looks at whether all is over.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Bytes of payload: here the time of sending.
pub(super) const LENGTH: usize = 8;

/// Microseconds there and back.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct RoundTrips {
    pub(super) p50: f64,
    pub(super) p99: f64,
}

impl RoundTrips {
    /// # Errors
    /// Fewer than half came back.
    fn of(times: &[f64]) -> Result<Self> {
        let least = usize::try_from(COUNT / 2)?;
        ensure!(times.len() >= least, "{} of {COUNT} datagrams came back", times.len());
        let share = |share| percentile(times, share).context("no datagram came back");
        Ok(Self { p50: share(0.5)?, p99: share(0.99)? })
    }

    /// Differences between these round trips and those of another path.
    pub(super) fn above(&self, other: &Self) -> Self {
        Self { p50: self.p50 - other.p50, p99: self.p99 - other.p99 }
    }
}

impl fmt::Display for RoundTrips {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "p50 {:.0} µs, p99 {:.0} µs", self.p50, self.p99)
    }
}

/// Sends from one namespace to an address of the other.
pub(super) fn measure(from: &Namespace, to: &Namespace, address: Ipv4Addr) -> Result<RoundTrips> {
    let server = socket(to, address, PORT)?;
    let client = socket(from, Ipv4Addr::UNSPECIFIED, 0)?;
    client.connect((address, PORT)).with_context(|| format!("no route to {address}"))?;
    RoundTrips::of(&exchange(&server, &client)?)
}

/// Bound in a namespace; reading from it ends now and then without a datagram.
pub(super) fn socket(namespace: &Namespace, address: Ipv4Addr, port: u16) -> Result<UdpSocket> {
    let socket = namespace.run(|| UdpSocket::bind((address, port)))?;
    let socket = socket.with_context(|| format!("cannot bind {address}:{port} in {}", namespace.name()))?;
    socket.set_read_timeout(Some(POLL_INTERVAL))?;
    Ok(socket)
}

/// Microseconds of each datagram that came back.
fn exchange(server: &UdpSocket, client: &UdpSocket) -> Result<Vec<f64>> {
    let (start, is_over) = (Instant::now(), AtomicBool::new(false));
    let times = thread::scope(|scope| {
        scope.spawn(|| echo(server, &is_over));
        let receiver = scope.spawn(|| receive(client, start, &is_over));
        send(client, start);
        thread::sleep(LATE);
        is_over.store(true, Ordering::Relaxed);
        receiver.join()
    });
    times.map_err(|_| anyhow!("the receiver panicked"))
}

fn send(client: &UdpSocket, start: Instant) {
    for number in 0..COUNT {
        thread::sleep(INTERVAL.saturating_mul(number).saturating_sub(start.elapsed()));
        // What the kernel does not take does not come back.
        let _ = client.send(&nanoseconds(start).to_le_bytes());
    }
}

fn receive(client: &UdpSocket, start: Instant, is_over: &AtomicBool) -> Vec<f64> {
    let (mut times, mut datagram) = (Vec::new(), [0; LENGTH]);
    while !is_over.load(Ordering::Relaxed) {
        if let Ok(LENGTH) = client.recv(&mut datagram) {
            let passed = nanoseconds(start).saturating_sub(u64::from_le_bytes(datagram));
            times.push(passed as f64 / 1000.0);
        }
    }
    times
}

/// Sends back what arrives until all is over.
pub(super) fn echo(server: &UdpSocket, is_over: &AtomicBool) {
    let mut datagram = [0; LENGTH];
    while !is_over.load(Ordering::Relaxed) {
        if let Ok((LENGTH, from)) = server.recv_from(&mut datagram) {
            // As above.
            let _ = server.send_to(&datagram, from);
        }
    }
}

fn nanoseconds(start: Instant) -> u64 {
    u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn datagrams_come_back() {
        let bound = || {
            let socket = UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
            socket.set_read_timeout(Some(POLL_INTERVAL)).unwrap();
            socket
        };
        let (server, client) = (bound(), bound());
        client.connect(server.local_addr().unwrap()).unwrap();
        let times = RoundTrips::of(&exchange(&server, &client).unwrap()).unwrap();
        assert!(0.0 < times.p50 && times.p50 <= times.p99, "{times}");
    }

    #[test]
    fn a_path_that_loses_most_is_an_error() {
        let error = RoundTrips::of(&[1.0; 499]).unwrap_err();
        assert_eq!(error.to_string(), "499 of 1000 datagrams came back");
    }

    #[test]
    fn what_a_path_adds_is_the_difference() {
        let (path, cable) = (RoundTrips { p50: 90.0, p99: 250.0 }, RoundTrips { p50: 30.0, p99: 100.0 });
        assert_eq!(path.above(&cable), RoundTrips { p50: 60.0, p99: 150.0 });
    }
}
