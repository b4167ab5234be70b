//! Load for a relay: pairs of clients in one process, of which one sends to the other. Clients of different relays share it.
//!
//! A load program is started with the relay's address and the number of pairs; it trusts the certificate in `SSL_CERT_FILE`. It writes
//! `ready` when all clients are registered, and then takes an order from each line of its input: the size of packets in bytes, how many
//! may be on their way in a pair, the microseconds from one to the next (0: at once), and the milliseconds the order lasts. It answers
//! with one line: packets that arrived, packets that were lost, nanoseconds until the last arrived, and the microseconds from a packet's
//! sending to its arrival, p50 and p99. `peers/derper/main.go` does the same.

use std::io::Write as _;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{sleep_until, timeout};

/// Time after which packets that have not come are lost.
const LOSS_TIMEOUT: Duration = Duration::from_millis(200);

/// Passes a packet to the relay, without waiting.
pub(crate) type Send = Box<dyn Fn(&[u8]) + std::marker::Send + Sync>;

/// Two clients, of which one sends to the other.
pub(crate) struct Pair {
    /// The sending client.
    pub(crate) send: Send,
    /// Arrivals at the other client: all that it receives goes to [`Arrivals::receive`].
    pub(crate) arrivals: Arc<Arrivals>,
}

/// State of the receiving client of a pair.
#[derive(Debug, Default)]
pub(crate) struct Arrivals {
    order: AtomicU32,
    /// The number of the next packet.
    next: AtomicU64,
    moved: Notify,
    log: Mutex<Log>,
}

#[derive(Debug, Default)]
struct Log {
    received: u64,
    lost: u64,
    last: Option<Instant>,
    latencies: Vec<Duration>,
}

#[derive(Debug, Clone, Copy)]
struct Order {
    number: u32,
    size: usize,
    window: u64,
    interval: Duration,
    length: Duration,
}

/// Follows the orders in the lines that `next_line` gives.
///
/// # Errors
/// An order does not parse, or the answer cannot be written.
pub(crate) async fn follow(pairs: Vec<Pair>, mut next_line: impl FnMut() -> Option<String>) -> Result<()> {
    let pairs: Vec<Arc<Pair>> = pairs.into_iter().map(Arc::new).collect();
    answer("ready")?;
    let mut number = 0_u32;
    while let Some(line) = tokio::task::block_in_place(&mut next_line) {
        number = number.wrapping_add(1);
        let order = Order::parse(number, &line).with_context(|| format!("not an order: {line:?}"))?;
        answer(&measure(&pairs, order).await)?;
    }
    Ok(())
}

fn answer(line: &str) -> Result<()> {
    let mut output = std::io::stdout();
    writeln!(output, "{line}").and_then(|()| output.flush()).context("cannot answer")
}

impl Order {
    fn parse(number: u32, line: &str) -> Result<Self> {
        let fields: Vec<u64> =
            line.split_whitespace().map(str::parse).collect::<Result<_, _>>().context("not a number")?;
        ensure!(fields.len() == 4, "it has {} numbers", fields.len());
        let field = |index: usize| fields.get(index).copied().unwrap_or_default();
        Ok(Self {
            number,
            size: usize::try_from(field(0))?.max(Stamp::LENGTH),
            window: field(1),
            interval: Duration::from_micros(field(2)),
            length: Duration::from_millis(field(3)),
        })
    }
}

async fn measure(pairs: &[Arc<Pair>], order: Order) -> String {
    let start = Instant::now();
    let mut senders = JoinSet::new();
    let count = u32::try_from(pairs.len()).unwrap_or(u32::MAX).max(1);
    for (index, pair) in (0..count).zip(pairs) {
        pair.arrivals.begin(order.number);
        let offset = order.interval.saturating_mul(index) / count;
        let pair = Arc::clone(pair);
        senders.spawn(async move { pair.run(order, start + offset, start + order.length).await });
    }
    senders.join_all().await;
    let logs: Vec<Log> = pairs.iter().map(|pair| std::mem::take(&mut *pair.arrivals.log())).collect();
    let received: u64 = logs.iter().map(|log| log.received).sum();
    let lost: u64 = logs.iter().map(|log| log.lost).sum();
    let last = logs.iter().filter_map(|log| log.last).max().unwrap_or(start);
    let mut latencies: Vec<Duration> = logs.into_iter().flat_map(|log| log.latencies).collect();
    latencies.sort_unstable();
    let percentile = |share: usize| {
        let index = latencies.len().saturating_sub(1).saturating_mul(share) / 100;
        latencies.get(index).copied().unwrap_or_default().as_micros()
    };
    let elapsed = last.duration_since(start).as_nanos();
    format!("{received} {lost} {elapsed} {} {}", percentile(50), percentile(99))
}

impl Pair {
    async fn run(&self, order: Order, start: Instant, end: Instant) {
        let mut payload = vec![0; order.size];
        let mut sent = 0_u64;
        let mut due = start;
        while Instant::now() < end {
            if !order.interval.is_zero() {
                sleep_until(due.into()).await;
                due += order.interval;
            }
            if !self.arrivals.wait(sent, order.window).await {
                self.arrivals.next.store(sent, Ordering::Release);
            }
            Stamp { order: order.number, number: sent, at: now() }.write(&mut payload);
            (self.send)(&payload);
            sent = sent.wrapping_add(1);
        }
        self.arrivals.wait(sent, 1).await;
        let missing = sent.saturating_sub(self.arrivals.next.load(Ordering::Acquire));
        self.arrivals.log().lost += missing;
    }
}

impl Arrivals {
    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, order: u32) {
        *self.log() = Log::default();
        self.next.store(0, Ordering::Release);
        self.order.store(order, Ordering::Release);
    }

    /// Waits until fewer than `window` packets are on their way; whether they were before the time was over.
    async fn wait(&self, sent: u64, window: u64) -> bool {
        let is_full = || sent.saturating_sub(self.next.load(Ordering::Acquire)) >= window;
        while is_full() {
            let moved = self.moved.notified();
            if is_full() && timeout(LOSS_TIMEOUT, moved).await.is_err() {
                return false;
            }
        }
        true
    }

    /// Takes a packet.
    pub(crate) fn receive(&self, payload: &[u8]) {
        let Some(stamp) = Stamp::read(payload) else { return };
        if stamp.order != self.order.load(Ordering::Acquire) {
            return;
        }
        let mut log = self.log();
        let next = self.next.swap(stamp.number.wrapping_add(1), Ordering::AcqRel);
        log.lost += stamp.number.saturating_sub(next);
        log.received += 1;
        log.last = Some(Instant::now());
        log.latencies.push(now().saturating_sub(stamp.at));
        drop(log);
        self.moved.notify_one();
    }
}

/// Content of a packet.
struct Stamp {
    order: u32,
    number: u64,
    at: Duration,
}

impl Stamp {
    const LENGTH: usize = 20;

    fn write(&self, payload: &mut [u8]) {
        let at = u64::try_from(self.at.as_nanos()).unwrap_or(u64::MAX);
        let fields =
            self.order.to_le_bytes().into_iter().chain(self.number.to_le_bytes()).chain(at.to_le_bytes());
        payload.iter_mut().zip(fields).for_each(|(byte, field)| *byte = field);
    }

    fn read(payload: &[u8]) -> Option<Self> {
        let (order, rest) = payload.split_first_chunk()?;
        let (number, rest) = rest.split_first_chunk()?;
        let (at, _) = rest.split_first_chunk()?;
        Some(Self {
            order: u32::from_le_bytes(*order),
            number: u64::from_le_bytes(*number),
            at: Duration::from_nanos(u64::from_le_bytes(*at)),
        })
    }
}

/// The time since the program first asked.
fn now() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Packets, losses and microseconds of an order whose packets are passed on if `passes` says so.
    async fn numbers(order: &str, passes: fn(u64) -> bool) -> Vec<u64> {
        let arrivals = Arc::new(Arrivals::default());
        let receiver = Arc::clone(&arrivals);
        let send = move |packet: &[u8]| {
            if passes(Stamp::read(packet).unwrap().number) {
                receiver.receive(packet);
            }
        };
        let pair = Arc::new(Pair { send: Box::new(send), arrivals });
        let answer = measure(&[pair], Order::parse(7, order).unwrap()).await;
        answer.split(' ').map(|number| number.parse().unwrap()).collect()
    }

    #[tokio::test]
    async fn packets_that_arrive_are_counted() {
        let numbers = numbers("100 4 1000 20", |_| true).await;
        assert!((10..=25).contains(&numbers[0]) && numbers[1] == 0, "{numbers:?}");
    }

    #[tokio::test]
    async fn packets_that_do_not_arrive_are_lost() {
        let numbers = numbers("20 4 1000 20", |number| number % 2 == 0).await;
        assert!(numbers[0].abs_diff(numbers[1]) <= 1, "{numbers:?}");
        assert_eq!(numbers.len(), 5);
    }

    #[test]
    fn an_order_has_four_numbers() {
        assert!(Order::parse(1, "1400 32 0").is_err() && Order::parse(1, "1400 32 0 x").is_err());
    }
}
