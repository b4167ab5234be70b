//! Trying every pair of pods, with TCP and ICMP, until all answer or patience runs out.

use std::io::{Read, Write};
use std::net::{IpAddr, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, ensure};
use serde::Serialize;

use crate::cni::Pod;

/// TCP port of the echo server in every pod.
pub const PORT: u16 = 7007;
/// Longest one attempt may take.
const ATTEMPT: Duration = Duration::from_secs(1);
/// Pause between attempts of one pair.
const PAUSE: Duration = Duration::from_millis(100);

/// One direction of one pair, in one family.
#[derive(Debug, Clone, Serialize)]
pub struct Pair {
    /// Pod that asks.
    pub from: String,
    /// Pod that answers.
    pub to: String,
    /// `ipv4` or `ipv6`.
    pub family: &'static str,
    /// Whether a TCP connection carried an echo.
    pub tcp: bool,
    /// Whether an ICMP echo came back.
    pub icmp: bool,
    /// Path of the packets: the WireGuard endpoint, or that both are on one node.
    pub path: String,
    /// Round-trip time of the ICMP echo in milliseconds.
    pub rtt_ms: Option<f64>,
}

/// Echo servers in pods; dropping it ends them.
pub struct Servers {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Servers {
    /// Starts one in each pod.
    ///
    /// # Errors
    /// A pod's namespace cannot be entered, or the port is taken.
    pub fn start(pods: &[Pod]) -> anyhow::Result<Self> {
        let stop = Arc::new(AtomicBool::new(false));
        let serve = |pod: &Pod| {
            // A socket stays in the namespace it was made in.
            let listener = pod.namespace.run(|| TcpListener::bind(("::", PORT)))??;
            listener.set_nonblocking(true)?;
            let stop = Arc::clone(&stop);
            Ok(std::thread::spawn(move || accept(&listener, &stop)))
        };
        let threads = pods.iter().map(serve).collect::<anyhow::Result<_>>()?;
        Ok(Self { stop, threads })
    }
}

impl Drop for Servers {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn accept(listener: &TcpListener, stop: &AtomicBool) {
    while !stop.load(Ordering::Relaxed) {
        match listener.accept() {
            Ok((stream, _)) => {
                std::thread::spawn(move || echo(stream));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(5)),
        }
    }
}

fn echo(mut stream: TcpStream) {
    let mut buffer = vec![0; 64 * 1024];
    let _ = stream.set_nonblocking(false);
    let _ = stream.set_read_timeout(Some(Duration::from_secs(10)));
    while let Ok(received) = stream.read(&mut buffer) {
        let whole = buffer.get(..received).unwrap_or_default();
        if received == 0 || stream.write_all(whole).is_err() {
            return;
        }
    }
}

/// Sends `bytes` bytes to the echo server at `to` and checks that the same come back.
///
/// # Errors
/// The failure, in the words of the socket's error.
pub fn tcp(from: &Pod, to: IpAddr, bytes: usize) -> anyhow::Result<()> {
    let mut stream =
        from.namespace.run(|| TcpStream::connect_timeout(&SocketAddr::new(to, PORT), ATTEMPT))??;
    stream.set_read_timeout(Some(Duration::from_secs(10)))?;
    let sent: Vec<u8> = (0..bytes).map(|index| (index % 251) as u8).collect();
    let mut writer = stream.try_clone()?;
    std::thread::scope(|scope| {
        let writing = scope.spawn(|| writer.write_all(&sent));
        let mut received = vec![0; bytes];
        stream.read_exact(&mut received)?;
        ensure!(received == sent, "the echo from {to} differs from what was sent");
        writing.join().map_err(|_| anyhow::anyhow!("the writer panicked"))??;
        Ok(())
    })
}

/// One ICMP echo; the round-trip time in milliseconds.
///
/// # Errors
/// No answer within a second.
pub fn ping(from: &Pod, to: IpAddr) -> anyhow::Result<f64> {
    let output =
        from.namespace.command("ping")?.args(["-n", "-c", "1", "-W", "1", &to.to_string()]).output()?;
    let text = String::from_utf8_lossy(&output.stdout);
    ensure!(output.status.success(), "no answer from {to}: {text}");
    let (_, rest) = text.split_once("time=").context("ping says no time")?;
    Ok(rest.split_whitespace().next().unwrap_or_default().parse()?)
}

/// Tries all pairs concurrently until each has answered by TCP and ICMP, or until `deadline`. `path` says how packets
/// go from one pod to another; it is asked at the end.
///
/// # Errors
/// The echo servers cannot be started.
pub fn all_pairs(
    pods: &[Pod],
    deadline: Instant,
    path: impl Fn(&Pod, &Pod) -> String,
) -> anyhow::Result<(Vec<Pair>, Instant)> {
    let servers = Servers::start(pods)?;
    let wanted: Vec<(&Pod, &Pod, IpAddr)> = pods
        .iter()
        .flat_map(|from| pods.iter().filter(|to| to.name != from.name).map(move |to| (from, to)))
        .flat_map(|(from, to)| to.addresses.iter().map(move |address| (from, to, *address)))
        .collect();
    let mut found: Vec<(bool, Option<f64>)> = std::thread::scope(|scope| {
        let trying: Vec<_> =
            wanted.iter().map(|(from, _, address)| scope.spawn(|| until(from, *address, deadline))).collect();
        trying.into_iter().map(|thread| thread.join().unwrap_or((false, None))).collect()
    });
    let done = Instant::now();
    drop(servers);
    // The first answers came while everything tried everything at once; these times are of a quiet network.
    for ((from, _, address), (_, rtt)) in wanted.iter().zip(&mut found) {
        if rtt.is_some() {
            *rtt = ping(from, *address).ok().or(*rtt);
        }
    }
    let pair = |((from, to, address), (tcp, rtt_ms)): ((&Pod, &Pod, IpAddr), (bool, Option<f64>))| Pair {
        from: from.name.clone(),
        to: to.name.clone(),
        family: if address.is_ipv4() { "ipv4" } else { "ipv6" },
        tcp,
        icmp: rtt_ms.is_some(),
        path: path(from, to),
        rtt_ms,
    };
    Ok((wanted.into_iter().zip(found).map(pair).collect(), done))
}

fn until(from: &Pod, to: IpAddr, deadline: Instant) -> (bool, Option<f64>) {
    let (mut connected, mut rtt) = (false, None);
    loop {
        connected = connected || tcp(from, to, 32).is_ok();
        rtt = rtt.or_else(|| ping(from, to).ok());
        if (connected && rtt.is_some()) || Instant::now() >= deadline {
            return (connected, rtt);
        }
        std::thread::sleep(PAUSE);
    }
}
