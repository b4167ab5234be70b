//! Continuous traffic during failures, and its losses.
//!
//! A [`Flow`] sends a numbered message every 50 ms, or more often, from one place to an echo server of its own in another and notes when
//! each came back: UDP shows every loss, TCP whether an established connection survives.

use std::io::{ErrorKind, Read, Write};
use std::net::{IpAddr, Shutdown, SocketAddr, TcpListener, TcpStream, UdpSocket};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};

use crate::place::Place;

/// Pause between two messages unless a test sets another.
const PACE: Duration = Duration::from_millis(50);
/// Interval at which a thread that waits for bytes looks whether it should end.
const POLL_INTERVAL: Duration = Duration::from_millis(100);
/// Longest time in which a connection must be established.
const CONNECT: Duration = Duration::from_secs(5);
/// A message that is younger may still be on its way, on a machine that is busy.
const UNDER_WAY: Duration = Duration::from_secs(1);
/// Number of the latest messages that must have been answered for a flow to count as flowing.
const FLOWING: usize = 5;

/// Losses and gaps of a flow in some time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Figures {
    /// Messages sent long enough ago to have been answered.
    pub sent: usize,
    /// Messages of those sent that were never answered.
    pub lost: usize,
    /// The longest time without any answer.
    pub longest_gap: Duration,
    /// The longest time in which nothing was sent: well above 50 ms, this machine was too busy to measure.
    pub longest_pause: Duration,
}

/// Messages in the order they were sent: when, and when the answer came.
#[derive(Debug, Default)]
struct Log {
    messages: Vec<(Instant, Option<Instant>)>,
    /// Reason why the connection ended, if it did.
    ended: Option<String>,
}

/// Messages that go from one place to another and back; dropping it ends them.
pub struct Flow {
    name: String,
    log: Arc<Mutex<Log>>,
    stop: Arc<AtomicBool>,
    connection: Option<TcpStream>,
    threads: Vec<JoinHandle<()>>,
}

impl Flow {
    /// Starts UDP from one place to an address of another.
    ///
    /// # Errors
    /// A namespace cannot be entered.
    pub fn udp(from: &impl Place, to: &impl Place, address: IpAddr) -> Result<Self> {
        Self::udp_every(PACE, from, to, address)
    }

    /// The same with another pause between two messages.
    ///
    /// # Errors
    /// As [`Flow::udp`].
    pub fn udp_every(pace: Duration, from: &impl Place, to: &impl Place, address: IpAddr) -> Result<Self> {
        let server = to.inside(|| UdpSocket::bind((address, 0)))??;
        let remote = server.local_addr()?;
        let client = from.inside(|| UdpSocket::bind(any(address)))??;
        for socket in [&server, &client] {
            socket.set_read_timeout(Some(POLL_INTERVAL))?;
        }
        let mut flow = Self::named("udp", from, to);
        let receiver = client.try_clone()?;
        flow.thread(move |_, stop| {
            echo_datagrams(&server, stop);
        });
        flow.thread(move |log, stop| {
            paced(pace, log, stop, |number| {
                // An unreachable network is one of the things that are being measured.
                let _ = client.send_to(&number.to_be_bytes(), remote);
                Ok(())
            });
        });
        flow.thread(move |log, stop| {
            let mut number = [0; 8];
            while !stop.load(Ordering::Relaxed) {
                if let Ok((8, _)) = receiver.recv_from(&mut number) {
                    answered(log, u64::from_be_bytes(number));
                }
            }
        });
        Ok(flow)
    }

    /// Connects one place to an address of another and keeps that connection busy.
    ///
    /// # Errors
    /// The connection does not come about, or a namespace cannot be entered.
    pub fn tcp(from: &impl Place, to: &impl Place, address: IpAddr) -> Result<Self> {
        let listener = to.inside(|| TcpListener::bind((address, 0)))??;
        let remote = listener.local_addr()?;
        let mut client = from
            .inside(|| TcpStream::connect_timeout(&remote, CONNECT))?
            .with_context(|| format!("{} cannot connect to {} at {remote}", from.name(), to.name()))?;
        let (server, _) = listener.accept()?;
        for stream in [&server, &client] {
            stream.set_read_timeout(Some(POLL_INTERVAL))?;
            stream.set_nodelay(true)?;
        }
        let mut flow = Self::named("tcp", from, to);
        flow.connection = Some(client.try_clone()?);
        let mut receiver = client.try_clone()?;
        flow.thread(move |_, stop| echo_stream(server, stop));
        flow.thread(move |log, stop| {
            paced(PACE, log, stop, |number| client.write_all(&number.to_be_bytes()))
        });
        flow.thread(move |log, stop| {
            let ended = numbers(&mut receiver, stop, |number| answered(log, number));
            if let Err(error) = ended {
                lock(log).ended.get_or_insert(error.to_string());
            }
        });
        Ok(flow)
    }

    fn named(kind: &str, from: &impl Place, to: &impl Place) -> Self {
        Self {
            name: format!("{kind} {} -> {}", from.name(), to.name()),
            log: Arc::default(),
            stop: Arc::default(),
            connection: None,
            threads: Vec::new(),
        }
    }

    fn thread(&mut self, work: impl FnOnce(&Mutex<Log>, &AtomicBool) + Send + 'static) {
        let (log, stop) = (Arc::clone(&self.log), Arc::clone(&self.stop));
        self.threads.push(std::thread::spawn(move || work(&log, &stop)));
    }

    /// Protocol and ends of the flow, for people.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Whether the latest messages, all sent after `mark`, were answered.
    pub fn flows_since(&self, mark: Instant) -> bool {
        let log = lock(&self.log);
        let now = Instant::now();
        let mut latest = log.messages.iter().rev().filter(|(sent, answer)| {
            // One that was sent just now may still be answered.
            answer.is_some() || now.saturating_duration_since(*sent) > UNDER_WAY
        });
        let good = |(sent, answer): &(Instant, Option<Instant>)| {
            answer.is_some() && *sent > mark && now.saturating_duration_since(*sent) < UNDER_WAY
        };
        log.ended.is_none() && (0..FLOWING).all(|_| latest.next().is_some_and(good))
    }

    /// Reason why the connection ended; `None` while it is open, and for UDP.
    pub fn ended(&self) -> Option<String> {
        lock(&self.log).ended.clone()
    }

    /// Figures since `mark`. Messages of the last second are not counted: they may be under way.
    pub fn figures_since(&self, mark: Instant) -> Figures {
        figures(&lock(&self.log).messages, mark, Instant::now())
    }

    /// When the messages were sent that [`Self::figures_since`] counts as lost, as times since `mark`.
    pub fn lost_since(&self, mark: Instant) -> Vec<Duration> {
        let counted_until = Instant::now().checked_sub(UNDER_WAY).unwrap_or(mark);
        let log = lock(&self.log);
        let lost = log
            .messages
            .iter()
            .filter(|(sent, answer)| *sent >= mark && *sent < counted_until && answer.is_none());
        lost.map(|(sent, _)| sent.duration_since(mark)).collect()
    }
}

impl Drop for Flow {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(connection) = &self.connection {
            // It may have ended by itself; a writer that waits for a lost peer is woken either way.
            let _ = connection.shutdown(Shutdown::Both);
        }
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

fn figures(messages: &[(Instant, Option<Instant>)], mark: Instant, now: Instant) -> Figures {
    let counted_until = now.checked_sub(UNDER_WAY).unwrap_or(now);
    let counted = || messages.iter().filter(|(sent, _)| *sent >= mark && *sent < counted_until);
    let mut answers: Vec<Instant> =
        messages.iter().filter_map(|(_, answer)| *answer).filter(|at| *at >= mark && *at <= now).collect();
    answers.sort_unstable();
    let sends: Vec<Instant> = messages.iter().map(|(sent, _)| *sent).filter(|at| *at >= mark).collect();
    Figures {
        sent: counted().count(),
        lost: counted().filter(|(_, answer)| answer.is_none()).count(),
        longest_gap: longest(mark, &answers, now),
        longest_pause: longest(mark, &sends, now),
    }
}

/// The longest time without any of `moments`, which are in order.
fn longest(start: Instant, moments: &[Instant], end: Instant) -> Duration {
    let starts = std::iter::once(&start).chain(moments);
    let ends = moments.iter().chain(std::iter::once(&end));
    starts.zip(ends).map(|(start, end)| end.saturating_duration_since(*start)).max().unwrap_or_default()
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

fn any(family: IpAddr) -> SocketAddr {
    match family {
        IpAddr::V4(_) => (std::net::Ipv4Addr::UNSPECIFIED, 0).into(),
        IpAddr::V6(_) => (std::net::Ipv6Addr::UNSPECIFIED, 0).into(),
    }
}

/// Sends numbers at an even pace until stopped or until a message cannot be sent any more.
fn paced(
    pace: Duration,
    log: &Mutex<Log>,
    stop: &AtomicBool,
    mut send: impl FnMut(u64) -> std::io::Result<()>,
) {
    for number in 0.. {
        if stop.load(Ordering::Relaxed) {
            return;
        }
        lock(log).messages.push((Instant::now(), None));
        if let Err(error) = send(number) {
            lock(log).ended.get_or_insert(error.to_string());
            return;
        }
        std::thread::sleep(pace);
    }
}

fn answered(log: &Mutex<Log>, number: u64) {
    let mut log = lock(log);
    let message = usize::try_from(number).ok().and_then(|number| log.messages.get_mut(number));
    if let Some((_, answer @ None)) = message {
        *answer = Some(Instant::now());
    }
}

fn echo_datagrams(server: &UdpSocket, stop: &AtomicBool) {
    let mut number = [0; 8];
    while !stop.load(Ordering::Relaxed) {
        if let Ok((length, from)) = server.recv_from(&mut number) {
            // What cannot be sent back is lost, and will be counted.
            let _ = server.send_to(number.get(..length).unwrap_or_default(), from);
        }
    }
}

fn echo_stream(mut server: TcpStream, stop: &AtomicBool) {
    let Ok(mut writer) = server.try_clone() else { return };
    // Its end is seen, and noted, at the other end.
    let _ = numbers(&mut server, stop, |number| drop(writer.write_all(&number.to_be_bytes())));
}

/// Reads numbers until stopped; any other end is an error.
fn numbers(stream: &mut TcpStream, stop: &AtomicBool, mut take: impl FnMut(u64)) -> std::io::Result<()> {
    let (mut number, mut filled) = ([0; 8], 0);
    while !stop.load(Ordering::Relaxed) {
        match stream.read(number.get_mut(filled..).unwrap_or_default()) {
            Ok(0) if stop.load(Ordering::Relaxed) => return Ok(()),
            Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
            Ok(read) => filled = filled.saturating_add(read),
            Err(error)
                if matches!(
                    error.kind(),
                    ErrorKind::WouldBlock | ErrorKind::TimedOut | ErrorKind::Interrupted
                ) => {}
            Err(error) => return Err(error),
        }
        if filled == number.len() {
            take(u64::from_be_bytes(number));
            filled = 0;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gap_is_the_longest_time_without_an_answer_even_at_the_ends() {
        let mark = Instant::now();
        let at = |ms| mark + Duration::from_millis(ms);
        let messages = [(at(10), Some(at(11))), (at(60), None), (at(500), Some(at(501))), (at(5_000), None)];
        let found = figures(&messages, mark, at(5_200));
        assert_eq!(found.longest_gap, Duration::from_millis(4_699));
        assert_eq!((found.sent, found.lost), (3, 1), "the last may be under way");
        let found = figures(&messages, at(100), at(400));
        assert_eq!((found.sent, found.longest_gap), (0, Duration::from_millis(300)));
    }
}
